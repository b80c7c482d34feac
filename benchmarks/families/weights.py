"""Weights from a seed: the same for every arm, and none of them held twice."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from zoo.weights import fill


def draw(shape: tuple[int, ...], name: str, *, seed: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Normal numbers, drawn on the device from a stream that belongs to this name."""
    # Of a longer number the CPU's generator would take the lower half only.
    generator = torch.Generator(device).manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    return torch.empty(shape, dtype=dtype, device=device).normal_(generator=generator)


class SeededWeights(Mapping[str, Tensor]):
    """Tensors under the upstream library's names, each drawn when it is asked for.

    Products keep the size of what goes through them. Norms differ from one, so that a forgotten one shows.

    Args:
        shapes: Of each tensor, by name.
        seed: The same seed gives the same weights on the same kind of device.
        dtype: Of the tensors; drawn in it.
        device: Where they are drawn.
    """

    def __init__(
        self, shapes: Mapping[str, tuple[int, ...]], *, seed: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.shapes, self.seed, self.dtype, self.device = shapes, seed, dtype, device

    def __getitem__(self, name: str) -> Tensor:
        shape = self.shapes[name]
        drawn = draw(shape, name, seed=self.seed, dtype=self.dtype, device=self.device)
        if len(shape) == 1:
            return drawn.mul_(0.1).add_(0.0 if name.endswith("bias") else 1.0)
        return drawn.mul_(shape[-1] ** -0.5)

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)


def zoo_model(build: Callable[[Any], nn.Module], config: Any, weights: SeededWeights, placements: Any) -> Any:
    """A zoo model with these weights, filled tensor by tensor; no gradients are computed of them.

    Args:
        build: The model's class, called with ``config``.
        config: The model's.
        weights: Under the upstream library's names.
        placements: Where each of them goes, as ``zoo.weights.fill`` takes it.
    """
    with torch.device("meta"):
        model = build(config)
    fill(model, weights, placements, device=weights.device, dtype=None, source="drawn weights")
    return model.requires_grad_(False)
