"""A family in a few sentences: its range over upstream's best, its worst row, what to run for how many calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from benchmarks import stats
from benchmarks.report import cells, choice, numbers, tables, ways
from benchmarks.report.families import fastest
from benchmarks.report.race import Arm, Race
from benchmarks.report.selection import UPSTREAM
from benchmarks.stats import Ratio, Verdict

# Of these the sentence names the ones at which the choice changes.
CALLS = (100, 1_000, 10_000, 100_000, 1_000_000)
MOST_NAMED = 3
# How an arm stands against another of its race.
Held = tuple[Race, Ratio, Verdict | None]


def sentences(races: Sequence[Race]) -> list[str]:
    """What leads a family; losses are said as plainly as wins, and what was not measured is said too."""
    if ways.is_comparison(races):
        return [ways.sentence(races)]
    advised = what_to_run(races) if any(race.ours for race in races) else []
    return [*_speedups(races), *_worst(races), *advised]


def _speedups(races: Sequence[Race]) -> list[str]:
    library = UPSTREAM.get(races[0].case.family, "upstream")
    best = library + ("' best" if library.endswith("s") else "'s best")
    shipped = _held([(race, race.ours, race.best_shipped) for race in races])
    tuned = _held([(race, race.ours, race.best_tuned) for race in races])
    parts = []
    if shipped:
        parts.append(f"Ours is {_range(shipped)} as fast as {best} as shipped {_outcomes(shipped, races)}.")
    if tuned:
        words = "Against its best tuned, {}" if shipped else f"Ours is {{}} as fast as {best} tuned"
        parts.append(f"{words.format(_range(tuned))} {_outcomes(tuned, races)}.")
    return parts or _over_reference(races, best)


def _held(arms: Iterable[tuple[Race, Arm | None, Arm | None]]) -> list[Held]:
    """What is said of arms that are held against others; without those of which one did not run."""
    return [
        (race, ratio, race.verdict(arm, over))
        for race, arm, over in arms
        if arm is not None and (ratio := race.speedup(arm, over)) is not None
    ]


def _over_reference(races: Sequence[Race], best: str) -> list[str]:
    """Of a family in which no regional arm of ours meets upstream: what the fastest arm of each race gains over eager.

    Where nothing ran eagerly either, our fastest against upstream's.
    """
    over_eager = _held([(race, fastest(race), race.reference) for race in races])
    if over_eager:
        said, of = _range(over_eager), numbers.races(len(over_eager))
        return [f"The fastest arm of each race is {said} as fast as eager over {of}."]
    found = _held([(race, _fastest_of(race, "zoo"), _fastest_of(race, "upstream")) for race in races])
    if found:
        return [f"Ours is {_range(found)} as fast as {best} {_outcomes(found, races)}."]
    return ["No upstream library was measured here."]


def _fastest_of(race: Race, impl: str) -> Arm | None:
    arms = (arm for arm in race.arms if arm.result.case.impl.startswith(impl))
    return next((arm for arm in arms if arm.p50 is not None and not arm.wrong), None)


def _worst(races: Sequence[Race]) -> list[str]:
    worst = tables.worst_row(races)
    if worst is None:
        return []
    race, arm, ratio = worst
    verdict = race.verdict(arm, race.best_shipped)
    said = f"{arm.name} on {_place(race, races)}{cells.but_wrong(arm)}"
    if verdict == "undetermined":
        return [f"Our worst result is level with upstream's best as shipped: {said}."]
    times = ratio.value if verdict == "faster" else ratio.inverse.value
    return [f"Our worst result: {said}, {numbers.times(times)} {verdict}."]


def what_to_run(races: Sequence[Race]) -> list[str]:
    """For rising numbers of calls the arm that most races choose in a new process; one sentence."""
    # The choice is that of ``advise``. Races without compile figures of their fastest arm cannot say what it costs.
    told = [race for race in races if _costs_known(race)]
    if not told:
        return ["Compile times were not measured here, so the break-even is unknown."]
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
        parts.append(f"{name} {when} (in {counts[0] if index else min(counts)} of {numbers.races(len(told))})")
    return [f"In a new process, run {', '.join(parts)}."]


def _costs_known(race: Race) -> bool:
    arm = fastest(race)
    return arm is not None and arm.paid("cold") is not None and choice.choose(race, 1, "cold") is not None


def _name(arm: Arm) -> str:
    return "eager" if arm.result.case.strategy == "eager" and not arm.result.case.cuda_graph else arm.name


def _range(found: Sequence[Held]) -> str:
    values = [ratio.value for _, ratio, _ in found]
    low, high = numbers.times(min(values)), numbers.times(max(values))
    return low if low == high else f"{low} to {high} (median {numbers.times(stats.median(values))})"


def _outcomes(found: Sequence[Held], family: Sequence[Race]) -> str:
    parts = []
    for verdict, word in (("faster", "faster"), ("slower", "slower"), ("undetermined", "level")):
        races = [race for race, _, outcome in found if outcome == verdict]
        if verdict == "faster" or races:
            named = f" ({_named(races, family)})" if races and verdict != "faster" else ""
            parts.append(f"{word} in {len(races) or 'none'}{named}")
    return f"over {numbers.races(len(found))}: {', '.join(parts)}"


def _named(races: Sequence[Race], family: Sequence[Race]) -> str:
    more = f" and {len(races) - MOST_NAMED} more" if len(races) > MOST_NAMED else ""
    return "; ".join(_place(race, family) for race in races[:MOST_NAMED]) + more


def _place(race: Race, family: Sequence[Race]) -> str:
    """The race in words; its dtype where the family has the same race in another."""
    model, input, workload = race.case.race[1:4]
    dtypes = {other.case.dtype for other in family if other.case.race[1:4] == race.case.race[1:4]}
    words = [model, input] + ["training"] * (workload == "train") + [race.case.dtype] * (len(dtypes) > 1)
    return ", ".join(words)
