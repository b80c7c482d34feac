"""What a claim is, read from claims.toml: parts that say which figure of which arms should lie in which range."""

from __future__ import annotations

import math
import shlex
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.plan import CUDA_GRAPH, IMPLEMENTATIONS, MODES, STRATEGIES, Case, arms_of, refusal

AROUND = 1.1  # a claim that names one number stands for the numbers around it, a tenth of it either way


@dataclass(frozen=True)
class Where:
    """A race that a part speaks of, in the words of the harness' options. Claims are about GPUs."""

    family: str
    model: str
    input: str
    workload: str = "inference"
    dtype: str = "bfloat16"
    device: str = "cuda"

    def case(self, arm: str = "upstream eager") -> Case:
        """The arm of this name, such as ``upstream full reduce-overhead`` or ``zoo regional + CUDA graph``."""
        name = arm.removesuffix(" + CUDA graph")
        impl, strategy, *more = name.split()
        mode = next((word for word in more if word in MODES), "default")
        case = Case(
            **vars(self), impl=impl, strategy=strategy, mode=mode, dynamic="dynamic" in more, cuda_graph=name != arm
        )
        if case.arm != arm or impl not in IMPLEMENTATIONS or strategy not in STRATEGIES:
            raise ValueError(f"there is no arm {arm!r}")
        return case


@dataclass(frozen=True)
class Part:
    """One thing that a claim says.

    Args:
        says: In a few words, to tell it from the claim's other parts.
        figure: What is measured in a race, a key of ``judge.FIGURES``.
        arms: The arm, and the one that it is held against where the figure compares two.
        low: Least value that the claim allows.
        high: Greatest value that the claim allows.
        where: In which races.
        against: Where the claim compares races: the figure there, by which the figure of ``where`` is divided.
        mean: Whether the claim speaks of the geometric mean of all races and not of each.
    """

    says: str
    figure: str
    arms: tuple[str, ...]
    low: float
    high: float
    where: tuple[Where, ...]
    against: Where | None = None
    mean: bool = False

    def __post_init__(self) -> None:
        if not self.where:
            raise ValueError(f"{self.says}: no races to look at")
        if not self.low <= self.high or (math.isinf(self.low) and math.isinf(self.high)):
            raise ValueError(f"{self.says}: {self.low} to {self.high} is no range that a claim could fail")


@dataclass(frozen=True)
class Claim:
    """A claim in the words of those who repeat it; ``not_here`` says what of it is not measured, and why."""

    number: int
    theme: str
    title: str
    text: str
    parts: tuple[Part, ...] = ()
    note: str = ""
    not_here: str = ""

    def __post_init__(self) -> None:
        if not (self.parts or self.not_here):
            raise ValueError(f"claim {self.number}: say what is measured, or why nothing is")


def parse_limit(text: str) -> tuple[float, float]:
    """``1.1 to 3``, ``at least 1``, ``at most 5`` or ``around 45/38`` as the lowest and the highest value."""
    if text.startswith("at least "):
        return _number(text[9:]), math.inf
    if text.startswith("at most "):
        return -math.inf, _number(text[8:])
    if text.startswith("around "):
        return _number(text[7:]) / AROUND, _number(text[7:]) * AROUND
    low, _, high = text.partition(" to ")
    return _number(low), _number(high)


def _number(text: str) -> float:
    over, _, under = text.partition("/")
    return float(over) / float(under or 1)


def parse(text: str) -> dict[int, Claim]:
    """Claims by number, in the order of the file."""
    data: dict[str, Any] = tomllib.loads(text)
    races = {name: Where(*values) for name, values in data.pop("races").items()}
    groups = {name: tuple(races[race] for race in names) for name, names in data.pop("groups").items()}

    def part(says: str, measured: str, limit: str, where: str) -> Part:
        figure, _, arms = measured.partition(": ")
        first, _, second = where.removeprefix("mean of ").partition(" against ")
        named = [groups.get(name) or (races[name],) for name in first.split(", ")]
        against = races[second] if second else None
        wanted = tuple(race for group in named for race in group)
        low, high = parse_limit(limit)
        return Part(says, figure, tuple(arms.split(" over ")), low, high, wanted, against, where.startswith("mean of "))

    return {
        int(number): Claim(int(number), theme, **{**fields, "parts": tuple(part(*p) for p in fields.get("parts", ()))})
        for theme, claims in data.items()
        for number, fields in claims.items()
    }


CLAIMS: Mapping[int, Claim] = parse((Path(__file__).parent / "claims.toml").read_text(encoding="utf-8"))


def commands(parts: Iterable[Part]) -> list[str]:
    """The runs that measure these parts: each race with all arms that are looked at, like races in one."""
    wanted: dict[Where, set[str]] = {}
    for part in parts:
        for where in (*part.where, *([part.against] if part.against else [])):
            wanted.setdefault(where, set()).update(part.arms)
    alike: dict[tuple[Where, frozenset[str]], list[Where]] = {}
    for where, arms in wanted.items():
        alike.setdefault((replace(where, model=""), frozenset(arms)), []).append(where)
    return [_command(group, arms) for (_, arms), group in alike.items()]


def _command(group: Sequence[Where], names: Iterable[str]) -> str:
    """The run of these arms on races that differ in their models alone."""
    where = group[0]
    arms = sorted(map(where.case, names), key=_place)
    lists = {
        "--impl": [case.impl for case in arms],
        "--strategy": [case.strategy + CUDA_GRAPH * case.cuda_graph for case in arms],
        "--mode": [case.mode for case in arms],
    }
    lists = {option: list(dict.fromkeys(values)) for option, values in lists.items()}
    words = ["python", "-m", "benchmarks.run", "--family", where.family]
    words += ["--model", ",".join(where.model for where in group), "--input", where.input]
    words += ["--workload", where.workload, "--dtype", where.dtype, "--device", where.device]
    for option, values in lists.items():
        words += [option, ",".join(values)]
    dynamic = any(case.dynamic for case in arms)
    made = arms_of(
        where.case(), impls=lists["--impl"], strategies=lists["--strategy"], modes=lists["--mode"], dynamic=dynamic
    )
    words += ["--dynamic"] * dynamic
    if any(refusal(case) is None and case not in arms for case in made):
        # Options combine each with each, which is more than is looked at: name the arms.
        words += [word for case in arms for word in ("--arm", case.arm)]
    return shlex.join(words)


def _place(case: Case) -> tuple[int, int, int, bool, bool]:
    order = ("upstream", "upstream-tuned", "zoo").index(case.impl)
    return order, STRATEGIES.index(case.strategy), MODES.index(case.mode), case.cuda_graph, case.dynamic
