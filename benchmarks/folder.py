"""Where a run's rows go: held by one run at a time, and what becomes of rows that the disk does not take."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.cli import UsageError
from benchmarks.record import Store

Row = Mapping[str, Any]
NEW_SECONDS = 60.0


class Unwritable(Exception):
    """The disk took rows no more; the message says which file, why, where the rows are, and how to go on."""


@contextmanager
def held(out: Path) -> Iterator[None]:
    """Make the folder of rows (or the one of a ``.jsonl`` file) and keep other runs out of it.

    The lock belongs to the process: one that is killed leaves none behind, and workers do not inherit it.

    Raises:
        UsageError: If it cannot be made or written, or if another run holds it.
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
            pass  # a file system without locks, some network ones: nobody can be kept out there
        yield
    finally:
        os.close(descriptor)


@contextmanager
def scratch(prefix: str) -> Iterator[Path]:
    """A temporary folder that is held, so that no other run sweeps it away, and removed at the end.

    Raises:
        OSError: If there is no folder for temporary files.
    """
    with tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True) as name:
        descriptor = os.open(name, os.O_RDONLY)
        try:
            with contextlib.suppress(OSError):  # without locks nobody sweeps either
                _lock(descriptor)
            yield Path(name)
        finally:
            os.close(descriptor)


def sweep(prefix: str) -> None:
    """Remove what this user's runs that were killed left among the temporary files: folders that no process holds."""
    for left in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with contextlib.suppress(OSError):
            facts = left.lstat()
            if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.getuid():
                continue
            if time.time() - facts.st_mtime < NEW_SECONDS:
                continue  # just made, and not held yet
            descriptor = os.open(left, os.O_RDONLY)
            try:
                _lock(descriptor)
                shutil.rmtree(left, ignore_errors=True)
            finally:
                os.close(descriptor)


def _lock(descriptor: int) -> None:
    """Hold an open file or folder until it is closed; OSError, a BlockingIOError where another process holds it."""
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


class Keeper:
    """Appends rows to one file; holds those that it does not take, to try them again and not to lose them."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._environment: Row | None = None
        self._waiting: list[Row] = []
        self._why: OSError | None = None

    def begin(self, environment: Row) -> None:
        """Write the environment's row, if the file does not hold it yet, before there is a row that names it.

        Raises:
            Unwritable: If that cannot be.
        """
        self._environment = environment
        if environment["id"] not in self.store.environments():
            try:
                self.store.append(environment)
            except OSError as error:
                raise Unwritable(
                    f"{self.store.path} cannot be written ({error.strerror}); nothing was measured"
                ) from error

    def append(self, row: Row) -> None:
        """Write a row, or hold it where the disk does not take it."""
        self._waiting.append(row)
        self._write()

    def _write(self) -> None:
        while self._waiting:
            try:
                self.store.append(self._waiting[0])
            except OSError as error:
                self._why = error
                return
            del self._waiting[0]

    def settle(self) -> None:
        """Try once more what waits; put it elsewhere if that fails as well.

        Raises:
            Unwritable: Saying where the rows are now.
        """
        self._write()
        if not self._waiting:
            return
        assert self._why is not None
        path, count = self.store.path, len(self._waiting)
        said = f"{path} cannot be written ({self._why.strerror}); what it held is kept. "
        lines = "".join(json.dumps(row, allow_nan=False, separators=(",", ":")) + "\n" for row in self._waiting)
        try:
            elsewhere = _write_elsewhere(lines)
        except OSError:
            raise Unwritable(
                f"{said}No other folder takes the {count} row(s) measured since; here they are:\n{lines}"
            ) from None
        raise Unwritable(
            f"{said}The {count} row(s) measured since are in {elsewhere}: when there is room, append them with "
            f"cat {elsewhere} >> {path}"
        )


def _write_elsewhere(lines: str) -> str:
    """A new file in the folder for temporary ones that holds these lines."""
    descriptor, name = tempfile.mkstemp(prefix="regional-zoo-rows-", suffix=".jsonl")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(lines)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        os.unlink(name)
        raise
    return name
