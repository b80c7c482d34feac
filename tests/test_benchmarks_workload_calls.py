"""Calls of small regions: the class has as many graphs as the input says, and every arm matches the reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from benchmarks.compiler import cache_environment, cached_files
from benchmarks.families import families, load
from benchmarks.families.calls import GRAPHS, WORKLOAD
from benchmarks.plan import Case, expand
from benchmarks.worker import Handler


def case(**changes: Any) -> Case:
    return Case(**{"family": "calls", "model": "block-8", "input": "graphs-8", "strategy": "regional", **changes})


@pytest.mark.slow
@pytest.mark.parametrize("workload", ["inference", "train"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("strategy", "others"), [("eager", 0), ("full", 0), ("regional", 7)])
def test_an_arm_has_the_graphs_of_its_input(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, workload: str, dtype: str, strategy: str, others: int
) -> None:
    monkeypatch.setenv("BENCHMARKS_BACKEND", "aot_eager")
    torch.compiler.reset()
    counters.clear()
    arm = Handler()
    arm.load(workload="calls")
    ready = arm.prepare(case=case(workload=workload, dtype=dtype, strategy=strategy).to_json(), data_root=None, seed=0)
    assert ready["sizes"]["graphs"] == 8
    assert counters["stats"]["unique_graphs"] == len(arm.prepared.model.others) == others
    compiled = strategy != "eager"
    arm.start_up(folder=str(tmp_path / "start-up") if compiled else None)
    first = arm.first_call()
    if compiled:
        assert first["graphs"] == 1 and not first["breaks"]
    check = arm.check(reference=str(tmp_path / "reference.pt"))
    assert check["error"] < (1e-5 if dtype == "float32" else 3e-2)
    arm.round(calls=2)
    assert arm.kernels()["recompiles"] == []
    torch.compiler.reset()


@pytest.mark.slow
def test_the_other_graphs_are_in_another_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(GRAPHS, "graphs-8", 2)
    for name, folder in cache_environment(tmp_path).items():
        monkeypatch.setenv(name, folder)
    torch.compiler.reset()
    prepared = WORKLOAD.prepare(case(), data_root=None, seed=0)
    assert len(prepared.model.others) == 1 and cached_files() == 0  # type: ignore[arg-type]
    torch.compiler.reset()


def test_which_arms_there_are() -> None:
    assert "calls" in families() and load("calls") is WORKLOAD
    races = WORKLOAD.default_races("cuda", quick=False)
    cases, refused = expand([case(model=model, input=name, device="cuda") for model, name in races], WORKLOAD.refuses)
    arms = ["zoo eager", "zoo full", "zoo regional", "zoo regional + CUDA graph", "zoo regional + CUDA graph (A/A)"]
    assert [one.arm for one in cases] == arms * 3
    assert {one.input for one in cases} == {"graphs-1", "graphs-8", "graphs-24"}
    assert set(refused.values()) == {"these blocks are of no library"}
    assert WORKLOAD.default_races("cpu", quick=True) == [("block-8", "graphs-1")]
    with pytest.raises(ValueError, match="of no library"):
        WORKLOAD.prepare(case(impl="upstream"), data_root=None, seed=0)
