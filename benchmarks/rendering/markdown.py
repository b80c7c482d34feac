"""Rows as Markdown: whole reports, and the pieces that generated tables in the docs are made of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.rendering import cells
from benchmarks.rendering.commands import commands_of
from benchmarks.rendering.race import Race, races
from benchmarks.result import Result


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, left: bool = False) -> str:
    """A Markdown table; a pipe in a cell is escaped.

    The first column is set to the left, the others, which are numbers, to the right; with ``left`` all to the left.
    """
    others = "---" if left else "---:"
    lines = [list(head), ["---"] + [others] * (len(head) - 1), *(list(row) for row in rows)]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def race_table(race: Race) -> str:
    """All arms of a race, fastest first, the ones that failed named below with their reasons."""
    rows = [cells.race_row(race, arm) for arm in race.arms]
    parts = [table(cells.race_head(race), rows)] if rows else []
    if race.failures:
        parts.append("\n".join(f"- {_escaped(cells.failure(result))}" for result in race.failures))
    return "\n\n".join(parts)


def compile_table(race: Race) -> str:
    """What compiling cost each arm that compiles: start-up, compile, capture and first result, cold and warm."""
    rows = [cells.compile_row(arm) for arm in race.arms if cells.compiles(arm)]
    failures = [result for result in race.failures if result.case.strategy != "eager"]
    parts = [table(cells.COMPILE_HEAD, rows)] if rows else ["No arm that compiles ran."]
    if failures:
        parts.append("\n".join(f"- {_escaped(cells.failure(result))}" for result in failures))
    return "\n\n".join(parts)


def report(results: Iterable[Result], environments: Mapping[str, Mapping[str, Any]]) -> str:
    """A whole report: a section a race, with what broke graphs or made them recompile, and how to measure it again."""
    shown = races(results, environments)
    parts = ["# Report"]
    if not shown:
        parts.append("No rows.")
    for race in shown:
        parts += [f"## {race.title}", cells.subject(race) + ".", race_table(race), " ".join(cells.notes(race))]
        if troubles := [line for arm in race.arms for line in cells.troubles(arm)]:
            parts += ["Graph breaks and recompiles:", "\n".join(f"- {_escaped(line)}" for line in troubles)]
        if commands := commands_of([race]):
            parts += ["Measured by:", "```\n" + "\n".join(commands) + "\n```"]
    return "\n\n".join(part for part in parts if part) + "\n"


def _escaped(text: str) -> str:
    """Reasons come from error messages: keep them from being read as Markdown or HTML."""
    for mark in "\\`*_<>[]":
        text = text.replace(mark, f"\\{mark}")
    return text
