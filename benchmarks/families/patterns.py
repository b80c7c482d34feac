"""The patterns of docs/patterns as a family: the usual code (``upstream``) against the zoo's code.

The raced code is only on the pages: their titled blocks form the module of a pattern, with ``Before``, ``After`` and
``inputs``.
"""

from __future__ import annotations

import functools
import re
import sys
import types
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import zoo
from benchmarks.compiler import Recorder
from benchmarks.families.base import Prepared, Workload, converted, count_parameters, dtype_of, tensors
from benchmarks.plan import Case
from zoo.engine.discover import declared_regions

Sizes = Mapping[str, int]

PAGES = Path(__file__).resolve().parents[2] / "docs/patterns"
TITLED = re.compile(r'^```python title="[^"]+"\n(.*?)^```$', re.MULTILINE | re.DOTALL)
# Sizes of a race on a GPU: arguments of Before and After, and arguments of inputs. The defaults are small.
PATTERNS: dict[str, tuple[Sizes, Sizes]] = {
    "layer-values": ({"width": 1024, "depth": 24}, {"batch": 64, "width": 1024}),
    "once-outside": ({"width": 64, "depth": 8}, {"nodes": 20_000, "edges": 200_000, "width": 64}),
    "static-cache": ({"width": 256, "depth": 8}, {"batch": 4, "steps": 8, "past": 1024, "depth": 8, "width": 256}),
    "outer-cuda-graph": ({"width": 1024, "depth": 24}, {"batch": 16, "width": 1024}),
    "buckets": ({"width": 256, "depth": 8}, {"batch": 16, "width": 256, "scale": 1}),
    "few-signatures": ({"width": 128, "stages": 4, "depth": 4}, {"batch": 1024, "width": 128}),
    "own-operators": ({"width": 512, "depth": 16}, {"batch": 256, "width": 512}),
    "glue": ({"width": 64, "stages": 4, "depth": 4}, {"rows": 400_000, "width": 64}),
    "no-branches": ({"width": 512, "depth": 16}, {"batch": 256, "width": 512}),
}
BYTES_FORMULA = "Every weight is read once, inputs are read and the output is written."
RECOMPILE_LIMIT = 8  # the default of torch.compile


@functools.cache
def pattern(name: str) -> Any:
    """The module made of the titled blocks of a pattern's page."""
    path = PAGES / f"{name}.md"
    text = path.read_text(encoding="utf-8")
    module = types.ModuleType(f"patterns_{name.replace('-', '_')}")
    sys.modules[module.__name__] = module  # the compiler looks classes up by their module's name
    for block in TITLED.finditer(text):
        # Leading blank lines make errors and the compiler's reasons name the page's line.
        source = "\n" * text.count("\n", 0, block.start(1)) + block[1]
        exec(compile(source, str(path), "exec"), module.__dict__)
    return module


class PatternsWorkload(Workload):
    """Inference of small models with random weights, ``small`` for a CPU and ``large`` for a GPU."""

    family = "patterns"
    models = tuple(PATTERNS)
    inputs = ("small", "large")
    gpu_dtypes = ("bfloat16", "float32", "float16")
    cpu_race = ("layer-values", "small")
    gpu_races = tuple((model, "large") for model in PATTERNS)

    def cannot(self, case: Case) -> str | None:
        if case.impl == "upstream-tuned":
            return "a pattern has two sides, before (upstream) and after (zoo)"
        if case.strategy in ("full", "hierarchical"):
            return f"patterns are about regions; {case.strategy} is raced in the families"
        return None

    def estimate(self, case: Case, *, reference: bool) -> int:
        """An upper bound: intermediate tensors of these models are less than thirty-two times their input."""
        with torch.device("meta"):
            weights = count_parameters(pattern(case.model).Before(**_sizes(case)[0]))
        given = sum(tensor.numel() for tensor in tensors(_draw(case, seed=0)))
        return (weights + 32 * given) * (dtype_of(case).itemsize + 8)

    def build(self, case: Case, *, data_root: str | None, seed: int) -> Prepared:
        device, dtype = torch.device(case.device), dtype_of(case)
        model_sizes, input_sizes = _sizes(case)
        model = before = _before(case, seed).to(device, dtype)
        if case.impl == "zoo":
            model = pattern(case.model).After(**model_sizes).eval().requires_grad_(False).to(device, dtype)
            model.load_state_dict(before.state_dict())
        inputs = converted(_draw(case, seed=seed), device, dtype)
        with torch.inference_mode():
            written = before(**inputs).numel() * dtype.itemsize

        def reference() -> Tensor:
            # Rebuilt for the reference, so that an arm's measured memory includes only its own model.
            exact = _before(case, seed).to(device, dtype).double()
            output: Tensor = exact(**converted(inputs, device, torch.float64))
            return output

        def compile_theirs(model: nn.Module, **options: Any) -> None:
            if case.model == "outer-cuda-graph" and options.get("backend", "inductor") == "inductor":
                options["mode"] = "reduce-overhead"
            compile_blocks(model, **options)

        return Prepared(
            model=model,
            inputs=inputs,
            compile_regions=None if case.impl == "zoo" else compile_theirs,
            reference=reference,
            bytes=sum(tensor.nbytes for tensor in (*model.parameters(), *tensors(inputs))) + written,
            bytes_formula=BYTES_FORMULA,
            data="generated (normal)",
            sizes={**model_sizes, **input_sizes, "parameters": count_parameters(model)},
        )


def _before(case: Case, seed: int) -> nn.Module:
    """The model in the usual style, with the weights of both sides."""
    torch.manual_seed(seed)
    model: nn.Module = pattern(case.model).Before(**_sizes(case)[0])
    return model.eval().requires_grad_(False)


def _sizes(case: Case) -> tuple[Sizes, Sizes]:
    return PATTERNS[case.model] if case.input == "large" else ({}, {})


def _draw(case: Case, *, seed: int) -> dict[str, Any]:
    drawn: dict[str, Any] = pattern(case.model).inputs(torch.Generator().manual_seed(seed), **_sizes(case)[1])
    return drawn


def compile_blocks(model: nn.Module, **options: Any) -> None:
    """Regional compilation by hand: ``block.compile()`` on each of ``model.blocks``."""
    blocks: Any = model.blocks
    for block in blocks:
        block.compile(**options)


# What the pages assert ------------------------------------------------------------------------------------------------


@torch.inference_mode()
def match(before: nn.Module, after: nn.Module, call: Mapping[str, Any]) -> None:
    """Copy the weights of ``before`` to ``after``, and assert equal outputs."""
    after.load_state_dict(before.state_dict())
    torch.testing.assert_close(after(**call), before(**call))


@dataclass(frozen=True)
class Counts:
    graphs: int
    breaks: int
    recompiles: int


def count(model: nn.Module, *calls: Mapping[str, Any], **options: Any) -> Counts:
    """Compile the blocks of a model, make these calls without gradients, and count the compiler's graphs and breaks.

    A model that declares regions is compiled by ``zoo.compile_regions`` within its budgets; any other with ``blocks``
    block by block. ``calls`` are keyword arguments, ``options`` those of ``torch.compile``. No code is generated, so it
    takes a second on any machine. The model stays eager.
    """
    from torch._dynamo import config as dynamo_config

    torch.compiler.reset()
    zoo.uncompile(model)
    options.setdefault("backend", "aot_eager")
    recorder = Recorder(model)
    with torch.inference_mode(), recorder.watching_signatures():
        for inputs in calls:
            model(**inputs)
    declared = bool(declared_regions(model))
    (zoo.compile_regions if declared else compile_blocks)(model, **options)
    # Before torch 2.13 the zoo raises the limit for the whole process.
    limit = zoo.enforce_budget(model) if declared else dynamo_config.patch(recompile_limit=RECOMPILE_LIMIT)
    try:
        with torch.inference_mode(), limit:
            for inputs in calls:
                model(**inputs)
    finally:
        zoo.uncompile(model)
    facts = recorder.facts()
    return Counts(facts.graphs or 0, len(facts.breaks), len(facts.recompiles))


WORKLOAD = PatternsWorkload()
