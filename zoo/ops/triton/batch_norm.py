"""Batch norm or bias, residual and relu in one pass, the statistics of a batch, max pooling, and their gradients.

    moments      mean and sum of squared deviations of each channel, over a chunk of rows
    combine      merges the chunks in order; updates the running statistics
    apply        normalises, adds and activates
    product      a product that ends in what apply does, for inference
    mean         over the pixels of each image, for inference
    sums         over a chunk of rows: the gradient after the relu's mask, and its product with the normalised rows
    total        adds the chunks in order: the gradients of weight and bias
    gradients    the gradient of each row, and of its residual

Means and deviations are merged by the formulas of Welford and Chan, so that a channel whose mean is far from zero keeps
its variance. No kernel uses atomics: results are bitwise reproducible. Without a residual the backward recomputes the
relu; with a residual the forward saves the relu's output.

Pooling takes the maximum of 3 × 3 pixels at a stride of 2. A program walks down the lines of some output columns and
reuses the last row of each line. A norm with a negative scale reverses the order of values, so the kernel flips signs,
finds the maximum and normalises only the maximum. The backward reads the argmax, one byte per window.

Images [N, C, H, W] in channels_last are treated as rows. Shape legend: N images, C channels, H height, W width, R rows,
K chunks of rows, h = ⌈H / 2⌉, w = ⌈W / 2⌉.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from zoo.engine.kernel import follow, kernel
from zoo.ops.common import ceil_div
from zoo.ops.images import NO_NORM, Tensors
from zoo.ops.triton.tiles import TURNS, tile_of_product, total_of

# Tile of a program (rows, channels) and its warps, for the forward and for gradients of rows.
APPLY = {"ROWS": 64, "BLOCK": 64, "num_warps": 4}
GRADIENTS = {"ROWS": 32, "BLOCK": 64, "num_warps": 4}
# Above ENOUGH tiles a program takes several, at most MOST_TILES.
ENOUGH, MOST_TILES = 4096, 4
# Pooling: a program covers 8 output columns and walks down their lines; 56 columns are whole tiles.
POOL = {"ROWS": 8, "BLOCK": 64, "num_warps": 2}
# The mean over the pixels of an image.
MEAN = {"ROWS": 64, "BLOCK": 32, "num_warps": 4}
# Sums over rows: batch statistics and their gradients. AHEAD is the number of tiles in flight. The chunk size is chosen
# to give about this many programs.
SUMS = {"ROWS": 32, "BLOCK": 64, "AHEAD": 3, "num_warps": 4}
PROGRAMS = 512
# Merging chunks: few channels per program, since channels are the only parallel dimension.
FINISH = {"ROWS": 512, "BLOCK": 8, "num_warps": 8}


def rows_to_write(x: Tensor, tile: dict[str, int]) -> tuple[tuple[int, int, int], tuple[int]]:
    """Sizes (rows, channels, rows per program) and grid of a kernel that writes rows."""
    channels = x.shape[1]
    rows, blocks = x.numel() // channels, ceil_div(channels, tile["BLOCK"])
    share = tile["ROWS"] * max(1, min(MOST_TILES, ceil_div(rows, tile["ROWS"]) * blocks // ENOUGH))
    return (rows, channels, share), (ceil_div(rows, share) * blocks,)


def rows_to_sum(x: Tensor) -> tuple[tuple[int, int, int, int], tuple[int], tuple[int]]:
    """Sizes (rows, channels, rows per chunk, chunks), and the grids of the summing and of the merging kernel."""
    channels = x.shape[1]
    rows, blocks = x.numel() // channels, ceil_div(channels, SUMS["BLOCK"])
    share = ceil_div(ceil_div(rows, max(1, PROGRAMS // blocks)), SUMS["ROWS"]) * SUMS["ROWS"]
    chunks = ceil_div(rows, share)
    return (rows, channels, share, chunks), (chunks * blocks,), (ceil_div(channels, FINISH["BLOCK"]),)


def lines_to_pool(images: int, lines: int, columns: int, channels: int) -> tuple[int, tuple[int]]:
    """Lines per program and grid of the pooling kernel, from the size of its output."""
    strips = ceil_div(columns, POOL["ROWS"]) * ceil_div(channels, POOL["BLOCK"])
    share = max(1, min(MOST_TILES, images * lines * strips // ENOUGH))
    return share, (images * ceil_div(lines, share) * strips,)


@triton.jit
def span(rows, channels, share, BLOCK: tl.constexpr):
    """This program's chunk, channels [BLOCK], mask of valid channels, first row, and the row after its last."""
    blocks = tl.cdiv(channels, BLOCK)
    # Neighbouring programs share rows, so that concurrent programs read neighbouring memory.
    chunk = tl.program_id(0) // blocks
    channel = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    begin = chunk * share
    return chunk, channel, channel < channels, begin, tl.minimum(begin + share, rows)


@triton.jit
def tile_at(start, begin, end, channel, channels, ROWS: tl.constexpr):
    """Offset of the tile at row ``start``, the offsets inside it and its mask, both [ROWS, BLOCK]."""
    row = tl.arange(0, ROWS)
    inner = row[:, None] * channels + channel[None, :]
    seen = (start + row < end)[:, None] & (channel < channels)[None, :]
    return (begin.to(tl.int64) + (start - begin)) * channels, inner, seen


@triton.jit
def strip(height, width, channels, share, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """A pooling program's image, the output's height and width, its channels [BLOCK], columns [ROWS] and line range."""
    lines, columns = (height + 1) // 2, (width + 1) // 2
    blocks, strips, bands = tl.cdiv(channels, BLOCK), tl.cdiv(columns, ROWS), tl.cdiv(lines, share)
    program = tl.program_id(0)
    channel = (program % blocks) * BLOCK + tl.arange(0, BLOCK)
    column = (program // blocks) % strips * ROWS + tl.arange(0, ROWS)
    begin = (program // (blocks * strips)) % bands * share
    image = (program // (blocks * strips * bands)).to(tl.int64)
    return image, lines, columns, channel, column, begin, tl.minimum(begin + share, lines)


@triton.jit
def of_channels(tensor, channel, live):
    """Load a per-channel tensor at channels [BLOCK], as float32."""
    return tl.load(tensor + channel, mask=live, other=0.0).to(tl.float32)


@triton.jit
def norm_of(mean, variance, weight, channel, live, eps):
    """Mean, rstd, and rstd times weight, of channels [BLOCK]."""
    middle = of_channels(mean, channel, live)
    rstd = tl.rsqrt(tl.load(variance + channel, mask=live, other=1.0).to(tl.float32) + eps)
    return middle, rstd, rstd * of_channels(weight, channel, live)


@triton.jit
def of_rows(tensor, place, inner, seen):
    """Load a tile [ROWS, BLOCK] as float32, at offsets ``inner`` from ``place``."""
    return tl.load(tensor + place + inner, mask=seen, other=0.0).to(tl.float32)


@kernel(do_not_specialize=["rows", "share"])
def _apply(
    x, mean, variance, weight, bias, other, other_mean, other_variance, other_weight, other_bias, out, rows, channels,
    share, eps: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    follow(OVERLAP)
    _, channel, live, begin, end = span(rows, channels, share, BLOCK)
    offset = of_channels(bias, channel, live)
    if mean is not None:
        middle, _, scale = norm_of(mean, variance, weight, channel, live, eps)
    if other_mean is not None:
        other_middle, _, other_scale = norm_of(other_mean, other_variance, other_weight, channel, live, eps)
        offset += of_channels(other_bias, channel, live)
    for start in range(begin, end, ROWS):
        place, inner, seen = tile_at(start, begin, end, channel, channels, ROWS)
        value = of_rows(x, place, inner, seen)
        if mean is not None:
            value = (value - middle[None, :]) * scale[None, :]
        value += offset[None, :]
        if other is not None:
            more = of_rows(other, place, inner, seen)
            if other_mean is not None:
                more = (more - other_middle[None, :]) * other_scale[None, :]
            value += more
        # Of a NaN no comparison is true: it passes, as in torch.
        value = tl.where(value <= 0.0, 0.0, value)
        tl.store(out + place + inner, value.to(out.dtype.element_ty), mask=seen)


@kernel(do_not_specialize=["norms", "rows", "inputs", "channels"])
def _product_norm_act(
    x, matrix, mean, variance, weight, bias, other, other_mean, other_variance, other_weight, other_bias, out, norms,
    rows, inputs, channels, eps: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, INPUTS: tl.constexpr, TURNS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    follow(OVERLAP)
    row, column = tile_of_product(tl.cdiv(rows, ROWS), tl.cdiv(channels, BLOCK), ROWS, BLOCK, TURNS)
    value = tl.zeros([ROWS, BLOCK], tl.float32)
    for first in range(0, inputs, INPUTS):
        value = tl.dot(x.load([row, first]), matrix.load([column, first]).T, value)
    channel = column + tl.arange(0, BLOCK)
    live = channel < channels
    # A scale and a shift of each channel: the tile leaves few registers.
    shift = of_channels(bias, channel, live)
    if mean is not None:
        middle, _, scale = norm_of(mean, variance, weight, channel, live, eps)
        value *= scale[None, :]
        shift -= middle * scale
    if other is not None:
        more = other.load([row, column]).to(tl.float32)
        if other_mean is not None:
            middle, _, scale = norm_of(other_mean, other_variance, other_weight, channel, live, eps)
            more *= tl.where(norms > 0, scale, 1.0)[None, :]
            shift += tl.where(norms > 0, of_channels(other_bias, channel, live) - middle * scale, 0.0)
        value += more
    value += shift[None, :]
    value = tl.where(value <= 0.0, 0.0, value)
    out.store([row, column], value.to(out.dtype))


@kernel(do_not_specialize=["rows", "share", "chunks"])
def _moments(
    x, part, rows, channels, share, chunks, ROWS: tl.constexpr, BLOCK: tl.constexpr, AHEAD: tl.constexpr
):  # fmt: skip
    chunk, channel, live, begin, end = span(rows, channels, share, BLOCK)
    # Each element of the tile keeps its own mean until the final merge.
    mean = tl.zeros([ROWS, BLOCK], tl.float32)
    squares = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in tl.range(begin, end, ROWS, num_stages=AHEAD):
        place, inner, seen = tile_at(start, begin, end, channel, channels, ROWS)
        value = of_rows(x, place, inner, seen)
        before = ((start - begin) // ROWS).to(tl.float32)
        portion = 1.0 / (before + 1.0)
        deviation = tl.where(seen, value - mean, 0.0)
        mean += deviation * portion
        squares += deviation * deviation * (before * portion)
    count = tl.maximum((end - begin - tl.arange(0, ROWS) + ROWS - 1) // ROWS, 0).to(tl.float32)
    middle = tl.sum(mean * count[:, None], 0) / (end - begin).to(tl.float32)
    deviation = mean - middle[None, :]
    total = tl.sum(squares + deviation * deviation * count[:, None], 0)
    place = part + chunk * channels + channel
    tl.store(place, middle, mask=live)
    tl.store(place + chunks * channels, total, mask=live)


@kernel(do_not_specialize=["rows", "share", "chunks"])
def _combine(
    part, mean, variance, running_mean, running_variance, batches, rows, channels, share, chunks,
    momentum: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = channel < channels
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(0, chunks, ROWS):
        index = start + tl.arange(0, ROWS)
        seen = (index < chunks)[:, None] & live[None, :]
        count = tl.minimum(share, rows - index * share).to(tl.float32)
        total += of_rows(part, 0, index[:, None] * channels + channel[None, :], seen) * count[:, None]
    middle = tl.sum(total, 0) / rows
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(0, chunks, ROWS):
        index = start + tl.arange(0, ROWS)
        seen = (index < chunks)[:, None] & live[None, :]
        count = tl.minimum(share, rows - index * share).to(tl.float32)
        place = index[:, None] * channels + channel[None, :]
        deviation = of_rows(part, 0, place, seen) - middle[None, :]
        inner = of_rows(part, chunks * channels, place, seen)
        total += tl.where(seen, inner + deviation * deviation * count[:, None], 0.0)
    squares = tl.sum(total, 0)
    tl.store(mean + channel, middle, mask=live)
    tl.store(variance + channel, squares / rows, mask=live)
    if running_mean is not None:
        old = of_channels(running_mean, channel, live)
        new = old + (middle - old) * momentum
        tl.store(running_mean + channel, new.to(running_mean.dtype.element_ty), mask=live)
    if running_variance is not None:
        old = of_channels(running_variance, channel, live)
        new = old + (squares / (rows - 1) - old) * momentum
        tl.store(running_variance + channel, new.to(running_variance.dtype.element_ty), mask=live)
    if batches is not None:
        tl.store(batches, tl.load(batches) + 1, mask=tl.program_id(0) == 0)


@triton.jit
def _relu_gradient(grad, out, place, inner, seen, centred, scale, offset):
    """Gradient of a tile [ROWS, BLOCK], masked where the relu was inactive."""
    change = of_rows(grad, place, inner, seen)
    if out is None:
        before = centred * scale[None, :] + offset[None, :]
    else:
        before = of_rows(out, place, inner, seen)
    return tl.where(before <= 0.0, 0.0, change)


@kernel(do_not_specialize=["rows", "share", "chunks"])
def _sums(
    grad, x, mean, variance, weight, bias, out, other, other_mean, other_variance, other_weight, part, rows, channels,
    share, chunks, eps: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    chunk, channel, live, begin, end = span(rows, channels, share, BLOCK)
    middle, rstd, scale = norm_of(mean, variance, weight, channel, live, eps)
    offset = of_channels(bias, channel, live)
    plain = tl.zeros([ROWS, BLOCK], tl.float32)
    along = tl.zeros([ROWS, BLOCK], tl.float32)
    if other is not None:
        other_middle, other_rstd, _ = norm_of(other_mean, other_variance, other_weight, channel, live, eps)
        other_along = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in tl.range(begin, end, ROWS, num_stages=AHEAD):
        place, inner, seen = tile_at(start, begin, end, channel, channels, ROWS)
        centred = of_rows(x, place, inner, seen) - middle[None, :]
        change = _relu_gradient(grad, out, place, inner, seen, centred, scale, offset)
        plain += change
        along += change * centred
        if other is not None:
            other_along += change * (of_rows(other, place, inner, seen) - other_middle[None, :])
    place = part + chunk * channels + channel
    tl.store(place, tl.sum(plain, 0), mask=live)
    tl.store(place + chunks * channels, tl.sum(along, 0) * rstd, mask=live)
    if other is not None:
        tl.store(place + 2 * chunks * channels, tl.sum(other_along, 0) * other_rstd, mask=live)


@kernel(do_not_specialize=["chunks"])
def _total(
    part, totals, grad_weight, grad_bias, grad_other_weight, grad_other_bias, channels, chunks,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = channel < channels
    plain = total_of(part, chunks, channels, channel, live, ROWS, BLOCK)
    along = total_of(part + chunks * channels, chunks, channels, channel, live, ROWS, BLOCK)
    tl.store(totals + channel, plain, mask=live)
    tl.store(totals + channels + channel, along, mask=live)
    tl.store(grad_bias + channel, plain.to(grad_bias.dtype.element_ty), mask=live)
    tl.store(grad_weight + channel, along.to(grad_weight.dtype.element_ty), mask=live)
    if grad_other_weight is not None:
        along = total_of(part + 2 * chunks * channels, chunks, channels, channel, live, ROWS, BLOCK)
        tl.store(totals + 2 * channels + channel, along, mask=live)
        tl.store(grad_other_bias + channel, plain.to(grad_other_bias.dtype.element_ty), mask=live)
        tl.store(grad_other_weight + channel, along.to(grad_other_weight.dtype.element_ty), mask=live)


@kernel(do_not_specialize=["rows", "share"])
def _gradients(
    grad, x, mean, variance, weight, bias, out, other, other_mean, other_variance, other_weight, totals, grad_x,
    grad_other, rows, channels, share, eps: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    _, channel, live, begin, end = span(rows, channels, share, BLOCK)
    middle, rstd, scale = norm_of(mean, variance, weight, channel, live, eps)
    offset = of_channels(bias, channel, live)
    if other is not None:
        other_middle, other_rstd, other_scale = norm_of(other_mean, other_variance, other_weight, channel, live, eps)
    if totals is not None:
        # Batch statistics depend on each row.
        count = rows * 1.0
        plain = of_channels(totals, channel, live) / count
        along = of_channels(totals + channels, channel, live) / count * rstd * scale
        if other is not None:
            other_along = of_channels(totals + 2 * channels, channel, live) / count * other_rstd * other_scale
    for start in range(begin, end, ROWS):
        place, inner, seen = tile_at(start, begin, end, channel, channels, ROWS)
        centred = of_rows(x, place, inner, seen) - middle[None, :]
        change = _relu_gradient(grad, out, place, inner, seen, centred, scale, offset)
        if out is not None and other is None:
            tl.store(grad_other + place + inner, change.to(grad_other.dtype.element_ty), mask=seen)
        if totals is not None:
            change -= plain[None, :]
        result = change * scale[None, :]
        if totals is not None:
            result -= centred * along[None, :]
        tl.store(grad_x + place + inner, result.to(grad_x.dtype.element_ty), mask=seen)
        if other is not None:
            result = change * other_scale[None, :]
            if totals is not None:
                centred = of_rows(other, place, inner, seen) - other_middle[None, :]
                result -= centred * other_along[None, :]
            tl.store(grad_other + place + inner, result.to(grad_other.dtype.element_ty), mask=seen)


@kernel(do_not_specialize=["pixels"])
def _mean(x, out, pixels, channels, ROWS: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    follow(OVERLAP)
    image = tl.program_id(1).to(tl.int64)
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    begin = image * pixels
    for start in range(begin, begin + pixels, ROWS):
        place, inner, seen = tile_at(start, begin, begin + pixels, channel, channels, ROWS)
        total += of_rows(x, place, inner, seen)
    value = tl.sum(total, 0) / pixels
    tl.store(out + image * channels + channel, value.to(out.dtype.element_ty), mask=channel < channels)


def mean(x: Tensor) -> Tensor:
    """The mean over pixels: [N, C, H, W] -> [N, C]."""
    images, channels, height, width = x.shape
    out = x.new_empty(images, channels)
    grid = ceil_div(channels, MEAN["BLOCK"]), images
    _mean[grid](by_pixels(x), out, height * width, channels, OVERLAP=False, **MEAN)
    return out


def by_pixels(x: Tensor) -> Tensor:
    """Make rows [R, C] contiguous, or images [N, C, H, W] channels_last; no copy if they are already."""
    return x.contiguous() if x.dim() == 2 else x.contiguous(memory_format=torch.channels_last)


# Tiles of a product: its rows and channels, inputs at a time, and pipeline stages. A product takes the first that gives
# a GPU's cores a tile each, or the last.
PRODUCT_TILES = (128, 128, 64, 3), (64, 64, 64, 4), (64, 32, 128, 4)
LEAST_TILES = 132


def _product_tile(rows: int, channels: int, adds: bool) -> tuple[int, int, int, int]:
    for down, across, depth, stages in PRODUCT_TILES:
        down = down if adds else 64  # without a residual more tiles of fewer rows are faster
        if ceil_div(rows, down) * ceil_div(channels, across) >= LEAST_TILES:
            return down, across, depth, stages
    return PRODUCT_TILES[-1]


def product_norm_act(
    x: Tensor, matrix: Tensor, own: Tensors, residual: Tensor | None, other: Tensors, eps: float
) -> Tensor:
    """``norm_act`` of x [R, I] times matrix [C, I]: [R, C], without the product in memory."""
    (rows, inputs), channels = x.shape, matrix.shape[0]
    out = x.new_empty(rows, channels)
    down, across, depth, stages = _product_tile(rows, channels, residual is not None)
    tile = [down, across]
    # One kernel serves residuals with and without a norm, since each takes a second to compile. For those without, a
    # flag makes it ignore the norm that it gets.
    norms = int(other[0] is not None)
    _product_norm_act[(ceil_div(rows, down) * ceil_div(channels, across),)](
        TensorDescriptor.from_tensor(x, [down, depth]), TensorDescriptor.from_tensor(matrix, [across, depth]),
        *own, None if residual is None else TensorDescriptor.from_tensor(residual, tile), *(other if norms else own),
        TensorDescriptor.from_tensor(out, tile), norms, rows, inputs, channels, eps,
        ROWS=down, BLOCK=across, INPUTS=depth, TURNS=TURNS, OVERLAP=False, num_warps=4, num_stages=stages,
    )  # fmt: skip
    return out


def norm_act(x: Tensor, norm: Tensors, residual: Tensor | None, residual_norm: Tensors, eps: float) -> Tensor:
    """Relu of (norm of x [R, C] or [N, C, H, W], or x + bias without a mean, plus a residual or a normed residual)."""
    x = by_pixels(x)
    out = torch.empty_like(x)
    sizes, grid = rows_to_write(x, APPLY)
    other = None if residual is None else by_pixels(residual)
    _apply[grid](x, *norm, other, *residual_norm, out, *sizes, eps, OVERLAP=False, **APPLY)
    return out


def batch_statistics(
    x: Tensor, running_mean: Tensor | None, running_variance: Tensor | None, batches: Tensor | None, momentum: float
) -> tuple[Tensor, Tensor]:
    """Mean and variance [C] float32 of x [R, C] or [N, C, H, W]. Updates running statistics and the batch count."""
    x = by_pixels(x)
    if x.numel() < 2 * x.shape[1]:
        raise ValueError(f"x has shape {tuple(x.shape)}: one row has no variance; give more, or use model.eval()")
    sizes, grid, finish = rows_to_sum(x)
    _, channels, _, chunks = sizes
    part = torch.empty(2, chunks, channels, dtype=torch.float32, device=x.device)
    mean = torch.empty(channels, dtype=torch.float32, device=x.device)
    variance = torch.empty_like(mean)
    _moments[grid](x, part, *sizes, **SUMS)
    _combine[finish](part, mean, variance, running_mean, running_variance, batches, *sizes, momentum, **FINISH)
    if not torch.compiler.is_compiling():
        for moved in (running_mean, running_variance, batches):
            if moved is not None and not moved.is_inference():
                # Autograd then refuses a backward that needs the old value, as after any in-place change.
                torch.autograd.graph.increment_version(moved)
    return mean, variance


def norm_act_backward(
    grad: Tensor, x: Tensor, norm: Tensors, residual: Tensor | None, residual_norm: Tensors, out: Tensor | None,
    eps: float, of_batch: bool, affine: bool,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Gradients of x, weight, bias, residual, the residual's weight and its bias; None for absent inputs.

    ``residual`` is given if it is normalised, ``out`` if there was a residual. Weights and biases need ``affine``.
    """
    grad, x = by_pixels(grad), by_pixels(x)
    out, other = (None if each is None else by_pixels(each) for each in (out, residual))
    totals, affines = None, list(NO_NORM)
    if of_batch or affine:
        affines = [None if each is None else torch.empty_like(each) for each in (*norm[2:], *residual_norm[2:])]
        kinds = 2 if other is None else 3
        sums, grid, finish = rows_to_sum(x)
        _, channels, _, chunks = sums
        part = torch.empty(kinds, chunks, channels, dtype=torch.float32, device=x.device)
        totals = torch.empty(kinds, channels, dtype=torch.float32, device=x.device)
        _sums[grid](grad, x, *norm, out, other, *residual_norm[:3], part, *sums, eps, **SUMS)
        _total[finish](part, totals, *affines, channels, chunks, **FINISH)
    grad_x = torch.empty_like(x)
    grad_other = None if out is None else torch.empty_like(x)
    sizes, grid = rows_to_write(x, GRADIENTS)
    given = grad, x, *norm, out, other, *residual_norm[:3], totals if of_batch else None
    _gradients[grid](*given, grad_x, grad_other, *sizes, eps, **GRADIENTS)
    weight, bias, *of_residual = affines if affine else NO_NORM
    return grad_x, weight, bias, grad_other, *of_residual


@triton.jit
def greater(a, b):
    """Maximum that propagates NaN."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _times_sign(value, sign):
    """Values [ROWS, BLOCK] times the signs of their channels, if signs are given."""
    return value if sign is None else value * sign[None, :]


@triton.jit
def _greatest_of_row(x, place, left, centre, right, sign, seen):
    """Maximum of three pixels in an image row, after the sign flip: [ROWS, BLOCK]."""
    before = _times_sign(of_rows(x, place, left, seen), sign)
    value = _times_sign(of_rows(x, place, centre, seen), sign)
    return greater(greater(before, value), _times_sign(of_rows(x, place, right, seen), sign))


@kernel(do_not_specialize=["height", "width", "share"])
def _pool(
    x, mean, variance, weight, bias, out, height, width, channels, share, eps: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    follow(OVERLAP)
    image, lines, columns, channel, column, begin, end = strip(height, width, channels, share, ROWS, BLOCK)
    live = channel < channels
    seen = (column < columns)[:, None] & live[None, :]
    offset = of_channels(bias, channel, live)
    sign = None
    if mean is not None:
        middle, _, scale = norm_of(mean, variance, weight, channel, live, eps)
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
        value = greater(greater(above, value), below)
        above = below
        if mean is not None:
            value = (_times_sign(value, sign) - middle[None, :]) * scale[None, :]
        value += offset[None, :]
        # Of a NaN no comparison is true: it passes, as in torch.
        value = tl.where(value <= 0.0, 0.0, value)
        place = (image * lines + line) * columns * channels
        tl.store(out + place + inner, value.to(out.dtype.element_ty), mask=seen)


@triton.jit
def _best(value, index, other, other_index):
    """Maximum of two values and its index, as in torch: the first of equal values; NaN propagates."""
    taken = (other > value) | (other != other)
    return tl.where(taken, other, value), tl.where(taken, other_index, index)


@triton.jit
def _best_of_row(x, place, column, channel, width, channels, live):
    """Maximum of three pixels in a row and its index: [ROWS, BLOCK] each."""
    inner = (2 * column)[:, None] * channels + channel[None, :]
    seen = (2 * column < width)[:, None] & live[None, :]
    left = seen & (column > 0)[:, None]
    right = seen & (2 * column + 1 < width)[:, None]
    value = tl.load(x + place + inner - channels, mask=left, other=float("-inf")).to(tl.float32)
    centre = tl.load(x + place + inner, mask=seen, other=float("-inf")).to(tl.float32)
    last = tl.load(x + place + inner + channels, mask=right, other=float("-inf")).to(tl.float32)
    # If all values are -inf, the index is the first valid pixel's: index 1 at the left edge.
    first = tl.broadcast_to(tl.where(column > 0, 0, 1)[:, None], value.shape)
    value, index = _best(value, first, centre, 1)
    return _best(value, index, last, 2)


@kernel(do_not_specialize=["height", "width", "share"])
def _max_pool(x, out, which, height, width, channels, share, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    image, lines, columns, channel, column, begin, end = strip(height, width, channels, share, ROWS, BLOCK)
    live = channel < channels
    seen = (column < columns)[:, None] & live[None, :]
    inner = column[:, None] * channels + channel[None, :]
    top = image * height
    # No row lies above the first line: its values must never win.
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
        # The row below this line is the row above the next line.
        above, above_index = below, below_index
        place = (image * lines + line) * columns * channels
        tl.store(out + place + inner, value.to(out.dtype.element_ty), mask=seen)
        tl.store(which + place + inner, index.to(tl.uint8), mask=seen)


@triton.jit
def _load_window(grad, which, place, seen):
    """Gradient and argmax of windows [ROWS, BLOCK]; a missing window has an index that matches no pixel."""
    return tl.load(grad + place, mask=seen, other=0.0).to(tl.float32), tl.load(which + place, mask=seen, other=255)


@triton.jit
def _given(window, index: tl.constexpr):
    """Gradient that a window passes to the pixel of this index."""
    change, chosen = window
    return tl.where(chosen == index, change, 0.0)


@kernel(do_not_specialize=["height", "width", "share"])
def _max_pool_backward(grad, which, grad_x, height, width, channels, share, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    image, lines, columns, channel, column, begin, end = strip(height, width, channels, share, ROWS, BLOCK)
    live = (channel < channels)[None, :]
    here = (column < columns)[:, None] & live
    beside = (column + 1 < columns)[:, None] & live
    right = (2 * column + 1 < width)[:, None] & live
    inner = column[:, None] * channels + channel[None, :]
    outer = (2 * column)[:, None] * channels + channel[None, :]
    top = (image * lines + begin) * columns * channels
    first = _load_window(grad, which, top + inner, here)
    second = _load_window(grad, which, top + inner + channels, beside)
    for line in range(begin, end):
        top += columns * channels
        below = line + 1 < lines
        third = _load_window(grad, which, top + inner, here & below)
        fourth = _load_window(grad, which, top + inner + channels, beside & below)
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


def norm_act_pool(x: Tensor, norm: Tensors, eps: float) -> Tensor:
    """Max pooling of relu(norm of x [N, C, H, W]), or relu(x + bias) without a mean: [N, C, h, w] in channels_last."""
    x, out, sizes, grid = _pool_launch(x)
    _pool[grid](x, *norm, out, *sizes, eps, OVERLAP=False, **POOL)
    return out


def max_pool(x: Tensor) -> tuple[Tensor, Tensor]:
    """Max pooling of x [N, C, H, W] and the argmax in each window, uint8: [N, C, h, w] in channels_last each."""
    x, out, sizes, grid = _pool_launch(x)
    which = torch.empty_like(out, dtype=torch.uint8)
    _max_pool[grid](x, out, which, *sizes, **POOL)
    return out, which


def max_pool_backward(grad: Tensor, which: Tensor, height: int, width: int) -> Tensor:
    """Gradient of x from grad and argmax ``which`` [N, C, h, w]: [N, C, H, W] in channels_last."""
    grad, which = by_pixels(grad), by_pixels(which)
    images, channels, lines, columns = grad.shape
    grad_x = _empty_images(grad, images, channels, height, width)
    share, grid = lines_to_pool(images, lines, columns, channels)
    _max_pool_backward[grid](grad, which, grad_x, height, width, channels, share, **POOL)
    return grad_x


def _pool_launch(x: Tensor) -> tuple[Tensor, Tensor, tuple[int, int, int, int], tuple[int]]:
    """Images, an output buffer, sizes (height, width, channels, lines per program), and the grid."""
    images, channels, height, width = x.shape
    lines, columns = ceil_div(height, 2), ceil_div(width, 2)
    out = _empty_images(x, images, channels, lines, columns)
    share, grid = lines_to_pool(images, lines, columns, channels)
    return by_pixels(x), out, (height, width, channels, share), grid


def _empty_images(like: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=torch.channels_last)
