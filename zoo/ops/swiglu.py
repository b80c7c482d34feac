"""The gate of an MLP: SiLU of one half times the other (https://arxiv.org/abs/2002.05202)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.ops.common import differentiable_once, differentiated, kernels_run


def swiglu(x: Tensor) -> Tensor:
    """SiLU of the first half of x [..., 2 I] times the second: [..., I]."""
    if kernels_run(x):
        if differentiated(x):
            out: Tensor = _SwiGLU.apply(x)
            return out
        from zoo.ops.triton import swiglu as kernels

        return kernels.swiglu(x)
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        from zoo.ops.triton import swiglu as kernels

        ctx.save_for_backward(x)
        return kernels.swiglu(x)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        from zoo.ops.triton import swiglu as kernels

        return kernels.swiglu_backward(grad, *ctx.saved_tensors)
