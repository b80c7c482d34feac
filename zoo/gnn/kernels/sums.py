# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs
"""Weighted sums over rows, and their gradient with respect to the weights."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from zoo.gnn.kernels.common import Blocks, choose_blocks, next_power, span, tile_columns


@triton.jit(do_not_specialize=["rows", "num_chunks", "chunk_size"])
def _csr_sum(
    x, index, pointers, weight, gather_scale, row_scale, chunks, out, partial, rows, num_chunks, chunk_size,
    CHANNELS: tl.constexpr, ROWS: tl.constexpr, EDGES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < CHANNELS
    item = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    first_row = tl.cdiv(num_chunks, ROWS) * ROWS
    row, first, end, whole, piece = span(item, first_row, pointers, chunks, rows, num_chunks, chunk_size)
    total = tl.zeros([ROWS, EDGES, COLUMNS], tl.float32)
    longest = tl.max(end - first, 0).to(tl.int32)
    for offset in range(0, longest, EDGES):
        edge = first[:, None] + (offset + tl.arange(0, EDGES))[None, :]
        live = edge < end[:, None]
        if index is None:
            node = edge
        else:
            node = tl.load(index + edge, mask=live, other=0).to(tl.int64)
        place = (node * CHANNELS)[:, :, None] + column[None, None, :]
        value = tl.load(x + place, mask=live[:, :, None] & inside[None, None, :], other=0.0).to(tl.float32)
        if weight is not None:
            value *= tl.load(weight + edge, mask=live, other=0.0).to(tl.float32)[:, :, None]
        if gather_scale is not None:
            value *= tl.load(gather_scale + node, mask=live, other=0.0).to(tl.float32)[:, :, None]
        total += value
    result = tl.sum(total, 1)
    if chunks is not None:
        place = (item * CHANNELS)[:, None] + column[None, :]
        tl.store(partial + place, result, mask=piece[:, None] & inside[None, :])
    if row_scale is not None:
        result *= tl.load(row_scale + row, mask=whole, other=0.0).to(tl.float32)[:, None]
    place = (row * CHANNELS)[:, None] + column[None, :]
    tl.store(out + place, result.to(out.dtype.element_ty), mask=whole[:, None] & inside[None, :])


@triton.jit
def _merge_sums(
    partial, long_rows, row_scale, out, CHANNELS: tl.constexpr, CHUNKS: tl.constexpr, COLUMNS: tl.constexpr
):
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < CHANNELS
    entry = long_rows + tl.program_id(0) * 3
    row = tl.load(entry)
    if row >= 0:
        first = tl.load(entry + 1)
        end = tl.load(entry + 2)
        total = tl.zeros([CHUNKS, COLUMNS], tl.float32)
        for offset in range(0, (end - first).to(tl.int32), CHUNKS):
            chunk = first + offset + tl.arange(0, CHUNKS)
            place = (chunk * CHANNELS)[:, None] + column[None, :]
            total += tl.load(partial + place, mask=(chunk < end)[:, None] & inside[None, :], other=0.0)
        result = tl.sum(total, 0)
        if row_scale is not None:
            result *= tl.load(row_scale + row).to(tl.float32)
        tl.store(out + row * CHANNELS + column, result.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["edges"])
def _edge_dot(
    x, grad, source, destination, gather_scale, row_scale, out, edges,
    CHANNELS: tl.constexpr, EDGES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    edge = tl.program_id(0).to(tl.int64) * EDGES + tl.arange(0, EDGES)
    live = edge < edges
    start = tl.load(source + edge, mask=live, other=0).to(tl.int64)
    stop = tl.load(destination + edge, mask=live, other=0).to(tl.int64)
    total = tl.zeros([EDGES, COLUMNS], tl.float32)
    for begin in range(0, CHANNELS, COLUMNS):
        column = begin + tl.arange(0, COLUMNS)
        mask = live[:, None] & (column < CHANNELS)[None, :]
        a = tl.load(x + (start * CHANNELS)[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)
        b = tl.load(grad + (stop * CHANNELS)[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)
        total += a * b
    result = tl.sum(total, 1)
    if gather_scale is not None:
        result *= tl.load(gather_scale + start, mask=live, other=0.0).to(tl.float32)
    if row_scale is not None:
        result *= tl.load(row_scale + stop, mask=live, other=0.0).to(tl.float32)
    tl.store(out + edge, result.to(out.dtype.element_ty), mask=live)


def csr_sum(
    x: Tensor,
    pointers: Tensor,
    index: Tensor | None,
    weight: Tensor | None = None,
    gather_scale: Tensor | None = None,
    row_scale: Tensor | None = None,
    chunks: Tensor | None = None,
    long_rows: Tensor | None = None,
    chunk_size: int = 0,
    blocks: Blocks | None = None,
) -> Tensor:
    """Weighted sum of gathered rows: x [S, C] -> [R, C]. Without ``index``, x is [E, C], a row an edge."""
    x = x.contiguous()
    rows, channels = pointers.shape[0] - 1, x.shape[1]
    edges = x.shape[0] if index is None else index.shape[0]
    out = x.new_empty(rows, channels)
    if not out.numel():
        return out
    blocks = blocks or choose_blocks(channels, edges / rows, x.element_size())
    num_chunks = 0 if chunks is None else chunks.shape[0]
    partial = None if chunks is None else x.new_empty(num_chunks, channels, dtype=torch.float32)
    tiles = triton.cdiv(channels, blocks.columns)
    _csr_sum[(triton.cdiv(num_chunks, blocks.rows) + triton.cdiv(rows, blocks.rows), tiles)](
        x, index, pointers, weight, gather_scale, row_scale, chunks, out, partial, rows, num_chunks, chunk_size,
        CHANNELS=channels, ROWS=blocks.rows, EDGES=blocks.edges, COLUMNS=blocks.columns, num_warps=blocks.warps,
    )  # fmt: skip
    if partial is not None and long_rows is not None:
        merge_sums(partial, long_rows, row_scale, out)
    return out


def merge_sums(partial: Tensor, long_rows: Tensor, row_scale: Tensor | None, out: Tensor) -> None:
    """Add up the chunks of long rows: partial [X, C] into some rows of out [R, C]."""
    channels = partial.shape[1]
    columns = min(tile_columns(channels), 64)
    _merge_sums[(long_rows.shape[0], triton.cdiv(channels, columns))](
        partial, long_rows, row_scale, out, CHANNELS=channels, CHUNKS=32, COLUMNS=columns, num_warps=4
    )


def edge_dot(
    x: Tensor,
    grad: Tensor,
    source: Tensor,
    destination: Tensor,
    gather_scale: Tensor | None,
    row_scale: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Features x [S, C] times grad [D, C] summed over channels, for each edge: [E]."""
    x, grad = x.contiguous(), grad.contiguous()
    edges, channels = source.shape[0], x.shape[1]
    out = x.new_empty(edges, dtype=dtype)
    if not edges:
        return out
    columns = min(next_power(channels), 256)
    tile = max(4096 // columns, 16)
    _edge_dot[(triton.cdiv(edges, tile),)](
        x, grad, source, destination, gather_scale, row_scale, out, edges,
        CHANNELS=channels, EDGES=tile, COLUMNS=columns, num_warps=4,
    )  # fmt: skip
    return out
