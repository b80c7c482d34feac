# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs
"""Norm or bias, relu and pooling of the stem in one pass over images in channels_last.

A program has some columns of the output and goes down its lines. Each line needs three rows of the input, and hands the
last one, as the greatest of three pixels each, on to the next.

A norm keeps the order of values, or turns it round where its scale is negative: signs are turned, the greatest of nine
is found, and only that is normalised. No padding is needed either: a window's centre is always a pixel of the image,
and what is clamped to the image falls on a pixel that the window has anyway.

Shape legend: N images, C channels, H height, W width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from zoo.ops.triton.kernel import kernel
from zoo.resnet.kernels import tiles
from zoo.resnet.kernels.tiles import norm_of, of_channels, of_rows, strip


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
    x, mean, variance, weight, bias, out, height, width, channels, share, eps, ROWS: tl.constexpr, BLOCK: tl.constexpr
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


def norm_act_pool(x: Tensor, mean: Tensor, variance: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Pooled relu of the norm of x [N, C, H, W]: [N, C, ⌈H / 2⌉, ⌈W / 2⌉] in channels_last."""
    return _launch(x, {"mean": mean, "variance": variance, "weight": weight, "bias": bias}, eps)


def bias_act_pool(x: Tensor, bias: Tensor) -> Tensor:
    """Pooled relu of x [N, C, H, W] plus bias [C]: [N, C, ⌈H / 2⌉, ⌈W / 2⌉] in channels_last."""
    return _launch(x, {"mean": None, "variance": None, "weight": None, "bias": bias}, 0.0)


def _launch(x: Tensor, norm: dict[str, Tensor | None], eps: float) -> Tensor:
    pixels = x.permute(0, 2, 3, 1).contiguous()
    tiles.check(pixels.flatten(0, 2), {}, norm)
    images, height, width, channels = pixels.shape
    lines, columns = (height + 1) // 2, (width + 1) // 2
    out = torch.empty(images, lines, columns, channels, dtype=x.dtype, device=x.device)
    share, programs = tiles.lines_to_pool(images, lines, columns, channels)
    _pool[(programs,)](
        pixels, *norm.values(), out, height, width, channels, share, eps, **tiles.POOL.code()
    )  # fmt: skip
    return out.permute(0, 3, 1, 2)
