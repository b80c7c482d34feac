"""What can be measured of a claim: a figure of one race, from its rows alone."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import Protocol

from benchmarks.plan import Case
from benchmarks.record import Result, Steady
from benchmarks.report import cells
from benchmarks.report.model import EPSILON, MeasuredArm, MeasuredRace

# An arm that ended so did not run, which is an answer; other failures say nothing of the compiler.
BROKEN = ("crashed", "failed", "timeout", "out-of-memory")
# From which call on calls take what they always take: not longer than this times the median of the last ones.
SETTLED, LAST_CALLS = 1.25, 3


@dataclass(frozen=True, kw_only=True)
class Way:
    """An arm of whatever race: how which library's model is run."""

    impl: str = "upstream"
    strategy: str = "full"
    mode: str = "default"
    cuda_graph: bool = False
    dynamic: bool = False

    @property
    def name(self) -> str:
        """As tables call the arm."""
        return Case(family="", model="", input="", **vars(self)).arm

    def find(self, race: MeasuredRace) -> MeasuredArm | Result | None:
        """The race's arm of this way, its row where it failed, or None where nobody tried."""
        results = {arm.result.case.arm: arm for arm in race.arms}
        failures = {result.case.arm: result for result in race.failures}
        return results.get(self.name) or failures.get(self.name)


@dataclass(frozen=True)
class Measured:
    """A figure with its range: one value stands for itself where rows have no interval.

    Args:
        low: Lower end, the race's noise included.
        value: The figure.
        high: Upper end.
        shown: As text, with what it was made from.
    """

    low: float
    value: float
    high: float
    shown: str


@dataclass(frozen=True)
class Broken:
    """An arm that the figure needs did not run, or computes something else."""

    why: str


class Figure(Protocol):
    """A kind of measurement."""

    @property
    def ways(self) -> tuple[Way, ...]:
        """The arms it needs."""

    @property
    def name(self) -> str:
        """What it is, in words."""

    @property
    def unit(self) -> str:
        """What its numbers are in: ``×``, ``s`` or nothing."""

    def of(self, race: MeasuredRace) -> Measured | Broken | None:
        """The figure in this race; None where it was not measured."""


def arms_of(race: MeasuredRace, ways: tuple[Way, ...]) -> list[MeasuredArm] | Broken | None:
    """The arms of these ways, all of them, or what is wrong with one; None where one was not measured."""
    found = [(way, way.find(race)) for way in ways]
    for way, arm in found:
        if isinstance(arm, Result) and arm.status in BROKEN:
            return Broken(f"{way.name}: {arm.status}")
        if isinstance(arm, MeasuredArm) and arm.wrong:
            return Broken(f"{way.name}: its output is wrong")
    arms = [arm for _, arm in found if isinstance(arm, MeasuredArm)]
    return arms if len(arms) == len(ways) else None


@dataclass(frozen=True)
class _OfTwo:
    """A figure that holds an arm against another."""

    arm: Way
    over: Way

    @property
    def ways(self) -> tuple[Way, ...]:
        return self.over, self.arm

    @property
    def unit(self) -> str:
        return "×"

    def of(self, race: MeasuredRace) -> Measured | Broken | None:
        arms = arms_of(race, self.ways)
        return self._between(race, arms[1], arms[0]) if isinstance(arms, list) else arms

    def _between(self, race: MeasuredRace, arm: MeasuredArm, over: MeasuredArm) -> Measured | None:
        raise NotImplementedError


class Speed(_OfTwo):
    """How many times as fast the one is as the other, in the steady state."""

    @property
    def name(self) -> str:
        return f"{self.arm.name} over {self.over.name}"

    def _between(self, race: MeasuredRace, arm: MeasuredArm, over: MeasuredArm) -> Measured | None:
        ratio = race.speedup(arm, over)
        if ratio is None:
            return None
        noise = race.noise or 0.0
        shown = f"{cells.significant(over.p50)} → {cells.significant(arm.p50)} ms, {cells.interval(ratio)}"
        if race.noise is not None:
            shown += f", noise {cells.percent(race.noise)}"
        return Measured(ratio.low / (1 + noise), ratio.value, ratio.high * (1 + noise), shown)


@dataclass(frozen=True)
class Epoch(_OfTwo):
    """How many times as fast the one trains an epoch, what it compiles on the way included; the first call is not.

    Rounds are stretches of an epoch. Those that were raced count as they were, the rest as the median of them. Of an
    arm and its A/A copy, which share their caches, the slower counts: the other finds there what the first compiled.

    Args:
        arm: The one.
        over: The other.
        steps: Of an epoch.
    """

    steps: int

    @property
    def name(self) -> str:
        return f"an epoch of {cells.count(self.steps)} steps, {self.arm.name} over {self.over.name}"

    def _between(self, race: MeasuredRace, arm: MeasuredArm, over: MeasuredArm) -> Measured | None:
        ours, theirs = self._seconds(arm), self._seconds(over)
        if ours is None or theirs is None:
            return None
        shown = f"{cells.significant(theirs)} → {cells.significant(ours)} s, {cells.times(theirs / ours)}"
        return _exact(theirs / ours, shown)

    def _seconds(self, arm: MeasuredArm) -> float | None:
        copies = [copy.steady for copy in (arm.result, arm.control) if copy is not None and copy.steady is not None]
        return max(map(self._seconds_of, copies), default=None)

    def _seconds_of(self, steady: Steady) -> float:
        calls = steady.calls_per_round
        raced = steady.wall_ms[: self.steps // calls]
        rest = self.steps - calls * len(raced)
        return (calls * sum(raced) + rest * statistics.median(steady.wall_ms)) / 1e3


class _Counted(_OfTwo):
    """A ratio of two numbers that have no interval."""

    _what = ""
    _unit = ""

    @property
    def name(self) -> str:
        return f"{self._what}, {self.arm.name} over {self.over.name}"

    def _number(self, arm: MeasuredArm) -> float | None:
        raise NotImplementedError

    def _between(self, race: MeasuredRace, arm: MeasuredArm, over: MeasuredArm) -> Measured | None:
        ours, theirs = self._number(arm), self._number(over)
        if ours is None or not theirs:
            return None
        shown = f"{cells.significant(theirs)} → {cells.significant(ours)} {self._unit}, "
        return _exact(ours / theirs, shown + cells.times(ours / theirs))


class PeakMemory(_Counted):
    """Peak memory over the other's. Not of modes with CUDA graphs of their own, whose replay allocates nothing."""

    _what, _unit = "peak memory", "MiB"

    def _number(self, arm: MeasuredArm) -> float | None:
        memory = arm.result.memory
        return None if memory is None or memory.allocated is None else memory.allocated / 2**20


class CompileTime(_Counted):
    """Cold compile time over the other's."""

    _what, _unit = "cold compile time", "s"

    def _number(self, arm: MeasuredArm) -> float | None:
        return arm.paid("cold")


class Kernels(_Counted):
    """Kernels of a call over the other's."""

    _what, _unit = "kernels", "kernels"

    def _number(self, arm: MeasuredArm) -> float | None:
        return arm.result.work.kernels if arm.result.work else None


@dataclass(frozen=True)
class _OfOne:
    """A figure of one arm alone."""

    arm: Way

    @property
    def ways(self) -> tuple[Way, ...]:
        return (self.arm,)

    def of(self, race: MeasuredRace) -> Measured | Broken | None:
        arms = arms_of(race, self.ways)
        return self._of(arms[0]) if isinstance(arms, list) else arms

    def _of(self, arm: MeasuredArm) -> Measured | None:
        raise NotImplementedError


class FirstCall(_OfOne):
    """The first call, cold compilation and all, over a later one."""

    unit = "×"

    @property
    def name(self) -> str:
        return f"first call over a later one, {self.arm.name}"

    def _of(self, arm: MeasuredArm) -> Measured | None:
        paid = arm.paid("cold")
        if paid is None or arm.p50 is None:
            return None
        first = paid + arm.p50 / 1e3
        times = first * 1e3 / arm.p50
        shown = f"{cells.significant(first)} s against {cells.significant(arm.p50)} ms, {cells.times(times)}"
        return _exact(times, shown)


class CompileSeconds(_OfOne):
    """Seconds to compile and capture from empty caches."""

    unit = "s"

    @property
    def name(self) -> str:
        return f"cold compile time, {self.arm.name}"

    def _of(self, arm: MeasuredArm) -> Measured | None:
        paid = arm.paid("cold")
        return None if paid is None else _exact(paid, f"{cells.significant(paid)} s")


class Error(_OfOne):
    """Its error against the reference over eager's own, or over the dtype's rounding where eager has less."""

    unit = "×"

    @property
    def name(self) -> str:
        return f"error over eager's, {self.arm.name}"

    def of(self, race: MeasuredRace) -> Measured | Broken | None:
        arm = self.arm.find(race)  # a wrong output is what is asked for here
        if isinstance(arm, Result):
            return Broken(f"{self.arm.name}: {arm.status}") if arm.status in BROKEN else None
        return None if arm is None else self._of(arm)

    def _of(self, arm: MeasuredArm) -> Measured | None:
        check = arm.result.check
        if check is None or check.error is None or check.eager_error is None:
            return None
        noise = max(check.eager_error, EPSILON[arm.result.case.dtype])
        errors = f"{cells.exponent(check.eager_error)} → {cells.exponent(check.error)}"
        return _exact(check.error / noise, f"{errors}, {cells.significant(check.error / noise)}×")


class Recompiles(_OfOne):
    """How often something was compiled again, the race included."""

    unit = ""

    @property
    def name(self) -> str:
        return f"recompiles, {self.arm.name}"

    def _of(self, arm: MeasuredArm) -> Measured | None:
        figures = arm.result.warm or arm.result.cold  # the process that went on to race
        if figures is None:
            return None
        return _exact(len(figures.recompiles), str(len(figures.recompiles)))


class WarmUp(_OfOne):
    """How many calls come before those that take what all later ones take."""

    unit = ""

    @property
    def name(self) -> str:
        return f"calls before the steady state, {self.arm.name}"

    def _of(self, arm: MeasuredArm) -> Measured | None:
        calls = arm.result.cold.later_calls if arm.result.cold else []
        if len(calls) <= LAST_CALLS:
            return None
        most = SETTLED * statistics.median(calls[-LAST_CALLS:])
        slow = [number for number, seconds in enumerate(calls, start=2) if seconds > most]
        before = max(slow, default=1)
        shown = ", ".join(cells.significant(seconds * 1e3) for seconds in calls)
        return _exact(before, f"{before}; calls from the second on: {shown} ms")


def _exact(value: float, shown: str) -> Measured:
    return Measured(value, value, value, shown)


def quotient(first: Measured, second: Measured) -> Measured:
    """The one figure over the other, as wide as both ranges allow."""
    low = 0.0 if math.isinf(second.high) else first.low / second.high
    high = math.inf if second.low == 0 else first.high / second.low
    value = first.value / second.value
    return Measured(low, value, high, f"{cells.times(value)}: {first.shown}; against {second.shown}")
