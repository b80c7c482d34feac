"""Training of GNNs: of the whole graph in every step, or of GraphSAGE on sampled neighbourhoods, a batch a step.

Labels are a random linear map of the features. Weights and features are float32; in half precision autocast rounds
them.

Legend: N nodes and E edges of a batch, B seeds; n and e of one that is not padded.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from operator import methodcaller
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.families import gnn_arms
from benchmarks.families.base import Prepared, Training, autocast_of, dtype_of
from benchmarks.families.gnn_arms import Architecture
from benchmarks.families.graphs import Graph
from benchmarks.plan import Case
from benchmarks.training import reference_losses
from zoo.gnn import NeighborSampler, SampledBatch, Subgraph

SAMPLED = "-sampled"
# Batches of an epoch, which is a round of the race.
BATCHES = 24
SAMPLED_BYTES_FORMULA = (
    "Of a batch of the usual size what full-batch training of such a graph must move, in each layer for the rows that "
    "the next one reads, and the features that are gathered for it, read and written."
)
BYTES_FORMULA = (
    "Twice what inference must move: the backward gathers as much as the forward. Left out, so that it is a lower "
    "bound: activations that are kept, weight gradients, and the optimizer, which reads and writes 28 bytes a weight."
)
LEARNING_RATE = 1e-2
# What a batch that is not padded holds.
_INPUTS = ("nodes", "edge_index", "seeds", "hop_nodes", "hop_edges")


def training_of(
    graph: Graph, x: Tensor, inputs: dict[str, Any], *, seed: int, autocast: torch.dtype | None = None
) -> Training:
    """Cross entropy over half of the nodes, another half in each step; labels are a random linear map of features."""
    labels = labels_of(x, graph.classes, seed=seed).cpu()

    def batch(index: int) -> Tensor:
        generator = torch.Generator().manual_seed((seed << 20) + index)
        # Left out by value and not by selection, whose size would differ and be waited for; in every arm alike.
        left_out = torch.rand(graph.nodes, generator=generator) < 0.5
        return torch.where(left_out, -100, labels).to(x.device)

    def loss(model: nn.Module, labels: Tensor) -> Tensor:
        features = x.to(next(model.parameters()).dtype)  # float64 for the reference, else as it is
        return F.cross_entropy(model(features, **inputs), labels)

    return Training(loss=loss, batch=batch, learning_rate=LEARNING_RATE, autocast=autocast)


def labels_of(x: Tensor, classes: int, *, seed: int) -> Tensor:
    """Labels [N] below ``classes``: the greatest of a random linear map of features [N, F]."""
    teacher = torch.randn(x.size(1), classes, generator=torch.Generator().manual_seed(seed)).to(x)
    return (x @ teacher).argmax(1)


def for_training(case: Case, prepared: Prepared, arch: Architecture, graph: Graph, *, seed: int) -> Prepared:
    """What inference prepares, made ready for training."""
    x = prepared.inputs["x"]
    inputs = {name: value for name, value in prepared.inputs.items() if name != "x"}

    def reference() -> Tensor:
        shipped = gnn_arms.build(arch, seed=seed).to(x.device)
        return reference_losses(shipped, training_of(graph, x, {"edge_index": graph.edge_index}, seed=seed))

    return replace(
        prepared,
        model=prepared.model.train(),
        inputs={},
        static=(),
        reference=reference,
        bytes=2 * prepared.bytes,
        bytes_formula=BYTES_FORMULA,
        flops=flops(arch, graph.nodes, graph.edges),
        data=f"{graph.data}, labels of a random linear map",
        count=graph.nodes,
        unit="nodes",
        training=training_of(graph, x, inputs, seed=seed, autocast=autocast_of(dtype_of(case))),
    )


def flops(arch: Architecture, nodes: int, edges: int) -> int:
    """Gradients by inputs and by weights each take what the forward does; the first layer's input needs none."""
    return flops_of_layers(arch, [(nodes, edges)] * arch.layers)


def flops_of_layers(arch: Architecture, sizes: Sequence[tuple[int, int]]) -> int:
    """:func:`flops` where each layer has (nodes, edges) of its own."""
    first, nodes = arch.stack()[0], sizes[0][0]
    maps = 2 if arch.kind == "graphsage" else 1
    return 3 * gnn_arms.flops_of_layers(arch, sizes) - 2 * maps * nodes * first.inputs * first.transformed


def memory(case: Case, arch: Architecture, nodes: int, edges: int, *, reference: bool) -> int:
    """What training keeps beyond inference: activations of all layers, gradients and two moments of every weight.

    Where messages are held at all (upstream's eager), GAT keeps those of every layer for the gradients of its weights;
    the weights of the others do not learn, and theirs are gone with the layer. The reference does so in float64.
    """
    layers = arch.stack()
    kept = sum(2 * layer.inputs + 3 * layer.transformed + layer.outputs for layer in layers) * nodes
    messages = gnn_arms.message_bytes(arch, nodes, edges, 4) * (arch.layers if arch.kind == "gat" else 1)
    held = messages if case.impl != "zoo" or case.device == "cpu" else 0
    running = 4 * kept + 16 * gnn_arms.parameters(arch) + held
    return max(running, 2 * (4 * kept + messages)) if reference else running


# --- sampled neighbourhoods ---


def fanouts_of(arch: Architecture) -> tuple[int, ...]:
    """Fewer neighbours hop by hop."""
    return (15, 10, 5)[: arch.layers] if arch.layers <= 3 else (5,) * arch.layers


def batch_size_of(nodes: int) -> int:
    """B."""
    return 8 if nodes < 10_000 else 1024


def sampler_of(graph: Graph, arch: Architecture, *, seed: int) -> NeighborSampler:
    """The sampler of every arm, on the host: seeds of a few batches."""
    size = batch_size_of(graph.nodes)
    count = min(graph.nodes // size, BATCHES) * size
    seeds = torch.randperm(graph.nodes, generator=torch.Generator().manual_seed(seed))[:count]
    return NeighborSampler(
        graph.edge_index,
        fanouts=fanouts_of(arch),
        batch_size=size,
        seeds=seeds,
        num_nodes=graph.nodes,
        seed=seed,
        workers=1 if size == 8 else 8,
    )


def for_sampled_training(case: Case, prepared: Prepared, arch: Architecture, graph: Graph, *, seed: int) -> Prepared:
    """What inference over the whole graph prepares, made ready for training on parts of it."""
    x: Tensor = prepared.inputs["x"]
    labels = labels_of(x, graph.classes, seed=seed)
    sampler = sampler_of(graph, arch, seed=seed)
    ours = sampler.to(x.device) if case.impl == "zoo" else sampler
    parts = _Parts(sampler, x, labels, ours, autocast_of(dtype_of(case)))
    training = parts.padded() if case.impl == "zoo" else parts.plain(trimmed=case.impl == "upstream-tuned")

    def reference() -> Tensor:
        return reference_losses(gnn_arms.build(arch, seed=seed).to(x.device), parts.plain())

    usual = sampler.buckets[0]
    gathered = 2 * usual.nodes * x.shape[1] * x.element_size()
    return replace(
        prepared,
        model=prepared.model.train(),
        inputs={},
        static=(),
        reference=reference,
        bytes=2 * gnn_arms.bytes_of_layers(arch, usual.layers, dtype_of(case).itemsize) + gathered,
        bytes_formula=SAMPLED_BYTES_FORMULA,
        flops=flops_of_layers(arch, usual.layers),
        data=f"{graph.data}, labels of a random linear map; sampled {sampler.fanouts}, in the race by {_who(case, x)}",
        sizes={
            **prepared.sizes,
            "seeds": sampler.batch_size,
            "sampled_nodes": usual.nodes,
            "sampled_edges": usual.edges,
        },
        count=sampler.batch_size,
        unit="seeds",
        training=training,
        tuned_dynamic=not case.cuda_graph,
    )


def sampled_memory(case: Case, arch: Architecture, nodes: int, edges: int, *, reference: bool) -> int:
    """Estimated peak device memory: the whole graph while it is made and sorted, or features, edges and a batch."""
    size = batch_size_of(nodes)
    met = frontier = size
    drawn = 0
    for fanout in fanouts_of(arch):
        frontier = frontier * fanout
        met, drawn = met + frontier, drawn + frontier
    met, drawn = min(met, nodes), min(drawn, edges)
    features = 4 * nodes * (arch.features + (arch.classes or arch.hidden))
    # Raw edges, and what it takes to sort them, as of the whole graph.
    made = (16 + 6 * 16) * edges
    kept = 4 * edges + 12 * nodes if case.impl == "zoo" else 0
    # A batch in the bucket that holds all, once more in the buffers of a CUDA graph; its features, and its edges in
    # each layer, both ways.
    batch = 2 * (4 * met * arch.features + 20 * arch.layers * (met + drawn))
    return features + max(made, kept + batch + memory(case, arch, met, drawn, reference=reference))


class _Parts:
    """Batches of one sampler, padded for our model and as they are for torch-geometric's.

    Of the race ``ours`` draws our model's; where losses are compared all arms see the same batches.
    """

    def __init__(
        self, sampler: NeighborSampler, x: Tensor, labels: Tensor, ours: NeighborSampler, autocast: torch.dtype | None
    ) -> None:
        self.sampler, self.x, self.labels, self.ours, self.autocast = sampler, x, labels, ours, autocast
        self._epochs = itertools.count(1)

    def padded(self) -> Training:
        """In the shapes that the sampler declares."""

        def loss(model: nn.Module, batch: SampledBatch) -> Tensor:
            output = model(self.x[batch.nodes], batch.graphs)
            return F.cross_entropy(output, batch.labels(self.labels))

        def epoch() -> Iterator[SampledBatch]:
            # What the host draws it also pins, in the thread that drew it.
            pinned = self.x.is_cuda and self.ours.device.type == "cpu"
            for batch in self.ours.epoch(next(self._epochs), methodcaller("pin_memory") if pinned else None):
                yield self._moved(batch)

        return Training(
            loss=loss,
            batch=lambda index: self._moved(self.sampler.batch(*self._place(index))),
            learning_rate=LEARNING_RATE,
            autocast=self.autocast,
            shapes=tuple(self._moved(self.sampler.padded_to(bucket)) for bucket in reversed(self.sampler.buckets)),
            loader=epoch,
            round=len(self.sampler),
        )

    def plain(self, *, trimmed: bool = False) -> Training:
        """Of as many nodes and edges as were drawn, by the library's own loader where it can be had.

        Args:
            trimmed: Tell the model which hop met what, so that layers leave out what nobody reads, as the library's
                documentation advises.
        """

        def loss(model: Any, batch: dict[str, Any]) -> Tensor:
            features = self.x[batch["nodes"]].to(next(model.parameters()).dtype)
            hops = {}
            if trimmed:
                hops = {
                    "num_sampled_nodes_per_hop": batch["hop_nodes"],
                    "num_sampled_edges_per_hop": batch["hop_edges"],
                }
            output = model(features, batch["edge_index"], **hops)
            return F.cross_entropy(output[: batch["seeds"]], self.labels[batch["nodes"][: batch["seeds"]]])

        def epoch() -> Iterator[dict[str, Any]]:
            # The library's loader goes on to another epoch by itself.
            drawn = self._library if library_samples() else self.sampler.subgraphs(next(self._epochs), self._ready)
            for batch in drawn:
                yield self._on_device(batch if isinstance(batch, dict) else _of_library(batch))

        return Training(
            loss=loss,
            batch=lambda index: self._on_device(self._ready(self.sampler.subgraph(*self._place(index)))),
            learning_rate=LEARNING_RATE,
            autocast=self.autocast,
            loader=epoch,
            round=len(self.sampler),
        )

    def _place(self, index: int) -> tuple[int, int]:
        """Epoch and place in it of the batch of this number."""
        return divmod(index, len(self.sampler))

    def _moved(self, batch: SampledBatch) -> SampledBatch:
        return batch if batch.nodes.device == self.x.device else batch.to(self.x.device, non_blocking=True)

    def _ready(self, drawn: Subgraph) -> dict[str, Any]:
        """All that the host does with a batch before it is moved."""
        nodes, edge_index = drawn.nodes, drawn.edge_index
        if self.x.is_cuda:
            nodes, edge_index = nodes.pin_memory(), edge_index.pin_memory()
        values = (nodes, edge_index, len(drawn.seeds), drawn.hop_nodes, drawn.hop_edges)
        return dict(zip(_INPUTS, values, strict=True))

    def _on_device(self, batch: dict[str, Any]) -> dict[str, Any]:
        moved = {name: batch[name].to(self.x.device, non_blocking=True) for name in ("nodes", "edge_index")}
        return {**batch, **moved}

    @functools.cached_property
    def _library(self) -> Any:
        """torch-geometric's loader. One for all epochs, whose workers stay; each has another order."""
        from torch_geometric.data import Data
        from torch_geometric.loader import NeighborLoader

        sampler = self.sampler
        return NeighborLoader(
            Data(edge_index=sampler.edge_index, num_nodes=sampler.num_nodes),
            num_neighbors=list(sampler.fanouts),
            batch_size=sampler.batch_size,
            input_nodes=sampler.seeds,
            is_sorted=True,
            # Else the thread that trains puts batches together, and nobody pins them.
            filter_per_worker=True,
            shuffle=True,
            generator=torch.Generator().manual_seed(sampler.seed),
            num_workers=sampler.workers,
            persistent_workers=sampler.workers > 0,
            pin_memory=self.x.is_cuda,
        )


def _of_library(batch: Any) -> dict[str, Any]:
    values = (batch.n_id, batch.edge_index, batch.batch_size, batch.num_sampled_nodes, batch.num_sampled_edges)
    return dict(zip(_INPUTS, values, strict=True))


def library_samples() -> bool:
    """Whether torch-geometric's NeighborLoader works here: it needs one of two packages."""
    return any(importlib.util.find_spec(name) for name in ("pyg_lib", "torch_sparse"))


def _who(case: Case, x: Tensor) -> str:
    if case.impl == "zoo":
        return f"the zoo's sampler on the {'GPU' if x.is_cuda else 'host'}"
    return "NeighborLoader" if library_samples() else "the zoo's sampler on the host"
