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
import inspect
import logging
import os
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
# A compilation that hangs does not keep the process from ending.
LAST_SECONDS = 10.0

_log = logging.getLogger(__name__)


class _Thread(threading.local):
    only_compiles = False


_here = _Thread()
# What was begun and is not in Triton's own cache yet, by what Triton knows it by.
_begun: dict[str, Any] = {}


def finish(begin: Callable[[], Any]) -> None:
    """Wait for the thread that compiles a kernel, if one does.

    Args:
        begin: Asks Triton for that kernel.
    """
    if not _begun:
        return
    _keep_finished()
    if _begun:
        with _asynchronously():
            kernel = begin()
        # Older Tritons forget it otherwise.
        if hasattr(kernel, "result"):
            kernel.result()


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


class Pointer:
    """What Triton asks of a tensor, of one that has no data: allocators align what views are cut from."""

    def __init__(self, tensor: Tensor) -> None:
        self.dtype = tensor.dtype
        self._offset = int(tensor.storage_offset()) * tensor.element_size()
        self._bytes = tensor.untyped_storage().nbytes()

    def data_ptr(self) -> int:
        """Bytes from where the memory begins."""
        return self._offset

    def ptr_range(self) -> int:
        """Bytes of the memory."""
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
