"""Schedules from the configurations of diffusers' schedulers; the library is not imported.

What was trained on is T noise levels, told from each other by a timestep. A scheduler picks some of them, or levels
between them, and goes from one to the next.

Shape legend: T trained levels, N steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from zoo.unet.schedule import Level, Schedule, ddim, dpm_multistep, euler, multistep
from zoo.unet.scheduler_options import read_options


def make_schedule(scheduler: Any, steps: int, *, solver: str | None = None) -> Schedule:
    """The steps that a diffusers scheduler would take.

    Args:
        scheduler: One of diffusers, or its configuration with ``_class_name`` in it, as ``scheduler_config.json`` has
            it: DDIM without noise, Euler, DPM-Solver++ of first or second order, PNDM without Runge-Kutta steps.
        steps: As ``num_inference_steps`` there. PNDM runs the model once more.
        solver: ``"ddim"``, ``"euler"``, ``"dpm++"`` or ``"pndm"`` in place of the scheduler's own, with its noise.

    Returns:
        Tables on the CPU, whatever torch's default device is.

    Raises:
        ValueError: If an option, a scheduler or a number of steps is not supported; the message names it.
    """
    options = read_options(scheduler, solver)
    total = options["num_train_timesteps"]
    if not isinstance(steps, int) or isinstance(steps, bool) or not 1 <= steps <= total:
        raise ValueError(f"steps is {steps!r}, expected an integer from 1 to {total}")
    kept = _signal_variances(options)
    make = {
        "DDIMScheduler": _ddim,
        "EulerDiscreteScheduler": _euler,
        "DPMSolverMultistepScheduler": _dpm,
        "PNDMScheduler": _pndm,
    }[options["_class_name"]]
    return make(options, kept, steps)


def _signal_variances(options: Mapping[str, Any]) -> Tensor:
    """What is left of the image's variance at each trained level, [T] float64, rounded as diffusers does."""
    total, name = options["num_train_timesteps"], options["_class_name"]
    start, end, curve = options["beta_start"], options["beta_end"], options["beta_schedule"]
    exact: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
    if options["trained_betas"] is not None:
        betas = torch.tensor(options["trained_betas"], **exact)
        if betas.shape != (total,):
            raise ValueError(f"trained_betas has {betas.numel()} values, and num_train_timesteps is {total}")
    elif curve == "linear":
        betas = torch.linspace(start, end, total, **exact)
    elif curve == "scaled_linear":
        betas = torch.linspace(start**0.5, end**0.5, total, **exact) ** 2
    else:
        heights = [math.cos((step / total + 0.008) / 1.008 * math.pi / 2) ** 2 for step in range(total + 1)]
        betas = torch.tensor([min(1 - heights[i + 1] / heights[i], 0.999) for i in range(total)], **exact)
    kept = torch.cumprod(1.0 - betas, dim=0)
    if options.get("rescale_betas_zero_snr"):
        # Lin et al., "Common Diffusion Noise Schedules and Sample Steps are Flawed", Algorithm 1.
        roots = kept.sqrt()
        roots = (roots - roots[-1]) * (roots[0] / (roots[0] - roots[-1]))
        squares = roots**2
        kept = torch.cumprod(torch.cat([squares[:1], squares[1:] / squares[:-1]]), dim=0)
        if name != "DDIMScheduler":
            # A solver in sigmas cannot start at an infinite one.
            kept[-1] = 2**-24
    return kept.to(torch.float64)


def _timesteps(options: Mapping[str, Any], steps: int, *, left_out: int = 0, whole: bool = True) -> Tensor:
    """The timesteps of a run, [N] float64, falling.

    Args:
        options: Of the scheduler.
        steps: N.
        left_out: How many more are spaced out and left out at the end.
        whole: Round them.
    """
    total, spacing, points = options["num_train_timesteps"], options["timestep_spacing"], steps + left_out
    # Multiples of a stride, added up as diffusers' are: which way a half is rounded depends on it.
    if spacing == "linspace":
        stride = (total - 1) / max(1, points - 1)
        found = [step * stride for step in range(points)]
    elif spacing == "leading":
        found = [float(step * (total // points) + options["steps_offset"]) for step in range(points)]
        if not 0 <= found[-steps] <= found[-1] <= total - 1:
            raise ValueError(
                f"{steps} steps with steps_offset={options['steps_offset']} go to timestep {found[-1]:g}, and "
                f"{total - 1} is the last that was trained on; take fewer steps"
            )
    else:
        stride = total - (total - total / steps)
        found = [round(total - step * stride) - 1.0 for step in reversed(range(steps))]
    timesteps = torch.tensor(found[::-1][:steps], dtype=torch.float64, device="cpu")
    return timesteps.round() if whole or spacing == "trailing" else timesteps.float().double()


def _ddim(options: Mapping[str, Any], kept: Tensor, steps: int) -> Schedule:
    timesteps = _timesteps(options, steps)
    stride = options["num_train_timesteps"] // steps
    levels = [_levels(options, kept, int(step), int(step) - stride) for step in timesteps]
    return ddim(timesteps, levels, options["prediction_type"])


def _pndm(options: Mapping[str, Any], kept: Tensor, steps: int) -> Schedule:
    timesteps = _timesteps(options, steps)
    stride = options["num_train_timesteps"] // steps
    pairs = [(int(step), int(step) - stride) for step in timesteps]
    if steps > 1:
        # The first step is done again, with what the model says where it led to.
        second = int(timesteps[1])
        pairs.insert(1, (second + stride, second))
        timesteps = torch.cat([timesteps[:2], timesteps[1:]])
    return multistep(timesteps, [_levels(options, kept, *pair) for pair in pairs], options["prediction_type"])


def _levels(options: Mapping[str, Any], kept: Tensor, before: int, after: int) -> tuple[Level, Level]:
    last = 1.0 if options["set_alpha_to_one"] else float(kept[0])
    return Level.of_variance(float(kept[before])), Level.of_variance(float(kept[after]) if after >= 0 else last)


def _euler(options: Mapping[str, Any], kept: Tensor, steps: int) -> Schedule:
    timesteps = _timesteps(options, steps, whole=False)
    trained = ((1 - kept) / kept).sqrt()
    sigmas = _between(trained, timesteps)
    if options["use_karras_sigmas"]:
        lowest, highest = options["sigma_min"], options["sigma_max"]
        lowest = float(sigmas[-1]) if lowest is None else lowest
        sigmas = _karras(lowest, float(sigmas[0]) if highest is None else highest, steps)
        timesteps = _nearest(trained, sigmas)
    first = float(sigmas.max())
    scale = first if options["timestep_spacing"] != "leading" else (first**2 + 1) ** 0.5
    return euler(timesteps, _ended(options, sigmas, trained), options["prediction_type"], scale)


def _dpm(options: Mapping[str, Any], kept: Tensor, steps: int) -> Schedule:
    timesteps = _timesteps(options, steps, left_out=1)
    trained = ((1 - kept) / kept).sqrt()
    if options["use_karras_sigmas"]:
        sigmas = _karras(float(trained[0]), float(trained[-1]), steps)
        timesteps = _nearest(trained, sigmas).round()
    else:
        sigmas = _between(trained, timesteps)
    few = options["lower_order_final"] and steps < 15
    first_at_end = options["euler_at_final"] or few or options["final_sigmas_type"] == "zero"
    second = [options["solver_order"] == 2 and step > 0 for step in range(steps)]
    second[-1] = second[-1] and not first_at_end
    return dpm_multistep(
        timesteps,
        _ended(options, sigmas, trained),
        options["prediction_type"],
        second=second,
        heun=options["solver_type"] == "heun",
    )


def _ended(options: Mapping[str, Any], sigmas: Tensor, trained: Tensor) -> list[float]:
    return [*sigmas.tolist(), 0.0 if options["final_sigmas_type"] == "zero" else float(trained[0])]


def _between(trained: Tensor, timesteps: Tensor) -> Tensor:
    """Sigmas at timesteps, in a straight line between trained ones."""
    low = timesteps.floor().clamp(0, len(trained) - 1).long()
    high = (low + 1).clamp(max=len(trained) - 1)
    return torch.lerp(trained[low], trained[high], (timesteps - low).clamp(0, 1))


def _nearest(trained: Tensor, sigmas: Tensor) -> Tensor:
    """Timesteps of sigmas, in a straight line between the logarithms of trained ones."""
    points, logs = trained.log(), sigmas.log()
    low = (torch.searchsorted(points, logs, right=True) - 1).clamp(0, len(points) - 2)
    share = (logs - points[low]) / (points[low + 1] - points[low])
    return low + share.clamp(0, 1)


def _karras(lowest: float, highest: float, steps: int) -> Tensor:
    """Karras et al., equation 5: sigmas between two, [N], falling."""
    root = 1 / 7
    ramp = torch.linspace(0, 1, steps, dtype=torch.float64, device="cpu")
    return (highest**root + ramp * (lowest**root - highest**root)) ** 7
