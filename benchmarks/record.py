"""Result rows and their files. A row is one JSON line: the measurements of one arm, or the reason for none."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import IO, Annotated, Any

from pydantic import BeforeValidator, ConfigDict, TypeAdapter, ValidationError, with_config

from benchmarks.cli import UsageError
from benchmarks.plan import Case

SCHEMA = 1
RESULTS = Path(__file__).parent / "results"  # committed rows
# Below RESULTS/<machine>/: races that answer one question each and appear in no table of their family.
EXTRA = "extra"
# All possible outcomes of an arm. Only "ok" has times; the others have a reason.
STATUSES = ("ok", "crashed", "out-of-memory", "timeout", "failed", "does-not-fit", "device-busy", "interrupted")
# Prefix of the reason of a recompile during the race.
IN_RACE = "during the race: "

# Sources of compiled code in a new process. "Empty caches" means new folders for each process.
EMPTY, FILLED, ARTIFACTS, CACHES = "empty caches", "filled caches", "artifacts", "torch's cache artifacts"
# The phase of a start that is not in its total.
HARNESS = "harness"

Row = Mapping[str, Any]


@dataclass(kw_only=True)
class Compile:
    """Compilation in one fresh process. Seconds unless said otherwise.

    ``seconds`` runs from the first call to its result, minus one steady call, with the compiler already started.
    ``time_to_first_result`` comes from a separate process that had compiled nothing, without imports and model set-up.
    ``start_up`` is the compiler's, the same for every arm, measured in a separate process.
    """

    start_up: float | None = None
    seconds: float | None = None
    capture: float | None = None
    time_to_first_result: float | None = None
    later_calls: list[float] = field(default_factory=list)  # the first process' calls from the second on, one by one
    phases: Mapping[str, float] = field(default_factory=dict)  # dynamo, aot, inductor, backend workers ...
    graphs: int | None = None
    breaks: list[str] = field(default_factory=list)  # one reason each
    recompiles: list[str] = field(default_factory=list)  # one reason each
    cache_empty_at_start: bool | None = None
    cache_hits: int | None = None
    cache_misses: int | None = None
    cache_bypasses: int | None = None

    @property
    def paid(self) -> float | None:
        """Seconds of compilation and capture before the first fast call; None if neither was measured."""
        known = [seconds for seconds in (self.seconds, self.capture) if seconds is not None]
        return sum(known) if known else None


def _samples(value: Any) -> Any:
    """Samples of a row; older rows have a single figure or None."""
    return value if isinstance(value, list) else [] if value is None else [value]


@dataclass(kw_only=True)
class Steady:
    """Steady state in the race. Milliseconds per call, one sample per round."""

    device_ms: list[float] = field(default_factory=list)  # by device events; empty on a CPU
    wall_ms: list[float] = field(default_factory=list)
    # Time until a call returns, with an empty device queue; one median per round, empty on a CPU.
    host_ms: Annotated[list[float], BeforeValidator(_samples)] = field(default_factory=list)
    rounds: list[int] = field(default_factory=list)  # the round number of each sample, for pairing across arms
    calls_per_round: int = 0
    sm_clock_mhz: list[float] = field(default_factory=list)
    power_w: list[float] = field(default_factory=list)

    @property
    def samples(self) -> list[float]:
        return self.device_ms or self.wall_ms


@dataclass(kw_only=True)
class Memory:
    """Bytes. Peaks of one steady call; for a captured step those of the capture, and the size of its pool."""

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
class KernelTime:
    """Launches of kernels of one name per call, and their total time. Means over the calls of a profile."""

    name: str
    launches: float
    microseconds: float


@dataclass(kw_only=True)
class Work:
    """The work of one call, and the peak rates of this device, measured shortly before."""

    flops: int | None = None
    bytes: int | None = None
    bytes_formula: str | None = None
    kernels: int | None = None
    longest: list[KernelTime] | None = None  # the longest kernels, by name; None on a CPU, and in older rows
    others: KernelTime | None = None  # all other kernels together
    count: int | None = None  # how many of ``unit`` (images, tokens) one call processes
    unit: str | None = None
    peak_flops: float | None = None  # FLOP/s of a large matrix product in the case's dtype
    peak_bandwidth: float | None = None  # byte/s

    @property
    def kernel_microseconds(self) -> float | None:
        """Total time of one call's kernels; None if they were not profiled."""
        if self.longest is None:
            return None
        return sum(kernel.microseconds for kernel in (*self.longest, *([self.others] if self.others else [])))


@with_config(ConfigDict(extra="forbid", allow_inf_nan=False))
@dataclass(kw_only=True)
class Result:
    """One arm's row. Reading a row checks it against these types and those of the sections above."""

    case: Case
    status: str = "ok"
    reason: str | None = None
    cold: Compile | None = None
    warm: Compile | None = None
    steady: Steady | None = None
    memory: Memory | None = None
    check: Check | None = None
    work: Work | None = None
    curve: list[float] | None = None  # losses of training steps from the initial weights, each on another batch
    preparation: Mapping[str, float] = field(default_factory=dict)  # seconds of one-time preparation
    data: str | None = None
    sizes: Mapping[str, int] = field(default_factory=dict)
    command: str | None = None  # reproduces this row
    environment: str | None = None  # id of the environment row in the same file

    def __post_init__(self) -> None:
        if self.status not in STATUSES:
            raise ValueError(f"status {self.status!r} is not one of {STATUSES}")
        if self.status != "ok" and not self.reason:
            raise ValueError(f"a row with status {self.status!r} needs a reason")

    @property
    def counted(self) -> Compile | None:
        """The process whose graphs, breaks and recompiles are shown: the cold process, or the only one.

        Its recompiles include those during the race, mostly by another process.
        """
        if self.cold is None or self.cold.graphs is None:
            return self.warm
        if self.warm is None or any(reason.startswith(IN_RACE) for reason in self.cold.recompiles):
            return self.cold
        late = [reason for reason in self.warm.recompiles if reason.startswith(IN_RACE)]
        return replace(self.cold, recompiles=[*self.cold.recompiles, *late])

    def to_json(self) -> dict[str, Any]:
        """The row as plain values, for ``Store.append``. ValueError names a number that JSON cannot hold."""
        return {"kind": "result", "schema": SCHEMA, **asdict(_validated(Result, asdict(self)))}

    @classmethod
    def from_json(cls, row: Row) -> Result:
        """A row read back. ValueError on another schema, and on a field that is missing, unknown or of another type.

        Unknown fields are refused instead of dropped: newer code wrote the row, and a comparison would silently omit
        part of it.
        """
        if row.get("schema") != SCHEMA:
            raise ValueError(
                f"the row has schema {row.get('schema')!r}, this code reads {SCHEMA}; "
                "measure it again, or use the commit that wrote it"
            )
        return _validated(Result, row)


@dataclass(kw_only=True)
class Process:
    """One new process from its start to its first result.

    ``seconds`` by phase: ``python``, ``torch`` and ``library`` (imports), ``context``, ``model`` (read with its inputs
    from a file), ``load`` (of artifacts), ``first call``, ``capture``; and the ``harness``' own imports, which are in
    no total. ``compiled``: ``files`` that compilers wrote, ``graphs`` by Dynamo, ``misses`` of Inductor's caches.
    """

    seconds: Mapping[str, float]
    compiled: Mapping[str, int]
    call_ms: float  # of a later call, by device events on a GPU
    host_ms: float | None
    output: str  # a hash

    @property
    def total(self) -> float:
        """Seconds from the process' start to its first result; with a CUDA graph to the first replay's result."""
        return sum(seconds for name, seconds in self.seconds.items() if name != HARNESS)


@dataclass(kw_only=True)
class Saved:
    """Artifacts: their size; for the zoo also the kind of each graph, and why other graphs were omitted."""

    bytes: int
    kinds: list[str]
    skipped: list[str]


@with_config(ConfigDict(extra="forbid", allow_inf_nan=False))
@dataclass(kw_only=True)
class Start:
    """The new processes of one arm. ``reason`` says why one failed; ``saved`` describes what the last one wrote."""

    case: Case
    source: str
    processes: list[Process] = field(default_factory=list)
    saved: Saved | None = None
    reason: str | None = None
    command: str | None = None
    environment: str | None = None

    @property
    def arm(self) -> str:
        return f"{self.case.arm}, {self.source}"

    @property
    def total(self) -> float:
        """The median of the processes' totals."""
        return statistics.median(each.total for each in self.processes)

    def to_json(self) -> dict[str, Any]:
        """The row as plain values, for ``Store.append``."""
        return {"kind": "start", **asdict(self)}


@functools.cache
def _adapter(of: Any) -> TypeAdapter[Any]:
    return TypeAdapter(of)


def _validated(of: Any, row: Row) -> Any:
    values = {name: value for name, value in row.items() if name not in ("kind", "schema")}
    try:
        return _adapter(of).validate_python(values)
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, each['loc'])) or 'the row'}: {each['msg']}" for each in error.errors())
        newer = any(each["type"] == "unexpected_keyword_argument" for each in error.errors())
        raise ValueError(wrong + ("; newer code wrote this row: update the clone" if newer else "")) from None


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _parse(line: bytes) -> dict[str, Any]:
    row = json.loads(line, parse_constant=_refuse_constant)
    if not isinstance(row, dict):
        raise ValueError(f"expected an object, got {type(row).__name__}")
    return row


@dataclass(frozen=True)
class Store:
    """An append-only JSONL file of rows. A line is written whole and flushed to disk before the next case starts."""

    path: Path

    def append(self, row: Row) -> None:
        """Write one row at the end and wait until the disk has it.

        An incomplete last line, left by a kill, is removed first: appending to it would corrupt two rows. OSError if
        the write fails; the file then ends with the previous row.
        """
        line = (json.dumps(row, allow_nan=False, separators=(",", ":")) + "\n").encode()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # Unbuffered: Python's buffer would try to write the rest of a failed row again when the file is closed.
        with self.path.open("a+b", buffering=0) as file:
            self._repair(file)
            end = file.seek(0, os.SEEK_END)
            try:
                left = memoryview(line)
                while left:
                    left = left[file.write(left) :]
                os.fsync(file.fileno())
            except OSError:
                with contextlib.suppress(OSError):
                    file.truncate(end)
                raise

    @staticmethod
    def _repair(file: IO[bytes]) -> None:
        file.seek(0)
        content = file.read()
        start = content.rfind(b"\n") + 1
        if start == len(content):
            return
        try:
            _parse(content[start:])
        except ValueError:
            file.truncate(start)
        else:
            file.write(b"\n")  # the row is complete except for its line end

    def rows(self) -> Iterator[dict[str, Any]]:
        return (row for _, row in self._numbered())

    def _numbered(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Rows by line. An incomplete last line, left by a kill, is dropped; any other broken line is an error."""
        lines = self.path.read_bytes().split(b"\n") if self.path.exists() else []
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                yield number, _parse(line)
            except ValueError as error:
                if number == len(lines):  # no line end follows: the writer was killed
                    return
                raise ValueError(
                    f"{self.path}:{number} is not a JSON row ({error}); repair or delete that line"
                ) from error

    def results(self) -> list[Result]:
        """The newest result of every case, in the order in which the cases first appear.

        ValueError, with file and line, for an unreadable row or a row whose environment does not precede it.
        """
        newest: dict[str, Result] = {}
        environments: set[str] = set()
        for number, row in self._numbered():
            if row.get("kind") == "environment":
                environments.add(row["id"])
            if row.get("kind") != "result":
                continue
            try:
                result = Result.from_json(row)
                if (named := result.environment) is not None and named not in environments:
                    raise ValueError(f"environment {named!r} is in no row before it; write the environment's row first")
            except ValueError as error:
                raise ValueError(f"{self.path}:{number}: {error}") from error
            newest[result.case.key] = result
        return list(newest.values())

    def starts(self) -> list[Start]:
        found = [_validated(Start, row) for row in self.rows() if row.get("kind") == "start"]
        return list({(each.case.key, each.source): each for each in found}.values())

    def environments(self) -> dict[str, dict[str, Any]]:
        """Environment rows by id; of repeated ids the newest."""
        return {row["id"]: row for row in self.rows() if row.get("kind") == "environment"}


@dataclass(frozen=True, eq=False)
class Rows:
    results: list[Result]  # which the families' tables are made from
    environments: dict[str, dict[str, Any]]  # by the id that rows name
    extra: dict[str, list[Result]] = field(default_factory=dict)  # by name, of races that answer one question each
    starts: list[Start] = field(default_factory=list)
    parallel: list[Row] = field(default_factory=list)  # of ``benchmarks.parallel``, as they are

    def environment(self, result: Result | Start) -> dict[str, Any]:
        return self.environments.get(result.environment or "", {})


def device_name(environment: Row, device: str) -> str:
    """The name of the GPU of that machine, or of its CPU if ``device`` is ``cpu``."""
    return str(environment.get("cpu" if device.startswith("cpu") else "gpu") or f"unknown {device}")


def load(path: Path) -> Rows:
    """The rows of a JSONL file, or of every ``*.jsonl`` below a folder in the order of their paths.

    If several files have a case for one device and torch version, the row with the latest ``time`` in its environment
    counts; if times are equal or missing, the row in the later path. Rows below ``extra/<name>`` of the folder go to
    ``Rows.extra[name]``.
    """
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist; give a .jsonl file of rows or a folder that holds some")
    files = [path] if path.is_file() else sorted(path.rglob("*.jsonl"))
    environments: dict[str, dict[str, Any]] = {}
    newest: dict[str, dict[tuple[str, ...], Result]] = {"": {}}
    starts: list[Start] = []
    parallel: list[Row] = []
    for file in files:
        found = newest.setdefault(_extra_name(file, path), {})
        store = Store(file)
        ids = {}
        for name, environment in store.environments().items():
            taken = environments.get(name, environment) != environment
            ids[name] = f"{name} of {file}" if taken else name  # ids are unique within a file only
            environments[ids[name]] = environment
        starts += [replace(each, environment=ids.get(each.environment or "")) for each in store.starts()]
        spread = (row for row in store.rows() if row.get("kind") == "parallel")
        parallel += [{**row, "environment": ids.get(row["environment"])} for row in spread]
        for result in store.results():
            result.environment = ids.get(result.environment or "")
            environment = environments.get(result.environment or "", {})
            what = (device_name(environment, result.case.device), str(environment.get("torch")), result.case.key)
            known = found.get(what)
            if known is None or _time(environment) >= _time(environments.get(known.environment or "", {})):
                found[what] = result
    results = list(newest.pop("").values())
    extra = {name: list(found.values()) for name, found in newest.items()}
    return Rows(results, environments, extra, starts, parallel)


def load_run(path: Path) -> Rows:
    """The rows of a run given by the user, by ``load``; UsageError if there are none or a row is unreadable."""
    try:
        rows = load(path)
    except (ValueError, FileNotFoundError) as error:
        raise UsageError(str(error)) from error
    if not rows.results:
        raise UsageError(f"{path} holds no rows; give the folder that benchmarks.run --out wrote to")
    return rows


def _extra_name(file: Path, folder: Path) -> str:
    """The name of the question that a file's rows answer: its folders below ``extra``, or empty for other rows."""
    folders = file.relative_to(folder).parts[:-1]
    if EXTRA not in folders:
        return ""
    name = "/".join(folders[folders.index(EXTRA) + 1 :])
    if not name:
        raise ValueError(f"{file}: rows in {EXTRA}/ need a folder of their own there, named for what they answer")
    return name


def _time(environment: Row) -> str:
    return str(environment.get("time") or "")  # ISO 8601 in UTC, so that text sorts as time does
