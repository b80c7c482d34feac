"""What the kernels compute, in torch's own operators.

Shape legend: as in operators.py.
"""

from __future__ import annotations

import torch
from torch import Tensor


def column_sums(x: Tensor, dtype: torch.dtype) -> Tensor:
    """[..., C] -> [C] in another dtype."""
    rows = x.reshape(-1, x.shape[-1])
    return (rows if x.dtype == torch.float64 else rows.float()).sum(0).to(dtype)


def add_low(x: Tensor, low: Tensor) -> Tensor:
    """X plus a tensor of the same shape in another dtype, in the dtype of x."""
    return (x.float() + low.float()).to(x.dtype).contiguous()
