"""Whether a claim holds, told from rows alone: each part in each race, the part, and the claim.

A part holds in a race if the whole interval of its figure, the A/A noise included, lies in the claimed range. It fails
if the whole interval lies outside, or an arm does not run. Else it is open. It holds, or fails, if it does so in every
race that was measured; it *depends* if it holds in some and fails in others. Where open races leave room for more than
one of these, it *cannot be told*.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from benchmarks.claims.claim import Claim, Part, Where
from benchmarks.record import Result, Steady
from benchmarks.report import cells
from benchmarks.report.model import EPSILON, MeasuredArm, MeasuredRace
from benchmarks.report.selection import newest, option, torch_version

Outcome = Literal["holds", "fails", "open"]
OUTCOMES: tuple[Outcome, ...] = ("holds", "fails", "open")
NOT_MEASURED, NOT_HERE, NOT_ALL = "not measured yet", "not measured here", "not all measured"
UNTOLD = "cannot be told"
# An arm that ended so did not run, which is an answer; other failures say nothing of the compiler.
BROKEN = ("crashed", "failed", "timeout", "out-of-memory")
# From which call on calls take what they always take: not longer than this times the median of the last ones.
SETTLED, LAST_CALLS = 1.25, 3
EPOCH_STEPS = 1000  # of an epoch of fine-tuning on a GPU
# What races of one part may differ in, and a verdict depend on; the widest first.
DIMENSIONS = {"gpu": "GPU", **{name: name for name in ("family", "model", "workload", "input", "dtype")}}

# Figures --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measured:
    """A figure with the ends of its range, the race's noise included, and as text with what it was made from."""

    low: float
    value: float
    high: float
    shown: str


@dataclass(frozen=True)
class Broken:
    """An arm that the figure needs did not run, or computes something else."""

    why: str


def _exact(value: float, shown: str) -> Measured:
    return Measured(value, value, value, shown)


def _speed(race: MeasuredRace, arm: MeasuredArm, over: MeasuredArm) -> Measured | None:
    """How many times as fast the one is as the other, in the steady state."""
    ratio = race.speedup(arm, over)
    if ratio is None:
        return None
    noise = race.noise or 0.0
    shown = f"{cells.significant(over.p50)} → {cells.significant(arm.p50)} ms, {cells.interval(ratio)}"
    if race.noise is not None:
        shown += f", noise {cells.percent(race.noise)}"
    return Measured(ratio.low / (1 + noise), ratio.value, ratio.high * (1 + noise), shown)


def _epoch(race: MeasuredRace, arm: MeasuredArm, over: MeasuredArm) -> Measured | None:
    """How many times as fast the one trains an epoch, what it compiles on the way included; the first call is not.

    Rounds are stretches of an epoch. Those that were raced count as they were, the rest as the median of them. Of an
    arm and its A/A copy, which share their caches, the slower counts: the other finds there what the first compiled.
    """

    def of(steady: Steady) -> float:
        raced = steady.wall_ms[: EPOCH_STEPS // steady.calls_per_round]
        rest = EPOCH_STEPS - steady.calls_per_round * len(raced)
        return (steady.calls_per_round * sum(raced) + rest * statistics.median(steady.wall_ms)) / 1e3

    def seconds(arm: MeasuredArm) -> float | None:
        copies = [copy.steady for copy in (arm.result, arm.control) if copy is not None and copy.steady is not None]
        return max(map(of, copies), default=None)

    ours, theirs = seconds(arm), seconds(over)
    if ours is None or theirs is None:
        return None
    shown = f"{cells.significant(theirs)} → {cells.significant(ours)} s, {cells.times(theirs / ours)}"
    return _exact(theirs / ours, shown)


def _quotient_of(
    unit: str, number: Callable[[MeasuredArm], float | None]
) -> Callable[[MeasuredRace, MeasuredArm, MeasuredArm], Measured | None]:
    """A ratio of two numbers that have no interval."""

    def measure(race: MeasuredRace, arm: MeasuredArm, over: MeasuredArm) -> Measured | None:
        ours, theirs = number(arm), number(over)
        if ours is None or not theirs:
            return None
        shown = f"{cells.significant(theirs)} → {cells.significant(ours)} {unit}, {cells.times(ours / theirs)}"
        return _exact(ours / theirs, shown)

    return measure


def _mebibytes(arm: MeasuredArm) -> float | None:
    """Peak memory. Not of modes with CUDA graphs of their own, whose replay allocates nothing."""
    memory = arm.result.memory
    return None if memory is None or memory.allocated is None else memory.allocated / 2**20


def _kernels(arm: MeasuredArm) -> float | None:
    return arm.result.work.kernels if arm.result.work else None


def _first_call(race: MeasuredRace, arm: MeasuredArm) -> Measured | None:
    """The first call, cold compilation and all, over a later one."""
    paid = arm.paid("cold")
    if paid is None or arm.p50 is None:
        return None
    first = paid + arm.p50 / 1e3
    times = first * 1e3 / arm.p50
    shown = f"{cells.significant(first)} s against {cells.significant(arm.p50)} ms, {cells.times(times)}"
    return _exact(times, shown)


def _compile_seconds(race: MeasuredRace, arm: MeasuredArm) -> Measured | None:
    paid = arm.paid("cold")
    return None if paid is None else _exact(paid, f"{cells.significant(paid)} s")


def _error(race: MeasuredRace, arm: MeasuredArm) -> Measured | None:
    """Its error against the reference over eager's own, or over the dtype's rounding where eager has less."""
    check = arm.result.check
    if check is None or check.error is None or check.eager_error is None:
        return None
    times = check.error / max(check.eager_error, EPSILON[arm.result.case.dtype])
    errors = f"{cells.exponent(check.eager_error)} → {cells.exponent(check.error)}"
    return _exact(times, f"{errors}, {cells.significant(times)}×")


def _recompiles(race: MeasuredRace, arm: MeasuredArm) -> Measured | None:
    """How often something was compiled again, the race included."""
    figures = arm.result.warm or arm.result.cold  # the process that went on to race
    return None if figures is None else _exact(len(figures.recompiles), str(len(figures.recompiles)))


def _warm_up(race: MeasuredRace, arm: MeasuredArm) -> Measured | None:
    """How many calls come before those that take what all later ones take."""
    calls = arm.result.cold.later_calls if arm.result.cold else []
    if len(calls) <= LAST_CALLS:
        return None
    most = SETTLED * statistics.median(calls[-LAST_CALLS:])
    before = max((number for number, seconds in enumerate(calls, start=2) if seconds > most), default=1)
    shown = ", ".join(cells.significant(seconds * 1e3) for seconds in calls)
    return _exact(before, f"{before}; calls from the second on: {shown} ms")


# By the name in claims.toml: the figure in words before its arms, its unit, and how it is measured.
FIGURES: dict[str, tuple[str, str, Callable[..., Measured | None]]] = {
    "speed": ("", "×", _speed),
    "epoch": (f"an epoch of {EPOCH_STEPS:,} steps, ", "×", _epoch),
    "peak memory": ("peak memory, ", "×", _quotient_of("MiB", _mebibytes)),
    "cold compile time": ("cold compile time, ", "×", _quotient_of("s", lambda arm: arm.paid("cold"))),
    "kernels": ("kernels, ", "×", _quotient_of("kernels", _kernels)),
    "first call over a later one": ("first call over a later one, ", "×", _first_call),
    "cold compile seconds": ("cold compile time, ", "s", _compile_seconds),
    "error over eager's": ("error over eager's, ", "×", _error),
    "recompiles": ("recompiles, ", "", _recompiles),
    "calls before the steady state": ("calls before the steady state, ", "", _warm_up),
}


def measure(part: Part, race: MeasuredRace) -> Measured | Broken | None:
    """The part's figure in this race; None where it was not measured."""
    known: dict[str, MeasuredArm | Result] = {result.case.arm: result for result in race.failures}
    known |= {arm.name: arm for arm in race.arms}
    arms: list[MeasuredArm] = []
    for name in reversed(part.arms):
        arm = known.get(name)
        if isinstance(arm, Result) and arm.status in BROKEN:
            return Broken(f"{name}: {arm.status}")
        if isinstance(arm, MeasuredArm):
            if arm.wrong and part.figure != "error over eager's":
                return Broken(f"{name}: its output is wrong")
            arms.insert(0, arm)
    return FIGURES[part.figure][2](race, *arms) if len(arms) == len(part.arms) else None


def quotient(first: Measured, second: Measured) -> Measured:
    """The one figure over the other, as wide as both ranges allow."""
    low = 0.0 if math.isinf(second.high) else first.low / second.high
    high = math.inf if second.low == 0 else first.high / second.low
    value = first.value / second.value
    return Measured(low, value, high, f"{cells.times(value)}: {first.shown}; against {second.shown}")


# Verdicts -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """A part in one race, or in the mean of several: the figure, the outcome, and why it is not *holds*."""

    races: tuple[MeasuredRace, ...]
    measured: Measured | Broken
    outcome: Outcome
    why: str


@dataclass(frozen=True)
class Verdict:
    """``holds``, ``fails``, ``depends``, ``cannot be told``, or that nothing was measured; in words, and in few words.

    ``complete`` says whether all races that the claim is held against were measured.
    """

    word: str
    text: str
    complete: bool = True
    brief: str = ""


def places(part: Part, races: Sequence[MeasuredRace]) -> list[Place]:
    """Where the part was measured, of each race the newest torch; the mean of all where it speaks of that.

    Of a race that was run again for a question, beside the one of its family's tables, the first that has the part's
    arms counts, in the order of ``races``.
    """
    shown = newest(races)
    first: dict[tuple[str, ...], tuple[MeasuredRace, Measured | Broken]] = {}
    for race in _in(part.where, shown):
        measured = measure(part, race)
        if measured is not None and part.against is not None:
            measured = _against(part, race, measured, shown)
        if measured is not None:
            what = (option(race, "gpu"), *race.case.race)
            if what not in first or torch_version(race) > torch_version(first[what][0]):
                first[what] = (race, measured)
    found = list(first.values())
    if not part.mean:
        return [_place(part, (race,), measured) for race, measured in found]
    kept = [(race, measured) for race, measured in found if isinstance(measured, Measured)]
    if not kept or not _complete(part, [race for race, _ in found]):
        return []  # a mean of some of the races is another mean
    return [_place(part, tuple(race for race, _ in kept), _mean([measured for _, measured in kept]))]


def _matches(where: Where, race: MeasuredRace) -> bool:
    return where.case().race == race.case.race


def _complete(part: Part, races: Iterable[MeasuredRace]) -> bool:
    measured = list(races)
    return all(any(_matches(where, race) for race in measured) for where in part.where)


def _in(where: Iterable[Where], shown: Sequence[MeasuredRace]) -> list[MeasuredRace]:
    """Races that one of these names, in their order, each once."""
    return list(dict.fromkeys(race for place in where for race in shown if _matches(place, race)))


def _against(
    part: Part, race: MeasuredRace, measured: Measured | Broken, shown: Sequence[MeasuredRace]
) -> Measured | Broken | None:
    assert part.against is not None
    others = [other for other in _in([part.against], shown) if option(other, "gpu") == option(race, "gpu")]
    second = next((figure for other in others if (figure := measure(part, other)) is not None), None)
    if second is None or isinstance(second, Broken) or isinstance(measured, Broken):
        return second if isinstance(measured, Measured) else measured
    return quotient(measured, second)


def _mean(measured: Sequence[Measured]) -> Measured:
    """The geometric mean; of its ends too, which is wider than its interval."""

    def mean(values: list[float]) -> float:
        return math.exp(sum(math.log(value) if value > 0 else -math.inf for value in values) / len(values))

    low, value, high = (mean([getattr(one, end) for one in measured]) for end in ("low", "value", "high"))
    return Measured(low, value, high, f"{cells.times(value)}, the mean of {len(measured)} races")


def _place(part: Part, races: tuple[MeasuredRace, ...], measured: Measured | Broken) -> Place:
    if isinstance(measured, Broken):
        return Place(races, measured, "fails", measured.why)
    if measured.high < part.low:
        return Place(races, measured, "fails", "less")
    if measured.low > part.high:
        return Place(races, measured, "fails", "more")
    if part.low <= measured.low and measured.high <= part.high:
        return Place(races, measured, "holds", "")
    if math.isinf(measured.high):
        return Place(races, measured, "open", "too few rounds, or too loud a machine, for an interval")
    edge = part.low if measured.low < part.low else part.high
    return Place(races, measured, "open", f"the interval crosses {amount(edge, part)}")


def of_part(part: Part, found: Sequence[Place]) -> Verdict:
    """What the places where a part was measured say together."""
    if not found:
        return Verdict(NOT_MEASURED, NOT_MEASURED, complete=False)
    complete = part.mean or _complete(part, [race for place in found for race in place.races])
    outcomes = [place.outcome for place in found]
    if set(outcomes) == {"holds"}:
        return Verdict("holds", "holds", complete)
    if set(outcomes) == {"fails"}:
        ways = list(dict.fromkeys(place.why for place in found))
        return Verdict("fails", f"fails ({ways[0]})" if len(ways) == 1 else "fails", complete)
    if len(found) == 1:
        return Verdict(UNTOLD, f"{UNTOLD}: {found[0].why}", complete)
    counts = [f"{kind} in {outcomes.count(kind)}" for kind in OUTCOMES if kind in outcomes]
    count = ", ".join([f"{counts[0]} of {len(found)} races", *counts[1:]])
    if {"holds", "fails"} <= set(outcomes):
        return Verdict("depends", f"depends on {_reasons(found)}: {count}", complete)
    return Verdict(UNTOLD, f"{UNTOLD}: {count}", complete)


def _reasons(found: Sequence[Place]) -> str:
    """What tells the races where a part holds from those where it fails: one thing, or all that they differ in."""

    def values(key: str, outcome: Outcome) -> set[str]:
        return {option(race, key) for place in found if place.outcome == outcome for race in place.races}

    for key, name in DIMENSIONS.items():
        if not values(key, "holds") & values(key, "fails"):
            return f"the {name}"
    differ = [key for key in DIMENSIONS if len(values(key, "holds") | values(key, "fails")) > 1]
    return " and ".join(f"the {DIMENSIONS[key]}" for key in differ)


def of_claim(claim: Claim, races: Sequence[MeasuredRace]) -> Verdict:
    """What the claim's parts say together. Where something was not measured yet, it says that it is not complete."""
    if not claim.parts:
        return Verdict(NOT_HERE, NOT_HERE, brief=NOT_HERE)
    looked = [(part, places(part, races)) for part in claim.parts]
    verdicts = [(part.says, of_part(part, found)) for part, found in looked]
    measured = [(says, verdict) for says, verdict in verdicts if verdict.word != NOT_MEASURED]
    if not measured:
        return Verdict(NOT_MEASURED, NOT_MEASURED, complete=False, brief=NOT_MEASURED)
    complete = all(verdict.complete for _, verdict in verdicts)
    word, text = _together(measured)
    brief = _briefly(text, {place.outcome for _, found in looked for place in found})
    left = "" if complete else f"; {NOT_ALL}"
    return Verdict(word, text + left, complete, brief + left)


def _together(measured: Sequence[tuple[str, Verdict]]) -> tuple[str, str]:
    words = {verdict.word for _, verdict in measured}
    texts = {verdict.text for _, verdict in measured}
    if len(texts) == 1:
        return words.pop(), texts.pop()
    if words in ({"holds"}, {"fails"}, {UNTOLD}):
        word = words.pop()
        return word, word
    said = "; ".join(
        f"{word} for {', '.join(says for says, verdict in measured if verdict.word == word)}"
        for word in ("holds", "fails", "depends", UNTOLD)
        if word in words
    )
    told = words - {UNTOLD}
    if len(told) == 1:
        return "depends" if "depends" in told else UNTOLD, said
    return "depends", f"depends on what is asked: {said}"


def _briefly(text: str, outcomes: set[Outcome]) -> str:
    """The verdict without its list: how the places came out, whichever part they belong to."""
    if outcomes in ({"holds"}, {"fails"}):
        return text
    if {"holds", "fails"} <= outcomes:
        return "holds in part"
    if outcomes == {"open"}:
        return UNTOLD
    return f"{'holds' if 'holds' in outcomes else 'fails'} in part, the rest {UNTOLD}"


def amount(number: float, part: Part) -> str:
    """A claimed number with its unit: ``1.33×``, ``60 s``, ``5``."""
    unit = FIGURES[part.figure][1]
    return f"{number:.3g}{' ' * (unit == 's')}{unit}"


def claimed(part: Part) -> str:
    """The claimed range: ``1.40× to 1.48×``, ``at most 5``."""
    low, high = amount(part.low, part), amount(part.high, part)
    if math.isinf(part.low):
        return f"at most {high}"
    if math.isinf(part.high):
        return f"at least {low}"
    return low if low == high else f"{low} to {high}"
