"""Start-up: cold processes that are cold, warm ones that are warm, and failures that stay with their arm."""

from __future__ import annotations

import itertools
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import benchmarks.harness
import benchmarks.startup
from benchmarks.harness import run_race
from benchmarks.machine import Monitor
from benchmarks.plan import Case
from benchmarks.process import kill_all
from benchmarks.record import Compile, Result
from benchmarks.startup import (
    COLD,
    FIRST_RESULT,
    RACE,
    ArmRun,
    Job,
    Settings,
    estimate,
    estimate_race,
    estimate_rounds,
    jobs_before_the_race,
    measure_compilation,
    prepare_race,
    processes,
)

CASE = Case(family="fake", model="good", input="small", strategy="regional")


class Notes:
    """A reporter that remembers."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.notes: list[str] = []

    def begin(self, what: str, seconds: float) -> None:
        assert seconds > 0
        self.begun.append(what)

    def partway(self, share: float, seconds: float) -> None:
        assert 0 < share <= 1 and seconds > 0

    def note(self, text: str) -> None:
        self.notes.append(text)


class Told(Notes):
    """A reporter that adds up what it is told to expect."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []

    def begin(self, what: str, seconds: float) -> None:
        super().begin(what, seconds)
        self.seconds.append(seconds)


class NoWorker:
    """A process that is none."""

    def ask(self, operation: str) -> dict[str, float]:
        return {"seconds": 0.0}

    def stop(self) -> None:
        pass


@pytest.fixture(autouse=True)
def _no_worker_stays(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("BENCHMARKS_BACKEND", "eager")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    yield
    kill_all()


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(
        workload="tests.fake_workload", scratch=tmp_path, monitor=Monitor(), timeout=200.0, rounds=6, ahead=2
    )


def arms_of(settings: Settings, *cases: Case) -> list[ArmRun]:
    return [ArmRun(case=case, folder=settings.scratch / str(index)) for index, case in enumerate(cases)]


def test_compiled_arms_have_two_processes_before_the_race(settings: Settings):
    arms = arms_of(settings, replace(CASE, strategy="eager"), CASE, replace(CASE, control=True))
    assert jobs_before_the_race(arms, settings) == [Job(arms[1], COLD), Job(arms[1], FIRST_RESULT)]
    assert jobs_before_the_race(arms, replace(settings, first_result=False)) == [Job(arms[1], COLD)]
    for option in ("quick", "steady_only"):
        assert jobs_before_the_race(arms, replace(settings, **{option: True})) == []


def test_the_warm_process_uses_the_cold_ones_folder_and_the_first_result_another(settings: Settings):
    (arm,) = arms_of(settings, CASE)
    assert Job(arm, COLD).folder == Job(arm, RACE).folder != Job(arm, FIRST_RESULT).folder


def test_estimates_grow_with_what_is_asked_for(settings: Settings):
    cases = [replace(CASE, strategy="eager"), CASE]
    whole = estimate_race(cases, settings)
    assert estimate_race(cases, replace(settings, quick=True)) < whole
    assert estimate_race(cases, replace(settings, sets=3)) > whole
    assert estimate(Job(ArmRun(case=cases[0], folder=settings.scratch), RACE)) > 0


@pytest.mark.parametrize("options", [{"quick": True}, {"steady_only": True}, {}], ids=["quick", "steady-only", "plain"])
def test_what_is_told_to_take_how_long_adds_up_to_the_plan(
    settings: Settings, options: dict[str, bool], monkeypatch: pytest.MonkeyPatch
):
    """Where no process comes before the race's own, those compile from nothing, and are told to take as long."""
    monkeypatch.setattr("benchmarks.startup._start_racing", lambda *_: None)
    monkeypatch.setattr("benchmarks.startup._start_together", lambda *_: None)
    monkeypatch.setattr("benchmarks.startup.processes", lambda jobs, _: ((job, NoWorker()) for job in jobs))
    monkeypatch.setattr("benchmarks.startup.bring_up", lambda *_: Compile())
    settings = replace(settings, **options)
    cases = [replace(CASE, strategy="eager"), CASE, replace(CASE, control=True)]
    arms, told = arms_of(settings, *cases), Told()
    measure_compilation(arms, settings, told)
    prepare_race(arms, settings, told, settings.scratch / "reference.pt")
    assert sum(told.seconds) + estimate_rounds(len(arms), settings) == pytest.approx(estimate_race(cases, settings))


@pytest.mark.slow
def test_cold_is_empty_and_warm_is_hit(settings: Settings, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("BENCHMARKS_BACKEND", "inductor")
    settings = replace(settings, compiler_start_up=1.5)
    (arm,) = arms_of(settings, CASE)
    notes = Notes()
    measure_compilation([arm], settings, notes)
    assert arm.ok, arm.result.reason
    cold = arm.result.cold
    assert cold is not None
    assert cold.cache_empty_at_start is True
    assert cold.cache_misses == cold.graphs == 1
    assert cold.seconds is not None and cold.seconds > 0
    assert cold.start_up == 1.5, "the run's own figure"
    assert cold.time_to_first_result is not None
    # Without a start-up before it, the first call pays for the compiler's own; with it, for the case alone.
    assert cold.time_to_first_result > cold.seconds
    assert 0 < sum(cold.phases.values()) <= cold.seconds * 1.2
    prepare_race([arm], settings, notes, settings.scratch / "reference.pt")
    assert arm.ok, arm.result.reason
    warm = arm.result.warm
    assert warm is not None
    assert warm.cache_empty_at_start is False
    assert (warm.cache_hits, warm.cache_misses) == (1, 0)
    assert warm.time_to_first_result is None
    assert arm.worker is not None and arm.worker.alive
    assert arm.result.check is not None and arm.result.check.error is not None and arm.result.check.error < 1e-6
    assert [line.partition(": ")[2] for line in notes.begun] == [COLD, FIRST_RESULT, RACE]


def run(settings: Settings, *cases: Case) -> tuple[dict[str, Result], Notes]:
    rows: dict[str, Result] = {}
    notes = Notes()
    run_race(
        cases,
        settings,
        notes,
        lambda result: rows.update({result.case.arm: result}),
        memory_bytes=lambda case: 1 << 60 if case.model == "huge" else 1,
        peaks={"copy_bandwidth": 2.0, "read_bandwidth": 3.0, "matmul_flops": {"float32": 5.0}},
    )
    return rows, notes


@pytest.mark.slow
@pytest.mark.parametrize(("rounds", "status"), [(6, "ok"), (3, "interrupted")])
def test_an_arm_that_was_through_its_rounds_outlives_an_interruption(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, rounds: int, status: str
):
    real, case = benchmarks.harness.race, replace(CASE, strategy="eager")
    monkeypatch.setattr(benchmarks.harness, "race", lambda arms, **given: real(arms, **given | {"rounds": rounds}))
    monkeypatch.setattr(ArmRun, "ask", lambda arm, operation, **given: _ask(arm, operation, given))
    rows: dict[str, Result] = {}
    with pytest.raises(KeyboardInterrupt):
        run_race(
            [case],
            replace(settings, quick=True, rounds=6),
            Notes(),
            lambda result: rows.update({result.case.arm: result}),
            memory_bytes=lambda case: 1,
            peaks={"copy_bandwidth": 2.0, "read_bandwidth": 3.0, "matmul_flops": {"float32": 5.0}},
        )
    row = rows[case.arm]
    assert row.status == status and (row.steady is not None) == (status == "ok")


@pytest.mark.slow
def test_a_curve_is_drawn_once_and_of_no_copy(settings: Settings, monkeypatch: pytest.MonkeyPatch):
    drawn: list[str] = []
    real = benchmarks.harness._draw

    def draw(arm: ArmRun, steps: int) -> None:
        drawn.append(arm.case.arm)
        real(arm, steps)

    monkeypatch.setattr(benchmarks.harness, "_draw", draw)
    monkeypatch.setattr("benchmarks.harness.free_memory", lambda device, monitor: 3)  # two arms of 1, no third
    one = replace(CASE, strategy="eager", workload="train")
    cases = [one, replace(one, impl="upstream"), replace(one, control=True)]
    rows, _ = run(replace(settings, quick=True, rounds=6, curve=3), *cases)
    assert {row.status for row in rows.values()} == {"ok"}, rows
    assert sorted(drawn) == ["upstream eager", "zoo eager"]
    assert [len(rows[arm].curve or []) for arm in ("zoo eager", "upstream eager", "zoo eager (A/A)")] == [3, 3, 0]


@pytest.mark.slow
def test_a_curve_that_is_stopped_while_it_is_drawn_loses_no_row(settings: Settings, monkeypatch: pytest.MonkeyPatch):
    drawing = threading.Event()
    real = benchmarks.harness._draw
    monkeypatch.setattr(benchmarks.harness, "_draw", lambda arm, steps: (drawing.set(), real(arm, steps)))

    def press_ctrl_c() -> None:
        drawing.wait()
        time.sleep(0.5)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    # Whoever was started in the background ignores it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Thread(target=press_ctrl_c, daemon=True).start()
    case = replace(CASE, strategy="eager", workload="train")
    rows: dict[str, Result] = {}
    with pytest.raises(KeyboardInterrupt):
        run_race(
            [case],
            replace(settings, quick=True, rounds=6, curve=10**7),  # longer than anybody waits
            Notes(),
            lambda result: rows.update({result.case.arm: result}),
            memory_bytes=lambda case: 1,
            peaks={},
        )
    signal.signal(signal.SIGINT, before)
    row = rows[case.arm]
    assert row.status == "ok" and row.steady is not None and len(row.steady.rounds) == 6
    assert not row.curve


def _ask(arm: ArmRun, operation: str, given: dict[str, object]) -> dict[str, object]:
    if operation == "kernels":
        raise KeyboardInterrupt
    assert arm.worker is not None
    return arm.worker.ask(operation, **given)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "status", "word"),
    [
        ("raise", "failed", "ValueError: this model does not like its input"),
        ("oom", "out-of-memory", "tried to allocate 7.00 GiB"),
    ],
)
def test_a_failure_is_a_row_with_its_reason(settings: Settings, model: str, status: str, word: str):
    rows, notes = run(replace(settings, quick=True), replace(CASE, model=model, strategy="eager"))
    (row,) = rows.values()
    assert row.status == status
    assert word in (row.reason or "")
    assert row.steady is None
    assert any(status in note for note in notes.notes)


def test_what_cannot_fit_says_what_it_needs_and_starts_no_process(settings: Settings, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("benchmarks.startup.Worker", None)
    monkeypatch.setattr("benchmarks.harness.free_memory", lambda device, monitor: 1 << 30)
    rows, _ = run(settings, replace(CASE, model="huge"))
    (row,) = rows.values()
    assert row.status == "does-not-fit"
    assert "needs about 1073741824.0 GiB of memory, 1.0 GiB are free" in (row.reason or "")


def test_arms_that_do_not_fit_together_race_in_pairs_with_the_reference(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
):
    from benchmarks.harness import _groups

    monkeypatch.setattr("benchmarks.harness.free_memory", lambda device, monitor: 100)
    cases = [replace(CASE, impl=impl, strategy=s) for impl in ("zoo", "upstream") for s in ("eager", "regional")]
    arms = arms_of(settings, *cases)
    groups = _groups(arms, settings, lambda case: 40, lambda case: 40)
    assert [[arm.case.arm for arm in group] for group in groups] == [
        ["zoo regional", "zoo eager"],
        ["zoo regional", "upstream eager"],
        ["zoo regional", "upstream regional"],
    ]
    assert _groups(arms, settings, lambda case: 10, lambda case: 10) == [arms]


def test_one_reference_at_a_time_is_all_that_memory_must_hold(settings: Settings, monkeypatch: pytest.MonkeyPatch):
    from benchmarks.harness import _groups

    monkeypatch.setattr("benchmarks.harness.free_memory", lambda device, monitor: 100)
    cases = [replace(CASE, impl=impl, strategy=s) for impl in ("zoo", "upstream") for s in ("eager", "regional")]
    arms = arms_of(settings, *cases)
    assert _groups(arms, settings, lambda case: 60, lambda case: 10) == [arms]  # 4 * 10 and 50 more
    assert len(_groups(arms, settings, lambda case: 61, lambda case: 10)) == 2  # 91 is more than its share
    # The first computes it, and the others have it: 45 + 45 fits, 45 + 45 and 45 more does not.
    assert [len(group) for group in _groups(arms, settings, lambda case: 90, lambda case: 45)] == [1, 2, 2, 2]


def test_an_arm_that_does_not_fit_beside_the_reference_arm_races_alone(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
):
    from benchmarks.harness import _groups

    def needs(case: Case) -> int:
        return 80 if case.impl == "upstream" else 20

    monkeypatch.setattr("benchmarks.harness.free_memory", lambda device, monitor: 100)
    cases = [replace(CASE, impl=impl, strategy=s) for impl in ("zoo", "upstream") for s in ("eager", "regional")]
    groups = _groups(arms_of(settings, *cases), settings, needs, needs)
    assert [[arm.case.arm for arm in group] for group in groups] == [
        ["zoo regional", "zoo eager"],
        ["upstream eager"],
        ["upstream regional"],
    ]
    cases.insert(1, replace(cases[1], control=True))
    cases.sort(key=lambda case: case.control)  # last of all, and beside its twin all the same
    groups = _groups(arms_of(settings, *cases), settings, needs, needs)
    assert [arm.case.arm for arm in groups[0]] == ["zoo regional", "zoo eager", "zoo regional (A/A)"]


@pytest.mark.slow
def test_nobody_works_while_another_does_or_imports(settings: Settings):
    """The token: no two intervals of work overlap, and none overlaps an arm's getting ready."""
    logs: list[list[dict[str, float]]] = []

    class Logged(ArmRun):
        def __setattr__(self, name: str, value: object) -> None:
            if name == "worker" and value is not None:
                logs.append(value.log)  # type: ignore[attr-defined]
            super().__setattr__(name, value)

    cases = [replace(CASE, strategy="eager"), CASE, replace(CASE, control=True)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("benchmarks.harness.ArmRun", Logged)
        rows, _ = run(replace(settings, quick=True), *cases)
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
    assert regional.cold is not None and regional.cold.graphs == 1
    assert eager.cold is None
    assert control.steady is not None and control.steady.rounds == list(range(settings.rounds))
    assert regional.work is not None
    assert (regional.work.peak_bandwidth, regional.work.peak_flops) == (3.0, 5.0)


def test_processes_of_failed_arms_are_not_started(settings: Settings):
    (arm,) = arms_of(settings, CASE)
    arm.fail("failed", "earlier")
    assert list(processes([Job(arm, COLD)], settings)) == []


@pytest.mark.parametrize(("device", "waiting"), [("cuda", "passive"), ("cpu", None)])
def test_threads_of_arms_that_start_together_do_not_spin_unless_the_cpu_is_measured(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, device: str, waiting: str | None
):
    given: list[str | None] = []

    def note(variables: dict[str, str], timeout: float) -> None:
        given.append(variables.get("OMP_WAIT_POLICY"))
        raise OSError(24, "not in this test")

    monkeypatch.setattr(benchmarks.startup, "Worker", note)
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    case = replace(CASE, device=device)
    for steady_only in (True, False):
        arms = arms_of(settings, case)
        prepare_race(arms, replace(settings, steady_only=steady_only), Notes(), settings.scratch)
    assert given == [waiting, None]


@pytest.mark.parametrize(("cores", "threads"), [(16, "8"), (1, "1")])
def test_arms_that_start_together_share_the_cores(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, cores: int, threads: str
):
    given: list[str | None] = []

    def note(variables: dict[str, str], timeout: float) -> None:
        given.append(variables.get("TORCHINDUCTOR_COMPILE_THREADS"))
        raise OSError(24, "not in this test")

    monkeypatch.setattr(benchmarks.startup, "Worker", note)
    monkeypatch.setattr(benchmarks.startup, "cores", lambda: cores)
    monkeypatch.delenv("TORCHINDUCTOR_COMPILE_THREADS")
    for steady_only in (True, False):
        arms = arms_of(settings, CASE, replace(CASE, strategy="full"))
        prepare_race(arms, replace(settings, steady_only=steady_only), Notes(), settings.scratch)
    # What is timed is timed as it runs elsewhere.
    assert given == [threads, threads, None, None]


@pytest.mark.slow
def test_steady_only_reports_counts_and_no_seconds(settings: Settings):
    cases = [replace(CASE, strategy="full"), CASE]
    rows, notes = run(replace(settings, steady_only=True, sets=2), *cases)
    for row in rows.values():
        assert row.status == "ok", row.reason
        assert row.cold is None
        assert row.warm is not None
        assert row.warm.graphs == 1
        assert row.warm.seconds is None and row.warm.start_up is None
        assert row.steady is not None
        assert row.steady.rounds == [*range(6), *range(1000, 1006)]
    assert "2 arms start together" in notes.begun
