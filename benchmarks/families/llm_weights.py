"""Weights, prompts and cached keys and values from a seed: the same for every arm, and none of them held twice."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from benchmarks.families.llm_work import Task
from zoo.llm import LLMConfig


def draw(shape: tuple[int, ...], name: str, *, seed: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Normal numbers, drawn on the device from a stream that belongs to this name."""
    # Of a longer number the CPU's generator would take the lower half only.
    generator = torch.Generator(device).manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    return torch.empty(shape, dtype=dtype, device=device).normal_(generator=generator)


class SeededWeights(Mapping[str, Tensor]):
    """A checkpoint that nobody stored: tensors under transformers' names, each drawn when it is asked for.

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
        self.shapes = shapes
        self.seed, self.dtype, self.device = seed, dtype, device

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


def draw_past(
    config: LLMConfig, task: Task, layer: int, *, seed: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Keys and values of a layer that a decoding step finds in its cache, each [B, K, S, D]."""
    shape = (task.batch, config.num_key_value_heads, task.slots, config.head_dim)
    key = draw(shape, f"keys of layer {layer}", seed=seed, dtype=dtype, device=device)
    return key, draw(shape, f"values of layer {layer}", seed=seed, dtype=dtype, device=device)


def draw_tokens(config: LLMConfig, task: Task, *, seed: int, device: torch.device) -> Tensor:
    """The tokens of the first call, [B, T] int64, uniformly drawn; the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(config.vocab_size, (task.batch, task.tokens), generator=generator).to(device)
