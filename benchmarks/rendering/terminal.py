"""Rows as tables in the terminal, readable at 80 columns: what does not fit side by side is stacked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchmarks.rendering import cells, numbers
from benchmarks.rendering.race import Arm, Race, races
from benchmarks.result import Result

ARM_WIDTH = 16  # at least; names wrap at their spaces
STYLES = {"faster": "green", "slower": "red", "undetermined": "yellow", "reference": "dim"}


def render(
    results: Iterable[Result], environments: Mapping[str, Mapping[str, Any]], console: Console | None = None
) -> None:
    """Print every race: times, what they are over upstream's best, what compiling cost, and what failed.

    Args:
        results: Rows of any number of races.
        environments: Environment rows by the id that results name.
        console: Where to print; standard output if None. Its width decides what is stacked.
    """
    console = console or Console()
    shown = races(results, environments)
    if not shown:
        console.print("No rows.")
    for race in shown:
        _print_race(race, console)


def _print_race(race: Race, console: Console) -> None:
    console.print()
    console.print(Text(race.title, style="bold"))
    console.print(Text(cells.subject(race), style="dim"))
    if race.arms:
        times, costs = _times(race, wide=True), _costs(race, wide=True)
        tables = [times if _fits(times, console) else _times(race, wide=False)]
        if not _fits(times, console) and any(arm.result.case.impl == "zoo" for arm in race.arms):
            tables.append(_against_upstream(race))
        tables.append(costs if _fits(costs, console) else _costs(race, wide=False))
        for table in tables:
            console.print()
            console.print(table)
    if race.failures:
        console.print()
    for result in race.failures:
        console.print(Text(cells.failure(result), style="red"))
    console.print()
    for line in cells.notes(race):
        console.print(Text(line, style="dim"))


def _fits(table: Table, console: Console) -> bool:
    """Whether every figure shows in full; the arms' names may wrap."""
    options = console.options.update(width=1000)
    needed = [
        1 + max(console.measure(cell, options=options).maximum for cell in (column.header, *column.cells))
        for column in table.columns[1:]
    ]
    return ARM_WIDTH + sum(needed) <= console.width


def arms_table(title: str, *columns: str) -> Table:
    """An empty table whose first column holds the arms' names."""
    table = Table(
        title=Text(title), title_justify="left", title_style="bold", box=None, padding=(0, 1, 0, 0), pad_edge=False
    )
    table.add_column(Text("arm", style="underline"), overflow="fold", min_width=ARM_WIDTH)
    for column in columns:
        table.add_column(Text(column, style="underline"), justify="right", no_wrap=True)
    return table


def _verdict(text: str) -> Text:
    return Text(text, style=STYLES.get(cells.outcome(text), ""))


def _times(race: Race, wide: bool) -> Table:
    reference = race.reference
    title = f"Speed-up over {reference.name}" if reference else "Times; no eager arm to compare with"
    columns = ["p50 ms", "p95 ms", "speed-up", "verdict", "× floor"]
    if wide:
        columns += ["× best as shipped", "× best tuned"]
    table = arms_table(title, *columns)
    for arm in race.arms:
        row = [
            Text(cells.name(arm)),
            Text(numbers.significant(arm.p50)),
            Text(numbers.significant(arm.p95)),
            Text(cells.speedup(race, arm, reference)),
            _verdict(cells.verdict(race, arm, reference)),
            Text(cells.times_floor(arm)),
        ]
        if wide:
            row += [_over_best(race, arm, best) for best in (race.best_shipped, race.best_tuned)]
        table.add_row(*row)
    return table


def _against_upstream(race: Race) -> Table:
    table = arms_table("Ours over upstream's best", "× best as shipped", "× best tuned")
    for arm in race.arms:
        if arm.result.case.impl == "zoo":
            table.add_row(
                Text(cells.name(arm)), *(_over_best(race, arm, best) for best in (race.best_shipped, race.best_tuned))
            )
    return table


def _over_best(race: Race, arm: Arm, best: Arm | None) -> Text:
    text = _verdict(cells.verdict(race, arm, best))
    text.plain = cells.speedup(race, arm, best)
    return text


def _costs(race: Race, wide: bool) -> Table:
    columns = ["cold s", "warm s", "g/b/r", "kernels", "MiB", "error", "break-even"]
    if wide:
        columns = ["cold s", "warm s", "capture s", "first result s", *columns[2:6], "eager's", *columns[6:]]
    table = arms_table("Compile s, graphs/breaks/recompiles, peak memory, break-even cold/warm", *columns)
    for arm in race.arms:
        cold = arm.result.cold
        row = [cells.name(arm), cells.seconds(cold), cells.seconds(arm.result.warm)]
        if wide:
            row += [numbers.significant(cold.capture if cold else None)]
            row += [numbers.significant(cold.time_to_first_result if cold else None)]
        row += [cells.compiler_counts(arm.result.counted), cells.kernels(arm), cells.memory(arm), cells.error(arm)]
        if wide:
            row += [cells.eager_error(arm)]
        row += [cells.break_even(race, arm)]
        table.add_row(*map(Text, row))
    return table
