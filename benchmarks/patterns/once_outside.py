"""Masks and norms outside: what depends on the input alone is done once a call and not once a layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.patterns.pattern import Pattern
from zoo import Region


class PreparingConv(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        edge_index = edge_index[:, edge_index[0] != edge_index[1]]  # as many edges as there happen to be
        source, target = torch.cat([edge_index, torch.arange(len(x), device=x.device).expand(2, -1)], dim=1)
        degree = x.new_zeros(len(x)).index_add(0, target, x.new_ones(len(target)))
        weight = (degree[source] * degree[target]).rsqrt()
        x = self.linear(x)
        return torch.zeros_like(x).index_add(0, target, weight[:, None] * x[source]).relu()


class Before(nn.Module):
    def __init__(self, width: int = 8, depth: int = 4) -> None:
        super().__init__()
        self.stem = nn.Linear(width, width)
        self.blocks = nn.ModuleList(PreparingConv(width) for _ in range(depth))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x, edge_index)
        return x


def prepare(edge_index: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    loops = torch.arange(len(x), device=x.device).expand(2, -1)
    counts = torch.cat([edge_index[0] != edge_index[1], loops[0] >= 0]).to(x.dtype)  # a loop that was there counts 0
    source, target = torch.cat([edge_index, loops], dim=1)
    degree = x.new_zeros(len(x)).index_add(0, target, counts)
    return source, target, counts * (degree[source] * degree[target]).rsqrt()


class Conv(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor, source: Tensor, target: Tensor, weight: Tensor) -> Tensor:
        x = self.linear(x)
        return torch.zeros_like(x).index_add(0, target, weight[:, None] * x[source]).relu()


class After(nn.Module):
    regions = (Region(Conv, graphs=1, why="product, sum over edges and activation; the edges are ready"),)

    def __init__(self, width: int = 8, depth: int = 4) -> None:
        super().__init__()
        self.stem = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Conv(width) for _ in range(depth))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.stem(x)
        source, target, weight = prepare(edge_index, x)
        for block in self.blocks:
            x = block(x, source, target, weight)
        return x


def inputs(generator: torch.Generator, *, nodes: int = 20, edges: int = 60, width: int = 8) -> dict[str, Tensor]:
    edge_index = torch.randint(nodes, (2, edges), generator=generator)
    edge_index[1, 0] = edge_index[0, 0]  # one loop at least
    return {"x": torch.randn(nodes, width, generator=generator), "edge_index": edge_index}


PATTERN = Pattern(
    before=Before,
    after=After,
    inputs=inputs,
    model_sizes={"width": 64, "depth": 8},
    input_sizes={"nodes": 20_000, "edges": 200_000, "width": 64},
)
