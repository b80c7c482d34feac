"""The races of a report by family, in the order in which a reader looks for them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from benchmarks.report import cells, numbers, tables
from benchmarks.report.race import Arm, Race
from benchmarks.report.selection import UPSTREAM

WORST = " · our worst result"
LAST = ("attention", "patterns", "claims")  # what explains the families, below all that can be used


def by_family(shown: Iterable[Race]) -> dict[str, list[Race]]:
    """Races by family: those with an upstream library as the documentation orders them, others, explanations last."""
    families: dict[str, list[Race]] = {}
    for race in shown:
        families.setdefault(race.case.family, []).append(race)
    return {name: families[name] for name in sorted(families, key=_rank)}  # a stable sort


def ordered(shown: Iterable[Race]) -> list[Race]:
    """The same races in one list."""
    return [race for races in by_family(shown).values() for race in races]


def titles(shown: Sequence[Race]) -> dict[Race, str]:
    """The races' titles without what all of them share; the machine stands in them where there are several."""
    parts = [(*race.case.race[1:], race.machine) for race in shown]
    differ = [index for index, values in enumerate(zip(*parts, strict=True)) if index < 2 or len(set(values)) > 1]
    return {race: " · ".join(of_one[index] for index in differ) for race, of_one in zip(shown, parts, strict=True)}


def headline_arms(races: Sequence[Race], named: Mapping[Race, str]) -> list[tuple[Race, Arm | None, str]]:
    """Ours of each race of a family under the race's name; the worst row is marked, and comes last if it is none."""
    worst = tables.worst_row(races) if any(race.ours for race in races) else None
    return [
        (race, arm, named[race] + (WORST if worst is not None and (race, arm) == worst[:2] else ""))
        for race, arm in tables.with_worst(races, worst)
    ]


def headline(races: Sequence[Race], named: Mapping[Race, str]) -> tuple[list[str], list[list[str]]]:
    """A family's table in the columns of ``tables.HEADLINE``, those that no race fills left out.

    Where nothing is ours the fastest arm of each race is held against eager.
    """
    if not any(race.ours for race in races):
        return cells.filled(("race", "the fastest: ms", "over eager"), [_fastest(race, named[race]) for race in races])
    lines = [(title, *tables.headline_row(race, arm)) for race, arm, title in headline_arms(races, named)]
    return cells.filled(("race", *tables.HEADLINE[1:]), lines)


def fastest(race: Race) -> Arm | None:
    """The fastest arm with a right output."""
    return next((arm for arm in race.arms if arm.p50 is not None and not arm.wrong), None)


def _fastest(race: Race, title: str) -> tuple[str, str, str]:
    arm = fastest(race)
    if arm is None:
        return title, "; ".join(cells.failure(result) for result in race.failures), numbers.NOTHING
    over = cells.speedup_and_verdict(race, arm, race.reference)
    return title, f"{arm.name}: {numbers.significant(arm.p50)}", over


def _rank(name: str) -> int:
    if name in UPSTREAM:
        return list(UPSTREAM).index(name)
    return len(UPSTREAM) + (1 + LAST.index(name) if name in LAST else 0)
