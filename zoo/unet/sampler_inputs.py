"""What a sampler is given, checked before anything runs, and put together for the model.

Shape legend: B images, R rows of the model (2 B with guidance: without the text first, then with it), L tokens of the
text, D its width, C channels, H height, W width.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from zoo.unet.checks import check_condition
from zoo.unet.model import UNet
from zoo.unet.schedule import Schedule
from zoo.validate import seeded


@dataclass(frozen=True)
class Side:
    """What the model is told: the text, or what guidance leads away from.

    Args:
        name: Of the text among the sampler's arguments.
        text: [B, L, D] or [1, L, D].
        added_name: Of what is beside it.
        added: ``text_embeds`` [B, X] and ``time_ids`` [B, Y], or [1, ...].
    """

    name: str
    text: Tensor | None
    added_name: str
    added: Mapping[str, Tensor] | None


def joined(model: UNet, batch: int, sides: list[Side]) -> tuple[Tensor, dict[str, Tensor] | None]:
    """Texts [R, L, D] of all sides, one after the other, and what is beside them in the same order.

    Raises:
        TypeError, ValueError: If something is missing, superfluous or of another shape.
    """
    config, texts = model.config, []
    for side in sides:
        if side.text is None and side is not sides[-1]:
            raise ValueError(
                f"{side.name} is missing: with guidance there must be something to lead away from; give the encoding "
                "of an empty text, or guidance_scale=1"
            )
        check_condition(side.text, config, model.text_projections.weight)  # type: ignore[arg-type]
        assert side.text is not None
        texts.append(_rows(side.name, side.text, batch))
        if texts[-1].shape != texts[0].shape:
            raise ValueError(
                f"{side.name} has {side.text.shape[1]} tokens and {sides[0].name} {texts[0].shape[1]}; pad both alike"
            )
    if config.addition_embed_type is None:
        for side in sides:
            if side.added:
                raise ValueError(
                    f"{side.added_name} has {', '.join(side.added)}, but this model has no added conditions"
                )
        return torch.cat(texts), None
    together: dict[str, list[Tensor]] = {}
    for side in sides:
        given = side.added or {}
        for key in ("text_embeds", "time_ids"):
            if key not in given:
                raise ValueError(f"{side.added_name} has no {key!r}, which this model needs")
        for key, value in given.items():
            rows = _rows(f"{side.added_name}[{key!r}]", value, batch)
            known = together.setdefault(key, [])
            if known and rows.shape != known[0].shape:
                raise ValueError(
                    f"{key} is {list(known[0].shape)} on one side of guidance, {list(rows.shape)} on the other"
                )
            known.append(rows.to(model.device))
    return torch.cat(texts), {key: torch.cat(parts) for key, parts in together.items()}


def initial_noise(shape: tuple[int, int, int, int], latents: Tensor | None, seed: int) -> Tensor:
    """[B, C, H, W], given or drawn on the host.

    Raises:
        TypeError, ValueError: If what is given does not fit.
    """
    if latents is None:
        return torch.randn(shape, generator=seeded(seed), device="cpu", dtype=torch.float32)
    if not isinstance(latents, Tensor) or not latents.dtype.is_floating_point:
        found = latents.dtype if isinstance(latents, Tensor) else type(latents).__name__
        raise TypeError(f"latents is {found}, expected a tensor of floating-point numbers")
    if tuple(latents.shape) != shape:
        raise ValueError(f"latents has shape {list(latents.shape)}, and the sampler was made for {list(shape)}")
    return latents


def check_model(model: UNet) -> None:
    """Refuse a model that a text alone does not tell enough.

    Raises:
        TypeError: If it is not of this family.
        ValueError: If it takes an image, a mask or its guidance as a condition.
    """
    if not isinstance(model, UNet):
        raise TypeError(f"model is a {type(model).__name__}, expected a UNet of the zoo")
    config = model.config
    if config.in_channels != config.out_channels:
        raise ValueError(
            f"the model takes {config.in_channels} channels and gives {config.out_channels}: one that takes an image "
            "or a mask beside the noise is for diffusers' pipelines"
        )
    if config.time_cond_proj_dim is not None:
        raise ValueError(
            f"the model has time_cond_proj_dim={config.time_cond_proj_dim}: one that takes its guidance as a condition "
            "is for diffusers' pipelines"
        )


def _rows(name: str, tensor: Tensor | None, batch: int) -> Tensor:
    """One row repeated, or one for each image."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} is a {type(tensor).__name__}, expected a tensor")
    if tensor.dim() == 0 or tensor.shape[0] not in (1, batch):
        raise ValueError(f"{name} has shape {list(tensor.shape)}, expected {batch} row(s), or one for all images")
    return tensor.expand(batch, *tensor.shape[1:])


def checked_shape(shape: tuple[int, int, int, int], model: UNet) -> tuple[int, int, int, int]:
    """The shape of latents, if the model can be run on them; ValueError if not."""
    config = model.config
    sizes = tuple(shape)
    if len(sizes) != 4 or not all(isinstance(size, int) and size > 0 for size in sizes):
        raise ValueError(f"shape is {shape!r}, expected four positive integers: [B, {config.in_channels}, H, W]")
    if sizes[1] != config.in_channels:
        raise ValueError(f"shape has {sizes[1]} channels, and the model takes {config.in_channels}")
    if sizes[2] % config.reduction or sizes[3] % config.reduction:
        raise ValueError(f"shape is {sizes[2]} × {sizes[3]}, and both must be divisible by {config.reduction}")
    return sizes


def checked_schedule(schedule: Schedule) -> Schedule:
    """The schedule; TypeError if it is something else."""
    if not isinstance(schedule, Schedule):
        raise TypeError(f"schedule is a {type(schedule).__name__}, expected what make_schedule gives")
    return schedule


def checked_guidance(scale: float) -> float:
    """The scale of guidance; ValueError if it is no such number."""
    if isinstance(scale, bool) or not isinstance(scale, (int, float)) or not math.isfinite(scale) or scale < 0:
        raise ValueError(f"guidance_scale is {scale!r}, expected a number; up to 1 there is no guidance")
    return float(scale)
