"""One outer CUDA graph around the step in place of a CUDA graph for each block."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.patterns.pattern import Pattern, compile_blocks
from zoo import Region


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Before(nn.Module):
    def __init__(self, width: int = 16, depth: int = 4) -> None:
        super().__init__()
        self.stem = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x


class After(Before):
    regions = (Region(Block, graphs=1, why="norm, both products and the residual add"),)


def compile_before(model: nn.Module, **options: Any) -> None:
    """A CUDA graph a block."""
    if options.get("backend", "inductor") == "inductor":
        options["mode"] = "reduce-overhead"
    compile_blocks(model, **options)


def inputs(generator: torch.Generator, *, batch: int = 2, width: int = 16) -> dict[str, Tensor]:
    return {"x": torch.randn(batch, width, generator=generator)}


PATTERN = Pattern(
    before=Before,
    after=After,
    inputs=inputs,
    model_sizes={"width": 1024, "depth": 24},
    input_sizes={"batch": 16, "width": 1024},
    compile_before=compile_before,
)
