"""Ways to do one thing, each a model that runs in a race of its own with one arm: compared in one table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks import stats
from benchmarks.report import cells, numbers
from benchmarks.report.race import Arm, Race, across
from benchmarks.report.selection import UPSTREAM

HEAD = (
    "way",
    "p50 ms",
    "p95 ms",
    "over the fastest",
    "kernels",
    "memory MiB",
    "error",
    "times the floor",
    "of peak bandwidth / FLOP/s",
)
NOTE = (
    "Each way ran alone, in processes and rounds of its own: their medians are compared unpaired, and drift between "
    "the runs is in the ratios and not in the intervals."
)


@dataclass(frozen=True)
class Group:
    """Races that differ in the model alone, the fastest first and those without a time last."""

    title: str
    races: tuple[Race, ...]

    @property
    def fastest(self) -> Arm | None:
        return next((arm for race in self.races if (arm := _timed(race)) is not None and not arm.wrong), None)


def is_comparison(races: Sequence[Race]) -> bool:
    """Whether these races of a family hold one arm each, so that only another race tells what a time is worth."""
    if any(race.case.family in UPSTREAM or len(race.arms) + len(race.failures) != 1 for race in races):
        return False
    return any(len(group.races) > 1 for group in groups(races))


def groups(races: Sequence[Race]) -> list[Group]:
    """The ways of each input, in the order of the races."""
    found: dict[tuple[str, ...], list[Race]] = {}
    for race in races:
        found.setdefault((*race.case.race[2:], race.machine), []).append(race)
    return [Group(" · ".join(key[:-1]), tuple(sorted(same, key=_milliseconds))) for key, same in found.items()]


def rows(group: Group) -> list[tuple[str, ...]]:
    """The ways in the columns of ``HEAD``; one that did not run says so where its time would stand."""
    return [_row(race, group.fastest) for race in group.races]


def sentence(races: Sequence[Race]) -> str:
    """Which way is the fastest for each input, and by how much."""
    said = []
    found = groups(races)
    inputs = [group.races[0].case.input for group in found]
    for group, short in zip(found, inputs, strict=True):
        fastest = group.fastest
        if fastest is None:
            continue
        others = [arm for race in group.races if (arm := _timed(race)) is not None and arm is not fastest]
        title = short if inputs.count(short) == 1 else group.title
        words = f"{fastest.result.case.model} for {title}, {numbers.significant(fastest.p50)} ms a call"
        if others:
            words += f", {_ahead(fastest, others[0])}"
        said.append(words)
    return f"The fastest way: {'; '.join(said)}." if said else "No way has a steady time."


def _ahead(fastest: Arm, other: Arm) -> str:
    ratio = across(other, fastest)
    name = other.result.case.model
    if stats.verdict(ratio, None) == "undetermined":
        return f"level with {name}"
    return f"{numbers.times(ratio.value)} faster than the next, {name}"


def _row(race: Race, fastest: Arm | None) -> tuple[str, ...]:
    name = race.case.model
    if not race.arms:
        return (name, race.failures[0].status, *[numbers.NOTHING] * (len(HEAD) - 2))
    (arm,) = race.arms
    over = numbers.NOTHING
    if arm is fastest:
        over = "reference"
    elif fastest is not None and arm.p50 is not None:
        ratio = across(fastest, arm)
        over = f"{numbers.interval(ratio)} {stats.verdict(ratio, None)}"
    return (
        f"{name} !" if arm.wrong else name,
        numbers.significant(arm.p50),
        numbers.significant(arm.p95),
        over,
        cells.kernels(arm),
        cells.memory(arm),
        cells.error(arm),
        cells.times_floor(arm),
        cells.utilisation(arm),
    )


def _timed(race: Race) -> Arm | None:
    return next((arm for arm in race.arms if arm.p50 is not None), None)


def _milliseconds(race: Race) -> float:
    arm = _timed(race)
    return float("inf") if arm is None or arm.p50 is None else arm.p50
