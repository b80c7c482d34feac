# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs
"""What the kernels share: which rows a program works on, and how large its tiles are."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def greater(a, b):
    """The greater, or NaN if either is one."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def span(item, first_row, pointers, chunks, rows, num_chunks, chunk_size):
    """What item of a launch (a number or a vector of them) is: (row, first edge, end, writes a row, a chunk).

    Chunks come first, rows from ``first_row`` on.
    """
    if chunks is None:
        whole = item < rows
        first = tl.load(pointers + item, mask=whole, other=0)
        end = tl.load(pointers + item + 1, mask=whole, other=0)
        return item, first, end, whole, item < 0
    else:
        piece = item < num_chunks
        own = item - first_row
        whole = (own >= 0) & (own < rows)
        first = tl.load(pointers + own, mask=whole, other=0)
        end = tl.load(pointers + own + 1, mask=whole, other=0)
        # A long row is left to its chunks.
        whole = whole & (end - first <= chunk_size)
        row = tl.where(piece, tl.load(chunks + item * 3, mask=piece, other=0), own)
        first = tl.where(piece, tl.load(chunks + item * 3 + 1, mask=piece, other=0), first)
        end = tl.where(piece, tl.load(chunks + item * 3 + 2, mask=piece, other=0), end)
        return row, first, tl.where(piece | whole, end, first), whole, piece


class Blocks(NamedTuple):
    """How a launch is cut: rows and edges of a step, columns of a tile, warps of a program."""

    rows: int
    edges: int
    columns: int
    warps: int


def choose_blocks(channels: int, itemsize: int) -> Blocks:
    """Block sizes by width and bytes a value. One place, no autotuning: a first call must be quick.

    Measured on an H200: one warp with some 32 values a thread in flight is best at every width. Larger tiles spill or
    leave too few programs on a multiprocessor, and lose a factor of two to six.
    """
    columns = tile_columns(channels)
    edges = 4 if columns * itemsize >= 512 else 8
    rows = 1
    # Narrow rows: several to a program, else its fixed latencies (pointer, index, row) are all that is left.
    while rows * edges * columns < 1024 and rows < 16:
        rows *= 2
    return Blocks(rows, edges, columns, 1)


def tile_columns(channels: int) -> int:
    """Width of a tile: the widest power of two that leaves at most an eighth of its lanes idle, or the frugalest."""
    if channels <= 256:
        return next_power(channels)
    frugal = min((256, 128, 64), key=lambda width: -channels % width)
    return next((width for width in (256, 128, 64) if -channels % width <= channels // 8), frugal)


def merge_tile(channels: int) -> tuple[int, int, int]:
    """(chunks, columns, warps) of a program that adds up chunks: narrow, to take many chunks of one long row a step."""
    columns = min(next_power(channels), 16)
    return 2048 // columns, columns, 4


def merge_grid(long_rows: Tensor) -> int:
    """Programs over a table of long rows, which is mostly empty: a program takes rows until it meets an empty one."""
    return min(long_rows.shape[0], 256)


def with_rows(x: Tensor) -> Tensor:
    """Features [N, C], copied unless the values of a row lie side by side; rows may be any distance apart."""
    return x if x.stride(1) == 1 else x.contiguous()


def next_power(value: int) -> int:
    """The next power of two, at least 1."""
    return 1 << max(value - 1, 0).bit_length()


def warps_for(elements: int) -> int:
    """32 values a thread."""
    return min(max(next_power(elements // 1024), 1), 8)
