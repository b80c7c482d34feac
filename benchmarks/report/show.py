"""Displays rows: as tables in the terminal, as one offline HTML file, and as sentences that recommend an arm."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchmarks import stats
from benchmarks.record import RESULTS, Result, Rows
from benchmarks.report import cells, charts, tables
from benchmarks.report.model import UPSTREAM, MeasuredArm, MeasuredRace, by_family, commands_of, machines, races, titles
from zoo.advise import number, unusable

ROOT = Path(__file__).resolve().parents[2]
MOST_OPEN = 3  # races whose details are open from the start
MOST_DRAWN = 24  # races that have charts of their own; with more, families are folded and their charts the overview
SHORT_HEAD = 10
NAME_WIDTH = 20  # of the first column in the terminal; longer names wrap
STYLES = {"faster": "green", "slower": "red", "undetermined": "yellow", "reference": "dim", "fails": "red"}
MOST_NAMES = 3

# The terminal. What does not fit side by side stands below ------------------------------------------------------------


def render(
    results: Iterable[Result], environments: Mapping[str, Mapping[str, Any]], console: Console | None = None
) -> None:
    """Print every race: recommendation, speed-ups over upstream's best, costs, failures; last the gain of each."""
    console = console or Console()
    shown = [race for chosen in by_family(races(results, environments)).values() for race in chosen]
    if not shown:
        console.print("No rows.")
    for race in shown:
        _say(console, "")
        _say(console, race.title, style="bold")
        _say(console, lead(race))
        _say(console, cells.subject(race), style="dim")
        if race.arms:
            print_table(console, "How fast", tables.speeds(race))
            print_table(console, "What it costs", tables.costs(race))
        _say(console, "", *map(cells.failure, race.failures), style="red")
        _say(console, *cells.notes(race), style="dim")
    if lines := gains(shown):
        _say(console, "", "Ours against each upstream arm:", *(f"  {line}" for line in lines.values()))


def _say(console: Console, *lines: str, style: str = "") -> None:
    for line in lines:
        console.print(Text(line, style=style))


def print_table(console: Console, title: str, table: tables.Table) -> None:
    """Print a table in as many pieces as the console's width needs, each with the first column."""
    head, rows = table
    # A long head has one word per line; a short head and a figure stay on one line.
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
        above = Text(title) if piece is pieces[0] else None
        shown = Table(
            title=above, title_justify="left", title_style="bold", box=None, padding=(0, 1, 0, 0), pad_edge=False
        )
        shown.add_column(Text(head[0], style="underline"), overflow="fold", width=min(widths[0], max(left, first)))
        for index in piece:
            shown.add_column(Text(head[index], style="underline"), justify="right", width=widths[index])
        for row in rows:
            figures = [Text(row[index], style=STYLES.get(cells.outcome(row[index]), "")) for index in piece]
            shown.add_row(Text(row[0]), *figures)
        console.print()
        console.print(shown)


# The page: what was gained, charts, tables, reasons, commands that measure again --------------------------------------


def folder_of_reports(rows: Path) -> Path:
    """The folder for reports of a file or folder of rows: next to the rows; ``runs`` for committed rows."""
    folder = rows if rows.is_dir() else rows.parent
    return ROOT / "runs" if folder.resolve().is_relative_to(RESULTS) else folder


def write_html(rows: Rows, target: Path) -> Path:
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(report(rows.results, rows.environments), encoding="utf-8")
    return target


def report(results: Iterable[Result], environments: Mapping[str, Mapping[str, Any]]) -> str:
    """The whole page. It contains style and charts, and loads no files."""
    shown = races(results, environments)
    families = by_family(shown)
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["outcome"] = cells.outcome
    return environment.get_template("report.html.jinja").render(
        machines=machines(shown),
        counts=(len(shown), sum(len(race.arms) for race in shown), sum(len(race.failures) for race in shown)),
        families=[_family(name, chosen, few=len(shown) <= MOST_DRAWN) for name, chosen in families.items()],
        all_open=len(shown) <= MOST_OPEN,
        worst=tables.WORST,
    )


def _family(name: str, chosen: Sequence[MeasuredRace], *, few: bool) -> dict[str, Any]:
    named, gained = titles(chosen), gains(chosen)
    compiled = sorted(gained, key=lambda race: race.ours is None or race.ours.paid("cold") is None)
    chart = charts.speedups(chosen, named)
    return {
        "name": name,
        "opened": few,
        "gains": [gained[race] for race in compiled],
        "chart": charts.as_address(chart) if chart else None,
        "table": tables.family(chosen, named),
        "races": [_section(race, draw=few) for race in chosen],
    }


def _section(race: MeasuredRace, *, draw: bool) -> dict[str, Any]:
    chart = charts.break_even(race) if draw else None
    # Preparation, which no other figure includes.
    prepared = [
        f"{arm.name}: {what}, {cells.significant(seconds)} s"
        for arm in race.arms
        for what, seconds in arm.result.preparation.items()
    ]
    named_tables = {
        "Arms, fastest first": tables.speeds(race),
        "What that speed costs": tables.costs(race),
        "The win taken apart": tables.filled(*tables.decomposition(race)),
        "What compiling cost": tables.compiles(race),
        "Loss": tables.losses(race) or ([], []),
    }
    return {
        "title": race.title,
        "subject": cells.subject(race),
        "lead": lead(race),
        "chart": charts.as_address(chart) if chart else None,
        "tables": {name: table for name, table in named_tables.items() if race.arms and table[1]},
        "notes": [*cells.notes(race), *([f"Prepared once: {'; '.join(prepared)}."] if prepared else [])],
        "troubles": [line for arm in race.arms for line in cells.troubles(arm)],
        "failures": [(result.case.arm, result.status, result.reason or "") for result in race.failures],
        "commands": commands_of([race]),
    }


# Which arm of a race to run, and what was gained ----------------------------------------------------------------------


def lead(race: MeasuredRace) -> str:
    """The recommended arm in plain words; losses are stated as clearly as wins."""
    timed = [arm for arm in race.arms if arm.p50 is not None and not arm.wrong and arm.result.case.kernels]
    if not timed:
        return "No arm has a steady time and a correct output, so no advice is possible."
    fastest, *others = timed  # arms are sorted by time
    noise = race.noise(fastest)
    if cells.is_unusable(noise):
        return unusable(noise)
    milliseconds = f"{cells.significant(fastest.p50)} ms a call"
    if not others:
        return f"Only {fastest.name} has a steady time: {milliseconds}; no other arm to compare it with."
    ratios = [race.speedup(arm, fastest) for arm in others]
    if noise == math.inf or not any(ratio is not None and ratio.has_interval for ratio in ratios):
        return f"Too few rounds to tell the arms apart; measure again with at least {stats.MIN_ROUNDS} rounds."
    said = [f"{fastest.name} is the fastest, {milliseconds}{_against_upstream(race, fastest)}."]
    if fastest.paid("cold") is None:
        said.append("Compile times were not measured here.")
    elif found := _steps(race, timed):
        later = [f"from {cells.calls(calls)} calls on {arm.name}" for calls, arm in found[1:]]
        in_turn = ", ".join([f"{found[0][1].name} finishes first", *later])
        said.append(f"In a new process with empty caches {in_turn}.")
    if alike := [arm.name for arm in others if race.verdict(arm, fastest) == "undetermined"]:
        more = f" and {len(alike) - MOST_NAMES} more" if len(alike) > MOST_NAMES else ""
        said.append(f"No measurable difference to {fastest.name}: {', '.join(alike[:MOST_NAMES])}{more}.")
    return " ".join(said)


def gains(shown: Sequence[MeasuredRace]) -> dict[MeasuredRace, str]:
    """A line per race: the zoo against each upstream arm."""
    lines: dict[MeasuredRace, str] = {}
    for race, subject in titles(shown).items():
        if (ours := race.ours) is None or ours.p50 is None:
            continue
        theirs = [
            (arm.name, arm.cold_seconds, arm.p50, None if race.verdict(ours, arm) == "undetermined" else ratio.value)
            for arm in race.arms
            if arm.result.case.impl != "zoo" and arm.p50 is not None and not arm.wrong
            if (ratio := race.speedup(ours, arm)) is not None
        ]
        if theirs:
            told = f"{ours.name} {gain(ours.cold_seconds, ours.p50, theirs)}."
            noise = race.noise(ours)
            lines[race] = f"{subject}: {unusable(noise) if cells.is_unusable(noise) else told}"
    return lines


def gain(seconds: float | None, ms: float, over: Iterable[tuple[str, float | None, float, float | None]]) -> str:
    """What an arm costs and brings: ``compiles in 12.1 s, then takes 310 ms a call, 2× as fast as eager (620 ms)``."""
    # Over each arm: its name, seconds to compile, ms, and how many times as fast this one is, None if not measurably.
    told = [("" if seconds is None else f"compiles in {number(seconds)} s, then ") + f"takes {number(ms)} ms a call"]
    for name, paid, theirs, times in over:
        against = "not measurably faster or slower than" if times is None else f"{number(times)}× as fast as"
        told.append(f"{against} {name} ({'' if paid is None else f'{number(paid)} s to compile, '}{number(theirs)} ms)")
    return ", ".join(told)


def _steps(race: MeasuredRace, arms: Sequence[MeasuredArm]) -> list[tuple[int, MeasuredArm]]:
    """The arm with the least total time from each number of calls on, in a process with empty caches."""
    paid = {arm: seconds for arm in arms if (seconds := race.before(arm)) is not None}
    p50 = {arm: arm.p50 for arm in paid if arm.p50 is not None}
    if not p50:
        return []
    chosen = [(1, min(p50, key=lambda arm: paid[arm] * 1e3 + p50[arm]))]
    while True:
        now = chosen[-1][1]
        ahead = [
            (stats.break_even_calls(paid[arm] - paid[now], p50[now], p50[arm]), p50[arm], index)
            for index, arm in enumerate(p50)
            if paid[arm] > paid[now] and race.overtakes(arm, now)
        ]
        if not ahead:
            return chosen
        calls, _, index = min(ahead)
        chosen.append((int(calls), list(p50)[index]))


def _against_upstream(race: MeasuredRace, arm: MeasuredArm) -> str:
    """``, 4.2× faster than torch-geometric's best as shipped, ...``; or by how much ours lose to this arm."""
    if race.case.family not in UPSTREAM:
        return ""  # a model without an upstream library
    library = UPSTREAM[race.case.family]
    if arm.result.case.impl != "zoo":
        return f"; ours, {race.ours.name}, is {_compared(race, race.ours, arm)} it" if race.ours else ""
    whose = library + ("'" if library.endswith("s") else "'s")
    bests = [(race.best_shipped, "as shipped"), (race.best_tuned, "tuned")]
    said = [f"{_compared(race, arm, best)} {whose} best {how}" for best, how in bests if best is not None]
    return f", which is {' and '.join(said)}" if said else f"; no arm of {library} ran, so there is no comparison"


def _compared(race: MeasuredRace, arm: MeasuredArm, over: MeasuredArm) -> str:
    ratio, verdict = race.speedup(arm, over), race.verdict(arm, over)
    if ratio is None or verdict == "undetermined":
        return "not measurably faster or slower than"
    if verdict == "faster":
        return f"{cells.times(ratio.value)} faster than"
    return f"{cells.times(ratio.inverse.value)} slower than"
