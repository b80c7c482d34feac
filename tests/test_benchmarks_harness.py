"""The race, its clocks and progress; starts that are cold and warm; arms that fail stay alone."""

import io
import itertools
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import benchmarks.harness
import benchmarks.startup
from benchmarks import timing
from benchmarks.cli import Progress, words
from benchmarks.harness import _groups, race
from benchmarks.machine import Monitor
from benchmarks.plan import Case
from benchmarks.process import WorkerFailure
from benchmarks.record import Result
from benchmarks.startup import COLD, FIRST_RESULT, RACE, ArmRun, Job, Settings, jobs_before_the_race, prepare_race
from benchmarks.timing import back_to_back, calibrate, host, once, settle
from tests.runs import CASE, EAGER, Notes, arms_of, rows_of, settings_in

TURNS: list[str] = []


class Runner:
    def __init__(self, name: str, fails_at: int | None = None) -> None:
        self.name = name
        self.fails_at = fails_at
        self.rounds = 0
        self.cores: list[int | None] = []
        self.killed = False

    def ask(self, operation: str, **payload: Any) -> dict[str, Any]:
        if operation == "calibrate":
            return {"calls": 7}
        assert operation == "round" and payload["calls"] == 7
        self.cores.append(payload["core"])
        if self.rounds == self.fails_at:
            raise WorkerFailure("crashed", "killed by SIGSEGV during round")
        self.rounds += 1
        TURNS.append(self.name)
        return {"calls": 7, "wall_ms": 2.0, "device_ms": 1.0, "host_ms": 0.5}

    def kill(self) -> None:
        self.killed = True


def start(*runners: Runner, device: str = "cpu") -> list[ArmRun]:
    TURNS.clear()
    arms = []
    for runner in runners:
        arm = ArmRun(case=Case(family="f", model=runner.name, input="i", device=device), folder=Path())
        arm.worker = runner
        arms.append(arm)
    return arms


def go(arms: list[ArmRun], **options: Any) -> None:
    race(arms, **{"rounds": 20, "first_round": 0, "seed": 0, "monitor": Monitor(), **options})


def test_with_a_gpu_the_turns_of_a_round_run_on_one_core_drawn_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 2, 3})
    a, b = Runner("a"), Runner("b")
    go(start(a, b, device="cuda"))
    assert a.cores == b.cores and set(a.cores) == {1, 2, 3}
    go(start(c := Runner("c")))
    assert set(c.cores) == {None}  # on a CPU the work itself is on all of them


def test_every_arm_works_once_a_round_in_an_order_that_changes_and_is_the_seeds():
    orders = []
    for seed in (1, 1, 2):
        go(start(Runner("a"), Runner("b"), Runner("c")), seed=seed)
        orders.append([tuple(TURNS[i : i + 3]) for i in range(0, len(TURNS), 3)])
    assert orders[0] == orders[1] != orders[2]
    assert all(sorted(turns) == ["a", "b", "c"] for turns in orders[0]) and len(set(orders[0])) > 2


def test_samples_carry_their_round_and_an_arm_that_crashes_drops_out() -> None:
    arms = start(Runner("a"), Runner("b"))
    go(arms, rounds=2)
    for arm in arms:
        arm.worker.rounds = 0
    go(arms, rounds=2, first_round=1000)
    for arm in arms:
        steady = arm.result.steady
        assert steady.rounds == [0, 1, 1000, 1001] and steady.calls_per_round == 7
        assert steady.wall_ms == [2.0] * 4 and steady.device_ms == [1.0] * 4 and steady.host_ms == [0.5] * 4
    broken = Runner("b", fails_at=3)
    arms = start(Runner("a"), broken)
    go(arms, rounds=6)
    assert len(arms[0].result.steady.wall_ms) == 6
    gone = arms[1].result
    assert gone.status == "crashed" and "SIGSEGV" in (gone.reason or "") and gone.steady is None and broken.killed


def test_clock_and_power_are_sampled_each_round_on_a_gpu_only():
    class Steadfast(Monitor):
        def sm_clock(self) -> float:
            return 1980.0

        def power(self) -> float:
            return 650.0

    for device, samples in (("cuda", 3), ("cpu", 0)):
        arms = start(Runner("a"), device=device)
        go(arms, rounds=3, monitor=Steadfast())
        steady = arms[0].result.steady
        assert steady.sm_clock_mhz == [1980.0] * samples
        assert steady.power_w == [650.0] * samples


class Counted:
    def __init__(self, seconds: float) -> None:
        self.calls = 0
        self.seconds = seconds

    def __call__(self) -> None:
        self.calls += 1
        time.sleep(self.seconds)


def test_a_calibrated_round_is_long_enough_and_of_a_slow_step_one_call() -> None:
    step = Counted(0.001)
    calls = calibrate(step, "cpu", 20)
    step.calls = 0
    timed = back_to_back(step, "cpu", calls)
    assert timed.wall_ms * calls >= 19 and calls <= 30
    assert step.calls == timed.calls == calls and timed.device_ms is None
    assert host(step, "cpu") is None
    step = Counted(0.12)
    assert calibrate(step, "cpu", 5) == 1
    assert step.calls == 2, "one to settle, one to time"
    assert len(settle(step, "cpu", 0.0)) == 1 and step.calls == 3
    assert once(step, "cpu") >= 0.12 and step.calls == 4


class Queued(Counted):
    """A step that takes the host 2 ms and leaves 10 ms of work to a device."""

    def __init__(self) -> None:
        super().__init__(0.002)
        self.waiting = 0

    def __call__(self) -> None:
        assert not self.waiting, "the queue is empty before each call"
        super().__call__()
        self.waiting += 1

    def synchronise(self, device: str) -> None:
        time.sleep(0.01 * self.waiting)
        self.waiting = 0


def test_the_hosts_time_ends_when_the_call_returns(monkeypatch: pytest.MonkeyPatch):
    step = Queued()
    monkeypatch.setattr(timing, "synchronise", step.synchronise)
    taken = host(step, "cuda")
    assert taken is not None and 2 <= taken < 8
    assert not step.waiting


@pytest.mark.gpu
def test_the_host_does_not_wait_for_the_device():
    x = torch.randn(8192, 8192, device="cuda")
    taken, whole = host(lambda: x @ x, "cuda"), back_to_back(lambda: x @ x, "cuda", 5).device_ms
    assert taken is not None and whole is not None and 0 < taken < whole / 2


def test_lines_say_what_runs_how_far_and_how_long(monkeypatch: pytest.MonkeyPatch):
    assert [words(seconds) for seconds in (0, 7, 43, 89, 150)] == ["1 s", "7 s", "45 s", "90 s", "2 min"]
    text = io.StringIO()
    clock = iter((0.0, 0.0, 40.0, 40.0))
    monkeypatch.setattr("benchmarks.cli.time.monotonic", lambda: next(clock))
    progress = Progress(Console(file=text, width=80), [("cold", 40.0), ("rounds", 60.0)])
    progress.begin("zoo full: cold process", "cold", 40.0)
    progress.begin("a very long name of an arm that would not fit into one line of a small terminal", "rounds", 60.0)
    progress.note("an arm failed")
    progress.begin("its calls are long", "counts", 0.0, more=240.0)
    *lines, last = text.getvalue().splitlines()
    assert last.endswith("about 4 min left")
    assert lines[-1] == "  an arm failed" and lines[0].startswith("  [  0 %] zoo full: cold process, about 2 min left")
    assert lines[1].startswith("  [ 40 %]") and len(lines) == 3
    assert all(len(line) <= 80 for line in lines) and all(line.endswith("left") for line in lines[:2])


def test_the_time_left_is_told_by_what_items_of_the_same_kind_took(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("benchmarks.cli.time.monotonic", lambda: now[0])
    plan = [("imports", 10.0), ("imports", 10.0), ("cold", 50.0), ("cold", 50.0), ("rounds", 60.0)]
    progress = Progress(Console(file=io.StringIO(), width=80), plan)
    # Imports take three times as long as planned, and compilations a fifth.
    for (kind, seconds), took, left in zip(plan, (30, 30, 10, 10, 60), (180, 190, 160, 70, 60), strict=True):
        progress.begin("an arm", kind, seconds)
        assert progress.ahead == pytest.approx(left, rel=0.1)
        now[0] += took


pytestmark = pytest.mark.usefixtures("no_worker_stays")


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return settings_in(tmp_path)


def test_compiled_arms_have_two_processes_before_the_race(settings: Settings):
    arms = arms_of(settings, EAGER, CASE, replace(CASE, control=True))
    assert jobs_before_the_race(arms, settings) == [Job(arms[1], COLD), Job(arms[1], FIRST_RESULT)]
    for option in ("quick", "steady_only"):
        assert jobs_before_the_race(arms, replace(settings, **{option: True})) == []


@pytest.mark.slow
def test_cold_is_empty_and_warm_is_hit(settings: Settings, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("BENCHMARKS_BACKEND", "inductor")
    settings = replace(settings, compiler_start_up=1.5)
    (arm,) = arms_of(settings, CASE)
    notes = Notes()
    benchmarks.startup.measure_compilation([arm], settings, notes)
    assert arm.ok, arm.result.reason
    cold = arm.result.cold
    assert cold.cache_empty_at_start is True and cold.cache_misses == cold.graphs == 1
    assert cold.seconds > 0 and cold.start_up == 1.5, "the run's own figure"
    # Without a start-up before it, the first call pays for the compiler's own; with it, for the case alone.
    assert cold.time_to_first_result > cold.seconds
    assert 0 < sum(cold.phases.values()) <= cold.seconds * 1.2
    prepare_race([arm], settings, notes, settings.scratch / "reference.pt")
    assert arm.ok, arm.result.reason
    warm = arm.result.warm
    assert (warm.cache_empty_at_start, warm.cache_hits, warm.cache_misses) == (False, 1, 0)
    assert warm.time_to_first_result is None and arm.worker.alive and arm.result.check.error < 1e-6
    starts = [line.partition(": ")[2] for line in notes.begun if not line.startswith("imports: ")]
    assert starts == [COLD, FIRST_RESULT, RACE]


@pytest.mark.slow
@pytest.mark.parametrize(("rounds", "status"), [(5, "ok"), (3, "interrupted")])
def test_an_arm_that_was_through_enough_rounds_outlives_an_interruption(settings, monkeypatch, rounds, status):
    real, case = benchmarks.harness.race, EAGER

    def ask(arm: ArmRun, operation: str, **given: object) -> dict[str, object]:
        if operation == "kernels":
            raise KeyboardInterrupt
        return arm.worker.ask(operation, **given)

    monkeypatch.setattr(benchmarks.harness, "race", lambda arms, **given: real(arms, **given | {"rounds": rounds}))
    monkeypatch.setattr(ArmRun, "ask", ask)
    rows: dict[str, Result] = {}
    with pytest.raises(KeyboardInterrupt):
        rows_of(replace(settings, quick=True), case, rows=rows)
    row = rows[case.arm]
    assert row.status == status and (row.steady is not None) == (status == "ok")


def test_what_cannot_fit_says_what_it_needs_and_starts_no_process(settings: Settings, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("benchmarks.startup.Worker", None)
    monkeypatch.setattr("benchmarks.harness.free_memory", lambda device, monitor: 1 << 30)
    rows = rows_of(settings, replace(CASE, model="huge"), memory_bytes=lambda case, reference: 1 << 60)
    (row,) = rows.values()
    assert row.status == "does-not-fit"
    assert "needs about 1073741824.0 GiB of memory, 1.0 GiB are free" in (row.reason or "")


ZOO, EAGER_ZOO, THEIRS, EAGER_THEIRS = "zoo regional", "zoo eager", "upstream regional", "upstream eager"


@pytest.mark.parametrize(
    ("with_reference", "zoo", "upstream", "expected"),
    [
        (10, 10, 10, [[EAGER_ZOO, ZOO, EAGER_THEIRS, THEIRS]]),
        (40, 40, 40, [[ZOO, EAGER_ZOO], [ZOO, EAGER_THEIRS], [ZOO, THEIRS]]),
        # Memory holds one reference at a time: 4 * 10 and 50 more, and no 51 more.
        (60, 10, 10, [[EAGER_ZOO, ZOO, EAGER_THEIRS, THEIRS]]),
        (61, 10, 10, [[ZOO, EAGER_ZOO, EAGER_THEIRS], [ZOO, THEIRS]]),
        # The first computes it, and the others have it: 45 + 45 fits, 45 + 45 and 45 more does not.
        (90, 45, 45, [[ZOO], [ZOO, EAGER_ZOO], [ZOO, EAGER_THEIRS], [ZOO, THEIRS]]),
        # What does not fit beside the arm that all are compared with races alone.
        (0, 20, 80, [[ZOO, EAGER_ZOO], [EAGER_THEIRS], [THEIRS]]),
    ],
)
def test_arms_that_do_not_fit_together_race_in_groups(settings, monkeypatch, with_reference, zoo, upstream, expected):
    def needs(case: Case, reference: bool) -> int:
        return (reference and with_reference) or (zoo if case.impl == "zoo" else upstream)

    monkeypatch.setattr("benchmarks.harness.free_memory", lambda device, monitor: 100)
    cases = [replace(CASE, impl=impl, strategy=s) for impl in ("zoo", "upstream") for s in ("eager", "regional")]
    groups = _groups(arms_of(settings, *cases), settings, needs)
    assert [[arm.case.arm for arm in group] for group in groups] == expected
    # A control races beside its twin, whatever else fits.
    twins = [*cases[:2], cases[3], replace(CASE, control=True)]
    twins_need = lambda case, reference: 80 if case.impl == "upstream" else 20  # noqa: E731
    first = _groups(arms_of(settings, *twins), settings, twins_need)[0]
    assert [arm.case.arm for arm in first] == [ZOO, EAGER_ZOO, f"{ZOO} (A/A)"]


@pytest.mark.slow
def test_nobody_works_while_another_does_or_imports(settings: Settings):
    """The token: no two intervals of work overlap, and none overlaps an arm's getting ready."""
    logs: list[list[dict[str, float]]] = []

    class Logged(ArmRun):
        def __setattr__(self, name: str, value: object) -> None:
            if name == "worker" and value is not None:
                logs.append(value.log)
            super().__setattr__(name, value)

    cases = [EAGER, CASE, replace(CASE, control=True)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("benchmarks.harness.ArmRun", Logged)
        rows = rows_of(replace(settings, quick=True), *cases)
    assert {row.status for row in rows.values()} == {"ok"}, rows
    assert len(logs) == 3
    spans = sorted((entry["began"], entry["ended"], entry["op"]) for log in logs for entry in log)
    readying = ("load", "prepare", "start_up")
    imports = [span for span in spans if span[2] in readying]
    work = [span for span in spans if span[2] not in readying]
    assert sum(op == "round" for *_, op in work) == 3 * settings.rounds
    for (_, ended, first), (began, _, second) in itertools.pairwise(work):
        assert began >= ended, f"{second} began before {first} had ended"
    for began, ended, _ in imports:
        assert not any(began < stop and start < ended for start, stop, _ in work)
    eager, regional, control = (rows[case.arm] for case in cases)
    assert regional.cold.graphs == 1
    assert eager.cold is None
    assert control.steady.rounds == list(range(settings.rounds))
    assert (regional.work.peak_bandwidth, regional.work.peak_flops) == (3.0, 5.0)


@pytest.mark.parametrize(
    ("variable", "device", "cores", "expected"),
    [
        ("OMP_WAIT_POLICY", "cuda", 16, "passive"),  # threads of arms that start together do not spin,
        ("OMP_WAIT_POLICY", "cpu", 16, None),  # unless the CPU is what is measured
        ("TORCHINDUCTOR_COMPILE_THREADS", "cpu", 16, "8"),
        ("TORCHINDUCTOR_COMPILE_THREADS", "cpu", 1, "1"),
    ],
)
def test_arms_that_start_together_share_the_machine_and_timed_ones_run_as_elsewhere(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, variable: str, device: str, cores: int, expected: str | None
):
    given: list[str | None] = []

    def note(variables: dict[str, str], timeout: float) -> None:
        given.append(variables.get(variable))
        raise OSError(24, "not in this test")

    monkeypatch.setattr(benchmarks.startup, "Worker", note)
    monkeypatch.setattr(benchmarks.startup, "cores", lambda: cores)
    monkeypatch.delenv(variable, raising=False)
    case = replace(CASE, device=device)
    for steady_only in (True, False):
        arms = arms_of(settings, case, replace(case, strategy="full"))
        prepare_race(arms, replace(settings, steady_only=steady_only), Notes(), settings.scratch)
        for arm in arms:
            assert arm.result.status == "failed" and "its process cannot be started" in (arm.result.reason or "")
    assert given == [expected, expected, None, None]
