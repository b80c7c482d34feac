"""A compiled model's first call begins all kernels: the same that the call launches, and nothing else happens."""

from __future__ import annotations

import copy
import functools
import importlib.util
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

import zoo
from tests.blocks import Stack
from tests.fake_gpu import Gpu, forget_compiled, settle
from zoo import ahead, dry_run
from zoo.bert import pack

MODELS = [
    name
    for name in zoo.list_models()
    if name.endswith("-debug") and hasattr(zoo.create(name, device="meta"), "dry_call")
]
pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None, reason="torch came without Triton, which GPUs only need"
    ),
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION is unset:UserWarning"),
]


@pytest.fixture(autouse=True)
def _values_are_not_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a tensor on a GPU nobody looks at values; the GPU here is a host's."""
    from zoo.unet import checks

    monkeypatch.setattr(checks, "_check_finite", lambda *_: None)


def make(name: str, training: bool) -> tuple[nn.Module, dict[str, Any]]:
    model = zoo.create(name).train(training)
    inputs = zoo.example_inputs(model)
    if name == "llm-debug" and not training:  # kernels are for generating
        model.bfloat16()
        inputs = {
            "input_ids": inputs["input_ids"][:1, :1],
            "position_ids": torch.tensor([[3]]),
            "cache": model.make_cache(1, 16),
        }
    return model, inputs


def run(model: nn.Module, inputs: dict[str, Any]) -> None:
    with torch.set_grad_enabled(model.training):
        outputs = [each for each in pytree.tree_leaves(model(**inputs)) if isinstance(each, torch.Tensor)]
        if model.training:
            sum(each.float().sum() for each in outputs).backward()


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the zoo logged."""
    return [record.getMessage() for record in caplog.records if record.name.startswith("zoo")]


def held_by(model: nn.Module) -> list[Any]:
    """All that attributes of its modules hold."""
    return [leaf for module in model.modules() for leaf in pytree.tree_leaves(dict(vars(module)))]


def test_every_family_with_kernels_takes_part() -> None:
    assert {name.split("-")[0] for name in MODELS} == {"bert", "gcn", "gat", "graphsage", "llm", "resnet", "unet"}


@pytest.mark.parametrize(
    ("name", "training"),
    # What an encoder infers has no kernels of ours.
    [(name, training) for name in MODELS for training in (False, True) if training or name != "bert-debug"],
)
def test_what_is_begun_is_what_is_launched(
    name: str, training: bool, gpu: Gpu, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "zoo")
    model, inputs = make(name, training)
    run(model, inputs)
    launched, count = gpu.asked, len(gpu.launches)
    assert launched
    model.zero_grad()
    gpu.asked = set()
    forget_compiled()
    before = copy.deepcopy(model.state_dict())
    random = torch.get_rng_state()
    with torch.set_grad_enabled(training):
        dry_run.begin_kernels(model, **inputs)
    settle()
    assert not told(caplog), "something stood in the way"
    assert gpu.asked == launched and len(gpu.launches) == count
    assert torch.equal(torch.get_rng_state(), random)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(isinstance(each, FakeTensor) for each in held_by(model))
    for key, value in model.state_dict().items():
        assert type(value) is type(before[key])
        torch.testing.assert_close(value, before[key], rtol=0, atol=0)


# --- when ---


@pytest.fixture
def resnet(gpu: Gpu) -> tuple[nn.Module, dict[str, Any]]:
    return make("resnet-debug", training=False)


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    models: list[Any] = []
    original = dry_run.begin_kernels

    def noted(model: nn.Module, *args: Any, **kwargs: Any) -> None:
        models.append(model)
        original(model, *args, **kwargs)

    monkeypatch.setattr(dry_run, "begin_kernels", noted)
    return models


def test_the_first_call_begins_and_no_other(resnet: Any, gpu: Gpu, begun: list[Any]) -> None:
    model, inputs = resnet
    gpu.before_compiling = lambda name: None if gpu.launches else names.append(name)
    names: list[str] = []
    zoo.compile_regions(model, backend="eager")
    for _ in range(2):
        run(model, inputs)
    assert begun == [model]
    assert set(names) == set(gpu.launches), "all were begun before the first was launched"


@pytest.mark.parametrize("change", [copy.deepcopy, zoo.uncompile])
def test_an_eager_model_begins_nothing(change: Callable[[Any], Any], resnet: Any, begun: list[Any]) -> None:
    model, inputs = resnet
    run(change(zoo.compile_regions(model, backend="eager")), inputs)
    assert not begun


def test_it_can_be_turned_off(resnet: Any, begun: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = resnet
    monkeypatch.setattr(ahead, "ENABLED", False)
    run(zoo.compile_regions(model, backend="eager"), inputs)
    assert not begun


def test_a_model_without_kernels_is_left_alone() -> None:
    model = zoo.compile_regions(Stack(), backend="eager")
    assert model._compiled_call_impl is None


def test_a_packed_batch_begins_what_it_launches(gpu: Gpu, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "zoo")
    model, inputs = make("bert-debug", training=True)
    batch = pack(inputs["input_ids"], inputs["attention_mask"], config=model.config)
    run(model, {"input_ids": batch})
    launched = gpu.asked
    gpu.asked = set()
    forget_compiled()
    dry_run.begin_kernels(model, batch)
    settle()
    assert launched and gpu.asked == launched and not told(caplog)


def test_a_call_without_kernels_is_not_run(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "only_compiling", None)
    model, inputs = make("bert-debug", training=False)
    with torch.no_grad():
        dry_run.begin_kernels(model, **inputs)
        assert model.train().dry_call(**inputs) is None


def test_a_cpu_is_left_alone(begun: list[Any]) -> None:
    model, inputs = make("resnet-debug", training=False)
    run(zoo.compile_regions(model, backend="eager"), inputs)
    assert not begun


@pytest.mark.parametrize("kind", ["forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook"])
def test_hooks_are_shown_no_tensor_without_data(kind: str, resnet: Any, begun: list[Any]) -> None:
    model, inputs = resnet
    zoo.compile_regions(model, backend="eager")
    getattr(model.stem.conv, f"register_{kind}")(lambda *_: None)
    run(model, inputs)
    assert not begun


def test_a_call_that_is_refused_is_refused_as_ever(resnet: Any, begun: list[Any]) -> None:
    model, inputs = resnet
    zoo.compile_regions(model, backend="eager")
    with pytest.raises(ValueError, match="expected"):
        model(torch.randn(2, 5, 64, 64))
    run(model, inputs)
    assert begun == [model], "the first call, whatever became of it"


def test_threads_never_meet_weights_without_data(resnet: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = resnet
    inside = threading.Event()
    forward = model.forward

    def slowly(*args: Any, **kwargs: Any) -> Any:
        inside.set()
        time.sleep(0.5)  # for the other thread to get in, were there no lock
        return forward(*args, **kwargs)

    monkeypatch.setattr(model, "dry_call", lambda *args, **kwargs: functools.partial(slowly, *args, **kwargs))
    zoo.compile_regions(model, backend="eager")
    outputs: list[Any] = []

    def call() -> None:
        with torch.no_grad():
            outputs.append(model(**inputs))

    threads = [threading.Thread(target=call, daemon=True) for _ in range(2)]
    threads[0].start()
    assert inside.wait(60)
    threads[1].start()
    for thread in threads:
        thread.join(60)
    assert [type(each) for each in outputs] == [torch.Tensor] * 2


def test_a_graph_that_is_captured_is_left_alone(resnet: Any, begun: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = resnet
    monkeypatch.setattr(torch.cuda.graphs, "is_current_stream_capturing", lambda: True)
    run(zoo.compile_regions(model, backend="eager"), inputs)
    assert not begun


class Toy(nn.Module):
    """A model whose forward is given, with a weight that is no parameter of it."""

    dry_call = dry_run.whole_call

    def __init__(self, function: Callable[[Toy, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function, self.norm = function, nn.Linear(4, 4)
        self.hidden = [nn.Parameter(torch.randn(4, 4))]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self, x)


def first_call(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    dry_run.before_first_call(model)
    out: torch.Tensor = model(x)
    assert type(out) is torch.Tensor and model._compiled_call_impl is None
    return out


def test_a_model_that_calls_itself_is_run_without_data_once(gpu: Gpu, begun: list[Any]) -> None:
    def halves(model: Toy, x: torch.Tensor) -> torch.Tensor:
        return model.norm(x) if x.shape[0] == 1 else torch.cat([model(half) for half in x.chunk(2)])

    first_call(Toy(halves), torch.randn(4, 4))
    assert len(begun) == 1


def test_the_backward_runs_in_the_thread_that_launches_nothing(gpu: Gpu, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "zoo")
    seen: list[tuple[bool, bool]] = []

    class Noted(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            seen.append((torch._C._is_multithreading_enabled(), ahead.only_compiles()))
            return grad

    first_call(Toy(lambda model, x: Noted.apply(model.norm(x))), torch.randn(2, 4)).sum().backward()
    assert seen == [(False, True), (True, False)] and not told(caplog)


# --- and nobody notices ---


def test_autocast_keeps_no_weight_without_data(gpu: Gpu) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        first_call(Toy(lambda model, x: nn.functional.linear(x, model.hidden[0])), torch.randn(2, 4))
        assert torch.is_autocast_cache_enabled()


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_model_may_be_checkpointed_as_a_whole(gpu: Gpu, reentrant: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "zoo")
    model, inputs = make("resnet-debug", training=True)
    zoo.compile_regions(model, backend="eager")
    images = inputs["images"].requires_grad_()
    torch.utils.checkpoint.checkpoint(model, images, use_reentrant=reentrant).sum().backward()
    assert images.grad is not None and type(images.grad) is torch.Tensor and not told(caplog)


def test_two_models_in_two_threads_leave_the_compiler_as_it_was(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    both = threading.Barrier(2, timeout=60)

    def together(model: Toy, x: torch.Tensor) -> torch.Tensor:
        if ahead.only_compiles():
            both.wait()
        return model.norm(x)

    models = [Toy(together) for _ in range(2)]
    threads = [threading.Thread(target=first_call, args=(model, torch.randn(2, 4)), daemon=True) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert all(model._compiled_call_impl is None for model in models)
    counter = CompileCounterWithBackend("eager")
    torch.compile(lambda x: x + 1, backend=counter)(torch.randn(3))
    assert counter.frame_count == 1


def test_regions_are_compiled_as_before(resnet: Any) -> None:
    model, inputs = resnet
    counter = CompileCounterWithBackend("eager")
    zoo.compile_regions(model, backend=counter)
    calls = {name: module._compiled_call_impl for name, module in model.named_modules() if name}
    run(model, inputs)
    assert counter.frame_count > 0
    assert {name: module._compiled_call_impl for name, module in model.named_modules() if name} == calls


def test_a_whole_compile_of_a_compiled_model_stays_one_graph(begun: list[Any]) -> None:
    model, inputs = make("resnet-debug", training=False)
    counter = CompileCounterWithBackend("eager")
    whole = torch.compile(zoo.compile_regions(model, backend="eager"), backend=counter, fullgraph=True)
    with torch.no_grad():
        whole(**inputs)
    assert counter.frame_count == 1 and not begun
