"""Race a family's models: ``python -m benchmarks.run --family gnn``.

Exit codes: 0; 1 where an arm of the zoo failed; 2 on wrong usage; 130 when stopped by Ctrl-C, what was done being kept.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from benchmarks.case import DTYPES, IMPLEMENTATIONS, MODES, STRATEGY_NAMES, WORKLOADS, Case, expand, races_of
from benchmarks.compiler import cache_environment
from benchmarks.environment import Monitor, row
from benchmarks.process import Worker, WorkerFailure, kill_all
from benchmarks.progress import Progress, words
from benchmarks.race import ROUNDS_OF_A_SET, run_race
from benchmarks.rendering.terminal import render
from benchmarks.report import folder_of_reports, write_html
from benchmarks.result import Result, Store, load
from benchmarks.startup import Settings, estimate_race
from benchmarks.usage import UsageError, did_you_mean, run_command
from benchmarks.worker import load_workload
from benchmarks.workloads import Workload, families

RUNS = Path("runs")
PEAKS_SECONDS = 12.0
INTERRUPTED = 130
# What says that an arm of ours is broken. One that does not fit, or was stopped, is not.
BROKEN = ("failed", "crashed", "timeout", "out-of-memory")


@dataclass
class Plan:
    """What a run will do, before anything is measured."""

    family: str
    workload: Workload
    device: str
    cases: list[Case]
    refused: Mapping[str, str]
    out: Path
    done: set[str] = field(default_factory=set)  # keys of cases that the files hold already

    @property
    def races(self) -> list[list[Case]]:
        """What is left to do, race by race."""
        todo = [case for case in self.cases if case.key not in self.done]
        return list(races_of(todo).values())

    def store(self, case: Case) -> Store:
        if self.out.suffix == ".jsonl":
            return Store(self.out)
        return Store(self.out / f"{case.family}-{case.workload}-{case.dtype}.jsonl")

    def stores(self) -> list[Store]:
        return list({store.path: store for store in map(self.store, self.cases)}.values())


def pick(option: str, given: Sequence[str], known: Iterable[str]) -> list[str]:
    """Values of an option that may be repeated or take a comma list, each checked; without repetition.

    Raises:
        UsageError: On a value that is not known, with a suggestion.
    """
    values = [value.strip() for part in given for value in part.split(",") if value.strip()]
    for value in values:
        if value not in known:
            raise UsageError(f"{option}: {value!r} is not known; {did_you_mean(value, known)}")
    return list(dict.fromkeys(values))


def _workload(family: str) -> Workload:
    if "." not in family and family not in families():
        raise UsageError(f"--family: {family!r} is not known; {did_you_mean(family, families())}")
    try:
        return load_workload(family)
    except (ImportError, AttributeError) as error:
        raise UsageError(f"--family {family}: {error}") from error


def _device(wanted: str | None) -> str:
    import torch

    device = wanted or ("cuda" if torch.cuda.is_available() else "cpu")
    if device not in ("cuda", "cpu"):
        raise UsageError(f"--device: {device!r} is not known; {did_you_mean(device, ('cuda', 'cpu'))}")
    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: torch finds no usable GPU here; use --device cpu")
    return device


def _newest_run() -> Path:
    runs = sorted(path for path in RUNS.glob("*") if path.is_dir())
    if not runs:
        raise UsageError(f"--resume: {RUNS}/ holds no run to continue; name its folder with --out")
    return runs[-1]


def _command(family: str, case: Case, settings: Settings) -> str:
    """What measures this row again."""
    words = ["python", "-m", "benchmarks.run", "--family", family, "--model", case.model, "--input", case.input]
    words += ["--workload", case.workload, "--dtype", case.dtype, "--device", case.device]
    words += ["--impl", case.impl, "--strategy", case.strategy_name, "--mode", case.mode]
    words += ["--dynamic"] * case.dynamic + ["--quick"] * settings.quick + ["--steady-only"] * settings.steady_only
    words += ["--rounds", str(settings.rounds), "--sets", str(settings.sets)]
    words += ["--data-root", settings.data_root] if settings.data_root else []
    return shlex.join(words)


def main(
    family: Annotated[str, typer.Option(help="Family to race; --list without it names them.")] = "",
    model: Annotated[list[str] | None, typer.Option(help="Models; 'all' for every one.")] = None,
    input: Annotated[list[str] | None, typer.Option(help="Inputs; 'all' for every one.")] = None,
    strategy: Annotated[list[str] | None, typer.Option(help=f"{', '.join(STRATEGY_NAMES)}.")] = None,
    impl: Annotated[list[str] | None, typer.Option(help=f"{', '.join(IMPLEMENTATIONS)}.")] = None,
    mode: Annotated[list[str] | None, typer.Option(help=f"{', '.join(MODES)}.")] = None,
    arm: Annotated[list[str] | None, typer.Option(help="Of these only such as match a pattern: 'zoo *'.")] = None,
    workload: Annotated[str, typer.Option(help=f"{', '.join(WORKLOADS)}.")] = WORKLOADS[0],
    dtype: Annotated[list[str] | None, typer.Option(help="The family's default if left out.")] = None,
    device: Annotated[str | None, typer.Option(help="cuda or cpu; cuda where there is one.")] = None,
    dynamic: Annotated[bool, typer.Option("--dynamic", help="Compile for dynamic shapes.")] = False,
    data_root: Annotated[Path | None, typer.Option(help="Folder of real data sets.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds that one step of an arm may take.")] = 900.0,
    resume: Annotated[bool, typer.Option("--resume", help="Skip what is done in --out (newest run).")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder or .jsonl file; runs/<date-time> if left out.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="One process an arm, fewer rounds.")] = False,
    steady_only: Annotated[bool, typer.Option("--steady-only", help="No compile figures; start together.")] = False,
    rounds: Annotated[int | None, typer.Option(help="Rounds of a race: 30, with --quick 10.")] = None,
    sets: Annotated[int, typer.Option(help="Sets of processes; 3 for a headline.")] = 1,
    seed: Annotated[int, typer.Option(help="Of weights, generated inputs and drawn orders.")] = 0,
    trace: Annotated[bool, typer.Option("--trace", help="A profiler trace an arm, into traces/ of --out.")] = False,
    list_: Annotated[bool, typer.Option("--list", help="Show models, inputs and arms; measure nothing.")] = False,
) -> int:
    """Race a family's models: eager, full and regional, ours against the upstream library's own."""
    console = Console(soft_wrap=False)
    if not family:
        if list_:
            console.print("families: " + ", ".join(families()))
            return 0
        raise UsageError(f"--family is missing; there is: {', '.join(families())}")
    if rounds is not None and rounds < 1:
        raise UsageError(f"--rounds is {rounds}, expected at least 1")
    if sets < 1:
        raise UsageError(f"--sets is {sets}, expected at least 1")
    if timeout <= 0:
        raise UsageError(f"--timeout is {timeout:g}, expected seconds above 0")
    if data_root is not None and not data_root.is_dir():
        raise UsageError(f"--data-root: {str(data_root)!r} is not a folder")
    loaded = _workload(family)
    on = _device(device)
    pick("--workload", [workload], WORKLOADS)
    supported = loaded.dtypes(on)
    dtypes = pick("--dtype", dtype or [], DTYPES) or [supported[0]]
    for name in dtypes:
        if name not in supported:
            raise UsageError(f"--dtype: {family} does not run {name} on {on}; there is: {', '.join(supported)}")
    bases = [
        Case(family=loaded.family, model=m, input=i, workload=workload, dtype=d, device=on)
        for d in dtypes
        for m, i in _pairs(loaded, on, quick, model or [], input or [])
    ]
    cases, refused = expand(
        bases,
        loaded.refuses,
        only=arm or [],
        impls=pick("--impl", impl or [], IMPLEMENTATIONS),
        strategies=pick("--strategy", strategy or [], STRATEGY_NAMES),
        modes=pick("--mode", mode or [], MODES),
        dynamic=dynamic,
    )
    if not cases and not refused and arm:
        raise UsageError(f"--arm: no arm matches {', '.join(map(repr, arm))}; --list shows their names")
    if not cases:
        raise UsageError("nothing is left to measure: " + next(iter(refused.values()), "no model and input"))
    folder = out or (_newest_run() if resume else RUNS / time.strftime("%Y%m%d-%H%M%S"))
    plan = Plan(family, loaded, on, cases, refused, folder)
    if list_:
        _list(plan, console)
        return 0
    if resume:
        plan.done = {r.case.key for store in plan.stores() for r in store.results() if r.status == "ok"}
    elif taken := [str(store.path) for store in plan.stores() if store.path.exists()]:
        raise UsageError(f"--out: {taken[0]} is there already; add --resume to continue it, or name another place")
    with tempfile.TemporaryDirectory(prefix="regional-zoo-", ignore_cleanup_errors=True) as scratch:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        settings = Settings(
            workload=family,
            scratch=Path(scratch),
            monitor=Monitor(),
            timeout=timeout,
            rounds=rounds or (10 if quick else 30),
            sets=sets,
            quick=quick,
            steady_only=steady_only,
            traces=(folder.parent if folder.suffix == ".jsonl" else folder) / "traces" if trace else None,
            data_root=None if data_root is None else str(data_root),
            seed=seed,
            # Arms get ready beside nothing but each other, so two cores may as well share them; where no seconds of
            # compilation are reported, every core may.
            ahead=min(cores, 16 if steady_only else max(2, min(cores // 2, 12))),
        )
        return _measure(plan, settings, console)


def _pairs(workload: Workload, device: str, quick: bool, models: list[str], inputs: list[str]) -> list[tuple[str, str]]:
    """Pairs of model and input: what was asked for, each with each; what was not asked for as in a plain run."""
    defaults = list(workload.default_races(device, quick))
    every = {"models": list(workload.models), "inputs": list(workload.inputs)}
    picked_models = every["models"] if models == ["all"] else pick("--model", models, workload.models)
    picked_inputs = every["inputs"] if inputs == ["all"] else pick("--input", inputs, workload.inputs)
    if not (picked_models or picked_inputs):
        return defaults
    picked_models = picked_models or list(dict.fromkeys(m for m, _ in defaults))
    picked_inputs = picked_inputs or list(dict.fromkeys(i for _, i in defaults))
    return [(m, i) for i in picked_inputs for m in picked_models]


def _list(plan: Plan, console: Console) -> None:
    def show(title: str, items: Iterable[str]) -> None:
        console.print(f"{title}:", markup=False, highlight=False)
        for item in items:
            console.print(f"  {item}", markup=False, highlight=False)

    show("models", plan.workload.models)
    show("inputs", plan.workload.inputs)
    show("races of these options", (f"{arms[0].model} on {arms[0].input}, {arms[0].dtype}" for arms in plan.races))
    show("arms", dict.fromkeys(case.arm for case in plan.cases))
    if plan.refused:
        show("left out", dict.fromkeys(f"{key.rpartition(' / ')[2]}: {why}" for key, why in plan.refused.items()))


def _measure(plan: Plan, settings: Settings, console: Console) -> int:
    races = plan.races
    seconds = PEAKS_SECONDS * (0.2 if settings.quick else 1) + sum(estimate_race(arms, settings) for arms in races)
    _announce(plan, races, seconds, console)
    if not races:
        return _conclude(plan, console, set())
    measured: set[str] = set()
    signal.signal(signal.SIGTERM, _stop)
    try:
        with Progress(console, seconds) as progress:
            environment, settings = _environment(plan, settings, progress)
            for arms in races:
                store = plan.store(arms[0])
                first_set = _sets_in(store)
                if environment["id"] not in store.environments():
                    store.append(environment)

                def emit(result: Result, store: Store = store) -> None:
                    result.command = _command(plan.family, result.case, settings)
                    result.environment = environment["id"]
                    store.append(result.to_json())
                    measured.add(result.case.key)

                progress.race(f"{arms[0].model} on {arms[0].input}, {arms[0].dtype}, {arms[0].device}")
                run_race(
                    arms,
                    settings,
                    progress,
                    emit,
                    memory_bytes=plan.workload.memory_bytes,
                    peaks=environment["peaks"],
                    first_set=first_set,
                )
    except KeyboardInterrupt:
        kill_all()
        _conclude(plan, console, measured)
        console.print(f"stopped; what was done is kept. Continue with --resume --out {plan.out}", markup=False)
        return INTERRUPTED
    finally:
        kill_all()
    return _conclude(plan, console, measured)


def _stop(number: int, frame: Any) -> None:
    raise KeyboardInterrupt


def _announce(plan: Plan, races: Sequence[Sequence[Case]], seconds: float, console: Console) -> None:
    arms = sum(len(race) for race in races)
    skipped = f", {len(plan.done & {case.key for case in plan.cases})} done before" if plan.done else ""
    lines = [f"{len(races)} race(s), {arms} arms{skipped}, on {plan.device}; about {words(seconds)}"]
    for race in races:
        lines.append(f"  {race[0].model} on {race[0].input}, {race[0].workload}, {race[0].dtype}")
        lines += [f"    {case.arm}" for case in race]
    lines.append(f"rows go to {plan.out}")
    for line in lines:
        console.print(line, markup=False, highlight=False)


def _environment(plan: Plan, settings: Settings, progress: Progress) -> tuple[dict[str, Any], Settings]:
    """The environment's row, measured in a process of its own; and the settings with a monitor of that very GPU."""
    from dataclasses import replace

    seconds = PEAKS_SECONDS * (0.2 if settings.quick else 1)
    progress.begin("what this device does at best", seconds)
    folder = settings.scratch / "start-up"
    compiles = any(case.strategy != "eager" for case in plan.cases) and not settings.steady_only
    worker = Worker(cache_environment(folder), timeout=settings.timeout)
    try:
        dtypes = list(dict.fromkeys(case.dtype for case in plan.cases))
        start_up = str(folder / "compiler") if compiles else None
        found = worker.ask("peaks", device=plan.device, dtypes=dtypes, quick=settings.quick, start_up=start_up)
    except WorkerFailure as failure:
        raise UsageError(f"the device {plan.device} could not be measured ({failure})") from failure
    finally:
        worker.stop()
    facts = found["device"]
    settings = replace(settings, monitor=Monitor(facts.get("gpu_uuid")), compiler_start_up=found["start_up"])
    return row(facts, found["peaks"]), settings


def _sets_in(store: Store) -> int:
    """How many sets of processes the file's rows may have: new rounds are numbered above all of them."""
    rounds = [number for result in store.results() if result.steady for number in result.steady.rounds]
    return max((number // ROUNDS_OF_A_SET + 1 for number in rounds), default=0)


def _conclude(plan: Plan, console: Console, measured: set[str]) -> int:
    """Print the tables of this run's cases and write the report; 1 where an arm of ours measured now is broken."""
    wanted = {case.key for case in plan.cases}
    results: list[Result] = []
    environments: dict[str, Any] = {}
    for store in plan.stores():
        results += [result for result in store.results() if result.case.key in wanted]
        environments |= store.environments()
    render(results, environments, console)
    console.print(f"\nrows: {', '.join(str(store.path) for store in plan.stores())}", markup=False, highlight=False)
    if results:
        _report(plan, console)
    broken = [r.case for r in results if r.case.impl == "zoo" and not r.case.control and r.status in BROKEN]
    return 1 if any(case.key in measured for case in broken) else 0


def _report(plan: Plan, console: Console) -> None:
    """The HTML report of all that stands where this run writes, earlier runs that it continues included."""
    try:
        path = write_html(load(plan.out), folder_of_reports(plan.out) / "report.html")
    except (OSError, ValueError) as error:  # a broken row of another run there must not hide that this one is done
        console.print(f"no report: {error}", markup=False, highlight=False)
    else:
        console.print(f"report: {path}", markup=False, highlight=False)


if __name__ == "__main__":
    sys.exit(run_command(main, "python -m benchmarks.run"))
