# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs
"""The kernels of a step that decodes few rows, of which each begins while the one before it ends.

A step is a chain of kernels of a few microseconds each, and the GPU is idle for about one between two of them. By
programmatic dependent launch, on Hopper and newer, a kernel starts as soon as all programs of the one before it have
said that it may (``gdc_launch_dependents``). It waits for that one's end (``gdc_wait``) before it touches anything that
any kernel writes, so that only loads of weights go ahead. It waits in every program: its own end then means that
everything before it has ended too. Weights may not be written by kernels right before a step. In a model a lookup
stands there.

Each product reads every weight row once and takes in what stands around it: the norm, the activation, the residual add.
A program takes a few rows of the weight, whole ones in registers where they fit, whose loads are issued first. A
product lets the next kernel start at once. Attention lets it start late: its loads are few, follow one another, and
would stand in line behind weights that are not needed yet.

Shape legend: M rows of features, a few, N rows of the weight, C columns.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from zoo.ops.common import ceil_div, next_power
from zoo.ops.triton.decode_attention import can_overlap, decode_attention
from zoo.ops.triton.kernel import kernel


@triton.jit
def _part(weight, row, live, begin, C: tl.constexpr, BLOCK_C: tl.constexpr):
    """Columns of rows of the weight, from ``begin`` on: [ROWS, BLOCK_C]."""
    column = begin + tl.arange(0, BLOCK_C)
    return tl.load(weight + (row * C)[:, None] + column[None, :], mask=live[:, None] & (column < C)[None, :], other=0.0)


@triton.jit
def _dots(x, norm, first, weight, row, live, m, eps, C: tl.constexpr, BLOCK_C: tl.constexpr):
    """Products [ROWS] of features ``m``, normed by ``norm`` if any, with rows of the weight that begin by ``first``."""
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
    x, norm, weight, bias, residual, out, eps: tl.constexpr,
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
    x, norm, weight, out, eps: tl.constexpr,
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
    """(rows, columns, warps) of a program for a weight [rows, columns]: whole rows at once where they fit."""
    # Rows share the features that they are multiplied with: as many as leave enough programs.
    block = min(next_power(columns), 8192)
    count = next((count for count in (4, 2) if rows // count >= ENOUGH), 1)
    warps = next_power(count * block * itemsize) // (32 * THREAD_BYTES)
    return count, block, min(max(warps, 2), 8)


def _options(overlap: bool) -> dict[str, bool]:
    return {"OVERLAP": True, "launch_pdl": True} if overlap else {"OVERLAP": False}


def norm_linear(
    x: Tensor, norm: Tensor | None, eps: float, weight: Tensor, bias: Tensor | None, overlap: bool
) -> Tensor:
    """RMS norm of x [M, C], unless ``norm`` is None, times weight [N, C], plus bias [N]: [M, N]."""
    return _launch(x, norm, eps, weight, bias, None, overlap)


def linear_add(x: Tensor, weight: Tensor, residual: Tensor, overlap: bool) -> Tensor:
    """Features x [M, C] times weight [N, C], plus residual [M, N]."""
    return _launch(x, None, 0.0, weight, None, residual, overlap)


def _launch(
    x: Tensor,
    norm: Tensor | None,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    overlap: bool,
) -> Tensor:
    x, (n, columns) = x.contiguous(), weight.shape
    out = x.new_empty(x.shape[0], n)
    rows, block, warps = _tile(n, columns, x.element_size())
    _linear[(ceil_div(n, rows),)](
        x, norm, weight.contiguous(), bias, None if residual is None else residual.contiguous(), out, eps,
        M=x.shape[0], N=n, C=columns, ROWS=rows, BLOCK_C=block, num_warps=warps, **_options(overlap),
    )  # fmt: skip
    return out


def norm_gate(x: Tensor, norm: Tensor, eps: float, weight: Tensor, overlap: bool) -> Tensor:
    """RMS norm of x [M, C] times weight [2 N, C]; SiLU of the first half times the second: [M, N]."""
    x, n, columns = x.contiguous(), weight.shape[0] // 2, weight.shape[1]
    out = x.new_empty(x.shape[0], n)
    rows, block, warps = _tile(n, columns, x.element_size())
    _gate[(ceil_div(n, rows),)](
        x, norm, weight.contiguous(), out, eps,
        M=x.shape[0], N=n, C=columns, ROWS=rows, BLOCK_C=block, num_warps=warps, **_options(overlap),
    )  # fmt: skip
    return out


def decode_layer(
    x: Tensor,
    cache: Tensor,
    positions: Tensor,
    rotary: Tensor,
    norm: Tensor,
    qkv_weight: Tensor,
    qkv_bias: Tensor | None,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    o_weight: Tensor,
    norm_after: Tensor,
    gate_up_weight: Tensor,
    down_weight: Tensor,
    eps: float,
    heads: int,
    window: int | None,
) -> Tensor:
    """See ``zoo/ops/cached_attention.py``."""
    overlap = can_overlap(x.device)
    qkv = norm_linear(x, norm, eps, qkv_weight, qkv_bias, overlap)
    mixed = decode_attention(qkv, cache, positions, rotary, q_norm, k_norm, eps, heads, window)
    x = linear_add(mixed, o_weight, x, overlap)
    hidden = norm_gate(x, norm_after, eps, gate_up_weight, overlap)
    return linear_add(hidden, down_weight, x, overlap)
