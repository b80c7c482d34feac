"""Attention written in several ways: all compute one thing, and what cannot run says why."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import zoo
from benchmarks.families import Prepared, families, load
from benchmarks.families.attention import DECODE_INPUTS, PACKED_INPUTS, WORKLOAD
from benchmarks.families.attention_choices import CHOICES, DECODE, PACKED
from benchmarks.plan import Case, expand

# On a CPU one runs eagerly and holds all scores, the other goes through torch's older kind of nested tensors.
pytestmark = [
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage"),
]
ON_A_CPU = [model for model in CHOICES if model != "packed-varlen"]


def case(model: str, **changes: Any) -> Case:
    chosen = "small-3x256" if model in DECODE else "skewed-4x32"
    return Case(**{"family": "attention", "model": model, "input": chosen, **changes})


def prepare(model: str, **changes: Any) -> Prepared:
    return WORKLOAD.prepare(case(model, **changes), data_root=None, seed=0)


def call(prepared: Prepared) -> torch.Tensor:
    with torch.inference_mode():
        return torch.stack(prepared.model())


def error(output: torch.Tensor, reference: torch.Tensor) -> float:
    assert output.shape == reference.shape
    return float((output.double() - reference.double()).norm() / reference.double().norm())


@pytest.mark.parametrize("model", ON_A_CPU)
def test_every_choice_matches_the_reference(model: str):
    prepared = prepare(model)
    assert prepared.reference().dtype == torch.float64
    assert error(call(prepared), prepared.reference()) < 1e-6
    # Calls write nothing that a later one reads.
    assert torch.equal(call(prepared), call(prepared))


@pytest.mark.parametrize("models", [list(DECODE), [model for model in PACKED if model in ON_A_CPU]])
def test_choices_agree(models: list[str]):
    outputs = []
    for model in models:
        output = call(prepare(model))
        if CHOICES[model].layout == "padded":
            lengths = PACKED_INPUTS["skewed-4x32"].lengths()
            there = torch.arange(output.shape[2]) < lengths[:, None]
            output = output[:, there]
        outputs.append(output)
    for output in outputs[1:]:
        torch.testing.assert_close(output, outputs[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("model", ON_A_CPU)
def test_slots_and_rows_of_others_are_not_seen(model: str):
    prepared = prepare(model)
    layers = prepared.model
    expected = call(prepared)
    if model in DECODE:
        for cache in layers.caches:
            for row, position in enumerate(DECODE_INPUTS["small-3x256"].positions().tolist()):
                cache[:, row, :, position + 1 :] = 9.0
        assert torch.equal(call(prepared), expected)
        layers.caches[0][1, 0, 0, 0] += 1.0
    else:
        layout, own = CHOICES[model].layout, slice(0, int(PACKED_INPUTS["skewed-4x32"].lengths()[0]))
        first = {"packed": own, "padded": 0, "apart": (slice(None), own)}[layout]
        with torch.inference_mode():
            layers.tokens[0][first] += 1.0
        changed = call(prepared)
        kept = torch.ones_like(expected, dtype=torch.bool)
        kept[0, 0 if layout == "padded" else own] = False
        torch.testing.assert_close(changed[kept], expected[kept], rtol=0, atol=1e-6)
    assert error(call(prepared), expected) > 1e-3


@pytest.mark.parametrize("model", ON_A_CPU)
def test_what_layers_hold_says_which_device_they_are_on(model: str):
    layers = prepare(model).model
    held = [*layers.tokens, *(cache for cache in layers.caches if cache is not None)]
    assert held and {id(each) for each in held} == {id(each) for each in layers.buffers()}


@pytest.mark.parametrize("model", [model for model in ON_A_CPU if model != "packed-nested"])
def test_layers_share_a_graph(model: str):
    prepared = prepare(model)
    zoo.compile_regions(prepared.model, backend="aot_eager")
    with torch.inference_mode(), zoo.enforce_budget(prepared.model):
        assert error(torch.stack(prepared.model()), prepared.reference()) < 1e-6


@pytest.mark.parametrize("name", DECODE_INPUTS)
def test_half_of_the_slots_are_filled(name: str):
    task = DECODE_INPUTS[name]
    assert task.seen / (task.rows * task.slots) == pytest.approx(0.5, abs=0.01)
    assert all(0 <= position < task.slots for position in task.positions().tolist())


def test_memory_fits_a_large_gpu():
    for model, name in WORKLOAD.default_races("cuda", quick=False):
        needed = WORKLOAD.memory_bytes(case(model, input=name, device="cuda", dtype="bfloat16"))
        assert 1 << 30 < needed < 12 << 30


def test_which_arms_there_are():
    assert "attention" in families() and load("attention") is WORKLOAD
    assert "attention_choices" not in families()
    bases = [case(m, input=i, device="cuda", dtype="bfloat16") for m, i in WORKLOAD.default_races("cuda", quick=False)]
    cases, _ = expand(bases, WORKLOAD.refuses)
    assert {c.model for c in cases} == set(CHOICES)
    assert {c.arm for c in cases if not c.control} == {"zoo eager", "zoo regional", "zoo regional + CUDA graph"}
    for model, changes, words in (
        ("decode-flex", {"impl": "upstream"}, "each choice is a model"),
        ("decode-flex", {"strategy": "full"}, "nothing stands between"),
        ("decode-flex", {"input": "skewed-4x32"}, "decode-flex has the inputs"),
        ("packed-varlen", {}, "half precision on a GPU"),
        ("packed-nested", {"strategy": "regional"}, "cannot trace"),
        ("decode-flex", {"strategy": "regional"}, "parts of one tensor"),
    ):
        assert words in str(WORKLOAD.refuses(case(model, **changes)))
        with pytest.raises(ValueError, match=words):
            prepare(model, **changes)
