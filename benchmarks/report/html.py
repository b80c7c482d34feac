"""Rows as one HTML file that opens offline: figures, tables, reasons, environments, the commands that measure again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup

from benchmarks.record import RESULTS, Result, Rows
from benchmarks.report import advice, bars, cells, costs, curves, numbers, summary, tables, ways
from benchmarks.report.commands import commands_of
from benchmarks.report.environments import used_by
from benchmarks.report.families import WORST, by_family, headline, headline_arms, ordered, titles
from benchmarks.report.race import Race, races
from benchmarks.report.selection import UPSTREAM

ROOT = Path(__file__).resolve().parents[2]
TEMPLATES = Path(__file__).parent / "templates"
MOST_OPEN = 3  # races whose details are open from the start; with more the leading sentences are the overview


@dataclass(frozen=True)
class Row:
    """One arm of one race in the table of all rows. ``outcome`` is what the table can be filtered by."""

    race: str
    anchor: str
    impl: str
    arm: str
    outcome: str
    cells: tuple[str, ...]
    reason: str
    command: str


ROW_HEAD = ("p50 ms", "over best as shipped", "over best tuned", "compile s, cold / warm", "memory MiB")


def report(results: Iterable[Result], environments: Mapping[str, Mapping[str, Any]]) -> str:
    """The whole page. It loads nothing: style, script and figures are in it."""
    results = list(results)
    shown = ordered(races(results, environments))
    named = titles(shown)
    anchors = {race: f"race-{number}" for number, race in enumerate(shown, start=1)}
    families = [
        _compared(name, chosen, anchors) if ways.is_comparison(chosen) else _family(name, chosen, anchors)
        for name, chosen in by_family(shown).items()
    ]
    template = _template()
    rows = [row for race in shown for row in _rows(race, named[race], anchors[race])]
    row_head = _without_empty(rows)
    return template.render(
        style=Markup((TEMPLATES / "report.css").read_text(encoding="utf-8")),
        script=Markup((TEMPLATES / "report.js").read_text(encoding="utf-8")),
        machines=list(dict.fromkeys(race.machine for race in shown)),
        counts=(len(shown), sum(len(race.arms) for race in shown), sum(len(race.failures) for race in shown)),
        families=families,
        all_open=len(shown) <= MOST_OPEN,
        row_head=row_head,
        rows=rows,
        impls=sorted({row.impl for row in rows}),
        outcomes=sorted({row.outcome for row in rows}),
        environments=used_by(results, environments),
    )


def folder_of_reports(rows: Path) -> Path:
    """Where reports of a file or folder of rows go: beside them, but not among the committed ones."""
    folder = rows if rows.is_dir() else rows.parent
    if folder.resolve().is_relative_to(RESULTS):  # rows and nothing else belong there
        folder = ROOT / "runs"
    return folder


def write_html(rows: Rows, target: Path) -> Path:
    """Write the HTML report of these rows; its path."""
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(report(rows.results, rows.environments), encoding="utf-8")
    return target


def _template() -> Template:
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["outcome"] = cells.outcome
    environment.tests["nothing"] = cells.EMPTY.__contains__
    return environment.get_template("report.html.jinja")


def _family(name: str, chosen: Sequence[Race], anchors: Mapping[Race, str]) -> dict[str, Any]:
    """A family whose races are shown one by one."""
    named = titles(chosen)
    anchor = anchors[chosen[0]].replace("race", "family")
    head, rows = headline(chosen, named)
    shown = [race for race, *_ in headline_arms(chosen, named)]
    return {
        "name": name,
        "anchor": anchor,
        "lead": " ".join(summary.sentences(chosen)),
        "library": UPSTREAM.get(name, "upstream"),
        "speedups": bars.speedups(chosen, [named[race] for race in chosen], f"{anchor}-speedups"),
        "head": head,
        "rows": [(anchors[race], row[0].endswith(WORST), row) for race, row in zip(shown, rows, strict=True)],
        "sections": [_section(race, anchors[race]) for race in chosen],
        "groups": [],
    }


def _compared(name: str, chosen: Sequence[Race], anchors: Mapping[Race, str]) -> dict[str, Any]:
    """A family of ways to do one thing, one race and one arm each: a single table of all."""
    groups = ways.groups(chosen)
    head, lines = cells.filled(ways.HEAD, [row for group in groups for row in ways.rows(group)])
    left = iter(lines)
    return {
        "name": name,
        "anchor": anchors[chosen[0]].replace("race", "family"),
        "lead": " ".join(summary.sentences(chosen)),
        "head": head,
        "groups": [
            (group.title, cells.subject(group.races[0]), [(anchors[race], next(left)) for race in group.races])
            for group in groups
        ],
        "failures": [(race.title, result.status, result.reason or "") for race in chosen for result in race.failures],
        "notes": [ways.NOTE, *dict.fromkeys(note for race in chosen for note in race.notes if note[0] == "!")],
        "troubles": [
            f"{race.case.model}, {race.case.input}: {line}"
            for race in chosen
            for arm in race.arms
            for line in cells.troubles(arm)
        ],
        "commands": commands_of(chosen),
        "sections": [],
    }


def _section(race: Race, anchor: str) -> dict[str, Any]:
    figures = [
        ("Latency", "Shorter is faster; the numbers lead to the table's rows.", bars.latency),
        ("Compile time against steady state", "", curves.compile_against_steady),
        ("Break-even", _without_start_up(race), curves.break_even),
        ("Memory", "", bars.memory),
        ("Utilisation", "", bars.utilisation),
        ("Loss", "Where the lines lie on each other, the arms train alike.", curves.losses),
    ]
    drawn = [(name, said, paint(race, f"{anchor}-{number}")) for number, (name, said, paint) in enumerate(figures)]
    return {
        "race": race,
        "title": race.title,
        "anchor": anchor,
        "subject": cells.subject(race),
        "lead": advice.lead(race),
        "figures": [figure for figure in drawn if figure[2] is not None],
        "speeds": cells.speeds(race),
        "costs": cells.costs(race),
        "decomposition": cells.filled(tables.DECOMPOSITION, tables.decomposition_rows(race)),
        "compile": cells.compiles(race),
        "prepared": _prepared(race),
        "troubles": [line for arm in race.arms for line in cells.troubles(arm)],
        "failures": [(result.case.arm, result.status, result.reason or "") for result in race.failures],
        "notes": [*cells.notes(race), *_warm_before(race)],
        "commands": commands_of([race]),
    }


def _without_start_up(race: Race) -> str:
    """That the figure's costs are those of a process in which the compiler runs, and what a new one adds."""
    adds = costs.start_up(race)
    if not adds:
        return ""
    return f"Where the compiler already runs; a new process adds {numbers.significant(adds)} s to whatever is compiled."


def _prepared(race: Race) -> list[str]:
    """What arms prepare once, which no other figure counts."""
    lines = []
    for arm in race.arms:
        for what, seconds in arm.result.preparation.items():
            lines.append(f"{arm.name}: {what}, {numbers.significant(seconds)} s")
    return lines


def _warm_before(race: Race) -> list[str]:
    """Arms whose cold figure is not quite one: something came from a cache."""
    hit = [arm.name for arm in race.arms if arm.result.cold and arm.result.cold.cache_hits]
    return [f"The cold compile of these hit a cache: {', '.join(hit)}."] if hit else []


def _rows(race: Race, title: str, anchor: str) -> list[Row]:
    rows = []
    for arm in race.arms:
        values = (
            numbers.significant(arm.p50),
            cells.speedup_and_verdict(race, arm, race.best_shipped),
            cells.speedup_and_verdict(race, arm, race.best_tuned),
            cells.pair(cells.seconds(arm.result.cold), cells.seconds(arm.warm)),
            cells.memory(arm),
        )
        outcome = cells.verdict(race, arm, race.best_shipped)
        outcome = "not compared" if outcome == numbers.NOTHING else outcome
        command = arm.result.command or ""
        rows.append(Row(title, anchor, arm.result.case.impl, cells.name(arm), outcome, values, "", command))
    for result in race.failures:
        reason = cells.shortened(result.reason or "")
        impl, name = result.case.impl, result.case.arm
        rows.append(Row(title, anchor, impl, name, result.status, (), reason, result.command or ""))
    return rows


def _without_empty(rows: list[Row]) -> list[str]:
    """Leave out of all rows the columns that none fills; the head of those that stay."""
    ran = [index for index, row in enumerate(rows) if row.cells]
    # The first column of this table stands before these cells, so that any of them may go.
    head, filled = cells.filled(("", *ROW_HEAD), [("", *rows[index].cells) for index in ran])
    for index, values in zip(ran, filled, strict=True):
        rows[index] = replace(rows[index], cells=tuple(values[1:]))
    return head[1:]
