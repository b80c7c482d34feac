"""Runs that share a GPU take turns: while one measures, no other runs anything there.

Any number of runs gets ready at the same time: imports, models, eager calls, references, loss curves after a race, with
--steady-only the compilation too, whose seconds nobody reports. Whatever is timed is timed alone, the kernels of a
profile too. So several races are done sooner started together than one after the other, and on the GPU none of them
disturbs another's figures. Which GPU it is a run learns first, in a process that does little else.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# What one run found of a device holds for runs beside it, and not for those of another day.
FRESH_SECONDS = 900.0


class Turns:
    """Turns on one device, by locks on files that the system releases with the process.

    Args:
        device: What all runs know the device by, a GPU's UUID. None for a device that cannot be held, a CPU.
        waiting: Called when others have to be waited for.
    """

    def __init__(self, device: str | None, waiting: Callable[[str], None] = lambda text: None) -> None:
        self._name = device and "".join(each if each.isalnum() else "-" for each in device)
        self._waiting = waiting

    @contextmanager
    def together(self) -> Iterator[None]:
        """Beside other runs that get ready, and none that measures."""
        with self._held("turns", fcntl.LOCK_SH):
            yield

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Beside no other run."""
        with self._held("turns", fcntl.LOCK_EX):
            yield

    def found(self, key: dict[str, Any], find: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What another run found under the same key a moment ago, or what ``find`` finds now, alone."""
        if self._name is None:
            return find()
        kept = self._path("found")
        with self._held("finding", fcntl.LOCK_EX):  # another lock: who waits here is not in the way of the others
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                known = json.loads(kept.read_text())
                if known["key"] == key and 0 <= time.time() - known["time"] < FRESH_SECONDS:
                    value: dict[str, Any] = known["value"]
                    return value
            with self.alone():
                value = find()
            with contextlib.suppress(OSError):
                kept.write_text(json.dumps({"key": key, "time": time.time(), "value": value}))
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
        for flags in (os.O_RDWR | os.O_CREAT, os.O_RDONLY):  # another user's can be held, if not written
            with contextlib.suppress(OSError):
                return os.open(path, flags, 0o666)
        self._waiting(f"{path} cannot be opened: other runs on this GPU are not waited for")
        return None

    def _lock(self, descriptor: int, how: int) -> None:
        with contextlib.suppress(OSError):
            try:
                fcntl.flock(descriptor, how | fcntl.LOCK_NB)
            except BlockingIOError:
                self._waiting("waiting for other runs on this GPU")
                fcntl.flock(descriptor, how)
