"""Training of UNets in the harness: the same steps in every arm, right gradients under autocast, a loss that falls."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import zoo
from benchmarks import families
from benchmarks.families import unet
from benchmarks.families.base import Training
from benchmarks.families.unet import WORKLOAD
from benchmarks.plan import Case
from benchmarks.training import Trainer
from zoo.unet.config import PRESETS
from zoo.unet.convert import WEIGHTS

with warnings.catch_warnings():
    # What diffusers imports warns of what it imports.
    warnings.simplefilter("ignore")
    from diffusers import DDPMScheduler


@pytest.fixture(autouse=True)
def _light(monkeypatch: pytest.MonkeyPatch, one_thread: None) -> None:
    monkeypatch.setenv("BENCHMARKS_BACKEND", "aot_eager")


def case(**changes: Any) -> Case:
    return Case(**{"family": "unet", "model": "unet-debug", "input": "2x8x8", "workload": "train", **changes})


def prepare(**changes: Any) -> families.Prepared:
    return WORKLOAD.prepare(case(**changes), data_root=None, seed=0)


def training_of(prepared: families.Prepared) -> Training:
    assert prepared.training is not None
    return prepared.training


def error(output: torch.Tensor, reference: torch.Tensor) -> float:
    return float((output.double() - reference.double()).norm() / reference.double().norm())


def test_the_loss_falls():
    prepared = prepare()
    arm = Trainer(case(), prepared)
    curve = arm.losses(arm.eager(), 16)
    assert curve[-4:].mean() < 0.75 * curve[:2].mean()


@pytest.mark.slow
@pytest.mark.parametrize("model", ["unet-debug", "unet-xl-debug"])
def test_gradients_under_autocast_are_as_near_as_diffusers(model: str):
    exact = prepare(model=model, impl="upstream")
    training = training_of(exact)
    batch = training.batch(0)
    doubles = torch.utils._pytree.tree_map(lambda t: t.double() if t.is_floating_point() else t, batch)
    training.loss(torch.nn.Module.double(exact.model), doubles).backward()
    config = PRESETS[model]
    expected = WEIGHTS.convert_state_dict({k: p.grad for k, p in exact.model.named_parameters()}, config)  # type: ignore[misc]
    errors = {}
    for impl in ("zoo", "upstream"):
        prepared = prepare(model=model, impl=impl, dtype="bfloat16")
        trained = training_of(prepared)
        assert trained.autocast is torch.bfloat16
        if impl == "zoo":
            zoo.compile_regions(prepared.model, backend="aot_eager")
        with torch.autocast("cpu", trained.autocast):
            loss = trained.loss(prepared.model, batch)
        loss.backward()
        found = {name: p.grad for name, p in prepared.model.named_parameters()}
        assert all(gradient is not None and gradient.dtype == torch.float32 for gradient in found.values())
        if impl == "upstream":
            found = WEIGHTS.convert_state_dict(found, config)  # type: ignore[arg-type]
        errors[impl] = {name: error(found[name], expected[name]) for name in expected}  # type: ignore[arg-type]
    for name, theirs in errors["upstream"].items():
        # Parameters of norms above all: their gradients are sums over all pixels, kept in float32.
        assert errors["zoo"][name] < max(2 * theirs, 0.02), (name, errors["zoo"][name], theirs)
    assert sum(errors["zoo"].values()) < 1.5 * sum(errors["upstream"].values())


def test_autocast_leaves_weights_wide_and_narrows_what_the_library_computes():
    prepared = prepare(dtype="bfloat16", impl="upstream")
    seen = set()
    for module in prepared.model.modules():
        if isinstance(module, torch.nn.Conv2d):
            module.register_forward_hook(lambda _, __, output: seen.add(output.dtype))
    arm = Trainer(case(dtype="bfloat16", impl="upstream"), prepared)
    arm.eager()()
    assert seen == {torch.bfloat16}
    assert {p.dtype for p in prepared.model.parameters()} == {torch.float32}
    assert training_of(prepare()).autocast is None


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_regions_hold_their_budget_in_training_steps(dtype: str):
    prepared = prepare(dtype=dtype)
    arm = Trainer(case(dtype=dtype, strategy="regional"), prepared)
    model = zoo.compile_regions(prepared.model, backend="aot_eager")
    step = arm.compiled(model)
    with zoo.enforce_budget(model):
        step()
        step()


@pytest.mark.slow
def test_noise_is_mixed_in_as_diffusers_does():
    loss = unet.NoiseLoss("cpu")
    scheduler = DDPMScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear")
    batch = training_of(prepare()).batch(3)
    seen: dict[str, Any] = {}

    def model(sample: torch.Tensor, timesteps: torch.Tensor, text: torch.Tensor, **options: Any) -> tuple[torch.Tensor]:
        seen.update(sample=sample, timesteps=timesteps, text=text, options=options)
        return (torch.zeros_like(sample),)

    found = loss(model, batch)  # type: ignore[arg-type]
    expected = scheduler.add_noise(batch["latents"], batch["noise"], batch["timesteps"])  # type: ignore[arg-type]
    torch.testing.assert_close(seen["sample"], expected, rtol=1e-4, atol=1e-5)
    assert seen["timesteps"] is batch["timesteps"] and seen["text"] is batch["text"]
    assert seen["options"] == {"return_dict": False}
    torch.testing.assert_close(found, batch["noise"].square().mean())


def test_batches_are_drawn_anew_and_the_same_at_each_call():
    for model in ("unet-debug", "unet-xl-debug"):
        training = training_of(prepare(model=model))
        batch, again, other = training.batch(1), training.batch(1), training.batch(2)
        assert batch.keys() == again.keys()
        for name in batch:
            assert torch.equal(batch[name], again[name])
            assert name == "time_ids" or not torch.equal(batch[name], other[name]), name
        assert ("text_embeds" in batch) == (model == "unet-xl-debug")
        assert batch["latents"].shape == batch["noise"].shape == (2, 4, 8, 8)
        assert batch["text"].shape == (2, 77, 24) and batch["timesteps"].shape == (2,)
        squares = F.interpolate(batch["latents"][:, :, ::2, ::2], size=(8, 8))
        assert torch.equal(squares, batch["latents"]) and batch["latents"].std() > 0.5
