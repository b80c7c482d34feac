"""Worker processes: the harness starts one, sends it requests and ends it; ``python -m benchmarks.process`` answers.

A message is one JSON line on the worker's standard input, a reply one JSON line on its standard output. The worker
first moves both to private descriptors. Prints of the model go to standard error, whose last lines the harness keeps. A
worker works only while it answers a message, so that the arms of a race do not disturb each other.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import select
import selectors
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from benchmarks.machine import INDUCTOR_CACHE, ROOT, cut, python_environment

REASON_LENGTH = 600
MESSAGE_LENGTH = 400
TAIL_LINES = 4

# Messages of out-of-memory errors that are not OutOfMemoryError, from allocators other than torch's.
NO_MEMORY = ("can't allocate memory", "CUDA error: out of memory", "_ALLOC_FAILED")
BUSY = "busy or unavailable"
DISK_FULL = (os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT), "PytorchStreamWriter failed writing file")
SET_TMPDIR = "set TMPDIR to a folder on another: the compiler's caches go there"

_alive: set[Worker] = set()


class WorkerFailure(Exception):
    """A request that failed: a status of ``benchmarks.record.STATUSES``, a reason, and the request."""

    def __init__(self, status: str, reason: str, operation: str | None = None) -> None:
        super().__init__(f"{status}: {reason}")
        self.status, self.reason, self.operation = status, reason, operation


class Worker:
    """The harness' end of a worker process. Not thread-safe: one request at a time, of at most ``timeout`` seconds."""

    def __init__(self, environment: Mapping[str, str], *, timeout: float) -> None:
        self.timeout = timeout
        self.log: list[dict[str, Any]] = []  # requests, and when the process worked on them
        self._stderr: deque[str] = deque(maxlen=200)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.process"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env={**os.environ, **python_environment(), **environment},
            # A separate process group: Ctrl-C reaches only the harness, and a kill includes the compile workers.
            start_new_session=True,
        )  # fmt: skip
        assert self._process.stdin and self._process.stdout and self._process.stderr
        self._requests, self._replies = self._process.stdin, self._process.stdout
        self._unread = b""
        self._pending: str | None = None
        self._stopped = False  # set by kill_all, whose kill is not a crash of the arm
        self._reader = threading.Thread(target=self._drain, args=(self._process.stderr,), daemon=True)
        self._reader.start()
        _alive.add(self)

    def _drain(self, stream: Any) -> None:
        with contextlib.suppress(OSError, ValueError):
            for line in stream:
                self._stderr.append(line[:2000].decode(errors="replace").rstrip())

    def send(self, operation: str, **payload: Any) -> None:
        """Send a request without waiting for its reply."""
        self._pending = operation
        try:
            self._requests.write(json.dumps({"op": operation, **payload}).encode() + b"\n")
            self._requests.flush()
        except OSError:
            raise self._death() from None

    def receive(self) -> dict[str, Any]:
        """The reply to the last request. WorkerFailure if the process fails, dies or times out; it is ended then."""
        line = self._line(time.monotonic() + self.timeout)
        reply: dict[str, Any] = json.loads(line)
        self.log.append({name: reply[name] for name in ("op", "began", "ended")})
        if not reply["ok"]:
            status, reason = reply["status"], self._describe(reply["reason"], tail=False)
            self.kill()
            raise WorkerFailure(status, reason, self._pending)
        return reply

    def ask(self, operation: str, **payload: Any) -> dict[str, Any]:
        self.send(operation, **payload)
        return self.receive()

    def _line(self, deadline: float) -> bytes:
        with selectors.DefaultSelector() as selector:
            selector.register(self._replies, selectors.EVENT_READ)
            while b"\n" not in self._unread:
                left = deadline - time.monotonic()
                if left <= 0 or not selector.select(left):
                    reason = f"{self._pending} took longer than {self.timeout:g} s; raise it with --timeout"
                    reason = self._describe(reason)
                    self.kill()
                    raise WorkerFailure("timeout", reason, self._pending)
                chunk = os.read(self._replies.fileno(), 1 << 16)
                if not chunk:
                    raise self._death()
                self._unread += chunk
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _death(self) -> WorkerFailure:
        if self._stopped:
            return WorkerFailure("interrupted", f"stopped during {self._pending}", self._pending)
        try:
            code = self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            code = None
        self._reader.join(timeout=1)
        how = "closed its pipe without ending" if code is None else f"exited with code {code}"
        if code is not None and code < 0:
            memory = " (on Linux often because memory ran out)" if -code == signal.SIGKILL else ""
            how = f"killed by {signal.Signals(-code).name}{memory}"
        reason = self._describe(f"{how} during {self._pending}")
        self.kill()
        return WorkerFailure("crashed", reason, self._pending)

    def _describe(self, reason: str, *, tail: bool = True) -> str:
        """The reason and the last lines of standard error, shortened and without this machine's paths."""
        lines = [line for line in self._stderr if line.strip() and not line.startswith("  ")] if tail else []
        text = "; ".join([reason, *lines[-TAIL_LINES:]])
        text = text.replace(f"{ROOT}/", "").replace(str(Path.home()), "~")
        text = re.sub(r"/[^\s'\"]*/site-packages/", "", text)
        return cut(text, REASON_LENGTH)

    @property
    def alive(self) -> bool:
        return self in _alive

    def stop(self) -> None:
        """End the process; its caches are already on disk."""
        if self.alive:
            with contextlib.suppress(OSError):
                self._requests.write(b'{"op": "stop"}\n')
                self._requests.flush()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=5)
        self.kill()

    def kill(self) -> None:
        """Kill the process and its compile workers, unless they have ended: their number may be reused."""
        if not self.alive:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=10)
        for pipe in (self._requests, self._replies):
            with contextlib.suppress(OSError):
                pipe.close()
        self._reader.join(timeout=1)
        if not self._reader.is_alive() and self._process.stderr is not None:
            self._process.stderr.close()
        _alive.discard(self)


def kill_all() -> None:
    """End every worker that is still alive, because the run was stopped."""
    for worker in list(_alive):
        worker._stopped = True
        worker.kill()


# In the worker --------------------------------------------------------------------------------------------------------


def serve(requests: IO[str], replies: IO[str]) -> None:
    """Answer messages until there are no more, or until "stop"."""
    handler: Any = None
    for line in requests:
        message = json.loads(line)
        operation = message.pop("op")
        if operation == "stop":
            return
        began = time.monotonic()
        try:
            if handler is None:  # created here, so that a failed import of torch becomes a reply
                from benchmarks.worker import Handler

                handler = Handler()
            reply = {"ok": True, **getattr(handler, operation)(**message)}
        except Exception as error:
            reply = failure_of(error)
        reply |= {"op": operation, "began": began, "ended": time.monotonic()}
        sys.stderr.flush()
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


def _end_with_harness(requests: int) -> None:
    """End this process and its compile workers when the harness has closed its end of the pipe.

    A killed harness cannot end its workers, and they would disturb the next run. The thread sleeps in the kernel until
    then, so it disturbs no measurement.
    """
    poll = select.poll()
    poll.register(requests, 0)  # only the hang-up event, which is always reported
    poll.poll()
    os.killpg(0, signal.SIGKILL)


def main() -> None:
    """Move the pipes to private descriptors, out of reach of prints, then serve."""
    requests, replies = os.fdopen(os.dup(0), "r", encoding="utf-8"), os.fdopen(os.dup(1), "w", encoding="utf-8")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    if os.getpgrp() == os.getpid():  # true if the harness started this process
        threading.Thread(target=_end_with_harness, args=(requests.fileno(),), daemon=True).start()
    serve(requests, replies)
    # Skips the orderly shutdown of compile workers and libraries: it takes seconds, and nothing needs it.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def failure_of(error: BaseException) -> dict[str, Any]:
    """A worker's reply to a request that raised: status, and reason with a remedy if known."""
    status, remedy = "failed", ""
    for cause in _causes(error):
        status, remedy = _typed(cause)
        if status != "failed" or remedy:
            break
    # Two lines: the compiler's exceptions name the backend in the first, and the backend's error in the second.
    lines = [line.strip() for line in str(error).splitlines() if line.strip()][:2]
    message = cut(": ".join([type(error).__name__, *([" ".join(lines)] if lines else [])]), MESSAGE_LENGTH)
    traceback.print_exception(error, file=sys.stderr)
    return {"ok": False, "status": status, "reason": f"{message}; {remedy}" if remedy else message}


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error and the errors it was raised from, outermost first."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        cause = cause.__cause__ or cause.__context__


def _typed(cause: BaseException) -> tuple[str, str]:
    """Status and remedy of one error, without its causes. Compares class names, since torch may not be imported."""
    name, text = type(cause).__name__, str(cause)
    if isinstance(cause, MemoryError) or name == "OutOfMemoryError" or any(words in text for words in NO_MEMORY):
        return "out-of-memory", ""
    if BUSY in text:
        return "device-busy", "another process holds the GPU: wait for it, or name another in CUDA_VISIBLE_DEVICES"
    if name == "InvalidCxxCompiler":
        return "failed", "no C++ compiler works here: install g++ or clang++, or name one in CXX"
    if any(words in text for words in DISK_FULL):
        return "failed", f"a disk is full: make room, or {SET_TMPDIR}"
    if isinstance(cause, OSError):
        cached = str(cause.filename).startswith(os.environ.get(INDUCTOR_CACHE, "\n"))  # not a file of the user
        if cause.errno == errno.EROFS or cached:
            return "failed", f"the disk cannot be written: {SET_TMPDIR}"
    return "failed", ""


if __name__ == "__main__":
    main()
