"""Training of GNNs in the harness: every implementation takes the same steps."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch_geometric.loader
from torch._dynamo.utils import counters
from torch.utils import _pytree as pytree

from benchmarks import strategies
from benchmarks.families import gnn_arms, gnn_train, graphs
from benchmarks.families.gnn import KINDS, WORKLOAD, _implementation
from benchmarks.families.gnn_arms import architecture
from benchmarks.plan import Case
from benchmarks.training import Trainer

CASE = Case(family="gnn", model="gcn", input="karate", workload="train")


@pytest.mark.parametrize("model", KINDS)
def test_the_loss_falls(model: str):
    case = replace(CASE, model=model)
    arm = Trainer(case, WORKLOAD.prepare(case, data_root=None, seed=0))
    curve = arm.losses(arm.eager(), 40)
    assert curve[-10:].mean() < 0.9 * curve[:10].mean()


def test_each_step_has_labels_of_its_own_and_the_same_each_time():
    training = WORKLOAD.prepare(CASE, data_root=None, seed=0).training
    assert training is not None
    assert not torch.equal(training.batch(0), training.batch(1))
    assert torch.equal(training.batch(3), training.batch(3))
    left_out = (training.batch(0) == -100).float().mean()
    assert 0.2 < left_out < 0.8
    other = WORKLOAD.prepare(CASE, data_root=None, seed=1).training
    assert other is not None and not torch.equal(training.batch(0), other.batch(0))


def test_work_is_more_than_that_of_inference():
    train = WORKLOAD.prepare(CASE, data_root=None, seed=0)
    inference = WORKLOAD.prepare(replace(CASE, workload="inference"), data_root=None, seed=0)
    assert inference.flops is not None and train.flops is not None
    assert 2 * inference.flops < train.flops < 3 * inference.flops
    assert train.bytes == 2 * inference.bytes
    assert (train.count, train.unit) == (34, "nodes")


@pytest.mark.parametrize("model", ["gcn", "graphsage"])
@pytest.mark.parametrize(("dtype", "held"), [("float32", torch.float32), ("bfloat16", torch.bfloat16)])
def test_a_tuned_adjacency_is_of_the_dtype_that_gradients_have(model: str, dtype: str, held: torch.dtype):
    # A CPU has no sparse product in bfloat16: what a GPU's arm would multiply is made, and not multiplied.
    case = replace(CASE, model=model, impl="upstream-tuned", dtype=dtype, device="cuda")
    graph = graphs.load("karate", data_root=None, features=None, seed=0, device=torch.device("cpu"))
    arch = architecture(model, "karate", features=graph.x.size(1), classes=graph.classes)
    tuned, inputs, what = _implementation(case, arch, gnn_arms.build(arch, seed=0), graph)
    assert what == "CSR adjacency" and inputs["edge_index"].values().dtype is held
    assert {parameter.dtype for parameter in tuned.parameters()} == {torch.float32}


SAMPLED = replace(CASE, model="graphsage", input="karate-sampled")


@pytest.mark.parametrize(
    ("graph", "impl"), [*(("karate", impl) for impl in ("zoo", "upstream", "upstream-tuned")), ("cora-powerlaw", "zoo")]
)
def test_sampled_losses_are_the_reference_s(graph: str, impl: str):
    case = replace(SAMPLED, impl=impl, input=f"{graph}-sampled")
    prepared = WORKLOAD.prepare(case, data_root=None, seed=0)
    arm = Trainer(case, prepared)
    step = arm.eager()
    torch.testing.assert_close(arm.losses(step).double(), prepared.reference(), rtol=1e-4, atol=0)
    if graph != "karate":
        return
    with arm.timed():
        losses = [step().item() for _ in range(40)]
    assert sum(losses[-10:]) < 0.9 * sum(losses[:10])


def test_sampled_shapes_are_declared():
    case = replace(SAMPLED, strategy="regional")
    prepared = WORKLOAD.prepare(case, data_root=None, seed=0)
    training = prepared.training
    assert training is not None and training.loader is not None
    # Of every tensor, so of each layer.
    declared, met = (
        {tuple(leaf.shape for leaf in pytree.tree_leaves(batch) if leaf is not None) for batch in batches}
        for batches in (training.shapes, itertools.chain(*(training.loader() for _ in range(3))))
    )
    assert met <= declared and len(declared) == len(training.shapes)
    assert (prepared.count, prepared.unit) == (8, "seeds")


def test_tuned_upstream_compiles_once_for_batches_of_many_sizes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("BENCHMARKS_BACKEND", "aot_eager")
    case = replace(SAMPLED, impl="upstream-tuned", input="cora-sampled", strategy="full")
    prepared = WORKLOAD.prepare(case, data_root=None, seed=0)
    arm = Trainer(case, prepared)
    torch._dynamo.reset()
    step = arm.compiled(strategies.apply(case, prepared))
    with arm.timed():
        step()
        # The first batch that is met may have a size that equals another one; after it nothing is compiled.
        step()
        before = counters["stats"]["unique_graphs"]
        for _ in range(12):
            step()
    assert counters["stats"]["unique_graphs"] == before
    assert prepared.training is not None and prepared.training.loader is not None
    assert len({len(batch["nodes"]) for batch in prepared.training.loader()}) > 5
    assert WORKLOAD.refuses(replace(case, dynamic=True)) == "upstream-tuned is compiled for batches of all sizes anyway"


def test_rounds_are_epochs_of_new_batches():
    training = WORKLOAD.prepare(SAMPLED, data_root=None, seed=0).training
    assert training is not None and training.loader is not None
    first, second = list(training.loader()), list(training.loader())
    assert len(first) == len(second) == training.round
    assert not torch.equal(first[0].seeds, second[0].seeds)


def test_every_graph_can_be_sampled_and_needs_less_memory_than_the_whole_of_it():
    for name in graphs.INPUTS:
        case = replace(SAMPLED, input=f"{name}-sampled", device="cuda")
        assert WORKLOAD.refuses(case) is None
    for impl in ("zoo", "upstream"):
        products = replace(SAMPLED, input="products-sampled", device="cuda", impl=impl)
        assert 10e9 < WORKLOAD.memory_bytes(products) < WORKLOAD.memory_bytes(replace(products, input="products"))


class Loader:
    """In place of torch-geometric's: all neighbours of one hop, whatever was asked for."""

    made: list[Loader]

    def __init__(self, data: Any, **options: Any) -> None:
        self.data, self.options = data, options
        self.made.append(self)

    def __iter__(self) -> Iterator[SimpleNamespace]:
        seeds, size = self.options["input_nodes"], self.options["batch_size"]
        order = torch.randperm(len(seeds), generator=self.options["generator"])
        for part in seeds[order].split(size):
            source, destination = self.data.edge_index
            edges = torch.isin(destination, part).nonzero().flatten()
            others = source[edges].unique()
            nodes = torch.cat([part, others[~torch.isin(others, part)]])
            place = torch.full((self.data.num_nodes,), -1)
            place[nodes] = torch.arange(len(nodes))
            yield SimpleNamespace(
                n_id=nodes,
                edge_index=place[self.data.edge_index[:, edges]],
                batch_size=len(part),
                num_sampled_nodes=[len(part), len(nodes) - len(part), 0],
                num_sampled_edges=[len(edges), 0],
            )


@pytest.mark.parametrize("impl", ["upstream", "upstream-tuned"])
def test_the_library_s_loader_where_it_can_be_had(impl: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Loader, "made", [], raising=False)
    monkeypatch.setattr(torch_geometric.loader, "NeighborLoader", Loader)
    monkeypatch.setattr(gnn_train, "library_samples", lambda: True)
    case = replace(SAMPLED, impl=impl)

    def epochs() -> list[list[dict[str, Any]]]:
        training = WORKLOAD.prepare(case, data_root=None, seed=3).training
        assert training is not None and training.loader is not None
        return [list(training.loader()) for _ in range(2)]

    first, again = epochs(), epochs()
    # One loader for all epochs, whose workers stay.
    options = Loader.made[0].options
    assert len(Loader.made) == 2
    assert options.pop("generator").initial_seed() == 3
    seeds = options.pop("input_nodes")
    assert options == {
        "num_neighbors": [15, 10],
        "batch_size": 8,
        "is_sorted": True,
        "filter_per_worker": True,
        "shuffle": True,
        "num_workers": 1,
        "persistent_workers": True,
        "pin_memory": False,
    }
    edges = Loader.made[0].data.edge_index
    assert edges.shape == (2, 156) and (edges[1].diff() >= 0).all()
    # In an order of its own each epoch, and the same when it is run again.
    orders = [
        [torch.cat([batch["nodes"][: batch["seeds"]] for batch in epoch]) for epoch in run] for run in (first, again)
    ]
    assert torch.equal(orders[0][0], orders[1][0]) and torch.equal(orders[0][1], orders[1][1])
    assert not torch.equal(orders[0][0], orders[0][1])
    assert all(torch.equal(order.sort().values, seeds.sort().values) for order in orders[0])

    prepared = WORKLOAD.prepare(case, data_root=None, seed=3)
    arm = Trainer(case, prepared)
    step = arm.eager()
    with arm.timed():
        losses = [step().item() for _ in range(40)]
    assert sum(losses[-10:]) < 0.9 * sum(losses[:10])
