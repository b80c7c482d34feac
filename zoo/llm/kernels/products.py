# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs
"""Products of a few rows with a weight: each weight row is read once, all of it at the same time.

A program takes a few rows of the weight, whole ones in registers where they fit. The loads of the weight are issued
before anything else: they do not depend on the kernel before, and are on their way while it ends (overlap.py).

Shape legend: M rows of features, a few, N rows of the weight, C columns.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from zoo.llm.kernels.overlap import overlapped
from zoo.ops.common import ceil_div, next_power
from zoo.ops.triton.kernel import kernel


@triton.jit
def _part(weight, row, live, begin, C: tl.constexpr, BLOCK_C: tl.constexpr):
    """Columns of rows of the weight, from ``begin`` on: [ROWS, BLOCK_C]."""
    column = begin + tl.arange(0, BLOCK_C)
    return tl.load(weight + (row * C)[:, None] + column[None, :], mask=live[:, None] & (column < C)[None, :], other=0.0)


@triton.jit
def _dots(x, norm, first, weight, row, live, m, eps, C: tl.constexpr, BLOCK_C: tl.constexpr):
    """Products of features row ``m``, normed if ``norm`` is there, with rows of the weight [ROWS, C]: [ROWS].

    ``first`` is the weight's first part, which is here already.
    """
    column = tl.arange(0, BLOCK_C)
    total = tl.zeros([row.shape[0], BLOCK_C], tl.float32)
    squares = tl.zeros([BLOCK_C], tl.float32)
    for begin in tl.static_range(0, C, BLOCK_C):
        inside = begin + column < C
        if begin == 0:
            part = first.to(tl.float32)
        else:
            part = _part(weight, row, live, begin, C, BLOCK_C).to(tl.float32)
        value = tl.load(x + m * C + begin + column, mask=inside, other=0.0).to(tl.float32)
        if norm is not None:
            squares += value * value
            value *= tl.load(norm + begin + column, mask=inside, other=0.0).to(tl.float32)
        total += part * value[None, :]
    result = tl.sum(total, 1)
    if norm is not None:
        result *= tl.rsqrt(tl.sum(squares, 0) / C + eps)
    return result


@kernel
def _linear(
    x, norm, weight, bias, residual, out, eps,
    M: tl.constexpr, N: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr, BLOCK_C: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = row < N
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    first = _part(weight, row, live, 0, C, BLOCK_C)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    for m in tl.static_range(M):
        result = _dots(x, norm, first, weight, row, live, m, eps, C, BLOCK_C)
        if bias is not None:
            result += tl.load(bias + row, mask=live, other=0.0).to(tl.float32)
        if residual is not None:
            # Rounded before the addition, as where the product is a kernel of its own.
            result = result.to(out.dtype.element_ty).to(tl.float32)
            result += tl.load(residual + m * N + row, mask=live, other=0.0).to(tl.float32)
        tl.store(out + m * N + row, result.to(out.dtype.element_ty), mask=live)


@kernel
def _gate(
    x, norm, weight, out, eps,
    M: tl.constexpr, N: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr, BLOCK_C: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = row < N
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    first_gate = _part(weight, row, live, 0, C, BLOCK_C)
    first_up = _part(weight + N * C, row, live, 0, C, BLOCK_C)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    for m in tl.static_range(M):
        gate = _dots(x, norm, first_gate, weight, row, live, m, eps, C, BLOCK_C)
        up = _dots(x, norm, first_up, weight + N * C, row, live, m, eps, C, BLOCK_C)
        result = gate * tl.sigmoid(gate) * up
        tl.store(out + m * N + row, result.to(out.dtype.element_ty), mask=live)


# Bytes of the weight that a thread holds at once, and programs that keep a large GPU busy: measured on an H200, for the
# whole chain of a step, since what is best for a kernel alone is not best for those that overlap.
THREAD_BYTES = 128
ENOUGH = 1600


def _tile(rows: int, columns: int, itemsize: int) -> tuple[int, int, int]:
    """(rows, columns, warps) of a program for a weight [rows, columns]: whole rows at once where they fit.

    Four rows share the features that they are multiplied with, fewer where the weight has too few for all programs.
    """
    block = min(next_power(columns), 8192)
    count = next((count for count in (4, 2) if rows // count >= ENOUGH), 1)
    warps = next_power(count * block * itemsize) // (32 * THREAD_BYTES)
    return count, block, min(max(warps, 2), 8)


def norm_linear(x: Tensor, norm: Tensor | None, eps: float, weight: Tensor, bias: Tensor | None) -> Tensor:
    """RMS norm of x [M, C], unless ``norm`` is None, times weight [N, C], plus bias [N]: [M, N]."""
    return _launch(x, norm, eps, weight, bias, None)


def linear_add(x: Tensor, weight: Tensor, residual: Tensor) -> Tensor:
    """Features x [M, C] times weight [N, C], plus residual [M, N]."""
    return _launch(x, None, 0.0, weight, None, residual)


def _launch(
    x: Tensor, norm: Tensor | None, eps: float, weight: Tensor, bias: Tensor | None, residual: Tensor | None
) -> Tensor:
    x, (n, columns) = x.contiguous(), weight.shape
    out = x.new_empty(x.shape[0], n)
    rows, block, warps = _tile(n, columns, x.element_size())
    _linear[(ceil_div(n, rows),)](
        x, norm, weight, bias, None if residual is None else residual.contiguous(), out, eps,
        M=x.shape[0], N=n, C=columns, ROWS=rows, BLOCK_C=block, num_warps=warps,
        **overlapped(x),
    )  # fmt: skip
    return out


def norm_gate(x: Tensor, norm: Tensor, eps: float, weight: Tensor) -> Tensor:
    """RMS norm of x [M, C] times weight [2 N, C]; SiLU of the first half times the second: [M, N]."""
    x, n, columns = x.contiguous(), weight.shape[0] // 2, weight.shape[1]
    out = x.new_empty(x.shape[0], n)
    rows, block, warps = _tile(n, columns, x.element_size())
    _gate[(ceil_div(n, rows),)](
        x, norm, weight, out, eps,
        M=x.shape[0], N=n, C=columns, ROWS=rows, BLOCK_C=block, num_warps=warps, **overlapped(x),
    )  # fmt: skip
    return out
