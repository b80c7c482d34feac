"""Neighbour sampling for training on large graphs, in few static shapes.

A batch is padded to a bucket, so that one compiled and captured step serves every batch of the bucket. A batch lists
its nodes hop by hop, the seeds first. Each layer computes a prefix of the previous layer's rows: the first layer all
nodes except those of the last hop, the last layer only the seeds.

Shape legend: B seeds of a batch, N nodes and E edges of its bucket, R rows of a layer; n and e before padding.
"""

from __future__ import annotations

import copy
import itertools
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from operator import methodcaller
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree

from zoo import validate
from zoo.gnn.graph import CSRGraph
from zoo.ops.csr import GraphTensors, Transpose, distinct


class Bucket(NamedTuple):
    """The sizes of a padded batch.

    ``layers`` has (rows, edges into these rows) from the first layer, with all E edges, to the last, with B rows.
    """

    nodes: int  # N
    layers: tuple[tuple[int, int], ...]

    @property
    def edges(self) -> int:
        """Number of edges E."""
        return self.layers[0][1]

    def holds(self, other: Bucket) -> bool:
        """True if a batch of the other's sizes fits."""
        return all(size <= most for size, most in zip(other.flat(), self.flat(), strict=True))

    def flat(self) -> list[int]:
        """All sizes: nodes, then rows and edges of each layer."""
        return [self.nodes, *itertools.chain(*self.layers)]


class SampledBatch(NamedTuple):
    """A sampled part of a graph, padded to a bucket. Rows and edges of padding come last; no seed depends on them."""

    nodes: Tensor  # [N] int64, ids in the large graph, the seeds first; 0 for padding
    seeds: Tensor  # [B] int64, the training nodes; -1 for padding in an epoch's last batch
    graphs: tuple[GraphTensors, ...]  # one per layer, for ``edge_index``: reads N or R rows, writes R or B

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> SampledBatch:
        """The batch on a device."""
        validate.check_device(device, "a batch")
        return pytree.tree_map_only(Tensor, lambda tensor: tensor.to(device, non_blocking=non_blocking), self)

    def pin_memory(self) -> SampledBatch:
        """The batch in pinned memory."""
        return pytree.tree_map_only(Tensor, Tensor.pin_memory, self)

    def labels(self, labels: Tensor) -> Tensor:
        """The seeds' classes [B, ...] from those of all nodes; padding gets -100, which ``F.cross_entropy`` ignores.

        IndexError if ``labels`` are not those of all nodes. TypeError if they are no integers: losses of others ignore
        no value, so take ``labels[batch.seeds[real]]`` and ``output[real]``, with ``real = batch.seeds >= 0``.
        """
        if labels.dtype not in validate.INTEGERS:
            rows = "take labels[batch.seeds[real]] and output[real], with real = batch.seeds >= 0"
            raise TypeError(f"labels are {labels.dtype}, of which losses ignore no value: {rows}")
        missing = (self.seeds < 0).view(-1, *(1,) * (labels.dim() - 1))
        return torch.where(missing, -100, labels[self.seeds.clamp(min=0)])


class Subgraph(NamedTuple):
    """A sampled part of a graph before padding, with n nodes and e edges."""

    nodes: Tensor  # [n] int64, ids in the large graph, the seeds first
    seeds: Tensor  # [B] int64, the training nodes; fewer at the end of an epoch
    counts: Tensor  # number of edges into each node, for all nodes except those of the last hop
    source: Tensor  # [e] int32, the source of each edge as an index into ``nodes``; edges are sorted by destination
    sizes: Bucket  # before padding

    @property
    def edge_index(self) -> Tensor:
        """[2, e] int64, sources in the first row, as indices into ``nodes``."""
        return torch.stack([self.source, _destinations(self.counts, len(self.source))]).long()

    @property
    def hop_nodes(self) -> list[int]:
        """Number of new nodes per hop, starting with the seeds."""
        rows = [0, *(rows for rows, _ in reversed(self.sizes.layers)), self.sizes.nodes]
        return [b - a for a, b in itertools.pairwise(rows)]

    @property
    def hop_edges(self) -> list[int]:
        """Number of edges per hop, in the order of ``edge_index``."""
        return [b - a for a, b in itertools.pairwise([0, *(edges for _, edges in reversed(self.sizes.layers))])]

    def padded(self, bucket: Bucket) -> SampledBatch:
        """The batch, padded to a bucket that holds it."""
        most_rows, most_edges = bucket.layers[0]
        rows, edges = self.sizes.layers[0]
        rowptr = torch.full((most_rows + 1,), edges, device=self.counts.device)
        rowptr[0] = 0
        torch.cumsum(self.counts, 0, out=rowptr[1 : rows + 1])
        first = GraphTensors(
            rowptr, _pad(self.source, most_edges), _pad(_destinations(self.counts, edges), most_edges),
            inverse_degree=rowptr.diff().clamp(min=1).float().reciprocal(),
        )  # fmt: skip
        graphs, sources = [], bucket.nodes
        for sizes, (rows, edges) in zip(self.sizes.layers, bucket.layers, strict=True):
            graphs.append(_first_rows(first, rows, edges, sizes, sources))
            sources = rows
        return SampledBatch(_pad(self.nodes, bucket.nodes), _pad(self.seeds, bucket.layers[-1][0], -1), tuple(graphs))


def _destinations(counts: Tensor, edges: int) -> Tensor:
    rows = torch.arange(len(counts), dtype=torch.int32, device=counts.device)
    return rows.repeat_interleave(counts, output_size=edges)


def _first_rows(graph: GraphTensors, rows: int, edges: int, sizes: tuple[int, int], sources: int) -> GraphTensors:
    """One layer's part of a graph, padded to R ``rows`` and ``edges``; ``sizes`` are those before padding."""
    assert graph.inverse_degree is not None
    nodes, drawn = sizes
    source = graph.source[:drawn]
    order = source.sort(stable=True).indices.int()
    # Unlike bincount this does not synchronise with a GPU.
    colptr = torch.zeros(sources + 1, dtype=torch.int64, device=source.device)
    colptr[1:].index_add_(0, source, colptr.new_ones(1).expand(drawn))
    return GraphTensors(
        rowptr=graph.rowptr[: rows + 1].clamp(max=drawn),
        # Padded with 0: sources of later edges may exceed the rows of this layer's features.
        source=_pad(source, edges),
        destination=_pad(graph.destination[:drawn], edges, rows),
        inverse_degree=graph.inverse_degree[:rows],
        transpose=Transpose(
            colptr=colptr.cumsum_(0), destination=_pad(graph.destination[order], edges), permutation=_pad(order, edges)
        ),
        rows=torch.full((), nodes, device=source.device),
    )


def _pad(values: Tensor, size: int, fill: int = 0) -> Tensor:
    return F.pad(values, (0, size - len(values)), value=fill)


class NeighborSampler:
    """Batches of seeds with sampled neighbours, hop by hop, for a GraphSAGE with as many layers as hops.

    Each node gets up to ``fanouts[hop]`` of its neighbours, sampled without replacement, in the hop after its first
    occurrence, as in torch-geometric's ``NeighborLoader``. Batch ``i`` of epoch ``e`` is the same in every run with one
    seed, for any number of threads. A GPU samples the same seeds but other neighbours.

    Args:
        edge_index: [2, E] int64, sources in the first row.
        fanouts: Neighbours per node, hop by hop from the seeds outward; -1 for all.
        batch_size: B; the number of seeds if that is smaller.
        seeds: [n] int64, the nodes of which batches are made; all by default.
        num_nodes: By default one more than the maximum index.
        buckets: A batch takes the smallest bucket that holds it. By default two: a few measured batches with a tenth
            of slack, and the largest that any batch can need.
        shuffle: Shuffle the seeds in each epoch.
        seed: Seed of orders and neighbours.
        workers: Threads that sample ahead on the host; 0 samples on demand. A GPU needs none.
        device: Device that stores the edges, four bytes each, and makes the batches.

    Raises:
        TypeError, ValueError: If an argument does not fit, or no bucket holds every batch.
    """

    def __init__(
        self, edge_index: Tensor, *, fanouts: Sequence[int], batch_size: int, seeds: Tensor | None = None,
        num_nodes: int | None = None, buckets: Sequence[Bucket] | None = None, shuffle: bool = True,
        seed: int = 0, workers: int = 2, device: torch.device | str = "cpu",
    ) -> None:  # fmt: skip
        given = fanouts if isinstance(fanouts, Sequence) else ()
        if not given or not all(validate.is_count(each, -1) and each for each in given):
            raise ValueError(f"fanouts are {fanouts}; one a hop, an integer of at least 1, or -1 for all neighbours")
        validate.count("batch_size", batch_size)
        validate.count("workers", workers, 0)
        validate.check_seed(seed)
        self.device = _device(device)
        self._stream: torch.cuda.Stream | None = None
        with torch.no_grad():
            # Sorted on the edges' device: a GPU is fast.
            tensors = CSRGraph.from_edge_index(edge_index, num_nodes=num_nodes).tensors
        self._rowptr, self._source = tensors.rowptr.to(self.device), tensors.source.to(self.device)
        self.num_nodes = len(self._rowptr) - 1
        if seeds is not None:
            if getattr(seeds, "dtype", None) == torch.bool:
                raise TypeError("seeds is a mask, expected ids of nodes: seeds=mask.nonzero().view(-1)")
            validate.tensor("seeds", seeds, "n", kinds=(torch.int64,))
        self.seeds = torch.arange(self.num_nodes) if seeds is None else seeds.cpu()
        if not len(self.seeds):
            raise ValueError("seeds is empty, expected at least one node")
        if len(wrong := self.seeds[(self.seeds < 0) | (self.seeds >= self.num_nodes)]):
            raise ValueError(f"seeds holds {int(wrong[0])}, and the graph has nodes 0 to {self.num_nodes - 1}")
        if len(self.seeds.unique()) != len(self.seeds):
            raise ValueError("a node is several times among the seeds, and a batch holds each once; use seeds.unique()")
        self.fanouts, self.batch_size = tuple(fanouts), min(batch_size, len(self.seeds))
        self.shuffle, self.seed, self.workers = shuffle, seed, workers
        most = self._largest_bucket()
        self.buckets = self._measured_buckets(most) if buckets is None else sorted(buckets)
        if not any(bucket.holds(most) for bucket in self.buckets):
            raise ValueError(f"a batch may need {most}, which none of the buckets {self.buckets} holds")

    def __len__(self) -> int:
        """Number of batches of an epoch."""
        return -(-len(self.seeds) // self.batch_size)

    def __iter__(self) -> Iterator[SampledBatch]:
        raise TypeError("batches are those of an epoch, whose number seeds them: for batch in sampler.epoch(0)")

    def to(self, device: torch.device | str) -> NeighborSampler:
        """The same sampler on another device, with the same buckets; this one stays."""
        other = copy.copy(self)
        other.device, other._stream = _device(device), None
        other._rowptr, other._source = self._rowptr.to(device), self._source.to(device)
        return other

    @property
    def edge_index(self) -> Tensor:
        """[2, E] int64 of the whole graph, sorted by destination, on the sampler's device."""
        return torch.stack([self._source, _destinations(self._rowptr.diff(), len(self._source))]).long()

    def epoch(self, number: int, then: Callable[[SampledBatch], Any] | None = None) -> Iterator[Any]:
        """All batches of an epoch, in order, on the sampler's device; some are sampled ahead.

        ``then`` is called with each batch: on a CPU by the sampling thread, on a GPU on the caller's stream.
        """
        return self._batches(number, self._padded, then)

    def subgraphs(self, number: int, then: Callable[[Subgraph], Any] | None = None) -> Iterator[Any]:
        """The batches of :meth:`epoch` before they are padded, for a model that takes an ``edge_index``."""
        return self._batches(number, lambda drawn: drawn, then)

    def _batches(
        self, number: int, finish: Callable[[Subgraph], Any], then: Callable[[Any], Any] | None
    ) -> Iterator[Any]:
        parts, after = self.seeds_of(number), then or (lambda batch: batch)

        def draw(index: int) -> Any:
            return finish(self._drawn(parts[index], number, index))

        if self.device.type == "cuda":
            # On the user's stream, so that it sees the user's earlier writes.
            yield from map(after, self._on_stream(draw, len(parts)))
        elif self.workers:
            yield from _in_threads(lambda index: after(draw(index)), len(parts), self.workers)
        else:
            yield from map(after, map(draw, range(len(parts))))

    def _on_stream(self, make: Callable[[int], Any], count: int) -> Iterator[Any]:
        """Sample on a separate stream: the host waits for sizes while the GPU runs the last step."""
        # Always the same stream, since the allocator caches memory per stream.
        stream = self._stream = self._stream or torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        for index in range(count):
            with torch.cuda.stream(stream):
                batch = make(index)
            user = torch.cuda.current_stream(self.device)
            user.wait_stream(stream)
            # The allocator must not reuse a batch's memory before the user's stream is done with it.
            pytree.tree_map_only(Tensor, methodcaller("record_stream", user), batch)
            yield batch

    def batch(self, epoch: int, index: int) -> SampledBatch:
        """One batch of an epoch, as :meth:`epoch` gives it; -1 is the last one."""
        return self._padded(self.subgraph(epoch, index))

    def subgraph(self, epoch: int, index: int) -> Subgraph:
        """One batch of an epoch, as :meth:`subgraphs` gives it; -1 is the last one."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"index is {index}, but an epoch has {len(self)} batches; use 0 to {len(self) - 1}")
        index %= len(self)  # the random seed of neighbours uses the nonnegative index
        return self._drawn(self.seeds_of(epoch)[index], epoch, index)

    def padded_to(self, bucket: Bucket) -> SampledBatch:
        """A batch in one of ``buckets`` with one seed and no edges, to compile and capture a step ahead of time."""
        seed, counts = self.seeds_of(0)[0][:1], self._rowptr.new_zeros(1)
        alone = Subgraph(seed, seed, counts, counts[:0].int(), Bucket(1, ((1, 0),) * len(self.fanouts)))
        return alone.padded(bucket)

    def seeds_of(self, epoch: int) -> tuple[Tensor, ...]:
        """The seeds of each batch of an epoch, in order, [B] each; the last may have fewer."""
        seeds = self.seeds
        if self.shuffle:
            seeds = seeds[torch.randperm(len(seeds), generator=self._random(epoch))]
        return seeds.to(self.device).split(self.batch_size)

    def _random(self, epoch: int, batch: int = -1, device: torch.device | str = "cpu") -> torch.Generator:
        """An independent generator for each epoch's order (batch -1) and for each batch."""
        return torch.Generator(device).manual_seed(zlib.crc32(f"{self.seed} {epoch} {batch}".encode()))

    def _padded(self, drawn: Subgraph) -> SampledBatch:
        return drawn.padded(next(bucket for bucket in self.buckets if bucket.holds(drawn.sizes)))

    def _drawn(self, seeds: Tensor, epoch: int, index: int) -> Subgraph:
        device, random = self.device, self._random(epoch, index, self.device)
        local = torch.full((self.num_nodes,), -1, dtype=torch.int32, device=device)
        local[seeds] = torch.arange(len(seeds), dtype=torch.int32, device=device)
        nodes, counts, sources = [seeds], [], []
        known, edges, frontier, layers = len(seeds), 0, seeds, []
        for fanout in self.fanouts:
            picked, count = self._neighbours(frontier, fanout, random)
            edges += len(picked)
            # The layer that reads this hop's nodes computes the nodes of all earlier hops.
            layers.append((known, edges))
            new = torch.unique(picked[local[picked] < 0])
            local[new] = torch.arange(known, known + len(new), dtype=torch.int32, device=device)
            known += len(new)
            nodes.append(new)
            counts.append(count)
            sources.append(local[picked])
            frontier = new
        sizes = Bucket(known, tuple(reversed(layers)))
        return Subgraph(torch.cat(nodes), seeds, torch.cat(counts), torch.cat(sources), sizes)

    def _neighbours(self, nodes: Tensor, fanout: int, random: torch.Generator) -> tuple[Tensor, Tensor]:
        """Sources of up to ``fanout`` edges into each node, node after node, and the number per node."""
        start = self._rowptr[nodes]
        degree = self._rowptr[nodes + 1] - start
        count = degree if fanout < 0 else degree.clamp(max=fanout)
        first = count.cumsum(0) - count
        total = int(count.sum())
        of = torch.arange(len(nodes), device=self.device).repeat_interleave(count, output_size=total)
        place = torch.arange(total, device=self.device) - first[of]
        many = degree > count
        if fanout > 0:
            # Nodes with more than ``fanout`` neighbours get sampled places instead of the first ones.
            place[many[of]] = distinct(degree[many], fanout, random).flatten()
        return self._source[start[of] + place].long(), count

    def _largest_bucket(self) -> Bucket:
        """A bucket that holds every batch, since a node is expanded once and no edge is drawn twice."""
        frontier = nodes = self.batch_size
        edges, all_edges = 0, len(self._source)
        layers = []
        for fanout in self.fanouts:
            into = all_edges if fanout < 0 else min(frontier * fanout, all_edges)
            edges = min(edges + into, all_edges)
            layers.append((nodes, edges))
            frontier = min(into, self.num_nodes)
            nodes = min(nodes + frontier, self.num_nodes)
        return Bucket(nodes, tuple(reversed(layers)))

    def _measured_buckets(self, most: Bucket) -> list[Bucket]:
        """A bucket that holds four batches with a tenth of slack, and the one that holds every batch."""
        drawn = [self._drawn(part, 0, index).sizes.flat() for index, part in enumerate(self.seeds_of(0)[:4])]
        room = [-(-int(1.1 * max(found)) // 1024) * 1024 for found in zip(*drawn, strict=True)]
        nodes, *layers = map(min, room, most.flat())
        usual = Bucket(nodes, tuple(zip(layers[::2], layers[1::2], strict=True)))
        return [most] if usual == most else [usual, most]


def _in_threads(make: Callable[[int], Any], count: int, workers: int) -> Iterator[Any]:
    """Results of ``make`` for 0 to ``count``, in order, computed ahead by threads that run on one core each."""
    workers, threads = min(workers, count), torch.get_num_threads()
    ready = threading.Barrier(workers + 1)

    def take_one_core() -> None:
        torch.get_num_threads()  # a thread's first call initialises its number
        torch.set_num_threads(1)
        ready.wait()

    pool = ThreadPoolExecutor(workers, initializer=take_one_core)
    try:
        # Two per thread: one is sampled while the other waits for the training step.
        ahead = deque(pool.submit(make, index) for index in range(min(count, 2 * workers)))
        ready.wait()
        torch.set_num_threads(threads)  # for threads that start later
        for index in range(len(ahead), count):
            ahead.append(pool.submit(make, index))
            yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def _device(device: torch.device | str) -> torch.device:
    validate.check_device(device, "a sampler")
    if torch.device(device).type not in ("cpu", "cuda"):
        raise ValueError(f"device is {device}; batches are sampled on the host, 'cpu', or on a GPU, 'cuda'")
    return torch.device(device)
