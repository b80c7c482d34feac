"""Which way to run a model that is called so many times, everything counted that its user waits for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.report import advice, numbers
from benchmarks.report.advice import Step
from benchmarks.report.costs import is_eager, pays_back, start_up, total
from benchmarks.report.race import Arm, Caches, Race

# A machine on which two copies of one arm differ by more can tell little apart.
QUIET = 0.1


def short_name(arm: Arm) -> str:
    """An arm's name without whose model it is: all are of one."""
    return arm.name.removeprefix(arm.result.case.impl).strip()


@dataclass(frozen=True)
class Choice:
    """What to run for so many calls from cold or from warm caches.

    Args:
        caches: From which of the two.
        arm: What takes the least time in all among what can be told apart.
        steps: From which number of calls on each arm would be that.
    """

    caches: Caches
    arm: Arm
    steps: tuple[Step, ...]


def choose(race: Race, calls: int, caches: Caches) -> Choice | None:
    """The choice for so many calls; None where these caches were not measured, or nothing can be told apart."""
    if advice.why_not(race):
        return None
    arms = advice.comparable(race)
    if caches == "warm" and not any(_measured(arm, "warm") for arm in arms):
        return None
    steps = advice.steps_of_a_new_process(race, arms, caches)
    reached = [step for step in steps if step.calls <= calls]
    return Choice(caches, reached[-1].arm, tuple(steps)) if reached else None


def _measured(arm: Arm, caches: Caches) -> bool:
    return not is_eager(arm) and arm.paid(caches) is not None


def verdict(race: Race, calls: int) -> list[str]:
    """What to run and why, a sentence or two each: the verdict from cold caches first, then from warm ones."""
    cold = choose(race, calls, "cold")
    if cold is None:
        return [advice.why_not(race) or "No arm has compile times, so no advice is possible."]
    lines = [f"For {numbers.count(calls)} calls: {_chosen(race, cold, calls)}"]
    alike = advice.alike(race, advice.comparable(race), cold.arm, short_name)
    lines += alike
    if alike and race.noise is not None and race.noise > QUIET:
        lines.append(
            f"Two copies of eager differ by {numbers.percent(race.noise)} here, so smaller differences cannot be seen: "
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


def _chosen(race: Race, choice: Choice, calls: int) -> str:
    arm = choice.arm
    a_call = f"{numbers.significant(arm.p50)} ms a call"
    if is_eager(arm):
        in_all = f"{a_call}, {seconds(total(race, arm, calls, 'cold'))} in all"
        later = [step for step in choice.steps if step.calls > calls]
        if later:
            return (
                f"do not compile. Eager takes {in_all}; {short_name(later[0].arm)} pays back only from "
                f"{numbers.calls(later[0].calls)} calls on."
            )
        return f"do not compile. Eager takes {in_all}, and no compiled arm is measurably faster."
    caches = choice.caches
    in_all = seconds(total(race, arm, calls, caches))
    words = f"{short_name(arm)}: {_costs(race, arm, caches)} first, then {a_call}, {in_all} in all"
    eager = race.own_eager(arm)
    if eager is None:
        return f"{words}; eager did not run, so the break-even is unknown."
    back = numbers.calls(pays_back(race, arm, caches))
    return f"{words} against eager's {seconds(total(race, eager, calls, caches))}. It pays back after {back} calls."


def _costs(race: Race, arm: Arm, caches: Caches) -> str:
    """What is paid before the first steady call, part by part."""
    figures = arm.result.cold if caches == "cold" else arm.result.warm
    assert figures is not None
    parts: Mapping[str, float | None] = {
        "to start the compiler": start_up(race),
        "to compile": figures.seconds,
        "to capture": figures.capture,
    }
    return " + ".join(f"{seconds(value)} {what}" for what, value in parts.items() if value is not None)


def _in_turn(steps: tuple[Step, ...]) -> str:
    first, *others = steps
    return f"{short_name(first.arm)} finishes first, " + ", ".join(
        f"from {numbers.calls(step.calls)} calls on {short_name(step.arm)}" for step in others
    )


def seconds(value: float | None) -> str:
    """Whole milliseconds at least: what follows is below what a process start varies by."""
    if value is None:
        return numbers.NOTHING
    return f"{numbers.significant(value)} s" if value >= 0.01 else f"{value:.3f} s"
