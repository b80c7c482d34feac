"""From a fresh process to an arm that can race: cold, first result, warm, each in a process of its own.

1. *cold*: empty cache folders; the compiler started, then the case compiled: the compile figure.
2. *first result*: other empty folders, nothing compiled before: what a user feels.
3. *race*: the folders that the first process filled; proven warm by hits. This process stays alive and races.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from benchmarks.locks import GpuLock
from benchmarks.machine import Monitor, cores
from benchmarks.plan import Case
from benchmarks.process import SET_TMPDIR, Worker, WorkerFailure, cache_environment, kill_all
from benchmarks.record import Check, Compile, Memory, Result, Work

COUNTED = (
    "seconds",
    "later_calls",
    "phases",
    "graphs",
    "breaks",
    "recompiles",
    "cache_hits",
    "cache_misses",
    "cache_bypasses",
)
COMPILE_THREADS = "TORCHINDUCTOR_COMPILE_THREADS"
# Where all arms start together (--steady-only), threads that spin while they wait keep those from running that they
# wait for, and a preparation takes many times as long. Where the CPU is what is measured they may.
WAITING = "OMP_WAIT_POLICY"
COLD, FIRST_RESULT, RACE = "cold process", "first result", "process for the race"


class Reporter(Protocol):
    """Who is told what goes on."""

    def begin(self, what: str, seconds: float) -> None:
        """Something starts that was planned to take so long."""

    def partway(self, share: float, seconds: float) -> None:
        """Of what is going on so much is over, and took so long."""

    def note(self, text: str) -> None:
        """Something that the user should see."""


_CHECKING = threading.Lock()


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a run is asked for, the cases apart.

    Args:
        workload: Family, or dotted name of a workload's module.
        scratch: Folder for caches and references; the caller removes it.
        ahead: How many workers may get ready at the same time.
        gpu_lock: Held while something is timed.
        compiler_start_up: Seconds that the compiler's own start takes, measured in a process alone.
        rounds: Rounds of a race, in each set of processes.
        curve: Steps of the loss curve that each arm of training draws after its race.
        first_result: Whether the time to first result is measured, for which each arm is compiled once more.
    """

    workload: str
    scratch: Path
    monitor: Monitor
    timeout: float = 900.0
    rounds: int = 30
    sets: int = 1
    curve: int = 0
    quick: bool = False
    steady_only: bool = False
    first_result: bool = True
    traces: Path | None = None
    data_root: str | None = None
    seed: int = 0
    ahead: int = 1
    gpu_lock: GpuLock = field(default_factory=lambda: GpuLock(None))
    compiler_start_up: float | None = None


@dataclass(kw_only=True)
class ArmRun:
    """One arm of the race that is going on, as the harness sees it."""

    case: Case
    folder: Path  # of its caches; the A/A control shares its twin's
    worker: Worker | None = None
    result: Result = field(init=False)
    calls: int = 0

    def __post_init__(self) -> None:
        self.result = Result(case=self.case)

    @property
    def ok(self) -> bool:
        return self.result.status == "ok"

    @property
    def compiled(self) -> bool:
        return self.case.strategy != "eager"

    def fail(self, status: str, reason: str) -> None:
        """Type the failure; what was measured before it stays in the row, steady state apart."""
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
    """One process of one arm."""

    arm: ArmRun
    phase: str

    @property
    def folder(self) -> Path:
        return self.arm.folder / ("first" if self.phase == FIRST_RESULT else "cache")


def jobs_before_the_race(arms: Sequence[ArmRun], settings: Settings) -> list[Job]:
    """The processes that only measure compilation."""
    if settings.quick or settings.steady_only:
        return []
    measured = [arm for arm in arms if arm.compiled and not arm.case.control]
    phases = (COLD, FIRST_RESULT) if settings.first_result else (COLD,)
    return [Job(arm, phase) for phase in phases for arm in measured]


def spawn(job: Job, settings: Settings, compile_threads: int | None = None) -> Worker:
    """Start the process of a job and let it import.

    Args:
        job: Whose process.
        settings: Of the run.
        compile_threads: How many processes its compiler may start, if all arms start together; None for the compiler's
            default, one a core.

    Raises:
        WorkerFailure: If its cache folder cannot be made, or the process not started.
    """
    try:
        job.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        where = f"{job.folder}: {error.strerror}"
        raise WorkerFailure("failed", f"its cache folder cannot be made ({where}); {SET_TMPDIR}") from error
    try:
        variables = {**cache_environment(job.folder), "BENCHMARKS_SCRATCH": str(settings.scratch)}
        if compile_threads is not None:
            variables[COMPILE_THREADS] = os.environ.get(COMPILE_THREADS, str(compile_threads))
            if job.arm.case.device != "cpu":
                variables[WAITING] = os.environ.get(WAITING, "passive")
        worker = Worker(variables, timeout=settings.timeout)
    except OSError as error:
        raise WorkerFailure("failed", f"its process cannot be started ({error.strerror}); end others first") from error
    worker.send("load", workload=settings.workload)
    return worker


def processes(jobs: Sequence[Job], settings: Settings) -> Iterator[tuple[Job, Worker]]:
    """A worker for each job, in order, ready to work; jobs of arms that failed meanwhile are left out.

    Several import, build their inputs and start the compiler at the same time, and nothing is handed out while one
    still does: an import beside a measurement would be measured with it.
    """
    for first in range(0, len(jobs), settings.ahead):
        batch: list[tuple[Job, Worker]] = []
        try:
            with settings.gpu_lock.shared():
                for job in jobs[first : first + settings.ahead]:
                    if job.arm.ok:
                        with failures_of(job.arm):
                            batch.append((job, spawn(job, settings)))
                in_parallel(lambda pair: make_ready(pair[0], pair[1], settings), batch, settings.ahead)
            with settings.gpu_lock.alone():
                for job, worker in batch:
                    if job.arm.ok and worker.alive:
                        yield job, worker
        finally:
            for job, worker in batch:
                if worker is not job.arm.worker:
                    worker.kill()


def in_parallel(work: Callable[[Any], None], items: Sequence[Any], threads: int) -> None:
    """Do the same with several items at once. On Ctrl-C the workers end, and with them whoever waits for one."""
    with ThreadPoolExecutor(threads) as pool:
        try:
            list(pool.map(work, items))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            kill_all()
            raise


def make_ready(job: Job, worker: Worker, settings: Settings) -> None:
    """Wait for the imports, build model and inputs, and start the compiler where the job is not about that."""
    arm = job.arm
    with failures_of(arm):
        worker.receive()
        ready = worker.ask("prepare", case=arm.case.to_json(), data_root=settings.data_root, seed=settings.seed)
        result = arm.result
        result.data, result.sizes, result.preparation = ready["data"], ready["sizes"], ready["preparation"]
        flops = result.work.flops if result.work is not None else None
        if job.phase != FIRST_RESULT:
            folder = str(arm.folder / "start-up") if arm.compiled else None
            flops = worker.ask("start_up", folder=folder)["flops"]
        result.work = Work(
            flops=flops,
            bytes=ready["bytes"],
            bytes_formula=ready["bytes_formula"],
            count=ready["count"],
            unit=ready["unit"],
        )
        result.memory = Memory(model=ready["model_bytes"])


class failures_of:
    """A context in which a worker's failure becomes the arm's status instead of an exception.

    Args:
        arm: Whose failure it is.
        phase: Which of its processes is at work, where that says more than the failure itself.
    """

    def __init__(self, arm: ArmRun, phase: str = "") -> None:
        self.arm = arm
        self.phase = phase

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        if isinstance(error, WorkerFailure):
            if error.status == "interrupted":
                return False  # Ctrl-C is told to another thread; what was measured before it stays
            reason = error.reason
            if self.phase == RACE and error.operation == "first_call" and self.arm.result.cold is not None:
                # The cold process compiled the very same: what is new are caches that are not empty.
                reason += "; the cold start worked, so an entry of the compiler's caches may be broken: measure again"
            self.arm.fail(error.status, reason)
            return True
        return False


def measure_compilation(
    arms: Sequence[ArmRun], settings: Settings, report: Reporter, cost: Callable[[Job], float]
) -> None:
    """Run the cold and the first-result process of every compiled arm."""
    for job, worker in processes(jobs_before_the_race(arms, settings), settings):
        arm = job.arm
        report.begin(f"{arm.case.arm}: {job.phase}", cost(job))
        with failures_of(arm):
            if job.phase == COLD:
                arm.result.cold = bring_up(arm, worker, settings)
            else:
                assert arm.result.cold is not None
                arm.result.cold.time_to_first_result = worker.ask("first_result")["seconds"]
        worker.stop()


def prepare_race(
    arms: Sequence[ArmRun], settings: Settings, report: Reporter, cost: Callable[[Job], float], reference: Path
) -> None:
    """Bring every arm to where it can race, its process alive."""
    jobs = [Job(arm, RACE) for arm in arms if arm.ok]
    if settings.steady_only:
        planned = sum(cost(_as_planned(job, settings)) for job in jobs) / settings.ahead
        report.begin(f"{len(jobs)} arms start together", planned)
        # All of them compile at the same time, each in as many processes as there are cores if it is not told.
        threads = max(1, cores() // max(1, min(len(jobs), settings.ahead)))
        with settings.gpu_lock.shared():
            in_parallel(lambda job: _start_alone(job, settings, reference, threads), jobs, settings.ahead)
        return
    for job, worker in processes(jobs, settings):
        report.begin(f"{job.arm.case.arm}: {job.phase}", cost(_as_planned(job, settings)))
        _start_racing(job.arm, worker, settings, reference)


def _start_alone(job: Job, settings: Settings, reference: Path, compile_threads: int) -> None:
    with failures_of(job.arm):
        worker = spawn(job, settings, compile_threads)
        make_ready(job, worker, settings)
        if job.arm.ok:
            _start_racing(job.arm, worker, settings, reference)


def _start_racing(arm: ArmRun, worker: Worker, settings: Settings, reference: Path) -> None:
    arm.worker = worker
    with failures_of(arm, RACE):
        figures = bring_up(arm, worker, settings)
        if settings.steady_only:
            # Arms that start together disturb each other: counts and reasons hold, seconds do not.
            figures = figures and Compile(
                graphs=figures.graphs,
                breaks=figures.breaks,
                recompiles=figures.recompiles,
                cache_hits=figures.cache_hits,
                cache_misses=figures.cache_misses,
                cache_bypasses=figures.cache_bypasses,
            )
        if settings.quick and not settings.steady_only and arm.result.cold is None and not arm.case.control:
            arm.result.cold = figures
        else:
            arm.result.warm = figures
        if not arm.compiled:
            arm.result.cold = figures  # an outer CUDA graph over eager code knows no cold and warm
        assert arm.result.memory is not None
        if not arm.case.cuda_graph:
            peaks = worker.ask("memory")
            arm.result.memory.allocated, arm.result.memory.reserved = peaks["allocated"], peaks["reserved"]
        # One after the other: the first makes the reference, in a precision that takes more memory than any arm.
        with _CHECKING:
            check = worker.ask("check", reference=str(reference))
        arm.result.check = Check(
            error=check["error"], eager_error=check["eager_error"], reference_dtype=check["reference_dtype"]
        )


def bring_up(arm: ArmRun, worker: Worker, settings: Settings) -> Compile | None:
    """Compile and capture in a process that is ready. What that took; None for a plain eager arm."""
    assert arm.result.memory is not None
    first = worker.ask("first_call")
    figures = None
    if arm.compiled:
        figures = Compile(
            start_up=settings.compiler_start_up,
            capture=first["recording"],
            cache_empty_at_start=first["files_at_start"] == 0,
            **{name: first[name] for name in COUNTED},
        )
    if arm.case.cuda_graph:
        captured = worker.ask("capture")
        figures = figures or Compile(seconds=0.0, graphs=0)
        figures.capture = captured["seconds"]
        figures.graphs = (figures.graphs or 0) + len(captured["recompiles"])
        figures.recompiles += [f"at capture: {reason}" for reason in captured["recompiles"]]
        # Replay hides allocations: the peak is the capture's, and its pool stays.
        arm.result.memory.allocated, arm.result.memory.reserved = captured["allocated"], captured["reserved"]
    return figures


def estimate(job: Job) -> float:
    """Seconds that a process is likely to take; only for the plan and the time left."""
    device = "cpu" if job.arm.case.device == "cpu" else "gpu"
    imports = 4.0
    if not job.arm.compiled:
        return imports + 2.0
    whole = 1.6 if job.arm.case.strategy in ("full", "hierarchical") else 1.0
    table = {"cpu": {COLD: 18.0, FIRST_RESULT: 12.0, RACE: 5.0}, "gpu": {COLD: 12.0, FIRST_RESULT: 10.0, RACE: 7.0}}
    return imports + whole * table[device][job.phase]


def _as_planned(job: Job, settings: Settings) -> Job:
    """A racing process as the plan counts it: where none came before it, it compiles as a cold one does."""
    cold = settings.steady_only or (settings.quick and not job.arm.case.control)  # the copy finds its twin's caches
    return Job(job.arm, COLD) if cold else job


def estimate_race(cases: Sequence[Case], settings: Settings) -> float:
    """Seconds that a whole race is likely to take."""
    arms = [ArmRun(case=case, folder=settings.scratch) for case in cases]
    before = sum(map(estimate, jobs_before_the_race(arms, settings)))
    starts = sum(estimate(_as_planned(Job(arm, RACE), settings)) for arm in arms)
    starts /= settings.ahead if settings.steady_only else 1
    return before + settings.sets * (starts + estimate_rounds(len(arms), settings))


def estimate_rounds(arms: int, settings: Settings) -> float:
    return 1.0 + 0.055 * arms * settings.rounds
