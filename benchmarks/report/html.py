"""Rows as one HTML file that opens offline: what was gained, charts, tables, reasons, commands that measure again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from benchmarks.record import RESULTS, Result, Rows
from benchmarks.report import advice, cells, charts, tables
from benchmarks.report.model import MeasuredRace, by_family, commands_of, machines, races, titles

ROOT = Path(__file__).resolve().parents[2]
MOST_OPEN = 3  # races whose details are open from the start
MOST_DRAWN = 24  # races that have charts of their own; with more, families are folded and their charts the overview


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
    """The whole page. It loads nothing: style and charts are in it."""
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
    named, gains = titles(chosen), advice.gains(chosen)
    compiled = sorted(gains, key=lambda race: race.ours is None or race.ours.paid("cold") is None)
    chart = charts.speedups(chosen, named)
    return {
        "name": name,
        "opened": few,
        "gains": [gains[race] for race in compiled],
        "chart": charts.as_address(chart) if chart else None,
        "table": tables.family(chosen, named),
        "races": [_section(race, draw=few) for race in chosen],
    }


def _section(race: MeasuredRace, *, draw: bool) -> dict[str, Any]:
    chart = charts.break_even(race) if draw else None
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
        "lead": advice.lead(race),
        "chart": charts.as_address(chart) if chart else None,
        "tables": {name: table for name, table in named_tables.items() if race.arms and table[1]},
        "notes": [*cells.notes(race), *_prepared(race)],
        "troubles": [line for arm in race.arms for line in cells.troubles(arm)],
        "failures": [(result.case.arm, result.status, result.reason or "") for result in race.failures],
        "commands": commands_of([race]),
    }


def _prepared(race: MeasuredRace) -> list[str]:
    """What arms prepare once, which no other figure counts."""
    parts = [(arm, what, s) for arm in race.arms for what, s in arm.result.preparation.items()]
    said = [f"{arm.name}: {what}, {cells.significant(seconds)} s" for arm, what, seconds in parts]
    return [f"Prepared once: {'; '.join(said)}."] if said else []
