"""The ResNet workload: every arm computes the same thing, and its formulas count what they say."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

import zoo
from benchmarks import families
from benchmarks.families import resnet
from benchmarks.families.base import count_flops
from benchmarks.families.resnet import WORKLOAD, sizes
from benchmarks.plan import IMPLEMENTATIONS, Case
from zoo.resnet import ResNet

DEBUG = [name for name in WORKLOAD.models if name.startswith("resnet-debug")]
FOLDED = "resnet-debug-folded"


@pytest.fixture(autouse=True)
def _thawed() -> Iterator[None]:
    """A worker is one arm's; here all arms share a process, whose configuration is put back."""
    import torch._inductor.config as inductor

    with inductor.patch(freezing=False):
        yield


def case(**changes: Any) -> Case:
    return Case(**{"family": "resnet", "model": "resnet-debug", "input": "2x32", **changes})


def prepare(**changes: Any) -> families.Prepared:
    return WORKLOAD.prepare(case(**changes), data_root=None, seed=0)


def call(prepared: families.Prepared) -> torch.Tensor:
    with torch.inference_mode():
        return prepared.model(**prepared.inputs)


def error(output: torch.Tensor, reference: torch.Tensor) -> float:
    return float((output.double() - reference.double()).norm() / reference.double().norm())


def regions_of(model: nn.Module) -> set[str]:
    return {found.region.cls.__name__ for found in zoo.find_regions(model).regions}


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_basic_blocks_match_the_reference(impl: str):
    prepared = prepare(model="resnet18", impl=impl)
    reference = prepared.reference()
    assert not torch.allclose(reference[0], reference[1], rtol=0.01)
    assert error(call(prepared), reference) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("model", DEBUG)
def test_every_model_of_the_zoo_matches_the_reference_and_declares_its_cut(model: str):
    prepared = prepare(model=model, strategy="regional")
    reference = prepared.reference()
    assert error(call(prepared), reference) < 1e-5
    regions = resnet.CUTS.get(model.partition("-cut-")[2], ResNet.regions)
    present = {type(module).__name__ for module in prepared.model.modules()}
    assert regions_of(prepared.model) == {region.cls.__name__ for region in regions} & present
    zoo.compile_regions(prepared.model, backend="eager")
    with torch.inference_mode(), zoo.enforce_budget(prepared.model):
        assert error(prepared.model(**prepared.inputs), reference) < 1e-5


def test_the_reference_takes_images_in_parts(monkeypatch: pytest.MonkeyPatch):
    whole = prepare().reference()
    monkeypatch.setattr(resnet, "REFERENCE_IMAGES", 1)
    torch.testing.assert_close(prepare().reference(), whole, rtol=1e-12, atol=1e-12)


def test_activations_stay_in_the_range_of_half_precision():
    with torch.inference_mode():
        for name in ("resnet18", "resnet50"):
            prepared = prepare(model=name)
            features = prepared.model.features(prepared.inputs["images"])
            assert all(float(feature.std()) > 0.1 and float(feature.max()) < 1000 for feature in features)


@pytest.mark.parametrize(
    "name", ["stem.norm.bias", "stages.1.blocks.1.join.norm.weight", "stages.2.blocks.0.join.shortcut_norm.bias"]
)
def test_a_wrong_weight_shows(name: str):
    prepared = prepare()
    with torch.no_grad():
        prepared.model.get_parameter(name).mul_(0.7)
    assert error(call(prepared), prepared.reference()) > 1e-3


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("model", ["resnet-debug", FOLDED])
def test_everything_is_channels_last(model: str, impl: str):
    prepared = prepare(model=model, impl=impl)
    (images,) = prepared.inputs.values()
    assert images.is_contiguous(memory_format=torch.channels_last)
    convolutions = [module for module in prepared.model.modules() if isinstance(module, nn.Conv2d)]
    assert all(conv.weight.is_contiguous(memory_format=torch.channels_last) for conv in convolutions)
    seen = []
    for conv in convolutions:
        conv.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    call(prepared)
    assert seen and all(tensor.is_contiguous(memory_format=torch.channels_last) for tensor in seen)


@pytest.mark.parametrize(
    ("model", "impl", "folded"),
    [
        ("resnet-debug", "zoo", False),
        ("resnet-debug", "upstream", False),
        ("resnet-debug", "upstream-tuned", True),
        (FOLDED, "zoo", True),
        (FOLDED, "upstream", False),
        (FOLDED, "upstream-tuned", True),
    ],
)
def test_who_folds_and_that_it_is_timed(model: str, impl: str, folded: bool):
    prepared = prepare(model=model, impl=impl)
    norms = [module for module in prepared.model.modules() if isinstance(module, nn.BatchNorm2d)]
    assert bool(norms) != folded
    assert set(prepared.preparation_seconds) == ({"batch norm folding"} if folded else set())
    assert all(seconds > 0 for seconds in prepared.preparation_seconds.values())


@pytest.mark.parametrize(
    ("impl", "strategy", "device", "frozen"),
    [
        ("upstream-tuned", "full", "cpu", True),
        ("upstream-tuned", "regional", "cpu", False),
        ("upstream-tuned", "eager", "cpu", False),
        ("upstream", "full", "cpu", False),
        ("zoo", "full", "cpu", False),
    ],
)
def test_only_the_whole_tuned_model_is_frozen(impl: str, strategy: str, device: str, frozen: bool):
    import torch._inductor.config as inductor

    prepare(impl=impl, strategy=strategy, device=device)
    assert inductor.freezing is frozen


@pytest.mark.parametrize("impl", ["upstream", "upstream-tuned"])
@pytest.mark.parametrize(("model", "graphs"), [("resnet-debug", 6), ("resnet50", 8)])
def test_upstream_s_regions_are_its_blocks(impl: str, model: str, graphs: int):
    prepared = prepare(model=model, impl=impl, strategy="regional")
    expected = call(prepared)
    counter = CompileCounter()
    assert prepared.compile_regions is not None
    prepared.compile_regions(prepared.model, backend=counter, dynamic=False)
    assert error(call(prepared), expected) < 1e-6
    assert counter.frame_count == graphs
    assert prepare(impl="zoo").compile_regions is None


def test_every_model_has_a_preset_and_every_input_a_size():
    assert families.load("resnet") is WORKLOAD
    assert len(set(WORKLOAD.models)) == len(WORKLOAD.models)
    for model in WORKLOAD.models:
        assert WORKLOAD.memory_bytes(case(model=model)) > 0
    assert all(f"{batch}x{size}" in name for name in WORKLOAD.inputs for batch, size in [sizes(name)])
    assert [sizes(name) for name in ("64x224", "2x32", "jpeg-128x224")] == [(64, 224), (2, 32), (128, 224)]
    for wrong in ("64", "0x32", "2x0", "2x32x3"):
        with pytest.raises(ValueError, match="is not BATCHxPIXELS"):
            sizes(wrong)


def test_dilation_counts():
    model: Any = zoo.create("resnet-debug", device="meta", replace_stride_with_dilation=(False, True, True))
    theirs = zoo.to_upstream(model)
    images = torch.empty(1, 3, 64, 64, device="meta")
    for training in (False, True):
        assert resnet.flops(model.config, 1, 64, training=training) == count_flops(theirs, images, backward=training)


def test_bytes_count_every_call_of_a_convolution():
    # What the convolutions of an eager call read and write is most of it, and all that they do is in it.
    prepared = prepare(impl="upstream")
    moved = 0

    def count(conv: nn.Conv2d, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
        nonlocal moved
        moved += 4 * (inputs[0].numel() + output.numel() + conv.weight.numel())

    for module in prepared.model.modules():
        if isinstance(module, nn.Conv2d):
            module.register_forward_hook(count)
    call(prepared)
    assert moved < prepared.bytes < 1.4 * moved


def test_bytes_by_hand():
    model = zoo.create("resnet18", device="meta", layers=(1, 1, 1, 1), num_classes=10)
    config = model.config
    # One image of 32 pixels a side, in values: image, stem's output written and read, pooled.
    stem = 3 * 32**2 + 2 * 64 * 16**2 + 64 * 8**2
    # Each block: its two convolutions read and write; the residual is read, or the shortcut is computed and read.
    first = 4 * 64 * 8**2 + 64 * 8**2
    later = sum(
        (c // 2 * s**2 * 4 + 3 * c * s**2) + (c // 2 * s**2 * 4 + 2 * c * s**2)
        for c, s in ((128, 4), (256, 2), (512, 1))
    )
    values = (
        stem
        + first
        + later
        + 512
        + 10
        + sum(
            p.numel() for p in zoo.create("resnet18", device="meta", layers=(1, 1, 1, 1), num_classes=10).parameters()
        )
    )
    assert resnet.bytes_moved(config, 1, 32, 2) == 2 * values
