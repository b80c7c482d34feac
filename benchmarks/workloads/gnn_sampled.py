"""Training of GraphSAGE on sampled neighbourhoods: each step a batch of seeds and what was drawn around them.

Legend: N nodes and E edges of a batch, B seeds.
"""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.case import Case
from benchmarks.training import reference_losses
from benchmarks.workloads import gnn_train, gnn_upstream, gnn_work
from benchmarks.workloads.base import Prepared, Training
from benchmarks.workloads.gnn_work import Architecture
from benchmarks.workloads.graphs import Graph
from zoo.gnn import NeighborSampler, SampledBatch

SAMPLED = "-sampled"
# Batches of an epoch, which is a round of the race.
BATCHES = 24
BYTES_FORMULA = (
    "Of a batch of the usual size what full-batch training of such a graph must move, and the features that are "
    "gathered for it, read and written."
)


def sampler_of(
    graph: Graph,
    arch: Architecture,
    *,
    seed: int,
    device: torch.device | str = "cpu",
    buckets: Sequence[tuple[int, int]] | None = None,
) -> NeighborSampler:
    """The sampler of every arm: seeds of a few batches, fewer neighbours hop by hop."""
    small = graph.nodes < 10_000
    fanouts = (15, 10, 5)[: arch.layers] if arch.layers <= 3 else (5,) * arch.layers
    size = 8 if small else 1024
    count = min(graph.nodes // size, BATCHES) * size
    seeds = torch.randperm(graph.nodes, generator=torch.Generator().manual_seed(seed))[:count]
    return NeighborSampler(
        graph.edge_index,
        fanouts=fanouts,
        batch_size=size,
        seeds=seeds,
        num_nodes=graph.nodes,
        buckets=buckets,
        seed=seed,
        workers=1 if small else 8,
        device=device,
    )


def for_training(case: Case, prepared: Prepared, arch: Architecture, graph: Graph, *, seed: int) -> Prepared:
    """What inference over the whole graph prepares, made ready for training on parts of it.

    Args:
        case: The arm.
        prepared: Of inference.
        arch: The model's shape.
        graph: The large graph.
        seed: Of weights, labels and samples.
    """
    x: Tensor = prepared.inputs["x"]
    labels = gnn_train.labels_of(x, graph.classes, seed=seed)
    sampler = sampler_of(graph, arch, seed=seed)
    on_device = None
    if case.impl == "zoo" and x.is_cuda:
        on_device = sampler_of(graph, arch, seed=seed, device=x.device, buckets=sampler.buckets)
    parts = _Parts(sampler, x, labels, on_device)
    training = parts.padded() if case.impl == "zoo" else parts.plain()

    def reference() -> Tensor:
        return reference_losses(gnn_upstream.build(arch, seed=seed).to(x.device), parts.plain())

    nodes, edges = sampler.buckets[0]
    gathered = 2 * nodes * x.shape[1] * x.element_size()
    return replace(
        prepared,
        model=prepared.model.train(),
        inputs={},
        static=(),
        reference=reference,
        bytes=2 * gnn_work.bytes_moved(arch, nodes, edges, x.element_size()) + gathered,
        bytes_formula=BYTES_FORMULA,
        flops=gnn_train.flops(arch, nodes, edges),
        data=f"{graph.data}, labels of a random linear map; sampled {sampler.fanouts}, in the race by {_who(case, x)}",
        sizes={**prepared.sizes, "seeds": sampler.batch_size, "sampled_nodes": nodes, "sampled_edges": edges},
        count=sampler.batch_size,
        unit="seeds",
        training=training,
    )


class _Parts:
    """Batches of one sampler, padded for our model and as they are for torch-geometric's.

    Of the race ``ours`` draws our model's, if it is given; where losses are compared all arms see the same batches.
    """

    def __init__(self, sampler: NeighborSampler, x: Tensor, labels: Tensor, ours: NeighborSampler | None) -> None:
        self.sampler, self.x, self.labels, self.ours = sampler, x, labels, ours or sampler
        self._epochs = itertools.count(1)

    def padded(self) -> Training:
        """In the shapes that the sampler declares."""

        def loss(model: nn.Module, batch: SampledBatch) -> Tensor:
            output = model(self.x[batch.nodes], batch.graph)
            return F.cross_entropy(output[: len(batch.seeds)], batch.labels(self.labels))

        def epoch() -> Iterator[SampledBatch]:
            for batch in self.ours.epoch(next(self._epochs)):
                yield self._moved(batch)

        return Training(
            loss=loss,
            batch=lambda index: self._moved(self._at(index)),
            learning_rate=gnn_train.LEARNING_RATE,
            shapes=tuple(self._moved(self.sampler.padded_to(bucket)) for bucket in reversed(self.sampler.buckets)),
            loader=epoch,
            round=len(self.sampler),
        )

    def plain(self) -> Training:
        """Of as many nodes and edges as were drawn, by the library's own loader where it can be had."""

        def loss(model: Any, batch: dict[str, Any]) -> Tensor:
            features = self.x[batch["nodes"]].to(next(model.parameters()).dtype)
            output = model(features, batch["edge_index"])
            return F.cross_entropy(output[: batch["seeds"]], self.labels[batch["nodes"][: batch["seeds"]]])

        def epoch() -> Iterator[dict[str, Any]]:
            number = next(self._epochs)
            for batch in self._by_the_library(number) if library_samples() else self.sampler.epoch(number):
                yield self._unpadded(batch) if isinstance(batch, SampledBatch) else batch

        return Training(
            loss=loss,
            batch=lambda index: self._unpadded(self._at(index)),
            learning_rate=gnn_train.LEARNING_RATE,
            loader=epoch,
            round=len(self.sampler),
        )

    def _at(self, index: int) -> SampledBatch:
        epoch, place = divmod(index, len(self.sampler))
        return self.sampler.batch(epoch, place)

    def _moved(self, batch: SampledBatch) -> SampledBatch:
        if self.x.is_cuda and not batch.nodes.is_cuda:
            return batch.pin_memory().to(self.x.device, non_blocking=True)
        return batch

    def _unpadded(self, batch: SampledBatch) -> dict[str, Any]:
        edges = self.sampler.edges_of(batch)
        # The nodes that were met last have no edges into them, and stand behind all others as sources.
        nodes = max(int(edges.max()) + 1, len(batch.seeds)) if edges.numel() else len(batch.seeds)
        return self._as_inputs(batch.nodes[:nodes], edges, len(batch.seeds))

    def _by_the_library(self, epoch: int) -> Iterator[dict[str, Any]]:
        from torch_geometric.data import Data
        from torch_geometric.loader import NeighborLoader

        sampler = self.sampler
        loader = NeighborLoader(
            Data(edge_index=sampler.edge_index, num_nodes=sampler.num_nodes),
            num_neighbors=list(sampler.fanouts),
            batch_size=sampler.batch_size,
            input_nodes=sampler.seeds[torch.randperm(len(sampler.seeds))],
            num_workers=sampler.workers,
        )
        for batch in loader:
            yield self._as_inputs(batch.n_id, batch.edge_index, batch.batch_size)

    def _as_inputs(self, nodes: Tensor, edge_index: Tensor, seeds: int) -> dict[str, Any]:
        device = self.x.device
        moved = (tensor.to(device, non_blocking=True) for tensor in (nodes, edge_index))
        return {"nodes": next(moved), "edge_index": next(moved), "seeds": seeds}


def library_samples() -> bool:
    """Whether torch-geometric's NeighborLoader works here: it needs one of two packages."""
    return any(importlib.util.find_spec(name) for name in ("pyg_lib", "torch_sparse"))


def _who(case: Case, x: Tensor) -> str:
    if case.impl == "zoo":
        return f"the zoo's sampler on the {'GPU' if x.is_cuda else 'host'}"
    return "NeighborLoader" if library_samples() else "the zoo's sampler on the host"
