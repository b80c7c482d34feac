"""Biases, residuals, doubling and windows of channels_last images: a launch each, one reading, one writing.

The compiler's code for symbolic sizes divides the place of each number by a width that it does not know, and reads
numbers one by one. Programs here hold tiles of rows and columns, whose places are sums. Sizes are arguments, so that
one compilation serves all levels of a model.

Shape legend: R rows (pixels of all images), C channels, B images, H height, W width.
"""

import torch
import triton.language as tl
from torch import Tensor

from zoo.engine.kernel import kernel
from zoo.ops.common import ceil_div
from zoo.ops.triton.tiles import tile_of

# Rows and columns of a tile: a thread reads 8 numbers of each summand. Widths in the models are multiples of 64.
ROWS, COLUMNS = 16, 64


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
def _windows(
    x, out, rows, height, width, lines, across, stride, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
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
    x, bias = x.contiguous(), bias.contiguous()
    out = torch.empty_like(x, dtype=x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype))
    if out.numel():
        columns = x.shape[-1]
        rows, added = out.numel() // columns, 0 if residual is None else columns
        grid = (ceil_div(rows, ROWS) * ceil_div(columns, COLUMNS),)
        # Where there is none another tensor stands for it, of which nothing is read.
        other = x if residual is None else residual.contiguous()
        _conv_add[grid](x, bias, other, out, rows, columns, added, ROWS=ROWS, COLUMNS=COLUMNS, num_warps=4)
    return out


def upsample(x: Tensor) -> Tensor:
    """[B, H, W, C] -> [B, 2 H, 2 W, C], each pixel four times."""
    count, height, width, columns = x.shape
    x = x.contiguous()
    out = x.new_empty(count, 2 * height, 2 * width, columns)
    if out.numel():
        rows = count * height * width
        grid = (ceil_div(rows, ROWS) * ceil_div(columns, COLUMNS),)
        _upsample[grid](x, out, rows, width, columns, ROWS=ROWS, COLUMNS=COLUMNS, num_warps=4)
    return out


def windows(x: Tensor, stride: int) -> Tensor:
    """[B, H, W, C] -> [B H' W', 9 C], H' = ⌈H / stride⌉: what a 3 × 3 convolution with a padding of 1 multiplies."""
    count, height, width, columns = x.shape
    x = x.contiguous()
    lines, across = ceil_div(height, stride), ceil_div(width, stride)
    out = x.new_empty(count * lines * across, 9 * columns)
    if out.numel():
        rows = count * lines * across * 9
        grid = (ceil_div(rows, ROWS) * ceil_div(columns, COLUMNS),)
        _windows[grid](
            x, out, rows, height, width, lines, across, stride, columns, ROWS=ROWS, COLUMNS=COLUMNS, num_warps=4
        )  # fmt: skip
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
    """As ``zoo.ops.conv.space_to_depth``; ``channels`` is a power of two."""
    out = x.new_empty(x.shape[0], height, width, channels, dtype=dtype)
    pixels = x.shape[0] * height * width
    _space_to_depth[(ceil_div(pixels, PIXELS),)](
        x, out, *x.stride(), x.shape[2], x.shape[3], pixels, height, width, offset,
        C=x.shape[1], D=channels, PIXELS=PIXELS, num_warps=4,
    )  # fmt: skip
    return out.permute(0, 3, 1, 2)
