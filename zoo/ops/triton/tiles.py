"""Kernels over tiles of rows and columns: sums over rows, and biases, residuals, doubling and windows of images.

Sums take two steps: programs add up rows of their own, and a last kernel adds their parts in float32, in a fixed order.

Images are in channels_last, and a launch is one reading and one writing. The compiler's code for symbolic sizes divides
the place of each number by a width that it does not know, and reads numbers one by one. Places in a tile are sums.
Sizes are arguments, so that one compilation serves all levels of a model.

Shape legend: R rows (pixels of all images), C channels or columns, B images, H height, W width, P parts, S sums that
the parts hold side by side.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from zoo.engine.kernel import kernel
from zoo.ops.common import ceil_div


@triton.jit
def tile_of(rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """A program's first row, rows [ROWS] from there on, columns [COLUMNS], and which of them are there."""
    across = tl.cdiv(columns, COLUMNS)
    first = (tl.program_id(0) // across).to(tl.int64) * ROWS
    row = tl.arange(0, ROWS)
    column = (tl.program_id(0) % across) * COLUMNS + tl.arange(0, COLUMNS)
    seen = (first + row < rows)[:, None] & (column < columns)[None, :]
    return first, row, column, seen


# Rows and columns of a tile, 8 warps: 32 bytes a thread in half precision, where a warp reads lines as they are.
ROWS, COLUMNS = 8, 512
# Parts of a tile's columns at most: three tiles of a width of 3,072 for each half of a multiprocessor of a large GPU.
PARTS = 128
# Parts that the last kernel reads at once, and its columns: many programs, for little is read.
PARTS_AT_ONCE, LAST_COLUMNS = 128, 16


@kernel(do_not_specialize=["rows"])
def _column_sums(x, part, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    mine = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    below = tl.arange(0, ROWS)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(mine * ROWS, rows, tl.num_programs(1) * ROWS):
        seen = (first + below < rows)[:, None] & (column < columns)[None, :]
        place = first * columns + below[:, None] * columns + column[None, :]
        total += tl.load(x + place, mask=seen, other=0.0).to(tl.float32)
    tl.store(part + mine * columns + column, tl.sum(total, 0), mask=column < columns)


@triton.jit
def total_of(part, parts, columns, column, live, PARTS: tl.constexpr, COLUMNS: tl.constexpr):
    """Parts [P, C], added up in their order, of columns [COLUMNS] where they are ``live``."""
    total = tl.zeros([PARTS, COLUMNS], tl.float32)
    for start in range(0, parts, PARTS):
        index = start + tl.arange(0, PARTS)
        seen = (index < parts)[:, None] & live[None, :]
        total += tl.load(part + index[:, None] * columns + column[None, :], mask=seen, other=0.0)
    return tl.sum(total, 0)


@kernel(do_not_specialize=["parts"])
def _add_parts(part, first, second, third, parts, columns, PARTS: tl.constexpr, COLUMNS: tl.constexpr):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    which = tl.program_id(1)
    total = tl.zeros([PARTS, COLUMNS], tl.float32)
    for start in range(0, parts, PARTS):
        row = start + tl.arange(0, PARTS)
        seen = (row < parts)[:, None] & (column < columns)[None, :]
        place = (row * tl.num_programs(1) + which)[:, None] * columns + column[None, :]
        total += tl.load(part + place, mask=seen, other=0.0)
    value = tl.sum(total, 0)
    live = column < columns
    tl.store(first + column, value.to(first.dtype.element_ty), mask=live & (which == 0))
    if second is not None:
        tl.store(second + column, value.to(second.dtype.element_ty), mask=live & (which == 1))
    if third is not None:
        tl.store(third + column, value.to(third.dtype.element_ty), mask=live & (which == 2))


def parts_of(rows: int, most: int | None = None) -> int:
    """How many programs share the rows of one tile of columns; ``PARTS`` at most if nothing is said."""
    return min(max(ceil_div(rows, ROWS), 1), most or PARTS)


def add_parts(part: Tensor, *sums: Tensor) -> None:
    """Parts [P, S, C] in float32 -> S sums [C], up to three, each written in its own dtype."""
    parts, _, columns = part.shape
    grid = ceil_div(columns, LAST_COLUMNS), len(sums)
    first, second, third = (*sums, None, None)[:3]
    _add_parts[grid](part, first, second, third, parts, columns, PARTS=PARTS_AT_ONCE, COLUMNS=LAST_COLUMNS, num_warps=8)


def column_sums(x: Tensor, dtype: torch.dtype) -> Tensor:
    """[..., C] -> [C] in another dtype."""
    x, columns = x.contiguous(), x.shape[-1]
    out = x.new_empty(columns, dtype=dtype)
    rows = x.numel() // columns
    # Where one tile holds all columns there are no others beside it to be read.
    parts = parts_of(rows, PARTS if columns > COLUMNS else 2 * PARTS)
    part = x.new_empty(parts, 1, columns, dtype=torch.float32)
    _column_sums[(ceil_div(columns, COLUMNS), part.shape[0])](
        x, part, rows, columns, ROWS=ROWS, COLUMNS=COLUMNS, num_warps=8
    )
    add_parts(part, out)
    return out


# An image's tile: a thread reads 8 numbers of each summand. Widths in the models are multiples of 64.
IMAGE_TILE = {"ROWS": 16, "COLUMNS": 64, "num_warps": 4}


def _launch(kernel: Any, rows: int, columns: int, *given: Any) -> None:
    """One program a tile of an image, if there is any."""
    if rows and columns:
        tiles = ceil_div(rows, IMAGE_TILE["ROWS"]) * ceil_div(columns, IMAGE_TILE["COLUMNS"])
        kernel[(tiles,)](*given, **IMAGE_TILE)


@kernel(do_not_specialize=["rows"])
def _conv_add(x, bias, residual, out, rows, columns, added, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    first, row, column, seen = tile_of(rows, columns, ROWS, COLUMNS)
    place = row[:, None] * columns + column[None, :]
    # A mask and no branch, so that both loads are under way before either is waited for.
    both = seen & (column < added)[None, :]
    value = tl.load(x + first * columns + place, mask=seen, other=0.0).to(tl.float32)
    value += tl.load(residual + first * columns + place, mask=both, other=0.0).to(tl.float32)
    value += tl.load(bias + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]
    tl.store(out + first * columns + place, value.to(out.dtype.element_ty), mask=seen)


@kernel(do_not_specialize=["rows", "width"])
def _upsample(x, out, rows, width, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    first, row, column, seen = tile_of(rows, columns, ROWS, COLUMNS)
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
def _windows(x, out, rows, height, width, lines, across, stride, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    first, row, column, seen = tile_of(rows, columns, ROWS, COLUMNS)
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


def conv_add(x: Tensor, bias: Tensor, residual: Tensor | None) -> Tensor:
    """[R, C] plus [C] plus [R, C], if any: [R, C]."""
    x, (rows, columns) = x.contiguous(), x.shape
    out = torch.empty_like(x, dtype=x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype))
    # Where there is none another tensor stands for it, of which nothing is read.
    other, added = (x, 0) if residual is None else (residual.contiguous(), columns)
    _launch(_conv_add, rows, columns, x, bias.contiguous(), other, out, rows, columns, added)
    return out


def upsample(x: Tensor) -> Tensor:
    """[B, H, W, C] -> [B, 2 H, 2 W, C], each pixel four times."""
    count, height, width, columns = x.shape
    out, rows = x.new_empty(count, 2 * height, 2 * width, columns), count * height * width
    _launch(_upsample, rows, columns, x.contiguous(), out, rows, width, columns)
    return out


def windows(x: Tensor, stride: int) -> Tensor:
    """[B, H, W, C] -> [B H' W', 9 C], H' = ⌈H / stride⌉: what a 3 × 3 convolution with a padding of 1 multiplies."""
    count, height, width, columns = x.shape
    lines, across = ceil_div(height, stride), ceil_div(width, stride)
    rows = count * lines * across
    out = x.new_empty(rows, 9 * columns)
    sizes = 9 * rows, height, width, lines, across, stride, columns
    _launch(_windows, 9 * rows, columns, x.contiguous(), out, *sizes)
    return out


# Pixels of the result that a program writes.
PIXELS = 128


@kernel
def _space_to_depth(
    x, out, stride_n, stride_c, stride_y, stride_x, height, width, pixels, H, W, offset,
    C: tl.constexpr, D: tl.constexpr, PIXELS: tl.constexpr,
):  # fmt: skip
    pixel = tl.program_id(0).to(tl.int64) * PIXELS + tl.arange(0, PIXELS)
    channel = tl.arange(0, D)
    image, place = pixel // (H * W), pixel % (H * W)
    square, c = channel // (D // 4), channel % (D // 4)
    y = 2 * (place // W)[:, None] + (square // 2)[None, :] - offset
    column = 2 * (place % W)[:, None] + (square % 2)[None, :] - offset
    inside = (y >= 0) & (y < height) & (column >= 0) & (column < width)
    inside &= (pixel < pixels)[:, None] & (c < C)[None, :]
    source = (image * stride_n)[:, None] + (c * stride_c)[None, :] + y * stride_y + column * stride_x
    value = tl.load(x + source, mask=inside, other=0.0)
    tl.store(out + (pixel * D)[:, None] + channel, value.to(out.dtype.element_ty), mask=(pixel < pixels)[:, None])


def space_to_depth(x: Tensor, offset: int, height: int, width: int, channels: int, dtype: torch.dtype) -> Tensor:
    """As ``zoo.ops.images.space_to_depth``; ``channels`` is a power of two."""
    out = x.new_empty(x.shape[0], height, width, channels, dtype=dtype)
    pixels = x.shape[0] * height * width
    _space_to_depth[(ceil_div(pixels, PIXELS),)](
        x, out, *x.stride(), x.shape[2], x.shape[3], pixels, height, width, offset,
        C=x.shape[1], D=channels, PIXELS=PIXELS, num_warps=4,
    )  # fmt: skip
    return out.permute(0, 3, 1, 2)
