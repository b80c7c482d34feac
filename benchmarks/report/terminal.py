"""Rows as tables in the terminal, readable at 80 columns: what does not fit side by side is stacked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchmarks.record import Result
from benchmarks.report import advice, cells, numbers, summary, ways
from benchmarks.report.families import by_family, fastest, headline_arms, ordered, titles
from benchmarks.report.race import Arm, Race, races

ARM_WIDTH = 16  # at least; names wrap at their spaces
STYLES = {"faster": "green", "slower": "red", "undetermined": "yellow", "reference": "dim"}


def render(
    results: Iterable[Result], environments: Mapping[str, Mapping[str, Any]], console: Console | None = None
) -> None:
    """Print every family in short, then every race: what to run, times over upstream's best, costs, what failed.

    Args:
        results: Rows of any number of races.
        environments: Environment rows by the id that results name.
        console: Where to print; standard output if None. Its width decides what is stacked.
    """
    console = console or Console()
    shown = ordered(races(results, environments))
    if not shown:
        console.print("No rows.")
    families = by_family(shown)
    for name, chosen in families.items():
        _print_family(name, chosen, titles(chosen), console)
    for chosen in families.values():
        for race in () if ways.is_comparison(chosen) else chosen:
            _print_race(race, console)
    if len(shown) > 1:  # what a run ends with is what is on the screen then
        console.print()
        for name, chosen in families.items():
            _say(f"{name}: {' '.join(summary.sentences(chosen))}", console)


def _say(line: str, console: Console, style: str = "") -> None:
    console.print(Text(line, style=style))


def _print_family(name: str, chosen: Sequence[Race], named: Mapping[Race, str], console: Console) -> None:
    console.print()
    _say(name, console, "bold")
    _say(" ".join(summary.sentences(chosen)), console)
    if ways.is_comparison(chosen):
        table = _ways(chosen)
    elif len(chosen) > 1:
        table = _headline(chosen, named)
    else:
        return  # the race's own tables follow, and say the same
    console.print()
    console.print(table)
    if ways.is_comparison(chosen):
        for line in (*(f"{race.title}: {cells.failure(r)}" for race in chosen for r in race.failures), ways.NOTE):
            _say(line, console, "dim")


def _headline(chosen: Sequence[Race], named: Mapping[Race, str]) -> Table:
    """Ours over upstream's best, a line a race, and the worst row; where nothing is ours the fastest over eager."""
    rows: list[list[Text]] = []
    if not any(race.ours for race in chosen):
        for race in chosen:
            arm = fastest(race)
            gain = _over_best(race, arm, race.reference) if arm else Text(numbers.NOTHING)
            rows.append([Text(named[race]), Text(numbers.significant(arm.p50 if arm else None)), gain])
        return _filled("The fastest over eager", ("ms a call", "× eager"), rows, first="race")
    for race, arm, title in headline_arms(chosen, named):
        best, tuned = race.best_shipped, race.best_tuned
        times = [numbers.significant(shown.p50 if shown else None) for shown in (best, arm)]
        over = [_over_best(race, arm, best) if arm else Text(numbers.NOTHING) for best in (best, tuned)]
        rows.append([Text(title), *map(Text, times), *over])
    columns = ("theirs", "ours", "× as shipped", "× tuned")
    return _filled("Our speed-up over upstream's best; ms a call", columns, rows, first="race")


def _ways(chosen: Sequence[Race]) -> Table:
    """Ways that ran alone, by input, the fastest first."""
    columns = ("p50 ms", "over the fastest", "kernels", "MiB", "error", "× floor")
    rows = []
    for group in ways.groups(chosen):
        rows.append([Text(group.title, style="dim"), *[Text("")] * len(columns)])
        for name, p50, _, over, *more in ways.rows(group):
            rows.append([Text(name), Text(p50), _verdict(over), *map(Text, more[:4])])
    return _filled("Ways compared; each ran alone", columns, rows, first="way")


def _filled(title: str, columns: Sequence[str], rows: Sequence[Sequence[Text]], *, first: str = "arm") -> Table:
    """A table of these rows without the columns in which none holds anything."""
    kept = [
        index + 1
        for index in range(len(columns))
        if not rows or any(row[index + 1].plain not in cells.EMPTY for row in rows)
    ]
    table = arms_table(title, *(columns[index - 1] for index in kept), first=first)
    for row in rows:
        table.add_row(row[0], *(row[index] for index in kept))
    return table


def _print_race(race: Race, console: Console) -> None:
    console.print()
    console.print(Text(race.title, style="bold"))
    console.print(Text(advice.lead(race)))
    console.print(Text(cells.subject(race), style="dim"))
    if race.arms:
        times, costs = _times(race, wide=True), _costs(race, wide=True)
        tables = [times if _fits(times, console) else _times(race, wide=False)]
        if not _fits(times, console) and any(arm.result.case.impl == "zoo" for arm in race.arms):
            tables.append(_against_upstream(race))
        if not _fits(times, console) and any(arm.host_ms is not None for arm in race.arms):
            tables.append(_host(race))
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


def arms_table(title: str, *columns: str, first: str = "arm") -> Table:
    """An empty table whose first column holds names, of arms if nothing else is said."""
    table = Table(
        title=Text(title), title_justify="left", title_style="bold", box=None, padding=(0, 1, 0, 0), pad_edge=False
    )
    table.add_column(Text(first, style="underline"), overflow="fold", min_width=ARM_WIDTH)
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
        columns += ["× best as shipped", "× best tuned", *cells.HOST_HEAD]
    rows = []
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
            row += map(Text, cells.host(arm))
        rows.append(row)
    return _filled(title, columns, rows)


def _against_upstream(race: Race) -> Table:
    rows = [
        [Text(cells.name(arm)), *(_over_best(race, arm, best) for best in (race.best_shipped, race.best_tuned))]
        for arm in race.arms
        if arm.result.case.impl == "zoo"
    ]
    return _filled("Our speed-up over upstream's best", ("× best as shipped", "× best tuned"), rows)


def _host(race: Race) -> Table:
    rows = [list(map(Text, (cells.name(arm), *cells.host(arm)))) for arm in race.arms]
    return _filled("How long a call keeps the host busy, and device time without a kernel", cells.HOST_HEAD, rows)


def _over_best(race: Race, arm: Arm, best: Arm | None) -> Text:
    text = _verdict(cells.verdict(race, arm, best))
    text.plain = cells.speedup(race, arm, best)
    return text


def _costs(race: Race, wide: bool) -> Table:
    columns = ["cold s", "warm s", "g/b/r", "kernels", "MiB", "error", "break-even"]
    if wide:
        columns = ["cold s", "warm s", "capture s", "first result s", *columns[2:6], "eager's", *columns[6:]]
    rows = []
    for arm in race.arms:
        cold = arm.result.cold
        row = [cells.name(arm), cells.seconds(cold), cells.seconds(arm.warm)]
        if wide:
            row += [numbers.significant(cold.capture if cold else None)]
            row += [numbers.significant(cold.time_to_first_result if cold else None)]
        row += [cells.compiler_counts(arm.result.counted), cells.kernels(arm), cells.memory(arm), cells.error(arm)]
        if wide:
            row += [cells.eager_error(arm)]
        row += [cells.break_even(race, arm)]
        rows.append(list(map(Text, row)))
    return _filled("Compile s, graphs/breaks/recompiles, peak memory, break-even cold/warm", columns, rows)
