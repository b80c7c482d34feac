"""The steps from noise to an image as tables of small matrices, read from diffusers' schedulers.

A solver computes its next latents as a sum of what it has: latents and model outputs of this step and of a few steps
before. So a step is a matrix [K, K + 1], with one row for each of the K tensors that go on to the next step, and all
steps of all solvers are the same work on the device.

Shape legend: N steps, K tensors that a step passes on to the next, the latents first, V values of a probe.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Short names of diffusers' schedulers, with what each needs so that its steps are sums.
SOLVERS: dict[str, tuple[str, dict[str, Any]]] = {
    "ddim": ("DDIMScheduler", {"clip_sample": False}),
    "euler": ("EulerDiscreteScheduler", {}),
    "dpm++": ("DPMSolverMultistepScheduler", {}),
    "pndm": ("PNDMScheduler", {"skip_prk_steps": True}),
}
# A step costs K² passes over the latents.
MOST_KEPT = 16
_TRIALS = 8


@dataclass(frozen=True, eq=False, kw_only=True)
class Schedule:
    """All steps of a run; ``make_schedule`` reads one from a scheduler of diffusers.

    Args:
        timesteps: [N], the timestep that the model gets in each step.
        input_scales: [N], factors of the latents before the model.
        transitions: [N, K, K + 1]: row k of a step's matrix are the shares of the latents, of the K - 1 tensors that
            are remembered, and of the model's output, in the k-th tensor of the next step.
        noise_scale: Standard deviation of the latents at the start.
    """

    timesteps: Tensor
    input_scales: Tensor
    transitions: Tensor
    noise_scale: float

    @property
    def steps(self) -> int:
        """Runs of the model: N."""
        return self.timesteps.shape[0]

    @property
    def kept(self) -> int:
        """Tensors that go from step to step: K."""
        return self.transitions.shape[1]


def make_schedule(scheduler: Any, steps: int, *, solver: str | None = None) -> Schedule:
    """The steps that a scheduler of diffusers takes; diffusers must be installed.

    Args:
        scheduler: A scheduler of diffusers, or its configuration with ``_class_name``, as ``scheduler_config.json``
            has it. Its steps must be sums: no clipping, no thresholding, no fresh noise.
        steps: diffusers' ``num_inference_steps``. Some solvers run the model more often.
        solver: ``"ddim"``, ``"euler"``, ``"dpm++"`` or ``"pndm"`` in place of the scheduler's own, with its noise.

    Returns:
        Tables on the CPU.

    Raises:
        ImportError: If diffusers is not installed.
        TypeError: If ``scheduler`` is neither.
        ValueError: If the scheduler, its configuration or the number of steps is not supported; the message says why.
    """
    # A scheduler that draws noise draws it from the global state, before it is refused.
    with torch.device("cpu"), torch.no_grad(), torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # numpy's, of schedulers that hand it tensors
        theirs = _build(scheduler, solver)
        total = theirs.config.num_train_timesteps
        if not isinstance(steps, int) or isinstance(steps, bool) or not 1 <= steps <= total:
            raise ValueError(f"steps is {steps!r}, expected an integer from 1 to {total}")
        if len(theirs.alphas_cumprod) != total:
            raise ValueError(f"trained_betas has {len(theirs.alphas_cumprod)} values, num_train_timesteps is {total}")
        theirs.set_timesteps(steps)
        # In float64 the tables, which diffusers made in float32, are as exact as before, and sums of them more so.
        for name, value in vars(theirs).items():
            if isinstance(value, Tensor) and value.dtype == torch.float32:
                setattr(theirs, name, value.double())
        low, high = float(theirs.timesteps.min()), float(theirs.timesteps.max())
        if low < 0 or high > total - 1:
            raise ValueError(
                f"{steps} steps with steps_offset={theirs.config.get('steps_offset')} have timesteps {low:g} to "
                f"{high:g}, and 0 to {total - 1} were trained on; take fewer steps"
            )
        scales, of_latents, of_outputs = _probe(theirs)
        transitions = _matrices(of_latents, of_outputs)
        if transitions.shape[1] > MOST_KEPT:
            raise ValueError(
                f"diffusers' {type(theirs).__name__} remembers {transitions.shape[1]} tensors in {steps} steps, and at "
                f"most {MOST_KEPT} are supported; choose another solver, as solver='dpm++'"
            )
        return Schedule(
            timesteps=theirs.timesteps.to(torch.float32),
            input_scales=scales,
            transitions=transitions,
            noise_scale=float(theirs.init_noise_sigma),
        )


def _build(scheduler: Any, solver: str | None) -> Any:
    """A new scheduler with the given one's configuration, of the solver's class if one is named."""
    try:
        import diffusers
    except ImportError as error:
        raise ImportError("make_schedule reads a scheduler of diffusers; install it: pip install diffusers") from error
    config = scheduler if isinstance(scheduler, Mapping) else getattr(scheduler, "config", None)
    if not isinstance(config, Mapping):
        raise TypeError(f"scheduler is a {type(scheduler).__name__}, expected diffusers' or its configuration")
    name = config.get("_class_name") if scheduler is config else type(scheduler).__name__
    cls: Any = getattr(diffusers, name or "", None) if scheduler is config else type(scheduler)
    theirs: Any = cls.from_config(config) if hasattr(cls, "set_timesteps") else None
    if not hasattr(theirs, "alphas_cumprod") or not hasattr(theirs, "scale_model_input"):
        raise ValueError(
            f"{name or 'a scheduler without _class_name'} is not supported; the zoo takes diffusers' schedulers of "
            "Stable Diffusion's noise, as DDIMScheduler and EulerDiscreteScheduler"
        )
    if solver is None:
        return theirs
    if solver not in SOLVERS:
        raise ValueError(f"there is no solver {solver!r}; choose one of {', '.join(SOLVERS)}")
    name, options = SOLVERS[solver]
    return getattr(diffusers, name).from_config(theirs.config, **options)


def _probe(theirs: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Factors of the model's input [N], and the shares [N, N] of all steps' latents and outputs in each step's result.

    Every step gets latents and an output of its own, each with a 1 where all others have a 0, so that its result lists
    the shares. The solver's memory of earlier steps shows like anything else.
    """
    steps = len(theirs.timesteps)
    unit = torch.eye(2 * steps, dtype=torch.float64)
    # Random values follow, on which the shares must agree with the solver.
    trials = 3 * torch.randn(2 * steps, _TRIALS, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    given = torch.cat([unit, trials], dim=1)[:, None, None]  # [2 N, 1, 1, V]: images of one channel
    if hasattr(theirs, "set_begin_index"):
        theirs.set_begin_index(0)  # otherwise it looks for its place by the timestep, of which there may be two
    sigmas, scales, returned = getattr(theirs, "sigmas", None), [], []
    for step, timestep in enumerate(theirs.timesteps):
        latents, output = given[step], given[steps + step]
        scales.append(float(theirs.scale_model_input(torch.ones(1, 1, dtype=torch.float64), timestep)))
        after: Tensor = theirs.step(output, timestep, latents, return_dict=False)[0].double()
        if after.isnan().any() and sigmas is not None and sigmas[step] == sigmas[step + 1]:
            # Karras' sigmas may end in a step of no width, for which Heun's formula divides zero by zero.
            after = latents
        returned.append(after.flatten())
    results = torch.stack(returned)
    shares = results[:, : 2 * steps]
    name, config = type(theirs).__name__, theirs.config
    if not results.isfinite().all():
        raise ValueError(
            f"diffusers' {name} divides by zero with rescale_betas_zero_snr={config.get('rescale_betas_zero_snr')} "
            f"and prediction_type={config.get('prediction_type')!r}; choose another timestep_spacing or prediction_type"
        )
    if not torch.allclose(shares @ trials, results[:, 2 * steps :], rtol=1e-4, atol=1e-4 * float(results.abs().max())):
        options = (
            f"{key}={config[key]!r}" for key in ("clip_sample", "thresholding", "algorithm_type") if key in config
        )
        raise ValueError(
            f"diffusers' {name} with {', '.join(options) or 'its options'} is not supported: its steps clip values or "
            "draw noise; switch that off, or choose a deterministic scheduler"
        )
    return torch.tensor(scales, dtype=torch.float64), shares[:, :steps], shares[:, steps:]


def _matrices(of_latents: Tensor, of_outputs: Tensor) -> Tensor:
    """Shares [N, N] twice -> transitions [N, K, K + 1], over the latents of as many steps as matter, and the outputs.

    Columns are the latents of this step, of the one before and so on, then outputs from the oldest to this step's.
    """
    steps = len(of_latents)
    latents, outputs = (1 + _longest_lag(shares) for shares in (of_latents, of_outputs))
    kept = latents + outputs - 1
    matrices = torch.zeros(steps, kept, kept + 1, dtype=torch.float64)
    for lag in range(latents):
        matrices[lag:, 0, lag] = of_latents.diagonal(-lag)
    for lag in range(outputs):
        matrices[lag:, 0, kept - lag] = of_outputs.diagonal(-lag)
    for row in range(1, kept):
        matrices[:, row, row - 1 if row < latents else row + 1] = 1.0
    return matrices


def _longest_lag(shares: Tensor) -> int:
    step, earlier = shares.nonzero(as_tuple=True)
    return int((step - earlier).max()) if len(step) else 0
