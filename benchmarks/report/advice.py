"""Which arm of a race to run for how many calls, in sentences: the lead of a report, and the verdict of ``advise``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks import stats
from benchmarks.report import cells
from benchmarks.report.model import Caches, MeasuredArm, MeasuredRace
from benchmarks.report.selection import UPSTREAM

MOST_NAMES = 3
# A machine on which two copies of one arm differ by more can tell little apart.
QUIET = 0.1


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
    elif found := steps(race, timed, "cold", new_process=True):
        said.append(f"In a new process with empty caches {_in_turn(found, lambda arm: arm.name)}.")
    return " ".join([*said, *alike(race, timed, fastest)])


def gains(shown: Iterable[MeasuredRace]) -> list[str]:
    """A line per race: ours against upstream's best as shipped, in speed and in compile time."""
    lines = []
    for race in shown:
        ours, best = race.ours, race.best_shipped
        if ours is None or best is None or (ratio := race.speedup(ours, best)) is None:
            continue
        told = f"{ours.name} is {cells.interval(ratio)} as fast as {best.name}, {race.verdict(ours, best)}"
        colds = [arm.result.cold.seconds if arm.result.cold else None for arm in (ours, best)]
        if None not in colds:
            told += f"; it compiles in {cells.significant(colds[0])} s against {cells.significant(colds[1])} s"
        lines.append(f"{race.case.model} on {race.case.input}: {told}")
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


def steps(race: MeasuredRace, arms: Sequence[MeasuredArm], caches: Caches, *, new_process: bool = False) -> list[Step]:
    """Which of these arms to run from which number of calls on, by the seconds that each pays before its first call.

    The first is the one that has its first result soonest; every further one is measurably faster a call and has paid
    back what it costs more. Arms without a time or compile figures are left out.

    Args:
        race: Says which differences are measurable.
        arms: The arms to choose from.
        caches: ``cold`` or ``warm``.
        new_process: Whether the compiler's start-up is paid too.
    """
    cost = race.before if new_process else lambda arm, caches: arm.paid(caches)
    paid = {arm: seconds for arm in arms if (seconds := cost(arm, caches)) is not None}
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
        return "level with"
    if verdict == "faster":
        return f"{cells.times(ratio.value)} faster than"
    return f"{cells.times(ratio.inverse.value)} slower than"


def alike(
    race: MeasuredRace,
    timed: Sequence[MeasuredArm],
    chosen: MeasuredArm,
    name: Callable[[MeasuredArm], str] = lambda arm: arm.name,
) -> list[str]:
    """The arms that no measurement here tells from the chosen one, in a sentence; none where there are none."""
    names = [name(arm) for arm in timed if arm is not chosen and race.verdict(arm, chosen) == "undetermined"]
    if not names:
        return []
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return [f"No measurable difference to {name(chosen)}: {', '.join(names[:MOST_NAMES])}{more}."]


# A given number of calls ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Choice:
    """What to run for so many calls from cold or from warm caches.

    Args:
        caches: From which of the two.
        arm: What takes the least time in all among what can be told apart.
        steps: From which number of calls on each arm would be that.
    """

    caches: Caches
    arm: MeasuredArm
    steps: tuple[Step, ...]


def choose(race: MeasuredRace, calls: int, caches: Caches) -> Choice | None:
    """The choice for so many calls; None where these caches were not measured, or nothing can be told apart."""
    if why_not(race):
        return None
    arms = comparable(race)
    if caches == "warm" and not any(_measured(arm, "warm") for arm in arms):
        return None
    found = steps(race, arms, caches, new_process=True)
    reached = [step for step in found if step.calls <= calls]
    return Choice(caches, reached[-1].arm, tuple(found)) if reached else None


def _measured(arm: MeasuredArm, caches: Caches) -> bool:
    return not arm.is_eager and arm.paid(caches) is not None


def verdict(race: MeasuredRace, calls: int) -> list[str]:
    """What to run and why, a sentence or two each: the verdict from cold caches first, then from warm ones."""
    cold = choose(race, calls, "cold")
    if cold is None:
        return [why_not(race) or "No arm has compile times, so no advice is possible."]
    lines = [f"For {cells.count(calls)} calls: {_chosen(race, cold, calls)}"]
    level = alike(race, comparable(race), cold.arm, cells.short_name)
    lines += level
    if level and race.noise is not None and race.noise > QUIET:
        lines.append(
            f"Two copies of eager differ by {cells.percent(race.noise)} here, so smaller differences cannot be seen: "
            "measure again on an idle machine."
        )
    if len(cold.steps) > 1:
        lines.append(f"From a cold start {_in_turn(cold.steps)}.")
    warm = choose(race, calls, "warm")
    if warm is None:
        lines.append("Warm starts were not measured.")
    elif warm.arm is not cold.arm:
        lines.append(f"With warm caches, as in a second process: {_chosen(race, warm, calls)}")
    elif len(warm.steps) > 1:
        lines.append(f"With warm caches, as in a second process, {_in_turn(warm.steps)}.")
    return lines


def how_to(race: MeasuredRace, calls: int) -> list[str]:
    """The lines of code that run the model the way that was chosen; none for eager."""
    chosen = choose(race, calls, "cold")
    if chosen is None or chosen.arm.is_eager:
        return []
    case = chosen.arm.result.case
    if case.strategy == "full":
        mode = "" if case.mode == "default" else f', mode="{case.mode}"'
        return [f"model = torch.compile(model, dynamic=False{mode})"]
    lines = ["zoo.compile_regions(model)"]
    return [*lines, "step = zoo.cuda_graph(model, kwargs=inputs)"] if case.cuda_graph else lines


def _chosen(race: MeasuredRace, choice: Choice, calls: int) -> str:
    arm = choice.arm
    a_call = f"{cells.significant(arm.p50)} ms a call"
    if arm.is_eager:
        in_all = f"{a_call}, {seconds(race.total(arm, calls, 'cold'))} in all"
        later = [step for step in choice.steps if step.calls > calls]
        if later:
            return (
                f"do not compile. Eager takes {in_all}; {cells.short_name(later[0].arm)} pays back only from "
                f"{cells.calls(later[0].calls)} calls on."
            )
        return f"do not compile. Eager takes {in_all}, and no compiled arm is measurably faster."
    caches = choice.caches
    in_all = seconds(race.total(arm, calls, caches))
    words = f"{cells.short_name(arm)}: {_costs(race, arm, caches)} first, then {a_call}, {in_all} in all"
    eager = race.own_eager(arm)
    if eager is None:
        return f"{words}; eager did not run, so the break-even is unknown."
    back = cells.calls(race.pays_back(arm, caches))
    return f"{words} against eager's {seconds(race.total(eager, calls, caches))}. It pays back after {back} calls."


def _costs(race: MeasuredRace, arm: MeasuredArm, caches: Caches) -> str:
    """What is paid before the first steady call, part by part."""
    figures = arm.result.cold if caches == "cold" else arm.result.warm
    assert figures is not None
    parts: Mapping[str, float | None] = {
        "to start the compiler": race.start_up,
        "to compile": figures.seconds,
        "to capture": figures.capture,
    }
    return " + ".join(f"{seconds(value)} {what}" for what, value in parts.items() if value is not None)


def _in_turn(steps: Sequence[Step], name: Callable[[MeasuredArm], str] = cells.short_name) -> str:
    first, *others = steps
    later = [f"from {cells.calls(step.calls)} calls on {name(step.arm)}" for step in others]
    return ", ".join([f"{name(first.arm)} finishes first", *later])


def seconds(value: float | None) -> str:
    """Whole milliseconds at least: what follows is below what a process start varies by."""
    if value is None:
        return cells.NOTHING
    return f"{cells.significant(value)} s" if value >= 0.01 else f"{value:.3f} s"
