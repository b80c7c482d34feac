"""Sampling: from noise and a text to latents. One step is captured once, and diffusers' solvers become tables.

Keys and values of the text, and the shifts of all timesteps, are computed before the steps. Each step reads its rows of
these tables by an index on the device.

A solver computes the next latents as a linear combination of latents and model outputs of the current step and a few
earlier steps. So a step is a matrix [K, K + 1], with one row for each of the K tensors passed to the next step.

Shape legend: B images, R rows of the model (2 B with guidance: first without the text, then with it), L tokens of the
text, D its width, X of the pooled text, Y sizes, C channels, H height, W width, N steps, K tensors that a step passes
to the next step (the latents first), S channels of all shifts, V values of a probe.
"""

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zoo import validate
from zoo.engine.cuda_graph import cuda_graph as capture
from zoo.engine.graphed_step import GraphedStep
from zoo.unet.model import TextKeysValues, TimeShifts, UNet

# A step costs K² passes over the latents.
MOST_KEPT = 16
# Number of random values on which the recovered coefficients must agree with the solver.
_TRIALS = 8
# Scheduler options that can make a step nonlinear, and the values of the last option that keep it linear.
_NO_SUM = ("clip_sample", "thresholding", "rescale_betas_zero_snr", "algorithm_type")
_SUMS = ("dpmsolver", "dpmsolver++")


@dataclass(frozen=True, eq=False, kw_only=True)
class Schedule:
    """All steps of a run. ``make_schedule`` reads one from a diffusers scheduler."""

    timesteps: Tensor  # [N], the model's timestep in each step
    input_scales: Tensor  # [N], factors of the latents before the model
    # [N, K, K + 1]: row k of a step's matrix holds the coefficients of the latents, the K - 1 remembered tensors and
    # the model's output in the k-th tensor of the next step.
    transitions: Tensor
    noise_scale: float  # standard deviation of the latents at the start

    @property
    def steps(self) -> int:
        """Runs of the model: N."""
        return self.timesteps.shape[0]

    @property
    def kept(self) -> int:
        """Tensors passed from step to step: K."""
        return self.transitions.shape[1]


def make_schedule(scheduler: Any, steps: int) -> Schedule:
    """The steps of a diffusers scheduler, as tables on the CPU; the scheduler is not changed.

    Its steps must be linear: no clipping, no thresholding, no fresh noise. ``steps`` is diffusers'
    ``num_inference_steps``; some solvers run the model more often. TypeError or ValueError if the scheduler or the
    number of steps is not supported.
    """
    name = type(scheduler).__name__
    if not hasattr(scheduler, "alphas_cumprod") or not hasattr(scheduler, "scale_model_input"):
        raise TypeError(
            f"scheduler is a {name}; the zoo takes diffusers' schedulers of Stable Diffusion's noise, as DDIMScheduler "
            "and EulerDiscreteScheduler"
        )
    # A scheduler with noise draws from the global random state before it is refused.
    with torch.device("cpu"), torch.no_grad(), torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # numpy's, of schedulers that hand it tensors
        theirs = type(scheduler).from_config(scheduler.config)
        total = theirs.config.num_train_timesteps
        if not validate.is_count(steps) or steps > total:
            raise ValueError(f"steps is {steps!r}, expected an integer from 1 to {total}")
        theirs.set_timesteps(steps)
        # Diffusers makes its tables in float32. The cast to float64 makes their sums more exact.
        for key, value in vars(theirs).items():
            if isinstance(value, Tensor) and value.dtype == torch.float32:
                setattr(theirs, key, value.double())
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
                f"diffusers' {name} remembers {transitions.shape[1]} tensors in {steps} steps, and at most {MOST_KEPT} "
                "are supported; choose another solver, as DPMSolverMultistepScheduler"
            )
        return Schedule(
            timesteps=theirs.timesteps.to(torch.float32), input_scales=scales, transitions=transitions,
            noise_scale=float(theirs.init_noise_sigma),
        )  # fmt: skip


def _probe(theirs: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Factors of the model's input [N], and coefficients [N, N] of all latents and outputs in each step's result."""
    # Every step gets its own unit vectors as latents and as output.
    steps = len(theirs.timesteps)
    unit = torch.eye(2 * steps, dtype=torch.float64)
    trials = 3 * torch.randn(2 * steps, _TRIALS, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    given = torch.cat([unit, trials], dim=1)[:, None, None]  # [2 N, 1, 1, V]: images of one channel
    if hasattr(theirs, "set_begin_index"):
        theirs.set_begin_index(0)  # otherwise it searches the timestep, which may occur twice
    one, scales, returned = torch.ones(1, 1, dtype=torch.float64), [], []
    for step, timestep in enumerate(theirs.timesteps):
        scales.append(float(theirs.scale_model_input(one, timestep)))
        after: Tensor = theirs.step(given[steps + step], timestep, given[step], return_dict=False)[0]
        returned.append(after.double().flatten())
    results = torch.stack(returned)
    shares, tried = results[:, : 2 * steps], results[:, 2 * steps :]
    if not (shares @ trials - tried).abs().max() <= 1e-4 * results.abs().max():  # `not <=` also catches NaN
        values = ((key, theirs.config.get(key)) for key in _NO_SUM)
        options = ", ".join(f"{key}={value!r}" for key, value in values if value and value not in _SUMS)
        having, remedy = (f" with {options}", "switch that off, or take") if options else ("", "take")
        raise ValueError(
            f"diffusers' {type(theirs).__name__}{having} is not supported: its steps clip values, draw noise or divide "
            f"by zero; {remedy} DPMSolverMultistepScheduler.from_config(...)"
        )
    return torch.tensor(scales, dtype=torch.float64), shares[:, :steps], shares[:, steps:]


def _matrices(of_latents: Tensor, of_outputs: Tensor) -> Tensor:
    """Coefficients of latents and of outputs, [N, N] each -> transitions [N, K, K + 1] over the steps that matter.

    Columns are latents from this step back to the oldest, then outputs from the oldest to this step.
    """
    steps, both = len(of_latents), (of_latents, of_outputs)
    # The longest lag of a nonzero coefficient.
    latents, outputs = (1 + max((i - j for i, j in shares.nonzero().tolist()), default=0) for shares in both)
    kept = latents + outputs - 1
    matrices = torch.zeros(steps, kept, kept + 1, dtype=torch.float64)
    for lag in range(latents):
        matrices[lag:, 0, lag] = of_latents.diagonal(-lag)
    for lag in range(outputs):
        matrices[lag:, 0, kept - lag] = of_outputs.diagonal(-lag)
    for row in range(1, kept):
        matrices[:, row, row - 1 if row < latents else row + 1] = 1.0
    return matrices


class DenoiseState:
    """Inputs and outputs of a step, at fixed addresses, for runs of at most N steps."""

    def __init__(self, shape: tuple[int, ...], kept: int, steps: int, shifts: Tensor, keys_values: Tensor) -> None:
        exact = torch.float64 if shifts.dtype == torch.float64 else torch.float32
        with shifts.device:
            self.tracks = torch.zeros(kept, *shape, dtype=exact)  # latents, then the solver's remembered tensors
            self.input_scales = torch.zeros(steps, dtype=exact)
            self.transitions = torch.zeros(steps, kept, kept + 1, dtype=exact)
            self.shifts = torch.zeros(steps, *shifts.shape[1:], dtype=shifts.dtype)  # [N, R or 1, S]
            self.keys_values = torch.zeros_like(keys_values)  # [R, L, 2 × channels of all cross-attentions]
            self.guidance = torch.zeros((), dtype=exact)
            self.step = torch.zeros(1, dtype=torch.int64)  # index of the next step

    def fits(self, schedule: Schedule, shifts: Tensor, keys_values: Tensor) -> bool:
        """True if a run has these shapes, or fewer steps."""
        pairs = (shifts[0], self.shifts[0]), (keys_values, self.keys_values)
        alike = all((a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device) for a, b in pairs)
        return alike and schedule.kept == len(self.tracks) and schedule.steps <= len(self.input_scales)

    def begin(self, schedule: Schedule, noise: Tensor, shifts: Tensor, keys_values: Tensor, guidance: float) -> None:
        """Copy the inputs of a run into the state, from which a captured step reads them."""
        steps = schedule.steps
        self.transitions[:steps].copy_(schedule.transitions)
        self.input_scales[:steps].copy_(schedule.input_scales)
        self.shifts[:steps].copy_(shifts)
        self.keys_values.copy_(keys_values)
        self.guidance.fill_(guidance)
        self.tracks.zero_()
        self.tracks[0].copy_(noise)
        self.tracks[0].mul_(schedule.noise_scale)
        self.step.zero_()


def denoise_step(model: UNet, state: DenoiseState, guided: bool) -> None:
    """Run the model on the latents and compute the next latents. Reads and writes only ``state``."""
    index = state.step
    sample = (state.tracks[0] * state.input_scales.index_select(0, index)).to(model.dtype)
    shifts = TimeShifts(state.shifts.index_select(0, index)[0])
    sample = torch.cat([sample, sample]) if guided else sample
    output = model(sample, shifts, TextKeysValues(state.keys_values)).sample.to(state.tracks.dtype)
    if guided:
        without, with_text = output.chunk(2)
        output = without + state.guidance * (with_text - without)
    shares = state.transitions.index_select(0, index)[0]
    moved = shares[:, :, None, None, None, None] * torch.cat([state.tracks, output[None]])
    state.tracks.copy_(moved.sum(1))
    # Modulo, since warm-up runs before a capture may outnumber the steps.
    index.add_(1).remainder_(len(state.input_scales))


class Sampler:
    """Generates latents from texts with a UNet and a schedule. Compile the model's regions before the first call.

    The first call captures a step. Later calls copy their inputs (texts, seeds, guidance, schedules) and replay it. A
    call with other shapes (another text length, guidance switched on or off, more steps than before, a solver that
    remembers another number of tensors) captures a new step, which replaces the old one.

    Args:
        model: A UNet of the zoo.
        schedule: From ``make_schedule``, the default of calls.
        shape: [B, C, H, W] of the latents: for an image of 512 × 512 pixels Stable Diffusion has [1, 4, 64, 64].
        guidance_scale: Factor of the difference between the outputs with and without the text, added to the latter.
            Up to 1 the model runs only with the text.
        cuda_graph: Run steps as a CUDA graph; by default on a GPU.

    Raises:
        TypeError, ValueError: If model, schedule or a size does not fit.
    """

    def __init__(
        self, model: UNet, schedule: Schedule, *, shape: tuple[int, int, int, int], guidance_scale: float = 7.5,
        cuda_graph: bool | None = None,
    ) -> None:  # fmt: skip
        if not isinstance(model, UNet):
            raise TypeError(f"model is a {type(model).__name__}, expected a UNet of the zoo")
        channels, reduction = model.config.in_channels, model.config.reduction
        if model.config.out_channels != channels or model.config.time_cond_proj_dim is not None:
            raise ValueError("the model takes more than latents, timestep and text: use diffusers' pipelines")
        fits = len(shape) == 4 and all(map(validate.is_count, shape)) and shape[1] == channels
        if not fits or any(size % reduction for size in shape[2:]):
            expected = f"[B, {channels}, H, W] with H and W divisible by {reduction}"
            raise ValueError(f"shape is {shape!r}, expected {expected}")
        _check_run(schedule, guidance_scale)
        self.model, self.schedule, self.shape, self.guidance_scale = model, schedule, tuple(shape), guidance_scale
        self.cuda_graph, self.captures = cuda_graph, 0
        self._state: DenoiseState | None = None
        self._step: GraphedStep | None = None

    def __call__(
        self, text: Tensor, negative: Tensor | None = None, *, added: Mapping[str, Tensor] | None = None,
        negative_added: Mapping[str, Tensor] | None = None, latents: Tensor | None = None, seed: int = 0,
        schedule: Schedule | None = None, guidance_scale: float | None = None,
    ) -> Tensor:  # fmt: skip
        """Run all steps: latents [B, C, H, W] float32. Divide them by a VAE's scaling factor before decoding.

        They are on the model's device, which may still be computing them.

        Args:
            text: [B, L, D], or [1, L, D] for all images.
            negative: Text of the same shape that guidance leads away from; required with guidance, may encode "".
            added: ``text_embeds`` [B, X] and ``time_ids`` [B, Y], or [1, ...], for models that take them.
            negative_added: The same for ``negative``.
            latents: [B, C, H, W], initial noise of standard deviation 1; replaces the seed's noise.
            seed: Seed of the noise, drawn on the host: the same on every device. The global random state is not used.
            schedule: Replaces the sampler's.
            guidance_scale: Replaces the sampler's.

        Raises:
            TypeError, ValueError: If an input is missing or does not fit, before any step runs.
        """
        schedule = self.schedule if schedule is None else schedule
        scale = self.guidance_scale if guidance_scale is None else guidance_scale
        _check_run(schedule, scale)
        model, guided = self.model, scale > 1
        if guided and negative is None:
            raise ValueError("negative is missing: encode an empty text, or pass guidance_scale=1")
        if latents is None:
            latents = torch.randn(self.shape, generator=validate.seeded(seed), device="cpu", dtype=torch.float32)
        shape = " ".join(map(str, self.shape))
        validate.tensor("latents", latents, shape, kinds="floating", hint=" as the sampler's shape")
        texts = {"negative": negative, "text": text} if guided else {"text": text}
        sides = {"negative_added": negative_added or {}, "added": added or {}} if guided else {"added": added or {}}
        with torch.inference_mode():
            conditions = {}
            for key in dict.fromkeys(key for side in sides.values() for key in side):
                values = {f"{name}[{key!r}]": side.get(key) for name, side in sides.items()}
                conditions[key] = self._joined(values, "X", {}).to(model.device)
            sizes = {"D": model.config.cross_attention_dim}
            keys_values = model.text_keys_values(self._joined(texts, "L D", sizes)).keys_values
            shifts = model.time_shifts(schedule.timesteps[:, None].to(model.device), conditions).shifts
            state = self._state
            if state is None or not state.fits(schedule, shifts, keys_values):
                steps = schedule.steps if state is None else max(schedule.steps, len(state.input_scales))
                # Frees the memory of the previously captured step.
                self._state = self._step = state = None
                state = DenoiseState(self.shape, schedule.kept, steps, shifts, keys_values)
                state.begin(schedule, latents, shifts, keys_values, scale)
                if self.cuda_graph or (self.cuda_graph is None and model.device.type == "cuda"):
                    self._step = capture(denoise_step, (model, state, guided), static=(0, 1), clone_outputs=False)
                    self.captures += 1
                self._state = state
            state.begin(schedule, latents, shifts, keys_values, scale)
            step = denoise_step if self._step is None else self._step
            for _ in range(schedule.steps):
                step(model, state, guided)
        return state.tracks[0].clone()

    def _joined(self, sides: Mapping[str, Any], names: str, sizes: Mapping[str, int]) -> Tensor:
        """Join both sides of guidance, each [B, ...] or [1, ...] with trailing dimensions ``names``: [R, ...]."""
        rows: list[Tensor] = []
        for name, given in sides.items():
            shapes = " | ".join(dict.fromkeys([f"{self.shape[0]} {names}", f"1 {names}"]))
            alike = f", as {next(iter(sides))} has" if rows else ""
            validate.tensor(name, given, shapes, sizes=sizes, hint=f"{alike}; one row stands for all images")
            sizes = dict(zip(names.split(), given.shape[1:], strict=True))
            rows.append(given.expand(self.shape[0], *given.shape[1:]))
        return torch.cat(rows)


def _check_run(schedule: Schedule, scale: float) -> None:
    if not isinstance(schedule, Schedule):
        raise TypeError(f"schedule is a {type(schedule).__name__}, expected what make_schedule gives")
    if isinstance(scale, bool) or not isinstance(scale, (int, float)) or not math.isfinite(scale) or scale < 0:
        raise ValueError(f"guidance_scale is {scale!r}, expected a number of at least 0; up to 1 there is no guidance")
