"""Bad input is refused before anything runs, with what was wrong and what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import zoo
from tests.test_bad_inputs import EDGES, GRAPHS, X
from zoo.gnn import CSRGraph, GATConv, GCNConv, SAGEConv
from zoo.gnn.model import build
from zoo.ops.csr import mean_neighbours

BAD_WEIGHTS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"edge_weight": torch.rand(4)}, ValueError, r"edge_weight has shape \[4\], expected \[3\], one weight per edge"),
    ({"edge_weight": torch.arange(3)}, TypeError, r"edge_weight is torch\.int64, expected floating-point numbers"),
    ({"edge_weight": torch.rand(3, device="meta")}, ValueError, "edge_weight is on meta and the edges on cpu"),
]


@pytest.mark.parametrize(("change", "kind", "message"), BAD_WEIGHTS, ids=[message for _, _, message in BAD_WEIGHTS])
def test_edge_weights(change: dict[str, Any], kind: type[Exception], message: str) -> None:
    model = zoo.create("gcn-debug")
    for call in (model, GCNConv(12, 3)):
        with pytest.raises(kind, match=message):
            call(X, EDGES, **change)
    with pytest.raises(kind, match=message):
        model.prepare(EDGES, **change)
    with pytest.raises(kind, match=message):
        CSRGraph.from_edge_index(EDGES).with_weights(**change)


@pytest.mark.parametrize("conv", [GCNConv(12, 3), GATConv(12, 3), SAGEConv(12, 3)], ids=["gcn", "gat", "sage"])
@pytest.mark.parametrize(("change", "kind", "message"), GRAPHS, ids=[message for _, _, message in GRAPHS])
def test_convolutions(conv: nn.Module, change: dict[str, Any], kind: type[Exception], message: str) -> None:
    given = {"x": X, "edge_index": EDGES, **change}
    with pytest.raises(kind, match=message):
        conv(given["x"], given["edge_index"])


def calls() -> dict[str, tuple[Callable[[], object], str]]:
    gcn, gat, sage = (zoo.create(f"{name}-debug") for name in ("gcn", "gat", "graphsage"))
    weights = torch.rand(3)
    graph = CSRGraph.from_edge_index(EDGES)
    weighted = CSRGraph.from_edge_index(EDGES, weights)
    rectangular = CSRGraph.from_edge_index(EDGES, num_nodes=(5, 6))
    return {
        "weights for gat": (lambda: gat(X, EDGES, weights), "does not use edge weights"),
        "weights for sage": (lambda: sage(X, EDGES, weights), "does not use edge weights"),
        "prepared with weights for sage": (lambda: sage.prepare(EDGES, weights), "GraphSAGE does not use edge weights"),
        "weighted graph for gat": (lambda: gat(X, weighted), "carries edge weights, which this layer does not use"),
        "weights twice": (lambda: gcn(X, graph, weights), r"with a CSRGraph.*with_weights"),
        "fewer nodes in the graph": (lambda: gcn(torch.randn(6, 12), graph), r"x has 6 rows.*5 nodes.*num_nodes=6"),
        "prepared for fewer nodes": (lambda: gat(X, gat.prepare(EDGES, num_nodes=7)), "x has 5 rows.*7 nodes"),
        "prepared with another number of nodes": (
            lambda: gcn.prepare(graph, num_nodes=6),
            "num_nodes is 6, but the graph has 5; leave it out",
        ),
        "rectangular model": (lambda: sage(X, rectangular), "5 sources and 6 destinations.*SAGEConv on their own"),
        "rectangular normalisation": (lambda: rectangular.gcn_normalized(), "normalisation needs a square graph"),
        "negative num_nodes": (lambda: CSRGraph.from_edge_index(EDGES, num_nodes=-1), "num_nodes is -1"),
        "num_nodes of three": (lambda: CSRGraph.from_edge_index(EDGES, num_nodes=(5, 5, 5)), r"\(5, 5, 5\)"),
        "sage destinations": (
            lambda: SAGEConv((12, 4), 3)((X, torch.randn(5, 4)), rectangular),
            "x has 5 rows, the graph 6 nodes",
        ),
        "gat own width": (lambda: GATConv((12, 4), 3)((X, X), graph), r"shape \[5, 12\], expected \[N, 4\]"),
        "aggregation": (lambda: SAGEConv(3, 3, aggr="median"), "aggr is 'median', expected"),
        "heads": (lambda: GATConv(3, 3, heads=0), "heads is 0, expected a positive integer"),
        "dropout": (lambda: GATConv(3, 3, dropout=2.0), "dropout is 2.0, expected a probability"),
        "self-loops alone": (lambda: GCNConv(3, 3, add_self_loops=True, normalize=False), "normalize False"),
        **{
            f"weights beside tensors, {type(conv).__name__}": (
                lambda conv=conv: conv(X, graph.tensors, weights),
                r"edge_weight was given with prepared tensors.*with_weights",
            )
            for conv in (GCNConv(12, 3), SAGEConv(12, 3, aggr="sum"), GATConv(12, 3))
        },
        "mean without degrees": (lambda: mean_neighbours(X, graph.tensors), "needs the graph's inverse degrees"),
        "no nodes to draw from": (lambda: zoo.example_inputs(gcn, num_nodes=0), "num_nodes is 0 and num_edges 256"),
    }


@pytest.mark.parametrize("name", calls())
def test_misuse(name: str) -> None:
    call, message = calls()[name]
    with pytest.raises(ValueError, match=message):
        call()


def test_foreign_objects() -> None:
    conv, rectangular = SAGEConv((12, 4), 3, root_weight=False), torch.tensor([[0, 4, 2], [0, 1, 2]])
    with pytest.raises(TypeError, match=r"of the destinations is a NoneType.*torch.empty\(D, 0\)"):
        conv((X, None), rectangular)  # type: ignore[arg-type]
    assert conv((X, torch.empty(3, 0)), rectangular).shape == (3, 3)
    with pytest.raises(TypeError, match="config is a dict"):
        build({})  # type: ignore[arg-type]


def test_autocast_takes_either_dtype_and_refuses_integers() -> None:
    model = zoo.create("gcn-debug")
    with torch.autocast("cpu", torch.bfloat16):
        assert model(X.bfloat16(), EDGES).shape == (5, 5)
        with pytest.raises(TypeError, match=r"x is torch\.int64"):
            model(X.long(), EDGES)


@pytest.mark.parametrize("name", ["gcn-debug", "gat-debug", "graphsage-debug"])
def test_autocast_does_not_take_double_beside_single(name: str) -> None:
    # Which it does not cast: the product fails long after.
    with torch.autocast("cpu", torch.bfloat16):
        assert zoo.create(name, dtype=torch.float64)(X.double(), EDGES).dtype == torch.float64
        with pytest.raises(TypeError, match=r"x is torch\.float64 and the weights torch\.float32; use x\.to\(torch"):
            zoo.create(name)(X.double(), EDGES)
        with pytest.raises(TypeError, match=r"x is torch\.float32 and the weights torch\.float64; use x\.to\(torch"):
            zoo.create(name, dtype=torch.float64)(X, EDGES)
