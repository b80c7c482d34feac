"""The UNet workload: every arm computes the same thing, and its formulas count what they say."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.utils.flop_counter import FlopCounterMode

import zoo
from benchmarks import strategies, workloads
from benchmarks.families import unet_upstream, unet_work
from benchmarks.families.cuts import CUTS
from benchmarks.families.unet import WORKLOAD, draw_inputs, sizes
from benchmarks.plan import IMPLEMENTATIONS, Case
from benchmarks.worker import Handler
from zoo.unet import UNetConfig
from zoo.unet.config import PRESETS

with warnings.catch_warnings():
    # What diffusers imports warns of what it imports.
    warnings.simplefilter("ignore")
    import diffusers.models.unets.unet_2d_condition as library

CUT_MODELS = [f"{preset}-cut-{name}" for preset in ("unet-debug", "unet-xl-debug") for name in CUTS["unet"]]


@pytest.fixture(autouse=True)
def _light(monkeypatch: pytest.MonkeyPatch, one_thread: None) -> None:
    monkeypatch.setenv("BENCHMARKS_BACKEND", "eager")


def case(**changes: Any) -> Case:
    return Case(**{"family": "unet", "model": "unet-debug", "input": "2x8x8", **changes})


def prepare(**changes: Any) -> workloads.Prepared:
    return WORKLOAD.prepare(case(**changes), data_root=None, seed=0)


def call(prepared: workloads.Prepared) -> torch.Tensor:
    with torch.inference_mode():
        output = prepared.model(**prepared.inputs)
    assert isinstance(output, tuple) and len(output) == 1
    return output[0]


def error(output: torch.Tensor, reference: torch.Tensor) -> float:
    return float((output.double() - reference.double()).norm() / reference.double().norm())


# --- arms ---


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("model", ["unet-debug", "unet-xl-debug"])
def test_every_implementation_matches_the_reference(model: str, impl: str):
    prepared = prepare(model=model, impl=impl)
    reference = prepared.reference()
    assert reference.dtype == torch.float64 and prepared.reference_dtype == "float64"
    assert not prepared.model.training and not any(p.requires_grad for p in prepared.model.parameters())
    assert not torch.allclose(reference[0], reference[1], rtol=0.01)
    assert error(call(prepared), reference) < 1e-5


@pytest.mark.parametrize("model", CUT_MODELS)
def test_every_cut_matches_the_reference_within_its_budget(model: str):
    prepared = prepare(model=model, strategy="regional")
    name = model.partition("-cut-")[2]
    present = {type(module) for module in prepared.model.modules()}
    found = {region.region.cls for region in zoo.find_regions(prepared.model).regions}
    assert found == {region.cls for region in CUTS["unet"][name]} & present
    zoo.compile_regions(prepared.model, backend="eager")
    with zoo.enforce_budget(prepared.model):
        assert error(call(prepared), prepared.reference()) < 1e-5


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_bfloat16(impl: str):
    prepared = prepare(impl=impl, dtype="bfloat16")
    output = call(prepared)
    assert output.dtype == torch.bfloat16
    assert 1e-4 < error(output, prepared.reference()) < 3e-2


def test_large_models_have_a_reference_in_float32():
    found = [unet_work.reference_dtype(PRESETS[name]) for name in ("sd15", "sd21", "sdxl")]
    assert found == [torch.float64, torch.float64, torch.float32]
    config = PRESETS["unet-debug"]
    prepared = prepare(impl="upstream")
    weights = unet_upstream.seeded(config, seed=0, dtype=torch.float32, device=torch.device("cpu"))
    single = unet_upstream.reference_output(config, weights, prepared.inputs, torch.float32)
    assert single.dtype == torch.float32
    assert 0 < error(single, prepared.reference()) < 1e-5


def test_the_reference_turns_off_tf32_and_puts_it_back():
    before = torch.backends.cudnn.conv.fp32_precision
    with unet_upstream.in_full_float32():
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


# --- compiled ---


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_the_whole_model_is_one_graph(impl: str):
    prepared = prepare(impl=impl, strategy="full")
    expected = call(prepared)
    counter = CompileCounter()
    compiled = torch.compile(prepared.model, backend=counter, fullgraph=True, dynamic=False)
    with torch.inference_mode():
        assert error(compiled(**prepared.inputs)[0], expected) < 1e-6
    assert counter.frame_count == 1


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


def test_hierarchical_is_right():
    prepared = prepare(strategy="hierarchical")
    reference = prepared.reference()
    compiled = strategies.apply(case(strategy="hierarchical"), prepared)
    with torch.inference_mode():
        assert error(compiled(**prepared.inputs)[0], reference) < 1e-5


@pytest.mark.parametrize("model", ["unet-debug", "unet-xl-debug"])
@pytest.mark.parametrize("impl", ["zoo", "upstream-tuned"])
def test_a_step_under_the_outer_cuda_graph(impl: str, model: str):
    # On the CPU it copies and overwrites as a replay would.
    prepared = prepare(impl=impl, model=model)
    expected = call(prepared)
    with torch.inference_mode():
        step = zoo.cuda_graph(prepared.model, kwargs=prepared.inputs, static=prepared.static, clone_outputs=False)
        assert error(step(**prepared.inputs)[0], expected) < 1e-6


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_through_the_harness(tmp_path: Path, impl: str):
    arm = Handler()
    arm.load(workload="unet")
    ready = arm.prepare(case=case(impl=impl, strategy="regional").to_json(), data_root=None, seed=0)
    parameters = sum(p.numel() for p in zoo.create("unet-debug").parameters())
    assert ready["sizes"] == {"batch": 2, "pixels": 8, "tokens": 77, "blocks": 11, "parameters": parameters}
    fused = unet_work.fused_weights(PRESETS["unet-debug"]) if impl == "upstream-tuned" else 0
    assert ready["model_bytes"] == 4 * (parameters + fused)
    assert arm.start_up(folder=None)["flops"] == unet_work.flops(PRESETS["unet-debug"], 2, 8)
    arm.first_call()
    arm.round(calls=2)
    found = arm.check(reference=str(tmp_path / "reference.pt"))
    assert found["error"] < 1e-5 and found["eager_error"] < 1e-5 and found["reference_dtype"] == "float64"


# --- weights and inputs ---


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


# --- what is run, and what is not ---


@pytest.mark.parametrize(("device", "dtype"), [("cpu", "float32"), ("cuda", "bfloat16")])
@pytest.mark.parametrize("quick", [False, True])
def test_default_races_exist(device: str, dtype: str, quick: bool):
    assert WORKLOAD.dtypes(device)[0] == dtype
    races = WORKLOAD.default_races(device, quick)
    assert races == [("unet-debug", "2x8x8") if device == "cpu" else ("sd15", "2x64x64")]
    for model, input in races:
        assert WORKLOAD.refuses(case(model=model, input=input, device=device, dtype=dtype)) is None


def test_every_model_has_a_preset_and_every_input_a_size():
    assert workloads.load("unet") is WORKLOAD
    assert len(set(WORKLOAD.models)) == len(WORKLOAD.models)
    for model in WORKLOAD.models:
        assert WORKLOAD.memory_bytes(case(model=model)) > 0
    assert {"sd15", "sd21", "sdxl", "sdxl-cut-transformers", "unet-debug-cut-transformers"} <= set(WORKLOAD.models)
    assert [sizes(name) for name in ("2x64x64", "8x64x64")] == [(2, 64), (8, 64)]
    for wrong in ("64x64", "0x32x32", "2x32x64", "2x32x32x2"):
        with pytest.raises(ValueError, match="is not ROWSxPIXELSxPIXELS"):
            sizes(wrong)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"impl": "upstream", "strategy": "hierarchical"}, "declared regions"),
        ({"strategy": "regional", "cuda_graph": True}, "a CPU has no CUDA graphs"),
        ({"model": "sd15-cut-glue"}, "model 'sd15-cut-glue' is not one of"),
        ({"input": "3x8x8"}, "input '3x8x8' is not one of"),
        ({"dtype": "float16"}, "dtype 'float16' is not one of"),
        ({"workload": "training"}, "workload 'training' is not one of"),
    ],
)
def test_refusals(changes: dict[str, Any], reason: str):
    assert reason in (WORKLOAD.refuses(case(**changes)) or "")
    with pytest.raises(ValueError, match=reason):
        prepare(**changes)


# --- formulas ---


def on_meta(config: UNetConfig, batch: int, size: int) -> tuple[nn.Module, dict[str, Any]]:
    inputs = draw_inputs(config, batch, size, seed=0, dtype=torch.float32, device=torch.device("cpu"))
    inputs = torch.utils._pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), inputs)
    return unet_upstream.skeleton(config), inputs


@pytest.mark.parametrize("model", list(PRESETS))
def test_parameters_and_products_are_diffusers(model: str):
    config = PRESETS[model]
    theirs, inputs = on_meta(config, 2, 32)
    assert unet_work.parameters(config) == sum(p.numel() for p in theirs.parameters())
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        theirs(**inputs)
    assert unet_work.flops(config, 2, 32) == counter.get_total_flops()


def test_products_of_other_configs():
    changes = {"layers_per_block": 2, "conv_in_kernel": 1, "conv_out_kernel": 5, "time_cond_proj_dim": 6}
    config = zoo.create("unet-debug", device="meta", **changes).config
    assert isinstance(config, UNetConfig)
    theirs, inputs = on_meta(config, 3, 16)
    assert unet_work.parameters(config) == sum(p.numel() for p in theirs.parameters())
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        theirs(**inputs, timestep_cond=torch.empty(3, 6, device="meta"))
    assert unet_work.flops(config, 3, 16) == counter.get_total_flops()


def test_fused_weights_are_those_that_diffusers_adds():
    for config in PRESETS.values():
        theirs = unet_upstream.skeleton(config)
        unet_upstream.fuse_projections(theirs)
        assert sum(p.numel() for p in theirs.parameters()) == unet_work.parameters(config) + unet_work.fused_weights(
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
    assert unet_work.activations(config, 4) == values
    assert unet_work.bytes_moved(config, 3, 4, 2) == 2 * (3 * values + unet_work.parameters(config))


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


def test_memory_of_large_cases():
    # Weights in bfloat16, the float64 reference with one row's scores three times, and 1 GiB.
    config, gib = PRESETS["sd15"], 1 << 30
    parameters, scores = 859_520_964, 8 * 4096**2
    row = unet_work.skips(config, 64) + unet_work.alive(config, 64)
    asked = case(model="sd15", input="2x64x64", dtype="bfloat16", device="cuda")
    assert WORKLOAD.memory_bytes(asked) == 2 * parameters + 8 * (parameters + row + 3 * scores) + gib
    # The skips of one row: eleven of the way down and the first.
    assert unet_work.skips(config, 64) == 320 * (3 * 64**2 + 32**2) + 640 * (2 * 32**2 + 16**2) + 1280 * (
        2 * 16**2 + 3 * 8**2
    )
    xl = case(model="sdxl", input="2x128x128", dtype="bfloat16", device="cuda")
    assert 6 * 2_567_463_684 + gib < WORKLOAD.memory_bytes(xl) < 20 * gib
    tuned = WORKLOAD.memory_bytes(case(model="sdxl", input="2x128x128", dtype="bfloat16", impl="upstream-tuned"))
    assert tuned == WORKLOAD.memory_bytes(xl) + 2 * unet_work.fused_weights(PRESETS["sdxl"])
