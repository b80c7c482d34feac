"""Rows as tables in the terminal. What does not fit side by side stands below."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchmarks.record import Result
from benchmarks.report import advice, cells, tables
from benchmarks.report.model import MeasuredRace, by_family, races

SHORT_HEAD = 10
NAME_WIDTH = 20  # of the first column; longer names wrap
STYLES = {"faster": "green", "slower": "red", "undetermined": "yellow", "reference": "dim"}


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
        _say(console, "", "Ours against upstream's best as shipped:", *(f"  {line}" for line in lines.values()))


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
