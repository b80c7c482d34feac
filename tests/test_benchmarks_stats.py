import math

import numpy as np
import pytest

from benchmarks import stats
from benchmarks.stats import Ratio


def _ratio(low: float, high: float) -> Ratio:
    return Ratio((low + high) / 2, low, high, 30, paired=True)


@pytest.mark.parametrize(
    ("samples", "said"),
    [([], "no samples"), ([1.0, math.nan], "sample 1 is nan"), ([math.inf], "inf"), ([0.0], "above 0"), ([-1.0], "-1")],
)
def test_bad_samples_are_named(samples: list[float], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        stats.median(samples)
    with pytest.raises(ValueError, match=said):
        stats.unpaired_ratio(samples, [1.0])


def test_pairing_cancels_what_slows_a_whole_round() -> None:
    random = np.random.RandomState(1)
    drift = random.uniform(1, 3, size=40)  # a clock that wanders by a factor of three
    reference = drift * 2.0 * random.normal(1, 0.002, size=40)
    arm = drift * random.normal(1, 0.002, size=40)
    paired = stats.paired_ratio(list(reference), list(arm))
    assert paired.low < 2.0 < paired.high and paired.high - paired.low < 0.02
    unpaired = stats.unpaired_ratio(list(reference), list(arm))
    assert unpaired.high - unpaired.low > 10 * (paired.high - paired.low)


def test_intervals_cover_the_truth_about_as_often_as_they_say() -> None:
    random = np.random.RandomState(2)
    ratios = 0
    for _ in range(200):
        reference, arm = 3.0 * random.lognormal(0, 0.1, size=20), random.lognormal(0, 0.1, size=20)
        ratio = stats.paired_ratio(list(reference), list(arm))
        ratios += ratio.low <= 3.0 <= ratio.high
    assert 0.89 <= ratios / 200 <= 0.99


def test_too_few_rounds_give_no_interval() -> None:
    few = stats.MIN_ROUNDS - 1
    ratio = stats.paired_ratio([2.0] * few, [1.0] * few)
    assert ratio.value == 2 and not ratio.has_interval
    assert stats.verdict(ratio, 0.0) == "undetermined"
    assert stats.noise_floor(ratio) == math.inf
    enough = stats.paired_ratio([2.0] * 6, [1.0] * 6)
    assert enough.has_interval and stats.verdict(enough, 0.0) == "faster"
