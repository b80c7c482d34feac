"""The steps from noise to an image, as tables: what each step does to the latents is one small matrix.

A solver of this kind computes its next latents, and whatever it remembers of earlier steps, as sums of what it has: the
latents, what it remembers, and the model's output. So a step is a matrix [K, K + 1], with one row for each of the K
tensors that go on to the next step, and all steps of all solvers are the same work on the device.

Symbols: a (signal) and s (noise) are the shares of image and noise in latents x = a image + s noise, a² + s² = 1.

Shape legend: N steps, K tensors that go from step to step, the latents first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

# Of the linear multistep method: weights of the output and the three before it.
_MULTISTEP = (
    (1.0, 0.0, 0.0, 0.0),
    (1 / 2, 1 / 2, 0.0, 0.0),
    (3 / 2, -1 / 2, 0.0, 0.0),
    (23 / 12, -16 / 12, 5 / 12, 0.0),
    (55 / 24, -59 / 24, 37 / 24, -9 / 24),
)


@dataclass(frozen=True, eq=False, kw_only=True)
class Schedule:
    """All steps of a run; ``make_schedule`` reads one from diffusers' configuration.

    Args:
        timesteps: [N], what the model is told in each step.
        input_scales: [N], what the latents are multiplied by before the model sees them.
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


@dataclass(frozen=True)
class Level:
    """A noise level: the shares of image and noise, with the ratio of them that it came from.

    Args:
        signal: a.
        noise: s.
        sigma: s / a; infinite where there is nothing but noise.
    """

    signal: float
    noise: float
    sigma: float

    @classmethod
    def of_variance(cls, kept: float) -> Level:
        """From a², one of diffusers' ``alphas_cumprod``."""
        signal, noise = kept**0.5, (1 - kept) ** 0.5
        return cls(signal, noise, noise / signal if signal else float("inf"))

    @classmethod
    def of_sigma(cls, sigma: float) -> Level:
        """From s / a."""
        signal = (sigma**2 + 1) ** -0.5
        return cls(signal, sigma * signal, sigma)

    def image(self, prediction: str) -> tuple[float, float]:
        """Shares of the latents and of the model's output in the image that the model expects."""
        if prediction == "epsilon":
            return 1 / self.signal, -self.noise / self.signal
        return (self.signal, -self.noise) if prediction == "v_prediction" else (0.0, 1.0)

    def towards(self, other: Level) -> tuple[float, float]:
        """Shares of the latents and of the expected image in latents of another level, along a straight line."""
        share = other.noise / self.noise
        return share, other.signal - share * self.signal


def ddim(timesteps: Tensor, levels: Sequence[tuple[Level, Level]], prediction: str) -> Schedule:
    """Song et al., "Denoising Diffusion Implicit Models", without noise; each step from one level to another."""
    rows = []
    for level, following in levels:
        share, image = level.towards(following)
        latents, output = level.image(prediction)
        rows.append([[share + image * latents, image * output]])
    return _schedule(timesteps, [1.0] * len(rows), rows, 1.0)


def euler(timesteps: Tensor, sigmas: Sequence[float], prediction: str, noise_scale: float) -> Schedule:
    """Karras et al., "Elucidating the Design Space of Diffusion-Based Generative Models", Algorithm 2, first order.

    Its latents are divided by a, so that noise has a standard deviation of sigma; ``sigmas`` [N + 1] end with the last.
    """
    scales, rows = [], []
    for sigma, following in pairwise(sigmas):
        level = Level.of_sigma(sigma)
        latents, output = level.image(prediction)
        share = following / sigma
        rows.append([[share + (1 - share) * latents * level.signal, (1 - share) * output]])
        scales.append(level.signal)
    return _schedule(timesteps, scales, rows, noise_scale)


def dpm_multistep(
    timesteps: Tensor, sigmas: Sequence[float], prediction: str, *, second: Sequence[bool], heun: bool
) -> Schedule:
    """Lu et al., "DPM-Solver++", the multistep solver of the expected image, which is remembered for a step.

    Args:
        timesteps: [N].
        sigmas: [N + 1], the last what the run ends at.
        prediction: What the model predicts.
        second: Of each step whether it is of second order, with what the step before expected.
        heun: The second order in the manner of Heun, else of the midpoint.
    """
    levels, rows = [Level.of_sigma(sigma) for sigma in sigmas], []
    for step, (level, following) in enumerate(pairwise(levels)):
        share, image = level.towards(following)
        latents, output = level.image(prediction)
        before = 0.0
        # A step from a level to itself, at which Karras' sigmas may end, changes nothing in either order.
        if second[step] and following != level:
            width, width_before = _log_ratio(level, following), _log_ratio(levels[step - 1], level)
            slope = following.signal + (following.noise / level.sigma - following.signal) / width if heun else image / 2
            slope *= width / width_before
            image, before = image + slope, -slope
        rows.append([[share + image * latents, before, image * output], [latents, 0.0, output]])
    return _schedule(timesteps, [1.0] * len(rows), rows, 1.0)


def multistep(timesteps: Tensor, levels: Sequence[tuple[Level, Level]], prediction: str) -> Schedule:
    """Liu et al., "Pseudo Numerical Methods for Diffusion Models", the linear multistep method alone.

    The second step takes the first again, with the mean of both outputs. Remembered are the three outputs before; the
    last of them is not needed yet when the latents of the first step take its place.
    """
    rows = []
    for step, (level, following) in enumerate(levels):
        share, image = level.towards(following)
        latents, output = level.image(prediction)
        weights = [image * output * weight for weight in _MULTISTEP[min(step, 4)]]
        start = share + image * latents
        moved = [start, *weights[1:], weights[0]]
        history = [[0.0, 0.0, 0.0, 0.0, 1.0], [0.0, 1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 1.0, 0.0, 0.0]]
        if step == 0:
            history[2] = [1.0, 0.0, 0.0, 0.0, 0.0]
        elif step == 1:
            moved[0], moved[3] = 0.0, start
            history = [[0.0, 1.0, 0.0, 0.0, 0.0], [0.0] * 5, [0.0] * 5]
        rows.append([moved, *history])
    return _schedule(timesteps, [1.0] * len(rows), rows, 1.0)


def _log_ratio(level: Level, following: Level) -> float:
    return math.log(level.sigma / following.sigma)


def _schedule(
    timesteps: Tensor, scales: Sequence[float], rows: Sequence[Sequence[Sequence[float]]], noise_scale: float
) -> Schedule:
    return Schedule(
        timesteps=timesteps.to(torch.float32),
        input_scales=torch.tensor(scales, dtype=torch.float64, device="cpu"),
        transitions=torch.tensor(rows, dtype=torch.float64, device="cpu"),
        noise_scale=noise_scale,
    )
