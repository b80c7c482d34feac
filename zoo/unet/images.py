"""Latents to images on disk, by the VAE of a pipeline's folder.

Shape legend: B images, C channels of the latents, H height, W width.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zoo.unet.pipeline import PipelineFolder


def load_vae(folder: PipelineFolder, *, device: torch.device, dtype: torch.dtype | None) -> Any:
    """The folder's ``AutoencoderKL``, in eval mode; in float32 where float16 would overflow, as its config says."""
    from diffusers import AutoencoderKL

    source: dict[str, Any] = {"pretrained_model_name_or_path": folder.path / "vae", "local_files_only": True}
    if dtype == torch.float16 and AutoencoderKL.load_config(**source).get("force_upcast", True):
        dtype = torch.float32
    return AutoencoderKL.from_pretrained(**source, torch_dtype=dtype).to(device).eval()


def decode(vae: Any, latents: Tensor) -> Tensor:
    """Latents [B, C, H, W] to images [B, H, W, 3] uint8 on the host, one at a time: memory is that of one."""
    config, images = vae.config, []
    latents = latents / config.scaling_factor
    mean, deviation = getattr(config, "latents_mean", None), getattr(config, "latents_std", None)
    if mean is not None and deviation is not None:
        latents = latents * _of_channels(deviation, latents) + _of_channels(mean, latents)
    with torch.inference_mode():
        for one in latents.to(vae.dtype).split(1):
            pixels = vae.decode(one).sample.float() / 2 + 0.5
            images.append((pixels.clamp(0, 1) * 255).round().to(torch.uint8).permute(0, 2, 3, 1).cpu())
    return torch.cat(images)


def _of_channels(values: Sequence[float], latents: Tensor) -> Tensor:
    return torch.tensor(values, device=latents.device, dtype=latents.dtype).view(1, -1, 1, 1)


def image_paths(out: str | Path, count: int) -> list[Path]:
    """Where images go: ``out`` itself, or with a number each where there are several.

    Raises:
        OSError: If nothing can be written there.
        ValueError: If it is no name of a PNG file.
    """
    path = Path(out)
    if path.suffix.lower() != ".png":
        raise ValueError(f"out is {str(out)!r}, expected the name of a .png file")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"out is {str(out)!r}, but there is no folder {str(path.parent)!r}")
    if not os.access(path.parent, os.W_OK):
        raise PermissionError(f"out is {str(out)!r}, and nothing may be written to {str(path.parent)!r}")
    paths = [path] if count == 1 else [path.with_stem(f"{path.stem}-{number}") for number in range(count)]
    for one in paths:
        if one.is_dir():
            raise IsADirectoryError(f"{str(one)!r} is a folder, expected the name of a .png file")
    return paths


def save_images(images: Tensor, paths: list[Path]) -> None:
    """Write images [B, H, W, 3] uint8 as PNG."""
    from PIL import Image

    for image, path in zip(images, paths, strict=True):
        Image.fromarray(image.numpy()).save(path, format="PNG")
