"""The report's figures with a line for each arm or race: latency, memory, utilisation, speed-ups over upstream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from benchmarks.report import cells, numbers, pieces
from benchmarks.report.pieces import WIDTH
from benchmarks.report.race import Race
from benchmarks.report.svg import INK, PAPER, TUNED, UPSTREAM, draw

BAR_HEIGHT = 25.0
RACE_HEIGHT = 32.0  # of two marks below their race's name
LETTER_WIDTH, DIGIT_WIDTH = 4.9, 5.8  # points, of the figures' font; a letter's as an average over names


@dataclass(frozen=True)
class Bar:
    """A bar below its name; ``text`` stands at the right. A value of None has no bar, and its text says why."""

    name: str
    text: str
    value: float | None
    colour: str
    interval: tuple[float, float] | None = None


def latency(race: Race, prefix: str) -> Markup | None:
    """Medians with their 95 % intervals, fastest first, and the roofline's floor; None where no arm was timed."""
    if all(arm.p50 is None for arm in race.arms):
        return None
    bars = []
    for arm in race.arms:
        interval = race.interval(arm)
        text = numbers.significant(arm.p50)
        if interval:
            text += f" [{', '.join(map(numbers.significant, interval))}]"
        bars.append(Bar(pieces.name(race, arm), text, arm.p50, pieces.colour(arm), interval))
    floors = [use.floor_ms for arm in race.arms if (use := arm.utilisation) and use.floor_ms is not None]
    bars += [Bar(pieces.printable(r.case.arm), r.status, None, INK) for r in race.failures]
    label = f"milliseconds a call, median and 95 % interval{'; dotted: roofline' if floors else ''}"
    return _bars(bars, label, f"Latency of {race.title}", prefix, mark=min(floors, default=None))


def memory(race: Race, prefix: str) -> Markup | None:
    """Peaks of allocated memory; None where no arm's was measured."""
    bars = []
    for arm in race.arms:
        peak = arm.result.memory.allocated if arm.result.memory else None
        bars.append(Bar(pieces.name(race, arm), cells.memory(arm), peak and peak / 2**20, pieces.colour(arm)))
    if not any(bar.value for bar in bars):
        return None
    return _bars(bars, "peak of allocated memory, MiB", f"Memory of {race.title}", prefix)


def utilisation(race: Race, prefix: str) -> Markup | None:
    """Shares of the peak bandwidth (bars) and of the peak FLOP/s (diamonds); None where nothing was counted."""
    bars, diamonds = [], []
    for arm in race.arms:
        use = arm.utilisation
        share = use.bandwidth * 100 if use and use.bandwidth is not None else None
        bars.append(Bar(pieces.name(race, arm), cells.utilisation(arm), share, pieces.colour(arm)))
        diamonds.append(use.flops * 100 if use and use.flops is not None else None)
    if not any(value for value in (*diamonds, *(bar.value for bar in bars))):
        return None
    label = "% of this device's measured peak: bar bandwidth, diamond FLOP/s"
    return _bars(bars, label, f"Utilisation in {race.title}", prefix, diamonds=diamonds)


def _bars(
    bars: Sequence[Bar],
    axis: str,
    label: str,
    prefix: str,
    *,
    mark: float | None = None,
    diamonds: Sequence[float | None] = (),
) -> Markup:
    def paint(figure: Figure) -> None:
        axes = lines(figure, [(bar.name, bar.text) for bar in bars], below=36)
        for place, bar in enumerate(bars):
            if bar.value is not None:
                axes.barh(place + 0.14, bar.value, height=0.3, color=bar.colour)
            if bar.interval:
                axes.plot(bar.interval, [place + 0.14] * 2, color=INK, linewidth=1.4)
        for place, value in enumerate(diamonds):
            if value is not None:
                axes.plot(value, place + 0.14, "D", color=INK, markeredgecolor=PAPER, markersize=5, clip_on=False)
        if mark is not None:
            axes.axvline(mark, color=INK, linestyle=":", linewidth=1.2)
        ends = [bar.interval[1] if bar.interval else bar.value for bar in bars]
        most = max((end for end in (*ends, *diamonds, mark) if end is not None), default=1.0)
        axes.set(xlim=(0, (most or 1.0) * 1.02), xlabel=axis)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))

    return draw(paint, width=WIDTH, height=BAR_HEIGHT * len(bars) + 40, label=label, prefix=prefix)


def speedups(races: Sequence[Race], titles: Sequence[str], prefix: str) -> Markup | None:
    """Ours over upstream's best as shipped and tuned, a line a race, losses left of 1; None where nothing compares."""
    rows = []
    for race, title in zip(races, titles, strict=True):
        if race.ours is None:
            continue
        shipped, tuned = (race.speedup(race.ours, best) for best in (race.best_shipped, race.best_tuned))
        if shipped or tuned:
            rows.append((pieces.printable(title), ((shipped, UPSTREAM, "o", 0.08), (tuned, TUNED, "s", 0.3))))
    if not rows:
        return None

    def paint(figure: Figure) -> None:
        texts = [" / ".join(numbers.times(r.value) if r else numbers.NOTHING for r, *_ in ratios) for _, ratios in rows]
        axes = lines(figure, [(title, text) for (title, _), text in zip(rows, texts, strict=True)], below=54)
        values = [1.0]
        for place, (_, ratios) in enumerate(rows):
            for ratio, colour, shape, lower in ratios:
                if ratio is None:
                    continue
                if ratio.has_interval:
                    axes.plot([ratio.low, ratio.high], [place + lower] * 2, color=colour, linewidth=2)
                axes.plot(ratio.value, place + lower, shape, color=colour, markeredgecolor=PAPER, markersize=7)
                values += [ratio.value, *((ratio.low, ratio.high) if ratio.has_interval else ())]
            # Not one line from top to bottom: it would run through the names.
            axes.plot([1, 1], [place - 0.06, place + 0.44], color=INK, linewidth=1, zorder=1)
        pieces.log(axes, "x", values)
        axes.set_xlabel("times faster than upstream's best; left of 1 ours is slower")
        keys = (("o", UPSTREAM, "over best as shipped"), ("s", TUNED, "over best tuned"))
        handles = [pieces.key(shape, colour, PAPER, said) for shape, colour, said in keys]
        figure.legend(handles=handles, loc="lower left", ncols=2)

    return draw(paint, width=WIDTH, height=RACE_HEIGHT * len(rows) + 58, label="Speed-ups over upstream", prefix=prefix)


def lines(figure: Figure, texts: Sequence[tuple[str, str]], below: float) -> Any:
    """Axes with a line for each pair of texts, the first at the left, the second at the right; marks go below them.

    Margins are set by hand, because laying out that many texts takes longer than drawing them.

    Args:
        figure: Where.
        texts: Of each line.
        below: Points for what stands below the axes.
    """
    width, height = (72 * inches for inches in figure.get_size_inches())
    figure.subplots_adjust(left=4 / width, right=1 - 4 / width, bottom=below / height, top=1 - 2 / height)
    axes = figure.add_subplot()
    for place, (left, right) in enumerate(texts):
        room = int((0.96 * width - DIGIT_WIDTH * len(right)) / LETTER_WIDTH) - 1
        left = left if len(left) <= room else left[: room - 1].rstrip(" ·") + "…"
        axes.text(0.012, place - 0.28, left, transform=axes.get_yaxis_transform(), va="center")
        axes.text(0.988, place - 0.28, right, transform=axes.get_yaxis_transform(), va="center", ha="right")
    axes.set_ylim(len(texts) - 0.4, -0.6)
    axes.yaxis.set_major_locator(NullLocator())
    return axes
