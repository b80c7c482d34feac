"""The kinds of tables and values that docs can ask for, made from measured rows alone."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence

from benchmarks.claims import page as claims
from benchmarks.cli import did_you_mean
from benchmarks.plan import Case
from benchmarks.record import Compile, Kernel, Result, Rows
from benchmarks.report import cells, front, markdown, numbers
from benchmarks.report.blocks import Spec
from benchmarks.report.commands import commands_of
from benchmarks.report.race import Arm, Race, races_beside, races_of
from benchmarks.report.selection import SELECTING, machines, option, select
from benchmarks.stats import Ratio

HEADLINE = (
    "model, input",
    "upstream as shipped, its best: ms",
    "ours: ms",
    "speed-up",
    "over upstream's best tuned",
    "cold compile s, upstream full → ours",
)
DECOMPOSITION = ("step", "p50 ms", "over the row above", "over the first row", "kernels")
KERNELS = ("kernel", "launches a call", "µs a call", "share")
CLAIMS: dict[str, Callable[[Spec, Rows], str]] = {"claim": claims.claim_table, "claims": claims.overview}
MACHINE = ("gpu", "torch")
DEFAULTS = {"workload": "inference", "dtype": "float32"}


def make_table(spec: Spec, rows: Rows) -> str:
    """The Markdown that belongs into a table block.

    Raises:
        ValueError: On a kind or option that does not exist, or options that select no single race.
    """
    if spec.kind in CLAIMS:
        return CLAIMS[spec.kind](spec, rows)
    if spec.kind == "front":
        _refuse_options(spec, MACHINE)
        return front.front_table(spec.options, races_of(rows))
    makers: dict[str, Callable[[Spec, Sequence[Race]], str]] = {
        "headline": _headline,
        "race": _of_one(markdown.race_table),
        "compile": _of_one(markdown.compile_table),
        "decomposition": _of_one(_decomposition),
        "losses": _of_one(_losses, alone=False),
        "kernels": _kernels,
    }
    if spec.kind not in makers:
        raise ValueError(f"there is no table {spec.kind!r}; {did_you_mean(spec.kind, ('front', *makers, *CLAIMS))}")
    _refuse_options(spec, (*SELECTING, "arm") if spec.kind == "kernels" else SELECTING)
    if spec.kind == "kernels" and not {"model", "input", "arm"} <= spec.options.keys():
        raise ValueError('kernels are those of one arm; give model=... input=... arm="zoo regional"')
    if spec.kind != "headline" and not {"model", "input"} <= spec.options.keys():
        raise ValueError(f"a {spec.kind} table shows one race; give model=... input=...")
    shown = races_of(rows)
    if spec.kind == "decomposition":
        apart = tuple(race for race in races_beside(rows) if _tells_own_kernels(race))
        shown = apart if _select(spec, apart) else shown
    return makers[spec.kind](spec, shown)


def make_value(spec: Spec, rows: Rows) -> str:
    """The text that belongs into a value block: a measured figure with its unit.

    Raises:
        ValueError: On a figure, option or arm that does not exist.
    """
    if spec.kind == "verdict":
        return claims.verdict_value(spec, rows)
    if spec.kind == "cold-range":
        _refuse_options(spec, ("of", *MACHINE))
        return front.cold_range(spec.options, races_of(rows))
    if spec.kind not in VALUES:
        known = (*VALUES, "verdict", "cold-range")
        raise ValueError(f"there is no value {spec.kind!r}; {did_you_mean(spec.kind, known)}")
    _refuse_options(spec, (*SELECTING, "arm", "against"))
    if not {"model", "input", "arm"} <= spec.options.keys():
        raise ValueError('a value belongs to one arm; give model=... input=... arm="zoo regional"')
    race = _single(spec, races_of(rows))
    if race is None:
        return "not measured yet"
    found = _arm(race, spec.options["arm"])
    if isinstance(found, Result):
        return found.status
    return VALUES[spec.kind](race, found, spec.options.get("against", "shipped"))


def _refuse_options(spec: Spec, known: Sequence[str]) -> None:
    for key in spec.options:
        if key not in known:
            raise ValueError(f"there is no option {key!r}; {did_you_mean(key, known)}")


# Which rows --------------------------------------------------------------------------------------------------------


def _select(spec: Spec, shown: Sequence[Race], *, ignore: tuple[str, ...] = ()) -> list[Race]:
    said = {**DEFAULTS, **spec.options}
    return select({key: said[key] for key in SELECTING if key in said and key not in ignore}, shown)


def _single(spec: Spec, shown: Sequence[Race]) -> Race | None:
    chosen = _select(spec, shown)
    if len(chosen) > 1:
        raise ValueError(f"{len(chosen)} races match: {'; '.join(race.title for race in chosen)}; give more options")
    return chosen[0] if chosen else None


def _of_one(make: Callable[[Race], str], *, alone: bool = True) -> Callable[[Spec, Sequence[Race]], str]:
    """A table of a race; not ``alone``, below another of the same race that says where it comes from."""

    def table(spec: Spec, shown: Sequence[Race]) -> str:
        race = _single(spec, shown)
        if race is None:
            return _nothing(spec)
        return "\n\n".join([make(race), " ".join(cells.notes(race)), _origin([race])]) if alone else make(race)

    return table


def _arm(race: Race, name: str) -> Arm | Result:
    arms: dict[str, Arm | Result] = {arm.name: arm for arm in race.arms}
    arms |= {result.case.arm: result for result in race.failures}
    if name not in arms:
        raise ValueError(f"{race.title} has no arm {name!r}; {did_you_mean(name, arms)}")
    return arms[name]


# What stands below a table -----------------------------------------------------------------------------------------


def _nothing(spec: Spec) -> str:
    words = ["python", "-m", "benchmarks.run"]
    for key in ("family", "model", "input", "workload", "dtype", "device"):
        if key in spec.options:
            words += [f"--{key}", spec.options[key]]
    return f"No rows measured yet; run `{shlex.join(words)}`."


def _origin(shown: Sequence[Race]) -> str:
    return _from(machines(shown), "\n".join(commands_of(shown)))


def _from(where: str, commands: str | None) -> str:
    if not commands:
        return f"{where}. The rows name no command that measures them again."
    return f"{where}. Measure it again:\n\n```sh\n{commands}\n```"


# Headline ----------------------------------------------------------------------------------------------------------


def worst_row(shown: Sequence[Race]) -> tuple[Race, Arm, Ratio] | None:
    """The regional arm, with or without the CUDA graph, of the lowest speed-up over upstream's best as shipped.

    One whose output is wrong is worse than any slow one.
    """
    found = []
    for race in shown:
        for arm in race.arms:
            case = arm.result.case
            if (case.implementation, case.strategy, case.mode, case.dynamic) != ("zoo", "regional", "default", False):
                continue
            if (ratio := race.speedup(arm, race.best_shipped)) is not None:
                found.append((race, arm, ratio))
    return min(found, key=lambda row: (not row[1].wrong, row[2].value), default=None)


def with_worst(chosen: Sequence[Race], worst: tuple[Race, Arm, Ratio] | None) -> list[tuple[Race, Arm | None]]:
    """The rows of a headline: ours of each race, and below them the worst row where it is not among them."""
    rows = [(race, race.ours) for race in chosen]
    return rows if worst is None or worst[:2] in rows else [*rows, worst[:2]]


def _headline(spec: Spec, shown: Sequence[Race]) -> str:
    chosen = _select(spec, shown)
    if not chosen:
        return _nothing(spec)
    # The worst row comes from all races of the family, so that a choice of models or inputs cannot hide it.
    everything = _select(spec, shown, ignore=("model", "input"))
    worst = worst_row(everything)
    rows = with_worst(chosen, worst)
    # Lists of these make rows of one model and input that nothing else tells apart.
    differ = [key for key in ("workload", "dtype") if len({option(race, key) for race, _ in rows}) > 1]

    def named(race: Race) -> str:
        return ", ".join(option(race, key) for key in ("model", "input", *differ))

    notes = []
    if worst is not None:
        race, arm, _ = worst
        said = cells.speedup_and_verdict(race, arm, race.best_shipped) + cells.but_wrong(arm)
        notes.append(f"Our worst result in {numbers.races(len(everything))}: {named(race)}, {arm.name}: {said}.")
    notes.append("Intervals are 95 % bootstrap over rounds; a difference within the A/A noise is undetermined.")
    body = markdown.table(HEADLINE, [(named(race), *headline_row(race, arm)) for race, arm in rows])
    return "\n\n".join([body, " ".join(notes), _origin(list(dict.fromkeys(race for race, _ in rows)))])


def headline_row(race: Race, ours: Arm | None) -> tuple[str, ...]:
    """One race in the columns of ``HEADLINE`` after its name: upstream's best arms beside one of ours."""
    shipped, tuned = race.best_shipped, race.best_tuned
    full = race.find(impl="upstream", strategy="full")
    before = cells.seconds(full.result.cold if full else None)
    graphed = race.find(impl="upstream", strategy="full", mode="reduce-overhead")
    if full is None and graphed is not None and graphed.result.cold is not None:
        before = f"{cells.seconds(graphed.result.cold)} (reduce-overhead)"
    after = cells.seconds(ours.result.cold if ours else None)
    return (
        _named(shipped) or _why_not(race, impl="upstream"),
        _named(ours) or _why_not(race, impl="zoo", strategy="regional"),
        cells.speedup_and_verdict(race, ours, shipped) if ours else numbers.NOTHING,
        f"{cells.speedup_and_verdict(race, ours, tuned)} ({tuned.name})" if ours and tuned else numbers.NOTHING,
        f"{before} → {after}",
    )


def _named(arm: Arm | None) -> str:
    return f"{arm.name}: {numbers.significant(arm.p50)}" if arm else ""


def _why_not(race: Race, **options: str) -> str:
    """Why no arm of these options can be shown: how they failed, or that none was tried."""
    failed = [r for r in race.failures if all(getattr(r.case, key) == value for key, value in options.items())]
    return "; ".join(f"{result.case.arm}: {result.status}" for result in failed) or "not measured"


# Decomposition -----------------------------------------------------------------------------------------------------


def _decomposition(race: Race) -> str:
    return markdown.table(DECOMPOSITION, decomposition_rows(race))


def _tells_own_kernels(race: Race) -> bool:
    """Whether the zoo was raced without its own kernels too, so that what they bring can be told."""
    return any(not result.case.kernels for result in (*(arm.result for arm in race.arms), *race.failures))


def decomposition_rows(race: Race) -> list[tuple[str, ...]]:
    """A win taken apart, in the columns of ``DECOMPOSITION``; a step that failed or was not run says so.

    Own kernels are a step where the zoo was raced without them; elsewhere all steps of ours hold them.
    """
    apart = _tells_own_kernels(race)
    ours = {"impl": "zoo", "kernels": not apart}
    by = "torch's operators" if apart else "own kernels"
    steps = [
        ("upstream eager", _case(race, impl="upstream", strategy="eager")),
        (f"ours, eager, by {by}", _case(race, **ours, strategy="eager")),
        ("+ regions", _case(race, **ours, strategy="regional")),
        *([("+ own kernels", _case(race, impl="zoo", strategy="regional"))] if apart else []),
        ("+ outer CUDA graph", _case(race, impl="zoo", strategy="regional", cuda_graph=True)),
    ]
    rows: list[tuple[str, ...]] = []
    first: Arm | None = None
    before: Arm | None = None
    for step, case in steps:
        arm = next((arm for arm in race.arms if arm.result.case == case and arm.p50 is not None), None)
        if arm is None:
            failed = next((result.status for result in race.failures if result.case == case), "not measured")
            rows.append((step, failed, *[numbers.NOTHING] * 3))
            continue
        rows.append(
            (
                step,
                numbers.significant(arm.p50),
                cells.speedup_and_verdict(race, arm, before) if before else numbers.NOTHING,
                cells.speedup_and_verdict(race, arm, first) if first else numbers.NOTHING,
                cells.kernels(arm),
            )
        )
        first, before = first or arm, arm
    return rows


def _case(race: Race, **options: object) -> Case:
    names = ("family", "model", "input", "workload", "dtype", "device")
    return Case(**dict(zip(names, race.case.race, strict=True)), **options)  # type: ignore[arg-type]


# Losses ------------------------------------------------------------------------------------------------------------


def _losses(race: Race) -> str:
    """Loss curves at some of their steps, an arm a row, and how far each is from the reference's at most."""
    curves = {arm.name: arm.result.curve for arm in race.arms if arm.result.curve}
    if not curves:
        return "No curves; give `--curve` steps."
    steps = min(map(len, curves.values()))
    shown = [step for step in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000) if step < steps] + [steps]
    told = race.reference.name if race.reference else ""
    reference = curves.get(told)
    rows = []
    for name, curve in curves.items():
        losses = [numbers.significant(curve[step - 1]) for step in shown]
        if reference is not None:
            pairs = zip(curve, reference, strict=False)
            apart = max(abs(ours - theirs) / max(abs(theirs), 1e-30) for ours, theirs in pairs)
            losses.append(numbers.percent(apart))
        rows.append((name, *losses))
    farthest = [] if reference is None else [f"farthest from {told}"]
    return markdown.table(("loss after step", *map(str, shown), *farthest), rows)


# Kernels -----------------------------------------------------------------------------------------------------------


def _kernels(spec: Spec, shown: Sequence[Race]) -> str:
    """The kernels that a call of one arm spends its time in, longest first."""
    race = _single(spec, shown)
    if race is None:
        return _nothing(spec)
    arm = _arm(race, spec.options["arm"])
    if isinstance(arm, Result):
        return f"{arm.case.arm}: {arm.status}."
    command, work = arm.result.command, arm.result.work
    if work is None or not work.longest:
        return f"Not measured yet; run `{command}`." if command else "Not measured yet."
    total = work.kernel_microseconds or 0.0
    rows = [_kernel_row(f"`{kernel.name}`", kernel, total) for kernel in work.longest]
    if work.others is not None:
        rows.append(_kernel_row(work.others.name, work.others, total))
    note = (
        f"One call of {arm.name}, by the profiler. Times are of a profiled call: their sum, "
        f"{numbers.significant(total)} µs, is a little more or less than a call takes without one."
    )
    return "\n\n".join([markdown.table(KERNELS, rows), note, _from(machines([race]), command)])


def _kernel_row(name: str, kernel: Kernel, total: float) -> tuple[str, ...]:
    launches = f"{kernel.launches:,.0f}" if kernel.launches % 1 == 0 else numbers.significant(kernel.launches)
    share = numbers.percent(kernel.microseconds / total) if total else numbers.NOTHING
    return name, launches, numbers.significant(kernel.microseconds), share


# Values ------------------------------------------------------------------------------------------------------------


def _speedup_value(race: Race, arm: Arm, against: str) -> str:
    known = {"eager": race.reference, "shipped": race.best_shipped, "tuned": race.best_tuned}
    if against in known:
        over = known[against]
    else:
        found = _arm(race, against)
        over = found if isinstance(found, Arm) else None
    ratio = race.speedup(arm, over)
    return numbers.times(ratio.value) if ratio else "not measured"


def _with_unit(number: float | None, unit: str) -> str:
    return "not measured" if number is None else f"{numbers.significant(number)} {unit}"


def _mebibytes(arm: Arm) -> str:
    return f"{cells.memory(arm)} MiB" if arm.result.memory else "not measured"


VALUES: dict[str, Callable[[Race, Arm, str], str]] = {
    "p50": lambda race, arm, against: _with_unit(arm.p50, "ms"),
    "p95": lambda race, arm, against: _with_unit(arm.p95, "ms"),
    "speedup": _speedup_value,
    "compile-cold": lambda race, arm, against: _with_unit((arm.result.cold or Compile()).seconds, "s"),
    "compile-warm": lambda race, arm, against: _with_unit((arm.warm or Compile()).seconds, "s"),
    "start-up": lambda race, arm, against: _with_unit((arm.result.cold or Compile()).start_up, "s"),
    "throughput": lambda race, arm, against: _with_unit(arm.throughput, f"{race.unit} a second"),
    "memory": lambda race, arm, against: _mebibytes(arm),
    "graphs": lambda race, arm, against: numbers.count((arm.result.counted or Compile()).graphs),
}
