"""Race a family's models: ``python -m benchmarks.run --family gnn``.

Exit codes: 0; 1 if an arm of the zoo failed; 2 on wrong usage; 3 if rows cannot be written; 130 after Ctrl-C, which
keeps finished rows.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from benchmarks.cli import UsageError, pick, require_zoo, run_command
from benchmarks.harness import ROUNDS_OF_A_GROUP
from benchmarks.measure import Run, measure, settings_of
from benchmarks.plan import DTYPES, IMPLEMENTATION_NAMES, MODES, STRATEGY_NAMES, WORKLOADS, Case, expand

if TYPE_CHECKING:
    from benchmarks.families import Workload

RUNS = Path("runs")


def main(
    family: Annotated[str, typer.Option(help="Family to measure; --list alone names the families.")] = "",
    model: Annotated[list[str] | None, typer.Option(help="Models, separated by commas; 'all' for every model.")] = None,
    input: Annotated[list[str] | None, typer.Option(help="Inputs, separated by commas; 'all' for every input.")] = None,
    strategy: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(STRATEGY_NAMES)}.")] = None,
    impl: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(IMPLEMENTATION_NAMES)}.")] = None,
    mode: Annotated[list[str] | None, typer.Option(help=f"Modes are {', '.join(MODES)}.")] = None,
    arm: Annotated[list[str] | None, typer.Option(help="Only arms whose name matches a pattern, as 'zoo *'.")] = None,
    workload: Annotated[str, typer.Option(help=f"{' or '.join(WORKLOADS)}.")] = WORKLOADS[0],
    dtype: Annotated[list[str] | None, typer.Option(help="The family's default if omitted.")] = None,
    device: Annotated[str | None, typer.Option(help="cuda or cpu; cuda by default if there is a GPU.")] = None,
    data_root: Annotated[Path | None, typer.Option(help="Folder with real data sets.")] = None,
    timeout: Annotated[float, typer.Option(help="Time limit in seconds for one step of an arm.")] = 900.0,
    resume: Annotated[bool, typer.Option("--resume", help="Skip arms done in --out or the newest run.")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder or .jsonl file; runs/<date-time> if omitted.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Use one process per arm and fewer rounds.")] = False,
    steady_only: Annotated[bool, typer.Option("--steady-only", help="No compile times; arms start together.")] = False,
    rounds: Annotated[int | None, typer.Option(help="Rounds of a race; 30 by default, 20 with --quick.")] = None,
    curve: Annotated[int, typer.Option(help="Steps of each arm's loss curve; needs --workload train.")] = 0,
    seed: Annotated[int, typer.Option(help="Seed of weights, generated inputs and the order of arms.")] = 0,
    parallel: Annotated[str, typer.Option(help="ddp, fsdp, zero2 or tp: spread arms over torchrun's processes.")] = "",
    list_: Annotated[bool, typer.Option("--list", help="Show models, inputs and arms without measuring.")] = False,
) -> int:
    """Measure the models of a family, ours and the upstream library's: eager, compiled whole and by regions."""
    require_zoo()
    console = Console(markup=False, highlight=False)
    if not family:
        if list_:
            console.print("families: " + ", ".join(_families()))
            return 0
        raise UsageError(f"--family is missing; available: {', '.join(_families())}")
    if rounds is not None and not 1 <= rounds <= ROUNDS_OF_A_GROUP:  # more rounds would get the next group's numbers
        raise UsageError(f"--rounds is {rounds}, expected 1 to {ROUNDS_OF_A_GROUP}")
    if curve < 0 or (curve and workload != "train"):
        raise UsageError(f"--curve is {curve}; it is a number of steps, and needs --workload train")
    if timeout <= 0:
        raise UsageError(f"--timeout is {timeout:g}, expected seconds above 0")
    if data_root is not None and not data_root.is_dir():
        raise UsageError(f"--data-root: {str(data_root)!r} is not a folder")
    loaded = workload_of(family)
    on = device_of(device)
    pick("--workload", [workload], WORKLOADS)
    supported = loaded.dtypes(on)
    dtypes = pick("--dtype", dtype or [], DTYPES) or [supported[0]]
    for name in dtypes:
        if name not in supported:
            raise UsageError(f"--dtype: {family} does not run {name} on {on}; available: {', '.join(supported)}")
    bases = [
        Case(family=loaded.family, model=m, input=i, workload=workload, dtype=d, device=on)
        for d in dtypes
        for m, i in _pairs(loaded, on, quick, workload, model or [], input or [])
    ]
    if parallel:
        from benchmarks import parallel as processes

        if impl or strategy or mode or curve or resume or list_:
            raise UsageError("--parallel: arms are chosen by --arm and measured anew; leave out other options")
        return processes.main(
            loaded,
            bases,
            parallel,
            only=arm or [],
            out=out or RUNS / time.strftime("%Y%m%d-%H%M%S"),
            rounds=rounds or 10,
            timeout=timeout,
            data_root=None if data_root is None else str(data_root),
            seed=seed,
        )
    cases, refused = expand(
        bases,
        loaded.refuses,
        only=arm or [],
        impls=pick("--impl", impl or [], IMPLEMENTATION_NAMES),
        strategies=pick("--strategy", strategy or [], STRATEGY_NAMES),
        modes=pick("--mode", mode or [], MODES),
    )
    if not cases:
        raise UsageError("nothing is left to measure: " + next(iter(refused.values()), "no model and input"))
    if resume and out is None:
        # The folder with the latest rows, by modification time, since --out allows any name.
        newest = max(RUNS.glob("*/*.jsonl"), key=lambda rows: rows.stat().st_mtime, default=None)
        if newest is None:
            raise UsageError(f"--resume: {RUNS}/ holds no run to continue; name its folder with --out")
        out = newest.parent
    folder = out or RUNS / time.strftime("%Y%m%d-%H%M%S")
    run = Run(loaded, on, cases, refused, folder)
    if list_:
        _list(run, console)
        return 0
    if resume and not folder.exists():
        console.print(f"there is no run in {folder} to continue: this one begins there", soft_wrap=True)
    run.skip_done(resume=resume)
    with settings_of(
        family,
        timeout=timeout,
        rounds=rounds,
        curve=curve,
        quick=quick,
        steady_only=steady_only,
        data_root=None if data_root is None else str(data_root),
        seed=seed,
    ) as settings:
        return measure(run, settings, console)


def _families() -> list[str]:
    from benchmarks.families import families  # imports torch

    return families()


def workload_of(family: str) -> Workload:
    from benchmarks.families import load

    try:
        return load(family)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(f"--family {family}: {error}") from error


def device_of(wanted: str | None) -> str:
    """``cuda`` or ``cpu``: the wanted device, else a GPU if torch finds one."""
    import torch

    device = wanted or ("cuda" if torch.cuda.is_available() else "cpu")
    pick("--device", [device], ("cuda", "cpu"))
    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: torch finds no usable GPU here; use --device cpu")
    return device


def _pairs(
    loaded: Workload, device: str, quick: bool, workload: str, models: list[str], inputs: list[str]
) -> list[tuple[str, str]]:
    """Pairs of model and input: all combinations of given ones, with a plain run's values for a missing option."""
    defaults = list(loaded.default_races(device, quick, workload))
    picked_models = list(loaded.models) if models == ["all"] else pick("--model", models, loaded.models)
    picked_inputs = list(loaded.inputs) if inputs == ["all"] else pick("--input", inputs, loaded.inputs)
    if not (picked_models or picked_inputs):
        return defaults
    picked_models = picked_models or list(dict.fromkeys(m for m, _ in defaults))
    picked_inputs = picked_inputs or list(dict.fromkeys(i for _, i in defaults))
    return [(m, i) for i in picked_inputs for m in picked_models]


def _list(run: Run, console: Console) -> None:
    def show(title: str, items: Iterable[str]) -> None:
        console.print(f"{title}:", *(f"  {item}" for item in items), sep="\n")

    show("models", run.workload.models)
    show("inputs", run.workload.inputs)
    show("races of these options", (f"{arms[0].model} on {arms[0].input}, {arms[0].dtype}" for arms in run.races))
    show("arms", dict.fromkeys(case.arm for case in run.cases))
    if run.refused:
        show("left out", dict.fromkeys(f"{key.rpartition(' / ')[2]}: {why}" for key, why in run.refused.items()))


if __name__ == "__main__":
    sys.exit(run_command(main, "python -m benchmarks.run"))
