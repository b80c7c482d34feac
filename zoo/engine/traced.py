"""What Dynamo traced of a region, kept so that it can be saved: guards, graph or its product, source files."""

from __future__ import annotations

import copy
import enum
import functools
import json
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

# Values that a guard compares, or that it knows by identity; no tensor is in any.
_KEPT = (
    *(bool, int, float, complex, str, bytes, type(None), enum.Enum),
    *(torch.Size, torch.dtype, torch.device, torch.layout, torch.memory_format),
    *(type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType),
)


@dataclass(frozen=True)
class Guard:
    """One guard: its kind and expression in Dynamo's words, its code, and the attribute that an object may not have.

    ``value`` is what the expression had: a ``TensorKind`` in place of a tensor, its type in place of another object.
    """

    kind: str
    name: str
    code: tuple[str, ...]
    attribute: str | None
    value: Any


@dataclass(frozen=True)
class TensorKind:
    """What is compared of a tensor; everything but its values."""

    cls: type
    dtype: torch.dtype
    device: torch.device
    shape: tuple[int, ...]
    stride: tuple[int, ...] | None
    requires_grad: bool
    keys: int

    @classmethod
    def of(cls, tensor: Tensor) -> TensorKind:
        """The kind of a tensor."""
        stride = tensor.stride() if tensor.layout is torch.strided else None
        keys = torch._C._dispatch_keys(tensor).raw_repr()
        return cls(type(tensor), tensor.dtype, tensor.device, (*tensor.shape,), stride, tensor.requires_grad, keys)


@dataclass
class Traced:
    """One compilation. ``product`` runs a direct graph; of another, ``graph`` and ``backend`` are what Inductor got."""

    guards: list[Guard] = field(default_factory=list)
    product: Callable[..., Any] | None = None
    graph: fx.GraphModule | None = None
    backend: Any = None
    files: frozenset[str] = frozenset()
    symbolic: bool = False
    # Of the call that was compiled: the code that Dynamo made, and ``torch_state()``.
    code: types.CodeType | None = None
    state: dict[str, Any] = field(default_factory=dict)


# By Dynamo's number of the compilation.
TRACED: dict[str, Traced] = {}


def torch_state() -> dict[str, Any]:
    """Modes and flags that a graph is specialised on, in plain values. The number of threads is left out."""
    state: dict[str, Any] = json.loads(str(torch._C._dynamo.guards.GlobalStateGuard().__getstate__()))
    del state["num_threads"]
    return {
        **state,
        "included_keys": torch._C._dispatch_tls_local_include_set().raw_repr(),
        "excluded_keys": torch._C._dispatch_tls_local_exclude_set().raw_repr(),
        **{name: ask() for name, ask in MODES.items()},
    }


# What changes between calls and no guard in C++ looks at.
MODES: dict[str, Callable[[], Any]] = {
    "inference_mode": torch.is_inference_mode_enabled,
    "torch_function_modes": torch._C._len_torch_function_stack,
    "default_device": lambda: str(torch.utils._device.CURRENT_DEVICE),
    "hooks_on_saved_tensors": lambda: bool(torch._C._autograd._top_saved_tensors_default_hooks(True)),
}


def note_entry(entry: Any) -> None:
    """Keep the code that Dynamo made for a call, and the state of torch in it."""
    # Numbers start again after a reset.
    if (found := TRACED.get(str(entry.compile_id))) is not None and found.code is None:
        found.code, found.state = entry.code, torch_state()


def note_guards(guards: Sequence[Any]) -> None:
    """Keep the guards that Dynamo is about to filter."""
    if (number := _number()) in TRACED:
        TRACED[number].guards = [_guard(each) for each in guards]


def note_product(run: Callable[..., Any], graph: fx.GraphModule) -> Callable[..., Any]:
    """Keep what runs in place of a direct graph, and return it."""
    TRACED[_number()] = Traced(product=run, **_read(graph))
    return run


def note_graph(backend: Any, graph: fx.GraphModule) -> None:
    """Keep a graph that Inductor is about to compile, and rewrite."""
    TRACED[_number()] = Traced(graph=copy.deepcopy(graph), backend=backend, **_read(graph))


def _number() -> str:
    from torch._guards import CompileContext

    return str(CompileContext.current_compile_id())


def _read(graph: fx.GraphModule) -> dict[str, Any]:
    from torch._guards import TracingContext

    context = TracingContext.try_get()
    codes = [] if context is None else context.traced_code or []
    examples = [each.meta.get("example_value") for each in graph.graph.nodes if each.op == "placeholder"]
    numbers = (torch.SymInt, torch.SymFloat)
    symbolic = any(
        isinstance(each, numbers)
        or (isinstance(each, Tensor) and any(isinstance(size, numbers) for size in (*each.shape, *each.stride())))
        for each in examples
    )
    return {"files": frozenset(each.co_filename for each in codes), "symbolic": symbolic}


def _is_kept(value: Any) -> bool:
    if type(value) in (tuple, list, set, frozenset):
        return all(map(_is_kept, value))
    return isinstance(value, _KEPT)


def _guard(entry: Any) -> Guard:
    original = entry.orig_guard
    made = original.create_fn
    given = (*made.args, *made.keywords.values()) if isinstance(made, functools.partial) else ()
    attribute = next((each for each in given if isinstance(each, str)), None)
    value = entry.value if entry.has_value else None
    if isinstance(value, Tensor):
        value = TensorKind.of(value)
    elif not _is_kept(value):
        value = type(value)
    return Guard(entry.guard_type, original.name, tuple(original.code_list or ()), attribute, value)
