"""Long rows in pieces: one node with 200,000 neighbours must not keep everybody waiting.

A row several times longer than the mean is cut into chunks. Each chunk is reduced on its own, at the same time as the
short rows, and a second small kernel adds up the chunks of each long row in their order: no atomics, and the same bits
at every run. A graph without a long row has no tables and needs no second kernel.

Shape legend: R rows (destinations; sources in the transpose), E edges, X chunks and L long rows at most.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from zoo.ops.common import next_power

# Fewest edges worth a chunk. A chunk is walked by one program, a few edges a step: some 20 microseconds on an H200,
# about as long as the shortest launches that matter.
EDGES_PER_CHUNK = 128
# Pieces that keep a large GPU busy to the end.
ENOUGH_PIECES = 8192


class Split(NamedTuple):
    """Tables of chunks, padded to powers of two, so that graphs of one kind and size have them of one shape.

    Args:
        chunks: [X, 3] int64, (row, first edge, end) of each chunk, those of one row side by side; empty at the end.
        rows: [L, 3] int64, (row, first chunk, end) of each long row; row -1 at the end.
    """

    chunks: Tensor
    rows: Tensor


class Rows(NamedTuple):
    """One orientation of a graph, as kernels walk it.

    Args:
        pointers: [R + 1] int64, where the edges of each row start.
        nodes: [E], the node at the other end of each edge, or None where values lie an edge a row already.
        chunks: [X, 3], as of ``Split``.
        long_rows: [L, 3].
    """

    pointers: Tensor
    nodes: Tensor | None
    chunks: Tensor | None = None
    long_rows: Tensor | None = None

    @property
    def number(self) -> int:
        """R."""
        return self.pointers.shape[0] - 1

    @property
    def num_chunks(self) -> int:
        """X, 0 where no row is cut."""
        return 0 if self.chunks is None else self.chunks.shape[0]


def edges_per_chunk(edges: int, rows: int) -> int:
    """Most edges in a chunk: four times the mean row, but pieces enough. Every cut costs a partial result."""
    mean = edges // max(rows, 1)
    return max(EDGES_PER_CHUNK, min(1 << (4 * mean).bit_length(), edges // ENOUGH_PIECES))


def split_rows(pointers: Tensor, edges: int, size: int | None = None) -> Split | None:
    """The tables of a graph, or None if no row has more than ``size`` edges. Reads two numbers from the device.

    Args:
        pointers: [R + 1] int64, where the edges of each row start.
        edges: E.
        size: Most edges in a chunk; ``edges_per_chunk`` when left out.
    """
    size = edges_per_chunk(edges, pointers.shape[0] - 1) if size is None else size
    if edges <= size or pointers.is_meta:
        return None
    degree = pointers.diff()
    is_long = degree > size
    count = ((degree + size - 1) // size) * is_long
    num_long, num_chunks = torch.stack([is_long.sum(), count.sum()]).tolist()
    if num_long == 0:
        return None
    end = count.cumsum(0)
    # A program that finds its entry empty costs about as much to launch as one that finds work: no more than need be.
    number = torch.arange(next_power(num_chunks), device=pointers.device)
    row, real = _within(torch.searchsorted(end, number, right=True), degree)
    first_edge = pointers[row] + (number - (end - count)[row]) * size
    chunks = torch.stack([row, first_edge, torch.minimum(first_edge + size, pointers[row + 1])], dim=1)
    rank = torch.arange(1, next_power(num_long) + 1, device=pointers.device)
    row, long = _within(torch.searchsorted(is_long.cumsum(0), rank), degree)
    rows = torch.stack([row, (end - count)[row], end[row]], dim=1)
    return Split(chunks.masked_fill(~real.unsqueeze(1), 0), rows.masked_fill(~long.unsqueeze(1), -1))


def _within(row: Tensor, degree: Tensor) -> tuple[Tensor, Tensor]:
    """Rows that exist, and which of them did."""
    return row.clamp(max=degree.shape[0] - 1), row < degree.shape[0]
