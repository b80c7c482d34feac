"""What the first pages show of the rows: a table of six races, the range of cold compile times, a picture of both."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from benchmarks.report import cells, charts, tables
from benchmarks.report.model import MeasuredArm, MeasuredRace
from benchmarks.report.selection import UPSTREAM, select

# One race of each family, by model, input and dtype; the table adds our greatest loss.
SHOWN = {
    "GCN, arxiv, float32": ("gcn", "arxiv", "float32"),
    "Llama 3.2 1B, one token": ("llama-3.2-1b", "decode-1x1024", "bfloat16"),
    "BERT-base, 32 × 128": ("bert-base", "32x128", "bfloat16"),
    "ResNet-50, 64 images": ("resnet50", "64x224", "bfloat16"),
    "SD 1.5 UNet, 2 × 64 × 64": ("sd15", "2x64x64", "bfloat16"),
}
HEAD = ("model, input", "cold s: whole / theirs / ours", "ms a call: theirs / ours", "times faster")
MISSING = "not measured"


@dataclass(frozen=True)
class Compared:
    """The arms of one race that the first pages speak of; None where one was not measured."""

    race: MeasuredRace

    @property
    def ours(self) -> MeasuredArm | None:
        return self.race.ours

    @property
    def best(self) -> MeasuredArm | None:
        """The fastest upstream arm, as shipped or tuned."""
        return _fastest((self.race.best_shipped, self.race.best_tuned))

    @property
    def whole(self) -> MeasuredArm | None:
        """Upstream's model compiled as a whole, as shipped, in the mode whose calls are faster."""
        arms = (self.race.find(impl="upstream", strategy="full", mode=mode) for mode in ("default", "reduce-overhead"))
        return _fastest(arm for arm in arms if cold(arm) is not None)

    @property
    def library(self) -> MeasuredArm | None:
        """Upstream's model compiled by the library's own regions."""
        return self.race.find(impl="upstream", strategy="regional")

    @property
    def compiled(self) -> tuple[MeasuredArm | None, ...]:
        """The arms whose cold compile seconds are shown, in the order of ``charts.SERIES``."""
        return self.whole, self.library, self.ours

    @property
    def times_faster(self) -> float:
        """Ours over the best upstream arm; infinite where one of them was not measured."""
        ratio = self.race.speedup(self.ours, self.best) if self.ours else None
        return math.inf if ratio is None else ratio.value


def _fastest(arms: Iterable[MeasuredArm | None]) -> MeasuredArm | None:
    return min((arm for arm in arms if arm is not None), key=lambda arm: arm.p50 or math.inf, default=None)


def cold(arm: MeasuredArm | None) -> float | None:
    """Seconds of cold compilation."""
    return None if arm is None or arm.result.cold is None else arm.result.cold.seconds


def table(options: Mapping[str, str], shown: Iterable[MeasuredRace]) -> str:
    """The six races in the columns of ``HEAD``, and the machine below."""
    chosen = _chosen(options, shown)
    rows = [_row(name, compared) for name, compared in chosen.items()]
    machines = dict.fromkeys(compared.race.machine for compared in chosen.values() if compared is not None)
    return "\n\n".join(
        filter(
            None,
            [
                tables.markdown(HEAD, rows),
                f"{'; '.join(machines)}; bfloat16 unless a name says float32." if machines else "",
            ],
        )
    )


def _all(options: Mapping[str, str], shown: Iterable[MeasuredRace]) -> list[Compared]:
    wanted = {"workload": "inference", "device": "cuda", "family": ",".join(UPSTREAM)}
    wanted |= options
    shown = tuple(shown)
    # Races that were measured for the first pages stand in for those of the families' pages.
    chosen = [race for extra in (False, True) for race in select(wanted, (r for r in shown if bool(r.extra) is extra))]
    return [Compared(race) for race in {race.case.race: race for race in chosen}.values()]


def _chosen(options: Mapping[str, str], shown: Iterable[MeasuredRace]) -> dict[str, Compared | None]:
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
    times = [arm.p50 if arm else None for arm in (compared.best, compared.ours)]
    return name, _joined([cold(arm) for arm in compared.compiled]), _joined(times), _faster(compared)


def _joined(values: Sequence[float | None]) -> str:
    if all(value is None for value in values):
        return MISSING
    return " / ".join(MISSING if value is None else cells.significant(value) for value in values)


def _faster(compared: Compared) -> str:
    if compared.ours is None or math.isinf(compared.times_faster):
        return MISSING
    verdict = compared.race.verdict(compared.ours, compared.best)
    return "undetermined" if verdict == "undetermined" else cells.times(compared.times_faster)


def points(shown: Iterable[MeasuredRace]) -> dict[str, charts.Points]:
    """By model, the cold compile seconds and milliseconds a call of each arm of the picture."""
    models = {name.partition(",")[0]: compared for name, compared in _chosen({}, shown).items() if name in SHOWN}
    return {
        name: tuple(map(_point, compared.compiled))
        for name, compared in models.items()
        if compared is not None and _point(compared.ours)
    }


def _point(arm: MeasuredArm | None) -> tuple[float, float] | None:
    seconds = cold(arm)
    return (seconds, arm.p50) if arm is not None and seconds and arm.p50 else None


def described(models: Mapping[str, charts.Points]) -> str:
    """The picture in words: its figures, by which it is known whether the rows still give them."""
    said = []
    for name, found in models.items():
        arms = [
            f"{series} {point[0]:.4g} s, {point[1]:.4g} ms"
            for (series, _), point in zip(charts.SERIES, found, strict=True)
            if point is not None
        ]
        said.append(f"{name}: {'; '.join(arms)}")
    return ". ".join(said)


def picture(shown: Iterable[MeasuredRace], drawn: str = "") -> str:
    """The SVG file of cold compile seconds against milliseconds a call; ``drawn`` itself if it has these figures.

    Another release of matplotlib draws the same figures by other characters, so the figures are compared.
    """
    models = points(shown)
    description = described(models)
    same = f"<dc:description>{escape(description, quote=False)}</dc:description>" in drawn
    return drawn if same else charts.picture(models, description)
