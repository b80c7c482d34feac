"""Kernels of a training step: AdamW, cross entropy, a scaling whose factor is mostly 1, a check for NaN, and float8.

torch's fused AdamW takes all parameters in one launch, in chunks that few threads walk in turn, and loses a third of
the memory bandwidth. Here each program issues all its loads before it computes, 16 bytes at a time. Up to eight
parameters of one size share a launch, since the tail of each launch leaves multiprocessors idle.

A program of the cross entropy reads a row twice: for its log-sum-exp, by an online softmax, and for the gradient. The
last columns stay in registers. One program of many warps runs on a multiprocessor at a time, so that the active rows
fit into the L2 cache. The second pass goes backwards, since the columns read last are still in the cache.

Shape legend: K parameters of a launch, M numbers of each; n rows, V classes.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from zoo.engine.kernel import kernel
from zoo.ops.common import ceil_div
from zoo.ops.training import FLOAT8, MULTIPLE, TOGETHER, Rounded

# Elements and warps of a program: a thread has 8 elements of each tensor, one vector in half precision.
UPDATE_BLOCK, UPDATE_WARPS = 1024, 4


@triton.jit
def _one_minus_exp(x):
    """1 - e^x for x <= 0, accurate in float32. Near zero, where the difference cancels, it is the series."""
    series = 1.0 + x * (1.0 / 8.0)
    for power in tl.static_range(7, 1, -1):
        series = 1.0 + x * (1.0 / power) * series
    return tl.where(x > -0.5, -x * series, 1.0 - tl.exp(x))


@triton.jit
def _select(index, a, b, c, d, e, f, g, h):
    """Select a pointer by the bits of its index. The compiler keeps the alignment of pointers through selects."""
    bit = index % 2 == 1
    a, c, e, g = tl.where(bit, b, a), tl.where(bit, d, c), tl.where(bit, f, e), tl.where(bit, h, g)
    bit = index // 2 % 2 == 1
    a, e = tl.where(bit, c, a), tl.where(bit, g, e)
    return tl.where(index // 4 == 1, e, a)


# Differently aligned step counters do not trigger another compilation.
@kernel(do_not_specialize_on_alignment=[f"count{index}" for index in range(TOGETHER)])
def _adamw(
    param0, param1, param2, param3, param4, param5, param6, param7, grad0, grad1, grad2, grad3, grad4, grad5, grad6,
    grad7, average0, average1, average2, average3, average4, average5, average6, average7, square0, square1, square2,
    square3, square4, square5, square6, square7, count0, count1, count2, count3, count4, count5, count6, count7, rate,
    scale, skip, numbers, keep, take, log_keep, keep_square, take_square, log_keep_square, eps, decay,
    RATE_ON_DEVICE: tl.constexpr, MAXIMIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # Programs walk one parameter after the other, which suits memory.
    index = tl.program_id(1)
    param = _select(index, param0, param1, param2, param3, param4, param5, param6, param7)
    grad = _select(index, grad0, grad1, grad2, grad3, grad4, grad5, grad6, grad7)
    average = _select(index, average0, average1, average2, average3, average4, average5, average6, average7)
    square = _select(index, square0, square1, square2, square3, square4, square5, square6, square7)
    count = _select(index, count0, count1, count2, count3, count4, count5, count6, count7)
    # A multilingual embedding has more bytes than 32 bits can count.
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    seen = place < numbers
    p = tl.load(param + place, mask=seen, other=0.0).to(tl.float32)
    g = tl.load(grad + place, mask=seen, other=0.0).to(tl.float32)
    m = tl.load(average + place, mask=seen, other=0.0).to(tl.float32)
    v = tl.load(square + place, mask=seen, other=0.0).to(tl.float32)
    steps = tl.load(count).to(tl.float32)
    if RATE_ON_DEVICE:
        rate = tl.load(rate).to(tl.float32)
    if skip is not None:  # noqa: SIM102 (what is None is nothing to load from)
        # Checked after the loads, so that they do not wait for it: bad steps are rare.
        if tl.load(skip) == 1.0:
            return
    if scale is not None:
        g = g / tl.load(scale).to(tl.float32)
        tl.store(grad + place, g.to(grad.dtype.element_ty), mask=seen)
    if MAXIMIZE:
        g = -g
    p -= rate * decay * p
    m = keep * m + take * g
    v = keep_square * v + take_square * (g * g)
    size = rate / _one_minus_exp(steps * log_keep)
    root = 1.0 / tl.sqrt(_one_minus_exp(steps * log_keep_square))
    p -= size * m / (tl.sqrt(v) * root + eps)
    tl.store(param + place, p.to(param.dtype.element_ty), mask=seen)
    tl.store(average + place, m.to(average.dtype.element_ty), mask=seen)
    tl.store(square + place, v.to(square.dtype.element_ty), mask=seen)


def adamw(
    params: list[Tensor], grads: list[Tensor], averages: list[Tensor], squares: list[Tensor], counts: list[Tensor],
    rate: Tensor | float, scale: Tensor | None, skip: Tensor | None, betas: tuple[float, float], eps: float,
    decay: float, maximize: bool,
) -> None:  # fmt: skip
    """Update K parameters in place. The four tensors of a parameter have M elements, equal strides and no gaps.

    All have the dtype of the first parameter; ``counts`` include this step.
    """
    numbers = params[0].numel()
    coefficients: list[float] = []
    for beta in betas:
        # In double precision: 1 minus 0.999 rounded to float32 is wrong in the fifth digit.
        coefficients += [beta, 1.0 - beta, math.log(beta) if beta else -math.inf]
    # Repeated arguments fill the unused parameters. No program is launched for them.
    fill = TOGETHER - len(params)
    pointers = [each for held in (params, grads, averages, squares, counts) for each in held + held[-1:] * fill]
    _adamw[ceil_div(numbers, UPDATE_BLOCK), len(params)](
        *pointers, rate, scale, skip, numbers, *coefficients, eps, decay,
        RATE_ON_DEVICE=isinstance(rate, Tensor), MAXIMIZE=maximize, BLOCK=UPDATE_BLOCK, num_warps=UPDATE_WARPS,
    )  # fmt: skip


# Bytes of a row per step (16 two-byte logits per thread), pipeline stages, and warps. Warps are the maximum of a
# program; on AMD's GPUs a warp has 64 threads.
BYTES, STAGES, WARPS = 32768, 1, 32 if torch.version.hip is None else 16
# Elements per step of a scaling program, maximum programs, and warps. Few programs, since mostly all return at once.
SCALE_BLOCK, SCALE_PROGRAMS, SCALE_WARPS = 4096, 2048, 8
# The largest finite float32.
_LARGEST = tl.constexpr(3.4028234663852886e38)


@triton.jit
def _columns(start, VECTORS: tl.constexpr, WIDTH: tl.constexpr):
    """Columns [VECTORS, WIDTH] from ``start`` on. One thread holds a whole vector."""
    return start + tl.arange(0, VECTORS)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]


@triton.jit
def _online_softmax(most, total, x):
    """Update the maximum and the sum of each lane with logits [VECTORS, WIDTH]."""
    higher = tl.minimum(tl.maximum(most, tl.max(x, 1)), _LARGEST)
    return higher, total * tl.exp(most - higher) + tl.sum(tl.exp(x - higher[:, None]), 1)


@triton.jit
def _gradient(x, column, hit, norm, factor):
    return ((tl.exp(x.to(tl.float32) - norm) - tl.where(column == hit, 1.0, 0.0)) * factor).to(x.dtype)


@kernel
def _cross_entropy(
    logits, labels, scale, losses, columns,
    IGNORED: tl.constexpr, VECTORS: tl.constexpr, WIDTH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits += row * columns
    label = tl.load(labels + row)
    BLOCK: tl.constexpr = VECTORS * WIDTH
    if label == IGNORED:
        for start in range(0, columns, BLOCK):
            column = _columns(start, VECTORS, WIDTH)
            tl.store(logits + column, tl.zeros([VECTORS, WIDTH], logits.dtype.element_ty), mask=column < columns)
        tl.store(losses + row, 0.0)
    else:
        # A label that is not a class has no logit. Its loss is NaN, which the caller notices.
        known = (label >= 0) & (label < columns)
        hit = tl.where(known, label, 0).to(tl.int32)
        factor = tl.where(known, tl.load(scale).to(tl.float32), float("nan"))
        # Loaded before any thread overwrites the logits.
        own = tl.load(logits + hit).to(tl.float32)
        # Maximum and sum of each lane. The initial maximum is finite, since infinity minus infinity is NaN.
        most = tl.full([VECTORS], -_LARGEST, tl.float32)
        total = tl.zeros([VECTORS], tl.float32)
        last = (columns - 1) // BLOCK * BLOCK
        for start in tl.range(0, last, BLOCK, num_stages=STAGES):
            x = tl.load(logits + _columns(start, VECTORS, WIDTH), eviction_policy="evict_last").to(tl.float32)
            most, total = _online_softmax(most, total, x)
        column = _columns(last, VECTORS, WIDTH)
        seen = column < columns
        held = tl.load(logits + column, mask=seen, other=float("-inf"), eviction_policy="evict_first")
        most, total = _online_softmax(most, total, held.to(tl.float32))
        highest = tl.max(most, 0)
        norm = highest + tl.log(tl.sum(total * tl.exp(most - highest), 0))
        tl.store(losses + row, tl.where(known, norm - own, float("nan")))
        # Evicted first: these values are not read soon, while other rows need the cache for their second pass.
        gradient = _gradient(held, column, hit, norm, factor)
        tl.store(logits + column, gradient, mask=seen, eviction_policy="evict_first")
        for back in tl.range(BLOCK, last + 1, BLOCK, num_stages=STAGES):
            column = _columns(last - back, VECTORS, WIDTH)
            gradient = _gradient(tl.load(logits + column, eviction_policy="evict_first"), column, hit, norm, factor)
            tl.store(logits + column, gradient, eviction_policy="evict_first")


@kernel
def _scale(x, factor, numbers, programs, BLOCK: tl.constexpr):
    by = tl.load(factor).to(tl.float32)
    if by != 1.0:
        for start in range(tl.program_id(0).to(tl.int64) * BLOCK, numbers, programs * BLOCK):
            place = start + tl.arange(0, BLOCK)
            value = tl.load(x + place, mask=place < numbers, other=0.0).to(tl.float32)
            tl.store(x + place, (value * by).to(x.dtype.element_ty), mask=place < numbers)


def cross_entropy_rows_(logits: Tensor, labels: Tensor, scale: Tensor, ignored: int) -> Tensor:
    """Losses [n] of logits [n, V]. Overwrites the logits with their gradient times ``scale``."""
    rows, columns = logits.shape
    losses = logits.new_empty(rows, dtype=torch.float32)
    if rows:
        width = 16 // logits.element_size()
        _cross_entropy[(rows,)](
            logits, labels, scale, losses, columns,
            IGNORED=ignored, VECTORS=BYTES // 16, WIDTH=width, STAGES=STAGES, num_warps=WARPS,
        )  # fmt: skip
    return losses


def scale_(x: Tensor, factor: Tensor) -> None:
    """Multiply a gapless tensor in place by a number on the device. A factor of 1 reads and writes no element."""
    if numbers := x.numel():
        programs = min(ceil_div(numbers, SCALE_BLOCK), SCALE_PROGRAMS)
        _scale[(programs,)](x, factor, numbers, programs, BLOCK=SCALE_BLOCK, num_warps=SCALE_WARPS)


@kernel
def _judge_step(loss, norm, count, last, last_loss, skip):
    number, value = tl.load(count) + 1, tl.load(loss)
    finite = tl.abs(value) < float("inf")
    if norm is not None:
        finite &= tl.abs(tl.load(norm).to(tl.float32)) < float("inf")
    tl.store(count, number)
    if tl.load(skip) == 0.0:
        tl.store(last, number)
        tl.store(last_loss, value)
        tl.store(skip, tl.where(finite, 0.0, 1.0))


def judge_step(
    loss: Tensor, norm: Tensor | None, count: Tensor, last: Tensor, last_loss: Tensor, skip: Tensor
) -> None:  # fmt: skip
    """See ``zoo.ops.training.judge_step``: one launch for seven of torch's."""
    _judge_step[(1,)](loss, norm, count, last, last_loss, skip, num_warps=1)


# For magnitudes: rows and columns of a tile, tiles below each other in a program, tiles loaded ahead, and warps.
DOWN, ACROSS, LOOP, AHEAD, SEEK_WARPS = 32, 128, 4, 3, 4
# For rounding: rows and columns of a tile, and warps.
TILE, TILE_WARPS = 64, 2
# The maximum of float8, and the lower bound of a row's greatest magnitude, as in ``zoo.ops.training._rounded``.
_GREATEST, _LEAST = tl.constexpr(torch.finfo(FLOAT8).max), tl.constexpr(1e-30)


@kernel(do_not_specialize=["rows"])
def _magnitudes(
    x, greatest, rows,
    COLUMNS: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr, LOOP: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * ACROSS + tl.arange(0, ACROSS)
    in_columns = column < COLUMNS
    most = tl.zeros([DOWN, ACROSS], tl.int32)
    for step in tl.range(0, LOOP, num_stages=AHEAD):
        row = (tl.program_id(1) * LOOP + step) * DOWN + tl.arange(0, DOWN)
        in_rows = row < rows
        place = row.to(tl.int64)[:, None] * COLUMNS + column[None, :]
        value = tl.load(x + place, mask=in_rows[:, None] & in_columns[None, :], other=0.0).to(tl.float32)
        # The bits of non-negative numbers, as integers, have the order of the numbers, with NaN above all.
        bits = tl.abs(value).to(tl.int32, bitcast=True)
        tl.atomic_max(greatest + row, tl.max(bits, 1), mask=in_rows, sem="relaxed")
        most = tl.maximum(most, bits)
    tl.atomic_max(greatest + rows + column, tl.max(most, 0), mask=in_columns, sem="relaxed")


@triton.jit
def _factor(greatest, there):
    """The factor that maps the greatest magnitude to the maximum of float8, and its inverse, rounded as by torch."""
    most = tl.load(greatest, mask=there, other=0).to(tl.float32, bitcast=True)
    most = tl.where(most < _LEAST, _LEAST, most)
    return tl.div_rn(1.0, most) * _GREATEST, most * (1.0 / _GREATEST)


@kernel(do_not_specialize=["rows"])
def _round(
    x, greatest, by_row, row_scale, by_column, column_scale, rows, padded, COLUMNS: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    # Backwards, since the tiles that the kernel before read last are still in the cache.
    tile_row, tile_column = tl.num_programs(1) - 1 - tl.program_id(1), tl.num_programs(0) - 1 - tl.program_id(0)
    row, column = tile_row * TILE + tl.arange(0, TILE), tile_column * TILE + tl.arange(0, TILE)
    in_rows, in_columns = row < rows, column < COLUMNS
    place, mask = row.to(tl.int64)[:, None] * COLUMNS + column[None, :], in_rows[:, None] & in_columns[None, :]
    value = tl.load(x + place, mask=mask, other=0.0).to(tl.float32)
    if by_row is not None:
        factor, inverse = _factor(greatest + row, in_rows)
        tl.store(by_row + place, (value * factor[:, None]).to(by_row.dtype.element_ty), mask=mask)
        if tile_column == 0:
            tl.store(row_scale + row, inverse, mask=in_rows)
    if by_column is not None:
        factor, inverse = _factor(greatest + rows + column, in_columns)
        rounded = tl.trans((value * factor[None, :]).to(by_column.dtype.element_ty))
        # Zeros, which add nothing to a product, fill up the rows.
        place = column.to(tl.int64)[:, None] * padded + row[None, :]
        tl.store(by_column + place, rounded, mask=in_columns[:, None] & (row < padded)[None, :])
        if tile_row == 0:
            tl.store(column_scale + column, inverse, mask=in_columns)


def magnitudes(x: Tensor) -> Tensor:
    """The greatest magnitudes of the rows and then of the columns of x [n, K], as bits of float32: [n + K] int32."""
    x, (rows, columns) = x.contiguous(), x.shape
    greatest = x.new_zeros(rows + columns, dtype=torch.int32)
    _magnitudes[(ceil_div(columns, ACROSS), ceil_div(rows, DOWN * LOOP))](
        x, greatest, rows,
        COLUMNS=columns, DOWN=DOWN, ACROSS=ACROSS, LOOP=LOOP, AHEAD=AHEAD, num_warps=SEEK_WARPS,
    )  # fmt: skip
    return greatest


def rounded(x: Tensor, greatest: Tensor, by_row: bool, by_column: bool) -> tuple[Rounded | None, Rounded | None]:
    """X [n, K] with scales of its rows; and its transpose, with scales of x's columns. None if not asked for.

    The transpose is [K, n'], with zeros from column n on; n' is the next size that a product takes.
    """
    x, (rows, columns) = x.contiguous(), x.shape
    padded = ceil_div(rows, MULTIPLE) * MULTIPLE
    found = [
        Rounded(x.new_empty(n, k, dtype=FLOAT8), x.new_empty(n, 1, dtype=torch.float32)) if asked else None
        for asked, n, k in ((by_row, rows, columns), (by_column, columns, padded))
    ]
    _round[(ceil_div(columns, TILE), ceil_div(padded, TILE))](
        x, greatest, *(found[0] or (None, None)), *(found[1] or (None, None)), rows, padded,
        COLUMNS=columns, TILE=TILE, num_warps=TILE_WARPS,
    )  # fmt: skip
    return found[0], found[1]
