"""The race: shuffled rounds, samples that can be paired, arms that drop out. Workers are stand-ins here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.harness import race
from benchmarks.machine import Monitor
from benchmarks.plan import Case
from benchmarks.process import WorkerFailure
from benchmarks.startup import ArmRun

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
        if operation == "host":
            assert self.rounds == 0, "before the rounds"
            return {"host_ms": 0.5}
        assert operation == "round" and payload == {"calls": 7}
        if self.rounds == self.fails_at:
            raise WorkerFailure("crashed", "killed by SIGSEGV during round")
        self.rounds += 1
        TURNS.append(self.name)
        return {"calls": 7, "wall_ms": 2.0, "device_ms": 1.0}

    def kill(self) -> None:
        self.killed = True


def start(*runners: Runner, device: str = "cpu") -> list[ArmRun]:
    TURNS.clear()
    arms = []
    for runner in runners:
        arm = ArmRun(case=Case(family="f", model=runner.name, input="i", device=device), folder=Path())
        arm.worker = runner  # type: ignore[assignment]
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
        arm.worker.rounds = 0  # type: ignore[union-attr]
    go(arms, rounds=2, first_round=1000)
    for arm in arms:
        steady = arm.result.steady
        assert steady.rounds == [0, 1, 1000, 1001]
        assert steady.wall_ms == [2.0] * 4
        assert steady.device_ms == [1.0] * 4
        assert steady.calls_per_round == 7
        assert steady.host_ms == 0.5


def test_an_arm_that_crashes_drops_out_and_the_others_go_on():
    broken = Runner("b", fails_at=3)
    arms = start(Runner("a"), broken)
    seen: list[int] = []
    race(arms, rounds=6, first_round=0, seed=0, monitor=Monitor(), on_round=seen.append)
    assert len(arms[0].result.steady.wall_ms) == 6
    assert arms[1].result.status == "crashed"
    assert "SIGSEGV" in (arms[1].result.reason or "")
    assert arms[1].result.steady is None
    assert broken.killed
    assert seen == [1, 2, 3, 4, 5, 6]


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
