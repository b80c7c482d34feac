"""Whether a claim holds, told from rows alone: each part in each race, the part, and the claim.

A part holds in a race if the whole interval of its figure, the A/A noise included, lies in the claimed range. It fails
if the whole interval lies outside, or an arm does not run. Else it is open. It holds, or fails, if it does so in every
race that was measured; it *depends* if it holds in some and fails in others. Where open races leave room for more than
one of these, it *cannot be told*.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from benchmarks.claims.claim import Claim, Part, Where
from benchmarks.claims.figures import Broken, Measured, quotient
from benchmarks.report import cells
from benchmarks.report.model import MeasuredRace
from benchmarks.report.selection import newest, option, torch_version

Outcome = Literal["holds", "fails", "open"]
NOT_MEASURED = "not measured yet"
NOT_HERE = "not measured here"
NOT_ALL = "not all measured"
UNTOLD = "cannot be told"
OUTCOMES: tuple[Outcome, ...] = ("holds", "fails", "open")
# What races of one part may differ in, and a verdict depend on; the widest first.
DIMENSIONS = {
    "gpu": "GPU",
    "family": "family",
    "model": "model",
    "workload": "workload",
    "input": "input",
    "dtype": "dtype",
}


@dataclass(frozen=True)
class Place:
    """A part in one race, or in the mean of several.

    Args:
        races: Where it was measured.
        measured: The figure, or why there is none.
        outcome: What that says of the part.
        why: In which way it fails, or what leaves it open; empty where it holds.
    """

    races: tuple[MeasuredRace, ...]
    measured: Measured | Broken
    outcome: Outcome
    why: str


@dataclass(frozen=True)
class Verdict:
    """In a word, with what it depends on.

    Args:
        word: ``holds``, ``fails``, ``depends``, ``cannot be told``, or that nothing was measured.
        text: The same in words, for the page.
        complete: Whether all races that the claim is held against were measured.
        brief: The same in few words, for an overview.
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
        measured = part.figure.of(race)
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
    mean = _mean([measured for _, measured in kept])
    return [_place(part, tuple(race for race, _ in kept), mean)]


def _complete(part: Part, races: Iterable[MeasuredRace]) -> bool:
    measured = list(races)
    return all(any(where.matches(race) for race in measured) for where in part.where)


def _in(where: Iterable[Where], shown: Sequence[MeasuredRace]) -> list[MeasuredRace]:
    """Races that one of these names, in their order, each once."""
    return list(dict.fromkeys(race for place in where for race in shown if place.matches(race)))


def _against(
    part: Part, race: MeasuredRace, measured: Measured | Broken, shown: Sequence[MeasuredRace]
) -> Measured | Broken | None:
    assert part.against is not None
    others = [other for other in _in([part.against], shown) if option(other, "gpu") == option(race, "gpu")]
    second = next((figure for other in others if (figure := part.figure.of(other)) is not None), None)
    if second is None or isinstance(second, Broken) or isinstance(measured, Broken):
        return second if isinstance(measured, Measured) else measured
    return quotient(measured, second)


def _mean(measured: Sequence[Measured]) -> Measured:
    """The geometric mean; of its ends too, which is wider than its interval."""

    def mean(values: list[float]) -> float:
        return math.exp(sum(math.log(value) if value > 0 else -math.inf for value in values) / len(values))

    value = mean([one.value for one in measured])
    low, high = mean([one.low for one in measured]), mean([one.high for one in measured])
    return Measured(low, value, high, f"{cells.times(value)}, the mean of {len(measured)} races")


def _place(part: Part, races: tuple[MeasuredRace, ...], measured: Measured | Broken) -> Place:
    if isinstance(measured, Broken):
        return Place(races, measured, "fails", measured.why)
    low, high = part.allowed.low, part.allowed.high
    if measured.high < low:
        return Place(races, measured, "fails", "less")
    if measured.low > high:
        return Place(races, measured, "fails", "more")
    if low <= measured.low and measured.high <= high:
        return Place(races, measured, "holds", "")
    if math.isinf(measured.high):
        return Place(races, measured, "open", "too few rounds, or too loud a machine, for an interval")
    edge = low if measured.low < low else high
    return Place(races, measured, "open", f"the interval crosses {amount(edge, part.figure.unit)}")


def of_part(part: Part, found: Sequence[Place]) -> Verdict:
    """What the places where a part was measured say together."""
    if not found:
        return Verdict(NOT_MEASURED, NOT_MEASURED, complete=False)
    races = [race for place in found for race in place.races]
    complete = part.mean or _complete(part, races)
    outcomes = [place.outcome for place in found]
    if set(outcomes) == {"holds"}:
        return Verdict("holds", "holds", complete)
    if set(outcomes) == {"fails"}:
        ways = list(dict.fromkeys(place.why for place in found))
        return Verdict("fails", f"fails ({ways[0]})" if len(ways) == 1 else "fails", complete)
    if len(found) == 1:
        return Verdict(UNTOLD, f"{UNTOLD}: {found[0].why}", complete)
    kinds = [kind for kind in OUTCOMES if kind in outcomes]
    counts = [f"{kind} in {outcomes.count(kind)}" for kind in kinds]
    count = ", ".join([f"{counts[0]} of {len(found)} races", *counts[1:]])
    if {"holds", "fails"} <= set(outcomes):
        return Verdict("depends", f"depends on {_reasons(found)}: {count}", complete)
    return Verdict(UNTOLD, f"{UNTOLD}: {count}", complete)


def _reasons(found: Sequence[Place]) -> str:
    """What tells the races where a part holds from those where it fails: one thing, or all that they differ in."""
    decided = [place for place in found if place.outcome != "open"]

    def values(key: str, outcome: Outcome) -> set[str]:
        return {option(race, key) for place in decided if place.outcome == outcome for race in place.races}

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


def amount(number: float, unit: str) -> str:
    """A claimed number with its unit: ``1.33×``, ``60 s``, ``5``."""
    text = f"{number:.3g}"
    return f"{text} {unit}" if unit not in ("", "×") else text + unit


def claimed(part: Part) -> str:
    """The claimed range: ``1.40× to 1.48×``, ``at most 5``."""
    low, high = (amount(edge, part.figure.unit) for edge in (part.allowed.low, part.allowed.high))
    if math.isinf(part.allowed.low):
        return f"at most {high}"
    if math.isinf(part.allowed.high):
        return f"at least {low}"
    return low if low == high else f"{low} to {high}"
