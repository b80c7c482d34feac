# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs
"""Gradients of the group norm of channels_last images in three launches, each reading the pixels once.

    1. means and deviations of chunks, as in the forward, which keeps nothing of its own for the backward
    2. sums over a chunk's pixels, a channel each: of the gradient before the affine part, of it times the normalised
       pixel, and of the normalised pixel
    3. the gradient of each pixel

What lies between is on a few numbers a group, in torch's own operators. Sums go chunk by chunk in a fixed order, so
that gradients have the same bits at every run.

Shape legend: B images, P pixels, C channels, G groups, K chunks of pixels.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from zoo.ahead import Kernel
from zoo.operators import ceil_div
from zoo.unet.kernels import group_norm as forward

# Channels and pixels that a program holds at once.
BLOCK = 64
ROWS = 32


@triton.jit
def _read(grad, x, row, inside, live, channel, channels, moved, scale, weight, bias, silu):
    """Of pixels [ROWS, BLOCK]: the gradient before the affine part, and the normalised value."""
    seen = inside[:, None] & live[None, :]
    place = row[:, None] * channels + channel[None, :]
    value = (tl.load(x + place, mask=seen, other=0.0).to(tl.float32) + moved[None, :]) * scale[None, :]
    value = tl.where(seen, value, 0.0)
    change = tl.load(grad + place, mask=seen, other=0.0).to(tl.float32)
    if silu != 0:
        before = value * weight[None, :] + bias[None, :]
        gate = tl.sigmoid(before)
        change *= gate * (1 + before * (1 - gate))
    return change, value


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


@Kernel
@triton.jit(do_not_specialize=["shift_stride", "shifted", "pixels", "size", "groups", "rows", "chunks", "silu"])
def _sums(
    grad, x, shift, weight, bias, stats, out, shift_stride, shifted, pixels, channels, size, groups, rows, chunks, silu,
    BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    image = tl.program_id(2).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = channel < channels
    moved, scale, factor, offset = _of_channels(
        shift, weight, bias, stats, image, channel, live, shift_stride, shifted, size, groups
    )
    start = image * pixels * channels
    end = tl.minimum((chunk + 1) * rows, pixels)
    changes = tl.zeros([BLOCK], tl.float32)
    products = tl.zeros([BLOCK], tl.float32)
    values = tl.zeros([BLOCK], tl.float32)
    for begin in range(chunk * rows, end, ROWS):
        row = begin + tl.arange(0, ROWS)
        change, value = _read(
            grad + start, x + start, row, row < end, live, channel, channels, moved, scale, factor, offset, silu
        )
        changes += tl.sum(change, 0)
        products += tl.sum(change * value, 0)
        values += tl.sum(value, 0)
    place = out + (image * chunks + chunk) * channels + channel
    stride = tl.num_programs(2).to(tl.int64) * chunks * channels
    tl.store(place, changes, mask=live)
    tl.store(place + stride, products, mask=live)
    tl.store(place + 2 * stride, values, mask=live)


@Kernel
@triton.jit(do_not_specialize=["shift_stride", "shifted", "pixels", "size", "groups", "rows", "added", "silu"])
def _gradients(
    grad, x, shift, weight, bias, stats, means, more, out, shift_stride, shifted, pixels, channels, size, groups, rows,
    added, silu, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    image = tl.program_id(2).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = channel < channels
    moved, scale, factor, offset = _of_channels(
        shift, weight, bias, stats, image, channel, live, shift_stride, shifted, size, groups
    )
    group = image * groups + channel // size
    plain = tl.load(means + group * 2, mask=live, other=0.0)
    along = tl.load(means + group * 2 + 1, mask=live, other=0.0)
    start = image * pixels * channels
    end = tl.minimum((chunk + 1) * rows, pixels)
    for begin in range(chunk * rows, end, ROWS):
        row = begin + tl.arange(0, ROWS)
        change, value = _read(
            grad + start, x + start, row, row < end, live, channel, channels, moved, scale, factor, offset, silu
        )
        result = scale[None, :] * (change * factor[None, :] - plain[None, :] - value * along[None, :])
        seen = (row < end)[:, None] & live[None, :]
        place = start + row[:, None] * channels + channel[None, :]
        if added != 0:
            result += tl.load(more + place, mask=seen, other=0.0).to(tl.float32)
        tl.store(out + place, result.to(out.dtype.element_ty), mask=seen)


def group_norm_backward(
    grad: Tensor,
    x: Tensor,
    shift: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    more: Tensor | None,
    groups: int,
    eps: float,
    silu: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x [B, C, H, W] (plus ``more``), of shift [B, C] (empty without one), weight [C] and bias [C]."""
    x, grad = (tensor.contiguous(memory_format=torch.channels_last) for tensor in (x, grad))
    out = torch.empty_like(x)
    if not x.numel():
        return out, x.new_zeros(0 if shift is None else x.shape[:2]), torch.zeros_like(weight), torch.zeros_like(bias)
    more = None if more is None else more.to(x.dtype).contiguous(memory_format=torch.channels_last)
    images, channels, height, side = x.shape
    pixels, size = height * side, channels // groups
    stats = forward.statistics(x, shift, weight, groups, eps)
    blocks = ceil_div(channels, BLOCK)
    wanted = max(1, forward.ENOUGH // (images * blocks))
    rows = ceil_div(ceil_div(pixels, wanted), ROWS) * ROWS
    chunks = ceil_div(pixels, rows)
    sums = torch.empty(3, images, chunks, channels, dtype=torch.float32, device=x.device)
    if shift is not None and shift.stride(1) != 1:
        shift = shift.contiguous()
    given = grad, x, weight if shift is None else shift, weight, bias, stats
    sizes = 0 if shift is None else shift.stride(0), 0 if shift is None else channels, pixels, channels, size, groups
    grid, code = (chunks, blocks, images), {"BLOCK": BLOCK, "ROWS": ROWS, "num_warps": 4}
    _sums[grid](*given, sums, *sizes, rows, chunks, int(silu), **code)
    changes, products, values = sums.sum(2)
    factor, count = weight.float(), pixels * size
    means = torch.stack([(part * factor).view(images, groups, size).sum(2) for part in (changes, products)], 2) / count
    _gradients[grid](
        *given, means, x if more is None else more, out, *sizes, rows, int(more is not None), int(silu), **code
    )
    grad_shift = x.new_empty(0)
    if shift is not None:
        plain, along, scale = (
            part.repeat_interleave(size, 1) for part in (means[..., 0], means[..., 1], stats[..., 1])
        )
        grad_shift = (scale * (changes * factor - pixels * plain - values * along)).to(shift.dtype)
    return out, grad_shift, products.sum(0).to(weight.dtype), changes.sum(0).to(bias.dtype)
