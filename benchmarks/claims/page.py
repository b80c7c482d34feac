"""Blocks of the page of claims: what was measured of a claim, with its verdict, and an overview of all."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from benchmarks.claims import CLAIMS
from benchmarks.claims.claim import Claim, Part, commands
from benchmarks.claims.figures import Broken
from benchmarks.claims.verdicts import NOT_MEASURED, Place, Verdict, claimed, of_claim, of_part, places
from benchmarks.record import Rows
from benchmarks.report import cells, markdown
from benchmarks.report.model import MeasuredRace, extra_races, races_of
from benchmarks.report.selection import machines

HEAD = ("it says", "of", "race", "measured", "claimed", "so")
OVERVIEW = ("claim", "about", "verdict")
# Of more races than these the table shows the least, the middle and the most; they all count.
MOST_PLACES = 6
# Races that were not measured are named if they are few; the commands name all.
MOST_NAMED = 2


def claim_table(options: Mapping[str, str], rows: Rows, claims: Mapping[int, Claim] = CLAIMS) -> str:
    """A claim with all that was measured of it: ``claim id=10``.

    Raises:
        ValueError: On an option other than ``id``, or a claim that does not exist.
    """
    claim = _claim(options, claims)
    shown = _all_races(rows)
    parts = [f"> {claim.text}"]
    looked = [(part, places(part, shown)) for part in claim.parts]
    if looked:
        lines = [line for part, found in looked for line in _lines(part, found)]
        parts.append(markdown.table(HEAD, lines, left=True))
    parts.append(f"Verdict: *{of_claim(claim, shown).text}*.")
    if claim.not_here:
        parts.append(f"Not measured here: {claim.not_here}")
    if where := machines(race for _, found in looked for place in found for race in place.races):
        parts.append(f"{where}.")
    if claim.parts:
        parts.append("```sh\n" + "\n".join(commands(claim.parts)) + "\n```")
    return "\n\n".join(parts)


def overview(options: Mapping[str, str], rows: Rows, claims: Mapping[int, Claim] = CLAIMS) -> str:
    """All claims with their verdicts in few words, each linked to its section: ``claims``."""
    if options:
        raise ValueError("the overview shows all claims; it takes no options")
    shown = _all_races(rows)
    lines = [
        (f"[{claim.number}](#{slug(heading(claim))})", claim.title, of_claim(claim, shown).brief)
        for _, claim in sorted(claims.items())
    ]
    return markdown.table(OVERVIEW, lines, left=True)


def verdict(options: Mapping[str, str], rows: Rows, claims: Mapping[int, Claim] = CLAIMS) -> str:
    """A claim's verdict in running text: ``verdict id=10``."""
    return of_claim(_claim(options, claims), _all_races(rows)).text


def heading(claim: Claim) -> str:
    """The title of a claim's section on the page."""
    return f"{claim.number}. {claim.title}"


def slug(title: str) -> str:
    """What the documentation's generator makes of a heading, for links to it."""
    return re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower())


def _all_races(rows: Rows) -> tuple[MeasuredRace, ...]:
    """First those that were run for a question: they have its arms, and enough rounds for it."""
    return (*extra_races(rows), *races_of(rows))


def _claim(options: Mapping[str, str], claims: Mapping[int, Claim]) -> Claim:
    if options.keys() != {"id"}:
        raise ValueError("a claim is named by its number and nothing else; give id=10")
    number = options["id"]
    if not number.isdecimal() or int(number) not in claims:
        raise ValueError(f"there is no claim {number}; there is: {min(claims)} to {max(claims)}")
    return claims[int(number)]


def _lines(part: Part, found: Sequence[Place]) -> list[tuple[str, ...]]:
    line = partial(_line, part)
    if not found:
        named = [", ".join((place.model, place.input, place.workload, place.dtype)) for place in part.where]
        where = "; ".join(named) if len(named) <= MOST_NAMED else _count(len(named))
        return [line(where, NOT_MEASURED, Verdict(NOT_MEASURED, ""))]
    shown = list(found)
    if len(found) > MOST_PLACES:
        ranked = sorted((p for p in found if not isinstance(p.measured, Broken)), key=_value)
        shown = [ranked[0], ranked[len(ranked) // 2], ranked[-1]] if ranked else []
        shown += [place for place in found if isinstance(place.measured, Broken)][:MOST_PLACES]
    lines = [line(_races(place), _measured(place), _so(place)) for place in shown]
    together = of_part(part, found)
    if len(found) > 1 or not together.complete:
        count = _count(len(found)) if together.complete else f"{_count(len(found))} of {len(part.where)}"
        lines.append(line(count, cells.NOTHING, together))
    return lines


def _line(part: Part, where: str, measured: str, verdict: Verdict) -> tuple[str, ...]:
    return part.says, part.figure.name, where, measured, claimed(part), verdict.text


def _value(place: Place) -> float:
    assert not isinstance(place.measured, Broken)
    return place.measured.value


def _measured(place: Place) -> str:
    return "–" if isinstance(place.measured, Broken) else place.measured.shown


def _so(place: Place) -> Verdict:
    return Verdict(place.outcome, place.outcome + (f": {place.why}" if place.why else ""))


def _races(place: Place) -> str:
    if len(place.races) > 1:
        return _count(len(place.races))
    case = place.races[0].case
    return ", ".join((case.model, case.input, case.workload, case.dtype))


def _count(races: int) -> str:
    return f"{races} race{'s' * (races != 1)}"


TABLES: dict[str, Callable[[Mapping[str, str], Rows], str]] = {"claim": claim_table, "claims": overview}
