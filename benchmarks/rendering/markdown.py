"""Rows as Markdown: whole reports, and the pieces that generated tables in the docs are made of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.rendering import cells, numbers
from benchmarks.rendering.commands import commands_of
from benchmarks.rendering.race import Arm, Race, races
from benchmarks.result import Compile, Result


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table: the first column to the left, the others to the right; a pipe in a cell is escaped."""
    lines = [list(head), ["---"] + ["---:"] * (len(head) - 1), *(list(row) for row in rows)]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def race_table(race: Race) -> str:
    """All arms of a race, fastest first, the ones that failed named below with their reasons."""
    reference = race.reference
    over = reference.name if reference else "eager"
    head = (
        "arm",
        "p50 ms",
        "p95 ms",
        f"over {over}",
        "over best as shipped",
        "over best tuned",
        "compile s, cold / warm",
        "graphs / breaks / recompiles",
        "kernels",
        "memory MiB",
        "error",
        "times the floor",
        "of peak bandwidth / FLOP/s",
        "break-even calls, cold / warm",
    )
    rows = [
        (
            cells.name(arm),
            numbers.significant(arm.p50),
            numbers.significant(arm.p95),
            *(cells.speedup_and_verdict(race, arm, best) for best in (reference, race.best_shipped, race.best_tuned)),
            _pair(cells.seconds(arm.result.cold), cells.seconds(arm.result.warm)),
            cells.compiler_counts(arm.result.cold).replace("/", " / "),
            cells.kernels(arm),
            cells.memory(arm),
            cells.error(arm),
            cells.times_floor(arm),
            cells.utilisation(arm),
            cells.break_even(race, arm).replace("/", " / "),
        )
        for arm in race.arms
    ]
    parts = [table(head, rows)] if rows else []
    if race.failures:
        parts.append("\n".join(f"- {_escaped(cells.failure(result))}" for result in race.failures))
    return "\n\n".join(parts)


def compile_table(race: Race) -> str:
    """What compiling cost each arm that compiles: start-up, compile, capture and first result, cold and warm."""
    head = (
        "arm",
        "compile s, cold / warm",
        "first result s, cold / warm",
        "start-up s",
        "capture s",
        "graphs",
        "breaks",
        "recompiles",
        "cache hits, cold / warm",
    )
    rows = []
    for arm in race.arms:
        cold, warm = arm.result.cold or Compile(), arm.result.warm or Compile()
        if arm.result.case.strategy == "eager" and cold.capture is None:
            continue
        rows.append(
            (
                cells.name(arm),
                _pair(numbers.significant(cold.seconds), numbers.significant(warm.seconds)),
                _pair(numbers.significant(cold.time_to_first_result), numbers.significant(warm.time_to_first_result)),
                numbers.significant(cold.start_up),
                numbers.significant(cold.capture),
                numbers.count(cold.graphs),
                str(len(cold.breaks)),
                str(len(cold.recompiles)),
                _pair(numbers.count(cold.cache_hits), numbers.count(warm.cache_hits)),
            )
        )
    failures = [result for result in race.failures if result.case.strategy != "eager"]
    parts = [table(head, rows)] if rows else ["No arm that compiles ran."]
    if failures:
        parts.append("\n".join(f"- {_escaped(cells.failure(result))}" for result in failures))
    return "\n\n".join(parts)


def notes(race: Race) -> list[str]:
    """The sentences below a race's table: upstream's best arms by name, clock, noise and what is odd."""
    return [*(cells.bests(race) if race.arms else []), *race.notes]


def report(results: Iterable[Result], environments: Mapping[str, Mapping[str, Any]]) -> str:
    """A whole report: a section a race, with what broke graphs or made them recompile, and how to measure it again."""
    shown = races(results, environments)
    parts = ["# Report"]
    if not shown:
        parts.append("No rows.")
    for race in shown:
        parts += [f"## {race.title}", cells.subject(race) + ".", race_table(race), " ".join(notes(race))]
        if troubles := [line for arm in race.arms for line in _troubles(arm)]:
            parts += ["Graph breaks and recompiles:", "\n".join(troubles)]
        if commands := commands_of([race]):
            parts += ["Measured by:", "```\n" + "\n".join(commands) + "\n```"]
    return "\n\n".join(part for part in parts if part) + "\n"


def _troubles(arm: Arm) -> list[str]:
    cold = arm.result.cold
    if cold is None:
        return []
    lines = []
    for what, reasons in (("break", cold.breaks), ("recompile", cold.recompiles)):
        for reason in dict.fromkeys(reasons):
            often = f"{reasons.count(reason)}× " if reasons.count(reason) > 1 else ""
            lines.append(f"- {arm.name}: {often}{what}: {_escaped(cells.shortened(reason))}")
    return lines


def _pair(first: str, second: str) -> str:
    return first if first == second == numbers.NOTHING else f"{first} / {second}"


def _escaped(text: str) -> str:
    """Reasons come from error messages: keep them from being read as Markdown or HTML."""
    for mark in "\\`*_<>[]":
        text = text.replace(mark, f"\\{mark}")
    return text
