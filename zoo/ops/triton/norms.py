# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs
"""A residual add and the layer norm of the sum where gradients are wanted: each direction is one pass.

    forward     the sum, its norm, and the norm in the dtype of products, a row a program
    backward    both gradients of the norm's outputs -> of the sum, in both dtypes. Few programs go over all rows, so
                that each holds what its rows give to weight and biases until the end; ``sums.py`` adds the rest

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
def _add_layer_norm(
    x, added, shift, weight, bias, total, out, low, mean, rstd, columns, eps: tl.constexpr, COLUMNS: tl.constexpr
):
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
    tl.store(rstd + row, root)
    value = apart * root * factor + offset
    tl.store(out + place, value.to(out.dtype.element_ty), mask=live)
    if low is not None:
        tl.store(low + place, value.to(low.dtype.element_ty), mask=live)


@kernel(do_not_specialize=["rows"])
def _add_layer_norm_backward(
    total, mean, rstd, weight, grad, low_grad, out, low_out, part, rows, columns,
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
    low = change
    if low_grad is not None:
        low = tl.load(low_grad + first * columns + column, mask=live, other=0.0)
    middle = tl.load(mean + first)
    root = tl.load(rstd + first)
    for row in range(first, rows, tl.num_programs(0)):
        place = row * columns + column
        # The next row is under way while the sums of this one wait for all threads.
        following = row + tl.num_programs(0)
        seen = live & (following < rows)
        place_after = following * columns + column
        change_after = tl.load(grad + place_after, mask=seen, other=0.0)
        value_after = tl.load(total + place_after, mask=seen, other=0.0)
        low_after = change_after
        if low_grad is not None:
            low_after = tl.load(low_grad + place_after, mask=seen, other=0.0)
        middle_after = tl.load(mean + following, mask=following < rows, other=0.0)
        root_after = tl.load(rstd + following, mask=following < rows, other=0.0)
        wide = change.to(tl.float32)
        if low_grad is not None:
            wide += low.to(tl.float32)
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
) -> tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor]:
    """The norm, its copy of another dtype, the sum [..., C], and mean and reciprocal deviation [...] of each row."""
    x, added, weight, bias = x.contiguous(), added.contiguous(), weight.contiguous(), bias.contiguous()
    shift = None if shift is None else shift.contiguous()
    total, out = torch.empty_like(x), torch.empty_like(x)
    low = None if low_dtype is None else torch.empty_like(x, dtype=low_dtype)
    mean, rstd = (x.new_empty(x.shape[:-1], dtype=torch.float32) for _ in range(2))
    if rows := mean.numel():
        columns = x.shape[-1]
        block = next_power(columns)
        _add_layer_norm[(rows,)](
            x, added, shift, weight, bias, total, out, low, mean, rstd, columns, eps,
            COLUMNS=block, num_warps=warps_of(block),
        )  # fmt: skip
    return out, low, total, mean, rstd


def add_layer_norm_backward(
    total: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor,
    grad: Tensor,
    low_grad: Tensor | None,
    low_dtype: torch.dtype | None,
    shifted: bool,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor | None]:
    """Gradients of the sum [..., C], its copy of another dtype, and of weight, bias and shift [C]."""
    weight, grad = weight.contiguous(), grad.contiguous()
    low_grad = None if low_grad is None else low_grad.contiguous()
    out = torch.empty_like(total)
    low = None if low_dtype is None else torch.empty_like(total, dtype=low_dtype)
    rows, columns = mean.numel(), total.shape[-1]
    sums = [torch.empty_like(weight) for _ in range(3 if shifted else 2)]
    part = total.new_empty(min(rows, PROGRAMS), len(sums), columns, dtype=torch.float32)
    if rows:
        block = next_power(columns)
        _add_layer_norm_backward[(min(rows, PROGRAMS),)](
            total, mean, rstd, weight, grad, low_grad, out, low, part, rows, columns,
            COLUMNS=block, SUMS=len(sums), num_warps=warps_of(block),
        )  # fmt: skip
    add_parts(part, *sums)
    return out, low, sums[0], sums[1], sums[2] if shifted else None


def warps_of(block: int) -> int:
    """Of a program that holds a row in so many places."""
    return min(max(block // (32 * NUMBERS), 1), 32)
