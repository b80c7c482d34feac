"""The patterns of docs/patterns as a family: each as people write it (``upstream``) against how the zoo writes it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.families.base import Prepared, Workload, converted, count_parameters, dtype_of, tensors
from benchmarks.patterns import (
    buckets,
    few_signatures,
    glue,
    layer_values,
    no_branches,
    once_outside,
    outer_cuda_graph,
    own_operators,
    static_cache,
)
from benchmarks.patterns.pattern import Pattern, Sizes, compile_blocks
from benchmarks.plan import Case

PATTERNS: dict[str, Pattern] = {
    "layer-values": layer_values.PATTERN,
    "once-outside": once_outside.PATTERN,
    "static-cache": static_cache.PATTERN,
    "outer-cuda-graph": outer_cuda_graph.PATTERN,
    "buckets": buckets.PATTERN,
    "few-signatures": few_signatures.PATTERN,
    "own-operators": own_operators.PATTERN,
    "glue": glue.PATTERN,
    "no-branches": no_branches.PATTERN,
}
BYTES_FORMULA = "Every weight is read once, inputs are read and the output is written."


class PatternsWorkload(Workload):
    """Inference of small models with random weights, ``small`` for a CPU and ``large`` for a GPU.

    Regions against regions: what goes wrong between them does not show where the whole model is one graph, so ``full``
    is left to the families.
    """

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
        """A bound: in between, nothing in these models is as large as thirty-two times their input."""
        with torch.device("meta"):
            weights = count_parameters(PATTERNS[case.model].before(**_model_sizes(case)))
        given = sum(tensor.numel() for tensor in tensors(_draw(case, seed=0)))
        return (weights + 32 * given) * (dtype_of(case).itemsize + 8)

    def build(self, case: Case, *, data_root: str | None, seed: int) -> Prepared:
        pattern, device, dtype = PATTERNS[case.model], torch.device(case.device), dtype_of(case)
        model = before = _before(case, seed).to(device, dtype)
        if case.impl == "zoo":
            model = pattern.after(**_model_sizes(case)).eval().requires_grad_(False).to(device, dtype)
            model.load_state_dict(before.state_dict())
        inputs = converted(_draw(case, seed=seed), device, dtype)
        with torch.inference_mode():
            written = before(**inputs).numel() * dtype.itemsize

        def reference() -> Tensor:
            # Made anew, so that an arm holds nothing that it does not run on: its memory is measured.
            exact = _before(case, seed).to(device, dtype).double()
            output: Tensor = exact(**converted(inputs, device, torch.float64))
            return output

        return Prepared(
            model=model,
            inputs=inputs,
            compile_regions=None if case.impl == "zoo" else pattern.compile_before or compile_blocks,
            reference=reference,
            bytes=sum(tensor.nbytes for tensor in (*model.parameters(), *tensors(inputs))) + written,
            bytes_formula=BYTES_FORMULA,
            data="generated (normal)",
            sizes={**_model_sizes(case), **_input_sizes(case), "parameters": count_parameters(model)},
        )


def _before(case: Case, seed: int) -> nn.Module:
    """The model as people write it, with the weights that both sides have."""
    torch.manual_seed(seed)
    return PATTERNS[case.model].before(**_model_sizes(case)).eval().requires_grad_(False)


def _model_sizes(case: Case) -> Sizes:
    return PATTERNS[case.model].model_sizes if case.input == "large" else {}


def _input_sizes(case: Case) -> Sizes:
    return PATTERNS[case.model].input_sizes if case.input == "large" else {}


def _draw(case: Case, *, seed: int) -> dict[str, Any]:
    return PATTERNS[case.model].inputs(torch.Generator().manual_seed(seed), **_input_sizes(case))


WORKLOAD = PatternsWorkload()
