"""Norms over the last dimension, with the residual add before them.

Shape legend: C columns. Kernels compute and sum in float32.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.ops.common import accumulation_dtype, differentiable_once, differentiated, kernels_run
from zoo.ops.products import column_sums

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
    if _residual_fits(x, added, shift, weight, bias):
        if low_dtype is not None and low_dtype != x.dtype:
            both: tuple[Tensor, Tensor] = _AddLayerNorm.apply(x, added, shift, weight, bias, eps, low_dtype)
            return both
        out: Tensor = _AddLayerNorm.apply(x, added, shift, weight, bias, eps, None)
        return out, out
    out = F.layer_norm(x + (added if shift is None else added + shift), weight.shape, weight, bias, eps)
    return out, out if low_dtype is None else out.to(low_dtype)


def _residual_fits(x: Tensor, added: Tensor, shift: Tensor | None, weight: Tensor, bias: Tensor) -> bool:
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


# The kernels hold all channels of a row at once.
WIDEST_ROW = 2048


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Layer norm of x [R, C] with weight [C] and bias [C], in float32: [R, C] in the dtype of ``x``."""
    if x.shape[-1] > WIDEST_ROW or not kernels_run(x, weight, bias):
        return F.layer_norm(x, weight.shape, weight, bias, eps).to(x.dtype)
    if differentiated(x, weight, bias):
        return _LayerNorm.apply(x, weight, bias, eps)  # type: ignore[no-any-return]
    from zoo.ops.triton import norms as kernels

    return kernels.layer_norm(x, weight, bias, eps, keep=False)[0]


def add_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, shift: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """The sum of two, and its layer norm, in float32; the sum is rounded before it is normed.

    Args:
        x: [R, C].
        residual: [R, C].
        weight: [C].
        bias: [C].
        shift: [C], added to the sum that is returned and not to the one that is normed, or None.
        eps: Added to the variance.

    Returns:
        Sum and norm, [R, C] each, in the wider dtype of x and residual.

    Raises:
        ValueError: If the two differ in shape, or the shift has not a number for each column.
    """
    if x.shape != residual.shape:
        raise ValueError(f"residual has shape {tuple(residual.shape)}, expected that of x, {tuple(x.shape)}")
    if shift is not None and shift.shape != x.shape[-1:]:
        raise ValueError(f"shift has shape {tuple(shift.shape)}, expected one number a column: ({x.shape[-1]},)")
    given = (x, residual, weight, bias) if shift is None else (x, residual, weight, bias, shift)
    if x.shape[-1] > WIDEST_ROW or not kernels_run(*given):
        total = residual + x
        normed = F.layer_norm(total, weight.shape, weight, bias, eps).to(total.dtype)
        return total if shift is None else total + shift.to(total.dtype), normed
    if differentiated(*given):
        return _AddNorm.apply(x, residual, weight, bias, shift, eps)  # type: ignore[no-any-return]
    from zoo.ops.triton import norms as kernels

    return kernels.add_norm(x, residual, weight, bias, shift, eps, keep=False)[:2]


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        from zoo.ops.triton import norms as kernels

        out, mean, rstd = kernels.layer_norm(x, weight, bias, eps, keep=True)
        ctx.save_for_backward(x, mean, rstd, weight, bias)
        return out

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        from zoo.ops.triton import norms as kernels

        weighted = any(ctx.needs_input_grad[1:3])
        summed, mean, rstd, weight, bias = ctx.saved_tensors
        x, weight, bias, _ = kernels.layer_norm_backward(grad, None, summed, mean, rstd, weight, bias, weighted, None)
        return x, weight, bias, None


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, shift: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        from zoo.ops.triton import norms as kernels

        total, out, summed, mean, rstd = kernels.add_norm(x, residual, weight, bias, shift, eps, keep=True)
        ctx.dtypes = x.dtype, residual.dtype, None if shift is None else shift.dtype
        ctx.save_for_backward(summed, mean, rstd, weight, bias)
        if not torch.compiler.is_compiling():  # zeros for a gradient that is not there would be a launch
            ctx.set_materialize_grads(False)
        return total, out

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, more: Tensor | None, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        from zoo.ops.triton import norms as kernels

        x, residual, shift = ctx.dtypes
        shifted = shift if ctx.needs_input_grad[4] and more is not None else None
        if grad is not None:
            weighted = any(ctx.needs_input_grad[2:4])
            summed, mean, rstd, weight, bias = ctx.saved_tensors
            given = grad, more, summed, mean, rstd, weight, bias, weighted, shifted
            out, *sums = kernels.layer_norm_backward(*given)
        elif more is not None:
            out, sums = more, [None, None, None if shifted is None else column_sums(more, shifted)]
        else:
            return (None,) * 6
        return out.to(x), out.to(residual), *sums, None


# A program of the kernels holds a whole row.
WIDEST_RMS_NORM = 16384


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """X [..., C], weight [C] -> [..., C]: normed in at least float32, rounded to the dtype of x, then weighted."""
    if not _rms_norm_fits(x, weight):
        return reference_rms_norm(x, weight, eps)
    if differentiated(x, weight):
        normed: Tensor = _RMSNorm.apply(x, None, weight, eps, False)
        return normed
    from zoo.ops.triton import norms as kernels

    return kernels.rms_norm(x, None, weight, eps)[1]


def add_rms_norm(x: Tensor, added: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The residual stream x [..., C] plus what is added [..., C] or None, and the RMS norm of that.

    Go on with the sum that is returned, also where nothing is added: its gradient is added in the norm's backward.
    """
    if not _rms_norm_fits(x, weight, added):
        total = x if added is None else x + added
        return total, reference_rms_norm(total, weight, eps)
    if differentiated(x, weight) or (added is not None and differentiated(added)):
        both: tuple[Tensor, Tensor] = _RMSNorm.apply(x, added, weight, eps, True)
        return both
    from zoo.ops.triton import norms as kernels

    total, normed, _ = kernels.rms_norm(x, added, weight, eps)
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


class _RMSNorm(torch.autograd.Function):
    """Returns the norm, or with ``both`` the sum and the norm."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, added: Tensor | None, weight: Tensor, eps: float, both: bool) -> Any:
        from zoo.ops.triton import norms as kernels

        total, normed, rstd = kernels.rms_norm(x, added, weight, eps)
        ctx.save_for_backward(total, weight, rstd)
        ctx.adds = added is not None
        if not both:
            return normed
        return (total if ctx.adds else x.view_as(x)), normed

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        from zoo.ops.triton import norms as kernels

        past = grads[0] if len(grads) == 2 else None
        grad, weight_grad = kernels.rms_norm_backward(grads[-1], past, *ctx.saved_tensors)
        return grad, grad if ctx.adds else None, weight_grad, None, None
