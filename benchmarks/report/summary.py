"""A family in a few sentences: its range over upstream's best, its worst row, what to run for how many calls."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from benchmarks import stats
from benchmarks.report import advice, cells, tables
from benchmarks.report.model import AS_SHIPPED, MeasuredArm, MeasuredRace, across, is_shipped
from benchmarks.report.selection import UPSTREAM
from benchmarks.stats import Ratio, Verdict

# Of these the sentence names the ones at which the choice changes.
CALLS = (100, 1_000, 10_000, 100_000, 1_000_000)
MOST_NAMED = 3
# How an arm stands against another of its race.
Held = tuple[MeasuredRace, Ratio, Verdict | None]


def sentences(races: Sequence[MeasuredRace]) -> list[str]:
    """What leads a family; losses are said as plainly as wins, and what was not measured is said too."""
    if tables.are_alternatives(races):
        return [_fastest_ways(races)]
    advised = what_to_run(races) if any(race.ours for race in races) else []
    return [*_speedups(races), *_worst(races), *advised]


def gains(races: Sequence[MeasuredRace]) -> dict[str, str]:
    """By arm of upstream, what ours gains over it: milliseconds a call and cold compile seconds, as medians."""
    shipped = {arm.name: arm for race in races for arm in race.arms if is_shipped(arm.result.case)}
    names = sorted(shipped, key=lambda name: AS_SHIPPED.index(_strategy(shipped[name])))
    upstream: dict[str, Callable[[MeasuredRace], MeasuredArm | None]] = {
        **{name: functools.partial(_right, name=name) for name in names},
        "upstream's best tuned arm": lambda race: race.best_tuned,
    }
    said = {}
    for name, find in upstream.items():
        compared = [(race, race.ours, theirs) for race in races if race.ours and (theirs := find(race))]
        held = _held(compared)
        if not held:
            continue
        ours_ms, theirs_ms = _median(ours.p50 for _, ours, _ in compared), _median(arm.p50 for _, _, arm in compared)
        words = f"{ours_ms} instead of {theirs_ms} ms a call"
        paid = [(ours.paid("cold"), theirs.paid("cold")) for _, ours, theirs in compared]
        if both := [(ours, theirs) for ours, theirs in paid if ours and theirs]:
            ours_s, theirs_s = (_median(pair[side] for pair in both) for side in (0, 1))
            times = cells.times(stats.median([theirs / ours for ours, theirs in both]))
            words += f", {ours_s} instead of {theirs_s} s to compile from cold caches ({times} less)"
        said[name] = f"{words}; medians. A call is {_range(held)} as fast {_outcomes(held, races, named=False)}."
    return said


def _strategy(arm: MeasuredArm) -> tuple[str, str]:
    return arm.result.case.strategy, arm.result.case.mode


def _median(values: Iterable[float | None]) -> str:
    return cells.significant(stats.median([value for value in values if value is not None]))


def _right(race: MeasuredRace, name: str) -> MeasuredArm | None:
    return next((arm for arm in race.arms if arm.name == name and arm.p50 is not None and not arm.wrong), None)


def _speedups(races: Sequence[MeasuredRace]) -> list[str]:
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


def _held(arms: Iterable[tuple[MeasuredRace, MeasuredArm | None, MeasuredArm | None]]) -> list[Held]:
    """What is said of arms that are held against others; without those of which one did not run."""
    return [
        (race, ratio, race.verdict(arm, over))
        for race, arm, over in arms
        if arm is not None and (ratio := race.speedup(arm, over)) is not None
    ]


def _over_reference(races: Sequence[MeasuredRace], best: str) -> list[str]:
    """Of a family in which no regional arm of ours meets upstream: what the fastest arm of each race gains over eager.

    Where nothing ran eagerly either, our fastest against upstream's.
    """
    over_eager = _held([(race, race.fastest, race.reference) for race in races])
    if over_eager:
        said, of = _range(over_eager), cells.race_count(len(over_eager))
        return [f"The fastest arm of each race is {said} as fast as eager over {of}."]
    found = _held([(race, _fastest_of(race, "zoo"), _fastest_of(race, "upstream")) for race in races])
    if found:
        return [f"Ours is {_range(found)} as fast as {best} {_outcomes(found, races)}."]
    return ["No upstream library was measured here."]


def _fastest_of(race: MeasuredRace, impl: str) -> MeasuredArm | None:
    arms = (arm for arm in race.arms if arm.result.case.impl.startswith(impl))
    return next((arm for arm in arms if arm.p50 is not None and not arm.wrong), None)


def _worst(races: Sequence[MeasuredRace]) -> list[str]:
    worst = tables.worst_row(races)
    if worst is None:
        return []
    race, arm, ratio = worst
    verdict = race.verdict(arm, race.best_shipped)
    said = f"{arm.name} on {_place(race, races)}{cells.but_wrong(arm)}"
    if verdict == "undetermined":
        return [f"Our worst result is level with upstream's best as shipped: {said}."]
    times = ratio.value if verdict == "faster" else ratio.inverse.value
    return [f"Our worst result: {said}, {cells.times(times)} {verdict}."]


def what_to_run(races: Sequence[MeasuredRace]) -> list[str]:
    """For rising numbers of calls the arm that most races choose in a new process; one sentence."""
    # The choice is that of ``advise``. Races without compile figures of their fastest arm cannot say what it costs.
    told = [race for race in races if _costs_known(race)]
    if not told:
        return ["Compile times were not measured here, so the break-even is unknown."]
    runs: list[tuple[str, list[int], list[int]]] = []  # an arm, the numbers of calls that it is for, races that say so
    for calls in CALLS:
        chosen = Counter(_name(picked.arm) for race in told if (picked := advice.choose(race, calls, "cold")))
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
            when = f"up to {cells.count(calls_of[-1])} calls"
        else:
            when = f"for {cells.count(calls_of[0])} or more"
        # The last run is long, and what is chosen at its start is what is least sure.
        parts.append(f"{name} {when} (in {counts[0] if index else min(counts)} of {cells.race_count(len(told))})")
    return [f"In a new process, run {', '.join(parts)}."]


def _costs_known(race: MeasuredRace) -> bool:
    arm = race.fastest
    return arm is not None and arm.paid("cold") is not None and advice.choose(race, 1, "cold") is not None


def _name(arm: MeasuredArm) -> str:
    return "eager" if arm.result.case.strategy == "eager" and not arm.result.case.cuda_graph else arm.name


def _range(found: Sequence[Held]) -> str:
    values = [ratio.value for _, ratio, _ in found]
    low, high = cells.times(min(values)), cells.times(max(values))
    return low if low == high else f"{low} to {high} (median {cells.times(stats.median(values))})"


def _outcomes(found: Sequence[Held], family: Sequence[MeasuredRace], named: bool = True) -> str:
    parts = []
    for verdict, word in (("faster", "faster"), ("slower", "slower"), ("undetermined", "level")):
        races = [race for race, _, outcome in found if outcome == verdict]
        if verdict == "faster" or races:
            which = f" ({_named(races, family)})" if named and races and verdict != "faster" else ""
            parts.append(f"{word} in {len(races) or 'none'}{which}")
    return f"over {cells.race_count(len(found))}: {', '.join(parts)}"


def _named(races: Sequence[MeasuredRace], family: Sequence[MeasuredRace]) -> str:
    more = f" and {len(races) - MOST_NAMED} more" if len(races) > MOST_NAMED else ""
    return "; ".join(_place(race, family) for race in races[:MOST_NAMED]) + more


def _place(race: MeasuredRace, family: Sequence[MeasuredRace]) -> str:
    """The race in words; its dtype where the family has the same race in another."""
    model, input, workload = race.case.race[1:4]
    dtypes = {other.case.dtype for other in family if other.case.race[1:4] == race.case.race[1:4]}
    words = [model, input] + ["training"] * (workload == "train") + [race.case.dtype] * (len(dtypes) > 1)
    return ", ".join(words)


def _fastest_ways(races: Sequence[MeasuredRace]) -> str:
    """Of models that do one thing, which is the fastest for each input, and by how much."""
    said = []
    groups = tables.alternatives(races)
    inputs = [group.races[0].case.input for group in groups]
    for group, short in zip(groups, inputs, strict=True):
        fastest, second = group.fastest, group.second
        if fastest is None:
            continue
        title = short if inputs.count(short) == 1 else group.title
        words = f"{fastest.result.case.model} for {title}, {cells.significant(fastest.p50)} ms a call"
        if second is not None:
            ratio, name = across(second, fastest), second.result.case.model
            level = stats.verdict(ratio, None) == "undetermined"
            words += f", level with {name}" if level else f", {cells.times(ratio.value)} faster than the next, {name}"
        said.append(words)
    return f"The fastest way: {'; '.join(said)}." if said else "No way has a steady time."
