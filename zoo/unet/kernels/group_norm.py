# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs
"""Group norm of channels_last images in two launches, with what stands before and behind it.

    1. a program reads a chunk of pixels of some groups, and leaves each group's mean and sum of squared deviations
    2. a program puts the chunks' together in their order, reads the same pixels again, and normalises them

Means and deviations are merged, never taken as a difference of large sums: a group whose mean is far from zero keeps
its variance. Pixels are read in whole lines of channels: a program takes as many groups as fit its block, whatever
power of two their width is not. Sizes are no part of the code, so that one compilation serves all levels of a model.

Shape legend: B images, P pixels, C channels, G groups, K chunks of pixels.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Channels that a program holds, where groups are not wider.
BLOCK = 128
# Pixels and channels that a program holds at once.
TILE = 4096
# Chunks that are put together at a time.
STEP = 32
# Programs that fill a large GPU twice.
ENOUGH = 528


@triton.jit
def _load(x, skip, row, inside, channel, live, first, channels):
    """Pixels [ROWS] of channels [BLOCK]: those from ``first`` on come from ``skip``."""
    own = inside[:, None] & (live & (channel < first))[None, :]
    other = inside[:, None] & (live & (channel >= first))[None, :]
    place = row[:, None] * first + channel[None, :]
    value = tl.load(x + place, mask=own, other=0.0).to(tl.float32)
    place = row[:, None] * (channels - first) + (channel - first)[None, :]
    return value + tl.load(skip + place, mask=other, other=0.0).to(tl.float32)


@triton.jit(
    do_not_specialize=["shift_stride", "shifted", "pixels", "size", "units", "groups", "rows", "chunks"],
)
def _partial(
    x, skip, shift, part, shift_stride, shifted, pixels, channels, first, size, units, groups, rows, chunks,
    UNIT: tl.constexpr, BLOCK: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    image = tl.program_id(2).to(tl.int64)
    width = units * UNIT
    column = tl.arange(0, BLOCK)
    channel = tl.program_id(1) * width + column
    live = (column < width) & (channel < channels)
    x += image * pixels * first
    skip += image * pixels * (channels - first)
    begin = chunk * rows
    end = tl.minimum(begin + rows, pixels)
    mean = tl.zeros([BLOCK], tl.float32)
    squares = tl.zeros([BLOCK], tl.float32)
    for start in range(begin, end, ROWS):
        row = start + tl.arange(0, ROWS)
        inside = row < end
        value = _load(x, skip, row, inside, channel, live, first, channels)
        count = tl.minimum(end - start, ROWS).to(tl.float32)
        before = (start - begin).to(tl.float32)
        middle = tl.sum(value, 0) / count
        apart = tl.where(inside[:, None], value - middle[None, :], 0.0)
        delta = middle - mean
        mean += delta * (count / (before + count))
        squares += tl.sum(apart * apart, 0) + delta * delta * (before * count / (before + count))
    # A shift of all pixels moves the mean and nothing else.
    mean += tl.load(shift + image * shift_stride + channel, mask=live & (channel < shifted), other=0.0).to(tl.float32)
    member = tl.arange(0, GROUPS)
    belongs = (column // size)[None, :] == member[:, None]
    belongs = belongs & live[None, :]
    count = (end - begin).to(tl.float32)
    middle = tl.sum(tl.where(belongs, mean[None, :], 0.0), 1) / size
    apart = tl.where(belongs, mean[None, :] - middle[:, None], 0.0)
    total = tl.sum(tl.where(belongs, squares[None, :], 0.0), 1) + count * tl.sum(apart * apart, 1)
    group = tl.program_id(1) * (width // size) + member
    real = (member * size < width) & (group < groups)
    place = part + (image * groups + group) * chunks + chunk
    tl.store(place, middle, mask=real)
    tl.store(place + tl.num_programs(2).to(tl.int64) * groups * chunks, total, mask=real)


@triton.jit(
    do_not_specialize=[
        "shift_stride",
        "shifted",
        "pixels",
        "size",
        "units",
        "groups",
        "rows",
        "chunks",
        "silu",
    ],
)
def _apply(
    x, skip, shift, weight, bias, part, out, joined, shift_stride, shifted, pixels, channels, first, size, units,
    groups, rows, chunks, kept, eps, silu,
    UNIT: tl.constexpr, BLOCK: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    image = tl.program_id(2).to(tl.int64)
    width = units * UNIT
    column = tl.arange(0, BLOCK)
    channel = tl.program_id(1) * width + column
    live = (column < width) & (channel < channels)
    member = tl.arange(0, GROUPS)
    group = tl.program_id(1) * (width // size) + member
    real = (member * size < width) & (group < groups)
    means = part + (image * groups + group) * chunks
    squares = means + tl.num_programs(2).to(tl.int64) * groups * chunks
    total = tl.zeros([GROUPS], tl.float32)
    for start in range(0, chunks, STEP):
        index = start + tl.arange(0, STEP)
        seen = real[:, None] & (index < chunks)[None, :]
        count = tl.maximum(tl.minimum(rows, pixels - index * rows), 0).to(tl.float32)
        total += tl.sum(tl.load(means[:, None] + index[None, :], mask=seen, other=0.0) * count[None, :], 1)
    mean = total / pixels
    total = tl.zeros([GROUPS], tl.float32)
    for start in range(0, chunks, STEP):
        index = start + tl.arange(0, STEP)
        seen = real[:, None] & (index < chunks)[None, :]
        count = tl.maximum(tl.minimum(rows, pixels - index * rows), 0).to(tl.float32) * size
        apart = tl.load(means[:, None] + index[None, :], mask=seen, other=0.0) - mean[:, None]
        inner = tl.load(squares[:, None] + index[None, :], mask=seen, other=0.0)
        total += tl.sum(tl.where(seen, inner + apart * apart * count[None, :], 0.0), 1)
    scale = tl.rsqrt(total / (pixels.to(tl.float32) * size) + eps)
    belongs = (column // size)[None, :] == member[:, None]
    mean = tl.sum(tl.where(belongs, mean[:, None], 0.0), 0)
    scale = tl.sum(tl.where(belongs, scale[:, None], 0.0), 0)
    scale *= tl.load(weight + channel, mask=live, other=0.0).to(tl.float32)
    offset = tl.load(bias + channel, mask=live, other=0.0).to(tl.float32)
    moved = tl.load(shift + image * shift_stride + channel, mask=live & (channel < shifted), other=0.0).to(tl.float32)
    moved -= mean
    x += image * pixels * first
    skip += image * pixels * (channels - first)
    out += image * pixels * channels
    joined += image * pixels * channels
    begin = chunk * rows
    end = tl.minimum(begin + rows, pixels)
    for start in range(begin, end, ROWS):
        row = start + tl.arange(0, ROWS)
        inside = row < end
        value = _load(x, skip, row, inside, channel, live, first, channels)
        seen = inside[:, None] & live[None, :]
        place = row[:, None] * channels + channel[None, :]
        tl.store(joined + place, value.to(joined.dtype.element_ty), mask=seen & (channel < kept)[None, :])
        value = (value + moved[None, :]) * scale[None, :] + offset[None, :]
        if silu != 0:
            value = value * tl.sigmoid(value)
        tl.store(out + place, value.to(out.dtype.element_ty), mask=seen)


def _groups_of_a_block(size: int, groups: int) -> tuple[int, int, int]:
    """(groups, unit of their width, channels) of a program: as many whole groups as fit, in whole vectors if any."""
    block = max(BLOCK, triton.next_power_of_2(size))
    most = min(block // size, groups)
    for unit in (8, 4, 2, 1):
        fitting = [count for count in range(most, 0, -1) if count * size % unit == 0]
        # Lines that begin on a vector are worth some lanes that have nothing to do.
        if fitting and 2 * fitting[0] > most:
            return fitting[0], unit, block
    raise AssertionError("a unit of 1 fits any width")


def group_norm(
    x: Tensor, shift: Tensor | None, weight: Tensor, bias: Tensor, groups: int, eps: float, silu: bool
) -> Tensor:
    """Group norm of x [B, C, H, W] plus shift [B, C], and SiLU where asked for."""
    x = x.contiguous(memory_format=torch.channels_last)
    out = torch.empty_like(x)
    _launch(x, x, shift, weight, bias, groups, eps, silu, out, out)
    return out


def cat_group_norm(
    x: Tensor, skip: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float, silu: bool
) -> tuple[Tensor, Tensor]:
    """Group norm of x [B, C, H, W] and skip [B, S, H, W] side by side, and both side by side."""
    x = x.contiguous(memory_format=torch.channels_last)
    skip = skip.to(x.dtype).contiguous(memory_format=torch.channels_last)
    shape = x.shape[0], weight.shape[0], *x.shape[2:]
    out = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    joined = torch.empty_like(out)
    _launch(x, skip, None, weight, bias, groups, eps, silu, out, joined)
    return out, joined


def statistics(x: Tensor, shift: Tensor | None, weight: Tensor, groups: int, eps: float) -> Tensor:
    """Mean, and one over the deviation, of each group of x [B, C, H, W] plus shift [B, C]: [B, G, 2] float32."""
    cut = _Cut(x, shift, weight, groups)
    cut.partial(x, x, weight)
    rows = torch.arange(cut.chunks, device=x.device) * cut.rows
    count = (cut.pixels - rows).clamp(max=cut.rows).float()
    mean = (cut.part[0] * count).sum(-1) / cut.pixels
    apart = (cut.part[0] - mean[..., None]).square() * count * cut.size
    variance = (cut.part[1] + apart).sum(-1) / (cut.pixels * cut.size)
    return torch.stack([mean, (variance + eps).rsqrt()], dim=-1)


class _Cut:
    """How the pixels of one call are cut into programs, and where the parts of their statistics lie."""

    def __init__(self, x: Tensor, shift: Tensor | None, weight: Tensor, groups: int) -> None:
        images, first, height, side = x.shape
        self.pixels, channels = height * side, weight.shape[0]
        self.size = channels // groups
        count, unit, block = _groups_of_a_block(self.size, groups)
        blocks = triton.cdiv(groups, count)
        rows_at_once = max(1, TILE // block)
        wanted = max(1, ENOUGH // (images * blocks))
        self.rows = triton.cdiv(triton.cdiv(self.pixels, wanted), rows_at_once) * rows_at_once
        self.chunks = triton.cdiv(self.pixels, self.rows)
        self.part = torch.empty(2, images, groups, self.chunks, dtype=torch.float32, device=x.device)
        self.shift = shift if shift is None or shift.stride(1) == 1 else shift.contiguous()
        self.sizes = (
            0 if self.shift is None else self.shift.stride(0), 0 if shift is None else channels, self.pixels, channels,
            first, self.size, count * self.size // unit, groups, self.rows, self.chunks,
        )  # fmt: skip
        self.code = {
            "UNIT": unit,
            "BLOCK": block,
            "GROUPS": max(16, triton.next_power_of_2(count)),
            "ROWS": rows_at_once,
            "num_warps": 4,
        }
        self.grid = (self.chunks, blocks, images)

    def partial(self, x: Tensor, skip: Tensor, weight: Tensor) -> None:
        """The first launch."""
        moved = weight if self.shift is None else self.shift
        _partial[self.grid](x, skip, moved, self.part, *self.sizes, **self.code)


def _launch(
    x: Tensor, skip: Tensor, shift: Tensor | None, weight: Tensor, bias: Tensor, groups: int, eps: float, silu: bool,
    out: Tensor, joined: Tensor,
) -> None:  # fmt: skip
    if not x.numel():
        return
    cut = _Cut(x, shift, weight, groups)
    cut.partial(x, skip, weight)
    moved = weight if cut.shift is None else cut.shift
    kept = weight.shape[0] if x.shape[1] < weight.shape[0] else 0
    _apply[cut.grid](
        x, skip, moved, weight, bias, cut.part, out, joined, *cut.sizes, kept, eps, int(silu), STEP=STEP, **cut.code
    )
