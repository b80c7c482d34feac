"""The operators over the edges of a graph, the layers that are made of them, and real sizes on a GPU."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import zoo
from tests.gnn_reference import attend, edge_attention, edge_sum
from zoo.gnn import CSRGraph
from zoo.gnn.graph import Recipe
from zoo.ops import common, csr
from zoo.ops.csr import GraphTensors, attention, distinct, mean_neighbours, split_rows, sum_neighbours

MODELS = ["gcn-debug", "gat-debug", "graphsage-debug"]
NODES, EDGES = 169_343, 2_315_598


# --- operators, by torch's own ---


def random_graph(weight: bool = False, **recipe: bool) -> CSRGraph:
    edges = torch.stack([torch.randint(8, (40,)), torch.randint(1, 7, (40,))])
    edges[1, :12] = 2
    return CSRGraph.from_edge_index(edges, torch.rand(40) if weight else None, (8, 7)).prepared(Recipe(**recipe))


def exact(graph: GraphTensors) -> tuple[Tensor, Tensor, int]:
    return graph.source, graph.destination, graph.rowptr.shape[0] - 1


def calls() -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    """Examples of all operators: see test_kernel.py."""
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


def test_second_derivatives_and_gradients_through_dropout() -> None:
    graph = random_graph(mean=True).tensors
    x = torch.randn(8, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: mean_neighbours(x, graph).square(), (x,))
    scores = [torch.randn(n, 2, dtype=torch.float64, requires_grad=True) for n in (8, 7)]
    x3 = torch.randn(8, 2, 3, dtype=torch.float64, requires_grad=True)

    def drawn(*inputs: Tensor) -> Tensor:
        torch.manual_seed(0)
        return attend(*inputs, graph, 0.2, 0.4)

    assert torch.autograd.gradcheck(drawn, (x3, *scores))


def test_dropout_leaves_out_the_asked_share_and_keeps_the_mean() -> None:
    edges = torch.stack([torch.arange(4000) % 50, torch.zeros(4000, dtype=torch.int64)])
    graph = CSRGraph.from_edge_index(edges, None, (50, 1)).tensors
    ones, zeros = torch.ones(50, 4, 1), torch.zeros(50, 4)
    drawn = torch.stack([attend(ones, zeros, zeros[:1], graph, 0.2, 0.3) for _ in range(40)])
    assert drawn.unique().numel() > 20, "calls and heads must draw anew"
    assert (drawn.mean() - 1.0).abs() < 0.01
    # All weights are one in 4000: the variance of the sum of kept ones is p / (1 - p) in 4000.
    assert 0.7 < drawn.std() / (0.3 / 0.7 / 4000) ** 0.5 < 1.3


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


# --- the graph ---


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


@pytest.mark.parametrize("size", [1, 2, 5, 16, 63])
def test_tables_of_long_rows_have_few_sizes(size: int) -> None:
    for seed in range(5):  # that they are right shows in the sums of gnn_kernel_checks.py
        torch.manual_seed(seed)
        rows = torch.randint(12, (200,)).clamp(min=2 * seed).sort().values
        pointers = torch.searchsorted(rows, torch.arange(13))
        tables, longest = split_rows(pointers, 200, size), int(pointers.diff().max())
        assert (tables is None) == (longest <= size)
        assert tables is None or all(len(each) & (len(each) - 1) == 0 for each in (tables.chunks, tables.rows))


def test_short_rows_have_no_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "triton_runs_on", lambda device: True)
    assert random_graph().tensors.split is None
    monkeypatch.setattr(csr, "EDGES_PER_CHUNK", 8)
    graph = random_graph()
    moved = graph.to("cpu").tensors.split
    assert moved is not None and moved.chunks.equal(graph.tensors.split.chunks)


@pytest.mark.parametrize("name", ["gcn-debug", "graphsage-debug"])
def test_rows_of_many_nodes_start_at_whole_vectors(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The values and gradients are the same, in rows that lie a multiple of 16 bytes apart."""
    model = zoo.create(name, out_channels=11).train().requires_grad_(True)
    inputs = zoo.example_inputs(model)
    widths, aggregate = [], csr._csr_sum

    def watched(x: Tensor, *rest: Any) -> Tensor:
        widths.append(x.shape[1])
        return aggregate(x, *rest)

    monkeypatch.setattr(csr, "_csr_sum", watched)
    monkeypatch.setattr("zoo.gnn.model.kernels_run", lambda *_: True)
    found = []
    for many in (2**16, 16):
        monkeypatch.setattr("zoo.gnn.model.MANY_NODES", many)
        out = model(**inputs)
        assert out.is_contiguous() and widths[-1] == (1 if "gcn" in name else 2) * (11 if many > 16 else 16)
        found.append([out, *torch.autograd.grad(out.sin().sum(), list(model.parameters()))])
    torch.testing.assert_close(found[1], found[0])


# --- on a GPU ---


def big_graph(kind: str = "uniform", **recipe: bool) -> CSRGraph:
    """As many nodes and edges as ogbn-arxiv has with both directions; ``hub`` has one of 200,000 each way."""
    nodes, edges = (NODES, EDGES) if kind == "uniform" else (NODES, 5 * NODES + 200_000)
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
        inputs = [torch.randn(NODES, *shape, device="cuda").to(dtype).requires_grad_() for shape in shapes]
        cotangent = torch.randn(NODES, *shapes[0], device="cuda").to(dtype)
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
            edge_attention(
                few.view(-1, 2, 128), score[used].double(), score[used].double(), 0.2, *small, len(used)
            ).flatten(1),
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
        x = torch.randn(NODES, model.config.in_channels, device="cuda")
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
    table = torch.randn(NODES, heads * (channels + 2), device="cuda", requires_grad=True)
    cotangent = torch.randn(NODES, heads * channels, device="cuda")

    def peak(function: Callable[[], Any]) -> int:
        function()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        function()
        return torch.cuda.max_memory_allocated() - before

    messages, nodes, scores = (4 * n * heads for n in (EDGES * channels, NODES * channels, EDGES))
    assert peak(lambda: attention(table.detach(), None, heads, graph, 0.2)) < 1.5 * nodes
    out = attention(table, None, heads, graph, 0.2)
    backward = peak(lambda: torch.autograd.grad(out, table, cotangent, retain_graph=True))
    assert backward < 3 * nodes + 2 * scores < messages / 2
