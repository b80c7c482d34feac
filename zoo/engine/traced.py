"""What Dynamo traced of a region: guards, graph and source files, which ``save_compiled`` writes.

A trace lives as long as a region runs its code, and holds no weight and no input.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import json
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
import torch.utils._device
from torch import Tensor, fx

# A function that runs in place of a graph, a node or a launch.
Run = Callable[..., Any]

# Values that a guard compares, or that it knows by identity; no tensor is in any.
_KEPT = (
    *(bool, int, float, complex, str, bytes, type(None), enum.Enum),
    *(torch.Size, torch.dtype, torch.device, torch.layout, torch.memory_format),
    *(type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType),
)
# Modes that change between calls and that no guard in C++ checks.
MODES: dict[str, Callable[[], Any]] = {
    "inference_mode": torch.is_inference_mode_enabled,
    "torch_function_modes": torch._C._len_torch_function_stack,
    "default_device": lambda: str(torch.utils._device.CURRENT_DEVICE),
    "hooks_on_saved_tensors": lambda: bool(torch._C._autograd._top_saved_tensors_default_hooks(True)),
}


class TensorKind(NamedTuple):
    """The properties of a tensor that are compared: all but its values."""

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


class Guard(NamedTuple):
    """One guard: its kind and expression in Dynamo's words, its code, and the attribute that an object must not have.

    ``value`` is what the expression had: a ``TensorKind`` in place of a tensor, its type in place of another object.
    """

    kind: str
    name: str
    code: tuple[str, ...]
    attribute: str | None
    value: Any


class Traced:
    """One compilation: the graph that Dynamo traced, which a backend may rewrite to the same effect.

    A direct graph is not kept, only its ``product``, which runs it. ``by_inductor`` compiles any other from the graph
    and fake inputs.
    """

    def __init__(self, graph: fx.GraphModule, *, product: Run | None = None, by_inductor: Run | None = None) -> None:
        from torch._guards import CompileContext, TracingContext

        context = TracingContext.try_get()
        inputs = [each.meta.get("example_value") for each in graph.graph.find_nodes(op="placeholder")]
        sizes = [size for x in inputs if isinstance(x, Tensor) for size in (*x.shape, *x.stride())]
        self.graph = graph if product is None else None
        self.product = product
        self.by_inductor = by_inductor
        self.symbolic = any(isinstance(each, torch.SymInt) for each in sizes)
        self.files = {each.co_filename for each in (context and context.traced_code) or ()}
        self.guards: list[Guard] = []
        # Of the call that was compiled: the code that Dynamo made, and ``torch_state()``.
        self.code: types.CodeType | None = None
        self.state: dict[str, Any] = {}
        if _new is not None:
            _new.append(self)
            _traced[str(CompileContext.current_compile_id())] = self


# By Dynamo's number of the compilation, which begins again after a reset.
_traced: WeakValueDictionary[str, Traced] = WeakValueDictionary()
_new: list[Traced] | None = None


@contextlib.contextmanager
def tracing() -> Iterator[None]:
    """Keep new traces alive until a region holds them; for one thread at a time."""
    global _new
    before, _new = _new, []
    try:
        yield
    finally:
        _new = before


def note_guards(guards: Sequence[Any]) -> None:
    """Keep the guards that Dynamo is about to filter."""
    from torch._guards import CompileContext

    if (found := _traced.get(str(CompileContext.current_compile_id()))) is not None:
        found.guards = [_guard(each) for each in guards]


def traced_of(entry: Any) -> Traced | None:
    """What Dynamo traced for an entry of its cache that has just served a call."""
    found = _traced.get(str(entry.compile_id))
    if found is not None and found.code is None:
        found.code, found.state = entry.code, torch_state()
    return found if found is not None and found.code is entry.code else None


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


def _is_kept(value: Any) -> bool:
    if type(value) in (tuple, list, set, frozenset):
        return all(map(_is_kept, value))
    return isinstance(value, _KEPT)
