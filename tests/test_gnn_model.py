"""Graph models and operators: graphs at any depth, CSRGraph, how raw edges are remembered, real sizes on a GPU."""

import copy
import functools
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

import zoo
from tests.blocks import doubles
from tests.gnn_reference import GRAPHS, attend, edge_attention, edge_max, edge_sum, exact
from tests.noted import noted
from tests.test_bad_inputs import EDGES, X
from zoo.engine.graphed_step import synchronising_raises
from zoo.gnn import CSRGraph, GATConv, GCNConv, SAGEConv
from zoo.gnn import graph as graphs
from zoo.gnn.graph import Recipe
from zoo.ops import csr
from zoo.ops.csr import GraphTensors, attention, distinct, max_neighbours, mean_neighbours, split_rows, sum_neighbours

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


def test_learned_edge_weights_compile_without_a_break_and_raw_edges_break_once() -> None:
    model = zoo.create("gcn-debug")
    x, edge_index = zoo.example_inputs(model).values()
    weight = (torch.rand(256) + 0.1).requires_grad_()
    graph = model.prepare(edge_index, weight, num_nodes=64)
    compiled = torch.compile(model, fullgraph=True, dynamic=False, backend="aot_eager")
    (expected,) = torch.autograd.grad(model(x, edge_index, weight).square().sum(), weight)
    (found,) = torch.autograd.grad(compiled(x, graph).square().sum(), weight)
    torch.testing.assert_close(found, expected)
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
    ((*_, graph),) = model._memory._entries.values()
    pointers = weakref.ref(graph.tensors.rowptr)
    monkeypatch.undo()
    del _, graph
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


def test_autocast_takes_either_dtype_and_refuses_integers() -> None:
    model = zoo.create("gcn-debug")
    with torch.autocast("cpu", torch.bfloat16):
        assert model(X.bfloat16(), EDGES).shape == (5, 5)
        with pytest.raises(TypeError, match=r"x is torch\.int64"):
            model(X.long(), EDGES)
    for aggr in ("mean", "max"):  # wider features than weights
        conv = SAGEConv(12, 3, aggr=aggr, project=True).bfloat16()
        with torch.autocast("cpu", torch.bfloat16):
            out = conv(X, EDGES)
        torch.testing.assert_close(out.float(), conv.float()(X, EDGES), rtol=0.05, atol=0.05)


def edges(name: str) -> tuple[Tensor, tuple[int, int]]:
    rows, sizes = GRAPHS[name]
    return torch.tensor(rows, dtype=torch.int64).view(2, -1), sizes


@pytest.mark.parametrize("name", GRAPHS)
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


def test_a_graph_that_holds_weights_with_gradients_serves_many_backward_passes() -> None:
    edge_index, sizes = edges("square")
    weight = (torch.rand(edge_index.shape[1], dtype=torch.float64) + 0.5).requires_grad_()
    x = torch.randn(sizes[0], 3, dtype=torch.float64)
    conv = GCNConv(3, 4, improved=True).double()
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
    with torch.inference_mode():  # whose tensors tell of no change, so that none is remembered
        x, edge_index = zoo.example_inputs(model).values()
        before = model(x, edge_index)
        edge_index.copy_(edge_index.flip(0))
        assert not torch.equal(model(x, edge_index), before)


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
    rootless = SAGEConv((12, 4), 3, root_weight=False)  # destinations without features of their own
    assert rootless((torch.randn(5, 12), torch.empty(2, 0)), rectangular).shape == (2, 3)


@pytest.mark.parametrize(
    "make",
    [
        *(lambda: GCNConv(4, 6), lambda: GCNConv(6, 4), lambda: GATConv(4, 3, heads=2), lambda: SAGEConv(4, 6)),
        *(lambda: GATConv((4, 3), 3, residual=True), lambda: SAGEConv(6, 4), lambda: SAGEConv((4, 3), 6)),
        *(lambda: SAGEConv(4, 6, aggr="max"), lambda: SAGEConv(6, 4, project=True, root_weight=False)),
    ],
)
def test_a_product_with_a_hook_is_called(make: Callable[[], Any]) -> None:
    conv, edges = make(), torch.tensor([[0, 1, 2, 2], [1, 1, 0, 1]])
    widths = {each.in_features for each in conv.children()}
    x = torch.randn(3, *widths) if len(widths) == 1 else (torch.randn(3, 4), torch.randn(2, 3))
    for layer in conv.children():
        doubles(lambda: conv(x, edges), [layer])


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


def test_a_moved_or_copied_graph_gives_the_same_tensors_for_every_recipe() -> None:
    edge_index = torch.tensor([[3, 0, 1, 2, 3, 1], [0, 1, 1, 1, 0, 0]])
    graph, weight = CSRGraph.from_edge_index(edge_index, None, 5), torch.rand(6)
    looped = graph.prepared(Recipe(self_loops=True, normalize=True))
    assert (looped.num_edges, graph.num_edges, graph.device) == (10, 6, edge_index.device)
    fresh = CSRGraph.from_edge_index(edge_index, None, 5)
    for again in (graph.to("cpu"), copy.deepcopy(graph), pickle.loads(pickle.dumps(graph)), looped):
        for one, other in ((again, fresh), (again.with_weights(weight), fresh.with_weights(weight))):
            for recipe in (Recipe(), Recipe(self_loops=True, normalize=True), Recipe(mean=True)):
                for a, b in zip(one.prepared(recipe).tensors, other.prepared(recipe).tensors, strict=True):
                    assert torch.equal(a, b) if isinstance(b, Tensor) else type(a) is type(b)
    on_meta = graph.with_weights(weight).to("meta")
    assert on_meta.device.type == "meta" and on_meta.tensors.weight is not None and on_meta.tensors.weight.is_meta
    with pytest.raises(ValueError, match="x is on cpu and the graph on meta"):
        zoo.create("gcn-debug")(X, on_meta)


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


MANY_NODES, MANY_EDGES = 169_343, 2_315_598


def random_graph(weight: bool = False, **recipe: bool) -> CSRGraph:
    edges = torch.stack([torch.randint(8, (40,)), torch.randint(1, 7, (40,))])
    edges[1, :12] = 2
    return CSRGraph.from_edge_index(edges, torch.rand(40) if weight else None, (8, 7)).prepared(Recipe(**recipe))


def calls() -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    found: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
        "draws": (distinct, (torch.full((8,), 9), 3, torch.Generator()))
    }
    graph, weighted = random_graph(mean=True), random_graph(weight=True)
    for name, size in (("whole", 40), ("split", 4)):
        g, learned = (
            each.tensors._replace(
                split=split_rows(each.tensors.rowptr, 40, size),
                transpose=each.tensors.transpose._replace(split=split_rows(each.tensors.transpose.colptr, 40, size)),
            )
            for each in (graph, weighted)
        )

        def sums(x: Tensor, weight: Tensor, bias: Tensor, learned: GraphTensors = learned) -> Tensor:
            return sum_neighbours(x, learned._replace(weight=weight), bias=bias, channels=3)

        # The transpose holds the same weights.
        x, bias, weight = torch.randn(8, 4), torch.randn(3), learned.weight.clone()
        x, weight, bias = (each.requires_grad_() for each in (x, weight, bias))
        found[f"sum {name}"] = sums, (x, weight, bias)
        for own in ("add", "concat"):
            found[f"mean {own} {name}"] = functools.partial(mean_neighbours, graph=g, own=own), (x,)
        for dropout, average in ((0.0, False), (0.5, True)):
            attends = functools.partial(attention, heads=2, graph=g, slope=0.2, dropout=dropout, average=average)
            table, scores = torch.randn(8, 2 * 3 + 2, requires_grad=True), torch.randn(7, 2, requires_grad=True)
            found[f"attention {name} {dropout}"] = attends, (table, scores)
    return found


def test_dropout_leaves_out_the_asked_share_and_gradients_pass_through_it() -> None:
    edges = torch.stack([torch.arange(4000) % 50, torch.zeros(4000, dtype=torch.int64)])
    graph = CSRGraph.from_edge_index(edges, None, (50, 1)).tensors
    ones, zeros = torch.ones(50, 4, 1), torch.zeros(50, 4)
    drawn = torch.stack([attend(ones, zeros, zeros[:1], graph, 0.2, 0.3) for _ in range(40)])
    assert drawn.unique().numel() > 20, "calls and heads must draw anew"
    assert (drawn.mean() - 1.0).abs() < 0.01
    # All weights are one in 4000: the variance of the sum of kept ones is p / (1 - p) in 4000.
    assert 0.7 < drawn.std() / (0.3 / 0.7 / 4000) ** 0.5 < 1.3
    graph = random_graph(mean=True).tensors
    x = torch.randn(8, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: mean_neighbours(x, graph).square(), (x,))
    scores = [torch.randn(n, 2, dtype=torch.float64, requires_grad=True) for n in (8, 7)]
    x3 = torch.randn(8, 2, 3, dtype=torch.float64, requires_grad=True)

    def drawn(*inputs: Tensor) -> Tensor:
        torch.manual_seed(0)
        return attend(*inputs, graph, 0.2, 0.4)

    assert torch.autograd.gradcheck(drawn, (x3, *scores))


@pytest.mark.parametrize("name", MODELS)
def test_forward_mode_is_right(name: str) -> None:
    model = zoo.create(name)
    x, edge_index = zoo.example_inputs(model).values()
    direction, cotangent = torch.randn_like(x), torch.randn(64, 5)
    out, tangent = torch.func.jvp(lambda x: model(x, edge_index), (x,), (direction,))
    torch.testing.assert_close(out, model(x, edge_index))
    leaf = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(model(leaf, edge_index), leaf, cotangent)
    torch.testing.assert_close((tangent * cotangent).sum(), (grad * direction).sum(), rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("gpu")
def test_kernels_refuse_gradients_without_a_transpose_and_say_what_to_do() -> None:
    with torch.no_grad():
        graph = random_graph(mean=True).tensors
    assert graph.transpose is None
    x = torch.randn(8, 3, requires_grad=True)
    for aggregate in (
        lambda: mean_neighbours(x, graph),
        lambda: attend(x.unsqueeze(1), x[:, :1], x[:7, :1], graph, 0.2),
    ):
        with pytest.raises(RuntimeError, match="walks the transposed graph"):
            aggregate()


def test_the_transpose_comes_with_gradients_and_is_built_once() -> None:
    model = zoo.create("gcn-debug")
    inputs = zoo.example_inputs(model)
    with torch.no_grad():
        graph = model.prepare(inputs["edge_index"], torch.rand(256), num_nodes=64)
        assert graph.tensors.transpose is None and graph._edges.transposed is None
    found = graph.tensors.transpose
    assert found is not None and graph.tensors.transpose is found
    torch.testing.assert_close(found.weight, graph.tensors.weight[found.permutation])
    with torch.inference_mode():
        assert graph.tensors.transpose is None
    assert model.prepare(inputs["edge_index"], num_nodes=64)._edges.transposed is not None
    model(inputs["x"], graph).sum().backward()


@pytest.mark.parametrize("name", ["gcn-debug", "graphsage-debug"])
def test_rows_of_many_nodes_start_at_whole_vectors(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The values and gradients are the same, in rows that lie a multiple of 16 bytes apart."""
    model = zoo.create(name, out_channels=11).train().requires_grad_(True)
    inputs = zoo.example_inputs(model)
    sums = noted(monkeypatch, csr, "_csr_sum")
    monkeypatch.setattr("zoo.gnn.model.kernels_run", lambda *_: True)
    found = []
    for many in (2**16, 16):
        monkeypatch.setattr("zoo.gnn.model.MANY_NODES", many)
        out = model(**inputs)
        assert out.is_contiguous() and sums[-1][0].shape[1] == (1 if "gcn" in name else 2) * (11 if many > 16 else 16)
        found.append([out, *torch.autograd.grad(out.sin().sum(), list(model.parameters()))])
    torch.testing.assert_close(found[1], found[0])


def big_graph(kind: str = "uniform", **recipe: bool) -> CSRGraph:
    """As many nodes and edges as ogbn-arxiv has with both directions; ``hub`` has one of 200,000 each way."""
    nodes, edges = (MANY_NODES, MANY_EDGES) if kind == "uniform" else (MANY_NODES, 5 * MANY_NODES + 200_000)
    generator = torch.Generator("cuda").manual_seed(0)
    ends = torch.randint(nodes, (2, edges), generator=generator, device="cuda")
    if kind == "hub":
        ends[1, :200_000] = 7
        ends[0, 200_000:400_000] = 9
    return CSRGraph.from_edge_index(ends, None, nodes).prepared(Recipe(**recipe))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["uniform", "hub"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_real_sizes_against_float64_and_to_the_bit(kind: str, dtype: torch.dtype) -> None:
    graph = big_graph(kind, normalize=True)
    tensors = graph.tensors
    assert (tensors.split is not None) == (kind == "hub") and tensors.transpose is not None
    plain_graph = graph.prepared(Recipe(mean=True)).tensors
    weight, scale = tensors.weight.double(), plain_graph.inverse_degree.double()
    cases: list[tuple[Callable[..., Tensor], Callable[..., Tensor], tuple[tuple[int, ...], ...]]] = [
        (lambda x: sum_neighbours(x, tensors), lambda x: edge_sum(x, *exact(tensors), weight), ((100,),)),
        (lambda x: mean_neighbours(x, plain_graph), lambda x: edge_sum(x, *exact(tensors), row_scale=scale), ((256,),)),
        (
            lambda *xs: attend(*xs, plain_graph, 0.2),
            lambda *xs: edge_attention(*xs, 0.2, *exact(tensors)),
            ((8, 8), (8,), (8,)),
        ),
    ]
    for ours, reference, shapes in cases:
        inputs = [torch.randn(MANY_NODES, *shape, device="cuda").to(dtype).requires_grad_() for shape in shapes]
        cotangent = torch.randn(MANY_NODES, *shapes[0], device="cuda").to(dtype)
        found = [out := ours(*inputs), *torch.autograd.grad(out, inputs, cotangent)]
        again = [out := ours(*inputs), *torch.autograd.grad(out, inputs, cotangent)]
        assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))
        wide = [tensor.detach().double().requires_grad_() for tensor in inputs]
        expected = [out := reference(*wide), *torch.autograd.grad(out, wide, cotangent.double())]
        for a, b in zip(found, expected, strict=True):
            assert (a.double() - b).norm() < (1e-5 if dtype == torch.float32 else 2e-2) * b.norm()
        del found, again, wide, expected


@pytest.mark.gpu
def test_offsets_past_two_to_the_31() -> None:
    nodes, channels, edges = 9_000_000, 256, 50_000
    assert nodes * channels > 2**31
    x = torch.randn(nodes, channels, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    # Both ends lie in the last million.
    ends = torch.randint(nodes - 1_000_000, nodes, (2, edges), device="cuda")
    graph = CSRGraph.from_edge_index(ends, None, nodes).prepared(Recipe(mean=True)).tensors
    used = ends.unique()
    small = torch.searchsorted(used, torch.stack([graph.source, graph.destination]).long())
    few = x.detach()[used].double().requires_grad_()
    scale = graph.inverse_degree[used].double()
    score = torch.randn(nodes, 2, device="cuda", dtype=torch.bfloat16)
    for ours, reference in (
        (lambda: mean_neighbours(x, graph), edge_sum(few, *small, len(used), row_scale=scale)),
        (
            lambda: attend(x.view(nodes, 2, 128), score, score, graph, 0.2).flatten(1),
            edge_attention(few.view(-1, 2, 128), *[score[used].double()] * 2, 0.2, *small, len(used)).flatten(1),
        ),
    ):
        out = ours()
        cotangent = torch.randn(len(used), channels, device="cuda", dtype=torch.bfloat16)
        spread = torch.zeros_like(out)
        spread[used] = cotangent
        (found,) = torch.autograd.grad(out, x, spread)
        (expected,) = torch.autograd.grad(reference, few, cotangent.double())
        for a, b in ((out[used], reference), (found[used], expected)):
            assert (a.double() - b).norm() < 1e-2 * b.norm()
        assert out.count_nonzero() == out[used].count_nonzero()
        del out, spread, found


@pytest.mark.gpu
@pytest.mark.parametrize("name", MODELS)
def test_kernels_in_an_outer_cuda_graph(name: str) -> None:
    for kind in ("uniform", "hub"):
        graph = big_graph(kind)
        model = zoo.create(name).cuda()
        x = torch.randn(MANY_NODES, model.config.in_channels, device="cuda")
        prepared = model.prepare(graph)
        with torch.no_grad():
            zoo.compile_regions(model.eval())
            step = zoo.cuda_graph(model, (x, prepared), static=(1,))
            other = torch.randn_like(x)
            found = step(other, prepared)
            zoo.uncompile(model)
            torch.testing.assert_close(found, model(other, prepared), rtol=1e-4, atol=1e-4)
            assert torch.equal(step(other, prepared), found)


@pytest.mark.gpu
def test_attention_never_holds_a_row_of_features_an_edge() -> None:
    graph = big_graph().tensors
    heads, channels = 8, 32
    table = torch.randn(MANY_NODES, heads * (channels + 2), device="cuda", requires_grad=True)
    cotangent = torch.randn(MANY_NODES, heads * channels, device="cuda")

    def peak(function: Callable[[], Any]) -> int:
        function()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        function()
        return torch.cuda.max_memory_allocated() - before

    messages, nodes, scores = (4 * n * heads for n in (MANY_EDGES * channels, MANY_NODES * channels, MANY_EDGES))
    assert peak(lambda: attention(table.detach(), None, heads, graph, 0.2)) < 1.5 * nodes
    out = attention(table, None, heads, graph, 0.2)
    backward = peak(lambda: torch.autograd.grad(out, table, cotangent, retain_graph=True))
    assert backward < 3 * nodes + 2 * scores < messages / 2
