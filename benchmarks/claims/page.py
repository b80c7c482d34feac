"""The page of claims: a line for each with its verdict, and below it, folded, what was measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from benchmarks.claims.claim import CLAIMS, Claim, Part, commands
from benchmarks.claims.judge import FIGURES, NOT_MEASURED, Broken, Place, claimed, of_claim, of_part, places
from benchmarks.record import Rows
from benchmarks.report import cells, markdown
from benchmarks.report.model import MeasuredRace, extra_races, races_of
from benchmarks.report.selection import machines

HEAD = ("it says", "of", "race", "measured", "claimed", "so")
# Of more races than these the table shows the least, the middle and the most; they all count.
MOST_PLACES = 6
# Races that were not measured are named if they are few; the commands name all.
MOST_NAMED = 2


def all_claims(options: Mapping[str, str], rows: Rows, claims: Mapping[int, Claim] = CLAIMS) -> str:
    """All claims by theme: ``claims``. ValueError on an option."""
    if options:
        raise ValueError("the page shows all claims; it takes no options")
    parts: list[str] = []
    theme = ""
    for claim in claims.values():
        if claim.theme != theme:
            theme = claim.theme
            parts.append(f"## {theme}")
        parts += [
            f'<details markdown="1" id="claim-{claim.number}">\n<summary><b>{claim.number}. {claim.title}</b>: '
            f"{of_claim(claim, _all_races(rows)).brief}</summary>",
            one_claim({"id": str(claim.number)}, rows, claims),
            "</details>",
        ]
    return "\n\n".join(parts)


def one_claim(options: Mapping[str, str], rows: Rows, claims: Mapping[int, Claim] = CLAIMS) -> str:
    """A claim with all that was measured of it: ``claim id=10``. ValueError on a claim that does not exist."""
    claim = _claim(options, claims)
    shown = _all_races(rows)
    looked = [(part, places(part, shown)) for part in claim.parts]
    parts = [f"> {claim.text}"]
    if looked:
        parts.append(markdown.table(HEAD, [line for part, found in looked for line in _lines(part, found)], left=True))
    parts.append(f"Verdict: *{of_claim(claim, shown).text}*.")
    if claim.note:
        parts.append(claim.note)
    if claim.not_here:
        parts.append(f"Not measured here: {claim.not_here}")
    if where := machines(race for _, found in looked for place in found for race in place.races):
        parts.append(f"{where}.")
    if claim.parts:
        parts.append("```sh\n" + "\n".join(commands(claim.parts)) + "\n```")
    return "\n\n".join(parts)


def verdict(options: Mapping[str, str], rows: Rows, claims: Mapping[int, Claim] = CLAIMS) -> str:
    """A claim's verdict in running text: ``verdict id=10``."""
    return of_claim(_claim(options, claims), _all_races(rows)).text


TABLES: dict[str, Callable[[Mapping[str, str], Rows], str]] = {"claim": one_claim, "claims": all_claims}


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
    def line(where: str, measured: str, so: str) -> tuple[str, ...]:
        return part.says, FIGURES[part.figure][0] + " over ".join(part.arms), where, measured, claimed(part), so

    if not found:
        named = [", ".join((place.model, place.input, place.workload, place.dtype)) for place in part.where]
        where = "; ".join(named) if len(named) <= MOST_NAMED else cells.race_count(len(named))
        return [line(where, NOT_MEASURED, "")]
    shown = list(found)
    if len(found) > MOST_PLACES:
        ranked = sorted((p for p in found if not isinstance(p.measured, Broken)), key=_value)
        shown = [ranked[0], ranked[len(ranked) // 2], ranked[-1]] if ranked else []
        shown += [place for place in found if isinstance(place.measured, Broken)][:MOST_PLACES]
    lines = [line(_races(p), _measured(p), p.outcome + (f": {p.why}" if p.why else "")) for p in shown]
    together = of_part(part, found)
    if len(found) > 1 or not together.complete:
        count = cells.race_count(len(found)) + ("" if together.complete else f" of {len(part.where)}")
        lines.append(line(count, cells.NOTHING, together.text))
    return lines


def _value(place: Place) -> float:
    assert not isinstance(place.measured, Broken)
    return place.measured.value


def _measured(place: Place) -> str:
    return cells.NOTHING if isinstance(place.measured, Broken) else place.measured.shown


def _races(place: Place) -> str:
    if len(place.races) > 1:
        return cells.race_count(len(place.races))
    case = place.races[0].case
    return ", ".join((case.model, case.input, case.workload, case.dtype))
