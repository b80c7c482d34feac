"""What is paid before the first steady call, and when it is paid back, in a new process or where the compiler runs.

The compiler's own start-up is paid once by a process, whichever arm it compiles. Who compiles in a process that has
compiled before pays what ``Arm.paid`` holds; who starts a process for the calls pays start-up on top.
"""

from __future__ import annotations

import math

from benchmarks import stats
from benchmarks.report.race import Arm, Caches, Race


def is_eager(arm: Arm) -> bool:
    return arm.result.case.strategy == "eager" and not arm.result.case.cuda_graph


def start_up(race: Race) -> float:
    """Seconds that starting the compiler adds to the first call of a process that has compiled nothing yet.

    It is the same for every arm. Of what was measured the least counts, since whatever else the machine did comes on
    top: a small graph compiled first and alone, and each arm's first result less what compiling it took.
    """
    found = []
    for arm in race.arms:
        cold, paid = arm.result.cold, arm.paid("cold")
        if cold is None or is_eager(arm):
            continue
        if cold.start_up is not None:
            found.append(cold.start_up)
        if cold.time_to_first_result is not None and paid is not None and arm.p50 is not None:
            found.append(max(0.0, cold.time_to_first_result - paid - arm.p50 / 1e3))
    return min(found, default=0.0)


def before(race: Race, arm: Arm, caches: Caches) -> float | None:
    """Seconds before the first steady call in a new process: start-up, compiling, capturing; None if not measured."""
    paid = arm.paid(caches)
    if paid is None or is_eager(arm):
        return paid
    return paid + start_up(race)


def total(race: Race, arm: Arm, calls: int, caches: Caches) -> float | None:
    """Seconds from a new process, imports and model set-up apart, to the last of so many results."""
    first = before(race, arm, caches)
    return None if first is None or arm.p50 is None else first + calls * arm.p50 / 1e3


def pays_back(race: Race, arm: Arm, caches: Caches) -> float | None:
    """Calls until all that was paid first is paid back against eager; infinite, NaN and None as ``Race.break_even``."""
    eager, first = race.own_eager(arm), before(race, arm, caches)
    if eager is None or eager.p50 is None or arm.p50 is None or first is None or is_eager(arm):
        return None
    if race.verdict(arm, eager) == "undetermined":
        return math.nan
    return stats.break_even_calls(first, eager.p50, arm.p50)
