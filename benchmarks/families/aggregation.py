"""The sum over neighbours alone, written in several ways, each a model of this family: what GCN and GraphSAGE stand on.

Shapes: N nodes, E edges sorted by destination, C channels.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from benchmarks.families import gnn_arms, graphs
from benchmarks.families.base import Prepared, Workload, dtype_of, timed
from benchmarks.plan import Case
from zoo.engine.region import Region
from zoo.gnn import CSRGraph
from zoo.ops.csr import GraphTensors
from zoo.ops.csr_sum import sum_neighbours

BYTES_FORMULA = (
    "For every edge a row is gathered, without reuse, and a 4-byte source index read; the edge offsets of every node "
    "are read (4 bytes each) and the sums written."
)
# Channels of the float64 reference that are summed at once: its messages are as long as the edges.
_CHANNELS_AT_ONCE = 16


@dataclass(frozen=True, kw_only=True)
class Graph:
    """A random graph.

    Args:
        nodes: N.
        edges: E.
        hub: Neighbours that one node has in the end, each way, besides those that it draws like all others.
    """

    nodes: int
    edges: int
    hub: int = 0

    def edge_index(self, seed: int) -> Tensor:
        """[2, E] int64 on the CPU, in no order, so that it is the same on every device."""
        ends = torch.randint(self.nodes, (2, self.edges), generator=torch.Generator().manual_seed(seed))
        ends[1, : self.hub] = 7
        ends[0, self.hub : 2 * self.hub] = 9
        return ends


_NODES, _HUB = graphs.SPECS["arxiv"].nodes, 200_000
# Nodes of a hub's graph have about five neighbours; its level twin has as many edges, none of them in a hub.
_WITH_HUB = 5 * _NODES + _HUB
GRAPHS = {
    "uniform": Graph(nodes=_NODES, edges=graphs.SPECS["arxiv"].edges),
    "hub": Graph(nodes=_NODES, edges=_WITH_HUB, hub=_HUB),
    "level": Graph(nodes=_NODES, edges=_WITH_HUB),
    "small": Graph(nodes=300, edges=5 * 300 + 400, hub=400),
}
WIDTHS = (40, 64, 256)
SMALL, _SMALL_WIDTH = "small", 16
_INPUT = re.compile(r"(?P<graph>[a-z]+)(?:-(?P<width>\d+))?")


def task_of(name: str) -> tuple[Graph, int]:
    """Graph and C of an input: ``hub-64``."""
    found = _INPUT.fullmatch(name)
    assert found is not None
    return GRAPHS[found["graph"]], int(found["width"] or _SMALL_WIDTH)


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to write the sum.

    Args:
        ready: What it needs of the graph, made once from its sorted edges; called with the dtype of the features too.
        add: Called as ``add(x, ready)`` with x [N, C]; returns [N, C].
        messages: Whether rows are gathered into a tensor [E, C] before they are added.
    """

    ready: Callable[[GraphTensors, torch.dtype], Any]
    add: Callable[[Tensor, Any], Tensor]
    messages: bool = False


def _adjacency(graph: GraphTensors, dtype: torch.dtype) -> Tensor:
    """[N, N] of ones: a product with it is the sum."""
    edges = torch.stack([graph.source, graph.destination])
    return gnn_arms.csr(edges, None, graph.rowptr.numel() - 1, dtype)


def _product(x: Tensor, adjacency: Tensor) -> Tensor:
    return adjacency @ x


def _segments(x: Tensor, ready: tuple[Tensor, Tensor]) -> Tensor:
    source, offsets = ready
    return torch.segment_reduce(x.index_select(0, source), "sum", offsets=offsets)


def _index_add(x: Tensor, ready: tuple[Tensor, Tensor]) -> Tensor:
    # Sorted edges serve it as well: neighbouring additions go to one row.
    source, destination = ready
    return torch.zeros_like(x).index_add_(0, destination, x.index_select(0, source))


WAYS = {
    "operator": Way(ready=lambda graph, dtype: graph, add=sum_neighbours),
    "sparse-csr": Way(ready=_adjacency, add=_product),
    "segment-reduce": Way(ready=lambda graph, dtype: (graph.source, graph.rowptr), add=_segments, messages=True),
    "index-add": Way(ready=lambda graph, dtype: (graph.source, graph.destination), add=_index_add, messages=True),
}


class Neighbours(nn.Module):
    """The sum."""

    def __init__(self, way: Way) -> None:
        super().__init__()
        self.add = way.add

    def forward(self, x: Tensor, ready: Any) -> Tensor:
        """Features to sums, both [N, C]."""
        return self.add(x, ready)


class Aggregation(nn.Module):
    """A sum with the features and the graph that it is about."""

    regions: ClassVar[tuple[Region, ...]] = (Region(Neighbours, graphs=1, why="one sum"),)
    x: Tensor

    def __init__(self, way: Way, x: Tensor, ready: Any) -> None:
        super().__init__()
        self.neighbours, self.ready = Neighbours(way), ready
        # Not an input, which the outer CUDA graph would copy: next to a sum of a few neighbours that is much.
        self.register_buffer("x", x, persistent=False)

    def forward(self) -> Tensor:
        """Sums [N, C]."""
        return self.neighbours(self.x, self.ready)


class AggregationWorkload(Workload):
    """The sum of every node's neighbours, on random features; a call is one sum over the whole graph.

    ``uniform-C`` has ogbn-arxiv's nodes and edges. In ``hub-C`` one node has 200,000 neighbours and the others about
    five; ``level-C`` has as many edges without a hub. Edges are sorted by destination for every way, and what else it
    needs of the graph is made before, and is not in the time. A mean is the same sum times a factor for each node.
    """

    family = "aggregation"
    models = tuple(WAYS)
    inputs = (*(f"{graph}-{width}" for graph in GRAPHS if graph != SMALL for width in WIDTHS), SMALL)
    gpu_dtypes = ("float32", "bfloat16")
    cpu_race = ("operator", SMALL)
    gpu_races = tuple((way, f"{graph}-64") for graph in GRAPHS if graph != SMALL for way in WAYS)

    def cannot(self, case: Case) -> str | None:
        if case.impl != "zoo":
            return "each way is a model of this family, and has no other implementation"
        if case.strategy in ("full", "hierarchical"):
            return f"nothing stands around a sum that {case.strategy} could compile with it"
        if case.model == "sparse-csr" and case.strategy != "eager":
            return "torch.compile takes no sparse tensors"
        if case.model == "sparse-csr" and case.device == "cpu" and case.dtype != "float32":
            return f"a CPU has no sparse product in {case.dtype}"
        return None

    def estimate(self, case: Case, *, reference: bool) -> int:
        """Estimated peak device memory of the case in bytes, the float64 reference included."""
        graph, width = task_of(case.input)
        itemsize = dtype_of(case).itemsize
        values = graph.nodes * width
        # The sort holds edges, keys, order and work space; the reference edges of 16 bytes and its messages.
        sorting, exact = 6 * 16 * graph.edges, (16 + 2 * 8 * _CHANNELS_AT_ONCE) * graph.edges + 3 * 8 * values
        messages = graph.edges * width * itemsize if WAYS[case.model].messages else 0
        prepared = (12 + itemsize) * graph.edges + 8 * graph.nodes
        return 2 * values * itemsize + prepared + max(sorting, exact, messages)

    def build(self, case: Case, *, data_root: str | None, seed: int) -> Prepared:
        device, dtype, way = torch.device(case.device), dtype_of(case), WAYS[case.model]
        graph, width = task_of(case.input)
        edges = graph.edge_index(seed).to(device)
        drawn = torch.randn(graph.nodes, width, generator=torch.Generator().manual_seed(seed))
        x = drawn.to(device, dtype)

        preparation: dict[str, float] = {}
        made = "CSR adjacency" if case.model == "sparse-csr" else "sorted edges"
        # With gradients the edges would be sorted by source as well.
        with timed(made, preparation, device.type), torch.no_grad():
            tensors = CSRGraph.from_edge_index(edges, None, graph.nodes).tensors
            ready = way.ready(tensors, dtype)

        return Prepared(
            model=Aggregation(way, x, ready).eval(),
            inputs={},
            reference=lambda: _exact(x, graph.edge_index(seed).to(device)),
            bytes=(graph.edges + graph.nodes) * width * dtype.itemsize + 4 * graph.edges + 4 * (graph.nodes + 1),
            bytes_formula=BYTES_FORMULA,
            # As the gnn family counts a sum over edges.
            flops=2 * graph.edges * width,
            data="generated, one hub" if graph.hub else "generated, uniform",
            preparation_seconds=preparation,
            sizes={
                "nodes": graph.nodes,
                "edges": graph.edges,
                "max_degree": int(tensors.rowptr.diff().max()),
                "width": width,
            },
        )


def _exact(x: Tensor, edge_index: Tensor) -> Tensor:
    """The sums in float64, from edges in any order: [N, C]."""
    source, destination = edge_index
    parts = []
    for part in x.split(_CHANNELS_AT_ONCE, dim=1):
        messages = part.double().index_select(0, source)
        parts.append(torch.zeros_like(part, dtype=torch.float64).index_add_(0, destination, messages))
    return torch.cat(parts, dim=1)


WORKLOAD = AggregationWorkload()
