# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs
"""A residual add and the layer norm of the sum where gradients are wanted: each direction is one pass.

    forward     the sum, its norm, and the norm in the dtype of products, a row a program
    backward    both gradients of the norm's outputs -> of the sum, in both dtypes. Few programs go over all rows, so
                that each holds what its rows give to weight and biases until the end; the rest is
                zoo/ops/triton/sums.py

The two norms of a layer differ in that products read one and not the other. That is no other kernel, which would have
to be compiled: where there is no copy another tensor of its dtype stands for it, of which nothing is read or written.

Shape legend: R rows, C columns, P programs, S sums.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from zoo.ops.common import next_power
from zoo.ops.triton.kernel import kernel
from zoo.ops.triton.sums import add_parts

# Numbers of a row that a thread holds: 32 bytes of each tensor in float32.
NUMBERS = 8
# Programs of the backward at most: four for each multiprocessor of a large GPU, and a power of two as rows mostly are.
PROGRAMS = 512


@kernel
def _forward(
    x, added, shift, weight, bias, total, out, low, mean, scale, columns, copied, eps, COLUMNS: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    live = column < columns
    place = row * columns + column
    value = tl.load(added + place, mask=live, other=0.0).to(tl.float32)
    value += tl.load(x + place, mask=live, other=0.0).to(tl.float32)
    if shift is not None:
        value += tl.load(shift + column, mask=live, other=0.0).to(tl.float32)
    # What is normed is rounded, as the backward will read it.
    value = value.to(total.dtype.element_ty)
    tl.store(total + place, value, mask=live)
    value = value.to(tl.float32)
    factor = tl.load(weight + column, mask=live, other=0.0).to(tl.float32)
    offset = tl.load(bias + column, mask=live, other=0.0).to(tl.float32)
    middle = tl.sum(value, 0) / columns
    # What rounding left of the mean goes too: a row of equal values has no variance, and with a small eps a rest of it
    # would be made large.
    middle += tl.sum(tl.where(live, value - middle, 0.0), 0) / columns
    apart = tl.where(live, value - middle, 0.0)
    root = tl.rsqrt(tl.sum(apart * apart, 0) / columns + eps)
    tl.store(mean + row, middle)
    tl.store(scale + row, root)
    value = apart * root * factor + offset
    tl.store(out + place, value.to(out.dtype.element_ty), mask=live)
    tl.store(low + place, value.to(low.dtype.element_ty), mask=column < copied)


@kernel(do_not_specialize=["rows"])
def _backward(
    total, mean, scale, weight, grad, low_grad, out, low_out, part, rows, columns, copied,
    COLUMNS: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    live = column < columns
    factor = tl.load(weight + column, mask=live, other=0.0).to(tl.float32)
    weights = tl.zeros([COLUMNS], tl.float32)
    biases = tl.zeros([COLUMNS], tl.float32)
    shifts = tl.zeros([COLUMNS], tl.float32)
    change = tl.load(grad + first * columns + column, mask=live, other=0.0)
    value = tl.load(total + first * columns + column, mask=live, other=0.0)
    low = tl.load(low_grad + first * columns + column, mask=column < copied, other=0.0)
    middle = tl.load(mean + first)
    root = tl.load(scale + first)
    for row in range(first, rows, tl.num_programs(0)):
        place = row * columns + column
        # The next row is under way while the sums of this one wait for all threads.
        following = row + tl.num_programs(0)
        seen = live & (following < rows)
        place_after = following * columns + column
        change_after = tl.load(grad + place_after, mask=seen, other=0.0)
        value_after = tl.load(total + place_after, mask=seen, other=0.0)
        low_after = tl.load(low_grad + place_after, mask=seen & (column < copied), other=0.0)
        middle_after = tl.load(mean + following, mask=following < rows, other=0.0)
        root_after = tl.load(scale + following, mask=following < rows, other=0.0)
        wide = change.to(tl.float32) + low.to(tl.float32)
        unit = (value.to(tl.float32) - middle) * root
        biases += wide
        weights += wide * unit
        wide *= factor
        level = tl.sum(wide, 0) / columns
        along = tl.sum(wide * unit, 0) / columns
        result = (wide - level - unit * along) * root
        tl.store(out + place, result.to(out.dtype.element_ty), mask=live)
        if low_out is not None:
            tl.store(low_out + place, result.to(low_out.dtype.element_ty), mask=live)
        if SUMS == 3:
            shifts += result
        change, value, low = change_after, value_after, low_after
        middle, root = middle_after, root_after
    place = first * SUMS * columns + column
    tl.store(part + place, weights, mask=live)
    tl.store(part + place + columns, biases, mask=live)
    if SUMS == 3:
        tl.store(part + place + 2 * columns, shifts, mask=live)


def add_layer_norm(
    x: Tensor,
    added: Tensor,
    shift: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    low_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The norm, its copy of another dtype, the sum [..., C], and the mean and the factor [...] of each row."""
    x, added, weight, bias = (each.contiguous() for each in (x, added, weight, bias))
    shift = None if shift is None else shift.contiguous()
    total, out = torch.empty_like(x), torch.empty_like(x)
    low = x.new_empty(0) if low_dtype is None else torch.empty_like(x, dtype=low_dtype)
    written, copied = (added, 0) if low_dtype is None else (low, x.shape[-1])
    mean, scale = (x.new_empty(x.shape[:-1], dtype=torch.float32) for _ in range(2))
    if rows := scale.numel():
        block = next_power(x.shape[-1])
        _forward[(rows,)](
            x, added, shift, weight, bias, total, out, written, mean, scale, x.shape[-1], copied, eps,
            COLUMNS=block, num_warps=_warps(block),
        )  # fmt: skip
    return out, low, total, mean, scale


def add_layer_norm_backward(
    total: Tensor,
    mean: Tensor,
    scale: Tensor,
    weight: Tensor,
    grad: Tensor,
    low_grad: Tensor | None,
    added_dtype: torch.dtype | None,
    shifted: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the sum [..., C], its copy of another dtype, and of weight, bias and shift [C]."""
    total, mean, scale, weight, grad = (each.contiguous() for each in (total, mean, scale, weight, grad))
    out = torch.empty_like(total)
    low = total.new_empty(0) if added_dtype is None else torch.empty_like(total, dtype=added_dtype)
    written = None if added_dtype is None else low
    if low_grad is None:
        read, copied = out if written is None else low, 0
    else:
        read, copied = low_grad.contiguous(), total.shape[-1]
    grad_weight, grad_bias, grad_shift = (torch.empty_like(weight) for _ in range(3))
    if not shifted:
        grad_shift = total.new_empty(0)
    sums = (grad_weight, grad_bias, grad_shift)[: 3 if shifted else 2]
    rows, columns = scale.numel(), total.shape[-1]
    part = total.new_empty(min(rows, PROGRAMS), len(sums), columns, dtype=torch.float32)
    if rows:
        block = next_power(columns)
        _backward[(part.shape[0],)](
            total, mean, scale, weight, grad, read, out, written, part, rows, columns, copied,
            COLUMNS=block, SUMS=len(sums), num_warps=_warps(block),
        )  # fmt: skip
    add_parts(part, *sums)
    return out, low, grad_weight, grad_bias, grad_shift


def _warps(block: int) -> int:
    return min(max(block // (32 * NUMBERS), 1), 32)
