"""Rows as tables in the terminal. What does not fit side by side stands below."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchmarks.record import Result
from benchmarks.report import advice, cells, tables
from benchmarks.report.model import EPSILON, MeasuredRace, races
from benchmarks.report.selection import by_family

SHORT_HEAD = 10
NAME_WIDTH = 20  # of the first column; longer names wrap
STYLES = {"faster": "green", "slower": "red", "undetermined": "yellow", "reference": "dim"}

# The commonest recompile of a model that was not written for regions, in the compiler's words.
KIND_DIFFERS = "dispatch key set mismatch"
RAW_INPUT = (
    " (the first block gets a tensor made outside inference mode, the others get one made inside; x = x + 0 before the "
    "blocks avoids the second graph)"
)
# Outputs of equal weights differ by rounding; by this many times that, the weights were not equal.
OTHER_WEIGHTS = 1e4


def render(
    results: Iterable[Result], environments: Mapping[str, Mapping[str, Any]], console: Console | None = None
) -> None:
    """Print every race: what to run, times over upstream's best, costs, what failed; last what was gained in each.

    Tables that are wider than the console, by default standard output, are stacked.
    """
    console = console or Console()
    shown = [race for chosen in by_family(races(results, environments)).values() for race in chosen]
    if not shown:
        console.print("No rows.")
    for race in shown:
        _print_race(race, console)
    if lines := advice.gains(shown):
        _say(console, "", "Ours against upstream's best as shipped:", *(f"  {line}" for line in lines))


def _say(console: Console, *lines: str, style: str = "") -> None:
    for line in lines:
        console.print(Text(line, style=style))


def _print_race(race: MeasuredRace, console: Console) -> None:
    console.print()
    _say(console, race.title, style="bold")
    _say(console, advice.lead(race))
    _say(console, cells.subject(race), style="dim")
    if race.arms:
        print_table(console, "How fast", tables.speeds(race))
        print_table(console, "What it costs", tables.costs(race))
    _say(console, "", *map(cells.failure, race.failures), style="red")
    _say(console, *cells.notes(race), style="dim")


def print_table(console: Console, title: str, table: tables.Table) -> None:
    """Print a table in as many pieces as the console's width needs, each with the first column."""
    head, rows = table
    # The words of a long head stand below each other; a short head and a figure stay on one line.
    words = [text.split() if len(text) > SHORT_HEAD else [text] for text in head]
    widths = [max(map(len, [*words[index], *(row[index] for row in rows)])) for index in range(len(head))]
    first = min(widths[0], NAME_WIDTH)
    pieces: list[list[int]] = [[]]
    for index in range(1, len(head)):
        if pieces[-1] and first + sum(1 + widths[other] for other in (*pieces[-1], index)) > console.width:
            pieces.append([])
        pieces[-1].append(index)
    for piece in pieces:
        left = console.width - sum(1 + widths[index] for index in piece)
        shown = Table(
            title=Text(title) if title and piece is pieces[0] else None,
            title_justify="left",
            title_style="bold",
            box=None,
            padding=(0, 1, 0, 0),
            pad_edge=False,
        )
        shown.add_column(Text(head[0], style="underline"), overflow="fold", width=min(widths[0], max(left, first)))
        for index in piece:
            shown.add_column(Text(head[index], style="underline"), justify="right", width=widths[index])
        for row in rows:
            figures = [Text(row[index], style=STYLES.get(cells.outcome(row[index]), "")) for index in piece]
            shown.add_row(Text(row[0]), *figures)
        console.print()
        console.print(shown)


# The advice on one model ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Regions:
    """What the model offers to compile by regions, a line each, and why it offers none."""

    found: Sequence[str]
    declared: bool
    obstacles: Sequence[str]
    none: str | None


def render_advice(race: MeasuredRace, calls: int, regions: Regions, console: Console) -> None:
    """Print which arm to run for so many calls, the figures behind it, and what prevents compilation by regions."""
    _say(console, "")
    verdict, *more = advice.verdict(race, calls)
    _say(console, verdict, style="bold")
    _say(console, *more)
    if lines := advice.how_to(race, calls):
        _say(console, "", "To run it this way:", *(f"  {line}" for line in lines))
    _say(console, "", cells.subject(race), style="dim")
    if race.arms:
        title = f"Total seconds for {cells.count(calls)} calls; break-even calls"
        print_table(console, title, tables.totals(race, calls))
        print_table(console, "Seconds before the first call; memory; relative error", tables.first_call(race))
    if failures := [_failure(result) for result in race.failures if not result.case.control]:
        _say(console, "", *failures, style="red")
    _say(console, "", *_obstacles(race, regions), "")
    _say(console, *_notes(race), style="dim")


def _obstacles(race: MeasuredRace, regions: Regions) -> list[str]:
    origin = "declared by the model" if regions.declared else "discovered"
    lines = [f"Regions, {origin}: {'; '.join(regions.found)}."] if regions.found else []
    if regions.none is not None:
        return [*lines, f"No regions: {regions.none}."]
    obstacles = list(regions.obstacles)
    for arm in race.arms:
        if arm.result.case.strategy == "regional" and not arm.result.case.cuda_graph and arm.result.cold is not None:
            reasons = (line.removeprefix(f"{arm.name}: ") for line in cells.troubles(arm))
            obstacles += [reason + (RAW_INPUT if KIND_DIFFERS in reason else "") for reason in reasons]
    obstacles += [_failure(r) for r in race.failures if r.case.strategy == "regional" and not r.case.cuda_graph]
    if not obstacles:
        return [*lines, "No obstacle to regional compilation was found."]
    return [*lines, "Obstacles to regional compilation:", *(f"- {obstacle}" for obstacle in obstacles)]


def _failure(result: Result) -> str:
    return cells.failure(result).removeprefix(f"{result.case.impl} ")


def _notes(race: MeasuredRace) -> list[str]:
    notes = cells.race_notes(race)
    checks = [arm.result.check for arm in race.arms if arm.result.check is not None]
    apart = max((check.eager_error for check in checks if check.eager_error is not None), default=0.0)
    if apart > OTHER_WEIGHTS * EPSILON[race.case.dtype]:
        notes.insert(
            0,
            "Eager outputs of the model differ between processes, so the errors here mean nothing: load the weights "
            "and inputs in the function, or draw them with torch's generator, which is seeded before each call of it.",
        )
    if any(arm.result.memory is not None and arm.result.memory.allocated is None for arm in race.arms):
        notes.append("Memory is measured on a GPU only.")
    notes.append(
        "g/b/r: graphs, graph breaks, recompiles. Totals are for one new process: they include the compiler's start-up "
        "and exclude imports and model set-up. The tables of the report exclude the start-up too."
    )
    return notes
