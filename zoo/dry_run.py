"""The first call of a compiled model is run without data before it runs, so that all its kernels compile at once.

While a region is traced its kernels are begun (ahead.py). One that is launched outside of regions would compile at its
first launch, after all that comes before it; and those of a region would wait for the regions before. Run without data,
a call takes the host part of a second, or a few where a model has hundreds of layers and learns, and hands every kernel
to the threads.

A model takes part that has a method ``dry_call``: it takes what ``forward`` takes and returns what is to be run, as a
partial, or None where no kernel would be launched. Whatever has to see data (checks of values, a graph that is sorted)
is done before it returns; and what is run keeps nothing that it computes, but in buffers: it would have no data.
"""

from __future__ import annotations

import functools
import itertools
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_modules
from torch.utils import _pytree as pytree

from zoo import ahead
from zoo.ops.common import triton_runs_on

_log = logging.getLogger(__name__)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def whole_call(model: nn.Module, *args: Any, **kwargs: Any) -> functools.partial[Any]:
    """``dry_call`` of a model whose forward never looks at data, and keeps nothing but in buffers."""
    return functools.partial(model.forward, *args, **kwargs)


def before_first_call(model: nn.Module) -> None:
    """Have the next call of a model, or of each that it holds, begin its kernels. Copies and pickles don't."""
    if not ahead.ENABLED or model._compiled_call_impl is not None:
        return
    if not hasattr(model, "dry_call"):
        for child in model.children():
            before_first_call(child)
        return
    lock = threading.Lock()
    waiting = True

    def first_call(*args: Any, **kwargs: Any) -> Any:
        nonlocal waiting
        # A forward that calls itself is run without data once.
        if not (torch.compiler.is_compiling() or ahead.only_compiles()):
            with lock:  # nobody else calls a model whose weights have no data
                if waiting:
                    waiting = False
                    _try_to_begin(model, args, kwargs)
                    if model._compiled_call_impl is first_call:
                        model._compiled_call_impl = None
        return model._call_impl(*args, **kwargs)

    model._compiled_call_impl = first_call


def _try_to_begin(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    try:
        if _can_begin(model):
            begin_kernels(model, *args, **kwargs)
    except Exception as error:  # what is wrong with the call, the call says
        _log.debug("kernels of %s are left to their first launch: %s", type(model).__name__, error)


def _can_begin(model: nn.Module) -> bool:
    """Whether there are kernels, and nobody else would be shown tensors without data."""
    first = next(model.parameters(), None)
    if first is None or not triton_runs_on(first.device) or torch.cuda.graphs.is_current_stream_capturing():
        return False
    return not any(getattr(torch_modules, f"_global{name}") for name in _HOOKS) and not any(
        getattr(module, name) for module in model.modules() for name in _HOOKS
    )


def begin_kernels(model: nn.Module, *args: Any, **kwargs: Any) -> None:
    """Begin to compile the kernels of a call in the current modes, and of its backward if the model is in training."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    call = model.dry_call(*args, **kwargs)  # type: ignore[operator]
    if call is None:
        return
    mode = FakeTensorMode(allow_fallback_kernels=False, allow_non_fake_inputs=True)
    fake = functools.partial(pytree.tree_map_only, torch.Tensor, mode.from_tensor)
    run = _Run(model)
    tensors = fake(dict(itertools.chain(run.named_parameters(), run.named_buffers())))
    with _no_casts_kept(), _saved_as_it_is(), mode, ahead.only_compiling():
        # The model's own would be written to: running statistics, say.
        outputs = torch.func.functional_call(run, tensors, (call.func, fake(call.args), fake(call.keywords)))
        if not (model.training and torch.is_grad_enabled()):
            return
        given = [each for each in pytree.tree_leaves(outputs) if isinstance(each, torch.Tensor) and each.requires_grad]
        wanted = [each for each in tensors.values() if each.requires_grad]
        if given and wanted:
            # In this thread, which is the one that launches nothing.
            with torch.autograd.set_multithreading_enabled(False):
                torch.autograd.grad(given, wanted, [torch.ones_like(each) for each in given], allow_unused=True)


class _Run(nn.Module):
    """Something to be run with other tensors in place of a model's."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return function(*args, **kwargs)


def _saved_as_it_is() -> torch.autograd.graph.saved_tensors_hooks:
    """No hook of the caller's is shown what the backward needs: a checkpoint's would run the call again."""
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)


@contextmanager
def _no_casts_kept() -> Iterator[None]:
    """Autocast would keep weights that were cast here, which have no data."""
    kept = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(kept)
