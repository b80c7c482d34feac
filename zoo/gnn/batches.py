"""A sampled part of a graph: as it was drawn, and padded to one of few static shapes, layer by layer.

A batch's nodes stand hop by hop from the seeds outward. So what a layer need compute are the first rows of what the one
before it computed: all nodes but those met last, then all but those met in the last two hops, in the end the seeds.

Shape legend: B seeds of a batch, N nodes and E edges of its bucket, R rows of a layer; n and e before padding.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

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
        """Whether a batch of the other's sizes fits."""
        both = zip(other.layers, self.layers, strict=True)
        return other.nodes <= self.nodes and all(
            rows <= most_rows and edges <= most_edges for (rows, edges), (most_rows, most_edges) in both
        )


class SampledBatch(NamedTuple):
    """A sampled part of a graph, padded; tensors only, so that a captured step takes it as it is.

    Attributes:
        nodes: [N] int64, which nodes of the large graph they are, the seeds first; 0 where padded.
        seeds: [B] int64, the nodes to learn from; -1 where the last batch of an epoch has fewer.
        graphs: For a model in place of ``edge_index``: the edges of each layer, the first layer first. It takes the
            rows of the layer before it (the first one N) to the R rows that the next one reads, in the end to B.
            Padding is behind the last row that was drawn for, where nothing reads it.
    """

    nodes: Tensor
    seeds: Tensor
    graphs: tuple[GraphTensors, ...]

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> SampledBatch:
        """The batch on a device; from pinned memory without waiting."""
        check_device(device, "a batch")
        return SampledBatch(*map_tensors(self, lambda tensor: tensor.to(device, non_blocking=non_blocking)))

    def pin_memory(self) -> SampledBatch:
        """The batch in pinned memory."""
        return SampledBatch(*map_tensors(self, lambda tensor: tensor.pin_memory()))

    def labels(self, labels: Tensor) -> Tensor:
        """Labels [B, ...] of the seeds out of [N, ...] of all nodes; -100, which a loss leaves out, where padded."""
        missing = (self.seeds < 0).view(-1, *(1,) * (labels.dim() - 1))
        return torch.where(missing, -100, labels[self.seeds.clamp(min=0)])


class Subgraph(NamedTuple):
    """A sampled part of a graph as it was drawn, n nodes and e edges.

    Attributes:
        nodes: [n] int64, which nodes of the large graph they are, the seeds first.
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
        nodes: Those that were met, the seeds first.
        counts: How many edges come into each of them but those met last, which have none.
        source: Where each edge comes from, in that order.
        sizes: How many there are.
    """

    nodes: Tensor
    counts: Tensor
    source: Tensor
    sizes: Bucket

    def subgraph(self, seeds: Tensor) -> Subgraph:
        """With its edges as an ``edge_index``."""
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
        """In the shapes of a bucket that holds it."""
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
    """The part of a graph that a layer needs, with a transpose of its own.

    Args:
        graph: With the edges of these rows and of more behind.
        rows: R.
        edges: How many edges to keep, padded.
        sizes: Of both the ones that were drawn: edges that a layer may walk, into rows that it is for. The rows behind
            them are padding, though nodes may be there.
        sources: Rows of what the layer reads.
    """
    assert graph.inverse_degree is not None
    nodes, drawn = sizes
    # Of one source's edges those to the first rows come first, but all of the transpose moves up.
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


def map_tensors(item: Any, function: Callable[[Tensor], Any]) -> list[Any]:
    """Fields of a tuple, its tensors changed, tuples in it likewise, as lists that torch's DataLoader makes of them."""

    def field(value: Any) -> Any:
        if isinstance(value, Tensor):
            return function(value)
        if value is None or (isinstance(value, list) and not any(isinstance(each, (Tensor, tuple)) for each in value)):
            return value
        fields = map_tensors(value, function)
        return type(value)(*fields) if hasattr(value, "_fields") else tuple(fields)

    return [field(value) for value in item]
