"""Differences between the supported releases of torch, all handled here."""

from __future__ import annotations

import contextlib
import gc
import inspect
import re
import sys
from collections.abc import Iterator
from typing import Any

import torch

OLDEST_TORCH = (2, 11)
# For each difference, the first release that was seen to have it.
FALLBACKS_ARE_LAZY = (2, 15)
GUARDS_SEE_TENSORS = (2, 14)
ATTENTION_KEEPS_STRIDES = (2, 14)

# Dynamo's own limit is a backstop far above any honest budget: on reaching it a frame falls to eager or raises,
# depending on the release and on fullgraph. Our own count is what enforces budgets.
RECOMPILE_LIMIT = 1024


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


_TORCH = _release(torch.__version__)


def refuse_old_torch(version: str) -> None:
    """Raise an ImportError that names the required torch, before the import of something that an old torch lacks."""
    if _release(version) < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        raise ImportError(f"zoo needs torch {oldest} or newer, this is torch {version}; pip install --upgrade torch")


refuse_old_torch(torch.__version__)


def compile_limit_kwargs() -> dict[str, Any]:
    """Raise Dynamo's recompile limit for one ``torch.compile`` call.

    From 2.13 the limit is a keyword. Before, it exists only as process-wide configuration that is read at the first
    call, so patching it around ``.compile()`` would have no effect: there it is raised for the process.
    """
    # Importing Dynamo takes a second and brings Triton in: not before something is compiled.
    from torch._dynamo import config

    # The accumulated limit has no keyword in any release.
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, RECOMPILE_LIMIT)
    if "recompile_limit" in inspect.signature(torch.compile).parameters:
        return {"recompile_limit": RECOMPILE_LIMIT}
    config.recompile_limit = max(config.recompile_limit, RECOMPILE_LIMIT)
    return {}


def name_fallbacks_alone() -> None:
    """Make Inductor's log of an operator without a lowering leave out the operator's arguments.

    Torch 2.11 formats them for the log even if it is not shown, with all that each argument is computed from. Where
    each operator reads the one before twice, as in residual blocks, the text doubles each time: a chain of thirty never
    ends. Torch 2.14.1 formats on demand. Before Inductor is imported this does nothing.
    """
    exc = sys.modules.get("torch._inductor.exc")
    if exc is not None and _TORCH < FALLBACKS_ARE_LAZY:
        exc.OperatorIssue.operator_str = staticmethod(lambda target, args, kwargs: f"  target: {target}")


def full_guards() -> dict[str, Any]:
    """Settings of Dynamo under which guards see that a parameter was cast, frozen or unfrozen in place.

    2.11 checks no tensor of a module whose dicts are unchanged (pytorch 177525): a layer that is unfrozen after its
    first steps would silently get no gradients.
    """
    return {} if _TORCH >= GUARDS_SEE_TENSORS else {"skip_tensor_guards_with_matching_dict_tags": False}


@contextlib.contextmanager
def configured(config: Any, **values: Any) -> Iterator[None]:
    """Set entries of a configuration of torch as its ``patch`` does, by a faster function where torch has it."""
    faster = getattr(config, "_make_closure_patcher", None)  # ``patch`` defines a class in each call
    if faster is None:
        with config.patch(**values):
            yield
        return
    revert = faster(**values)()
    try:
        yield
    finally:
        revert()


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Pause the garbage collector."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextlib.contextmanager
def only_compiling() -> Iterator[None]:
    """Disable two slow and useless parts of a compilation: garbage collection, and the timing of guards.

    A compilation makes many objects, and each collection visits those of the whole process. Dynamo empties the
    processor's caches for each graph, to log how long its guards take.
    """
    import torch._dynamo.guards

    module: Any = torch._dynamo.guards
    timing = getattr(module, "profile_guard_manager", None)
    module.profile_guard_manager = lambda *_: 0.0
    try:
        with no_garbage_collection():
            yield
    finally:
        module.profile_guard_manager = timing


@contextlib.contextmanager
def strides_as_compiled() -> Iterator[None]:
    """Context in which eager ``nn.MultiheadAttention`` returns tensors with the strides of compiled code.

    Before 2.14 its eager fast path returns others, so the fast path is disabled.
    """
    mha = torch.backends.mha
    before = mha.get_fastpath_enabled()
    mha.set_fastpath_enabled(before and _TORCH >= ATTENTION_KEEPS_STRIDES)
    try:
        yield
    finally:
        mha.set_fastpath_enabled(before)
