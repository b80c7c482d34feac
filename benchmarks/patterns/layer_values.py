"""Per-layer values as tensors: a layer that indexes a table by its number is a graph a layer."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.patterns.pattern import Pattern
from zoo import Region


class IndexingBlock(nn.Module):
    def __init__(self, width: int, index: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.index = index

    def forward(self, x: Tensor, scales: Tensor) -> Tensor:
        return x + scales[self.index] * self.down(F.gelu(self.up(x)))


class Before(nn.Module):
    def __init__(self, width: int = 16, depth: int = 4) -> None:
        super().__init__()
        self.stem = nn.Linear(width, width)
        self.scales = nn.Parameter(torch.rand(depth, width))
        self.blocks = nn.ModuleList(IndexingBlock(width, index) for index in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x, self.scales)
        return x


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return x + scale * self.down(F.gelu(self.up(x)))


class After(nn.Module):
    regions = (Region(Block, graphs=1, why="each layer is handed its own row"),)

    def __init__(self, width: int = 16, depth: int = 4) -> None:
        super().__init__()
        self.stem = nn.Linear(width, width)
        self.scales = nn.Parameter(torch.rand(depth, width))
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block, scale in zip(self.blocks, self.scales, strict=True):
            x = block(x, scale)
        return x


def inputs(generator: torch.Generator, *, batch: int = 2, width: int = 16) -> dict[str, Tensor]:
    return {"x": torch.randn(batch, width, generator=generator)}


PATTERN = Pattern(
    before=Before,
    after=After,
    inputs=inputs,
    model_sizes={"width": 1024, "depth": 24},
    input_sizes={"batch": 64, "width": 1024},
)
