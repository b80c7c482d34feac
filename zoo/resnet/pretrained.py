"""torchvision's pretrained weights by name, and the preprocessing that belongs to them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def transforms(weights: Any) -> Callable[[Any], Tensor]:
    """Torchvision's preprocessing for pretrained weights: resize, crop, scale, normalise.

    Args:
        weights: One of torchvision's weight enums, its full name ``"ResNet50_Weights.IMAGENET1K_V2"``, or a preset's
            name for the weights that torchvision recommends.

    Returns:
        What takes a PIL image, or an integer tensor [C, H, W] or [N, C, H, W], and gives what the model expects.

    Raises:
        ValueError: If there are no such weights.
    """
    found = _member(weights) or (_enum_of(weights).get("DEFAULT") if isinstance(weights, str) else None)
    if found is None:
        raise ValueError(
            f"weights is {weights!r}, expected one of torchvision's weight enums, its full name such as "
            "'ResNet50_Weights.IMAGENET1K_V2', or the name of a preset that has weights"
        )
    preprocessing: Callable[[Any], Tensor] = found.transforms()
    return preprocessing


def find_weights(name: str, weights: Any) -> Path | None:
    """The file of pretrained weights in torch hub's cache, downloaded if it is not there; None for anything else.

    Args:
        name: The preset's.
        weights: One of torchvision's weight enums, or its name, with or without the class: ``"IMAGENET1K_V2"``.

    Raises:
        ValueError: If they are the weights of another model, or this one has none of that name.
    """
    if isinstance(weights, str) and not _is_name(weights):
        return None
    if isinstance(weights, Path):
        return None
    known = ", ".join(_enum_of(name)) or "none that torchvision knows"
    found = _enum_of(name).get(weights) if isinstance(weights, str) and "." not in weights else _member(weights)
    if found is None:
        raise ValueError(f"weights is {weights!r}; {name} has {known}")
    if found not in _enum_of(name).values():
        raise ValueError(f"{found} are not weights of {name}, which has {known}")
    return _download(found.url)


def _is_name(text: str) -> bool:
    """Neither a path nor a hub id, which has a slash: ``IMAGENET1K_V2`` or ``ResNet50_Weights.IMAGENET1K_V2``."""
    head, _, tail = text.rpartition(".")
    return tail.isidentifier() and (not head or head.endswith("_Weights")) and not Path(text).exists()


def _member(weights: Any) -> Any:
    """The enum's member that this is or names in full, or None."""
    from torchvision.models import WeightsEnum, get_weight

    if isinstance(weights, WeightsEnum):
        return weights
    try:
        return get_weight(weights) if isinstance(weights, str) and "." in weights else None
    except (KeyError, ValueError):
        return None


def _enum_of(name: str) -> dict[str, Any]:
    """Weights by name, aliases such as ``DEFAULT`` included; empty for a model that torchvision does not know."""
    from torchvision.models import get_model_weights

    try:
        return dict(get_model_weights(name).__members__)
    except ValueError:
        return {}


def _download(url: str) -> Path:
    """The file in torch hub's cache. Files are named by the start of their hash, which is checked on the way."""
    file = Path(torch.hub.get_dir()) / "checkpoints" / url.rpartition("/")[2]
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        digest = torch.hub.HASH_REGEX.search(file.name)
        torch.hub.download_url_to_file(url, str(file), digest[1] if digest else None, progress=True)
    return file
