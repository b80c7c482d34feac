"""From a fresh process to an arm that can race: cold, first result, warm, each in a separate process.

1. *cold*: empty cache folders; starts the compiler, then compiles the case: the compile figure.
2. *first result*: other empty folders, nothing compiled before: the delay that a user sees.
3. *race*: the folders filled by the first process, proven warm by cache hits. This process stays alive and races.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.machine import Monitor, cache_environment, cores
from benchmarks.plan import Case
from benchmarks.process import SET_TMPDIR, Worker, WorkerFailure, kill_all
from benchmarks.record import Check, Compile, Memory, Result, Work

if TYPE_CHECKING:
    from benchmarks.cli import Progress

COLD, FIRST_RESULT, RACE = "cold process", "first result", "process for the race"
COUNTS = ("graphs", "breaks", "recompiles", "cache_hits", "cache_misses", "cache_bypasses")
COMPILE_THREADS = "TORCHINDUCTOR_COMPILE_THREADS"
# If arms start together (--steady-only), spinning threads delay the threads that they wait for, and preparation takes
# many times as long. In races on a CPU threads may spin.
WAIT_POLICY = "OMP_WAIT_POLICY"
_CHECKING = threading.Lock()


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of a run, apart from its cases."""

    workload: str  # family, or dotted name of a workload's module
    scratch: Path  # for caches and references; the caller removes it
    monitor: Monitor
    timeout: float = 900.0  # seconds of one step of an arm
    rounds: int = 30
    curve: int = 0  # steps of the loss curve that each arm of training draws after its race
    quick: bool = False  # one process per arm
    steady_only: bool = False  # no compile figures; arms start together
    data_root: str | None = None
    seed: int = 0
    ahead: int = 1  # number of workers that may prepare at the same time
    compiler_start_up: float | None = None  # seconds, measured in a separate process


TURN = 0.08  # seconds that an arm's turn in a round takes, if its calls are short


@dataclass(kw_only=True)
class ArmRun:
    """One arm during its race: its process and its row so far."""

    case: Case
    folder: Path  # of its caches; the A/A control shares its twin's
    worker: Worker | None = None
    result: Result = field(init=False)
    calls: int = 0  # of one turn in the race
    call_seconds: float = 0.0  # of an early call of compiled code, for the estimate of the race

    def __post_init__(self) -> None:
        self.result = Result(case=self.case)

    @property
    def ok(self) -> bool:
        return self.result.status == "ok"

    @property
    def compiled(self) -> bool:
        return self.case.strategy != "eager"

    def fail(self, status: str, reason: str) -> None:
        """End the process and set the failure's status; the row keeps earlier figures except the steady state."""
        self.result.status, self.result.reason = status, reason
        self.result.steady = None
        if self.worker is not None:
            self.worker.kill()
            self.worker = None

    def ask(self, operation: str, **payload: Any) -> dict[str, Any]:
        assert self.worker is not None
        return self.worker.ask(operation, **payload)


@dataclass(frozen=True)
class Job:
    arm: ArmRun
    phase: str

    @property
    def folder(self) -> Path:
        return self.arm.folder / ("first" if self.phase == FIRST_RESULT else "cache")


def jobs_before_the_race(arms: Sequence[ArmRun], settings: Settings) -> list[Job]:
    if settings.quick or settings.steady_only:
        return []
    measured = [arm for arm in arms if arm.compiled and not arm.case.control]
    return [Job(arm, phase) for phase in (COLD, FIRST_RESULT) for arm in measured]


def measure_compilation(arms: Sequence[ArmRun], settings: Settings, progress: Progress) -> None:
    """The cold and the first-result process of every compiled arm."""
    for job, worker in processes(jobs_before_the_race(arms, settings), settings, progress):
        arm = job.arm
        with failures_of(arm):
            if job.phase == COLD:
                arm.result.cold = bring_up(arm, worker, settings)
            else:
                assert arm.result.cold is not None
                arm.result.cold.time_to_first_result = worker.ask("first_result")["seconds"]
        worker.stop()


def prepare_race(arms: Sequence[ArmRun], settings: Settings, progress: Progress, reference: Path) -> None:
    """Prepare every arm for the race, with its process alive."""
    jobs = [Job(arm, RACE) for arm in arms if arm.ok]
    if settings.steady_only:
        progress.begin(f"{len(jobs)} arms start together", *starts(jobs, settings)[0])
        # By default each worker would start one compile process per core.
        threads = max(1, cores() // max(1, min(len(jobs), settings.ahead)))

        def start(job: Job) -> None:
            with failures_of(job.arm):
                worker = _spawn(job, settings, threads)
                _make_ready(job, worker, settings)
                if job.arm.ok:
                    _start_racing(job.arm, worker, settings, reference)

        in_parallel(start, jobs, settings.ahead)
        return
    for job, worker in processes(jobs, settings, progress):
        _start_racing(job.arm, worker, settings, reference)


# Processes ------------------------------------------------------------------------------------------------------------


def processes(jobs: Sequence[Job], settings: Settings, progress: Progress) -> Iterator[tuple[Job, Worker]]:
    """A ready worker for each job, in order; jobs of arms that failed meanwhile are skipped.

    Several workers import, build their inputs and start the compiler concurrently. No worker is yielded while another
    one does so, since an import would disturb a concurrent measurement.
    """
    for first in range(0, len(jobs), settings.ahead):
        batch: list[tuple[Job, Worker]] = []
        ready = [job for job in jobs[first : first + settings.ahead] if job.arm.ok]
        progress.begin(f"imports: {', '.join(job.arm.case.arm for job in ready)}", *imports(ready))
        try:
            for job in ready:
                with failures_of(job.arm):
                    batch.append((job, _spawn(job, settings)))
            in_parallel(lambda pair: _make_ready(pair[0], pair[1], settings), batch, settings.ahead)
            for job, worker in batch:
                if job.arm.ok and worker.alive:
                    progress.begin(f"{job.arm.case.arm}: {job.phase}", *estimate(job, settings))
                    yield job, worker
        finally:
            for job, worker in batch:
                if worker is not job.arm.worker:
                    worker.kill()


def in_parallel(work: Callable[[Any], None], items: Sequence[Any], threads: int) -> None:
    """Apply ``work`` to several items concurrently. On Ctrl-C all workers end, so that no thread waits for one."""
    with ThreadPoolExecutor(threads) as pool:
        try:
            list(pool.map(work, items))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            kill_all()
            raise


@contextmanager
def failures_of(arm: ArmRun, phase: str = "") -> Iterator[None]:
    """Turn a worker's failure inside the block into the arm's status; ``phase`` names the process."""
    try:
        yield
    except WorkerFailure as error:
        if error.status == "interrupted":
            raise  # another thread got the Ctrl-C; earlier measurements are kept
        reason = error.reason
        if phase == RACE and error.operation == "first_call" and arm.result.cold is not None:
            # The cold process compiled the same; the only difference is that the caches are not empty.
            reason += "; the cold start worked, so an entry of the compiler's caches may be broken: measure again"
        arm.fail(error.status, reason)


def _spawn(job: Job, settings: Settings, compile_threads: int | None = None) -> Worker:
    """Start a job's process and its imports; ``compile_threads`` is for its compiler, one per core by default."""
    try:
        job.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        where = f"{job.folder}: {error.strerror}"
        raise WorkerFailure("failed", f"its cache folder cannot be made ({where}); {SET_TMPDIR}") from error
    variables = cache_environment(job.folder)
    if compile_threads is not None:
        variables[COMPILE_THREADS] = os.environ.get(COMPILE_THREADS, str(compile_threads))
        if job.arm.case.device != "cpu":
            variables[WAIT_POLICY] = os.environ.get(WAIT_POLICY, "passive")
    try:
        worker = Worker(variables, timeout=settings.timeout)
    except OSError as error:
        raise WorkerFailure("failed", f"its process cannot be started ({error.strerror}); end others first") from error
    worker.send("load", workload=settings.workload)
    return worker


def _make_ready(job: Job, worker: Worker, settings: Settings) -> None:
    """Wait for the imports, build model and inputs, and start the compiler unless the job is a first result."""
    arm = job.arm
    with failures_of(arm):
        worker.receive()
        ready = worker.ask("prepare", case=arm.case.to_json(), data_root=settings.data_root, seed=settings.seed)
        result = arm.result
        result.data, result.sizes, result.preparation = ready["data"], ready["sizes"], ready["preparation"]
        if result.work is None:
            result.work = Work(**{name: ready[name] for name in ("bytes", "bytes_formula", "count", "unit")})
        if job.phase != FIRST_RESULT:
            folder = str(arm.folder / "start-up") if arm.compiled else None
            result.work.flops = worker.ask("start_up", folder=folder)["flops"]
        result.memory = Memory(model=ready["model_bytes"])


def _start_racing(arm: ArmRun, worker: Worker, settings: Settings, reference: Path) -> None:
    arm.worker = worker
    with failures_of(arm, RACE):
        figures = bring_up(arm, worker, settings)
        if settings.steady_only and figures is not None:
            # Arms that start together disturb each other: counts and reasons are valid, seconds are not.
            figures = Compile(**{name: getattr(figures, name) for name in COUNTS})
        once = settings.quick and not settings.steady_only and arm.result.cold is None and not arm.case.control
        if once or not arm.compiled:  # an outer CUDA graph over eager code has no cold and warm start
            arm.result.cold = figures
        if not once:
            arm.result.warm = figures
        assert arm.result.memory is not None
        if not arm.case.cuda_graph:
            peaks = worker.ask("memory")
            arm.result.memory.allocated, arm.result.memory.reserved = peaks["allocated"], peaks["reserved"]
        # One at a time: the first arm computes the reference, whose precision takes more memory than any arm.
        with _CHECKING:
            check = worker.ask("check", reference=str(reference))
        arm.result.check = Check(**{name: check[name] for name in ("error", "eager_error", "reference_dtype")})


def bring_up(arm: ArmRun, worker: Worker, settings: Settings) -> Compile | None:
    """Compile and capture in a ready process. Returns the costs; None for a plain eager arm."""
    assert arm.result.memory is not None
    first = worker.ask("first_call")
    arm.call_seconds = 0.0 if arm.case.cuda_graph else min(first.get("later_calls", ()), default=0.0)
    figures = None
    if arm.compiled:
        figures = Compile(
            start_up=settings.compiler_start_up,
            capture=first["recording"],
            cache_empty_at_start=first["files_at_start"] == 0,
            **{name: first[name] for name in ("seconds", "later_calls", "phases", *COUNTS)},
        )
    if arm.case.cuda_graph:
        captured = worker.ask("capture")
        figures = figures or Compile(seconds=0.0, graphs=0)
        figures.capture = captured["seconds"]
        figures.graphs = (figures.graphs or 0) + len(captured["recompiles"])
        figures.recompiles += [f"at capture: {reason}" for reason in captured["recompiles"]]
        # A replay shows no allocations: the peak is the capture's, and its pool stays.
        arm.result.memory.allocated, arm.result.memory.reserved = captured["allocated"], captured["reserved"]
    return figures


# Estimates, for the plan and the time left ----------------------------------------------------------------------------


def imports(jobs: Sequence[Job]) -> tuple[str, float]:
    """The kind and the expected seconds of what processes do side by side until each is ready."""
    return "imports", 10.0 + 5.0 * any(job.arm.case.impl != "zoo" for job in jobs)  # an upstream library takes longer


def estimate(job: Job, settings: Settings) -> tuple[str, float]:
    """The kind and the expected seconds of a ready process; one without a predecessor compiles like a cold one."""
    case = job.arm.case
    cold = settings.steady_only or (settings.quick and not case.control)  # the control finds its twin's caches
    kind = "eager" if not job.arm.compiled else COLD if cold else job.phase
    longer = 1.6 if case.strategy in ("full", "hierarchical") else 1.0
    return kind, longer * {"eager": 1.0, COLD: 3.0, FIRST_RESULT: 6.0, RACE: 2.0}[kind]


def starts(jobs: Sequence[Job], settings: Settings) -> list[tuple[str, float]]:
    """All items of these processes; a single one if they start together."""
    batches = [jobs[first : first + settings.ahead] for first in range(0, len(jobs), settings.ahead)]
    items = [imports(batch) for batch in batches] + [estimate(job, settings) for job in jobs]
    return [("start", sum(seconds for _, seconds in items))] if settings.steady_only else items


def estimate_race(cases: Sequence[Case], settings: Settings) -> list[tuple[str, float]]:
    arms = [ArmRun(case=case, folder=settings.scratch) for case in cases]
    jobs = [Job(arm, RACE) for arm in arms]
    items = starts(jobs_before_the_race(arms, settings), settings) + starts(jobs, settings)
    return [*items, ("rounds", estimate_rounds(arms, settings)[0])]


def estimate_rounds(arms: Sequence[ArmRun], settings: Settings) -> tuple[float, float]:
    """Seconds of all rounds if calls are short, and seconds to add for those known to be long: a turn makes two."""
    longer = sum(max(0.0, 2 * arm.call_seconds - TURN) for arm in arms)
    return 1.0 + TURN * len(arms) * settings.rounds, settings.rounds * longer
