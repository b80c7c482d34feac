"""Group norm of channels_last images, after a shift or a concatenation and before SiLU, and its gradients.

Small images take one launch: a program reads a group of an image twice. A step covers as many whole pixels as threads
allow. A tile is several steps, and a thread has the same channels in each step. Larger images take two launches, so
that the whole GPU reads each image:

    partial      mean and sum of squared deviations of some groups, over a chunk of pixels
    apply        merges the chunks in order, reads the same pixels again and normalises them

Both variants save the mean and the rstd of each group for the backward, which takes three launches:

    sums         per channel over a chunk of pixels: the gradient before the affine part, its product with the
                 normalised pixel, and the normalised pixel
    finish       adds the chunks: the terms that a group's pixels share, and the gradients of shift, weight and bias
    gradients    the gradient of each pixel; concatenated images get one gradient each

Means and deviations are merged by Chan's formula, so that a group whose mean is far from zero keeps its variance. A
program loads the next pixels before it computes with the current ones. Sizes are runtime arguments, so that one
compilation serves all levels of a model.

Shape legend: B images, P pixels, C channels, G groups, K chunks of pixels, V vectors of a step, N vectors of a tile.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from zoo.engine.kernel import kernel
from zoo.ops.common import ceil_div, next_power
from zoo.ops.triton.tiles import total_of

# Channels of a program, unless groups are wider; maximum chunks of an image, all merged in one load; and concurrent
# programs of a large GPU.
BLOCK, CHUNKS, ENOUGH = 128, 64, 528
# Elements that a program reads at once: 4 vectors of 8 elements per thread.
TILE, WARPS, STEPS = 4096, 4, 4


@triton.jit
def _load(x, skip, row, end, channel, live, first, channels, begin, both):
    """Load pixels [ROWS] of channels [BLOCK]. Channels from ``first`` on come from ``skip``; few tiles mix ``both``."""
    inside = (row < end)[:, None]
    source = tl.where(begin < first, x, skip)
    width = tl.where(begin < first, first, channels - first)
    place = row[:, None] * width + (channel - tl.where(begin < first, 0, first))[None, :]
    own = live & (channel < tl.where(begin < first, first, channels))
    value = tl.load(source + place, mask=inside & own[None, :], other=0.0)
    if both:
        place = row[:, None] * (channels - first) + (channel - first)[None, :]
        value += tl.load(skip + place, mask=inside & (live & (channel >= first))[None, :], other=0.0)
    return value


@triton.jit
def _block_of(channels, first, units, UNIT: tl.constexpr, BLOCK: tl.constexpr):
    """A program's columns [BLOCK], their count, channels [BLOCK], first channel, mask; whether it reads ``both``."""
    width = units * UNIT
    column = tl.arange(0, BLOCK)
    left = tl.program_id(1) * width
    channel = left + column
    live = (column < width) & (channel < channels)
    both = (left < first) & (left + width > first) & (first < channels)
    return column, width, channel, left, live, both


@kernel(do_not_specialize=["pixels", "size", "units", "groups", "rows", "chunks"])
def _partial(
    x, skip, shift, part, shift_stride, shifted, pixels, channels, first, size, units, groups, rows, chunks,
    UNIT: tl.constexpr, BLOCK: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr, STEPS: tl.constexpr,
    CHUNKS: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    image = tl.program_id(2).to(tl.int64)
    column, width, channel, left, live, both = _block_of(channels, first, units, UNIT, BLOCK)
    x += image * pixels * first
    skip += image * pixels * (channels - first)
    begin = chunk * rows
    end = tl.minimum(begin + rows, pixels)
    row = begin + tl.arange(0, ROWS * STEPS)
    following = _load(x, skip, row, end, channel, live, first, channels, left, both)
    # A shift of all pixels moves only the mean. Each row loads it like pixels, so that both have the same layout.
    place = tl.broadcast_to(image * shift_stride + channel[None, :], [ROWS, BLOCK])
    moved = tl.load(shift + place, mask=(live & (channel < shifted))[None, :], other=0.0).to(tl.float32)
    # Each thread sums the differences of its pixels from its first pixel. Since the first pixel is one of the sample,
    # the sum of squares stays close to the sum of squared deviations, and little precision is lost to cancellation.
    step = tl.arange(0, STEPS)[:, None, None]
    lane = tl.arange(0, ROWS)
    value = tl.reshape(following, [STEPS, ROWS, BLOCK]).to(tl.float32)
    pivot = tl.sum(tl.where(step == 0, value, 0.0), 0)
    sums = tl.zeros([ROWS, BLOCK], tl.float32)
    squares = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(begin, end, ROWS * STEPS):
        value = tl.reshape(following, [STEPS, ROWS, BLOCK]).to(tl.float32)
        row += ROWS * STEPS
        following = _load(x, skip, row, end, channel, live, first, channels, left, both)
        deviation = tl.where(start + step * ROWS + lane[None, :, None] < end, value - pivot[None, :, :], 0.0)
        sums += tl.sum(deviation, 0)
        squares += tl.sum(deviation * deviation, 0)
    count = tl.maximum((end - begin - lane + ROWS - 1) // ROWS, 0).to(tl.float32)
    middle = sums * (1.0 / tl.maximum(count, 1.0))[:, None]
    squares -= sums * middle
    middle += pivot + moved
    # Mean of a channel, then of a group.
    mean = tl.sum(middle * count[:, None], 0) / (end - begin)
    deviation = middle - mean[None, :]
    squares = tl.sum(squares + count[:, None] * deviation * deviation, 0)
    member = tl.arange(0, GROUPS)[None, :]
    belongs = (column[:, None] >= member * size) & (column[:, None] < (member + 1) * size) & live[:, None]
    middle = tl.sum(tl.where(belongs, mean[:, None], 0.0), 0, keep_dims=True) / size
    deviation = mean[:, None] - middle
    within = squares[:, None] + (end - begin).to(tl.float32) * deviation * deviation
    total = tl.sum(tl.where(belongs, within, 0.0), 0, keep_dims=True)
    group = left // size + member
    real = (member * size < width) & (group < groups)
    place = part + (image * groups + group) * CHUNKS + chunk
    tl.store(place, middle, mask=real)
    tl.store(place + tl.num_programs(2).to(tl.int64) * groups * CHUNKS, total, mask=real)


@kernel(do_not_specialize=["pixels", "size", "units", "groups", "rows", "chunks", "silu"])
def _apply(
    x, skip, shift, weight, bias, part, out, joined, stats, shift_stride, shifted, pixels, channels, first, size, units,
    groups, rows, chunks, kept, eps: tl.constexpr, silu, UNIT: tl.constexpr, BLOCK: tl.constexpr, GROUPS: tl.constexpr,
    ROWS: tl.constexpr, STEPS: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    image = tl.program_id(2).to(tl.int64)
    column, width, channel, left, live, both = _block_of(channels, first, units, UNIT, BLOCK)
    x += image * pixels * first
    skip += image * pixels * (channels - first)
    out += image * pixels * channels
    joined += image * pixels * channels
    begin = chunk * rows
    end = tl.minimum(begin + rows, pixels)
    row = begin + tl.arange(0, ROWS * STEPS)
    following = _load(x, skip, row, end, channel, live, first, channels, left, both)
    member = tl.arange(0, GROUPS)
    group = left // size + member
    real = (member * size < width) & (group < groups)
    index = tl.arange(0, CHUNKS)
    # The mask is set in groups of four chunks, by the first chunk of each group.
    asked = real[:, None] & (index // 4 * 4 < chunks)[None, :]
    means = part + ((image * groups + group) * CHUNKS)[:, None] + index[None, :]
    there = (index < chunks)[None, :]
    middles = tl.where(there, tl.load(means, mask=asked, other=0.0), 0.0)
    means += tl.num_programs(2).to(tl.int64) * groups * CHUNKS
    squares = tl.where(there, tl.load(means, mask=asked, other=0.0), 0.0)
    moved = tl.load(shift + image * shift_stride + channel, mask=live & (channel < shifted), other=0.0).to(tl.float32)
    factor = tl.load(weight + channel, mask=live, other=0.0).to(tl.float32)
    offset = tl.load(bias + channel, mask=live, other=0.0).to(tl.float32)
    count = tl.maximum(tl.minimum(rows, pixels - index * rows), 0).to(tl.float32)[None, :]
    mean = tl.sum(middles * count, 1) / pixels
    deviation = middles - mean[:, None]
    total = tl.sum(squares + deviation * deviation * (count * size), 1)
    scale = tl.rsqrt(total / (pixels * 1.0 * size) + eps)
    leaves = real & (chunk == 0)
    left_for = stats + (image * groups + group) * 2
    tl.store(left_for, mean, mask=leaves)
    tl.store(left_for + 1, scale, mask=leaves)
    own = tl.minimum(column // size, GROUPS - 1)
    moved -= tl.gather(mean, own, 0)
    factor *= tl.gather(scale, own, 0)
    for _ in range(begin, end, ROWS * STEPS):
        value = following
        seen = (row < end)[:, None] & live[None, :]
        place = row[:, None] * channels + channel[None, :]
        row += ROWS * STEPS
        following = _load(x, skip, row, end, channel, live, first, channels, left, both)
        tl.store(joined + place, value, mask=seen & (channel < kept)[None, :])
        normed = (value.to(tl.float32) + moved[None, :]) * factor[None, :] + offset[None, :]
        tl.store(out + place, activated(normed, silu).to(out.dtype.element_ty), mask=seen)


def launch_plan(
    images: int, pixels: int, channels: int, groups: int
) -> tuple[int, int, tuple[int, int], dict[str, int]]:
    """Rows per chunk, vectors per program, chunks, blocks of channels, and the constants of both kernels."""
    size = channels // groups
    block = max(BLOCK, next_power(size))
    # As many whole groups as fit. Some lanes stay idle so that rows begin on a vector.
    most = min(block // size, groups)
    count, unit = most, 1
    for vector in (8, 4, 2):
        together = vector // math.gcd(vector, size)  # groups that are whole vectors
        if 2 * (most // together * together) > most:
            count, unit = most // together * together, vector
            break
    blocks = ceil_div(groups, count)
    rows_at_once = max(1, TILE // STEPS // block)
    wanted = max(1, min(CHUNKS, ENOUGH // (images * blocks)))
    rows = ceil_div(ceil_div(pixels, wanted), rows_at_once * STEPS) * rows_at_once * STEPS
    code = {"UNIT": unit, "BLOCK": block, "GROUPS": max(16, next_power(count)), "ROWS": rows_at_once}
    return rows, count * size // unit, (ceil_div(pixels, rows), blocks), {**code, "STEPS": STEPS, "CHUNKS": CHUNKS}


# Pixels of an image at most for one launch, measured on an H200.
PIXELS, SMALL_WARPS = 1024, 16
# Steps of a tile, by elements per vector: registers must hold two tiles, the current one and the one that is loading.
SMALL_STEPS = {4: 2, 2: 4, 1: 8}


@triton.jit
def activated(normed, silu):
    """SiLU if ``silu``, else the identity."""
    if silu != 0:
        # The reciprocal by rsqrt is one instruction; a division takes eight.
        below = 1.0 + tl.exp2(normed * -1.4426950408889634)
        normed = normed * tl.rsqrt(below * below)
    return normed


@kernel(do_not_specialize=["pixels", "units", "rows", "tiles", "joins", "silu"])
def _small(
    x, skip, shift, weight, bias, out, joined, stats, shift_stride, shifted, pixels, channels, first, units, rows,
    tiles, joins, eps: tl.constexpr, silu, UNIT: tl.constexpr, VECTORS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    image = tl.program_id(1).to(tl.int64)
    x += image * pixels * first
    skip += image * pixels * (channels - first)
    out += image * pixels * channels
    joined += image * pixels * channels
    left = tl.program_id(0) * units * UNIT
    # The group's channels come from x or from skip.
    source = tl.where(left < first, x, skip)
    begin, width = tl.where(left < first, 0, first), tl.where(left < first, first, channels - first)
    unit = tl.arange(0, UNIT)[None, :]
    # Vectors of a step. Threads after its last whole pixel are idle.
    vector = tl.arange(0, VECTORS)
    row = vector // units
    channel = (left + (vector - row * units) * UNIT)[:, None] + unit
    count = ((pixels - tl.where(row < rows, row, pixels) + rows - 1) // rows).to(tl.float32)[:, None]
    # Vectors of a tile. Its steps are consecutive, so a thread has the same channels in each step.
    lane = tl.arange(0, STEPS * VECTORS)
    vector = lane % VECTORS
    row = vector // units
    start = left + (vector - row * units) * UNIT
    row = tl.where(row < rows, row + lane // VECTORS * rows, pixels)
    inner = (row * width + start - begin)[:, None] + unit
    kept = tl.load(source + inner, mask=(row < pixels)[:, None], other=0.0)
    origin = tl.load(source + (left - begin)).to(tl.float32)
    origin += tl.load(shift + image * shift_stride + left, mask=left < shifted, other=0.0).to(tl.float32)
    # A shift of all pixels moves only the mean.
    moved = tl.load(shift + image * shift_stride + channel, mask=channel < shifted, other=0.0).to(tl.float32)
    factor = tl.load(weight + channel).to(tl.float32)
    offset = tl.load(bias + channel).to(tl.float32)
    # Each thread sums the differences of its pixels from its first pixel, as in ``_partial``.
    step = tl.arange(0, STEPS)[:, None, None]
    pivot = tl.sum(tl.where(step == 0, tl.reshape(kept, [STEPS, VECTORS, UNIT]).to(tl.float32), 0.0), 0)
    sums = tl.zeros([VECTORS, UNIT], tl.float32)
    squares = tl.zeros([VECTORS, UNIT], tl.float32)
    following = kept
    for tile in range(tiles):
        value = tl.reshape(following, [STEPS, VECTORS, UNIT]).to(tl.float32)
        ahead = (tile + 1) * STEPS * rows
        following = tl.load(source + ahead * width + inner, mask=(row < pixels - ahead)[:, None], other=0.0)
        deviation = tl.where(tile * STEPS + step < count[None, :, :], value - pivot[None, :, :], 0.0)
        sums += tl.sum(deviation, 0)
        squares += tl.sum(deviation * deviation, 0)
    middle = sums / tl.maximum(count, 1.0)
    squares -= sums * middle
    middle += pivot + moved
    numbers = pixels * 1.0 * (units * UNIT)
    # Relative to one of the values, so that equal values give exactly zero despite rounding.
    mean = origin + tl.sum((middle - origin) * count) / numbers
    deviation = middle - mean
    total = tl.sum(squares + count * deviation * deviation)
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
        following = tl.load(source + ahead * width + inner, mask=(row < pixels - ahead)[:, None], other=0.0)
        if joins != 0:
            tl.store(joined + place, value, mask=seen)
        normed = tl.reshape(value, [STEPS, VECTORS, UNIT]).to(tl.float32) + moved[None, :, :]
        normed = activated(normed * factor[None, :, :] + offset[None, :, :], silu).to(out.dtype.element_ty)
        tl.store(out + place, tl.reshape(normed, [STEPS * VECTORS, UNIT]), mask=seen)
        out += STEPS * rows * channels
        joined += STEPS * rows * channels


def group_norm(
    x: Tensor, skip: Tensor | None, shift: Tensor | None, weight: Tensor, bias: Tensor, groups: int, eps: float,
    silu: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Group norm of x [B, C, H, W] plus shift [B, C], or of x concatenated with skip [B, S, H, W]; SiLU if ``silu``.

    Also returns the normed input, without the shift, and statistics [B, G, 2]. The shift's rows may be strided.
    """
    joined, x = x, x.contiguous(memory_format=torch.channels_last)
    if skip is None:
        skip, out = x, torch.empty_like(x)
        # A separate dummy for the unused output: the compiler assumes that a written argument overwrites its tensor.
        written = x.new_empty(1)
    else:
        skip = skip.to(x.dtype).contiguous(memory_format=torch.channels_last)
        shape = x.shape[0], weight.shape[0], *x.shape[2:]
        out = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
        joined = written = torch.empty_like(out)
    images, first, height, side = x.shape
    pixels, channels = height * side, weight.shape[0]
    size = channels // groups
    stats = torch.empty(images, groups, 2, dtype=torch.float32, device=x.device)
    if not x.numel():
        return out, joined, stats
    moved, *strides = (weight, 0, 0) if shift is None else (shift, shift.stride(0), channels)
    if pixels <= PIXELS and size <= 32 * SMALL_WARPS and first % size == 0:
        unit = 4 if size % 4 == 0 else 2 if size % 2 == 0 else 1
        units, vectors, steps = size // unit, 32 * SMALL_WARPS, SMALL_STEPS[unit]
        tiles = ceil_div(pixels, vectors // units * steps)
        _small[(groups, images)](
            x, skip, moved, weight, bias, out, written, stats, *strides, pixels, channels, first, units,
            ceil_div(pixels, tiles * steps), tiles, int(first < channels), eps, int(silu),
            UNIT=unit, VECTORS=vectors, STEPS=steps, num_warps=SMALL_WARPS,
        )  # fmt: skip
        return out, joined, stats
    rows, units, (chunks, blocks), code = launch_plan(images, pixels, channels, groups)
    part = torch.empty(2, images, groups, CHUNKS, dtype=torch.float32, device=x.device)
    sizes = (*strides, pixels, channels, first, size, units, groups, rows, chunks)
    grid, kept = (chunks, blocks, images), channels if first < channels else 0
    _partial[grid](x, skip, moved, part, *sizes, **code, num_warps=WARPS)
    _apply[grid](
        x, skip, moved, weight, bias, part, out, written, stats, *sizes, kept, eps, int(silu), **code, num_warps=WARPS
    )
    return out, joined, stats


# Backward: tile of a program (channels, pixels), 8 elements per thread, and maximum programs.
GRADIENT_BLOCK, GRADIENT_ROWS, GRADIENT_PROGRAMS = 64, 16, 528
# Chunks that are merged at once, and the fewest channels of that tile; wider groups merge fewer chunks at once.
CHUNKS_AT_ONCE, LEAST_WIDTH = 32, 128


@triton.jit
def _of_channels(shift, weight, bias, stats, image, channel, live, shift_stride, shifted, size, groups):
    """Offset of a pixel (shift minus mean), rstd, weight and bias, for channels [BLOCK]."""
    group = image * groups + channel // size
    moved = tl.load(shift + image * shift_stride + channel, mask=live & (channel < shifted), other=0.0).to(tl.float32)
    moved -= tl.load(stats + group * 2, mask=live, other=0.0)
    scale = tl.load(stats + group * 2 + 1, mask=live, other=0.0)
    factor = tl.load(weight + channel, mask=live, other=0.0).to(tl.float32)
    offset = tl.load(bias + channel, mask=live, other=0.0).to(tl.float32)
    return moved, scale, factor, offset


@triton.jit
def _load_gradient(grad, x, row, end, channel, live, channels):
    """Load gradient and value of pixels [ROWS] of channels [BLOCK]; also their mask and offsets."""
    seen = (row < end)[:, None] & live[None, :]
    place = row[:, None] * channels + channel[None, :]
    return tl.load(grad + place, mask=seen, other=0.0), tl.load(x + place, mask=seen, other=0.0), seen, place


@triton.jit
def _before_affine(change, value, seen, moved, scale, factor, offset, silu):
    """From loaded pixels [ROWS, BLOCK]: the gradient before the affine part, and the normalised value."""
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
    held = _load_gradient(grad, x, row, end, channel, live, channels)
    moved, scale, factor, offset = _of_channels(
        shift, weight, bias, stats, image, channel, live, shift_stride, shifted, size, groups
    )
    changes = tl.zeros([ROWS, BLOCK], tl.float32)
    products = tl.zeros([ROWS, BLOCK], tl.float32)
    values = tl.zeros([ROWS, BLOCK], tl.float32)
    for _ in range(begin, end, ROWS):
        change, value, seen, _ = held
        # The next pixels load during the computation.
        row += ROWS
        held = _load_gradient(grad, x, row, end, channel, live, channels)
        wide, normed = _before_affine(change, value, seen, moved, scale, factor, offset, silu)
        changes += wide
        products += wide * normed
        values += normed
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
        # A shift is added to all pixels of a channel, so its gradient is the sum of their gradients.
        scale = tl.load(stats + place + 1)
        moved = scale * (changes * factor - count * plain - values * along)
        place = grad_shift + image * channels + channel
        tl.store(place, moved.to(grad_shift.dtype.element_ty), mask=live & (channel < shifted))
    else:
        # Chunks of all images are consecutive.
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
        change, value, seen, place = _load_gradient(grad, x, row, end, channel, live, channels)
        # A mask instead of a branch, so that all loads are issued before the first result is used.
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
    stride: int, first: int, silu: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor]:  # fmt: skip
    """Gradients of x's ``first`` channels and of its rest (``more`` is added to them), shift, weight [C] and bias [C].

    ``stride`` is the row stride of the shift.
    """
    x, grad = (tensor.contiguous(memory_format=torch.channels_last) for tensor in (x, grad))
    images, channels, height, side = x.shape
    out, other = (
        torch.empty((images, part, height, side), dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
        for part in (first, channels - first)
    )
    grad_shift = None if shift is None else shift.new_empty(shift.shape)
    # A dummy for absent outputs, as in the forward.
    spare = x.new_empty(1)
    grad_weight, grad_bias = torch.empty_like(weight), torch.empty_like(bias)
    if not x.numel():
        return out, other, None if shift is None else torch.zeros_like(shift), grad_weight.zero_(), grad_bias.zero_()
    more = None if more is None else more.to(x.dtype).contiguous(memory_format=torch.channels_last)
    pixels, groups = height * side, stats.shape[1]
    size, blocks = channels // groups, ceil_div(channels, GRADIENT_BLOCK)
    most = max(1, GRADIENT_PROGRAMS // (images * blocks))
    rows = ceil_div(ceil_div(pixels, most), GRADIENT_ROWS) * GRADIENT_ROWS
    chunks = ceil_div(pixels, rows)
    moved, shifted = (weight, 0) if shift is None else (shift, channels)
    part = torch.empty(3, images, chunks, channels, dtype=torch.float32, device=x.device)
    common = torch.empty_like(stats)
    given = grad, x, moved, weight, bias, stats
    grid, code = (chunks, blocks, images), {"BLOCK": GRADIENT_BLOCK, "ROWS": GRADIENT_ROWS, "num_warps": 4}
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
