"""Training of UNets: the noise in latents predicted, float32 weights in channels_last, autocast.

Shape legend: B rows, C channels, H × W pixels, L tokens of the text, D its width, X width of the pooled text.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.families import unet_upstream, unet_work
from benchmarks.families.base import UNSCALED, Prepared, Training, autocast_of
from benchmarks.plan import Case
from benchmarks.training import reference_losses
from zoo.unet import UNetConfig

BYTES_FORMULA = (
    "Activations three times as in inference: forward, gradients by inputs and gradients by weights are a call each, "
    "which reads two of input, output and weights and writes the third; latents and text need no gradient. And 32 "
    "bytes a weight: its gradient is written, and the optimizer reads weight, gradient and two moments and writes "
    "three. Left out, so that it is a lower bound: statistics of norms, which need a pass of their own."
)
# Times the width of the first level: wide models take smaller steps. 1e-4 at 320.
_RATE_TIMES_WIDTH = 0.032
# Latents are squares of this many a side, so that there is something to tell from noise.
SQUARES = 4
# Of Stable Diffusion's noise: the variance that steps add, from the first to the last of a thousand.
_STEPS, _FIRST, _LAST = 1000, 0.00085, 0.012


class NoiseLoss:
    """Mean squared error of the predicted noise.

    Args:
        device: Where the tables lie: how much of the latents, and of noise, is left at each timestep.
    """

    def __init__(self, device: torch.device | str) -> None:
        variances = torch.linspace(_FIRST**0.5, _LAST**0.5, _STEPS, dtype=torch.float64).square()
        left = (1 - variances).cumprod(0)
        self.latents, self.noise = (table.sqrt().float().to(device) for table in (left, 1 - left))

    def __call__(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """Of ``latents`` and ``noise`` [B, C, H, W], ``timesteps`` [B] and ``text`` [B, L, D]; a scalar.

        Models that take them are given ``text_embeds`` [B, X] and ``time_ids`` [B, 6] as well.
        """
        noise, timesteps = batch["noise"], batch["timesteps"]
        rows = (-1, 1, 1, 1)
        mixed = self.latents[timesteps].view(rows) * batch["latents"] + self.noise[timesteps].view(rows) * noise
        added = {name: batch[name] for name in ("text_embeds", "time_ids") if name in batch}
        conditions: dict[str, Any] = {"added_cond_kwargs": added} if added else {}
        (predicted,) = model(mixed, timesteps, batch["text"], **conditions, return_dict=False)
        return F.mse_loss(predicted.to(noise.dtype), noise)


def training_of(config: UNetConfig, batch: int, size: int, *, seed: int, device: str, dtype: torch.dtype) -> Training:
    """The loss of noise in latents that are drawn anew in each step.

    Args:
        config: The model's.
        batch: B.
        size: H and W.
        seed: Of everything that is drawn.
        device: Where it is drawn; the same seed gives the same on the same kind of device.
        dtype: Of autocast; float32 for none.
    """

    def draw(index: int) -> dict[str, Tensor]:
        generator = torch.Generator(device).manual_seed((seed << 20) + index)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device)

        squares = normal(batch, config.in_channels, min(SQUARES, size), min(SQUARES, size))
        drawn = {
            "latents": F.interpolate(squares, size=(size, size)),
            "noise": normal(batch, config.out_channels, size, size),
            "timesteps": torch.randint(_STEPS, (batch,), generator=generator, device=device),
            "text": normal(batch, unet_work.TOKENS, config.cross_attention_dim),
        }
        if config.addition_embed_type is not None:
            pooled, drawn["time_ids"] = unet_work.added_conditions(config, batch, size, device)
            drawn["text_embeds"] = normal(batch, pooled)
        return drawn

    return Training(
        loss=NoiseLoss(device),
        batch=draw,
        learning_rate=_RATE_TIMES_WIDTH / config.block_out_channels[0],
        autocast=autocast_of(dtype),
    )


def refuses(case: Case) -> str | None:
    """Why there is no such training, names that exist taken for granted; or None."""
    if case.impl == "upstream-tuned":
        return "tuned has fused projections, which are for inference; to train, diffusers' users have no better way"
    if case.dtype == "float16":
        return UNSCALED
    return None


def for_training(case: Case, prepared: Prepared, config: UNetConfig, batch: int, size: int, *, seed: int) -> Prepared:
    """What inference prepares in float32, made ready for training.

    Args:
        case: The arm; its dtype is that of autocast, float32 for none.
        prepared: Of inference.
        config: The model's.
        batch: B.
        size: H and W.
        seed: Of weights, latents, noise, timesteps and text.
    """
    dtype: torch.dtype = getattr(torch, case.dtype)
    training = training_of(config, batch, size, seed=seed, device=case.device, dtype=dtype)
    precision = unet_work.reference_dtype(config, _COPIES)

    def reference() -> Tensor:
        weights = unet_upstream.seeded(config, seed=seed, dtype=torch.float32, device=torch.device(case.device))
        theirs = unet_upstream.build(config, weights).requires_grad_(True)
        # Of each block the inputs alone are kept.
        theirs.enable_gradient_checkpointing()
        with unet_upstream.in_full_float32():
            return reference_losses(theirs, training, precision)

    return replace(
        prepared,
        model=prepared.model.requires_grad_(True).train(),
        inputs={},
        reference=reference,
        reference_dtype=str(precision).removeprefix("torch."),
        bytes=bytes_moved(config, batch, size, dtype.itemsize),
        bytes_formula=BYTES_FORMULA,
        flops=flops(config, batch, size),
        data="generated, squares and noise",
        count=batch,
        unit="images",
        training=training,
    )


def flops(config: UNetConfig, batch: int, size: int) -> int:
    """Gradients by inputs and by weights each take what the forward does; what is given needs none."""
    return 3 * unet_work.flops(config, batch, size) - 2 * batch * unet_work.given_products(config, size)


def bytes_moved(config: UNetConfig, batch: int, size: int, itemsize: int) -> int:
    """Fewest bytes that one step moves through device memory, as :data:`BYTES_FORMULA` says."""
    given = batch * (config.in_channels * size**2 + unet_work.TOKENS * config.cross_attention_dim) * itemsize
    return 3 * unet_work.bytes_moved(config, batch, size, itemsize) - given + 32 * unet_work.parameters(config)


# Each weight has a gradient and two moments.
_COPIES = 4


def memory_bytes(
    config: UNetConfig, batch: int, size: int, itemsize: int, *, ready: int, reference: bool = True
) -> int:
    """Peak memory of an arm or of the reference, whichever takes more; or of the arm alone.

    Under autocast weights have a narrow copy. The reference keeps what goes into each block, and the inside of one.

    Args:
        config: The model's.
        batch: B.
        size: H and W.
        itemsize: Bytes of an activation.
        ready: Batches that lie ready on the device.
        reference: Whether the arm computes the reference too.
    """
    parameters, wide = unet_work.parameters(config), unet_work.reference_dtype(config, _COPIES).itemsize
    running = batch * kept(config, size) * itemsize + parameters * itemsize
    scores = 3 * unet_work.scores(config, size) if wide == 8 else 0
    inside = 2 * unet_work.skips(config, size) + 2 * unet_work.alive(config, size) + scores
    exact = (_COPIES * parameters + batch * inside) * wide
    rows = (config.in_channels + config.out_channels) * size**2 + unet_work.TOKENS * config.cross_attention_dim
    held = 4 * _COPIES * parameters + 4 * ready * batch * rows
    return held + (max(running, exact) if reference else running) + unet_work.PROCESS_BYTES


def kept(config: UNetConfig, size: int) -> int:
    """Values that a row leaves behind for the backward: about what calls read and write."""
    return unet_work.activations(config, size)
