"""How a case is compiled: eager, full, regional, hierarchical."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

import zoo
from benchmarks.families.base import Prepared
from benchmarks.plan import CUDA_GRAPH_MODES, Case
from zoo.engine.discover import declared_regions

Call = Callable[..., Any]


def backend() -> str:
    """``inductor``, unless the harness' own tests ask for a lighter one."""
    return os.environ.get("BENCHMARKS_BACKEND", "inductor")


def apply(case: Case, prepared: Prepared) -> Call:
    """Compile ``prepared.model`` as the case says, lazily as ``torch.compile`` does; returns what to call.

    Shapes are static for our own model and, unless they change from call to call, upstream at its documented best.
    Upstream as shipped keeps the default of ``torch.compile``, which its users get: the second shape that a frame meets
    turns symbolic.
    """
    model = prepared.model
    if case.strategy != "eager" and prepared.training is not None and prepared.training.loss_module is not None:
        zoo.compile_regions(prepared.training.loss_module, backend=backend())
    own = {"upstream": prepared.dynamic, "upstream-tuned": prepared.tuned_dynamic}
    dynamic = True if case.dynamic else own.get(case.impl, False)
    mode = None if case.mode == "default" else case.mode
    match case.strategy:
        case "eager":
            return model
        case "full" if prepared.compile_full is not None:
            prepared.compile_full(model, mode=mode, dynamic=dynamic, backend=backend())
            return model
        case "full":
            return torch.compile(model, mode=mode, dynamic=dynamic, backend=backend())
        case "regional":
            if prepared.compile_regions is not None:
                compiled = prepared.compile_regions(model, mode=mode, dynamic=dynamic, backend=backend())
                return model if compiled is None else compiled
            if case.impl not in ("zoo", "own"):
                raise ValueError(f"{case.impl} has no way to compile its regions: Prepared.compile_regions is None")
            zoo.compile_regions(model, mode=mode, dynamic=bool(dynamic), backend=backend())
            if prepared.training is not None and prepared.training.after_compile is not None:
                prepared.training.after_compile(model)
            return model
        case "hierarchical":
            mark_nested_regions(model)
            return torch.compile(model, mode=mode, dynamic=dynamic, backend=backend())
    raise ValueError(f"strategy {case.strategy!r} is none of eager, full, regional, hierarchical")


def mark_nested_regions(model: nn.Module) -> None:
    """Make every region of a zoo model a nested compile region, so that a full trace holds one body a signature.

    The wrapper goes onto a class and not onto a bound method, which ``nested_compile_region`` does not take.
    """
    wanted = {region.cls for region in declared_regions(model)}
    if not wanted:
        raise ValueError(f"{type(model).__name__} declares no regions; hierarchical needs them")
    nested = {
        cls: type(cls.__name__, (cls,), {"forward": torch.compiler.nested_compile_region(cls.forward)})
        for cls in wanted
    }
    found = [module for module in model.modules() if type(module) in wanted]
    if not found:
        raise ValueError(f"none of the regions of {type(model).__name__} occurs in the model")
    for module in found:
        module.__class__ = nested[type(module)]


def marked(case: Case, call: Call) -> Call:
    """For modes with CUDA graphs, say before each call that the outputs of the last one are done with."""
    if case.mode not in CUDA_GRAPH_MODES:
        return call

    def step(*args: Any, **kwargs: Any) -> Any:
        torch.compiler.cudagraph_mark_step_begin()
        return call(*args, **kwargs)

    return step


@contextmanager
def execution_mode(case: Case) -> Iterator[None]:
    """The grad mode that every call of the case runs in, the first one included."""
    with torch.inference_mode() if case.workload == "inference" else torch.enable_grad():
        yield
