"""Charts, drawn by matplotlib as SVG: for the HTML report, and the picture of the first pages."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from typing import Any

import matplotlib
import numpy as np
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from benchmarks.report import cells, tables
from benchmarks.report.model import MeasuredArm, MeasuredRace

INK, GREY = "#1b1f24", "#6b7280"
# Blue, orange and green of Okabe and Ito, dark enough on white.
COLOURS = {"zoo": "#0072b2", "upstream": "#c75a00", "upstream-tuned": "#007f5f"}
LINES = {"eager": ":", "full": "--", "stages": (0, (5, 1)), "regional": "-", "hierarchical": "-."}
WIDTH = 5.2  # inches: on a phone it is shrunk to 70 % and still legible
STYLE = {
    "svg.hashsalt": "report",  # the same rows make the same file
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid.axis": "x",
    "grid.color": "#d5d9df",
    "legend.frameon": False,
    "figure.constrained_layout.use": True,
}


def draw(paint: Callable[[Figure], None], height: float, **options: Any) -> str:
    """The SVG file of a figure of ``height`` inches that ``paint`` draws."""
    written = io.BytesIO()
    nothing: dict[str, Any] = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with matplotlib.rc_context({**STYLE, **options.pop("style", {})}):
        figure = Figure(figsize=(options.pop("width", WIDTH), height))
        FigureCanvasSVG(figure)
        paint(figure)
        figure.savefig(written, format="svg", metadata={**nothing, **options})
    return written.getvalue().decode()


def as_address(svg: str) -> str:
    """The SVG as a data URL, so that a page loads no files."""
    return "data:image/svg+xml;base64," + base64.b64encode(svg.encode()).decode()


def speedups(races: Sequence[MeasuredRace], titles: Mapping[MeasuredRace, str]) -> str | None:
    """Speed-ups of the zoo over upstream's best, shipped and tuned, one line per race; None without a comparison."""
    compared = [race for race in races if race.ours and (race.best_shipped or race.best_tuned)]
    if not compared:
        return None

    def paint(figure: Figure) -> None:
        axes = figure.add_subplot()
        for place, race in enumerate(compared):
            bests = ((race.best_shipped, "upstream", "o"), (race.best_tuned, "upstream-tuned", "s"))
            for offset, (best, impl, shape) in zip((-0.15, 0.15), bests, strict=True):
                ratio = race.speedup(race.ours, best) if race.ours else None
                if ratio is not None:
                    errors = [[ratio.value - ratio.low], [ratio.high - ratio.value]] if ratio.has_interval else None
                    style: Any = {"fmt": shape, "color": COLOURS[impl], "markersize": 5}
                    axes.errorbar(ratio.value, place + offset, xerr=errors, **style)
        axes.axvline(1, color=INK, linewidth=1)
        axes.set_yticks(range(len(compared)), [_short(titles[race]) for race in compared])
        axes.set_ylim(len(compared) - 0.5, -0.5)
        _logarithmic(axes, "x")
        axes.grid(True)
        axes.set_xlabel("times as fast as upstream's best")
        for impl, shape, label in (("upstream", "o", "as shipped"), ("upstream-tuned", "s", "tuned")):
            axes.plot([], [], shape, color=COLOURS[impl], markersize=5, label=label)
        figure.legend(loc="outside lower left", ncols=2)

    return draw(paint, 1.1 + 0.27 * len(compared), Title="Speed-ups over upstream")


def break_even(race: MeasuredRace) -> str | None:
    """Total seconds over the number of calls, from cold caches; None if nothing was compiled."""
    arms = [arm for arm in _compared(race) if arm.paid("cold") is not None]
    paid = {arm: arm.paid("cold") or 0.0 for arm in arms}
    if not any(paid.values()):
        return None
    crossings = [found for arm in arms if (found := race.break_even(arm, arm.result.cold)) and np.isfinite(found)]
    calls = np.geomspace(1, 10 * max(crossings, default=1e3), 60)

    def paint(figure: Figure) -> None:
        axes = figure.add_subplot()
        for arm in arms:
            axes.plot(calls, paid[arm] + calls * (arm.p50 or 0.0) / 1e3, **_line(arm))
        _logarithmic(axes, "x")
        _logarithmic(axes, "y")
        axes.set(xlabel="calls", ylabel="seconds in all, cold caches", xlim=(1, calls[-1]))
        axes.grid(True, axis="both")
        figure.legend(loc="outside lower left", ncols=2)

    return draw(paint, 3.0 + 0.1 * len(arms), Title=f"Total time over calls of {_printable(race.title)}")


# The points of one model: compiled whole, by the library's own regions, by the zoo; None for an unmeasured arm.
Points = tuple[tuple[float, float] | None, ...]
SERIES = (("whole model", "#c75a00"), ("library's own regions", GREY), ("ours", "#0072b2"))


def picture(first: Mapping[str, MeasuredRace | None], drawn: str = "") -> str:
    """The SVG file of cold compile seconds against milliseconds per call in ``tables.first_races``.

    Returns ``drawn`` if it has these figures, since other releases of matplotlib write other characters for them.
    """
    models = points(first)
    said = []
    for name, found in models.items():
        pairs = zip(SERIES, found, strict=True)
        arms = [f"{series} {point[0]:.4g} s, {point[1]:.4g} ms" for (series, _), point in pairs if point is not None]
        said.append(f"{name}: {'; '.join(arms)}")
    description = ". ".join(said)
    same = f"<dc:description>{escape(description, quote=False)}</dc:description>" in drawn
    return drawn if same else _picture(models, description)


def points(first: Mapping[str, MeasuredRace | None]) -> dict[str, Points]:
    """By model, the cold compile seconds and milliseconds per call of each arm of the picture."""

    def point(arm: MeasuredArm | None) -> tuple[float, float] | None:
        return (arm.cold_seconds, arm.p50) if arm is not None and arm.cold_seconds and arm.p50 else None

    found = {
        name.partition(",")[0]: tuple(map(point, tables.compiled_arms(race)))
        for name, race in first.items()
        if race is not None and name in tables.FIRST
    }
    return {name: of_arms for name, of_arms in found.items() if of_arms[-1]}


def _picture(models: Mapping[str, Points], description: str) -> str:
    def paint(figure: Figure) -> None:
        axes = figure.add_subplot()
        for name, points in models.items():
            ours = points[-1]
            for point, (_, colour) in zip(points, SERIES, strict=True):
                if point is not None and ours is not None:
                    axes.plot(*zip(point, ours, strict=True), color=colour, alpha=0.6, linewidth=1, zorder=1)
                    axes.plot(*point, "o", color=colour, markersize=7)
            if ours is not None:
                axes.annotate(name, ours, (-8, 0), textcoords="offset points", ha="right", va="center")
        for label, colour in SERIES:
            axes.plot([], [], "o", color=colour, markersize=7, label=label)
        values = [point for points in models.values() for point in points if point is not None]
        if values:
            seconds, milliseconds = zip(*values, strict=True)
            # A name is to the left of each point of the zoo.
            axes.set(
                xlim=(min(seconds) / 9, max(seconds) * 1.6), ylim=(min(milliseconds) / 1.6, max(milliseconds) * 1.6)
            )
            _logarithmic(axes, "x")
            _logarithmic(axes, "y")
        axes.set(xlabel="cold compile, seconds", ylabel="milliseconds a call")
        axes.grid(True, axis="both")
        figure.legend(loc="outside upper left", ncols=3, handletextpad=0.1, columnspacing=1.0)

    title = "Cold compile seconds against milliseconds a call"
    white = {"font.size": 11, "figure.facecolor": "white"}
    return draw(paint, 4.0, width=5.0, Title=title, Description=description, style=white)


def _compared(race: MeasuredRace) -> Iterable[MeasuredArm]:
    """The arms whose totals are drawn: eager, full and regional of the zoo and of upstream, and upstream's best."""
    for arm in race.arms:
        case = arm.result.case
        plain = case.mode == "default" and not case.dynamic and case.kernels
        captured = case.cuda_graph and (case.impl == "upstream" or case.strategy not in ("full", "regional"))
        best = arm in (race.best_shipped, race.best_tuned)
        if arm.p50 is not None and (best or (plain and not captured and case.impl != "upstream-tuned")):
            yield arm


def _line(arm: MeasuredArm) -> dict[str, Any]:
    case = arm.result.case
    width = 2.6 if case.cuda_graph else 1.4
    line = {"linestyle": LINES.get(case.strategy, "-"), "linewidth": width, "color": COLOURS.get(case.impl, GREY)}
    return {**line, "label": _printable(cells.name(arm))}


def _logarithmic(axes: Any, which: str) -> None:
    (axes.set_xscale if which == "x" else axes.set_yscale)("log")
    low, high = axes.get_xlim() if which == "x" else axes.get_ylim()
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_locator(
        LogLocator(subs=(1.0, 2.0, 5.0) if high < 100 * low else (1.0, 3.0)[: 1 + (high < 3e3 * low)])
    )
    axis.set_major_formatter(FuncFormatter(lambda value, _: cells.calls(value) if value >= 1e3 else f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _short(text: str) -> str:
    text = _printable(text)
    return text if len(text) <= 42 else text[:41].rstrip(" ·") + "…"


def _printable(text: str) -> str:
    return "".join(letter if letter.isprintable() else " " for letter in text)
