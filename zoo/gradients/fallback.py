"""What the kernels compute, in torch's own operators.

Shape legend: as in operators.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zoo.ops.common import wide


def column_sums(x: Tensor, dtype: torch.dtype) -> Tensor:
    """[..., C] -> [C] in another dtype."""
    return x.reshape(-1, x.shape[-1]).to(wide(x.dtype)).sum(0).to(dtype)


def add_low(x: Tensor, low: Tensor) -> Tensor:
    """X plus a tensor of the same shape in another dtype, in the dtype of x."""
    return (x.float() + low.float()).to(x.dtype).contiguous()
