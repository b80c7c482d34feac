"""The tables of races, each a head and rows of text. Terminal, Markdown and HTML show the same tables."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from benchmarks.plan import Case
from benchmarks.record import ARTIFACTS, EMPTY, FILLED, Compile, KernelTime, Start, Work
from benchmarks.report import cells
from benchmarks.report.cells import NOTHING, significant, speedup_and_verdict
from benchmarks.report.model import SELECTING, UPSTREAM, MeasuredArm, MeasuredRace, select
from benchmarks.stats import Ratio

Table = tuple[list[str], list[list[str]]]
Column = Callable[[MeasuredArm], str]
HEADLINE = (
    "model, input", "upstream as shipped, its best: ms", "ours: ms", "speed-up", "over upstream's best tuned",
    "cold compile s, upstream full → ours",
)  # fmt: skip
BRIEF = ("model, input", "ms: theirs / ours", "times faster", "cold s: theirs / ours")
FRONT = (
    "model, input", "cold s: whole / theirs / ours", "warm s: whole / theirs / ours",
    "new process s: whole / eager / ours", "ms a call: theirs / ours", "times faster",
)  # fmt: skip
# {input: the input on which its new processes are measured}: for decoding, a whole answer.
STARTED_ON = {"decode-1x1024": "answer-1x2048"}
# One race per family for the first pages, by model, input and dtype.
FIRST = {
    "GCN, arxiv, float32": ("gcn", "arxiv", "float32"),
    "Llama 3.2 1B, one token": ("llama-3.2-1b", "decode-1x1024", "bfloat16"),
    "BERT-base, 32 × 128": ("bert-base", "32x128", "bfloat16"),
    "ResNet-50, 64 images": ("resnet50", "64x224", "bfloat16"),
    "SD 1.5 UNet, 2 × 64 × 64": ("sd15", "2x64x64", "bfloat16"),
}
DECOMPOSITION = ("step", "p50 ms", "over the row above", "over the first row", "kernels")
KERNELS = ("kernel", "launches a call", "µs a call", "share")
LOSS_STEPS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
WORST = " · our worst result"


def filled(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A table without empty columns; the first column is always kept."""
    columns = range(len(head))
    kept = [index for index in columns if not (index and rows and all(row[index] in cells.EMPTY for row in rows))]
    return [head[index] for index in kept], [[row[index] for index in kept] for row in rows]


# The arms of one race -------------------------------------------------------------------------------------------------


def _of_arms(arms: Iterable[MeasuredArm], columns: Mapping[str, Column]) -> Table:
    return filled(["arm", *columns], [[cells.name(arm), *(text(arm) for text in columns.values())] for arm in arms])


def speeds(race: MeasuredRace) -> Table:
    columns: dict[str, Column] = {
        "p50 ms": lambda arm: significant(arm.p50),
        "p95 ms": lambda arm: significant(arm.p95),
    }
    if race.unit:
        columns[f"{race.unit} / s"] = cells.throughput
    over = race.reference.name if race.reference else "eager"
    columns |= {
        f"over {over}": lambda arm: speedup_and_verdict(race, arm, race.reference),
        "over best as shipped": lambda arm: speedup_and_verdict(race, arm, race.best_shipped),
        "over best tuned": lambda arm: speedup_and_verdict(race, arm, race.best_tuned),
        "times the floor": cells.times_floor,
        "of peak bandwidth / FLOP/s": cells.utilisation,
        "host ms": lambda arm: significant(arm.host_ms),
        "device idle": lambda arm: cells.percent(arm.idle),
    }
    return _of_arms(race.arms, columns)


def costs(race: MeasuredRace) -> Table:
    return _of_arms(
        race.arms,
        {
            "compile s, cold / warm": lambda arm: cells.pair(cells.seconds(arm.result.cold), cells.seconds(arm.warm)),
            "graphs / breaks / recompiles": lambda arm: cells.compiler_counts(arm.result.counted),
            "kernels": cells.kernels,
            "memory MiB": cells.memory,
            "error": cells.error,
            "break-even calls, cold / warm": lambda arm: cells.break_even(race, arm),
        },
    )


def compiles(race: MeasuredRace) -> Table:
    """Compile costs of each arm that compiles or captures, and the time of a new process to 1,000 results."""

    def both(text: Callable[[Compile], str]) -> Column:
        return lambda arm: cells.pair(text(arm.result.cold or Compile()), text(arm.warm or Compile()))

    def cold(text: Callable[[Compile], float | None]) -> Column:
        return lambda arm: significant(text(arm.result.cold or Compile()))

    return _of_arms(
        [arm for arm in race.arms if not arm.is_eager],
        {
            "compile s, cold / warm": both(lambda compile: significant(compile.seconds)),
            "first result s, cold / warm": both(lambda compile: significant(compile.time_to_first_result)),
            "start-up s": cold(lambda compile: compile.start_up),
            "capture s": cold(lambda compile: compile.capture),
            "1,000th call s": lambda arm: significant(race.total(arm, 1000)),
            "graphs": lambda arm: cells.count((arm.result.counted or Compile()).graphs),
            "breaks": lambda arm: str(len((arm.result.counted or Compile()).breaks)),
            "recompiles": lambda arm: str(len((arm.result.counted or Compile()).recompiles)),
            "cache hits, cold / warm": both(lambda compile: cells.count(compile.cache_hits)),
        },
    )


def separates_kernels(race: MeasuredRace) -> bool:
    return any(not result.case.kernels for result in (*(arm.result for arm in race.arms), *race.failures))


def decomposition(race: MeasuredRace) -> Table:
    """A speed-up, decomposed into steps; failed and missing steps are marked."""
    apart = separates_kernels(race)
    shared: dict[str, Any] = dict(zip(SELECTING, race.case.race, strict=False))
    step = functools.partial(Case, **shared)
    by = "torch's operators" if apart else "own kernels"
    steps = {
        "upstream eager": step(impl="upstream", strategy="eager"),
        f"ours, eager, by {by}": step(impl="zoo", strategy="eager", kernels=not apart),
        "+ regions": step(impl="zoo", strategy="regional", kernels=not apart),
        **({"+ own kernels": step(impl="zoo", strategy="regional")} if apart else {}),
        "+ outer CUDA graph": step(impl="zoo", strategy="regional", cuda_graph=True),
    }
    rows: list[list[str]] = []
    first: MeasuredArm | None = None
    before: MeasuredArm | None = None
    for name, wanted in steps.items():
        arm = next((arm for arm in race.arms if arm.result.case == wanted and arm.p50 is not None), None)
        if arm is None:
            failed = next((result.status for result in race.failures if result.case == wanted), "not measured")
            rows.append([name, failed, *[NOTHING] * 3])
            continue
        over = [speedup_and_verdict(race, arm, other) if other else NOTHING for other in (before, first)]
        rows.append([name, significant(arm.p50), *over, cells.kernels(arm)])
        first, before = first or arm, arm
    return list(DECOMPOSITION), rows


def losses(race: MeasuredRace) -> Table | None:
    """Loss curves at some steps, one row per arm, and each curve's maximum distance from the reference's."""
    curves = {arm.name: arm.result.curve for arm in race.arms if arm.result.curve}
    if not curves:
        return None
    steps = min(map(len, curves.values()))
    shown = [step for step in LOSS_STEPS if step < steps] + [steps]
    told = race.reference.name if race.reference else ""
    reference = curves.get(told)
    rows = []
    for name, curve in curves.items():
        row = [name, *(significant(curve[step - 1]) for step in shown)]
        if reference is not None:
            pairs = zip(curve, reference, strict=False)
            row.append(cells.percent(max(abs(one - other) / max(abs(other), 1e-30) for one, other in pairs)))
        rows.append(row)
    return ["loss after step", *map(str, shown), *([f"farthest from {told}"] if reference is not None else [])], rows


def kernels(work: Work) -> Table:
    total = work.kernel_microseconds or 0.0

    def row(name: str, kernel: KernelTime) -> list[str]:
        launches = f"{kernel.launches:,.0f}" if kernel.launches % 1 == 0 else significant(kernel.launches)
        share = cells.percent(kernel.microseconds / total) if total else NOTHING
        return [name, launches, significant(kernel.microseconds), share]

    rows = [row(f"`{kernel.name}`", kernel) for kernel in work.longest or ()]
    return list(KERNELS), rows + ([row(work.others.name, work.others)] if work.others else [])


# The races of one family ----------------------------------------------------------------------------------------------


def worst_row(shown: Sequence[MeasuredRace]) -> tuple[MeasuredRace, MeasuredArm, Ratio] | None:
    """The regional arm, with or without the CUDA graph, with the lowest speed-up over upstream's best as shipped."""
    found = []
    for race in shown:
        for arm in race.arms:
            case = arm.result.case
            if (case.implementation, case.strategy, case.mode, case.dynamic) != ("zoo", "regional", "default", False):
                continue
            if (ratio := race.speedup(arm, race.best_shipped)) is not None:
                found.append((race, arm, ratio))
    return min(found, key=lambda row: (not row[1].wrong, row[2].value), default=None)


def with_worst(
    chosen: Sequence[MeasuredRace], worst: tuple[MeasuredRace, MeasuredArm, Ratio] | None
) -> list[tuple[MeasuredRace, MeasuredArm | None]]:
    """The zoo's arm of each race, then the worst row if it is not among them."""
    rows = [(race, race.ours) for race in chosen]
    return rows if worst is None or worst[:2] in rows else [*rows, worst[:2]]


def headline_row(race: MeasuredRace, ours: MeasuredArm | None) -> list[str]:
    """One race in the columns of ``HEADLINE`` after its name: upstream's best arms and one of the zoo's."""
    shipped, tuned = race.best_shipped, race.best_tuned
    full = race.find(impl="upstream", strategy="full")
    before = significant(full.cold_seconds if full else None)
    after = significant(ours.cold_seconds if ours else None)
    reduced = race.find(impl="upstream", strategy="full", mode="reduce-overhead")
    if full is None and reduced is not None and reduced.result.cold is not None:
        before = f"{significant(reduced.cold_seconds)} (reduce-overhead)"
    return [
        _named(shipped) or _why_not(race, impl="upstream"),
        _named(ours) or _why_not(race, impl="zoo", strategy="regional"),
        speedup_and_verdict(race, ours, shipped) if ours else NOTHING,
        f"{speedup_and_verdict(race, ours, tuned)} ({tuned.name})" if ours and tuned else NOTHING,
        NOTHING if before == after == NOTHING else f"{before} → {after}",
    ]


def brief_row(race: MeasuredRace, ours: MeasuredArm | None) -> list[str]:
    """One race in the columns of ``BRIEF`` after its name: upstream's fastest arm, shipped or tuned, and the zoo's."""
    arms = (race.best, ours)
    return [_calls(arms, NOTHING), _times_faster(race, ours, NOTHING), _colds(arms, NOTHING)]


def _calls(arms: Iterable[MeasuredArm | None], missing: str) -> str:
    return _joined([arm.p50 if arm else None for arm in arms], missing)


def _colds(arms: Iterable[MeasuredArm | None], missing: str) -> str:
    return _joined([arm.cold_seconds if arm else None for arm in arms], missing)


def _joined(values: Sequence[float | None], missing: str) -> str:
    if set(values) == {None}:
        return missing
    return " / ".join(missing if value is None else significant(value) for value in values)


def _times_faster(race: MeasuredRace, ours: MeasuredArm | None, missing: str) -> str:
    """Speed-up over upstream's best arm, as shipped or tuned."""
    ratio = race.speedup(ours, race.best) if ours else None
    if ours is None or ratio is None:
        return missing
    return "undetermined" if race.verdict(ours, race.best) == "undetermined" else cells.times(ratio.value)


def _named(arm: MeasuredArm | None) -> str:
    return f"{arm.name}: {significant(arm.p50)}" if arm else ""


def _why_not(race: MeasuredRace, **options: str) -> str:
    failed = [r for r in race.failures if all(getattr(r.case, key) == value for key, value in options.items())]
    return "; ".join(f"{result.case.arm}: {result.status}" for result in failed) or "not measured"


def family(races: Sequence[MeasuredRace], titles: Mapping[MeasuredRace, str]) -> Table:
    """A row per race, with the worst row marked; it comes last if it is not one of these."""
    worst = worst_row(races) if len(races) > 1 else None
    rows = [
        [titles[race] + (WORST if worst is not None and (race, arm) == worst[:2] else ""), *headline_row(race, arm)]
        for race, arm in with_worst(races, worst)
    ]
    return filled(("race", *HEADLINE[1:]), rows)


def arms(races: Sequence[MeasuredRace]) -> Table:
    """A row per race with each arm's milliseconds and the distance of two copies of one arm, by tenth percentiles."""
    names = list(dict.fromkeys(arm.name for race in races for arm in race.arms))
    rows = []
    for race in races:
        found = {arm.name: significant(arm.p10) for arm in race.arms}
        apart = [arm.apart for arm in race.arms if arm.apart is not None]
        noise = f"{max(apart):.0%}" if apart else NOTHING
        title = f"{race.case.model}, {race.case.input}, {race.case.dtype}"
        rows.append([title, *(found.get(name, NOTHING) for name in names), noise])
    return ["model, input", *names, "A/A noise"], rows


# The first pages ------------------------------------------------------------------------------------------------------


def first_races(options: Mapping[str, str], shown: Iterable[MeasuredRace]) -> dict[str, MeasuredRace | None]:
    """The races of ``FIRST`` and, if the zoo loses a race, its largest loss."""
    wanted = {"workload": "inference", "device": "cuda", "family": ",".join(UPSTREAM), **options}
    found = select(wanted, shown)
    by_case = {(race.case.model, race.case.input, race.case.dtype): race for race in found}
    first = {name: by_case.get(case) for name, case in FIRST.items()}

    def times_faster(race: MeasuredRace) -> float:
        ratio = race.speedup(race.ours, race.best) if race.ours else None
        return math.inf if ratio is None else ratio.value

    worst = min(found, key=times_faster, default=None)
    if worst is not None and times_faster(worst) < 1 and worst not in first.values():
        first[f"{', '.join((worst.case.model, worst.case.input, worst.case.dtype))}: our worst"] = worst
    return first


def compiled_arms(race: MeasuredRace) -> tuple[MeasuredArm | None, MeasuredArm | None, MeasuredArm | None]:
    """Upstream's model compiled whole, as shipped, in its faster mode; upstream's own regions; the zoo's arm."""
    modes = (race.find(impl="upstream", strategy="full", mode=mode) for mode in ("default", "reduce-overhead"))
    whole = [arm for arm in modes if arm is not None and arm.cold_seconds is not None]
    library = race.find(impl="upstream", strategy="regional")
    return min(whole, key=lambda arm: arm.p50 or math.inf, default=None), library, race.ours


def front(first: Mapping[str, MeasuredRace | None], starts: Iterable[Start]) -> Table:
    """Times of compiling, of a new process and of a call in the races of the first pages."""
    missing, rows = "not measured", []
    totals = {(start.case.model, start.case.input, start.arm): start.total for start in starts if start.processes}
    for name, race in first.items():
        figures = [missing] * 5
        if race is not None:
            where = race.case.model, STARTED_ON.get(race.case.input, race.case.input)
            arms = f"upstream full, {FILLED}", f"upstream eager, {EMPTY}", f"zoo regional + CUDA graph, {ARTIFACTS}"
            seconds = [significant(totals.get((*where, arm))) for arm in arms]
            compiled = compiled_arms(race)
            warms = [arm.warm.seconds if arm and arm.warm else None for arm in compiled]
            figures = [_colds(compiled, missing), _joined(warms, NOTHING), " / ".join(seconds)]
            figures += [_calls((race.best, race.ours), missing), _times_faster(race, race.ours, missing)]
        rows.append([name, *figures])
    return list(FRONT), rows


# Markdown -------------------------------------------------------------------------------------------------------------


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]], *, left: bool = False) -> str:
    """A Markdown table; a pipe in a cell is escaped.

    The first column is set to the left, the others, which are numbers, to the right; with ``left`` all to the left.
    """
    others = "---" if left else "---:"
    lines = [list(head), ["---"] + [others] * (len(head) - 1), *(list(row) for row in rows)]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
