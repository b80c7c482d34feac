"""Rows as one HTML file that opens offline: what was gained, charts, tables, reasons, commands that measure again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from benchmarks.record import RESULTS, Result, Rows
from benchmarks.report import advice, cells, charts, summary, tables
from benchmarks.report.model import MeasuredArm, MeasuredRace, races
from benchmarks.report.selection import by_family, commands_of, ordered, titles, used_by

ROOT = Path(__file__).resolve().parents[2]
TEMPLATES = Path(__file__).parent / "templates"
MOST_OPEN = 3  # races whose details are open from the start; with more the leading sentences are the overview
MOST_DRAWN = 24  # races that have charts of their own; with more the families' charts are the overview

ROW_HEAD = ("p50 ms", "over best as shipped", "over best tuned", "compile s, cold / warm", "memory MiB")


def folder_of_reports(rows: Path) -> Path:
    """Where reports of a file or folder of rows go: beside them; of committed rows, to ``runs``."""
    folder = rows if rows.is_dir() else rows.parent
    return ROOT / "runs" if folder.resolve().is_relative_to(RESULTS) else folder


def write_html(rows: Rows, target: Path) -> Path:
    """Write the HTML report of these rows; its path."""
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(report(rows.results, rows.environments), encoding="utf-8")
    return target


def report(results: Iterable[Result], environments: Mapping[str, Mapping[str, Any]]) -> str:
    """The whole page. It loads nothing: style, script and charts are in it."""
    results = list(results)
    shown = ordered(races(results, environments))
    named = titles(shown)
    anchors = {race: f"race-{number}" for number, race in enumerate(shown, start=1)}
    rows = [row for race in shown for row in _rows(race)]
    ran = [row for row in rows if row["cells"]]
    row_head, kept = tables.filled(("arm", *ROW_HEAD), [(row["arm"], *row["cells"]) for row in ran])
    for row, figures in zip(ran, kept, strict=True):
        row["cells"] = figures[1:]
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["outcome"] = cells.outcome
    return environment.get_template("report.html.jinja").render(
        machines=list(dict.fromkeys(race.machine for race in shown)),
        counts=(len(shown), sum(len(race.arms) for race in shown), sum(len(race.failures) for race in shown)),
        gains=summary.gains(shown),
        families=[
            _family(name, chosen, anchors, draw=len(shown) <= MOST_DRAWN) for name, chosen in by_family(shown).items()
        ],
        all_open=len(shown) <= MOST_OPEN,
        rows=rows,
        row_head=row_head[1:],
        named=named,
        anchors=anchors,
        impls=sorted({row["impl"] for row in rows}),
        outcomes=sorted({row["outcome"] for row in rows}),
        environments=used_by(results, environments),
    )


def _family(
    name: str, chosen: Sequence[MeasuredRace], anchors: Mapping[MeasuredRace, str], *, draw: bool
) -> dict[str, Any]:
    named = titles(chosen)
    alone = tables.are_alternatives(chosen)
    chart = None if alone else charts.speedups(chosen, named)
    if alone:
        groups = tables.alternatives(chosen)
        table, rows = tables.alternatives_table(groups), [race for group in groups for race in group.races]
    else:
        table, rows = tables.family(chosen, named)
    return {
        "name": name,
        "anchor": anchors[chosen[0]].replace("race", "family"),
        "lead": " ".join(summary.sentences(chosen)),
        "chart": charts.as_address(chart) if chart else None,
        "table": table,
        "links": [None if alone else anchors[race] for race in rows],
        "worst": tables.WORST,
        "failures": [(race.title, r.status, r.reason or "") for race in chosen for r in race.failures] if alone else [],
        "notes": [tables.ALTERNATIVES_NOTE, *dict.fromkeys(note for race in chosen for note in race_warnings(race))]
        if alone
        else [],
        "troubles": [f"{race.case.model}, {race.case.input}: {line}" for race in chosen for line in _troubles(race)],
        "commands": commands_of(chosen),
        "sections": [] if alone else [_section(race, anchors[race], draw) for race in chosen],
    }


def race_warnings(race: MeasuredRace) -> list[str]:
    """The notes that say what is wrong."""
    return [note for note in cells.race_notes(race) if note.startswith("!")]


def _section(race: MeasuredRace, anchor: str, draw: bool) -> dict[str, Any]:
    drawn = {"Latency": charts.latency, "Total time over calls": charts.break_even, "Loss": charts.losses}
    figures = [(name, svg) for name, paint in drawn.items() if draw and (svg := paint(race))]
    named_tables = {
        "Arms, fastest first": tables.speeds(race),
        "What that speed costs": tables.costs(race),
        "The win taken apart": tables.filled(*tables.decomposition(race)),
        "What compiling cost": tables.compiles(race),
    }
    return {
        "title": race.title,
        "anchor": anchor,
        "subject": cells.subject(race),
        "lead": advice.lead(race),
        "figures": [(name, charts.as_address(svg)) for name, svg in figures],
        "tables": {name: table for name, table in named_tables.items() if race.arms and table[1]},
        "notes": [*cells.notes(race), *_hits(race), *_prepared(race)],
        "troubles": _troubles(race),
        "failures": [(result.case.arm, result.status, result.reason or "") for result in race.failures],
        "commands": commands_of([race]),
    }


def _troubles(race: MeasuredRace) -> list[str]:
    return [line for arm in race.arms for line in cells.troubles(arm)]


def _prepared(race: MeasuredRace) -> list[str]:
    """What arms prepare once, which no other figure counts."""
    parts = [(arm, what, s) for arm in race.arms for what, s in arm.result.preparation.items()]
    said = [f"{arm.name}: {what}, {cells.significant(seconds)} s" for arm, what, seconds in parts]
    return [f"Prepared once: {'; '.join(said)}."] if said else []


def _hits(race: MeasuredRace) -> list[str]:
    """Arms whose cold figure is not quite one: something came from a cache."""
    hit = [arm.name for arm in race.arms if arm.result.cold and arm.result.cold.cache_hits]
    return [f"The cold compile of these hit a cache: {', '.join(hit)}."] if hit else []


def _rows(race: MeasuredRace) -> list[dict[str, Any]]:
    """The race's part of the table of all rows. ``outcome`` is what the table can be filtered by."""
    ran = [{**_row(race, arm.result), **_figures(race, arm)} for arm in race.arms]
    failed = [{**_row(race, r), "outcome": r.status, "reason": cells.shortened(r.reason or "")} for r in race.failures]
    return ran + failed


def _row(race: MeasuredRace, result: Result) -> dict[str, Any]:
    return {"race": race, "impl": result.case.impl, "arm": result.case.arm, "cells": ()}


def _figures(race: MeasuredRace, arm: MeasuredArm) -> dict[str, Any]:
    outcome = cells.verdict(race, arm, race.best_shipped)
    return {
        "arm": cells.name(arm),
        "outcome": "not compared" if outcome == cells.NOTHING else outcome,
        "cells": (
            cells.significant(arm.p50),
            cells.speedup_and_verdict(race, arm, race.best_shipped),
            cells.speedup_and_verdict(race, arm, race.best_tuned),
            cells.pair(cells.seconds(arm.result.cold), cells.seconds(arm.warm)),
            cells.memory(arm),
        ),
    }
