"""What a captured step reads and writes: buffers for its inputs, and the weights of the modules that it reaches."""

from __future__ import annotations

import functools
import operator
import types
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from zoo.engine.signature import PLAIN, is_torch_class, names_in


def is_step_input(tensor: torch.Tensor) -> bool:
    """Whether this is an input buffer of a captured step, whose contents change between replays.

    Whatever Python derives from it and remembers (a prepared graph, a mask) would be baked into the CUDA graph.
    """
    return getattr(tensor, "_is_step_input", False)


def is_captured(device: torch.device) -> bool:
    """Whether what runs on the device now goes into a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def is_constant(value: Any) -> bool:
    """Whether this is a plain value, which a CUDA graph can only hold as it was."""
    return isinstance(value, PLAIN)


def check_leaves(leaves: Iterable[Any]) -> None:
    """ValueError for a tensor that requires grad, TypeError for anything but strided tensors and plain values."""
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            if leaf.requires_grad:
                raise ValueError(f"input {describe([leaf])} requires grad; run backward inside the step, or detach it")
            if leaf.layout is not torch.strided:
                raise TypeError(
                    f"input {describe([leaf])} is {leaf.layout}; only strided tensors are copied in: name it static="
                )
        elif not is_constant(leaf):
            remedy = "give it as a dict" if isinstance(leaf, Mapping) else "name it in static="
            raise TypeError(f"an input is a {type(leaf).__name__}, which cannot be copied in; {remedy}")


def make_buffer(leaf: Any) -> torch.Tensor | None:
    """A static copy of the same kind: an inference tensor only where the example was one, or blocks would recompile."""
    if not isinstance(leaf, torch.Tensor):
        return None
    with torch.inference_mode(leaf.is_inference()), torch.no_grad():
        buffer = torch.empty_like(leaf).copy_(leaf)
    buffer._is_step_input = True  # type: ignore[attr-defined]
    return buffer


def flatten_outputs(outputs: Any) -> tuple[list[Any], Any]:
    """Output leaves without autograd history, and their pytree structure."""
    leaves, spec = pytree.tree_flatten(outputs)
    return [leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], spec


def tensors_in(values: Iterable[Any], depth: int = 4) -> list[torch.Tensor]:
    """Tensors in values, and at most ``depth`` levels deep in containers and attributes of objects."""
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif depth and not isinstance(value, type | types.ModuleType):
            held = value if isinstance(value, dict) else getattr(value, "__dict__", {})
            found += tensors_in(value if isinstance(value, list | tuple) else held.values(), depth - 1)
    return found


def one_device(tensors: list[torch.Tensor]) -> torch.device:
    """The GPU that holds all tensors on GPUs, or the CPU; ValueError for several GPUs, or without any tensor."""
    if not tensors and torch.cuda.is_available():
        raise ValueError(
            "no argument, weight or buffer of the step is a tensor, so nothing says which device it runs on; pass "
            "the tensors that it reads as arguments, and name those that never change in static="
        )
    on_gpu = {tensor.device for tensor in tensors if tensor.is_cuda}
    if len(on_gpu) > 1:
        raise ValueError(f"inputs and weights lie on {sorted(map(str, on_gpu))}; one CUDA graph runs on one device")
    return on_gpu.pop() if on_gpu else torch.device("cpu")


def shapes_of(leaves: list[Any]) -> tuple[Any, ...]:
    """The key of a bucket: shape and dtype of tensors, type and value of constants, the type of anything else."""
    return tuple(map(shape_of, leaves))


def shape_of(leaf: Any) -> Any:
    """``shapes_of`` of one leaf."""
    if isinstance(leaf, torch.Tensor):
        return tuple(leaf.shape), leaf.dtype
    # Captured code may distinguish 1 from True and 1.0, and 0.0 from -0.0. By repr a NaN equals itself.
    return (type(leaf), repr(leaf)) if is_constant(leaf) else type(leaf)


def describe(leaves: Iterable[Any]) -> str:
    """Dtype, shape and device of tensors, constants as they are."""
    return ", ".join(
        f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)} on {leaf.device}"
        if isinstance(leaf, torch.Tensor)
        else repr(leaf)
        for leaf in leaves
    )


def reachable_modules(*roots: Any) -> list[nn.Module]:
    """Modules that a function can reach: itself, its bound object, closure, defaults, partial arguments, named globals.

    Also those that a function, a comprehension or a generator inside of it names.
    """
    found: dict[int, nn.Module] = {}
    seen: set[int] = set()
    todo = list(roots)
    while todo:
        item = todo.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, nn.Module):
            found[id(item)] = item
        elif isinstance(item, functools.partial):
            todo += [item.func, *item.args, *item.keywords.values()]
        elif isinstance(item, types.MethodType):
            todo += [item.__self__, item.__func__]
        elif isinstance(item, types.FunctionType):
            # A cell that nothing was assigned to yet has no contents, and equals an empty one.
            todo += [cell.cell_contents for cell in item.__closure__ or () if cell != types.CellType()]
            todo += [*(item.__defaults__ or ()), *(item.__kwdefaults__ or {}).values()]
            todo += [item.__globals__[n] for n in names_in(item.__code__) if n in item.__globals__]
            todo.append(getattr(item, "__wrapped__", None))
        elif isinstance(item, (list, tuple, set, frozenset)):
            todo += item
        elif isinstance(item, dict):
            todo += item.values()
        elif not isinstance(item, type | types.ModuleType) and not is_torch_class(type(item)):
            todo += list(getattr(item, "__dict__", {}).values())
    return list(found.values())


_TRAINING, _CHILDREN = operator.itemgetter("training"), operator.itemgetter("_modules")
_HOOKS, _PRE_HOOKS = operator.itemgetter("_forward_hooks"), operator.itemgetter("_forward_pre_hooks")


class WeightsMovedError(RuntimeError):
    """A weight is no longer where a CUDA graph reads it, or a submodule was replaced."""


class Weights:
    """A snapshot of modules: submodules, training modes, hooks, and the addresses of all parameters and buffers."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._places: list[tuple[dict[str, Any], str, str]] = []
        self._modules: dict[int, tuple[str, nn.Module]] = {}
        for root in modules:
            for prefix, module in root.named_modules():
                # The wrapper of torch.compile has the mode of what it wraps, which is a submodule of it.
                if id(module) in self._modules or "training" not in module.__dict__:
                    continue
                self._modules[id(module)] = prefix, module
                for store in (module._parameters, module._buffers):
                    for name, tensor in store.items():
                        if tensor is None or tensor.layout is torch.strided:
                            self._places.append((store, name, f"{prefix}.{name}" if prefix else name))
        self._spaces = [module.__dict__ for _, module in self._modules.values()]
        self._stores, self._names = [store for store, _, _ in self._places], [name for _, name, _ in self._places]
        self._before: tuple[list[Any], ...] = ()
        self._held: list[Any] = []

    def tensors(self) -> list[torch.Tensor]:
        """The weights themselves."""
        return [store[name] for store, name, _ in self._places if store[name] is not None]

    def hooked(self) -> bool:
        """Whether a module has forward hooks, or a forward of its own, whose Python a replay would leave out."""
        return any(any(runs) for _, *runs in self._now()[0])

    def remember(self) -> None:
        """Store the present state, which ``check`` compares with."""
        self._before = self._now()
        # Tensors that are plain attributes are not checked: the CUDA graph goes on reading those of its capture.
        values = [value for space in self._spaces for value in space.values()]
        self._held = [value for value in values if isinstance(value, torch.Tensor | list | tuple)]

    def _now(self) -> tuple[list[Any], ...]:
        """Modes and hooks of all modules, submodules, and addresses. Loops in C, since each replay waits for them."""
        spaces = self._spaces
        runs = map(len, map(_HOOKS, spaces)), map(len, map(_PRE_HOOKS, spaces)), ["forward" in each for each in spaces]
        modes = zip(map(_TRAINING, spaces), *runs, strict=True)
        children = map(list, map(dict.values, map(_CHILDREN, spaces)))
        tensors = map(dict.get, self._stores, self._names)
        return [*modes], [*children], [None if each is None else each.data_ptr() for each in tensors]

    def check(self) -> None:
        """Raise WeightsMovedError if the state has changed since ``remember``."""
        now = self._now()
        if now == self._before:
            return
        labels = [label or "the model" for label, _ in self._modules.values()]
        names = labels, labels, [label for _, _, label in self._places]
        changes = (
            "{} changed its training mode, hooks or forward since capture; capture again",
            "{} has other submodules than at capture; capture again",
            "{} was moved or replaced since capture (.to(), load_state_dict(assign=True), an assigned parameter), so a "
            "replay would read stale memory; capture again. Loading in place is fine",
        )
        for named, before, found, change in zip(names, self._before, now, changes, strict=True):
            for label, old, new in zip(named, before, found, strict=True):
                if old != new:
                    raise WeightsMovedError(change.format(label))
