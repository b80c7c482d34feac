"""Folders of whole pipelines in diffusers' format: what is in one, checked before anything of it is loaded."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zoo.unet.checkpoint import read_config
from zoo.unet.config import UNetConfig

_ENCODERS = ("CLIPTextModel", "CLIPTextModelWithProjection")
_WITH_WEIGHTS = {"unet": "diffusion_pytorch_model", "vae": "diffusion_pytorch_model"}
# Whether a pipeline has two text encoders, a pooled text and sizes.
_PIPELINES = {"StableDiffusionPipeline": False, "StableDiffusionXLPipeline": True}


@dataclass(frozen=True, kw_only=True)
class PipelineFolder:
    """A pipeline on disk.

    Args:
        path: The folder.
        encoders: Of each text encoder the folder of its tokenizer, its own, and its class in transformers.
        pooled: Whether the model takes a pooled text and sizes beside the text, as SDXL does.
        zeros_for_no_negative: Whether zeros stand for a negative prompt that is not given, or an empty text.
        unet: Configuration of the UNet.
        scheduler: Configuration of the scheduler.
        reduction: Pixels of an image's side for one of its latents.
    """

    path: Path
    encoders: tuple[tuple[str, str, str], ...]
    pooled: bool
    zeros_for_no_negative: bool
    unet: UNetConfig
    scheduler: dict[str, Any]
    reduction: int

    def shape(self, batch: int, height: int | None, width: int | None) -> tuple[int, int, int, int]:
        """[B, C, H, W] of the latents for images of so many pixels, or of what the model was trained on.

        Raises:
            ValueError: If a size is not positive or cannot be halved as often as the models do.
        """
        if batch < 1:
            raise ValueError(f"batch is {batch}, expected a positive number of images")
        sizes, step = [], self.reduction * self.unet.reduction
        trained = self.unet.sample_size or 64
        usual = (trained, trained) if isinstance(trained, int) else trained
        for name, given, default in zip(("height", "width"), (height, width), usual, strict=True):
            size = default * self.reduction if given is None else given
            if size < 1 or size % step:
                near = max(step, round(size / step) * step)
                raise ValueError(f"{name} is {size}, expected a multiple of {step}; {near} is one")
            sizes.append(size // self.reduction)
        return batch, self.unet.in_channels, sizes[0], sizes[1]


def read_pipeline(source: str | Path) -> PipelineFolder:
    """What is in a folder, or in a hub id's, which is downloaded first.

    Args:
        source: A folder with ``model_index.json`` and the pipeline's parts, or the hub id ``"owner/name"`` of one.

    Raises:
        FileNotFoundError: If there is no such folder, or a part of it is missing.
        ValueError: If it is another kind of pipeline, or a part is of another class.
    """
    path = _locate(source)
    if not (path / "model_index.json").is_file():
        raise FileNotFoundError(f"{path} has no model_index.json: expected the folder of a whole pipeline")
    index = _read(path / "model_index.json")
    kind = index.get("_class_name")
    if kind not in _PIPELINES:
        raise ValueError(f"{path} is a {kind}, expected a {' or a '.join(_PIPELINES)}")
    numbers = ("", "_2") if _PIPELINES[kind] else ("",)
    encoders = []
    for number in numbers:
        name = f"text_encoder{number}"
        _, found = index.get(name) or (None, None)
        if found not in _ENCODERS:
            raise ValueError(f"{path}: {name} is a {found}, expected a {' or a '.join(_ENCODERS)}")
        encoders.append((f"tokenizer{number}", name, found))
    parts = ["unet", "vae", "scheduler", *(part for tokenizer, encoder, _ in encoders for part in (tokenizer, encoder))]
    for part in parts:
        _check_part(path, part)
    vae = _read(path / "vae" / "config.json")
    if vae.get("_class_name", "AutoencoderKL") != "AutoencoderKL":
        raise ValueError(f"{path}: vae is a {vae['_class_name']}, expected an AutoencoderKL")
    return PipelineFolder(
        path=path,
        encoders=tuple(encoders),
        pooled=_PIPELINES[kind],
        zeros_for_no_negative=_PIPELINES[kind] and index.get("force_zeros_for_empty_prompt", True),
        unet=read_config(path / "unet"),
        scheduler=_read(path / "scheduler" / "scheduler_config.json"),
        # What diffusers takes where the file is silent: one size.
        reduction=2 ** (len(vae.get("block_out_channels", (64,))) - 1),
    )


def _locate(source: str | Path) -> Path:
    path, words = Path(source), str(source).split("/")
    if path.is_dir():
        return path
    if path.exists():
        raise FileNotFoundError(f"{path} is a file, expected the folder of a pipeline")
    if len(words) != 2 or not all(words) or words[0] in (".", "..", "~"):
        raise FileNotFoundError(f"{source!r}: no such folder, and not a hub id of the form owner/name")
    from huggingface_hub import snapshot_download

    # Once each: weights of other precisions, other formats and single files lie beside them.
    wanted = ["model_index.json", "scheduler/*.json"]
    for part, stem in {**_WITH_WEIGHTS, "text_encoder": "model", "text_encoder_2": "model"}.items():
        wanted += [f"{part}/config.json", f"{part}/{stem}.safetensors*", f"{part}/{stem}-*-of-*.safetensors"]
    wanted += [f"tokenizer{number}/*.{ending}" for number in ("", "_2") for ending in ("json", "txt")]
    return Path(snapshot_download(str(source), allow_patterns=wanted))


def _check_part(path: Path, part: str) -> None:
    folder = path / part
    if not folder.is_dir():
        raise FileNotFoundError(f"{path} has no {part}: a part of the pipeline is missing")
    needed = {"scheduler": "scheduler_config.json"}.get(part, "" if part.startswith("tokenizer") else "config.json")
    if needed and not (folder / needed).is_file():
        raise FileNotFoundError(f"{folder} has no {needed}")
    weights = [file for ending in ("safetensors", "bin") for file in folder.glob(f"*.{ending}")]
    if needed == "config.json" and not weights:
        raise FileNotFoundError(f"{folder} has no weights, in .safetensors or .bin")


def _read(file: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{file} is not JSON: {error}") from None
    return found
