"""What only the GNNs' arms do: layouts of the adjacency, references in blocks, and sampled batches."""

import dataclasses
import gc
import itertools
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch_geometric.loader
from torch._dynamo.utils import counters

from benchmarks import strategies
from benchmarks.families import gnn, gnn_arms, graphs
from benchmarks.families.gnn import KINDS, WORKLOAD, _implementation
from benchmarks.families.gnn_arms import Architecture, architecture
from benchmarks.families.graphs import GraphSpec
from benchmarks.plan import IMPLEMENTATIONS
from benchmarks.strategies import Trainer
from tests import workloads
from tests.workloads import Arms, call, error, tensors
from zoo.gnn import NeighborSampler

SAMPLED = {"model": "graphsage", "input": "karate-sampled", "workload": "train"}

ARMS = Arms(family="gnn", model="gcn", input="karate")
case, prepare = ARMS.case, ARMS.prepare


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
def test_stacks_and_graphs_with_repeated_edges_match_the_reference(kind: str, impl: str):
    prepared = prepare(model=f"{kind}-8x256", impl=impl)
    assert prepared.reference().shape == (34, 256) and error(call(prepared), prepared.reference()) < 1e-5
    # Without its duplicates the graph would give other numbers, so an arm that merges them is found here.
    prepared = prepare(seed=1, model=kind, impl=impl, input="cora-powerlaw")
    assert prepared.data == "generated, power law"
    assert error(call(prepared), prepared.reference()) < 1e-5


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_the_graph_is_static_and_the_features_are_not(impl: str):
    prepared = prepare(impl=impl)
    assert "edge_index" in prepared.static and {*prepared.static, "x"} == {*prepared.inputs} != {*prepared.static}


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


@pytest.mark.parametrize(
    ("impl", "dynamic", "expected"),
    [("upstream", False, None), ("upstream", True, True), ("upstream-tuned", False, False)],
)
def test_regional_arms_of_upstream(monkeypatch: pytest.MonkeyPatch, impl: str, dynamic: bool, expected: bool | None):
    seen: list[dict[str, Any]] = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **options: seen.append({"module": self, **options}))
    prepared = prepare(impl=impl, strategy="regional", dynamic=dynamic)
    prepared.compile_regions(prepared.model, backend="inductor", mode="default", dynamic=dynamic)
    assert [options.pop("module") for options in seen] == list(prepared.model.convs)
    assert seen == [{"backend": "inductor", "mode": "default", "dynamic": expected}] * 2


@pytest.mark.parametrize("impl", ["upstream-tuned", "zoo"])
def test_an_arm_holds_only_what_it_runs_on(monkeypatch: pytest.MonkeyPatch, impl: str):
    loaded: list[weakref.ref[torch.Tensor]] = []
    load = graphs.load

    def spy(*args: Any, **options: Any) -> graphs.Graph:
        graph = load(*args, **options)
        loaded.extend((weakref.ref(graph.x), weakref.ref(graph.edge_index)))
        return graph

    monkeypatch.setattr(graphs, "load", spy)
    prepared = prepare(impl=impl, dtype="bfloat16")
    gc.collect()
    assert [ref() for ref in loaded] == [None, None]  # float32 features and raw edges would count as the arm's memory
    assert prepared.reference().shape == (34, 4)


@pytest.mark.parametrize("kind", ["gcn", "graphsage"])
def test_the_reference_of_a_large_graph_holds_no_messages(kind: str, monkeypatch: pytest.MonkeyPatch):
    graph, arch = skewed_graph(), small_architecture(kind)
    model = gnn_arms.build(arch, seed=0)
    expected = gnn_arms.reference_output(arch, model, graph.x, graph.edge_index)
    monkeypatch.setattr(gnn_arms, "LARGE_EDGES", 1)
    made: list[int] = []
    csr = gnn_arms.csr
    monkeypatch.setattr(gnn_arms, "csr", lambda *given: (made.append(1), csr(*given))[1])
    found = gnn_arms.reference_output(arch, model, graph.x, graph.edge_index)
    assert made and error(found, expected) < 1e-7


@pytest.mark.parametrize("model", ["gcn", "graphsage"])
@pytest.mark.parametrize(("dtype", "held"), [("float32", torch.float32), ("bfloat16", torch.bfloat16)])
def test_a_tuned_adjacency_is_of_the_dtype_that_gradients_have(model: str, dtype: str, held: torch.dtype):
    # A CPU has no sparse product in bfloat16: what a GPU's arm would multiply is made, and not multiplied.
    asked = case(model=model, impl="upstream-tuned", dtype=dtype, device="cuda", workload="train")
    graph = graphs.load("karate", data_root=None, features=None, seed=0, device=torch.device("cpu"))
    arch = architecture(model, "karate", features=graph.x.size(1), classes=graph.classes)
    tuned, inputs, what = _implementation(asked, arch, gnn_arms.build(arch, seed=0), graph)
    assert what == "CSR adjacency" and inputs["edge_index"].values().dtype is held
    assert {parameter.dtype for parameter in tuned.parameters()} == {torch.float32}


def test_sampled_losses_of_a_skewed_graph_are_the_reference_s():
    prepared = prepare(**SAMPLED | {"input": "cora-powerlaw-sampled"})
    arm = Trainer(case(**SAMPLED | {"input": "cora-powerlaw-sampled"}), prepared)
    torch.testing.assert_close(arm.losses(arm.eager()).double(), prepared.reference(), rtol=1e-4, atol=0)


def test_sampled_shapes_are_declared_and_epochs_differ():
    training = prepare(**SAMPLED, strategy="regional").training
    epochs = [list(training.loader()) for _ in range(3)]
    assert {len(epoch) for epoch in epochs} == {training.round}
    assert not torch.equal(epochs[0][0].seeds, epochs[1][0].seeds)
    # Of every tensor, so of each layer.
    declared, met = (
        {tuple(tensor.shape for tensor in tensors(batch)) for batch in batches}
        for batches in (training.shapes, itertools.chain(*epochs))
    )
    assert met <= declared and len(declared) == len(training.shapes)


def test_tuned_upstream_compiles_once_for_batches_of_many_sizes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("BENCHMARKS_BACKEND", "aot_eager")
    asked = case(**SAMPLED | {"impl": "upstream-tuned", "input": "cora-sampled", "strategy": "full"})
    prepared = workloads.prepare(asked)
    arm = Trainer(asked, prepared)
    torch._dynamo.reset()
    step = arm.compiled(strategies.apply(asked, prepared))
    with arm.timed():
        step()
        # The first batch that is met may have a size that equals another one; after it nothing is compiled.
        step()
        before = counters["stats"]["unique_graphs"]
        for _ in range(12):
            step()
    assert counters["stats"]["unique_graphs"] == before
    assert len({len(batch["nodes"]) for batch in prepared.training.loader()}) > 5
    assert "compiled for batches of all sizes" in WORKLOAD.refuses(dataclasses.replace(asked, dynamic=True))


class Loader:
    """In place of torch-geometric's: what the zoo's sampler draws, in its form."""

    made: list[Any]

    def __init__(self, data: Any, **options: Any) -> None:
        self.options, self.epochs = options, itertools.count(1)
        self.sampler = NeighborSampler(
            data.edge_index, fanouts=options["num_neighbors"], batch_size=options["batch_size"],
            seeds=options["input_nodes"], num_nodes=data.num_nodes, workers=0,
        )  # fmt: skip
        self.made.append(self)

    def __iter__(self) -> Iterator[SimpleNamespace]:
        for part in self.sampler.subgraphs(next(self.epochs)):
            yield SimpleNamespace(
                n_id=part.nodes, edge_index=part.edge_index, batch_size=len(part.seeds),
                num_sampled_nodes=part.hop_nodes, num_sampled_edges=part.hop_edges,
            )  # fmt: skip


@pytest.mark.parametrize("impl", ["upstream", "upstream-tuned"])
def test_the_library_s_loader_where_it_can_be_had(impl: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Loader, "made", [], raising=False)
    monkeypatch.setattr(torch_geometric.loader, "NeighborLoader", Loader)
    monkeypatch.setattr(gnn, "library_samples", lambda: True)

    def epochs() -> list[list[dict[str, Any]]]:
        training = prepare(seed=3, **SAMPLED, impl=impl).training
        return [list(training.loader()) for _ in range(2)]

    first, again = epochs(), epochs()
    # One loader for all epochs, whose workers stay.
    options = Loader.made[0].options
    assert len(Loader.made) == 2
    assert options.pop("generator").initial_seed() == 3
    seeds = options.pop("input_nodes")
    assert (options["num_neighbors"], options["batch_size"], options["shuffle"]) == ([15, 10], 8, True)
    # In an order of its own each epoch, and the same when it is run again.
    orders = [
        [torch.cat([each["nodes"][: each["seeds"]] for each in epoch]) for epoch in run] for run in (first, again)
    ]
    assert torch.equal(orders[0][0], orders[1][0]) and torch.equal(orders[0][1], orders[1][1])
    assert not torch.equal(orders[0][0], orders[0][1])
    assert all(torch.equal(order.sort().values, seeds.sort().values) for order in orders[0])
    arm = Trainer(case(**SAMPLED, impl=impl), prepare(seed=3, **SAMPLED, impl=impl))
    with arm.timed():
        assert arm.eager()().isfinite()
