"""What a pattern is to the harness, and what compiling one of its models costs, counted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import zoo
from benchmarks.compiler import Recorder
from zoo.engine.discover import declared_regions

Sizes = Mapping[str, int]

RECOMPILE_LIMIT = 8  # the default of torch.compile


@dataclass(frozen=True, kw_only=True)
class Pattern:
    """One thing written in two ways that compute the same.

    Args:
        before: Makes the model as people write it. Its blocks are in ``model.blocks``.
        after: Makes the model as the zoo writes it, with declared regions and weights of the same names.
        inputs: Makes the keyword arguments of one call, on the CPU in float32, from a generator.
        model_sizes: What ``before`` and ``after`` take for a race on a GPU; left out, they have small defaults.
        input_sizes: The same for ``inputs``.
        compile_before: How people compile the blocks, where it is not ``block.compile()`` on each.
    """

    before: Callable[..., nn.Module]
    after: Callable[..., nn.Module]
    inputs: Callable[..., dict[str, Any]]
    model_sizes: Sizes = field(default_factory=dict)
    input_sizes: Sizes = field(default_factory=dict)
    compile_before: Callable[..., None] | None = None


def compile_blocks(model: nn.Module, **options: Any) -> None:
    """Regional compilation as it is done by hand: ``block.compile()`` on each of ``model.blocks``."""
    blocks: Any = model.blocks
    for block in blocks:
        block.compile(**options)


@torch.inference_mode()
def match(before: nn.Module, after: nn.Module, call: Mapping[str, Any]) -> None:
    """Give ``after`` the weights of ``before``, and hold it to the same output.

    Raises:
        AssertionError: If the outputs differ.
        RuntimeError: If names or shapes of weights do.
    """
    after.load_state_dict(before.state_dict())
    torch.testing.assert_close(after(**call), before(**call))


@dataclass(frozen=True)
class Counts:
    """What compiling cost, but for the seconds."""

    graphs: int
    breaks: int
    recompiles: int


def count(model: nn.Module, *calls: Mapping[str, Any], **options: Any) -> Counts:
    """Compile the blocks of a model, make these calls without gradients, and count what the compiler did.

    A model that declares regions is compiled by ``zoo.compile_regions`` and held to its budgets; any other block by
    block. No code is generated, so it takes a second anywhere. The model is left eager.

    Args:
        model: Of a pattern, or any model with ``blocks``.
        calls: Keyword arguments, a mapping a call.
        options: What ``torch.compile`` takes.

    Raises:
        zoo.BudgetError: If a declared region costs more than it declares.
    """
    from torch._dynamo import config as dynamo_config

    torch.compiler.reset()
    zoo.uncompile(model)
    options.setdefault("backend", "aot_eager")
    recorder = Recorder(model)
    with torch.inference_mode(), recorder.watching_signatures():
        _call(model, calls)
    try:
        if declared_regions(model):
            zoo.compile_regions(model, **options)
            with torch.inference_mode(), zoo.enforce_budget(model):
                _call(model, calls)
        else:
            compile_blocks(model, **options)
            # Before torch 2.13 the zoo raises the limit for the whole process.
            with torch.inference_mode(), dynamo_config.patch(recompile_limit=RECOMPILE_LIMIT):
                _call(model, calls)
    finally:
        zoo.uncompile(model)
    facts = recorder.facts()
    return Counts(facts.graphs, len(facts.breaks), len(facts.recompiles))


def _call(model: nn.Module, calls: Iterable[Mapping[str, Any]]) -> None:
    for inputs in calls:
        model(**inputs)
