"""The race: arms alive side by side, one of them working at a time, in shuffled rounds."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from benchmarks.machine import Monitor
from benchmarks.record import Steady
from benchmarks.startup import ArmRun, failures_of
from benchmarks.timing import ROUND_MS


def race(
    arms: Sequence[ArmRun],
    *,
    rounds: int,
    first_round: int,
    seed: int,
    monitor: Monitor,
    milliseconds: float = ROUND_MS,
    on_round: Callable[[int], None] = lambda number: None,
) -> None:
    """Pass the token round: in every round each arm works once, in an order drawn for that round.

    Before the rounds each arm measures once how many calls fill a turn and how long a call keeps the host busy. An arm
    that fails drops out with its reason; the others go on. Samples are appended to what the arm has already,
    under round numbers from ``first_round`` on, so that sets of processes do not mix.

    Args:
        arms: Arms whose processes are ready.
        rounds: How many rounds.
        first_round: Number of the first of them.
        seed: Of the drawn orders.
        monitor: Clock and power of the GPU.
        milliseconds: The least length of an arm's turn.
        on_round: Called with the number of rounds done.
    """
    draw = random.Random(seed)
    for arm in arms:
        with failures_of(arm):
            if arm.ok:
                arm.calls = arm.ask("calibrate", milliseconds=milliseconds)["calls"]
                steady = arm.result.steady = arm.result.steady or Steady()
                steady.host_ms = arm.ask("host")["host_ms"]
    for number in range(rounds):
        order = [arm for arm in arms if arm.ok]
        draw.shuffle(order)
        for arm in order:
            with failures_of(arm):
                _turn(arm, first_round + number, monitor)
        on_round(number + 1)


def _turn(arm: ArmRun, number: int, monitor: Monitor) -> None:
    timed = arm.ask("round", calls=arm.calls)
    # Read right after the work and outside of it: the query itself would disturb the clocks.
    clock, power = (monitor.sm_clock(), monitor.power()) if arm.case.device != "cpu" else (None, None)
    steady = arm.result.steady
    assert steady is not None
    steady.calls_per_round = arm.calls
    steady.rounds.append(number)
    steady.wall_ms.append(timed["wall_ms"])
    if timed["device_ms"] is not None:
        steady.device_ms.append(timed["device_ms"])
    if clock is not None:
        steady.sm_clock_mhz.append(clock)
    if power is not None:
        steady.power_w.append(power)
