"""The races of a report by family, in the order in which a reader looks for them."""

from __future__ import annotations

from collections.abc import Iterable

from benchmarks.rendering.race import Race
from benchmarks.rendering.selection import UPSTREAM

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


def _rank(name: str) -> int:
    if name in UPSTREAM:
        return list(UPSTREAM).index(name)
    return len(UPSTREAM) + (1 + LAST.index(name) if name in LAST else 0)
