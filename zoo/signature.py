"""What makes two calls of one module class need two graphs: structure, mode and inputs, as hashable values.

Dynamo guards on all of it; here it is spelled out so that graphs can be predicted before they are compiled, and so
that a recompile (the same three compiled twice) can be told from a second legitimate signature.
"""

from __future__ import annotations

import dataclasses
import enum
import types
from collections.abc import Hashable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


def structure(module: nn.Module) -> Hashable:
    """Parameters, buffers and submodule classes, with shapes, strides, dtypes and devices; no Python attributes."""
    tensors = tuple(
        (name, tuple(t.shape), t.stride() if t.layout is torch.strided else None, t.dtype, t.device, t.requires_grad)
        for source in (module.named_parameters(), module.named_buffers())
        for name, t in source
    )
    return type(module), tensors, tuple((name, type(child)) for name, child in module.named_modules() if name)


def read_attributes(module: nn.Module, *, configuration: bool = True) -> dict[str, Hashable]:
    """Plain Python attributes, of the module and its submodules, that running ``forward`` reads.

    Storing a per-layer value costs nothing; reading it makes Dynamo guard on it. Keys are dotted names such as
    ``self_attn.layer_idx``; values are compared by value for plain types and by identity for functions.
    ``configuration=False`` leaves out the submodules that torch defines (strides, dropout rates).
    """
    found: dict[str, Hashable] = {}
    for prefix, child in module.named_modules():
        if _is_torch_nn(type(child)):
            if not configuration:
                continue
            # A stride or a dropout rate is configuration that belongs to the structure, all of it is read.
            names: set[str] = set(child.__constants__) if hasattr(child, "__constants__") else set(vars(child))
        else:
            names = _names_read(type(child))
        for name, value in vars(child).items():
            if name in names and not name.startswith("_") and name != "training":
                key = _plain(value)
                if key is not None:
                    found[f"{prefix}.{name}" if prefix else name] = key[0]
    return found


def signature(module: nn.Module) -> Hashable:
    """Everything static about a module that a graph is specialised on."""
    return structure(module), tuple(sorted(read_attributes(module).items(), key=lambda item: item[0]))


def mode(module: nn.Module) -> str:
    """The mode a call runs in, in words: ``eval, inference_mode`` or ``train, grad, autocast(cuda:bfloat16)``."""
    words = ["train" if module.training else "eval"]
    if torch.is_inference_mode_enabled():
        words.append("inference_mode")
    else:
        words.append("grad" if torch.is_grad_enabled() else "no_grad")
    for device in ("cuda", "cpu"):
        if torch.is_autocast_enabled(device):
            words.append(f"autocast({device}:{str(torch.get_autocast_dtype(device)).removeprefix('torch.')})")
    return ", ".join(words)


def input_signature(*args: Any, **kwargs: Any) -> Hashable:
    """Kinds of all inputs: of a tensor everything that is guarded on but its values, of a plain value the value."""
    return tuple(_leaves((args, kwargs)))


def _leaves(tree: Any) -> Iterator[Hashable]:
    for path, leaf in pytree.tree_flatten_with_path(tree)[0]:
        where = pytree.keystr(path)
        if isinstance(leaf, torch.Tensor):
            stride = leaf.stride() if leaf.layout is torch.strided else None
            kind = (tuple(leaf.shape), stride, leaf.dtype, leaf.device, leaf.requires_grad, leaf.is_inference())
            yield where, kind
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            fields = {field.name: getattr(leaf, field.name) for field in dataclasses.fields(leaf)}
            yield where, type(leaf), tuple(_leaves(fields))
        else:
            yield where, (_plain(leaf) or (type(leaf),))[0]


def _plain(value: Any) -> tuple[Hashable] | None:
    """A comparable stand-in in a one-tuple, or None for a value that is not compared."""
    if isinstance(value, _PLAIN):
        return (value,)
    if isinstance(value, enum.Enum):
        return (value,)
    if isinstance(value, (types.FunctionType, types.BuiltinFunctionType, types.MethodType, type)):
        return (f"{value.__module__}.{value.__qualname__}@{id(value)}" if hasattr(value, "__qualname__") else id(value),)
    if isinstance(value, (list, tuple)):
        items = [_plain(item) for item in value]
        return None if any(item is None for item in items) else ((type(value).__name__, *items),)
    return None


def _is_torch_nn(cls: type) -> bool:
    return cls.__module__.partition(".")[0] == "torch"


def forward_in_torch_nn(cls: type[nn.Module]) -> bool:
    """Whether the class runs a ``forward`` that torch itself defines: compiling such a module may do nothing."""
    return getattr(cls.forward, "__module__", "").partition(".")[0] == "torch"


def _names_read(cls: type) -> set[str]:
    """Attribute names that ``forward`` reads, following methods and properties of the class by name."""
    read: set[str] = set()
    todo = ["forward"]
    while todo:
        member = getattr(cls, todo.pop(), None)
        if isinstance(member, property):
            member = member.fget
        code = getattr(_unwrap(member), "__code__", None)
        if code is None:
            continue
        new = _names_in(code) - read
        read |= new
        todo.extend(name for name in new if not _defined_by_torch(cls, name))
    return read


def _unwrap(member: Any) -> Any:
    # Decorators that keep ``__wrapped__`` (deprecation helpers, kwargs filters) hide the code that really reads.
    while hasattr(member, "__wrapped__"):
        member = member.__wrapped__
    return member


def _defined_by_torch(cls: type, name: str) -> bool:
    owner = next((base for base in cls.__mro__ if name in vars(base)), None)
    return owner is None or _is_torch_nn(owner)


def _names_in(code: types.CodeType) -> set[str]:
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _names_in(constant)
    return names
