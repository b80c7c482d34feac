"""Medians, confidence intervals and verdicts: when two arms differ, and when that cannot be decided.

Every ratio is a *speed-up*: the reference's time over the arm's, so above 1 the arm is faster. Its interval is a
percentile bootstrap over rounds. Timing noise is skewed and drifts with the clocks, so medians are used, and rounds are
paired if both arms ran in the same rounds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

CONFIDENCE = 0.95
RESAMPLES = 1999  # 50 of them in each tail
# The widest interval for the median of n samples, [min, max], covers the median with probability 1 - 2 ** (1 - n):
# 93.75 % with five samples, so a 95 % interval needs six.
MIN_ROUNDS = 6

Verdict = Literal["faster", "slower", "undetermined"]


@dataclass(frozen=True)
class Ratio:
    """A speed-up, the reference's time over the arm's, with its 95 % interval: ``[0, inf]`` if rounds are too few."""

    value: float
    low: float
    high: float
    rounds: int  # number of samples; those of the shorter arm if unpaired
    paired: bool  # round n of one arm was compared with round n of the other

    @property
    def inverse(self) -> Ratio:
        low = 0.0 if math.isinf(self.high) else 1 / self.high
        high = math.inf if self.low == 0 else 1 / self.low
        return Ratio(1 / self.value, low, high, self.rounds, self.paired)

    @property
    def has_interval(self) -> bool:
        return math.isfinite(self.high)


def _checked(samples: Sequence[float], what: str) -> NDArray[np.float64]:
    """The samples as an array, or a ValueError that names an invalid one."""
    array = np.asarray(samples, dtype=np.float64)
    if array.size == 0:
        raise ValueError(f"{what}: no samples; the arm ran no round, so give it a failure row instead")
    bad = np.flatnonzero(~np.isfinite(array) | (array <= 0))
    if bad.size:
        raise ValueError(f"{what}: sample {bad[0]} is {array[bad[0]]}; a time must be finite and above 0")
    return array


def median(samples: Sequence[float]) -> float:
    """The median, in the samples' unit. ValueError on no samples, or one that is NaN, infinite or not positive."""
    return float(np.median(_checked(samples, "median")))


def p10(samples: Sequence[float]) -> float:
    """The tenth percentile: the time of an undisturbed call. ValueError as for :func:`median`."""
    return float(np.percentile(_checked(samples, "p10"), 10))


def p95(samples: Sequence[float]) -> float:
    """The 95th percentile by linear interpolation, in the samples' unit; errors as for ``median``."""
    return float(np.percentile(_checked(samples, "p95"), 95))


def _resampled_medians(values: NDArray[np.float64], random: np.random.RandomState) -> NDArray[np.float64]:
    picks = random.randint(0, values.size, size=(RESAMPLES, values.size))
    return np.asarray(np.median(values[picks], axis=1))


def _interval(resampled: NDArray[np.float64]) -> tuple[float, float]:
    tail = 100 * (1 - CONFIDENCE) / 2
    low, high = np.percentile(resampled, [tail, 100 - tail])
    return float(low), float(high)


def _seeded() -> np.random.RandomState:
    # A fixed seed, and numpy's legacy generator, whose stream is frozen: tables generated from committed rows must be
    # equal on every machine and with every numpy.
    return np.random.RandomState(0)


def paired_ratio(reference: Sequence[float], arm: Sequence[float]) -> Ratio:
    """The arm's speed-up over the reference: the median over rounds of the ratio within a round.

    A slowdown of a whole round (a lower clock, a busy neighbour) cancels out of its ratio, which makes the interval
    narrower than that of two separate medians. Samples with the same index belong to the same round.
    """
    ratios = _checked(reference, "reference") / _checked(arm, "arm")
    few = ratios.size < MIN_ROUNDS
    low, high = (0.0, math.inf) if few else _interval(_resampled_medians(ratios, _seeded()))
    return Ratio(float(np.median(ratios)), low, high, ratios.size, paired=True)


def unpaired_ratio(reference: Sequence[float], arm: Sequence[float]) -> Ratio:
    """The arm's speed-up over a reference that did not run in the same rounds: the ratio of two medians.

    Each side is resampled separately. Drift between the two sessions affects the ratio but not the interval; an A/A
    noise floor does not catch it either. Errors as for ``median``.
    """
    first, second = _checked(reference, "reference"), _checked(arm, "arm")
    value = float(np.median(first) / np.median(second))
    rounds = min(first.size, second.size)
    if rounds < MIN_ROUNDS:
        return Ratio(value, 0.0, math.inf, rounds, paired=False)
    random = _seeded()  # one stream: two equal streams would resample sides of equal size alike
    low, high = _interval(_resampled_medians(first, random) / _resampled_medians(second, random))
    return Ratio(value, low, high, rounds, paired=False)


def noise_floor(control: Ratio) -> float:
    """The difference between two copies of an arm: the largest distance of the A/A interval from 1, as a fraction.

    0.02 means that a factor of 1.02 either way can be pure noise. Infinite if the control has no interval.
    """
    return math.inf if control.low == 0 else max(control.high, 1 / control.low) - 1


def verdict(speedup: Ratio, noise: float | None) -> Verdict:
    """``faster`` or ``slower`` only if the whole interval lies beyond the noise floor, else ``undetermined``.

    ``noise`` is the A/A noise floor as a fraction, None if no control ran: then only the interval decides, and every
    display of the verdict must say that the noise is unknown.
    """
    bound = 1 + (noise or 0.0)
    if speedup.low > bound:
        return "faster"
    if speedup.high < 1 / bound:
        return "slower"
    return "undetermined"


def break_even_calls(compile_seconds: float, eager_ms: float, arm_ms: float) -> float:
    """Whole number of calls until their speed-up has paid back ``compile_seconds``; infinite if never.

    Compile time is a difference of two measurements, so a value just below 0 counts as 0.
    """
    _checked([eager_ms, arm_ms], "break-even")
    if not math.isfinite(compile_seconds):
        raise ValueError(f"break-even: compile seconds must be finite, got {compile_seconds}")
    saved_ms = eager_ms - arm_ms
    if saved_ms <= 0:
        return math.inf
    return math.ceil(max(compile_seconds, 0.0) * 1e3 / saved_ms)


@dataclass(frozen=True)
class Utilisation:
    """How close a call comes to the device's peak rates; None if work or peak was not measured."""

    bandwidth: float | None  # byte/s over the peak, as a fraction
    flops: float | None  # FLOP/s over the peak, as a fraction
    times_floor: float | None  # the call's time over the roofline's, the shortest possible


def utilisation(
    milliseconds: float,
    *,
    bytes: float | None,
    flops: float | None,
    peak_bandwidth: float | None,
    peak_flops: float | None,
) -> Utilisation:
    """Utilisation of one call from its minimum bytes, its FLOPs and the peaks (per second) of the same device.

    A fraction above 1 is kept: it shows that bytes or peak are wrong, or that a cache served the bytes.
    """
    seconds = float(_checked([milliseconds], "utilisation")[0]) / 1e3
    pairs = ((bytes, peak_bandwidth), (flops, peak_flops))
    least = [None if amount is None or peak is None else amount / peak for amount, peak in pairs]
    floor = max((each for each in least if each is not None), default=0.0)
    return Utilisation(
        bandwidth=None if least[0] is None else least[0] / seconds,
        flops=None if least[1] is None else least[1] / seconds,
        times_floor=seconds / floor if floor else None,
    )
