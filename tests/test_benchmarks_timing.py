"""Clocks: how many calls are made, and that a round is long enough."""

from __future__ import annotations

import time

import pytest
import torch

from benchmarks import timing
from benchmarks.timing import back_to_back, calibrate, host, once, settle


class Counted:
    def __init__(self, seconds: float) -> None:
        self.calls = 0
        self.seconds = seconds

    def __call__(self) -> None:
        self.calls += 1
        time.sleep(self.seconds)


def test_back_to_back_makes_as_many_calls_as_it_says():
    step = Counted(0.001)
    timed = back_to_back(step, "cpu", 5)
    assert step.calls == timed.calls == 5
    assert timed.wall_ms >= 1.0
    assert timed.device_ms is None


def test_a_calibrated_round_is_long_enough():
    step = Counted(0.001)
    calls = calibrate(step, "cpu", 20)
    assert back_to_back(step, "cpu", calls).wall_ms * calls >= 19
    assert calls <= 30


def test_a_slow_step_is_called_once_a_round_and_settles_once():
    step = Counted(0.12)
    assert calibrate(step, "cpu", 5) == 1
    assert step.calls == 2, "one to settle, one to time"
    assert settle(step, "cpu", 0.0) == 1 and step.calls == 3
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
    monkeypatch.setattr(timing, "HOST_MS", 1e4)
    taken = host(step, "cuda")
    assert taken is not None and 2 <= taken < 8
    assert timing.HOST_CALLS < step.calls <= timing.HOST_CALLS + 3, "what settles comes before"
    assert not step.waiting
    step.calls = 0
    monkeypatch.setattr(timing, "HOST_MS", 0.0)
    host(step, "cuda")
    assert step.calls <= 4, "a slow step is called once"


def test_on_a_cpu_host_and_device_are_one():
    step = Counted(0.001)
    assert host(step, "cpu") is None and step.calls == 0


@pytest.mark.gpu
def test_the_host_does_not_wait_for_the_device():
    x = torch.randn(8192, 8192, device="cuda")
    taken, whole = host(lambda: x @ x, "cuda"), back_to_back(lambda: x @ x, "cuda", 5).device_ms
    assert taken is not None and whole is not None and 0 < taken < whole / 2
