"""Kernels of our own are compiled while the region around them is traced, several at a time.

Triton compiles a kernel when it is launched first, in the thread that launches it: one after the other, and only when
the compiler is through with the region. Here the operator whose shapes the compiler asks for is run once without data,
and what it would launch is handed to threads. Triton does most of its work outside of Python's lock or in processes. A
launch waits for its own kernel alone, and compiles it itself where no thread has begun.

Threads touch no GPU. The launch loads what they compiled: loading would break a CUDA graph that is being captured.

``ZOO_COMPILE_AHEAD=0`` in the environment leaves every kernel to its first launch.
"""

from __future__ import annotations

import atexit
import functools
import inspect
import logging
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Triton's interpreter has nothing to compile.
ENABLED = os.environ.get("ZOO_COMPILE_AHEAD") != "0" and os.environ.get("TRITON_INTERPRET") != "1"
MOST_THREADS = 8
# Different launches of a kernel that are kept: a size that changes in every call would fill the memory.
MOST_LAUNCHES = 1024
# A compilation that hangs does not keep the process from ending.
LAST_SECONDS = 10.0

_log = logging.getLogger(__name__)


class _Thread(threading.local):
    only_compiles = False


_here = _Thread()
# What was begun and is not in Triton's own cache yet, by what Triton knows it by.
_begun: dict[str, Any] = {}


class Kernel:
    """A Triton kernel that is launched from Python: a decorator above ``triton.jit``.

    Triton finds the compiled kernel of a launch anew each time, which takes the host two to three times as long as the
    launch. Here a launch like an earlier one goes to the kernel that Triton returned then.

    Args:
        jit: What ``triton.jit`` made.
    """

    def __init__(self, jit: Any) -> None:
        self.jit = jit
        # Triton's cache of a device, and of what is in it: everything that Triton compiles a kernel for -> the kernel,
        # and its arguments after the positional ones. Whoever clears Triton's cache clears this.
        self._kept: dict[int, tuple[Any, dict[Any, Any]]] = {}
        # Triton's interpreter compiles nothing; on AMD GPUs it also looks at the size of a tensor's memory.
        self._keeps = os.environ.get("TRITON_INTERPRET") != "1" and torch.version.hip is None
        # Of sizes that are not specialised Triton only asks whether they fit 32 bits, and of fractions nothing.
        self._sized = [getattr(each, "do_not_specialize", False) for each in getattr(jit, "params", ())]

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        return self._begin if _here.only_compiles else functools.partial(self._launch, grid)

    def _begin(self, *arguments: Any, **options: Any) -> None:
        given = [_Pointer(each) if isinstance(each, Tensor) else each for each in arguments]
        self.jit.warmup(*given, grid=(1,), **options)

    def _launch(self, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
        if not self._keeps or _launches_are_watched(self.jit):
            self._launch_first(grid, *arguments, **options)
            return
        driver = sys.modules["triton"].runtime.driver.active
        device = driver.get_current_device()
        key: list[Any] = [*options.items()]
        for value, sized in zip(arguments, self._sized, strict=False):
            if isinstance(value, Tensor):
                key.append(value.dtype)
                key.append(value.data_ptr() % 16 == 0)
            elif isinstance(value, float):
                key.append(float)
            elif value is None or isinstance(value, int):
                key.append(-(2**31) <= value < 2**31 if sized and value is not None else value)
            else:  # a descriptor of a tensor is made for one launch
                self._launch_first(grid, *arguments, **options)
                return
        cache, kept = self._kept.get(device, (None, {}))
        found = kept.get(tuple(key)) if cache is self.jit.device_caches.get(device) else None
        if found is None:
            kernel = self._launch_first(grid, *arguments, **options)
            self._keep(device, tuple(key), kernel, len(arguments), options)
            return
        kernel, rest = found
        stream = driver.get_current_stream(device)
        x, y, z = (*grid, 1, 1)[:3]
        kernel.run(x, y, z, stream, kernel.function, kernel.packed_metadata, None, None, None, *arguments, *rest)

    def _keep(self, device: int, key: Any, kernel: Any, positional: int, options: dict[str, Any]) -> None:
        """Keep a kernel that was launched. Tensors are arguments of one launch, and are not kept."""
        if not hasattr(kernel, "packed_metadata") or any(isinstance(each, Tensor) for each in options.values()):
            return
        cache, kept = self._kept.get(device, (None, {}))
        if cache is not self.jit.device_caches[device] or len(kept) >= MOST_LAUNCHES:
            kept = {}
        rest = tuple(options.get(each.name, each.default) for each in self.jit.params[positional:])
        self._kept[device] = self.jit.device_caches[device], {**kept, key: (kernel, rest)}

    def _launch_first(self, grid: tuple[int, ...], *arguments: Any, **options: Any) -> Any:
        """Launch by Triton, but have a thread that compiles just this kernel finish first."""
        if not _begun:
            return self.jit[grid](*arguments, **options)
        # Whatever is wrong there, the launch itself compiles, and raises what there is to raise.
        with suppress(Exception):
            _keep_finished()
            if _begun:
                with _asynchronously():
                    kernel = self.jit.warmup(*arguments, grid=grid, **options)
                # Older Tritons forget it otherwise.
                if hasattr(kernel, "result"):
                    kernel.result()
        return self.jit[grid](*arguments, **options)


def _launches_are_watched(jit: Any) -> bool:
    """Whether a profiler of Triton's, or a hook of the kernel's, asks to be called at each launch."""
    runtime = sys.modules["triton"].knobs.runtime
    hooks = runtime.launch_enter_hook, runtime.launch_exit_hook, jit.pre_run_hooks
    return any(getattr(each, "calls", each) for each in hooks)


@contextmanager
def _asynchronously() -> Iterator[None]:
    """Triton hands what it would compile to the threads, unless it was begun already."""
    import triton

    mode = triton.AsyncCompileMode(_threads)
    mode.future_kernels = _begun
    mode.__enter__()
    try:
        yield
    finally:
        mode.raw_futures = []  # leaving would wait for them
        mode.__exit__(None, None, None)


def _keep_finished() -> None:
    """Put what threads have compiled into Triton's own cache."""
    for key, kernel in list(_begun.items()):
        # Newer Tritons drop the future once it was asked, whatever it said.
        future = kernel.future
        if future is None or future.done():
            _begun.pop(key, None)
            if kernel.kernel is None and future is not None and future.succeeded:
                kernel.result()


class _Pointer:
    """What Triton asks of a tensor, of one that has no data: allocators align what views are cut from."""

    def __init__(self, tensor: Tensor) -> None:
        self.dtype = tensor.dtype
        self._offset = int(tensor.storage_offset()) * tensor.element_size()
        self._bytes = tensor.untyped_storage().nbytes()

    def data_ptr(self) -> int:
        return self._offset

    def ptr_range(self) -> int:
        return self._bytes


# --- an operator without data ---


class _Layout(NamedTuple):
    """A tensor without its data, and without symbols."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device

    def empty(self) -> Tensor:
        spans = [(size - 1) * step for size, step in zip(self.shape, self.stride, strict=True)]
        elements = self.offset + (0 if 0 in self.shape else 1 + sum(spans))
        return torch.empty(elements, dtype=self.dtype, device=self.device).as_strided(
            self.shape, self.stride, self.offset
        )


def describe(value: Any) -> Any:
    """An argument of an operator as something that can be compared and kept. Symbols become the sizes traced with.

    Raises:
        ValueError: If a symbol has no such size.
    """
    if isinstance(value, Tensor):
        shape, stride, offset = describe(value.shape), describe(value.stride()), describe(value.storage_offset())
        return _Layout(shape, stride, offset, value.dtype, value.device)
    if isinstance(value, list | tuple):
        return tuple(describe(each) for each in value)
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        # int() and the like would guard the size, and compile a graph for each.
        if (hint := value.node.hint) is None:
            raise ValueError(f"{value} depends on data, and has no size while it is traced")
        return hint
    return value


def _restore(value: Any) -> Any:
    if isinstance(value, _Layout):
        return value.empty()
    return [_restore(each) for each in value] if isinstance(value, tuple) else value


def compile_kernels(implementation: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Begin to compile the kernels that an operator launches for these arguments.

    Only while the compiler traces, and once a trace. What stands in the way is left to the first launch, which compiles
    as ever.

    Args:
        implementation: The operator's function.
        arguments: Fake tensors, symbols and numbers.
    """
    if _here.only_compiles:
        # An operator within an operator, or of a call that is run without data.
        implementation(*arguments)
        return
    tracing = torch._guards.TracingContext.try_get()
    if tracing is None:
        return
    try:
        call = implementation, describe(arguments)
        seen = _seen.setdefault(tracing, set())
        if call not in seen:
            seen.add(call)
            run_without_data(*call)
    except Exception as error:
        _log.debug("kernels of %s are not compiled ahead: %s", implementation.__name__, error)


_seen: weakref.WeakKeyDictionary[Any, set[Any]] = weakref.WeakKeyDictionary()


def run_without_data(implementation: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Run an operator's function on described arguments, its kernels being compiled in threads and not launched."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._python_dispatch import _disable_current_modes

    # A mode of its own: nothing of this is part of what is being traced. What has no rule for shapes is not run either.
    with _disable_current_modes(), torch.no_grad(), FakeTensorMode(allow_fallback_kernels=False), only_compiling():
        implementation(*_restore(arguments))


def only_compiles() -> bool:
    """Whether what this thread would launch is only compiled."""
    return _here.only_compiles


@contextmanager
def only_compiling() -> Iterator[None]:
    """What this thread would launch, threads compile; for tensors without data."""
    with _asynchronously():
        _keep_finished()
        _here.only_compiles = True
        try:
            yield
        finally:
            _here.only_compiles = False


# --- threads ---


class _Compilation(Future[Any]):
    """A kernel that a thread compiles; or whoever asks, where none has begun, or it failed, or it was before a fork."""

    def __init__(self, compile_kernel: Callable[[], Any]) -> None:
        super().__init__()
        self._compile_kernel, self._process = compile_kernel, os.getpid()
        self.succeeded = False

    def run(self) -> None:
        if not self.set_running_or_notify_cancel():
            return
        kernel = None
        try:
            with suppress(Exception), _building_launcher(self._compile_kernel):
                kernel = self._compile_kernel()
                self.succeeded = True
            if kernel is not None:
                _build_launcher(kernel.src, kernel.metadata)
        finally:
            self.set_result(kernel)

    def result(self, timeout: float | None = None) -> Any:
        here = os.getpid() != self._process or self.cancel()
        kernel = None if here else super().result(timeout)
        return self._compile_kernel() if kernel is None else kernel


@contextmanager
def _building_launcher(compile_kernel: Callable[[], Any]) -> Iterator[None]:
    """Meanwhile a thread builds the launcher: the C compiler takes as long as Triton does, and needs nothing of it.

    Args:
        compile_kernel: Triton's function, a closure over the kernel's source; of anything else nothing is built.
    """
    held = inspect.getclosurevars(compile_kernel).nonlocals if inspect.isfunction(compile_kernel) else {}
    source = held.get("src")
    # How descriptors are passed is known once the kernel is compiled.
    if source is None or any("tensordesc" in str(kind) for kind in source.signature.values()):
        yield
        return
    thread = threading.Thread(target=_build_launcher, args=(source, None), name="zoo-build-launcher", daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def _build_launcher(source: Any, metadata: Any) -> None:
    """Older Tritons compile some C for each kernel, and keep it on disk: the launch finds it there.

    Args:
        source: The kernel's.
        metadata: The compiled kernel's. With None the launcher is of no use, and fails once its C was compiled.
    """
    from triton.runtime import driver

    with suppress(Exception):
        driver.active.launcher_cls(source, metadata)


class _Threads:
    """Threads that end when there is no more to do. An executor's compile all that waits before they let Python end."""

    def __init__(self) -> None:
        self._forget()
        atexit.register(self._stop)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[_Compilation] = deque()
        self._running: set[threading.Thread] = set()

    def submit(self, compile_kernel: Callable[[], Any]) -> _Compilation:
        """Have a kernel compiled, as Triton's asynchronous mode asks an executor for."""
        compilation = _Compilation(compile_kernel)
        with self._lock:
            self._waiting.append(compilation)
            if len(self._running) < min(MOST_THREADS, os.cpu_count() or 1):
                thread = threading.Thread(target=self._work, name="zoo-compile-ahead", daemon=True)
                thread.start()
                self._running.add(thread)
        return compilation

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._running.discard(threading.current_thread())
                    return
                compilation = self._waiting.popleft()
            compilation.run()

    def _stop(self) -> None:
        with self._lock:
            self._waiting.clear()
            running = list(self._running)
        # A thread inside of compiled code when Python ends would end the process with an abort.
        for thread in running:
            thread.join(LAST_SECONDS / len(running))


_threads = _Threads()
