"""Activation checkpointing of whole blocks: keep a block's input only, run the block again in the backward."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from zoo import validate
from zoo.engine.call import call_of, outermost_call, set_call
from zoo.engine.compile import compiled_plan
from zoo.engine.discover import declared_regions
from zoo.engine.lifted import tensors_of


def checkpoint_regions(
    model: nn.Module, cls: type[nn.Module], *, every: int = 1, preserve_rng_state: bool = True
) -> nn.Module:
    """Keep only the inputs of blocks for the backward, which runs each block a second time; returns the same model.

    A block is a region or contains some, and all of it runs again. The second run uses the code compiled for the first
    and changes no running statistics. Call this after ``zoo.compile_regions``; ``zoo.uncompile`` undoes both.

    Args:
        model: A model with compiled regions.
        cls: The exact class of the blocks, usually the repeated one, whose activations fill the memory.
        every: Checkpoint each n-th block, the first included: 2 keeps the activations of every other one.
        preserve_rng_state: Draw the same dropout in the second run. ``False`` is a little faster and can be captured in
            a CUDA graph; only where nothing in the blocks is random.

    Raises:
        TypeError: If ``cls`` is no class.
        ValueError: If the model is not compiled, has no block of this class, or is checkpointed already.
    """
    plan = compiled_plan(model)
    if not isinstance(cls, type):
        raise TypeError(f"cls is {cls!r}, expected the class of the blocks")
    validate.count("every", every)
    regions = set(plan.modules_of(model).values())
    # A region of our kernels alone stays eager: a module around such regions is a block too.
    declared = {region.cls for region in declared_regions(model)}
    held = regions.union(module for module in model.modules() if type(module) in declared)
    blocks = [each for each in model.modules() if type(each) is cls and not held.isdisjoint(each.modules())]
    if not blocks:
        names = sorted({type(module).__name__ for module in regions})
        raise ValueError(f"no {cls.__name__} is or contains a compiled region; regions are of {', '.join(names)}")
    if cls.forward is nn.Module.forward:
        raise ValueError(f"a {cls.__name__} is never called; name the class of the modules in it")
    if any(isinstance(outermost_call(block), _Checkpointed) for block in blocks):
        raise ValueError(f"regions of {cls.__name__} are checkpointed already; zoo.uncompile(model) undoes it")
    if eager := sum(block in regions and outermost_call(block) is None for block in blocks):
        raise ValueError(f"{eager} of {len(blocks)} regions of {cls.__name__} are eager now: compile the model again")
    for block in blocks[::every]:
        call = outermost_call(block) or block._call_impl
        set_call(block, _Checkpointed(call, block, model, preserve_rng_state))
    return model


def restores_random_state(model: nn.Module) -> bool:
    """Whether the backward of this model puts a random state back."""
    calls = (call_of(module, _Checkpointed) for module in model.modules())
    return any(call is not None and call.preserve_rng_state for call in calls)


class _Checkpointed:
    """A call of a block that is run again in the backward."""

    def __init__(self, call: Callable[..., Any], block: nn.Module, model: nn.Module, preserve_rng_state: bool) -> None:
        self._call = call
        self.preserve_rng_state = preserve_rng_state
        # Strong references would be a cycle.
        self._block, self._model = weakref.ref(block), weakref.ref(model)
        self._has_buffers = any(True for _ in model.buffers())
        functools.update_wrapper(self, call, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": self.preserve_rng_state}
        block, model = self._block(), self._model()
        if self._has_buffers and block is not None and model is not None:
            # Some buffers are in the block; others are passed to it.
            own = set(model.buffers())
            passed = [each for each in tensors_of((args, kwargs)) if each in own]
            buffers = {*block.buffers(), *passed}
            options["context_fn"] = lambda: (nullcontext(), _Unmoved(buffers))  # of the first run and of the second
        return checkpoint(self._call, *args, **options, **kwargs)


class _Unmoved(AbstractContextManager[None]):
    """Put buffers back: the second run must not move running statistics again. Each backward enters it once."""

    def __init__(self, buffers: Collection[Tensor]) -> None:
        self._buffers = buffers
        self._before: list[Tensor] = []

    def __enter__(self) -> None:
        self._before = [buffer.clone() for buffer in self._buffers]

    def __exit__(self, *error: object) -> None:
        for buffer, value in zip(self._buffers, self._before, strict=True):
            # Through .data, for autograd refuses tensors that were written after a forward saved them.
            buffer.data.copy_(value)
        self._before = []
