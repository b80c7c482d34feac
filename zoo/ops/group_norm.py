"""Group norm of channels_last images, of one or of two side by side, with what stands before and behind it.

torch's own group norm goes through the other memory format, and adds a shift and applies SiLU in passes of their own.

Shape legend: B images, C channels, H height, W width, S channels of a skip connection.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.engine.autograd import differentiable_once
from zoo.ops import triton as kernels
from zoo.ops.common import accumulation_dtype, differentiated, kernels_run

# The kernels hold all channels of a group at once.
WIDEST_GROUP = 4096


def group_norm(
    x: Tensor, shift: Tensor | None, weight: Tensor, bias: Tensor, groups: int, eps: float, silu: bool
) -> Tensor:
    """Group norm of images x [B, C, H, W] in channels_last; weight and bias [C]. Statistics are in float32.

    A shift [B, C], if any, is added to each pixel first; SiLU follows where asked for.
    """
    given = (x, weight, bias) if shift is None else (x, weight, bias, shift)
    if not _kernels_fit(groups, *given):
        return _reference(x, shift, weight, bias, groups, eps, silu)
    if differentiated(*given):
        return _GroupNorm.apply(x, shift, weight, bias, groups, eps, silu)
    return kernels.group_norm.group_norm(x, shift, weight, bias, groups, eps, silu)[0]


def cat_group_norm(
    x: Tensor, skip: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float, silu: bool
) -> tuple[Tensor, Tensor]:
    """Channels of x [B, C, H, W] and skip [B, S, H, W] side by side, and their group norm, without a pass to join them.

    Returns the norm [B, C + S, H, W] and what it was taken of, both in channels_last. A group may reach across.
    """
    if not _kernels_fit(groups, x, weight, bias, skip):
        joined = torch.cat([x, skip.to(x.dtype)], dim=1).contiguous(memory_format=torch.channels_last)
        return _reference(joined, None, weight, bias, groups, eps, silu), joined
    if differentiated(x, skip, weight, bias):
        return _CatGroupNorm.apply(x, skip, weight, bias, groups, eps, silu)
    return kernels.group_norm.cat_group_norm(x, skip, weight, bias, groups, eps, silu)[:2]


def _kernels_fit(groups: int, x: Tensor, weight: Tensor, *others: Tensor) -> bool:
    return weight.shape[0] // groups <= WIDEST_GROUP and kernels_run(x, weight, *others)


def _reference(
    x: Tensor, shift: Tensor | None, weight: Tensor, bias: Tensor, groups: int, eps: float, silu: bool
) -> Tensor:
    dtype = accumulation_dtype(x.dtype)
    shifted = x.to(dtype) if shift is None else x.to(dtype) + shift.to(dtype)[:, :, None, None]
    out = F.group_norm(shifted, groups, weight.to(dtype), bias.to(dtype), eps)
    return (F.silu(out) if silu else out).to(x.dtype, memory_format=torch.channels_last)


class _GroupNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, shift: Tensor | None, weight: Tensor, bias: Tensor, groups: int, eps: float, silu: bool
    ) -> Tensor:
        out, statistics = kernels.group_norm.group_norm(x, shift, weight, bias, groups, eps, silu)
        ctx.silu = silu
        ctx.save_for_backward(x, shift, weight, bias, statistics)
        return out

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_x, _, grad_shift, grad_weight, grad_bias = kernels.group_norm.group_norm_backward(
            grad, *ctx.saved_tensors, None, grad.shape[1], ctx.silu
        )
        return grad_x, grad_shift, grad_weight, grad_bias, None, None, None


class _CatGroupNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, skip: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float, silu: bool
    ) -> tuple[Tensor, Tensor]:
        out, joined, statistics = kernels.group_norm.cat_group_norm(x, skip, weight, bias, groups, eps, silu)
        ctx.silu, ctx.channels, ctx.skip_dtype = silu, x.shape[1], skip.dtype
        ctx.save_for_backward(joined, weight, bias, statistics)
        if not torch.compiler.is_compiling():  # zeros for a gradient that is not there would be a launch
            ctx.set_materialize_grads(False)
        return out, joined

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor | None, joined_grad: Tensor | None) -> tuple[Tensor | None, ...]:
        joined, weight, bias, statistics = ctx.saved_tensors
        if grad is None:
            if joined_grad is None:
                return (None,) * 7
            grad_x, grad_skip = joined_grad.split([ctx.channels, joined.shape[1] - ctx.channels], dim=1)
            return grad_x, grad_skip.to(ctx.skip_dtype), None, None, None, None, None
        grad_x, grad_skip, _, grad_weight, grad_bias = kernels.group_norm.group_norm_backward(
            grad, joined, None, weight, bias, statistics, joined_grad, ctx.channels, ctx.silu
        )
        return grad_x, grad_skip.to(ctx.skip_dtype), grad_weight, grad_bias, None, None, None
