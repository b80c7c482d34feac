"""The race, its clocks and its progress: shuffled rounds, arms that drop out, rounds long enough, lines that fit."""

import io
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from benchmarks import timing
from benchmarks.cli import Progress, words
from benchmarks.harness import race
from benchmarks.machine import Monitor
from benchmarks.plan import Case
from benchmarks.process import WorkerFailure
from benchmarks.startup import ArmRun
from benchmarks.timing import back_to_back, calibrate, host, once, settle

TURNS: list[str] = []


class Runner:
    """Answers as a worker does; fails from a given round on."""

    def __init__(self, name: str, fails_at: int | None = None) -> None:
        self.name = name
        self.fails_at = fails_at
        self.rounds = 0
        self.killed = False

    def ask(self, operation: str, **payload: Any) -> dict[str, Any]:
        if operation == "calibrate":
            return {"calls": 7}
        assert operation == "round" and payload == {"calls": 7}
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


def go(
    arms: list[ArmRun], rounds: int = 20, seed: int = 0, first_round: int = 0, monitor: Monitor | None = None
) -> None:
    race(arms, rounds=rounds, first_round=first_round, seed=seed, monitor=monitor or Monitor())


def test_every_arm_works_once_a_round_in_an_order_that_changes_and_is_the_seeds():
    orders = []
    for seed in (1, 1, 2):
        go(start(Runner("a"), Runner("b"), Runner("c")), seed=seed)
        orders.append([tuple(TURNS[i : i + 3]) for i in range(0, len(TURNS), 3)])
    assert orders[0] == orders[1] != orders[2]
    assert all(sorted(turns) == ["a", "b", "c"] for turns in orders[0]) and len(set(orders[0])) > 2


def test_samples_carry_their_round_and_groups_do_not_mix():
    arms = start(Runner("a"), Runner("b"))
    go(arms, rounds=2)
    for arm in arms:
        arm.worker.rounds = 0
    go(arms, rounds=2, first_round=1000)
    for arm in arms:
        steady = arm.result.steady
        assert steady.rounds == [0, 1, 1000, 1001] and steady.calls_per_round == 7
        assert steady.wall_ms == [2.0] * 4 and steady.device_ms == [1.0] * 4 and steady.host_ms == [0.5] * 4


def test_an_arm_that_crashes_drops_out_and_the_others_go_on():
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


def test_a_calibrated_round_is_long_enough():
    step = Counted(0.001)
    calls = calibrate(step, "cpu", 20)
    step.calls = 0
    timed = back_to_back(step, "cpu", calls)
    assert timed.wall_ms * calls >= 19 and calls <= 30
    assert step.calls == timed.calls == calls and timed.device_ms is None
    assert host(step, "cpu") is None


def test_a_slow_step_is_called_once_a_round_and_settles_once():
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
    monkeypatch.setattr("benchmarks.cli.time.monotonic", lambda: 0.0)
    progress = Progress(Console(file=text, width=80), 100)
    progress.begin("zoo full: cold process", 40)
    progress.begin("a very long name of an arm that would not fit into one line of a small terminal", 60)
    progress.note("an arm failed")
    lines = text.getvalue().splitlines()
    assert lines[-1] == "  an arm failed" and lines[0].startswith("  [  0 %] zoo full: cold process, about 2 min left")
    assert lines[1].startswith("  [ 40 %]") and len(lines) == 3
    assert all(len(line) <= 80 for line in lines) and all(line.endswith("left") for line in lines[:2])
