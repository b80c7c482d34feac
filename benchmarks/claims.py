"""Claims about ``torch.compile`` that people repeat: ``claims.toml`` holds them, rows alone judge them.

A part of a claim holds in a race if the whole interval of its figure, the A/A noise included, lies in the claimed
range. It fails if the whole interval lies outside, or an arm does not run. Else it is open.
"""

from __future__ import annotations

import functools
import math
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.record import Result, Rows
from benchmarks.report import cells, tables
from benchmarks.report.cells import significant
from benchmarks.report.model import (
    EPSILON,
    MeasuredArm,
    MeasuredRace,
    commands_of,
    extra_races,
    machines,
    newest,
    option,
    races_of,
    torch_version,
)

AROUND = 1.1  # a claim that names one number stands for the numbers around it, a tenth of it either way
NOT_MEASURED, UNTOLD = "not measured yet", "cannot be told"
# An arm that ended so did not run, which is an answer; other failures say nothing of the compiler.
BROKEN = ("crashed", "failed", "timeout", "out-of-memory")
HEAD = ("it says", "of", "race", "measured", "claimed", "so")


@dataclass(frozen=True)
class Part:
    """One statement of a claim: a figure of some arms lies between ``low`` and ``high`` in some races.

    Family, model, input, workload, dtype and device name a race. With ``mean`` the claim is about the geometric mean of
    all races. ``arms`` is the arm and, if the figure compares two arms, its reference.
    """

    says: str
    figure: str
    arms: tuple[str, ...]
    low: float
    high: float
    races: tuple[tuple[str, ...], ...]
    mean: bool = False

    @property
    def claimed(self) -> str:
        """The range in words: ``1.40× to 1.48×``, ``at most 5``."""
        unit = FIGURES[self.figure][1]
        low, high = (f"{edge:.3g}{' ' * (unit == 's')}{unit}" for edge in (self.low, self.high))
        if math.isinf(self.low):
            return f"at most {high}"
        if math.isinf(self.high):
            return f"at least {low}"
        return low if low == high else f"{low} to {high}"


@dataclass(frozen=True)
class Claim:
    """A claim in its common wording; ``not_here`` says which part is not measured, and why."""

    number: int
    theme: str
    text: str
    parts: tuple[Part, ...]
    note: str = ""
    not_here: str = ""


def parse_limit(text: str) -> tuple[float, float]:
    """``1.1 to 3``, ``at least 1``, ``at most 5`` or ``around 45/38`` as the lowest and the highest value."""

    def number(text: str) -> float:
        over, _, under = text.partition("/")
        return float(over) / float(under or 1)

    if text.startswith("at least "):
        return number(text[9:]), math.inf
    if text.startswith("at most "):
        return -math.inf, number(text[8:])
    if text.startswith("around "):
        return number(text[7:]) / AROUND, number(text[7:]) * AROUND
    low, _, high = text.partition(" to ")
    return number(low), number(high)


def parse(text: str) -> dict[int, Claim]:
    data: dict[str, Any] = tomllib.loads(text)
    races = {name: (*race, "cuda") for name, race in data.pop("races").items()}
    groups = {name: [races[race] for race in names] for name, names in data.pop("groups").items()}

    def part(says: str, measured: str, limit: str, where: str) -> Part:
        figure, _, arms = measured.partition(": ")
        names = where.removeprefix("mean of ").split(", ")
        wanted = tuple(race for name in names for race in groups.get(name) or [races[name]])
        return Part(
            says, figure, tuple(arms.split(" over ")), *parse_limit(limit), wanted, where.startswith("mean of ")
        )

    return {
        int(number): Claim(int(number), theme, **{**fields, "parts": tuple(part(*each) for each in fields["parts"])})
        for theme, claims in data.items()
        for number, fields in claims.items()
    }


@functools.cache
def known_claims() -> dict[int, Claim]:
    return parse(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


# Figures --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Figure:
    """A figure, its range including the race's noise, and a text that also names its inputs."""

    low: float
    value: float
    high: float
    shown: str


def _exact(value: float, shown: str) -> Figure:
    return Figure(value, value, value, shown)


def _speed(race: MeasuredRace, arm: MeasuredArm, over: MeasuredArm) -> Figure | None:
    ratio = race.speedup(arm, over)
    if ratio is None:
        return None
    known = race.noise(arm, over)
    noise = known or 0.0
    shown = f"{significant(over.p50)} → {significant(arm.p50)} ms, {cells.interval(ratio)}"
    shown += f", noise {cells.percent(known)}" if known is not None else ""
    return Figure(ratio.low / (1 + noise), ratio.value, ratio.high * (1 + noise), shown)


def _ratio(unit: str, ours: float | None, theirs: float | None) -> Figure | None:
    if ours is None or not theirs:
        return None
    return _exact(ours / theirs, f"{significant(theirs)} → {significant(ours)} {unit}, {cells.times(ours / theirs)}")


def _peak_memory(race: MeasuredRace, arm: MeasuredArm, over: MeasuredArm) -> Figure | None:
    peaks = [each.result.memory.allocated if each.result.memory else None for each in (arm, over)]
    return _ratio("MiB", *(None if peak is None else peak / 2**20 for peak in peaks))


def _compile_seconds(race: MeasuredRace, arm: MeasuredArm) -> Figure | None:
    paid = arm.paid("cold")
    return None if paid is None else _exact(paid, f"{significant(paid)} s")


def _first_call(race: MeasuredRace, arm: MeasuredArm) -> Figure | None:
    paid = arm.paid("cold")
    if paid is None or arm.p50 is None:
        return None
    first = paid + arm.p50 / 1e3
    times = first * 1e3 / arm.p50
    return _exact(times, f"{significant(first)} s against {significant(arm.p50)} ms, {cells.times(times)}")


def _error(race: MeasuredRace, arm: MeasuredArm) -> Figure | None:
    """The arm's error over eager's error, or over the dtype's rounding if that is larger."""
    check = arm.result.check
    if check is None or check.error is None or check.eager_error is None:
        return None
    times = check.error / max(check.eager_error, EPSILON[arm.result.case.dtype])
    errors = f"{cells.exponent(check.eager_error)} → {cells.exponent(check.error)}"
    return _exact(times, f"{errors}, {significant(times)}×")


def _recompiles(race: MeasuredRace, arm: MeasuredArm) -> Figure | None:
    figures = arm.result.warm or arm.result.cold  # the process that went on to race
    return None if figures is None else _exact(len(figures.recompiles), str(len(figures.recompiles)))


# {name in claims.toml: (the figure in words, its unit, the function that measures it)}.
FIGURES: dict[str, tuple[str, str, Callable[..., Figure | None]]] = {
    "speed": ("", "×", _speed),
    "peak memory": ("peak memory, ", "×", _peak_memory),
    "cold compile time": (
        "cold compile time, ",
        "×",
        lambda race, *arms: _ratio("s", *(arm.paid("cold") for arm in arms)),
    ),
    "cold compile seconds": ("cold compile time, ", "s", _compile_seconds),
    "first call over a later one": ("first call over a later one, ", "×", _first_call),
    "error over eager's": ("error over eager's, ", "×", _error),
    "recompiles": ("recompiles, ", "", _recompiles),
}


def measure(part: Part, race: MeasuredRace) -> Figure | str | None:
    """The part's figure in this race; the reason as text if an arm is broken; None if it was not measured."""
    known: dict[str, MeasuredArm | Result] = {result.case.arm: result for result in race.failures}
    known |= {arm.name: arm for arm in race.arms}
    arms: list[MeasuredArm] = []
    for name in part.arms:
        arm = known.get(name)
        if isinstance(arm, Result) and arm.status in BROKEN:
            return f"{name}: {arm.status}"
        if isinstance(arm, MeasuredArm):
            if arm.wrong and part.figure != "error over eager's":
                return f"{name}: its output is wrong"
            arms.append(arm)
    return FIGURES[part.figure][2](race, *arms) if len(arms) == len(part.arms) else None


# Verdicts -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """A part in one race or in the mean of several: its figure in words, ``holds``, ``fails`` or ``open``, and why."""

    races: tuple[MeasuredRace, ...]
    shown: str
    outcome: str
    why: str = ""


def places(part: Part, shown: Sequence[MeasuredRace]) -> list[Place]:
    """The races that measured the part; of several rows of a race, the first with its arms on the newest torch."""
    ranked = sorted(newest(shown), key=torch_version, reverse=True)  # stable: keeps the order within a release
    first: dict[tuple[str, ...], tuple[MeasuredRace, Figure | str]] = {}
    for wanted in part.races:
        for race in ranked:
            if race.case.race == wanted and (measured := measure(part, race)) is not None:
                first.setdefault((option(race, "gpu"), *wanted), (race, measured))
    if not part.mean:
        return [_place(part, (race,), measured) for race, measured in first.values()]
    measured_in = [(race, each) for race, each in first.values() if isinstance(each, Figure)]
    if len({race.case.race for race, _ in measured_in}) < len(part.races):
        return []
    low, value, high = (
        math.exp(sum(math.log(getattr(each, end) or 1e-300) for _, each in measured_in) / len(measured_in))
        for end in ("low", "value", "high")
    )
    mean = Figure(low, value, high, f"{cells.times(value)}, the mean of {len(measured_in)} races")
    return [_place(part, tuple(race for race, _ in measured_in), mean)]


def _place(part: Part, races: tuple[MeasuredRace, ...], measured: Figure | str) -> Place:
    if isinstance(measured, str):
        return Place(races, cells.NOTHING, "fails", measured)
    if measured.high < part.low:
        return Place(races, measured.shown, "fails", "less")
    if measured.low > part.high:
        return Place(races, measured.shown, "fails", "more")
    held = part.low <= measured.low and measured.high <= part.high
    return Place(races, measured.shown, "holds" if held else "open")


def verdict(outcomes: Sequence[str]) -> str:
    """The joint verdict of places: ``holds``, ``fails``, ``cannot be told``, in part, or that nothing was measured."""
    found = set(outcomes)
    if not found:
        return NOT_MEASURED
    if found == {"open"}:
        return UNTOLD
    if len(found) == 1:
        return outcomes[0]
    if {"holds", "fails"} <= found:
        return "holds in part"
    return f"{'holds' if 'holds' in found else 'fails'} in part, the rest {UNTOLD}"


# The page -------------------------------------------------------------------------------------------------------------


def page(rows: Rows, claims: Mapping[int, Claim] | None = None) -> str:
    """All claims by theme: a line for each with its verdict, and below it, folded, the measurements."""
    # First the races that were run for one question: they have its arms, and enough rounds for it.
    # The extra rows "host" come from a machine shared by several runs: their noise leaves most claims open.
    extra = (race for race in extra_races(rows) if race.extra != "host")
    shown = (*extra, *races_of(rows))
    parts: list[str] = []
    theme = ""
    for claim in (known_claims() if claims is None else claims).values():
        if claim.theme != theme:
            theme = claim.theme
            parts.append(f"## {theme}")
        looked = [(part, places(part, shown)) for part in claim.parts]
        said = verdict([place.outcome for _, found in looked for place in found])
        text = re.sub("`([^`]+)`", r"<code>\1</code>", claim.text)  # a summary is HTML
        summary = f"<summary>{text} <b>{said[0].upper()}{said[1:]}.</b></summary>"
        opened = f'<details markdown="1" id="claim-{claim.number}">'
        parts += [f"{opened}\n{summary}", *_details(claim, looked), "</details>"]
    return "\n\n".join(parts)


def _details(claim: Claim, looked: Sequence[tuple[Part, Sequence[Place]]]) -> list[str]:
    lines = [line for part, found in looked for line in _lines(part, found)]
    races = list(dict.fromkeys(race for _, found in looked for place in found for race in place.races))
    commands = "\n".join(commands_of(races))
    return [
        tables.markdown(HEAD, lines, left=True),
        *([claim.note] if claim.note else []),
        *([f"Not measured here: {claim.not_here}"] if claim.not_here else []),
        *([f"{machines(races)}. Measure it again:\n\n```sh\n{commands}\n```"] if commands else []),
    ]


def _lines(part: Part, found: Sequence[Place]) -> list[tuple[str, ...]]:
    of = FIGURES[part.figure][0] + " over ".join(part.arms)
    lines: list[tuple[str, ...]] = []
    for place in found:
        where = ", ".join(place.races[0].case.race[1:5]) if len(place.races) == 1 else f"{len(place.races)} races"
        so = place.outcome + (f": {place.why}" if place.why else "")
        lines.append((part.says, of, where, place.shown, part.claimed, so))
    if missing := len(part.races) - len({race.case.race for place in found for race in place.races}):
        lines.append((part.says, of, cells.race_count(missing), cells.NOTHING, part.claimed, NOT_MEASURED))
    return lines
