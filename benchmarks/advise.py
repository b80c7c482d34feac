"""Which mode pays off for N calls of a model: ``python -m benchmarks.advise bert-debug --calls 10000``.

The model is a preset of the zoo, or your own: ``module:function`` or ``file.py:function``, the function returning
``(model, inputs)``. All modes are measured, eager included; the verdict comes first, then the numbers behind it.

Exit codes: 0; 1 where nothing could be advised; 2 on wrong usage; 3 where the disk took no more rows; 130 when stopped.
"""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from benchmarks import advised
from benchmarks.cli import UsageError, did_you_mean, pick, require_zoo, run_command
from benchmarks.machine import cache_environment
from benchmarks.measure import Run, measure, say_where, settings_of
from benchmarks.plan import DTYPES, Case
from benchmarks.process import Worker, WorkerFailure
from benchmarks.run import RUNS, device_of
from benchmarks.startup import Settings

WORKLOAD = "benchmarks.advised"
# (strategy, mode, outer CUDA graph, needs a GPU)
ARMS = (
    ("eager", "default", False, False),
    ("full", "default", False, False),
    ("regional", "default", False, False),
    ("regional", "default", True, True),
    ("full", "reduce-overhead", False, True),
)


def main(
    model: Annotated[str, typer.Argument(help="Preset of the zoo, or module:function that returns (model, inputs).")],
    calls: Annotated[int, typer.Option(help="Number of calls in one process.")],
    size: Annotated[list[str] | None, typer.Option(help="Sizes of a preset's inputs: batch=8,tokens=128.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32 for a preset, the model's own if omitted.")] = None,
    device: Annotated[str | None, typer.Option(help="cuda or cpu; cuda by default if there is a GPU.")] = None,
    timeout: Annotated[float, typer.Option(help="Time limit in seconds for one step of an arm.")] = 900.0,
    resume: Annotated[bool, typer.Option("--resume", help="Skip arms done in --out, for any --calls.")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder or .jsonl file; runs/<date-time> if omitted.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="One process per arm, fewer rounds, no warm start.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of weights, inputs and the order of arms.")] = 0,
) -> int:
    """Measure a model eager and compiled, and say which way takes the least time for a number of calls."""
    require_zoo()
    if calls < 1:
        raise UsageError(f"--calls is {calls}, expected at least 1")
    if timeout <= 0:
        raise UsageError(f"--timeout is {timeout:g}, expected seconds above 0")
    if resume and out is None:
        raise UsageError("--resume continues what --out holds; name its folder")
    _check_name(model)
    sizes = _sizes(size or [], own=advised.is_own(model))
    on = device_of(device)
    if dtype is not None:
        pick("--dtype", [dtype], DTYPES)
    console = Console(soft_wrap=False)
    with settings_of(WORKLOAD, timeout=timeout, quick=quick, seed=seed) as settings:
        console.print(f"inspecting {model}", markup=False, highlight=False)
        facts = _look(settings, model=model, device=on, dtype=dtype, seed=seed, sizes=sizes)
        workload = advised.AdvisedWorkload()
        workload.memory = facts["memory"]
        cases = cases_of(model, on, facts["dtype"], cast=dtype is not None, sizes=sizes)

        def again(case: Case, settings: Settings) -> str:
            words = ["python", "-m", "benchmarks.advise", model, "--calls", str(calls), "--device", on]
            words += ["--dtype", dtype] if dtype else []
            words += [word for name, value in sizes.items() for word in ("--size", f"{name}={value}")]
            return shlex.join([*words, "--seed", str(seed), *(["--quick"] if quick else [])])

        run = Run(workload, on, cases, {}, out or RUNS / time.strftime("%Y%m%d-%H%M%S"), again)
        run.skip_done(resume=resume)

        def conclude(run: Run, console: Console, measured: set[str]) -> int:
            from benchmarks.report import advice
            from benchmarks.report.model import races
            from benchmarks.report.terminal import Regions, render_advice

            regions = Regions(**{name: facts[name] for name in ("found", "declared", "obstacles", "none")})
            results, environments = run.results()
            shown = races(results, environments)
            if shown:
                render_advice(shown[0], calls, regions, console)
            say_where(run, console)
            return 0 if shown and advice.choose(shown[0], calls, "cold") is not None else 1

        return measure(run, settings, console, conclude)


def cases_of(model: str, device: str, dtype: str, *, cast: bool, sizes: Mapping[str, int]) -> list[Case]:
    """The arms on this device, and a second eager one as the A/A control, since eager is the least likely to fail."""
    own = advised.is_own(model)
    example = ", ".join([advised.EXAMPLE, *(f"{name}={value}" for name, value in sizes.items())])
    base = Case(
        family=advised.AdvisedWorkload.family,
        model=model,
        input=(advised.CAST if cast else advised.GIVEN) if own else example,
        dtype=dtype,
        device=device,
        impl="own" if own else "zoo",
    )
    arms = [
        replace(base, strategy=strategy, mode=mode, cuda_graph=cuda_graph)
        for strategy, mode, cuda_graph, gpu in ARMS
        if device != "cpu" or not gpu
    ]
    return [*arms, replace(base, control=True)]


def _check_name(model: str) -> None:
    if advised.is_own(model):
        return
    import zoo

    if model not in zoo.list_models():
        raise UsageError(
            f"the zoo has no model {model!r}; {did_you_mean(model, zoo.list_models())} A model of your own is "
            "module:function"
        )


def _sizes(given: list[str], *, own: bool) -> dict[str, int]:
    """``batch=8,tokens=128`` as numbers."""
    if given and own:
        raise UsageError("--size is of a preset's inputs; a function of your own returns them as they should be")
    sizes = {}
    for part in ",".join(given).split(",") if given else []:
        name, _, value = part.strip().partition("=")
        if not name or not value.isdigit():
            raise UsageError(f"--size: {part!r} is not name=number, such as batch=8")
        sizes[name] = int(value)
    return sizes


def _look(settings: Settings, *, model: str, **question: Any) -> dict[str, Any]:
    """What the model is, asked of a process of its own, which may crash.

    Raises:
        UsageError: If it cannot be measured, saying why.
    """
    worker = Worker(cache_environment(settings.scratch / "look"), timeout=settings.timeout)
    try:
        worker.ask("load", workload=WORKLOAD)
        facts = worker.ask("look", model=model, **question)
    except WorkerFailure as failure:
        raise UsageError(f"{model}: {failure}") from failure
    finally:
        worker.stop()
    if facts["refused"]:
        raise UsageError(facts["refused"])
    return facts


if __name__ == "__main__":
    sys.exit(run_command(main, "python -m benchmarks.advise"))
