"""What the figures of the HTML report have in common: colours, shapes, names, logarithmic axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from benchmarks.report import cells
from benchmarks.report.race import Arm, Race
from benchmarks.report.svg import INK, TUNED, UPSTREAM, ZOO

WIDTH = 340.0  # points: on a phone 80 % of it, and text is still to be read
COLOURS = {"zoo": ZOO, "upstream": UPSTREAM, "upstream-tuned": TUNED}
SHAPES = {"eager": "o", "full": "s", "regional": "^", "hierarchical": "D"}
LINES = {"eager": ":", "full": "--", "regional": "-", "hierarchical": "-."}


def colour(arm: Arm) -> str:
    return COLOURS.get(arm.result.case.impl, INK)


def name(race: Race, arm: Arm) -> str:
    """The arm's number in the race's table and its name."""
    return f"{race.arms.index(arm) + 1}  {printable(cells.name(arm))}"


def printable(text: str) -> str:
    return "".join(letter if letter.isprintable() else " " for letter in text)


def key(shape: str, colour: str, edge: str, label: str) -> Any:
    return Line2D([], [], color=colour, marker=shape, markeredgecolor=edge, linestyle="", markersize=7, label=label)


def log(axes: Any, which: str, values: Sequence[float]) -> None:
    """A logarithmic axis around these values, with plain numbers at 1, 2 and 5 where few decades leave room."""
    low, high = min(values) / 1.35, max(values) * 1.25
    axis = axes.yaxis if which == "y" else axes.xaxis
    (axes.set_yscale if which == "y" else axes.set_xscale)("log")
    (axes.set_ylim if which == "y" else axes.set_xlim)(low, high)
    decades = math.log10(high / low)
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if decades < 2.5 else (1.0,), numticks=12))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())
    axis.set_minor_locator(NullLocator())
