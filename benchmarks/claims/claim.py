"""What a claim is: parts that say which figure of which arms in which races should lie in which range."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from benchmarks.claims.figures import Figure, Way
from benchmarks.plan import MODES, STRATEGIES, Case, arms_of, refusal
from benchmarks.report.model import MeasuredRace

# A claim that names one number stands for the numbers around it: a tenth of it either way.
AROUND = 1.1


@dataclass(frozen=True, kw_only=True)
class Where:
    """A race that a part speaks of, in the words of the harness' options. Claims are about GPUs."""

    family: str
    model: str
    input: str
    dtype: str = "bfloat16"
    workload: str = "inference"
    device: str = "cuda"

    def case(self, way: Way) -> Case:
        """The arm of this way."""
        return Case(**vars(self), **vars(way))

    def matches(self, race: MeasuredRace) -> bool:
        """Whether that race is this one."""
        return self.case(Way()).race == race.case.race


@dataclass(frozen=True)
class Range:
    """What a claim allows: from ``low`` to ``high``, both included."""

    low: float = -math.inf
    high: float = math.inf

    def __post_init__(self) -> None:
        if not self.low <= self.high or (math.isinf(self.low) and math.isinf(self.high)):
            raise ValueError(f"{self.low} to {self.high} is no range that a claim could fail")


def between(low: float, high: float) -> Range:
    """From the one to the other."""
    return Range(low, high)


def around(number: float) -> Range:
    """What one number stands for."""
    return Range(number / AROUND, number * AROUND)


def at_least(number: float) -> Range:
    """So much or more."""
    return Range(low=number)


def at_most(number: float) -> Range:
    """So much or less."""
    return Range(high=number)


@dataclass(frozen=True, kw_only=True)
class Part:
    """One thing that a claim says.

    Args:
        says: In a few words, to tell it from the claim's other parts.
        figure: What is measured in a race.
        allowed: Where it should lie.
        where: In which races.
        against: Where the claim compares races: the figure there, by which the figure of ``where`` is divided.
        mean: Whether the claim speaks of the mean of all races (the geometric one) and not of each.
    """

    says: str
    figure: Figure
    allowed: Range
    where: tuple[Where, ...]
    against: Where | None = None
    mean: bool = False

    def __post_init__(self) -> None:
        if not self.where:
            raise ValueError(f"{self.says}: no races to look at")


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A claim that people repeat, in their words.

    Args:
        number: Of the list of claims.
        title: A few words.
        text: The claim.
        parts: What it says that can be measured here.
        not_here: What of it is not measured here, and why; empty where all of it is.
    """

    number: int
    title: str
    text: str
    parts: tuple[Part, ...] = ()
    not_here: str = ""

    def __post_init__(self) -> None:
        if not (self.parts or self.not_here):
            raise ValueError(f"claim {self.number}: say what is measured, or why nothing is")


def commands(parts: Iterable[Part]) -> list[str]:
    """The runs that measure these parts: each race with all arms that are looked at, like races in one."""
    wanted: dict[Where, set[Way]] = {}
    for part in parts:
        for where in (*part.where, *([part.against] if part.against else [])):
            wanted.setdefault(where, set()).update(part.figure.ways)
    alike: dict[tuple[Where, frozenset[Way]], list[Where]] = {}
    for where, ways in wanted.items():
        alike.setdefault((replace(where, model=""), frozenset(ways)), []).append(where)
    return [_command(group, sorted(ways, key=_place)) for (_, ways), group in alike.items()]


def _command(group: Sequence[Where], ways: Sequence[Way]) -> str:
    """The run of these ways on races that differ in their models alone."""
    where = group[0]
    given: dict[str, list[str]] = {
        "--impl": [way.impl for way in ways],
        "--strategy": [where.case(way).strategy_name for way in ways],
        "--mode": [way.mode for way in ways],
    }
    lists = {option: list(dict.fromkeys(values)) for option, values in given.items()}
    words = ["python", "-m", "benchmarks.run", "--family", where.family]
    words += ["--model", ",".join(where.model for where in group), "--input", where.input]
    words += ["--workload", where.workload, "--dtype", where.dtype, "--device", where.device]
    for option, values in lists.items():
        words += [option, ",".join(values)]
    dynamic = any(way.dynamic for way in ways)
    made = arms_of(
        where.case(Way()),
        impls=lists["--impl"],
        strategies=lists["--strategy"],
        modes=lists["--mode"],
        dynamic=dynamic,
    )
    if dynamic:
        words.append("--dynamic")
    arms = [where.case(way) for way in ways]
    if any(refusal(case) is None and case not in arms for case in made):
        # Options combine each with each, which is more than is looked at: name the arms.
        words += [word for case in arms for word in ("--arm", case.arm)]
    return shlex.join(words)


def _place(way: Way) -> tuple[int, int, int, bool, bool]:
    return (
        ("upstream", "upstream-tuned", "zoo").index(way.impl),
        STRATEGIES.index(way.strategy),
        MODES.index(way.mode),
        way.cuda_graph,
        way.dynamic,
    )
