# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs
"""Weighted sums over rows, and their gradient with respect to the weights."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from zoo.gnn.kernels.common import Blocks, choose_blocks, merge_grid, merge_tile, readable_columns, span, with_rows
from zoo.gnn.split import Rows, edges_per_chunk
from zoo.ops.common import ceil_div, next_power
from zoo.ops.triton.kernel import kernel


@triton.jit
def _finish(
    result, row, column, mask, row_scale, root, out,
    CHANNELS: tl.constexpr, ROOT_STRIDE: tl.constexpr, OUT_STRIDE: tl.constexpr, BESIDE: tl.constexpr,
):  # fmt: skip
    """Scale the sums [ROWS, COLUMNS] of rows [ROWS], add the rows' own values or put them beside, and write."""
    if row_scale is not None:
        result *= tl.load(row_scale + row, mask=row >= 0, other=0.0).to(tl.float32)[:, None]
    place = (row * OUT_STRIDE)[:, None] + column[None, :]
    if root is not None:
        own = tl.load(root + (row * ROOT_STRIDE)[:, None] + column[None, :], mask=mask, other=0.0)
        if BESIDE:
            tl.store(out + place + CHANNELS, own, mask=mask)
        else:
            result += own.to(tl.float32)
    tl.store(out + place, result.to(out.dtype.element_ty), mask=mask)


@kernel(do_not_specialize=["rows", "num_chunks", "chunk_size"])
def _csr_sum(
    x, index, pointers, weight, gather_scale, row_scale, root, chunks, out, partial, rows, num_chunks, chunk_size,
    CHANNELS: tl.constexpr, READABLE: tl.constexpr, STRIDE: tl.constexpr, ROOT_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr, BESIDE: tl.constexpr, ROWS: tl.constexpr, EDGES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < CHANNELS
    readable = column < READABLE
    program = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, ROWS)
    row, first, end, whole, _used, piece = span(program, slot, pointers, chunks, rows, num_chunks, chunk_size, ROWS)
    total = tl.zeros([ROWS, EDGES, COLUMNS], tl.float32)
    longest = tl.max(end - first, 0).to(tl.int32)
    for offset in range(0, longest, EDGES):
        edge = first[:, None] + (offset + tl.arange(0, EDGES))[None, :]
        live = edge < end[:, None]
        if index is None:
            node = edge
        else:
            node = tl.load(index + edge, mask=live, other=0).to(tl.int64)
        place = (node * STRIDE)[:, :, None] + column[None, None, :]
        value = tl.load(x + place, mask=live[:, :, None] & readable[None, None, :], other=0.0).to(tl.float32)
        if weight is not None:
            value *= tl.load(weight + edge, mask=live, other=0.0).to(tl.float32)[:, :, None]
        if gather_scale is not None:
            value *= tl.load(gather_scale + node, mask=live, other=0.0).to(tl.float32)[:, :, None]
        total += value
    result = tl.sum(total, 1)
    if chunks is not None:  # noqa: SIM102 (whose programs are one or the other at run time)
        if piece:
            tl.store(partial + program * CHANNELS + column, tl.sum(result, 0), mask=inside)
    row = tl.where(whole, row, -1)
    mask = whole[:, None] & inside[None, :]
    _finish(result, row, column, mask, row_scale, root, out, CHANNELS, ROOT_STRIDE, OUT_STRIDE, BESIDE)


@kernel(do_not_specialize=["num_rows"])
def _merge_sums(
    partial, long_rows, row_scale, root, out, num_rows,
    CHANNELS: tl.constexpr, ROOT_STRIDE: tl.constexpr, OUT_STRIDE: tl.constexpr, BESIDE: tl.constexpr,
    CHUNKS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < CHANNELS
    number = tl.program_id(0)
    row = tl.load(long_rows + number * 3)
    while row >= 0:
        first = tl.load(long_rows + number * 3 + 1)
        end = tl.load(long_rows + number * 3 + 2)
        total = tl.zeros([CHUNKS, COLUMNS], tl.float32)
        for offset in range(0, (end - first).to(tl.int32), CHUNKS):
            chunk = first + offset + tl.arange(0, CHUNKS)
            place = (chunk * CHANNELS)[:, None] + column[None, :]
            total += tl.load(partial + place, mask=(chunk < end)[:, None] & inside[None, :], other=0.0)
        result = tl.sum(total, 0)[None, :]
        _finish(
            result, row + tl.zeros([1], tl.int64), column, inside[None, :], row_scale, root, out,
            CHANNELS, ROOT_STRIDE, OUT_STRIDE, BESIDE,
        )  # fmt: skip
        number += tl.num_programs(0)
        row = tl.load(long_rows + number * 3, mask=number < num_rows, other=-1)


@kernel(do_not_specialize=["edges"])
def _edge_dot(
    x, grad, source, destination, gather_scale, row_scale, out, edges,
    CHANNELS: tl.constexpr, X_STRIDE: tl.constexpr, GRAD_STRIDE: tl.constexpr, EDGES: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    edge = tl.program_id(0).to(tl.int64) * EDGES + tl.arange(0, EDGES)
    live = edge < edges
    start = tl.load(source + edge, mask=live, other=0).to(tl.int64)
    stop = tl.load(destination + edge, mask=live, other=0).to(tl.int64)
    total = tl.zeros([EDGES, COLUMNS], tl.float32)
    for begin in range(0, CHANNELS, COLUMNS):
        column = begin + tl.arange(0, COLUMNS)
        mask = live[:, None] & (column < CHANNELS)[None, :]
        a = tl.load(x + (start * X_STRIDE)[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)
        b = tl.load(grad + (stop * GRAD_STRIDE)[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)
        total += a * b
    result = tl.sum(total, 1)
    if gather_scale is not None:
        result *= tl.load(gather_scale + start, mask=live, other=0.0).to(tl.float32)
    if row_scale is not None:
        result *= tl.load(row_scale + stop, mask=live, other=0.0).to(tl.float32)
    tl.store(out + edge, result.to(out.dtype.element_ty), mask=live)


def csr_sum(
    x: Tensor,
    rows: Rows,
    weight: Tensor | None = None,
    gather_scale: Tensor | None = None,
    row_scale: Tensor | None = None,
    root: Tensor | None = None,
    beside: bool = False,
    blocks: Blocks | None = None,
) -> Tensor:
    """Weighted sum of gathered rows plus ``root`` [R or more, C], or with it beside: x [S, C] -> [R, C] or [R, 2 C].

    Without an index in ``rows``, x is [E, C], a row an edge.
    """
    x, root = with_rows(x), None if root is None else with_rows(root)
    number, channels = rows.number, x.shape[1]
    edges = (x if rows.nodes is None else rows.nodes).shape[0]
    out = x.new_empty(number, 2 * channels if beside else channels)
    if not out.numel():
        return out
    readable = readable_columns(x)
    blocks = blocks or choose_blocks(readable, x.element_size(), x.shape[0])
    partial = None if rows.chunks is None else x.new_empty(rows.num_chunks, channels, dtype=torch.float32)
    tiles = ceil_div(channels, blocks.columns)
    _csr_sum[(rows.num_chunks + ceil_div(number, blocks.rows), tiles)](
        x, rows.nodes, rows.pointers, weight, gather_scale, row_scale, root, rows.chunks, out, partial,
        number, rows.num_chunks, edges_per_chunk(edges, number),
        CHANNELS=channels, READABLE=readable, STRIDE=x.stride(0),
        ROOT_STRIDE=0 if root is None else root.stride(0), OUT_STRIDE=out.stride(0), BESIDE=beside,
        ROWS=blocks.rows, EDGES=blocks.edges, COLUMNS=blocks.columns, num_warps=blocks.warps,
    )  # fmt: skip
    if partial is not None:
        merge_sums(partial, rows, out, row_scale, root, beside)
    return out


def merge_sums(
    partial: Tensor,
    rows: Rows,
    out: Tensor,
    row_scale: Tensor | None = None,
    root: Tensor | None = None,
    beside: bool = False,
) -> None:
    """Add up the chunks of long rows: partial [X, C] into some rows of out [R, ...], which may be a view of columns."""
    assert rows.long_rows is not None
    channels = partial.shape[1]
    chunks, columns, warps = merge_tile(channels)
    _merge_sums[(merge_grid(rows.long_rows), ceil_div(channels, columns))](
        partial, rows.long_rows, row_scale, root, out, rows.long_rows.shape[0],
        CHANNELS=channels, ROOT_STRIDE=0 if root is None else root.stride(0), OUT_STRIDE=out.stride(0), BESIDE=beside,
        CHUNKS=chunks, COLUMNS=columns, num_warps=warps,
    )  # fmt: skip


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
    x, grad = with_rows(x), with_rows(grad)
    edges, channels = source.shape[0], x.shape[1]
    out = x.new_empty(edges, dtype=dtype)
    if not edges:
        return out
    columns = min(next_power(channels), 256)
    tile = max(4096 // columns, 16)
    _edge_dot[(ceil_div(edges, tile),)](
        x, grad, source, destination, gather_scale, row_scale, out, edges,
        CHANNELS=channels, X_STRIDE=x.stride(0), GRAD_STRIDE=grad.stride(0), EDGES=tile, COLUMNS=columns, num_warps=4,
    )  # fmt: skip
    return out
