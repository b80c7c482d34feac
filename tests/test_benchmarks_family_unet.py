"""The UNet workload: every arm computes the same thing, and its formulas count what they say."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

import zoo
from benchmarks import families
from benchmarks.families import unet_arms
from benchmarks.families.unet import CUTS, WORKLOAD, sizes
from benchmarks.plan import IMPLEMENTATIONS, Case
from zoo.unet import UNetConfig
from zoo.unet.config import PRESETS

with warnings.catch_warnings():
    # What diffusers imports warns of what it imports.
    warnings.simplefilter("ignore")
    import diffusers.models.unets.unet_2d_condition as library

CUT_MODELS = [f"{preset}-cut-{name}" for preset in ("unet-debug", "unet-xl-debug") for name in CUTS]


@pytest.fixture(autouse=True)
def _light(monkeypatch: pytest.MonkeyPatch, one_thread: None) -> None:
    monkeypatch.setenv("BENCHMARKS_BACKEND", "eager")


def case(**changes: Any) -> Case:
    return Case(**{"family": "unet", "model": "unet-debug", "input": "2x8x8", **changes})


def prepare(**changes: Any) -> families.Prepared:
    return WORKLOAD.prepare(case(**changes), data_root=None, seed=0)


def call(prepared: families.Prepared) -> torch.Tensor:
    with torch.inference_mode():
        output = prepared.model(**prepared.inputs)
    assert isinstance(output, tuple) and len(output) == 1
    return output[0]


def error(output: torch.Tensor, reference: torch.Tensor) -> float:
    return float((output.double() - reference.double()).norm() / reference.double().norm())


@pytest.mark.slow
@pytest.mark.parametrize("model", CUT_MODELS)
def test_every_cut_matches_the_reference_within_its_budget(model: str):
    prepared = prepare(model=model, strategy="regional")
    name = model.partition("-cut-")[2]
    present = {type(module) for module in prepared.model.modules()}
    found = {region.region.cls for region in zoo.find_regions(prepared.model).regions}
    assert found == {region.cls for region in CUTS[name]} & present
    zoo.compile_regions(prepared.model, backend="eager")
    with zoo.enforce_budget(prepared.model):
        assert error(call(prepared), prepared.reference()) < 1e-5


def test_large_models_have_a_reference_in_float32():
    found = [unet_arms.reference_dtype(PRESETS[name]) for name in ("sd15", "sd21", "sdxl")]
    assert found == [torch.float64, torch.float64, torch.float32]
    config = PRESETS["unet-debug"]
    prepared = prepare(impl="upstream")
    weights = unet_arms.seeded(config, seed=0, dtype=torch.float32, device=torch.device("cpu"))
    single = unet_arms.reference_output(config, weights, prepared.inputs, torch.float32)
    assert single.dtype == torch.float32
    assert 0 < error(single, prepared.reference()) < 1e-5


def test_the_reference_turns_off_tf32_and_puts_it_back():
    before = torch.backends.cudnn.conv.fp32_precision
    with unet_arms.in_full_float32():
        assert torch.backends.cudnn.conv.fp32_precision != "tf32" and not torch.backends.cudnn.allow_tf32
    assert torch.backends.cudnn.conv.fp32_precision == before


@pytest.mark.parametrize(
    "name",
    [
        "conditions.time_embedding.linear_2.weight",
        "time_projections.conv_bias",
        "text_projections.weight",
        "down.0.resnets.0.norm2.bias",
        "down.1.transformers.0.blocks.0.norm3.weight",
        "middle.transformers.0.proj_out.bias",
        "up.2.resnets.1.shortcut.weight",
        "norm_out.bias",
    ],
)
def test_a_wrong_weight_shows(name: str):
    prepared = prepare()
    with torch.no_grad():
        prepared.model.get_parameter(name).mul_(0.5)
    assert error(call(prepared), prepared.reference()) > 1e-3


@pytest.mark.parametrize("model", ["unet-debug", "unet-xl-debug"])
def test_every_input_matters(model: str):
    prepared = prepare(model=model, impl="upstream")
    expected = call(prepared)
    conditions = prepared.inputs.get("added_cond_kwargs", {})
    for name in ("timestep", "encoder_hidden_states", *conditions):
        inputs = dict(prepared.inputs)
        if name in conditions:
            inputs["added_cond_kwargs"] = {**conditions, name: 0.9 * conditions[name]}
        else:
            inputs[name] = inputs[name] - 100 if name == "timestep" else 0.9 * inputs[name]
        with torch.inference_mode():
            assert error(prepared.model(**inputs)[0], expected) > 1e-3, name


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_weights_and_images_are_channels_last(impl: str):
    prepared = prepare(impl=impl)
    convolutions = [module for module in prepared.model.modules() if isinstance(module, nn.Conv2d)]
    assert all(conv.weight.is_contiguous(memory_format=torch.channels_last) for conv in convolutions)
    assert prepared.inputs["sample"].is_contiguous()
    seen = []
    for conv in convolutions:
        conv.register_forward_hook(lambda _, __, output: seen.append(output))
    call(prepared)
    assert seen and all(tensor.is_contiguous(memory_format=torch.channels_last) for tensor in seen)


def test_only_tuned_fuses_projections_and_it_is_timed():
    expected = call(prepare(impl="upstream"))
    for impl in IMPLEMENTATIONS:
        prepared = prepare(impl=impl)
        fused = [module for module in prepared.model.modules() if getattr(module, "fused_projections", False)]
        assert bool(fused) == (impl == "upstream-tuned")
        assert set(prepared.preparation_seconds) == ({"fused projections"} if fused else set())
        assert error(call(prepared), expected) < 1e-5


@pytest.mark.parametrize(("impl", "dynamic", "graphs"), [("upstream", None, 2), ("upstream-tuned", False, 3)])
def test_upstream_s_regions_are_its_transformer_blocks(impl: str, dynamic: bool | None, graphs: int):
    prepared = prepare(impl=impl, strategy="regional")
    expected = call(prepared)
    counter = CompileCounter()
    assert prepared.compile_regions is not None and prepare(impl="zoo").compile_regions is None
    prepared.compile_regions(prepared.model, backend=counter, dynamic=dynamic)
    assert error(call(prepared), expected) < 1e-6
    # Three sizes in two widths; as shipped the second turns symbolic.
    assert counter.frame_count == graphs
    compiled = {type(module).__name__ for module in prepared.model.modules() if module._compiled_call_impl is not None}
    assert compiled == set(library.UNet2DConditionModel._repeated_blocks) == {"BasicTransformerBlock"}


@pytest.mark.slow
def test_weights_and_inputs_are_drawn_alike_and_leave_the_random_state_alone():
    before = torch.random.get_rng_state()
    arms = [prepare(impl=impl) for impl in IMPLEMENTATIONS]
    arms[0].reference()
    assert torch.equal(before, torch.random.get_rng_state())
    for arm in arms[1:]:
        torch.testing.assert_close(arm.inputs, arms[0].inputs, rtol=0, atol=0)
    assert type(arms[0].model).__module__.startswith("zoo.")
    ours = zoo.to_upstream(arms[0].model).state_dict()
    theirs = arms[1].model.state_dict()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    other = WORKLOAD.prepare(case(impl="upstream"), data_root=None, seed=1)
    assert not torch.equal(other.inputs["sample"], arms[0].inputs["sample"])
    assert not torch.equal(other.model.conv_in.weight, arms[1].model.conv_in.weight)


def test_norms_are_not_ones_and_biases_not_zeros():
    weights = prepare(impl="upstream").model.state_dict()
    for name, tensor in weights.items():
        mean = float(tensor.mean())
        assert tensor.std() > 0.01, name
        if tensor.dim() == 1:
            assert abs(mean - (1.0 if "norm" in name and name.endswith("weight") else 0.0)) < 0.2, name


@pytest.mark.slow
@pytest.mark.parametrize("model", ["unet-debug", "unet-xl-debug"])
def test_activations_stay_in_the_range_of_half_precision(model: str):
    prepared = prepare(model=model, impl="upstream")
    seen: dict[str, torch.Tensor] = {}
    for name, module in prepared.model.named_modules():
        if not list(module.children()):
            module.register_forward_hook(lambda _, __, output, name=name: seen.update({name: output}))
    call(prepared)
    assert len(seen) > 50
    for name, tensor in seen.items():
        assert tensor.std() > 0.02 and tensor.abs().max() < 100, name


def test_every_model_has_a_preset_and_every_input_a_size():
    assert families.load("unet") is WORKLOAD
    assert len(set(WORKLOAD.models)) == len(WORKLOAD.models)
    for model in WORKLOAD.models:
        assert WORKLOAD.memory_bytes(case(model=model)) > 0
    assert {"sd15", "sd21", "sdxl", "sdxl-cut-transformers", "unet-debug-cut-transformers"} <= set(WORKLOAD.models)
    assert [sizes(name) for name in ("2x64x64", "8x64x64")] == [(2, 64), (8, 64)]
    for wrong in ("64x64", "0x32x32", "2x32x64", "2x32x32x2"):
        with pytest.raises(ValueError, match="is not ROWSxPIXELSxPIXELS"):
            sizes(wrong)


def test_fused_weights_are_those_that_diffusers_adds():
    for config in PRESETS.values():
        theirs = unet_arms.skeleton(config)
        unet_arms.fuse_projections(theirs)
        assert sum(p.numel() for p in theirs.parameters()) == unet_arms.parameters(config) + unet_arms.fused_weights(
            config
        )


def test_bytes_by_hand():
    config = zoo.create(
        "unet-debug",
        device="meta",
        block_out_channels=(16,),
        down_block_types=("DownBlock2D",),
        up_block_types=("UpBlock2D",),
        layers_per_block=1,
        transformer_layers_per_block=1,
        num_attention_heads=2,
    ).config
    assert isinstance(config, UNetConfig)
    # One row of 4 x 4 pixels: both ends; a resnet block down and two in the middle, whose convolutions read and write
    # and which read their residual; two up, which read the skip twice and write and read the shortcut.
    image, text = 16 * 16, 77 * 24
    ends = 2 * (4 * 16 + image)
    blocks = 3 * 5 * image + 2 * (2 + 1 + 1 + 2 + 1 + 2) * image
    # The middle's transformer: projections in and out, the latter with a residual; qkv, attention, output with a
    # residual; query, keys and values, attention, output with a residual; gated MLP with a residual.
    keys = 2 * 16 * 77
    transformer = (2 + 3 + 4 + 4 + 3 + 2 + 2 + 3 + 5 + 6) * image + 2 * keys
    values = ends + blocks + transformer + text
    assert sum(unet_arms.calls(config, 4)) == values
    assert unet_arms.bytes_moved(config, 3, 4, 2) == 2 * (3 * values + unet_arms.parameters(config))


def test_bytes_count_every_call_of_the_library():
    # What convolutions and products of an eager call read and write is most of it, and all that they do is in it.
    prepared = prepare(model="unet-xl-debug", impl="upstream", input="8x64x64")
    moved = 0

    def count(module: nn.Module, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
        nonlocal moved
        moved += 4 * (inputs[0].numel() + output.numel())

    for name, module in prepared.model.named_modules():
        # Left out where a smaller image or half a gate is counted, and where one product stands for several.
        if isinstance(module, (nn.Conv2d, nn.Linear)) and not any(
            part in name for part in ("upsamplers", "ff.net.0", "to_q", "to_k", "to_v", "emb")
        ):
            module.register_forward_hook(count)
    call(prepared)
    assert 0.4 * prepared.bytes < moved < prepared.bytes
