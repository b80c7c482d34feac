# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs
"""Group norm of small channels_last images in one launch: a program has a group of an image to itself.

    1. it reads the pixels, and puts what each thread finds together to a mean and a sum of squared deviations
    2. it reads the pixels again but for those that it still holds, which of the smallest images are all, and
       normalises them

A group is a few channels of a line, and room for numbers that are not there costs as much as numbers. So threads lie
along the group's own, pixel after pixel. A step is as many whole pixels as there are threads for, and a tile is some
steps: a thread has the same channels in all of them, and what belongs to a channel is read once.

Shape legend: V vectors of a step, N vectors of a tile.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from zoo.ops.common import ceil_div
from zoo.ops.triton.kernel import kernel

# Pixels of an image at most, measured on an H200: of more, lines of a few channels each, the whole GPU reads its share
# in two launches. Of fewer, where a group begins in one image and ends in another: that program reads both.
PIXELS, PIXELS_OF_BOTH = 1024, 256
WARPS = 16
# Numbers that a thread reads as one vector, the first that whole groups are made of; and steps of a tile, as many as
# registers hold twice: what a program has at hand, and what it waits for.
STEPS = {4: 2, 2: 4, 1: 8}


@triton.jit
def activated(normed, silu):
    """SiLU, where asked for."""
    if silu != 0:
        # One over it by a root, which is one instruction: a division takes eight.
        below = 1.0 + tl.exp2(normed * -1.4426950408889634)
        normed = normed * tl.rsqrt(below * below)
    return normed


@triton.jit
def _load(x, skip, ahead, row, channel, unit, pixels, channels, first, left, both):
    """Vectors [N, UNIT] of rows ``ahead`` of [N] and of channels [N], as they are: from ``first`` on of ``skip``.

    Those of a group are mostly of one of the two: ``both`` says that they are of both.
    """
    begin = tl.where(left < first, 0, first)
    end = tl.where(left < first, first, channels)
    source = tl.where(left < first, x, skip) + ahead * (end - begin)
    # What does not change from tile to tile is kept by the compiler: one comparison and one sum are left.
    own = tl.where(channel < end, row, pixels) < pixels - ahead
    place = row * (end - begin) + channel - begin
    value = tl.load(source + (place[:, None] + unit), mask=own[:, None], other=0.0)
    if both:
        other = tl.where(channel < first, pixels, row) < pixels - ahead
        place = row * (channels - first) + channel - first
        source = skip + ahead * (channels - first)
        more = tl.load(source + (place[:, None] + unit), mask=other[:, None], other=0.0)
        value = tl.where(other[:, None], more, value)
    return value


@kernel(do_not_specialize=["pixels", "units", "rows", "tiles", "joins", "silu"])
def _norm(
    x, skip, shift, weight, bias, out, joined, stats, shift_stride, shifted, pixels, channels, first, units, rows,
    tiles, joins, eps: tl.constexpr, silu, UNIT: tl.constexpr, VECTORS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    image = tl.program_id(1).to(tl.int64)
    x += image * pixels * first
    skip += image * pixels * (channels - first)
    out += image * pixels * channels
    joined += image * pixels * channels
    left = tl.program_id(0) * units * UNIT
    both = (left < first) & (left + units * UNIT > first)
    unit = tl.arange(0, UNIT)[None, :]
    # Of a step. Threads behind its last whole pixel have none.
    vector = tl.arange(0, VECTORS)
    row = vector // units
    channel = (left + (vector - row * units) * UNIT)[:, None] + unit
    count = ((pixels - tl.where(row < rows, row, pixels) + rows - 1) // rows).to(tl.float32)[:, None]
    # Of a tile, whose steps lie one behind the other: a thread has the same channels in each.
    lane = tl.arange(0, STEPS * VECTORS)
    vector = lane % VECTORS
    row = vector // units
    start = left + (vector - row * units) * UNIT
    row = tl.where(row < rows, row + lane // VECTORS * rows, pixels)
    kept = _load(x, skip, 0, row, start, unit, pixels, channels, first, left, both)
    origin = tl.load(tl.where(left < first, x + left, skip + left - first)).to(tl.float32)
    origin += tl.load(shift + image * shift_stride + left, mask=left < shifted, other=0.0).to(tl.float32)
    # A shift of all pixels moves the mean and nothing else.
    moved = tl.load(shift + image * shift_stride + channel, mask=channel < shifted, other=0.0).to(tl.float32)
    factor = tl.load(weight + channel).to(tl.float32)
    offset = tl.load(bias + channel).to(tl.float32)
    # Each thread sums what its pixels are apart from the first of them. That is one of their number, so that their
    # squares sum to no more than so many deviations, and little is lost in taking off their mean.
    step = tl.arange(0, STEPS)[:, None, None]
    pivot = tl.sum(tl.where(step == 0, tl.reshape(kept, [STEPS, VECTORS, UNIT]).to(tl.float32), 0.0), 0)
    sums = tl.zeros([VECTORS, UNIT], tl.float32)
    squares = tl.zeros([VECTORS, UNIT], tl.float32)
    following = kept
    for tile in range(tiles):
        value = tl.reshape(following, [STEPS, VECTORS, UNIT]).to(tl.float32)
        ahead = (tile + 1) * STEPS * rows
        following = _load(x, skip, ahead, row, start, unit, pixels, channels, first, left, both)
        apart = tl.where(tile * STEPS + step < count[None, :, :], value - pivot[None, :, :], 0.0)
        sums += tl.sum(apart, 0)
        squares += tl.sum(apart * apart, 0)
    middle = sums / tl.maximum(count, 1.0)
    squares -= sums * middle
    middle += pivot + moved
    numbers = pixels * 1.0 * (units * UNIT)
    # Apart from one of them, so that of equal ones nothing is left, whatever is rounded.
    mean = origin + tl.sum((middle - origin) * count) / numbers
    apart = middle - mean
    total = tl.sum(squares + count * apart * apart)
    scale = tl.rsqrt(total / numbers + eps)
    left_for = stats + (image * tl.num_programs(0) + tl.program_id(0)) * 2
    tl.store(left_for, mean)
    tl.store(left_for + 1, scale)
    moved -= mean
    factor *= scale
    following = kept
    place = (row * channels + start)[:, None] + unit
    for tile in range(tiles):
        value = following
        seen = (row < pixels - tile * STEPS * rows)[:, None]
        ahead = (tile + 1) * STEPS * rows
        following = _load(x, skip, ahead, row, start, unit, pixels, channels, first, left, both)
        if joins != 0:
            tl.store(joined + place, value, mask=seen)
        normed = tl.reshape(value, [STEPS, VECTORS, UNIT]).to(tl.float32) + moved[None, :, :]
        normed = activated(normed * factor[None, :, :] + offset[None, :, :], silu).to(out.dtype.element_ty)
        tl.store(out + place, tl.reshape(normed, [STEPS * VECTORS, UNIT]), mask=seen)
        out += STEPS * rows * channels
        joined += STEPS * rows * channels


def as_given(shift: Tensor | None, weight: Tensor) -> tuple[Tensor, int, int]:
    """Shift [B, C] or None as kernels take it: where it lies, its stride, and how many channels there are of it."""
    if shift is None:
        return weight, 0, 0
    shift = shift if shift.stride(1) == 1 else shift.contiguous()
    return shift, shift.stride(0), shift.shape[1]


def fits(pixels: int, size: int, first: int) -> bool:
    """Whether groups of ``size`` channels are for one launch, the first ``first`` of all being one image's."""
    return pixels <= (PIXELS_OF_BOTH if first % size else PIXELS) and size <= 32 * WARPS


def launch(
    x: Tensor, skip: Tensor, shift: Tensor | None, weight: Tensor, bias: Tensor, groups: int, eps: float, silu: bool,
    out: Tensor, joined: Tensor, stats: Tensor,
) -> None:  # fmt: skip
    """Normalise images that fit, which are not empty. They are joined where ``x`` has not all channels."""
    images, first, height, side = x.shape
    pixels, channels = height * side, weight.shape[0]
    size = channels // groups
    unit = 4 if size % 4 == first % 4 == 0 else 2 if size % 2 == first % 2 == 0 else 1
    units, vectors, steps = size // unit, 32 * WARPS, STEPS[unit]
    tiles = ceil_div(pixels, vectors // units * steps)
    moved, stride, shifted = as_given(shift, weight)
    _norm[(groups, images)](
        x, skip, moved, weight, bias, out, joined, stats, stride, shifted, pixels, channels, first, units,
        ceil_div(pixels, tiles * steps), tiles, int(first < channels), eps, int(silu),
        UNIT=unit, VECTORS=vectors, STEPS=steps, num_warps=WARPS,
    )  # fmt: skip
