"""Tables in Markdown: the pieces that reports and the generated tables in the docs are made of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from benchmarks.report import cells
from benchmarks.report.race import Race


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, left: bool = False) -> str:
    """A Markdown table; a pipe in a cell is escaped.

    The first column is set to the left, the others, which are numbers, to the right; with ``left`` all to the left.
    """
    others = "---" if left else "---:"
    lines = [list(head), ["---"] + [others] * (len(head) - 1), *(list(row) for row in rows)]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def race_table(race: Race) -> str:
    """All arms of a race, fastest first: how fast, and below what it costs; last those that failed, with reasons."""
    parts = [table(*cells.speeds(race)), table(*cells.costs(race))] if race.arms else []
    if race.failures:
        parts.append("\n".join(f"- {escaped(cells.failure(result))}" for result in race.failures))
    return "\n\n".join(parts)


def compile_table(race: Race) -> str:
    """What compiling cost each arm that compiles: start-up, compile, capture and first result, cold and warm."""
    head, rows = cells.compiles(race)
    failures = [result for result in race.failures if result.case.strategy != "eager"]
    parts = [table(head, rows)] if rows else ["No arm that compiles ran."]
    if failures:
        parts.append("\n".join(f"- {escaped(cells.failure(result))}" for result in failures))
    return "\n\n".join(parts)


def escaped(text: str) -> str:
    """Reasons come from error messages: keep them from being read as Markdown or HTML."""
    for mark in "\\`*_<>[]":
        text = text.replace(mark, f"\\{mark}")
    return text
