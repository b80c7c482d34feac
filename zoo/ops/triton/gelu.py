# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs
"""GELU of a product and the bias that it lacks, and its gradient with that of the bias: each number is read once.

Shape legend: R rows, I columns, P parts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from zoo.ops.common import ceil_div
from zoo.ops.triton.kernel import kernel
from zoo.ops.triton.sums import COLUMNS, ROWS, add_parts, parts_of


@triton.jit
def erf_form(x):
    """|x|, and the normal distribution beyond it: the probability, and |x| times the density there.

    The probability by 7.1.26 of Abramowitz and Stegun, Handbook of Mathematical Functions, whose error is 1.5e-7 at
    most; it shares its exponential with the density. An exact erf has twice the instructions, and would take longer
    than memory.
    """
    # Behind 64 nothing is left of the tail, and infinity times nothing is not a number.
    size = tl.minimum(tl.abs(x), 64.0, propagate_nan=tl.PropagateNan.ALL)
    t = 1.0 + 0.23164189 * size
    t = tl.rsqrt(t * t)  # 1 / t in one instruction, where a division takes eight
    bell = tl.exp2(-0.72134752 * size * size)
    tail = 1.061405429 * t - 1.453152027
    tail = tail * t + 1.421413741
    tail = tail * t - 0.284496736
    tail = tail * t + 0.254829592
    return size, 0.5 * tail * t * bell, 0.39894228 * size * bell


@triton.jit
def _tanh_form(x):
    """What x is multiplied with, a sigmoid, and the slope of what stands in it, times x."""
    square = x * x
    within = 1.5957691216 * x * (1.0 + 0.044715 * square)
    return tl.sigmoid(within), 1.5957691216 * x * (1.0 + 0.134145 * square)


@kernel(do_not_specialize=["rows"])
def _bias_gelu(x, bias, out, rows, columns, TANH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    # Rows lie along the axis that has no limit.
    first = tl.program_id(0).to(tl.int64) * ROWS
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    below = tl.arange(0, ROWS)
    seen = (first + below < rows)[:, None] & (column < columns)[None, :]
    place = first * columns + below[:, None] * columns + column[None, :]
    value = tl.load(x + place, mask=seen, other=0.0).to(tl.float32)
    value += tl.load(bias + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]
    if TANH:
        value *= _tanh_form(value)[0]
    else:
        size, tail, _ = erf_form(value)
        # Off what GELU tends to, the difference: nothing cancels.
        value = tl.maximum(value, 0.0, propagate_nan=tl.PropagateNan.ALL) - size * tail
    tl.store(out + place, value.to(out.dtype.element_ty), mask=seen)


@kernel(do_not_specialize=["rows"])
def _bias_gelu_backward(
    grad, x, bias, out, part, rows, columns, TANH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    mine = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    below = tl.arange(0, ROWS)
    added = tl.load(bias + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(mine * ROWS, rows, tl.num_programs(1) * ROWS):
        seen = (first + below < rows)[:, None] & (column < columns)[None, :]
        place = first * columns + below[:, None] * columns + column[None, :]
        change = tl.load(grad + place, mask=seen, other=0.0).to(tl.float32)
        value = tl.load(x + place, mask=seen, other=0.0).to(tl.float32) + added
        if TANH:
            opened, slope = _tanh_form(value)
            change *= opened + opened * (1.0 - opened) * slope
        else:
            _, tail, inner = erf_form(value)
            beyond = tail - inner
            change *= tl.where(value < 0.0, beyond, 1.0 - beyond)
        tl.store(out + place, change.to(out.dtype.element_ty), mask=seen)
        total += change
    tl.store(part + mine * columns + column, tl.sum(total, 0), mask=column < columns)


def bias_gelu(x: Tensor, bias: Tensor, tanh: bool) -> Tensor:
    """GELU of x [..., I] plus bias [I]: [..., I]."""
    x, bias = x.contiguous(), bias.contiguous()
    out, columns = torch.empty_like(x), x.shape[-1]
    if rows := x.numel() // columns:
        grid = ceil_div(rows, ROWS), ceil_div(columns, COLUMNS)
        _bias_gelu[grid](x, bias, out, rows, columns, TANH=tanh, ROWS=ROWS, COLUMNS=COLUMNS, num_warps=8)
    return out


def bias_gelu_backward(grad: Tensor, x: Tensor, bias: Tensor, tanh: bool) -> tuple[Tensor, Tensor]:
    """Gradient of the output [..., I] -> of x [..., I] and of the bias [I]."""
    grad, x, bias = grad.contiguous(), x.contiguous(), bias.contiguous()
    out, grad_bias, columns = torch.empty_like(x), torch.empty_like(bias), x.shape[-1]
    rows = x.numel() // columns
    part = x.new_empty(parts_of(rows), 1, columns, dtype=torch.float32)
    _bias_gelu_backward[(ceil_div(columns, COLUMNS), part.shape[0])](
        grad, x, bias, out, part, rows, columns, TANH=tanh, ROWS=ROWS, COLUMNS=COLUMNS, num_warps=8
    )
    add_parts(part, grad_bias)
    return out, grad_bias
