# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs
"""Products of a few rows with a weight: each weight row is read once, all of it at the same time.

A program takes a few rows of the weight, one whole row after the other in registers where they fit. The loads of the
weight are issued before anything else: they do not depend on the kernel before, and are on their way while it ends.

Shape legend: M rows of features, a few, N rows of the weight, C columns.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _dots(x, norm, weight, row, live, m, eps, C: tl.constexpr, BLOCK_C: tl.constexpr):
    """Products of features row ``m``, normed if ``norm`` is there, with rows of the weight [ROWS, C]: [ROWS]."""
    column = tl.arange(0, BLOCK_C)
    total = tl.zeros([row.shape[0], BLOCK_C], tl.float32)
    squares = tl.zeros([BLOCK_C], tl.float32)
    for begin in tl.static_range(0, C, BLOCK_C):
        inside = begin + column < C
        place = (row * C)[:, None] + (begin + column)[None, :]
        part = tl.load(weight + place, mask=live[:, None] & inside[None, :], other=0.0).to(tl.float32)
        value = tl.load(x + m * C + begin + column, mask=inside, other=0.0).to(tl.float32)
        if norm is not None:
            squares += value * value
            value *= tl.load(norm + begin + column, mask=inside, other=0.0).to(tl.float32)
        total += part * value[None, :]
    result = tl.sum(total, 1)
    if norm is not None:
        result *= tl.rsqrt(tl.sum(squares, 0) / C + eps)
    return result


@triton.jit
def _linear(
    x, norm, weight, bias, residual, out, eps,
    M: tl.constexpr, N: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = row < N
    for m in tl.static_range(M):
        result = _dots(x, norm, weight, row, live, m, eps, C, BLOCK_C)
        if bias is not None:
            result += tl.load(bias + row, mask=live, other=0.0).to(tl.float32)
        if residual is not None:
            # Rounded before the addition, as where the product is a kernel of its own.
            result = result.to(out.dtype.element_ty).to(tl.float32)
            result += tl.load(residual + m * N + row, mask=live, other=0.0).to(tl.float32)
        tl.store(out + m * N + row, result.to(out.dtype.element_ty), mask=live)


@triton.jit
def _gate(
    x, norm, weight, out, eps,
    M: tl.constexpr, N: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = row < N
    for m in tl.static_range(M):
        gate = _dots(x, norm, weight, row, live, m, eps, C, BLOCK_C)
        up = _dots(x, norm, weight + N * C, row, live, m, eps, C, BLOCK_C)
        result = gate * tl.sigmoid(gate) * up
        tl.store(out + m * N + row, result.to(out.dtype.element_ty), mask=live)


def _tile(columns: int, itemsize: int, wanted: int) -> tuple[int, int, int]:
    """(rows, columns, warps) of a program: ``wanted`` bytes of the weight at once, in whole rows where they fit."""
    block = min(triton.next_power_of_2(columns), 8192)
    rows = max(1, min(wanted // (block * itemsize), 8))
    return rows, block, 4 if rows * block * itemsize <= 8192 else 8


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
    rows, block, warps = _tile(columns, x.element_size(), wanted=8192)
    _linear[(triton.cdiv(n, rows),)](
        x, norm, weight, bias, None if residual is None else residual.contiguous(), out, eps,
        M=x.shape[0], N=n, C=columns, ROWS=rows, BLOCK_C=block, num_warps=warps,
    )  # fmt: skip
    return out


def norm_gate(x: Tensor, norm: Tensor, eps: float, weight: Tensor) -> Tensor:
    """RMS norm of x [M, C] times weight [2 N, C]; SiLU of the first half times the second: [M, N]."""
    x, n, columns = x.contiguous(), weight.shape[0] // 2, weight.shape[1]
    out = x.new_empty(x.shape[0], n)
    rows, block, warps = _tile(columns, x.element_size(), wanted=4096)
    _gate[(triton.cdiv(n, rows),)](
        x, norm, weight, out, eps, M=x.shape[0], N=n, C=columns, ROWS=rows, BLOCK_C=block, num_warps=warps
    )
    return out
