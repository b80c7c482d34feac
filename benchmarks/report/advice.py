"""Which arm of a race to run, in sentences: the lead of a race, and what was gained."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks import stats
from benchmarks.report import cells
from benchmarks.report.model import UPSTREAM, MeasuredArm, MeasuredRace, titles
from zoo.advise import UNUSABLE, gain, unusable

MOST_NAMES = 3


@dataclass(frozen=True)
class Step:
    """From this number of calls on this arm takes the least time in all, what it paid before included."""

    calls: int
    arm: MeasuredArm


def lead(race: MeasuredRace) -> str:
    """What to use, in plain words; losses are said as plainly as wins."""
    if why := why_not(race):
        return why
    timed = comparable(race)
    fastest = timed[0]  # arms are sorted by time
    said = [f"{fastest.name} is the fastest, {_milliseconds(fastest)} a call{_against_upstream(race, fastest)}."]
    if fastest.paid("cold") is None:
        said.append("Compile times were not measured here.")
    elif found := steps(race, timed):
        said.append(f"In a new process with empty caches {_in_turn(found)}.")
    return " ".join([*said, *alike(race, timed, fastest)])


def gains(shown: Sequence[MeasuredRace]) -> dict[MeasuredRace, str]:
    """A line per race in the words of ``zoo advise``: ours against upstream's best as shipped."""
    lines: dict[MeasuredRace, str] = {}
    for race, subject in titles(shown).items():
        ours, best = race.ours, race.best_shipped
        if ours is None or ours.p50 is None or best is None or (ratio := race.speedup(ours, best)) is None:
            continue
        if race.noise is not None and UNUSABLE < race.noise < math.inf:
            lines[race] = f"{subject}: {unusable(race.noise)}"
            continue
        cold, theirs = (arm.result.cold.seconds if arm.result.cold else None for arm in (ours, best))
        compiled = "" if theirs is None else f"{cells.significant(theirs)} s to compile, "
        times = None if race.verdict(ours, best) == "undetermined" else ratio.value
        told = gain(cold, ours.p50, times, f"{best.name} ({compiled}{_milliseconds(best)})")
        lines[race] = f"{subject}: {ours.name} {told}."
    return lines


def comparable(race: MeasuredRace) -> list[MeasuredArm]:
    """The arms that can be advised: those with a steady time and a right output, fastest first."""
    return [arm for arm in race.arms if arm.p50 is not None and not arm.wrong and arm.result.case.kernels]


def why_not(race: MeasuredRace) -> str | None:
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


def steps(race: MeasuredRace, arms: Sequence[MeasuredArm]) -> list[Step]:
    """Which of these arms to run from which number of calls on, in a new process with empty caches.

    The first is the one that has its first result soonest; every further one is measurably faster a call and has paid
    back what it costs more. Arms without a time or compile figures are left out.
    """
    paid = {arm: seconds for arm in arms if (seconds := race.before(arm)) is not None}
    p50 = {arm: arm.p50 for arm in paid if arm.p50 is not None}
    if not p50:
        return []
    chosen = [Step(1, min(p50, key=lambda arm: paid[arm] * 1e3 + p50[arm]))]
    while True:
        now = chosen[-1].arm
        ahead = [
            (stats.break_even_calls(paid[arm] - paid[now], p50[now], p50[arm]), p50[arm], index)
            for index, arm in enumerate(p50)
            if paid[arm] > paid[now] and race.overtakes(arm, now)
        ]
        if not ahead:
            return chosen
        calls, _, index = min(ahead)
        chosen.append(Step(int(calls), list(p50)[index]))


def _milliseconds(arm: MeasuredArm) -> str:
    return f"{cells.significant(arm.p50)} ms"


def _against_upstream(race: MeasuredRace, arm: MeasuredArm) -> str:
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


def _compared(race: MeasuredRace, arm: MeasuredArm, over: MeasuredArm) -> str:
    ratio, verdict = race.speedup(arm, over), race.verdict(arm, over)
    if ratio is None or verdict == "undetermined":
        return "with no measurable difference to"
    if verdict == "faster":
        return f"{cells.times(ratio.value)} faster than"
    return f"{cells.times(ratio.inverse.value)} slower than"


def alike(race: MeasuredRace, timed: Sequence[MeasuredArm], chosen: MeasuredArm) -> list[str]:
    """The arms that no measurement here tells from the chosen one, in a sentence; none where there are none."""
    names = [arm.name for arm in timed if arm is not chosen and race.verdict(arm, chosen) == "undetermined"]
    if not names:
        return []
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return [f"No measurable difference to {chosen.name}: {', '.join(names[:MOST_NAMES])}{more}."]


def _in_turn(steps: Sequence[Step]) -> str:
    first, *others = steps
    later = [f"from {cells.calls(step.calls)} calls on {step.arm.name}" for step in others]
    return ", ".join([f"{first.arm.name} finishes first", *later])
