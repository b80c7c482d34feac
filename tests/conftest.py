"""What every test relies on: caches of its own, a compiler without memory of the last test, and honest GPU tests."""

from __future__ import annotations

import gc
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

# Before torch is imported. A compiler cache that outlives the run would let a test pass by what an earlier run left
# there. Workers of pytest-xdist inherit the folder and its variables from the process that started them.
_OWN_CACHE = "TORCHINDUCTOR_CACHE_DIR" not in os.environ
if _OWN_CACHE:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="regional-zoo-tests-")
    os.environ["TRITON_CACHE_DIR"] = os.path.join(os.environ["TORCHINDUCTOR_CACHE_DIR"], "triton")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# Or Inductor asks the C++ compiler what vector instructions there are, ten seconds in every new cache folder, and many
# tests begin with one. What the processor says of itself is enough.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

import torch  # noqa: E402

if os.environ.get("TRITON_INTERPRET") == "1":
    import tests.interpreter  # noqa: F401

if TYPE_CHECKING:
    from tests.fake_gpu import Gpu


def pytest_unconfigure(config: pytest.Config) -> None:
    if _OWN_CACHE:
        shutil.rmtree(os.environ["TORCHINDUCTOR_CACHE_DIR"], ignore_errors=True)


def pytest_collection_finish(session: pytest.Session) -> None:
    # The garbage collector would look through all that was imported, half a second each time, whenever a test compiles.
    gc.collect()
    gc.freeze()


def _asks_for_gpu(config: pytest.Config) -> bool:
    return re.search(r"\bgpu\b", config.option.markexpr) is not None


# Last, when -m has made its choice: what is left of "not gpu" holds no GPU test.
@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # Slow ones first, the minutes in the interpreter before all: what is left at the end is short.
    items.sort(key=lambda item: (item.get_closest_marker("slow") is None, "in_the_interpreter" not in item.name))
    if torch.cuda.is_available() or _asks_for_gpu(config):
        return
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if gpu:
        config.hook.pytest_deselected(items=gpu)
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.fail("a test marked gpu was asked for by -m, and torch sees no CUDA device", pytrace=False)


def pytest_report_header(config: pytest.Config) -> str:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no CUDA device: gpu tests are left out"
    return f"torch {torch.__version__}, {device}"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    """A GPU that is not there, for Triton."""
    pytest.importorskip("triton", reason="torch came without Triton, which GPUs only need")
    from tests.fake_gpu import in_place

    yield from in_place(monkeypatch)


@pytest.fixture(autouse=True)
def _fresh_compiler_and_seed() -> Iterator[None]:
    """Compiled code, recompile counts and random state do not pass from one test to the next."""
    torch.manual_seed(0)
    yield
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    device: str = request.param
    return device


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For tensors so small that threads would mostly wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def exact_norms() -> Iterator[None]:
    """transformers rounds its norms to float32 in every dtype; in here its models in float64 are float64 throughout."""
    import transformers

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * scaled.to(x.dtype)

    with pytest.MonkeyPatch.context() as patch:
        for name in ("llama", "mistral", "qwen2", "qwen3"):
            module = getattr(getattr(transformers.models, name), f"modeling_{name}")
            patch.setattr(getattr(module, f"{name.capitalize()}RMSNorm"), "forward", forward)
        yield


@pytest.fixture
def no_worker_stays(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Workers of the benchmark compile by a light backend, and none outlives the test."""
    from benchmarks.process import kill_all
    from tests.runs import LIGHT

    for name, value in LIGHT.items():
        monkeypatch.setenv(name, value)
    yield
    kill_all()


@pytest.fixture
def eager_backend(monkeypatch: pytest.MonkeyPatch, one_thread: None) -> Iterator[None]:
    """Arms of the benchmark in this process, compiled by a light backend; what an arm sets is put back."""
    import torch._inductor.config as inductor

    monkeypatch.setenv("BENCHMARKS_BACKEND", "eager")
    with inductor.patch(freezing=False):
        yield
