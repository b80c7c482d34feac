"""One race: measures its arms and makes a row for each."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.machine import Monitor, core_numbers, free_memory
from benchmarks.plan import Case, twin_of
from benchmarks.process import WorkerFailure
from benchmarks.record import IN_RACE, KernelTime, Result, Steady
from benchmarks.startup import (
    ArmRun,
    Settings,
    estimate_rounds,
    failures_of,
    in_parallel,
    measure_compilation,
    prepare_race,
)

if TYPE_CHECKING:
    from benchmarks.cli import Progress

ROUNDS_OF_A_GROUP = 1000  # round n of group g is numbered g * 1000 + n
LEAST_ROUNDS = 5  # fewest rounds of a stopped race that give rows
MEMORY_SHARE = 0.9  # usable share of free memory, since estimates are imprecise


def run_race(
    cases: Sequence[Case],
    settings: Settings,
    progress: Progress,
    emit: Callable[[Result], None],
    *,
    memory_bytes: Callable[..., int],
    peaks: Mapping[str, Any],
) -> None:
    """Measure the arms of one race and pass each finished row to ``emit``; a failure is also a row.

    ``memory_bytes`` is the workload's estimate of an arm's peak, ``peaks`` the peak rates of this device.
    """
    # Cache folders: a control shares its twin's; arms that start together share one.
    names = ["shared" if settings.steady_only else _safe(case.key.removesuffix(" (A/A)")) for case in cases]
    arms = [ArmRun(case=case, folder=settings.scratch / name) for case, name in zip(cases, names, strict=True)]
    waiting = list(arms)

    def hand_out(arm: ArmRun) -> None:
        if arm in waiting:
            waiting.remove(arm)
            emit(arm.result)

    def hand_out_failures() -> None:
        for arm in [arm for arm in waiting if not arm.ok]:
            progress.note(f"{arm.case.arm}: {arm.result.status}: {arm.result.reason}")
            hand_out(arm)

    try:
        groups = _groups(arms, settings, memory_bytes)
        # Arms that do not fit in memory together cannot start together. The last group may be smaller than that.
        at_once = min((len(group) for group in groups[:-1] or groups), default=1)
        settings = replace(settings, ahead=min(settings.ahead, max(1, at_once)))
        hand_out_failures()
        measure_compilation(arms, settings, progress)
        _fail_controls(arms)
        hand_out_failures()
        reference = settings.scratch / f"{_safe('-'.join(cases[0].race))}.pt"
        for index, group in enumerate(groups):
            _race_group(group, settings, progress, reference, index * ROUNDS_OF_A_GROUP)
            _fail_controls(arms)
            hand_out_failures()
        _finish(arms, peaks)
        for arm in arms:
            hand_out(arm)
    except KeyboardInterrupt:
        _finish(arms, peaks)
        enough = min(settings.rounds, LEAST_ROUNDS)  # fewest rounds for a row; intervals show how few there were
        for arm in arms:
            if arm.ok and arm.result.work is not None:
                if arm.result.steady is None or len(arm.result.steady.rounds) < enough:
                    arm.fail("interrupted", f"stopped before {enough} rounds of its race")
                hand_out(arm)  # the row may lack later rounds and the counts after them
        raise
    finally:
        for arm in arms:
            if arm.worker is not None:
                arm.worker.kill()
        if not settings.steady_only:
            for arm in arms:
                shutil.rmtree(arm.folder, ignore_errors=True)


def _safe(name: str) -> str:
    return "".join(c if c.isalnum() or c in "._-" else "_" for c in name)


def _groups(arms: Sequence[ArmRun], settings: Settings, memory_bytes: Callable[..., int]) -> list[list[ArmRun]]:
    """Groups of arms that fit in memory together; one arm of the first group also computes the reference output.

    If not all arms fit, each group repeats the reference arm, for paired ratios. An arm that does not fit together with
    the reference arm races alone. An arm that does not fit alone fails here, with the memory that it needs.
    """
    free = free_memory(arms[0].case.device, settings.monitor)
    needs, running = {}, {}
    for arm in arms:
        try:
            needs[arm.case.key] = memory_bytes(arm.case, reference=True)
            running[arm.case.key] = memory_bytes(arm.case, reference=False)
        except Exception as error:
            arm.fail("failed", f"its memory could not be estimated: {type(error).__name__}: {error}")
            continue
        if free is not None and needs[arm.case.key] > free:
            gib = needs[arm.case.key] / 2**30
            arm.fail(
                "does-not-fit", f"needs about {gib:.1f} GiB of memory, {free / 2**30:.1f} GiB are free on the device"
            )
    fitting = [arm for arm in arms if arm.ok]
    if not fitting:
        return []
    reference_case = twin_of([arm.case for arm in fitting if not arm.case.control] or [fitting[0].case])
    reference = next(arm for arm in fitting if arm.case == reference_case)
    room = float("inf") if free is None else MEMORY_SHARE * free

    def fit(group: Sequence[ArmRun], *, first: bool) -> bool:
        checking = max(needs[arm.case.key] - running[arm.case.key] for arm in group) if first else 0
        return sum(running[arm.case.key] for arm in group) + checking <= room

    if fit(fitting, first=True):
        return [fitting]
    groups = [[reference]]
    for arm in fitting:
        if arm is reference:
            continue
        roomy = next((group for group in groups if fit([*group, arm], first=group is groups[0])), None)
        if roomy is not None:
            roomy.append(arm)
        else:
            groups.append([reference, arm] if fit([reference, arm], first=False) else [arm])
    return groups


def _fail_controls(arms: Sequence[ArmRun]) -> None:
    """Fail the controls whose twin failed: alone they measure nothing."""
    by_name = {arm.case.arm: arm for arm in arms}
    for arm in arms:
        if arm.case.control and arm.ok:
            twin = by_name.get(arm.case.arm.removesuffix(" (A/A)"))
            if twin is not None and not twin.ok:
                arm.fail("failed", f"its twin is {twin.result.status}, so there is no noise floor to measure")


def _race_group(
    group: Sequence[ArmRun], settings: Settings, progress: Progress, reference: Path, first_round: int
) -> None:
    racing = [arm for arm in group if arm.ok]
    prepare_race(racing, settings, progress, reference)
    racing = [arm for arm in racing if arm.ok]
    if not racing:
        return
    what = f"race of {len(racing)} arms, {settings.rounds} rounds"
    progress.begin(what, "rounds", *estimate_rounds(racing, settings))
    seed = settings.seed + first_round
    race(racing, rounds=settings.rounds, first_round=first_round, seed=seed, monitor=settings.monitor)
    progress.begin("kernel counts and profile", "counts", 1.0)
    for arm in racing:
        _count(arm)
    # A control's curve is never shown. The reference arm is in each group, and draws its curve once.
    drawing = [arm for arm in racing if not (arm.case.control or arm.result.curve)]
    if settings.curve and drawing:
        in_parallel(lambda arm: _draw(arm, settings.curve), drawing, settings.ahead)
    for arm in racing:
        if arm.worker is not None:
            arm.worker.stop()
            arm.worker = None


def race(arms: Sequence[ArmRun], *, rounds: int, first_round: int, seed: int, monitor: Monitor) -> None:
    """Run the rounds. In every round each arm runs once, alone, in a random order.

    Before the rounds each arm measures how many calls fill a turn. With a GPU all turns of a round run on one randomly
    drawn core: other users of a shared machine slow some cores, and a process would otherwise stay on its core. An arm
    that fails drops out with its reason; the others continue. If an arm is in several groups, its samples are appended
    under round numbers from ``first_round`` on, so that groups do not mix.
    """
    draw = random.Random(seed)
    for arm in arms:
        with failures_of(arm):
            if arm.ok:
                arm.calls = arm.ask("calibrate")["calls"]
                arm.result.steady = arm.result.steady or Steady()
    numbers = core_numbers() if all(arm.case.device != "cpu" for arm in arms) else []
    for number in range(rounds):
        order, core = [arm for arm in arms if arm.ok], draw.choice(numbers or [None])
        draw.shuffle(order)
        for arm in order:
            with failures_of(arm):
                _turn(arm, first_round + number, core, monitor)


def _turn(arm: ArmRun, number: int, core: int | None, monitor: Monitor) -> None:
    timed = arm.ask("round", calls=arm.calls, core=core)
    # Read right after the timed work: a query during it would disturb the clocks.
    clock, power = (monitor.sm_clock(), monitor.power()) if arm.case.device != "cpu" else (None, None)
    steady = arm.result.steady
    assert steady is not None
    steady.calls_per_round = arm.calls
    steady.rounds.append(number)
    steady.wall_ms.append(timed["wall_ms"])
    known = {"device_ms": timed["device_ms"], "host_ms": timed["host_ms"], "sm_clock_mhz": clock, "power_w": power}
    for name, value in known.items():
        getattr(steady, name).extend([] if value is None else [value])


def _count(arm: ArmRun) -> None:
    """Count kernels and late recompiles. After all rounds: profilers leave hooks behind. A failure costs no row."""
    if not arm.ok:
        return
    work = arm.result.work
    assert work is not None
    try:
        counted = arm.ask("kernels")
    except WorkerFailure as error:
        arm.result.reason = f"its kernels, and what it compiled in the race, were not counted: {error.reason}"
        return
    work.kernels = counted["kernels"]
    if counted["longest"] is not None:
        work.longest = [KernelTime(**kernel) for kernel in counted["longest"]]
        work.others = KernelTime(**counted["others"]) if counted["others"] is not None else None
    if (figures := arm.result.warm or arm.result.cold) is not None:
        figures.recompiles += [IN_RACE + reason for reason in counted["recompiles"]]


def _draw(arm: ArmRun, steps: int) -> None:
    if arm.ok and arm.worker is not None and arm.worker.alive:  # a failed profile may have ended the worker
        with failures_of(arm):
            arm.result.curve = arm.ask("curve", steps=steps)["losses"]


def _finish(arms: Sequence[ArmRun], peaks: Mapping[str, Any]) -> None:
    """Fill in the fields that depend on the whole race or run."""
    eager = next((a for a in arms if a.ok and a.case.impl == "upstream" and a.case.strategy_name == "eager"), None)
    for arm in arms:
        if arm.result.check is not None and eager is not None and eager.result.check is not None:
            arm.result.check.eager_error = eager.result.check.error
        if arm.result.work is not None:
            arm.result.work.peak_flops = peaks.get("matmul_flops", {}).get(arm.case.dtype)
            arm.result.work.peak_bandwidth = max(
                (peaks[name] for name in ("copy_bandwidth", "read_bandwidth") if name in peaks), default=None
            )
