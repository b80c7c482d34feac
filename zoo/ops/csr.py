"""A graph as the operators over its edges walk it: compressed sparse rows, and long rows in pieces.

One node with 200,000 neighbours must not keep everybody waiting. A row several times longer than the mean is cut into
chunks. Each chunk is reduced on its own, at the same time as the short rows, and a second small kernel adds up the
chunks of each long row in their order: no atomics, and the same bits at every run. A graph without a long row has no
tables and needs no second kernel.

Shape legend: S sources, D destinations, E edges, R rows (destinations; sources in the transpose), X chunks and L long
rows at most, H heads, C channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.ops import common

# What a sum adds of a row's own features, or puts beside it.
Own: TypeAlias = Literal["added", "beside"] | None
# Fewest edges worth a chunk. A chunk is walked by one program, a few edges a step: some 20 microseconds on an H200,
# about as long as the shortest launches that matter.
EDGES_PER_CHUNK = 128
# Pieces that keep a large GPU busy to the end.
ENOUGH_PIECES = 8192


class Split(NamedTuple):
    """Tables of chunks, padded to powers of two, so that graphs of one kind and size have them of one shape."""

    chunks: Tensor  # [X, 3] int64, (row, first edge, end) of each, those of one row side by side; empty at the end
    rows: Tensor  # [L, 3] int64, (row, first chunk, end) of each long row; row -1 at the end
    size: int  # most edges of a row that is not long


class Transpose(NamedTuple):
    """The same edges sorted by source, for backward passes of kernels."""

    colptr: Tensor  # [S + 1] int64, where the edges of each source start
    destination: Tensor  # [E], the node that each edge goes to
    permutation: Tensor  # [E], each edge's place in CSR order
    weight: Tensor | None = None  # [E], the graph's weights in this order
    split: Split | None = None  # long columns in pieces, if there are any


class GraphTensors(NamedTuple):
    """The part of a graph that enters a region: sizes come from the shapes of its tensors.

    Edges are sorted by destination, and keep the order of the input within one destination. Nodes are int32 where the
    graph has fewer than 2^31 nodes and edges, else int64.
    """

    rowptr: Tensor  # [D + 1] int64, where the edges of each destination start
    source: Tensor  # [E], the node that each edge comes from
    destination: Tensor  # [E], ascending, the node that each edge goes to; D for edges that are padding
    weight: Tensor | None = None  # [E], one factor per edge
    inverse_degree: Tensor | None = None  # [D], one over the number of incoming edges, 1 where there are none
    split: Split | None = None  # long rows in pieces, where kernels run on the graph's device and it has any
    transpose: Transpose | None = None  # for backward passes, where gradients are enabled
    rows: Tensor | None = None  # [] int64, how many of the D stand for nodes, the ones behind are padding; None for all


class Rows(NamedTuple):
    """One orientation of a graph, as kernels walk it."""

    pointers: Tensor  # [R + 1] int64, where the edges of each row start
    nodes: Tensor | None  # [E], the node at the other end of each edge, or None where values lie an edge a row already
    chunks: Tensor | None = None  # [X, 3], as of ``Split``
    long_rows: Tensor | None = None  # [L, 3]
    chunk_size: int = 0  # most edges of a row that is not long

    @property
    def limits(self) -> tuple[int, int, int]:
        """(R, X, chunk_size); X is 0 where no row is cut."""
        return self.pointers.shape[0] - 1, 0 if self.chunks is None else self.chunks.shape[0], self.chunk_size


def rows_from(tables: Sequence[Any], chunk_size: int) -> Rows:
    """Rows whose four tensors went through an autograd function one by one."""
    pointers, nodes, chunks, long_rows = tables
    return Rows(pointers, nodes, chunks, long_rows, chunk_size)


def rows_of(graph: GraphTensors) -> Rows:
    """The edges by destination."""
    return Rows(graph.rowptr, graph.source, *(graph.split or ()))


def columns_of(graph: GraphTensors) -> Rows:
    """The edges by source, which the gradients of kernels walk."""
    transpose = graph.transpose
    if transpose is None:
        raise RuntimeError(
            "a gradient of an aggregation walks the transposed graph, which this one was prepared without; run the "
            "forward with gradients enabled on a CSRGraph or on raw edges"
        )
    return Rows(transpose.colptr, transpose.destination, *(transpose.split or ()))


def edge_sum(x: Tensor, graph: GraphTensors, weight: Tensor | None = None) -> Tensor:
    """Sums over incoming edges by torch's operators: x [S, C] -> [D, C], or [S, H, C] and weights [E, H] -> [D, H, C].

    On a CPU the sums of ``embedding_bag`` take a twelfth of the time of gathering and ``index_add``.
    """
    if x.device.type == "cpu" and x.dtype == torch.float32 and not common.transformed() and not common.forward_mode():
        if x.dim() == 3:
            assert weight is not None
            return torch.stack([edge_sum(x[:, h], graph, weight[:, h]) for h in range(x.shape[1])], dim=1)
        # A last bag holds the edges that are padding.
        offsets = torch.cat([graph.rowptr, graph.rowptr.new_full((1,), graph.source.shape[0])]).to(graph.source.dtype)
        weight = None if weight is None else weight.contiguous()
        bags = F.embedding_bag(
            graph.source, x, offsets, mode="sum", per_sample_weights=weight, include_last_offset=True
        )
        return bags[:-1]
    messages = x.index_select(0, graph.source)
    if weight is not None:
        messages = messages * weight.unsqueeze(-1)
    return x.new_zeros(graph.rowptr.shape[0], *x.shape[1:]).index_add(0, graph.destination, messages)[:-1]


def edge_max(x: Tensor, graph: GraphTensors) -> Tensor:
    """The greatest value over incoming edges by torch's operators, zero where there are none: x [E, C] -> [D, C]."""
    where = graph.destination.long().unsqueeze(-1).expand_as(x)
    zeros = x.new_zeros(graph.rowptr.shape[0], x.shape[1])
    return zeros.scatter_reduce(0, where, x, "amax", include_self=False)[:-1]


def edges_per_chunk(edges: int, rows: int) -> int:
    """Most edges in a chunk: four times the mean row, but pieces enough. Every cut costs a partial result."""
    mean = edges // max(rows, 1)
    return max(EDGES_PER_CHUNK, min(1 << (4 * mean).bit_length(), edges // ENOUGH_PIECES))


def split_rows(pointers: Tensor, edges: int, size: int | None = None) -> Split | None:
    """The tables of a graph, or None if no row has more than ``size`` edges. Reads two numbers from the device.

    Pointers [R + 1] int64 say where the edges of each row start. ``size`` is ``edges_per_chunk`` when left out.
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
    number = torch.arange(common.next_power(num_chunks), device=pointers.device)
    row, real = _within(torch.searchsorted(end, number, right=True), degree)
    first_edge = pointers[row] + (number - (end - count)[row]) * size
    chunks = torch.stack([row, first_edge, torch.minimum(first_edge + size, pointers[row + 1])], dim=1)
    rank = torch.arange(1, common.next_power(num_long) + 1, device=pointers.device)
    row, long = _within(torch.searchsorted(is_long.cumsum(0), rank), degree)
    rows = torch.stack([row, (end - count)[row], end[row]], dim=1)
    return Split(chunks.masked_fill(~real.unsqueeze(1), 0), rows.masked_fill(~long.unsqueeze(1), -1), size)


def _within(row: Tensor, degree: Tensor) -> tuple[Tensor, Tensor]:
    """Rows that exist, and which of them did."""
    return row.clamp(max=degree.shape[0] - 1), row < degree.shape[0]
