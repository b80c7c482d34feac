"""What makes two calls of one module class need two graphs: structure, mode and inputs, as hashable values.

Dynamo guards on all three. They are computed here to predict graphs before they are compiled, and to distinguish a
recompile (the same three compiled twice) from a second signature.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import inspect
import itertools
import sys
import types
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

# Values that are compared as they are.
PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


def own_class(module: nn.Module) -> type[nn.Module]:
    """The module's class as it was written: ``fully_shard`` puts a subclass in its place."""
    return as_written(type(module))


def as_written(cls: type) -> type:
    """The class that ``fully_shard`` derived this one from, or the class itself."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return cls.__bases__[-1] if fsdp is not None and issubclass(cls, fsdp.FSDPModule) else cls


def check_model(model: Any) -> None:
    """TypeError for anything but a module."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}, expected an nn.Module{model_in(model)}")


def model_in(value: Any) -> str:
    """The end of a message: the models that an object, such as a pipeline of diffusers, holds, to pass instead."""
    names = [f".{name}" for name, held in getattr(value, "__dict__", {}).items() if isinstance(held, nn.Module)]
    return f": pass the model that it holds, {' or '.join(names[:4])}" if names else ""


def without_ddp(model: nn.Module) -> nn.Module:
    """The model that ``DistributedDataParallel`` is around, or the model itself."""
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model


def structure(module: nn.Module) -> Hashable:
    """Parameters, buffers and submodule classes, with shapes, strides, dtypes and devices; no attributes.

    Hooks of submodules count. The module's own hooks do not, since they run outside of its graph.
    """
    parts = tuple((name, own_class(part), tuple(_hooks(part)) if name else ()) for name, part in module.named_modules())
    return parts, _tensors(module, recurse=True)


def _hooks(module: nn.Module) -> Iterator[tuple[str, Hashable]]:
    """A module's hooks as Dynamo guards them, without those that torch itself adds, such as FSDP's.

    Functions count by their code: to collect hidden states transformers gives each layer a closure of its own.
    """
    for kind in ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"):
        for hook in getattr(module, kind).values():
            if not str(getattr(hook, "__module__", "")).startswith("torch."):
                yield kind, _attribute(hook) if isinstance(hook, types.FunctionType) else id(hook)


def own_structure(module: nn.Module) -> Hashable:
    """The part of ``structure`` that is the module's own, without its submodules."""
    return own_class(module), _tensors(module, recurse=False)


def _tensors(module: nn.Module, *, recurse: bool) -> tuple[Hashable, ...]:
    return tuple(
        (name, *_layout(t), t.dtype, t.device, t.requires_grad)
        for source in (module.named_parameters(recurse=recurse), module.named_buffers(recurse=recurse))
        for name, t in source
    )


def _layout(tensor: torch.Tensor) -> tuple[Hashable, Hashable]:
    if is_lazy(tensor) or (tensor.is_nested and tensor.layout is torch.strided):  # which have no sizes
        return None, None
    return tuple(tensor.shape), tensor.stride() if tensor.layout is torch.strided else None


@dataclass(frozen=True)
class Attribute:
    """A plain value as Dynamo compares it: by type and value (1 is not 1.0), a function by identity."""

    kind: str
    text: str
    identity: int = 0

    @property
    def countable(self) -> bool:
        """Whether each layer can have its own value: an index, a name, a list or an enum, not a flag or activation."""
        return self.kind in ("int", "str", "list", "tuple", "enum")

    def __str__(self) -> str:
        return self.text


def read_attributes(
    module: nn.Module, *, configuration: bool = True, reads: Collection[str] | None = None,
    without: Collection[str] = (), contents: bool = False,
) -> dict[str, Attribute]:  # fmt: skip
    """Plain Python attributes that running ``forward`` reads, by dotted names such as ``self_attn.layer_idx``.

    Storing a per-layer value costs nothing; reading it makes Dynamo guard on it. ``configuration`` False leaves out the
    submodules that torch defines (strides, dropout rates). ``reads`` are the names that a call was seen to read;
    without them every branch of the code counts. ``without`` are names to leave out. With ``contents``, what dicts and
    objects hold counts, read or not, as an attribute of kind ``contents``.
    """
    found: dict[str, Attribute] = {}
    for prefix, child in module.named_modules():
        if is_torch_class(own_class(child)):
            if not configuration:
                continue
            # A stride or a dropout rate is configuration that belongs to the structure: all of it is read.
            names = set(getattr(child, "__constants__", None) or vars(child))
            seen = None
        else:
            names, seen = _names_read(own_class(child)), reads
        for name, value in vars(child).items():
            dotted = f"{prefix}.{name}" if prefix else name
            left_out = name not in names or name.startswith("_") or name == "training" or dotted in without
            if left_out or (seen is not None and dotted not in seen):
                continue
            attribute = _attribute(value) or (_contents(value) if contents else None)
            if attribute is not None:
                found[dotted] = attribute
    return found


def signature(
    module: nn.Module, *, reads: Collection[str] | None = None, without: Collection[str] = ()
) -> tuple[Hashable, tuple[tuple[str, Attribute], ...]]:
    """Everything static about a module that a graph is specialised on: its structure, and attributes that are read."""
    read = read_attributes(module, reads=reads, without=without)
    return structure(module), tuple(sorted(read.items(), key=lambda item: item[0]))


def choices_of(blocks: Collection[nn.Module]) -> set[str]:
    """Attributes that select code and do not number blocks: those with two values in more than two blocks."""
    values: dict[str, set[Attribute]] = defaultdict(set)
    for block in blocks:
        for name, value in read_attributes(block).items():
            values[name].add(value)
    return {name for name, distinct in values.items() if len(distinct) == 2 < len(blocks)}


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


def input_kinds(args: Any, kwargs: Any, *, sizes: bool = True) -> tuple[Hashable, ...]:
    """The kind of each input: what Dynamo guards of a tensor, or a plain value itself.

    Without ``sizes``, what a graph of symbolic sizes is specialised on.
    """
    return tuple(_leaves((args, kwargs), sizes))


def differing_inputs(calls: Iterable[Any]) -> Iterator[str]:
    """How the inputs of calls of one structure differ, in words."""
    inputs = [{where: tuple(kind) for where, *kind in call if where[0] == "["} for call in calls]
    for where in dict.fromkeys(itertools.chain.from_iterable(inputs)):
        kinds = list(dict.fromkeys(each.get(where, ("not given",)) for each in inputs))
        # The second part of a kind: of a dataclass its fields; of a tensor the first input that is the same tensor.
        tensors = [dict(kind) if _is_of_tensor(kind) else {} for kind, *_ in kinds]
        words = dict.fromkeys(_in_words(kind) for kind, *_ in kinds)
        name = f"inputs{where[3:]}"
        if len(kinds) > 1 and all(tensors):
            aspect = next((each for each in tensors[0] if len({kind[each] for kind in tensors}) > 1), None)
            if aspect is not None:
                yield f"{name}, {aspect}: {' / '.join(dict.fromkeys(str(kind[aspect]) for kind in tensors))}"
            for _, *twin in kinds:
                yield from (f"{name}: in some calls the tensor that is inputs{where[3:]} too" for where in twin)
        elif len(kinds) > 1:
            yield f"{name}: {' / '.join(words) if len(words) > 1 else f'what {words.popitem()[0]} holds'}"
    orders = {tuple(each) for each in inputs}
    if len(orders) > 1 and len(set(map(frozenset, orders))) == 1:
        yield "inputs: a dict whose entries are in another order, which costs a graph where the code iterates over it"


def _is_of_tensor(kind: Any) -> bool:
    """Whether this kind of input is a tensor's: pairs of a property and its value. An object's begins with a class."""
    return isinstance(kind, tuple) and not isinstance(kind[0], type)


def _in_words(kind: Any) -> str:
    if _is_of_tensor(kind):
        return "a tensor"
    kind = kind[0] if isinstance(kind, tuple) else kind
    return getattr(kind, "__name__", str(kind))


def numbers_in(kinds: Any) -> tuple[dict[str, Attribute], Hashable]:
    """The ints and floats among kinds of keyword inputs, by the names that Dynamo gives them, and tensors' shapes."""
    numbers = {
        f"L{where.removeprefix('[1]')}": kind
        for where, kind, *_ in kinds
        if isinstance(kind, Attribute) and kind.kind in ("int", "float")
    }
    return numbers, tuple(kind[0] for _, kind, *_ in kinds if _is_of_tensor(kind))


def stands_in(value: Any) -> bool:
    """Whether a value stands for a list or dict of which a block has an item of its own (``OwnItem``, ``OwnEntry``)."""
    # A ``hasattr`` would run the code of any object's ``__getattr__``, which may raise anything.
    return isinstance(value, list | dict) and "own_index" in getattr(value, "__dict__", ())


def _leaves(tree: Any, sizes: bool, inside: tuple[int, ...] = ()) -> Iterator[Hashable]:
    first: dict[int, str] = {}
    for path, leaf in pytree.tree_flatten_with_path(tree, is_leaf=stands_in)[0]:
        where = pytree.keystr(path)
        if isinstance(leaf, torch.Tensor):
            layout = zip(("shape", "strides"), _layout(leaf), strict=True) if sizes else [("dimensions", leaf.dim())]
            rest = {"dtype": leaf.dtype, "device": leaf.device, "requires_grad": leaf.requires_grad}
            kind = (*layout, *rest.items(), ("made in inference_mode", leaf.is_inference()))
            # Dynamo compiles another graph where two inputs are one tensor.
            yield (where, kind, first[id(leaf)]) if id(leaf) in first else (where, kind)
            first.setdefault(id(leaf), where)
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type) and id(leaf) not in inside:
            # A field may be unset yet, and one may lead back to where it is.
            names = [field.name for field in dataclasses.fields(leaf) if hasattr(leaf, field.name)]
            fields = {name: getattr(leaf, name) for name in names}
            yield where, type(leaf), tuple(_leaves(fields, sizes, (*inside, id(leaf))))
        else:
            yield where, _attribute(leaf) or (type(leaf), _held(leaf))


def _held(value: Any, inside: tuple[int, ...] = ()) -> Hashable:
    """Kinds of the tensors that an object (a cache) holds, and its flags."""
    if isinstance(value, torch.Tensor):
        return (*_layout(value), value.dtype, value.requires_grad)
    if isinstance(value, bool | None):
        return value
    inside = (*inside, id(value))
    if stands_in(value):  # what the other blocks keep is not this block's
        return _held(value.own, inside)
    items = value if isinstance(value, list | tuple) else value.values() if isinstance(value, dict) else ()
    items = [*items, *getattr(value, "__dict__", {}).values()]
    if len(inside) > 6 or isinstance(value, type | nn.Module | types.ModuleType):
        return (type(value),)
    return type(value), tuple(_held(each, inside) for each in items if id(each) not in inside)


def _attribute(value: Any) -> Attribute | None:
    """None for a value that is not compared."""
    if isinstance(value, enum.Enum):  # which may be an int or a string as well
        return Attribute("enum", repr(value))
    if type(value).__module__ == "numpy":  # tensors to Dynamo, also those that are floats
        return None
    if isinstance(value, PLAIN):
        return Attribute(type(value).__name__, repr(value))
    if isinstance(value, types.MethodType):
        return _attribute(value.__func__)
    if isinstance(value, types.FunctionType):
        # By its code and the plain values that it closes over: a lambda is another function in each instance.
        cells = [cell.cell_contents for cell in value.__closure__ or () if cell != types.CellType()]
        plain = [repr(each) for each in cells if isinstance(each, PLAIN)]
        return Attribute("function", ", ".join([value.__qualname__, *plain]), id(value.__code__))
    if isinstance(value, (types.BuiltinFunctionType, type)):
        return Attribute("function", getattr(value, "__qualname__", repr(value)), id(value))
    if isinstance(value, (list, tuple)):
        items = [_attribute(item) for item in value]
        return None if None in items else Attribute(type(value).__name__, ", ".join(map(str, items)))
    return None


def _contents(value: Any, depth: int = 2) -> Attribute | None:
    """The plain values in a dict, an object or a partial function; None for what holds none."""
    if isinstance(value, functools.partial):
        value = {"function": value.func, **dict(enumerate(value.args)), **value.keywords}
    held = value if isinstance(value, dict) else getattr(value, "__dict__", None)
    if not held or not depth or isinstance(value, torch.Tensor | nn.Module | type):
        return None
    items = ((key, _attribute(each) or _contents(each, depth - 1)) for key, each in list(held.items()))
    return Attribute("contents", ", ".join(f"{key} {each}" for key, each in items if each is not None))


def is_torch_class(cls: type) -> bool:
    """Whether torch itself defines the class."""
    return str(cls.__module__).partition(".")[0] == "torch"  # None of a class that exec made


def forward_in_torch_nn(cls: type[nn.Module]) -> bool:
    """Whether the class runs a ``forward`` that torch itself defines: compiling such a module may do nothing."""
    # A scripted module's class has no forward to look at.
    return is_torch_class(cls) or getattr(cls.forward, "__module__", "").partition(".")[0] == "torch"


def _names_read(cls: type) -> set[str]:
    """Attribute names that ``forward`` reads, following methods and properties of the class by name."""
    read: set[str] = set()
    todo = ["forward"]
    while todo:
        member: Any = getattr(cls, todo.pop(), None)
        if isinstance(member, property):
            member = member.fget
        # Decorators that keep ``__wrapped__`` (deprecation helpers, kwargs filters) hide the code that really reads.
        code = getattr(inspect.unwrap(member), "__code__", None)
        if code is None:
            continue
        new = names_in(code) - read
        read |= new
        for name in new:
            owner = next((base for base in cls.__mro__ if name in vars(base)), None)
            if owner is not None and not is_torch_class(owner):
                todo.append(name)
    return read


def names_in(code: types.CodeType) -> set[str]:
    """Global and attribute names in a code object and in those inside of it."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= names_in(constant)
    return names
