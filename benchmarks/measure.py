"""A run: from its cases to rows in their files, whatever happens on the way."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from benchmarks.cli import UsageError
from benchmarks.harness import ROUNDS_OF_A_SET, run_race
from benchmarks.locks import GpuLock, locked, remove_stale, scratch_folder
from benchmarks.machine import Monitor, cache_environment, cores, row
from benchmarks.plan import Case, races_of
from benchmarks.process import Worker, WorkerFailure, kill_all
from benchmarks.progress import Progress, words
from benchmarks.record import Result, RowWriter, Store, Unwritable, load
from benchmarks.startup import Settings, estimate_race

if TYPE_CHECKING:
    from benchmarks.families import Workload

PEAKS_SECONDS = 12.0
SCRATCH = "regional-zoo-run-"
UNWRITABLE = 3
INTERRUPTED = 130


@dataclass
class Run:
    """What a run will measure. ``command`` gives the command line that measures a case's row again."""

    workload: Workload
    device: str
    cases: list[Case]
    refused: Mapping[str, str]
    out: Path
    command: Callable[[Case, Settings], str]
    done: set[str] = field(default_factory=set)  # keys of cases that the files hold already

    @property
    def races(self) -> list[list[Case]]:
        """What is left to do, race by race."""
        todo = [case for case in self.cases if case.key not in self.done]
        return list(races_of(todo).values())

    def store(self, case: Case) -> Store:
        if self.out.suffix == ".jsonl":
            return Store(self.out)
        return Store(self.out / f"{case.family}-{case.workload}-{case.dtype}.jsonl")

    def stores(self) -> list[Store]:
        return list({store.path: store for store in map(self.store, self.cases)}.values())

    def skip_done(self, *, resume: bool) -> None:
        """Leave out what the files hold already.

        Raises:
            UsageError: If a file is there and its run is not to be resumed, or its rows cannot be read.
        """
        if resume:
            try:
                self.done = {r.case.key for store in self.stores() for r in store.results() if r.status == "ok"}
            except ValueError as error:
                raise UsageError(str(error)) from error
        elif taken := [str(store.path) for store in self.stores() if store.path.exists()]:
            raise UsageError(f"--out: {taken[0]} is there already; add --resume to continue it, or name another place")

    def results(self) -> tuple[list[Result], dict[str, Any]]:
        """The rows of this run's cases, and the environments that they name."""
        wanted = {case.key for case in self.cases}
        results: list[Result] = []
        environments: dict[str, Any] = {}
        for store in self.stores():
            results += [result for result in store.results() if result.case.key in wanted]
            environments |= store.environments()
        return results, environments


# Prints what was measured; gets the keys of the cases measured now and returns the exit code.
Conclude = Callable[[Run, Console, set[str]], int]


@contextmanager
def settings_of(workload: str, *, rounds: int | None = None, quick: bool = False, **options: Any) -> Iterator[Settings]:
    """Settings with a scratch folder, which is removed at the end.

    Raises:
        UsageError: If there is no folder for temporary files.
    """
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
            rounds=rounds or (10 if quick else 30),
            quick=quick,
            ahead=min(cores(), 16 if options.get("steady_only") else 12),
            **options,
        )


def measure(run: Run, settings: Settings, console: Console, conclude: Conclude) -> int:
    """Measure what is left of the run and conclude; the exit code.

    Raises:
        UsageError: If the rows' folder or the device cannot be used; nothing has been measured then.
    """
    races = run.races
    seconds = _peaks_seconds(settings) + sum(estimate_race(arms, settings) for arms in races)
    _announce(run, races, settings, seconds, console)
    measured: set[str] = set()
    if not races:
        return conclude(run, console, measured)
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        with locked(run.out), Progress(console, seconds) as progress:
            environment, settings = _environment(run, settings, progress)
            for arms in races:
                progress.race(f"{arms[0].model} on {arms[0].input}, {arms[0].dtype}, {arms[0].device}")
                _measure_race(run, arms, settings, progress, environment, measured)
    except (KeyboardInterrupt, Unwritable) as error:
        kill_all()
        conclude(run, console, measured)
        stopped = isinstance(error, KeyboardInterrupt)
        said = "stopped; finished rows are kept. " if stopped else f"error: {error}\n"
        console.print(f"{said}Continue with --resume --out {run.out}", markup=False, highlight=False, soft_wrap=True)
        return INTERRUPTED if stopped else UNWRITABLE
    finally:
        kill_all()
    return conclude(run, console, measured)


def _interrupt(number: int, frame: Any) -> None:
    raise KeyboardInterrupt


def _peaks_seconds(settings: Settings) -> float:
    return PEAKS_SECONDS * (0.2 if settings.quick else 1)


def _announce(run: Run, races: Sequence[Sequence[Case]], settings: Settings, seconds: float, console: Console) -> None:
    arms = sum(len(race) for race in races)
    skipped = f", {len(run.done & {case.key for case in run.cases})} done before" if run.done else ""
    count = f"{len(races)} race{'s' * (len(races) != 1)}"
    lines = [f"{count}, {arms} arms{skipped}, on {run.device}: about {words(seconds)}", _method(settings)]
    for race in races:
        lines.append(f"  {race[0].model} on {race[0].input}, {race[0].workload}, {race[0].dtype}")
        lines += [f"    {case.arm}" for case in race]
    lines.append(f"rows are written to {run.out}")
    for line in lines:
        console.print(line, markup=False, highlight=False)


def _method(settings: Settings) -> str:
    """What is done with each arm, in a line."""
    starts = "cold, to a first result and warm" if settings.first_result else "cold and warm"
    starts = "once, all together" if settings.steady_only else "once" if settings.quick else starts
    sets = f" in each of {settings.sets} sets of processes" if settings.sets > 1 else ""
    return f"each arm starts {starts}, then all race for {settings.rounds} rounds{sets}"


def _environment(run: Run, settings: Settings, progress: Progress) -> tuple[dict[str, Any], Settings]:
    """The environment's row, measured in a process of its own; and the settings with a monitor and lock of that GPU."""
    progress.begin("peak rates of the device", _peaks_seconds(settings))
    folder = settings.scratch / "start-up"
    compiles = any(case.strategy != "eager" for case in run.cases) and not settings.steady_only
    worker = Worker(cache_environment(folder), timeout=settings.timeout)
    try:
        facts = worker.ask("facts", device=run.device)["device"]
        gpu_lock = GpuLock(facts.get("gpu_uuid"), progress.note)
        wanted = {"device": run.device, "dtypes": sorted({c.dtype for c in run.cases}), "quick": settings.quick}
        host = {"cores": cores(), "backend": os.environ.get("BENCHMARKS_BACKEND")}
        found = gpu_lock.measured_once(
            {**wanted, **host, "starts": compiles, "facts": facts},
            lambda: worker.ask("peaks", **wanted, start_up=str(folder / "compiler") if compiles else None),
        )
    except WorkerFailure as failure:
        raise UsageError(f"the device {run.device} could not be measured ({failure})") from failure
    finally:
        worker.stop()
    monitor = Monitor(facts.get("gpu_uuid"))
    settings = replace(settings, monitor=monitor, gpu_lock=gpu_lock, compiler_start_up=found["start_up"])
    return row(facts, found["peaks"]), settings


def _measure_race(
    run: Run,
    arms: Sequence[Case],
    settings: Settings,
    progress: Progress,
    environment: Mapping[str, Any],
    measured: set[str],
) -> None:
    """One race to its rows; their cases' keys are added to ``measured``. Rows are kept whatever ends the race."""
    store = run.store(arms[0])
    first_set = _sets_in(store)
    writer = RowWriter(store)
    writer.begin(environment)

    def emit(result: Result) -> None:
        result.command = run.command(result.case, settings)
        result.environment = environment["id"]
        writer.append(result.to_json())
        measured.add(result.case.key)

    try:
        run_race(
            arms,
            settings,
            progress,
            emit,
            memory_bytes=run.workload.memory_bytes,
            running_bytes=getattr(run.workload, "running_bytes", None),
            peaks=environment["peaks"],
            first_set=first_set,
        )
    finally:
        writer.flush()


def _sets_in(store: Store) -> int:
    """How many sets of processes the file's rows may have: new rounds are numbered above all of them."""
    rounds = [number for result in store.results() if result.steady for number in result.steady.rounds]
    return max((number // ROUNDS_OF_A_SET + 1 for number in rounds), default=0)


def say_where(run: Run, console: Console) -> None:
    """Name the files of rows, and write the HTML report of everything in that place, earlier runs included."""
    console.print(f"\nrows: {', '.join(str(store.path) for store in run.stores())}", markup=False, highlight=False)
    if not run.results()[0]:
        return
    from benchmarks.report.html import folder_of_reports, write_html

    try:
        path = write_html(load(run.out), folder_of_reports(run.out) / "report.html")
    except (OSError, ValueError) as error:  # another run's broken row must not hide that this run is done
        console.print(f"no report: {error}", markup=False, highlight=False)
    else:
        console.print(f"report: {path}", markup=False, highlight=False)
