"""Kernels that are compiled while a region is traced: which ones, by whom, and that nobody else notices.

Triton runs here on a GPU that is not there: it compiles for one, and launches are counted.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.compiler import _forget
from tests import (
    test_bert_kernels,
    test_gnn_kernels,
    test_gradients,
    test_llm_kernels,
    test_resnet_kernels,
    test_training_kernels,
    test_unet_kernels,
)
from tests.fake_gpu import MODULES, Gpu, forget_compiled, kernels, lower, settle, wait_for_threads
from zoo import ahead
from zoo.llm import operators as llm
from zoo.resnet import depth
from zoo.unet import operators as unet

ROOT = Path(__file__).resolve().parent.parent
# Library calls, without a kernel of ours.
WITHOUT_KERNELS = {"conv_act", "linear_relu", "lowered", "weight_gradient"}
pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None, reason="torch came without Triton, which GPUs only need"
    ),
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION is unset:UserWarning"),
]


# --- which kernels ---


def calls() -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    images, weight = torch.randn(2, 3, 16, 12), torch.randn(8, 3, 7, 7, requires_grad=True)
    x = torch.randn(2, 12, 3, 5).requires_grad_()
    of_families = {
        "bert": test_bert_kernels.calls(),
        "gnn": test_gnn_kernels.operator_calls(),
        "gradients": test_gradients.calls(),
        "llm": test_llm_kernels.calls(),
        "resnet": test_resnet_kernels.calls(),
        "training": test_training_kernels.calls(),
        "unet": test_unet_kernels.calls(),
        "stem": {
            "squares": (depth.space_to_depth, (images, 4, 11, 9, 16)),
            "squares of a view": (depth.space_to_depth, (images[:, :, 1:, 1:], 4, 11, 9, 16)),
            "convolution": (depth.stem_conv, (images, weight)),
        },
        "views": {
            "rows that do not begin on a vector": (llm.swiglu, (torch.randn(3, 9)[:, 1:],)),
            "a shift in other strides": (
                unet.native_group_norm,
                (x, torch.randn(12, 2).t(), torch.randn(12), torch.randn(12), 4, 1e-5, True),
            ),
        },
    }
    return {f"{family}: {name}": call for family, each in of_families.items() for name, call in each.items()}


class Recorder(TorchDispatchMode):
    """The operators of ours that ran, those of the backward among them."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: list[tuple[Any, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace.startswith("zoo_"):
            self.ran.append((func, args))
        return func(*args, **(kwargs or {}))


def launched_by(operator: Callable[..., Any], arguments: tuple[Any, ...]) -> list[tuple[Any, tuple[Any, ...]]]:
    """Run an operator and its backward, and say what ran."""
    with Recorder() as recorder:
        out = operator(*arguments)
        outputs = [each for each in (out if isinstance(out, tuple) else (out,)) if each is not None]
        wanted = [each for each in arguments if isinstance(each, Tensor) and each.requires_grad]
        given = [each for each in outputs if each.requires_grad]
        if given:
            grads = [torch.ones_like(each) for each in given]
            torch.autograd.grad(given, wanted, grads, allow_unused=True)
    return recorder.ran


def on_gpu(value: Any) -> Any:
    """The same without data, inside of a fake mode."""
    if isinstance(value, Tensor):
        return ahead.describe(value)._replace(device=torch.device("cuda", 0)).empty()
    return value


def trace(ran: list[tuple[Any, tuple[Any, ...]]]) -> None:
    """Ask for the shapes of operators' outputs, as a compiler does."""
    mode = FakeTensorMode()
    with tracing(TracingContext(mode)), mode, torch.no_grad():
        for operator, arguments in ran:
            operator(*(on_gpu(each) for each in arguments))


@pytest.mark.parametrize("name", calls())
def test_what_is_compiled_ahead_is_what_is_launched(name: str, gpu: Gpu, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "zoo.ahead")
    ran = launched_by(*calls()[name])
    launched, count = gpu.asked, len(gpu.launches)
    if "no rows" not in name:
        assert launched and count, "the example runs no kernel"
    gpu.asked = set()
    forget_compiled()
    trace(ran)
    settle()
    assert not caplog.records, "something stood in the way"
    assert gpu.asked == launched
    assert len(gpu.launches) == count


def test_every_operator_has_an_example(gpu: Gpu) -> None:
    reached = {operator.name().split("::")[1] for call in calls().values() for operator, _ in launched_by(*call)}
    known = {name for module in MODULES for name in module._LIBRARY._implementations}
    assert reached == known - WITHOUT_KERNELS


def test_triton_takes_every_kernel(gpu: Gpu) -> None:
    for call in calls().values():
        launched_by(*call)
    settle()
    seen = {(source.fn.fn.__module__, source.fn.fn.__name__) for source, _ in gpu.sources.values()}
    assert seen >= {(each.fn.__module__, each.fn.__name__) for each in kernels()}, "an example is missing"
    for source, options in gpu.sources.values():
        lower(source, options)


# --- by whom, and when ---


@pytest.fixture
def swiglu(gpu: Gpu) -> tuple[Any, tuple[Any, ...]]:
    return torch.ops.zoo_llm.swiglu.default, (torch.randn(3, 8),)


def test_a_launch_waits_for_the_thread_that_compiles_its_kernel(gpu: Gpu, swiglu: Any) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def slowly(name: str) -> None:
        begun.set()
        assert go_on.wait(60)

    gpu.before_compiling = slowly
    trace([swiglu])
    assert begun.wait(60) and not gpu.launches
    threading.Timer(0.2, go_on.set).start()
    operator, arguments = swiglu
    operator(*arguments)
    assert gpu.launches == gpu.compiled == ["_swiglu"]


def test_a_launcher_is_built_while_its_kernel_compiles(gpu: Gpu, swiglu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    build, begun, met = gpu.launcher_cls, threading.Event(), []

    def note(source: Any, metadata: Any) -> Any:
        begun.set()
        return build(source, metadata)

    monkeypatch.setattr(gpu, "launcher_cls", note)
    gpu.before_compiling = lambda name: met.append(begun.wait(5))
    trace([swiglu])
    settle()
    assert met == [True]


def test_a_launch_waits_for_the_launcher_of_its_kernel(gpu: Gpu, swiglu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    build, compiled, built = gpu.launcher_cls, threading.Event(), threading.Event()

    def slowly(source: Any, metadata: Any) -> Any:
        if threading.current_thread().name == "zoo-build-launcher":
            assert compiled.wait(60)
            time.sleep(0.2)
            built.set()
        return build(source, metadata)

    monkeypatch.setattr(gpu, "launcher_cls", slowly)
    gpu.before_compiling = lambda name: compiled.set()
    trace([swiglu])
    assert compiled.wait(60)
    operator, arguments = swiglu
    operator(*arguments)
    assert gpu.launches == ["_swiglu"] and built.is_set()


def test_a_launcher_that_cannot_be_built_alone_is_left_to_the_launch(
    gpu: Gpu, swiglu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    build, failed = gpu.launcher_cls, []

    def needs_its_kernel(source: Any, metadata: Any) -> Any:
        if threading.current_thread().name == "zoo-build-launcher":
            failed.append(source.fn.fn.__name__)
            raise AttributeError("there is no metadata")
        return build(source, metadata)

    monkeypatch.setattr(gpu, "launcher_cls", needs_its_kernel)
    trace([swiglu])
    settle()
    operator, arguments = swiglu
    operator(*arguments)
    assert failed == gpu.launches == gpu.compiled == ["_swiglu"]


def test_what_compiles_a_kernel_may_be_no_closure(gpu: Gpu) -> None:
    class Compiles:
        def __call__(self) -> Any:
            return SimpleNamespace(src=None, metadata=None)

    compilation = ahead._threads.submit(Compiles())
    wait_for_threads()
    assert compilation.succeeded


@pytest.mark.parametrize(("argument", "alone"), [("*fp32", True), ("tensordesc<fp32[64, 32]>", False)])
def test_a_launcher_of_descriptors_is_built_once_its_kernel_is_known(
    argument: str, alone: bool, gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    src, builders = SimpleNamespace(signature={"x": argument, "BLOCK": "constexpr"}), []

    def compile_kernel() -> Any:
        return SimpleNamespace(src=src, metadata=None)

    monkeypatch.setattr(gpu, "launcher_cls", lambda *_: builders.append(threading.current_thread().name))
    ahead._threads.submit(compile_kernel)
    wait_for_threads()
    assert builders == ["zoo-build-launcher"] * alone + ["zoo-compile-ahead"]


def norm_launches() -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Launches of one kernel, each compiled otherwise by Triton, but for the last two."""
    x, low = torch.randn(2, 32), torch.randn(2, 32, dtype=torch.bfloat16)
    vector, shifted, part = torch.randn(32), torch.randn(33)[1:], torch.empty(2, 32)
    options = {"COLUMNS": 32, "num_warps": 1}
    given = [
        ((x, x, vector, vector, None, x, part, 2, 32), options),
        ((x, x, vector, vector, x, x, part, 2, 32), options),
        ((low, low, vector, vector, None, low, part, 2, 32), options),
        ((x, x, shifted, vector, None, x, part, 2, 32), options),
        ((x, x, vector, vector, None, x, part, 2, 31), options),
        ((x, x, vector, vector, None, x, part, 2, 1), options),
        ((x, x, vector, vector, None, x, part, 2**31, 32), options),
        ((x, x, vector, vector, None, x, part, 2, 32), {**options, "COLUMNS": 64}),
        ((x, x, vector, vector, None, x, part, 2, 32), {**options, "num_warps": 2}),
    ]
    # Triton compiles these as the first: a size that is not specialised, and other tensors of the same kind.
    return [*given, ((x, x, vector, vector, None, x, part, 7, 32), options), ((x + 1, *given[0][0][1:]), options)]


def test_a_launch_like_an_earlier_one_runs_what_triton_would_run(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    from zoo.llm.kernels.rms_norm import _backward as kernel

    launched: list[tuple[str, tuple[Any, ...]]] = []
    launcher = lambda source, _: lambda x, y, z, *given: launched.append((source.hash(), (x, y, z, *given[6:])))  # noqa: E731
    monkeypatch.setattr(gpu, "launcher_cls", launcher)
    for arguments, options in norm_launches():
        kernel.run(*arguments, grid=(2,), warmup=False, **options)
    by_triton, kernels = launched[:], len(gpu.compiled)
    for arguments, options in norm_launches():
        kernel[(2,)](*arguments, **options)
    monkeypatch.setattr(kernel, "run", lambda *_, **__: pytest.fail("Triton looked the kernel up again"))
    launched.clear()
    for arguments, options in norm_launches():
        kernel[(2,)](*arguments, **options)
    assert len(gpu.compiled) == kernels == len(norm_launches()) - 2
    assert [each for each, _ in launched] == [each for each, _ in by_triton]
    for (_, ours), (_, tritons) in zip(launched, by_triton, strict=True):
        assert [each if not isinstance(each, torch.Tensor) else each.shape for each in ours] == [
            each if not isinstance(each, torch.Tensor) else each.shape for each in tritons
        ]


def test_a_launch_is_not_kept_where_somebody_watches_launches(
    gpu: Gpu, swiglu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from zoo.llm.kernels.swiglu import _swiglu as kernel

    operator, arguments = swiglu
    operator(*arguments)
    watched: list[str] = []
    monkeypatch.setattr(kernel, "pre_run_hooks", [lambda *_, **__: watched.append("launch")])
    operator(*arguments)
    assert watched == ["launch"]


def test_a_launch_runs_on_the_device_of_its_tensors(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    from zoo.llm.kernels.rms_norm import _backward as kernel

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
    arguments, options = norm_launches()[0]
    for first in (arguments[0], arguments[0].as_subclass(OnTheSecond)) * 2:
        kernel[(2,)](first, *arguments[1:], **options)
    assert launched_on == [0, 1, 0, 1] and current == [0]


def test_launches_that_were_kept_end_with_tritons_cache(gpu: Gpu, swiglu: Any) -> None:
    operator, arguments = swiglu
    for _ in range(2):
        operator(*arguments)
    forget_compiled()
    operator(*arguments)
    assert gpu.compiled == ["_swiglu"] * 2


def test_a_launch_compiles_what_no_thread_has_begun(gpu: Gpu, swiglu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "MOST_THREADS", 0)
    trace([swiglu])
    assert not gpu.compiled
    operator, arguments = swiglu
    operator(*arguments)
    assert gpu.launches == gpu.compiled == ["_swiglu"]
    ahead._threads._waiting.clear()


def test_a_launch_does_not_wait_for_other_kernels(gpu: Gpu, swiglu: Any) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def slowly(name: str) -> None:
        if name == "_swiglu":
            begun.set()
            assert go_on.wait(60)

    gpu.before_compiling = slowly
    trace([swiglu])
    assert begun.wait(60)
    x = torch.randn(2, 8)
    llm.norm_gate(x, x[0], 1e-6, torch.randn(6, 8))
    assert gpu.launches == ["_gate"]
    go_on.set()


@pytest.mark.parametrize("settled", [True, False])
def test_an_error_of_a_thread_is_left_to_the_launch(gpu: Gpu, swiglu: Any, settled: bool) -> None:
    operator, arguments = swiglu

    def fails(name: str) -> None:
        raise OSError("no space left")

    gpu.before_compiling = fails
    trace([swiglu])
    if settled:
        settle()
    with pytest.raises(OSError, match="no space left"):
        operator(*arguments)
    gpu.before_compiling = lambda name: None
    for _ in range(2):
        operator(*arguments)
    assert gpu.launches == ["_swiglu"] * 2 and not ahead._begun


def test_a_trace_compiles_again_what_was_forgotten(gpu: Gpu, swiglu: Any) -> None:
    operator, arguments = swiglu
    operator(*arguments)
    trace([swiglu])
    settle()
    assert gpu.compiled == ["_swiglu"], "it was there"
    for times in (2, 3):
        wait_for_threads()
        _forget()
        trace([swiglu, swiglu])
        wait_for_threads()
        assert gpu.compiled == ["_swiglu"] * times


def test_shapes_that_differ_in_nothing_that_matters_are_compiled_once(gpu: Gpu) -> None:
    shapes = [(n, 64 * n) for n in (3, 5, 7)]
    trace([(torch.ops.zoo_llm.swiglu.default, (torch.randn(*shape),)) for shape in shapes])
    settle()
    assert gpu.compiled == ["_swiglu"]


def test_an_operator_runs_once_a_trace(gpu: Gpu, swiglu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[Any] = []
    monkeypatch.setattr(ahead, "run_without_data", lambda *call: ran.append(call))
    trace([swiglu, swiglu])
    assert len(ran) == 1
    trace([swiglu])
    assert len(ran) == 2 and len(ahead._seen) == 0, "the first trace is over, and not held"


def test_nothing_is_compiled_where_nothing_is_traced(gpu: Gpu, swiglu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    operator, arguments = swiglu
    with FakeTensorMode():
        operator(*(on_gpu(each) for each in arguments))
    monkeypatch.setattr(ahead, "ENABLED", False)
    trace([swiglu])
    settle()
    assert not gpu.asked


def test_triton_really_compiles_in_a_thread(
    swiglu: Any, gpu: Gpu, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import triton.compiler.compiler

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(triton.compiler, "compile", triton.compiler.compiler.compile)
    trace([swiglu])
    settle()
    assert list(tmp_path.rglob("_swiglu.cubin"))
    monkeypatch.setattr(type(kernels()[0]), "_do_compile", None)
    operator, arguments = swiglu
    operator(*arguments)
    assert gpu.launches == ["_swiglu"]


# --- and nobody notices ---


@pytest.mark.parametrize("enabled", [True, False])
def test_sizes_that_vary_stay_one_graph(enabled: bool, gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "ENABLED", enabled)
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda x: llm.swiglu(x.sin()) + 1, backend=counter, fullgraph=True)
    for rows in (5, 9, 33):
        x = torch.randn(rows, 8, requires_grad=True)
        torch._dynamo.mark_dynamic(x, 0)
        compiled(x).sum().backward()
        settle()
        # Both directions of the first size, while it was traced; the others differ in nothing that matters.
        assert set(gpu.compiled) == {"_swiglu", "_swiglu_backward"} and len(gpu.compiled) == 2
    assert counter.frame_count == 1


def test_a_size_that_depends_on_data_is_left_to_the_launch() -> None:
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    size = ShapeEnv().create_unbacked_symint()
    with pytest.raises(ValueError, match="depends on data"):
        ahead.describe((3, [size]))


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout


def test_what_waits_does_not_keep_the_process_from_ending() -> None:
    code = (
        "import time\n"
        "from zoo import ahead\n"
        "def compile_kernel():\n    time.sleep(0.2)\n    print('compiled', flush=True)\n"
        "for _ in range(200): ahead._threads.submit(compile_kernel)\n"
        "time.sleep(0.1)"
    )
    assert 1 <= run(code).count("compiled") <= ahead.MOST_THREADS


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
def test_a_fork_does_not_wait_for_threads_that_it_has_not() -> None:
    code = (
        "import os, time, warnings\n"
        "from zoo import ahead\n"
        "warnings.simplefilter('ignore')\n"
        "def compile_kernel():\n    time.sleep(0.5)\n    return os.getpid()\n"
        "running = [ahead._threads.submit(compile_kernel) for _ in range(20)]\n"
        "time.sleep(0.2)\n"
        "if (child := os.fork()) == 0:\n"
        "    assert running[0].result() == running[-1].result() == os.getpid()\n"
        "    assert ahead._threads.submit(compile_kernel).result() == os.getpid()\n"
        "    os._exit(0)\n"
        "assert os.waitpid(child, 0)[1] == 0 and running[0].result() == os.getpid()\n"
        "print('done')"
    )
    assert run(code) == "done\n"
