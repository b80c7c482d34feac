"""Cross entropy of rows of logits, whose gradient takes their place; and a gradient times a number that is mostly one.

A program reads a row twice: for its log-sum-exp, by an online softmax, and for the gradient. The last columns stay in
registers. One program of many warps runs on a multiprocessor at a time, so that the rows under way fit into the L2
cache; the second reading goes backwards, since what was read last is still there.

Shape legend: n rows, V classes.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from zoo.engine.kernel import kernel
from zoo.ops.common import ceil_div

# Bytes of a row that a program takes at once (16 two-byte logits a thread), readings under way and what is computed
# with, and warps: as many as a program can have, of 64 threads each on AMD's GPUs, which hold less that is under way.
BYTES, STAGES, WARPS = (32768, 1, 32) if torch.version.hip is None else (32768, 1, 16)
# Numbers that a program scales at once, programs at most, and their warps. Few, since most often all just return.
SCALE_BLOCK, SCALE_PROGRAMS, SCALE_WARPS = 4096, 2048, 8
# Of float32.
_LARGEST = tl.constexpr(3.4028234663852886e38)


@triton.jit
def _columns(start, VECTORS: tl.constexpr, WIDTH: tl.constexpr):
    """Columns [VECTORS, WIDTH] from ``start`` on: one thread holds a whole vector."""
    return start + tl.arange(0, VECTORS)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]


@triton.jit
def _online_softmax(most, total, x):
    """Greatest and sum of each lane, with logits [VECTORS, WIDTH] more."""
    higher = tl.minimum(tl.maximum(most, tl.max(x, 1)), _LARGEST)
    return higher, total * tl.exp(most - higher) + tl.sum(tl.exp(x - higher[:, None]), 1)


@triton.jit
def _gradient(x, column, hit, norm, factor):
    """The gradient of logits, in their dtype."""
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
        # A label that is no class has neither a logit nor a loss; a loss that is not a number is noticed.
        known = (label >= 0) & (label < columns)
        hit = tl.where(known, label, 0).to(tl.int32)
        factor = tl.where(known, tl.load(scale).to(tl.float32), float("nan"))
        # Before any thread writes.
        own = tl.load(logits + hit).to(tl.float32)
        # Greatest and sum of each vector's lane, finite from the start: infinity off infinity is not a number.
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
        # Nobody reads these soon, while other rows wait in the cache for their second reading.
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
    """Losses [n] of logits [n, V], in whose place the gradient is left, times ``scale``."""
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
    """Numbers that lie without gaps, times a number on the device, in place; nothing is read or written for one."""
    if numbers := x.numel():
        programs = min(ceil_div(numbers, SCALE_BLOCK), SCALE_PROGRAMS)
        _scale[(programs,)](x, factor, numbers, programs, BLOCK=SCALE_BLOCK, num_warps=SCALE_WARPS)
