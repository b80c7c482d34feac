# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs
"""Dot products of every head with a few vectors: what attention scores are made of, features read once.

Shape legend: S nodes, K vectors, H heads, C channels.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from zoo.gnn.kernels.common import next_power, warps_for


@triton.jit(do_not_specialize=["nodes"])
def _head_scores(
    x, vectors, out, nodes,
    VECTORS: tl.constexpr, HEADS: tl.constexpr, CHANNELS: tl.constexpr, ROWS: tl.constexpr, HEAD_BLOCK: tl.constexpr,
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
    for k in tl.static_range(VECTORS):
        vector = tl.load(vectors + k * (HEADS * CHANNELS) + lane, mask=inside, other=0.0).to(tl.float32)
        score = tl.sum(value * vector[None, :, :], 2)
        target = out + (k * nodes.to(tl.int64) + node)[:, None] * HEADS + head[None, :]
        tl.store(target, score.to(out.dtype.element_ty), mask=live)


def head_scores(x: Tensor, vectors: Tensor) -> Tensor:
    """Features [S, H, C] times vectors [K, H, C], summed over channels: [K, S, H]."""
    x, vectors = x.contiguous(), vectors.contiguous()
    (nodes, heads, channels), count = x.shape, vectors.shape[0]
    out = x.new_empty(count, nodes, heads)
    if not out.numel():
        return out
    head_block, columns = next_power(heads), next_power(channels)
    rows = max(1, 2048 // (head_block * columns))
    _head_scores[(triton.cdiv(nodes, rows),)](
        x, vectors, out, nodes, VECTORS=count, HEADS=heads, CHANNELS=channels, ROWS=rows, HEAD_BLOCK=head_block,
        COLUMNS=columns, num_warps=warps_for(rows * head_block * columns),
    )  # fmt: skip
    return out
