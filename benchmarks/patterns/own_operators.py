"""Custom kernels behind torch.library: a call the compiler cannot see into becomes one node of its graph."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.patterns.pattern import Pattern
from zoo import Region


@torch.compiler.disable
def linear_relu_hidden(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Stands for any kernel that cannot be traced: here the product with the relu in it, of the vendor's library."""
    return torch.ops.aten._addmm_activation(bias, x, weight.t())


class HidingBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(linear_relu_hidden(self.norm(x), self.up.weight, self.up.bias))


class Before(nn.Module):
    def __init__(self, width: int = 16, depth: int = 4) -> None:
        super().__init__()
        self.stem = nn.Linear(width, width)
        self.blocks = nn.ModuleList(HidingBlock(width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x


@torch.library.custom_op("patterns::linear_relu", mutates_args=())
def linear_relu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.ops.aten._addmm_activation(bias, x, weight.t())


@linear_relu.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])  # shapes and dtypes are all that the compiler asks


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(linear_relu(self.norm(x), self.up.weight, self.up.bias))


class After(nn.Module):
    regions = (Region(Block, graphs=1, why="the kernel is one node between the norm and the residual add"),)

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
