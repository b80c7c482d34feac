"""What went wrong in a worker, in words: a status, the error's own last line, and what to do about it."""

from __future__ import annotations

import errno
import os
import sys
import traceback
from collections.abc import Iterator
from typing import Any

MESSAGE_LENGTH = 400
# What says that memory is short without being an OutOfMemoryError: the allocators beside torch's own.
NO_MEMORY = ("can't allocate memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "_ALLOC_FAILED")
BUSY = "busy or unavailable"
NO_ROOM = (os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT), "PytorchStreamWriter failed writing file")
CACHES = "TORCHINDUCTOR_CACHE_DIR"
ELSEWHERE = "set TMPDIR to a folder on another: the compiler's caches go there"


def failure_of(error: BaseException) -> dict[str, Any]:
    """A failure's type and its last line, and where one is known a remedy; causes that the compiler wrapped included.

    Returns:
        ``ok`` (False), ``status`` of ``benchmarks.record.STATUSES``, and ``reason``. The traceback goes to stderr.
    """
    status, remedy = "failed", ""
    for cause in _causes(error):
        status, remedy = _typed(cause)
        if status != "failed" or remedy:
            break
    # The second line, too: the compiler's exceptions name the backend first and what it raised after that.
    lines = [line.strip() for line in str(error).splitlines() if line.strip()][:2]
    message = ": ".join([type(error).__name__, " ".join(lines)]) if lines else type(error).__name__
    message = message if len(message) <= MESSAGE_LENGTH else message[: MESSAGE_LENGTH - 1] + "…"
    traceback.print_exception(error, file=sys.stderr)
    return {"ok": False, "status": status, "reason": f"{message}; {remedy}" if remedy else message}


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error and what it was raised from, outermost first."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        cause = cause.__cause__ or cause.__context__


def _typed(cause: BaseException) -> tuple[str, str]:
    """Status and remedy of one error, its causes apart. By name: torch may not be imported here."""
    name, text = type(cause).__name__, str(cause)
    if isinstance(cause, MemoryError) or name == "OutOfMemoryError" or any(words in text for words in NO_MEMORY):
        return "out-of-memory", "" if isinstance(cause, MemoryError) else _held_by_others()
    if BUSY in text:
        return "device-busy", "another process holds the GPU: wait for it, or name another in CUDA_VISIBLE_DEVICES"
    if name == "InvalidCxxCompiler":
        return "failed", "no C++ compiler works here: install g++ or clang++, or name one in CXX"
    if any(words in text for words in NO_ROOM):
        return "failed", f"a disk is full: make room, or {ELSEWHERE}"
    if isinstance(cause, OSError) and (cause.errno == errno.EROFS or _among_caches(cause.filename)):
        return "failed", f"the disk cannot be written: {ELSEWHERE}"
    return "failed", ""


def _held_by_others() -> str:
    """How much of the GPU other processes hold, where that is much and more than this one does; nothing without one."""
    torch = sys.modules.get("torch")
    try:
        if torch is None or not torch.cuda.is_initialized():
            return ""
        free, total = torch.cuda.mem_get_info()
        own = torch.cuda.memory_reserved()
    except Exception:  # a context that an error has broken
        return ""
    others = total - free - own
    # What this process holds beside torch's allocator, its context above all, counts as others' here.
    if others <= max(own, total // 10):
        return ""
    return (
        f"other processes hold {others / 2**30:.0f} of the GPU's {total / 2**30:.0f} GiB, arms of the same race among "
        "them: with fewer arms (--arm) or runs beside it, it may fit"
    )


def _among_caches(name: Any) -> bool:
    """Whether a file is one of the compiler's caches in this process; a model's own files are its own affair."""
    return isinstance(name, str) and CACHES in os.environ and name.startswith(os.environ[CACHES])
