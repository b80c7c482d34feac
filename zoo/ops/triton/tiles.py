"""Kernels over tiles of rows and columns: sums over rows, what stands around products, images in windows.

Sums take two steps: programs add up rows of their own, and a last kernel adds their parts in float32, in a fixed order.

Around products stand biases, residuals, GELU, and units gated by GELU or SiLU. A product fused with its gate loads
tiles by Hopper's TMA, which fills with zeros what lies outside, and multiplies the same rows by a tile of each half.
Two programs fit a multiprocessor, so that one multiplies while the other is at its gate.

Images are in channels_last. The compiler's code for symbolic sizes divides the place of each number by a width that it
does not know, and reads numbers one by one; here places in a tile are sums. Sizes are arguments, so that one
compilation serves all levels of a model.

Shape legend: R rows (pixels of all images), C channels or columns, I width inside the MLP, B images, H height, W width,
P parts, S sums that the parts hold side by side.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from zoo.engine.kernel import kernel
from zoo.ops.common import ceil_div


@triton.jit
def tile_of(rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """A program's first row, rows [ROWS] from there on, columns [COLUMNS], and which of them are there."""
    across = tl.cdiv(columns, COLUMNS)
    first = (tl.program_id(0) // across).to(tl.int64) * ROWS
    row = tl.arange(0, ROWS)
    column = (tl.program_id(0) % across) * COLUMNS + tl.arange(0, COLUMNS)
    seen = (first + row < rows)[:, None] & (column < columns)[None, :]
    return first, row, column, seen


# Rows and columns of a tile, 8 warps: 32 bytes a thread in half precision, where a warp reads lines as they are.
ROWS, COLUMNS = 8, 512
# Parts of a tile's columns at most: three tiles of a width of 3,072 for each half of a multiprocessor of a large GPU.
PARTS = 128
# Parts that the last kernel reads at once, and its columns: many programs, for little is read.
PARTS_AT_ONCE, LAST_COLUMNS = 128, 16


@kernel(do_not_specialize=["rows"])
def _column_sums(x, part, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    mine = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    below = tl.arange(0, ROWS)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(mine * ROWS, rows, tl.num_programs(1) * ROWS):
        seen = (first + below < rows)[:, None] & (column < columns)[None, :]
        place = first * columns + below[:, None] * columns + column[None, :]
        total += tl.load(x + place, mask=seen, other=0.0).to(tl.float32)
    tl.store(part + mine * columns + column, tl.sum(total, 0), mask=column < columns)


@triton.jit
def total_of(part, parts, stride, column, live, PARTS: tl.constexpr, COLUMNS: tl.constexpr):
    """Parts [P, ...], so many numbers apart, added up in their order, of columns [COLUMNS] where they are ``live``."""
    total = tl.zeros([PARTS, COLUMNS], tl.float32)
    for start in range(0, parts, PARTS):
        index = start + tl.arange(0, PARTS)
        seen = (index < parts)[:, None] & live[None, :]
        total += tl.load(part + index[:, None] * stride + column[None, :], mask=seen, other=0.0)
    return tl.sum(total, 0)


@kernel(do_not_specialize=["parts"])
def _add_parts(part, first, second, third, parts, columns, PARTS: tl.constexpr, COLUMNS: tl.constexpr):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    live = column < columns
    which = tl.program_id(1)
    value = total_of(part + which * columns, parts, tl.num_programs(1) * columns, column, live, PARTS, COLUMNS)
    tl.store(first + column, value.to(first.dtype.element_ty), mask=live & (which == 0))
    if second is not None:
        tl.store(second + column, value.to(second.dtype.element_ty), mask=live & (which == 1))
    if third is not None:
        tl.store(third + column, value.to(third.dtype.element_ty), mask=live & (which == 2))


def add_parts(part: Tensor, *sums: Tensor) -> None:
    """Parts [P, S, C] in float32 -> S sums [C], up to three, each written in its own dtype."""
    parts, _, columns = part.shape
    grid = ceil_div(columns, LAST_COLUMNS), len(sums)
    first, second, third = (*sums, None, None)[:3]
    _add_parts[grid](part, first, second, third, parts, columns, PARTS=PARTS_AT_ONCE, COLUMNS=LAST_COLUMNS, num_warps=8)


def column_sums(x: Tensor, dtype: torch.dtype) -> Tensor:
    """[..., C] -> [C] in another dtype."""
    x, columns = x.contiguous(), x.shape[-1]
    out = x.new_empty(columns, dtype=dtype)
    rows = x.numel() // columns
    # Where one tile holds all columns there are no others beside it to be read.
    parts = max(1, min(ceil_div(rows, ROWS), PARTS if columns > COLUMNS else 2 * PARTS))
    part = x.new_empty(parts, 1, columns, dtype=torch.float32)
    _column_sums[(ceil_div(columns, COLUMNS), parts)](x, part, rows, columns, ROWS=ROWS, COLUMNS=COLUMNS, num_warps=8)
    add_parts(part, out)
    return out


# An image's tile: a thread reads 8 numbers of each summand. Widths in the models are multiples of 64.
IMAGE_TILE = {"ROWS": 16, "COLUMNS": 64, "num_warps": 4}


def _launch(kernel: Any, rows: int, columns: int, *given: Any) -> None:
    if rows and columns:
        tiles = ceil_div(rows, IMAGE_TILE["ROWS"]) * ceil_div(columns, IMAGE_TILE["COLUMNS"])
        kernel[(tiles,)](*given, **IMAGE_TILE)


@kernel(do_not_specialize=["rows"])
def _conv_add(x, bias, residual, out, rows, columns, added, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    first, row, column, seen = tile_of(rows, columns, ROWS, COLUMNS)
    place = row[:, None] * columns + column[None, :]
    # A mask and no branch, so that both loads are under way before either is waited for.
    both = seen & (column < added)[None, :]
    value = tl.load(x + first * columns + place, mask=seen, other=0.0).to(tl.float32)
    value += tl.load(residual + first * columns + place, mask=both, other=0.0).to(tl.float32)
    value += tl.load(bias + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]
    tl.store(out + first * columns + place, value.to(out.dtype.element_ty), mask=seen)


@kernel(do_not_specialize=["rows", "height", "width", "lines", "across", "stride"])
def _windows(x, out, rows, height, width, lines, across, stride, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    first, row, column, seen = tile_of(rows, columns, ROWS, COLUMNS)
    # A row is one of the nine pixels that a pixel of the output is made of.
    pixel = (first + row) // 9
    ninth = (first + row) - pixel * 9
    line = pixel // across
    image = line // lines
    down = (line - image * lines) * stride + ninth // 3 - 1
    right = (pixel - line * across) * stride + ninth % 3 - 1
    inside = (down >= 0) & (down < height) & (right >= 0) & (right < width)
    place = ((image * height + down) * width + right)[:, None] * columns + column[None, :]
    value = tl.load(x + place, mask=seen & inside[:, None], other=0.0)
    tl.store(out + first * columns + row[:, None] * columns + column[None, :], value, mask=seen)


def conv_add(x: Tensor, bias: Tensor, residual: Tensor | None) -> Tensor:
    """[R, C] plus [C] plus [R, C], if any: [R, C]."""
    x, (rows, columns) = x.contiguous(), x.shape
    out = torch.empty_like(x, dtype=x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype))
    # Where there is none another tensor stands for it, of which nothing is read.
    other, added = (x, 0) if residual is None else (residual.contiguous(), columns)
    _launch(_conv_add, rows, columns, x, bias.contiguous(), other, out, rows, columns, added)
    return out


def windows(x: Tensor, stride: int) -> Tensor:
    """[B, H, W, C] -> [B H' W', 9 C], H' = ⌈H / stride⌉: what a 3 × 3 convolution with a padding of 1 multiplies."""
    count, height, width, columns = x.shape
    lines, across = ceil_div(height, stride), ceil_div(width, stride)
    rows = count * lines * across
    out = x.new_empty(rows, 9 * columns)
    sizes = 9 * rows, height, width, lines, across, stride, columns
    _launch(_windows, 9 * rows, columns, x.contiguous(), out, *sizes)
    return out


# Pixels of the result that a program writes.
PIXELS = 128


@kernel
def _space_to_depth(
    x, out, stride_n, stride_c, stride_y, stride_x, height, width, pixels, H, W, offset,
    C: tl.constexpr, D: tl.constexpr, PIXELS: tl.constexpr,
):  # fmt: skip
    pixel = tl.program_id(0).to(tl.int64) * PIXELS + tl.arange(0, PIXELS)
    channel = tl.arange(0, D)
    image, place = pixel // (H * W), pixel % (H * W)
    square, c = channel // (D // 4), channel % (D // 4)
    y = 2 * (place // W)[:, None] + (square // 2)[None, :] - offset
    column = 2 * (place % W)[:, None] + (square % 2)[None, :] - offset
    inside = (y >= 0) & (y < height) & (column >= 0) & (column < width)
    inside &= (pixel < pixels)[:, None] & (c < C)[None, :]
    source = (image * stride_n)[:, None] + (c * stride_c)[None, :] + y * stride_y + column * stride_x
    value = tl.load(x + source, mask=inside, other=0.0)
    tl.store(out + (pixel * D)[:, None] + channel, value.to(out.dtype.element_ty), mask=(pixel < pixels)[:, None])


def space_to_depth(x: Tensor, offset: int, height: int, width: int, channels: int, dtype: torch.dtype) -> Tensor:
    """As ``zoo.ops.images.space_to_depth``; ``channels`` is a power of two."""
    out = x.new_empty(x.shape[0], height, width, channels, dtype=dtype)
    pixels = x.shape[0] * height * width
    _space_to_depth[(ceil_div(pixels, PIXELS),)](
        x, out, *x.stride(), x.shape[2], x.shape[3], pixels, height, width, offset,
        C=x.shape[1], D=channels, PIXELS=PIXELS, num_warps=4,
    )  # fmt: skip
    return out.permute(0, 3, 1, 2)


@triton.jit
def erf_form(x):
    """|x|, and the normal distribution beyond it: the probability, and |x| times the density there.

    The probability by 7.1.26 of Abramowitz and Stegun, Handbook of Mathematical Functions, whose error is 1.5e-7 at
    most; it shares its exponential with the density. An exact erf has twice the instructions, and would take longer
    than memory.
    """
    # Behind 64 nothing is left of the tail, and infinity times nothing is not a number.
    size = tl.minimum(tl.abs(x), 64.0, propagate_nan=tl.PropagateNan.ALL)
    t = 1.0 + 0.23164189 * size
    t = tl.rsqrt(t * t)  # 1 / t in one instruction, where a division takes eight
    bell = tl.exp2(-0.72134752 * size * size)
    tail = 1.061405429 * t - 1.453152027
    tail = tail * t + 1.421413741
    tail = tail * t - 0.284496736
    tail = tail * t + 0.254829592
    return size, 0.5 * tail * t * bell, 0.39894228 * size * bell


@triton.jit
def _gelu(x):
    """The erf form. Taken off max(x, 0) the tail cancels nowhere: in float32 the error stays below 4e-7."""
    size, tail, _ = erf_form(x)
    return tl.maximum(x, 0.0) - size * tail


@triton.jit
def _tanh_form(x):
    """What x is multiplied with, a sigmoid, and the slope of what stands in it, times x."""
    square = x * x
    within = 1.5957691216 * x * (1.0 + 0.044715 * square)
    return tl.sigmoid(within), 1.5957691216 * x * (1.0 + 0.134145 * square)


@kernel(do_not_specialize=["rows"])
def _bias_gelu(x, bias, out, rows, columns, TANH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    # Rows lie along the axis that has no limit.
    first = tl.program_id(0).to(tl.int64) * ROWS
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    below = tl.arange(0, ROWS)
    seen = (first + below < rows)[:, None] & (column < columns)[None, :]
    place = first * columns + below[:, None] * columns + column[None, :]
    value = tl.load(x + place, mask=seen, other=0.0).to(tl.float32)
    value += tl.load(bias + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]
    value = value * _tanh_form(value)[0] if TANH else _gelu(value)
    tl.store(out + place, value.to(out.dtype.element_ty), mask=seen)


@kernel(do_not_specialize=["rows"])
def _bias_gelu_backward(
    grad, x, bias, out, part, rows, columns, TANH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    mine = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    below = tl.arange(0, ROWS)
    added = tl.load(bias + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(mine * ROWS, rows, tl.num_programs(1) * ROWS):
        seen = (first + below < rows)[:, None] & (column < columns)[None, :]
        place = first * columns + below[:, None] * columns + column[None, :]
        change = tl.load(grad + place, mask=seen, other=0.0).to(tl.float32)
        value = tl.load(x + place, mask=seen, other=0.0).to(tl.float32) + added
        if TANH:
            opened, slope = _tanh_form(value)
            change *= opened + opened * (1.0 - opened) * slope
        else:
            _, tail, inner = erf_form(value)
            beyond = tail - inner
            change *= tl.where(value < 0.0, beyond, 1.0 - beyond)
        tl.store(out + place, change.to(out.dtype.element_ty), mask=seen)
        total += change
    tl.store(part + mine * columns + column, tl.sum(total, 0), mask=column < columns)


def bias_gelu(x: Tensor, bias: Tensor, tanh: bool) -> Tensor:
    """GELU of x [..., I] plus bias [I]: [..., I]."""
    x, bias = x.contiguous(), bias.contiguous()
    out, columns = torch.empty_like(x), x.shape[-1]
    if rows := x.numel() // columns:
        grid = ceil_div(rows, ROWS), ceil_div(columns, COLUMNS)
        _bias_gelu[grid](x, bias, out, rows, columns, TANH=tanh, ROWS=ROWS, COLUMNS=COLUMNS, num_warps=8)
    return out


def bias_gelu_backward(grad: Tensor, x: Tensor, bias: Tensor, tanh: bool) -> tuple[Tensor, Tensor]:
    """Gradient of the output [..., I] -> of x [..., I] and of the bias [I]."""
    grad, x, bias = grad.contiguous(), x.contiguous(), bias.contiguous()
    out, grad_bias, columns = torch.empty_like(x), torch.empty_like(bias), x.shape[-1]
    rows = x.numel() // columns
    parts = max(1, min(ceil_div(rows, ROWS), PARTS))
    part = x.new_empty(parts, 1, columns, dtype=torch.float32)
    _bias_gelu_backward[(ceil_div(columns, COLUMNS), parts)](
        grad, x, bias, out, part, rows, columns, TANH=tanh, ROWS=ROWS, COLUMNS=COLUMNS, num_warps=8
    )
    add_parts(part, grad_bias)
    return out, grad_bias


# A tile of the gate with GELU, of which a thread reads 16 numbers of each half, and of the one with SiLU. GELU's widths
# are multiples of 256.
GATE, SILU = {"ROWS": 8, "COLUMNS": 256}, {"ROWS": 1, "COLUMNS": 2048}
# Programs of the backward at most, shared between tiles of columns: three a multiprocessor of a large GPU. With SiLU,
# which has no bias to add up a gradient for, as many as a grid can have.
PROGRAMS, MOST_PROGRAMS = 384, 65535
# Of a product's tile: rows, columns of each half, channels at once; and what is under way. The fastest on an H200.
PRODUCT_ROWS, PRODUCT_COLUMNS, CHANNELS, STAGES = 128, 64, 64, 3
# Tiles of rows that take turns at the same columns, so that these are still in the cache.
TURNS = 8
# Of more channels a product is long enough to be worth more threads.
FEW_CHANNELS = 512


@kernel(do_not_specialize=["rows"])
def _gated(x, bias, out, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """With a bias the first half times GELU of the second, without one SiLU of the first half times the second."""
    first, row, column, seen = tile_of(rows, columns, ROWS, COLUMNS)
    x += first * (2 * columns)
    place = row[:, None] * (2 * columns) + column[None, :]
    left = tl.load(x + place, mask=seen, other=0.0).to(tl.float32)
    right = tl.load(x + columns + place, mask=seen, other=0.0).to(tl.float32)
    if bias is None:
        result = left * tl.sigmoid(left) * right
    else:
        live = column < columns
        left += tl.load(bias + column, mask=live, other=0.0).to(tl.float32)[None, :]
        right += tl.load(bias + columns + column, mask=live, other=0.0).to(tl.float32)[None, :]
        result = left * _gelu(right)
    place = row[:, None] * columns + column[None, :]
    tl.store(out + first * columns + place, result.to(out.dtype.element_ty), mask=seen)


@kernel(do_not_specialize=["rows"])
def _gated_backward(grad, x, bias, out, part, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    mine = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    below = tl.arange(0, ROWS)
    live = column < columns
    if bias is not None:
        left_bias = tl.load(bias + column, mask=live, other=0.0).to(tl.float32)[None, :]
        right_bias = tl.load(bias + columns + column, mask=live, other=0.0).to(tl.float32)[None, :]
        lefts = tl.zeros([ROWS, COLUMNS], tl.float32)
        rights = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(mine * ROWS, rows, tl.num_programs(1) * ROWS):
        seen = (first + below < rows)[:, None] & live[None, :]
        place = first * columns + below[:, None] * columns + column[None, :]
        # Rows of both halves are twice as long.
        wide = first * (2 * columns) + below[:, None] * (2 * columns) + column[None, :]
        change = tl.load(grad + place, mask=seen, other=0.0).to(tl.float32)
        left = tl.load(x + wide, mask=seen, other=0.0).to(tl.float32)
        right = tl.load(x + columns + wide, mask=seen, other=0.0).to(tl.float32)
        if bias is None:
            opened = tl.sigmoid(left)
            silu = left * opened
            of_left, of_right = change * right * (opened + silu * (1.0 - opened)), change * silu
        else:
            left += left_bias
            right += right_bias
            size, tail, inner = erf_form(right)
            opened = tl.maximum(right, 0.0, propagate_nan=tl.PropagateNan.ALL) - size * tail
            slope = tl.where(right < 0.0, tail - inner, 1.0 - (tail - inner))
            of_left, of_right = change * opened, change * left * slope
            lefts += of_left
            rights += of_right
        tl.store(out + wide, of_left.to(out.dtype.element_ty), mask=seen)
        tl.store(out + columns + wide, of_right.to(out.dtype.element_ty), mask=seen)
    if bias is not None:
        part += mine * (2 * columns) + column
        tl.store(part, tl.sum(lefts, 0), mask=live)
        tl.store(part + columns, tl.sum(rights, 0), mask=live)


@kernel(do_not_specialize=["rows", "channels", "columns"])
def _gated_gelu_product(
    x, weight, bias, out, rows, channels, columns,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, CHANNELS: tl.constexpr, TURNS: tl.constexpr,
):  # fmt: skip
    down, across = tl.cdiv(rows, ROWS), tl.cdiv(columns, COLUMNS)
    turn = tl.program_id(0) // (TURNS * across)
    within = tl.program_id(0) % (TURNS * across)
    together = tl.minimum(down - turn * TURNS, TURNS)
    row = (turn * TURNS + within % together) * ROWS
    column = within // together * COLUMNS
    value = tl.zeros([ROWS, COLUMNS], tl.float32)
    gate = tl.zeros([ROWS, COLUMNS], tl.float32)
    for channel in range(0, channels, CHANNELS):
        tile = x.load([row, channel])
        value = tl.dot(tile, weight.load([column, channel]).T, value)
        gate = tl.dot(tile, weight.load([columns + column, channel]).T, gate)
    place = column + tl.arange(0, COLUMNS)
    value += tl.load(bias + place, mask=place < columns, other=0.0).to(tl.float32)[None, :]
    gate += tl.load(bias + columns + place, mask=place < columns, other=0.0).to(tl.float32)[None, :]
    out.store([row, column], (value * _gelu(gate)).to(out.dtype))


def gated(x: Tensor, bias: Tensor | None) -> Tensor:
    """``gated_gelu`` of x [..., 2 I] and a bias [2 I], or ``swiglu`` of x alone: [..., I]."""
    x, columns = x.contiguous(), x.shape[-1] // 2
    out = x.new_empty(*x.shape[:-1], columns)
    if out.numel():
        rows, (tile, warps) = out.numel() // columns, (SILU, 8) if bias is None else (GATE, 4)
        grid = (ceil_div(rows, tile["ROWS"]) * ceil_div(columns, tile["COLUMNS"]),)
        bias = None if bias is None else bias.contiguous()
        _gated[grid](x, bias, out, rows, columns, **tile, num_warps=warps)
    return out


def gated_backward(grad: Tensor, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Gradient of the output [..., I] -> of x [..., 2 I] and of the bias [2 I], None without one."""
    grad, x, columns = grad.contiguous(), x.contiguous(), grad.shape[-1]
    out, part, grad_bias = torch.empty_like(x), None, None
    tile, most = (SILU, MOST_PROGRAMS) if bias is None else (GATE, PROGRAMS)
    rows, across = grad.numel() // max(columns, 1), ceil_div(columns, tile["COLUMNS"])
    parts = max(1, min(ceil_div(rows, tile["ROWS"]), most // max(across, 1)))
    if bias is not None:
        bias, grad_bias = bias.contiguous(), bias.new_empty(2 * columns)
        part = x.new_empty(parts, 1, 2 * columns, dtype=torch.float32)
    if columns:
        _gated_backward[(across, parts)](grad, x, bias, out, part, rows, columns, **tile, num_warps=8)
        if part is not None and grad_bias is not None:
            add_parts(part, grad_bias)
    return out, grad_bias


def gated_gelu_product(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """X [R, C] by weight [2 I, C], plus bias [2 I]; GELU of the second half times the first: [R, I]."""
    (rows, channels), columns = x.shape, weight.shape[0] // 2
    x, out = x.contiguous(), x.new_empty(rows, columns)
    if out.numel():
        grid = (ceil_div(rows, PRODUCT_ROWS) * ceil_div(columns, PRODUCT_COLUMNS),)
        _gated_gelu_product[grid](
            TensorDescriptor.from_tensor(x, [PRODUCT_ROWS, CHANNELS]),
            TensorDescriptor.from_tensor(weight, [PRODUCT_COLUMNS, CHANNELS]), bias.contiguous(),
            TensorDescriptor.from_tensor(out, [PRODUCT_ROWS, PRODUCT_COLUMNS]), rows, channels, columns,
            ROWS=PRODUCT_ROWS, COLUMNS=PRODUCT_COLUMNS, CHANNELS=CHANNELS, TURNS=TURNS,
            num_warps=4 if channels <= FEW_CHANNELS else 8, num_stages=STAGES,
        )  # fmt: skip
    return out
