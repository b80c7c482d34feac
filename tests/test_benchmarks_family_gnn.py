"""The GNN workload: every arm computes the same thing, and its formulas count what they say."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.utils.flop_counter import FlopCounterMode

import zoo
from benchmarks import families
from benchmarks.families import gnn_arms, graphs
from benchmarks.families.gnn import KINDS, WORKLOAD
from benchmarks.families.gnn_arms import Architecture, architecture
from benchmarks.families.graphs import GraphSpec
from benchmarks.plan import IMPLEMENTATIONS, Case


def case(**changes: Any) -> Case:
    return Case(**{"family": "gnn", "model": "gcn", "input": "karate", **changes})


def error(output: torch.Tensor, reference: torch.Tensor) -> float:
    return float((output.double() - reference).norm() / reference.norm())


def run(prepared: families.Prepared) -> torch.Tensor:
    with torch.inference_mode():
        return prepared.model(**prepared.inputs)


def small_architecture(kind: str, **changes: Any) -> Architecture:
    values = {"features": 12, "hidden": 16, "layers": 3, "classes": 5, "heads": 4 if kind == "gat" else 1}
    return Architecture(kind=kind, **(values | changes))


def skewed_graph(nodes: int = 60, edges: int = 800) -> graphs.Graph:
    """Small and skewed: duplicate edges are certain."""
    counts = GraphSpec(nodes=nodes, edges=edges, features=12, classes=5, hub=edges // 5)
    graph = graphs.generate(counts, power_law=True)
    assert torch.unique(graph.edge_index, dim=1).size(1) < edges
    return graph


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_stacks_of_equal_layers_match_the_reference(kind: str, impl: str):
    prepared = WORKLOAD.prepare(case(model=f"{kind}-8x256", impl=impl), data_root=None, seed=0)
    output = run(prepared)
    assert output.shape == (34, 256) and error(output, prepared.reference()) < 1e-5


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_implementations_agree_where_edges_repeat(kind: str, impl: str):
    # Without its duplicates the graph would give other numbers, so an arm that merges them is found here.
    prepared = WORKLOAD.prepare(case(model=kind, impl=impl, input="cora-powerlaw"), data_root=None, seed=1)
    assert prepared.data == "generated, power law"
    assert error(run(prepared), prepared.reference()) < 1e-5


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_the_graph_is_static_and_the_features_are_not(impl: str):
    prepared = WORKLOAD.prepare(case(impl=impl), data_root=None, seed=0)
    assert "edge_index" in prepared.static and "x" not in prepared.static
    assert set(prepared.static) | {"x"} == set(prepared.inputs)
    assert bool(prepared.preparation_seconds) == (impl != "upstream")
    assert all(seconds > 0 for seconds in prepared.preparation_seconds.values())
    assert (prepared.compile_regions is None) == (impl == "zoo")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", ["csr", "sorted"])
def test_tuned_layouts_give_the_same_numbers(kind: str, layout: str):
    if (kind, layout) == ("gat", "csr"):
        assert all(gnn_arms.tuned_layout(case(strategy=strategy), kind) == "sorted" for strategy in ("eager", "full"))
        return
    graph, arch = skewed_graph(), small_architecture(kind)
    shipped = gnn_arms.build(arch, seed=3).double()
    tuned, inputs = gnn_arms.tune(arch, shipped, graph.edge_index, graph.nodes, layout)
    assert (inputs["edge_index"].layout is torch.sparse_csr) == (layout == "csr")
    x = graph.x.double()
    with torch.no_grad():
        assert error(tuned(x, **inputs), shipped(x, graph.edge_index)) < 1e-7


@pytest.mark.parametrize("kind", KINDS)
def test_tuned_arms_compile_without_a_break(kind: str):
    graph, arch = skewed_graph(), small_architecture(kind)
    layout = gnn_arms.tuned_layout(case(strategy="full"), kind)
    tuned, inputs = gnn_arms.tune(arch, gnn_arms.build(arch, seed=0), graph.edge_index, graph.nodes, layout)
    compiled = torch.compile(tuned, backend="eager", fullgraph=True, dynamic=False)
    with torch.no_grad():
        torch.testing.assert_close(compiled(graph.x, **inputs), tuned(graph.x, **inputs))


@pytest.mark.parametrize(
    ("impl", "dynamic", "expected"),
    [("upstream", False, None), ("upstream", True, True), ("upstream-tuned", False, False)],
)
def test_regional_arms_of_upstream(monkeypatch: pytest.MonkeyPatch, impl: str, dynamic: bool, expected: bool | None):
    seen: list[dict[str, Any]] = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **options: seen.append({"module": self, **options}))
    prepared = WORKLOAD.prepare(case(impl=impl, strategy="regional", dynamic=dynamic), data_root=None, seed=0)
    assert prepared.compile_regions is not None
    prepared.compile_regions(prepared.model, backend="inductor", mode="default", dynamic=dynamic)
    assert [options.pop("module") for options in seen] == list(prepared.model.convs)
    assert seen == [{"backend": "inductor", "mode": "default", "dynamic": expected}] * 2


@pytest.mark.parametrize("kind", KINDS)
def test_graphs_do_not_grow_with_depth(kind: str):
    # Upstream's convolutions of one width are all alike. The zoo's regions hold the activation too, which the last
    # layer has not, and the first may order its work differently.
    for impl, most in (("upstream-tuned", 1), ("zoo", 3)):
        chosen = case(model=f"{kind}-8x256", impl=impl, strategy="regional")
        prepared = WORKLOAD.prepare(chosen, data_root=None, seed=0)
        counter = CompileCounter()
        compile_in_place = prepared.compile_regions or zoo.compile_regions
        compile_in_place(prepared.model, backend=counter, dynamic=False)
        with torch.no_grad():
            output = prepared.model(**prepared.inputs)
        assert 1 <= counter.frame_count <= most
        assert error(output, prepared.reference()) < 1e-5


@pytest.mark.parametrize("impl", ["upstream-tuned", "zoo"])
def test_an_arm_holds_only_what_it_runs_on(monkeypatch: pytest.MonkeyPatch, impl: str):
    loaded: list[weakref.ref[torch.Tensor]] = []
    load = graphs.load

    def spy(*args: Any, **options: Any) -> graphs.Graph:
        graph = load(*args, **options)
        loaded.extend((weakref.ref(graph.x), weakref.ref(graph.edge_index)))
        return graph

    monkeypatch.setattr(graphs, "load", spy)
    prepared = WORKLOAD.prepare(case(impl=impl, dtype="bfloat16"), data_root=None, seed=0)
    gc.collect()
    assert [ref() for ref in loaded] == [None, None]  # float32 features and raw edges would count as the arm's memory
    assert prepared.reference().shape == (34, 4)


@pytest.mark.parametrize("kind", KINDS)
def test_reference_in_blocks_is_the_reference(kind: str):
    graph, arch = skewed_graph(), small_architecture(kind)
    model = gnn_arms.build(arch, seed=0).double()
    x = graph.x.double()
    with torch.no_grad():
        expected = model(x, graph.edge_index)
    for budget in (5_000, 50_000, 10**9):
        output = gnn_arms.output_in_blocks(arch, model, x, graph.edge_index, budget=budget)
        assert error(output, expected) < 1e-7  # tune() rounds GCN's weights to the model's dtype, through float32


def test_reference_falls_back_to_blocks_where_memory_is_short(monkeypatch: pytest.MonkeyPatch):
    graph, arch = skewed_graph(), small_architecture("gcn")
    model = gnn_arms.build(arch, seed=0)
    expected = gnn_arms.reference_output(arch, model, graph.x, graph.edge_index)
    monkeypatch.setattr(gnn_arms, "_free_bytes", lambda device: 1_000)
    monkeypatch.setattr(type(model), "forward", lambda *args: pytest.fail("ran the whole model at once"))
    assert error(gnn_arms.reference_output(arch, model, graph.x, graph.edge_index), expected) < 1e-7


def test_architectures():
    cora = architecture("gcn", "cora-powerlaw", features=1433, classes=7)
    assert [(layer.inputs, layer.outputs) for layer in cora.stack()] == [(1433, 64), (64, 7)]
    arxiv = architecture("gat", "arxiv", features=128, classes=40)
    assert [(layer.inputs, layer.outputs, layer.heads) for layer in arxiv.stack()] == [
        (128, 256, 8),
        (256, 256, 8),
        (256, 40, 8),
    ]
    assert [layer.transformed for layer in arxiv.stack()] == [256, 256, 320]
    for kind in KINDS:
        deep = architecture(f"{kind}-8x256", "arxiv", features=128, classes=40).stack()
        assert len(deep) == 8 and len(set(deep)) == 1 and deep[0].inputs == deep[0].outputs == 256


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("classes", [5, None])
def test_parameters_and_signatures_are_upstream_s(kind: str, classes: int | None):
    arch = small_architecture(kind, features=16, classes=classes)
    model = gnn_arms.build(arch, seed=0)
    assert gnn_arms.parameters(arch) == sum(parameter.numel() for parameter in model.parameters())
    signatures = {tuple((name, p.shape) for name, p in conv.named_parameters()) for conv in model.convs}
    assert len(signatures) == len(set(arch.stack())) == (1 if classes is None else 2)


@pytest.mark.parametrize("kind", KINDS)
def test_dense_flops_are_those_counted_on_eager(kind: str):
    graph, arch = skewed_graph(), small_architecture(kind)
    model = gnn_arms.build(arch, seed=0)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(graph.x, graph.edge_index)
    # Without edges only the self-loops' sums and GAT's scores are left beside the linear maps.
    beside = 0
    for layer in arch.stack():
        loops = graph.nodes * (layer.transformed if kind == "gat" else min(layer.inputs, layer.outputs))
        beside += 2 * loops * arch.self_loops + 4 * graph.nodes * layer.transformed * (kind == "gat")
    assert gnn_arms.flops(arch, graph.nodes, 0) - beside == counter.get_total_flops()


def test_flops_of_the_aggregation():
    arch = small_architecture("graphsage", features=12, hidden=16, layers=2, classes=5)
    assert gnn_arms.flops(arch, 100, 1_000) - gnn_arms.flops(arch, 100, 0) == 2 * 1_000 * (12 + 5)
    arch = small_architecture("gat", features=12, hidden=16, layers=2, classes=5)
    assert gnn_arms.flops(arch, 100, 1_000) - gnn_arms.flops(arch, 100, 0) == 2 * 1_000 * (16 + 4 * 5)


def test_bytes_by_hand():
    nodes, edges = 100, 1_000
    one = {"layers": 1, "hidden": 8}
    # Aggregates the narrow input first: gather, output, degree factors, weights; then indices and offsets.
    gcn = small_architecture("gcn", features=4, classes=8, **one)
    values = 1_100 * 4 + 100 * 8 + 100 + (4 * 8 + 8)
    assert gnn_arms.bytes_moved(gcn, nodes, edges, 4) == 4 * values + 4 * 1_100 + 4 * 101
    assert gnn_arms.bytes_moved(gcn, nodes, edges, 2) == 2 * values + 4 * 1_100 + 4 * 101
    # Transforms first: reads the wide input, writes the narrow rows that it then gathers.
    gcn = small_architecture("gcn", features=8, classes=4, **one)
    values = 1_100 * 4 + 100 * 4 + 100 * (8 + 4) + 100 + (8 * 4 + 4)
    assert gnn_arms.bytes_moved(gcn, nodes, edges, 4) == 4 * values + 4 * 1_100 + 4 * 101
    # No self-loops; each node's own row as well.
    sage = small_architecture("graphsage", features=4, classes=8, **one)
    values = 1_000 * 4 + 100 * 8 + 100 * 4 + (2 * 4 * 8 + 8)
    assert gnn_arms.bytes_moved(sage, nodes, edges, 4) == 4 * values + 4 * 1_000 + 4 * 101
    # One layer of classes averages its heads: rows of heads * classes = 8 are wider than the 4 inputs.
    gat = small_architecture("gat", features=4, classes=2, **one)
    values = 1_100 * 4 + 100 * 2 + 100 * 4 + 4 * (1_100 + 300) + (4 * 8 + 2 * 8 + 2)
    assert gnn_arms.bytes_moved(gat, nodes, edges, 4) == 4 * values + 4 * 1_100 + 4 * 101


def test_memory_tells_what_fits():
    gpu = 140 * 2**30
    fits = {
        (impl, graph): WORKLOAD.memory_bytes(case(input=graph, impl=impl, device="cuda")) < gpu
        for impl in IMPLEMENTATIONS
        for graph in ("arxiv", "products")
    }
    # Messages of 126 million edges, 256 wide, twice: upstream's eager GCN needs 260 GB as shipped.
    assert not fits["upstream", "products"] and fits["upstream-tuned", "products"]
    assert all(fits[impl, "arxiv"] for impl in IMPLEMENTATIONS)
    halves = [
        WORKLOAD.memory_bytes(case(input="arxiv", dtype=dtype, device="cuda")) for dtype in ("float32", "float16")
    ]
    assert halves[1] < halves[0]


def test_sizes():
    prepared = WORKLOAD.prepare(case(model="gat", input="karate"), data_root=None, seed=0)
    assert prepared.data == "bundled (KarateClub)"
    assert dict(prepared.sizes) == {
        "nodes": 34,
        "edges": 156,
        "max_degree": 17,
        "features": 34,
        "classes": 4,
        "layers": 2,
        "width": 64,
        "heads": 8,
        "parameters": 34 * 64 + 2 * 64 + 64 + 64 * 32 + 2 * 32 + 4,
    }
