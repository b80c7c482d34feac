# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs
"""Maxima over rows. Ties share the gradient, as with torch's scatter_reduce."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from zoo.ops.common import ceil_div
from zoo.ops.csr import Rows
from zoo.ops.triton.csr import choose_blocks, greater, merge_grid, merge_tile, span, written
from zoo.ops.triton.csr_sum import merge_sums
from zoo.ops.triton.kernel import kernel


@kernel(do_not_specialize=["rows", "num_chunks", "chunk_size"])
def _csr_max(
    x, index, pointers, chunks, out, ties, partial, partial_ties, rows, num_chunks, chunk_size,
    CHANNELS: tl.constexpr, ROWS: tl.constexpr, EDGES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < CHANNELS
    program = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, ROWS)
    _row, first, end, whole, _used, piece = span(program, slot, pointers, chunks, rows, num_chunks, chunk_size, ROWS)
    greatest = tl.full([ROWS, EDGES, COLUMNS], float("-inf"), tl.float32)
    equal = tl.zeros([ROWS, EDGES, COLUMNS], tl.float32)
    longest = tl.max(end - first, 0).to(tl.int32)
    for offset in range(0, longest, EDGES):
        edge = first[:, None] + (offset + tl.arange(0, EDGES))[None, :]
        live = edge < end[:, None]
        node = tl.load(index + edge, mask=live, other=0).to(tl.int64)
        place = (node * CHANNELS)[:, :, None] + column[None, None, :]
        mask = live[:, :, None] & inside[None, None, :]
        value = tl.load(x + place, mask=mask, other=float("-inf")).to(tl.float32)
        top = greater(greatest, value)
        if ties is not None:
            equal = tl.where(greatest == top, equal, 0.0) + tl.where(mask & (value == top), 1.0, 0.0)
        greatest = top
    result = tl.reduce(greatest, 1, greater)
    place = (written(program, slot, num_chunks, ROWS) * CHANNELS)[:, None] + column[None, :]
    if ties is not None:
        count = tl.sum(tl.where(greatest == result[:, None, :], equal, 0.0), 1)
    if chunks is not None:  # noqa: SIM102 (whose programs are one or the other at run time)
        if piece:
            top = tl.reduce(result, 0, greater)
            tl.store(partial + program * CHANNELS + column, top, mask=inside)
            if ties is not None:
                all_count = tl.sum(tl.where(result == top[None, :], count, 0.0), 0)
                tl.store(partial_ties + program * CHANNELS + column, all_count, mask=inside)
    if ties is not None:
        # torch's scatter_reduce starts from zeros, and counts its start among the ties.
        count += tl.where(result == 0.0, 1.0, 0.0)
        tl.store(ties + place, count, mask=whole[:, None] & inside[None, :])
    result = tl.where((end > first)[:, None], result, 0.0)
    tl.store(out + place, result.to(out.dtype.element_ty), mask=whole[:, None] & inside[None, :])


@kernel(do_not_specialize=["num_rows"])
def _merge_maxima(
    partial, partial_ties, long_rows, out, ties, num_rows,
    CHANNELS: tl.constexpr, CHUNKS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < CHANNELS
    number = tl.program_id(0)
    row = tl.load(long_rows + number * 3)
    while row >= 0:
        first = tl.load(long_rows + number * 3 + 1)
        end = tl.load(long_rows + number * 3 + 2)
        greatest = tl.full([CHUNKS, COLUMNS], float("-inf"), tl.float32)
        equal = tl.zeros([CHUNKS, COLUMNS], tl.float32)
        for offset in range(0, (end - first).to(tl.int32), CHUNKS):
            chunk = first + offset + tl.arange(0, CHUNKS)
            place = (chunk * CHANNELS)[:, None] + column[None, :]
            mask = (chunk < end)[:, None] & inside[None, :]
            value = tl.load(partial + place, mask=mask, other=float("-inf"))
            top = greater(greatest, value)
            if ties is not None:
                count = tl.load(partial_ties + place, mask=mask, other=0.0)
                equal = tl.where(greatest == top, equal, 0.0) + tl.where(value == top, count, 0.0)
            greatest = top
        result = tl.reduce(greatest, 0, greater)
        if ties is not None:
            count = tl.sum(tl.where(greatest == result[None, :], equal, 0.0), 0)
            count += tl.where(result == 0.0, 1.0, 0.0)
            tl.store(ties + row * CHANNELS + column, count, mask=inside)
        tl.store(out + row * CHANNELS + column, result.to(out.dtype.element_ty), mask=inside)
        number += tl.num_programs(0)
        row = tl.load(long_rows + number * 3, mask=number < num_rows, other=-1)


@kernel(do_not_specialize=["rows", "num_chunks", "chunk_size"])
def _csr_max_backward(
    x, values, shares, index, pointers, chunks, out, partial, rows, num_chunks, chunk_size,
    CHANNELS: tl.constexpr, ROWS: tl.constexpr, EDGES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Over the transpose: each source takes its share wherever it is the greatest."""
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < CHANNELS
    program = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, ROWS)
    row, first, end, whole, used, piece = span(program, slot, pointers, chunks, rows, num_chunks, chunk_size, ROWS)
    own = tl.load(x + (row * CHANNELS)[:, None] + column[None, :], mask=used[:, None] & inside[None, :], other=0.0)[
        :, None, :
    ]
    total = tl.zeros([ROWS, EDGES, COLUMNS], tl.float32)
    longest = tl.max(end - first, 0).to(tl.int32)
    for offset in range(0, longest, EDGES):
        edge = first[:, None] + (offset + tl.arange(0, EDGES))[None, :]
        live = edge < end[:, None]
        node = tl.load(index + edge, mask=live, other=0).to(tl.int64)
        place = (node * CHANNELS)[:, :, None] + column[None, None, :]
        mask = live[:, :, None] & inside[None, None, :]
        value = tl.load(values + place, mask=mask, other=0.0)
        share = tl.load(shares + place, mask=mask, other=0.0).to(tl.float32)
        total += tl.where(own == value, share, 0.0)
    result = tl.sum(total, 1)
    if chunks is not None:  # noqa: SIM102 (whose programs are one or the other at run time)
        if piece:
            tl.store(partial + program * CHANNELS + column, tl.sum(result, 0), mask=inside)
    place = (written(program, slot, num_chunks, ROWS) * CHANNELS)[:, None] + column[None, :]
    tl.store(out + place, result.to(out.dtype.element_ty), mask=whole[:, None] & inside[None, :])


def csr_max(x: Tensor, rows: Rows, count_ties: bool) -> tuple[Tensor, Tensor]:
    """Greatest of gathered rows, x [S, C] -> [R, C], and how many edges reach it, [R, C] float32 (or [0])."""
    x = x.contiguous()
    number, channels = rows.pointers.shape[0] - 1, x.shape[1]
    out = x.new_empty(number, channels)
    ties = x.new_empty((number, channels) if count_ties else (0,), dtype=torch.float32)
    if not out.numel():
        return out, ties
    blocks = choose_blocks(channels, x.element_size(), x.shape[0])
    partial = None if rows.chunks is None else x.new_empty(rows.num_chunks, channels, dtype=torch.float32)
    partial_ties = None if partial is None or not count_ties else torch.empty_like(partial)
    given_ties = ties if count_ties else None
    tiles = ceil_div(channels, blocks.columns)
    _csr_max[(rows.num_chunks + ceil_div(number, blocks.rows), tiles)](
        x, rows.nodes, rows.pointers, rows.chunks, out, given_ties, partial, partial_ties,
        number, rows.num_chunks, rows.chunk_size,
        CHANNELS=channels, ROWS=blocks.rows, EDGES=blocks.edges, COLUMNS=blocks.columns, num_warps=blocks.warps,
    )  # fmt: skip
    if rows.long_rows is not None:
        chunks, columns, warps = merge_tile(channels)
        chunks //= 2  # of which it holds the greatest, and how many there are
        _merge_maxima[(merge_grid(rows.long_rows), ceil_div(channels, columns))](
            partial, partial_ties, rows.long_rows, out, given_ties, rows.long_rows.shape[0],
            CHANNELS=channels, CHUNKS=chunks, COLUMNS=columns, num_warps=warps,
        )  # fmt: skip
    return out, ties


def csr_max_backward(x: Tensor, values: Tensor, shares: Tensor, rows: Rows) -> Tensor:
    """Over the transpose, x [S, C], values and shares [D, C] -> [S, C]: the shares of all maxima that x reaches."""
    x, values, shares = x.contiguous(), values.contiguous(), shares.contiguous()
    number, channels = x.shape
    out = torch.empty_like(x)
    if not out.numel():
        return out
    blocks = choose_blocks(channels, x.element_size(), values.shape[0])
    partial = None if rows.chunks is None else x.new_empty(rows.num_chunks, channels, dtype=torch.float32)
    tiles = ceil_div(channels, blocks.columns)
    _csr_max_backward[(rows.num_chunks + ceil_div(number, blocks.rows), tiles)](
        x, values, shares, rows.nodes, rows.pointers, rows.chunks, out, partial,
        number, rows.num_chunks, rows.chunk_size,
        CHANNELS=channels, ROWS=blocks.rows, EDGES=blocks.edges, COLUMNS=blocks.columns, num_warps=blocks.warps,
    )  # fmt: skip
    if partial is not None:
        merge_sums(partial, rows, out)
    return out
