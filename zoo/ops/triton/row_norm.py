# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs
"""Gradients of the glue: one pass over the rows, and a small kernel that adds what its programs have summed.

A program keeps to its columns and goes over rows at equal distances, so that what the rows give to a bias is held until
the end; see zoo/ops/triton/sums.py. Sizes are no part of the code: one compilation serves all levels of a model.
Sums that nobody asks for are: with a bias that does not learn the kernel has none.

Shape legend: R rows (pixels of all images), C channels, I width inside the MLP.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from zoo.ops.common import ceil_div, next_power
from zoo.ops.triton.gelu import erf_form
from zoo.ops.triton.kernel import kernel
from zoo.ops.triton.sums import add_parts

# Rows and columns of a tile, 8 warps: a vector of 8 numbers a thread of each of the three that are read. Widths inside
# the MLP are multiples of 256: no lane is idle.
GATE_ROWS, GATE_COLUMNS = 8, 256
# Programs at most, shared between tiles of columns: three a multiprocessor of a large GPU, which holds as many.
GATE_PROGRAMS = 384
# Numbers of a tile of whole rows, 8 warps, a vector of 8 a thread; and rows of it at most.
NORM_TILE, NORM_ROWS = 2048, 4
# Programs at most: two a multiprocessor, which holds as many with the next rows on their way.
NORM_PROGRAMS = 256


@kernel(do_not_specialize=["rows"])
def _gated_gelu_backward(grad, x, bias, out, part, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    mine = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    below = tl.arange(0, ROWS)
    live = column < columns
    beside_value = tl.load(bias + column, mask=live, other=0.0).to(tl.float32)[None, :]
    beside_gate = tl.load(bias + columns + column, mask=live, other=0.0).to(tl.float32)[None, :]
    values = tl.zeros([ROWS, COLUMNS], tl.float32)
    gates = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(mine * ROWS, rows, tl.num_programs(1) * ROWS):
        seen = (first + below < rows)[:, None] & live[None, :]
        place = first * columns + below[:, None] * columns + column[None, :]
        # Rows of both halves are twice as long.
        wide = first * (2 * columns) + below[:, None] * (2 * columns) + column[None, :]
        change = tl.load(grad + place, mask=seen, other=0.0).to(tl.float32)
        value = tl.load(x + wide, mask=seen, other=0.0).to(tl.float32) + beside_value
        gate = tl.load(x + columns + wide, mask=seen, other=0.0).to(tl.float32) + beside_gate
        size, tail, inner = erf_form(gate)
        opened = tl.maximum(gate, 0.0, propagate_nan=tl.PropagateNan.ALL) - size * tail
        slope = tl.where(gate < 0.0, tail - inner, 1.0 - (tail - inner))
        of_value, of_gate = change * opened, change * value * slope
        tl.store(out + wide, of_value.to(out.dtype.element_ty), mask=seen)
        tl.store(out + columns + wide, of_gate.to(out.dtype.element_ty), mask=seen)
        if part is not None:
            values += of_value
            gates += of_gate
    if part is not None:
        part += mine * (2 * columns) + column
        tl.store(part, tl.sum(values, 0), mask=live)
        tl.store(part + columns, tl.sum(gates, 0), mask=live)


@triton.jit
def _read(grad, more, summed, mean, scale, first, row, column, rows, columns, joined):
    """Of rows [ROWS, COLUMNS]: the norm's gradient, the sum, its other gradient, and mean and factor of each row."""
    inside = first + row < rows
    seen = inside[:, None] & (column < columns)[None, :]
    place = first * columns + row[:, None] * columns + column[None, :]
    change = tl.load(grad + place, mask=seen, other=0.0)
    value = tl.load(summed + place, mask=seen, other=0.0)
    # A mask and no branch, so that all loads are under way before any is waited for.
    beside = tl.load(more + place, mask=seen & (column < joined)[None, :], other=0.0)
    middle = tl.load(mean + first + row, mask=inside, other=0.0)
    root = tl.load(scale + first + row, mask=inside, other=0.0)
    return change, value, beside, middle, root


@kernel(do_not_specialize=["rows"])
def _norm_backward(
    grad, more, summed, mean, scale, weight, out, part, rows, columns, joined,
    WEIGHTED: tl.constexpr, SHIFTED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    mine = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    live = column < columns
    factor = tl.load(weight + column, mask=live, other=0.0).to(tl.float32)[None, :]
    weights = tl.zeros([ROWS, COLUMNS], tl.float32)
    biases = tl.zeros([ROWS, COLUMNS], tl.float32)
    shifts = tl.zeros([ROWS, COLUMNS], tl.float32)
    first = mine * ROWS
    change, value, beside, middle, root = _read(
        grad, more, summed, mean, scale, first, row, column, rows, columns, joined
    )
    for first in range(mine * ROWS, rows, tl.num_programs(0) * ROWS):
        # The next rows are under way while the sums of these wait for all threads.
        following = first + tl.num_programs(0) * ROWS
        change_after, value_after, beside_after, middle_after, root_after = _read(
            grad, more, summed, mean, scale, following, row, column, rows, columns, joined
        )
        wide, added = change.to(tl.float32), beside.to(tl.float32)
        unit = (value.to(tl.float32) - middle[:, None]) * root[:, None]
        if WEIGHTED:
            biases += wide
            weights += wide * unit
        if SHIFTED:
            shifts += added
        wide *= factor
        level = tl.sum(wide, 1) / columns
        along = tl.sum(wide * unit, 1) / columns
        result = (wide - level[:, None] - unit * along[:, None]) * root[:, None] + added
        seen = (first + row < rows)[:, None] & live[None, :]
        place = first * columns + row[:, None] * columns + column[None, :]
        tl.store(out + place, result.to(out.dtype.element_ty), mask=seen)
        change, value, beside = change_after, value_after, beside_after
        middle, root = middle_after, root_after
    part += mine * (2 * WEIGHTED + SHIFTED) * columns + column
    if WEIGHTED:
        tl.store(part, tl.sum(weights, 0), mask=live)
        tl.store(part + columns, tl.sum(biases, 0), mask=live)
    if SHIFTED:
        tl.store(part + 2 * WEIGHTED * columns, tl.sum(shifts, 0), mask=live)


def gated_gelu_backward(grad: Tensor, x: Tensor, bias: Tensor, summed: bool) -> tuple[Tensor, Tensor]:
    """Gradient of the output [R, I] -> of x [R, 2 I] and, if summed, of the bias [2 I], else [0]."""
    columns = grad.shape[-1]
    out, grad_bias = torch.empty_like(x), bias.new_empty(2 * columns if summed else 0)
    rows = grad.numel() // max(columns, 1)
    across = ceil_div(columns, GATE_COLUMNS)
    parts = max(1, min(ceil_div(rows, GATE_ROWS), GATE_PROGRAMS // max(across, 1)))
    part = x.new_empty(parts, 1, 2 * columns, dtype=torch.float32) if summed else None
    if columns:
        _gated_gelu_backward[(across, parts)](
            grad, x, bias, out, part, rows, columns, ROWS=GATE_ROWS, COLUMNS=GATE_COLUMNS, num_warps=8
        )
        if part is not None:
            add_parts(part, grad_bias)
    return out, grad_bias


def norm_backward(
    grad: Tensor, more: Tensor | None, summed: Tensor, mean: Tensor, scale: Tensor, weight: Tensor, weighted: bool,
    shifted: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of the sum [R, C], of weight and bias [C] if weighted, and of the shift [C] if shifted; else [0]."""
    columns = summed.shape[-1]
    out = torch.empty_like(summed)
    grad_weight, grad_bias = (weight.new_empty(columns if weighted else 0) for _ in range(2))
    grad_shift = weight.new_empty(columns if shifted else 0)
    sums = [*([grad_weight, grad_bias] if weighted else []), *([grad_shift] if shifted else [])]
    rows, block = mean.numel(), next_power(columns)
    at_once = max(1, min(NORM_ROWS, NORM_TILE // block))
    parts = max(1, min(ceil_div(rows, at_once), NORM_PROGRAMS))
    # Where there is no tensor another one stands for it, of which nothing is read or written.
    part = mean if not sums else mean.new_empty(parts, len(sums), columns)
    joined = 0 if more is None else columns
    _norm_backward[(parts,)](
        grad, grad if more is None else more, summed, mean, scale, weight, out, part, rows, columns, joined,
        WEIGHTED=weighted, SHIFTED=shifted, ROWS=at_once, COLUMNS=block, num_warps=8,
    )  # fmt: skip
    if sums:
        add_parts(part, *sums)
    return out, grad_weight, grad_bias, grad_shift
