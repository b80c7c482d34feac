"""Rows as one Markdown document: what to run first, then the tables, the reasons and how to measure it again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.record import Result
from benchmarks.report import advice, cells, summary, tables
from benchmarks.report.model import MeasuredRace, races
from benchmarks.report.selection import by_family, commands_of, ordered, titles, used_by


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, left: bool = False) -> str:
    """A Markdown table; a pipe in a cell is escaped.

    The first column is set to the left, the others, which are numbers, to the right; with ``left`` all to the left.
    """
    others = "---" if left else "---:"
    lines = [list(head), ["---"] + [others] * (len(head) - 1), *(list(row) for row in rows)]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def escaped(text: str) -> str:
    """Reasons come from error messages: keep them from being read as Markdown or HTML."""
    for mark in "\\`*_<>[]":
        text = text.replace(mark, f"\\{mark}")
    return text


def failures(results: Iterable[Result], before: str = "") -> str:
    """A list of what failed, with reasons; empty where nothing did."""
    return "\n".join(f"- {escaped(before + cells.failure(result))}" for result in results)


def race_table(race: MeasuredRace) -> str:
    """All arms of a race, fastest first: how fast, and below what it costs; last those that failed, with reasons."""
    parts = [table(*tables.speeds(race)), table(*tables.costs(race))] if race.arms else []
    return "\n\n".join(filter(None, [*parts, failures(race.failures)]))


def compile_table(race: MeasuredRace) -> str:
    """What compiling cost each arm that compiles: start-up, compile, capture and first result, cold and warm."""
    head, rows = tables.compiles(race)
    failed = [result for result in race.failures if result.case.strategy != "eager"]
    parts = [table(head, rows) if rows else "No arm that compiles ran.", failures(failed)]
    return "\n\n".join(filter(None, parts))


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
        if tables.are_alternatives(chosen):
            parts.append(table(*tables.alternatives_table(tables.alternatives(chosen))))
            parts += [failures(race.failures, f"{race.title}: ") for race in chosen]
            parts += [tables.ALTERNATIVES_NOTE, *_measured_by(chosen)]
        else:
            parts.append(table(*tables.family(chosen, titles(chosen))[0]))
    for chosen in families.values():
        for race in () if tables.are_alternatives(chosen) else chosen:
            parts += _race(race)
    if known := used_by(results, environments):
        parts.append("## Environments")
        for name, facts in known.items():
            parts += [f"### {escaped(name)}", "\n".join(f"- {escaped(key)}: {escaped(fact)}" for key, fact in facts)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _race(race: MeasuredRace) -> list[str]:
    parts = [f"## {race.title}", advice.lead(race), cells.subject(race) + ".", race_table(race)]
    parts.append(" ".join(cells.notes(race)))
    if race.arms:
        parts += ["The win taken apart:", table(*tables.filled(*tables.decomposition(race)))]
    head, compiled = tables.compiles(race)
    if compiled:
        parts += ["What compiling cost:", table(head, compiled)]
    if troubles := [line for arm in race.arms for line in cells.troubles(arm)]:
        parts += ["Graph breaks and recompiles:", "\n".join(f"- {escaped(line)}" for line in troubles)]
    return [*parts, *_measured_by([race])]


def _measured_by(chosen: Sequence[MeasuredRace]) -> list[str]:
    commands = commands_of(chosen)
    return ["Measured by:", "```\n" + "\n".join(commands) + "\n```"] if commands else []
