"""A compiled model's first call begins all kernels: the same that the call launches, and nothing else happens."""

from __future__ import annotations

import copy
import importlib.util
import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils import _pytree as pytree

import zoo
from tests.fake_gpu import Gpu, forget_compiled, settle
from zoo import ahead, dry_run

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


def test_every_family_with_kernels_takes_part() -> None:
    assert {name.split("-")[0] for name in MODELS} == {"gcn", "gat", "graphsage", "llm", "resnet", "unet"}


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("name", MODELS)
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
    assert not caplog.records, "something stood in the way"
    assert gpu.asked == launched and len(gpu.launches) == count
    assert torch.equal(torch.get_rng_state(), random)
    assert all(parameter.grad is None for parameter in model.parameters())
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


def test_a_model_without_kernels_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = zoo.compile_regions(zoo.create("bert-debug"), backend="eager")
    assert model._compiled_call_impl is None


def test_a_cpu_is_left_alone(begun: list[Any]) -> None:
    model, inputs = make("resnet-debug", training=False)
    run(zoo.compile_regions(model, backend="eager"), inputs)
    assert not begun


def test_hooks_are_shown_no_tensor_without_data(resnet: Any, begun: list[Any]) -> None:
    model, inputs = resnet
    zoo.compile_regions(model, backend="eager")
    model.stem.conv.register_forward_hook(lambda *_: None)
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
    inside, other = threading.Event(), threading.Event()
    forward = model.forward

    def slowly(*args: Any, **kwargs: Any) -> Any:
        inside.set()
        other.wait(0.5)  # time for the other thread to get in, were there no lock
        assert type(args[0] if args else kwargs["images"]) is torch.Tensor or not other.is_set()
        return forward(*args, **kwargs)

    monkeypatch.setattr(model, "dry_call", lambda *args, **kwargs: dry_run.functools.partial(slowly, *args, **kwargs))
    zoo.compile_regions(model, backend="eager")
    failures: list[BaseException] = []

    def call() -> None:
        try:
            with torch.no_grad():
                assert type(model(**inputs)) is torch.Tensor
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=call) for _ in range(2)]
    threads[0].start()
    assert inside.wait(60)
    threads[1].start()
    for thread in threads:
        thread.join(60)
    assert not failures


# --- and nobody notices ---


def test_autocast_keeps_no_weight_without_data(resnet: Any) -> None:
    model, inputs = resnet
    zoo.compile_regions(model.train(), backend="eager")
    with torch.autocast("cpu", torch.bfloat16):
        assert type(model(**inputs)) is torch.Tensor
        assert torch.is_autocast_cache_enabled()


def test_a_whole_compile_of_a_compiled_model_stays_one_graph(begun: list[Any]) -> None:
    model, inputs = make("resnet-debug", training=False)
    counter = CompileCounterWithBackend("eager")
    whole = torch.compile(zoo.compile_regions(model, backend="eager"), backend=counter, fullgraph=True)
    with torch.no_grad():
        whole(**inputs)
    assert counter.frame_count == 1 and not begun
