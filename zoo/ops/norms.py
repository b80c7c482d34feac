"""Norms over the last dimension, with the residual add before them.

Shape legend: C columns. Kernels compute and sum in float32.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.ops.common import differentiable_once, differentiated, kernels_run

# A program holds a whole row of a norm.
WIDEST_NORM = 8192


def add_layer_norm(
    x: Tensor,
    added: Tensor,
    shift: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    low_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """The residual stream plus what is added to it, and the layer norm of the sum. Ba, Kiros and Hinton, 2016.

    Own kernels run where a gradient is wanted; elsewhere the compiler writes one pass as well.

    Args:
        x: [..., C], the stream.
        added: [..., C], of any dtype.
        shift: [C], added as well, or None: the bias that the product before it lacks, whose gradient is one more sum of
            the same pass.
        weight: [C].
        bias: [C].
        eps: Added to the variance.
        low_dtype: Of the second result, for the products that follow; None for that of the first.

    Returns:
        The norm [..., C], and the same in ``low_dtype``.
    """
    if _takes(x, added, shift, weight, bias):
        if low_dtype is not None and low_dtype != x.dtype:
            both: tuple[Tensor, Tensor] = _AddLayerNorm.apply(x, added, shift, weight, bias, eps, low_dtype)
            return both
        out: Tensor = _AddLayerNorm.apply(x, added, shift, weight, bias, eps, None)
        return out, out
    out = F.layer_norm(x + (added if shift is None else added + shift), weight.shape, weight, bias, eps)
    return out, out if low_dtype is None else out.to(low_dtype)


def _takes(x: Tensor, added: Tensor, shift: Tensor | None, weight: Tensor, bias: Tensor) -> bool:
    """Whether the kernels are for these; what does not fit is torch's to broadcast or to refuse."""
    vectors = (weight, bias) if shift is None else (weight, bias, shift)
    if not kernels_run(x, added, *vectors) or not differentiated(x, added, *vectors):
        return False
    # What autocast normalises is float32, whatever it is given.
    if x.dtype != torch.float32 and torch.is_autocast_enabled(x.device.type):
        return False
    fit = all(each.shape == x.shape[-1:] and each.dtype == x.dtype for each in vectors)
    return fit and added.shape == x.shape and x.shape[-1] <= WIDEST_NORM


class _AddLayerNorm(torch.autograd.Function):
    """The norm, and its copy if there is one. Keeps the sum."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        added: Tensor,
        shift: Tensor | None,
        weight: Tensor,
        bias: Tensor,
        eps: float,
        low_dtype: torch.dtype | None,
    ) -> Any:
        from zoo.ops.triton import norms as kernels

        out, low, total, mean, rstd = kernels.add_layer_norm(x, added, shift, weight, bias, eps, low_dtype)
        ctx.save_for_backward(total, mean, rstd, weight)
        ctx.added_dtype = None if added.dtype == x.dtype else added.dtype
        ctx.shifted = shift is not None
        return out if low is None else (out, low)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor, low_grad: Tensor | None = None) -> tuple[Tensor | None, ...]:
        from zoo.ops.triton import norms as kernels

        total, mean, rstd, weight = ctx.saved_tensors
        out, low, grad_weight, grad_bias, grad_shift = kernels.add_layer_norm_backward(
            total, mean, rstd, weight, grad, low_grad, ctx.added_dtype, ctx.shifted
        )
        return out, out if low is None else low, grad_shift, grad_weight, grad_bias, None, None
