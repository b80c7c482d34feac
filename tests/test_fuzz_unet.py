"""Random UNets, schedules and texts against diffusers'; see fuzzing.py."""

from __future__ import annotations

import copy
import functools
from typing import Any

import diffusers
import pytest
import torch
from diffusers import UNet2DConditionModel
from fuzzing import (
    REFUSALS,
    Results,
    backward,
    compare,
    convert,
    dtypes,
    fuzz,
    one_of,
    randomize,
    rarely,
    round_trips,
    seeds,
)
from hypothesis import event, given
from hypothesis import strategies as st
from torch import Tensor, nn

import zoo
from zoo.unet import Sampler, make_schedule

pytestmark = pytest.mark.usefixtures("one_thread")


@st.composite
def models(draw: Any) -> dict[str, Any]:
    levels = draw(st.integers(1, 2))
    attended = draw(st.lists(st.booleans(), min_size=levels, max_size=levels))
    heads = draw(one_of(1, 2))
    options: dict[str, Any] = {
        "in_channels": draw(st.integers(1, 5)),
        "out_channels": draw(st.integers(1, 5)),
        "block_out_channels": tuple(8 * draw(st.integers(1, 2)) for _ in range(levels)),
        "down_block_types": tuple("CrossAttnDownBlock2D" if each else "DownBlock2D" for each in attended),
        "up_block_types": tuple("CrossAttnUpBlock2D" if each else "UpBlock2D" for each in reversed(attended)),
        "layers_per_block": draw(st.integers(1, 2)),
        "transformer_layers_per_block": draw(st.integers(1, 2)),
        "attention_head_dim": heads,
        "cross_attention_dim": draw(st.integers(1, 9)),
        "norm_num_groups": draw(one_of(1, 2, 4)),
        "norm_eps": draw(one_of(1e-5, 1e-3)),
        "use_linear_projection": draw(st.booleans()),
        "upcast_attention": draw(st.booleans()),
        "flip_sin_to_cos": draw(st.booleans()),
        "freq_shift": draw(one_of(0, 1)),
        "center_input_sample": draw(st.booleans()),
        "conv_in_kernel": draw(one_of(1, 3)),
        "act_fn": "relu" if draw(rarely) else "silu",
        "dual_cross_attention": draw(rarely),
    }
    if draw(st.booleans()):
        options |= {"time_cond_proj_dim": 3}
    return options


@pytest.mark.slow
@fuzz
@given(
    options=models(), dtype=dtypes, rows=st.integers(1, 2), sides=st.tuples(*[st.integers(1, 5)] * 2),
    tokens=st.integers(1, 5), timestep=st.integers(0, 999), seed=seeds,
)  # fmt: skip
def test_models(
    options: dict[str, Any],
    dtype: torch.dtype,
    rows: int,
    sides: tuple[int, int],
    tokens: int,
    timestep: int,
    seed: int,
) -> None:
    theirs = randomize(UNet2DConditionModel(**options), seed).eval()
    if convert(theirs, options) is None:
        return
    generator = torch.Generator().manual_seed(seed)
    scale = 2 ** (len(options["block_out_channels"]) - 1)
    sample = torch.randn(rows, options["in_channels"], *(scale * side for side in sides), generator=generator)
    text = torch.randn(rows, tokens, options["cross_attention_dim"], generator=generator)
    condition = torch.randn(rows, options.get("time_cond_proj_dim", 1), generator=generator)

    def run(model: nn.Module, dtype: torch.dtype) -> Results:
        inputs = [each.to(dtype, copy=True).requires_grad_() for each in (sample, text, condition)]
        given = {"timestep_cond": inputs[2]} if "time_cond_proj_dim" in options else {}
        output = model(inputs[0], torch.tensor(timestep), encoder_hidden_states=inputs[1], **given)
        return backward({"sample": output.sample}, *inputs)

    # A norm over two values amplifies a rounding up to a million times.
    ours = compare(theirs, run, dtype, floor=1e-8)
    round_trips(theirs, ours)


@functools.cache
def tiny() -> Any:
    channels = {"in_channels": 2, "out_channels": 2, "block_out_channels": (8,), "cross_attention_dim": 3}
    kinds = {"down_block_types": ("CrossAttnDownBlock2D",), "up_block_types": ("CrossAttnUpBlock2D",)}
    sizes = {"layers_per_block": 1, "attention_head_dim": 1, "norm_num_groups": 2}
    return randomize(UNet2DConditionModel(**channels, **kinds, **sizes), 0).eval()


SPACINGS, PREDICTIONS = ("leading", "trailing", "linspace"), ("epsilon", "v_prediction")
OPTIONS: dict[str, tuple[Any, ...]] = {
    "num_train_timesteps": (20, 100, 1000), "beta_schedule": ("linear", "scaled_linear", "squaredcos_cap_v2"),
    "beta_end": (0.012, 0.02), "steps_offset": (0, 1), "timestep_spacing": SPACINGS, "prediction_type": PREDICTIONS,
}  # fmt: skip
SIGMAS: dict[str, tuple[Any, ...]] = {
    "prediction_type": (*PREDICTIONS, "sample"),
    "rescale_betas_zero_snr": (False, True),
    "use_karras_sigmas": (False, True),
    "final_sigmas_type": ("zero", "sigma_min"),
}
SCHEDULERS: dict[str, dict[str, tuple[Any, ...]]] = {
    "DDIMScheduler": {
        "prediction_type": (*PREDICTIONS, "sample"),
        "rescale_betas_zero_snr": (False, True),
        "clip_sample": (False,),
        "set_alpha_to_one": (False, True),
    },
    "PNDMScheduler": {"skip_prk_steps": (True,), "set_alpha_to_one": (False, True)},
    "EulerDiscreteScheduler": SIGMAS,
    "DPMSolverMultistepScheduler": {
        **SIGMAS,
        "solver_order": (1, 2, 3),
        "solver_type": ("midpoint", "heun"),
        "lower_order_final": (True, False),
        "euler_at_final": (False, True),
    },
    "HeunDiscreteScheduler": {"use_karras_sigmas": (False, True)},
}


@st.composite
def schedulers(draw: Any) -> dict[str, Any]:
    name = draw(one_of(*SCHEDULERS))
    options = {key: draw(one_of(*values)) for key, values in {**OPTIONS, **SCHEDULERS[name]}.items()}
    return {"_class_name": name, **options}


@pytest.mark.slow
@fuzz
@given(options=schedulers(), steps=st.integers(1, 12), guidance=one_of(1.0, 3.0), seed=seeds, captured=st.booleans())
def test_sampler(options: dict[str, Any], steps: int, guidance: float, seed: int, captured: bool) -> None:
    try:
        schedule = make_schedule(options, steps)
    except REFUSALS as error:
        assert any(option in str(error) for option in (*options, "steps")), error
        event("refused")
        return
    scheduler = getattr(diffusers, options["_class_name"])(**{k: v for k, v in options.items() if k != "_class_name"})
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(2, 2, 4, 3, generator=generator)
    text, negative = (torch.randn(2, 4, 3, generator=generator) for _ in range(2))
    sampler = Sampler(
        zoo.from_upstream(tiny()), schedule, shape=(2, 2, 4, 3), guidance_scale=guidance, cuda_graph=captured
    )
    found = sampler(text, negative if guidance > 1 else None, latents=noise)

    def theirs(dtype: torch.dtype) -> Tensor:
        unet = copy.deepcopy(tiny()).to(dtype)
        scheduler.set_timesteps(steps)
        if hasattr(scheduler, "set_begin_index"):
            scheduler.set_begin_index(0)  # or it looks for its place by the timestep, of which there may be two
        latents = noise.to(dtype) * scheduler.init_noise_sigma
        with torch.no_grad():
            for timestep in scheduler.timesteps:
                given = scheduler.scale_model_input(latents, timestep)
                output = unet(given, timestep, text.to(dtype)).sample
                if guidance > 1:
                    away = unet(given, timestep, negative.to(dtype)).sample
                    output = away + guidance * (output - away)
                latents = scheduler.step(output, timestep, latents, return_dict=False)[0]
        return latents.double()

    truth, single = theirs(torch.float64), theirs(torch.float32)
    if not (truth.isfinite().all() and single.isfinite().all()):
        event("not finite in diffusers")
        return
    error, allowed = (float((each - truth).norm() / truth.norm()) for each in (found, single))
    assert error < 1e-3 + 3 * allowed, f"relative error {error:.1e}, diffusers' own {allowed:.1e}"
