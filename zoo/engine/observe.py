"""Observes one eager call of a model: each region's inputs, and its share of the device's time."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import random
import sys
from collections import Counter
from collections.abc import Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from zoo.engine.compat import strides_as_compiled
from zoo.engine.lifted import Lifted, own_items, tensors_of
from zoo.engine.region import Region
from zoo.engine.signature import input_kinds, is_torch_class, own_class

# Positional and keyword arguments of one call of a model.
Example = tuple[tuple[Any, ...], dict[str, Any]]
Chosen = Mapping[Region, Mapping[str, nn.Module]]


def checked_example(args: Any = (), kwargs: Any = None) -> Example:
    """The arguments of one call, given as to ``torch.export``. TypeError if ``args`` or ``kwargs`` has another form."""
    if not isinstance(args, tuple | list):
        raise TypeError(f"args is a {type(args).__name__}, expected a tuple of arguments: (x,), or kwargs={{'x': x}}")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise TypeError(f"kwargs is a {type(kwargs).__name__}, expected a dict of arguments by name: {{'x': x}}")
    return tuple(args), dict(kwargs or {})


def given_example(args: Any, kwargs: Any) -> Example | None:
    """The call that a public function was given; None if it was given none."""
    example = checked_example(args, kwargs)
    return example if args or kwargs is not None else None


@contextlib.contextmanager
def buffers_restored(model: nn.Module) -> Iterator[list[tuple[dict[str, Any], dict[str, Any]]]]:
    """Put buffers back as they were. Yields each module's dict of buffers with a copy of that dict."""
    # A scripted module has no dict of buffers to put back.
    dicts = (module._buffers for module in model.modules() if isinstance(module._buffers, dict))
    stores = [(buffers, dict(buffers)) for buffers in dicts]
    contents = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        yield stores
    finally:
        for store, before in stores:
            store.clear()
            store.update(before)
        with torch.inference_mode():
            for buffer, content in contents:
                buffer.copy_(content)


@contextlib.contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Restore the random states of torch, Python and NumPy and, in training, the buffers (running statistics)."""
    tensors = itertools.chain(model.parameters(), model.buffers())
    devices = sorted({tensor.device.index for tensor in tensors if tensor.is_cuda})
    buffers = buffers_restored(model) if model.training else contextlib.nullcontext()
    numpy, python = sys.modules.get("numpy"), random.getstate()
    arrays = numpy and numpy.random.get_state()
    try:
        with buffers, torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(python)
        if numpy is not None:
            numpy.random.set_state(arrays)


@contextlib.contextmanager
def _watched(model: nn.Module, *, grad: bool = True) -> Iterator[None]:
    """Inside, a call of the model is eager, in the model's mode, and has no side effects."""
    grad &= model.training and torch.is_grad_enabled()
    # A hook on a compiled module would be traced into it, and compiling is not what a report should cost.
    eager = torch.compiler.set_stance("force_eager")
    with undisturbed(model), torch.set_grad_enabled(grad), eager, strides_as_compiled():
        yield


def count_calls(model: nn.Module, example: Example) -> Counter[nn.Module]:
    """How often each module is called in one eager call of the model."""
    calls: Counter[nn.Module] = Counter()
    with register_module_forward_pre_hook(lambda module, _: calls.update([module])), _watched(model):
        model(*example[0], **example[1])
    return calls


@dataclass
class Observed:
    """What one call showed of a region module, and the dotted attributes that it read.

    ``inputs`` are the distinct kinds of input, each with the operations that ran, the floats given to them, and which
    tensors are the model's own inputs.
    """

    inputs: dict[tuple[Hashable, ...], set[Hashable]] = field(default_factory=dict)
    reads: set[str] = field(default_factory=set)
    running: bool = False
    # Of the running call: its kinds of input, and the lists among its inputs with the block's own index and item.
    kinds: tuple[Hashable, ...] = ()
    own: list[tuple[list[Any], int, Any]] = field(default_factory=list)
    calls: set[Hashable] = field(default_factory=set)

    def given(self, number: Any) -> set[str]:
        """Names of the operations that were given this float."""
        calls: Iterator[Any] = itertools.chain.from_iterable(self.inputs.values())
        called = (call for call in calls if call and isinstance(call[0], torch._ops.OpOverload))
        return {func.overloadpacket.__name__ for func, floats in called if number in floats}


def observe_call(
    model: nn.Module, chosen: Chosen, example: Example, lifted: Mapping[Region, Lifted]
) -> dict[str, Observed]:
    """Run the model once, eagerly and in its mode, and watch every region module, by name.

    Of a cache that blocks pick from by a number in ``lifted``, only the block's own item is one of its inputs.
    """
    seen = {name: Observed() for modules in chosen.values() for name in modules}
    # In eval a caller with gradients on has them for all that blocks compute, but not for the model's own inputs.
    unknown = torch.is_grad_enabled() and not model.training
    given = set(map(id, tensors_of(example))) if unknown else set()
    with contextlib.ExitStack() as stack:
        stack.enter_context(_watched(model))
        for region, modules in chosen.items():
            for name, module in modules.items():
                noting = _noting_inputs(module, seen[name], lifted[region], given, sizes=not region.dynamic)
                stack.enter_context(noting)
                for prefix, child in module.named_modules():
                    if not is_torch_class(own_class(child)):
                        stack.enter_context(_noting_reads(child, prefix, seen[name]))
        with _NotingCalls(seen.values()):
            model(*example[0], **example[1])
    return seen


@contextlib.contextmanager
def _noting_inputs(
    module: nn.Module, observed: Observed, lifted: Lifted, given: Collection[int], *, sizes: bool
) -> Iterator[None]:
    """Note the kinds of input of a region's calls, and when it runs."""
    index = lifted.own_index(module)
    parameters, empty = inspect.signature(module.forward).parameters, inspect.Parameter.empty
    defaults = {name: each.default for name, each in parameters.items()}

    def enter(_: nn.Module, args: Any, kwargs: Any) -> None:
        # A default that one block is given and another is not makes no other graph.
        kwargs = {name: each for name, each in kwargs.items() if each is not defaults.get(name, empty)}
        positional = dict(enumerate(args))
        with contextlib.ExitStack() as own:
            if index is not None:
                swapped = own.enter_context(own_items(index, lifted.items, positional, kwargs))
                observed.own = [(each, index, each[index]) for _, each in swapped if isinstance(each, list)]
            observed.kinds = input_kinds(tuple(positional.values()), kwargs, sizes=sizes)
        observed.running, observed.calls = True, {tuple(id(each) in given for each in tensors_of((args, kwargs)))}

    def leave(*_: Any) -> None:
        # Dynamo makes a constant of an index that writes to a list, so each such block needs its own graph.
        kept = ((index, item, each[index : index + 1]) for each, index, item in observed.own)
        written = [("item", index) for index, item, now in kept if not any(each is item for each in now)]
        observed.inputs.setdefault((*observed.kinds, *written), set()).update(observed.calls)
        observed.running = False

    before = module.register_forward_pre_hook(enter, with_kwargs=True)
    with before, module.register_forward_hook(leave, always_call=True):
        yield


class _NotingCalls(TorchDispatchMode):
    """Notes for each running region which operations of torch it runs, and the floats that it gives them."""

    def __init__(self, regions: Collection[Observed]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._regions = regions

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        floats = tuple(each for each in pytree.tree_leaves((args, kwargs)) if type(each) is float)
        for observed in self._regions:
            if observed.running:
                observed.calls.add((func, floats))
        return func(*args, **(kwargs or {}))


class _Unregistered:
    """Keeps a subclass from the ``__init_subclass__`` of its other base, which may want arguments or keep a list."""

    def __init_subclass__(cls, **_: Any) -> None:
        pass


@contextlib.contextmanager
def _noting_reads(module: nn.Module, prefix: str, observed: Observed) -> Iterator[None]:
    """Note which instance attributes a region reads while it runs."""
    original = type(module)
    # Each block notes a module that several share: its class is one of these already.
    bases = (original,) if issubclass(original, _Unregistered) else (_Unregistered, original)

    class Noting(*bases):  # type: ignore[misc]
        def __getattribute__(self, name: str) -> Any:
            if observed.running and not name.startswith("_"):
                observed.reads.add(f"{prefix}.{name}" if prefix else name)
            return super().__getattribute__(name)

    for name in ("__name__", "__qualname__", "__module__"):
        setattr(Noting, name, getattr(original, name))
    module.__class__ = Noting
    try:
        yield
    finally:
        module.__class__ = original


def device_shares(model: nn.Module, chosen: Chosen, example: Example) -> dict[type[nn.Module], float]:
    """Each region class' share of the model's kernel time in one eager call; empty where there is no GPU."""
    if not any(p.is_cuda for p in model.parameters()):
        return {}
    from torch.profiler import ProfilerActivity, profile, record_function

    open_ranges: list[Any] = []

    def enter(module: nn.Module, *_: Any) -> None:
        open_ranges.append(record_function(f"zoo.region/{own_class(module).__name__}"))
        open_ranges[-1].__enter__()

    def leave(*_: Any) -> None:
        open_ranges.pop().__exit__(None, None, None)

    with contextlib.ExitStack() as stack:
        for modules in chosen.values():
            for module in modules.values():
                stack.enter_context(module.register_forward_pre_hook(enter))
                stack.enter_context(module.register_forward_hook(leave, always_call=True))
        stack.enter_context(_watched(model, grad=False))
        activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
        profiler = stack.enter_context(profile(activities=activities, acc_events=True))
        with record_function("zoo.model"):
            model(*example[0], **example[1])
        torch.cuda.synchronize()
    # CPU-side ranges own the kernels launched inside them; the device-side copies of the ranges would count twice.
    times = Counter[str]()
    for event in profiler.events():
        if event.device_type == torch._C._autograd.DeviceType.CPU:
            times[event.name] += event.device_time_total
    total = times["zoo.model"]
    return {region.cls: times[f"zoo.region/{region.cls.__name__}"] / total for region in chosen} if total else {}
