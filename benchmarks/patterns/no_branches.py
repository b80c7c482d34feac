"""No control flow that depends on data: what is decided by values is computed, not branched on."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.patterns.pattern import Pattern
from zoo import Region


class BranchingBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(self.up(self.norm(x)))
        if not hidden.isfinite().all():  # waits for the device, and breaks the graph
            hidden = hidden.nan_to_num(posinf=0.0, neginf=0.0)
        return x + self.down(hidden)


class Before(nn.Module):
    def __init__(self, width: int = 16, depth: int = 4) -> None:
        super().__init__()
        self.stem = nn.Linear(width, width)
        self.blocks = nn.ModuleList(BranchingBlock(width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(self.up(self.norm(x)))
        hidden = hidden.nan_to_num(posinf=0.0, neginf=0.0)  # changes nothing where all is finite
        return x + self.down(hidden)


class After(nn.Module):
    regions = (Region(Block, graphs=1, why="norm, both products, clean-up and residual add"),)

    def __init__(self, width: int = 16, depth: int = 4) -> None:
        super().__init__()
        self.stem = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x


def inputs(generator: torch.Generator, *, batch: int = 2, width: int = 16) -> dict[str, Tensor]:
    return {"x": torch.randn(batch, width, generator=generator)}


PATTERN = Pattern(
    before=Before,
    after=After,
    inputs=inputs,
    model_sizes={"width": 512, "depth": 16},
    input_sizes={"batch": 256, "width": 512},
)
