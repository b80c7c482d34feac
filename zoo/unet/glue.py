"""What lies between the library's convolutions, products and attention: the regions of the family.

Shape legend: R rows (pixels of all images), C channels, I width inside the MLP.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class ConvAdd(nn.Module):
    """The end of a resnet block: the convolution's bias and the residual. Holds nothing: one graph for all widths."""

    def forward(self, x: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
        """[R, C], [C] and [R, C] -> [R, C]."""
        # Under autocast parameters stay wide, and would make activations wide as well.
        return x + bias.to(x.dtype) + residual


class AddNorm(nn.Module):
    """Residual add and layer norm, both results. The weights fix the width; one graph for any number of rows."""

    def __init__(self, width: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))
        self.eps = eps

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """[R, C] and [R, C] -> their sum [R, C] and its norm [R, C]."""
        total = residual + x
        return total, F.layer_norm(total, self.weight.shape, self.weight, self.bias, self.eps).to(total.dtype)


class GatedGelu(nn.Module):
    """GELU of the second half times the first. Holds nothing: one graph for all widths."""

    def forward(self, x: Tensor) -> Tensor:
        """[R, 2 I] -> [R, I]."""
        value, gate = x.chunk(2, dim=-1)
        return value * F.gelu(gate)
