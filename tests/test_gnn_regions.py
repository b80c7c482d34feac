"""The regions: one graph at any depth, no break, no recompile for another graph, and the same numbers."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

import zoo
from zoo.gnn import graph as graphs

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
