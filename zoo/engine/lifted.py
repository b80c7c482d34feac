"""Numbers that differ from block to block and sizes that vary from call to call, as symbols of one graph.

A block of another library often knows its place: ``layer_idx`` picks its part of a cache, a drop rate grows with
depth. Dynamo would compile the block once for each value. Here such numbers are symbols, and a list or dict that the
index picks from holds the block's own item apart, where the graph finds it without a constant index. Dynamo guards
whatever the code asks of a symbol, so a block that branches on its index still gets the graphs that it needs.
"""

from __future__ import annotations

import functools
import operator
import re
import sys
import types
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from zoo.engine.autograd import copy_overwritten_inputs
from zoo.engine.compat import configured
from zoo.engine.signature import Attribute, numbers_in, stands_in, structure

_ABSENT = object()
# What Dynamo knows of the sizes and numbers that it met: by code object, then by name.
Sizes = defaultdict[Any, Any]


@dataclass(eq=False)
class Lifted:
    """Dotted names of the numbers that differ between the blocks of a class.

    ``items`` is the length that a list needs for each block's index to pick an item, ``told`` whether the user was
    warned. ``met`` holds the numbers among the arguments of the first of similar calls, ``varying`` names those that
    differed later; ``first`` has each structure's first call by a model, and what is known of the sizes in it.
    """

    ints: tuple[str, ...] = ()
    floats: tuple[str, ...] = ()
    items: int = 0
    told: bool = False
    met: dict[Hashable, dict[str, Attribute]] = field(default_factory=dict)
    varying: set[str] = field(default_factory=set)
    first: dict[Hashable, tuple[Any, Any, Sizes]] = field(default_factory=dict)

    @property
    def names(self) -> frozenset[str]:
        """The names of all these numbers."""
        return frozenset(self.ints + self.floats)

    def own_index(self, module: nn.Module) -> int | None:
        """The index that most of a block's ints hold; None for a block without any."""
        values = Counter(number for name in self.ints if (number := number_at(module, name)) is not None)
        return max(values, key=values.__getitem__) if values else None

    @functools.cached_property
    def _sources(self) -> list[str]:
        return [*map(_source, self.ints), r".*\.own_index$"] if self.ints else []

    @contextmanager
    def as_symbols(self, sizes: Sizes) -> Iterator[None]:
        """Context in which Dynamo makes symbols of these numbers, and of sizes that differ from those in ``sizes``."""
        from torch._dynamo import pgo
        from torch._dynamo.symbolic_convert import TensorifyState
        from torch._dynamo.variables import BuiltinVariable, TensorVariable

        config: Any = torch.compiler.config
        tensor: Any = TensorVariable
        builtin: Any = BuiltinVariable
        for state in sizes.values():
            for name in self.varying & state.automatic_dynamic.keys():
                state.automatic_dynamic[name].scalar = pgo.auto_dynamic
        known = config.dynamic_sources
        before, pgo._CODE_STATE = pgo._CODE_STATE, sizes
        call_method, call_function, setitem = tensor.call_method, builtin.call_function, tensor.method___setitem__
        if self.floats or self.varying:
            TensorifyState.clear()  # else a float that was a constant in an earlier block is one in this block too
            tensor.call_method = _draws_by_symbols(call_method)
        if self.ints or self.varying:
            builtin.call_function = _reads_by_symbols(call_function)
            tensor.method___setitem__ = lambda self, tx, *item: setitem(*_narrowed(tx, self, *item))
        try:
            with configured(config, dynamic_sources=",".join([*filter(None, [known]), *self._sources])):
                yield
        finally:
            pgo._CODE_STATE = before
            tensor.call_method, builtin.call_function, tensor.method___setitem__ = call_method, call_function, setitem

    def note_numbers(self, module: nn.Module, kinds: Hashable) -> None:
        """Note the ints and floats among a call's arguments that differ between similar calls.

        Similar calls have tensors of equal shapes, so a number that is a tensor's size does not differ between them.
        """
        numbers, shapes = numbers_in(kinds)
        first = self.met.setdefault((structure(module), shapes), numbers)
        self.varying |= {name for name, number in numbers.items() if first.get(name, number) != number}

    def sizes_for(self, module: nn.Module) -> Sizes:
        """The known sizes for a block's first call; in training, those that a block of the same structure has met."""
        calls = [*module_calls()]
        if not calls:  # the second run of a checkpoint, in the backward
            return self.new_sizes()
        outermost = calls[-1]
        model, tensors = outermost["self"], tensors_of((outermost["args"], outermost["kwargs"]))
        if not module.training or model is module or not tensors:
            return self.new_sizes()
        built = structure(module)
        if built not in self.first:
            self.first[built] = weakref.ref(model), weakref.ref(tensors[0]), self.new_sizes()
            return self.first[built][2]
        first_model, first_input, sizes = self.first[built]
        # Within one call of the model, another size belongs to another stage.
        return sizes if first_model() is model and first_input() is not tensors[0] else self.new_sizes()

    def new_sizes(self) -> Sizes:
        """Known sizes before the first call: only that the floats vary, and arguments that differed between blocks."""
        from torch._dynamo import pgo

        return defaultdict(lambda: pgo.CodeState(automatic_dynamic=_Known(self)))

    def varied(self, sizes: Sizes, module: str) -> frozenset[str]:
        """Names of the sizes and numbers in which calls differed, without those that ``module`` holds."""
        from torch._dynamo.pgo import auto_dynamic

        own = f"L['{module}']"
        found: set[str] = set()
        for state in sizes.values():
            for name, entry in state.automatic_dynamic.items():
                if "._base" in name or own in name or name.endswith(".own_index"):
                    continue
                words = re.sub(r"^L\['(\w+)'\]", r"\1", name)
                if isinstance(entry.size, tuple):  # of a tensor
                    found |= {f"{words}.shape[{dim}]" for dim, size in enumerate(entry.size) if size is auto_dynamic}
                elif entry.scalar is auto_dynamic:
                    found.add(words)
        return frozenset(found)


class _Known(defaultdict[str, Any]):
    """What Dynamo knows of a size or number that it has not met."""

    def __init__(self, lifted: Lifted) -> None:
        super().__init__()
        self._lifted = lifted

    def __missing__(self, name: str) -> Any:
        from torch._dynamo import pgo

        self[name] = entry = pgo.FrameStateSizeEntry()
        if name in self._lifted.varying or any(re.match(_source(each), name) for each in self._lifted.floats):
            entry.scalar = pgo.auto_dynamic
        return entry


def lifted_in(modules: Iterable[nn.Module]) -> Lifted:
    """The numbers that differ between blocks of one class and structure.

    An int counts if no two blocks share it, or if it has more than two values. An int that has two values in more than
    two blocks of the class, of whatever structure, chooses code.
    """
    numbers: dict[Any, dict[str, list[int | float]]] = defaultdict(lambda: defaultdict(list))
    everywhere: dict[str, list[int | float]] = defaultdict(list)
    for module in modules:
        built = numbers[structure(module)]
        for prefix, child in module.named_modules():
            # Dynamo runs torch's dropout with its rate as a constant, in eval mode too.
            rate = "p" if isinstance(child, nn.modules.dropout._DropoutNd) else None
            for name, value in vars(child).items():
                if type(value) in (int, float) and name != rate:
                    path = f"{prefix}.{name}" if prefix else name
                    built[path].append(value)
                    everywhere[path].append(value)
    of_two = {name for name, values in everywhere.items() if len(set(values)) == 2 < len(values)}
    found = Lifted()
    for built in numbers.values():
        for name, values in built.items():
            kinds, distinct = set(map(type, values)), len(set(values))
            if kinds == {float} and distinct > 1 and name not in found.floats:
                found.floats += (name,)
            elif kinds == {int} and name not in of_two and (distinct > 2 or distinct == len(values) > 1):
                found.items = max(found.items, int(max(values)) + 1)
                if name not in found.ints:
                    found.ints += (name,)
    return found


def _draws_by_symbols(call_method: Callable[..., Any]) -> Callable[..., Any]:
    """Dynamo's call of a tensor's method, in which ``bernoulli_`` takes a symbol.

    The operator would take it for a constant. Inductor draws in the same way: uniform numbers below the probability.
    """
    from torch._dynamo.variables.tensor import SymNodeVariable

    def call(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        rate = args[0].realize() if name == "bernoulli_" and len(args) == 1 and not kwargs else None
        if not isinstance(rate, SymNodeVariable):
            return call_method(self, tx, name, args, kwargs)
        uniform = call_method(call_method(self, tx, "float", [], {}), tx, "uniform_", [], {})
        return call_method(self, tx, "copy_", [call_method(uniform, tx, "lt", [rate], {})], {})

    return call


def _reads_by_symbols(call_function: Callable[..., Any]) -> Callable[..., Any]:
    """Dynamo's call of a builtin, in which ``tensor[:, symbol]`` takes a symbol."""
    from torch._dynamo.variables import TensorVariable

    def call(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if self.fn is operator.getitem and isinstance(args[0].realize(), TensorVariable):
            tensor, _, index = _narrowed(tx, *args)
            args = tensor, index
        return call_function(self, tx, args, kwargs)

    return call


def _narrowed(tx: Any, tensor: Any, index: Any, *value: Any) -> tuple[Any, ...]:
    """Arguments of Dynamo's indexing, changed so that symbols next to other indices do not become constants."""
    from torch._dynamo.variables import ConstantVariable, SliceVariable, TupleVariable, UserFunctionVariable
    from torch._dynamo.variables.tensor import SymNodeVariable

    index = index.realize()
    # Dynamo reads by a lone symbol without a constant, but does not write by one.
    items = [each.realize() for each in index.items] if isinstance(index, TupleVariable) else [index] * len(value)
    found = any(isinstance(each, SymNodeVariable) for each in items)
    if found and all(isinstance(each, SymNodeVariable | ConstantVariable | SliceVariable) for each in items):
        in_slices: Any = UserFunctionVariable(_in_slices)  # type: ignore[arg-type]
        tensor, index = in_slices.call_function(tx, [tensor, TupleVariable(items)], {}).items
    return tensor, tx, index, *value


def _in_slices(tensor: torch.Tensor, index: tuple[Any, ...]) -> tuple[torch.Tensor, tuple[Any, ...]]:
    """``x[:, 5]`` as ``x[:, 5:6]`` and the index ``[:, 0]`` in that; Dynamo traces this."""
    slices: tuple[Any, ...] = ()
    rest: tuple[Any, ...] = ()
    for each in index:
        picks = type(each) is int and each >= 0
        if each is not None:
            slices += (slice(each, each + 1) if picks else each if each is ... else slice(None),)
        rest += (0 if picks else each,)
    return tensor[slices], rest


# Operations that AOTAutograd computes with a float input as with a tensor that holds it.
_OF_TENSORS = {
    *(operator.mul, operator.add, operator.sub, operator.truediv, torch.mul, torch.add, torch.sub, torch.div),
    *(operator.imul, operator.iadd, operator.isub, operator.itruediv),
    *(operator.gt, operator.lt, operator.ge, operator.le, operator.eq, operator.ne),
    *("mul", "add", "sub", "div", "mul_", "add_", "sub_", "div_", "gt", "lt", "ge", "le", "eq", "ne"),
}
# Their names as a call shows them, with those that the compiler makes from them.
TAKE_SYMBOLS = {each.rstrip("_") for each in _OF_TENSORS if isinstance(each, str)} | {"rsub", "bernoulli"}


def take_other_floats_for_constants(graph: fx.GraphModule) -> None:
    """Restart the trace, with guards on the values of floats that reach an operation that needs a number.

    AOTAutograd restarts it too, unless such a float also reaches one of ``_OF_TENSORS``: then it writes the first
    block's value into the graph, without a guard.
    """
    from torch._dynamo.exc import TensorifyScalarRestartAnalysis
    from torch._dynamo.symbolic_convert import TensorifyState
    from torch.utils._sympy.symbol import SymT, symbol_is_type

    constants: set[str] = set()
    for node in graph.graph.nodes:
        value = node.meta.get("example_value")
        if not isinstance(value, torch.SymFloat | torch.SymInt | torch.SymBool):
            continue
        expression: Any = value.node._expr
        floats = {str(each) for each in expression.free_symbols if symbol_is_type(each, SymT.FLOAT)}
        for user in node.users:
            computed = user.meta.get("example_value")
            of_tensors = isinstance(value, torch.SymFloat) and user.target in _OF_TENSORS and not user.kwargs
            if not of_tensors and not isinstance(computed, torch.SymFloat | torch.SymInt | torch.SymBool):
                constants |= floats
    new = [name for name in constants if not TensorifyState.should_specialize(name)]
    if new:
        for name in new:
            TensorifyState.specialize(name)
        raise TensorifyScalarRestartAnalysis


@dataclass(frozen=True)
class Checked:
    """A backend other than Inductor, which may use AOTAutograd: ``take_other_floats_for_constants`` runs before it.

    Dynamo reuses code of an equal backend alone.
    """

    backend: Any

    def __call__(self, graph: fx.GraphModule, inputs: Any, **options: Any) -> Any:
        """Compile a graph."""
        take_other_floats_for_constants(graph)
        copy_overwritten_inputs(graph)
        return self.backend(graph, inputs, **options)


def without_base(value: Any) -> Any:
    """A view as a tensor without a base: Dynamo guards a base's sizes, and other blocks' inputs may have no base."""
    own = type(value) is torch.Tensor and value._is_view() and not hasattr(value, "_dynamo_dynamic_indices")
    if not own or (value.requires_grad and not torch.is_grad_enabled()):
        return value
    return _WithoutBase.apply(value) if value.requires_grad else value.detach()


class _WithoutBase(torch.autograd.Function):
    """The same memory as a tensor of its own, with the view's gradient."""

    @staticmethod
    def forward(ctx: Any, view: torch.Tensor) -> torch.Tensor:
        return view.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients


def carry_writes(views: Iterable[Any], owns: Iterable[Any]) -> None:
    """Add a block's writes to tensors of ``without_base`` to the autograd history of the views; both share memory."""
    for view, own in zip(views, owns, strict=True):
        if own is not view and own.requires_grad and not isinstance(own.grad_fn, _WithoutBase._backward_cls):
            with torch.autograd.grad_mode._unsafe_preserve_version_counter(view):
                view.copy_(own)


def carry_marks(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Copy marks of ``mark_dynamic`` and ``mark_static`` from the model's inputs to equal sizes of a block's.

    A size that the block's weights have as well stays as it is: it may be theirs. Returns whether any is static.
    """
    marked: dict[str, set[int]] = {"_dynamo_dynamic_indices": set(), "_dynamo_static_indices": set()}
    for call in module_calls():
        for tensor in tensors_of((call["args"], call["kwargs"])):
            for mark, sizes in marked.items():
                sizes.update(tensor.shape[index] for index in getattr(tensor, mark, ()))
    if not any(marked.values()):
        return False
    of_weights = {size for weight in module.parameters() for size in weight.shape}
    dynamic, static = (sizes - of_weights for sizes in marked.values())
    for tensor in tensors_of((args, kwargs)):
        own = getattr(tensor, "_dynamo_dynamic_indices", None)  # of the model's input itself
        for index, size in enumerate(tensor.shape):
            if own is None and size in dynamic:
                torch._dynamo.maybe_mark_dynamic(tensor, index)
            elif own is not None and index in own:
                # Inputs of other blocks have this mark; torch 2.15 adds it to no size with a stronger one.
                tensor.__dict__.setdefault("_dynamo_weak_dynamic_indices", set()).add(index)
            elif size in static:
                torch._dynamo.mark_static(tensor, index)
    return bool(marked["_dynamo_static_indices"])


def module_calls() -> Iterator[dict[str, Any]]:
    """The modules that are being called, as ``self`` with ``args`` and ``kwargs``, from the innermost outwards."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is nn.Module._wrapped_call_impl.__code__:
            yield frame.f_locals
        frame = frame.f_back


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """The tensors in nested lists, tuples and dicts."""
    return [leaf for leaf in pytree.tree_leaves(tree, is_leaf=stands_in) if isinstance(leaf, torch.Tensor)]


def number_at(module: nn.Module, name: str) -> Any:
    """What a dotted name of an attribute leads to; None where a module has no such attribute."""
    try:
        return operator.attrgetter(name)(module)
    except AttributeError:
        return None


def _source(name: str) -> str:
    """A pattern for Dynamo's name of a module's attribute, seen from the module or, after a break, from its parts."""
    *path, attribute = name.split(".")
    children = "".join(rf"(\._modules\['{each}'\])?" for each in path)
    return rf"L\['\w+'\](\[\d+\])?{children}\.{attribute}$"


class OwnItem(list[Any]):
    """A list that also holds the item at ``own_index`` as ``own``; methods that move items update ``own``."""

    def __init__(self, items: list[Any], own_index: int) -> None:
        super().__init__(items)
        self.own_index, self.own = own_index, items[own_index]

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, int) and index == self.own_index and self.own is not _ABSENT:
            return self.own
        return super().__getitem__(index)

    def __setitem__(self, index: Any, value: Any) -> None:
        if isinstance(index, int) and index in (self.own_index, self.own_index - len(self)):
            self.own = value
        super().__setitem__(index, value)
        if isinstance(index, slice):
            self._moved()

    def __delitem__(self, index: Any) -> None:
        super().__delitem__(index)
        self._moved()

    def insert(self, index: Any, item: Any) -> None:
        """As of a list."""
        super().insert(index, item)
        self._moved()

    def pop(self, index: Any = -1) -> Any:
        """As of a list."""
        item = super().pop(index)
        self._moved()
        return item

    def remove(self, item: Any) -> None:
        """As of a list."""
        super().remove(item)
        self._moved()

    def reverse(self) -> None:
        """As of a list."""
        super().reverse()
        self._moved()

    def sort(self, **order: Any) -> None:
        """As of a list."""
        super().sort(**order)
        self._moved()

    def clear(self) -> None:
        """As of a list."""
        super().clear()
        self.own = _ABSENT

    def _moved(self) -> None:
        self.own = super().__getitem__(self.own_index) if self.own_index < len(self) else _ABSENT


pytree.register_pytree_node(
    OwnItem,
    lambda own: (list(own), None),
    lambda items, _: list(items),
    flatten_with_keys_fn=lambda own: ([(pytree.SequenceKey(place), each) for place, each in enumerate(own)], None),
)


class OwnEntry(MutableMapping[int, Any], dict):  # type: ignore[type-arg,misc,metaclass]
    """The entries of the dict ``others``, with the value at ``own_index`` as ``own``. Its own storage is a dummy."""

    def __init__(self, others: dict[int, Any], own_index: int) -> None:
        # A dummy entry, since Dynamo checks no guard on an attribute of an empty dict.
        dict.__setitem__(self, None, None)  # type: ignore[index]
        self.others = others
        self.own_index = own_index
        self.own = others.get(own_index, _ABSENT)

    def __getitem__(self, key: Any) -> Any:
        if key != self.own_index:
            return self.others[key]
        if self.own is _ABSENT:
            raise KeyError(key)
        return self.own

    def __setitem__(self, key: Any, value: Any) -> None:
        if key == self.own_index:
            self.own = value
        else:
            self.others[key] = value

    def __delitem__(self, key: Any) -> None:
        if key == self.own_index:
            self.own = _ABSENT
        else:
            del self.others[key]

    def _whole(self) -> dict[int, Any]:
        own = {self.own_index: self.own}
        whole = {key: own.pop(key, value) for key, value in self.others.items()}
        if self.own is _ABSENT:
            whole.pop(self.own_index, None)
            return whole
        return {**whole, **own}

    def __iter__(self) -> Iterator[int]:
        return iter(self._whole())

    def __len__(self) -> int:
        return len(self._whole())


@contextmanager
def own_items(index: int, items: int, *arguments: dict[Any, Any]) -> Iterator[list[tuple[Any, Any]]]:
    """Replace lists of at least ``items`` items and dicts with int keys by ``OwnItem`` and ``OwnEntry``, for a block.

    They are looked for in the arguments, and in the attributes of objects there. Yields pairs of a replacement and
    the list or dict that it stands for, to which writes are copied at the end.
    """
    swapped: list[tuple[dict[Any, Any], Any, Any, Any]] = []
    addresses = []
    try:
        for holder, key, container in _containers(arguments, items):
            own: Any = (OwnItem if isinstance(container, list) else OwnEntry)(container, index)
            holder[key] = own
            swapped.append((holder, key, container, own))
            for tensor in getattr(own.own, "__dict__", {}).values():
                if getattr(tensor, "_dynamo_static_input_type", None) == "guarded":
                    # This mark makes a graph that only this tensor can run in.
                    torch._dynamo.mark_static_address(tensor, guard=False)
                    addresses.append(tensor)
        yield [(own, container) for _, _, container, own in swapped]
    finally:
        for holder, key, container, own in swapped:
            holder[key] = container
            _write_back(own, container)
        for tensor in addresses:
            torch._dynamo.mark_static_address(tensor)


def as_given(result: Any, swapped: list[tuple[Any, Any]]) -> Any:
    """A block's result, where a stand-in that it was given is again the list, dict or view that it stands for."""
    if type(result) is tuple:
        return tuple([as_given(each, swapped) for each in result])
    return next((container for own, container in swapped if own is result), result)


# Common types of values without a container inside; and types whose attributes are not searched.
_PLAIN = frozenset({bool, int, float, str, tuple, type(None), torch.Tensor, torch.dtype, torch.device, torch.Size})
_WHOLE = (torch.Tensor, nn.Module, type, types.ModuleType, fx.Proxy)


def _containers(holders: Iterable[dict[Any, Any]], items: int) -> Iterator[tuple[dict[Any, Any], Any, Any]]:
    seen: set[int] = set()
    todo = list(holders)
    while todo:
        holder = todo.pop()
        for key, value in list(holder.items()):
            if type(value) in _PLAIN or isinstance(value, _WHOLE) or id(value) in seen:
                continue
            seen.add(id(value))
            by_int = type(value) is dict and all(type(each) is int for each in value)
            if by_int or (type(value) is list and len(value) >= items):
                yield holder, key, value
            elif type(value).__dictoffset__:
                todo.append(object.__getattribute__(value, "__dict__"))  # not by the object's own code


def _write_back(own: Any, container: Any) -> None:
    if isinstance(container, list):
        if len(own) != len(container) or any(map(operator.is_not, own, container)):
            container[:] = list(own)
    elif own.own is _ABSENT:
        container.pop(own.own_index, None)
    else:
        container[own.own_index] = own.own
