# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs
"""Gradients of norm, residual and relu in two passes over the rows.

    sums         of a chunk of rows, a channel each: of the gradient that the relu let pass, and of it times the
                 normalised row, of both norms where there are two
    total        the chunks' together in their order: the gradients of weight and bias
    gradients    of each row, and of its residual or shortcut

Where nothing was added the relu is computed again; else its output says where it passed. Without the statistics of a
batch the first two are for weight and bias alone, and left out where nobody wants those.

Shape legend: R rows, C channels, K chunks of rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from zoo.ops.common import ceil_div
from zoo.ops.triton.kernel import kernel
from zoo.ops.triton.sums import total_of
from zoo.resnet.kernels import tiles
from zoo.resnet.kernels.tiles import norm_of, of_channels, of_rows, span


@triton.jit
def _passed(grad, out, place, inner, seen, centred, scale, offset):
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
    eps, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    chunk, channel, live, begin, end = span(rows, channels, share, BLOCK)
    middle, spread = norm_of(mean, variance, channel, live, eps)
    scale, offset = spread * of_channels(weight, channel, live), of_channels(bias, channel, live)
    plain = tl.zeros([ROWS, BLOCK], tl.float32)
    along = tl.zeros([ROWS, BLOCK], tl.float32)
    if other is not None:
        other_middle, other_spread = norm_of(other_mean, other_variance, channel, live, eps)
        other_along = tl.zeros([ROWS, BLOCK], tl.float32)
    row = tl.arange(0, ROWS)
    inner = row[:, None] * channels + channel[None, :]
    for start in range(begin, end, ROWS):
        seen = (start + row < end)[:, None] & live[None, :]
        place = (begin.to(tl.int64) + (start - begin)) * channels
        centred = of_rows(x, place, inner, seen) - middle[None, :]
        change = _passed(grad, out, place, inner, seen, centred, scale, offset)
        plain += change
        along += change * centred
        if other is not None:
            other_along += change * (of_rows(other, place, inner, seen) - other_middle[None, :])
    place = part + chunk * channels + channel
    tl.store(place, tl.sum(plain, 0), mask=live)
    tl.store(place + chunks * channels, tl.sum(along, 0) * spread, mask=live)
    if other is not None:
        tl.store(place + 2 * chunks * channels, tl.sum(other_along, 0) * other_spread, mask=live)


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
    grad_other, rows, channels, share, eps, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    _, channel, live, begin, end = span(rows, channels, share, BLOCK)
    middle, spread = norm_of(mean, variance, channel, live, eps)
    scale, offset = spread * of_channels(weight, channel, live), of_channels(bias, channel, live)
    if other is not None:
        other_middle, other_spread = norm_of(other_mean, other_variance, channel, live, eps)
        other_scale = other_spread * of_channels(other_weight, channel, live)
    if totals is not None:
        # Statistics of the batch move with each row.
        count = rows.to(tl.float32)
        plain = of_channels(totals, channel, live) / count
        along = of_channels(totals + channels, channel, live) / count * spread * scale
        if other is not None:
            other_along = of_channels(totals + 2 * channels, channel, live) / count * other_spread * other_scale
    row = tl.arange(0, ROWS)
    inner = row[:, None] * channels + channel[None, :]
    for start in range(begin, end, ROWS):
        seen = (start + row < end)[:, None] & live[None, :]
        place = (begin.to(tl.int64) + (start - begin)) * channels
        centred = of_rows(x, place, inner, seen) - middle[None, :]
        change = _passed(grad, out, place, inner, seen, centred, scale, offset)
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


def norm_act_backward(
    grad: Tensor, x: Tensor, mean: Tensor, variance: Tensor, weight: Tensor, bias: Tensor, out: Tensor | None,
    eps: float, of_batch: bool, affine: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of x [R, C], of the residual (empty without ``out``), of weight and bias (empty unless ``affine``)."""
    tiles.check(x, {"grad": grad, "out": out}, {"mean": mean, "variance": variance, "weight": weight, "bias": bias})
    grad_x, grad_residual, grad_weight, grad_bias, _, _ = _launch(
        grad, x, (mean, variance, weight, bias), out, None, None, eps, of_batch, affine
    )
    return grad_x, grad_residual, grad_weight, grad_bias


def norms_add_act_backward(
    grad: Tensor, x: Tensor, mean: Tensor, variance: Tensor, weight: Tensor, bias: Tensor,
    shortcut: Tensor, shortcut_mean: Tensor, shortcut_variance: Tensor, shortcut_weight: Tensor, shortcut_bias: Tensor,
    out: Tensor, eps: float, of_batch: bool, affine: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of x and shortcut [R, C], then of weight, bias and the shortcut's (empty unless ``affine``)."""
    channels: dict[str, Tensor | None] = {
        "mean": mean, "variance": variance, "weight": weight, "bias": bias, "shortcut_mean": shortcut_mean,
        "shortcut_variance": shortcut_variance, "shortcut_weight": shortcut_weight, "shortcut_bias": shortcut_bias,
    }  # fmt: skip
    tiles.check(x, {"grad": grad, "shortcut": shortcut, "out": out}, channels)
    other = (shortcut_mean, shortcut_variance, shortcut_weight, shortcut_bias)
    return _launch(grad, x, (mean, variance, weight, bias), out, shortcut, other, eps, of_batch, affine)


def _launch(
    grad: Tensor,
    x: Tensor,
    norm: tuple[Tensor, ...],
    out: Tensor | None,
    other: Tensor | None,
    other_norm: tuple[Tensor, ...] | None,
    eps: float,
    of_batch: bool,
    affine: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    rows, channels = x.shape
    grad, x = grad.contiguous(), x.contiguous()
    out, other = (None if given is None else given.contiguous() for given in (out, other))
    other_mean, other_variance, other_weight, other_bias = other_norm or (None,) * 4
    totals = None
    affines: list[Tensor | None] = [None] * 4
    if of_batch or affine:
        affines = [None if of is None else torch.empty_like(of) for of in (*norm[2:], other_weight, other_bias)]
        totals = _totals(grad, x, norm, out, other, other_mean, other_variance, affines, eps)
    grad_x = torch.empty_like(x)
    grad_other = None if out is None else torch.empty_like(x)
    share, programs = tiles.rows_to_write(rows, channels, tiles.GRADIENTS)
    _gradients[(programs,)](
        grad, x, *norm, out, other, other_mean, other_variance, other_weight, totals if of_batch else None, grad_x,
        grad_other, rows, channels, share, eps, **tiles.GRADIENTS.code(),
    )  # fmt: skip
    empty = [x.new_empty(0) if given is None or not affine else given for given in affines]
    return grad_x, x.new_empty(0) if grad_other is None else grad_other, *empty  # type: ignore[return-value]


def _totals(
    grad: Tensor,
    x: Tensor,
    norm: tuple[Tensor, ...],
    out: Tensor | None,
    other: Tensor | None,
    other_mean: Tensor | None,
    other_variance: Tensor | None,
    affines: list[Tensor | None],
    eps: float,
) -> Tensor:
    """Sums of the gradient, of it times the normalised rows and, of two norms, the shortcut's: [2 or 3, C] float32."""
    rows, channels = x.shape
    kinds = 2 if other is None else 3
    share, chunks, programs = tiles.rows_to_sum(rows, channels, tiles.SUMS)
    part = torch.empty(kinds, chunks, channels, dtype=torch.float32, device=x.device)
    totals = torch.empty(kinds, channels, dtype=torch.float32, device=x.device)
    _sums[(programs,)](
        grad, x, *norm, out, other, other_mean, other_variance, part, rows, channels, share, chunks, eps,
        **tiles.SUMS.code(),
    )  # fmt: skip
    _total[(ceil_div(channels, tiles.FINISH.channels),)](
        part, totals, *affines, channels, chunks, **tiles.FINISH.code()
    )
    return totals
