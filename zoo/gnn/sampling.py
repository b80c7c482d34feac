"""Neighbour sampling for training on large graphs, in few static shapes.

Nodes and edges of a batch are padded to a bucket, so that one compiled and captured step serves every batch of a
bucket. Threads of the host sample ahead of the training step, or a GPU that holds the edges does. The seed and the kind
of device alone decide what they draw.

Shape legend: B seeds of a batch, N nodes and E edges of its bucket.
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
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from zoo import validate
from zoo.gnn.batches import Bucket, Drawn, SampledBatch, Subgraph
from zoo.gnn.graph import CSRGraph
from zoo.ops.draws import distinct

_setting_threads = threading.Lock()


class NeighborSampler:
    """Batches of seeds with sampled neighbours, hop by hop, for a GraphSAGE whose layers are as many as the hops.

    Each node gets up to ``fanouts[hop]`` of its neighbours, drawn without replacement, in the hop that first meets it,
    as in torch-geometric's ``NeighborLoader``. Batch ``i`` of epoch ``e`` is the same in every run with this seed,
    however many threads sample; a GPU draws the same seeds and other neighbours.

    Args:
        edge_index: [2, E] int64, sources above destinations.
        fanouts: Neighbours a node, hop by hop from the seeds outward; -1 for all.
        batch_size: B.
        seeds: Nodes to draw batches from; all when left out.
        num_nodes: Of the graph; one more than the greatest index when left out.
        buckets: Sizes that batches are padded to, each a ``Bucket`` or (nodes, edges); a batch takes the smallest that
            holds it. When left out there are two: one with a tenth of room over a few batches, and the largest that any
            batch can need.
        shuffle: Draw seeds in a new order each epoch.
        seed: Of orders and neighbours.
        workers: Threads that sample ahead on the host; 0 samples when a batch is asked for. A GPU needs none.
        device: Where edges are kept and batches are made. A GPU, if it has room for four bytes an edge, saves the
            host's threads and the copy of each batch.

    Raises:
        TypeError: If ``seeds`` is not an int64 tensor, or ``device`` or ``seed`` is of another type.
        ValueError: If a size is out of range, or a bucket list cannot hold every batch.
    """

    def __init__(
        self,
        edge_index: Tensor,
        *,
        fanouts: Sequence[int],
        batch_size: int,
        seeds: Tensor | None = None,
        num_nodes: int | None = None,
        buckets: Sequence[Bucket | tuple[int, int]] | None = None,
        shuffle: bool = True,
        seed: int = 0,
        workers: int = 2,
        device: torch.device | str = "cpu",
    ) -> None:
        if not isinstance(fanouts, Sequence) or not fanouts or any(not _is_fanout(fanout) for fanout in fanouts):
            found = list(fanouts) if isinstance(fanouts, Sequence) else fanouts
            raise ValueError(f"fanouts are {found}; one a hop, an integer of at least 1, or -1 for all neighbours")
        if not isinstance(batch_size, int) or batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}; an integer, and at least one seed is needed")
        if not isinstance(workers, int) or workers < 0:
            raise ValueError(f"workers is {workers}; an integer, and 0 samples when a batch is asked for")
        validate.check_seed(seed)
        self.device = _device(device)
        self._stream: torch.cuda.Stream | None = None
        with torch.no_grad():
            # Sorted where the edges are: a GPU does it in a moment.
            tensors = CSRGraph.from_edge_index(edge_index, num_nodes=num_nodes).tensors
        self._rowptr, self._source = tensors.rowptr.to(self.device), tensors.source.to(self.device)
        self.num_nodes = len(self._rowptr) - 1
        self.seeds = torch.arange(self.num_nodes) if seeds is None else _check_seeds(seeds).cpu()
        if not len(self.seeds) or int(self.seeds.min()) < 0 or int(self.seeds.max()) >= self.num_nodes:
            raise ValueError(f"seeds must be nodes of the graph, 0 to {self.num_nodes - 1}, and at least one")
        different, times = self.seeds.unique(return_counts=True)
        if len(different) != len(self.seeds):
            raise ValueError(
                f"node {int(different[times > 1][0])} is {int(times.max())} times among the seeds, and a batch holds "
                "each node once; to see some more often, run more epochs over them"
            )
        self.fanouts, self.batch_size = tuple(fanouts), batch_size
        self.shuffle, self.seed, self.workers = shuffle, seed, workers
        most = self._most()
        given = None if buckets is None else sorted(_bucket(bucket, most, batch_size) for bucket in buckets)
        self.buckets: list[Bucket] = self._measured_buckets(most) if given is None else given
        if not any(bucket.holds(most) for bucket in self.buckets):
            largest = self.buckets[-1] if self.buckets else None
            raise ValueError(
                f"a batch may have up to {most.nodes} nodes and {most.edges} edges, in all {most}; the largest bucket "
                f"is {largest}"
            )

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

        Args:
            number: The epoch; the same number gives the same batches.
            then: A function for each batch, such as one that pins its memory. On the host the thread that sampled the
                batch calls it.
        """
        return self._ahead(number, self._batch, then)

    def subgraphs(self, number: int, then: Callable[[Subgraph], Any] | None = None) -> Iterator[Any]:
        """The batches of :meth:`epoch` before they are padded, for a model that takes an ``edge_index``."""
        return self._ahead(number, self._subgraph, then)

    def _ahead(
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
                    # Two per thread: one that is sampled while the other waits to be trained on.
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
        index = self._place(index)
        return self._batch(self.seeds_of(epoch)[index], epoch, index)

    def subgraph(self, epoch: int, index: int) -> Subgraph:
        """One batch of an epoch, as :meth:`subgraphs` gives it; -1 is the last one."""
        index = self._place(index)
        return self._subgraph(self.seeds_of(epoch)[index], epoch, index)

    def _place(self, index: int) -> int:
        """Counted from the first batch: neighbours are drawn by that number."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"index is {index}, but an epoch has {len(self)} batches; use 0 to {len(self) - 1}")
        return index % len(self)

    def padded_to(self, bucket: Bucket) -> SampledBatch:
        """A batch of this bucket's shape with one seed and no edges, to compile and capture a step before it is needed.

        Raises:
            ValueError: If it is not one of ``buckets``.
        """
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
        return self._sample(seeds, self._random(epoch, index, self.device))

    def _sample(self, seeds: Tensor, random: torch.Generator) -> Drawn:
        device = self.device
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
            # Those with more neighbours than are wanted get drawn places instead of the first ones.
            place[many[of]] = distinct(degree[many], fanout, random).flatten()
        return self._source[start[of] + place].long(), count

    def _most(self) -> Bucket:
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
        sizes = [self._sample(part, self._random(0, i, self.device)).sizes for i, part in enumerate(parts)]

        def room(most: int, found: Iterable[int]) -> int:
            return min(_round_up(1.1 * max(found)), most)

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
    """Run this thread's operators on one core, as in the processes of torch's DataLoader.

    Otherwise each thread of the pool uses every core, and they wait for each other. ``torch.set_num_threads`` sets the
    number of the calling thread and of those that start later, so another new thread restores the latter.
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


def _is_fanout(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= -1 and value != 0


def _check_seeds(seeds: Tensor) -> Tensor:
    if isinstance(seeds, Tensor) and seeds.dtype == torch.bool:
        raise TypeError("seeds is torch.bool, expected the numbers of nodes; use mask.nonzero().view(-1)")
    validate.tensor("seeds", seeds, "n", kinds=(torch.int64,))
    return seeds


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


def _round_up(size: float, multiple: int = 1024) -> int:
    return -(-int(size) // multiple) * multiple
