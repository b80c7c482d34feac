"""Figures as text: numbers, cells of a race's tables, and the notes below them."""

from __future__ import annotations

import math
import re
from typing import TypeGuard

from benchmarks import stats
from benchmarks.record import Compile, Result
from benchmarks.report.model import WRONG, MeasuredArm, MeasuredRace
from benchmarks.stats import Ratio
from zoo.advise import UNUSABLE

NOTHING = "–"
MOST_REASON = 300
NUMBER = re.compile(r"0x[0-9a-fA-F]+|\d+")  # sizes, counters, addresses
EMPTY = ("", NOTHING, "not measured")
OUTCOMES = ("faster", "slower", "undetermined", "reference", "fails")


# Numbers: three significant digits, and more only if they matter --------------------------------------------------


def significant(value: float | None) -> str:
    """Three significant digits, trailing zeros kept: ``0.500``, ``12.3``, ``4,567``; a dash for None."""
    if value is None:
        return NOTHING
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    if value == 0:
        return "0"
    if abs(value) >= 999.5:
        return f"{value:,.0f}"  # more than three digits, to avoid an exponent
    if abs(value) < 1e-3:
        return f"{value:.2e}"
    return f"{value:#.3g}".rstrip(".")


def times(value: float) -> str:
    """A speed-up: three significant digits, and three decimals near 1, where the third matters."""
    return f"{value:.3f}×" if 0.9 <= value < 1.1 else f"{significant(value)}×"


def interval(ratio: Ratio | None) -> str:
    """A speed-up with its interval: ``8.54× [8.49, 8.60]``."""
    if ratio is None:
        return NOTHING
    if not ratio.has_interval:
        return f"{times(ratio.value)} [{ratio.rounds} rounds]"
    return f"{times(ratio.value)} [{times(ratio.low)[:-1]}, {times(ratio.high)[:-1]}]"


def is_unusable(noise: float | None) -> TypeGuard[float]:
    """Whether noise is too large for verdicts. Infinite noise (too few rounds) is unknown, not unusable."""
    return noise is not None and UNUSABLE < noise < math.inf


def percent(fraction: float | None) -> str:
    """A fraction as a percentage, three significant digits at most: ``0.42 %``."""
    if fraction is None:
        return NOTHING
    return "∞ %" if math.isinf(fraction) else f"{fraction * 100:.3g} %"


def exponent(value: float | None) -> str:
    return NOTHING if value is None else "0" if value == 0 else f"{value:.1e}"


def mebibytes(number: int | None) -> str:
    """Bytes as MiB; the unit is in the column's head."""
    return significant(None if number is None else number / 2**20)


def calls(number: float | None) -> str:
    """Break-even calls: ``1,234``, ``43.5k``, ``never``; ``unclear`` for NaN."""
    if number is None:
        return NOTHING
    if math.isnan(number):
        return "unclear"
    if math.isinf(number):
        return "never"
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= 9.995 * unit:
            return significant(number / unit) + name
    return f"{number:,.0f}"


def count(number: int | None) -> str:
    return NOTHING if number is None else f"{number:,}"


def race_count(number: int) -> str:
    return f"{number} race{'s' * (number != 1)}"


# Cells ----------------------------------------------------------------------------------------------------------------


def name(arm: MeasuredArm) -> str:
    return f"{arm.name} !" if arm.wrong else arm.name


def speedup_and_verdict(race: MeasuredRace, arm: MeasuredArm, over: MeasuredArm | None) -> str:
    """Both in one cell: ``8.54× [8.49, 8.60] faster``; ``reference`` for the reference arm."""
    if (ratio := race.speedup(arm, over)) is None:
        return NOTHING
    return "reference" if arm is over else f"{interval(ratio)} {race.verdict(arm, over)}"


def outcome(cell: str) -> str:
    """The verdict at the end of a cell, or before its remark in brackets; empty without a verdict."""
    return next((word for word in cell.split() if word in OUTCOMES), "")


def compiler_counts(compile: Compile | None) -> str:
    """Graphs, breaks and recompiles: ``2 / 0 / 0``; a dash if nothing was compiled."""
    if compile is None or compile.graphs is None:
        return NOTHING
    return f"{compile.graphs} / {len(compile.breaks)} / {len(compile.recompiles)}"


def seconds(compile: Compile | None) -> str:
    return significant(compile.seconds if compile else None)


def kernels(arm: MeasuredArm) -> str:
    return count(arm.result.work.kernels if arm.result.work else None)


def memory(arm: MeasuredArm) -> str:
    return mebibytes(arm.result.memory.allocated if arm.result.memory else None)


def error(arm: MeasuredArm) -> str:
    return exponent(arm.result.check.error if arm.result.check else None)


def break_even(race: MeasuredRace, arm: MeasuredArm) -> str:
    cold, warm = (calls(race.break_even(arm, compile)) for compile in (arm.result.cold, arm.warm))
    return cold if cold == warm else f"{cold} / {warm}"


def times_floor(arm: MeasuredArm) -> str:
    use = arm.utilisation
    return NOTHING if use is None or use.times_floor is None else f"{significant(use.times_floor)}×"


def utilisation(arm: MeasuredArm) -> str:
    """Share of the peak bandwidth and of the peak FLOP/s: ``10.4 % / 20.1 %``."""
    use = arm.utilisation
    if use is None or (use.bandwidth is None and use.flops is None):
        return NOTHING
    return f"{percent(use.bandwidth)} / {percent(use.flops)}"


def shortened(reason: str) -> str:
    reason = " ".join(reason.split())
    return reason if len(reason) <= MOST_REASON else reason[: MOST_REASON - 4].rstrip() + " ..."


def failure(result: Result) -> str:
    return f"{result.case.arm}: {result.status}: {shortened(result.reason or '')}"


def subject(race: MeasuredRace) -> str:
    """A race's machine and data: ``NVIDIA H200, torch 2.11.0+cu130; real data; 2,708 nodes``."""
    parts = [race.machine]
    results = [arm.result for arm in race.arms] or list(race.failures)
    if data := next((result.data for result in results if result.data), None):
        parts.append(f"{data} data")
    if sizes := next((result.sizes for result in results if result.sizes), None):
        parts.append(", ".join(f"{count(value)} {what}" for what, value in sizes.items()))
    return "; ".join(parts)


def throughput(arm: MeasuredArm) -> str:
    return calls(arm.throughput)


def notes(race: MeasuredRace) -> list[str]:
    """The sentences below a race: upstream's best by name, throughput, losses, clock, noise and anomalies."""
    said = []
    for what, best in (("as shipped", race.best_shipped), ("tuned", race.best_tuned)) if race.arms else ():
        said.append(f"Best upstream {what}: {f'{best.name}, {significant(best.p50)} ms' if best else 'none ran'}.")
    arms = dict.fromkeys(arm for arm in (race.ours, race.best_shipped, race.best_tuned) if arm is not None)
    rates = [f"{arm.name} {throughput(arm)}" for arm in arms if arm.throughput is not None]
    if race.unit is not None and rates:
        said.append(f"{race.unit.capitalize()} a second: {', '.join(rates)}.")
    if curves := [(arm.name, arm.result.curve) for arm in race.arms if arm.result.curve]:
        steps = len(curves[0][1])
        last = max(1, round(steps / 10))
        losses = [f"{name} {significant(sum(curve[-last:]) / last)}" for name, curve in curves]
        said.append(f"Loss, mean of the last {last} of {steps} steps: {', '.join(losses)}.")
    return [*said, *race_notes(race)]


def troubles(arm: MeasuredArm) -> list[str]:
    """Graph breaks and recompiles; reasons that differ only in numbers share a line."""
    counted = arm.result.counted or Compile()
    lines = []
    for what, reasons in (("break", counted.breaks), ("recompile", counted.recompiles)):
        alike: dict[str, list[str]] = {}
        for reason in reasons:
            alike.setdefault(NUMBER.sub("#", reason), []).append(reason)
        for same in alike.values():
            often = f"{len(same)}× " if len(same) > 1 else ""
            others = " (and the like with other numbers)" if len(set(same)) > 1 else ""
            lines.append(f"{arm.name}: {often}{what}: {shortened(same[0])}{others}")
    return lines


def pair(first: str, second: str) -> str:
    return first if first == second == NOTHING else f"{first} / {second}"


def race_notes(race: MeasuredRace) -> list[str]:
    """Caveats that a reader needs to interpret the figures, one sentence each."""
    timed = [arm for arm in race.arms if arm.p50 is not None]
    notes = []
    if timed:
        by = "device events" if race.clock == "device" else "the wall clock"
        notes.append(f"Times are milliseconds a call by {by}; intervals are 95 % bootstrap over rounds.")
        if not race.floors:
            notes.append("No A/A control ran: the noise is unknown, verdicts rest on the intervals alone.")
        if any(math.isinf(floor) for floor, _ in race.floors):
            notes.append(f"The A/A control ran fewer than {stats.MIN_ROUNDS} rounds: nothing can be told apart.")
        known = [(floor, twin) for floor, twin in race.floors if math.isfinite(floor)]
        notes += [f"A/A noise {percent(floor)} ({twin.name} against its copy)." for floor, twin in known]
    if copied := [arm.name for arm in race.arms if arm.warm is not arm.result.warm]:
        notes.append(f"The warm start shown for {', '.join(copied)} is its copy's.")
    if few := [arm.name for arm in timed if len(race.samples(arm)) < stats.MIN_ROUNDS]:
        notes.append(f"Fewer than {stats.MIN_ROUNDS} rounds, so no interval: {', '.join(few)}.")
    apart = [arm for arm in timed if (ratio := race.speedup(arm, race.reference)) and not ratio.paired]
    if apart:
        notes.append(f"Not raced in the reference's rounds, compared unpaired: {', '.join(a.name for a in apart)}.")
    if missed := [arm.name for arm in timed if _missed(arm)]:
        notes.append(f"The warm start of these missed a cache and compiled something anew: {', '.join(missed)}.")
    if warm := [arm.name for arm in race.arms if (c := arm.result.cold) and c.cache_empty_at_start is False]:
        notes.append(f"Their caches were not empty, so these have no cold figure: {', '.join(warm)}.")
    notes += [f"! {arm.name}: {arm.result.reason}." for arm in timed if arm.result.reason]
    if wrong := [arm.name for arm in race.arms if arm.wrong]:
        notes.append(f"! Error above {WRONG}× eager's own, not counted among the best: {', '.join(wrong)}.")
    checks = [arm.result.check for arm in race.arms if arm.result.check is not None]
    errors = {check.eager_error for check in checks if check.eager_error is not None}
    if errors:
        against = " and ".join(sorted({str(check.reference_dtype) for check in checks if check.reference_dtype}))
        widest = " to ".join(exponent(error) for error in sorted({min(errors), max(errors)}))
        notes.append(f"Errors are relative, norm-wise, against {against or 'the reference'}; eager's own is {widest}.")
    return notes


def _missed(arm: MeasuredArm) -> bool:
    """Whether the warm start found a broken or missing cache entry and recompiled it."""
    cold, warm = arm.result.cold, arm.warm
    return cold is not None and warm is not None and warm.seconds is not None and bool(warm.cache_misses)
