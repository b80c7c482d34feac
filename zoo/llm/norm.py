"""Root-mean-square norm."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zoo.ops.common import wide


class RMSNorm(nn.Module):
    """Division by the root mean square, in at least float32 (https://arxiv.org/abs/1910.07467)."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """X [..., C] -> [..., C]."""
        return rms_norm(x, self.weight, self.eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """X [..., C], weight [C] -> [..., C]: normed in at least float32, rounded to the dtype of x, then weighted."""
    normed = x.to(wide(x.dtype))
    return weight * (normed * torch.rsqrt(normed.square().mean(-1, keepdim=True) + eps)).to(x.dtype)
