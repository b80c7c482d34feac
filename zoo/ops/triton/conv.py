# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs
"""The glue between products and convolutions, a launch each: one reading, one writing, 16 bytes at a time.

What the compiler makes for symbolic sizes divides the place of each number by a width that it does not know, and so
reads them one by one. Here programs hold tiles of rows and columns, whose places are sums. Sizes are no part of the
code: one compilation serves all levels of a model, of norms one for each power of two that a width fits in. Gradients
are glue_backward.py's, for which norms keep what the sum alone does not tell.

Shape legend: R rows (pixels of all images), C channels, I width inside the MLP, B images, H height, W width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from zoo.ops.common import ceil_div, next_power
from zoo.ops.triton.kernel import kernel

# Rows and columns of a tile. Widths in the models are multiples of 64, inside the MLP of 256: no lane is idle. A
# thread reads 16 numbers of each half, or 8 of each summand.
GATE_ROWS, GATE_COLUMNS = 8, 256
ADD_ROWS, ADD_COLUMNS = 16, 64
# Numbers of a tile of whole rows, and rows that a program takes at most: 16 numbers a thread, 4 warps.
NORM_TILE, NORM_ROWS = 2048, 4


@triton.jit
def _gelu(x):
    """The erf form.

    By formula 7.1.26 of Abramowitz and Stegun, Handbook of Mathematical Functions: erfc(z) = polynomial(t) exp(-z²)
    with t = 1 / (1 + 0.3275911 z), to 1.5e-7 for z >= 0. Taken off max(x, 0) it cancels nowhere, so that in float32
    the error stays below 4e-7 on all numbers, a third of that of ``x * (1 + erf(x / √2)) / 2`` with an exact erf. It
    is half the instructions of that erf, which at this rate of numbers would take longer than memory.
    """
    # Behind 64 nothing is left of the tail, and infinity times nothing is not a number.
    size = tl.minimum(tl.abs(x), 64.0, propagate_nan=tl.PropagateNan.ALL)
    t = 1.0 + 0.23164189 * size  # 0.3275911 / √2
    # One over it in one instruction: a division takes eight.
    t = tl.rsqrt(t * t)
    tail = 1.061405429 * t - 1.453152027
    tail = tail * t + 1.421413741
    tail = tail * t - 0.284496736
    tail = tail * t + 0.254829592
    # exp(-x² / 2) / 2, as a power of two.
    tail *= t * tl.exp2(-0.72134752 * size * size) * 0.5
    return tl.maximum(x, 0.0) - size * tail


@triton.jit
def _tile(rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """A program's first row, rows [ROWS] from there on, columns [COLUMNS], and which of them are there."""
    across = tl.cdiv(columns, COLUMNS)
    first = (tl.program_id(0) // across).to(tl.int64) * ROWS
    row = tl.arange(0, ROWS)
    column = (tl.program_id(0) % across) * COLUMNS + tl.arange(0, COLUMNS)
    seen = (first + row < rows)[:, None] & (column < columns)[None, :]
    return first, row, column, seen


@kernel(do_not_specialize=["rows"])
def _gated_gelu(x, bias, out, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    first, row, column, seen = _tile(rows, columns, ROWS, COLUMNS)
    x += first * (2 * columns)
    place = row[:, None] * (2 * columns) + column[None, :]
    live = column < columns
    value = tl.load(x + place, mask=seen, other=0.0).to(tl.float32)
    gate = tl.load(x + columns + place, mask=seen, other=0.0).to(tl.float32)
    value += tl.load(bias + column, mask=live, other=0.0).to(tl.float32)[None, :]
    gate += tl.load(bias + columns + column, mask=live, other=0.0).to(tl.float32)[None, :]
    place = row[:, None] * columns + column[None, :]
    tl.store(out + first * columns + place, (value * _gelu(gate)).to(out.dtype.element_ty), mask=seen)


@kernel(do_not_specialize=["rows"])
def _conv_add(x, bias, residual, out, rows, columns, added, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    first, row, column, seen = _tile(rows, columns, ROWS, COLUMNS)
    place = row[:, None] * columns + column[None, :]
    # A mask and no branch, so that both loads are under way before either is waited for.
    both = seen & (column < added)[None, :]
    value = tl.load(x + first * columns + place, mask=seen, other=0.0).to(tl.float32)
    value += tl.load(residual + first * columns + place, mask=both, other=0.0).to(tl.float32)
    value += tl.load(bias + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]
    tl.store(out + first * columns + place, value.to(out.dtype.element_ty), mask=seen)


@kernel(do_not_specialize=["rows", "width"])
def _upsample(x, out, rows, width, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    first, row, column, seen = _tile(rows, columns, ROWS, COLUMNS)
    value = tl.load(x + first * columns + row[:, None] * columns + column[None, :], mask=seen, other=0.0)
    # A line of the image becomes two of twice the length.
    pixel = first + row
    line = pixel // width
    above = (4 * width * line + 2 * (pixel - line * width))[:, None] * columns + column[None, :]
    tl.store(out + above, value, mask=seen)
    tl.store(out + above + columns, value, mask=seen)
    below = above + 2 * width * columns
    tl.store(out + below, value, mask=seen)
    tl.store(out + below + columns, value, mask=seen)


@kernel(do_not_specialize=["rows", "height", "width", "lines", "across", "stride"])
def _windows(
    x, out, rows, height, width, lines, across, stride, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    first, row, column, seen = _tile(rows, columns, ROWS, COLUMNS)
    # A row is one of the nine pixels that a pixel of the output is made of.
    pixel = (first + row) // 9
    ninth = (first + row) - pixel * 9
    line = pixel // across
    image = line // lines
    down = (line - image * lines) * stride + ninth // 3 - 1
    right = (pixel - line * across) * stride + ninth % 3 - 1
    inside = (down >= 0) & (down < height) & (right >= 0) & (right < width)
    place = ((image * height + down) * width + right)[:, None] * columns + column[None, :]
    value = tl.load(x + place, mask=seen & inside[:, None], other=0.0)
    tl.store(out + first * columns + row[:, None] * columns + column[None, :], value, mask=seen)


@kernel(do_not_specialize=["rows"])
def _norm(
    x, residual, weight, bias, shift, total, out, kept, mean, scale, rows, columns, added, shifted, eps,
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
    value = value.to(total.dtype.element_ty)
    if kept is not None:
        tl.store(kept + first * columns + place, value, mask=seen & (column < shifted)[None, :])
    value = value.to(tl.float32)
    factor = tl.load(weight + column, mask=live, other=0.0).to(tl.float32)
    offset = tl.load(bias + column, mask=live, other=0.0).to(tl.float32)
    # Rounded as torch rounds: a row of equal values has no variance.
    middle = tl.div_rn(tl.sum(value, 1), tl.zeros([ROWS], tl.float32) + columns)
    apart = tl.where(seen, value - middle[:, None], 0.0)
    root = tl.rsqrt(tl.sum(apart * apart, 1) / columns + eps)
    if kept is not None:
        tl.store(mean + first + row, middle, mask=first + row < rows)
        tl.store(scale + first + row, root, mask=first + row < rows)
    value = apart * root[:, None] * factor[None, :] + offset[None, :]
    tl.store(out + first * columns + place, value.to(out.dtype.element_ty), mask=seen)


def gated_gelu(x: Tensor, bias: Tensor) -> Tensor:
    """X [R, 2 I] plus bias [2 I]; GELU of the second half times the first: [R, I]."""
    columns = x.shape[-1] // 2
    out = x.new_empty(*x.shape[:-1], columns)
    if out.numel():
        rows = out.numel() // columns
        grid = (ceil_div(rows, GATE_ROWS) * ceil_div(columns, GATE_COLUMNS),)
        _gated_gelu[grid](x, bias, out, rows, columns, ROWS=GATE_ROWS, COLUMNS=GATE_COLUMNS, num_warps=4)
    return out


def conv_add(x: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
    """[R, C] plus [C] plus [R, C]: [R, C]."""
    out = torch.empty_like(x, dtype=torch.promote_types(x.dtype, residual.dtype))
    _launch_add(x, bias, residual, x.shape[-1], out)
    return out


def conv_bias(x: Tensor, bias: Tensor) -> Tensor:
    """[R, C] plus [C]: [R, C]."""
    out = torch.empty_like(x)
    _launch_add(x, bias, x, 0, out)
    return out


def _launch_add(x: Tensor, bias: Tensor, residual: Tensor, added: int, out: Tensor) -> None:
    if out.numel():
        columns = x.shape[-1]
        rows = out.numel() // columns
        grid = (ceil_div(rows, ADD_ROWS) * ceil_div(columns, ADD_COLUMNS),)
        _conv_add[grid](x, bias, residual, out, rows, columns, added, ROWS=ADD_ROWS, COLUMNS=ADD_COLUMNS, num_warps=4)


def upsample(x: Tensor) -> Tensor:
    """[B, H, W, C] -> [B, 2 H, 2 W, C], each pixel four times."""
    count, height, width, columns = x.shape
    out = x.new_empty(count, 2 * height, 2 * width, columns)
    if out.numel():
        rows = count * height * width
        grid = (ceil_div(rows, ADD_ROWS) * ceil_div(columns, ADD_COLUMNS),)
        _upsample[grid](x, out, rows, width, columns, ROWS=ADD_ROWS, COLUMNS=ADD_COLUMNS, num_warps=4)
    return out


def windows(x: Tensor, stride: int) -> Tensor:
    """[B, H, W, C] -> [B H' W', 9 C], H' = ⌈H / stride⌉: what a 3 × 3 convolution with a padding of 1 multiplies."""
    count, height, width, columns = x.shape
    lines, across = ceil_div(height, stride), ceil_div(width, stride)
    out = x.new_empty(count * lines * across, 9 * columns)
    if out.numel():
        rows = count * lines * across * 9
        grid = (ceil_div(rows, ADD_ROWS) * ceil_div(columns, ADD_COLUMNS),)
        _windows[grid](
            x, out, rows, height, width, lines, across, stride, columns, ROWS=ADD_ROWS, COLUMNS=ADD_COLUMNS, num_warps=4
        )  # fmt: skip
    return out


def add_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, shift: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """X [R, C] plus residual [R, C], plus shift [C]; and the layer norm of the first sum, with weight and bias [C]."""
    total = torch.empty_like(x, dtype=torch.promote_types(x.dtype, residual.dtype))
    out = torch.empty_like(total)
    _launch_norm(x, residual, weight, bias, shift, eps, total, out)
    return total, out


def row_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Layer norm of x [R, C] with weight [C] and bias [C]: [R, C]."""
    out = torch.empty_like(x)
    _launch_norm(x, None, weight, bias, None, eps, out, out)
    return out


def kept_add_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, shift: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """``add_norm``, the sum without the shift [R, C], or [0] without one, and mean and factor of each row [R]."""
    total = torch.empty_like(x, dtype=torch.promote_types(x.dtype, residual.dtype))
    out = torch.empty_like(total)
    kept = total.new_empty(0 if shift is None else total.shape)
    mean, scale = (x.new_empty(x.shape[:-1], dtype=torch.float32) for _ in range(2))
    _launch_norm(x, residual, weight, bias, shift, eps, total, out, (out if shift is None else kept, mean, scale))
    return total, out, kept, mean, scale


def kept_row_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """``row_norm``, and mean and factor of each row [R]."""
    out = torch.empty_like(x)
    mean, scale = (x.new_empty(x.shape[:-1], dtype=torch.float32) for _ in range(2))
    _launch_norm(x, None, weight, bias, None, eps, out, out, (out, mean, scale))
    return out, mean, scale


def _launch_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor, shift: Tensor | None, eps: float, total: Tensor,
    out: Tensor, kept: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None),
) -> None:  # fmt: skip
    if not x.numel():
        return
    columns = x.shape[-1]
    rows, block = x.numel() // columns, next_power(columns)
    at_once = max(1, min(NORM_ROWS, NORM_TILE // block))
    # Where there is none another tensor stands for it, of which nothing is read.
    given = x, x if residual is None else residual, weight, bias, weight if shift is None else shift, total, out
    sizes = rows, columns, 0 if residual is None else columns, 0 if shift is None else columns
    _norm[(ceil_div(rows, at_once),)](*given, *kept, *sizes, eps, ROWS=at_once, COLUMNS=block, num_warps=4)
