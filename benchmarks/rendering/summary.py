"""A family in a few sentences: its range over upstream's best, its worst row, what to run for how many calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from benchmarks import stats
from benchmarks.rendering import choice, numbers, tables, ways
from benchmarks.rendering.families import fastest
from benchmarks.rendering.race import Arm, Race
from benchmarks.rendering.selection import UPSTREAM

# Of these the sentence names the ones at which the choice changes.
CALLS = (100, 1_000, 10_000, 100_000, 1_000_000)
MOST_NAMED = 3


def sentences(races: Sequence[Race]) -> list[str]:
    """What leads a family; losses are said as plainly as wins, and what was not measured is said too."""
    if ways.is_comparison(races):
        return [ways.sentence(races)]
    advised = what_to_run(races) if any(race.ours for race in races) else []
    return [*_speedups(races), *_worst(races), *advised]


def _speedups(races: Sequence[Race]) -> list[str]:
    library = UPSTREAM.get(races[0].case.family, "upstream")
    whose = library + ("'" if library.endswith("s") else "'s")
    found = [(race, ratio) for race in races if race.ours and (ratio := race.speedup(race.ours, race.best_shipped))]
    if not found:
        return _over_reference(races)
    values = [ratio.value for _, ratio in found]
    words = f"Ours is {_range(values)} as fast as {whose} best as shipped over {_races(len(found))}"
    outcomes = [(race, race.verdict(race.ours, race.best_shipped)) for race, _ in found if race.ours]
    parts = [f"{words}: {_outcomes(outcomes, races)}."]
    tuned = [(race, race.verdict(race.ours, race.best_tuned)) for race in races if race.ours and race.best_tuned]
    if tuned:
        ratios = [race.speedup(race.ours, race.best_tuned) for race, _ in tuned if race.ours]
        parts.append(
            f"Against its best tuned, {_range([r.value for r in ratios if r])} over {_races(len(tuned))}: "
            f"{_outcomes(tuned, races)}."
        )
    return parts


def _over_reference(races: Sequence[Race]) -> list[str]:
    """Of a family in which nothing of ours meets upstream: how much the fastest arm of each race gains over eager."""
    values = []
    for race in races:
        arm = fastest(race)
        if arm is not None and (ratio := race.speedup(arm, race.reference)) is not None:
            values.append(ratio.value)
    if not values:
        return ["Nothing here was held against an upstream library."]
    return [f"The fastest arm of each race is {_range(values)} as fast as eager over {_races(len(values))}."]


def _worst(races: Sequence[Race]) -> list[str]:
    worst = tables.worst_row(races)
    if worst is None:
        return []
    race, arm, ratio = worst
    verdict = race.verdict(arm, race.best_shipped)
    said = f"{arm.name} on {_place(race, races)}"
    if verdict == "undetermined":
        return [f"Our worst regional row, by rule, is level with upstream's best as shipped: {said}."]
    times = ratio.value if verdict == "faster" else ratio.inverse.value
    return [f"Our worst regional row, by rule: {said}, {numbers.times(times)} {verdict}."]


def what_to_run(races: Sequence[Race]) -> list[str]:
    """For rising numbers of calls the arm that most races choose in a new process; one sentence."""
    # The choice is that of ``advise``. Races without compile figures of their fastest arm cannot say what it costs.
    told = [race for race in races if _costs_known(race)]
    if not told:
        return ["What compiling costs was not measured here: no number of calls from which it pays."]
    runs: list[tuple[str, list[int], list[int]]] = []  # an arm, the numbers of calls that it is for, races that say so
    for calls in CALLS:
        chosen = Counter(_name(picked.arm) for race in told if (picked := choice.choose(race, calls, "cold")))
        name, count = chosen.most_common(1)[0]
        if not runs or runs[-1][0] != name:
            runs.append((name, [], []))
        runs[-1][1].append(calls)
        runs[-1][2].append(count)
    parts = []
    for index, (name, calls_of, counts) in enumerate(runs):
        if len(runs) == 1:
            when = "for any number of calls"
        elif index == 0:
            when = f"up to {numbers.count(calls_of[-1])} calls"
        else:
            when = f"for {numbers.count(calls_of[0])} or more"
        # The last run is long, and what is chosen at its start is what is least sure.
        parts.append(f"{name} {when} (in {counts[0] if index else min(counts)} of {_races(len(told))})")
    return [f"In a new process, run {', '.join(parts)}."]


def _costs_known(race: Race) -> bool:
    arm = fastest(race)
    return arm is not None and arm.paid("cold") is not None and choice.choose(race, 1, "cold") is not None


def _name(arm: Arm) -> str:
    return "eager" if arm.result.case.strategy == "eager" and not arm.result.case.cuda_graph else arm.name


def _range(values: Sequence[float]) -> str:
    low, high = numbers.times(min(values)), numbers.times(max(values))
    return low if low == high else f"{low} to {high} (median {numbers.times(stats.median(values))})"


def _outcomes(outcomes: Sequence[tuple[Race, str | None]], family: Sequence[Race]) -> str:
    parts = []
    for verdict, word in (("faster", "faster"), ("slower", "slower"), ("undetermined", "level")):
        races = [race for race, outcome in outcomes if outcome == verdict]
        if verdict == "faster" or races:
            named = f" ({_named(races, family)})" if races and verdict != "faster" else ""
            parts.append(f"{word} in {len(races) or 'none'}{named}")
    return ", ".join(parts)


def _named(races: Sequence[Race], family: Sequence[Race]) -> str:
    more = f" and {len(races) - MOST_NAMED} more" if len(races) > MOST_NAMED else ""
    return "; ".join(_place(race, family) for race in races[:MOST_NAMED]) + more


def _place(race: Race, family: Sequence[Race]) -> str:
    """The race in words; its dtype where the family has the same race in another."""
    model, input, workload = race.case.race[1:4]
    dtypes = {other.case.dtype for other in family if other.case.race[1:4] == race.case.race[1:4]}
    words = [model, input] + ["training"] * (workload == "train") + [race.case.dtype] * (len(dtypes) > 1)
    return ", ".join(words)


def _races(count: int) -> str:
    return f"{count} race{'s' * (count != 1)}"
