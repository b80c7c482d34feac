"""What stands in the columns of a race's tables, as text; terminal, Markdown and HTML show the same."""

from __future__ import annotations

import re
from collections.abc import Sequence

from benchmarks.record import Compile, Result
from benchmarks.report import numbers
from benchmarks.report.costs import is_eager, total
from benchmarks.report.race import Arm, Race

MOST_REASON = 300
NUMBER = re.compile(r"0x[0-9a-fA-F]+|\d+")  # sizes, counters, addresses
EMPTY = ("", numbers.NOTHING, f"{numbers.NOTHING} → {numbers.NOTHING}", "not measured")
OUTCOMES = ("faster", "slower", "undetermined", "reference")
COST_HEAD = (
    "arm",
    "compile s, cold / warm",
    "graphs / breaks / recompiles",
    "kernels",
    "memory MiB",
    "error",
    "break-even calls, cold / warm",
)
HOST_HEAD = ("host ms", "device idle")
COMPILE_HEAD = (
    "arm",
    "compile s, cold / warm",
    "first result s, cold / warm",
    "start-up s",
    "capture s",
    "1,000th call s",
    "graphs",
    "breaks",
    "recompiles",
    "cache hits, cold / warm",
)


def name(arm: Arm) -> str:
    return f"{arm.name} !" if arm.wrong else arm.name


def but_wrong(arm: Arm) -> str:
    """What a sentence on an arm's speed must add where its output is wrong."""
    return ", with a wrong output" if arm.wrong else ""


def verdict(race: Race, arm: Arm, over: Arm | None) -> str:
    """``faster``, ``slower`` or ``undetermined``; the arm that all are held against is ``reference``."""
    if arm is over:
        return "reference"
    return race.verdict(arm, over) or numbers.NOTHING


def speedup(race: Race, arm: Arm, over: Arm | None) -> str:
    return "1×" if arm is over else numbers.interval(race.speedup(arm, over))


def speedup_and_verdict(race: Race, arm: Arm, over: Arm | None) -> str:
    """Both in one cell: ``8.54× [8.49, 8.60] faster``."""
    if race.speedup(arm, over) is None:
        return numbers.NOTHING
    return "reference" if arm is over else f"{speedup(race, arm, over)} {verdict(race, arm, over)}"


def filled(head: Sequence[str], rows: Sequence[Sequence[str]]) -> tuple[list[str], list[list[str]]]:
    """A table without the columns in which no row holds anything; the first column stays."""
    kept = [index for index in range(len(head)) if not index or any(row[index] not in EMPTY for row in rows)]
    if not rows:
        kept = list(range(len(head)))
    return [head[index] for index in kept], [[row[index] for index in kept] for row in rows]


def outcome(cell: str) -> str:
    """The verdict that a cell ends with or that stands before a remark in brackets; empty where there is none.

    It is what a cell is coloured by: ``0.791× [0.790, 0.792] slower (upstream-tuned full + CUDA graph)`` is a loss.
    """
    return next((word for word in cell.split() if word in OUTCOMES), "")


def compiler_counts(compile: Compile | None) -> str:
    """Graphs, breaks and recompiles: ``2/0/0``; a dash where nothing was compiled."""
    if compile is None or compile.graphs is None:
        return numbers.NOTHING
    return f"{compile.graphs}/{len(compile.breaks)}/{len(compile.recompiles)}"


def seconds(compile: Compile | None) -> str:
    return numbers.significant(compile.seconds if compile else None)


def kernels(arm: Arm) -> str:
    return numbers.count(arm.result.work.kernels if arm.result.work else None)


def memory(arm: Arm) -> str:
    """Peak of allocated memory, MiB."""
    return numbers.mebibytes(arm.result.memory.allocated if arm.result.memory else None)


def error(arm: Arm) -> str:
    return numbers.exponent(arm.result.check.error if arm.result.check else None)


def eager_error(arm: Arm) -> str:
    return numbers.exponent(arm.result.check.eager_error if arm.result.check else None)


def break_even(race: Race, arm: Arm) -> str:
    """Break-even calls cold and warm: ``1,234/567``, or one word if both agree."""
    both = [numbers.calls(race.break_even(arm, compile)) for compile in (arm.result.cold, arm.warm)]
    return both[0] if both[0] == both[1] else "/".join(both)


def times_floor(arm: Arm) -> str:
    """The call's time over the roofline floor."""
    use = arm.utilisation
    return numbers.NOTHING if use is None or use.times_floor is None else f"{numbers.significant(use.times_floor)}×"


def utilisation(arm: Arm) -> str:
    """Share of the peak bandwidth and of the peak FLOP/s: ``10.4 % / 20.1 %``."""
    use = arm.utilisation
    if use is None or (use.bandwidth is None and use.flops is None):
        return numbers.NOTHING
    return f"{numbers.percent(use.bandwidth)} / {numbers.percent(use.flops)}"


def host(arm: Arm) -> tuple[str, str]:
    """The host's time of a call and the share of device time left idle, in the columns of ``HOST_HEAD``."""
    return numbers.significant(arm.host_ms), numbers.percent(arm.idle)


def shortened(reason: str) -> str:
    """A reason on one line; rows keep it in full."""
    reason = " ".join(reason.split())
    return reason if len(reason) <= MOST_REASON else reason[: MOST_REASON - 4].rstrip() + " ..."


def failure(result: Result) -> str:
    """One line: ``zoo hierarchical: crashed: signal 11``."""
    return f"{result.case.arm}: {result.status}: {shortened(result.reason or '')}"


def subject(race: Race) -> str:
    """Where it ran and on what: ``NVIDIA H200, torch 2.11.0+cu130; real data; 2,708 nodes``."""
    parts = [race.machine]
    results = [arm.result for arm in race.arms] or list(race.failures)
    if data := next((result.data for result in results if result.data), None):
        parts.append(f"{data} data")
    if sizes := next((result.sizes for result in results if result.sizes), None):
        parts.append(", ".join(f"{numbers.count(value)} {what}" for what, value in sizes.items()))
    return "; ".join(parts)


def throughput(arm: Arm) -> str:
    """How many a second, in short: ``25.3k``."""
    return numbers.calls(arm.throughput)


def throughputs(race: Race) -> list[str]:
    """Throughput of our arm and of upstream's best, in a sentence; nothing where it says nothing."""
    if race.unit is None:
        return []
    arms = dict.fromkeys(arm for arm in (race.ours, race.best_shipped, race.best_tuned) if arm is not None)
    said = [f"{arm.name} {throughput(arm)}" for arm in arms if arm.throughput is not None]
    return [f"{race.unit.capitalize()} a second: {', '.join(said)}."] if said else []


def last_losses(race: Race, share: float = 0.1) -> list[str]:
    """What the arms' loss curves come down to: means over their last tenth; nothing without curves."""
    curves = [(arm, arm.result.curve) for arm in race.arms if arm.result.curve]
    if not curves:
        return []
    steps = len(curves[0][1])
    last = max(1, round(share * steps))
    said = [f"{arm.name} {numbers.significant(sum(curve[-last:]) / last)}" for arm, curve in curves]
    return [f"Loss, mean of the last {last} of {steps} steps: {', '.join(said)}."]


def bests(race: Race) -> list[str]:
    """The upstream arms that ours are held against, by name and time."""
    lines = []
    for what, best in (("as shipped", race.best_shipped), ("tuned", race.best_tuned)):
        if best is not None:
            lines.append(f"Best upstream {what}: {best.name}, {numbers.significant(best.p50)} ms.")
        else:
            lines.append(f"Best upstream {what}: none ran.")
    return lines


def notes(race: Race) -> list[str]:
    """The sentences below a race: upstream's best by name, throughput, losses, clock, noise and what is odd."""
    if not race.arms:
        return race.notes
    return [*bests(race), *throughputs(race), *last_losses(race), *race.notes]


def speed_head(race: Race) -> tuple[str, ...]:
    """The columns of ``speed_row``."""
    over = race.reference.name if race.reference else "eager"
    return (
        "arm",
        "p50 ms",
        "p95 ms",
        *([f"{race.unit} / s"] if race.unit else []),
        f"over {over}",
        "over best as shipped",
        "over best tuned",
        "times the floor",
        "of peak bandwidth / FLOP/s",
        *HOST_HEAD,
    )


def speed_row(race: Race, arm: Arm) -> tuple[str, ...]:
    """How fast an arm is, and against what."""
    return (
        name(arm),
        numbers.significant(arm.p50),
        numbers.significant(arm.p95),
        *([throughput(arm)] if race.unit else []),
        *(speedup_and_verdict(race, arm, best) for best in (race.reference, race.best_shipped, race.best_tuned)),
        times_floor(arm),
        utilisation(arm),
        *host(arm),
    )


def cost_row(race: Race, arm: Arm) -> tuple[str, ...]:
    """What that speed costs, in the columns of ``COST_HEAD``."""
    return (
        name(arm),
        pair(seconds(arm.result.cold), seconds(arm.warm)),
        compiler_counts(arm.result.counted).replace("/", " / "),
        kernels(arm),
        memory(arm),
        error(arm),
        break_even(race, arm).replace("/", " / "),
    )


def speeds(race: Race) -> tuple[list[str], list[list[str]]]:
    """The table of how fast the arms are, fastest first, without empty columns."""
    return filled(speed_head(race), [speed_row(race, arm) for arm in race.arms])


def costs(race: Race) -> tuple[list[str], list[list[str]]]:
    """The table of what that costs: no page is as wide as both."""
    return filled(COST_HEAD, [cost_row(race, arm) for arm in race.arms])


def compiles(race: Race) -> tuple[list[str], list[list[str]]]:
    """The table of what compiling cost each arm that compiles or captures, without empty columns."""
    paid = [arm for arm in race.arms if not is_eager(arm)]
    return filled(COMPILE_HEAD, [compile_row(race, arm) for arm in paid])


def compile_row(race: Race, arm: Arm) -> tuple[str, ...]:
    """What compiling cost, in the columns of ``COMPILE_HEAD``, and when a new process has 1,000 results."""
    cold, warm = arm.result.cold or Compile(), arm.warm or Compile()
    counted = arm.result.counted or Compile()
    return (
        name(arm),
        pair(numbers.significant(cold.seconds), numbers.significant(warm.seconds)),
        pair(numbers.significant(cold.time_to_first_result), numbers.significant(warm.time_to_first_result)),
        numbers.significant(cold.start_up),
        numbers.significant(cold.capture),
        numbers.significant(total(race, arm, 1000, "cold")),
        numbers.count(counted.graphs),
        str(len(counted.breaks)),
        str(len(counted.recompiles)),
        pair(numbers.count(cold.cache_hits), numbers.count(warm.cache_hits)),
    )


def troubles(arm: Arm) -> list[str]:
    """Graph breaks and recompiles, a line for those whose reasons differ in numbers alone."""
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
    return first if first == second == numbers.NOTHING else f"{first} / {second}"
