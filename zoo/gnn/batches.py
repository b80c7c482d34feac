"""A sampled part of a graph: as it was drawn, and padded to one of few static shapes, layer by layer.

A batch lists its nodes hop by hop, the seeds first. Each layer computes a prefix of the rows of the layer before it:
the first layer all nodes but those of the last hop, the next one all but those of the last two hops, the last layer the
seeds.

Shape legend: B seeds of a batch, N nodes and E edges of its bucket, R rows of a layer; n and e before padding.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from zoo.ops.csr import GraphTensors, Transpose
from zoo.validate import check_device


class Bucket(NamedTuple):
    """What a batch is padded to.

    Attributes:
        nodes: N.
        layers: (rows, edges into them) of each layer, the first layer first. The first one's edges are all, E; the last
            one's rows are B, and its edges those of the first hop.
    """

    nodes: int
    layers: tuple[tuple[int, int], ...]

    @property
    def edges(self) -> int:
        """E."""
        return self.layers[0][1]

    def holds(self, other: Bucket) -> bool:
        """True if a batch of the other's sizes fits."""
        both = zip(other.layers, self.layers, strict=True)
        return other.nodes <= self.nodes and all(
            rows <= most_rows and edges <= most_edges for (rows, edges), (most_rows, most_edges) in both
        )


class SampledBatch(NamedTuple):
    """A sampled part of a graph, padded; tensors only, so that a captured step takes it as it is.

    Attributes:
        nodes: [N] int64, their numbers in the large graph, the seeds first; 0 where padded.
        seeds: [B] int64, the nodes to learn from; -1 where the last batch of an epoch has fewer.
        graphs: The edges of each layer, for a model in place of ``edge_index``. The first layer takes N rows; each
            layer writes the R rows that the next one reads, the last one B. Rows and edges that are padding come last,
            and no seed depends on them.
    """

    nodes: Tensor
    seeds: Tensor
    graphs: tuple[GraphTensors, ...]

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> SampledBatch:
        """The batch on a device; from pinned memory without waiting."""
        check_device(device, "a batch")
        moved = pytree.tree_map_only(Tensor, lambda tensor: tensor.to(device, non_blocking=non_blocking), self)
        # Torch's DataLoader makes lists of tuples.
        return SampledBatch(moved.nodes, moved.seeds, tuple(moved.graphs))

    def pin_memory(self) -> SampledBatch:
        """The batch in pinned memory."""
        return SampledBatch(*pytree.tree_map_only(Tensor, Tensor.pin_memory, tuple(self)))

    def labels(self, labels: Tensor) -> Tensor:
        """The seeds' part [B, ...] of all nodes' labels; -100, which torch's losses leave out, where padded."""
        missing = (self.seeds < 0).view(-1, *(1,) * (labels.dim() - 1))
        return torch.where(missing, -100, labels[self.seeds.clamp(min=0)])


class Subgraph(NamedTuple):
    """A sampled part of a graph as it was drawn, n nodes and e edges.

    Attributes:
        nodes: [n] int64, their numbers in the large graph, the seeds first.
        seeds: [B] int64, the nodes to learn from; fewer at the end of an epoch.
        edge_index: [2, e] int64, sources above destinations, in the numbers of ``nodes``.
        hop_nodes: How many nodes each hop met first, the seeds before all.
        hop_edges: How many edges each hop drew; they stand in this order.
    """

    nodes: Tensor
    seeds: Tensor
    edge_index: Tensor
    hop_nodes: list[int]
    hop_edges: list[int]


class Drawn(NamedTuple):
    """A batch before it is padded.

    Attributes:
        nodes: [n] int64, the seeds first.
        counts: How many edges go into each node, for all nodes but those of the last hop.
        source: [e] int32, the source of each edge; edges are sorted by destination.
        sizes: The smallest bucket that holds it.
    """

    nodes: Tensor
    counts: Tensor
    source: Tensor
    sizes: Bucket

    def subgraph(self, seeds: Tensor) -> Subgraph:
        """The batch with its edges as an ``edge_index``."""
        destination = _destinations(self.counts, len(self.source)).long()
        rows, edges = zip(*reversed(self.sizes.layers), strict=True)
        return Subgraph(
            self.nodes,
            seeds,
            torch.stack([self.source.long(), destination]),
            hop_nodes=[b - a for a, b in itertools.pairwise((0, *rows, self.sizes.nodes))],
            hop_edges=[b - a for a, b in itertools.pairwise((0, *edges))],
        )

    def padded(self, seeds: Tensor, bucket: Bucket) -> SampledBatch:
        """The batch in the shapes of a bucket that holds it."""
        most_rows, most_edges = bucket.layers[0]
        rows, edges = self.sizes.layers[0]
        rowptr = torch.full((most_rows + 1,), edges, device=self.counts.device)
        rowptr[0] = 0
        torch.cumsum(self.counts, 0, out=rowptr[1 : rows + 1])
        first = GraphTensors(
            rowptr=rowptr,
            source=_pad(self.source, most_edges),
            destination=_pad(_destinations(self.counts, edges), most_edges),
            inverse_degree=rowptr.diff().clamp(min=1).float().reciprocal(),
        )
        graphs, sources = [], bucket.nodes
        for sizes, (rows, edges) in zip(self.sizes.layers, bucket.layers, strict=True):
            graphs.append(_first_rows(first, rows, edges, sizes, sources))
            sources = rows
        return SampledBatch(_pad(self.nodes, bucket.nodes), _pad(seeds, bucket.layers[-1][0], -1), tuple(graphs))


def _destinations(counts: Tensor, edges: int) -> Tensor:
    rows = torch.arange(len(counts), dtype=torch.int32, device=counts.device)
    return rows.repeat_interleave(counts, output_size=edges)


def _first_rows(graph: GraphTensors, rows: int, edges: int, sizes: tuple[int, int], sources: int) -> GraphTensors:
    """The part of a graph that one layer needs, padded to R ``rows`` and ``edges``, with a transpose of its own.

    ``sizes`` are the rows and edges that were drawn; ``sources`` is the number of rows that the layer reads.
    """
    assert graph.inverse_degree is not None
    nodes, drawn = sizes
    source = graph.source[:drawn]
    order = source.sort(stable=True).indices.int()
    # Counted without waiting for a GPU, as bincount would.
    colptr = torch.zeros(sources + 1, dtype=torch.int64, device=source.device)
    colptr[1:].index_add_(0, source, colptr.new_ones(1).expand(drawn))
    return GraphTensors(
        rowptr=graph.rowptr[: rows + 1].clamp(max=drawn),
        # Sources of the edges behind may be no rows of this layer's features.
        source=_pad(source, edges),
        destination=_pad(graph.destination[:drawn], edges, rows),
        inverse_degree=graph.inverse_degree[:rows],
        transpose=Transpose(
            colptr=colptr.cumsum_(0),
            destination=_pad(graph.destination[order], edges),
            permutation=_pad(order, edges),
        ),
        rows=torch.full((), nodes, device=source.device),
    )


def _pad(values: Tensor, size: int, fill: int = 0) -> Tensor:
    padded = values.new_full((size,), fill)
    padded[: len(values)] = values
    return padded
