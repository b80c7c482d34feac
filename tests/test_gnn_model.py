"""Graph models: one graph at any depth; CSRGraph, aggregations and how raw edges are remembered; bad input named."""

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

import zoo
from tests.gnn_reference import GRAPHS, attend, edge_attention, edge_max, edge_sum
from tests.test_bad_inputs import EDGES, X
from tests.test_bad_inputs import GRAPHS as BAD_GRAPHS
from zoo.engine.graphed_step import synchronising_raises
from zoo.gnn import CSRGraph, GATConv, GCNConv, SAGEConv
from zoo.gnn import graph as graphs
from zoo.gnn.graph import Recipe
from zoo.gnn.model import build
from zoo.ops.csr import max_neighbours, mean_neighbours, sum_neighbours

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
    assert zoo.find_regions(model, kwargs=inputs).graphs_needed == graphs


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
    pointers = weakref.ref(entry.graph.tensors.rowptr)
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
@pytest.mark.parametrize(("change", "kind", "message"), BAD_GRAPHS, ids=[message for *_, message in BAD_GRAPHS])
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
        "prepared with weights for sage": (
            lambda: sage.prepare(EDGES, weights),
            "carries edge weights, which this layer does not use",
        ),
        "weighted graph for gat": (lambda: gat(X, weighted), "carries edge weights, which this layer does not use"),
        "weights twice": (lambda: gcn(X, graph, weights), r"with a CSRGraph.*with_weights"),
        "fewer nodes in the graph": (lambda: gcn(torch.randn(6, 12), graph), r"x has 6 rows.*5 nodes.*num_nodes=6"),
        "prepared for fewer nodes": (lambda: gat(X, gat.prepare(EDGES, num_nodes=7)), "x has 5 rows.*7 nodes"),
        "prepared with another number of nodes": (
            lambda: gcn.prepare(graph, num_nodes=6),
            "num_nodes is 6, but the graph has 5; leave it out",
        ),
        "rectangular model": (lambda: sage(X, rectangular), "the graph is rectangular.*convolutions on their own"),
        "rectangular normalisation": (lambda: GCNConv(12, 3)(X, rectangular), "normalisation needs a square graph"),
        "negative num_nodes": (lambda: CSRGraph.from_edge_index(EDGES, num_nodes=-1), "num_nodes is -1"),
        "num_nodes of three": (lambda: CSRGraph.from_edge_index(EDGES, num_nodes=(5, 5, 5)), r"\(5, 5, 5\)"),
        "sage destinations": (
            lambda: SAGEConv((12, 4), 3)((X, torch.randn(5, 4)), rectangular),
            "x has 5 rows, the graph 6 nodes",
        ),
        "gat own width": (lambda: GATConv((12, 4), 3)((X, X), graph), r"shape \[5, 12\], expected \[N, 4\]"),
        **{
            f"more destinations, {type(conv).__name__}": (
                lambda conv=conv: conv(X, rectangular),
                r"the graph has 6 destinations and x 5 rows, .* pass x=\(sources, destinations\)",
            )
            for conv in (SAGEConv(12, 3), GATConv(12, 3))
        },
        "a pair of widths and one of features": (
            lambda: SAGEConv((12, 4), 3)(X, graph),
            r"shape \[5, 12\], expected \[N, 4\]",
        ),
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
        "no nodes to draw from": (
            lambda: zoo.example_inputs(gcn, num_nodes=0),
            "num_nodes is 0, expected a positive integer",
        ),
    }


@pytest.mark.parametrize("name", calls())
def test_misuse(name: str) -> None:
    call, message = calls()[name]
    with pytest.raises(ValueError, match=message):
        call()


def test_foreign_objects() -> None:
    rectangular = torch.tensor([[0, 4, 2], [0, 1, 2]])
    for conv, x, takes in (GCNConv(12, 3), (X, X), "sources alone"), (SAGEConv(12, 3), (X,) * 3, "two tensors"):
        with pytest.raises(TypeError, match=f"x is a tuple of {len(x)}, expected .*{takes}"):
            conv(x, rectangular)
    conv = SAGEConv((12, 4), 3, root_weight=False)
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


every_graph = pytest.mark.parametrize("name", GRAPHS)


def edges(name: str) -> tuple[Tensor, tuple[int, int]]:
    rows, sizes = GRAPHS[name]
    return torch.tensor(rows, dtype=torch.int64).view(2, -1), sizes


@every_graph
def test_rows_are_sorted_and_stable(name: str) -> None:
    edge_index, sizes = edges(name)
    weight = torch.arange(edge_index.shape[1], dtype=torch.float32)
    graph = CSRGraph.from_edge_index(edge_index, weight, sizes)
    tensors = graph.tensors
    order = sorted(range(edge_index.shape[1]), key=lambda e: int(edge_index[1, e]))
    assert tensors.source.tolist() == [int(edge_index[0, e]) for e in order]
    assert tensors.weight is not None and tensors.weight.tolist() == [float(e) for e in order]
    assert tensors.rowptr.tolist() == [int((edge_index[1] < d).sum()) for d in range(sizes[1] + 1)]
    assert (graph.num_sources, graph.num_destinations, graph.num_edges) == (*sizes, edge_index.shape[1])
    transpose = tensors.transpose
    assert tensors.destination[transpose.permutation].equal(transpose.destination)
    assert tensors.source[transpose.permutation].equal(torch.sort(edge_index[0]).values)
    assert transpose.colptr.tolist() == [int((edge_index[0] < s).sum()) for s in range(sizes[0] + 1)]


@every_graph
def test_aggregations_are_sums_over_edges_and_attention_does_not_overflow(name: str) -> None:
    edge_index, sizes = edges(name)
    weight, x = torch.rand(edge_index.shape[1], dtype=torch.float64), torch.randn(sizes[0], 3, dtype=torch.float64)
    weighted = CSRGraph.from_edge_index(edge_index, weight, sizes).tensors
    plain = CSRGraph.from_edge_index(edge_index, None, sizes).prepared(Recipe(mean=True), torch.float64).tensors
    given = x, *edge_index, sizes[1]
    scale = 1 / edge_sum(torch.ones_like(x), *edge_index, sizes[1]).clamp(min=1)[:, 0] if sizes[0] else None
    torch.testing.assert_close(sum_neighbours(x, weighted), edge_sum(*given, weight))
    torch.testing.assert_close(sum_neighbours(x, plain), edge_sum(*given))
    torch.testing.assert_close(mean_neighbours(x, plain), edge_sum(*given, row_scale=scale))
    torch.testing.assert_close(max_neighbours(x, plain), edge_max(*given))
    scores = [torch.randn(size, 2) * 300 for size in sizes]
    x = torch.randn(sizes[0], 2, 3)
    expected = edge_attention(x, *scores, 0.2, *edge_index, sizes[1])
    torch.testing.assert_close(attend(x, *scores, plain, 0.2), expected, atol=1e-4, rtol=1e-4)


def test_gradient_of_edge_weights() -> None:
    edge_index, sizes = edges("square")
    weight = (torch.rand(edge_index.shape[1], dtype=torch.float64) + 0.5).requires_grad_()
    x = torch.randn(sizes[0], 3, dtype=torch.float64)
    conv = GCNConv(3, 4, improved=True).double()
    assert torch.autograd.gradcheck(lambda w: conv(x, edge_index, w), (weight,))
    # A graph that holds weights with gradients serves many backward passes.
    graph = CSRGraph.from_edge_index(edge_index, weight, sizes)
    for _ in range(2):
        conv(x, graph).sum().backward()
    with torch.no_grad():
        before = conv(x, graph)
        weight[0] *= 3
        assert not torch.equal(conv(x, graph), before), "an optimiser step on the weights was not seen"


def test_half_precision_sums_keep_their_digits() -> None:
    # 4096 ones: a running bfloat16 sum stops at 256.
    edge_index = torch.stack([torch.arange(4096), torch.zeros(4096, dtype=torch.int64)])
    x = torch.ones(4096, 2, dtype=torch.bfloat16)
    graph = CSRGraph.from_edge_index(edge_index)
    out = sum_neighbours(x, graph.tensors)
    assert out.dtype == torch.bfloat16 and out[0].tolist() == [4096.0, 4096.0]
    mean = mean_neighbours(x, graph.prepared(Recipe(mean=True)).tensors)
    assert mean[0].tolist() == [1.0, 1.0]
    # Nor are weights rounded to the dtype of the features.
    weighted = CSRGraph.from_edge_index(edge_index[:, :2], torch.tensor([1 + 2**-9, -1.0]), 4096)
    assert sum_neighbours(x, weighted.tensors)[0].tolist() == [2**-9, 2**-9]


def test_inference_mode_leaves_nothing_behind_that_training_cannot_use() -> None:
    model = zoo.create("gcn-debug")
    inputs = zoo.example_inputs(model)
    weight = torch.rand(256)
    with torch.inference_mode():
        first = model(**inputs, edge_weight=weight)
        made_inside = zoo.example_inputs(model)
        prepared = model.prepare(made_inside["edge_index"], torch.rand(256), num_nodes=64)
        model(made_inside["x"], made_inside["edge_index"])
        assert len(model._memory._entries) == 2
    out = model(**inputs, edge_weight=weight)
    torch.testing.assert_close(out, first)
    (out.sum() + model(inputs["x"], prepared).sum()).backward()


def test_in_place_changes_are_seen() -> None:
    model = zoo.create("gcn-debug")
    x, edge_index = zoo.example_inputs(model).values()
    weight = torch.rand(256)

    def fresh() -> Tensor:
        return copy.deepcopy(model)(x, edge_index.clone(), weight.clone())

    for change in (
        lambda: edge_index[1].copy_(edge_index[1].flip(0)),
        lambda: edge_index.t()[0].fill_(3),
        lambda: weight.mul_(torch.linspace(1, 2, 256)),
        lambda: setattr(edge_index, "data", edge_index.flip(1)),
    ):
        before = model(x, edge_index, weight)
        change()
        after = model(x, edge_index, weight)
        assert not torch.allclose(before, after)
        torch.testing.assert_close(after, fresh(), rtol=0, atol=0)


def test_inference_tensors_are_never_remembered_across_a_change() -> None:
    model = zoo.create("graphsage-debug")
    with torch.inference_mode():
        x, edge_index = zoo.example_inputs(model).values()
        before = model(x, edge_index)
        edge_index.copy_(edge_index.flip(0))
        assert not torch.equal(model(x, edge_index), before)


def test_a_moved_or_copied_graph_gives_the_same_tensors_for_every_recipe() -> None:
    edge_index = torch.tensor([[3, 0, 1, 2, 3, 1], [0, 1, 1, 1, 0, 0]])
    graph, weight = CSRGraph.from_edge_index(edge_index, None, 5), torch.rand(6)
    looped = graph.prepared(Recipe(self_loops=True, normalize=True))
    assert (looped.num_edges, graph.num_edges, graph.device) == (10, 6, edge_index.device)
    fresh = CSRGraph.from_edge_index(edge_index, None, 5)
    for again in (graph.to("cpu"), copy.deepcopy(graph), looped):
        for one, other in ((again, fresh), (again.with_weights(weight), fresh.with_weights(weight))):
            for recipe in (Recipe(), Recipe(self_loops=True, normalize=True), Recipe(mean=True)):
                for a, b in zip(one.prepared(recipe).tensors, other.prepared(recipe).tensors, strict=True):
                    assert torch.equal(a, b) if isinstance(b, Tensor) else type(a) is type(b)


def test_convolutions_take_rectangular_graphs() -> None:
    edge_index = torch.tensor([[4, 0, 3, 2], [0, 1, 1, 0]])
    square, rectangular = (CSRGraph.from_edge_index(edge_index, None, sizes) for sizes in ((5, 5), (5, 2)))
    for conv in (
        GCNConv(12, 3, normalize=False), SAGEConv(12, 3, aggr="max"), SAGEConv(3, 12, aggr="sum"), SAGEConv(12, 3),
        GATConv(12, 3, add_self_loops=False, residual=True), SAGEConv(12, 3, project=True),
    ):  # fmt: skip
        x = torch.randn(5, 12 if getattr(conv, "lin_l", None) is None else conv.lin_l.in_features)
        torch.testing.assert_close(conv(x, rectangular), conv(x, square)[:2])
    more = CSRGraph.from_edge_index(torch.tensor([[4, 0], [5, 1]]), None, (5, 6))
    assert GCNConv(12, 3, normalize=False)(torch.randn(5, 12), more).shape == (6, 3)


def test_prepared_once_and_let_go_with_the_edges(monkeypatch: pytest.MonkeyPatch) -> None:
    built = []
    original = CSRGraph.from_edge_index.__func__
    monkeypatch.setattr(CSRGraph, "from_edge_index", classmethod(lambda *a, **k: built.append(1) or original(*a, **k)))
    model = zoo.create("gcn-debug")
    x, edge_index = zoo.example_inputs(model).values()
    learned = torch.rand(256, requires_grad=True)
    for weight in (None, torch.rand(256), learned, learned * 2, None):
        for _ in range(2):
            model(x, edge_index, weight)
    assert len(built) == 1, "new weights alone must not sort the graph again"
    others = [edge_index.clone() for _ in range(20)]
    for other in others:
        model(x, other)
    assert len(model._memory._entries) == 8
    del others, other
    gc.collect()
    assert len(model._memory._entries) == 0
    model(x, edge_index)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert not other._memory._entries


def test_a_neutral_graph_is_prepared_once_for_each_model() -> None:
    models = [zoo.create(f"{name}-debug") for name in ("gcn", "gat", "graphsage")]
    x, edge_index = zoo.example_inputs(models[0]).values()
    neutral = CSRGraph.from_edge_index(edge_index, num_nodes=64)
    for model in models:
        prepared = model.prepare(neutral)
        assert prepared.tensors is model.prepare(neutral).tensors
        for other in models:
            # Whoever prepared it, a model derives what it needs from the edges as they were given.
            torch.testing.assert_close(other(x, prepared), other(x, edge_index), rtol=0, atol=0)


def test_graphs_move_and_copy() -> None:
    model = zoo.create("gcn-debug")
    x, edge_index = zoo.example_inputs(model).values()
    graph = model.prepare(edge_index, torch.rand(256), num_nodes=64)
    expected = model(x, graph)
    for other in (graph.to("cpu"), copy.deepcopy(graph), pickle.loads(pickle.dumps(graph))):
        torch.testing.assert_close(model(x, other), expected, rtol=0, atol=0)
    on_meta = graph.to("meta")
    assert on_meta.device.type == "meta" and on_meta.tensors.weight is not None and on_meta.tensors.weight.is_meta
    with pytest.raises(ValueError, match="x is on cpu and the graph on meta"):
        model(x, on_meta)


@pytest.mark.gpu
def test_on_a_gpu_forward_never_synchronises_and_agrees_with_the_cpu() -> None:
    for name in ("gcn-debug", "gat-debug", "graphsage-debug"):
        model = zoo.create(name)
        inputs = zoo.example_inputs(model)
        expected = model(**inputs)
        model.cuda()
        x, edge_index = (tensor.cuda() for tensor in inputs.values())
        graph = model.prepare(edge_index, num_nodes=64)
        model(x, edge_index)
        with synchronising_raises():
            outs = [model(x, graph), model(x, edge_index)]
        for out in outs:
            torch.testing.assert_close(out.cpu(), expected, rtol=1e-4, atol=1e-5)
