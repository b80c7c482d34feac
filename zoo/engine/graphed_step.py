"""A step captured in a CUDA graph, with the signature of the function that it captures.

On a CPU the step copies inputs in and overwrites outputs in the same way, so that tests without a GPU notice code that
keeps an output which the next call overwrites.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from zoo.engine import captured
from zoo.engine.captured import describe, flatten_outputs, shape_of, shapes_of
from zoo.engine.compat import no_garbage_collection


class CaptureError(RuntimeError):
    """The step cannot be captured; the message names the operation and the line it was called from."""


def by_place(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[int | str, Any]:
    """Arguments of a call by position or name, in one order for all calls."""
    return {**dict(enumerate(args)), **dict(sorted(kwargs.items()))}


def _places(structure: Any) -> str:
    """Where the leaves of a call's arguments are, in words: the position or name of each, and the path inside it."""
    flat = isinstance(structure, tuple)
    tree = dict.fromkeys(structure) if flat else pytree.tree_unflatten(range(structure.num_leaves), structure)
    return ", ".join(pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(tree)[0]) or "no arguments"


@dataclass(eq=False)
class _Bucket:
    """One captured shape: static input buffers (None where the leaf is a constant), outputs, and the replay."""

    leaves: list[Any]
    buffers: list[torch.Tensor | None]
    outputs: list[Any] = field(default_factory=list)
    output_spec: Any = None
    graph: torch.cuda.CUDAGraph | None = None


class GraphedStep:
    """A captured step, made by ``cuda_graph`` and called as its function is.

    A call copies its inputs in, replays the bucket of their shapes and gives the outputs; it is not reentrant.
    ``device`` is where it runs, ``pool`` holds its graphs' memory: two steps may share a pool if they never run at once
    and return clones.
    """

    def __init__(
        self, fn: Callable[..., Any], calls: Sequence[tuple[tuple[Any, ...], Mapping[str, Any]]], *, warmup: int,
        clone_outputs: bool = True, static: tuple[int | str, ...] = (), pool: Any = None,
    ) -> None:  # fmt: skip
        self._fn = fn
        self._clone = clone_outputs
        self._lock = threading.Lock()
        given = by_place(*calls[0])
        for place in static:
            if place not in given:
                raise ValueError(
                    f"static names {place!r}, which is none of the call's arguments; they are "
                    f"{', '.join(map(repr, given)) or 'none'}: a number stands for a positional one"
                )
        self._static = {place: given[place] for place in static}
        flat = [self._flatten(args, kwargs, spec=None) for args, kwargs in calls]
        self._spec = flat[0][1]
        for index, (_, spec) in enumerate(flat):
            if spec != self._spec:
                raise ValueError(f"bucket {index} is called with another structure of arguments than the first call")
        for leaves, _ in flat:
            captured.check_leaves(leaves)
        tensors = [leaf for leaves, _ in flat for leaf in leaves if isinstance(leaf, torch.Tensor)]
        self._weights = captured.Weights(captured.reachable_modules(fn, *self._static.values()))
        tensors += [*self._weights.tensors(), *captured.tensors_in(self._static.values())]
        self.device = captured.one_device(tensors)
        kind = self.device.type
        self._grad_modes = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
        self._autocast = kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        self._buckets: dict[tuple[Any, ...], _Bucket] = {}
        self.pool = pool
        if pool is None and self.device.type == "cuda":
            self.pool = torch.cuda.graph_pool_handle()
        # The largest first: later captures then fit into the pool that it reserved.
        for leaves, _ in sorted(flat, key=lambda item: -sum(t.numel() for t in item[0] if isinstance(t, torch.Tensor))):
            self._add(leaves, warmup)
        self._weights.remember()

    def written_inputs(self) -> list[int | str]:
        """Inputs that the step has written to: a replay writes to a copy. Places of arguments, or numbers of leaves."""
        places: Any = self._spec if isinstance(self._spec, tuple) else itertools.count()
        written = {
            place: None
            for bucket in self._buckets.values()
            for place, leaf, buffer in zip(places, bucket.leaves, bucket.buffers, strict=False)
            if buffer is not None and not torch.equal(_bytes(leaf), _bytes(buffer))
        }
        return list(written)

    def check_repeatable(self) -> None:
        """Raise CaptureError if the step writes to inputs, which replays lose, or returns objects that have no copy."""
        for place in self.written_inputs():
            raise CaptureError(
                f"it writes to input {place!r}, of which a replay has a copy; give an example, "
                "zoo.cuda_graph(model, args, static=...), and name that input in static="
            )
        for bucket in self._buckets.values():
            for leaf in bucket.outputs:
                if not (isinstance(leaf, torch.Tensor) or captured.is_constant(leaf)):
                    raise CaptureError(f"its output holds a {type(leaf).__name__}, which the next replay overwrites")

    def _add(self, leaves: list[Any], warmup: int) -> None:
        if (key := shapes_of(leaves)) in self._buckets:
            raise ValueError(f"two buckets have the same shapes: {describe(leaves)}")
        bucket = _Bucket(leaves, [*map(captured.make_buffer, leaves)])
        (self._imitate if self.pool is None else self._capture)(bucket, warmup)
        self._buckets[key] = bucket
        self._only = bucket if len(self._buckets) == 1 else None

    @property
    def shapes(self) -> list[str]:
        """The captured buckets, in words."""
        return [describe(bucket.leaves) for bucket in self._buckets.values()]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Replay on new inputs.

        Raises:
            TypeError: If a tensor is not a strided one.
            ValueError: If a shape, dtype, device or constant differs from what was captured, a static argument is
                another object, or an input requires grad.
            RuntimeError: If weights were moved or replaced since capture, or the step is already running.
        """
        if not self._lock.acquire(blocking=False):
            raise RuntimeError("this step is running already (it is not reentrant): capture a second one for each user")
        try:
            leaves, _ = self._flatten(args, kwargs, spec=self._spec)
            bucket = self._match(leaves)
            self._weights.check()
            _copy_in(bucket, leaves)
            if bucket.graph is not None:
                bucket.graph.replay()
            else:
                self._run_imitation(bucket)
            outputs = bucket.outputs
            if self._clone:
                outputs = [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in outputs]
            return pytree.tree_unflatten(outputs, bucket.output_spec)
        finally:
            self._lock.release()

    def _flatten(self, args: Sequence[Any], kwargs: Mapping[str, Any], spec: Any) -> tuple[list[Any], Any]:
        """Leaves without the static arguments, which must be the very objects of the first call."""
        given = by_place(args, kwargs)
        for place, value in self._static.items():
            if place not in given:
                raise ValueError(f"static argument {place!r} is missing: give it in the place in which it was captured")
            if given.pop(place) is not value:
                raise ValueError(
                    f"static argument {place!r} is another object than the one captured; capture again, or leave it "
                    "out of static= to have it copied in"
                )
        # Nothing is nested in most calls: pytree takes ten times as long.
        nested = any(isinstance(value, (dict, list, tuple)) for value in given.values())
        leaves, found = pytree.tree_flatten(given) if nested else (list(given.values()), tuple(given))
        if spec is not None and found != spec:
            raise ValueError(f"called with {_places(found)}, but captured with {_places(spec)}; call it in that form")
        return leaves, found

    def _match(self, leaves: list[Any]) -> _Bucket:
        bucket = self._only if self._only is not None else self._buckets.get(shapes_of(leaves))
        if bucket is None:
            raise ValueError(f"no bucket for {describe(leaves)}; captured: {'; '.join(self.shapes)}")
        for index, (leaf, buffer) in enumerate(zip(leaves, bucket.buffers, strict=True)):
            if buffer is None:
                if shape_of(leaf) != shape_of(bucket.leaves[index]):
                    raise ValueError(
                        f"input {index} is {leaf!r}, but {bucket.leaves[index]!r} was captured as a constant; pass a "
                        "tensor for what changes"
                    )
            elif (
                not isinstance(leaf, torch.Tensor)
                or leaf.shape != buffer.shape
                or leaf.dtype != buffer.dtype
                or leaf.device != buffer.device
            ):
                remedy = "capture this shape as one of buckets=, or pad to a captured one"
                if isinstance(leaf, torch.Tensor) and leaf.shape == buffer.shape:
                    remedy = f"convert it by .to({str(buffer.device)!r}, {buffer.dtype})"
                found, was = describe([leaf]), describe([buffer])
                raise ValueError(f"input {index} is {found}, but {was} was captured; {remedy}")
            elif leaf.requires_grad or leaf.layout is not torch.strided:
                captured.check_leaves([leaf])  # as when it was captured
        return bucket

    def _call(self, bucket: _Bucket) -> Any:
        both = zip(bucket.leaves, bucket.buffers, strict=True)
        leaves = [leaf if buffer is None else buffer for leaf, buffer in both]
        flat = isinstance(self._spec, tuple)
        given = dict(zip(self._spec, leaves, strict=True)) if flat else pytree.tree_unflatten(leaves, self._spec)
        every = {**given, **self._static}
        args = [every.pop(place) for place in range(sum(isinstance(place, int) for place in every))]
        outputs = self._fn(*args, **every)
        if not flat:
            after = pytree.tree_leaves(given)
            if len(after) != len(leaves) or any(one is not other for one, other in zip(after, leaves, strict=True)):
                raise CaptureError("it changes a list or a dict that it is given, which a replay would leave out")
        return outputs

    def _capture(self, bucket: _Bucket, warmup: int) -> None:
        if torch.cuda.is_current_stream_capturing():
            raise CaptureError("another CUDA graph is being captured on this stream; capture steps one after the other")
        index = self.device.index if self.device.index is not None else torch.cuda.current_device()
        with torch.cuda.device(index), _own_caches(gpu=True):
            if warmup:
                with torch.random.fork_rng(devices=[index]):
                    self._warm_up(bucket, warmup)
            _clear_caches(gpu=True)
            generator = torch.cuda.default_generators[index]
            # A failed capture leaves the generator believing that it still records; only a clone can be put back.
            state = generator.clone_state()
            graph = torch.cuda.CUDAGraph()
            failure: Exception | None = None
            try:
                # The garbage collector may find an older CUDA graph, and freeing one ends a capture.
                with (
                    no_garbage_collection(),
                    torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"),
                ):
                    try:
                        outputs = self._call(bucket)
                    except Exception as error:
                        failure = error
                        raise
            except Exception as error:
                generator.graphsafe_set_state(state)
                with contextlib.suppress(RuntimeError):
                    torch.cuda.synchronize(index)
                cause = failure or error
                why = f"{_first_line(cause)}{_where(cause)}{_remedy(cause)}"
                try:
                    raise CaptureError(f"capture failed: {why}") from cause
                finally:
                    # Its traceback holds this frame: a reference cycle, which would keep the step's tensors in memory.
                    failure = cause = None  # type: ignore[assignment]
        bucket.graph = graph
        bucket.outputs, bucket.output_spec = flatten_outputs(outputs)

    def _warm_up(self, bucket: _Bucket, warmup: int) -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side), _as_when_capturing():
            for _ in range(warmup - 1):
                self._call(bucket)
            torch.cuda.synchronize()
            # Synchronising is found here, where it raises and harms nothing, not in a capture that it would poison.
            with synchronising_raises():
                self._call(bucket)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()

    def _imitate(self, bucket: _Bucket, warmup: int) -> None:
        with _own_caches(gpu=False), torch.random.fork_rng(devices=[]):
            for _ in range(warmup):
                _keep_outputs(bucket, self._call(bucket))

    def _run_imitation(self, bucket: _Bucket) -> None:
        # A replay runs in the mode of its capture, whatever the caller's.
        inference, grad = self._grad_modes
        with (
            torch.inference_mode(inference), torch.set_grad_enabled(grad), torch.autocast(*self._autocast),
            _own_caches(gpu=False),
        ):  # fmt: skip
            outputs = self._call(bucket)
        if bucket.output_spec is None:
            _keep_outputs(bucket, outputs)
            return
        for held, leaf in zip(bucket.outputs, flatten_outputs(outputs)[0], strict=True):
            if isinstance(leaf, torch.Tensor):
                with torch.inference_mode(held.is_inference()):  # such tensors may be written nowhere else
                    held.copy_(leaf)


def _keep_outputs(bucket: _Bucket, outputs: Any) -> None:
    leaves, bucket.output_spec = flatten_outputs(outputs)
    bucket.outputs = [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


def _copy_in(bucket: _Bucket, leaves: list[Any]) -> None:
    pairs = [(buffer, leaf) for buffer, leaf in zip(bucket.buffers, leaves, strict=True) if buffer is not None]
    # Only inference tensors need a mode, and to enter one takes longer than the copies. No input requires grad.
    inference = any(buffer.is_inference() for buffer, _ in pairs)
    with torch.inference_mode() if inference else contextlib.nullcontext():
        for buffer, leaf in pairs:
            buffer.copy_(leaf)


_warming_up = threading.RLock()


@contextlib.contextmanager
def _as_when_capturing() -> Iterator[None]:
    """Tell code of this thread that it is captured: transformers then builds masks without a read on the host."""
    thread = threading.get_ident()
    with _warming_up:
        original = torch.cuda.is_current_stream_capturing
        torch.cuda.is_current_stream_capturing = lambda: threading.get_ident() == thread or original()
        try:
            yield
        finally:
            torch.cuda.is_current_stream_capturing = original


@contextlib.contextmanager
def synchronising_raises() -> Iterator[None]:
    """Raise CaptureError if torch notices an operation that waits for the device."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        # Torch says on every use that it does not notice all of them; the capture itself finds the rest.
        warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    except RuntimeError as error:
        if "synchronizing" not in str(error):
            raise
        raise CaptureError(
            f"the step synchronises with the host, which no CUDA graph can hold: {_first_line(error)}"
            f"{_where(error)}; move it out of the step"
        ) from error
    finally:
        torch.cuda.set_sync_debug_mode(before)


@contextlib.contextmanager
def synchronisations() -> Iterator[list[str]]:
    """Yield a list that gets the file and line of each operation that torch notices waiting for the device."""
    before = torch.cuda.get_sync_debug_mode()
    found: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode(before)
    for warning in caught:
        if "called a synchronizing" in str(warning.message):
            found.append(f"{warning.filename}, line {warning.lineno}")
        elif "Synchronization debug mode" not in str(warning.message):
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)


@contextlib.contextmanager
def _own_caches(gpu: bool) -> Iterator[None]:
    """Clear caches before and after a capture: it may use no memory of before, and no cache may keep its memory.

    Autocast keeps casts until its outermost context ends; switching its cache off is a global state that Dynamo guards
    on, and would recompile every region. The matrix library keeps tens of MiB for each stream that it ran on.
    """
    _clear_caches(gpu)
    try:
        yield
    finally:
        _clear_caches(gpu)


def _clear_caches(gpu: bool) -> None:
    torch.clear_autocast_cache()
    if gpu:
        torch._C._cuda_clearCublasWorkspaces()


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _remedy(error: BaseException) -> str:
    """What to do about an error whose words do not say it."""
    if "legacy stream" not in str(error):
        return ""
    # Autograd adds up a parameter's gradient on the stream where the parameter was first used, for as long as anything
    # keeps that use. Other work on the default stream gives the same error.
    return (
        "; if it is in a backward, something from before the capture mostly still holds the history of a parameter, "
        "whose gradient is on another stream then: keep losses and copies of parameters with .detach(), or drop them"
    )


def _where(error: BaseException) -> str:
    """The innermost line outside torch that the error came through."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/torch/" not in frame.filename]
    own = [frame for frame in frames if frame.filename != __file__] or frames
    return f" (in {own[-1].name}, line {own[-1].lineno}: {own[-1].line})" if own else ""
