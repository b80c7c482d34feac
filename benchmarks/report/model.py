"""Races prepared for display: reference, upstream's best, speed-ups; selection and order."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from benchmarks import stats
from benchmarks.plan import Case, merged
from benchmarks.record import Compile, Result, Rows, device_name
from benchmarks.stats import Ratio, Utilisation, Verdict

# Arms that users of the upstream library run today. Every other upstream arm counts as tuned.
AS_SHIPPED = (("eager", "default"), ("full", "default"), ("full", "reduce-overhead"), ("regional", "default"))

# An arm whose error is this many times eager's error computes something else; its time is shown but not counted.
WRONG = 10
Caches = Literal["cold", "warm"]
EPSILON = {"float32": 2.0**-23, "bfloat16": 2.0**-7, "float16": 2.0**-10}


def is_shipped(case: Case) -> bool:
    """Whether the arm is the upstream library as its users would run it today."""
    changed = case.cuda_graph or case.dynamic
    return case.impl == "upstream" and (case.strategy, case.mode) in AS_SHIPPED and not changed


def machine_name(environment: Mapping[str, Any], device: str) -> str:
    """An environment in words: ``NVIDIA H200, torch 2.11.0+cu130``."""
    return f"{device_name(dict(environment), device)}, torch {environment.get('torch', 'unknown')}"


@dataclass(frozen=True, eq=False)
class MeasuredArm:
    """One arm that ran, with its median and 95th percentile in milliseconds (None without rounds).

    ``rounding`` is the error of its eager twin, or the maximum of the other arms' if the twin did not run. ``control``
    is the row of its A/A control, if that ran.
    """

    result: Result
    p50: float | None
    p95: float | None
    rounding: float | None = None
    control: Result | None = None

    @property
    def name(self) -> str:
        return self.result.case.arm

    @property
    def is_eager(self) -> bool:
        return self.result.case.strategy == "eager" and not self.result.case.cuda_graph

    @property
    def wrong(self) -> bool:
        check = self.result.check
        if check is None or check.error is None or self.rounding is None:
            return False
        return check.error > WRONG * max(self.rounding, EPSILON[self.result.case.dtype])

    def paid(self, caches: Caches) -> float | None:
        """Seconds before the first fast call: zero for eager; None if not measured."""
        if self.is_eager:
            return 0.0
        compile = self.result.cold if caches == "cold" else self.result.warm
        return None if compile is None else compile.paid

    @property
    def cold_seconds(self) -> float | None:
        return None if self.result.cold is None else self.result.cold.seconds

    @property
    def warm(self) -> Compile | None:
        """The arm's warm start. If it raced in its cold process, its control's: a second process with its caches."""
        own, copied = self.result.warm, None if self.control is None else self.control.warm
        if copied is None or copied.seconds is None or (own is not None and own.seconds is not None):
            return own
        return copied

    @property
    def throughput(self) -> float | None:
        work = self.result.work
        return work.count / self.p50 * 1e3 if work is not None and work.count and self.p50 else None

    @property
    def p10(self) -> float | None:
        """The tenth percentile of the arm's rounds, those with the least other load on the machine."""
        return _p10(self.result)

    @property
    def apart(self) -> float | None:
        """Distance of the control's tenth percentile from the arm's, as a fraction of the smaller."""
        own, copied = self.p10, None if self.control is None else _p10(self.control)
        return None if own is None or copied is None else max(own, copied) / min(own, copied) - 1

    @property
    def host_ms(self) -> float | None:
        """A low percentile of the host's time over rounds, since other tenants of the machine only add to it."""
        steady = self.result.steady
        return stats.p10(steady.host_ms) if steady is not None and steady.host_ms else None

    @property
    def idle(self) -> float | None:
        """Share of a call's device time, 0 to 1, without a running kernel; copies and fills are not kernels."""
        steady, work = self.result.steady, self.result.work
        busy = None if work is None else work.kernel_microseconds
        if self.host_ms is None or steady is None or not steady.device_ms or busy is None:
            return None
        return min(1.0, max(0.0, 1 - busy / 1e3 / stats.median(steady.device_ms)))

    @property
    def utilisation(self) -> Utilisation | None:
        work = self.result.work
        if work is None or self.p50 is None:
            return None
        return stats.utilisation(
            self.p50, bytes=work.bytes, flops=work.flops, peak_bandwidth=work.peak_bandwidth, peak_flops=work.peak_flops
        )


@dataclass(frozen=True, eq=False)
class MeasuredRace:
    """All arms that share model, input, workload, dtype, device and torch."""

    case: Case  # what they share, as the case of one of them
    environment: Mapping[str, Any]  # of one of them
    arms: tuple[MeasuredArm, ...]  # those that ran, fastest first, without A/A controls
    failures: tuple[Result, ...]
    clock: Literal["device", "wall"]  # device events, or the wall clock if an arm has no device times
    floors: tuple[tuple[float, MeasuredArm], ...]  # A/A noise floors as fractions, and the arms whose copies ran
    extra: str = ""  # the name of its question, for a race outside the family's tables

    @property
    def title(self) -> str:
        return " · ".join(self.case.race[1:])

    @property
    def machine(self) -> str:
        return machine_name(self.environment, self.case.device)

    @property
    def unit(self) -> str | None:
        """The unit of throughput: ``images``, ``tokens``; None without a meaningful unit."""
        units = (arm.result.work.unit for arm in self.arms if arm.result.work is not None)
        return next((unit for unit in units if unit), None)

    def find(self, *, impl: str, strategy: str, cuda_graph: bool = False, mode: str = "default") -> MeasuredArm | None:
        """The arm of exactly these options that is not dynamic and has its kernels, or None."""
        plain = replace(self.case, dynamic=False, control=False, kernels=True)
        wanted = replace(plain, impl=impl, strategy=strategy, cuda_graph=cuda_graph, mode=mode)
        return next((arm for arm in self.arms if arm.result.case == wanted), None)

    @property
    def reference(self) -> MeasuredArm | None:
        """Upstream eager if it ran, else the zoo's eager."""
        return self._eager("upstream", "zoo")

    def _eager(self, *impls: str) -> MeasuredArm | None:
        arms = (self.find(impl=impl, strategy="eager") for impl in impls)
        return next((arm for arm in arms if arm is not None and arm.p50 is not None), None)

    @property
    def ours(self) -> MeasuredArm | None:
        """The zoo's recommended arm: regional with the outer CUDA graph, or without if it cannot be captured."""
        return _right(self.find(impl="zoo", strategy="regional", cuda_graph=graph) for graph in (True, False))

    @property
    def best_shipped(self) -> MeasuredArm | None:
        """The fastest upstream arm as shipped with a correct output."""
        return _right(arm for arm in self.arms if is_shipped(arm.result.case))  # arms are sorted by time

    @property
    def best_tuned(self) -> MeasuredArm | None:
        """The fastest correct upstream arm at its documented best, or under the outer CUDA graph."""
        cases = ((arm, arm.result.case) for arm in self.arms)
        return _right(arm for arm, case in cases if case.impl.startswith("upstream") and not is_shipped(case))

    @property
    def best(self) -> MeasuredArm | None:
        """The fastest upstream arm, as shipped or tuned, with a correct output."""
        return min(filter(None, (self.best_shipped, self.best_tuned)), key=lambda arm: arm.p50 or 0.0, default=None)

    def speedup(self, arm: MeasuredArm, over: MeasuredArm | None) -> Ratio | None:
        """Speed-up of ``arm`` over ``over``; paired if one ran in all rounds of the other, in one run."""
        if over is None or over.p50 is None or arm.p50 is None:
            return None
        return _ratio(over.result, arm.result, self.clock)

    def samples(self, arm: MeasuredArm) -> list[float]:
        return _samples(arm.result, self.clock)

    def noise(self, *arms: MeasuredArm) -> float | None:
        """The A/A noise floor of these arms, or of all, as a fraction; None if no control ran with its twin.

        Arms in a CUDA graph have another noise than arms that the host launches.
        """
        kinds = {arm.result.case.captured for arm in arms}
        alike = [floor for floor, twin in self.floors if twin.result.case.captured in kinds]
        return max(alike or [floor for floor, _ in self.floors], default=None)

    def verdict(self, arm: MeasuredArm, over: MeasuredArm | None) -> Verdict | None:
        """The verdict on this speed-up, from its interval and the noise floor."""
        ratio = self.speedup(arm, over)
        return None if ratio is None or over is None else stats.verdict(ratio, self.noise(arm, over))

    def overtakes(self, arm: MeasuredArm, over: MeasuredArm) -> bool:
        """Whether calls of ``arm`` pay back its higher cost: its verdict and its median are faster."""
        return self.verdict(arm, over) == "faster" and (arm.p50 or 0.0) < (over.p50 or 0.0)

    def break_even(self, arm: MeasuredArm, compile: Compile | None) -> float | None:
        """Calls until the speed-up over the arm's own eager, or upstream's, pays back compile and capture seconds.

        Infinite if never, NaN if eager and the arm cannot be distinguished, None if one of the figures is missing.
        """
        paid = None if compile is None else compile.paid
        eager = self._eager(arm.result.case.impl, "upstream")
        if paid is None or eager is None or eager.p50 is None or arm.p50 is None or arm is eager:
            return None
        if self.verdict(arm, eager) == "undetermined":
            return math.nan
        return stats.break_even_calls(paid, eager.p50, arm.p50)

    @functools.cached_property
    def start_up(self) -> float:
        """Seconds that starting the compiler adds to the first call of a process that has compiled nothing yet.

        All arms share it. It is the minimum of the measured values, since other load only adds: the time of a small
        graph compiled first and alone, and each arm's first result minus its compile time.
        """
        found = []
        for arm in self.arms:
            cold, paid = arm.result.cold, arm.paid("cold")
            if cold is None or arm.is_eager:
                continue
            if cold.start_up is not None:
                found.append(cold.start_up)
            if cold.time_to_first_result is not None and paid is not None and arm.p50 is not None:
                found.append(max(0.0, cold.time_to_first_result - paid - arm.p50 / 1e3))
        return min(found, default=0.0)

    def before(self, arm: MeasuredArm) -> float | None:
        """Seconds before the first steady call in a new process with empty caches: start-up, compilation, capture."""
        paid = arm.paid("cold")
        return paid if paid is None or arm.is_eager else paid + self.start_up

    def total(self, arm: MeasuredArm, calls: int) -> float | None:
        """Seconds in such a process, without imports and model set-up, until the last of ``calls`` results."""
        first = self.before(arm)
        return None if first is None or arm.p50 is None else first + calls * arm.p50 / 1e3


def _right(arms: Iterable[MeasuredArm | None]) -> MeasuredArm | None:
    """The first arm with a time and a correct output."""
    return next((arm for arm in arms if arm is not None and arm.p50 is not None and not arm.wrong), None)


def _samples(result: Result, clock: str) -> list[float]:
    if result.steady is None:
        return []
    return result.steady.device_ms if clock == "device" else result.steady.wall_ms


def _ratio(reference: Result, arm: Result, clock: str) -> Ratio:
    first, second = _samples(reference, clock), _samples(arm, clock)
    assert reference.steady is not None and arm.steady is not None
    theirs = dict(zip(reference.steady.rounds, first, strict=True))
    ours = dict(zip(arm.steady.rounds, second, strict=True))
    # Where memory does not hold all arms side by side they race in groups, of which each holds one of them again.
    common = sorted(theirs.keys() & ours.keys())
    all_of_one = len(theirs) == len(first) and len(ours) == len(second) and len(common) in (len(theirs), len(ours))
    if reference.environment == arm.environment and all_of_one:
        return _paired(tuple(theirs[n] for n in common), tuple(ours[n] for n in common))
    return _unpaired(tuple(first), tuple(second))


def _p10(result: Result) -> float | None:
    steady = result.steady
    return stats.p10(steady.samples) if steady is not None and steady.samples else None


# A table asks for the same ratio several times: for the figure, its verdict and the notes.
_paired = functools.lru_cache(maxsize=4096)(stats.paired_ratio)
_unpaired = functools.lru_cache(maxsize=4096)(stats.unpaired_ratio)


def races(results: Iterable[Result], environments: Mapping[str, Mapping[str, Any]]) -> list[MeasuredRace]:
    """Rows grouped into races, in the order in which they first appear."""
    groups: dict[tuple[str, ...], list[Result]] = {}
    for result in results:
        environment = environments.get(result.environment or "", {})
        where = (device_name(environment, result.case.device), str(environment.get("torch")))
        groups.setdefault((*where, *result.case.race), []).append(result)
    return [_race(group, environments.get(group[0].environment or "", {})) for group in groups.values()]


@functools.lru_cache(maxsize=4)  # every table and figure of a page calls this
def races_of(rows: Rows) -> tuple[MeasuredRace, ...]:
    """The races of the families' tables. The rows must not change afterwards."""
    return tuple(races(rows.results, rows.environments))


@functools.lru_cache(maxsize=4)
def extra_races(rows: Rows) -> tuple[MeasuredRace, ...]:
    """Races that were run for one question each, in addition to those of the families' tables."""
    return tuple(
        replace(race, extra=name)
        for name, results in sorted(rows.extra.items())
        for race in races(results, rows.environments)
    )


def _proven(result: Result) -> Result:
    """The row without the seconds of a cold start whose cache folders were not empty."""
    cold = result.cold
    if cold is None or cold.cache_empty_at_start is not False:
        return result
    unknown = replace(cold, seconds=None, capture=None, time_to_first_result=None, later_calls=[], phases={})
    return replace(result, cold=unknown)


def _race(results: list[Result], environment: Mapping[str, Any]) -> MeasuredRace:
    results = [_proven(result) for result in results]
    ran = [result for result in results if result.status == "ok"]
    steady = [result.steady for result in ran if result.steady is not None]
    clock: Literal["device", "wall"] = "device" if steady and all(s.device_ms for s in steady) else "wall"
    known = [None if result.check is None else result.check.eager_error for result in ran]
    greatest = max((error for error in known if error is not None), default=None)
    controls = {result.case.key.removesuffix(" (A/A)"): result for result in ran if result.case.control}
    arms = []
    for result, error in zip(ran, known, strict=True):
        if not result.case.control:
            samples = _samples(result, clock)
            p50, p95 = (stats.median(samples), stats.p95(samples)) if samples else (None, None)
            rounding = greatest if error is None else error
            arms.append(MeasuredArm(result, p50, p95, rounding, controls.get(result.case.key)))
    floors = (
        (stats.noise_floor(_ratio(arm.result, arm.control, clock)), arm)
        for arm in arms
        if arm.p50 is not None and arm.control is not None and _samples(arm.control, clock)
    )
    return MeasuredRace(
        case=results[0].case,
        environment=environment,
        arms=tuple(sorted(arms, key=lambda arm: math.inf if arm.p50 is None else arm.p50)),
        failures=tuple(result for result in results if result.status != "ok"),
        clock=clock,
        floors=tuple(floors),
    )


# Which races are shown, in which order, where they ran, and the commands that measure them again ---------------------

SELECTING = ("family", "model", "input", "workload", "dtype", "device", "gpu", "torch")
# The model families in the order of their pages, each with its upstream library.
UPSTREAM = {
    "gnn": "torch-geometric", "llm": "transformers", "bert": "transformers", "resnet": "torchvision",
    "unet": "diffusers",
}  # fmt: skip


def select(wanted: Mapping[str, str], shown: Iterable[MeasuredRace]) -> list[MeasuredRace]:
    """Races that the options select (commas separate alternatives), with the newest torch, on a single device.

    ValueError if rows of several devices match.
    """
    chosen = [race for race in shown if all(option(race, key) in value.split(",") for key, value in wanted.items())]
    devices = sorted({(option(race, "gpu"), race.case.device) for race in chosen})
    if len(devices) > 1:
        names = " and ".join(f"{gpu} ({device})" for gpu, device in devices)
        raise ValueError(f'there are rows of {names}; add gpu="..." or device=...')
    return newest(chosen)


def newest(shown: Iterable[MeasuredRace]) -> list[MeasuredRace]:
    """Of races that differ only in torch, the race with the newest torch."""
    found: dict[tuple[str, ...], MeasuredRace] = {}
    for race in shown:
        key = (option(race, "gpu"), race.extra, *race.case.race)
        known = found.get(key)
        if known is None or torch_version(race) >= torch_version(known):
            found[key] = race
    return list(found.values())


def option(race: MeasuredRace, key: str) -> str:
    """The value of a marker's ``key=`` that selects this race."""
    if key == "gpu":
        return device_name(race.environment, race.case.device)
    if key == "torch":
        return str(race.environment.get("torch"))
    return str(getattr(race.case, key))


def torch_version(race: MeasuredRace) -> tuple[int, ...]:
    """The race's torch version, comparable: newer is greater."""
    return tuple(map(int, re.findall(r"\d+", option(race, "torch").partition("+")[0])))


def machines(shown: Iterable[MeasuredRace]) -> str:
    """Device, torch, driver, relevant libraries and commits, once for all races of one machine."""
    found: dict[str, tuple[dict[str, None], dict[str, None]]] = {}
    for race in shown:
        environment = race.environment
        driver = f", driver {environment['driver']}" if environment.get("driver") else ""
        libraries, commits = found.setdefault(race.machine + driver, ({}, {}))
        known = environment.get("libraries") or {}
        libraries |= {f"{n} {known[n]}": None for n in ("triton", UPSTREAM.get(race.case.family)) if n in known}
        if commit := environment.get("commit"):
            commits[str(commit)[:10] + (" with changes" if environment.get("dirty") else "")] = None
    lines = []
    for machine, (libraries, commits) in found.items():
        parts = [machine, *libraries]
        if commits:
            parts.append(f"commit{'s' * (len(commits) > 1)} {', '.join(commits)}")
        lines.append(", ".join(parts))
    return "; ".join(lines)


def by_family(shown: Iterable[MeasuredRace]) -> dict[str, list[MeasuredRace]]:
    """Races by family: those with an upstream library in the documentation's order, then others."""
    families: dict[str, list[MeasuredRace]] = {}
    for race in shown:
        families.setdefault(race.case.family, []).append(race)
    rank = {name: place for place, name in enumerate(UPSTREAM)}
    return {name: families[name] for name in sorted(families, key=lambda name: rank.get(name, len(rank)))}


def titles(shown: Sequence[MeasuredRace]) -> dict[MeasuredRace, str]:
    """The races' titles without their common parts; they include the machine if there are several."""
    parts = [(*race.case.race[1:], race.machine) for race in shown]
    differ = [index for index, values in enumerate(zip(*parts, strict=True)) if index < 2 or len(set(values)) > 1]
    return {race: " · ".join(of_one[index] for index in differ) for race, of_one in zip(shown, parts, strict=True)}


def commands_of(races: Iterable[MeasuredRace]) -> list[str]:
    """Commands that measure all arms of these races again, with A/A controls and failures; one command if possible."""
    results = [result for race in races for result in (*(arm.result for arm in race.arms), *race.failures)]
    return merged(result.command for result in results if result.command)
