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
from benchmarks import workloads
from benchmarks.families import gnn_upstream, gnn_work, graphs
from benchmarks.families.gnn import KINDS, WORKLOAD, architecture
from benchmarks.families.gnn_work import Architecture
from benchmarks.families.graphs import GraphSpec
from benchmarks.plan import IMPLEMENTATIONS, Case


def case(**changes: Any) -> Case:
    return Case(**{"family": "gnn", "model": "gcn", "input": "karate", **changes})


def error(output: torch.Tensor, reference: torch.Tensor) -> float:
    return float((output.double() - reference).norm() / reference.norm())


def run(prepared: workloads.Prepared) -> torch.Tensor:
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


# --- arms ---


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("model", WORKLOAD.models)
def test_every_implementation_matches_the_reference(model: str, impl: str):
    prepared = WORKLOAD.prepare(case(model=model, impl=impl), data_root=None, seed=0)
    reference = prepared.reference()
    assert reference.dtype == torch.float64 and prepared.reference_dtype == "float64"
    assert not prepared.model.training
    output = run(prepared)
    assert output.shape == (34, 256 if "-8x256" in model else 4)
    assert error(output, reference) < 1e-5


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_implementations_agree_where_edges_repeat(kind: str, impl: str):
    # Without its duplicates the graph would give other numbers, so an arm that merges them is found here.
    prepared = WORKLOAD.prepare(case(model=kind, impl=impl, input="cora-powerlaw"), data_root=None, seed=1)
    assert prepared.data == "generated, power law"
    assert error(run(prepared), prepared.reference()) < 1e-5


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16(kind: str, impl: str):
    prepared = WORKLOAD.prepare(case(model=kind, impl=impl, dtype="bfloat16"), data_root=None, seed=0)
    output = run(prepared)
    assert output.dtype == torch.bfloat16
    assert 1e-5 < error(output, prepared.reference()) < 2e-2


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
        assert all(
            gnn_upstream.tuned_layout(case(strategy=strategy), kind) == "sorted" for strategy in ("eager", "full")
        )
        return
    graph, arch = skewed_graph(), small_architecture(kind)
    shipped = gnn_upstream.build(arch, seed=3).double()
    tuned, inputs = gnn_upstream.tune(arch, shipped, graph.edge_index, graph.nodes, layout)
    assert (inputs["edge_index"].layout is torch.sparse_csr) == (layout == "csr")
    x = graph.x.double()
    with torch.no_grad():
        assert error(tuned(x, **inputs), shipped(x, graph.edge_index)) < 1e-7


@pytest.mark.parametrize("kind", KINDS)
def test_tuned_arms_compile_without_a_break(kind: str):
    graph, arch = skewed_graph(), small_architecture(kind)
    layout = gnn_upstream.tuned_layout(case(strategy="full"), kind)
    tuned, inputs = gnn_upstream.tune(arch, gnn_upstream.build(arch, seed=0), graph.edge_index, graph.nodes, layout)
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


def test_seeds():
    one, again, other = (WORKLOAD.prepare(case(input="cora"), data_root=None, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(one.inputs["x"], again.inputs["x"])
    assert torch.equal(run(one), run(again))
    weights = [next(prepared.model.parameters()) for prepared in (one, other)]
    assert not torch.equal(*weights) and not torch.equal(one.inputs["x"], other.inputs["x"])


def test_building_leaves_the_random_state_alone():
    before = torch.random.get_rng_state()
    gnn_upstream.build(small_architecture("gcn"), seed=0)
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.parametrize("kind", KINDS)
def test_reference_in_blocks_is_the_reference(kind: str):
    graph, arch = skewed_graph(), small_architecture(kind)
    model = gnn_upstream.build(arch, seed=0).double()
    x = graph.x.double()
    with torch.no_grad():
        expected = model(x, graph.edge_index)
    for budget in (5_000, 50_000, 10**9):
        output = gnn_upstream.output_in_blocks(arch, model, x, graph.edge_index, budget=budget)
        assert error(output, expected) < 1e-7  # tune() rounds GCN's weights to the model's dtype, through float32


def test_reference_falls_back_to_blocks_where_memory_is_short(monkeypatch: pytest.MonkeyPatch):
    graph, arch = skewed_graph(), small_architecture("gcn")
    model = gnn_upstream.build(arch, seed=0)
    expected = gnn_upstream.reference_output(arch, model, graph.x, graph.edge_index)
    monkeypatch.setattr(gnn_upstream, "_free_bytes", lambda device: 1_000)
    monkeypatch.setattr(type(model), "forward", lambda *args: pytest.fail("ran the whole model at once"))
    assert error(gnn_upstream.reference_output(arch, model, graph.x, graph.edge_index), expected) < 1e-7


# --- what is run, and what is not ---


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("quick", [False, True])
def test_default_races_exist(device: str, quick: bool):
    races = WORKLOAD.default_races(device, quick)
    assert races and all(
        WORKLOAD.refuses(case(model=model, input=graph, device=device)) is None for model, graph in races
    )
    assert WORKLOAD.dtypes(device)[0] == "float32"


def test_default_races_are_small_on_a_cpu_and_full_size_on_a_gpu():
    assert WORKLOAD.default_races("cpu", quick=False) == [("gcn", "karate")]
    assert {race for race in WORKLOAD.default_races("cuda", quick=False) if race[1] == "arxiv"} == {
        (kind, "arxiv") for kind in KINDS
    }


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"impl": "upstream", "strategy": "hierarchical"}, "declared regions"),
        ({"dtype": "float16", "device": "cpu"}, "dtype 'float16' is not one of float32, bfloat16 on cpu"),
        ({"model": "gin"}, "model 'gin' is not one of gcn"),
        ({"input": "citeseer"}, "input 'citeseer'"),
        ({"workload": "training"}, "workload 'training'"),
    ],
)
def test_refusals(changes: dict[str, Any], reason: str):
    refused = case(**{"device": "cuda", **changes})
    assert reason in (WORKLOAD.refuses(refused) or "")
    with pytest.raises(ValueError, match=reason.split("'")[0]):
        WORKLOAD.prepare(refused, data_root=None, seed=0)


@pytest.mark.parametrize(
    "changes",
    [
        {"strategy": "hierarchical"},
        {"strategy": "full", "mode": "reduce-overhead", "impl": "upstream"},
        {"strategy": "regional", "cuda_graph": True},
        {"strategy": "regional", "mode": "max-autotune-no-cudagraphs"},
        {"impl": "upstream-tuned", "cuda_graph": True, "dtype": "float16"},
    ],
)
def test_what_is_not_refused(changes: dict[str, Any]):
    assert WORKLOAD.refuses(case(device="cuda", **changes)) is None


def test_families_by_name():
    assert all(workloads.load(family).family == family for family in workloads.families())
    assert workloads.load("gnn") is WORKLOAD
    with pytest.raises(ValueError, match="no family 'gnm'; choose one of .*gnn"):
        workloads.load("gnm")


# --- formulas ---


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
    model = gnn_upstream.build(arch, seed=0)
    assert gnn_work.parameters(arch) == sum(parameter.numel() for parameter in model.parameters())
    signatures = {tuple((name, p.shape) for name, p in conv.named_parameters()) for conv in model.convs}
    assert len(signatures) == len(set(arch.stack())) == (1 if classes is None else 2)


@pytest.mark.parametrize("kind", KINDS)
def test_dense_flops_are_those_counted_on_eager(kind: str):
    graph, arch = skewed_graph(), small_architecture(kind)
    model = gnn_upstream.build(arch, seed=0)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(graph.x, graph.edge_index)
    # Without edges only the self-loops' sums and GAT's scores are left beside the linear maps.
    beside = 0
    for layer in arch.stack():
        loops = graph.nodes * (layer.transformed if kind == "gat" else min(layer.inputs, layer.outputs))
        beside += 2 * loops * arch.self_loops + 4 * graph.nodes * layer.transformed * (kind == "gat")
    assert gnn_work.flops(arch, graph.nodes, 0) - beside == counter.get_total_flops()


def test_flops_of_the_aggregation():
    arch = small_architecture("graphsage", features=12, hidden=16, layers=2, classes=5)
    assert gnn_work.flops(arch, 100, 1_000) - gnn_work.flops(arch, 100, 0) == 2 * 1_000 * (12 + 5)
    arch = small_architecture("gat", features=12, hidden=16, layers=2, classes=5)
    assert gnn_work.flops(arch, 100, 1_000) - gnn_work.flops(arch, 100, 0) == 2 * 1_000 * (16 + 4 * 5)


def test_bytes_by_hand():
    nodes, edges = 100, 1_000
    one = {"layers": 1, "hidden": 8}
    # Aggregates the narrow input first: gather, output, degree factors, weights; then indices and offsets.
    gcn = small_architecture("gcn", features=4, classes=8, **one)
    values = 1_100 * 4 + 100 * 8 + 100 + (4 * 8 + 8)
    assert gnn_work.bytes_moved(gcn, nodes, edges, 4) == 4 * values + 4 * 1_100 + 4 * 101
    assert gnn_work.bytes_moved(gcn, nodes, edges, 2) == 2 * values + 4 * 1_100 + 4 * 101
    # Transforms first: reads the wide input, writes the narrow rows that it then gathers.
    gcn = small_architecture("gcn", features=8, classes=4, **one)
    values = 1_100 * 4 + 100 * 4 + 100 * (8 + 4) + 100 + (8 * 4 + 4)
    assert gnn_work.bytes_moved(gcn, nodes, edges, 4) == 4 * values + 4 * 1_100 + 4 * 101
    # No self-loops; each node's own row as well.
    sage = small_architecture("graphsage", features=4, classes=8, **one)
    values = 1_000 * 4 + 100 * 8 + 100 * 4 + (2 * 4 * 8 + 8)
    assert gnn_work.bytes_moved(sage, nodes, edges, 4) == 4 * values + 4 * 1_000 + 4 * 101
    # One layer of classes averages its heads: rows of heads * classes = 8 are wider than the 4 inputs.
    gat = small_architecture("gat", features=4, classes=2, **one)
    values = 1_100 * 4 + 100 * 2 + 100 * 4 + 4 * (1_100 + 300) + (4 * 8 + 2 * 8 + 2)
    assert gnn_work.bytes_moved(gat, nodes, edges, 4) == 4 * values + 4 * 1_100 + 4 * 101


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
