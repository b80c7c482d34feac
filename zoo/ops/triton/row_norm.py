# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs
"""Layer norm of rows, alone and with a residual add before it, and the gradients of both.

Forward programs hold some whole rows. Backward programs go over rows at equal distances, so that what the rows give to
weight and bias is held until the end; see sums.py. One compilation for each power of two that a width fits in.

Shape legend: R rows, C channels.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from zoo.ops.common import ceil_div, next_power
from zoo.ops.triton.kernel import kernel
from zoo.ops.triton.sums import add_parts

# Numbers of a tile of whole rows, and rows of it at most: 16 numbers a thread, 4 warps; in the backward 8 of 8 warps.
TILE, ROWS = 2048, 4
# Programs of the backward at most: two a multiprocessor, which holds as many with the next rows on their way.
PROGRAMS = 256


@kernel(do_not_specialize=["rows"])
def _norm(
    x, residual, weight, bias, shift, total, out, kept, mean, rstd, rows, columns, added, shifted, eps: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * ROWS
    row = tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    live = column < columns
    seen = (first + row < rows)[:, None] & live[None, :]
    place = row[:, None] * columns + column[None, :]
    # A mask and no branch, so that both loads are under way before either is waited for.
    both = seen & (column < added)[None, :]
    value = tl.load(x + first * columns + place, mask=seen, other=0.0).to(tl.float32)
    value += tl.load(residual + first * columns + place, mask=both, other=0.0).to(tl.float32)
    moved = tl.load(shift + column, mask=column < shifted, other=0.0).to(tl.float32)
    tl.store(total + first * columns + place, (value + moved[None, :]).to(total.dtype.element_ty), mask=both)
    # What is normed is rounded, as it would be if it were written.
    value = value.to(out.dtype.element_ty)
    if kept is not None:
        tl.store(kept + first * columns + place, value, mask=seen & (column < shifted)[None, :])
    value = value.to(tl.float32)
    factor = tl.load(weight + column, mask=live, other=0.0).to(tl.float32)
    offset = tl.load(bias + column, mask=live, other=0.0).to(tl.float32)
    # Rounded as torch rounds: a row of equal values has no variance.
    middle = tl.div_rn(tl.sum(value, 1), tl.zeros([ROWS], tl.float32) + columns)
    apart = tl.where(seen, value - middle[:, None], 0.0)
    root = tl.rsqrt(tl.sum(apart * apart, 1) / columns + eps)
    if mean is not None:
        tl.store(mean + first + row, middle, mask=first + row < rows)
        tl.store(rstd + first + row, root, mask=first + row < rows)
    value = apart * root[:, None] * factor[None, :] + offset[None, :]
    tl.store(out + first * columns + place, value.to(out.dtype.element_ty), mask=seen)


@triton.jit
def _read(grad, more, summed, mean, rstd, first, row, column, rows, columns, joined):
    """Of rows [ROWS, COLUMNS]: the norm's gradient, the sum, its other gradient, and mean and factor of each row."""
    inside = first + row < rows
    seen = inside[:, None] & (column < columns)[None, :]
    place = first * columns + row[:, None] * columns + column[None, :]
    change = tl.load(grad + place, mask=seen, other=0.0)
    value = tl.load(summed + place, mask=seen, other=0.0)
    # A mask and no branch, so that all loads are under way before any is waited for.
    beside = tl.load(more + place, mask=seen & (column < joined)[None, :], other=0.0)
    middle = tl.load(mean + first + row, mask=inside, other=0.0)
    root = tl.load(rstd + first + row, mask=inside, other=0.0)
    return change, value, beside, middle, root


@kernel(do_not_specialize=["rows"])
def _norm_backward(
    grad, more, summed, mean, rstd, weight, out, part, rows, columns, joined,
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
        grad, more, summed, mean, rstd, first, row, column, rows, columns, joined
    )
    for first in range(mine * ROWS, rows, tl.num_programs(0) * ROWS):
        # The next rows are under way while the sums of these wait for all threads.
        following = first + tl.num_programs(0) * ROWS
        change_after, value_after, beside_after, middle_after, root_after = _read(
            grad, more, summed, mean, rstd, following, row, column, rows, columns, joined
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


def row_norm(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, keep: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Layer norm of x [R, C] with weight [C] and bias [C]: [R, C]; mean and factor of each row [R] if kept."""
    x = x.contiguous()
    out, mean, rstd = torch.empty_like(x), *_statistics(x, keep)
    _launch(x, None, weight, bias, None, eps, None, out, None, mean, rstd)
    return out, mean, rstd


def add_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, shift: Tensor | None, eps: float, keep: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """X [R, C] plus residual [R, C] plus shift [C], and the layer norm of the sum without the shift.

    If kept also that sum [R, C], and mean and factor of each row [R].
    """
    x = x.contiguous()
    total = torch.empty_like(x, dtype=torch.promote_types(x.dtype, residual.dtype))
    out, mean, rstd = torch.empty_like(total), *_statistics(x, keep)
    summed = torch.empty_like(total) if keep and shift is not None else None
    _launch(x, residual, weight, bias, shift, eps, total, out, summed, mean, rstd)
    return total, out, total if summed is None else summed, mean, rstd


def _statistics(x: Tensor, keep: bool) -> tuple[Tensor | None, Tensor | None]:
    if not keep:
        return None, None
    return x.new_empty(x.shape[:-1], dtype=torch.float32), x.new_empty(x.shape[:-1], dtype=torch.float32)


def _launch(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor, shift: Tensor | None, eps: float,
    total: Tensor | None, out: Tensor, summed: Tensor | None, mean: Tensor | None, rstd: Tensor | None,
) -> None:  # fmt: skip
    if not x.numel():
        return
    columns = x.shape[-1]
    rows, block = x.numel() // columns, next_power(columns)
    at_once = max(1, min(ROWS, TILE // block))
    # Where there is none another tensor stands for it, of which nothing is read; one of its own for what is written:
    # the compiler takes what an argument writes for the whole of a tensor.
    weight = weight.contiguous()
    added = x if residual is None else residual.contiguous()
    moved = weight if shift is None else shift.contiguous()
    sizes = rows, columns, 0 if residual is None else columns, 0 if shift is None else columns
    _norm[(ceil_div(rows, at_once),)](
        x, added, weight, bias.contiguous(), moved, out.new_empty(1) if total is None else total, out, summed,
        mean, rstd, *sizes, eps, ROWS=at_once, COLUMNS=block, num_warps=4,
    )  # fmt: skip


def norm_backward(
    grad: Tensor, more: Tensor | None, summed: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor, bias: Tensor,
    weighted: bool, shift: torch.dtype | None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Gradients of the sum [R, C], of weight and bias [C] if weighted, and of a shift [C] of a dtype, if it is said."""
    columns, grad, summed, weight = summed.shape[-1], grad.contiguous(), summed.contiguous(), weight.contiguous()
    out = torch.empty_like(summed)
    grad_weight = torch.empty_like(weight) if weighted else None
    grad_bias = torch.empty_like(bias) if weighted else None
    grad_shift = None if shift is None else weight.new_empty(columns, dtype=shift)
    sums = [each for each in (grad_weight, grad_bias, grad_shift) if each is not None]
    rows, block = mean.numel(), next_power(columns)
    at_once = max(1, min(ROWS, TILE // block))
    parts = max(1, min(ceil_div(rows, at_once), PROGRAMS))
    # Where there is no tensor another one stands for it, of which nothing is read or written.
    part = mean if not sums else mean.new_empty(parts, len(sums), columns)
    _norm_backward[(parts,)](
        grad, grad if more is None else more.contiguous(), summed, mean, rstd, weight, out, part, rows,
        columns, 0 if more is None else columns, WEIGHTED=weighted, SHIFTED=shift is not None, ROWS=at_once,
        COLUMNS=block, num_warps=8,
    )  # fmt: skip
    if sums:
        add_parts(part, *sums)
    return out, grad_weight, grad_bias, grad_shift
