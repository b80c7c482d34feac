"""A whole run from noise to latents in the harness: both libraries' loops end at the same latents."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter

import zoo
from benchmarks import families, strategies
from benchmarks.families import unet_arms, unet_loop
from benchmarks.families.unet import WORKLOAD, sizes
from benchmarks.plan import IMPLEMENTATIONS, Case
from zoo.unet.config import PRESETS

with warnings.catch_warnings():
    # What diffusers imports warns of what it imports.
    warnings.simplefilter("ignore")
    from diffusers import EulerDiscreteScheduler

# numpy's word to schedulers that take square roots of tensors.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning")


@pytest.fixture(autouse=True)
def _light(monkeypatch: pytest.MonkeyPatch, one_thread: None) -> None:
    monkeypatch.setenv("BENCHMARKS_BACKEND", "eager")


def case(**changes: Any) -> Case:
    return Case(**{"family": "unet", "model": "unet-debug", "input": "loop-3x8x8", **changes})


def prepare(**changes: Any) -> families.Prepared:
    return WORKLOAD.prepare(case(**changes), data_root=None, seed=0)


def call(prepared: families.Prepared) -> torch.Tensor:
    with torch.inference_mode():
        output: torch.Tensor = prepared.model(**prepared.inputs)
    return output


def error(output: torch.Tensor, reference: torch.Tensor) -> float:
    return float((output.double() - reference.double()).norm() / reference.double().norm())


@pytest.mark.parametrize("model", ["unet-debug", "unet-xl-debug"])
@pytest.mark.parametrize(
    ("impl", "input"), [*((impl, "loop-3x8x8") for impl in IMPLEMENTATIONS), ("zoo", "pipeline-3x8x8")]
)
def test_every_implementation_ends_at_the_reference_captured_or_not(impl: str, input: str, model: str):
    prepared = prepare(impl=impl, input=input, model=model)
    reference = prepared.reference()
    assert reference.dtype == torch.float64 and prepared.reference_dtype == "float64"
    latents = call(prepared)
    assert latents.shape == (1, 4, 8, 8) and error(latents, reference) < 1e-5
    assert prepared.capture is not None
    prepared.capture()
    # On the CPU it copies and overwrites as a replay would.
    for _ in range(2):
        assert error(call(prepared), reference) < 1e-5
    loop: Any = prepared.model
    if isinstance(loop, unet_loop.ZooLoop):
        assert loop.sampler.captures == 1
    else:
        assert loop.pipeline.unet is loop.unet and type(loop.unet).__module__.partition(".")[0] in (impl, "diffusers")
        captured = zoo.captures(loop.unet)
        # All calls but the first, which compiles.
        assert (len(captured.shapes), captured.replays, captured.uncaptured) == (1, 2 * 3 - 1, {})


@pytest.mark.parametrize("model", ["unet-debug", "unet-xl-debug"])
def test_every_input_matters(model: str):
    prepared = prepare(model=model)
    assert ("pooled_prompt_embeds" in prepared.inputs) == (model == "unet-xl-debug")
    expected = call(prepared)
    for name, tensor in prepared.inputs.items():
        with torch.inference_mode():
            assert error(prepared.model(**{**prepared.inputs, name: 0.9 * tensor}), expected) > 1e-3, name


def test_bfloat16_is_as_near_as_diffusers():
    errors = {}
    for impl in ("zoo", "upstream"):
        prepared = prepare(impl=impl, dtype="bfloat16")
        errors[impl] = error(call(prepared), prepared.reference())
    assert 1e-4 < errors["zoo"] < 2 * errors["upstream"] < 0.2


def test_the_scheduler_is_stable_diffusions_euler():
    loop: Any = prepare(impl="upstream").model
    scheduler = loop.pipeline.scheduler
    assert type(scheduler) is EulerDiscreteScheduler and scheduler.config.prediction_type == "epsilon"
    assert scheduler.config.timestep_spacing == "leading" and scheduler.config.beta_end == 0.012
    ours: Any = prepare().model
    scheduler.set_timesteps(3)
    torch.testing.assert_close(ours.sampler.schedule.timesteps.float(), scheduler.timesteps.float())


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["full", "regional"])
@pytest.mark.parametrize("input", ["loop-3x8x8", "pipeline-3x8x8"])
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_the_model_is_compiled_and_the_loop_is_not(
    impl: str, input: str, strategy: str, monkeypatch: pytest.MonkeyPatch
):
    counter = CompileCounter()
    monkeypatch.setattr(strategies, "backend", lambda: counter)
    asked = case(impl=impl, input=input, strategy=strategy)
    prepared = prepare(impl=impl, input=input, strategy=strategy)
    expected = call(prepared)
    compiled = strategies.apply(asked, prepared)
    assert compiled is prepared.model
    assert error(call(prepared), expected) < 1e-5
    graphs = counter.frame_count
    assert error(call(prepared), expected) < 1e-5
    assert counter.frame_count == graphs
    if strategy == "full":
        assert graphs == 1
    elif impl != "zoo":
        assert graphs == (2 if impl == "upstream" else 3)


def test_bytes_of_a_run():
    config = PRESETS["unet-debug"]
    # Keys and values of the text, of a transformer block of 16 channels down and two up, and of 32: one down, one in
    # the middle, two up.
    channels = 2 * (3 * 16 + 4 * 32)
    known = channels * 24 + 2 * 77 * (24 + channels)
    expected = 3 * unet_arms.bytes_moved(config, 2, 8, 4) - 2 * 4 * known
    assert unet_loop.bytes_moved(config, 3, 8, 4) == expected == prepare().bytes


def test_sizes_and_memory_are_those_of_two_rows():
    asked = {"model": "sd15", "dtype": "bfloat16", "device": "cuda"}
    for run in ("loop-30x64x64", "pipeline-30x64x64"):
        assert sizes(run) == (30, 64)
        assert WORKLOAD.memory_bytes(case(input=run, **asked)) == WORKLOAD.memory_bytes(case(input="2x64x64", **asked))
