# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs
"""The greatest of 3 × 3 pixels at a stride of 2, in channels_last: with a norm and a relu, or with a gradient.

A program has some columns of the output and goes down its lines. Each line needs three rows of the input, and hands the
last one, as the greatest of three pixels each, on to the next.

A norm keeps the order of values, or turns it round where its scale is negative: signs are turned, the greatest of nine
is found, and only that is normalised. No padding is needed either: a window's centre is always a pixel of the image,
and what is clamped to the image falls on a pixel that the window has anyway.

With a gradient the forward leaves which of the nine it was, a byte for each number, and the backward reads no image. A
pixel is in up to four windows; four pixels that are neighbours are in four windows together. So a program of the
backward reads a number of each of these and writes four.

Shape legend: N images, C channels, H height, W width; h and w, ⌈H / 2⌉ and ⌈W / 2⌉.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from zoo.engine.kernel import kernel
from zoo.ops.triton import tiles
from zoo.ops.triton.tiles import norm_of, of_channels, of_rows, strip


@triton.jit
def _greater(one, other):
    """The greater of two, and NaN if one of them is."""
    return tl.maximum(one, other, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _turned(value, sign):
    """Values [ROWS, BLOCK] times the signs of their channels, where there are any."""
    return value if sign is None else value * sign[None, :]


@triton.jit
def _greatest_of_row(x, place, left, centre, right, sign, seen):
    """The greatest of three pixels of a row of the image, signs turned: [ROWS, BLOCK]."""
    before = _turned(of_rows(x, place, left, seen), sign)
    value = _turned(of_rows(x, place, centre, seen), sign)
    return _greater(_greater(before, value), _turned(of_rows(x, place, right, seen), sign))


@kernel(do_not_specialize=["height", "width", "share"])
def _pool(
    x, mean, variance, weight, bias, out, height, width, channels, share, eps: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    lines, columns = (height + 1) // 2, (width + 1) // 2
    image, channel, column, begin, end = strip(lines, columns, channels, share, ROWS, BLOCK)
    live = channel < channels
    seen = (column < columns)[:, None] & live[None, :]
    offset = of_channels(bias, channel, live)
    sign = None
    if mean is not None:
        middle, scale = norm_of(mean, variance, channel, live, eps)
        scale *= of_channels(weight, channel, live)
        sign = tl.where(scale < 0.0, -1.0, 1.0)
    left = tl.maximum(2 * column - 1, 0)[:, None] * channels + channel[None, :]
    centre = (2 * column)[:, None] * channels + channel[None, :]
    right = tl.minimum(2 * column + 1, width - 1)[:, None] * channels + channel[None, :]
    inner = column[:, None] * channels + channel[None, :]

    top = image * height
    place = (top + tl.maximum(2 * begin - 1, 0)) * width * channels
    above = _greatest_of_row(x, place, left, centre, right, sign, seen)
    for line in range(begin, end):
        place = (top + 2 * line) * width * channels
        value = _greatest_of_row(x, place, left, centre, right, sign, seen)
        place = (top + tl.minimum(2 * line + 1, height - 1)) * width * channels
        below = _greatest_of_row(x, place, left, centre, right, sign, seen)
        value = _greater(_greater(above, value), below)
        above = below
        if mean is not None:
            value = (_turned(value, sign) - middle[None, :]) * scale[None, :]
        value += offset[None, :]
        # Of a NaN no comparison is true: it passes, as in torch.
        value = tl.where(value <= 0.0, 0.0, value)
        place = (image * lines + line) * columns * channels
        tl.store(out + place + inner, value.to(out.dtype.element_ty), mask=seen)


@triton.jit
def _best(value, index, other, other_index):
    """The greater of two and its index: the first of equals, and NaN if one of them is. As in torch."""
    taken = (other > value) | (other != other)
    return tl.where(taken, other, value), tl.where(taken, other_index, index)


@triton.jit
def _best_of_row(x, place, column, channel, width, channels, live):
    """The greatest of three pixels of a row and which of them it is: [ROWS, BLOCK] each."""
    inner = (2 * column)[:, None] * channels + channel[None, :]
    seen = (2 * column < width)[:, None] & live[None, :]
    left = seen & (column > 0)[:, None]
    right = seen & (2 * column + 1 < width)[:, None]
    value = tl.load(x + place + inner - channels, mask=left, other=float("-inf")).to(tl.float32)
    centre = tl.load(x + place + inner, mask=seen, other=float("-inf")).to(tl.float32)
    last = tl.load(x + place + inner + channels, mask=right, other=float("-inf")).to(tl.float32)
    # Where nothing is greater than nothing it is the first that there is: an edge has no left one.
    first = tl.broadcast_to(tl.where(column > 0, 0, 1)[:, None], value.shape)
    value, index = _best(value, first, centre, 1)
    return _best(value, index, last, 2)


@kernel(do_not_specialize=["height", "width", "share"])
def _max_pool(
    x, out, which, height, width, channels, share, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    lines, columns = (height + 1) // 2, (width + 1) // 2
    image, channel, column, begin, end = strip(lines, columns, channels, share, ROWS, BLOCK)
    live = channel < channels
    seen = (column < columns)[:, None] & live[None, :]
    inner = column[:, None] * channels + channel[None, :]
    top = image * height
    # Above the first line there is none: then its numbers are no one's greatest.
    place = (top + tl.maximum(2 * begin - 1, 0)) * width * channels
    above, above_index = _best_of_row(x, place, column, channel, width, channels, live & (begin > 0))
    above_index += tl.where(begin > 0, 0, 3)
    for line in range(begin, end):
        place = (top + 2 * line) * width * channels
        value, index = _best_of_row(x, place, column, channel, width, channels, live)
        value, index = _best(above, above_index, value, index + 3)
        row = 2 * line + 1
        place = (top + tl.minimum(row, height - 1)) * width * channels
        below, below_index = _best_of_row(x, place, column, channel, width, channels, live & (row < height))
        value, index = _best(value, index, below, below_index + 6)
        # The row below is the next line's row above.
        above, above_index = below, below_index
        place = (image * lines + line) * columns * channels
        tl.store(out + place + inner, value.to(out.dtype.element_ty), mask=seen)
        tl.store(which + place + inner, index.to(tl.uint8), mask=seen)


@triton.jit
def _of_window(grad, which, place, seen):
    """Gradient and index of windows [ROWS, BLOCK]; of one that is not there, an index that no pixel has."""
    return tl.load(grad + place, mask=seen, other=0.0).to(tl.float32), tl.load(which + place, mask=seen, other=255)


@triton.jit
def _given(window, index: tl.constexpr):
    """What a window gives to the pixel of this index."""
    change, chosen = window
    return tl.where(chosen == index, change, 0.0)


@kernel(do_not_specialize=["height", "width", "share"])
def _max_pool_backward(
    grad, which, grad_x, height, width, channels, share, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    lines, columns = (height + 1) // 2, (width + 1) // 2
    image, channel, column, begin, end = strip(lines, columns, channels, share, ROWS, BLOCK)
    live = (channel < channels)[None, :]
    here = (column < columns)[:, None] & live
    beside = (column + 1 < columns)[:, None] & live
    right = (2 * column + 1 < width)[:, None] & live
    inner = column[:, None] * channels + channel[None, :]
    outer = (2 * column)[:, None] * channels + channel[None, :]
    top = (image * lines + begin) * columns * channels
    first = _of_window(grad, which, top + inner, here)
    second = _of_window(grad, which, top + inner + channels, beside)
    for line in range(begin, end):
        top += columns * channels
        below = line + 1 < lines
        third = _of_window(grad, which, top + inner, here & below)
        fourth = _of_window(grad, which, top + inner + channels, beside & below)
        place = grad_x + (image * height + 2 * line) * width * channels + outer
        kind = grad_x.dtype.element_ty
        tl.store(place, _given(first, 4).to(kind), mask=here)
        tl.store(place + channels, (_given(first, 5) + _given(second, 3)).to(kind), mask=right)
        under = 2 * line + 1 < height
        place += width * channels
        tl.store(place, (_given(first, 7) + _given(third, 1)).to(kind), mask=here & under)
        corner = _given(first, 8) + _given(second, 6) + _given(third, 2) + _given(fourth, 0)
        tl.store(place + channels, corner.to(kind), mask=right & under)
        first, second = third, fourth


def norm_act_pool(
    x: Tensor, mean: Tensor | None, variance: Tensor | None, weight: Tensor | None, bias: Tensor, eps: float
) -> Tensor:
    """Pooled relu of the norm of x [N, C, H, W] (bias alone without a mean): [N, C, h, w] in channels_last."""
    tiles.check(x, (), (mean, variance, weight, bias), ("mean", "variance", "weight", "bias"))
    pixels, out, share, programs = _cut(x)
    _pool[(programs,)](pixels, mean, variance, weight, bias, out, *pixels.shape[1:], share, eps, **tiles.POOL.code())
    return out.permute(0, 3, 1, 2)


def bias_act_pool(x: Tensor, bias: Tensor) -> Tensor:
    """Pooled relu of x [N, C, H, W] plus bias [C]: [N, C, h, w] in channels_last."""
    return norm_act_pool(x, None, None, None, bias, 0.0)


def max_pool(x: Tensor) -> tuple[Tensor, Tensor]:
    """Pooled x [N, C, H, W], and which of nine it was, uint8: [N, C, h, w] in channels_last each."""
    pixels, out, share, programs = _cut(x)
    which = torch.empty_like(out, dtype=torch.uint8)
    _max_pool[(programs,)](pixels, out, which, *pixels.shape[1:], share, **tiles.POOL.code())
    return out.permute(0, 3, 1, 2), which.permute(0, 3, 1, 2)


def max_pool_backward(grad: Tensor, which: Tensor, height: int, width: int) -> Tensor:
    """Gradient of x: grad and which [N, C, h, w] -> [N, C, H, W] in channels_last."""
    grad, which = tiles.pixels_of(grad), tiles.pixels_of(which)
    images, lines, columns, channels = grad.shape
    grad_x = grad.new_empty(images, height, width, channels)
    share, programs = tiles.lines_to_pool(images, lines, columns, channels)
    _max_pool_backward[(programs,)](grad, which, grad_x, height, width, channels, share, **tiles.POOL.code())
    return grad_x.permute(0, 3, 1, 2)


def _cut(x: Tensor) -> tuple[Tensor, Tensor, int, int]:
    """Images [N, H, W, C], memory for what is pooled of them, and (lines of a program, programs)."""
    if x.dim() != 4:
        raise ValueError(f"x has shape {tuple(x.shape)}, expected images [N, C, H, W]")
    pixels = tiles.pixels_of(x)
    images, height, width, channels = pixels.shape
    out = pixels.new_empty(images, (height + 1) // 2, (width + 1) // 2, channels)
    return pixels, out, *tiles.lines_to_pool(*out.shape)
