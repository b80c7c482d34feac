"""Norms over the last dimension, alone and with the residual add before them; group norm of channels_last images.

RMS norm is Zhang and Sennrich, 2019; layer norm is Ba, Kiros and Hinton, 2016; group norm is Wu and He, 2018. torch's
own group norm goes through the other memory format, and adds a shift and applies SiLU in passes of their own.

Shape legend: R rows, B images, C channels or columns, H height, W width, S channels of a skip connection.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.engine.autograd import differentiable_once
from zoo.ops import triton as kernels
from zoo.ops.common import accumulation_dtype, differentiated, kernels_run

# The widest rows that a program of each kernel holds.
WIDEST_RMS_NORM, WIDEST_NORM, WIDEST_ROW = 16384, 8192, 2048


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """X [..., C], weight [C] -> [..., C]: normed in at least float32, rounded to the dtype of x, then weighted."""
    if not _rms_norm_fits(x, weight):
        return reference_rms_norm(x, weight, eps)
    if differentiated(x, weight):
        return _Norm.apply(x, None, None, weight, None, eps, None, False)
    return kernels.norms.norm(x, None, None, weight, None, eps, keep=False)[0]


def add_rms_norm(x: Tensor, added: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The residual stream x [..., C] plus what is added [..., C] or None, and the RMS norm of that.

    Go on with the sum that is returned, also where nothing is added: its gradient is added in the norm's backward.
    """
    if not _rms_norm_fits(x, weight, added):
        total = x if added is None else x + added
        return total, reference_rms_norm(total, weight, eps)
    if differentiated(x, weight, added):
        normed, total = _Norm.apply(x, added, None, weight, None, eps, None, True)
    else:
        normed, _, total, _, _ = kernels.norms.norm(x, added, None, weight, None, eps)
    return total, normed


def reference_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``rms_norm`` by torch's operators, for the compiler to fuse with what stands around it."""
    normed = x.to(accumulation_dtype(x.dtype))
    return weight * (normed * torch.rsqrt(normed.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def _rms_norm_fits(x: Tensor, weight: Tensor, added: Tensor | None = None) -> bool:
    if added is not None and (added.shape != x.shape or added.dtype != x.dtype):
        return False
    alike = weight.shape == x.shape[-1:] and weight.dtype == x.dtype
    return alike and x.shape[-1] <= WIDEST_RMS_NORM and kernels_run(x, weight, added)


class _Norm(torch.autograd.Function):
    """The layer norm of a sum, or without a bias its RMS norm; then its copy in ``low_dtype``, or the sum if kept."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, added: Tensor | None, shift: Tensor | None, weight: Tensor, bias: Tensor | None,
        eps: float, low_dtype: torch.dtype | None, keep_sum: bool,
    ) -> Any:  # fmt: skip
        out, low, total, mean, rstd = kernels.norms.norm(x, added, shift, weight, bias, eps, low_dtype)
        ctx.save_for_backward(total, mean, rstd, weight)
        ctx.adds, ctx.keep_sum = added is not None, keep_sum
        ctx.added_dtype = None if added is None or added.dtype == x.dtype else added.dtype
        ctx.sums = 1 + (bias is not None) + (shift is not None)
        if keep_sum:
            return out, total if ctx.adds else x.view_as(x)
        return out if low is None else (out, low)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor, other: Tensor | None = None) -> tuple[Tensor | None, ...]:
        low_grad, sum_grad = (None, other) if ctx.keep_sum else (other, None)
        given = *ctx.saved_tensors, grad, low_grad, sum_grad, ctx.added_dtype
        out, low, sums = kernels.norms.norm_backward(*given, ctx.sums)
        weight, bias, shift = (*sums, None, None)[:3]
        return out, (out if low is None else low) if ctx.adds else None, shift, weight, bias, None, None, None


def add_layer_norm(
    x: Tensor, added: Tensor, shift: Tensor | None, weight: Tensor, bias: Tensor, eps: float,
    low_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Layer norm of x [..., C] + added [..., C] + shift [C], and the same in ``low_dtype`` for products that follow.

    The shift, or None, is the bias that the product before lacks: its gradient is one more sum of the same pass.
    """
    if _add_layer_norm_fits(x, added, shift, weight, bias):
        low_dtype = None if low_dtype == x.dtype else low_dtype
        if not differentiated(x, added, shift, weight, bias):
            out, low, *_ = kernels.norms.norm(x, added, shift, weight, bias, eps, low_dtype, keep=False)
            return out, out if low is None else low
        out = _Norm.apply(x, added, shift, weight, bias, eps, low_dtype, False)
        return (out, out) if low_dtype is None else out
    out = F.layer_norm(x + (added if shift is None else added + shift), weight.shape, weight, bias, eps)
    return out, out if low_dtype is None else out.to(low_dtype)


def _add_layer_norm_fits(x: Tensor, added: Tensor, shift: Tensor | None, weight: Tensor, bias: Tensor) -> bool:
    """Whether the kernels take these; torch broadcasts or refuses what does not fit."""
    vectors = weight, bias, shift
    if not kernels_run(x, added, *vectors):
        return False
    # Autocast normalises in float32, whatever it is given.
    if x.dtype != torch.float32 and torch.is_autocast_enabled(x.device.type):
        return False
    fit = all(each is None or (each.shape == x.shape[-1:] and each.dtype == x.dtype) for each in vectors)
    return fit and added.shape == x.shape and x.shape[-1] <= WIDEST_NORM


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Layer norm of x [R, C] with weight [C] and bias [C], in float32: [R, C] in the dtype of ``x``."""
    if x.shape[-1] > WIDEST_ROW or not kernels_run(x, weight, bias):
        return F.layer_norm(x, weight.shape, weight, bias, eps).to(x.dtype)
    if differentiated(x, weight, bias):
        return _LayerNorm.apply(x, None, weight, bias, None, eps)
    return kernels.norms.layer_norm(x, None, weight, bias, None, eps, keep=False)[0]


def add_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, shift: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """The sum of x [R, C] and residual [R, C], and its layer norm: [R, C] each, in the wider dtype of the two.

    Computed in float32; the sum is rounded before it is normed. A shift [C] is added to the sum that is returned, and
    not to the one that is normed. Other shapes are a ValueError.
    """
    if x.shape != residual.shape:
        raise ValueError(f"residual has shape {tuple(residual.shape)}, expected that of x, {tuple(x.shape)}")
    if shift is not None and shift.shape != x.shape[-1:]:
        raise ValueError(f"shift has shape {tuple(shift.shape)}, expected one number a column: ({x.shape[-1]},)")
    given = x, residual, weight, bias, shift
    if x.shape[-1] > WIDEST_ROW or not kernels_run(*given):
        total = residual + x
        normed = F.layer_norm(total, weight.shape, weight, bias, eps).to(total.dtype)
        return total if shift is None else total + shift.to(total.dtype), normed
    if differentiated(*given):
        return _LayerNorm.apply(x, residual, weight, bias, shift, eps)
    normed, total, *_ = kernels.norms.layer_norm(x, residual, weight, bias, shift, eps, keep=False)
    return total, normed


class _LayerNorm(torch.autograd.Function):
    """The norm of x, or with a residual their sum and its norm."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor, shift: Tensor | None, eps: float
    ) -> Any:
        ctx.dtypes = [None if each is None else each.dtype for each in (x, residual, shift)]
        out, total, summed, mean, rstd = kernels.norms.layer_norm(x, residual, weight, bias, shift, eps, keep=True)
        ctx.save_for_backward(summed, mean, rstd, weight, bias)
        return out if residual is None else (total, out)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, residual, shift = ctx.dtypes
        sum_grad = grads[0] if len(grads) == 2 else None
        out, *sums = kernels.norms.layer_norm_backward(grads[-1], sum_grad, *ctx.saved_tensors, shift)
        return out.to(x), None if residual is None else out.to(residual), *sums, None


# The kernels hold all channels of a group at once.
WIDEST_GROUP = 4096


def group_norm(
    x: Tensor, shift: Tensor | None, weight: Tensor, bias: Tensor, groups: int, eps: float, silu: bool
) -> Tensor:
    """Group norm of images x [B, C, H, W] in channels_last; weight and bias [C]. Statistics are in float32.

    A shift [B, C], if any, is added to each pixel first; SiLU follows where asked for.
    """
    given = x, weight, bias, shift
    if not _group_norm_fits(groups, *given):
        return _reference_group_norm(x, shift, weight, bias, groups, eps, silu)
    if differentiated(*given):
        return _GroupNorm.apply(x, None, shift, weight, bias, groups, eps, silu)
    return kernels.group_norm.group_norm(x, None, shift, weight, bias, groups, eps, silu)[0]


def cat_group_norm(
    x: Tensor, skip: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float, silu: bool
) -> tuple[Tensor, Tensor]:
    """Channels of x [B, C, H, W] and skip [B, S, H, W] side by side, and their group norm, without a pass to join them.

    Returns the norm [B, C + S, H, W] and what it was taken of, both in channels_last. A group may reach across.
    """
    if not _group_norm_fits(groups, x, weight, bias, skip):
        joined = torch.cat([x, skip.to(x.dtype)], dim=1).contiguous(memory_format=torch.channels_last)
        return _reference_group_norm(joined, None, weight, bias, groups, eps, silu), joined
    if differentiated(x, skip, weight, bias):
        return _GroupNorm.apply(x, skip, None, weight, bias, groups, eps, silu)
    return kernels.group_norm.group_norm(x, skip, None, weight, bias, groups, eps, silu)[:2]


def _group_norm_fits(groups: int, x: Tensor, weight: Tensor, *others: Tensor | None) -> bool:
    return weight.shape[0] // groups <= WIDEST_GROUP and kernels_run(x, weight, *others)


def _reference_group_norm(
    x: Tensor, shift: Tensor | None, weight: Tensor, bias: Tensor, groups: int, eps: float, silu: bool
) -> Tensor:
    dtype = accumulation_dtype(x.dtype)
    shifted = x.to(dtype) if shift is None else x.to(dtype) + shift.to(dtype)[:, :, None, None]
    out = F.group_norm(shifted, groups, weight.to(dtype), bias.to(dtype), eps)
    return (F.silu(out) if silu else out).to(x.dtype, memory_format=torch.channels_last)


class _GroupNorm(torch.autograd.Function):
    """The norm of x, or with a skip connection that of both side by side, and both."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, skip: Tensor | None, shift: Tensor | None, weight: Tensor, bias: Tensor, groups: int,
        eps: float, silu: bool,
    ) -> Any:  # fmt: skip
        ctx.silu, ctx.channels, ctx.skip_dtype = silu, x.shape[1], None if skip is None else skip.dtype
        out, joined, statistics = kernels.group_norm.group_norm(x, skip, shift, weight, bias, groups, eps, silu)
        ctx.save_for_backward(joined, shift, weight, bias, statistics)
        return out if skip is None else (out, joined)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor, joined_grad: Tensor | None = None) -> tuple[Tensor | None, ...]:
        given = grad, *ctx.saved_tensors, joined_grad, ctx.channels, ctx.silu
        grad_x, grad_skip, *others = kernels.group_norm.group_norm_backward(*given)
        return grad_x, None if ctx.skip_dtype is None else grad_skip.to(ctx.skip_dtype), *others, None, None, None
