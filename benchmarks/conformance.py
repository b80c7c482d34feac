"""How many graphs models of other libraries cost by regions, and by what else compiles them.

python -m benchmarks.conformance --model "transformers Bert"            measure one, or all without it
python -m benchmarks.conformance --update docs/conformance.md           write what was measured into the page

Nothing is timed: a backend counts the graphs and the operations in them, which compile time grows with.
"""

from __future__ import annotations

import importlib.util
import re
import sys
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch.utils import _pytree as pytree

import zoo
from benchmarks.cli import run_command
from benchmarks.foreign import MODELS, Foreign
from zoo.engine.step_buffers import tensors_in

OURS = "zoo"
COLUMNS = ("eval", "three sizes", "training", "loop")
ARMS = (OURS, "torch.compile", "accelerate", "diffusers")
COUNT = re.compile(r"([a-z.]+) (\d+) \((\d+)\)")
RULE = "|---|---|---|---|---|---|---|---|---|"


@dataclass
class Count:
    """A backend that counts graphs and the operations in them, and runs them as they are."""

    graphs: int = 0
    operations: int = 0

    def __call__(self, graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        self.graphs += 1
        self.operations += sum(node.op.startswith("call") for node in graph.graph.nodes)
        return graph.forward

    def __str__(self) -> str:
        return f"{self.graphs} ({self.operations})"


def compiled(arm: str, model: Any, backend: Count) -> Any:
    """The model, compiled by one of the arms; None where its library has no such thing for it."""
    if arm == OURS:
        return zoo.compile_regions(model, backend=backend)
    if arm == "torch.compile":
        model.compile(backend=backend)  # in place, so that generate() runs it as well
    elif arm == "accelerate":
        from accelerate.utils import compile_regions

        return compile_regions(model, backend=backend)
    elif not getattr(model, "_repeated_blocks", None):
        return None
    else:
        model.compile_repeated_blocks(backend=backend)
    return model


def call(model: Any, foreign: Foreign, size: int) -> None:
    """A call at a size, in training with its backward."""
    outputs = model(**foreign.inputs(size))
    if model.training:
        found = [each.sum() for each in tensors_in(pytree.tree_leaves(outputs)) if each.requires_grad]
        torch.stack(found).sum().backward()


def counts(foreign: Foreign, arm: str) -> dict[str, str]:
    """Graphs and operations by column; the name of the error where a call fails."""
    found: dict[str, str] = {}
    at_sizes = [partial(call, foreign=foreign, size=size) for size in foreign.sizes]
    for first, last, calls in (
        ("eval", "three sizes", at_sizes),
        ("training", "training", at_sizes[:1]),
        ("loop", "loop", [foreign.loop] if foreign.loop else []),
    ):
        torch.compiler.reset()
        torch.manual_seed(0)
        backend = Count()
        try:
            model = compiled(arm, foreign.make().train(first == "training"), backend) if calls else None
            if model is None:
                continue
            for each in calls:
                with torch.set_grad_enabled(first == "training"):
                    each(model)
                found.setdefault(first, str(backend))
                found[last] = str(backend)
        except Exception as error:
            found = {first: type(error).__name__, last: type(error).__name__, **found}
    return found


def row(name: str, arms: Iterable[str] = ARMS) -> str:
    """A line of the table."""
    foreign = MODELS[name]
    reports = [
        zoo.find_regions(foreign.make().train(training), inputs=foreign.inputs(foreign.sizes[0]))
        for training in (False, True)
    ]
    regions = [f"{len(found.modules)} {found.name}" for found in reports[0].regions]
    by_arm = {arm: counts(foreign, arm) for arm in arms}
    columns = ["<br>".join(f"{arm} {by[each]}" for arm, by in by_arm.items() if each in by) for each in COLUMNS]
    predicted = ", ".join(report.graphs for report in reports)
    cells = [name, "<br>".join(regions) or "none", f"{reports[0].coverage:.0%}", predicted, *columns, foreign.why]
    return f"| {' | '.join(cells)} |"


def losses(line: str) -> list[str]:
    """Where a line shows more operations than another way has, a prediction that is not met, or no region."""
    _, _, regions, _, predicted, *columns, _, _ = (cell.strip() for cell in line.split("|"))
    found = ["no region"] if regions == "none" else []
    by_column = [{arm: (int(n), int(m)) for arm, n, m in COUNT.findall(cell.replace("<br>", " "))} for cell in columns]
    for column, cell, by_arm in zip(COLUMNS, columns, by_column, strict=True):
        if cell and OURS not in by_arm:
            found.append(f"{column} fails")
        elif regions != "none":
            found += [f"{column}: {arm}" for arm, (_, operations) in by_arm.items() if operations < by_arm[OURS][1]]
    for said, by_arm in zip(predicted.split(", "), by_column[::2], strict=True):
        at_least, graphs = said.startswith("at least"), by_arm.get(OURS, (0, 0))[0]
        if graphs < (wanted := int(said.split()[-1])) or (graphs > wanted and not at_least):
            found.append(f"predicted {said}, seen {graphs}")
    return found


def rows_of(text: str) -> dict[str, str]:
    """Lines of a page by model."""
    return {name: line for line in text.splitlines() if (name := line.split(" | ")[0].removeprefix("| ")) in MODELS}


def main(
    model: Annotated[
        list[str] | None, typer.Option(help="Names in the table; all that are installed if omitted.")
    ] = None,
    update: Annotated[Path | None, typer.Option(help="Page whose lines are replaced by what is measured.")] = None,
) -> int:
    """Count graphs of foreign models, compiled by regions and otherwise."""
    warnings.simplefilter("ignore")
    text = update.read_text(encoding="utf-8") if update else ""
    lines = rows_of(text)
    for name in model or MODELS:
        if importlib.util.find_spec(name.split()[0]) is None:
            print(f"{name}: not installed")
            continue
        lines[name] = row(name)
        print(lines[name], *losses(lines[name]), sep="\n  ", flush=True)
        if update:
            start = text.index(RULE) + len(RULE)
            table = "".join(f"\n{lines[name]}" for name in MODELS if name in lines)
            update.write_text(f"{text[:start]}{table}\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main, "python -m benchmarks.conformance"))
