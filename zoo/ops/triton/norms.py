"""Layer and RMS norms of rows, fused with the residual add before them. Forward and backward are one pass each.

RMS norms and the layer norms of post-norm blocks take one row per program. They write the sum, its norm, and a copy of
the norm in the dtype of products. Layer norms of narrower rows take several whole rows per program. In the backward few
programs walk all rows; each keeps partial gradients of weight and biases, and ``tiles.py`` adds these parts. Each power
of two that a width is padded to compiles once.

Shape legend: R rows, C columns, P programs, S sums.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from zoo.engine.kernel import kernel
from zoo.ops.common import ceil_div, next_power
from zoo.ops.triton.tiles import add_parts

# Maximum programs of the backward: four per multiprocessor of a large GPU, and a power of two like most row counts.
PROGRAMS = 512


@kernel
def _norm(
    x, added, shift, weight, bias, count, total, out, low, mean, rstd, columns,
    eps: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Layer norm (RMS norm without a bias) of x, or of x + added + shift; the sum is stored in ``total``."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    live = column < columns
    if count is not None:
        live = live & (row < tl.load(count))
    place = row * columns + column
    value = tl.load(x + place, mask=live, other=0.0)
    if added is not None:
        value = value.to(tl.float32) + tl.load(added + place, mask=live, other=0.0).to(tl.float32)
        if shift is not None:
            value += tl.load(shift + column, mask=live, other=0.0).to(tl.float32)
        # The sum is rounded before it is normed: the backward and the next block read the rounded sum.
        value = value.to(x.dtype.element_ty)
        if total is not None:
            tl.store(total + place, value, mask=live)
    value = value.to(tl.float32)
    factor = tl.load(weight + column, mask=live, other=0.0).to(tl.float32)
    if bias is None:
        root = tl.rsqrt(tl.sum(value * value, 0) / columns + eps)
        value = (value * root).to(out.dtype.element_ty).to(tl.float32) * factor
    else:
        offset = tl.load(bias + column, mask=live, other=0.0).to(tl.float32)
        middle = tl.sum(value, 0) / columns
        # A second pass removes the mean's rounding error. With a small eps a row of equal values would amplify it.
        middle += tl.sum(tl.where(live, value - middle, 0.0), 0) / columns
        deviation = tl.where(live, value - middle, 0.0)
        root = tl.rsqrt(tl.sum(deviation * deviation, 0) / columns + eps)
        if mean is not None:
            tl.store(mean + row, middle)
        value = deviation * root * factor + offset
    if rstd is not None:
        tl.store(rstd + row, root)
    tl.store(out + place, value.to(out.dtype.element_ty), mask=live)
    if low is not None:
        tl.store(low + place, value.to(low.dtype.element_ty), mask=live)


@triton.jit
def _load_row(total, mean, rstd, grad, low_grad, row, rows, column, columns):
    """Load a row's sum, mean and factor (rstd), and the gradients of the norm and of its low-precision copy."""
    place, seen = row * columns + column, (column < columns) & (row < rows)
    change = tl.load(grad + place, mask=seen, other=0.0)
    value = tl.load(total + place, mask=seen, other=0.0)
    root = tl.load(rstd + row, mask=row < rows, other=0.0)
    # Unread placeholders for absent values.
    low, middle = change, root
    if low_grad is not None:
        low = tl.load(low_grad + place, mask=seen, other=0.0)
    if mean is not None:
        middle = tl.load(mean + row, mask=row < rows, other=0.0)
    return value, middle, root, change, low


@kernel(do_not_specialize=["rows"])
def _norm_backward(
    total, mean, rstd, weight, grad, low_grad, sum_grad, out, low_out, part, rows, columns,
    COLUMNS: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """Backward of a layer norm, or without a mean of an RMS norm. ``sum_grad`` reaches the sum without the norm."""
    first = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    live = column < columns
    factor = tl.load(weight + column, mask=live, other=0.0).to(tl.float32)
    weights = tl.zeros([COLUMNS], tl.float32)
    biases = tl.zeros([COLUMNS], tl.float32)
    shifts = tl.zeros([COLUMNS], tl.float32)
    held = _load_row(total, mean, rstd, grad, low_grad, first, rows, column, columns)
    for row in range(first, rows, tl.num_programs(0)):
        place = row * columns + column
        if sum_grad is not None:
            past = tl.load(sum_grad + place, mask=live, other=0.0)
        value, middle, root, change, low = held
        # The next row loads while the reductions of this row synchronise all threads.
        following = row + tl.num_programs(0)
        held = _load_row(total, mean, rstd, grad, low_grad, following, rows, column, columns)
        gradient = change.to(tl.float32)
        if low_grad is not None:
            gradient += low.to(tl.float32)
        if mean is None:
            unit = value.to(tl.float32) * root
            weights += gradient * unit.to(total.dtype.element_ty).to(tl.float32)
            gradient *= factor
            result = (gradient - unit * (tl.sum(gradient * unit, 0) / columns)) * root
        else:
            unit = (value.to(tl.float32) - middle) * root
            biases += gradient
            weights += gradient * unit
            gradient *= factor
            level = tl.sum(gradient, 0) / columns
            result = (gradient - level - unit * (tl.sum(gradient * unit, 0) / columns)) * root
        if sum_grad is not None:
            result += past.to(tl.float32)
        tl.store(out + place, result.to(out.dtype.element_ty), mask=live)
        if low_out is not None:
            tl.store(low_out + place, result.to(low_out.dtype.element_ty), mask=live)
        if SUMS == 3:
            shifts += result
    place = first * SUMS * columns + column
    tl.store(part + place, weights, mask=live)
    if SUMS > 1:
        tl.store(part + place + columns, biases, mask=live)
    if SUMS == 3:
        tl.store(part + place + 2 * columns, shifts, mask=live)


def norm(
    x: Tensor, added: Tensor | None, shift: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float,
    low_dtype: torch.dtype | None = None, count: Tensor | None = None, *, keep: bool = True,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Layer norm of the sum, or its RMS norm without a bias, and a copy of the norm in ``low_dtype``.

    With a count [1] int32, rows from it on are not computed. If kept, also the sum [..., C], the mean of each row [...]
    (layer norm only) and its factor (rstd) [...].
    """
    x, weight = x.contiguous(), weight.contiguous()
    added, shift, bias = [None if each is None else each.contiguous() for each in (added, shift, bias)]
    out = torch.empty_like(x)
    total = torch.empty_like(x) if keep and added is not None else None
    low = None if low_dtype is None else torch.empty_like(x, dtype=low_dtype)
    rstd = x.new_empty(x.shape[:-1], dtype=torch.float32) if keep else None
    mean = None if rstd is None or bias is None else torch.empty_like(rstd)
    if x.numel():
        columns, block = x.shape[-1], next_power(x.shape[-1])
        given = x, added, shift, weight, bias, count, total, out, low, mean, rstd, columns, eps
        _norm[(x.numel() // columns,)](*given, COLUMNS=block, num_warps=_warps(block))
    return out, low, x if total is None else total, mean, rstd


def norm_backward(
    total: Tensor, mean: Tensor | None, rstd: Tensor, weight: Tensor, grad: Tensor, low_grad: Tensor | None,
    sum_grad: Tensor | None, low_dtype: torch.dtype | None, number: int,
) -> tuple[Tensor, Tensor | None, list[Tensor]]:  # fmt: skip
    """Gradients of the sum [..., C], of its copy in ``low_dtype``, and of ``number`` of weight, bias and shift [C].

    ``sum_grad`` is the gradient that reaches the sum without passing the norm.
    """
    total, rstd, weight, grad = [each.contiguous() for each in (total, rstd, weight, grad)]
    low_grad, sum_grad = [None if each is None else each.contiguous() for each in (low_grad, sum_grad)]
    out = torch.empty_like(total)
    low = None if low_dtype is None else torch.empty_like(total, dtype=low_dtype)
    rows, columns = rstd.numel(), total.shape[-1]
    sums = [torch.empty_like(weight) for _ in range(number)]
    part = total.new_empty(min(rows, PROGRAMS), number, columns, dtype=torch.float32)
    if rows:
        block = next_power(columns)
        given = total, mean, rstd, weight, grad, low_grad, sum_grad, out, low, part, rows, columns
        _norm_backward[(min(rows, PROGRAMS),)](*given, COLUMNS=block, SUMS=number, num_warps=_warps(block))
    add_parts(part, *sums)
    return out, low, sums


def _warps(block: int) -> int:
    """Warps of a program whose padded row has ``block`` elements: 8 per thread, 32 bytes of each float32 tensor."""
    return min(max(block // 256, 1), 32)


# Elements of a tile of whole rows, and its maximum rows: 16 elements per thread of 4 warps; in the backward 8 of 8.
TILE, ROWS = 2048, 4
# Maximum programs of the backward: two per multiprocessor.
ROW_PROGRAMS = 256


@kernel(do_not_specialize=["rows"])
def _layer_norm(
    x, residual, weight, bias, shift, total, out, kept, mean, rstd, rows, columns, added, shifted, eps: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * ROWS
    row = tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    live = column < columns
    seen = (first + row < rows)[:, None] & live[None, :]
    place = row[:, None] * columns + column[None, :]
    # A mask instead of a branch, so that both loads are issued before either result is used.
    both = seen & (column < added)[None, :]
    value = tl.load(x + first * columns + place, mask=seen, other=0.0).to(tl.float32)
    value += tl.load(residual + first * columns + place, mask=both, other=0.0).to(tl.float32)
    moved = tl.load(shift + column, mask=column < shifted, other=0.0).to(tl.float32)
    tl.store(total + first * columns + place, (value + moved[None, :]).to(total.dtype.element_ty), mask=both)
    # The sum is rounded before it is normed, as if it had been stored.
    value = value.to(out.dtype.element_ty)
    if kept is not None:
        tl.store(kept + first * columns + place, value, mask=seen & (column < shifted)[None, :])
    value = value.to(tl.float32)
    factor = tl.load(weight + column, mask=live, other=0.0).to(tl.float32)
    offset = tl.load(bias + column, mask=live, other=0.0).to(tl.float32)
    # Rounded as in torch: a row of equal values has zero variance.
    middle = tl.div_rn(tl.sum(value, 1), tl.zeros([ROWS], tl.float32) + columns)
    deviation = tl.where(seen, value - middle[:, None], 0.0)
    root = tl.rsqrt(tl.sum(deviation * deviation, 1) / columns + eps)
    if mean is not None:
        tl.store(mean + first + row, middle, mask=first + row < rows)
        tl.store(rstd + first + row, root, mask=first + row < rows)
    value = deviation * root[:, None] * factor[None, :] + offset[None, :]
    tl.store(out + first * columns + place, value.to(out.dtype.element_ty), mask=seen)


@triton.jit
def _load_rows(grad, more, summed, mean, rstd, first, row, column, rows, columns, joined):
    """Load for rows [ROWS, COLUMNS]: the norm's gradient, the sum, its other gradient, and each row's mean and rstd."""
    inside = first + row < rows
    seen = inside[:, None] & (column < columns)[None, :]
    place = first * columns + row[:, None] * columns + column[None, :]
    change = tl.load(grad + place, mask=seen, other=0.0)
    value = tl.load(summed + place, mask=seen, other=0.0)
    # A mask instead of a branch, so that all loads are issued before any result is used.
    extra = tl.load(more + place, mask=seen & (column < joined)[None, :], other=0.0)
    middle = tl.load(mean + first + row, mask=inside, other=0.0)
    root = tl.load(rstd + first + row, mask=inside, other=0.0)
    return change, value, extra, middle, root


@kernel(do_not_specialize=["rows"])
def _layer_norm_backward(
    grad, more, summed, mean, rstd, weight, out, part, rows, columns, joined, SHIFTED: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    mine = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    live = column < columns
    factor = tl.load(weight + column, mask=live, other=0.0).to(tl.float32)[None, :]
    weights = tl.zeros([ROWS, COLUMNS], tl.float32)
    biases = tl.zeros([ROWS, COLUMNS], tl.float32)
    shifts = tl.zeros([ROWS, COLUMNS], tl.float32)
    held = _load_rows(grad, more, summed, mean, rstd, mine * ROWS, row, column, rows, columns, joined)
    for first in range(mine * ROWS, rows, tl.num_programs(0) * ROWS):
        change, value, extra, middle, root = held
        # The next rows load while the reductions of these rows synchronise all threads.
        following = first + tl.num_programs(0) * ROWS
        held = _load_rows(grad, more, summed, mean, rstd, following, row, column, rows, columns, joined)
        wide, added = change.to(tl.float32), extra.to(tl.float32)
        unit = (value.to(tl.float32) - middle[:, None]) * root[:, None]
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
    part += mine * (2 + SHIFTED) * columns + column
    tl.store(part, tl.sum(weights, 0), mask=live)
    tl.store(part + columns, tl.sum(biases, 0), mask=live)
    if SHIFTED:
        tl.store(part + 2 * columns, tl.sum(shifts, 0), mask=live)


def layer_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor, shift: Tensor | None, eps: float, keep: bool
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None, Tensor | None]:
    """Layer norm of x [R, C] + residual [R, C], and that sum plus shift [C]; without a residual the norm of x.

    If kept, also the normed input [R, C], and mean and factor (rstd) of each row [R].
    """
    x, columns = x.contiguous(), x.shape[-1]
    out = torch.empty_like(x, dtype=x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype))
    total = None if residual is None else torch.empty_like(out)
    summed = torch.empty_like(out) if keep and shift is not None else None
    mean = x.new_empty(x.shape[:-1], dtype=torch.float32) if keep else None
    rstd = None if mean is None else torch.empty_like(mean)
    if x.numel():
        rows, block = x.numel() // columns, next_power(columns)
        at_once = max(1, min(ROWS, TILE // block))
        # Placeholders for absent arguments. An unread input may be any tensor; an unwritten output needs its own, since
        # the compiler assumes that a written argument overwrites its whole tensor.
        weight = weight.contiguous()
        added = x if residual is None else residual.contiguous()
        moved = weight if shift is None else shift.contiguous()
        sizes = rows, columns, 0 if residual is None else columns, 0 if shift is None else columns
        _layer_norm[(ceil_div(rows, at_once),)](
            x, added, weight, bias.contiguous(), moved, out.new_empty(1) if total is None else total, out, summed,
            mean, rstd, *sizes, eps, ROWS=at_once, COLUMNS=block, num_warps=4,
        )  # fmt: skip
    return out, total, x if total is None else total if summed is None else summed, mean, rstd


def layer_norm_backward(
    grad: Tensor, more: Tensor | None, summed: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor, bias: Tensor,
    shift: torch.dtype | None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Gradients of the sum [R, C], of weight and bias [C], and of a shift [C] if its dtype is given."""
    columns, grad, summed, weight = summed.shape[-1], grad.contiguous(), summed.contiguous(), weight.contiguous()
    out = torch.empty_like(summed)
    sums = [torch.empty_like(weight), torch.empty_like(bias)]
    if shift is not None:
        sums.append(weight.new_empty(columns, dtype=shift))
    rows, block = mean.numel(), next_power(columns)
    at_once = max(1, min(ROWS, TILE // block))
    part = mean.new_empty(max(1, min(ceil_div(rows, at_once), ROW_PROGRAMS)), len(sums), columns)
    # Placeholders for absent arguments, as above.
    _layer_norm_backward[(part.shape[0],)](
        grad, grad if more is None else more.contiguous(), summed, mean, rstd, weight, out, part, rows, columns,
        0 if more is None else columns, SHIFTED=shift is not None, ROWS=at_once, COLUMNS=block, num_warps=8,
    )  # fmt: skip
    add_parts(part, *sums)
    return out, *(*sums, None)[:3]
