"""Schedules: each solver's steps are those of diffusers' scheduler, at every spacing; what is not there is named."""

import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from zoo.unet import Schedule, make_schedule
from zoo.unet.sampler import SOLVERS

with warnings.catch_warnings():
    # What diffusers imports warns of what it imports.
    warnings.simplefilter("ignore")
    import diffusers

NOISE = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
NEEDED = {"DDIMScheduler": {"clip_sample": False}, "PNDMScheduler": {"skip_prk_steps": True}}
NAMES = [name for name, _ in SOLVERS.values()]
EULER, DPM = "EulerDiscreteScheduler", "DPMSolverMultistepScheduler"
ZERO = {"rescale_betas_zero_snr": True}
SPACINGS = ("leading", "trailing", "linspace")
# One step, one of two orders, the ends of lower order (under 15 steps), and where a timestep falls on a half.
COUNTS = (1, 2, 3, 5, 14, 15, 30, 48)


def scheduler(name: str, **options: Any) -> Any:
    return getattr(diffusers, name)(**{**NOISE, **NEEDED.get(name, {}), **options})


def model(x: Tensor, timestep: Tensor) -> Tensor:
    """In place of one: not linear, and different at every timestep."""
    return 0.9 * torch.sin(3 * x + float(timestep) / 300) + 0.2 * x


def noise() -> Tensor:
    return torch.randn(12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def run(schedule: Schedule) -> Tensor:
    tracks = torch.zeros(schedule.kept, 12, dtype=torch.float64)
    tracks[0] = noise() * schedule.noise_scale
    for step, timestep in enumerate(schedule.timesteps):
        output = model(tracks[0] * schedule.input_scales[step], timestep)
        tracks = schedule.transitions[step] @ torch.cat([tracks, output[None]])
    return tracks[0]


def run_theirs(theirs: Any, steps: int, model: Callable[[Tensor, Tensor], Tensor] = model) -> Tensor:
    theirs.set_timesteps(steps)
    if hasattr(theirs, "set_begin_index"):
        theirs.set_begin_index(0)
    x = noise() * theirs.init_noise_sigma
    for timestep in theirs.timesteps:
        output = model(theirs.scale_model_input(x, timestep), timestep)
        x = theirs.step(output, timestep, x).prev_sample.double()
    return x


def assert_same(theirs: Any, steps: int) -> None:
    expected = run_theirs(theirs, steps)
    ours = make_schedule(theirs, steps)
    assert ours.steps == len(theirs.timesteps)
    # What they compute in float32 is here a table made in float64; their sigmas go up to 4096.
    torch.testing.assert_close(ours.timesteps, theirs.timesteps.float(), rtol=1e-6, atol=1e-3)
    found = run(ours)
    assert expected.isfinite().all()
    assert float((found - expected).norm() / expected.norm()) < 5e-5


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("spacing", SPACINGS)
@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
def test_the_same_steps(name: str, spacing: str, prediction: str) -> None:
    for steps in COUNTS:
        assert_same(scheduler(name, timestep_spacing=spacing, prediction_type=prediction, steps_offset=1), steps)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("DDIMScheduler", {"beta_schedule": "linear", "num_train_timesteps": 600, "set_alpha_to_one": False}),
        ("DDIMScheduler", {"trained_betas": [0.001 + 0.00001 * step for step in range(1000)]}),
        ("PNDMScheduler", {"skip_prk_steps": False}),
        (EULER, {"use_karras_sigmas": True, "sigma_min": 0.03, "sigma_max": 12.0, "timestep_spacing": "leading"}),
        (EULER, {**ZERO, "prediction_type": "v_prediction", "timestep_spacing": "trailing"}),
        (DPM, {"solver_order": 3, "final_sigmas_type": "sigma_min", "lower_order_final": False}),
        (DPM, {"solver_type": "heun"}),
        (DPM, {"use_karras_sigmas": True, "beta_schedule": "squaredcos_cap_v2", "prediction_type": "v_prediction"}),
        (DPM, {"euler_at_final": True, "prediction_type": "sample"}),
        ("DDIMScheduler", {**ZERO, "prediction_type": "v_prediction", "timestep_spacing": "trailing"}),
        ("HeunDiscreteScheduler", {"use_karras_sigmas": True}),
        ("LMSDiscreteScheduler", {}),
    ],
    ids=str,
)
def test_the_same_with_options(name: str, options: dict[str, Any]) -> None:
    theirs = scheduler(name, **options)
    for steps in COUNTS[3:]:
        assert_same(theirs, steps)


@pytest.mark.parametrize("steps", [2, 5, 20])
def test_a_last_step_of_no_width_changes_nothing(steps: int) -> None:
    # Karras' sigmas end where sigma_min ends. diffusers divides zero by zero there; by the midpoint it does not.
    ends = {"use_karras_sigmas": True, "final_sigmas_type": "sigma_min", "lower_order_final": False}
    ends |= {"beta_schedule": "linear", "beta_start": 0.0001}
    heun, midpoint = (scheduler(DPM, solver_type=kind, **ends) for kind in ("heun", "midpoint"))
    assert run_theirs(heun, steps).isnan().all()
    last = [make_schedule(each, steps).transitions[-1, 0] for each in (heun, midpoint)]
    torch.testing.assert_close(*last)
    assert run(make_schedule(heun, steps)).isfinite().all()


def test_a_solver_takes_the_noise_of_a_scheduler_that_is_not_there() -> None:
    theirs = diffusers.UniPCMultistepScheduler(**NOISE, prediction_type="v_prediction", timestep_spacing="trailing")
    config = {"_class_name": "UniPCMultistepScheduler", **theirs.config}
    for solver in ("euler", "dpm++"):
        same = getattr(diffusers, SOLVERS[solver][0]).from_config(theirs.config)
        torch.testing.assert_close(
            run(make_schedule(config, 9, solver=solver)), run_theirs(same, 9), rtol=1e-5, atol=1e-5
        )
    with pytest.raises(ValueError, match="FlowMatchEulerDiscreteScheduler is not supported; the zoo takes"):
        make_schedule({"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 3.0}, 9, solver="euler")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({}, "a scheduler without _class_name is not supported"),
        ({"_class_name": "UNet2DConditionModel"}, "UNet2DConditionModel is not supported"),
        ({"_class_name": "DDIMScheduler"}, "DDIMScheduler with clip_sample=True, .* its steps clip values"),
        ({"_class_name": DPM, "thresholding": True}, "DPMSolverMultistepScheduler with thresholding=True"),
        ({"_class_name": DPM, "algorithm_type": "sde-dpmsolver++"}, "algorithm_type='sde-dpmsolver\\+\\+' is not"),
        ({"_class_name": "EulerAncestralDiscreteScheduler"}, "its steps clip values or draw noise"),
        ({"_class_name": "UniPCMultistepScheduler"}, "remembers 17 tensors in 10 steps, and at most 16 are supported"),
        ({"_class_name": EULER, "prediction_type": "flow"}, "prediction_type given as flow must be one of"),
        ({"_class_name": EULER, "trained_betas": [0.1]}, "trained_betas has 1 values, num_train_timesteps is 1000"),
        (
            {"_class_name": "DDIMScheduler", "timestep_spacing": "trailing", **NEEDED["DDIMScheduler"], **ZERO},
            "divides by zero with rescale_betas_zero_snr=True and prediction_type='epsilon'",
        ),
    ],
)
def test_what_is_not_supported_is_named(config: dict[str, Any], words: str) -> None:
    before = torch.get_rng_state()
    with pytest.raises(ValueError, match=words):
        make_schedule(config, 10)
    assert torch.equal(torch.get_rng_state(), before)


def test_without_diffusers_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "diffusers", None)
    with pytest.raises(ImportError, match=r"pip install \"regional-zoo\[diffusers\]\""):
        make_schedule({"_class_name": EULER}, 10)


@pytest.mark.parametrize("steps", [0, -1, 1001, 2.0, True, None])
def test_numbers_of_steps_are_checked(steps: Any) -> None:
    with pytest.raises(ValueError, match="steps is .*, expected an integer from 1 to 1000"):
        make_schedule({"_class_name": EULER}, steps)


def test_timesteps_that_were_not_trained_are_refused() -> None:
    config = {"_class_name": EULER, "timestep_spacing": "leading", "steps_offset": 1}
    assert float(make_schedule(config, 999).timesteps[0]) == 999
    with pytest.raises(ValueError, match="1000 steps with steps_offset=1 have timesteps 1 to 1000, and 0 to 999 were"):
        make_schedule(config, 1000)
    with pytest.raises(ValueError, match="there is no solver 'heun'; choose one of ddim, euler"):
        make_schedule(config, 10, solver="heun")
    with pytest.raises(TypeError, match="scheduler is a str"):
        make_schedule("euler", 10)
