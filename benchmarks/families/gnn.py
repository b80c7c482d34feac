"""GCN, GAT and GraphSAGE over a whole graph: models, inputs, and the arms of both libraries from one set of weights."""

from __future__ import annotations

import re
import time
from typing import Any

import torch

from benchmarks.families import gnn_sampled, gnn_train, gnn_upstream, gnn_work, graphs
from benchmarks.families.base import UNSCALED, Prepared, autocast_of, dtype_of, refuses_unknown
from benchmarks.families.gnn_sampled import SAMPLED
from benchmarks.families.gnn_work import Architecture
from benchmarks.families.graphs import POWER_LAW, Graph
from benchmarks.plan import Case
from benchmarks.timing import synchronise

KINDS = ("gcn", "gat", "graphsage")
HEADS = 8
SMALL = ("karate", "cora")

_DEEP = re.compile(r"(?P<kind>\w+)-(?P<layers>\d+)x(?P<width>\d+)")


class GnnWorkload:
    """Inference over the whole graph, all nodes at once; one call returns the logits of every node.

    ``gcn``, ``gat`` and ``graphsage`` have two layers, 64 wide (GAT 8 heads of 8), on karate and cora, and three, 256
    wide (GAT 8 heads of 32), on larger graphs; the last layer ends in the classes. ``<kind>-8x256`` has eight layers of
    one width from end to end, so that all share one signature.

    Training is full-batch too, with labels of a random linear map; on ``<graph>-sampled`` GraphSAGE trains on sampled
    neighbourhoods, and a step waits for its batch. Weights and features are float32 then, and the dtype is autocast's.
    """

    family = "gnn"
    models: tuple[str, ...] = (*KINDS, *(f"{kind}-8x256" for kind in KINDS))
    inputs: tuple[str, ...] = (*graphs.INPUTS, *(name + SAMPLED for name in graphs.INPUTS))

    def default_races(self, device: str, quick: bool, workload: str = "inference") -> list[tuple[str, str]]:
        """(model, input) pairs of a plain run."""
        if device == "cpu":
            return [("gcn", "karate")]
        if quick:
            return [("gcn", "cora")]
        return [(kind, "arxiv") for kind in KINDS]

    def dtypes(self, device: str) -> tuple[str, ...]:
        """Supported dtypes, the default first."""
        return ("float32", "bfloat16") if device == "cpu" else ("float32", "bfloat16", "float16")

    def refuses(self, case: Case) -> str | None:
        """Why this combination does not exist, or None."""
        if reason := refuses_unknown(self, case, ("inference", "train")):
            return reason
        sampled = case.input.endswith(SAMPLED)
        if sampled and (case.workload != "train" or case.model != "graphsage"):
            return f"{case.input} is for training, of graphsage"
        if sampled and case.dynamic and case.impl == "upstream-tuned":
            return "upstream-tuned is compiled for batches of all sizes anyway"
        if case.workload == "train" and case.dtype == "float16":
            return UNSCALED
        return None

    def memory_bytes(self, case: Case) -> int:
        """Estimated peak device memory of the case in bytes, from the counts of the published graph."""
        return self._bytes(case, reference=True)

    def running_bytes(self, case: Case) -> int:
        """The same without the reference of training."""
        return self._bytes(case, reference=False)

    def _bytes(self, case: Case, *, reference: bool) -> int:
        graph_name = case.input.removesuffix(SAMPLED)
        counts = graphs.spec(graph_name)
        arch = architecture(case.model, graph_name, features=counts.features, classes=counts.classes)
        if case.input.endswith(SAMPLED):
            return gnn_sampled.memory_bytes(case, arch, counts.nodes, counts.edges, reference=reference)
        nodes, edges = counts.nodes, counts.edges
        itemsize = _dtype_of_weights(case).itemsize
        # Raw edges, and while they are sorted (by the generator, or for a CSR) keys, values, order and work space.
        sorting = 6 * 16 * edges
        # What stays: raw edges, and what was prepared from them (in the zoo, with narrow indices, with and without
        # self-loops).
        prepared = {"upstream": 0, "upstream-tuned": 24, "zoo": 28 if arch.self_loops else 12}[case.impl]
        graph = (16 + prepared) * arch.edges(nodes, edges)
        running = gnn_work.dense_bytes(arch, nodes, itemsize)
        if case.impl == "zoo" and case.device == "cuda":
            messages = 0  # nothing of ours is as long as the edges and as wide as the features
        elif case.impl == "upstream-tuned" and gnn_upstream.tuned_layout(case, arch.kind) == "csr":
            messages = 0
        elif case.strategy == "eager":
            # The zoo sums half precision in float32.
            held = max(itemsize, 4) if case.impl == "zoo" else itemsize
            messages = gnn_work.message_bytes(arch, nodes, edges, held)
        else:
            # Inductor fuses gather, weight and scatter; GAT's scores and their sums stay, a few values a head and edge.
            messages = arch.edges(nodes, edges) * 6 * arch.heads * itemsize
        if case.workload == "train":
            messages = gnn_train.memory_bytes(case, arch, nodes, edges, reference=reference)
        return graph + gnn_work.dense_bytes(arch, nodes, itemsize) + max(sorting, running + messages)

    def prepare(self, case: Case, *, data_root: str | None, seed: int) -> Prepared:
        """Build model and inputs on the device.

        Args:
            case: What to build.
            data_root: Folder of real data sets, or None.
            seed: Of the generated graph, the features and the weights.

        Raises:
            ValueError: If the case is one that :meth:`refuses` names.
            FileNotFoundError: If the real data set is incomplete.
        """
        if reason := self.refuses(case):
            raise ValueError(f"{case.arm}: {reason}")
        device, dtype = torch.device(case.device), dtype_of(case)
        deep = _DEEP.fullmatch(case.model)
        features = int(deep["width"]) if deep else None
        graph_name = case.input.removesuffix(SAMPLED)
        graph = graphs.load(graph_name, data_root=data_root, features=features, seed=seed, device=device)
        arch = architecture(case.model, graph_name, features=graph.x.size(1), classes=graph.classes)
        held = _dtype_of_weights(case)
        shipped = gnn_upstream.build(arch, seed=seed).to(device, held)
        x = graph.x.to(held)

        synchronise(device.type)
        start = time.perf_counter()
        model, inputs, what = _implementation(case, arch, shipped, graph)
        synchronise(device.type)
        preparation = {} if what is None else {what: time.perf_counter() - start}

        def compile_convs(model: torch.nn.Module, **options: Any) -> None:
            if case.impl == "upstream" and not case.dynamic:
                options["dynamic"] = None  # as its users leave it
            gnn_upstream.compile_convs(model, **options)

        def reference() -> torch.Tensor:
            # Made anew, so that an arm holds nothing that it does not run on: its memory is measured.
            raw = graphs.load(graph_name, data_root=data_root, features=features, seed=seed, device=device).edge_index
            model = gnn_upstream.build(arch, seed=seed).to(device, dtype)
            return gnn_upstream.reference_output(arch, model, x, raw)

        prepared = Prepared(
            model=model.eval(),
            inputs={"x": x, **inputs},
            static=tuple(inputs),
            compile_regions=None if case.impl == "zoo" else compile_convs,
            reference=reference,
            reference_dtype="float64",
            bytes=gnn_work.bytes_moved(arch, graph.nodes, graph.edges, dtype.itemsize),
            bytes_formula=gnn_work.BYTES_FORMULA,
            flops=gnn_work.flops(arch, graph.nodes, graph.edges),
            data=graph.data,
            preparation_seconds=preparation,
            sizes={
                "nodes": graph.nodes,
                "edges": graph.edges,
                "max_degree": graph.max_degree,
                "features": arch.features,
                "classes": graph.classes,
                "layers": arch.layers,
                "width": arch.hidden,
                "heads": arch.heads,
                "parameters": gnn_work.parameters(arch),
            },
        )
        if case.input.endswith(SAMPLED):
            return gnn_sampled.for_training(case, prepared, arch, graph, seed=seed)
        if case.workload == "train":
            return gnn_train.for_training(case, prepared, arch, graph, seed=seed)
        return prepared


def _dtype_of_weights(case: Case) -> torch.dtype:
    """What weights and features are held in."""
    return torch.float32 if case.workload == "train" else dtype_of(case)


def architecture(model: str, input: str, *, features: int, classes: int) -> Architecture:
    """The model's shape on this input.

    Args:
        model: A name of :attr:`GnnWorkload.models`.
        input: A name of :data:`graphs.INPUTS`.
        features: Width of the node features; a model of one width replaces it.
        classes: Number of classes; a model of one width has none.
    """
    if deep := _DEEP.fullmatch(model):
        kind, layers, width = deep["kind"], int(deep["layers"]), int(deep["width"])
        return Architecture(
            kind=kind, features=width, hidden=width, layers=layers, classes=None, heads=HEADS if kind == "gat" else 1
        )
    layers, hidden = (2, 64) if input.removesuffix(POWER_LAW) in SMALL else (3, 256)
    heads = HEADS if model == "gat" else 1
    return Architecture(kind=model, features=features, hidden=hidden, layers=layers, classes=classes, heads=heads)


def _implementation(
    case: Case, arch: Architecture, shipped: torch.nn.Module, graph: Graph
) -> tuple[torch.nn.Module, dict[str, Any], str | None]:
    """The case's model, its inputs besides ``x``, and what was prepared once, if anything.

    Where parts of the graph are sampled nothing of the whole is prepared, and no input is left.
    """
    sampled = case.input.endswith(SAMPLED)
    if case.impl == "upstream" or (sampled and case.impl == "upstream-tuned"):
        return shipped, {} if sampled else {"edge_index": graph.edge_index}, None
    if case.impl == "upstream-tuned":
        layout = gnn_upstream.tuned_layout(case, arch.kind)
        autocast = autocast_of(dtype_of(case)) if case.workload == "train" else None
        model, inputs = gnn_upstream.tune(arch, shipped, graph.edge_index, graph.nodes, layout, autocast=autocast)
        return model, inputs, "CSR adjacency" if layout == "csr" else "sorted edges"
    from zoo.gnn.convert import WEIGHTS

    ours: Any = WEIGHTS.from_upstream(shipped)
    if sampled:
        return ours, {}, None
    return ours, {"edge_index": ours.prepare(graph.edge_index, num_nodes=graph.nodes)}, "CSRGraph"


WORKLOAD = GnnWorkload()
