"""Kernels over tiles of rows and columns: sums over rows, epilogues of matrix products, windows of images (im2col).

Sums take two steps: each program adds its own rows, and a last kernel adds the parts in float32, in a fixed order.

Epilogues are biases, residuals, GELU, and units gated by GELU or SiLU. The product that ends in one loads tiles by
Hopper's TMA, which pads with zeros; with a gate it multiplies the same rows by a tile of each half. Two programs fit on
a multiprocessor, so that one multiplies while the other computes its epilogue.

Images are in channels_last. The compiler's code for symbolic sizes divides the offset of each element by an unknown
width and loads elements one by one; here the offsets in a tile are sums. Sizes are runtime arguments, so that one
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

from zoo.engine.kernel import follow, kernel
from zoo.ops.common import ceil_div


@triton.jit
def tile_of(rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """A program's first row, rows [ROWS] relative to it, columns [COLUMNS], and the mask of valid elements."""
    across = tl.cdiv(columns, COLUMNS)
    first = (tl.program_id(0) // across).to(tl.int64) * ROWS
    row = tl.arange(0, ROWS)
    column = (tl.program_id(0) % across) * COLUMNS + tl.arange(0, COLUMNS)
    seen = (first + row < rows)[:, None] & (column < columns)[None, :]
    return first, row, column, seen


# Tile (rows, columns), 8 warps: 32 bytes per thread in half precision, with whole cache lines per warp.
ROWS, COLUMNS = 8, 512
# Maximum parts of a tile's columns. For a width of 3,072: three tiles per half multiprocessor of a large GPU. The
# backward of GELU takes half as many, with three tiles in flight in each.
PARTS = 128
# Tile of the last kernel (parts, columns): many small programs, since it reads little.
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
    """Sum of parts [P, ...], ``stride`` elements apart, in order, for the ``live`` ones of columns [COLUMNS]."""
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
    """Add parts [P, S, C] in float32 into S sums [C], at most three, each in its own dtype."""
    parts, _, columns = part.shape
    grid = ceil_div(columns, LAST_COLUMNS), len(sums)
    first, second, third = (*sums, None, None)[:3]
    _add_parts[grid](part, first, second, third, parts, columns, PARTS=PARTS_AT_ONCE, COLUMNS=LAST_COLUMNS, num_warps=8)


def column_sums(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Sum x [..., C] over all rows: [C] in another dtype."""
    x, columns = x.contiguous(), x.shape[-1]
    out = x.new_empty(columns, dtype=dtype)
    rows = x.numel() // columns
    # If one tile holds all columns, no other tiles fill the GPU, so the rows form more parts.
    parts = max(1, min(ceil_div(rows, ROWS), PARTS if columns > COLUMNS else 2 * PARTS))
    part = x.new_empty(parts, 1, columns, dtype=torch.float32)
    _column_sums[(ceil_div(columns, COLUMNS), parts)](x, part, rows, columns, ROWS=ROWS, COLUMNS=COLUMNS, num_warps=8)
    add_parts(part, out)
    return out


# Tile of an image: a thread reads 8 elements of each summand. Widths in the models are multiples of 64.
IMAGE_TILE = {"ROWS": 16, "COLUMNS": 64, "num_warps": 4}


def _launch(kernel: Any, rows: int, columns: int, *given: Any) -> None:
    if rows and columns:
        tiles = ceil_div(rows, IMAGE_TILE["ROWS"]) * ceil_div(columns, IMAGE_TILE["COLUMNS"])
        kernel[(tiles,)](*given, **IMAGE_TILE)


@kernel(do_not_specialize=["rows"])
def _conv_add(x, bias, residual, out, rows, columns, added, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    first, row, column, seen = tile_of(rows, columns, ROWS, COLUMNS)
    place = row[:, None] * columns + column[None, :]
    # A mask instead of a branch, so that both loads are issued before either result is used.
    both = seen & (column < added)[None, :]
    value = tl.load(x + first * columns + place, mask=seen, other=0.0).to(tl.float32)
    value += tl.load(residual + first * columns + place, mask=both, other=0.0).to(tl.float32)
    value += tl.load(bias + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]
    tl.store(out + first * columns + place, value.to(out.dtype.element_ty), mask=seen)


@kernel(do_not_specialize=["rows", "height", "width", "lines", "across", "stride"])
def _windows(x, out, rows, height, width, lines, across, stride, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    first, row, column, seen = tile_of(rows, columns, ROWS, COLUMNS)
    # A row is one of the nine input pixels of an output pixel.
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
    """X [R, C] plus bias [C] plus residual [R, C], if given: [R, C]."""
    x, (rows, columns) = x.contiguous(), x.shape
    out = torch.empty_like(x, dtype=x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype))
    # Without a residual x is an unread placeholder.
    other, added = (x, 0) if residual is None else (residual.contiguous(), columns)
    _launch(_conv_add, rows, columns, x, bias.contiguous(), other, out, rows, columns, added)
    return out


def windows(x: Tensor, stride: int) -> Tensor:
    """im2col of a 3 × 3 convolution with a padding of 1: [B, H, W, C] -> [B H' W', 9 C], H' = ⌈H / stride⌉."""
    count, height, width, columns = x.shape
    lines, across = ceil_div(height, stride), ceil_div(width, stride)
    rows = count * lines * across
    out = x.new_empty(rows, 9 * columns)
    sizes = 9 * rows, height, width, lines, across, stride, columns
    _launch(_windows, 9 * rows, columns, x.contiguous(), out, *sizes)
    return out


# Output pixels of a program.
PIXELS = 128


@kernel
def _space_to_depth(
    x, out, stride_n, stride_c, stride_y, stride_x, height, width, pixels, H, W, offset,
    C: tl.constexpr, D: tl.constexpr, PIXELS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    follow(OVERLAP)
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
    """See ``zoo.ops.images.space_to_depth``. ``channels`` is a power of two."""
    out = x.new_empty(x.shape[0], height, width, channels, dtype=dtype)
    pixels = x.shape[0] * height * width
    _space_to_depth[(ceil_div(pixels, PIXELS),)](
        x, out, *x.stride(), x.shape[2], x.shape[3], pixels, height, width, offset,
        C=x.shape[1], D=channels, PIXELS=PIXELS, OVERLAP=False, num_warps=4,
    )  # fmt: skip
    return out.permute(0, 3, 1, 2)


@triton.jit
def erf_form(x):
    """|x|, the normal distribution's upper tail probability at |x|, and |x| times the density there.

    The probability is formula 7.1.26 of Abramowitz and Stegun, Handbook of Mathematical Functions, with an error of at
    most 1.5e-7. It shares its exponential with the density. An exact erf takes twice the instructions and would make
    the kernel compute-bound.
    """
    # Beyond 64 the tail is zero, and infinity times zero is NaN.
    size = tl.minimum(tl.abs(x), 64.0, propagate_nan=tl.PropagateNan.ALL)
    t = 1.0 + 0.23164189 * size
    t = tl.rsqrt(t * t)  # 1 / t in one instruction; a division takes eight
    bell = tl.exp2(-0.72134752 * size * size)
    tail = 1.061405429 * t - 1.453152027
    tail = tail * t + 1.421413741
    tail = tail * t - 0.284496736
    tail = tail * t + 0.254829592
    return size, 0.5 * tail * t * bell, 0.39894228 * size * bell


@triton.jit
def _gelu(x):
    """GELU by erf, as max(x, 0) minus the tail. This avoids cancellation: the float32 error stays below 4e-7."""
    size, tail, _ = erf_form(x)
    return tl.maximum(x, 0.0) - size * tail


@triton.jit
def _tanh_form(x):
    """GELU by tanh is x times a sigmoid. Returns the sigmoid, and x times the derivative of the sigmoid's argument."""
    square = x * x
    within = 1.5957691216 * x * (1.0 + 0.044715 * square)
    return tl.sigmoid(within), 1.5957691216 * x * (1.0 + 0.134145 * square)


@kernel(do_not_specialize=["rows"])
def _bias_gelu(x, bias, out, rows, columns, TANH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    # Rows are on the grid's first axis, the only one without a small limit.
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
    for first in tl.range(mine * ROWS, rows, tl.num_programs(1) * ROWS, num_stages=3):
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
    """From the gradient of the output [..., I]: the gradients of x [..., I] and of the bias [I]."""
    grad, x, bias = grad.contiguous(), x.contiguous(), bias.contiguous()
    out, grad_bias, columns = torch.empty_like(x), torch.empty_like(bias), x.shape[-1]
    rows = x.numel() // columns
    parts = max(1, min(ceil_div(rows, ROWS), PARTS // 2))
    part = x.new_empty(parts, 1, columns, dtype=torch.float32)
    _bias_gelu_backward[(ceil_div(columns, COLUMNS), parts)](
        grad, x, bias, out, part, rows, columns, TANH=tanh, ROWS=ROWS, COLUMNS=COLUMNS, num_warps=8
    )
    add_parts(part, grad_bias)
    return out, grad_bias


# Tiles of the GELU gate and of the SiLU gate. In the GELU gate a thread reads 16 elements of each half, and widths are
# multiples of 256.
GATE, SILU = {"ROWS": 8, "COLUMNS": 256}, {"ROWS": 1, "COLUMNS": 2048}
# Maximum programs of the backward, over all tiles of columns: three per multiprocessor of a large GPU. SiLU sums no
# bias gradient, so its limit is the grid's.
PROGRAMS, MOST_PROGRAMS = 384, 65535
# Tile of a product (rows, columns, channels) and its pipeline stages: the fastest on an H200. A gated one takes half
# as many columns of each half. With three stages two programs fit on a multiprocessor, with four only one.
PRODUCT_ROWS, PRODUCT_COLUMNS, CHANNELS, STAGES = 128, 128, 64, 3
MULTIPROCESSORS = 132
# Tiles of rows that run consecutively on the same columns, so that the weights stay in the cache.
TURNS = 8
# With more channels a product is long enough for more threads.
FEW_CHANNELS = 512


@kernel(do_not_specialize=["rows"])
def _gated(x, bias, out, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """With a bias: first half times GELU of the second. Without one: SiLU of the first half times the second."""
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
        # Rows of the input hold both halves.
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


@triton.jit
def tile_of_product(down, across, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TURNS: tl.constexpr):
    """First row and first column of a program's tile, of so many tiles down and across."""
    turn = tl.program_id(0) // (TURNS * across)
    within = tl.program_id(0) % (TURNS * across)
    together = tl.minimum(down - turn * TURNS, TURNS)
    return (turn * TURNS + within % together) * ROWS, within // together * COLUMNS


@kernel(do_not_specialize=["rows", "channels", "columns"])
def _product(
    x, weight, bias, count, out, rows, channels, columns, GATED: tl.constexpr, GELU: tl.constexpr, TANH: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, CHANNELS: tl.constexpr, TURNS: tl.constexpr,
):  # fmt: skip
    down, across = tl.cdiv(rows, ROWS), tl.cdiv(columns, COLUMNS)
    if count is not None:
        down = tl.minimum(down, tl.cdiv(tl.load(count), ROWS))
    if tl.program_id(0) < down * across:
        row, column = tile_of_product(down, across, ROWS, COLUMNS, TURNS)
        value = tl.zeros([ROWS, COLUMNS], tl.float32)
        if GATED:
            gate = tl.zeros([ROWS, COLUMNS], tl.float32)
        for channel in range(0, channels, CHANNELS):
            tile = x.load([row, channel])
            value = tl.dot(tile, weight.load([column, channel]).T, value)
            if GATED:
                gate = tl.dot(tile, weight.load([columns + column, channel]).T, gate)
        place = column + tl.arange(0, COLUMNS)
        value += tl.load(bias + place, mask=place < columns, other=0.0).to(tl.float32)[None, :]
        if GATED:
            gate += tl.load(bias + columns + place, mask=place < columns, other=0.0).to(tl.float32)[None, :]
            value = value * _gelu(gate)
        elif TANH:
            value = value * _tanh_form(value)[0]
        elif GELU:
            value = _gelu(value)
        out.store([row, column], value.to(out.dtype))


def gated(x: Tensor, bias: Tensor | None) -> Tensor:
    """``gated_gelu`` of x [..., 2 I] and bias [2 I], or ``swiglu`` of x without a bias: [..., I]."""
    x, columns = x.contiguous(), x.shape[-1] // 2
    out = x.new_empty(*x.shape[:-1], columns)
    if out.numel():
        rows, (tile, warps) = out.numel() // columns, (SILU, 8) if bias is None else (GATE, 4)
        grid = (ceil_div(rows, tile["ROWS"]) * ceil_div(columns, tile["COLUMNS"]),)
        bias = None if bias is None else bias.contiguous()
        _gated[grid](x, bias, out, rows, columns, **tile, num_warps=warps)
    return out


def gated_backward(grad: Tensor, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """From the gradient of the output [..., I]: the gradients of x [..., 2 I] and of the bias [2 I], or None."""
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


def product(x: Tensor, weight: Tensor, bias: Tensor, activation: str = "", count: Tensor | None = None) -> Tensor:
    """X [R, C] times weight [I, C] plus bias [I]: [R, I], then nothing, ``gelu`` (by erf) or ``tanh``.

    ``gated`` takes a weight [2 I, C] and a bias [2 I], and multiplies the first half by GELU of the second. With a
    count [1] int32, rows from it on are not computed.
    """
    gated = activation == "gated"
    (rows, channels), columns = x.shape, weight.shape[0] // (1 + gated)
    x, out = x.contiguous(), x.new_empty(rows, columns)
    if out.numel():
        wide = PRODUCT_COLUMNS // (1 + gated)
        tiles = ceil_div(rows, PRODUCT_ROWS) * ceil_div(columns, wide)
        # Fewer programs at once, each faster, if the last round of pairs would leave most multiprocessors idle.
        alone = ceil_div(tiles, MULTIPROCESSORS) < 1.6 * ceil_div(tiles, 2 * MULTIPROCESSORS)
        _product[(tiles,)](
            TensorDescriptor.from_tensor(x, [PRODUCT_ROWS, CHANNELS]),
            TensorDescriptor.from_tensor(weight, [wide, CHANNELS]), bias.contiguous(), count,
            TensorDescriptor.from_tensor(out, [PRODUCT_ROWS, wide]), rows, channels, columns,
            GATED=gated, GELU=activation == "gelu", TANH=activation == "tanh",
            ROWS=PRODUCT_ROWS, COLUMNS=wide, CHANNELS=CHANNELS, TURNS=TURNS,
            num_warps=8 if gated and channels > FEW_CHANNELS else 4, num_stages=STAGES + (alone and not activation),
        )  # fmt: skip
    return out
