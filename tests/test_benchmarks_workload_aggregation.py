"""Sums over neighbours written in several ways: all compute one thing, and what cannot run says why."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import zoo
from benchmarks.families import Prepared, families, gnn_arms, load
from benchmarks.families.aggregation import GRAPHS, WAYS, WORKLOAD, task_of
from benchmarks.plan import Case, expand
from benchmarks.worker import Handler

DTYPES = ["float32", "bfloat16"]
# In bfloat16 some add into the output, which then rounds after each of a hub's neighbours.
CLOSE = {"float32": 1e-6, "bfloat16": 3e-2}
ON_A_CPU = [(way, dtype) for way in WAYS for dtype in DTYPES if (way, dtype) != ("sparse-csr", "bfloat16")]


def case(model: str, **changes: Any) -> Case:
    return Case(**{"family": "aggregation", "model": model, "input": "small", **changes})


def prepare(model: str, **changes: Any) -> Prepared:
    return WORKLOAD.prepare(case(model, **changes), data_root=None, seed=0)


def call(prepared: Prepared) -> torch.Tensor:
    with torch.inference_mode():
        return prepared.model()


def error(output: torch.Tensor, reference: torch.Tensor) -> float:
    assert output.shape == reference.shape
    return float((output.double() - reference.double()).norm() / reference.double().norm())


@pytest.mark.parametrize(("model", "dtype"), ON_A_CPU)
def test_every_way_matches_the_reference(model: str, dtype: str) -> None:
    prepared = prepare(model, dtype=dtype)
    assert prepared.reference().dtype == torch.float64
    output = call(prepared)
    assert output.dtype == getattr(torch, dtype)
    assert error(output, prepared.reference()) < CLOSE[dtype]
    # Calls write nothing that a later one reads.
    assert torch.equal(call(prepared), output)
    prepared.model.x[3] += 1.0
    assert error(call(prepared), output) > 1e-3


def test_ways_agree() -> None:
    first, *others = (call(prepare(model)) for model in WAYS)
    for output in others:
        torch.testing.assert_close(output, first, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("model", [model for model in WAYS if model != "sparse-csr"])
def test_a_sum_is_one_graph(model: str) -> None:
    prepared = prepare(model)
    zoo.compile_regions(prepared.model, backend="aot_eager")
    with torch.inference_mode(), zoo.enforce_budget(prepared.model):
        assert error(prepared.model(), prepared.reference()) < CLOSE["float32"]


def test_a_worker_runs_an_arm() -> None:
    arm = Handler()
    arm.load(workload="aggregation")
    ready = arm.prepare(case=case("operator").to_json(), data_root=None, seed=0)
    assert ready["preparation"].keys() == {"sorted edges"} and ready["model_bytes"] == 300 * 16 * 4
    assert arm.start_up(folder=None)["flops"] == 2 * 1900 * 16
    assert arm.first_call() == {"seconds": None}


def test_a_hub_and_its_level_twin() -> None:
    assert (GRAPHS["uniform"].nodes, GRAPHS["uniform"].edges) == (169_343, 2_315_598)
    hub, level = GRAPHS["hub"], GRAPHS["level"]
    assert (hub.nodes, hub.edges) == (level.nodes, level.edges) == (169_343, 5 * 169_343 + 200_000)
    for graph, most in ((hub, 200_000), (level, 0)):
        _, destinations = graph.edge_index(0)
        degrees = destinations.bincount(minlength=graph.nodes)
        assert most <= int(degrees.max()) < most + 40
        assert 4.0 < float(degrees.float().median()) < 7.0


def test_bytes_are_counted_as_a_layer_of_the_gnn_counts_them() -> None:
    prepared = prepare("operator")
    arch = gnn_arms.Architecture(kind="graphsage", features=16, hidden=16, layers=1, classes=None)
    layer = gnn_arms.bytes_moved(arch, 300, 1900, 4) - 4 * gnn_arms.parameters(arch)
    # A layer of GraphSAGE reads the features apart from the gather as well.
    assert prepared.bytes == layer - 4 * 300 * 16


def test_memory_fits_a_large_gpu() -> None:
    for model in WAYS:
        for name in WORKLOAD.inputs:
            needed = WORKLOAD.memory_bytes(case(model, input=name, device="cuda"))
            assert 1 << 30 < needed < 8 << 30
    graph, width = task_of("uniform-256")
    messages = graph.edges * width * 4
    assert WORKLOAD.memory_bytes(case("index-add", input="uniform-256", device="cuda")) > messages
    assert WORKLOAD.memory_bytes(case("operator", input="uniform-256", device="cuda")) < messages + (1 << 30)


def test_which_arms_there_are() -> None:
    assert "aggregation" in families() and load("aggregation") is WORKLOAD
    bases = [case(m, input=i, device="cuda") for m, i in WORKLOAD.default_races("cuda", quick=False)]
    cases, refused = expand(bases, WORKLOAD.refuses, strategies=["eager+cudagraph", "regional+cudagraph"])
    assert {c.model for c in cases} == set(WAYS) and {c.input for c in cases} == {"uniform-64", "hub-64", "level-64"}
    assert {c.arm for c in cases if c.model == "sparse-csr"} == {"zoo eager + CUDA graph"}
    assert any("no sparse tensors" in why for why in refused.values())
    on_gpu = {"device": "cuda", "dtype": "bfloat16"}
    assert WORKLOAD.refuses(case("sparse-csr", **on_gpu)) is None
    for model, changes, words in (
        ("gather", {}, "model 'gather' is not one of"),
        ("operator", {"input": "hub-41"}, "input 'hub-41' is not one of"),
        ("operator", {"dtype": "float16"}, "dtype 'float16' is not one of"),
        ("operator", {"workload": "train"}, "workload 'train' is not one of"),
        ("operator", {"impl": "upstream"}, "each way is a model"),
        ("operator", {"strategy": "full"}, "nothing stands around"),
        ("sparse-csr", {"strategy": "regional"}, "no sparse tensors"),
        ("sparse-csr", {"dtype": "bfloat16"}, "no sparse product in bfloat16"),
    ):
        assert words in str(WORKLOAD.refuses(case(model, **changes)))
        with pytest.raises(ValueError, match=words):
            prepare(model, **changes)
