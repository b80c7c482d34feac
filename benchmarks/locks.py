"""What keeps runs out of each other's way: locks on a GPU, on the folder of rows and on scratch folders.

All are locks on files, which the system releases when the process ends, however it ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.cli import UsageError

FRESH_SECONDS = 900.0  # what one run measured of a device holds for the runs that start this much later
NEW_SECONDS = 60.0


class GpuLock:
    """Lets any number of runs get ready on a GPU at the same time, and one of them measure alone.

    Getting ready is imports, models, eager calls, references, loss curves, and with --steady-only the compilation,
    whose seconds are not reported. Whatever is timed is timed alone, the kernels of a profile included. So several
    races are done sooner when they are started together, and none disturbs another's figures.

    Args:
        uuid: The GPU's. None for a device that is not locked, a CPU.
        note: Called with a message when other runs have to be waited for.
    """

    def __init__(self, uuid: str | None, note: Callable[[str], None] = lambda text: None) -> None:
        self._name = uuid and "".join(each if each.isalnum() else "-" for each in uuid)
        self._note = note

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Other runs may get ready meanwhile; none measures."""
        with self._held("turns", fcntl.LOCK_SH):
            yield

    @contextmanager
    def alone(self) -> Iterator[None]:
        """No other run does anything on the GPU meanwhile."""
        with self._held("turns", fcntl.LOCK_EX):
            yield

    def measured_once(self, key: dict[str, Any], measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What another run measured under the same key within ``FRESH_SECONDS``, or what ``measure`` returns, alone."""
        if self._name is None:
            return measure()
        file = self._path("found")
        with self._held("finding", fcntl.LOCK_EX):  # another lock: who waits here does not hold up the others
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                known = json.loads(file.read_text())
                if known["key"] == key and 0 <= time.time() - known["time"] < FRESH_SECONDS:
                    value: dict[str, Any] = known["value"]
                    return value
            with self.alone():
                value = measure()
            with contextlib.suppress(OSError):
                file.write_text(json.dumps({"key": key, "time": time.time(), "value": value}))
            return value

    def _path(self, what: str) -> Path:
        return Path(tempfile.gettempdir()) / f"regional-zoo-{self._name}.{what}"

    @contextmanager
    def _held(self, what: str, how: int) -> Iterator[None]:
        descriptor = None if self._name is None else self._open(self._path(what))
        try:
            if descriptor is not None:
                self._lock(descriptor, how)
            yield
        finally:
            if descriptor is not None:
                os.close(descriptor)

    def _open(self, path: Path) -> int | None:
        for flags in (os.O_RDWR | os.O_CREAT, os.O_RDONLY):  # another user's file can be locked, if not written
            with contextlib.suppress(OSError):
                return os.open(path, flags, 0o666)
        self._note(f"{path} cannot be opened: this run does not wait for others on this GPU")
        return None

    def _lock(self, descriptor: int, how: int) -> None:
        with contextlib.suppress(OSError):
            try:
                fcntl.flock(descriptor, how | fcntl.LOCK_NB)
            except BlockingIOError:
                self._note("waiting for other runs on this GPU")
                fcntl.flock(descriptor, how)


@contextmanager
def locked(out: Path) -> Iterator[None]:
    """Make the folder of rows (or the one of a ``.jsonl`` file) and keep other runs out of it.

    Raises:
        UsageError: If it cannot be made or written, or if another run has it.
    """
    is_file = out.suffix == ".jsonl"
    folder = out.parent if is_file else out
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Permissions alone do not tell: a disk may be mounted read-only, and root may do anything but write there.
        with tempfile.TemporaryFile(dir=folder):
            pass
        descriptor = os.open(out, os.O_RDWR | os.O_CREAT if is_file else os.O_RDONLY, 0o666)
    except OSError as error:
        raise UsageError(f"--out: {out} cannot be written ({error.strerror}); name another place") from error
    try:
        try:
            _lock(descriptor)
        except BlockingIOError:
            said = f"--out: another run is writing to {out}; wait until it has ended, or name another place"
            raise UsageError(said) from None
        except OSError:
            pass  # some network file systems have no locks: no run can be kept out there
        yield
    finally:
        os.close(descriptor)


@contextmanager
def scratch_folder(prefix: str) -> Iterator[Path]:
    """A temporary folder, removed at the end, and locked so that ``remove_stale`` of another run leaves it.

    Raises:
        OSError: If there is no folder for temporary files.
    """
    with tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True) as name:
        descriptor = os.open(name, os.O_RDONLY)
        try:
            with contextlib.suppress(OSError):  # without locks remove_stale finds none either, and leaves it
                _lock(descriptor)
            yield Path(name)
        finally:
            os.close(descriptor)


def remove_stale(prefix: str) -> None:
    """Remove this user's scratch folders whose runs were killed: those that no process has locked."""
    for left in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with contextlib.suppress(OSError):
            facts = left.lstat()
            if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.getuid():
                continue
            if time.time() - facts.st_mtime < NEW_SECONDS:
                continue  # just made, and not locked yet
            descriptor = os.open(left, os.O_RDONLY)
            try:
                _lock(descriptor)
                shutil.rmtree(left, ignore_errors=True)
            finally:
                os.close(descriptor)


def _lock(descriptor: int) -> None:
    """Hold an open file or folder until it is closed; BlockingIOError if another process holds it."""
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
