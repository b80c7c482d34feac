"""Clocks: device events on a GPU, the wall clock everywhere; and how many calls make a round."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

ROUND_MS = 20.0  # a round is at least this long, so that the clocks' own grain and one stray interrupt do not matter
_NO_STALL = 20  # rounds: what takes longer than so many is a long step, not one that was held up
# Unmeasured calls before a round, as long as the round: another process had the device, the caches and the clocks.
SETTLE_MS = ROUND_MS
HOST_CALLS, HOST_MS = 30, 300.0  # at most so many calls, and no new one after so long, measure the host's time

Step = Callable[[], Any]


@dataclass(frozen=True)
class Timed:
    """Milliseconds a call, over back-to-back calls. ``device_ms`` is None without a GPU."""

    calls: int
    wall_ms: float
    device_ms: float | None


def synchronise(device: str) -> None:
    """Wait for the device; nothing on a CPU."""
    if device != "cpu":
        torch.cuda.synchronize()


def once(step: Step, device: str) -> float:
    """Wall seconds of one call to its result."""
    synchronise(device)
    began = time.perf_counter()
    step()
    synchronise(device)
    return time.perf_counter() - began


def back_to_back(step: Step, device: str, calls: int) -> Timed:
    """Time ``calls`` calls that follow each other without a synchronisation between them."""
    if calls < 1:
        raise ValueError(f"calls is {calls}, expected at least 1")
    synchronise(device)
    if device == "cpu":
        began = time.perf_counter()
        for _ in range(calls):
            step()
        return Timed(calls, (time.perf_counter() - began) * 1e3 / calls, None)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    began = time.perf_counter()
    start.record()
    for _ in range(calls):
        step()
    end.record()
    torch.cuda.synchronize()
    wall = (time.perf_counter() - began) * 1e3 / calls
    return Timed(calls, wall, start.elapsed_time(end) / calls)


def host(step: Step, device: str) -> float | None:
    """Median milliseconds from a call with the device's queue empty until the call returned; None on a CPU.

    A call that launches more than the queue holds waits for the device, and this wait is part of its time.
    """
    if device == "cpu":
        return None
    settle(step, device)
    taken: list[float] = []
    until = time.perf_counter() + HOST_MS / 1e3
    while not taken or (len(taken) < HOST_CALLS and time.perf_counter() < until):
        synchronise(device)
        began = time.perf_counter()
        step()
        taken.append(time.perf_counter() - began)
    synchronise(device)
    return statistics.median(taken) * 1e3


def settle(step: Step, device: str, milliseconds: float = SETTLE_MS) -> int:
    """Call without measuring for at least ``milliseconds`` and at least once; returns the number of calls."""
    calls = 0
    until = time.perf_counter() + milliseconds / 1e3
    while calls == 0 or time.perf_counter() < until:
        step()
        synchronise(device)
        calls += 1
    return calls


def calibrate(step: Step, device: str, milliseconds: float = ROUND_MS) -> int:
    """How many back-to-back calls fill a round of at least ``milliseconds``, by the device's clock and the wall's."""
    settle(step, device)
    calls = 1
    while True:
        # The fastest of three: one stalled call would otherwise pass for a slow step, and rounds would be too short.
        # No stall is long enough for a first call of many rounds' length, and steps of seconds are dear.
        each = float("inf")
        for _ in range(3):
            timed = back_to_back(step, device, calls)
            each = min(each, timed.wall_ms, float("inf") if timed.device_ms is None else timed.device_ms)
            if each * calls >= _NO_STALL * milliseconds:
                break
        if each * calls >= milliseconds:
            return calls
        # A tenth more than needed: the next round may be a little faster than this one.
        wanted = math.ceil(1.1 * milliseconds / each) if each > 0 else calls * 10
        calls = max(calls + 1, min(wanted, calls * 10))
