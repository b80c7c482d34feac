"""Layer norm of rows, alone and with the residual add before it.

Shape legend: R rows, C channels.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.ops.common import differentiable_once, differentiated, kernels_run
from zoo.ops.products import column_sums

# The kernels hold all channels of a row at once.
WIDEST_ROW = 2048


def row_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Layer norm of x [R, C] with weight [C] and bias [C], in float32: [R, C] in the dtype of ``x``."""
    if x.shape[-1] > WIDEST_ROW or not kernels_run(x, weight, bias):
        return F.layer_norm(x, weight.shape, weight, bias, eps).to(x.dtype)
    if differentiated(x, weight, bias):
        return _RowNorm.apply(x, weight, bias, eps)  # type: ignore[no-any-return]
    from zoo.ops.triton import row_norm as kernels

    return kernels.row_norm(x, weight, bias, eps, keep=False)[0]


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
    from zoo.ops.triton import row_norm as kernels

    return kernels.add_norm(x, residual, weight, bias, shift, eps, keep=False)[:2]


class _RowNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        from zoo.ops.triton import row_norm as kernels

        out, mean, rstd = kernels.row_norm(x, weight, bias, eps, keep=True)
        ctx.save_for_backward(x, mean, rstd, weight, bias)
        return out

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        from zoo.ops.triton import row_norm as kernels

        weighted = any(ctx.needs_input_grad[1:3])
        summed, mean, rstd, weight, bias = ctx.saved_tensors
        x, weight, bias, _ = kernels.norm_backward(grad, None, summed, mean, rstd, weight, bias, weighted, None)
        return x, weight, bias, None


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, shift: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        from zoo.ops.triton import row_norm as kernels

        total, out, summed, mean, rstd = kernels.add_norm(x, residual, weight, bias, shift, eps, keep=True)
        ctx.dtypes = x.dtype, residual.dtype, None if shift is None else shift.dtype
        ctx.save_for_backward(summed, mean, rstd, weight, bias)
        if not torch.compiler.is_compiling():  # zeros for a gradient that is not there would be a launch
            ctx.set_materialize_grads(False)
        return total, out

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, more: Tensor | None, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        from zoo.ops.triton import row_norm as kernels

        x, residual, shift = ctx.dtypes
        shifted = shift if ctx.needs_input_grad[4] and more is not None else None
        if grad is not None:
            weighted = any(ctx.needs_input_grad[2:4])
            summed, mean, rstd, weight, bias = ctx.saved_tensors
            given = grad, more, summed, mean, rstd, weight, bias, weighted, shifted
            out, *sums = kernels.norm_backward(*given)
        elif more is not None:
            out, sums = more, [None, None, None if shifted is None else column_sums(more, shifted)]
        else:
            return (None,) * 6
        return out.to(x), out.to(residual), *sums, None
