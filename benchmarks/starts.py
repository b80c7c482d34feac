"""Rows of starts: what new processes of one arm took to their first result, phase by phase."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from pydantic import ConfigDict, TypeAdapter, with_config

from benchmarks.plan import Case

# Where compiled code comes from. Empty caches are new folders for each process.
EMPTY, FILLED, ARTIFACTS = "empty caches", "filled caches", "artifacts"
HARNESS = "harness"


@dataclass(kw_only=True)
class Process:
    """One process.

    Args:
        seconds: By phase: ``python``, ``torch`` and ``library`` (imports), ``context``, ``model`` (read from a file,
            with its inputs), ``load`` (of artifacts), ``first call``, ``capture``; and the ``harness``' own imports,
            which are in no total.
        compiled: ``files`` that compilers wrote, ``graphs`` that Dynamo traced, ``misses`` of Inductor's caches.
        call_ms: A call afterwards, on the device where there is one.
        host_ms: How long the host is busy with a call; None on a CPU.
        output: A hash of the outputs.
    """

    seconds: Mapping[str, float]
    compiled: Mapping[str, int]
    call_ms: float
    host_ms: float | None
    output: str

    @property
    def total(self) -> float:
        """Seconds from the process' start to its first result; with a CUDA graph to that of a replay."""
        return sum(seconds for name, seconds in self.seconds.items() if name != HARNESS)


@dataclass(kw_only=True)
class Saved:
    """A folder of artifacts: its size, the kind of each graph in it, and why others were left out."""

    bytes: int
    kinds: list[str]
    skipped: list[str]


@with_config(ConfigDict(extra="forbid", allow_inf_nan=False))
@dataclass(kw_only=True)
class Start:
    """The processes of one arm; ``reason`` says why one failed. ``saved`` is what the first arm wrote."""

    case: Case
    source: str
    processes: list[Process] = field(default_factory=list)
    saved: Saved | None = None
    reason: str | None = None
    command: str | None = None
    environment: str | None = None

    @property
    def arm(self) -> str:
        """The arm's name, as ``zoo regional, artifacts``."""
        return f"{self.case.arm}, {self.source}"

    @property
    def total(self) -> float:
        """The median of the processes' totals."""
        return statistics.median(each.total for each in self.processes)

    def to_json(self) -> dict[str, Any]:
        """The row as plain values, for ``Store.append``."""
        return {"kind": "start", **asdict(self)}


def read(row: Mapping[str, Any]) -> Start:
    """A row read back. ValueError on a field that is missing, unknown or of another type."""
    return _adapter().validate_python({name: value for name, value in row.items() if name != "kind"})


@functools.cache
def _adapter() -> TypeAdapter[Start]:
    return TypeAdapter(Start)
