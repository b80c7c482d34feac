# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs
"""Gradients of the group norm of channels_last images, in three launches of which two read the pixels.

    1. sums over a chunk's pixels, a channel each: of the gradient before the affine part, of it times the normalised
       pixel, and of the normalised pixel
    2. the chunks' put together in their order: what a group's pixels have in common, and the gradients of shift, weight
       and bias
    3. the gradient of each pixel

The forward leaves means and deviations. Sums go chunk by chunk in a fixed order, so that gradients have the same bits
at every run. Where two images were normed side by side each is given a gradient of its own: of a common one it would be
copied out.

Shape legend: B images, P pixels, C channels, G groups, K chunks of pixels.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from zoo.engine.kernel import kernel
from zoo.ops.common import ceil_div, next_power
from zoo.ops.triton.group_norm import as_given
from zoo.ops.triton.sums import total_of

# Channels and pixels that a program holds at once, 4 warps: a vector of 8 numbers a thread.
BLOCK, ROWS = 64, 16
# Programs that a large GPU holds at a time.
ENOUGH = 528
# Chunks that are put together at once, of at least so many channels: one compilation for all widths of the models. Of
# wider groups fewer, or registers would not hold them.
CHUNKS_AT_ONCE, LEAST_WIDTH = 32, 128


@triton.jit
def _of_channels(shift, weight, bias, stats, image, channel, live, shift_stride, shifted, size, groups):
    """What is to be added to a pixel, one over the deviation, weight and bias of channels [BLOCK]."""
    group = image * groups + channel // size
    moved = tl.load(shift + image * shift_stride + channel, mask=live & (channel < shifted), other=0.0).to(tl.float32)
    moved -= tl.load(stats + group * 2, mask=live, other=0.0)
    scale = tl.load(stats + group * 2 + 1, mask=live, other=0.0)
    factor = tl.load(weight + channel, mask=live, other=0.0).to(tl.float32)
    offset = tl.load(bias + channel, mask=live, other=0.0).to(tl.float32)
    return moved, scale, factor, offset


@triton.jit
def _before_affine(change, value, seen, moved, scale, factor, offset, silu):
    """Of what was read of pixels [ROWS, BLOCK]: the gradient before the affine part, and the normalised value."""
    value = tl.where(seen, (value.to(tl.float32) + moved[None, :]) * scale[None, :], 0.0)
    change = change.to(tl.float32)
    if silu != 0:
        before = value * factor[None, :] + offset[None, :]
        gate = tl.sigmoid(before)
        change *= gate * (1 + before * (1 - gate))
    return change, value


@kernel(do_not_specialize=["shift_stride", "shifted", "pixels", "size", "groups", "rows", "chunks", "silu"])
def _sums(
    grad, x, shift, weight, bias, stats, part, shift_stride, shifted, pixels, channels, size, groups, rows, chunks,
    silu, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    image = tl.program_id(2).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = channel < channels
    grad += image * pixels * channels
    x += image * pixels * channels
    begin = chunk * rows
    end = tl.minimum(begin + rows, pixels)
    row = begin + tl.arange(0, ROWS)
    seen = (row < end)[:, None] & live[None, :]
    place = row[:, None] * channels + channel[None, :]
    change = tl.load(grad + place, mask=seen, other=0.0)
    value = tl.load(x + place, mask=seen, other=0.0)
    moved, scale, factor, offset = _of_channels(
        shift, weight, bias, stats, image, channel, live, shift_stride, shifted, size, groups
    )
    # Threads sum what they read themselves, and put it together at the end.
    changes = tl.zeros([ROWS, BLOCK], tl.float32)
    products = tl.zeros([ROWS, BLOCK], tl.float32)
    values = tl.zeros([ROWS, BLOCK], tl.float32)
    for _ in range(begin, end, ROWS):
        # The next pixels are under way while these are computed with.
        row += ROWS
        following = (row < end)[:, None] & live[None, :]
        place = row[:, None] * channels + channel[None, :]
        change_after = tl.load(grad + place, mask=following, other=0.0)
        value_after = tl.load(x + place, mask=following, other=0.0)
        wide, normed = _before_affine(change, value, seen, moved, scale, factor, offset, silu)
        changes += wide
        products += wide * normed
        values += normed
        change, value, seen = change_after, value_after, following
    place = part + (image * chunks + chunk) * channels + channel
    stride = tl.num_programs(2).to(tl.int64) * chunks * channels
    tl.store(place, tl.sum(changes, 0), mask=live)
    tl.store(place + stride, tl.sum(products, 0), mask=live)
    tl.store(place + 2 * stride, tl.sum(values, 0), mask=live)


@kernel(do_not_specialize=["shifted", "pixels", "size", "chunks"])
def _finish(
    part, weight, stats, common, grad_shift, grad_weight, grad_bias, shifted, pixels, channels, size, chunks,
    CHUNKS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0)
    groups = tl.num_programs(0)
    image = tl.program_id(1).to(tl.int64)
    images = tl.num_programs(1) - 1
    column = tl.arange(0, WIDTH)
    channel = group * size + column
    live = column < size
    stride = images.to(tl.int64) * chunks * channels
    if image < images:
        part += image * chunks * channels
        changes = total_of(part, chunks, channels, channel, live, CHUNKS, WIDTH)
        products = total_of(part + stride, chunks, channels, channel, live, CHUNKS, WIDTH)
        values = total_of(part + 2 * stride, chunks, channels, channel, live, CHUNKS, WIDTH)
        factor = tl.load(weight + channel, mask=live, other=0.0).to(tl.float32)
        count = pixels * 1.0
        plain = tl.sum(changes * factor, 0) / (count * size)
        along = tl.sum(products * factor, 0) / (count * size)
        place = (image * groups + group) * 2
        tl.store(common + place, plain)
        tl.store(common + place + 1, along)
        # A shift moves all pixels of a channel: its gradient is the sum of theirs.
        scale = tl.load(stats + place + 1)
        moved = scale * (changes * factor - count * plain - values * along)
        place = grad_shift + image * channels + channel
        tl.store(place, moved.to(grad_shift.dtype.element_ty), mask=live & (channel < shifted))
    else:
        # Chunks of all images lie one behind the other.
        changes = total_of(part, images * chunks, channels, channel, live, CHUNKS, WIDTH)
        products = total_of(part + stride, images * chunks, channels, channel, live, CHUNKS, WIDTH)
        tl.store(grad_bias + channel, changes.to(grad_bias.dtype.element_ty), mask=live)
        tl.store(grad_weight + channel, products.to(grad_weight.dtype.element_ty), mask=live)


@kernel(do_not_specialize=["shift_stride", "shifted", "pixels", "size", "groups", "rows", "added", "silu"])
def _gradients(
    grad, x, shift, weight, bias, stats, common, more, out, other, shift_stride, shifted, pixels, channels, first, size,
    groups, rows, added, silu, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    image = tl.program_id(2).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = channel < channels
    grad += image * pixels * channels
    x += image * pixels * channels
    more += image * pixels * channels
    out += image * pixels * first
    other += image * pixels * (channels - first)
    moved, scale, factor, offset = _of_channels(
        shift, weight, bias, stats, image, channel, live, shift_stride, shifted, size, groups
    )
    group = image * groups + channel // size
    plain = tl.load(common + group * 2, mask=live, other=0.0)
    along = tl.load(common + group * 2 + 1, mask=live, other=0.0)
    end = tl.minimum((chunk + 1) * rows, pixels)
    for begin in range(chunk * rows, end, ROWS):
        row = begin + tl.arange(0, ROWS)
        seen = (row < end)[:, None] & live[None, :]
        place = row[:, None] * channels + channel[None, :]
        change = tl.load(grad + place, mask=seen, other=0.0)
        value = tl.load(x + place, mask=seen, other=0.0)
        # A mask and no branch, so that all loads are under way before one is waited for.
        further = tl.load(more + place, mask=seen & (channel < added)[None, :], other=0.0).to(tl.float32)
        change, value = _before_affine(change, value, seen, moved, scale, factor, offset, silu)
        result = scale[None, :] * (change * factor[None, :] - plain[None, :] - value * along[None, :]) + further
        result = result.to(out.dtype.element_ty)
        place = row[:, None] * first + channel[None, :]
        tl.store(out + place, result, mask=seen & (channel < first)[None, :])
        place = row[:, None] * (channels - first) + (channel - first)[None, :]
        tl.store(other + place, result, mask=seen & (channel >= first)[None, :])


def group_norm_backward(
    grad: Tensor, x: Tensor, shift: Tensor | None, weight: Tensor, bias: Tensor, stats: Tensor, more: Tensor | None,
    first: int, silu: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor]:  # fmt: skip
    """Gradients of x [B, C, H, W] (plus ``more``), first channels and rest; of shift, weight [C] and bias [C]."""
    x, grad = (tensor.contiguous(memory_format=torch.channels_last) for tensor in (x, grad))
    images, channels, height, side = x.shape
    out, other = (
        torch.empty((images, part, height, side), dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
        for part in (first, channels - first)
    )
    grad_shift = None if shift is None else shift.new_empty(shift.shape)
    # Where there is none a tensor that is not written stands for it. It is none of the others: the compiler takes what
    # one argument writes for the whole of a tensor.
    spare = x.new_empty(1)
    grad_weight, grad_bias = torch.empty_like(weight), torch.empty_like(bias)
    if not x.numel():
        return out, other, None if shift is None else torch.zeros_like(shift), grad_weight.zero_(), grad_bias.zero_()
    more = None if more is None else more.to(x.dtype).contiguous(memory_format=torch.channels_last)
    pixels, groups = height * side, stats.shape[1]
    size, blocks = channels // groups, ceil_div(channels, BLOCK)
    rows = ceil_div(ceil_div(pixels, max(1, ENOUGH // (images * blocks))), ROWS) * ROWS
    chunks = ceil_div(pixels, rows)
    moved, stride, shifted = as_given(shift, weight)
    part = torch.empty(3, images, chunks, channels, dtype=torch.float32, device=x.device)
    common = torch.empty_like(stats)
    given = grad, x, moved, weight, bias, stats
    grid, code = (chunks, blocks, images), {"BLOCK": BLOCK, "ROWS": ROWS, "num_warps": 4}
    _sums[grid](*given, part, stride, shifted, pixels, channels, size, groups, rows, chunks, int(silu), **code)
    written = spare if grad_shift is None else grad_shift
    width = max(LEAST_WIDTH, next_power(size))
    _finish[(groups, images + 1)](
        part, weight, stats, common, written, grad_weight, grad_bias, shifted, pixels, channels, size, chunks,
        CHUNKS=max(1, CHUNKS_AT_ONCE * LEAST_WIDTH // width), WIDTH=width, num_warps=8,
    )  # fmt: skip
    added = 0 if more is None else channels
    _gradients[grid](
        *given, common, x if more is None else more, out, spare if first == channels else other, stride, shifted,
        pixels, channels, first, size, groups, rows, added, int(silu), **code,
    )  # fmt: skip
    return out, other, grad_shift, grad_weight, grad_bias
