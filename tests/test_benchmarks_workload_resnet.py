"""The ResNet workload: every arm computes the same thing, and its formulas count what they say."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.utils.flop_counter import FlopCounterMode
from torchvision import models

import zoo
from benchmarks import workloads
from benchmarks.families import resnet_upstream, resnet_work
from benchmarks.families.cuts import CUTS
from benchmarks.families.resnet import WORKLOAD, sizes
from benchmarks.plan import IMPLEMENTATIONS, Case
from benchmarks.worker import Handler
from zoo.resnet import ResNet
from zoo.resnet.model import PRESETS

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


def prepare(**changes: Any) -> workloads.Prepared:
    return WORKLOAD.prepare(case(**changes), data_root=None, seed=0)


def call(prepared: workloads.Prepared) -> torch.Tensor:
    with torch.inference_mode():
        return prepared.model(**prepared.inputs)


def error(output: torch.Tensor, reference: torch.Tensor) -> float:
    return float((output.double() - reference.double()).norm() / reference.double().norm())


def regions_of(model: nn.Module) -> set[str]:
    return {found.region.cls.__name__ for found in zoo.find_regions(model).regions}


# --- arms ---


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("model", ["resnet-debug", FOLDED, "resnet18"])
def test_every_implementation_matches_the_reference(model: str, impl: str):
    prepared = prepare(model=model, impl=impl)
    reference = prepared.reference()
    assert reference.dtype == torch.float64 and prepared.reference_dtype == "float64"
    assert not prepared.model.training and not any(p.requires_grad for p in prepared.model.parameters())
    assert not torch.allclose(reference[0], reference[1], rtol=0.01)
    assert error(call(prepared), reference) < 1e-5


@pytest.mark.parametrize("model", DEBUG)
def test_every_model_of_the_zoo_matches_the_reference_and_declares_its_cut(model: str):
    prepared = prepare(model=model, strategy="regional")
    reference = prepared.reference()
    assert error(call(prepared), reference) < 1e-5
    regions = CUTS["resnet"].get(model.partition("-cut-")[2], ResNet.regions)
    present = {type(module).__name__ for module in prepared.model.modules()}
    assert regions_of(prepared.model) == {region.cls.__name__ for region in regions} & present
    zoo.compile_regions(prepared.model, backend="eager")
    with torch.inference_mode(), zoo.enforce_budget(prepared.model):
        assert error(prepared.model(**prepared.inputs), reference) < 1e-5


def test_the_reference_takes_images_in_parts(monkeypatch: pytest.MonkeyPatch):
    whole = prepare().reference()
    monkeypatch.setattr(resnet_upstream, "REFERENCE_IMAGES", 1)
    torch.testing.assert_close(prepare().reference(), whole, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_bfloat16(impl: str):
    prepared = prepare(model=FOLDED, impl=impl, dtype="bfloat16")
    output = call(prepared)
    assert output.dtype == torch.bfloat16
    assert 1e-4 < error(output, prepared.reference()) < 3e-2


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


# --- compiled ---


@pytest.mark.parametrize(("impl", "model"), [(i, m) for i in IMPLEMENTATIONS for m in ("resnet-debug", FOLDED)])
def test_the_whole_model_is_one_graph(impl: str, model: str):
    prepared = prepare(model=model, impl=impl, strategy="full")
    expected = call(prepared)
    counter = CompileCounter()
    compiled = torch.compile(prepared.model, backend=counter, fullgraph=True, dynamic=False)
    with torch.inference_mode():
        assert error(compiled(**prepared.inputs), expected) < 1e-6
    assert counter.frame_count == 1


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


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_a_step_under_the_outer_cuda_graph(impl: str):
    # On the CPU it copies and overwrites as a replay would.
    prepared = prepare(model=FOLDED, impl=impl)
    expected = call(prepared)
    with torch.inference_mode():
        step = zoo.cuda_graph(prepared.model, kwargs=prepared.inputs, static=prepared.static, clone_outputs=False)
        assert error(step(**prepared.inputs), expected) < 1e-6


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_through_the_harness(tmp_path: Path, impl: str):
    arm = Handler()
    arm.load(workload="resnet")
    ready = arm.prepare(case=case(impl=impl).to_json(), data_root=None, seed=0)
    parameters = sum(p.numel() for p in zoo.create("resnet-debug").parameters())
    assert ready["sizes"] == {"batch": 2, "pixels": 32, "blocks": 6, "classes": 10, "parameters": parameters}
    assert arm.start_up(folder=None)["flops"] == resnet_work.flops(PRESETS["resnet-debug"], 2, 32)
    arm.first_call()
    arm.round(calls=2)
    found = arm.check(reference=str(tmp_path / "reference.pt"))
    assert found["error"] < 1e-5 and found["eager_error"] < 1e-5 and found["reference_dtype"] == "float64"


# --- weights ---


def test_weights_and_images_are_drawn_alike_and_leave_the_random_state_alone():
    before = torch.random.get_rng_state()
    arms = [prepare(impl="upstream") for _ in range(2)]
    zoo_arm = prepare(impl="zoo")
    zoo_arm.reference()
    assert torch.equal(before, torch.random.get_rng_state())
    assert torch.equal(arms[0].inputs["x"], arms[1].inputs["x"])
    assert torch.equal(arms[0].inputs["x"], zoo_arm.inputs["images"])
    for first, second in zip(arms[0].model.parameters(), arms[1].model.parameters(), strict=True):
        assert torch.equal(first, second)
    other = WORKLOAD.prepare(case(impl="upstream"), data_root=None, seed=1)
    assert not torch.equal(other.inputs["x"], arms[0].inputs["x"])
    assert not torch.equal(other.model.conv1.weight, arms[0].model.conv1.weight)


# --- what is run, and what is not ---


@pytest.mark.parametrize(("device", "dtype"), [("cpu", "float32"), ("cuda", "bfloat16")])
@pytest.mark.parametrize("quick", [False, True])
def test_default_races_exist(device: str, dtype: str, quick: bool):
    assert WORKLOAD.dtypes(device)[0] == dtype
    races = WORKLOAD.default_races(device, quick)
    assert races and (device == "cuda" or races == [("resnet-debug", "2x32")])
    for model, input in races:
        assert WORKLOAD.refuses(case(model=model, input=input, device=device, dtype=dtype)) is None
    assert set(races) >= set(WORKLOAD.default_races(device, True))


def test_every_model_has_a_preset_and_every_input_a_size():
    assert workloads.load("resnet") is WORKLOAD
    assert len(set(WORKLOAD.models)) == len(WORKLOAD.models)
    for model in WORKLOAD.models:
        assert WORKLOAD.memory_bytes(case(model=model)) > 0
    assert all(f"{batch}x{size}" in name for name in WORKLOAD.inputs for batch, size in [sizes(name)])
    assert [sizes(name) for name in ("64x224", "2x32", "jpeg-128x224")] == [(64, 224), (2, 32), (128, 224)]
    for wrong in ("64", "0x32", "2x0", "2x32x3"):
        with pytest.raises(ValueError, match="is not BATCHxPIXELS"):
            sizes(wrong)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"impl": "upstream", "strategy": "hierarchical"}, "declared regions"),
        ({"strategy": "regional", "cuda_graph": True}, "a CPU has no CUDA graphs"),
        ({"model": "resnet50-cut-layers"}, "model 'resnet50-cut-layers' is not one of"),
        ({"input": "3x32"}, "input '3x32' is not one of"),
        ({"dtype": "float16"}, "dtype 'float16' is not one of"),
        ({"workload": "training"}, "workload 'training' is not one of"),
    ],
)
def test_refusals(changes: dict[str, Any], reason: str):
    assert reason in (WORKLOAD.refuses(case(**changes)) or "")
    with pytest.raises(ValueError, match=reason):
        prepare(**changes)


# --- formulas ---


@pytest.mark.parametrize("model", list(PRESETS))
def test_parameters_are_those_of_the_model(model: str):
    built = zoo.create(model, device="meta")
    assert resnet_work.parameters(PRESETS[model]) == sum(p.numel() for p in built.parameters())


@pytest.mark.parametrize(("model", "size"), [(name, 64) for name in PRESETS] + [("resnet50", 225)])
def test_products_are_those_that_torch_counts(model: str, size: int):
    with torch.device("meta"):
        theirs = resnet_like(model)
        images = torch.empty(3, 3, size, size)
    with FlopCounterMode(display=False) as counter:
        theirs(images)
    assert resnet_work.flops(PRESETS[model], 3, size) == counter.get_total_flops()


def resnet_like(model: str) -> nn.Module:
    return zoo.to_upstream(zoo.create(model, device="meta")) if "debug" in model else getattr(models, model)()


def test_dilation_counts():
    model = zoo.create("resnet-debug", device="meta", replace_stride_with_dilation=(False, True, True))
    assert isinstance(model, ResNet)
    with FlopCounterMode(display=False) as counter:
        zoo.to_upstream(model)(torch.empty(1, 3, 64, 64, device="meta"))
    assert resnet_work.flops(model.config, 1, 64) == counter.get_total_flops()


def test_bytes_by_hand():
    config = zoo.create("resnet18", device="meta", layers=(1, 1, 1, 1), num_classes=10).config
    # One image of 32 pixels a side, in values: image, stem's output written and read, pooled.
    stem = 3 * 32**2 + 2 * 64 * 16**2 + 64 * 8**2
    # Each block: its two convolutions read and write; the residual is read, or the shortcut is computed and read.
    first = 4 * 64 * 8**2 + 64 * 8**2
    later = sum(
        (c // 2 * s**2 * 4 + 3 * c * s**2) + (c // 2 * s**2 * 4 + 2 * c * s**2)
        for c, s in ((128, 4), (256, 2), (512, 1))
    )
    values = stem + first + later + 512 + 10 + resnet_work.parameters(config)
    assert resnet_work.bytes_moved(config, 1, 32, 2) == 2 * values


def test_bytes_count_every_call_of_a_convolution():
    # What the convolutions of an eager call read and write is most of it, and all that they do is in it.
    prepared = prepare(model="resnet50", impl="upstream")
    moved = 0

    def count(conv: nn.Conv2d, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
        nonlocal moved
        moved += 4 * (inputs[0].numel() + output.numel() + conv.weight.numel())

    for module in prepared.model.modules():
        if isinstance(module, nn.Conv2d):
            module.register_forward_hook(count)
    call(prepared)
    assert moved < prepared.bytes < 1.4 * moved


def test_memory_of_large_cases():
    # Four of the largest activations in bfloat16, weights twice, and 1 GiB; the float64 reference takes 16 images.
    largest, parameters = 64 * 112 * 112, 25_557_032
    images = 3 * 224 * 224
    expected = 256 * (4 * largest + images) * 2 + 2 * parameters * 2 + (1 << 30)
    assert WORKLOAD.memory_bytes(case(model="resnet50", input="256x224", dtype="bfloat16")) == expected
    small = WORKLOAD.memory_bytes(case(model="resnet50", input="1x224", dtype="bfloat16"))
    assert small == (4 * largest + parameters) * 8 + images * 2 + 2 * parameters * 2 + (1 << 30)
