"""What the first pages show of the rows: a table of six races, the range of cold compile times, a picture of both."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from benchmarks.report import markdown, numbers
from benchmarks.report.race import Arm, Race
from benchmarks.report.selection import UPSTREAM, select

# One race of each family, by model, input and dtype; the table adds our greatest loss.
SHOWN = {
    "GCN, arxiv, float32": ("gcn", "arxiv", "float32"),
    "Llama 3.2 1B, one token": ("llama-3.2-1b", "decode-1x1024", "bfloat16"),
    "BERT-base, 32 × 128": ("bert-base", "32x128", "bfloat16"),
    "ResNet-50, 64 images": ("resnet50", "64x224", "bfloat16"),
    "SD 1.5 UNet, 2 × 64 × 64": ("sd15", "2x64x64", "bfloat16"),
}
HEAD = (
    "model, input",
    "cold s: whole / theirs / ours",
    "ms a call: theirs / ours",
    "times faster",
)
MISSING = "not measured"


@dataclass(frozen=True)
class Compared:
    """The arms of one race that the first pages speak of; None where one was not measured."""

    race: Race

    @property
    def ours(self) -> Arm | None:
        return self.race.ours

    @property
    def best(self) -> Arm | None:
        """The fastest upstream arm, as shipped or tuned."""
        return _fastest((self.race.best_shipped, self.race.best_tuned))

    @property
    def whole(self) -> Arm | None:
        """Upstream's model compiled as a whole, as shipped, in the mode whose calls are faster."""
        arms = (self.race.find(impl="upstream", strategy="full", mode=mode) for mode in ("default", "reduce-overhead"))
        return _fastest(arm for arm in arms if cold(arm) is not None)

    @property
    def library(self) -> Arm | None:
        """Upstream's model compiled by the library's own regions."""
        return self.race.find(impl="upstream", strategy="regional")

    @property
    def times_faster(self) -> float:
        """Ours over the best upstream arm; infinite where one of them was not measured."""
        ratio = self.race.speedup(self.ours, self.best) if self.ours else None
        return math.inf if ratio is None else ratio.value


def _fastest(arms: Iterable[Arm | None]) -> Arm | None:
    return min((arm for arm in arms if arm is not None), key=lambda arm: arm.p50 or math.inf, default=None)


def cold(arm: Arm | None) -> float | None:
    """Seconds of cold compilation."""
    return None if arm is None or arm.result.cold is None else arm.result.cold.seconds


def front_table(options: Mapping[str, str], shown: Iterable[Race]) -> str:
    """The six races in the columns of ``HEAD``, and the machine below."""
    chosen = _chosen(options, shown)
    rows = [_row(name, compared) for name, compared in chosen.items()]
    machines = dict.fromkeys(compared.race.machine for compared in chosen.values() if compared is not None)
    return "\n\n".join(
        filter(
            None,
            [
                markdown.table(HEAD, rows),
                f"{'; '.join(machines)}; bfloat16 unless a name says float32." if machines else "",
            ],
        )
    )


def cold_range(options: Mapping[str, str], shown: Iterable[Race]) -> str:
    """The least and the greatest cold compile time over all inference races, ``of`` the ``whole`` model or ``ours``.

    Raises:
        ValueError: If ``of`` is neither.
    """
    of = options.get("of")
    if of not in ("whole", "ours"):
        raise ValueError(f"of is {of!r}; give of=whole or of=ours")
    pairs = [(cold(c.whole), cold(c.ours)) for c in _all(options, shown)]
    seconds = [whole if of == "whole" else ours for whole, ours in pairs if whole is not None and ours is not None]
    known = [value for value in seconds if value is not None]
    return f"{min(known):.0f} to {max(known):.0f} s" if known else MISSING


def _all(options: Mapping[str, str], shown: Iterable[Race]) -> list[Compared]:
    wanted = {"workload": "inference", "device": "cuda", "family": ",".join(UPSTREAM)}
    wanted |= {key: value for key, value in options.items() if key != "of"}
    return [Compared(race) for race in select(wanted, shown)]


def _chosen(options: Mapping[str, str], shown: Iterable[Race]) -> dict[str, Compared | None]:
    """The races of ``SHOWN`` and, if any race is lost, the one that is lost by most."""
    found = _all(options, shown)
    by_case = {(c.race.case.model, c.race.case.input, c.race.case.dtype): c for c in found}
    chosen = {name: by_case.get(case) for name, case in SHOWN.items()}
    worst = min(found, key=lambda compared: compared.times_faster, default=None)
    if worst is not None and worst.times_faster < 1 and worst not in chosen.values():
        case = worst.race.case
        chosen[f"{case.model}, {case.input}, {case.dtype}: our worst"] = worst
    return chosen


def _row(name: str, compared: Compared | None) -> tuple[str, ...]:
    if compared is None:
        return (name, *[MISSING] * 3)
    ours, best = compared.ours, compared.best
    seconds = [cold(arm) for arm in (compared.whole, compared.library, ours)]
    times = [arm.p50 if arm else None for arm in (best, ours)]
    return name, _joined(seconds), _joined(times), _faster(compared)


def _joined(values: Sequence[float | None]) -> str:
    if all(value is None for value in values):
        return MISSING
    return " / ".join(MISSING if value is None else numbers.significant(value) for value in values)


def _faster(compared: Compared) -> str:
    if compared.ours is None or math.isinf(compared.times_faster):
        return MISSING
    verdict = compared.race.verdict(compared.ours, compared.best)
    return "undetermined" if verdict == "undetermined" else numbers.times(compared.times_faster)


# The picture -------------------------------------------------------------------------------------------------------

# Of each arm of a race: its name in the legend and its colour, dark enough on white.
DRAWN: tuple[tuple[str, str, Callable[[Compared], Arm | None]], ...] = (
    ("whole model", "#c75a00", lambda compared: compared.whole),
    ("library's own regions", "#6b7280", lambda compared: compared.library),
    ("ours", "#0072b2", lambda compared: compared.ours),
)
WIDTH, HEIGHT = 400, 330
LEFT, RIGHT, TOP, BOTTOM = 30, 388, 34, 292
NAMES = 85  # the width of the longest model name, which stands left of its point
TICKS = (0.1, 0.3, 1, 3, 10, 30, 100, 300)
INK, FAINT = "#1b1f24", "#d5d9df"


def picture(shown: Iterable[Race]) -> str:
    """An SVG file: cold compile seconds against milliseconds a call, a point for each arm, a line for each model."""
    models = {name.partition(",")[0]: compared for name, compared in _chosen({}, shown).items() if name in SHOWN}
    points = {
        name: [(s, arm.p50, colour) for _, colour, of in DRAWN if (arm := of(c)) and (s := cold(arm)) and arm.p50]
        for name, c in models.items()
        if c is not None and cold(c.ours)
    }
    across = _axis([s for found in points.values() for s, _, _ in found], LEFT + NAMES, RIGHT)
    up = _axis([p50 for found in points.values() for _, p50, _ in found], BOTTOM, TOP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="520" role="img" '
        f'font-family="sans-serif" font-size="12" fill="{INK}">',
        "<title>Cold compile seconds against milliseconds a call</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
    ]
    for tick in TICKS:
        if LEFT <= (x := across(tick)) <= RIGHT:
            parts += [_line(x, TOP, x, BOTTOM, FAINT), _text(x, BOTTOM + 16, f"{tick:g}", "middle")]
        if TOP <= (y := up(tick)) <= BOTTOM:
            parts += [_line(LEFT, y, RIGHT, y, FAINT), _text(LEFT - 5, y + 4, f"{tick:g}", "end")]
    parts += [_text(RIGHT, HEIGHT - 6, "cold compile, s", "end"), _text(4, HEIGHT - 6, "↑ ms a call")]
    for name, found in points.items():
        placed = [(across(s), up(p50), colour) for s, p50, colour in found]
        x, y, _ = placed[-1]
        parts += [_line(x1, y1, x, y, colour) for x1, y1, colour in placed[:-1]]
        parts += [_dot(*place) for place in placed]
        parts.append(_text(x - 9, y + 4, name, "end"))
    for at, (legend, colour, _) in zip((LEFT, 150, 320), DRAWN, strict=True):
        parts += [_dot(at + 5, 14, colour), _text(at + 14, 18, legend)]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _axis(values: Sequence[float], start: float, end: float) -> Callable[[float], float]:
    """A logarithmic axis that holds the values between two places of the picture, with a margin."""
    low, high = math.log(min(values, default=1) / 1.6), math.log(max(values, default=1) * 1.6)
    return lambda value: start + (math.log(value) - low) / (high - low) * (end - start)


def _line(x1: float, y1: float, x2: float, y2: float, colour: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}" opacity="0.6"/>'


def _dot(x: float, y: float, colour: str) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{colour}"/>'


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
