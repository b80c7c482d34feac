"""Graph models: one graph at any depth, no recompile for another graph, and bad input named before anything runs."""

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

import zoo
from tests.test_bad_inputs import EDGES, GRAPHS, X
from zoo.gnn import CSRGraph, GATConv, GCNConv, SAGEConv
from zoo.gnn import graph as graphs
from zoo.gnn.model import build
from zoo.ops.csr import mean_neighbours

MODELS = ["gcn-debug", "gat-debug", "graphsage-debug"]
# The first layer, the last and all between, at any depth; with a jumping-knowledge head no layer is a last one.
VARIANTS: list[tuple[dict[str, Any], int]] = [
    ({}, 3),
    ({"num_layers": 1}, 1),
    ({"num_layers": 5, "in_channels": 12, "out_channels": 16}, 3),
    ({"num_layers": 4, "in_channels": 12, "jk": "cat", "norm": "batch", "dropout": 0.3}, 3),
    ({"num_layers": 3, "in_channels": 12, "jk": "max", "norm": "layer"}, 3),
]


def run(model: torch.nn.Module, inputs: dict[str, Any]) -> Tensor:
    out = model(**inputs)
    if out.requires_grad:
        out.sum().backward()
    return out.detach()


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("variant", "graphs"), VARIANTS, ids=str)
def test_one_graph_at_any_depth(name: str, variant: dict[str, Any], graphs: int) -> None:
    model = zoo.create(name, **variant)
    inputs = zoo.example_inputs(model)
    # test_contract.py has other modes.
    for context, train in ((torch.inference_mode(), False), (torch.enable_grad(), True)):
        torch.compiler.reset()
        zoo.compile_regions(zoo.uncompile(model.train(train)), backend="aot_eager")
        with context, zoo.enforce_budget(model):
            run(model, inputs)
            run(model, {**inputs, "edge_index": model.prepare(inputs["edge_index"], num_nodes=64)})
    assert zoo.find_regions(model, inputs=inputs).graphs_needed == graphs


def test_learned_edge_weights_compile_without_a_break() -> None:
    model = zoo.create("gcn-debug")
    x, edge_index = zoo.example_inputs(model).values()
    weight = (torch.rand(256) + 0.1).requires_grad_()
    graph = model.prepare(edge_index, weight, num_nodes=64)
    compiled = torch.compile(model, fullgraph=True, dynamic=False, backend="aot_eager")
    (expected,) = torch.autograd.grad(model(x, edge_index, weight).square().sum(), weight)
    (found,) = torch.autograd.grad(compiled(x, graph).square().sum(), weight)
    torch.testing.assert_close(found, expected)


def test_raw_edges_break_a_full_compile_once_and_stay_right() -> None:
    model = zoo.create("gcn-debug")
    x, edge_index = zoo.example_inputs(model).values()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, dynamic=False, backend=counter)
    counters.clear()
    for shift in range(3):
        edges = (edge_index + shift) % 64
        torch.testing.assert_close(compiled(x, edges), model(x, edges))
    # Preparation stays eager; all layers together are one graph.
    assert counter.frame_count == 1
    assert sum(counters["graph_break"].values()) > 0


@pytest.mark.parametrize("name", MODELS)
def test_outer_cuda_graph_refuses_raw_edges_that_it_would_copy_in(name: str) -> None:
    model = zoo.create(name)
    x, edge_index = zoo.example_inputs(model).values()
    with torch.no_grad():
        with pytest.raises(ValueError, match=r"bake in .*model\.prepare\(edge_index, num_nodes=N\)"):
            zoo.cuda_graph(model, args=(x, edge_index))
        zoo.cuda_graph(model, args=(x, edge_index), static=(1,))(x, edge_index)


def test_a_captured_step_keeps_what_was_prepared_from_raw_edges(monkeypatch: pytest.MonkeyPatch) -> None:
    model = zoo.create("graphsage-debug")
    x, edge_index = zoo.example_inputs(model).values()
    model(x, edge_index)
    # Stands in for a capture, which the CPU does not have.
    monkeypatch.setattr(graphs, "is_captured", lambda device: True)
    model(x, edge_index)
    (entry,) = model._memory._entries.values()
    pointers = weakref.ref(entry.unweighted.tensors.rowptr)
    monkeypatch.undo()
    del entry
    for shift in range(8):
        model(x, (edge_index + shift) % 64)
    edge_index.copy_(edge_index.flip(0))
    model(x, edge_index)
    gc.collect()
    assert pointers() is not None, "a replay would read freed memory"


def test_edge_weights_that_a_captured_step_copies_in_are_never_remembered() -> None:
    model = zoo.create("gcn-debug")
    x, edge_index = zoo.example_inputs(model).values()
    first, second = torch.rand(256), torch.rand(256)
    with torch.no_grad():
        step = zoo.cuda_graph(model, args=(x, edge_index, first), static=(1,))
        # From a warm-up to the capture they do not change: what is remembered would not be captured.
        (entry,) = model._memory._entries.values()
        assert entry.weighted is None
        for weight in (second, first):
            torch.testing.assert_close(step(x, edge_index, weight), model(x, edge_index, weight))


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_symbolic_sizes_take_graphs_of_all_sizes(name: str) -> None:
    model = zoo.create(name)
    counters.clear()
    zoo.compile_regions(model, backend="aot_eager", dynamic=True)
    eager = copy.deepcopy(model)
    for nodes in (64, 50, 33):
        x, edge_index = torch.randn(nodes, model.config.in_channels), torch.randint(nodes, (2, 5 * nodes))
        torch.testing.assert_close(model(x, edge_index), eager(x, edge_index))
    assert counters["stats"]["unique_graphs"] == 3


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
        conv((X, None), rectangular)
    assert conv((X, torch.empty(3, 0)), rectangular).shape == (3, 3)
    with pytest.raises(TypeError, match="config is a dict"):
        build({})


def test_autocast_takes_either_dtype_and_refuses_integers() -> None:
    model = zoo.create("gcn-debug")
    with torch.autocast("cpu", torch.bfloat16):
        assert model(X.bfloat16(), EDGES).shape == (5, 5)
        with pytest.raises(TypeError, match=r"x is torch\.int64"):
            model(X.long(), EDGES)


@pytest.mark.parametrize("aggr", ["mean", "max"])
def test_autocast_takes_wider_features_than_weights(aggr: str) -> None:
    conv = SAGEConv(12, 3, aggr=aggr, project=True).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        out = conv(X, EDGES)
    torch.testing.assert_close(out.float(), conv.float()(X, EDGES), rtol=0.05, atol=0.05)
