"""One sentence or two that lead a race: which arm to run when it is called so many times, worked out from its rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks import stats
from benchmarks.report import numbers
from benchmarks.report.costs import before, is_eager
from benchmarks.report.race import Arm, Caches, Race
from benchmarks.report.selection import UPSTREAM

MOST_NAMES = 3


@dataclass(frozen=True)
class Step:
    """From this number of calls on this arm takes the least time in all, what it paid before included."""

    calls: int
    arm: Arm


def lead(race: Race) -> str:
    """What to use, in plain words; losses are said as plainly as wins."""
    timed = comparable(race)
    if why := why_not(race):
        return why
    fastest = timed[0]  # arms are sorted by time
    if fastest.paid("cold") is None:
        words = f"In steady state {fastest.name} is the fastest, {_milliseconds(fastest)} a call"
        parts = [f"{words}{_against_upstream(race, fastest)}.", *alike(race, timed, fastest)]
        return " ".join([*parts, "Compile times were not measured here."])
    cold, new = (at(race, timed, "cold") for at in (steps, steps_of_a_new_process))
    last = cold[-1].arm
    parts = [f"{_in_words(timed, cold, new)}{_against_upstream(race, last)}."]
    if not _same_arms(cold, new):
        parts.append(f"In a new process: {_lower(_in_words(timed, new))}.")
    if not is_eager(last) and last.paid("warm") is not None:
        parts += _with_warm_caches(race, timed, cold)
    return " ".join([*parts, *alike(race, timed, last)])


def _with_warm_caches(race: Race, timed: Sequence[Arm], cold: Sequence[Step]) -> list[str]:
    warm, new = (at(race, timed, "warm") for at in (steps, steps_of_a_new_process))
    if not _same_arms(warm, cold):
        return [f"With warm caches: {_lower(_in_words(timed, warm, new))}."]
    if len(warm) == 1:
        return []
    words = f"With warm caches: from {_calls_in_turn(warm)} calls"
    if not _same_arms(warm, new):
        words += f"; in a new process {_lower(_in_words(timed, new))}"
    elif _calls_in_turn(new) != _calls_in_turn(warm):
        words += f", {_calls_in_turn(new)} in a new process"
    return [words + "."]


def comparable(race: Race) -> list[Arm]:
    """The arms that can be advised: those with a steady time and a right output, fastest first."""
    return [arm for arm in race.arms if arm.p50 is not None and not arm.wrong and arm.result.case.kernels]


def why_not(race: Race) -> str | None:
    """Why nothing can be advised, in a sentence; None where something can."""
    timed = comparable(race)
    if not timed:
        return "No arm has a steady time and a correct output, so no advice is possible."
    fastest = timed[0]
    if len(timed) == 1:
        return (
            f"Only {fastest.name} has a steady time: {_milliseconds(fastest)} a call; no other arm to compare it with."
        )
    ratios = [race.speedup(arm, fastest) for arm in timed[1:]]
    if race.noise == math.inf or not any(ratio is not None and ratio.has_interval for ratio in ratios):
        return f"Too few rounds to tell the arms apart; measure again with at least {stats.MIN_ROUNDS} rounds."
    return None


def steps(race: Race, arms: Sequence[Arm], caches: Caches) -> list[Step]:
    """Which of these arms to run from which number of calls on, by what compiling and capturing cost.

    The compiler already runs: its start-up is not among the costs.

    Args:
        race: Says which differences are measurable.
        arms: Arms with a steady time; those without compile figures are left out.
        caches: ``cold`` or ``warm``.
    """
    return steps_by(race, {arm: cost for arm in arms if (cost := arm.paid(caches)) is not None})


def steps_of_a_new_process(race: Race, arms: Sequence[Arm], caches: Caches) -> list[Step]:
    """The same where nothing was compiled before, so that the compiler's start-up is paid too."""
    return steps_by(race, {arm: cost for arm in arms if (cost := before(race, arm, caches)) is not None})


def steps_by(race: Race, paid: Mapping[Arm, float]) -> list[Step]:
    """Which arm to run from which number of calls on, by the seconds that each pays before its first steady call.

    The first is the one that has its first result soonest; every further one is measurably faster a call and has paid
    back what it costs more.
    """
    if not paid:
        return []
    arms = list(paid)
    chosen = [Step(1, min(paid, key=lambda arm: paid[arm] * 1e3 + _p50(arm)))]
    while True:
        now = chosen[-1].arm
        ahead = [
            (stats.break_even_calls(paid[arm] - paid[now], _p50(now), _p50(arm)), _p50(arm), index)
            for index, arm in enumerate(arms)
            if paid[arm] > paid[now] and race.overtakes(arm, now)
        ]
        if not ahead:
            return chosen
        calls, _, index = min(ahead)
        chosen.append(Step(int(calls), arms[index]))


def _p50(arm: Arm) -> float:
    assert arm.p50 is not None
    return arm.p50


def _milliseconds(arm: Arm) -> str:
    return f"{numbers.significant(arm.p50)} ms"


def _in_words(timed: Sequence[Arm], chosen: Sequence[Step], new: Sequence[Step] = ()) -> str:
    """The steps in a sentence; ``new`` are those of a new process, named where they are of the same arms."""
    first, *others = chosen
    if not others:
        if not is_eager(first.arm):
            return f"Run {first.arm.name} from the first call on"
        if all(arm.result.case.strategy == "eager" for arm in timed):
            return f"No arm of this race is compiled: run {first.arm.name}"
        return f"Do not compile: no compiled arm is measurably faster than {first.arm.name}"
    calls = [numbers.calls(step.calls) for step in others]
    later = [numbers.calls(step.calls) for step in new[1:]] if _same_arms(chosen, new) else calls
    words = f"For fewer than {calls[0]} calls "
    if later[0] != calls[0]:
        words += f"where the compiler already runs, {later[0]} in a new process, "
    words += f"run {first.arm.name}; "
    if len(others) == 1:
        return f"{words}beyond that {others[0].arm.name}"
    words += f"from there {others[0].arm.name}"
    for step, here, anew in zip(others[1:], calls[1:], later[1:], strict=True):
        words += f"; from {here} calls{f' ({anew} in a new process)' if anew != here else ''} on {step.arm.name}"
    return words


def _same_arms(some: Sequence[Step], others: Sequence[Step]) -> bool:
    return [step.arm for step in some] == [step.arm for step in others]


def _calls_in_turn(chosen: Sequence[Step]) -> str:
    return " and ".join(numbers.calls(step.calls) for step in chosen[1:])


def _lower(words: str) -> str:
    return words[0].lower() + words[1:]


def _against_upstream(race: Race, arm: Arm) -> str:
    """``, 4.2× faster than torch-geometric's best as shipped, ...``; or by how much ours lose to this arm."""
    if race.case.family not in UPSTREAM:
        return ""  # a model of nobody's library: there is no upstream to hold it against
    library = UPSTREAM[race.case.family]
    if arm.result.case.impl != "zoo":
        return f"; ours, {race.ours.name}, is {_compared(race, race.ours, arm)} it" if race.ours else ""
    whose = library + ("'" if library.endswith("s") else "'s")
    bests = [(race.best_shipped, "as shipped"), (race.best_tuned, "tuned")]
    said = [f"{_compared(race, arm, best)} {whose} best {how}" for best, how in bests if best is not None]
    return f", which is {' and '.join(said)}" if said else f"; no arm of {library} ran, so there is no comparison"


def _compared(race: Race, arm: Arm, over: Arm) -> str:
    ratio, verdict = race.speedup(arm, over), race.verdict(arm, over)
    if ratio is None or verdict == "undetermined":
        return "level with"
    if verdict == "faster":
        return f"{numbers.times(ratio.value)} faster than"
    return f"{numbers.times(ratio.inverse.value)} slower than"


def alike(
    race: Race, timed: Sequence[Arm], chosen: Arm, name: Callable[[Arm], str] = lambda arm: arm.name
) -> list[str]:
    """The arms that no measurement here tells from the chosen one, in a sentence; none where there are none."""
    names = [name(arm) for arm in timed if arm is not chosen and race.verdict(arm, chosen) == "undetermined"]
    if not names:
        return []
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return [f"No measurable difference to {name(chosen)}: {', '.join(names[:MOST_NAMES])}{more}."]
