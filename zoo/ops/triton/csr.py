"""Sums over compressed sparse rows with their gradients, and sampling without replacement.

A program sums ``ROWS`` rows in float32, ``EDGES`` edges of each per step, which hides the latency of the gathers. Long
rows are cut into chunks (see zoo/ops/csr.py): the first programs of a launch write partial results of chunks, the other
programs skip long rows, and a second kernel merges the chunks of each long row in order. No kernel uses atomics:
results are bitwise reproducible. Offsets are 64 bits wide; indices are int32 or int64.

Shape legend: R rows, S gathered nodes, E edges, X chunks, L long rows, H heads, C channels.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from zoo.engine.kernel import kernel
from zoo.ops.common import ceil_div, next_power
from zoo.ops.csr import MOST_AT_ONCE, Own, Rows

# L2 cache of an H200, about. Half-precision strips that do not fit in it are gathered wider.
L2_BYTES = 50 * 2**20


@triton.jit
def span(program, slot, pointers, chunks, rows, num_chunks, chunk_size, SLOTS: tl.constexpr):
    """For each slot of a program: row, first edge, end, whether the slot is valid, is in use, and belongs to a chunk.

    The first programs take one chunk each and share its edges among their slots. The others take one row per slot. Use
    the row of ``written`` for stores: torch's compiler would treat the pointers passed to this call as written.
    """
    if chunks is None:
        row = program * SLOTS + slot
        whole = row < rows
        first = tl.load(pointers + row, mask=whole, other=0)
        end = tl.load(pointers + row + 1, mask=whole, other=0)
        return row, first, end, whole, whole, program < 0
    else:
        piece = program < num_chunks
        # A branch, since with masks every program would wait for the tables, though few programs take chunks.
        if piece:
            row = tl.load(chunks + program * 3) + slot * 0
            start = tl.load(chunks + program * 3 + 1)
            stop = tl.load(chunks + program * 3 + 2)
            part = tl.cdiv(stop - start, SLOTS)
            first = tl.minimum(start + slot * part, stop)
            end = tl.minimum(first + part, stop)
            whole = row < 0
            used = row >= 0
        else:
            row = (program - num_chunks) * SLOTS + slot
            used = row < rows
            first = tl.load(pointers + row, mask=used, other=0)
            end = tl.load(pointers + row + 1, mask=used, other=0)
            # Chunks sum the long rows.
            whole = used & (end - first <= chunk_size)
            used = whole
            end = tl.where(whole, end, first)
        return row, first, end, whole, used, piece


@triton.jit
def written(program, slot, num_chunks, SLOTS: tl.constexpr):
    """The row that a slot writes, if it writes a row."""
    return (program - num_chunks) * SLOTS + slot


def partial_of(rows: Rows, x: Tensor, *shape: int) -> Tensor | None:
    """Memory for the partial results [X, ...] of chunks, or None without chunks."""
    return None if rows.chunks is None else x.new_empty(rows.chunks.shape[0], *shape, dtype=torch.float32)


def choose_blocks(channels: int, itemsize: int, nodes: int = 0, weighted: bool = False) -> dict[str, int]:
    """Tile of a program (rows, edges per step, columns), from the bytes per value and the number of gathered nodes.

    Measured on an H200, since autotuning delays first calls. Wide features are processed in strips of 128 bytes, all
    rows before the next strip: a strip of some hundred thousand nodes fits in the L2 cache. Very wide features use
    strips of 256 bytes, since every strip reads the edges again. If no strip fits in the cache, a strip is as wide as
    possible. A program is one warp with 8 to 32 values per thread in flight: larger tiles lower the occupancy. With
    weights more edges are in flight, since a step also waits for them.
    """
    strip, small = 128 // itemsize, next_power(channels)
    if nodes * 128 > L2_BYTES and channels >= 32:
        if small <= 64:
            rows, edges, columns = 2, 2 if small == strip else 4, small
        else:
            # Half-precision rows that are not a multiple of 16 bytes need more loads, so more edges are in flight.
            rows, edges, columns = 1, 4 if itemsize > 2 or channels * itemsize % 16 else 2, 128
    elif channels * itemsize > 1024:
        rows, edges, columns = (2, 4, 64) if itemsize > 2 else (1, 8, 128)
    else:
        columns = small if channels < 2 * strip else strip
        if columns >= 32:
            rows, edges = 4, 4 if itemsize <= 2 or (weighted and columns == 32) else 2
        else:
            edges = 4 if columns == 16 else 8
            rows = min(512 // (edges * columns), 16)
    return {"ROWS": rows, "EDGES": edges, "COLUMNS": columns, "num_warps": 1}


def grid_of(rows: Rows, channels: int, blocks: dict[str, int]) -> tuple[int, int]:
    """Grid of a launch: programs for chunks plus programs for rows, by tiles of columns."""
    number, num_chunks, _ = rows.limits
    return num_chunks + ceil_div(number, blocks["ROWS"]), ceil_div(channels, blocks["COLUMNS"])


def merge_tile(channels: int) -> dict[str, int]:
    """Tile of a merging program, measured on an H200. Most long rows have few chunks; the others take more steps."""
    return {"CHUNKS": 64, "COLUMNS": min(next_power(channels), 32), "num_warps": 4}


def merge_grid(long_rows: Tensor, channels: int, tile: dict[str, int]) -> tuple[int, int]:
    """Grid over the table of long rows, which is mostly padding. A program takes rows until it meets an empty entry."""
    return min(long_rows.shape[0], 256), ceil_div(channels, tile["COLUMNS"])


@triton.jit
def _finish(
    result, row, whole, column, row_scale, bias, x, own_rows, out, CHANNELS: tl.constexpr, READABLE: tl.constexpr,
    STRIDE: tl.constexpr, OWN: tl.constexpr, RELU: tl.constexpr, OUT_STRIDE: tl.constexpr, OUT_COLUMN: tl.constexpr,
):  # fmt: skip
    """Scale the sums [ROWS, COLUMNS] of whole rows, add or concatenate the rows' own values, and store them."""
    mask = whole[:, None] & (column < CHANNELS)[None, :]
    if row_scale is not None:
        result *= tl.load(row_scale + row, mask=whole, other=0.0).to(tl.float32)[:, None]
    place = (row * OUT_STRIDE)[:, None] + (OUT_COLUMN + column)[None, :]
    if OWN != 0:
        there = mask & (row < own_rows)[:, None] & (column < READABLE)[None, :]
        own = tl.load(x + (row * STRIDE)[:, None] + (READABLE * (OWN == 1) + column)[None, :], mask=there, other=0.0)
        if OWN == 1:
            result += own.to(tl.float32)
        else:
            tl.store(out + place + CHANNELS, own.to(out.dtype.element_ty), mask=mask)
    if bias is not None:
        result += tl.load(bias + column, mask=column < CHANNELS, other=0.0).to(tl.float32)[None, :]
    if RELU:
        result = tl.where(result < 0, 0.0, result)  # NaN stays
    tl.store(out + place, result.to(out.dtype.element_ty), mask=mask)


@kernel(do_not_specialize=["rows", "num_chunks", "chunk_size", "own_rows"])
def _csr_sum(
    x, index, pointers, weight, gather_scale, row_scale, bias, chunks, out, partial, rows, num_chunks, chunk_size,
    own_rows, CHANNELS: tl.constexpr, READABLE: tl.constexpr, STRIDE: tl.constexpr, OWN: tl.constexpr,
    RELU: tl.constexpr, OUT_STRIDE: tl.constexpr, OUT_COLUMN: tl.constexpr, ROWS: tl.constexpr, EDGES: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < CHANNELS
    readable = column < READABLE
    program = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, ROWS)
    _row, first, end, whole, _used, piece = span(program, slot, pointers, chunks, rows, num_chunks, chunk_size, ROWS)
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
        mask = live[:, :, None] & readable[None, None, :]
        value = tl.load(x + place, mask=mask, other=0.0).to(tl.float32)
        if weight is not None:
            value *= tl.load(weight + edge, mask=live, other=0.0).to(tl.float32)[:, :, None]
        if gather_scale is not None:
            value *= tl.load(gather_scale + node, mask=live, other=0.0).to(tl.float32)[:, :, None]
        total += value
    result = tl.sum(total, 1)
    if chunks is not None:  # noqa: SIM102 (whose programs are one or the other at run time)
        if piece:
            tl.store(partial + program * CHANNELS + column, tl.sum(result, 0), mask=inside)
    _finish(
        result, written(program, slot, num_chunks, ROWS), whole, column, row_scale, bias, x, own_rows, out,
        CHANNELS, READABLE, STRIDE, OWN, RELU, OUT_STRIDE, OUT_COLUMN,
    )  # fmt: skip


@kernel(do_not_specialize=["num_rows", "own_rows"])
def _merge_sums(
    partial, long_rows, row_scale, bias, x, out, num_rows, own_rows,
    CHANNELS: tl.constexpr, READABLE: tl.constexpr, STRIDE: tl.constexpr, OWN: tl.constexpr, RELU: tl.constexpr,
    OUT_STRIDE: tl.constexpr, OUT_COLUMN: tl.constexpr, CHUNKS: tl.constexpr, COLUMNS: tl.constexpr,
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
            result, row + tl.zeros([1], tl.int64), tl.full([1], True, tl.int1), column,
            row_scale, bias, x, own_rows, out, CHANNELS, READABLE, STRIDE, OWN, RELU, OUT_STRIDE, OUT_COLUMN,
        )  # fmt: skip
        number += tl.num_programs(0)
        row = tl.load(long_rows + number * 3, mask=number < num_rows, other=-1)


def csr_sum(
    x: Tensor, rows: Rows, weight: Tensor | None = None, gather_scale: Tensor | None = None,
    row_scale: Tensor | None = None, bias: Tensor | None = None, own: Own = None, channels: int | None = None,
    relu: bool = False, out: Tensor | None = None, out_column: int = 0,
) -> Tensor:  # fmt: skip
    """Weighted sums of gathered rows: x [S, W] -> [R, C], or into ``out`` [R, ...] from ``out_column`` on.

    Factors are weight [E], gather_scale [S] and row_scale [R]; bias is [C]. ``own="add"`` takes x [S, 2 W] and adds its
    second half to the sums; ``own="concat"`` concatenates x to the sums: [R, 2 C]. Rows beyond the end of x count as
    zero. Without nodes in ``rows`` x is [E, W], one row per edge. C defaults to W; columns beyond W are zero. ``relu``
    comes last and does not apply to concatenated columns.
    """
    x, number = x.contiguous(), rows.limits[0]
    readable = x.shape[1] // 2 if own == "add" else x.shape[1]
    channels = readable if channels is None else channels
    if out is None:
        out = x.new_empty(number, 2 * channels if own == "concat" else channels)
    if not number or not channels:
        return out
    blocks = choose_blocks(max(channels, readable), x.element_size(), x.shape[0], weight is not None)
    partial = partial_of(rows, x, channels)
    _csr_sum[grid_of(rows, channels, blocks)](
        x, rows.nodes, rows.pointers, weight, gather_scale, row_scale, bias, rows.chunks, out, partial, *rows.limits,
        x.shape[0], CHANNELS=channels, READABLE=readable, STRIDE=x.shape[1], OWN=_OWN[own], RELU=relu,
        OUT_STRIDE=out.shape[1], OUT_COLUMN=out_column, **blocks,
    )  # fmt: skip
    if partial is not None:
        merge_sums(partial, rows, out, out_column, row_scale, bias, x, _OWN[own], readable, relu)
    return out


_OWN = {None: 0, "add": 1, "concat": 2}


def merge_sums(
    partial: Tensor, rows: Rows, out: Tensor, out_column: int = 0, row_scale: Tensor | None = None,
    bias: Tensor | None = None, x: Tensor | None = None, own: int = 0, readable: int = 0, relu: bool = False,
) -> None:  # fmt: skip
    """Add the chunks of long rows: partial [X, C] into the long rows of out [R, ...], from ``out_column`` on."""
    assert rows.long_rows is not None
    channels, tile = partial.shape[1], merge_tile(partial.shape[1])
    own_rows, stride = (0, 0) if x is None else x.shape
    _merge_sums[merge_grid(rows.long_rows, channels, tile)](
        partial, rows.long_rows, row_scale, bias, x, out, rows.long_rows.shape[0], own_rows, CHANNELS=channels,
        READABLE=readable, STRIDE=stride, OWN=own, RELU=relu, OUT_STRIDE=out.shape[1], OUT_COLUMN=out_column,
        **tile,
    )  # fmt: skip


# Places that a program holds in registers, 16 per thread, for at least two nodes.
_HELD = 2 * MOST_AT_ONCE


@kernel(do_not_specialize=["nodes"])
def _distinct(degree, uniform, out, nodes, COUNT: tl.constexpr, COLUMNS: tl.constexpr, NODES: tl.constexpr):
    node = tl.program_id(0).to(tl.int64) * NODES + tl.arange(0, NODES)
    inside = node < nodes
    column = tl.arange(0, COLUMNS)
    size = tl.load(degree + node, mask=inside, other=COUNT)
    places = tl.full([NODES, COLUMNS], -1, tl.int64)
    uniform += node
    for index in range(COUNT):
        last = size - COUNT + index
        share = tl.load(uniform, mask=inside, other=0.0)
        uniform += nodes
        # Rounded as in torch, so that both draw the same places.
        drawn = (share * (last + 1).to(tl.float64)).to(tl.int64)
        taken = tl.max((places == drawn[:, None]).to(tl.int32), 1) > 0
        place = tl.where(taken, last, drawn)
        places = tl.where(column[None, :] == index, place[:, None], places)
    mask = inside[:, None] & (column < COUNT)[None, :]
    tl.store(out + (node * COUNT)[:, None] + column[None, :], places, mask=mask)


def distinct(degree: Tensor, uniform: Tensor) -> Tensor:
    """K distinct places below each degree [n] int64, from ``uniform`` [K, n] float64, K <= ``MOST_AT_ONCE``: [n, K]."""
    count, nodes = uniform.shape
    out = torch.empty((nodes, count), dtype=torch.int64, device=degree.device)
    if nodes:
        columns = next_power(count)
        block = _HELD // columns
        _distinct[(ceil_div(nodes, block),)](
            degree, uniform, out, nodes, COUNT=count, COLUMNS=columns, NODES=block, num_warps=2
        )
    return out
