# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs
"""Norm or bias, residual and relu in one pass; the statistics of a batch in another.

    moments    a program goes through a chunk of rows, and leaves each channel's mean and sum of squared deviations
    combine    puts the chunks' together in their order, and moves the running statistics
    apply      normalises, adds and activates, with these statistics or with running ones

Means and deviations are merged, never taken as a difference of large sums: a channel whose mean is far from zero keeps
its variance, and there are no atomics, so that all of it has the same bits at every run.

Shape legend: R rows, C channels, K chunks of rows.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from zoo.ops.common import ceil_div
from zoo.ops.triton.kernel import kernel
from zoo.resnet.kernels import tiles
from zoo.resnet.kernels.tiles import norm_of, of_channels, of_rows, span


@kernel(do_not_specialize=["rows", "share"])
def _apply(
    x, mean, variance, weight, bias, other, other_mean, other_variance, other_weight, other_bias, out, rows, channels,
    share, eps, ROWS: tl.constexpr, BLOCK: tl.constexpr,
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
        apart = tl.where(seen, value - mean, 0.0)
        mean += apart * portion
        squares += apart * apart * (before * portion)
    count = tl.maximum((end - begin - row + ROWS - 1) // ROWS, 0).to(tl.float32)
    middle = tl.sum(mean * count[:, None], 0) / (end - begin).to(tl.float32)
    apart = mean - middle[None, :]
    total = tl.sum(squares + apart * apart * count[:, None], 0)
    place = part + chunk * channels + channel
    tl.store(place, middle, mask=live)
    tl.store(place + chunks * channels, total, mask=live)


@kernel(do_not_specialize=["rows", "share", "chunks"])
def _combine(
    part, mean, variance, running_mean, running_variance, rows, channels, share, chunks, momentum,
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
    middle = tl.sum(total, 0) / rows.to(tl.float32)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(0, chunks, ROWS):
        index = start + tl.arange(0, ROWS)
        seen = (index < chunks)[:, None] & live[None, :]
        count = tl.minimum(share, rows - index * share).to(tl.float32)
        place = index[:, None] * channels + channel[None, :]
        apart = of_rows(part, 0, place, seen) - middle[None, :]
        inner = of_rows(part, chunks * channels, place, seen)
        total += tl.where(seen, inner + apart * apart * count[:, None], 0.0)
    squares = tl.sum(total, 0)
    tl.store(mean + channel, middle, mask=live)
    tl.store(variance + channel, squares / rows.to(tl.float32), mask=live)
    if running_mean is not None:
        old = of_channels(running_mean, channel, live)
        new = old + (middle - old) * momentum
        tl.store(running_mean + channel, new.to(running_mean.dtype.element_ty), mask=live)
    if running_variance is not None:
        old = of_channels(running_variance, channel, live)
        new = old + (squares / (rows - 1).to(tl.float32) - old) * momentum
        tl.store(running_variance + channel, new.to(running_variance.dtype.element_ty), mask=live)


def norm_act(
    x: Tensor, mean: Tensor, variance: Tensor, weight: Tensor, bias: Tensor, residual: Tensor | None, eps: float
) -> Tensor:
    """Relu of the norm of x [R, C], plus residual [R, C] if there is one: [R, C]."""
    tiles.check(x, {"residual": residual}, {"mean": mean, "variance": variance, "weight": weight, "bias": bias})
    return _launch(x, (mean, variance, weight, bias), residual, (None, None, None, None), eps)


def norms_add_act(
    x: Tensor, mean: Tensor, variance: Tensor, weight: Tensor, bias: Tensor,
    shortcut: Tensor, shortcut_mean: Tensor, shortcut_variance: Tensor, shortcut_weight: Tensor, shortcut_bias: Tensor,
    eps: float,
) -> Tensor:  # fmt: skip
    """Relu of the sum of the norms of x and shortcut [R, C] each: [R, C]."""
    channels: dict[str, Tensor | None] = {
        "mean": mean, "variance": variance, "weight": weight, "bias": bias, "shortcut_mean": shortcut_mean,
        "shortcut_variance": shortcut_variance, "shortcut_weight": shortcut_weight, "shortcut_bias": shortcut_bias,
    }  # fmt: skip
    tiles.check(x, {"shortcut": shortcut}, channels)
    norm = (shortcut_mean, shortcut_variance, shortcut_weight, shortcut_bias)
    return _launch(x, (mean, variance, weight, bias), shortcut, norm, eps)


def bias_act(x: Tensor, bias: Tensor, residual: Tensor | None) -> Tensor:
    """Relu of x [R, C] plus bias [C] plus residual [R, C] if there is one: [R, C]."""
    tiles.check(x, {"residual": residual}, {"bias": bias})
    return _launch(x, (None, None, None, bias), residual, (None, None, None, None), 0.0)


def _launch(
    x: Tensor,
    norm: tuple[Tensor | None, ...],
    other: Tensor | None,
    other_norm: tuple[Tensor | None, ...],
    eps: float,
) -> Tensor:
    rows, channels = x.shape
    out = x.new_empty(rows, channels)
    share, programs = tiles.rows_to_write(rows, channels, tiles.APPLY)
    _apply[(programs,)](
        x.contiguous(), *norm, None if other is None else other.contiguous(), *other_norm, out, rows, channels, share,
        eps, **tiles.APPLY.code(),
    )  # fmt: skip
    return out


def batch_statistics(
    x: Tensor, running_mean: Tensor | None, running_variance: Tensor | None, momentum: float
) -> tuple[Tensor, Tensor]:
    """Mean and variance [C] float32 of x [R, C]; running ones are moved towards them in place."""
    tiles.check(x, {}, {"running_mean": running_mean, "running_variance": running_variance})
    rows, channels = x.shape
    share, chunks, programs = tiles.rows_to_sum(rows, channels, tiles.MOMENTS)
    part = torch.empty(2, chunks, channels, dtype=torch.float32, device=x.device)
    mean, variance = (torch.empty(channels, dtype=torch.float32, device=x.device) for _ in range(2))
    _moments[(programs,)](x.contiguous(), part, rows, channels, share, chunks, **tiles.MOMENTS.code())
    _combine[(ceil_div(channels, tiles.FINISH.channels),)](
        part, mean, variance, running_mean, running_variance, rows, channels, share, chunks, momentum,
        **tiles.FINISH.code(),
    )  # fmt: skip
    for running in (running_mean, running_variance):
        if running is not None and not running.is_inference():
            # Autograd then refuses a backward that was to use what it was before, as of every change in place.
            torch.autograd.graph.increment_version(running)
    return mean, variance
