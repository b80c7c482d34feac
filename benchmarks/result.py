"""Result rows: what was measured for one arm, or why nothing was. One JSON object a line, appended as they come."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.case import Case

SCHEMA = 1

# Everything that can become of an arm. Only "ok" carries times; the others carry a reason.
STATUSES = ("ok", "crashed", "out-of-memory", "timeout", "failed", "does-not-fit", "interrupted")


@dataclass(kw_only=True)
class Compile:
    """Compilation in one fresh process. Seconds unless said otherwise.

    ``seconds`` runs from the first call to its result, less one steady call, the compiler having been started before.
    ``time_to_first_result`` comes from a process of its own in which nothing was compiled before, imports and model
    set-up apart.
    """

    start_up: float | None = None
    seconds: float | None = None
    capture: float | None = None
    time_to_first_result: float | None = None
    phases: Mapping[str, float] = field(default_factory=dict)  # dynamo, aot, inductor, backend workers ...
    graphs: int | None = None
    breaks: list[str] = field(default_factory=list)  # a reason each
    recompiles: list[str] = field(default_factory=list)  # a reason each
    cache_empty_at_start: bool | None = None
    cache_hits: int | None = None
    cache_misses: int | None = None
    cache_bypasses: int | None = None


@dataclass(kw_only=True)
class Steady:
    """Steady state, raced. Milliseconds a call; one sample a round."""

    device_ms: list[float] = field(default_factory=list)  # by device events; empty on a CPU
    wall_ms: list[float] = field(default_factory=list)
    rounds: list[int] = field(default_factory=list)  # the round number of each sample, for pairing across arms
    calls_per_round: int = 0
    sm_clock_mhz: list[float] = field(default_factory=list)
    power_w: list[float] = field(default_factory=list)

    @property
    def samples(self) -> list[float]:
        return self.device_ms or self.wall_ms


@dataclass(kw_only=True)
class Memory:
    """Bytes. Peaks of one steady call (for a captured step: of its capture, and the pool it keeps)."""

    allocated: int | None = None
    reserved: int | None = None
    device: int | None = None
    model: int | None = None


@dataclass(kw_only=True)
class Check:
    """Norm-wise relative errors against the reference, and the same for upstream eager in the case's dtype."""

    error: float | None = None
    eager_error: float | None = None
    reference_dtype: str | None = None


@dataclass(kw_only=True)
class Work:
    """What one call must do, and what this device can do at best, measured in the same run."""

    flops: int | None = None
    bytes: int | None = None
    bytes_formula: str | None = None
    kernels: int | None = None
    peak_flops: float | None = None  # FLOP/s of a large matrix product in the case's dtype
    peak_bandwidth: float | None = None  # byte/s


@dataclass(kw_only=True)
class Result:
    """One arm's row."""

    case: Case
    status: str = "ok"
    reason: str | None = None
    cold: Compile | None = None
    warm: Compile | None = None
    steady: Steady | None = None
    memory: Memory | None = None
    check: Check | None = None
    work: Work | None = None
    preparation: Mapping[str, float] = field(default_factory=dict)  # seconds of what was prepared once
    data: str | None = None
    sizes: Mapping[str, int] = field(default_factory=dict)
    command: str | None = None  # reproduces this row
    environment: str | None = None  # id of the environment row in the same file

    def __post_init__(self) -> None:
        if self.status not in STATUSES:
            raise ValueError(f"status {self.status!r} is not one of {STATUSES}")
        if self.status != "ok" and not self.reason:
            raise ValueError(f"a row with status {self.status!r} needs a reason")

    def to_json(self) -> dict[str, Any]:
        return {"kind": "result", "schema": SCHEMA, **asdict(self)}

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Result:
        values = {f.name: row.get(f.name) for f in dataclasses.fields(cls) if f.name in row}
        values["case"] = Case(**row["case"])
        sections = {"cold": Compile, "warm": Compile, "steady": Steady, "memory": Memory, "check": Check, "work": Work}
        for name, section in sections.items():
            if values.get(name) is not None:
                values[name] = section(**values[name])
        return cls(**values)


class Store:
    """An append-only JSONL file of rows. A line is written whole and flushed to disk before the next case starts."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, row: Mapping[str, Any]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, allow_nan=False, separators=(",", ":")) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def rows(self) -> Iterator[dict[str, Any]]:
        """All rows; a last line cut short by a kill is dropped, a broken line before it is an error naming it."""
        if not self.path.exists():
            return
        lines = self.path.read_text(encoding="utf-8").splitlines()
        for number, line in enumerate(lines, start=1):
            try:
                yield json.loads(line)
            except json.JSONDecodeError as error:
                if number == len(lines):
                    return
                raise ValueError(f"{self.path}:{number} is not a JSON row ({error}); repair or delete that line") from error

    def results(self) -> list[Result]:
        """The newest result of every case, in file order."""
        newest: dict[str, Result] = {}
        for row in self.rows():
            if row.get("kind") == "result":
                result = Result.from_json(row)
                newest[result.case.key] = result
        return list(newest.values())

    def environments(self) -> dict[str, dict[str, Any]]:
        return {row["id"]: row for row in self.rows() if row.get("kind") == "environment"}
