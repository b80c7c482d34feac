"""A run: measures its cases and writes rows to files, and keeps finished rows after any failure."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shlex
import shutil
import signal
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from benchmarks.cli import Progress, UsageError, words
from benchmarks.harness import run_race
from benchmarks.machine import Monitor, cache_environment, cores, row
from benchmarks.plan import Case, races_of
from benchmarks.process import Worker, WorkerFailure, kill_all
from benchmarks.record import Result, Store, load
from benchmarks.startup import Settings, estimate_race

if TYPE_CHECKING:
    from benchmarks.families import Workload

PEAKS = {False: ("peaks", 20.0), True: ("peaks", 12.0)}  # kind and expected seconds, by --quick
SCRATCH = "regional-zoo-run-"
# Statuses of a broken arm of the zoo. An arm that does not fit in memory, or was stopped, is not broken.
BROKEN = ("failed", "crashed", "timeout", "out-of-memory")
UNWRITABLE = 3
INTERRUPTED = 130


class Unwritable(Exception):
    """A row cannot be written to disk; the message says which file and why."""


@dataclass
class Run:
    workload: Workload
    device: str
    cases: list[Case]
    refused: Mapping[str, str]
    out: Path
    done: set[str] = field(default_factory=set)  # keys of cases that are already in the files

    @property
    def races(self) -> list[list[Case]]:
        todo = [case for case in self.cases if case.key not in self.done]
        return list(races_of(todo).values())

    def store(self, case: Case) -> Store:
        if self.out.suffix == ".jsonl":
            return Store(self.out)
        return Store(self.out / f"{case.family}-{case.workload}-{case.dtype}.jsonl")

    def stores(self) -> list[Store]:
        return list({store.path: store for store in map(self.store, self.cases)}.values())

    def skip_done(self, *, resume: bool) -> None:
        """Skip cases that are already in files. UsageError if a file exists without ``resume``, or is unreadable."""
        if resume:
            try:
                self.done = {r.case.key for store in self.stores() for r in store.results() if r.status == "ok"}
            except ValueError as error:
                raise UsageError(str(error)) from error
        elif taken := [str(store.path) for store in self.stores() if store.path.exists()]:
            raise UsageError(f"--out: {taken[0]} is there already; add --resume to continue it, or name another place")

    def results(self) -> tuple[list[Result], dict[str, Any]]:
        wanted = {case.key for case in self.cases}
        results: list[Result] = []
        environments: dict[str, Any] = {}
        for store in self.stores():
            results += [result for result in store.results() if result.case.key in wanted]
            environments |= store.environments()
        return results, environments


def command_of(case: Case, settings: Settings) -> str:
    words = ["python", "-m", "benchmarks.run", "--family", settings.workload, "--model", case.model]
    words += ["--input", case.input, "--workload", case.workload, "--dtype", case.dtype, "--device", case.device]
    words += ["--impl", case.implementation, "--strategy", case.strategy_name, "--mode", case.mode]
    words += ["--quick"] * settings.quick + ["--steady-only"] * settings.steady_only
    words += ["--rounds", str(settings.rounds)]
    for option in ("curve", "data_root", "seed"):
        if value := getattr(settings, option):
            words += [f"--{option.replace('_', '-')}", str(value)]
    return shlex.join(words)


@contextmanager
def settings_of(workload: str, *, rounds: int | None = None, quick: bool = False, **options: Any) -> Iterator[Settings]:
    stack = ExitStack()
    try:
        remove_stale(SCRATCH)
        folder = stack.enter_context(scratch_folder(SCRATCH))
    except OSError as error:
        raise UsageError(
            f"the compiler's caches have no folder ({error.strerror}: {error.filename or tempfile.gettempdir()}); set "
            "TMPDIR to one that can be written"
        ) from error
    with stack:
        yield Settings(
            workload=workload,
            scratch=folder,
            monitor=Monitor(),
            rounds=rounds or (20 if quick else 30),
            quick=quick,
            ahead=min(cores(), 16 if options.get("steady_only") else 12),
            **options,
        )


def measure(run: Run, settings: Settings, console: Console) -> int:
    """Measure the remaining cases of the run and show them; returns the exit code.

    UsageError, before any measurement, if the rows' folder or the device cannot be used.
    """
    races = run.races
    plan = [PEAKS[settings.quick], *(item for arms in races for item in estimate_race(arms, settings))]
    _announce(run, races, settings, sum(seconds for _, seconds in plan), console)
    measured: set[str] = set()
    if not races:
        return _conclude(run, console, measured)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with locked(run.out), ExitStack() as stack:
            progress = Progress(console, plan)
            environment, settings = _environment(run, settings, progress, stack)
            for arms in races:
                console.print(f"{arms[0].model} on {arms[0].input}, {arms[0].dtype}, {arms[0].device}")
                _measure_race(run, arms, settings, progress, environment, measured)
    except (KeyboardInterrupt, Unwritable) as error:
        kill_all()
        _conclude(run, console, measured)
        stopped = isinstance(error, KeyboardInterrupt)
        said = "stopped; finished rows are kept. " if stopped else f"error: {error}\n"
        console.print(f"{said}Continue with --resume --out {run.out}", soft_wrap=True)
        return INTERRUPTED if stopped else UNWRITABLE
    finally:
        kill_all()
    return _conclude(run, console, measured)


def _announce(run: Run, races: Sequence[Sequence[Case]], settings: Settings, seconds: float, console: Console) -> None:
    arms = sum(len(race) for race in races)
    skipped = f", {len(run.done & {case.key for case in run.cases})} done before" if run.done else ""
    count = f"{len(races)} race{'s' * (len(races) != 1)}"
    starts = "once, all together" if settings.steady_only else "once" if settings.quick else ""
    starts = starts or "cold, to a first result and warm"
    console.print(f"{count}, {arms} arms{skipped}, on {run.device}: about {words(seconds)}")
    console.print(f"each arm starts {starts}, then all race for {settings.rounds} rounds")
    for race in races:
        console.print(f"  {race[0].model} on {race[0].input}, {race[0].workload}, {race[0].dtype}")
        for case in race:
            console.print(f"    {case.arm}")
    console.print(f"rows are written to {run.out}")


def _environment(run: Run, settings: Settings, progress: Progress, stack: ExitStack) -> tuple[dict[str, Any], Settings]:
    """The environment's row, measured in a separate process, and the settings with a monitor of its GPU."""
    progress.begin("peak rates of the device", *PEAKS[settings.quick])
    folder = settings.scratch / "start-up"
    compiles = any(case.strategy != "eager" for case in run.cases) and not settings.steady_only
    worker = Worker(cache_environment(folder), timeout=settings.timeout)
    try:
        facts = worker.ask("facts", device=run.device)["device"]
        stack.enter_context(gpu_alone(facts.get("gpu_uuid"), progress.note))
        dtypes, start_up = sorted({case.dtype for case in run.cases}), str(folder / "compiler") if compiles else None
        found = worker.ask("peaks", device=run.device, dtypes=dtypes, quick=settings.quick, start_up=start_up)
    except WorkerFailure as failure:
        raise UsageError(f"the device {run.device} could not be measured ({failure})") from failure
    finally:
        worker.stop()
    monitor = Monitor(facts.get("gpu_uuid"))
    settings = replace(settings, monitor=monitor, compiler_start_up=found["start_up"])
    return row(facts, found["peaks"]), settings


def _measure_race(
    run: Run, arms: Sequence[Case], settings: Settings, progress: Progress, environment: Mapping[str, Any],
    measured: set[str],
) -> None:  # fmt: skip
    """Measure one race, write its rows and add their keys to ``measured``. Rows survive any end of the race."""
    store = run.store(arms[0])
    _write(store, environment)

    def emit(result: Result) -> None:
        result.command = command_of(result.case, settings)
        result.environment = environment["id"]
        _write(store, result.to_json())
        measured.add(result.case.key)

    run_race(arms, settings, progress, emit, memory_bytes=run.workload.memory_bytes, peaks=environment["peaks"])


def _write(store: Store, row: Mapping[str, Any]) -> None:
    """Append a row, unless it is an environment that the file already has. Raises Unwritable if the disk refuses it."""
    if row["kind"] == "environment" and row["id"] in store.environments():
        return
    try:
        store.append(row)
    except OSError as error:
        raise Unwritable(f"{store.path} cannot be written ({error.strerror}); the rows in it are kept") from error


def _conclude(run: Run, console: Console, measured: set[str]) -> int:
    """Print this run's tables and write the HTML report of all its rows; returns 1 if an arm of the zoo is broken."""
    from benchmarks.report.show import folder_of_reports, render, write_html  # not needed to measure

    results, environments = run.results()
    render(results, environments, console)
    console.print(f"\nrows: {', '.join(str(store.path) for store in run.stores())}")
    if results:
        try:
            path = write_html(load(run.out), folder_of_reports(run.out) / "report.html")
        except (OSError, ValueError) as error:  # a broken row of another run must not fail this run
            console.print(f"no report: {error}")
        else:
            console.print(f"report: {path}")
    ours = [result for result in results if result.case.impl == "zoo" and not result.case.control]
    return int(any(result.status in BROKEN and result.case.key in measured for result in ours))


# Locks on files: the system releases them when the process ends, however it ends --------------------------------------


@contextmanager
def gpu_alone(uuid: str | None, note: Callable[[str], None]) -> Iterator[None]:
    """Lock the GPU against other runs, after waiting for a run that has it. None (a CPU) locks nothing.

    Runs see each other only if they share the folder for temporary files. ``note`` reports a wait, or a missing lock.
    """
    path, descriptor = Path(tempfile.gettempdir()) / f"regional-zoo-{uuid}.lock", None
    with ExitStack() as stack:
        for flags in (os.O_RDWR | os.O_CREAT, os.O_RDONLY):  # another user's file can be locked but not written
            with contextlib.suppress(OSError):
                descriptor = os.open(path, flags, 0o666) if uuid and descriptor is None else descriptor
        if descriptor is not None:
            stack.callback(os.close, descriptor)
            try:
                _lock(descriptor)
            except BlockingIOError:
                note("waiting for another run on this GPU")
                fcntl.flock(descriptor, fcntl.LOCK_EX)
        elif uuid is not None:
            note("no lock file can be opened: this run does not wait for others on this GPU")
        yield


@contextmanager
def locked(out: Path) -> Iterator[None]:
    """Create the folder of rows (or of a ``.jsonl`` file) and lock it against other runs."""
    is_file = out.suffix == ".jsonl"
    folder = out.parent if is_file else out
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Tested by writing: permissions do not show a disk that is mounted read-only.
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
            pass  # some network file systems have no locks, so other runs cannot be excluded
        yield
    finally:
        os.close(descriptor)


@contextmanager
def scratch_folder(prefix: str) -> Iterator[Path]:
    """A temporary folder, removed at the end, and locked so that ``remove_stale`` of another run leaves it."""
    with tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True) as name:
        descriptor = os.open(name, os.O_RDONLY)
        try:
            with contextlib.suppress(OSError):  # without locks remove_stale leaves every folder
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
            if time.time() - facts.st_mtime < 60.0:
                continue  # just created, and not locked yet
            descriptor = os.open(left, os.O_RDONLY)
            try:
                _lock(descriptor)
                shutil.rmtree(left, ignore_errors=True)
            finally:
                os.close(descriptor)


def _lock(descriptor: int) -> None:
    """Hold an open file or folder until it is closed; BlockingIOError if another process holds it."""
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
