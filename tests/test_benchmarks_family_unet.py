"""What only the UNets' arms do: whole runs from noise to latents, and training under autocast on mixed noise."""

import warnings
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter

import zoo
from benchmarks import strategies
from benchmarks.families import unet, unet_arms
from benchmarks.plan import IMPLEMENTATIONS
from tests import workloads
from tests.workloads import Arms, call, error
from zoo.unet.blocks import PRESETS
from zoo.unet.convert import WEIGHTS

with warnings.catch_warnings():
    # What diffusers imports warns of what it imports.
    warnings.simplefilter("ignore")
    import diffusers.models.unets.unet_2d_condition as library
    from diffusers import DDPMScheduler

LOOP = "loop-3x8x8"

pytestmark = pytest.mark.usefixtures("eager_backend")

ARMS = Arms(family="unet", model="unet-debug", input="2x8x8")
case, prepare, training_of = ARMS.case, ARMS.prepare, ARMS.training


def test_large_models_have_a_reference_in_float32():
    found = [unet_arms.reference_dtype(PRESETS[name]) for name in ("sd15", "sd21", "sdxl")]
    assert found == [torch.float64, torch.float64, torch.float32]
    config = PRESETS["unet-debug"]
    prepared = prepare(impl="upstream")
    weights = unet_arms.Weights(unet_arms.skeleton(config), seed=0, dtype=torch.float32, device=torch.device("cpu"))
    single = unet_arms.reference_output(config, weights, prepared.inputs, torch.float32)
    assert single.dtype == torch.float32
    assert 0 < error(single, prepared.reference()) < 1e-5


def test_the_reference_turns_off_tf32_and_puts_it_back():
    before = torch.backends.cudnn.conv.fp32_precision
    with unet_arms.in_full_float32():
        assert torch.backends.cudnn.conv.fp32_precision != "tf32" and not torch.backends.cudnn.allow_tf32
    assert torch.backends.cudnn.conv.fp32_precision == before


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


def test_fused_weights_are_those_that_diffusers_adds():
    for config in PRESETS.values():
        theirs, expected = unet_arms.skeleton(config), unet_arms.parameters(config) + unet_arms.fused_weights(config)
        unet_arms.fuse_projections(theirs)
        assert sum(p.numel() for p in theirs.parameters()) == expected


@pytest.mark.parametrize("model", ["unet-debug", "unet-xl-debug"])
@pytest.mark.parametrize(("impl", "input"), [*((impl, LOOP) for impl in IMPLEMENTATIONS), ("zoo", "pipeline-3x8x8")])
def test_every_implementation_ends_at_the_reference_captured_or_not(impl: str, input: str, model: str):
    prepared = prepare(impl=impl, input=input, model=model)
    reference = prepared.reference()
    assert reference.shape == (1, 4, 8, 8) and error(call(prepared), reference) < 1e-5
    prepared.capture()
    # On the CPU it copies and overwrites as a replay would.
    for _ in range(2):
        assert error(call(prepared), reference) < 1e-5
    loop: Any = prepared.model
    if isinstance(loop, unet.ZooLoop):
        assert loop.sampler.captures == 1
    else:
        assert loop.pipeline.unet is loop.unet and type(loop.unet).__module__.partition(".")[0] in (impl, "diffusers")
        captured = zoo.captures(loop.unet)
        # All calls but the first, which compiles.
        assert (len(captured.shapes), captured.replays, captured.uncaptured) == (1, 2 * 3 - 1, {})


@pytest.mark.slow
@pytest.mark.parametrize("input", [LOOP, "pipeline-3x8x8"])
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_the_model_is_compiled_and_the_loop_is_not(impl: str, input: str, monkeypatch: pytest.MonkeyPatch):
    counter = CompileCounter()
    monkeypatch.setattr(strategies, "backend", lambda: counter)
    asked = case(impl=impl, input=input, strategy="full")
    prepared = workloads.prepare(asked)
    expected = call(prepared)
    compiled = strategies.apply(asked, prepared)
    assert compiled is prepared.model
    assert all(error(call(prepared), expected) < 1e-5 for _ in range(2)) and counter.frame_count == 1


@pytest.mark.slow
@pytest.mark.parametrize("model", ["unet-debug", "unet-xl-debug"])
def test_gradients_under_autocast_are_as_near_as_diffusers(model: str):
    exact = prepare(model=model, impl="upstream", workload="train")
    training = exact.training
    batch = training.batch(0)
    doubles = torch.utils._pytree.tree_map(lambda t: t.double() if t.is_floating_point() else t, batch)
    training.loss(torch.nn.Module.double(exact.model), doubles).backward()
    config = PRESETS[model]
    expected = WEIGHTS.convert_state_dict({k: p.grad for k, p in exact.model.named_parameters()}, config)
    errors = {}
    for impl in ("zoo", "upstream"):
        prepared = prepare(model=model, impl=impl, dtype="bfloat16", workload="train")
        if impl == "zoo":
            zoo.compile_regions(prepared.model, backend="aot_eager")
        with torch.autocast("cpu", prepared.training.autocast):
            loss = prepared.training.loss(prepared.model, batch)
        loss.backward()
        found = {name: p.grad for name, p in prepared.model.named_parameters()}
        assert {gradient.dtype for gradient in found.values()} == {torch.float32}
        found = found if impl == "zoo" else WEIGHTS.convert_state_dict(found, config)
        errors[impl] = {name: error(found[name], expected[name]) for name in expected}
    for name, theirs in errors["upstream"].items():
        # Parameters of norms above all: their gradients are sums over all pixels, kept in float32.
        assert errors["zoo"][name] < max(2 * theirs, 0.02), (name, errors["zoo"][name], theirs)
    assert sum(errors["zoo"].values()) < 1.5 * sum(errors["upstream"].values())


@pytest.mark.slow
def test_noise_is_mixed_in_as_diffusers_does():
    loss = unet.NoiseLoss("cpu")
    scheduler = DDPMScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear")
    batch = training_of().batch(3)
    seen: dict[str, Any] = {}

    def model(sample: torch.Tensor, timesteps: torch.Tensor, text: torch.Tensor, **options: Any) -> tuple[torch.Tensor]:
        seen.update(sample=sample, timesteps=timesteps, text=text, options=options)
        return (torch.zeros_like(sample),)

    found = loss(model, batch)
    expected = scheduler.add_noise(batch["latents"], batch["noise"], batch["timesteps"])
    torch.testing.assert_close(seen["sample"], expected, rtol=1e-4, atol=1e-5)
    assert seen["timesteps"] is batch["timesteps"] and seen["text"] is batch["text"]
    assert seen["options"] == {"return_dict": False}
    torch.testing.assert_close(found, batch["noise"].square().mean())
