"""GCN, GAT and GraphSAGE over a whole graph: models, inputs, and the arms of both libraries from one set of weights."""

from __future__ import annotations

from typing import Any

import torch

import zoo
from benchmarks.families import gnn_arms, gnn_train, graphs
from benchmarks.families.base import Prepared, Workload, autocast_of, dtype_of, timed, weights_dtype
from benchmarks.families.gnn_arms import Architecture, architecture
from benchmarks.families.gnn_train import SAMPLED
from benchmarks.families.graphs import Graph
from benchmarks.plan import Case

KINDS = ("gcn", "gat", "graphsage")


class GnnWorkload(Workload):
    """Inference over the whole graph, all nodes at once; one call returns the logits of every node.

    ``gcn``, ``gat`` and ``graphsage`` have two layers, 64 wide (GAT 8 heads of 8), on karate and cora, and three, 256
    wide (GAT 8 heads of 32), on larger graphs; the last layer ends in the classes. ``<kind>-8x256`` has eight layers of
    one width from end to end, so that all share one signature.

    Training is full-batch too, with labels of a random linear map; on ``<graph>-sampled`` GraphSAGE trains on sampled
    neighbourhoods, and a step waits for its batch. Weights and features are float32 then, and the dtype is autocast's.
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
            return gnn_train.sampled_memory(case, arch, nodes, edges, reference=reference)
        itemsize = weights_dtype(case).itemsize
        # Raw edges, and while they are sorted (by the generator, or for a CSR) keys, values, order and work space.
        sorting = 6 * 16 * edges
        # What stays: raw edges, and what was prepared from them (in the zoo, with narrow indices, with and without
        # self-loops).
        prepared = {"upstream": 0, "upstream-tuned": 24, "zoo": 28 if arch.self_loops else 12}[case.impl]
        graph = (16 + prepared) * arch.edges(nodes, edges)
        dense = gnn_arms.dense_bytes(arch, nodes, itemsize)
        tuned_csr = case.impl == "upstream-tuned" and gnn_arms.tuned_layout(case, arch.kind) == "csr"
        if case.workload == "train":
            messages = gnn_train.memory(case, arch, nodes, edges, reference=reference)
        elif tuned_csr or (case.impl == "zoo" and case.device == "cuda"):
            messages = 0  # nothing is as long as the edges and as wide as the features
        elif case.strategy == "eager":
            # The zoo sums half precision in float32.
            held = max(itemsize, 4) if case.impl == "zoo" else itemsize
            messages = gnn_arms.message_bytes(arch, nodes, edges, held)
        else:
            # Inductor fuses gather, weight and scatter; GAT's scores and their sums stay, a few values a head and edge.
            messages = arch.edges(nodes, edges) * 6 * arch.heads * itemsize
        return graph + dense + max(sorting, dense + messages)

    def build(self, case: Case, *, data_root: str | None, seed: int) -> Prepared:
        """Build model and inputs on the device."""
        device, held = torch.device(case.device), weights_dtype(case)
        graph_name, features = case.input.removesuffix(SAMPLED), gnn_arms.width_of(case.model)

        def load() -> Graph:
            return graphs.load(graph_name, data_root=data_root, features=features, seed=seed, device=device)

        graph = load()
        arch = architecture(case.model, graph_name, features=graph.x.size(1), classes=graph.classes)
        shipped = gnn_arms.build(arch, seed=seed).to(device, held)
        x = graph.x.to(held)
        preparation: dict[str, float] = {}
        with timed("", preparation, case.device):
            model, inputs, what = _implementation(case, arch, shipped, graph)

        def compile_convs(model: torch.nn.Module, **options: Any) -> None:
            if case.impl == "upstream" and not case.dynamic:
                options["dynamic"] = None  # as its users leave it
            gnn_arms.compile_convs(model, **options)

        def reference() -> torch.Tensor:
            # Made anew, so that an arm holds nothing that it does not run on: its memory is measured.
            model = gnn_arms.build(arch, seed=seed).to(device, held)
            return gnn_arms.reference_output(arch, model, x, load().edge_index)

        prepared = Prepared(
            model=model.eval(),
            inputs={"x": x, **inputs},
            static=tuple(inputs),
            compile_regions=None if case.impl == "zoo" else compile_convs,
            reference=reference,
            bytes=gnn_arms.bytes_moved(arch, graph.nodes, graph.edges, dtype_of(case).itemsize),
            bytes_formula=gnn_arms.BYTES_FORMULA,
            flops=gnn_arms.flops(arch, graph.nodes, graph.edges),
            data=graph.data,
            preparation_seconds={} if what is None else {what: preparation[""]},
            sizes={
                "nodes": graph.nodes,
                "edges": graph.edges,
                "max_degree": graph.max_degree,
                "features": arch.features,
                "classes": graph.classes,
                "layers": arch.layers,
                "width": arch.hidden,
                "heads": arch.heads,
                "parameters": gnn_arms.parameters(arch),
            },
        )
        if case.input.endswith(SAMPLED):
            return gnn_train.for_sampled_training(case, prepared, arch, graph, seed=seed)
        if case.workload == "train":
            return gnn_train.for_training(case, prepared, arch, graph, seed=seed)
        return prepared


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
        layout = gnn_arms.tuned_layout(case, arch.kind)
        autocast = autocast_of(dtype_of(case)) if case.workload == "train" else None
        model, inputs = gnn_arms.tune(arch, shipped, graph.edge_index, graph.nodes, layout, autocast=autocast)
        return model, inputs, "CSR adjacency" if layout == "csr" else "sorted edges"
    ours: Any = zoo.from_upstream(shipped)
    if sampled:
        return ours, {}, None
    return ours, {"edge_index": ours.prepare(graph.edge_index, num_nodes=graph.nodes)}, "CSRGraph"


WORKLOAD = GnnWorkload()
