"""Neighbour sampling for training on large graphs, in few static shapes: batches change, what compiles does not.

Nodes and edges of a batch are padded to a bucket, so that a compiled and captured step serves every batch. Sampling is
done by threads of the host, or by a GPU that holds the edges, ahead of the step that trains on the last batch. It
depends on nothing but the seed, and on which of the two it was.

Shape legend: B seeds of a batch, N nodes and E edges of its bucket.
"""

from __future__ import annotations

import itertools
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from operator import methodcaller
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zoo.gnn.csr import CSRGraph, GraphTensors, Transpose


class SampledBatch(NamedTuple):
    """A sampled part of a graph, padded; tensors only, so that a captured step takes it as it is.

    Args:
        nodes: [N] int64, which nodes of the large graph they are, the seeds first; 0 where padded.
        seeds: [B] int64, the nodes to learn from; -1 where the last batch of an epoch has fewer.
        graph: Edges among the N nodes, for a model in place of ``edge_index``. Padding is behind the last row, where
            nothing reads it.
    """

    nodes: Tensor
    seeds: Tensor
    graph: GraphTensors

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> SampledBatch:
        """The batch on a device; from pinned memory without waiting."""
        return SampledBatch(*_map(self, lambda tensor: tensor.to(device, non_blocking=non_blocking)))

    def pin_memory(self) -> SampledBatch:
        """The batch in pinned memory."""
        return SampledBatch(*_map(self, lambda tensor: tensor.pin_memory()))

    def labels(self, labels: Tensor) -> Tensor:
        """Labels [B] of the seeds out of those of all nodes; -100, which a loss leaves out, where padded."""
        return torch.where(self.seeds < 0, -100, labels[self.seeds.clamp(min=0)])


class NeighborSampler:
    """Batches of seeds with sampled neighbours, hop by hop, for a GraphSAGE whose layers are as many as the hops.

    Each node that is met gets up to ``fanouts[hop]`` of its neighbours, drawn without replacement; a node is expanded
    once, in the hop that first met it, as torch-geometric's ``NeighborLoader`` does it. Batch ``i`` of epoch ``e`` is
    the same in every run with this seed, however many threads sample; a GPU draws the same seeds and other neighbours.

    Args:
        edge_index: [2, E] int64, sources above destinations.
        fanouts: Neighbours a node, hop by hop from the seeds outward; -1 for all.
        batch_size: B.
        seeds: Nodes to draw batches from; all when left out.
        num_nodes: Of the graph; one more than the greatest index when left out.
        buckets: (nodes, edges) that batches are padded to, the smallest that fits; when left out one that held the
            largest of a few batches with some room, and the most that can come up.
        shuffle: Draw seeds in a new order each epoch.
        seed: Of orders and neighbours.
        workers: Threads that sample ahead on the host; 0 samples when a batch is asked for. A GPU needs none.
        device: Where edges are kept and batches are made. A GPU, if it has room for four bytes an edge, saves the
            host's threads and the copy of each batch.

    Raises:
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
        buckets: Sequence[tuple[int, int]] | None = None,
        shuffle: bool = True,
        seed: int = 0,
        workers: int = 2,
        device: torch.device | str = "cpu",
    ) -> None:
        if not fanouts or any(fanout == 0 or fanout < -1 for fanout in fanouts):
            raise ValueError(f"fanouts are {list(fanouts)}; one a hop, at least 1, or -1 for all neighbours")
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}; at least one seed is needed")
        if workers < 0:
            raise ValueError(f"workers is {workers}; 0 samples when a batch is asked for")
        if torch.device(device).type not in ("cpu", "cuda"):
            raise ValueError(f"device is {device}; batches are sampled on the host, 'cpu', or on a GPU, 'cuda'")
        self.edge_index, self.device = edge_index.cpu(), torch.device(device)
        with torch.no_grad():
            tensors = CSRGraph.from_edge_index(self.edge_index, num_nodes=num_nodes).tensors
        self._rowptr, self._source = tensors.rowptr.to(self.device), tensors.source.to(self.device)
        self.num_nodes = len(self._rowptr) - 1
        self.seeds = torch.arange(self.num_nodes) if seeds is None else seeds.cpu()
        if not len(self.seeds) or int(self.seeds.min()) < 0 or int(self.seeds.max()) >= self.num_nodes:
            raise ValueError(f"seeds must be nodes of the graph, 0 to {self.num_nodes - 1}, and at least one")
        self.fanouts, self.batch_size = tuple(fanouts), batch_size
        self.shuffle, self.seed, self.workers = shuffle, seed, workers
        most = self._most()
        self.buckets = sorted(buckets) if buckets is not None else self._measured_buckets(most)
        if self.buckets[-1][0] < most[0] or max(edges for _, edges in self.buckets) < most[1]:
            raise ValueError(
                f"a batch may have up to {most[0]} nodes and {most[1]} edges; the largest bucket is {self.buckets[-1]}"
            )

    def __len__(self) -> int:
        """Batches of an epoch."""
        return -(-len(self.seeds) // self.batch_size)

    def epoch(self, number: int) -> Iterator[SampledBatch]:
        """All batches of an epoch, in order, on the sampler's device; some are sampled ahead.

        Args:
            number: Which epoch: the same number gives the same batches.
        """
        parts = self._seeds_of(number)
        if self.device.type == "cuda":
            yield from self._beside_the_step(parts, number)
            return
        if not self.workers:
            for index, part in enumerate(parts):
                yield self._batch(part, number, index)
            return
        # Two a thread: one that is sampled while the other waits to be trained on.
        ahead: deque[Future[SampledBatch]] = deque()
        with ThreadPoolExecutor(self.workers) as pool:
            todo = enumerate(parts)
            try:
                for index, part in itertools.islice(todo, 2 * self.workers):
                    ahead.append(pool.submit(self._batch, part, number, index))
                while ahead:
                    batch = ahead.popleft().result()
                    for index, part in itertools.islice(todo, 1):
                        ahead.append(pool.submit(self._batch, part, number, index))
                    yield batch
            finally:
                for future in ahead:
                    future.cancel()

    def _beside_the_step(self, parts: Sequence[Tensor], epoch: int) -> Iterator[SampledBatch]:
        """Sampled on a stream of their own, for whose sizes the host waits while the GPU is busy with the last step."""
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        for index, part in enumerate(parts):
            with torch.cuda.stream(stream):
                batch = self._batch(part, epoch, index)
            user = torch.cuda.current_stream(self.device)
            user.wait_stream(stream)
            # Memory that is freed while the user's work on it waits is not for the next batch.
            _map(batch, methodcaller("record_stream", user))
            yield batch

    def batch(self, epoch: int, index: int) -> SampledBatch:
        """One batch of an epoch, as :meth:`epoch` gives it."""
        return self._batch(self._seeds_of(epoch)[index], epoch, index)

    def padded_to(self, bucket: tuple[int, int]) -> SampledBatch:
        """A batch of this bucket's shape, to compile and capture it before it comes up.

        Raises:
            ValueError: If it is none of ``buckets``.
        """
        if bucket not in self.buckets:
            raise ValueError(f"{bucket} is none of the buckets {self.buckets}")
        seeds = self._seeds_of(0)[0][:1]
        return self._padded(seeds, *self._sample(seeds, self._random(0, 0, self.device)), bucket)

    def edges_of(self, batch: SampledBatch) -> Tensor:
        """The batch's edges as an ``edge_index`` [2, edges] of its own numbering, without padding."""
        edges = int(batch.graph.rowptr[-1])
        return torch.stack([batch.graph.source[:edges], batch.graph.destination[:edges]]).long()

    def _seeds_of(self, epoch: int) -> tuple[Tensor, ...]:
        seeds = self.seeds
        if self.shuffle:
            seeds = seeds[torch.randperm(len(seeds), generator=self._random(epoch))]
        return seeds.to(self.device).split(self.batch_size)

    def _random(self, epoch: int, batch: int = -1, device: torch.device | str = "cpu") -> torch.Generator:
        """Numbers of their own for each order and each batch: a batch does not depend on the ones before it."""
        return torch.Generator(device).manual_seed(zlib.crc32(f"{self.seed} {epoch} {batch}".encode()))

    def _batch(self, seeds: Tensor, epoch: int, index: int) -> SampledBatch:
        nodes, counts, source = self._sample(seeds, self._random(epoch, index, self.device))
        return self._padded(seeds, nodes, counts, source)

    def _sample(self, seeds: Tensor, random: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        """Nodes that are met, the seeds first; how many edges come into each; and their sources, in that order."""
        device = self.device
        local = torch.full((self.num_nodes,), -1, dtype=torch.int32, device=device)
        local[seeds] = torch.arange(len(seeds), dtype=torch.int32, device=device)
        nodes, counts, sources = [seeds], [], []
        known, frontier = len(seeds), seeds
        for fanout in self.fanouts:
            picked, count = self._neighbours(frontier, fanout, random)
            new = torch.unique(picked[local[picked] < 0])
            local[new] = torch.arange(known, known + len(new), dtype=torch.int32, device=device)
            known += len(new)
            nodes.append(new)
            counts.append(count)
            sources.append(local[picked])
            frontier = new
        # The last ones that were met are not expanded.
        counts.append(torch.zeros(len(frontier), dtype=torch.int64, device=device))
        return torch.cat(nodes), torch.cat(counts), torch.cat(sources)

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
            place[many[of]] = _distinct(degree[many], fanout, random).flatten()
        return self._source[start[of] + place].long(), count

    def _padded(
        self, seeds: Tensor, nodes: Tensor, counts: Tensor, source: Tensor, bucket: tuple[int, int] | None = None
    ) -> SampledBatch:
        edges = len(source)
        fitting = ((n, e) for n, e in self.buckets if len(nodes) <= n and edges <= e)
        most_nodes, most_edges = bucket or next(fitting)
        rowptr = torch.full((most_nodes + 1,), edges, device=self.device)
        rowptr[0] = 0
        torch.cumsum(counts, 0, out=rowptr[1 : len(nodes) + 1])
        rows = torch.arange(len(nodes), dtype=torch.int32, device=self.device)
        destination = rows.repeat_interleave(counts, output_size=edges)
        order = source.sort(stable=True).indices.int()
        colptr = torch.zeros(most_nodes + 1, dtype=torch.int64, device=self.device)
        torch.cumsum(source.bincount(minlength=most_nodes), 0, out=colptr[1:])
        graph = GraphTensors(
            rowptr=rowptr,
            source=_pad(source, most_edges),
            destination=_pad(destination, most_edges),
            inverse_degree=rowptr.diff().clamp(min=1).float().reciprocal(),
            transpose=Transpose(
                colptr=colptr,
                destination=_pad(destination[order], most_edges),
                permutation=_pad(order, most_edges),
            ),
        )
        return SampledBatch(_pad(nodes, most_nodes), _pad(seeds, self.batch_size, -1), graph)

    def _most(self) -> tuple[int, int]:
        """Nodes and edges that no batch exceeds: a node is expanded once, and no edge is drawn twice."""
        frontier = nodes = min(self.batch_size, len(self.seeds))
        edges, all_edges = 0, len(self._source)
        for fanout in self.fanouts:
            into = all_edges if fanout < 0 else min(frontier * fanout, all_edges)
            frontier = min(into, self.num_nodes)
            nodes, edges = nodes + frontier, edges + into
        return min(nodes, self.num_nodes), min(edges, all_edges)

    def _measured_buckets(self, most: tuple[int, int], probes: int = 4) -> list[tuple[int, int]]:
        """One that a few batches fit into with a tenth of room, and the most that can come up."""
        parts = self._seeds_of(0)[:probes]
        samples = [self._sample(part, self._random(0, i, self.device)) for i, part in enumerate(parts)]
        nodes = min(_round_up(1.1 * max(len(nodes) for nodes, _, _ in samples)), most[0])
        edges = min(_round_up(1.1 * max(len(source) for _, _, source in samples)), most[1])
        return [most] if (nodes, edges) == most else [(nodes, edges), most]


def _distinct(degree: Tensor, count: int, random: torch.Generator) -> Tensor:
    """For each degree ``count`` different places below it: [len(degree), count].

    Floyd's algorithm, a column at a time: a place that was drawn before gives way to the last one allowed.
    """
    places = torch.empty((len(degree), count), dtype=torch.int64, device=degree.device)
    uniform = torch.rand(count, len(degree), generator=random, dtype=torch.float64, device=degree.device)
    for column in range(count):
        last = degree - count + column
        drawn = (uniform[column] * (last + 1)).long()
        taken = (places[:, :column] == drawn[:, None]).any(1)
        places[:, column] = torch.where(taken, last, drawn)
    return places


def _pad(values: Tensor, size: int, fill: int = 0) -> Tensor:
    padded = values.new_full((size,), fill)
    padded[: len(values)] = values
    return padded


def _round_up(size: float, multiple: int = 1024) -> int:
    return -(-int(size) // multiple) * multiple


def _map(item: Any, function: Callable[[Tensor], Any]) -> list[Any]:
    """Fields of a named tuple, its tensors changed, named tuples in it likewise."""

    def field(value: Any) -> Any:
        if isinstance(value, Tensor):
            return function(value)
        return None if value is None else type(value)(*_map(value, function))

    return [field(value) for value in item]
