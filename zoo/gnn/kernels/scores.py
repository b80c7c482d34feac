# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs
"""Dot products of every head with a few vectors: what attention scores are made of, features read once.

Shape legend: S nodes, K = 1 or 2 vectors, H heads, C channels.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from zoo.gnn.kernels.common import next_power, warps_for


@triton.jit(do_not_specialize=["nodes"])
def _head_scores(
    x, first, second, out, nodes,
    HEADS: tl.constexpr, CHANNELS: tl.constexpr, ROWS: tl.constexpr, HEAD_BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    node = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    head = tl.arange(0, HEAD_BLOCK)
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


def head_scores(x: Tensor, first: Tensor, second: Tensor | None = None) -> Tensor:
    """Features [S, H, C] times one or two vectors [H, C], summed over channels: [K, S, H]."""
    x, first = x.contiguous(), first.contiguous()
    second = None if second is None else second.contiguous()
    nodes, heads, channels = x.shape
    out = x.new_empty(1 if second is None else 2, nodes, heads)
    if not out.numel():
        return out
    head_block, columns = next_power(heads), next_power(channels)
    rows = max(1, 2048 // (head_block * columns))
    _head_scores[(triton.cdiv(nodes, rows),)](
        x, first, second, out, nodes, HEADS=heads, CHANNELS=channels, ROWS=rows, HEAD_BLOCK=head_block,
        COLUMNS=columns, num_warps=warps_for(rows * head_block * columns),
    )  # fmt: skip
    return out
