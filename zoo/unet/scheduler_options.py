"""What diffusers' schedulers can be told, what of it is supported, and what they take where nothing is said."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

SOLVERS = {
    "ddim": "DDIMScheduler",
    "euler": "EulerDiscreteScheduler",
    "dpm++": "DPMSolverMultistepScheduler",
    "pndm": "PNDMScheduler",
}

_FLAG = (True, False)
_OFF = (False, None)
_ANY = None
_SPACINGS = ("leading", "trailing", "linspace")
_PREDICTIONS = ("epsilon", "v_prediction", "sample")
# Of each option diffusers' default and what is supported. None: any value, or one that is without effect here.
_COMMON: dict[str, tuple[Any, tuple[Any, ...] | None]] = {
    "num_train_timesteps": (1000, _ANY),
    "beta_start": (0.0001, _ANY),
    "beta_end": (0.02, _ANY),
    "beta_schedule": ("linear", ("linear", "scaled_linear", "squaredcos_cap_v2")),
    "trained_betas": (None, _ANY),
    "steps_offset": (0, _ANY),
}
_SIGMAS: dict[str, tuple[Any, tuple[Any, ...] | None]] = {
    "prediction_type": ("epsilon", _PREDICTIONS),
    "timestep_spacing": ("linspace", _SPACINGS),
    "rescale_betas_zero_snr": (False, _FLAG),
    "use_karras_sigmas": (False, (True, False, None)),
    "use_exponential_sigmas": (False, _OFF),
    "use_beta_sigmas": (False, _OFF),
    "final_sigmas_type": ("zero", ("zero", "sigma_min")),
}
OPTIONS: dict[str, dict[str, tuple[Any, tuple[Any, ...] | None]]] = {
    "DDIMScheduler": {
        **_COMMON,
        "prediction_type": ("epsilon", _PREDICTIONS),
        "timestep_spacing": ("leading", _SPACINGS),
        "rescale_betas_zero_snr": (False, _FLAG),
        "clip_sample": (True, (False,)),
        "clip_sample_range": (1.0, _ANY),
        "set_alpha_to_one": (True, _FLAG),
        "thresholding": (False, (False,)),
        "dynamic_thresholding_ratio": (0.995, _ANY),
        "sample_max_value": (1.0, _ANY),
    },
    "EulerDiscreteScheduler": {
        **_COMMON,
        **_SIGMAS,
        "interpolation_type": ("linear", ("linear",)),
        "sigma_min": (None, _ANY),
        "sigma_max": (None, _ANY),
        "timestep_type": ("discrete", ("discrete",)),
    },
    "DPMSolverMultistepScheduler": {
        **_COMMON,
        **_SIGMAS,
        "solver_order": (2, (1, 2)),
        "thresholding": (False, (False,)),
        "dynamic_thresholding_ratio": (0.995, _ANY),
        "sample_max_value": (1.0, _ANY),
        "algorithm_type": ("dpmsolver++", ("dpmsolver++",)),
        "solver_type": ("midpoint", ("midpoint", "heun")),
        "lower_order_final": (True, _FLAG),
        "euler_at_final": (False, _FLAG),
        "use_lu_lambdas": (False, _OFF),
        "use_flow_sigmas": (False, _OFF),
        "flow_shift": (1.0, _ANY),
        "lambda_min_clipped": (-math.inf, (-math.inf, None)),
        "variance_type": (None, (None,)),
        "use_dynamic_shifting": (False, _OFF),
        "time_shift_type": ("exponential", _ANY),
    },
    "PNDMScheduler": {
        **_COMMON,
        "prediction_type": ("epsilon", ("epsilon", "v_prediction")),
        "timestep_spacing": ("leading", _SPACINGS),
        "skip_prk_steps": (False, (True,)),
        "set_alpha_to_one": (False, _FLAG),
    },
}
# A folder's options often are those of several schedulers: what is not this one's has no effect, in diffusers too.
_KNOWN = {name for options in OPTIONS.values() for name in options}
# Schedulers of the same noise: a solver of the zoo can take their places, with what they say of it.
_RELATED = tuple(
    f"{name}Scheduler"
    for name in (
        "DDPM",
        "DEISMultistep",
        "DPMSolverSinglestep",
        "EulerAncestralDiscrete",
        "HeunDiscrete",
        "KDPM2AncestralDiscrete",
        "KDPM2Discrete",
        "LMSDiscrete",
        "UniPCMultistep",
    )
)
# In place of another scheduler: latents have no range to be clipped to, and the Runge-Kutta steps are not here.
_SWITCHED: dict[str, dict[str, Any]] = {"ddim": {"clip_sample": False}, "pndm": {"skip_prk_steps": True}}


def read_options(scheduler: Any, solver: str | None) -> dict[str, Any]:
    """All options of a scheduler, with those that it does not name; ``_class_name`` is one of them.

    Args:
        scheduler: One of diffusers, or its configuration.
        solver: One of ``SOLVERS`` in place of its own.

    Raises:
        TypeError: If it is neither.
        ValueError: If the scheduler or the value of an option is not supported; the message names it.
    """
    if isinstance(scheduler, Mapping):
        given, name = dict(scheduler), scheduler.get("_class_name")
    else:
        config = getattr(scheduler, "config", None)
        if not isinstance(config, Mapping):
            raise TypeError(f"scheduler is a {type(scheduler).__name__}, expected diffusers' or its configuration")
        given, name = dict(config), type(scheduler).__name__
    if solver is not None:
        if solver not in SOLVERS:
            raise ValueError(f"there is no solver {solver!r}; choose one of {', '.join(SOLVERS)}")
        if name in _RELATED:
            given = {key: value for key, value in given.items() if key in (*_COMMON, *_SIGMAS)}
        if name in (*OPTIONS, *_RELATED):
            given, name = {**given, **_SWITCHED.get(solver, {})}, SOLVERS[solver]
    if name not in OPTIONS:
        remedy = f"; one of {', '.join(SOLVERS)} can take its place" if name in _RELATED else ""
        raise ValueError(f"{name or 'a scheduler without _class_name'} is not supported{remedy}")
    strange = [key for key in given if key not in _KNOWN and not key.startswith("_")]
    if strange:
        raise ValueError(
            f"diffusers' {name} with {strange[0]}={given[strange[0]]!r}: the zoo does not know this option"
        )
    options: dict[str, Any] = {"_class_name": name}
    for key, (default, supported) in OPTIONS[name].items():
        value = options[key] = given.get(key, default)
        if supported is not None and value not in supported:
            raise ValueError(
                f"diffusers' {name} with {key}={value!r} is not supported; the zoo has "
                f"{' and '.join(map(repr, supported))}"
            )
    if options.get("rescale_betas_zero_snr") and options["prediction_type"] == "epsilon":
        raise ValueError(
            f"diffusers' {name} with rescale_betas_zero_snr=True and prediction_type='epsilon' is not supported: the "
            "first latents are all noise, and hold nothing of the image to be found by subtracting it"
        )
    if name == SOLVERS["dpm++"] and options["use_karras_sigmas"] and options["beta_schedule"] == "squaredcos_cap_v2":
        raise ValueError(
            f"diffusers' {name} with use_karras_sigmas=True and beta_schedule='squaredcos_cap_v2' is not supported: "
            "its timesteps are cut off where rounding errors decide"
        )
    return options
