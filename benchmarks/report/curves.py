"""The report's figures of compile time: what is paid before the first fast call, and when it is paid back."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from markupsafe import Markup
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, NullFormatter

from benchmarks import stats
from benchmarks.report import cells, numbers, pieces
from benchmarks.report.labels import label
from benchmarks.report.pieces import LINES, SHAPES, WIDTH
from benchmarks.report.race import Arm, Caches, Race
from benchmarks.report.svg import FAINT, INK, PAPER, draw

CACHES: tuple[Caches, ...] = ("cold", "warm")


def compile_against_steady(race: Race, prefix: str) -> Markup | None:
    """What an arm costs before its first fast call against what a call takes then; None without compile figures."""
    points = []
    for arm in race.arms:
        paid = arm.paid("cold")
        if paid is not None and arm.p50 is not None:
            points.append((arm, paid, arm.p50))
    if not any(paid for _, paid, _ in points):
        return None

    def paint(figure: Figure) -> None:
        figure.set_layout_engine("constrained")
        axes = figure.add_subplot()
        for arm, paid, p50 in points:
            shape = SHAPES.get(arm.result.case.strategy, "o")
            edge = INK if arm.result.case.cuda_graph else PAPER
            axes.plot(paid, p50, shape, color=pieces.colour(arm), markeredgecolor=edge, markersize=8)
        axes.set(xlabel="compile and capture, cold, seconds", ylabel="milliseconds a call")
        pieces.log(axes, "y", [p50 for *_, p50 in points])
        axes.set_xlim(left=-0.05 * axes.get_xlim()[1])
        axes.grid(True)
        axes.text(0.02, 0.02, "↙ best corner", transform=axes.transAxes, style="italic")
        ranks = [str(race.arms.index(arm) + 1) for arm, *_ in points]
        label(figure, axes, [point[1:] for point in points], ranks)
        used = dict.fromkeys(arm.result.case.strategy for arm, *_ in points)
        handles = [pieces.key(SHAPES.get(strategy, "o"), FAINT, PAPER, strategy) for strategy in used]
        if any(arm.result.case.cuda_graph for arm, *_ in points):
            handles.append(pieces.key("o", FAINT, INK, "ringed: + outer CUDA graph"))
        figure.legend(handles=handles, loc="outside lower left", ncols=3, handletextpad=0.1, columnspacing=0.8)

    return draw(paint, width=WIDTH, height=290, label=f"Compile time against latency of {race.title}", prefix=prefix)


def break_even(race: Race, prefix: str) -> Markup | None:
    """Total time over calls, cold above and warm below, and where arms overtake their eager; None without figures."""
    arms = list(_lines(race))
    pairs = _regional_and_full(race)
    which: list[Caches] = [caches for caches in CACHES if any(arm.paid(caches) for arm in arms)]
    if not which:
        return None
    crossings = [calls for caches in which for arm in arms if (calls := _crossing(race, arm, caches))]
    crossings += [calls for caches in which for pair in pairs if (calls := _overtaking(race, *pair, caches)[1])]
    most = 10 * max(crossings, default=1e3)
    meetings = [said for pair in pairs for caches in which if (said := meeting(race, *pair, caches))]

    def paint(figure: Figure) -> None:
        figure.set_layout_engine("constrained")
        panels = figure.subplots(len(which), 1, sharex=True, squeeze=False)[:, 0]
        for axes, caches in zip(panels, which, strict=True):
            _totals(figure, axes, race, arms, pairs, caches, most)
        panels[-1].set_xlabel("calls; dot: ahead of its own eager; diamond: regional meets full")
        handles = [Line2D([], [], **_line(arm), label=_with_calls(race, arm)) for arm in arms]
        handles += [pieces.key("D", PAPER, INK, said) for said in meetings]
        figure.legend(handles=handles, loc="outside lower left", title="break-even calls, cold / warm")

    height = 70 + 180 * len(which) + 14 * (len(arms) + len(meetings))
    return draw(paint, width=WIDTH, height=height, label=f"Total time over calls of {race.title}", prefix=prefix)


def losses(race: Race, prefix: str) -> Markup | None:
    """Loss over training steps, a line an arm; None without curves."""
    arms = [arm for arm in race.arms if arm.result.curve]
    if not arms:
        return None

    def paint(figure: Figure) -> None:
        figure.set_layout_engine("constrained")
        axes = figure.add_subplot()
        for arm in arms:
            curve = arm.result.curve or []
            axes.plot(range(1, len(curve) + 1), curve, **_line(arm))
        axes.set(xlabel="training step, each on a batch of its own", ylabel="loss")
        axes.grid(True)
        handles = [Line2D([], [], **_line(arm), label=pieces.name(race, arm)) for arm in arms]
        figure.legend(handles=handles, loc="outside lower left")

    height = 240 + 14 * len(arms)
    return draw(paint, width=WIDTH, height=height, label=f"Loss over training steps of {race.title}", prefix=prefix)


def _totals(
    figure: Figure,
    axes: Any,
    race: Race,
    arms: Sequence[Arm],
    pairs: Sequence[tuple[Arm, Arm]],
    caches: Caches,
    most: float,
) -> None:
    """One panel: what was paid before and the calls since, a line an arm.

    Numbered dots stand where arms overtake their eager, diamonds with the number of calls where regional and full meet.
    """
    calls = np.geomspace(1, most, 60)
    dots, names, ends = [], [], []
    for arm in arms:
        if (paid := arm.paid(caches)) is None or arm.p50 is None:
            continue
        seconds = paid + calls * arm.p50 / 1e3
        ends += [seconds[0], seconds[-1]]
        axes.plot(calls, seconds, **_line(arm))
        eager = race.own_eager(arm)
        if (crossing := _crossing(race, arm, caches)) and eager is not None and eager.p50 is not None:
            dots.append((crossing, crossing * eager.p50 / 1e3))
            names.append(str(race.arms.index(arm) + 1))
            axes.plot(*dots[-1], "o", color=pieces.colour(arm), markeredgecolor=INK, markersize=6)
    for pair in pairs:
        ahead, crossing = _overtaking(race, *pair, caches)
        if crossing and ahead is not None and ahead.p50 is not None:
            dots.append((crossing, (ahead.paid(caches) or 0.0) + crossing * ahead.p50 / 1e3))
            names.append(numbers.calls(crossing))
            axes.plot(*dots[-1], "D", color=PAPER, markeredgecolor=INK, markersize=7)
    axes.set_xscale("log")
    axes.set(ylabel=f"{caches}: seconds in all", xlim=(1, most))
    pieces.log(axes, "y", ends)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: numbers.calls(value).replace(".0", "")))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.grid(True)
    label(figure, axes, dots, names)


def _regional_and_full(race: Race) -> list[tuple[Arm, Arm]]:
    """Regional and full of one implementation, both with the outer CUDA graph or both without it."""
    pairs = []
    for impl in ("zoo", "upstream", "own"):
        for cuda_graph in (False, True):
            regional, full = (
                race.find(impl=impl, strategy=strategy, cuda_graph=cuda_graph) for strategy in ("regional", "full")
            )
            if regional and full and not (regional.wrong or full.wrong) and None not in (regional.p50, full.p50):
                pairs.append((regional, full))
    return pairs


def _overtaking(race: Race, regional: Arm, full: Arm, caches: Caches) -> tuple[Arm | None, float | None]:
    """Which of the two takes less time in the long run, and the calls from which on; 0 is from the first call on.

    Of two that cannot be told apart it is the one that is ready sooner. None where the costs were not measured.
    """
    paid = {arm: arm.paid(caches) for arm in (regional, full)}
    if any(cost is None for cost in paid.values()):
        return None, None
    sooner, later = sorted((regional, full), key=lambda arm: paid[arm] or 0.0)
    assert sooner.p50 is not None and later.p50 is not None
    if not race.overtakes(later, sooner):
        return sooner, 0.0
    more = (paid[later] or 0.0) - (paid[sooner] or 0.0)
    return later, stats.break_even_calls(more, sooner.p50, later.p50)


def meeting(race: Race, regional: Arm, full: Arm, caches: Caches) -> str:
    """Where regional and full cross, by their numbers in the race's table; empty where it was not measured."""
    ahead, calls = _overtaking(race, regional, full, caches)
    if ahead is None or calls is None:
        return ""
    other = full if ahead is regional else regional
    first, second = (f"{race.arms.index(arm) + 1} {arm.result.case.strategy}" for arm in (ahead, other))
    if race.verdict(ahead, other) == "undetermined":
        return f"{caches}: {first} is ready before {second}, then level"
    return f"{caches}: {first} ahead of {second} from {numbers.calls(max(calls, 1))} call{'s' * (calls > 1)} on"


def _line(arm: Arm) -> dict[str, Any]:
    case = arm.result.case
    width = 2.6 if case.cuda_graph else 1.4
    return {"linestyle": LINES.get(case.strategy, "-"), "linewidth": width, "color": pieces.colour(arm)}


def _with_calls(race: Race, arm: Arm) -> str:
    calls = cells.break_even(race, arm).replace("/", " / ")
    return pieces.name(race, arm) + ("" if calls == numbers.NOTHING else f": {calls}")


def _lines(race: Race) -> Iterable[Arm]:
    """The arms whose totals are drawn: eager, full and regional of the zoo and of upstream, and upstream's best."""
    # Ours with the outer CUDA graph is what is run; beside it stands what it is compared with, the same compiled whole.
    compared = {("zoo", "regional"), ("zoo", "full")}
    for arm in race.arms:
        case = arm.result.case
        plain = case.impl in ("zoo", "upstream") and case.mode == "default" and not case.dynamic and case.kernels
        captured = case.cuda_graph and (case.impl, case.strategy) not in compared
        if arm.p50 is not None and ((plain and not captured) or arm in (race.best_shipped, race.best_tuned)):
            yield arm


def _crossing(race: Race, arm: Arm, caches: Caches) -> float | None:
    calls = race.break_even(arm, arm.result.cold if caches == "cold" else arm.result.warm)
    return calls if calls is not None and math.isfinite(calls) and calls >= 1 else None
