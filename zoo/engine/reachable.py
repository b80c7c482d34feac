"""Which modules a step runs, and whether their weights still lie where a CUDA graph reads them."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from zoo.engine.signature import names_in


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
            for cell in item.__closure__ or ():
                # A cell that nothing was assigned to yet has no contents.
                todo += [cell.cell_contents] if _filled(cell) else []
            todo += [*(item.__defaults__ or ()), *(item.__kwdefaults__ or {}).values()]
            todo += [item.__globals__[n] for n in names_in(item.__code__) if n in item.__globals__]
            todo.append(getattr(item, "__wrapped__", None))
        elif isinstance(item, (list, tuple, set, frozenset)):
            todo += item
        elif isinstance(item, dict):
            todo += item.values()
        elif type(item).__module__.partition(".")[0] not in ("builtins", "torch") and not isinstance(
            item, (type, types.ModuleType)
        ):
            todo += list(getattr(item, "__dict__", {}).values())
    return list(found.values())


def _filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


class WeightsMovedError(RuntimeError):
    """A weight is no longer where a CUDA graph reads it, or a submodule was replaced."""


class Weights:
    """Submodules, their modes and hooks, and addresses of all parameters and buffers of some modules, at one moment."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._places: list[tuple[dict[str, Any], str, str]] = []
        self._modules: dict[int, tuple[str, nn.Module]] = {}
        for root in modules:
            for prefix, module in root.named_modules():
                if id(module) in self._modules:
                    continue
                self._modules[id(module)] = prefix, module
                for store in (module._parameters, module._buffers):
                    for name, tensor in store.items():
                        if tensor is None or tensor.layout is torch.strided:
                            self._places.append((store, name, f"{prefix}.{name}" if prefix else name))
        self._remembered: list[tuple[dict[str, Any], str, int | None]] = []
        self._states: list[tuple[Any, ...]] = []
        self._held: list[Any] = []

    def tensors(self) -> list[torch.Tensor]:
        """The weights themselves."""
        return [store[name] for store, name, _ in self._places if store[name] is not None]

    def hooked(self) -> bool:
        """Whether a module has forward hooks, or a forward of its own, whose Python a replay would leave out."""
        return any(_python(module) for _, module in self._modules.values())

    def remember(self) -> None:
        """Take what is there at this moment as what to check against."""
        self._remembered = [(store, name, _address(store[name])) for store, name, _ in self._places]
        self._states = [
            (module, label, module.training, _python(module), list(module._modules.values()))
            for label, module in self._modules.values()
        ]
        # Tensors that are plain attributes are not checked: the CUDA graph goes on reading those of its capture.
        values = [value for _, module in self._modules.values() for value in vars(module).values()]
        self._held = [value for value in values if isinstance(value, torch.Tensor | list | tuple)]

    def check(self) -> None:
        """Raise WeightsMovedError if anything is no longer what it was; a fraction of a microsecond each."""
        for module, label, training, python, children in self._states:
            if module.training is not training or _python(module) != python:
                raise WeightsMovedError(
                    f"{label or 'the model'} changed its training mode, hooks or forward since capture; capture again"
                )
            if [*module._modules.values()] != children:
                raise WeightsMovedError(f"{label or 'the model'} has other submodules than at capture; capture again")
        for store, name, address in self._remembered:
            if _address(store.get(name)) != address:
                label = next(label for where, key, label in self._places if where is store and key == name)
                raise WeightsMovedError(
                    f"{label} was moved or replaced since capture (.to(), load_state_dict(assign=True), an assigned "
                    "parameter), so a replay would read stale memory; capture again. Loading in place is fine"
                )


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _python(module: nn.Module) -> int:
    """How many hooks, and forward of its own, run in Python beside the forward of the module's class."""
    return len(module._forward_hooks) + len(module._forward_pre_hooks) + ("forward" in module.__dict__)
