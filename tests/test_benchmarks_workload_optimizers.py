"""A step of AdamW by every arm: all give the parameters of the same step in float64, and what cannot run says why."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.families import optimizers
from benchmarks.families.optimizers import PARAMETERS, WORKLOAD, make_optimizer
from benchmarks.plan import IMPLEMENTATIONS, Case
from benchmarks.strategies import apply, execution_mode
from tests.workloads import error, output_of, prepare
from zoo.training import AdamW

CLOSE = {"float32": 1e-6, "bfloat16": 4e-3}


def case(**changes: Any) -> Case:
    return Case(**{"family": "optimizers", "model": "adamw", "input": "small", **changes})


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", CLOSE)
def test_every_implementation_matches_the_reference(impl: str, dtype: str) -> None:
    one = case(impl=impl, dtype=dtype)
    prepared = prepare(one)
    reference = prepared.reference()
    assert reference.dtype == torch.float64 and len(reference) == prepared.sizes["parameters"]
    output = output_of(one, prepared, prepared.model)
    assert output.dtype == getattr(torch, dtype)
    assert error(output, reference) < CLOSE[dtype]
    # As often as one likes, and a step more or less is seen.
    with execution_mode(one):
        assert error(torch.cat(prepared.model()), reference) > 0.1
    assert torch.equal(output_of(one, prepared, prepared.model), output)
    assert prepared.reset is not None
    prepared.reset()
    assert error(torch.cat(prepared.model.seen), reference) > 0.1


def test_a_compiled_step_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BENCHMARKS_BACKEND", "aot_eager")
    one = case(impl="upstream", strategy="full")
    prepared = prepare(one)
    call = apply(one, prepared)
    for _ in range(2):
        assert error(output_of(one, prepared, call), prepared.reference()) < CLOSE["float32"]


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_averages_and_decay_count(impl: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one = case(impl=impl)
    reference = prepare(one).reference()
    for changed in ({"betas": (0.8, 0.999)}, {"betas": (0.9, 0.998)}, {"weight_decay": 0.0}):
        with monkeypatch.context() as patch:
            patch.setattr(optimizers, "OPTIONS", {**optimizers.OPTIONS, **changed})
            other = prepare(one)
            assert error(output_of(one, other, other.model), reference) > 1e-4
    with monkeypatch.context() as patch:
        patch.setattr(optimizers, "EARLIER_STEPS", 0.0)
        other = prepare(one)
        assert error(output_of(one, other, other.model), reference) > 1e-4


def test_large_sets_are_checked_in_part_and_stepped_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = prepare(case()).reference()
    monkeypatch.setattr(optimizers, "_AT_ONCE", 100)
    torch.testing.assert_close(prepare(case()).reference(), whole, rtol=0, atol=0)
    monkeypatch.setattr(optimizers, "_ALL_CHECKED", 1000)
    part = prepare(case())
    output = output_of(case(), part, part.model)
    assert len(output) == part.sizes["checked"] < 0.04 * part.sizes["parameters"]
    assert error(output, part.reference()) < CLOSE["float32"]


def test_parameters_are_those_of_the_models() -> None:
    counted = {name: sum(torch.Size(s).numel() for s in each.shapes()) for name, each in PARAMETERS.items()}
    assert counted["resnet50"] == 25_557_032 and counted["bert-base"] == 109_482_240
    assert counted["llama-3.2-1b"] == 1_235_814_400  # the embedding, which is the head too, once
    for name, parameters in PARAMETERS.items():
        needed = WORKLOAD.memory_bytes(case(input=name, device="cuda", dtype=parameters.dtypes[0]))
        held = 4 * counted[name] * getattr(torch, parameters.dtypes[0]).itemsize
        assert held + (1 << 30) < needed < 2 * held + (5 << 30)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_under_a_cuda_graph_steps_are_counted_on_the_device(impl: str) -> None:
    parameters = [torch.nn.Parameter(torch.zeros(3))]
    plain, captured = (make_optimizer(case(impl=impl, cuda_graph=graph), parameters) for graph in (False, True))
    assert isinstance(captured, AdamW) == (impl == "zoo")
    group = captured.param_groups[0]
    assert group["capturable"] and isinstance(group["lr"], torch.Tensor)
    assert not plain.param_groups[0]["capturable"] and isinstance(plain.param_groups[0]["lr"], float)
    assert group["fused"] is (None if impl == "upstream" else True)
