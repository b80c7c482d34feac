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
    """Submodules of some modules, and addresses of all their parameters and buffers, at one moment."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._places: list[tuple[dict[str, Any], str, str]] = []
        self._children: list[tuple[dict[str, Any], str, nn.Module | None]] = []
        seen: set[int] = set()
        for root in modules:
            for prefix, module in root.named_modules():
                if id(module) in seen:
                    continue
                seen.add(id(module))
                self._children += [(module._modules, name, child) for name, child in module._modules.items()]
                for store in (module._parameters, module._buffers):
                    for name, tensor in store.items():
                        if tensor is not None and tensor.layout is torch.strided:
                            self._places.append((store, name, f"{prefix}.{name}" if prefix else name))
        self._remembered: list[tuple[dict[str, Any], str, int]] = []

    def tensors(self) -> list[torch.Tensor]:
        """The weights themselves."""
        return [store[name] for store, name, _ in self._places]

    def remember(self) -> None:
        """Take the addresses of this moment as the ones to check against."""
        self._remembered = [(store, name, store[name].data_ptr()) for store, name, _ in self._places]

    def check(self) -> None:
        """Raise WeightsMovedError if anything is no longer what it was; a fraction of a microsecond a weight."""
        for store, name, child in self._children:
            if store.get(name) is not child:
                raise WeightsMovedError(f"submodule {name} was replaced since capture; capture again")
        for store, name, address in self._remembered:
            tensor = store.get(name)
            if tensor is None or tensor.data_ptr() != address:
                label = next(label for where, key, label in self._places if where is store and key == name)
                raise WeightsMovedError(
                    f"{label} was moved or replaced since capture (.to(), load_state_dict(assign=True), an assigned "
                    "parameter), so a replay would read stale memory; capture again. Loading in place is fine"
                )
