"""Glue regions: the library keeps its products, and what stands between them is one graph for all widths."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.patterns.pattern import Pattern
from zoo import Region


class BiasAct(nn.Module):
    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        return F.relu(x + bias)


class BiasAddAct(nn.Module):
    def forward(self, x: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
        return F.relu(x + bias + residual)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width)
        self.act = BiasAct()
        self.join = BiasAddAct()

    def forward(self, x: Tensor) -> Tensor:
        # Viewed, a bias is a tensor like any other. The sizes of a parameter are fixed, whatever dynamic= says.
        hidden = self.act(F.linear(x, self.first.weight), self.first.bias.view(-1))
        return self.join(F.linear(hidden, self.second.weight), self.second.bias.view(-1), x)


class Before(nn.Module):
    def __init__(self, width: int = 8, stages: int = 4, depth: int = 2) -> None:
        super().__init__()
        widths = [width * 2**stage for stage in range(stages)]
        self.entries = nn.ModuleList(nn.Linear(w // 2, w) for w in widths)
        self.blocks = nn.ModuleList(Block(w) for w in widths for _ in range(depth))
        self.depth = depth

    def forward(self, x: Tensor) -> Tensor:
        for stage, entry in enumerate(self.entries):
            x = entry(x[::2])  # half as many rows, twice as many channels, as in a convolutional network
            for block in self.blocks[self.depth * stage : self.depth * (stage + 1)]:
                x = block(x)
        return x


class After(Before):  # the same model, cut elsewhere
    regions = (
        Region(BiasAct, graphs=1, dynamic=True, why="bias and activation, of any size"),
        Region(BiasAddAct, graphs=1, dynamic=True, why="bias, residual and activation, of any size"),
    )


def inputs(generator: torch.Generator, *, rows: int = 96, width: int = 8) -> dict[str, Tensor]:
    return {"x": torch.randn(rows, width // 2, generator=generator)}


PATTERN = Pattern(
    before=Before,
    after=After,
    inputs=inputs,
    model_sizes={"width": 64, "stages": 4, "depth": 4},
    input_sizes={"rows": 400_000, "width": 64},
)
