"""Rows as one Markdown document: what to run first, then the tables, the reasons and how to measure it again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.record import Result
from benchmarks.report import advice, cells, summary, tables, ways
from benchmarks.report.commands import commands_of
from benchmarks.report.environments import used_by
from benchmarks.report.families import by_family, headline, ordered, titles
from benchmarks.report.markdown import escaped, race_table, table
from benchmarks.report.race import Race, races


def report(results: Iterable[Result], environments: Mapping[str, Mapping[str, Any]]) -> str:
    """The whole report: each family in short, then a section a race, then the environments."""
    results = list(results)
    shown = ordered(races(results, environments))
    families = by_family(shown)
    parts = ["# Report"]
    if not shown:
        parts.append("No rows.")
    for name, chosen in families.items():
        parts += [f"## {name}", " ".join(summary.sentences(chosen))]
        parts += _ways(chosen) if ways.is_comparison(chosen) else [table(*headline(chosen, titles(chosen)))]
    for chosen in families.values():
        for race in () if ways.is_comparison(chosen) else chosen:
            parts += _race(race)
    if known := used_by(results, environments):
        parts.append("## Environments")
        for name, facts in known.items():
            parts += [f"### {escaped(name)}", "\n".join(f"- {escaped(key)}: {escaped(fact)}" for key, fact in facts)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _ways(chosen: Sequence[Race]) -> list[str]:
    groups = ways.groups(chosen)
    rows = [(group.title, *row) for group in groups for row in ways.rows(group)]
    failures = [f"- {escaped(f'{race.title}: {cells.failure(r)}')}" for race in chosen for r in race.failures]
    return [table(*cells.filled(("input", *ways.HEAD), rows)), "\n".join(failures), ways.NOTE, *_measured_by(chosen)]


def _race(race: Race) -> list[str]:
    parts = [f"## {race.title}", advice.lead(race), cells.subject(race) + ".", race_table(race)]
    parts.append(" ".join(cells.notes(race)))
    if race.arms:
        parts += ["The win taken apart:", table(*cells.filled(tables.DECOMPOSITION, tables.decomposition_rows(race)))]
    head, compiled = cells.compiles(race)
    if compiled:
        parts += ["What compiling cost:", table(head, compiled)]
    if troubles := [line for arm in race.arms for line in cells.troubles(arm)]:
        parts += ["Graph breaks and recompiles:", "\n".join(f"- {escaped(line)}" for line in troubles)]
    return [*parts, *_measured_by([race])]


def _measured_by(chosen: Sequence[Race]) -> list[str]:
    commands = commands_of(chosen)
    return ["Measured by:", "```\n" + "\n".join(commands) + "\n```"] if commands else []
