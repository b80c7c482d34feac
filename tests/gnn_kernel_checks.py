"""Every kernel against float64."""

import functools
import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import zoo
from tests.gnn_reference import GRAPHS, attend, edge_attention, edge_softmax, edge_sum, exact, kept
from tests.kernel_checks import DEVICE, MARKS, kernels_run, values  # noqa: F401
from zoo.gnn import CSRGraph
from zoo.gnn.graph import Recipe
from zoo.ops import common, csr
from zoo.ops.common import next_power
from zoo.ops.csr import GraphTensors, mean_neighbours, sum_neighbours
from zoo.ops.triton import csr as csr_kernels

pytestmark = MARKS
RELATIVE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
HALF = [torch.float16, torch.bfloat16]


def merge_tile_of(chunks: int, most: int) -> Callable[[int], dict[str, int]]:
    return lambda channels: {"CHUNKS": chunks, "COLUMNS": min(next_power(channels), most), "num_warps": 1}


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter reduces number by number, and a tile for a GPU holds many chunks."""
    monkeypatch.setattr(csr, "FEW_EDGES", 0)
    if DEVICE == "cpu":
        monkeypatch.setattr(csr_kernels, "merge_tile", merge_tile_of(32, 8))


def make(edge_index: Tensor, sizes: tuple[int, int], weight: Tensor | None = None, **recipe: bool) -> CSRGraph:
    weight = None if weight is None else weight.to(DEVICE)
    return CSRGraph.from_edge_index(edge_index.to(DEVICE), weight, sizes).prepared(Recipe(**recipe))


def named(name: str, weight: bool = False, **recipe: bool) -> CSRGraph:
    rows, sizes = GRAPHS[name]
    edge_index = torch.tensor(rows, dtype=torch.int64).view(2, -1)
    return make(edge_index, sizes, torch.rand(edge_index.shape[1]) if weight else None, **recipe)


def hub(
    weight: bool = False, edges: int = 48 if DEVICE == "cpu" else 90, destinations: int = 9, **recipe: bool
) -> CSRGraph:
    """11 sources and 9 destinations; a third of the edges ends in node 2, another third starts in node 5."""
    edge_index = torch.stack([torch.randint(11, (edges,)), torch.randint(destinations, (edges,))])
    edge_index[1, : edges // 3] = 2
    edge_index[0, edges // 3 : 2 * edges // 3] = 5
    return make(edge_index, (11, destinations), torch.rand(edges) if weight else None, **recipe)


def with_gradients(function: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    out = function(*leaves)
    cotangent = torch.linspace(-1, 1, out.numel(), dtype=torch.float64, device=out.device).sin().view(out.shape)
    return [out, *torch.autograd.grad(out, leaves, cotangent.to(out.dtype))]


def agree(
    ours: Callable[..., Tensor], reference: Callable[..., Tensor], *inputs: Tensor, factor: float = 1.0
) -> list[Tensor]:
    """Output and gradients within rounding of float64, in the dtypes of the inputs; on a GPU the same bits twice."""
    found = with_gradients(ours, *inputs)
    expected = with_gradients(reference, *(tensor.double() for tensor in inputs))
    for index, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert a.shape == b.shape and a.dtype == inputs[max(index - 1, 0)].dtype
        error = (a.double() - b).abs().max() if a.numel() else 0.0
        # Inputs are of the order of one; what cancels is as wrong as its parts.
        allowed = factor * RELATIVE[inputs[0].dtype] * max(b.abs().max() if b.numel() else 0.0, 0.1)
        assert a.isfinite().all() and error <= allowed, (index, error, allowed)
    if DEVICE == "cuda":  # the interpreter runs one program after the other
        for a, b in zip(found, with_gradients(ours, *inputs), strict=True):
            assert torch.equal(a, b)
    return found


def check_sum(graph: CSRGraph, x: Tensor) -> None:
    tensors = graph.tensors
    weight = None if tensors.weight is None else tensors.weight.double()
    agree(lambda x: sum_neighbours(x, tensors), lambda x: edge_sum(x, *exact(tensors), weight), x, factor=4)


def check_mean(graph: CSRGraph, x: Tensor) -> None:
    tensors = graph.tensors
    scale = tensors.inverse_degree.double()
    agree(lambda x: mean_neighbours(x, tensors), lambda x: edge_sum(x, *exact(tensors), row_scale=scale), x, factor=4)


def averaged(x: Tensor, average: bool) -> Tensor:
    return x.mean(1) if average else x


def check_attention(graph: CSRGraph, heads: int, channels: int, dtype: torch.dtype = torch.float32) -> None:
    tensors = graph.tensors
    for average in (False, True):
        for joined in (False, True) if graph.is_square else (False,):
            _check_attention(graph, tensors, heads, channels, dtype, average, joined)


def _check_attention(
    graph: CSRGraph, tensors: GraphTensors, heads: int, channels: int, dtype: torch.dtype, average: bool, joined: bool
) -> None:
    x = values(graph.num_sources, heads, channels, dtype=dtype)
    a_source, a_destination = (values(n, heads, dtype=dtype) * 3 for n in (graph.num_sources, graph.num_destinations))
    agree(
        lambda x, a, b: attend(x, a, b, tensors, 0.2, joined=joined, average=average),
        lambda x, a, b: averaged(edge_attention(x, a, b, 0.2, *exact(tensors)), average),
        x, a_source, a_destination,
        # The gradient of a score is a difference of dot products, which grow with the root of their length.
        factor=max(20.0, channels**0.5),
    )  # fmt: skip


@pytest.mark.parametrize("name", GRAPHS)
def test_sums_and_attention_on_every_graph(name: str) -> None:
    for weight in (False, True):
        graph = named(name, weight)
        check_sum(graph, values(graph.num_sources, 3))
    check_mean(named(name, mean=True), values(graph.num_sources, 3))
    check_attention(named(name), heads=2, channels=3)
    check_attention(named(name), heads=3, channels=1)


@pytest.mark.parametrize("size", [512, 8])
@pytest.mark.parametrize("channels", [1, 7, 47, 100, 256])
def test_sums_of_every_width_with_rows_whole_and_split(channels, size, monkeypatch):
    monkeypatch.setattr(csr, "EDGES_PER_CHUNK", size)
    graph = hub(weight=True)
    assert (graph.tensors.split is not None) == (graph.tensors.transpose.split is not None) == (size == 8)
    check_sum(graph, values(11, channels))
    check_mean(hub(mean=True), values(11, channels))


@pytest.mark.parametrize("size", [512, 8])
@pytest.mark.parametrize(("heads", "channels"), [(1, 1), (8, 5), (3, 40), (1, 100), (1, 256)])
def test_attention_of_every_width_with_rows_whole_and_split(heads, channels, size, monkeypatch):
    monkeypatch.setattr(csr, "EDGES_PER_CHUNK", size)
    check_attention(hub(), heads, channels)


def test_long_rows_are_cut_shorter_in_a_graph_of_few_edges(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    for few in (0, 10_000):
        monkeypatch.setattr(csr, "FEW_EDGES", few)
        split = csr.split_rows(torch.tensor([0, 3, 203], device=DEVICE), 203)
        assert split is not None
        sizes.append(split.size)
    assert sizes == [128, 32]


@pytest.mark.parametrize("chunks", [2, 4])
def test_long_rows_of_more_chunks_than_a_step_adds_up(chunks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(csr, "EDGES_PER_CHUNK", 4)
    monkeypatch.setattr(csr_kernels, "merge_tile", merge_tile_of(chunks, 16))
    edges = 60  # a third of them in one row
    check_sum(hub(weight=True, edges=edges), values(11, 20))
    check_attention(hub(edges=edges), 3, 7)


@pytest.mark.parametrize("dtype", HALF)
def test_half_precision(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(csr, "EDGES_PER_CHUNK", 16)
    check_sum(hub(weight=True), values(11, 40, dtype=dtype))
    check_mean(hub(mean=True), values(11, 40, dtype=dtype))
    check_attention(hub(), 2, 20, dtype)


def test_sums_pass_gradients_to_learned_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(csr, "EDGES_PER_CHUNK", 16)
    edges = torch.stack([torch.randint(6, (70,)), torch.randint(7, (70,)).clamp(min=3)]).to(DEVICE)
    order = torch.sort(edges[1], stable=True).indices

    def ours(x: Tensor, weight: Tensor) -> Tensor:
        return sum_neighbours(x, CSRGraph.from_edge_index(edges, weight, (6, 7)).tensors)

    def reference(x: Tensor, weight: Tensor) -> Tensor:
        return edge_sum(x, edges[0][order], edges[1][order], 7, weight[order])

    agree(ours, reference, values(6, 9), values(70), factor=8)


def test_attention_does_not_overflow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(csr, "EDGES_PER_CHUNK", 16)
    graph = hub().tensors
    inputs = values(11, 2, 4), values(11, 2) * 1e4, values(9, 2) * 1e4
    found = with_gradients(lambda *inputs: attend(*inputs, graph, 0.2), *inputs)
    expected = edge_attention(*(tensor.double() for tensor in inputs), 0.2, *exact(graph))
    assert all(tensor.isfinite().all() for tensor in found)
    torch.testing.assert_close(found[0].double(), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("size", [512, 8])
@pytest.mark.parametrize(("heads", "channels"), [(3, 5), (2, 40), (64, 16)])  # of the last no program has all heads
def test_bias_and_relu_of_attention_are_those_after_it(heads, channels, size, monkeypatch):
    monkeypatch.setattr(csr, "EDGES_PER_CHUNK", size)
    graph, table = hub().tensors, values(11, heads * (channels + 2))
    for average in (False, True):
        bias = values(channels if average else heads * channels)
        plain = csr.attention(table, None, heads, graph, 0.2, average=average) + bias
        for relu in (False, True):
            found = csr.attention(table, None, heads, graph, 0.2, average=average, bias=bias, relu=relu)
            torch.testing.assert_close(found, plain.relu() if relu else plain)


@pytest.mark.parametrize("size", [512, 8])
def test_attention_drops_the_same_edges_forward_and_backward(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(csr, "EDGES_PER_CHUNK", size)
    graph = hub().tensors
    source, row, rows = exact(graph)
    inputs = values(11, 3, 4), values(11, 3), values(9, 3)
    torch.manual_seed(3)
    seed = torch.randint(2**62, (1,), device=DEVICE)
    mask = kept(seed, torch.arange(source.shape[0], device=DEVICE), 3, 0.4).double()
    assert 0.4 < (mask > 0).double().mean() < 0.8

    def ours(*inputs: Tensor) -> Tensor:
        torch.manual_seed(3)
        return attend(*inputs, graph, 0.2, 0.4)

    def reference(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        score = torch.nn.functional.leaky_relu(a[source.long()] + b[row.long()], 0.2)
        return edge_sum(x, source, row, rows, edge_softmax(score, row, rows) * mask)

    agree(ours, reference, *inputs, factor=20)
    everything_dropped = attend(*inputs, graph, 0.2, 1.0)
    assert everything_dropped.abs().max() == 0


@pytest.mark.parametrize("size", [512, 8])
@pytest.mark.parametrize("rows", [9, 5])
@pytest.mark.parametrize("dtype", RELATIVE)
def test_sums_with_features_of_the_rows_themselves(dtype, rows, size, monkeypatch):
    """Beside the sums, or added from the second half of a table whose halves end in padding."""
    monkeypatch.setattr(csr, "EDGES_PER_CHUNK", size)
    graph = hub(mean=True, destinations=rows).tensors
    scale = graph.inverse_degree.double()

    def mean(x: Tensor) -> Tensor:
        return edge_sum(x, *exact(graph), row_scale=scale)

    x, table = values(11, 5, dtype=dtype), values(11, 16, dtype=dtype)
    agree(
        lambda x: mean_neighbours(x, graph, own="concat"), lambda x: torch.cat([mean(x), x[:rows]], dim=1), x, factor=4
    )
    agree(
        lambda table, bias: mean_neighbours(table, graph, own="add", bias=bias, channels=7),
        lambda table, bias: mean(table[:, :7]) + table[:rows, 8:15] + bias, table, values(7, dtype=dtype), factor=4,
    )  # fmt: skip
    with torch.no_grad():
        table[0, 0] = float("nan")
        summed = functools.partial(mean_neighbours, table, graph, own="add", bias=values(7, dtype=dtype), channels=7)
        assert torch.equal(summed(relu=True).nan_to_num(9.0), summed().relu().nan_to_num(9.0))


@pytest.mark.parametrize("kind", ["gcn-debug", "graphsage-debug", "gat-debug"])
def test_a_relu_is_part_of_the_kernel_before_it_unless_somebody_listens(kind: str) -> None:
    model = zoo.create(kind).to(DEVICE).eval()
    inputs = {name: each.to(DEVICE) for name, each in zoo.example_inputs(model).items()}
    heard: list[Tensor] = []
    with torch.no_grad():
        found = model(**inputs)
        for layer in model.layers[:-1]:
            layer.epilogue.act.register_forward_hook(lambda module, given, out: heard.append(out))
        torch.testing.assert_close(model(**inputs), found)
    assert len(heard) == len(model.layers) - 1 and all((each >= 0).all() for each in heard)


@pytest.mark.parametrize(
    ("count", "nodes"), [*itertools.product([1, 2, 5, 16, 33], [0, 1, 700]), (csr.MOST_AT_ONCE, 3)]
)
def test_places_are_those_drawn_by_columns(count: int, nodes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    degree = count + 1 + torch.randint(4, (nodes,), device=DEVICE)
    degree[::3] += 1 << 33

    def draw(kernel: bool) -> Tensor:
        monkeypatch.setattr(common, "triton_runs_on", lambda device: kernel)
        return csr.distinct(degree, count, torch.Generator(DEVICE).manual_seed(3))

    places = draw(True)
    assert places.shape == (nodes, count)
    assert torch.equal(places, draw(False))
    assert (places >= 0).all() and (places < degree[:, None]).all()
    assert (places.sort(1).values.diff(dim=1) > 0).all()
