"""A Triton kernel that torch's compiler traces, and that an eager call launches fast."""
# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs

from __future__ import annotations

import functools
import inspect
import os
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton._C.libtriton import get_cache_invalidating_env_vars
from triton.compiler import ASTSource, CompiledKernel
from triton.runtime.cache import FileCacheManager, get_cache_manager
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

KERNELS: list[Kernel] = []
# Most launches that a kernel keeps: launches whose size changes in every call would fill the memory.
MOST_LAUNCHES = 1024


def kernel(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """``triton.jit``, for kernels that are launched from Python. Takes the same options.

    A kernel with a constant ``OVERLAP`` starts while the kernel before it ends, on GPUs that support this. Callers and
    torch's compiler pass ``OVERLAP=False``, which the launch changes to True on these GPUs. The kernel calls
    :func:`wait` before it touches memory that other kernels write.
    """
    if function is None:
        return functools.partial(kernel, **options)
    # The interpreter compiles nothing; on AMD GPUs Triton also looks at the size of a tensor's memory.
    if triton.knobs.runtime.interpret or torch.version.hip is not None:
        return triton.jit(function, **options)
    return Kernel(function, **options)


@functools.cache
def _overlap(device: int) -> dict[str, bool]:
    return {"OVERLAP": True, "launch_pdl": True} if torch.cuda.get_device_capability(device) >= (9, 0) else {}


@triton.jit
def wait(OVERLAP: tl.constexpr):
    """Wait for the end of the kernel before, whose writes are visible only then."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()


@triton.jit
def permit(OVERLAP: tl.constexpr):
    """Permit the next kernel, which starts when all programs have."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def follow(OVERLAP: tl.constexpr):
    """Wait for the kernel before, then permit the next."""
    wait(OVERLAP)
    permit(OVERLAP)


def compile_together(launches: Sequence[tuple[Kernel, list[Any], dict[str, Any]]]) -> None:
    """Compile the kernels of several launches in parallel, before their first launches would compile them one by one.

    A launch is a kernel, its arguments and its options. A dtype stands for a tensor, and descriptors are of tensors
    without data. A kernel that fails here is compiled again by its launch, and a RuntimeWarning names the first error.
    """
    driver, knobs = triton.runtime.driver.active, triton.knobs.runtime
    device = driver.get_current_device()
    failed: list[BaseException] = []
    builds: list[Future[Any]] = []

    def compile_one(build: Callable[[], Any]) -> Any:
        driver.set_current_device(device)  # a new thread starts on the first device
        return build()

    def submit(build: Callable[[], Any]) -> Future[Any]:
        builds.append(threads.submit(compile_one, build))
        return builds[-1]

    # Older Tritons also compile a launcher in C, which takes as long as its kernel, and later find it on disk. Its code
    # depends only on the kernel's signature, so both compile at the same time.
    def start_launcher(*, fn: Any, compile: dict[str, Any], **_: Any) -> None:
        signature = compile["signature"]
        source = ASTSource(fn.jit_function, signature, compile["constants"], compile["configs"][0])
        threads.submit(driver.launcher_cls, source, _NoMetadata(signature))

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads, knobs.scope():
        knobs.jit_cache_hook = knobs.jit_cache_hook or start_launcher
        with triton.AsyncCompileMode(types.SimpleNamespace(submit=submit), ignore_errors=True):
            for kernel, given, options in launches:
                try:
                    kernel.warmup(*given, grid=(1,), **options)
                except Exception as error:
                    failed.append(error)
    failed += [error for error in map(Future.exception, builds) if error is not None]
    if failed:
        warnings.warn(f"{len(failed)} kernels are compiled one by one: {failed[0]!r}", RuntimeWarning, stacklevel=2)


class _NoMetadata:
    """Stands for the metadata of a kernel that is not compiled yet: its descriptors, and None for any other field."""

    def __init__(self, signature: dict[str, Any]) -> None:
        # A launcher asks only whether they are there, as they are for each descriptor on a GPU with TMA.
        self.tensordesc_meta = [each for each in signature.values() if str(each).startswith("tensordesc")]

    def __getattr__(self, name: str) -> None:
        return None


class CachedKernels(NamedTuple):
    """Compiled kernels of a process, as a folder of compiled regions stores them."""

    hashes: dict[str, str]  # a kernel's source, options and environment -> Triton's hash of the compiled kernel
    files: dict[str, dict[str, bytes]]  # a folder in Triton's cache -> the contents of its files by name
    # A launch -> the arguments of its ASTSource after the function, and its key in ``hashes``.
    launches: dict[Any, tuple[Any, Any, Any, str]]


# The kernels of all folders that this process has loaded; and those in use, by device and key in ``hashes``.
_loaded = CachedKernels({}, {}, {})
_running: WeakValueDictionary[tuple[int, str], CompiledKernel] = WeakValueDictionary()


def cached_kernels() -> CachedKernels:
    """All kernels that this process has compiled, with their binaries, metadata and launchers."""
    files: dict[str, dict[str, bytes]] = {}

    def note(path: str) -> None:
        folder, name = os.path.split(path)
        with open(path, "rb") as file:
            files.setdefault(os.path.basename(folder), {})[name] = file.read()

    class Noting(FileCacheManager):  # type: ignore[misc]
        def get_file(self, filename: str) -> str | None:
            if (path := super().get_file(filename)) is not None:
                note(path)
            return path  # type: ignore[no-any-return]

    # Caches of a device are tuples, of which the first is by specialisation.
    compiled = [each for kernel in KERNELS for cache in kernel.device_caches.values() for each in cache[0].values()]
    launched = {launch: each for kernel in KERNELS for launch, each in kernel.launched() if hasattr(each, "made_of")}
    compiled = [*{id(each): each for each in [*compiled, *launched.values()]}.values()]
    binaries = (".json", ".cubin", ".hsaco")
    for each in compiled:
        for name, path in getattr(each, "metadata_group", {}).items():
            if name.endswith(binaries) and os.path.exists(path):
                note(path)
    if files:
        # Triton also compiled each kernel's launcher, from C, and finds it by its source: load it to note its file.
        driver = triton.runtime.driver.active
        with triton.knobs.cache.scope():
            triton.knobs.cache.manager_class = Noting
            type(driver.utils).__init__(driver.utils)
            for each in compiled:
                driver.launcher_cls(each.src, each.metadata)
    hashes = {each.made_of: each.hash for each in compiled if hasattr(each, "made_of")}
    launches = {
        launch: (each.src.signature, each.src.constants, each.src.attrs, each.made_of)
        for launch, each in launched.items()
    }
    return CachedKernels(hashes, files, launches)


def load_kernels(kernels: CachedKernels) -> None:
    """Write the kernels' files into Triton's cache, so that Triton loads the kernels instead of compiling them."""
    for folder, contents in kernels.files.items():
        cache = FileCacheManager(folder)
        paths = {name: cache.get_file(name) or cache.put(data, name) for name, data in contents.items()}
        for name in paths:
            if name.endswith(".json"):
                cache.put_group(name, paths)
    _loaded.hashes.update(kernels.hashes)
    _loaded.launches.update(kernels.launches)


def _compile(compile: Callable[..., Any], source: Any, *, options: dict[str, Any], **how: Any) -> Any:
    """Triton's ``compile``, except for kernels of a loaded folder, which are loaded."""
    made_of = repr((source.hash(), sorted(options.items()), _environment()))
    compiled = _load(source, made_of)
    if compiled is None:
        compiled = compile(source, options=options, **how)
        compiled.made_of = made_of
    return compiled


def _load(source: Any, made_of: str) -> Any:
    """A kernel of a loaded folder, or None. It is found without Triton's cache key, a slow hash of Triton's files."""
    known = None if triton.knobs.compilation.always_compile else _loaded.hashes.get(made_of)
    if known is None:
        return None
    here = triton.runtime.driver.active.get_current_device(), made_of
    compiled = _running.get(here)
    if compiled is None and (files := get_cache_manager(known).get_group(f"{source.name[:150]}.json")):
        compiled = _running[here] = CompiledKernel(source, files, known)
        compiled.made_of = made_of
    return compiled


def _environment() -> list[tuple[str, str]]:
    """Environment variables that Triton compiles kernels anew for."""
    return sorted(get_cache_invalidating_env_vars().items())


def by_tile(value: Any, tensor: Tensor, tile: list[int] | None) -> Any:
    """``value``, or a descriptor of the tensor if it is read by tiles."""
    return value if tile is None else TensorDescriptor.from_tensor(tensor, tile)


def with_base(like: TensorDescriptor, tensor: Tensor | None) -> TensorDescriptor:
    """A descriptor of another tensor of the same layout, without the checks, which take the host a microsecond."""
    made = object.__new__(TensorDescriptor)
    made.__dict__ = {**like.__dict__, "base": tensor}
    return made


# Triton's launcher is a Python function that allocates scratch memory, which our kernels do not ask for, and calls a
# launch in C. Key: the launcher's parameters after grid, stream and function, which tell its versions apart. Value:
# the arguments that it passes to C after these three.
_BY_PYTHON = "metadata, None, None, None, {values}"
_IN_C = {
    ("args",): "launcher.launch_cooperative_grid, launcher.launch_pdl, None, None, " + _BY_PYTHON,
    ("kernel_metadata", "launch_metadata", "launch_enter_hook", "launch_exit_hook", "args"): (
        "launcher.launch_cooperative_grid, launcher.launch_pdl, metadata, None, None, None, None, None, "
        "launcher.arg_annotations, launcher.kernel_signature, ({values},)"
    ),
}


def _arguments_in_c(launcher_class: Any) -> str | None:
    """What this Triton's launcher passes to C, None for a version that is not known."""
    parameters = [*inspect.signature(launcher_class.__call__).parameters][1:]
    known = parameters[:5] == ["gridX", "gridY", "gridZ", "stream", "function"]
    return _IN_C.get(tuple(parameters[5:])) if known else None


def _launch_in_c(launcher: Any) -> Callable[..., None] | None:
    """The launch in C of a compiled kernel; None where the launcher also allocates, or instruments the kernel."""
    sizes = launcher.global_scratch_size, launcher.profile_scratch_size
    return None if any(sizes) or getattr(launcher, "gsan_enabled", False) else launcher.launch


class Kernel(JITFunction):  # type: ignore[misc]
    """A Triton kernel whose launches are kept.

    Triton finds the compiled kernel of a launch anew each time, which takes the host two to three times as long as the
    launch. Here a launch like an earlier one goes to the kernel that Triton returned then. It runs on the device of its
    tensors, whichever is current. A compiled region launches by ``bound`` where its graph runs as it was traced. Where
    Inductor compiles the graph, none of this is called.
    """

    compile: Any  # Triton's

    def __init__(self, function: Callable[..., Any], **options: Any) -> None:
        super().__init__(function, **options)
        self._overlaps = any(each.name == "OVERLAP" for each in self.params)
        KERNELS.append(self)
        # Device -> Triton's cache, and the launches that are kept: key of ``_described`` -> compiled kernel, and its
        # arguments after the positional ones. Another object as Triton's cache makes these launches invalid.
        self._kept: dict[int, tuple[Any, dict[Any, Any]]] = {}
        # Triton only checks that sizes without specialisation fit 32 bits, and checks nothing of floats.
        self._sized = [each.do_not_specialize for each in self.params]
        self._fixed = [each.is_constexpr for each in self.params]

    def create_binder(self) -> Any:
        """Triton's caches for a device, filled by ``_compile``."""
        made = super().create_binder()
        self.compile = functools.partial(_compile, self.compile)
        return made

    def options_on(self, device: int) -> dict[str, bool]:
        """More options of a launch on a device."""
        return _overlap(device) if self._overlaps else {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        return functools.partial(self.launch, grid)

    def launch(self, grid: Any, *arguments: Any, **options: Any) -> Any:
        """``kernel[grid](*arguments, **options)``; returns the compiled kernel."""
        driver = triton.runtime.driver.active
        device = driver.get_current_device()
        there = arguments[0].get_device() if arguments and isinstance(arguments[0], Tensor) else -1
        if there != device and there != -1:  # Triton launches on the current device, wherever the tensors are
            with torch.cuda.device(there):
                return self.launch(grid, *arguments, **options)
        if self._overlaps:
            options |= _overlap(device)
        key, values = self._described(arguments, options)
        if key is None or self._is_watched():
            return self.run(*arguments, grid=grid, warmup=False, **options)
        cache, kept = self._kept.get(device, (None, {}))
        found = kept.get(key) if cache is self.device_caches.get(device) else None
        if found is None:
            loaded = self._from_folder(key)
            compiled = loaded or self.run(*arguments, grid=grid, warmup=False, **options)
            found = compiled, self._unnamed(len(arguments), options)
            self._keep(device, key, found, options)
            if loaded is None:
                return compiled
        compiled, rest = found
        stream = driver.get_current_stream(device)
        x, y, z = (*grid, 1, 1)[:3]
        # A kernel just loaded has its function only once it is asked for what runs it.
        run = compiled.run
        run(x, y, z, stream, compiled.function, compiled.packed_metadata, None, None, None, *values, *rest)
        return compiled

    def launched(self) -> Iterator[tuple[Any, Any]]:
        """Launches that are kept, by their keys in a folder, and their compiled kernels."""
        for device, (cache, kept) in self._kept.items():
            if cache is self.device_caches.get(device):
                yield from ((self._key_in_folder(key), compiled) for key, (compiled, _) in kept.items())

    def _key_in_folder(self, key: Any) -> Any:
        """A launch's key, with the kernel's name, the GPU's architecture and Triton's settings."""
        knobs, target = triton.knobs, triton.runtime.driver.active.get_current_target()
        settings = *_environment(), knobs.runtime.debug, knobs.compilation.instrumentation_mode
        return f"{self.fn.__module__}.{self.fn.__qualname__}", key, str(target), settings

    def _from_folder(self, key: Any) -> Any:
        """The kernel that a loaded folder has for a launch, or None.

        Triton is not asked: at its first launch it imports Gluon, a tenth of a second.
        """
        found = _loaded.launches.get(self._key_in_folder(key)) if _loaded.launches else None
        return found and _load(ASTSource(self, *found[:3]), found[3])

    def bound(
        self, grid: tuple[int, ...], arguments: list[Any], positions: list[int], options: dict[str, Any],
        tiles: Sequence[list[int] | None] = (),
    ) -> Callable[..., None]:  # fmt: skip
        """A launch as a function of the tensors at these positions; nothing else changes between its calls.

        A tensor with a shape in ``tiles`` is read by tiles of that shape, and keeps its layout. All keep their dtypes
        and are on the current device. A call takes half the host's time of ``kernel[grid](...)``.
        """
        driver = triton.runtime.driver.active
        tile_of = dict(zip(positions, tiles or [None] * len(positions), strict=True))
        tiled = [position for position, tile in tile_of.items() if tile]
        values = [*arguments, *self._unnamed(len(arguments), options)]
        in_c = _arguments_in_c(driver.launcher_cls)

        def launch_anew(*tensors: Tensor) -> None:
            given = [*arguments]
            for position, tensor in zip(positions, tensors, strict=True):
                given[position] = by_tile(tensor, tensor, tile_of[position])
            compiled = self.launch(grid, *given, **options)
            first = names["device"] is None and not any(tensor.data_ptr() % 16 for tensor in tensors)
            if first and hasattr(compiled, "packed_metadata"):
                # Without their tensors, whose memory they would keep.
                names.update({f"d{place}": with_base(given[place], None) for place in tiled})
                run = compiled.run if in_c is None else _launch_in_c(compiled.run)
                names.update(run=run, launcher=compiled.run, function=compiled.function)
                names.update(metadata=compiled.packed_metadata, device=driver.get_current_device())

        # Generate code without loops over the arguments, which would take half of the host's time.
        passed = [f"a{place}" if place in tile_of else f"v{place}" for place in range(len(values))]
        for place in tiled:
            passed[place] = f"with_base(d{place}, t{place})"
        tensors, size = ", ".join(f"t{place}" for place in positions), ", ".join(map(str, (*grid, 1, 1)[:3]))
        rest = (in_c or _BY_PYTHON).format(values=", ".join(passed))
        source = f"""
def launch({tensors}):
    {"; ".join(f"a{place} = t{place}.data_ptr()" for place in positions)}
    if run is None or ({" | ".join(f"a{place}" for place in positions)}) % 16 or is_watched():
        launch_anew({tensors})
    else:
        run({size}, stream(device), function, {rest})
"""
        names: dict[str, Any] = {
            "__name__": __name__, "run": None, "device": None, "launch_anew": launch_anew,
            "stream": driver.get_current_stream, "is_watched": self._is_watched,
            "with_base": with_base, **{f"v{place}": value for place, value in enumerate(values)},
        }  # fmt: skip
        exec(compile(source, f"<launch of {self.fn.__name__}>", "exec"), names)
        return names["launch"]  # type: ignore[no-any-return]

    def _described(self, arguments: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, list[Any]]:
        """What Triton compiles a launch for, None if it is not kept; and the arguments, tensors as addresses."""
        # The launcher asks the driver about each tensor, but not about an address.
        key: list[Any] = [*options.items()]
        values: list[Any] = []
        for value, sized, fixed in zip(arguments, self._sized, self._fixed, strict=False):
            if isinstance(value, Tensor):
                address = value.data_ptr()
                key += value.dtype, address % 16 == 0, value.is_cuda
                value = address
            elif isinstance(value, float):
                key.append(value if fixed else float)
            elif value is None or isinstance(value, int):
                key.append(-(2**31) <= value < 2**31 if sized and value is not None else value)
            elif isinstance(value, TensorDescriptor):
                key += value.base.dtype, *value.block_shape, value.padding
            else:
                return None, values
            values.append(value)
        # The compiler's eager backend passes all arguments by name; its tensors belong to this launch alone.
        return tuple(key) if arguments else None, values

    def _is_watched(self) -> bool:
        """True if a profiler of Triton's, or a hook of the kernel's, asks to be called at each launch."""
        runtime = triton.knobs.runtime
        return bool(runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls or self.pre_run_hooks)

    def _keep(self, device: int, key: Any, found: tuple[Any, Any], options: dict[str, Any]) -> None:
        if not hasattr(found[0], "packed_metadata") or any(isinstance(each, Tensor) for each in options.values()):
            return
        cache, kept = self._kept.get(device, (None, {}))
        if cache is not self.device_caches[device] or len(kept) >= MOST_LAUNCHES:
            kept = {}
        self._kept[device] = self.device_caches[device], {**kept, key: found}

    def _unnamed(self, positional: int, options: dict[str, Any]) -> tuple[Any, ...]:
        """Arguments after the positional ones, in the kernel's order."""
        return tuple(options.get(each.name, each.default) for each in self.params[positional:])
