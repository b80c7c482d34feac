"""Root-mean-square norm, alone and together with the residual add before it (https://arxiv.org/abs/1910.07467).

Shape legend: C columns.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zoo.ops.common import accumulation_dtype, differentiable_once, differentiated, kernels_run

# A program of the kernels holds a whole row.
WIDEST = 16384


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """X [..., C], weight [C] -> [..., C]: normed in at least float32, rounded to the dtype of x, then weighted."""
    if not _fits(x, weight):
        return reference_rms_norm(x, weight, eps)
    if differentiated(x, weight):
        normed: Tensor = _RMSNorm.apply(x, None, weight, eps, False)
        return normed
    from zoo.ops.triton import rms_norm as kernels

    return kernels.rms_norm(x, None, weight, eps)[1]


def add_rms_norm(x: Tensor, added: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The residual stream x [..., C] plus what is added [..., C] or None, and the RMS norm of that.

    Go on with the sum that is returned, also where nothing is added: its gradient is added in the norm's backward.
    """
    if not _fits(x, weight, added):
        total = x if added is None else x + added
        return total, reference_rms_norm(total, weight, eps)
    if differentiated(x, weight) or (added is not None and differentiated(added)):
        both: tuple[Tensor, Tensor] = _RMSNorm.apply(x, added, weight, eps, True)
        return both
    from zoo.ops.triton import rms_norm as kernels

    total, normed, _ = kernels.rms_norm(x, added, weight, eps)
    return total, normed


def reference_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``rms_norm`` by torch's operators, for the compiler to fuse with what stands around it."""
    normed = x.to(accumulation_dtype(x.dtype))
    return weight * (normed * torch.rsqrt(normed.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def _fits(x: Tensor, weight: Tensor, added: Tensor | None = None) -> bool:
    if added is not None and (added.shape != x.shape or added.dtype != x.dtype):
        return False
    alike = weight.shape == x.shape[-1:] and weight.dtype == x.dtype
    return alike and x.shape[-1] <= WIDEST and kernels_run(x, weight, added)


class _RMSNorm(torch.autograd.Function):
    """Returns the norm, or with ``both`` the sum and the norm."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, added: Tensor | None, weight: Tensor, eps: float, both: bool) -> Any:
        from zoo.ops.triton import rms_norm as kernels

        total, normed, rstd = kernels.rms_norm(x, added, weight, eps)
        ctx.save_for_backward(total, weight, rstd)
        ctx.adds = added is not None
        if not both:
            return normed
        return (total if ctx.adds else x.view_as(x)), normed

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        from zoo.ops.triton import rms_norm as kernels

        past = grads[0] if len(grads) == 2 else None
        grad, weight_grad = kernels.rms_norm_backward(grads[-1], past, *ctx.saved_tensors)
        return grad, grad if ctx.adds else None, weight_grad, None, None
