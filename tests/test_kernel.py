"""Triton kernels that are launched from Python: which launches are kept, and that Triton takes every kernel.

Triton runs here on a GPU that is not there: it compiles for one, and launches are counted.
"""

import gc
import inspect
import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

pytest.importorskip("triton", reason="torch came without Triton, which GPUs only need")

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import compile as compile_for_real
from triton.knobs import HookChain
from triton.runtime import _allocation
from triton.runtime.cache import get_cache_manager

from benchmarks.compiler import _forget
from tests import (
    test_bert_model,
    test_gnn_model,
    test_llm_model,
    test_resnet_model,
    test_training_operators,
    test_unet_model,
)
from tests.fake_gpu import Gpu, kernels, lower
from zoo.engine import kernel as kernel_module
from zoo.engine.kernel import Kernel, by_tile, compile_together, follow, kernel


@kernel(do_not_specialize=["rows"])
def _scaled(x, scale, out, rows, columns, COLUMNS: tl.constexpr):
    row, column = tl.program_id(0), tl.arange(0, COLUMNS)
    inside = (column < columns) & (row < rows)
    value = tl.load(x + row * columns + column, inside)
    if scale is not None:
        value *= tl.load(scale + column, column < columns)
    tl.store(out + row * columns + column, value, inside)


@pytest.fixture(autouse=True)
def _nothing_is_kept() -> Iterator[None]:
    yield
    for each in (_scaled, _copied, _tile):
        each.device_caches.clear()


@pytest.fixture
def launched(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Launches as they reach Triton's launcher: the kernel, the grid and the arguments."""
    seen: list[tuple[Any, ...]] = []
    start = lambda source, _: lambda x, y, z, *given: seen.append((source.hash(), (x, y, z, *given[6:])))  # noqa: E731
    monkeypatch.setattr(gpu, "launcher_cls", start)
    return seen


def launches() -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Launches of one kernel, each compiled otherwise by Triton, but for the last two."""
    x, low = torch.randn(2, 32), torch.randn(2, 32, dtype=torch.bfloat16)
    scale, shifted, out = torch.randn(32), torch.randn(33)[1:], torch.empty(2, 32)
    options = {"COLUMNS": 32, "num_warps": 1}
    given = [
        ((x, scale, out, 2, 32), options),
        ((x, None, out, 2, 32), options),
        ((low, scale, out, 2, 32), options),
        ((x, shifted, out, 2, 32), options),
        ((x, scale, out, 2, 31), options),
        ((x, scale, out, 2, 1), options),
        ((x, scale, out, 2**31, 32), options),
        ((x, scale, out, 2, 32), {**options, "COLUMNS": 64}),
        ((x, scale, out, 2, 32), {**options, "num_warps": 2}),
    ]
    # Triton compiles these as the first: a size that is not specialised, and other tensors of the same kind.
    return [*given, ((x, scale, out, 7, 32), options), ((x + 1, scale, out, 2, 32), options)]


def launch(index: int = 0) -> None:
    arguments, options = launches()[index]
    _scaled[(2,)](*arguments, **options)


def test_a_launch_like_an_earlier_one_runs_what_triton_would_run(gpu: Gpu, launched: list[Any], monkeypatch) -> None:
    given = launches()
    for arguments, options in given:
        _scaled.run(*arguments, grid=(2,), warmup=False, **options)
    by_triton, compiled = launched[:], len(gpu.compiled)
    for arguments, options in given:
        _scaled[(2,)](*arguments, **options)
    monkeypatch.setattr(_scaled, "run", lambda *_, **__: pytest.fail("Triton looked the kernel up again"))
    launched.clear()
    for arguments, options in given:
        _scaled[(2,)](*arguments, **options)
    assert len(gpu.compiled) == compiled == len(given) - 2
    assert [each for each, _ in launched] == [each for each, _ in by_triton]
    for (_, ours), (_, tritons) in zip(launched, by_triton, strict=True):
        assert [*ours] == [each.data_ptr() if isinstance(each, Tensor) else each for each in tritons]


@pytest.mark.parametrize("between", [False, True], ids=["tensors-first", "a-constant-between"])
def test_a_bound_launch_runs_what_triton_would_run(between: bool, launched: list[Any], monkeypatch) -> None:
    out, options = torch.empty(2, 32), {"COLUMNS": 32, "num_warps": 1}
    scale = None if between else torch.randn(32)
    positions = [0, 2] if between else [0, 1, 2]
    inputs = [torch.randn(2, 32), torch.randn(65)[1:].view(2, 32), torch.randn(2, 32)]
    for x in inputs:
        _scaled.run(x, scale, out, 2, 32, grid=(2,), warmup=False, **options)
    expected = [(kernel, [each.data_ptr() if isinstance(each, Tensor) else each for each in given])
                for kernel, given in launched]  # fmt: skip
    bound = _scaled.bound((2, 1, 1), [None, None, None, 2, 32], positions, options)
    tensors = [[each for each in (x, scale, out) if each is not None] for x in inputs]
    for _ in range(2):
        launched.clear()
        for each in tensors:
            bound(*each)
    assert [(kernel, [*given]) for kernel, given in launched] == expected
    monkeypatch.setattr(_scaled, "launch", lambda *_, **__: pytest.fail("the launch was not kept"))
    launched.clear()
    for each in (tensors[0], tensors[2]):
        bound(*each)
    assert [(kernel, [*given]) for kernel, given in launched] == [expected[0], expected[2]]


@pytest.mark.parametrize("scratch", [0, 16])
def test_a_bound_launch_hands_to_c_what_tritons_launcher_does(scratch: int, gpu: Gpu, monkeypatch) -> None:
    from triton.backends.nvidia.driver import CudaLauncher

    in_c, by_python = [], []

    class Launcher(CudaLauncher):
        gsan_enabled, num_ctas, launch_cooperative_grid, launch_pdl = False, 1, False, True
        global_scratch_align = profile_scratch_align = 1
        arg_annotations, kernel_signature, profile_scratch_size = "annotations", "signature", 0

        def __init__(self, *_: Any) -> None:
            self.global_scratch_size = scratch

        def launch(self, *given: Any) -> None:
            flat = pytree.tree_leaves(given)
            flat = [each.data_ptr() if isinstance(each, Tensor) else each for each in flat]
            in_c.append([None if isinstance(each, HookChain) else each for each in flat])

        def __call__(self, *given: Any) -> None:
            by_python.append(given)
            super().__call__(*given)

    Launcher.__call__.__signature__ = inspect.signature(CudaLauncher.__call__)
    monkeypatch.setattr(gpu, "launcher_cls", Launcher)
    allocator = _allocation._allocator.set(lambda size, *_: size)
    out, scale, inputs = torch.empty(2, 32), torch.randn(32), [torch.randn(2, 32) for _ in range(2)]
    bound = _scaled.bound((2,), [None, None, None, 2, 32], [0, 1, 2], {"COLUMNS": 32, "num_warps": 1})
    for x in inputs * 2:
        bound(x, scale, out)
    _allocation._allocator.reset(allocator)
    assert in_c[:2] == in_c[2:] and len(by_python) == (4 if scratch else 1)
    assert in_c[0][0:3] == [2, 1, 1] and in_c[0][-5:] == [scale.data_ptr(), out.data_ptr(), 2, 32, 32]


@kernel
def _tile(x, out, COLUMNS: tl.constexpr):
    row = tl.program_id(0)
    out.store([row, 0], x.load([row, 0]))


def test_a_bound_launch_describes_tiles_anew(launched: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    bound = _tile.bound((2,), [None, None], [0, 1], {"COLUMNS": 32}, [[1, 32], [1, 32]])
    given = [(torch.randn(2, 32), torch.empty(2, 32)) for _ in range(3)]
    bound(*given[0])
    monkeypatch.setattr(_tile, "run", lambda *_, **__: pytest.fail("Triton looked the kernel up again"))
    for x, out in given[1:]:
        bound(x, out)
    for (x, out), (_, (*size, first, second, columns)) in zip(given, launched, strict=True):
        assert size == [2, 1, 1]
        assert first.base is x and second.base is out and columns == 32
        assert ([*first.shape], [*first.strides], first.block_shape) == ([*x.shape], [*x.stride()], [1, 32])


def test_launches_with_tiles_run_what_triton_would_run(launched: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    wide, low = torch.randn(4, 64), torch.randn(4, 64, dtype=torch.bfloat16)
    pairs = [(wide, [1, 32]), (wide[:2], [1, 32]), (wide[:, :32], [1, 32]), (wide, [2, 32]), (low, [1, 32])]
    given = [(by_tile(tensor, tensor, tile),) * 2 for tensor, tile in pairs]
    for tiles in given:
        _tile.run(*tiles, grid=(2,), warmup=False, COLUMNS=32)
    expected = launched[:]
    for _ in range(2):
        launched.clear()
        for tiles in given:
            _tile[(2,)](*tiles, COLUMNS=32)
        assert [each for each, _ in launched] == [each for each, _ in expected]
        for (_, ours), (_, tritons) in zip(launched, expected, strict=True):
            assert all(one is other or one == other for one, other in zip(ours, tritons, strict=True))
        monkeypatch.setattr(_tile, "run", lambda *_, **__: pytest.fail("Triton looked the kernel up again"))


def test_a_launch_runs_on_the_device_of_its_tensors(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    class OnTheSecond(torch.Tensor):
        def get_device(self) -> int:
            return 1

    current, launched_on = [0], []

    @contextmanager
    def device(index: int) -> Iterator[None]:
        before, current[0] = current[0], index
        yield
        current[0] = before

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(gpu, "get_current_device", lambda: current[0])
    monkeypatch.setattr(gpu, "launcher_cls", lambda *_: lambda *_: launched_on.append(current[0]))
    arguments, options = launches()[0]
    for first in (arguments[0], arguments[0].as_subclass(OnTheSecond)) * 2:
        _scaled[(2,)](first, *arguments[1:], **options)
    assert launched_on == [0, 1, 0, 1] and current == [0]


def test_launches_that_were_kept_end_with_tritons_cache_and_none_is_kept_where_somebody_watches(gpu, monkeypatch):
    for _ in range(2):
        launch()
    gc.unfreeze()  # what conftest.py froze is not listed
    _forget()
    launch()
    assert gpu.compiled == ["_scaled"] * 2
    arguments, options = launches()[0]
    bound = _scaled.bound((2,), [None, None, None, *arguments[3:]], [0, 1, 2], options)
    for _ in range(2):
        launch()
        bound(*arguments[:3])
    watched: list[str] = []
    monkeypatch.setattr(_scaled, "pre_run_hooks", [lambda *_, **__: watched.append("launch")])
    launch()
    bound(*arguments[:3])
    assert watched == ["launch"] * 2


def test_kernels_are_compiled_together_and_one_that_does_not_compile_is_named(gpu, monkeypatch):
    given = launches()
    described = [[each.dtype if isinstance(each, Tensor) else each for each in arguments] for arguments, _ in given]
    aligned = [index for index in range(len(given)) if index != 3]  # the fourth has a tensor that is not
    compile_together([(_scaled, described[index], given[index][1]) for index in aligned * 2])
    compiled = len(gpu.compiled)
    assert compiled >= len(given) - 3
    # Rows are not specialised: one kernel for all numbers of them.
    compile_together([(_scaled, [*described[0][:3], rows, 32], given[0][1]) for rows in range(2, 20)])
    assert len(gpu.compiled) == compiled
    _scaled.device_caches.clear()
    compile_together([(_scaled, [*described[0][:3], rows, 32], given[0][1]) for rows in range(2, 20)])
    assert len(gpu.compiled) == compiled + 1
    compile_together([(_scaled, described[index], given[index][1]) for index in aligned])
    compiled = len(gpu.compiled)
    for index in aligned:
        launch(index)
    assert len(gpu.compiled) == compiled, "a launch compiled its kernel again"
    _scaled.device_caches.clear()
    for patch in ((triton.compiler, "compile"), (_scaled, "warmup")):
        monkeypatch.setattr(*patch, lambda *_, **__: 1 / 0)
        with pytest.warns(RuntimeWarning, match="1 kernels are compiled one by one: ZeroDivisionError"):
            compile_together([(_scaled, described[0], given[0][1])])


def test_the_launcher_of_a_kernel_that_reads_tiles_is_compiled_at_the_same_time(gpu, monkeypatch) -> None:
    tiles = [by_tile(None, torch.empty(1, 32, device="meta"), [1, 32])] * 2
    started, descriptors = threading.Event(), []

    def launcher(source: Any, metadata: Any) -> None:
        descriptors.append(len(metadata.tensordesc_meta))  # older Tritons write them into the launcher's code
        started.set()

    def compile(source: Any, **_: Any) -> Any:
        assert started.wait(20)
        return SimpleNamespace(src=source)

    monkeypatch.setattr(gpu, "launcher_cls", launcher)
    monkeypatch.setattr(triton.compiler, "compile", compile)
    compile_together([(_tile, tiles, {"COLUMNS": 32})])
    assert descriptors == [2]


def calls() -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    of_families = {
        "bert": test_bert_model.calls(), "gnn": test_gnn_model.calls(), "llm": test_llm_model.calls(),
        "resnet": test_resnet_model.calls(), "training": test_training_operators.calls(),
        "unet": test_unet_model.calls(),
    }  # fmt: skip
    return {f"{family}: {name}": call for family, each in of_families.items() for name, call in each.items()}


def run(operator: Callable[..., Any], arguments: tuple[Any, ...]) -> list[Tensor | None]:
    out = operator(*arguments)
    returned = [each for each in (out if isinstance(out, tuple) else (out,)) if each is not None]
    learning = [each for each in returned if each.requires_grad]
    wanted = [each for each in arguments if isinstance(each, Tensor) and each.requires_grad]
    # Norms pass no gradient that is the same everywhere.
    grads = [
        torch.arange(1.0, each.numel() + 1, device=each.device).cos().view(each.shape).to(each.dtype)
        for each in learning
    ]
    return [*returned, *(torch.autograd.grad(learning, wanted, grads, allow_unused=True) if learning else ())]


def test_fractions_are_constants_of_kernels_that_models_launch(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    # Inductor passes others in double precision, in which a kernel computes something else or does not compile.
    seen: set[str] = set()
    by_triton = Kernel.run

    def note(kernel: Kernel, *arguments: Any, **options: Any) -> Any:
        given = [*zip(kernel.params, arguments, strict=False), *((p, options.get(p.name)) for p in kernel.params)]
        if any(isinstance(value, float) and not parameter.is_constexpr for parameter, value in given):
            seen.add(kernel.fn.__name__)
        return by_triton(kernel, *arguments, **options)

    monkeypatch.setattr(Kernel, "run", note)
    for name, call in calls().items():
        if not name.startswith("training: "):  # an optimizer's step is never in a compiler's graph
            run(*call)
    assert not seen


def test_a_second_derivative_is_refused(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Kernel, "launch", lambda *_, **__: None)
    refused = set()
    for name, (operator, arguments) in calls().items():
        given = [each for each in arguments if isinstance(each, Tensor) and each.requires_grad]
        out = operator(*arguments)
        out = [each for each in (out if isinstance(out, tuple) else (out,)) if each is not None and each.requires_grad]
        if not given or not out:
            continue
        sums = sum(each.float().square().sum() for each in out)
        first = torch.autograd.grad(sums, given, create_graph=True, allow_unused=True)
        with pytest.raises(RuntimeError, match="differentiate twice|once_differentiable"):
            sum(each.float().square().sum() for each in first if each is not None).backward()
        refused.add(name.partition(":")[0])
    assert refused == {"bert", "gnn", "llm", "resnet", "training", "unet"}


@kernel
def _followed(x, out, OVERLAP: tl.constexpr):
    follow(OVERLAP)
    tl.store(out + tl.program_id(0), tl.load(x + tl.program_id(0)))


@pytest.mark.parametrize("architecture", [80, 90])
def test_a_kernel_starts_before_the_last_one_ends_where_the_gpu_can(gpu: Gpu, monkeypatch, architecture: int) -> None:
    kernel_module._overlap.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: divmod(architecture, 10))
    target = GPUTarget("cuda", architecture, 32)
    monkeypatch.setattr(gpu, "get_current_target", lambda: target)
    _followed.device_caches.clear()
    _followed[(4,)](torch.empty(4), torch.empty(4), OVERLAP=False)
    _followed.bound((4,), [None, None], [0, 1], {"OVERLAP": False, **_followed.options_on(0)})(
        torch.empty(4), torch.empty(4)
    )
    kernel_module._overlap.cache_clear()
    assert gpu.launches == ["_followed"] * 2 and len(gpu.sources) == 1, "a bound launch is the same one"
    ((source, options),) = gpu.sources.values()
    code = compile_for_real(source, target=target, options=options).asm["ptx"]
    overlaps = architecture >= 90
    assert bool(options.get("launch_pdl")) == overlaps and ("griddepcontrol.wait" in code) == overlaps
    assert ("griddepcontrol.launch_dependents" in code) == overlaps


@pytest.mark.slow
def test_triton_takes_every_kernel(gpu: Gpu) -> None:
    for call in calls().values():
        run(*call)
    seen = {(source.fn.fn.__module__, source.fn.fn.__name__) for source, _ in gpu.sources.values()}
    assert seen >= {(each.fn.__module__, each.fn.__name__) for each in kernels()}, "an example is missing"
    for source, options in gpu.sources.values():
        lower(source, options)
    launches = kernel_module.cached_kernels().launches
    assert len(launches) >= len(gpu.sources) and pickle.loads(pickle.dumps(launches)) == launches


@kernel
def _copied(x, out, NUMBERS: tl.constexpr):
    tl.store(out + tl.program_id(0), tl.load(x + tl.program_id(0)).to(NUMBERS))


class Utils(SimpleNamespace):
    def __init__(self) -> None:
        """Loads a library that Triton compiled."""
        self.__dict__.update(Gpu().utils.__dict__)


def test_a_compiled_kernel_is_found_in_another_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[Any] = []

    def launcher(source: Any, metadata: Any) -> Any:
        cache = get_cache_manager("ab" * 32)
        if cache.get_file("launcher.so") is None:
            cache.put(b"library", "launcher.so")
            cache.get_file("launcher.so")
        return lambda *given: launched.append([source.hash(), *given[9:]])

    driver = Gpu()
    driver.utils, driver.launcher_cls = Utils(), launcher
    monkeypatch.setattr(triton.runtime.driver, "_active", driver)
    monkeypatch.setattr(kernel_module, "KERNELS", [_copied, _tile])
    monkeypatch.setattr(kernel_module, "_loaded", kernel_module.CachedKernels({}, {}, {}))
    x, out, wide = torch.empty(4), torch.empty(4), torch.empty(2, 32)
    tiles = [by_tile(wide, wide, [1, 32])] * 2

    def start(numbers: Any = tl.float32) -> tuple[list[bool], list[Any]]:
        """Launches in a process that has compiled nothing: the compiler's lookups, and whether each hit; launches."""
        hits: list[bool] = []
        launched.clear()
        for each in (_copied, _tile):
            each.device_caches.clear()
        with triton.knobs.compilation.scope():
            triton.knobs.compilation.listener = lambda *, cache_hit, **_: hits.append(cache_hit)
            _copied[(4,)](x, out, NUMBERS=numbers)
            _copied[(4,)](x, out, NUMBERS=numbers, num_warps=4)  # the default: compiled once for both
            _tile[(2,)](*tiles, COLUMNS=32)
        return hits, [[each.data_ptr() if isinstance(each, Tensor) else each for each in row] for row in launched]

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "first"))
    hits, expected = start()
    assert hits == [False, True, False] and len(expected) == 3
    found = pickle.loads(pickle.dumps(kernel_module.cached_kernels()))
    suffixes = [Path(name).suffix for each in found.files.values() for name in each]
    assert sorted(suffixes) == [".cubin", ".cubin", ".json", ".json", ".so"] and len(found.launches) == 3

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "second"))
    kernel_module.load_kernels(found._replace(hashes={}, launches={}))
    assert start() == ([True] * 3, expected)
    assert [path.read_bytes() for path in (tmp_path / "second").rglob("launcher.so")] == [b"library"]

    kernel_module.load_kernels(found._replace(launches={}))
    with monkeypatch.context() as patch:
        patch.setattr(triton.runtime.cache, "triton_key", lambda: pytest.fail("Triton read all of itself for its key"))
        assert start() == ([], expected)
        kernel_module.load_kernels(found)
        with monkeypatch.context() as within:
            within.setattr(Kernel, "run", lambda *_, **__: pytest.fail("Triton looked the kernel up"))
            assert start() == ([], expected) and len(kernel_module._running) == 2
        again = kernel_module.cached_kernels()
        assert (again.hashes, again.launches) == (found.hashes, found.launches)
    assert start(tl.float64)[0] == [False, True], "another kernel"
    for changed, name, value, lookups in (
        (triton.knobs.compilation, "always_compile", True, [False] * 3),
        (triton.knobs.runtime, "debug", True, [False, True, False]),
        (driver, "get_current_target", lambda: GPUTarget("cuda", 80, 32), [False, True, False]),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(changed, name, value)
            assert start()[0] == lookups
