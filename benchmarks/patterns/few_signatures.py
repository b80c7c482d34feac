"""Few signatures by design: what differs is lifted out of the region, what is equal is repeated inside."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.patterns.pattern import Pattern
from zoo import Region


class Body(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Block(nn.Module):
    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.entry = nn.Linear(inputs, width) if inputs != width else None
        self.body = Body(width)

    def forward(self, x: Tensor) -> Tensor:
        if self.entry is not None:
            x = self.entry(x)
        return self.body(x)


class Before(nn.Module):
    def __init__(self, width: int = 8, stages: int = 4, depth: int = 2) -> None:
        super().__init__()
        self.stem = nn.Linear(width, width // 2)
        widths = [width // 2, *(width * 2**stage for stage in range(stages) for _ in range(depth))]
        self.blocks = nn.ModuleList(Block(*pair) for pair in pairwise(widths))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x


class After(Before):  # the same model, cut elsewhere
    regions = (Region(Body, graphs=4, why="one for each width; the change of width is one library call outside"),)


def inputs(generator: torch.Generator, *, batch: int = 2, width: int = 8) -> dict[str, Tensor]:
    return {"x": torch.randn(batch, width, generator=generator)}


PATTERN = Pattern(
    before=Before,
    after=After,
    inputs=inputs,
    model_sizes={"width": 128, "stages": 4, "depth": 4},
    input_sizes={"batch": 1024, "width": 128},
)
