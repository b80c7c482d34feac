"""Neighbour sampling for training on large graphs, in few static shapes.

A batch is padded to a bucket, so that one compiled and captured step serves every batch of it. Threads of the host
sample ahead of the training step, or a GPU that holds the edges does.

A batch lists its nodes hop by hop, the seeds first. Each layer computes a prefix of the rows of the layer before it:
the first all nodes but those of the last hop, and so on to the last layer, which computes the seeds.

Shape legend: B seeds of a batch, N nodes and E edges of its bucket, R rows of a layer; n and e before padding.
"""

from __future__ import annotations

import copy
import itertools
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from operator import methodcaller
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from zoo import validate
from zoo.gnn.graph import CSRGraph
from zoo.ops.csr import GraphTensors, Transpose, distinct

_setting_threads = threading.Lock()


class Bucket(NamedTuple):
    """What a batch is padded to.

    ``layers`` are (rows, edges into them) from the first layer, with all E edges, to the last, with B rows.
    """

    nodes: int  # N
    layers: tuple[tuple[int, int], ...]

    @property
    def edges(self) -> int:
        """E."""
        return self.layers[0][1]

    def holds(self, other: Bucket) -> bool:
        """True if a batch of the other's sizes fits."""
        pairs = [(other.nodes, self.nodes)]
        for theirs, ours in zip(other.layers, self.layers, strict=True):
            pairs += zip(theirs, ours, strict=True)
        return all(size <= room for size, room in pairs)


class SampledBatch(NamedTuple):
    """A sampled part of a graph, padded to a bucket. Rows and edges of padding come last; no seed depends on them."""

    nodes: Tensor  # [N] int64, numbers in the large graph, the seeds first; 0 where padded
    seeds: Tensor  # [B] int64, the nodes to learn from; -1 where the last batch of an epoch has fewer
    graphs: tuple[GraphTensors, ...]  # of each layer, in place of ``edge_index``: reads N or R rows, writes R or B

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> SampledBatch:
        """The batch on a device."""
        validate.check_device(device, "a batch")
        moved = pytree.tree_map_only(Tensor, lambda tensor: tensor.to(device, non_blocking=non_blocking), self)
        return SampledBatch(moved.nodes, moved.seeds, tuple(moved.graphs))  # torch's DataLoader makes lists of tuples

    def pin_memory(self) -> SampledBatch:
        """The batch in pinned memory."""
        return SampledBatch(*pytree.tree_map_only(Tensor, Tensor.pin_memory, tuple(self)))

    def labels(self, labels: Tensor) -> Tensor:
        """The seeds' part [B, ...] of all nodes' labels; -100, which torch's losses leave out, where padded."""
        missing = (self.seeds < 0).view(-1, *(1,) * (labels.dim() - 1))
        return torch.where(missing, -100, labels[self.seeds.clamp(min=0)])


class Subgraph(NamedTuple):
    """A sampled part of a graph as it was drawn, n nodes and e edges."""

    nodes: Tensor  # [n] int64, numbers in the large graph, the seeds first
    seeds: Tensor  # [B] int64, the nodes to learn from; fewer at the end of an epoch
    edge_index: Tensor  # [2, e] int64, sources above destinations, in the numbers of ``nodes``
    hop_nodes: list[int]  # how many nodes each hop met first, the seeds before all
    hop_edges: list[int]  # how many edges each hop drew, in the order of ``edge_index``


class Drawn(NamedTuple):
    """A batch before it is padded."""

    nodes: Tensor  # [n] int64, the seeds first
    counts: Tensor  # how many edges go into each node, for all nodes but those of the last hop
    source: Tensor  # [e] int32, the source of each edge; edges are sorted by destination
    sizes: Bucket  # its own

    def subgraph(self, seeds: Tensor) -> Subgraph:
        """The batch with its edges as an ``edge_index``."""
        destination = _destinations(self.counts, len(self.source)).long()
        rows, edges = zip(*reversed(self.sizes.layers), strict=True)
        return Subgraph(
            self.nodes, seeds, torch.stack([self.source.long(), destination]),
            hop_nodes=[b - a for a, b in itertools.pairwise((0, *rows, self.sizes.nodes))],
            hop_edges=[b - a for a, b in itertools.pairwise((0, *edges))],
        )  # fmt: skip

    def padded(self, seeds: Tensor, bucket: Bucket) -> SampledBatch:
        """The batch in the shapes of a bucket that holds it."""
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
        return SampledBatch(_pad(self.nodes, bucket.nodes), _pad(seeds, bucket.layers[-1][0], -1), tuple(graphs))


def _destinations(counts: Tensor, edges: int) -> Tensor:
    rows = torch.arange(len(counts), dtype=torch.int32, device=counts.device)
    return rows.repeat_interleave(counts, output_size=edges)


def _first_rows(graph: GraphTensors, rows: int, edges: int, sizes: tuple[int, int], sources: int) -> GraphTensors:
    """One layer's part of a graph, padded to R ``rows`` and ``edges``; ``sizes`` are those that were drawn."""
    assert graph.inverse_degree is not None
    nodes, drawn = sizes
    source = graph.source[:drawn]
    order = source.sort(stable=True).indices.int()
    # Counted without waiting for a GPU, as bincount would.
    colptr = torch.zeros(sources + 1, dtype=torch.int64, device=source.device)
    colptr[1:].index_add_(0, source, colptr.new_ones(1).expand(drawn))
    return GraphTensors(
        rowptr=graph.rowptr[: rows + 1].clamp(max=drawn),
        # Padded with 0: sources of further edges may not be rows of this layer's features.
        source=_pad(source, edges),
        destination=_pad(graph.destination[:drawn], edges, rows),
        inverse_degree=graph.inverse_degree[:rows],
        transpose=Transpose(
            colptr=colptr.cumsum_(0), destination=_pad(graph.destination[order], edges), permutation=_pad(order, edges)
        ),
        rows=torch.full((), nodes, device=source.device),
    )


def _pad(values: Tensor, size: int, fill: int = 0) -> Tensor:
    padded = values.new_full((size,), fill)
    padded[: len(values)] = values
    return padded


class NeighborSampler:
    """Batches of seeds with sampled neighbours, hop by hop, for a GraphSAGE whose layers are as many as the hops.

    Each node gets up to ``fanouts[hop]`` of its neighbours, drawn without replacement, in the hop that first meets it,
    as in torch-geometric's ``NeighborLoader``. Batch ``i`` of epoch ``e`` is the same in every run with this seed,
    however many threads sample; a GPU draws the same seeds and other neighbours.

    Args:
        edge_index: [2, E] int64, sources above destinations.
        fanouts: Neighbours a node, hop by hop from the seeds outward; -1 for all.
        batch_size: B.
        seeds: [n] int64, nodes to draw batches from; all when left out.
        num_nodes: One more than the greatest index when left out.
        buckets: Each a ``Bucket`` or (nodes, edges), of which a batch takes the smallest that holds it. When left out:
            one with a tenth of room over a few batches, and the largest that any batch can need.
        shuffle: Draw seeds in a new order each epoch.
        seed: Of orders and neighbours.
        workers: Threads that sample ahead on the host; 0 samples when a batch is asked for. A GPU needs none.
        device: Where edges are kept, four bytes each, and batches are made.

    Raises:
        TypeError, ValueError: If an argument does not fit, or no bucket holds every batch.
    """

    def __init__(
        self, edge_index: Tensor, *, fanouts: Sequence[int], batch_size: int, seeds: Tensor | None = None,
        num_nodes: int | None = None, buckets: Sequence[Bucket | tuple[int, int]] | None = None, shuffle: bool = True,
        seed: int = 0, workers: int = 2, device: torch.device | str = "cpu",
    ) -> None:  # fmt: skip
        given = list(fanouts) if isinstance(fanouts, Sequence) else fanouts
        if not isinstance(given, list) or not given or not all(validate.is_count(each, -1) and each for each in given):
            raise ValueError(f"fanouts are {given}; one a hop, an integer of at least 1, or -1 for all neighbours")
        validate.count("batch_size", batch_size)
        validate.count("workers", workers, 0)
        validate.check_seed(seed)
        self.device = _device(device)
        self._stream: torch.cuda.Stream | None = None
        with torch.no_grad():
            # Sorted where the edges are: a GPU does it in a moment.
            tensors = CSRGraph.from_edge_index(edge_index, num_nodes=num_nodes).tensors
        self._rowptr, self._source = tensors.rowptr.to(self.device), tensors.source.to(self.device)
        self.num_nodes = len(self._rowptr) - 1
        if isinstance(seeds, Tensor) and seeds.dtype == torch.bool:
            raise TypeError("seeds is torch.bool, expected the numbers of nodes; use mask.nonzero().view(-1)")
        if seeds is not None:
            validate.tensor("seeds", seeds, "n", kinds=(torch.int64,))
        self.seeds = torch.arange(self.num_nodes) if seeds is None else seeds.cpu()
        if not len(self.seeds) or int(self.seeds.min()) < 0 or int(self.seeds.max()) >= self.num_nodes:
            raise ValueError(f"seeds must be nodes of the graph, 0 to {self.num_nodes - 1}, and at least one")
        different, times = self.seeds.unique(return_counts=True)
        if len(different) != len(self.seeds):
            node, count = int(different[times > 1][0]), int(times.max())
            raise ValueError(f"node {node} is {count} times among the seeds, and a batch holds each node once")
        self.fanouts, self.batch_size = tuple(fanouts), batch_size
        self.shuffle, self.seed, self.workers = shuffle, seed, workers
        most = self._largest_bucket()
        fixed = None if buckets is None else sorted(_bucket(each, most, batch_size) for each in buckets)
        self.buckets: list[Bucket] = self._measured_buckets(most) if fixed is None else fixed
        if not any(bucket.holds(most) for bucket in self.buckets):
            largest = self.buckets[-1] if self.buckets else None
            raise ValueError(f"a batch may need {most}, but the largest bucket is {largest}")

    def __len__(self) -> int:
        """Batches of an epoch."""
        return -(-len(self.seeds) // self.batch_size)

    def to(self, device: torch.device | str) -> NeighborSampler:
        """The same sampler on another device, with the same buckets; this one stays."""
        other = copy.copy(self)
        other.device, other._stream = _device(device), None
        other._rowptr, other._source = self._rowptr.to(device), self._source.to(device)
        return other

    @property
    def edge_index(self) -> Tensor:
        """[2, E] int64 of the whole graph, sorted by destination, on the sampler's device."""
        nodes = torch.arange(self.num_nodes, device=self.device)
        destination = nodes.repeat_interleave(self._rowptr.diff(), output_size=len(self._source))
        return torch.stack([self._source.long(), destination])

    def epoch(self, number: int, then: Callable[[SampledBatch], SampledBatch] | None = None) -> Iterator[SampledBatch]:
        """All batches of an epoch, in order, on the sampler's device; some are sampled ahead.

        ``then`` is called with each batch, on the host by the thread that sampled it: to pin its memory, say.
        """
        return self._sample_ahead(number, self._batch, then)

    def subgraphs(self, number: int, then: Callable[[Subgraph], Any] | None = None) -> Iterator[Any]:
        """The batches of :meth:`epoch` before they are padded, for a model that takes an ``edge_index``."""
        return self._sample_ahead(number, self._subgraph, then)

    def _sample_ahead(
        self, epoch: int, draw: Callable[[Tensor, int, int], Any], then: Callable[[Any], Any] | None
    ) -> Iterator[Any]:
        def make(part: Tensor, index: int) -> Any:
            batch = draw(part, epoch, index)
            return batch if then is None else then(batch)

        parts = self.seeds_of(epoch)
        if self.device.type == "cuda":
            drawn = self._on_stream(parts, epoch, draw)
            yield from drawn if then is None else map(then, drawn)
        elif not self.workers:
            yield from map(make, parts, itertools.count())
        else:
            pool = ThreadPoolExecutor(self.workers, initializer=_one_core)
            ahead: deque[Future[Any]] = deque()
            try:
                for index, part in enumerate(parts):
                    ahead.append(pool.submit(make, part, index))
                    # Two per thread: one is sampled while the other waits for the training step.
                    if len(ahead) > 2 * self.workers:
                        yield ahead.popleft().result()
                while ahead:
                    yield ahead.popleft().result()
            finally:
                pool.shutdown(cancel_futures=True)

    def _on_stream(self, parts: Sequence[Tensor], epoch: int, draw: Callable[[Tensor, int, int], Any]) -> Iterator[Any]:
        """Sample on a stream of its own: the host waits for sizes while the GPU runs the last step."""
        # Always the same stream: the allocator keeps memory for each.
        stream = self._stream = self._stream or torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        for index, part in enumerate(parts):
            with torch.cuda.stream(stream):
                batch = draw(part, epoch, index)
            user = torch.cuda.current_stream(self.device)
            user.wait_stream(stream)
            # The allocator must not reuse a batch's memory before the user's stream is done with it.
            pytree.tree_map_only(Tensor, methodcaller("record_stream", user), batch)
            yield batch

    def batch(self, epoch: int, index: int) -> SampledBatch:
        """One batch of an epoch, as :meth:`epoch` gives it; -1 is the last one."""
        return self._batch(*self._place(epoch, index))

    def subgraph(self, epoch: int, index: int) -> Subgraph:
        """One batch of an epoch, as :meth:`subgraphs` gives it; -1 is the last one."""
        return self._subgraph(*self._place(epoch, index))

    def _place(self, epoch: int, index: int) -> tuple[Tensor, int, int]:
        """A batch's seeds, its epoch, and its number from the first, by which neighbours are drawn."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"index is {index}, but an epoch has {len(self)} batches; use 0 to {len(self) - 1}")
        index %= len(self)
        return self.seeds_of(epoch)[index], epoch, index

    def padded_to(self, bucket: Bucket) -> SampledBatch:
        """A batch of one of ``buckets`` with one seed and no edges, to compile and capture a step ahead of time."""
        if bucket not in self.buckets:
            raise ValueError(f"{bucket} is none of the buckets {self.buckets}")
        seed, counts = self.seeds_of(0)[0][:1], self._rowptr.new_zeros(1)
        alone = Drawn(seed, counts, counts[:0].int(), Bucket(1, ((1, 0),) * len(self.fanouts)))
        return alone.padded(seed, bucket)

    def edges_of(self, batch: SampledBatch) -> Tensor:
        """The batch's edges as an ``edge_index`` [2, edges] of its own numbering, without padding."""
        graph = batch.graphs[0]
        edges = int(graph.rowptr[-1])
        return torch.stack([graph.source[:edges], graph.destination[:edges]]).long()

    def seeds_of(self, epoch: int) -> tuple[Tensor, ...]:
        """The seeds of each batch of an epoch, in order, each [B] or for the last one fewer."""
        seeds = self.seeds
        if self.shuffle:
            seeds = seeds[torch.randperm(len(seeds), generator=self._random(epoch))]
        return seeds.to(self.device).split(self.batch_size)

    def _random(self, epoch: int, batch: int = -1, device: torch.device | str = "cpu") -> torch.Generator:
        """A generator for each epoch's order (batch -1) and for each batch: none depends on another."""
        return torch.Generator(device).manual_seed(zlib.crc32(f"{self.seed} {epoch} {batch}".encode()))

    def _batch(self, seeds: Tensor, epoch: int, index: int) -> SampledBatch:
        drawn = self._drawn(seeds, epoch, index)
        return drawn.padded(seeds, next(bucket for bucket in self.buckets if bucket.holds(drawn.sizes)))

    def _subgraph(self, seeds: Tensor, epoch: int, index: int) -> Subgraph:
        return self._drawn(seeds, epoch, index).subgraph(seeds)

    def _drawn(self, seeds: Tensor, epoch: int, index: int) -> Drawn:
        device, random = self.device, self._random(epoch, index, self.device)
        local = torch.full((self.num_nodes,), -1, dtype=torch.int32, device=device)
        local[seeds] = torch.arange(len(seeds), dtype=torch.int32, device=device)
        nodes, counts, sources = [seeds], [], []
        known, edges, frontier, layers = len(seeds), 0, seeds, []
        for fanout in self.fanouts:
            picked, count = self._neighbours(frontier, fanout, random)
            edges += len(picked)
            # The layer that reads this hop's nodes computes the nodes of the hops before.
            layers.append((known, edges))
            new = torch.unique(picked[local[picked] < 0])
            local[new] = torch.arange(known, known + len(new), dtype=torch.int32, device=device)
            known += len(new)
            nodes.append(new)
            counts.append(count)
            sources.append(local[picked])
            frontier = new
        sizes = Bucket(known, tuple(reversed(layers)))
        return Drawn(torch.cat(nodes), torch.cat(counts), torch.cat(sources), sizes)

    def _neighbours(self, nodes: Tensor, fanout: int, random: torch.Generator) -> tuple[Tensor, Tensor]:
        """Sources of up to ``fanout`` edges into each node, one node after the other, and how many each has."""
        start = self._rowptr[nodes]
        degree = self._rowptr[nodes + 1] - start
        count = degree if fanout < 0 else degree.clamp(max=fanout)
        first = count.cumsum(0) - count
        total = int(count.sum())
        of = torch.arange(len(nodes), device=self.device).repeat_interleave(count, output_size=total)
        place = torch.arange(total, device=self.device) - first[of]
        many = degree > count
        if fanout > 0:
            # Nodes with more neighbours than are wanted get drawn places instead of the first ones.
            place[many[of]] = distinct(degree[many], fanout, random).flatten()
        return self._source[start[of] + place].long(), count

    def _largest_bucket(self) -> Bucket:
        """A bucket that holds every batch: a node is expanded once, and no edge is drawn twice."""
        frontier = nodes = min(self.batch_size, len(self.seeds))
        edges, all_edges = 0, len(self._source)
        layers = []
        for fanout in self.fanouts:
            into = all_edges if fanout < 0 else min(frontier * fanout, all_edges)
            edges = min(edges + into, all_edges)
            layers.append((nodes, edges))
            frontier = min(into, self.num_nodes)
            nodes = min(nodes + frontier, self.num_nodes)
        return self._with_all_seeds(nodes, layers)

    def _measured_buckets(self, most: Bucket, probes: int = 4) -> list[Bucket]:
        """A bucket with a tenth of room over a few batches, and the one that holds every batch."""
        parts = self.seeds_of(0)[:probes]
        sizes = [self._drawn(part, 0, i).sizes for i, part in enumerate(parts)]

        def room(most: int, found: Iterable[int]) -> int:
            return min(-(-int(1.1 * max(found)) // 1024) * 1024, most)

        layers = []
        for index in reversed(range(len(most.layers))):
            rows, edges = zip(*(size.layers[index] for size in sizes), strict=True)
            layers.append((room(most.layers[index][0], rows), room(most.layers[index][1], edges)))
        usual = self._with_all_seeds(room(most.nodes, (size.nodes for size in sizes)), layers)
        return [most] if usual == most else [usual, most]

    def _with_all_seeds(self, nodes: int, layers: Sequence[tuple[int, int]]) -> Bucket:
        """A bucket of layers given from the last to the first; every layer computes at least B rows."""
        seeds = self.batch_size
        sizes = [(seeds, layers[0][1]), *((max(rows, seeds), edges) for rows, edges in layers[1:])]
        return Bucket(max(nodes, seeds), tuple(reversed(sizes)))


def _one_core() -> None:
    """Run this thread's operators on one core: otherwise each thread of the pool uses every core.

    ``torch.set_num_threads`` also sets the number of threads that start later, so another new thread restores that.
    """
    if not torch.backends.openmp.is_available():
        return  # torch has one pool for all threads then
    with _setting_threads:
        others = torch.get_num_threads()  # also fixes this thread's number, which torch sets at the first question
        ready = threading.Event()

        def restore() -> None:
            ready.wait()
            torch.set_num_threads(others)

        thread = threading.Thread(target=restore)
        thread.start()
        try:
            torch.set_num_threads(1)
        finally:
            ready.set()
            thread.join()


def _device(device: torch.device | str) -> torch.device:
    validate.check_device(device, "a sampler")
    if torch.device(device).type not in ("cpu", "cuda"):
        raise ValueError(f"device is {device}; batches are sampled on the host, 'cpu', or on a GPU, 'cuda'")
    return torch.device(device)


def _bucket(given: Bucket | tuple[int, int], most: Bucket, seeds: int) -> Bucket:
    """A bucket as it was given; if (nodes, edges), one with layers as large as any batch needs within these."""
    if not isinstance(given, Bucket):
        nodes, edges = given
        if nodes < seeds:
            raise ValueError(f"bucket {(nodes, edges)} has {nodes} nodes, fewer than the {seeds} seeds of a batch")
        first, *others = most.layers
        return Bucket(nodes, ((min(first[0], nodes), edges), *((min(r, nodes), min(e, edges)) for r, e in others)))
    rows, edges_of = [given.nodes, *(r for r, _ in given.layers)], [e for _, e in given.layers]
    if len(given.layers) != len(most.layers) or rows[-1] != seeds:
        raise ValueError(f"{given} does not have {len(most.layers)} layers, one a hop, the last of {seeds} rows")
    if rows != sorted(rows, reverse=True) or edges_of != sorted(edges_of, reverse=True):
        raise ValueError(f"{given} has a layer with more rows or edges than the one before it, of which they are part")
    return given
