"""Attention, sums over neighbours and small blocks, each written in several ways that compute one thing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

import zoo
from benchmarks.compiler import cache_environment, cached_files
from benchmarks.families.aggregation import GRAPHS, WAYS
from benchmarks.families.attention import DECODE_INPUTS, PACKED_INPUTS
from benchmarks.families.attention_choices import CHOICES, DECODE
from benchmarks.families.calls import GRAPHS as CALLED_GRAPHS
from benchmarks.plan import Case
from benchmarks.worker import Handler
from tests.workloads import call, error, prepare

# On a CPU one runs eagerly and holds all scores, the other goes through torch's older kind of nested tensors.
pytestmark = [
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage"),
]


def case(model: str, **changes: Any) -> Case:
    if model in WAYS:
        return Case(**{"family": "aggregation", "model": model, "input": "small", **changes})
    chosen = "small-3x256" if model in DECODE else "skewed-4x32"
    return Case(**{"family": "attention", "model": model, "input": chosen, **changes})


ATTENTION = [model for model in CHOICES if model != "packed-varlen"]  # that one needs a GPU
FLOAT32 = [(model, "float32", 1e-6) for model in (*ATTENTION, *WAYS)]
# Some add into the output, which then rounds after each of a hub's neighbours.
BFLOAT16 = [(model, "bfloat16", 3e-2) for model in WAYS if model != "sparse-csr"]


@pytest.mark.parametrize(("model", "dtype", "close"), FLOAT32 + BFLOAT16)
def test_every_way_matches_the_reference(model: str, dtype: str, close: float) -> None:
    prepared = prepare(case(model, dtype=dtype))
    output = call(prepared)
    assert output.dtype == getattr(torch, dtype) and error(output, prepared.reference()) < close
    assert torch.equal(call(prepared), output), "calls write nothing that a later one reads"
    if model in WAYS:
        prepared.model.x[3] += 1.0
        assert error(call(prepared), output) > 1e-3


@pytest.mark.parametrize("model", [name for name in (*ATTENTION, *WAYS) if name not in ("packed-nested", "sparse-csr")])
def test_a_way_is_one_graph(model: str) -> None:
    prepared = prepare(case(model))
    zoo.compile_regions(prepared.model, backend="aot_eager")
    with zoo.enforce_budget(prepared.model):
        assert error(call(prepared), prepared.reference()) < 1e-6


@pytest.mark.parametrize("model", ATTENTION)
def test_slots_and_rows_of_others_are_not_seen(model: str) -> None:
    prepared = prepare(case(model))
    layers = prepared.model
    held = [*layers.tokens, *(cache for cache in layers.caches if cache is not None)]
    assert {id(each) for each in held} == {id(each) for each in layers.buffers()}, "where the harness finds them"

    def outputs() -> torch.Tensor:
        with torch.inference_mode():
            return torch.stack(layers())

    expected = outputs()
    if model in DECODE:
        for cache in layers.caches:
            for row, position in enumerate(DECODE_INPUTS["small-3x256"].positions().tolist()):
                cache[:, row, :, position + 1 :] = 9.0
        assert torch.equal(outputs(), expected)
        layers.caches[0][1, 0, 0, 0] += 1.0
    else:
        layout, own = CHOICES[model].layout, slice(0, int(PACKED_INPUTS["skewed-4x32"].lengths()[0]))
        first = {"packed": own, "padded": 0, "apart": (slice(None), own)}[layout]
        with torch.inference_mode():
            layers.tokens[0][first] += 1.0
        kept = torch.ones_like(expected, dtype=torch.bool)
        kept[0, 0 if layout == "padded" else own] = False
        torch.testing.assert_close(outputs()[kept], expected[kept], rtol=0, atol=1e-6)
    assert error(outputs(), expected) > 1e-3


@pytest.mark.parametrize("name", DECODE_INPUTS)
def test_half_of_the_slots_are_filled(name: str) -> None:
    task = DECODE_INPUTS[name]
    assert task.seen / (task.rows * task.slots) == pytest.approx(0.5, abs=0.01)
    assert all(0 <= position < task.slots for position in task.positions().tolist())


def test_a_hub_and_its_level_twin() -> None:
    hub, level = GRAPHS["hub"], GRAPHS["level"]
    assert (hub.nodes, hub.edges) == (level.nodes, level.edges) == (169_343, 5 * 169_343 + 200_000)
    for graph, most in ((hub, 200_000), (level, 0)):
        degrees = graph.edge_index(0)[1].bincount(minlength=graph.nodes)
        assert most <= int(degrees.max()) < most + 40
        assert 4.0 < float(degrees.float().median()) < 7.0


# Small blocks: the class has as many graphs as the input says.

CALLS = Case(family="calls", model="block-8", input="graphs-8", strategy="regional")


@pytest.mark.slow
@pytest.mark.parametrize(("workload", "dtype"), [("inference", "float32"), ("train", "bfloat16")])
@pytest.mark.parametrize(("strategy", "others"), [("eager", 0), ("full", 0), ("regional", 7)])
def test_an_arm_has_the_graphs_of_its_input(
    eager_backend: None, tmp_path: Path, workload: str, dtype: str, strategy: str, others: int
) -> None:
    counters.clear()
    one = Case(**{**CALLS.to_json(), "workload": workload, "dtype": dtype, "strategy": strategy})
    arm = Handler()
    arm.load(workload="calls")
    assert arm.prepare(case=one.to_json(), data_root=None, seed=0)["sizes"]["graphs"] == 8
    assert counters["stats"]["unique_graphs"] == len(arm.prepared.model.others) == others
    arm.start_up(folder=str(tmp_path / "start-up") if strategy != "eager" else None)
    first = arm.first_call()
    assert strategy == "eager" or (first["graphs"] == 1 and not first["breaks"])
    assert arm.check(reference=str(tmp_path / "reference.pt"))["error"] < (1e-5 if dtype == "float32" else 3e-2)
    arm.round(calls=2)
    assert arm.kernels()["recompiles"] == []


@pytest.mark.slow
def test_the_other_graphs_are_in_another_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(CALLED_GRAPHS, "graphs-8", 2)
    for name, folder in cache_environment(tmp_path).items():
        monkeypatch.setenv(name, folder)
    assert len(prepare(CALLS).model.others) == 1 and cached_files() == 0  # type: ignore[arg-type]
