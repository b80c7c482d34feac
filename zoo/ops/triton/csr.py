# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs
"""What Triton kernels over compressed sparse rows share.

A program reduces ``ROWS`` rows. It walks their edges ``EDGES`` at a time: that many rows of features are on their way
from memory at once, which is what hides its latency. Sums are kept in float32, an edge slot each, and the slots are
added up at the end. There are no atomics: the same input gives the same bits.

Long rows are cut into chunks (see zoo/ops/csr.py). The first programs of a launch take chunks and leave partial
results, the others take whole rows and skip the long ones; a second kernel then adds up the chunks of each long row in
order.

Offsets are 64 bits wide; indices are int32 or int64.

Shape legend: R rows, S gathered nodes, E edges, X chunks, L long rows, H heads, C channels.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from zoo.ops.common import ceil_div, next_power
from zoo.ops.csr import Rows

# Of an H200, about. Strips of half precision that do not stay in it are better gathered wider.
L2_BYTES = 50 * 2**20


@triton.jit
def greater(a, b):
    """The greater, or NaN if either is one."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def span(program, slot, pointers, chunks, rows, num_chunks, chunk_size, SLOTS: tl.constexpr):
    """What the slots of a program walk: (row, first edge, end, whether it writes that row, or uses it, if in a chunk).

    The first programs take a chunk each, of which every slot walks a part; the others take a row a slot. To write to a
    row use ``written``: what a call returns depends on all that it is given, and torch's compiler would take the
    pointers in it for tensors that are written to.
    """
    if chunks is None:
        row = program * SLOTS + slot
        whole = row < rows
        first = tl.load(pointers + row, mask=whole, other=0)
        end = tl.load(pointers + row + 1, mask=whole, other=0)
        return row, first, end, whole, whole, program < 0
    else:
        piece = program < num_chunks
        # Two ways, and not masks over both: every program would wait for the tables, though few are chunks.
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
            # A long row is left to its chunks.
            whole = used & (end - first <= chunk_size)
            used = whole
            end = tl.where(whole, end, first)
        return row, first, end, whole, used, piece


@triton.jit
def written(program, slot, num_chunks, SLOTS: tl.constexpr):
    """The row that a slot writes, if it writes one."""
    return (program - num_chunks) * SLOTS + slot


class Blocks(NamedTuple):
    """How a launch is cut: rows of a program and edges of each at a step, columns of a tile, warps."""

    rows: int
    edges: int
    columns: int
    warps: int

    def grid(self, rows: Rows, channels: int) -> tuple[int, int]:
        """Programs of a launch: those that take a chunk each, those that take rows, and tiles of columns."""
        number, num_chunks, _ = rows.limits
        return num_chunks + ceil_div(number, self.rows), ceil_div(channels, self.columns)

    def code(self) -> dict[str, int]:
        """As a launch takes them."""
        return {"ROWS": self.rows, "EDGES": self.edges, "COLUMNS": self.columns, "num_warps": self.warps}


def partial_of(rows: Rows, x: Tensor, *shape: int) -> Tensor | None:
    """Memory for a result [X, ...] of each chunk, if there are any."""
    return None if rows.chunks is None else x.new_empty(rows.chunks.shape[0], *shape, dtype=torch.float32)


def choose_blocks(channels: int, itemsize: int, nodes: int = 0) -> Blocks:
    """Block sizes by columns, bytes a value and gathered nodes. No autotuning: a first call must be quick.

    Measured on an H200. Wide features are taken in strips of 128 bytes, all rows before the next strip: a strip of some
    hundred thousand nodes stays in the L2 cache, and is gathered at twice the speed of memory. Very wide ones are taken
    in strips of 256 bytes, since every strip reads the edges once more; and where no strip stays in the cache, as much
    of a row as there is. Programs are one warp with 8 to 32 values a thread in flight: larger tiles leave too few of
    them on a multiprocessor and lose by factors.
    """
    strip = 128 // itemsize
    small = next_power(channels)
    if nodes * 128 > L2_BYTES and channels >= 32:
        if small <= 64:
            return Blocks(2, 2 if small == strip else 4, small, 1)
        # In half precision a row that is no whole vectors of 16 bytes takes more loads, which want to be in flight.
        return Blocks(1, 4 if itemsize > 2 or channels * itemsize % 16 else 2, 128, 1)
    if channels * itemsize > 1024:
        return Blocks(2, 4, 64, 1) if itemsize > 2 else Blocks(1, 8, 128, 1)
    columns = small if channels < 2 * strip else strip
    if columns >= 32:
        return Blocks(4, 2 if itemsize > 2 else 4, columns, 1)
    edges = 4 if columns == 16 else 8
    return Blocks(min(512 // (edges * columns), 16), edges, columns, 1)


def merge_tile(channels: int) -> tuple[int, int, int]:
    """(chunks, columns, warps) of a program that adds up chunks: narrow, to take many chunks of one long row a step.

    Each step waits for memory once, and there are few programs to wait beside it.
    """
    columns = min(next_power(channels), 8)
    return 16384 // columns, columns, 16


def merge_grid(long_rows: Tensor) -> int:
    """Programs over a table of long rows, which is mostly empty: a program takes rows until it meets an empty one."""
    return min(long_rows.shape[0], 256)
