"""Buckets and padding: a batch is filled up to one of a few lengths, with a mask, outside the regions."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.patterns.pattern import Pattern
from zoo import Region

HEADS = 2
STEP = 8


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


class Before(nn.Module):
    def __init__(self, width: int = 16, depth: int = 2) -> None:
        super().__init__()
        self.stem = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))

    def forward(self, batches: list[Tensor]) -> Tensor:
        return torch.cat([self.encode(x) for x in batches])

    def encode(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)  # x [B, T, C]: each T is another shape
        return x.mean(dim=1)


def fill_up(x: Tensor) -> tuple[Tensor, Tensor]:
    length = x.shape[1]
    x = F.pad(x, (0, 0, 0, -length % STEP))  # to the next multiple: few shapes, at most STEP - 1 tokens for nothing
    return x, (torch.arange(x.shape[1], device=x.device) < length)[None]


class After(nn.Module):
    regions = (Region(Block, graphs=2, why="one for each of the lengths that batches are filled up to"),)

    def __init__(self, width: int = 16, depth: int = 2) -> None:
        super().__init__()
        self.stem = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))

    def forward(self, batches: list[Tensor]) -> Tensor:
        return torch.cat([self.encode(x) for x in batches])

    def encode(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        x, mask = fill_up(self.stem(x))
        for block in self.blocks:
            x = block(x, mask)
        return x[:, :length].mean(dim=1)


def inputs(generator: torch.Generator, *, batch: int = 2, width: int = 16, scale: int = 1) -> dict[str, list[Tensor]]:
    lengths = [scale * length for length in (5, 12, 7, 10, 15, 6)]
    return {"batches": [torch.randn(batch, length, width, generator=generator) for length in lengths]}


PATTERN = Pattern(
    before=Before,
    after=After,
    inputs=inputs,
    model_sizes={"width": 256, "depth": 8},
    input_sizes={"batch": 16, "width": 256, "scale": 1},
)
