"""The Gaussian error linear unit, with the bias of the product before it. Hendrycks and Gimpel, 2016."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.ops.common import differentiable_once, differentiated, kernels_run


def bias_gelu(x: Tensor, bias: Tensor, tanh: bool) -> Tensor:
    """GELU of x [..., I] plus bias [I], by erf or its approximation by tanh: [..., I], in the dtype of x.

    Own kernels run where a gradient is wanted: that of the bias is a sum of the pass that writes the product's.
    """
    if kernels_run(x, bias) and differentiated(x, bias):
        out: Tensor = _BiasGelu.apply(x, bias, tanh)
        return out
    return F.gelu(x + bias, approximate="tanh" if tanh else "none").to(x.dtype)


class _BiasGelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, tanh: bool) -> Tensor:
        from zoo.ops.triton import gelu as kernels

        ctx.save_for_backward(x, bias)
        ctx.tanh = tanh
        return kernels.bias_gelu(x, bias, tanh)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        from zoo.ops.triton import gelu as kernels

        x, bias = ctx.saved_tensors
        return (*kernels.bias_gelu_backward(grad, x, bias, ctx.tanh), None)
