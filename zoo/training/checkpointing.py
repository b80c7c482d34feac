"""Activation checkpointing of whole regions: keep a block's input only, run the block again in the backward."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from zoo.compile import plan_of


def checkpoint_regions(
    model: nn.Module,
    cls: type[nn.Module],
    *,
    every: int = 1,
    preserve_rng_state: bool = True,
) -> nn.Module:
    """Keep only the inputs of compiled blocks for the backward, which runs them a second time.

    The second run is the compiled one, so that no graph is added. Call this after ``zoo.compile_regions``;
    ``zoo.uncompile`` undoes both.

    Args:
        model: A model with compiled regions.
        cls: The exact class of the blocks: the repeated one, whose activations are what fills the memory.
        every: Checkpoint each n-th block, the first included: 2 keeps the activations of every other one.
        preserve_rng_state: Draw the same dropout in the second run. ``False`` is a little faster and can be captured
            in a CUDA graph; only where nothing in the blocks is random.

    Returns:
        The same model.

    Raises:
        ValueError: If the model is not compiled, no compiled region is of this class, ``every`` is not positive, its
            blocks are checkpointed already, or some are compiled no more.
    """
    plan = plan_of(model)
    if plan is None:
        raise ValueError(f"{type(model).__name__} has no compiled regions: call zoo.compile_regions(model) first")
    if every < 1:
        raise ValueError(f"every is {every}; 1 checkpoints each block, n each n-th")
    blocks = [module for module in plan.modules_of(model).values() if type(module) is cls]
    if not blocks:
        names = sorted({type(module).__name__ for module in plan.modules_of(model).values()})
        raise ValueError(f"no compiled region is a {cls.__name__}; there are {', '.join(names)}")
    if any(isinstance(block._compiled_call_impl, _Checkpointed) for block in blocks):
        raise ValueError(f"regions of {cls.__name__} are checkpointed already; zoo.uncompile(model) undoes it")
    if eager := sum(block._compiled_call_impl is None for block in blocks):
        raise ValueError(
            f"{eager} of {len(blocks)} regions of {cls.__name__} are eager now, replaced or uncompiled on their own: "
            "call zoo.uncompile(model) and zoo.compile_regions(model) again"
        )
    for block in blocks[::every]:
        call = block._compiled_call_impl
        assert call is not None  # none is eager
        block._compiled_call_impl = _Checkpointed(call, preserve_rng_state)
    return model


def restores_random_state(model: nn.Module) -> bool:
    """Whether the backward of this model puts a random state back."""
    for module in model.modules():
        call = module._compiled_call_impl
        # Whoever watches the calls has wrapped them.
        while call is not None and not isinstance(call, _Checkpointed):
            call = getattr(call, "__wrapped__", None)
        if call is not None and call.preserve_rng_state:
            return True
    return False


class _Checkpointed:
    """A compiled call that is run again in the backward."""

    def __init__(self, call: Callable[..., Any], preserve_rng_state: bool) -> None:
        self._call = call
        self.preserve_rng_state = preserve_rng_state
        functools.update_wrapper(self, call, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(self._call, *args, use_reentrant=False, preserve_rng_state=self.preserve_rng_state, **kwargs)
