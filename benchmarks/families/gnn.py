"""GCN, GAT and GraphSAGE over a whole graph, and GraphSAGE trained on sampled neighbourhoods.

Legend: N nodes and E edges of a batch, B seeds; n nodes and e edges of an unpadded batch.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
from collections.abc import Iterator
from operator import methodcaller
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zoo
from benchmarks.families import gnn_arms, graphs
from benchmarks.families.base import Prepared, Training, Workload, autocast_of, dtype_of, timed, weights_dtype
from benchmarks.families.gnn_arms import Architecture, architecture
from benchmarks.families.graphs import Graph
from benchmarks.plan import Case
from benchmarks.strategies import reference_losses
from zoo.gnn import NeighborSampler, SampledBatch, Subgraph

SAMPLED = "-sampled"
# Batches of an epoch. A round of the race is an epoch.
BATCHES = 24
SAMPLED_BYTES_FORMULA = (
    "Of a batch of the usual size what full-batch training of such a graph must move, in each layer for the rows that "
    "the next one reads, and the features that are gathered for it, read and written."
)
TRAINING_BYTES_FORMULA = (
    "Twice what inference must move: the backward gathers as much as the forward. Left out, so that it is a lower "
    "bound: activations that are kept, weight gradients, and the optimizer, which reads and writes 28 bytes a weight."
)
LEARNING_RATE = 1e-2
# Keys of an unpadded batch.
_INPUTS = ("nodes", "edge_index", "seeds", "hop_nodes", "hop_edges")
KINDS = ("gcn", "gat", "graphsage")
# Bytes per edge during sorting (by the generator, or for a CSR): keys, values, order and work space.
_SORTING = 6 * 16


class GnnWorkload(Workload):
    """Inference over the whole graph, all nodes at once; one call returns the logits of every node.

    ``gcn``, ``gat`` and ``graphsage`` have two layers, 64 wide (GAT 8 heads of 8), on karate and cora, and three, 256
    wide (GAT 8 heads of 32), on larger graphs; the last layer ends in the classes. ``<kind>-8x256`` has eight layers of
    one width from end to end, so that all share one signature.

    Training is also full-batch, with labels from a random linear map. On ``<graph>-sampled`` GraphSAGE trains on
    sampled neighbourhoods, and a step waits for its batch. Training has float32 weights and features under autocast.
    """

    family = "gnn"
    models = (*KINDS, *(f"{kind}-8x256" for kind in KINDS))
    inputs = (*graphs.INPUTS, *(name + SAMPLED for name in graphs.INPUTS))

    workloads = ("inference", "train")
    gpu_dtypes = ("float32", "bfloat16", "float16")
    cpu_race, gpu_races, quick_races = ("gcn", "karate"), tuple((kind, "arxiv") for kind in KINDS), (("gcn", "cora"),)

    def cannot(self, case: Case) -> str | None:
        sampled = case.input.endswith(SAMPLED)
        if sampled and (case.workload != "train" or case.model != "graphsage"):
            return f"{case.input} is for training, of graphsage"
        if sampled and case.dynamic and case.impl == "upstream-tuned":
            return "upstream-tuned is compiled for batches of all sizes anyway"
        return None

    def estimate(self, case: Case, *, reference: bool) -> int:
        """Estimated device memory, from the counts of the published graph."""
        graph_name = case.input.removesuffix(SAMPLED)
        counts = graphs.spec(graph_name)
        nodes, edges = counts.nodes, counts.edges
        arch = architecture(case.model, graph_name, features=counts.features, classes=counts.classes)
        if case.input.endswith(SAMPLED):
            return sampled_memory(case, arch, nodes, edges, reference=reference)
        itemsize = weights_dtype(case).itemsize
        sorting = _SORTING * edges
        # Persistent memory: raw edges and the prepared graph (in the zoo with narrow indices, with and without
        # self-loops).
        prepared = {"upstream": 0, "upstream-tuned": 24, "zoo": 28 if arch.self_loops else 12}[case.impl]
        graph = (16 + prepared) * arch.edges(nodes, edges)
        dense = gnn_arms.dense_bytes(arch, nodes, itemsize)
        tuned_csr = case.impl == "upstream-tuned" and gnn_arms.tuned_layout(case, arch.kind) == "csr"
        if case.workload == "train":
            messages = gnn_arms.training_memory(case, arch, nodes, edges, reference=reference)
        elif tuned_csr or (case.impl == "zoo" and case.device == "cuda"):
            messages = 0  # no tensor is as long as the edges and as wide as the features
        elif case.strategy == "eager":
            # The zoo sums half precision in float32.
            held = max(itemsize, 4) if case.impl == "zoo" else itemsize
            messages = gnn_arms.message_bytes(arch, nodes, edges, held)
        else:
            # Inductor fuses gather, weight and scatter. GAT's scores and sums remain, a few values per head and edge.
            messages = arch.edges(nodes, edges) * 6 * arch.heads * itemsize
        return graph + dense + max(sorting, dense + messages)

    def build(self, case: Case, *, data_root: str | None, seed: int) -> Prepared:
        device, held = torch.device(case.device), weights_dtype(case)
        graph_name = case.input.removesuffix(SAMPLED)
        # A model of one width takes features of this width.
        features = architecture(case.model, graph_name, features=0, classes=0).features or None

        def load() -> Graph:
            return graphs.load(graph_name, data_root=data_root, features=features, seed=seed, device=device)

        graph = load()
        arch = architecture(case.model, graph_name, features=graph.x.size(1), classes=graph.classes)
        sizes = [(graph.nodes, graph.edges)] * arch.layers
        shipped = gnn_arms.build(arch, seed=seed).to(device, held)
        x = graph.x.to(held)
        preparation: dict[str, float] = {}
        with timed("", preparation, case.device):
            model, inputs, what = _implementation(case, arch, shipped, graph)

        def compile_convs(model: nn.Module, **options: Any) -> None:
            if case.impl == "upstream" and not case.dynamic:
                options["dynamic"] = None  # the default of its users
            gnn_arms.compile_convs(model, **options)

        def reference() -> Tensor:
            # Rebuilt for the reference, so that an arm's measured memory includes only its own model.
            model = gnn_arms.build(arch, seed=seed).to(device, held)
            return gnn_arms.reference_output(arch, model, x, load().edge_index)

        prepared = Prepared(
            model=model.eval(),
            inputs={"x": x, **inputs},
            static=tuple(inputs),
            compile_regions=None if case.impl == "zoo" else compile_convs,
            reference=reference,
            bytes=gnn_arms.bytes_moved(arch, sizes, dtype_of(case).itemsize),
            bytes_formula=gnn_arms.BYTES_FORMULA,
            flops=gnn_arms.flops(arch, sizes),
            data=graph.data,
            preparation_seconds={} if what is None else {what: preparation[""]},
            sizes={
                **{name: getattr(graph, name) for name in ("nodes", "edges", "max_degree")},
                "features": arch.features,
                "classes": graph.classes,
                "layers": arch.layers,
                "width": arch.hidden,
                **({"heads": arch.heads} if arch.heads > 1 else {}),
                "parameters": gnn_arms.parameters(arch),
            },
        )
        if case.input.endswith(SAMPLED):
            return for_sampled_training(case, prepared, arch, graph, seed=seed)
        if case.workload == "train":
            return for_training(case, prepared, arch, graph, seed=seed)
        return prepared


def _implementation(
    case: Case, arch: Architecture, shipped: nn.Module, graph: Graph
) -> tuple[nn.Module, dict[str, Any], str | None]:
    """The case's model, its inputs besides ``x``, and what was prepared once, if anything."""
    if case.input.endswith(SAMPLED):
        return zoo.from_upstream(shipped) if case.impl == "zoo" else shipped, {}, None
    if case.impl == "upstream":
        return shipped, {"edge_index": graph.edge_index}, None
    if case.impl == "upstream-tuned":
        layout = gnn_arms.tuned_layout(case, arch.kind)
        autocast = autocast_of(dtype_of(case)) if case.workload == "train" else None
        model, inputs = gnn_arms.tune(arch, shipped, graph.edge_index, graph.nodes, layout, autocast=autocast)
        return model, inputs, "CSR adjacency" if layout == "csr" else "sorted edges"
    ours: Any = zoo.from_upstream(shipped)
    return ours, {"edge_index": ours.prepare(graph.edge_index, num_nodes=graph.nodes)}, "CSRGraph"


# --- training ---


def training_of(
    graph: Graph, x: Tensor, inputs: dict[str, Any], *, seed: int, autocast: torch.dtype | None = None
) -> Training:
    """Cross entropy over half of the nodes, another half in each step; labels are a random linear map of features."""
    labels = labels_of(x, graph.classes, seed=seed).cpu()

    def batch(index: int) -> Tensor:
        generator = torch.Generator().manual_seed((seed << 20) + index)
        # Excluded by label value, in every arm: a selection would have a varying size and synchronise.
        left_out = torch.rand(graph.nodes, generator=generator) < 0.5
        return torch.where(left_out, -100, labels).to(x.device)

    def loss(model: nn.Module, labels: Tensor) -> Tensor:
        features = x.to(next(model.parameters()).dtype)  # float64 for the reference, else unchanged
        return F.cross_entropy(model(features, **inputs), labels)

    return Training(loss=loss, batch=batch, learning_rate=LEARNING_RATE, autocast=autocast)


def labels_of(x: Tensor, classes: int, *, seed: int) -> Tensor:
    """Labels [N] below ``classes``: the argmax of a random linear map of features [N, F]."""
    teacher = torch.randn(x.size(1), classes, generator=torch.Generator().manual_seed(seed)).to(x)
    return (x @ teacher).argmax(1)


def for_training(case: Case, prepared: Prepared, arch: Architecture, graph: Graph, *, seed: int) -> Prepared:
    x = prepared.inputs["x"]
    inputs = {name: value for name, value in prepared.inputs.items() if name != "x"}

    def reference() -> Tensor:
        shipped = gnn_arms.build(arch, seed=seed).to(x.device)
        return reference_losses(shipped, training_of(graph, x, {"edge_index": graph.edge_index}, seed=seed))

    return prepared.for_training(
        reference=reference,
        bytes=2 * prepared.bytes,
        bytes_formula=TRAINING_BYTES_FORMULA,
        flops=gnn_arms.training_flops(arch, [(graph.nodes, graph.edges)] * arch.layers),
        data=f"{graph.data}, labels of a random linear map",
        count=graph.nodes,
        unit="nodes",
        training=training_of(graph, x, inputs, seed=seed, autocast=autocast_of(dtype_of(case))),
    )


# --- sampled neighbourhoods ---


def drawing_of(arch: Architecture, nodes: int) -> tuple[tuple[int, ...], int]:
    """Neighbours sampled per hop, decreasing, and the seeds of a batch."""
    return (15, 10, 5)[: arch.layers], 8 if nodes < 10_000 else 1024


def sampler_of(graph: Graph, arch: Architecture, *, seed: int) -> NeighborSampler:
    """The sampler of every arm, on the host: seeds of a few batches."""
    fanouts, size = drawing_of(arch, graph.nodes)
    count = min(graph.nodes // size, BATCHES) * size
    seeds = torch.randperm(graph.nodes, generator=torch.Generator().manual_seed(seed))[:count]
    return NeighborSampler(
        graph.edge_index,
        fanouts=fanouts,
        batch_size=size,
        seeds=seeds,
        num_nodes=graph.nodes,
        seed=seed,
        workers=1 if size == 8 else 8,
    )


def for_sampled_training(case: Case, prepared: Prepared, arch: Architecture, graph: Graph, *, seed: int) -> Prepared:
    """A copy of the prepared whole-graph inference for training on sampled parts of the graph."""
    x: Tensor = prepared.inputs["x"]
    labels = labels_of(x, graph.classes, seed=seed)
    sampler = sampler_of(graph, arch, seed=seed)
    ours = sampler.to(x.device) if case.impl == "zoo" else sampler
    parts = _Parts(sampler, x, labels, ours, autocast_of(dtype_of(case)))
    training = parts.padded() if case.impl == "zoo" else parts.unpadded(trimmed=case.impl == "upstream-tuned")

    def reference() -> Tensor:
        return reference_losses(gnn_arms.build(arch, seed=seed).to(x.device), parts.unpadded())

    usual, by = sampler.buckets[0], f"the zoo's sampler on the {'GPU' if ours.device.type == 'cuda' else 'host'}"
    if case.impl != "zoo" and library_samples():
        by = "NeighborLoader"
    gathered = 2 * usual.nodes * x.shape[1] * x.element_size()
    return prepared.for_training(
        reference=reference,
        bytes=2 * gnn_arms.bytes_moved(arch, usual.layers, dtype_of(case).itemsize) + gathered,
        bytes_formula=SAMPLED_BYTES_FORMULA,
        flops=gnn_arms.training_flops(arch, usual.layers),
        data=f"{graph.data}, labels of a random linear map; sampled {sampler.fanouts}, in the race by {by}",
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
    """Estimated peak device memory: building and sorting the whole graph, or features, edges and a batch."""
    fanouts, met = drawing_of(arch, nodes)
    frontier, drawn = met, 0
    for fanout in fanouts:
        frontier = frontier * fanout
        met, drawn = met + frontier, drawn + frontier
    met, drawn = min(met, nodes), min(drawn, edges)
    features = 4 * nodes * (arch.features + (arch.classes or arch.hidden))
    made = (16 + _SORTING) * edges
    kept = 4 * edges + 12 * nodes if case.impl == "zoo" else 0
    # A batch in the largest bucket, and its copy in a CUDA graph's buffers: features, and the edges of each layer in
    # both directions.
    batch = 2 * (4 * met * arch.features + 20 * arch.layers * (met + drawn))
    return features + max(made, kept + batch + gnn_arms.training_memory(case, arch, met, drawn, reference=reference))


class _Parts:
    """Batches of one sampler: padded for the zoo's model, unpadded for torch-geometric's.

    In the race ``ours`` samples for the zoo's model. For comparisons of losses all arms see the same batches.
    """

    def __init__(
        self, sampler: NeighborSampler, x: Tensor, labels: Tensor, ours: NeighborSampler, autocast: torch.dtype | None
    ) -> None:
        self.sampler, self.x, self.labels, self.ours, self.autocast = sampler, x, labels, ours, autocast
        self._epochs = itertools.count(1)

    def padded(self) -> Training:
        def loss(model: nn.Module, batch: SampledBatch) -> Tensor:
            output = model(self.x[batch.nodes], batch.graphs)
            return F.cross_entropy(output, batch.labels(self.labels))

        def epoch() -> Iterator[SampledBatch]:
            # The thread that samples a batch on the host also pins it.
            pinned = self.x.is_cuda and self.ours.device.type == "cpu"
            for batch in self.ours.epoch(next(self._epochs), methodcaller("pin_memory") if pinned else None):
                yield self._moved(batch)

        return Training(
            loss=loss,
            batch=lambda index: self._moved(self.sampler.batch(*divmod(index, len(self.sampler)))),
            learning_rate=LEARNING_RATE,
            autocast=self.autocast,
            shapes=tuple(self._moved(self.sampler.padded_to(bucket)) for bucket in reversed(self.sampler.buckets)),
            loader=epoch,
            round=len(self.sampler),
        )

    def unpadded(self, *, trimmed: bool = False) -> Training:
        """Training on unpadded batches, from the library's own loader if it is available."""

        def loss(model: Any, batch: dict[str, Any]) -> Tensor:
            features = self.x[batch["nodes"]].to(next(model.parameters()).dtype)
            hops = {f"num_sampled_{of}_per_hop": batch[f"hop_{of}"] for of in ("nodes", "edges") if trimmed}
            output = model(features, batch["edge_index"], **hops)
            return F.cross_entropy(output[: batch["seeds"]], self.labels[batch["nodes"][: batch["seeds"]]])

        def epoch() -> Iterator[dict[str, Any]]:
            if not library_samples():
                yield from map(self._on_device, self.sampler.subgraphs(next(self._epochs), self._ready))
                return
            for got in self._library:  # each iteration over the loader is another epoch
                values = (got.n_id, got.edge_index, got.batch_size, got.num_sampled_nodes, got.num_sampled_edges)
                yield self._on_device(dict(zip(_INPUTS, values, strict=True)))

        return Training(
            loss=loss,
            batch=lambda index: self._on_device(self._ready(self.sampler.subgraph(*divmod(index, len(self.sampler))))),
            learning_rate=LEARNING_RATE,
            autocast=self.autocast,
            loader=epoch,
            round=len(self.sampler),
        )

    def _moved(self, batch: SampledBatch) -> SampledBatch:
        return batch if batch.nodes.device == self.x.device else batch.to(self.x.device, non_blocking=True)

    def _ready(self, drawn: Subgraph) -> dict[str, Any]:
        """The host's work on a batch before it is moved to the device."""
        tensors = [each.pin_memory() if self.x.is_cuda else each for each in (drawn.nodes, drawn.edge_index)]
        values = (*tensors, len(drawn.seeds), drawn.hop_nodes, drawn.hop_edges)
        return dict(zip(_INPUTS, values, strict=True))

    def _on_device(self, batch: dict[str, Any]) -> dict[str, Any]:
        moved = {name: batch[name].to(self.x.device, non_blocking=True) for name in ("nodes", "edge_index")}
        return {**batch, **moved}

    @functools.cached_property
    def _library(self) -> Any:
        """torch-geometric's loader: one for all epochs, with persistent workers; each epoch has another order."""
        from torch_geometric.data import Data
        from torch_geometric.loader import NeighborLoader

        sampler = self.sampler
        return NeighborLoader(
            Data(edge_index=sampler.edge_index, num_nodes=sampler.num_nodes),
            num_neighbors=list(sampler.fanouts),
            batch_size=sampler.batch_size,
            input_nodes=sampler.seeds,
            is_sorted=True,
            # Otherwise the training thread collates batches, and no thread pins them.
            filter_per_worker=True,
            shuffle=True,
            generator=torch.Generator().manual_seed(sampler.seed),
            num_workers=sampler.workers,
            persistent_workers=sampler.workers > 0,
            pin_memory=self.x.is_cuda,
        )


def library_samples() -> bool:
    """Whether torch-geometric's NeighborLoader works here: it needs one of two packages."""
    return any(importlib.util.find_spec(name) for name in ("pyg_lib", "torch_sparse"))


WORKLOAD = GnnWorkload()
