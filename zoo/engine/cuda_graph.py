"""CUDA graphs around whole calls: of a step with example arguments, or of a module once its calls repeat."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, overload

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from zoo.engine.autograd import transformed
from zoo.engine.call import RegionWarning, has_stance, outermost_call, set_call
from zoo.engine.captured import Weights, WeightsMovedError, is_captured, is_constant, shapes_of
from zoo.engine.graphed_step import CaptureError, GraphedStep, by_place
from zoo.engine.observe import buffers_restored, checked_example
from zoo.engine.signature import model_in

Model = TypeVar("Model", bound=nn.Module)
Call = tuple[tuple[Any, ...], Mapping[str, Any]]
# Kinds of call that were seen once and may be captured when seen again. The oldest is forgotten first.
_MOST_REMEMBERED = 16


@dataclass
class Captures:
    """What the calls of a module given to ``cuda_graph`` did.

    Args:
        shapes: The captured shapes, in words.
        replays: Calls that replayed a CUDA graph.
        uncaptured: Reason -> calls that ran without one. First calls of a kind, which compile, are in neither.
    """

    shapes: list[str] = field(default_factory=list)
    replays: int = 0
    uncaptured: Counter[str] = field(default_factory=Counter)


class CapturingCall:
    """What ``module(...)`` runs after ``cuda_graph(module)``.

    The first call of a kind runs as before, and compiles. The second one captures, later ones replay. A kind is the
    shapes, dtypes and devices of all tensors, the values of all else, and the grad, inference, autocast and training
    modes. Arguments that the module's class names in ``static_arguments`` are not copied in: another object is another
    kind. At most ``most_graphs`` kinds are captured. With ``clone_outputs`` the next call overwrites no output.
    """

    def __init__(self, module: nn.Module, most_graphs: int, clone_outputs: bool) -> None:
        self.captures = Captures()
        self._module = module
        self._call: Callable[..., Any] = outermost_call(module) or module._call_impl
        self.__wrapped__ = self._call  # here ``call_of`` finds a region's call
        self._most_graphs = most_graphs
        self._clone_outputs = clone_outputs
        self._lock = threading.Lock()
        self._names: dict[int | str, str] = dict(enumerate(inspect.signature(module.forward).parameters))
        self._static_names = getattr(type(module), "static_arguments", ())
        self._steps: dict[Any, GraphedStep] = {}
        self._seen: dict[Any, Any] = {}  # with the static arguments, whose identity must not be reused
        self._refused: dict[Any, str] = {}
        self._pool: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Replay, capture or run the module on the arguments of ``module.forward``."""
        if torch.compiler.is_compiling() or _is_watched():
            return self._call(*args, **kwargs)
        if not self._lock.acquire(blocking=False):
            return self._plainly("another call was running; let threads take turns with a lock", args, kwargs)
        try:
            return self._replay(args, kwargs)
        except _Uncapturable as reason:
            outputs = self._plainly(str(reason), args, kwargs)
            if reason.kind is not None:  # the plain call has succeeded, so the fault is the capture's
                self._refused[reason.kind] = str(reason)
                _forget_oldest(self._refused)
            return outputs
        finally:
            self._lock.release()

    def _plainly(self, reason: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run without a CUDA graph, count the reason, and warn of it the first time."""
        if reason not in self.captures.uncaptured:
            message = f"{type(self._module).__name__} runs without a CUDA graph: {reason}"
            warnings.warn(message, RegionWarning, stacklevel=4)
        self.captures.uncaptured[reason] += 1
        return self._call(*args, **kwargs)

    def _replay(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = by_place(args, kwargs)
        named = {place: value for place, value in given.items() if self._names.get(place, place) in self._static_names}
        static = {place: value for place, value in named.items() if value is not None}
        leaves, spec = pytree.tree_flatten({place: value for place, value in given.items() if place not in static})
        device = self._device(leaves)
        if is_captured(device):
            return self._call(*args, **kwargs)  # part of a larger CUDA graph
        self._check(leaves)
        objects = tuple((place, id(value)) for place, value in static.items())
        kind = spec, shapes_of(leaves), objects, self._mode(device)
        step = self._steps.get(kind)
        if step is None:
            if kind in self._refused:
                raise _Uncapturable(self._refused[kind])
            if kind not in self._seen:
                self._seen[kind] = static
                _forget_oldest(self._seen)
                return self._call(*args, **kwargs)
            if len(self._steps) >= self._most_graphs:
                raise _Uncapturable(f"{self._most_graphs} kinds of call are captured; raise most_graphs for more")
        if any(isinstance(each, Tensor) and (each.device != device or each.requires_grad) for each in leaves):
            # Replays would not read a tensor on the host again. Detached, since a capture records no gradients.
            args = tuple(_to(value, device) if place not in static else value for place, value in enumerate(args))
            kwargs = {name: _to(value, device) if name not in static else value for name, value in kwargs.items()}
        try:
            outputs = (step or self._capture(kind, args, kwargs, tuple(static)))(*args, **kwargs)
        except WeightsMovedError:
            # What was captured reads memory that the weights have left.
            self._steps.clear()
            self.captures.shapes.clear()
            outputs = self._capture(kind, args, kwargs, tuple(static))(*args, **kwargs)
        self.captures.replays += 1
        return outputs

    def _capture(
        self, kind: Any, args: tuple[Any, ...], kwargs: dict[str, Any], static: tuple[int | str, ...]
    ) -> GraphedStep:
        if Weights([self._module]).hooked():
            raise _Uncapturable("a module of it has hooks or a forward of its own, which a replay would leave out")
        try:
            with _without_traces(self._module):
                calls, clone = [(args, kwargs)], self._clone_outputs
                step = GraphedStep(self._call, calls, warmup=2, clone_outputs=clone, static=static, pool=self._pool)
            step.check_repeatable()
        except Exception as error:
            # The plain run raises an error of the call's own again.
            reason = str(error) if isinstance(error, CaptureError) else f"{type(error).__name__}: {error}"
            raise _Uncapturable(reason.partition("\n")[0], kind) from error
        _warn_on_cpu(step)
        self._pool = step.pool
        self._steps[kind] = step
        self.captures.shapes += step.shapes
        return step

    def _device(self, leaves: list[Any]) -> torch.device:
        tensors = itertools.chain(self._module.parameters(), self._module.buffers(), leaves)
        found = (each.device for each in tensors if isinstance(each, Tensor))
        return next(found, torch.device("cpu"))

    def _check(self, leaves: list[Any]) -> None:
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                if type(leaf) not in (Tensor, nn.Parameter):
                    raise _Uncapturable(f"an argument is a {type(leaf).__name__}, a tensor of another class")
                if leaf.layout is not torch.strided:
                    raise _Uncapturable(f"an argument is {leaf.layout}, and only strided tensors are copied in")
            elif not is_constant(leaf):
                raise _Uncapturable(f"an argument is a {type(leaf).__name__}, which cannot be copied in")
        if torch.is_grad_enabled():
            tensors = (each for each in (*self._module.parameters(), *leaves) if isinstance(each, Tensor))
            if any(each.requires_grad for each in tensors):
                raise _Uncapturable("gradients are recorded; call it under torch.no_grad() or torch.inference_mode()")

    def _mode(self, device: torch.device) -> tuple[Any, ...]:
        autocast = torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type)
        modes = torch.is_inference_mode_enabled(), torch.is_grad_enabled(), self._module.training
        return *modes, autocast, torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled()


def _warn_on_cpu(step: GraphedStep) -> None:
    if step.device.type == "cpu" and torch.cuda.is_available():
        message = "a step runs without a CUDA graph: all its tensors are on the CPU; model.to('cuda')"
        warnings.warn(message, RegionWarning, stacklevel=3)


def _to(value: Any, device: torch.device) -> Any:
    return pytree.tree_map_only(Tensor, lambda each: each.detach().to(device), value)


def _is_watched() -> bool:
    """Whether a mode or a transform sees each operator, or a stance of the compiler asks for eager code."""
    return bool(torch._C._len_torch_dispatch_stack() or transformed() or has_stance())


def _forget_oldest(kinds: dict[Any, Any]) -> None:
    if len(kinds) > _MOST_REMEMBERED:
        del kinds[next(iter(kinds))]


class _Uncapturable(Exception):
    """Why a call runs without a CUDA graph; ``kind`` is given if the reason holds for all calls of that kind."""

    def __init__(self, reason: str, kind: Any = None) -> None:
        super().__init__(reason)
        self.kind = kind


@contextlib.contextmanager
def _without_traces(module: nn.Module) -> Iterator[None]:
    """Restore buffers after the runs of a capture. CaptureError if a run replaced a buffer or wrote to a parameter."""
    versions = [(each, each._version) for each in module.parameters() if not each.is_inference()]
    with buffers_restored(module) as stores:
        yield
        if any(store.get(name) is not buffer for store, before in stores for name, buffer in before.items()):
            raise CaptureError("it assigns a buffer, which a replay would leave out; write to it in place")
        if any(each._version != version for each, version in versions):
            raise CaptureError("it writes to a parameter; make it a buffer")


@overload
def cuda_graph(  # type: ignore[overload-overlap]
    fn: Model, *, clone_outputs: bool = ..., most_graphs: int = ...
) -> Model: ...
@overload
def cuda_graph(
    fn: Callable[..., Any], args: tuple[Any, ...] = ..., kwargs: Mapping[str, Any] | None = ..., *,
    clone_outputs: bool = ..., static: Iterable[int | str] = ..., buckets: Sequence[Call] | None = ...,
    warmup: int = ...,
) -> GraphedStep: ...  # fmt: skip
def cuda_graph(
    fn: Callable[..., Any], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None, *,
    clone_outputs: bool = True, static: Iterable[int | str] = (), buckets: Sequence[Call] | None = None,
    warmup: int = 3, most_graphs: int = 8,
) -> Any:  # fmt: skip
    """Capture ``fn(*args, **kwargs)`` in a CUDA graph; or, given a module alone, its calls whenever they repeat.

    ``cuda_graph(module)`` returns the same module. The first call of a kind (shapes and dtypes of tensors, values of
    other arguments, modes) runs as before, the second one is captured, later ones replay. Calls that cannot be captured
    run as before, with a RegionWarning for each reason: gradients are recorded, an argument or output is of an unknown
    type, the module writes to an argument, an operation waits for the device, ``most_graphs`` kinds are captured.
    ``zoo.captures`` counts them. Weights that are moved or replaced are captured again. Python attributes that the
    module reads keep the values of the capture. ``zoo.uncompile`` undoes it; a deep copy or a pickle is without it.

    With example arguments, the result is a step that copies new inputs in and replays. A RegionWarning names an input
    that the step writes to, since the caller's tensor does not change. ``fn`` first runs ``warmup`` times on a side
    stream, which triggers lazy compilation. Replays keep this call's grad mode, inference mode, autocast and device.
    Random state is registered: each replay draws new dropout, and a seed gives the numbers of an eager run.

    Args:
        fn: A module or function whose work has static shapes and never synchronises.
        args: Example positional arguments.
        kwargs: Example keyword arguments.
        clone_outputs: ``True`` returns fresh tensors. ``False`` returns the static outputs, which the next call of
            this step overwrites.
        static: Positions or names of arguments that are the same object in every call (a prepared graph, a cache).
            They are not copied in.
        buckets: Further calls to capture, one ``(args, kwargs)`` pair for each shape, sharing one memory pool. A call
            replays the bucket of its exact shapes; padding to a bucket is the caller's.
        warmup: Runs before capture, at least 2: the last one is watched for synchronising operations. 0 if the caller
            has run the step at these shapes itself, on a side stream.
        most_graphs: Of a module alone: kinds of call that are captured at most. They share one memory pool.

    Returns:
        The module; or, with an example, a callable with the signature of ``fn``, which is not reentrant.

    Raises:
        CaptureError: If an operation synchronises or the capture fails; the process stays usable.
        TypeError: If an argument is neither a tensor, a plain value, nor a container of them, and is not static; if
            ``args``, ``kwargs``, ``static`` or a bucket has another form than above.
        ValueError: If an input requires grad, two buckets have the same shapes, or the tensors are on several GPUs or
            missing; if the module's calls are captured already, or ``most_graphs`` is not positive.
    """
    example = checked_example(args, kwargs)
    if isinstance(fn, nn.Module) and not args and kwargs is None and buckets is None and not static:
        if not isinstance(most_graphs, int) or most_graphs < 1:
            raise ValueError(f"most_graphs is {most_graphs!r}, expected a positive number of kinds of call")
        if isinstance(outermost_call(fn), CapturingCall):
            raise ValueError(f"the calls of this {type(fn).__name__} are captured already; call zoo.uncompile(model)")
        set_call(fn, CapturingCall(fn, most_graphs, clone_outputs))
        return fn
    if warmup < 2 and warmup != 0:
        raise ValueError(f"warmup is {warmup}; at least 2 runs are needed, one to compile and one to watch")
    pipeline = {"diffusers", "transformers"} & {cls.__module__.partition(".")[0] for cls in type(fn).__mro__}
    if not callable(fn) or (pipeline and not isinstance(fn, nn.Module)):
        raise TypeError(f"fn is a {type(fn).__name__}, expected a module or a function{model_in(fn)}")
    if isinstance(static, (str, int)):
        raise TypeError(f"static is {static!r}, expected positions or names in a tuple: ({static!r},)")
    for index, bucket in enumerate(buckets or ()):
        if not (isinstance(bucket, (tuple, list)) and len(bucket) == 2 and isinstance(bucket[1], Mapping)):
            raise TypeError(f"bucket {index} is no pair of arguments and keyword arguments: ((x,), {{}})")
    if buckets and not args and kwargs is None:
        raise ValueError("buckets are given without an example: name the first call in args= or kwargs=")
    calls = [example, *(buckets or ())]
    try:
        step = GraphedStep(fn, calls, warmup=warmup, clone_outputs=clone_outputs, static=tuple(static))
    except Exception as error:
        if not args and kwargs is None:
            error.add_note("zoo.cuda_graph called it without arguments: give args=(x,) or kwargs={...} of a call")
        raise
    _warn_on_cpu(step)
    for place in step.written_inputs():
        message = f"the step writes to input {place!r}, its replays to a copy: name it in static= if it is read later"
        warnings.warn(message, RegionWarning, stacklevel=2)
    return step


def captures(module: nn.Module) -> Captures:
    """What the calls of a module given to ``zoo.cuda_graph`` did so far.

    Raises:
        TypeError: If it is no module; a step that was captured by an example replays in each call.
        ValueError: If its calls are not captured; a deep copy's and an unpickled module's are not.
    """
    if not isinstance(module, nn.Module):
        given = f"module is a {type(module).__name__}, expected a model given to zoo.cuda_graph without an example"
        raise TypeError(f"{given}; a step captured by an example replays in each call")
    call = outermost_call(module)
    if not isinstance(call, CapturingCall):
        raise ValueError(f"the calls of this {type(module).__name__} are not captured: call zoo.cuda_graph(model)")
    return call.captures
