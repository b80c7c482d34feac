# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs
"""Dot products of every head with a few vectors, or with another row: features are read once, forward and backward.

Shape legend: S nodes, K = 1 or 2 vectors, H heads, C channels, P programs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from zoo.gnn.kernels.common import next_power, warps_for

# Programs that share the nodes when gradients of vectors are summed: some for every multiprocessor.
PROGRAMS = 1024


@triton.jit(do_not_specialize=["nodes"])
def _head_scores(
    x, first, second, out, nodes,
    HEADS: tl.constexpr, CHANNELS: tl.constexpr, ROWS: tl.constexpr, HEAD_BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    node = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1) * HEAD_BLOCK + tl.arange(0, HEAD_BLOCK)
    column = tl.arange(0, COLUMNS)
    lane = (head * CHANNELS)[:, None] + column[None, :]
    inside = (head < HEADS)[:, None] & (column < CHANNELS)[None, :]
    live = (node < nodes)[:, None] & (head < HEADS)[None, :]
    place = (node * (HEADS * CHANNELS))[:, None, None] + lane[None, :, :]
    value = tl.load(x + place, mask=(node < nodes)[:, None, None] & inside[None, :, :], other=0.0).to(tl.float32)
    target = out + node[:, None] * HEADS + head[None, :]
    vector = tl.load(first + lane, mask=inside, other=0.0).to(tl.float32)
    tl.store(target, tl.sum(value * vector[None, :, :], 2).to(out.dtype.element_ty), mask=live)
    if second is not None:
        vector = tl.load(second + lane, mask=inside, other=0.0).to(tl.float32)
        target += nodes.to(tl.int64) * HEADS
        tl.store(target, tl.sum(value * vector[None, :, :], 2).to(out.dtype.element_ty), mask=live)


@triton.jit(do_not_specialize=["nodes", "steps"])
def _head_scores_backward(
    grad, x, first, second, grad_x, partial, nodes, steps,
    HEADS: tl.constexpr, CHANNELS: tl.constexpr, ROWS: tl.constexpr, HEAD_BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """A program takes ``steps`` times ROWS nodes, and leaves its part of the vectors' gradients: [K, P, H, C]."""
    head = tl.program_id(1) * HEAD_BLOCK + tl.arange(0, HEAD_BLOCK)
    column = tl.arange(0, COLUMNS)
    lane = (head * CHANNELS)[:, None] + column[None, :]
    inside = (head < HEADS)[:, None] & (column < CHANNELS)[None, :]
    one = tl.load(first + lane, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros([ROWS, HEAD_BLOCK, COLUMNS], tl.float32)
    if second is not None:
        two = tl.load(second + lane, mask=inside, other=0.0).to(tl.float32)
        other_total = tl.zeros([ROWS, HEAD_BLOCK, COLUMNS], tl.float32)
    for step in range(0, steps):
        node = (tl.program_id(0).to(tl.int64) * steps + step) * ROWS + tl.arange(0, ROWS)
        live = (node < nodes)[:, None] & (head < HEADS)[None, :]
        mask = (node < nodes)[:, None, None] & inside[None, :, :]
        place = (node * (HEADS * CHANNELS))[:, None, None] + lane[None, :, :]
        value = tl.load(x + place, mask=mask, other=0.0).to(tl.float32)
        source = grad + node[:, None] * HEADS + head[None, :]
        slope = tl.load(source, mask=live, other=0.0).to(tl.float32)[:, :, None]
        result = slope * one[None, :, :]
        total += slope * value
        if second is not None:
            slope = tl.load(source + nodes.to(tl.int64) * HEADS, mask=live, other=0.0).to(tl.float32)[:, :, None]
            result += slope * two[None, :, :]
            other_total += slope * value
        tl.store(grad_x + place, result.to(grad_x.dtype.element_ty), mask=mask)
    target = partial + tl.program_id(0).to(tl.int64) * (HEADS * CHANNELS) + lane
    tl.store(target, tl.sum(total, 0), mask=inside)
    if second is not None:
        target += tl.num_programs(0).to(tl.int64) * (HEADS * CHANNELS)
        tl.store(target, tl.sum(other_total, 0), mask=inside)


@triton.jit(do_not_specialize=["nodes"])
def _head_dots(
    x, other, out, nodes,
    HEADS: tl.constexpr, CHANNELS: tl.constexpr, ROWS: tl.constexpr, HEAD_BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    node = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1) * HEAD_BLOCK + tl.arange(0, HEAD_BLOCK)
    column = tl.arange(0, COLUMNS)
    lane = (head * CHANNELS)[:, None] + column[None, :]
    inside = (head < HEADS)[:, None] & (column < CHANNELS)[None, :]
    mask = (node < nodes)[:, None, None] & inside[None, :, :]
    place = (node * (HEADS * CHANNELS))[:, None, None] + lane[None, :, :]
    left = tl.load(x + place, mask=mask, other=0.0).to(tl.float32)
    right = tl.load(other + place, mask=mask, other=0.0).to(tl.float32)
    live = (node < nodes)[:, None] & (head < HEADS)[None, :]
    tl.store(out + node[:, None] * HEADS + head[None, :], tl.sum(left * right, 2), mask=live)


def _tile(heads: int, channels: int) -> tuple[int, int, int, int]:
    """(rows, heads, columns, warps) of a program."""
    columns = next_power(channels)
    head_block = min(next_power(heads), max(2048 // columns, 1))
    rows = max(1, 2048 // (head_block * columns))
    return rows, head_block, columns, warps_for(rows * head_block * columns)


def head_scores(x: Tensor, first: Tensor, second: Tensor | None = None) -> Tensor:
    """Features [S, H, C] times one or two vectors [H, C], summed over channels: [K, S, H]."""
    x, first = x.contiguous(), first.contiguous()
    second = None if second is None else second.contiguous()
    nodes, heads, channels = x.shape
    out = x.new_empty(1 if second is None else 2, nodes, heads)
    if not out.numel():
        return out
    rows, head_block, columns, warps = _tile(heads, channels)
    _head_scores[(triton.cdiv(nodes, rows), triton.cdiv(heads, head_block))](
        x, first, second, out, nodes, HEADS=heads, CHANNELS=channels, ROWS=rows, HEAD_BLOCK=head_block,
        COLUMNS=columns, num_warps=warps,
    )  # fmt: skip
    return out


def head_scores_backward(grad: Tensor, x: Tensor, first: Tensor, second: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Gradients of x [S, H, C] and, side by side, of the vectors [K, H, C], from that of the scores [K, S, H]."""
    grad, x, first = grad.contiguous(), x.contiguous(), first.contiguous()
    second = None if second is None else second.contiguous()
    nodes, heads, channels = x.shape
    grad_x = torch.empty_like(x)
    if not x.numel():
        return grad_x, x.new_zeros(grad.shape[0], heads, channels, dtype=first.dtype)
    rows, head_block, columns, warps = _tile(heads, channels)
    steps = triton.cdiv(nodes, rows * PROGRAMS)
    programs = triton.cdiv(nodes, rows * steps)
    partial = x.new_empty(grad.shape[0], programs, heads, channels, dtype=torch.float32)
    _head_scores_backward[(programs, triton.cdiv(heads, head_block))](
        grad, x, first, second, grad_x, partial, nodes, steps, HEADS=heads, CHANNELS=channels, ROWS=rows,
        HEAD_BLOCK=head_block, COLUMNS=columns, num_warps=2 * warps,
    )  # fmt: skip
    return grad_x, partial.sum(1).to(first.dtype)


def head_dots(x: Tensor, other: Tensor) -> Tensor:
    """Features [S, H, C] times [S, H, C], summed over channels: [S, H] float32."""
    x, other = x.contiguous(), other.contiguous()
    nodes, heads, channels = x.shape
    out = x.new_empty(nodes, heads, dtype=torch.float32)
    if x.numel():
        rows, head_block, columns, warps = _tile(heads, channels)
        _head_dots[(triton.cdiv(nodes, rows), triton.cdiv(heads, head_block))](
            x, other, out, nodes, HEADS=heads, CHANNELS=channels, ROWS=rows, HEAD_BLOCK=head_block,
            COLUMNS=columns, num_warps=warps,
        )  # fmt: skip
    return out
