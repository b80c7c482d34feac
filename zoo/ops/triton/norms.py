"""Layer and RMS norms of rows, fused with the residual add before them. Forward and backward are one pass each.

A program takes whole rows, several if they are narrow. It writes the sum, its norm, and a copy of the norm in the dtype
of products. In the backward few programs walk all rows, one at a time; each keeps partial gradients of weight and
biases, and ``tiles.py`` adds these parts. Each power of two that a width is padded to compiles once.

Shape legend: R rows, C columns, P programs, S sums.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from zoo.engine.kernel import follow, kernel
from zoo.ops.common import ceil_div, next_power
from zoo.ops.triton.tiles import add_parts

# Maximum programs of the backward: four per multiprocessor of a large GPU, and a power of two like most row counts.
PROGRAMS = 512
# Maximum rows of a tile, and its elements: 16 for each thread of 4 warps. Wider rows take 8 for each thread.
ROWS, TILE = 4, 2048


@kernel(do_not_specialize=["rows"])
def _norm(
    x, added, shift, weight, bias, after, count, summed, total, out, low, mean, rstd, rows, columns,
    eps: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, EARLY: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Layer norm (RMS norm without a bias) of x, or of x + added + shift. ``total`` gets that sum plus ``after``."""
    first = tl.program_id(0).to(tl.int64) * ROWS
    row = tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    live = column < columns
    if EARLY:
        factor = tl.load(weight + column, mask=live, other=0.0).to(tl.float32)[None, :]
    follow(OVERLAP)
    real = first + row < rows
    if count is not None:
        real = real & (first + row < tl.load(count))
    seen = real[:, None] & live[None, :]
    place = first * columns + row[:, None] * columns + column[None, :]
    value = tl.load(x + place, mask=seen, other=0.0).to(tl.float32)
    if added is not None:
        value += tl.load(added + place, mask=seen, other=0.0).to(tl.float32)
    if shift is not None:
        value += tl.load(shift + column, mask=live, other=0.0).to(tl.float32)[None, :]
    if after is not None:
        moved = value + tl.load(after + column, mask=live, other=0.0).to(tl.float32)[None, :]
        tl.store(total + place, moved.to(total.dtype.element_ty), mask=seen)
    # The sum is rounded before it is normed: the backward and the next block read the rounded sum.
    value = value.to(out.dtype.element_ty)
    if summed is not None:
        tl.store(summed + place, value, mask=seen)
    value = value.to(tl.float32)
    if not EARLY:
        factor = tl.load(weight + column, mask=live, other=0.0).to(tl.float32)[None, :]
    if bias is None:
        root = tl.rsqrt(tl.sum(value * value, 1) / columns + eps)
        value = (value * root[:, None]).to(out.dtype.element_ty).to(tl.float32) * factor
    else:
        offset = tl.load(bias + column, mask=live, other=0.0).to(tl.float32)[None, :]
        # Rounded as in torch: a row of equal values has zero variance.
        middle = tl.div_rn(tl.sum(value, 1), tl.zeros([ROWS], tl.float32) + columns)
        if eps < 1e-7:
            # A second pass removes the error of the sum, which a row of equal values would amplify.
            middle += tl.sum(tl.where(seen, value - middle[:, None], 0.0), 1) / columns
        deviation = tl.where(seen, value - middle[:, None], 0.0)
        root = tl.rsqrt(tl.sum(deviation * deviation, 1) / columns + eps)
        if mean is not None:
            tl.store(mean + first + row, middle, mask=real)
        value = deviation * root[:, None] * factor + offset
    if rstd is not None:
        tl.store(rstd + first + row, root, mask=real)
    tl.store(out + place, value.to(out.dtype.element_ty), mask=seen)
    if low is not None:
        tl.store(low + place, value.to(low.dtype.element_ty), mask=seen)


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
    COLUMNS: tl.constexpr, SUMS: tl.constexpr, AFTER: tl.constexpr,
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
            if AFTER:
                shifts += past.to(tl.float32)
        tl.store(out + place, result.to(out.dtype.element_ty), mask=live)
        if low_out is not None:
            tl.store(low_out + place, result.to(low_out.dtype.element_ty), mask=live)
        if SUMS == 3 and not AFTER:
            shifts += result
    place = first * SUMS * columns + column
    tl.store(part + place, weights, mask=live)
    if SUMS > 1:
        tl.store(part + place + columns, biases, mask=live)
    if SUMS == 3:
        tl.store(part + place + 2 * columns, shifts, mask=live)


def norm(
    x: Tensor, added: Tensor | None, shift: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float,
    low_dtype: torch.dtype | None = None, after: Tensor | None = None, count: Tensor | None = None, *,
    keep: bool = True, early: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Layer norm of the sum, or without a bias its RMS norm, and a copy of the norm in ``low_dtype``.

    Then the sum [..., C], plus ``after`` [C] if that is given. If kept, also the sum alone, the mean of each row [...]
    (layer norm only) and its factor (rstd) [...]; a sum is written if it is kept or has an ``after``. With a count [1]
    int32, rows from it on are not computed. ``early`` promises that the kernel before writes no weight.
    """
    x, weight = x.contiguous(), weight.contiguous()
    added, shift, bias, after = [None if each is None else each.contiguous() for each in (added, shift, bias, after)]
    out = torch.empty_like(x, dtype=x.dtype if added is None else torch.promote_types(x.dtype, added.dtype))
    total = None if after is None else torch.empty_like(out)
    summed = torch.empty_like(out) if keep and added is not None else None
    low = None if low_dtype is None else torch.empty_like(x, dtype=low_dtype)
    rstd = x.new_empty(x.shape[:-1], dtype=torch.float32) if keep else None
    mean = None if rstd is None or bias is None else torch.empty_like(rstd)
    if x.numel():
        columns, block = x.shape[-1], next_power(x.shape[-1])
        rows, at_once = x.numel() // columns, max(1, min(ROWS, TILE // block))
        given = x, added, shift, weight, bias, after, count, summed, total, out, low, mean, rstd, rows, columns, eps
        # Layer norms keep more of a row in registers, and lose less by fewer warps than RMS norms.
        warps = 4 if at_once > 1 or (bias is not None and block == TILE) else _warps(block)
        _norm[(ceil_div(rows, at_once),)](
            *given, ROWS=at_once, COLUMNS=block, EARLY=early, OVERLAP=False, num_warps=warps
        )
    summed = x if summed is None else summed
    return out, low, summed if total is None else total, summed, mean, rstd


def norm_backward(
    total: Tensor, mean: Tensor | None, rstd: Tensor, weight: Tensor, grad: Tensor, low_grad: Tensor | None,
    sum_grad: Tensor | None, low_dtype: torch.dtype | None, number: int, after: bool = False,
) -> tuple[Tensor, Tensor | None, list[Tensor]]:  # fmt: skip
    """Gradients of the sum [..., C], of its copy in ``low_dtype``, and of ``number`` of weight, bias and shift [C].

    ``sum_grad`` is the gradient that reaches the sum without passing the norm. The shift was added before the norm, or
    ``after`` it to the returned sum.
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
        _norm_backward[(min(rows, PROGRAMS),)](*given, COLUMNS=block, SUMS=number, AFTER=after, num_warps=_warps(block))
    add_parts(part, *sums)
    return out, low, sums


def _warps(block: int) -> int:
    """Warps of a program whose padded row has ``block`` elements: 8 per thread, 32 bytes of each float32 tensor."""
    return min(max(block // 256, 1), 32)
