"""Batch norm or bias, residual and relu in one pass, the statistics of a batch, max pooling, and their gradients.

    moments      mean and sum of squared deviations of each channel, over a chunk of rows
    combine      the chunks merged in their order; moves the running statistics
    apply        normalises, adds and activates
    sums         over a chunk of rows: of the gradient that the relu lets pass, and of it times each normalised row
    total        the chunks added in their order: the gradients of weight and bias
    gradients    of each row, and of its residual

Means and deviations are merged as Welford's and Chan's are, so that a channel whose mean is far from zero keeps its
variance. There are no atomics: the same bits at every run. The backward of a norm without a residual recomputes the
relu; else the relu's output is saved. Without the statistics of a batch, sums serve weight and bias alone.

Pooling takes the maximum of 3 × 3 pixels at a stride of 2. A program goes down the lines of some output columns, and
reuses each line's last row for the next. A norm keeps the order of values, or reverses it where its scale is negative:
signs are flipped, the maximum is found, and only that is normalised. Windows need no padding: what is clamped to the
image falls on a pixel of the same window. With a gradient the forward saves the argmax, a byte each. A program of the
backward reads each four neighbouring windows, and writes the four pixels between their centres.

Images [N, C, H, W] in channels_last are rows. Shape legend: N images, C channels, H height, W width, R rows, K chunks
of rows; h and w, ⌈H / 2⌉ and ⌈W / 2⌉.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from zoo.engine.kernel import kernel
from zoo.ops.common import ceil_div
from zoo.ops.triton import tiles
from zoo.ops.triton.tiles import greater, norm_of, of_channels, of_rows, span, strip, total_of

# Mean, variance, weight and bias of a norm; of one that is not there None.
Tensors = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]
NO_NORM: Tensors = (None, None, None, None)
NAMES = ("mean", "variance", "weight", "bias", "residual_mean", "residual_variance", "residual_weight", "residual_bias")


@kernel(do_not_specialize=["rows", "share"])
def _apply(
    x, mean, variance, weight, bias, other, other_mean, other_variance, other_weight, other_bias, out, rows, channels,
    share, eps: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    _, channel, live, begin, end = span(rows, channels, share, BLOCK)
    offset = of_channels(bias, channel, live)
    if mean is not None:
        middle, scale = norm_of(mean, variance, channel, live, eps)
        scale *= of_channels(weight, channel, live)
    if other_mean is not None:
        other_middle, other_scale = norm_of(other_mean, other_variance, channel, live, eps)
        other_scale *= of_channels(other_weight, channel, live)
        offset += of_channels(other_bias, channel, live)
    row = tl.arange(0, ROWS)
    inner = row[:, None] * channels + channel[None, :]
    for start in range(begin, end, ROWS):
        seen = (start + row < end)[:, None] & live[None, :]
        place = (begin.to(tl.int64) + (start - begin)) * channels
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


@kernel(do_not_specialize=["rows", "share", "chunks"])
def _moments(x, part, rows, channels, share, chunks, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    chunk, channel, live, begin, end = span(rows, channels, share, BLOCK)
    row = tl.arange(0, ROWS)
    inner = row[:, None] * channels + channel[None, :]
    # Each place of the tile has its own, until the end.
    mean = tl.zeros([ROWS, BLOCK], tl.float32)
    squares = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(begin, end, ROWS):
        seen = (start + row < end)[:, None] & live[None, :]
        value = of_rows(x, (begin.to(tl.int64) + (start - begin)) * channels, inner, seen)
        before = ((start - begin) // ROWS).to(tl.float32)
        portion = 1.0 / (before + 1.0)
        deviation = tl.where(seen, value - mean, 0.0)
        mean += deviation * portion
        squares += deviation * deviation * (before * portion)
    count = tl.maximum((end - begin - row + ROWS - 1) // ROWS, 0).to(tl.float32)
    middle = tl.sum(mean * count[:, None], 0) / (end - begin).to(tl.float32)
    deviation = mean - middle[None, :]
    total = tl.sum(squares + deviation * deviation * count[:, None], 0)
    place = part + chunk * channels + channel
    tl.store(place, middle, mask=live)
    tl.store(place + chunks * channels, total, mask=live)


@kernel(do_not_specialize=["rows", "share", "chunks"])
def _combine(
    part, mean, variance, running_mean, running_variance, batches, rows, channels, share, chunks,
    momentum: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
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
    """The gradient where the relu passed, of a tile [ROWS, BLOCK]."""
    change = of_rows(grad, place, inner, seen)
    if out is None:
        before = centred * scale[None, :] + offset[None, :]
    else:
        before = of_rows(out, place, inner, seen)
    return tl.where(before <= 0.0, 0.0, change)


@kernel(do_not_specialize=["rows", "share", "chunks"])
def _sums(
    grad, x, mean, variance, weight, bias, out, other, other_mean, other_variance, part, rows, channels, share, chunks,
    eps: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    chunk, channel, live, begin, end = span(rows, channels, share, BLOCK)
    middle, rstd = norm_of(mean, variance, channel, live, eps)
    scale, offset = rstd * of_channels(weight, channel, live), of_channels(bias, channel, live)
    plain = tl.zeros([ROWS, BLOCK], tl.float32)
    along = tl.zeros([ROWS, BLOCK], tl.float32)
    if other is not None:
        other_middle, other_rstd = norm_of(other_mean, other_variance, channel, live, eps)
        other_along = tl.zeros([ROWS, BLOCK], tl.float32)
    row = tl.arange(0, ROWS)
    inner = row[:, None] * channels + channel[None, :]
    for start in range(begin, end, ROWS):
        seen = (start + row < end)[:, None] & live[None, :]
        place = (begin.to(tl.int64) + (start - begin)) * channels
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
    middle, rstd = norm_of(mean, variance, channel, live, eps)
    scale, offset = rstd * of_channels(weight, channel, live), of_channels(bias, channel, live)
    if other is not None:
        other_middle, other_rstd = norm_of(other_mean, other_variance, channel, live, eps)
        other_scale = other_rstd * of_channels(other_weight, channel, live)
    if totals is not None:
        # Statistics of the batch move with each row.
        count = rows * 1.0
        plain = of_channels(totals, channel, live) / count
        along = of_channels(totals + channels, channel, live) / count * rstd * scale
        if other is not None:
            other_along = of_channels(totals + 2 * channels, channel, live) / count * other_rstd * other_scale
    row = tl.arange(0, ROWS)
    inner = row[:, None] * channels + channel[None, :]
    for start in range(begin, end, ROWS):
        seen = (start + row < end)[:, None] & live[None, :]
        place = (begin.to(tl.int64) + (start - begin)) * channels
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


def norm_act(x: Tensor, norm: Tensors, residual: Tensor | None, residual_norm: Tensors, eps: float) -> Tensor:
    """Relu of the norm of x [R, C] or [N, C, H, W] (bias alone without a mean), plus a residual or the norm of one."""
    tiles.check(x, (residual,), norm + residual_norm, ("residual", *NAMES))
    pixels = tiles.pixels_of(x)
    out = torch.empty_like(pixels)
    rows, channels = tiles.size_of(pixels)
    share, programs = tiles.rows_to_write(rows, channels, tiles.APPLY)
    _apply[(programs,)](
        pixels, *norm, None if residual is None else tiles.pixels_of(residual), *residual_norm, out, rows,
        channels, share, eps, **tiles.APPLY.code(),
    )  # fmt: skip
    return tiles.images_of(out)


def batch_statistics(
    x: Tensor, running_mean: Tensor | None, running_variance: Tensor | None, batches: Tensor | None, momentum: float
) -> tuple[Tensor, Tensor]:
    """Mean and variance [C] float32 of x [R, C] or [N, C, H, W]; running ones are moved, and the batch is counted."""
    tiles.check(x, (), (running_mean, running_variance), ("running_mean", "running_variance"))
    pixels = tiles.pixels_of(x)
    rows, channels = tiles.size_of(pixels)
    if rows < 2:
        raise ValueError(f"x has shape {tuple(x.shape)}: one row has no variance; give more, or use model.eval()")
    share, chunks, programs = tiles.rows_to_sum(rows, channels, tiles.MOMENTS)
    part = torch.empty(2, chunks, channels, dtype=torch.float32, device=x.device)
    mean = torch.empty(channels, dtype=torch.float32, device=x.device)
    variance = torch.empty_like(mean)
    _moments[(programs,)](pixels, part, rows, channels, share, chunks, **tiles.MOMENTS.code())
    _combine[(ceil_div(channels, tiles.FINISH.channels),)](
        part, mean, variance, running_mean, running_variance, batches, rows, channels, share, chunks, momentum,
        **tiles.FINISH.code(),
    )  # fmt: skip
    if not torch.compiler.is_compiling():
        for moved in (running_mean, running_variance, batches):
            if moved is not None and not moved.is_inference():
                # Autograd then refuses a backward that was to use what it was before, as of every change in place.
                torch.autograd.graph.increment_version(moved)
    return mean, variance


def norm_act_backward(
    grad: Tensor, x: Tensor, norm: Tensors, residual: Tensor | None, residual_norm: Tensors, out: Tensor | None,
    eps: float, of_batch: bool, affine: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Gradients of x, weight, bias, the residual, and its weight and bias; None where there is none to be had.

    ``residual`` is given if it is normalised, ``out`` if there was any; of weights and biases only where ``affine``.
    """
    tiles.check(x, (grad, residual, out), norm + residual_norm, ("grad", "residual", "out", *NAMES))
    grad, x = tiles.pixels_of(grad), tiles.pixels_of(x)
    out = None if out is None else tiles.pixels_of(out)
    other = None if residual is None else tiles.pixels_of(residual)
    rows, channels = tiles.size_of(x)
    totals = None
    affines: Sequence[Tensor | None] = NO_NORM
    if of_batch or affine:
        affines = [None if each is None else torch.empty_like(each) for each in (*norm[2:], *residual_norm[2:])]
        kinds = 2 if other is None else 3
        share, chunks, programs = tiles.rows_to_sum(rows, channels, tiles.SUMS)
        part = torch.empty(kinds, chunks, channels, dtype=torch.float32, device=x.device)
        totals = torch.empty(kinds, channels, dtype=torch.float32, device=x.device)
        _sums[(programs,)](
            grad, x, *norm, out, other, *residual_norm[:2], part, rows, channels, share, chunks, eps,
            **tiles.SUMS.code(),
        )  # fmt: skip
        finish = (ceil_div(channels, tiles.FINISH.channels),)
        _total[finish](part, totals, *affines, channels, chunks, **tiles.FINISH.code())
    grad_x = torch.empty_like(x)
    grad_other = None if out is None else torch.empty_like(x)
    share, programs = tiles.rows_to_write(rows, channels, tiles.GRADIENTS)
    _gradients[(programs,)](
        grad, x, *norm, out, other, *residual_norm[:3], totals if of_batch else None, grad_x, grad_other, rows,
        channels, share, eps, **tiles.GRADIENTS.code(),
    )  # fmt: skip
    grads = affines if affine else NO_NORM
    grad_residual = None if grad_other is None else tiles.images_of(grad_other)
    return tiles.images_of(grad_x), grads[0], grads[1], grad_residual, grads[2], grads[3]


@triton.jit
def _times_sign(value, sign):
    """Values [ROWS, BLOCK] times the signs of their channels, where there are any."""
    return value if sign is None else value * sign[None, :]


@triton.jit
def _greatest_of_row(x, place, left, centre, right, sign, seen):
    """The greatest of three pixels of a row of the image, signs turned: [ROWS, BLOCK]."""
    before = _times_sign(of_rows(x, place, left, seen), sign)
    value = _times_sign(of_rows(x, place, centre, seen), sign)
    return greater(greater(before, value), _times_sign(of_rows(x, place, right, seen), sign))


@kernel(do_not_specialize=["height", "width", "share"])
def _pool(
    x, mean, variance, weight, bias, out, height, width, channels, share, eps: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    image, lines, columns, channel, column, begin, end = strip(height, width, channels, share, ROWS, BLOCK)
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
    image, lines, columns, channel, column, begin, end = strip(height, width, channels, share, ROWS, BLOCK)
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
def _load_window(grad, which, place, seen):
    """Gradient and index of windows [ROWS, BLOCK]; of one that is not there, an index that no pixel has."""
    return tl.load(grad + place, mask=seen, other=0.0).to(tl.float32), tl.load(which + place, mask=seen, other=255)


@triton.jit
def _share_of_pixel(window, index: tl.constexpr):
    """What a window gives to the pixel of this index."""
    change, chosen = window
    return tl.where(chosen == index, change, 0.0)


@kernel(do_not_specialize=["height", "width", "share"])
def _max_pool_backward(
    grad, which, grad_x, height, width, channels, share, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
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
        tl.store(place, _share_of_pixel(first, 4).to(kind), mask=here)
        tl.store(place + channels, (_share_of_pixel(first, 5) + _share_of_pixel(second, 3)).to(kind), mask=right)
        under = 2 * line + 1 < height
        place += width * channels
        tl.store(place, (_share_of_pixel(first, 7) + _share_of_pixel(third, 1)).to(kind), mask=here & under)
        corner = (
            _share_of_pixel(first, 8)
            + _share_of_pixel(second, 6)
            + _share_of_pixel(third, 2)
            + _share_of_pixel(fourth, 0)
        )
        tl.store(place + channels, corner.to(kind), mask=right & under)
        first, second = third, fourth


def norm_act_pool(
    x: Tensor, mean: Tensor | None, variance: Tensor | None, weight: Tensor | None, bias: Tensor, eps: float
) -> Tensor:
    """Pooled relu of the norm of x [N, C, H, W] (bias alone without a mean): [N, C, h, w] in channels_last."""
    tiles.check(x, (), (mean, variance, weight, bias), ("mean", "variance", "weight", "bias"))
    pixels, out, share, programs = _pool_launch(x)
    _pool[(programs,)](pixels, mean, variance, weight, bias, out, *pixels.shape[1:], share, eps, **tiles.POOL.code())
    return out.permute(0, 3, 1, 2)


def max_pool(x: Tensor) -> tuple[Tensor, Tensor]:
    """Pooled x [N, C, H, W], and which of nine it was, uint8: [N, C, h, w] in channels_last each."""
    pixels, out, share, programs = _pool_launch(x)
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


def _pool_launch(x: Tensor) -> tuple[Tensor, Tensor, int, int]:
    """Images [N, H, W, C], memory for what is pooled of them, and (lines of a program, programs)."""
    if x.dim() != 4:
        raise ValueError(f"x has shape {tuple(x.shape)}, expected images [N, C, H, W]")
    pixels = tiles.pixels_of(x)
    images, height, width, channels = pixels.shape
    out = pixels.new_empty(images, (height + 1) // 2, (width + 1) // 2, channels)
    return pixels, out, *tiles.lines_to_pool(*out.shape)
