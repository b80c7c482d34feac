"""A case (one arm of a race, as data), and the conversion of command options to cases."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fnmatch import filter as matches
from typing import Any

from benchmarks.cli import UsageError

STRATEGIES = ("eager", "full", "stages", "regional", "hierarchical")
# Strategies that need the declared regions of a zoo model.
OWN_STRATEGIES = ("stages", "hierarchical")
IMPLEMENTATIONS = ("zoo", "upstream", "upstream-tuned")
MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
# Modes in which torch.compile records its own CUDA graphs.
CUDA_GRAPH_MODES = ("reduce-overhead", "max-autotune")
WORKLOADS = ("inference", "train")
DTYPES = ("float32", "bfloat16", "float16")

# Suffixes of --strategy: a strategy under the outer CUDA graph, or compiled with dynamic shapes.
CUDA_GRAPH, DYNAMIC = "+cudagraph", "+dynamic"
STRATEGY_NAMES = tuple(name + more for more in ("", CUDA_GRAPH, DYNAMIC) for name in STRATEGIES)
# A value of --impl: the zoo without its own kernels, which shows the gain of the kernels.
LIBRARY = "zoo-library"
IMPLEMENTATION_NAMES = (IMPLEMENTATIONS[0], LIBRARY, *IMPLEMENTATIONS[1:])

# The arms of a plain run: (implementation, strategy name, mode, needs a GPU). Intentionally few; options add others.
DEFAULT_ARMS = (
    ("zoo", "eager", "default", False),
    ("zoo", "full", "default", False),
    ("zoo", "regional", "default", False),
    ("zoo", "regional+cudagraph", "default", True),
    ("upstream", "eager", "default", False),
    ("upstream", "full", "default", False),
    ("upstream", "full", "reduce-overhead", True),
    ("upstream", "regional", "default", False),
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One arm. Cases that differ only in implementation, strategy, mode and cuda_graph race each other.

    ``cuda_graph`` puts the outer CUDA graph around the step; ``control`` marks the second copy of an arm, which gives
    the A/A noise floor. ``kernels=False`` runs torch's operators instead of the zoo's own kernels.
    """

    family: str
    model: str
    input: str
    workload: str = "inference"
    dtype: str = "float32"
    device: str = "cpu"
    impl: str = "zoo"
    strategy: str = "eager"
    mode: str = "default"
    cuda_graph: bool = False
    dynamic: bool = False
    control: bool = False
    kernels: bool = True

    @property
    def implementation(self) -> str:
        """The value of ``--impl`` for this arm."""
        return self.impl if self.kernels else LIBRARY

    @property
    def race(self) -> tuple[str, ...]:
        return (self.family, self.model, self.input, self.workload, self.dtype, self.device)

    @property
    def arm(self) -> str:
        """The arm's name within its race: ``zoo regional + CUDA graph``."""
        name = f"{self.implementation} {self.strategy}"
        if self.mode != "default":
            name += f" {self.mode}"
        if self.dynamic:
            name += " dynamic"
        if self.cuda_graph:
            name += " + CUDA graph"
        return name + (" (A/A)" if self.control else "")

    @property
    def captured(self) -> bool:
        """Whether the step is replayed from CUDA graphs, ours or the compiler's."""
        return self.cuda_graph or self.mode in CUDA_GRAPH_MODES

    @property
    def key(self) -> str:
        """A stable identity across runs, for ``--resume`` and ``compare``."""
        return " / ".join((*self.race, self.arm))

    @property
    def strategy_name(self) -> str:
        """The value of ``--strategy`` for this arm."""
        return self.strategy + CUDA_GRAPH * self.cuda_graph + DYNAMIC * self.dynamic

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def refusal(case: Case) -> str | None:
    cpu, eager, parts = case.device == "cpu", case.strategy == "eager", case.strategy != "full"
    theirs, records = case.impl != "zoo", case.mode in CUDA_GRAPH_MODES
    reasons = {
        "on a CPU the zoo runs no kernels of its own, so this arm equals zoo": cpu and not case.kernels,
        f"eager is not compiled, so mode {case.mode} does not apply": eager and case.mode != "default",
        "eager is not compiled, so dynamic shapes do not apply": eager and case.dynamic,
        f"{case.strategy} needs the declared regions of a zoo model": theirs and case.strategy in OWN_STRATEGIES,
        f"{case.mode} records a CUDA graph for each compiled block; it is for full alone": records and parts,
        f"{case.mode} records CUDA graphs itself; leave out +cudagraph": records and case.cuda_graph,
        f"{case.mode} needs a GPU": records and cpu,
        "a CPU has no CUDA graphs": case.cuda_graph and cpu,
        "a CUDA graph has fixed shapes, so dynamic shapes cannot be captured": case.cuda_graph and case.dynamic,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def arms_of(
    base: Case, *, impls: Sequence[str] = (), strategies: Sequence[str] = (), modes: Sequence[str] = ()
) -> list[Case]:
    """The arms of all combinations of the options' values, on the model and input of ``base``."""
    gpu = base.device != "cpu"
    default = [(impl, name, mode) for impl, name, mode, needs_gpu in DEFAULT_ARMS if gpu or not needs_gpu]
    fallback = [name for impl, name, _ in default if impl == "zoo"]  # for implementations without default arms
    chosen: list[tuple[str, str, str]] = []
    for impl in impls or ("zoo", "upstream"):
        if strategies or modes:
            chosen += [(impl, name, mode) for name in strategies or fallback for mode in modes or ("default",)]
        else:
            chosen += [arm for arm in default if arm[0] == impl] or [(impl, name, "default") for name in fallback]
    return [
        replace(
            base,
            impl="zoo" if impl == LIBRARY else impl,
            kernels=impl != LIBRARY,
            strategy=name.partition("+")[0],
            mode=mode,
            cuda_graph=name.endswith(CUDA_GRAPH),
            dynamic=name.endswith(DYNAMIC),
        )
        for impl, name, mode in dict.fromkeys(chosen)
    ]


def expand(
    bases: Iterable[Case], refuses: Callable[[Case], str | None], *, only: Sequence[str] = (), **options: Any
) -> tuple[list[Case], Mapping[str, str]]:
    """All arms of all races, each race with its A/A controls last; and the reasons for omitted arms, by case key.

    ``bases`` has one case per race, ``only`` the patterns for ``matching``, ``options`` the arguments of ``arms_of``.
    """
    cases: list[Case] = []
    refused: dict[str, str] = {}
    races = [arms_of(base, **options) for base in bases]
    wanted = matching([case.arm for race in races for case in race], only)
    for race in races:
        arms = []
        for case in race:
            if case.arm not in wanted:
                continue
            if why := refusal(case) or refuses(case):
                refused[case.key] = why
            else:
                arms.append(case)
        cases += arms
        if len(arms) > 1:  # a single arm has no ratio, so it needs no noise floor
            kinds = [[case for case in arms if case.captured == kind] for kind in (True, False)]
            own = [kind for kind in kinds if any(case.impl == "zoo" for case in kind)] or [arms]
            cases += [replace(twin_of(kind), control=True) for kind in own]
    return cases, refused


def matching(arms: Iterable[str], patterns: Sequence[str]) -> set[str]:
    """Arms that match one of the shell patterns, such as ``"zoo *"``, or all; UsageError if a pattern matches none."""
    names = set(arms)
    found = {pattern: set(matches(names, pattern)) for pattern in patterns}
    for pattern in patterns:
        if not found[pattern]:
            raise UsageError(
                f"--arm: no arm matches {pattern!r}; give --arm once for each. benchmarks.run --list shows the names, "
                "and --impl, --strategy and --mode add others"
            )
    return set().union(*found.values()) if patterns else names


def twin_of(arms: Sequence[Case]) -> Case:
    """The arm whose second copy gives the noise floor: the zoo's last or the last of all, if possible a static one."""
    static = [case for case in arms if not case.dynamic] or list(arms)
    own = [case for case in static if case.impl == "zoo" and case.kernels]
    return (own or static)[-1]


def races_of(cases: Iterable[Case]) -> dict[tuple[str, ...], list[Case]]:
    races: dict[tuple[str, ...], list[Case]] = {}
    for case in cases:
        races.setdefault(case.race, []).append(case)
    return races


# Commands: the runs that measure a whole table again, put together from those that its rows hold ----------------------

PROGRAM = ("python", "-m", "benchmarks.run")
# benchmarks.run takes lists of these and runs all combinations. Commands that differ in other options are not merged.
LISTS = ("--model", "--input", "--impl", "--strategy", "--mode", "--dtype")


def merged(commands: Iterable[str]) -> list[str]:
    """Merge commands that differ only in lists; other commands stay unchanged."""
    groups: dict[tuple[str, ...], dict[str, list[str]]] = {}
    for command in commands:
        fixed, lists = _parse(command)
        known = groups.setdefault((*fixed, *sorted(lists)), {})  # only commands with the same list options merge
        for option, values in lists.items():
            known.setdefault(option, []).extend(value for value in values if value not in known.get(option, []))
    return [_written(fixed[: len(fixed) - len(lists)], lists) for fixed, lists in groups.items()]


def _parse(command: str) -> tuple[list[str], dict[str, list[str]]]:
    """The fixed words of a command, and the values of its lists."""
    words = shlex.split(command)
    if tuple(words[:3]) != PROGRAM:
        return words, {}
    rest = iter(words)
    lists: dict[str, list[str]] = {}
    fixed: list[str] = []
    for word in rest:
        if word in LISTS:
            lists.setdefault(word, []).extend(next(rest, "").split(","))
        else:
            fixed.append(word)
    return fixed, lists


def _written(fixed: tuple[str, ...], lists: dict[str, list[str]]) -> str:
    place = fixed.index("--family") + 2 if "--family" in fixed else len(PROGRAM)
    named = [word for option in LISTS if option in lists for word in (option, ",".join(lists[option]))]
    return shlex.join([*fixed[:place], *named, *fixed[place:]])
