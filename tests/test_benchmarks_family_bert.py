"""The BERT workload: every arm computes the same thing, and its formulas count what they say."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.utils.flop_counter import FlopCounterMode

import zoo
from benchmarks import families
from benchmarks.families import bert_arms
from benchmarks.families.base import parameters_of
from benchmarks.families.bert import WORKLOAD
from benchmarks.plan import IMPLEMENTATIONS, Case
from zoo.bert import Bert, PackedBatch
from zoo.bert.model import PRESETS

LARGE = "bert-large"
SMALL_LARGE = dataclasses.replace(
    PRESETS[LARGE],
    vocab_size=101,
    hidden_size=40,
    intermediate_size=72,
    num_hidden_layers=10,
    num_attention_heads=5,
    max_position_embeddings=24,
)
INPUTS = ("2x32", "skewed-4x32")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The large preset's name means a small model, and batches of more rows than the reference takes are known."""
    monkeypatch.setitem(PRESETS, LARGE, SMALL_LARGE)
    monkeypatch.setattr(type(WORKLOAD), "inputs", (*WORKLOAD.inputs, "19x6", "skewed-37x24"))
    yield


def case(**changes: Any) -> Case:
    return Case(**{"family": "bert", "model": "bert-debug", "input": "2x32", **changes})


def prepare(**changes: Any) -> families.Prepared:
    return WORKLOAD.prepare(case(**changes), data_root=None, seed=0)


def call(prepared: families.Prepared, model: Any = None) -> torch.Tensor:
    with torch.inference_mode():
        output = (prepared.model if model is None else model)(**prepared.inputs)
    return torch.cat([part.flatten() for part in (output if isinstance(output, tuple) else (output,))])


def error(output: torch.Tensor, reference: torch.Tensor) -> float:
    return float((output.double() - reference.double()).norm() / reference.double().norm())


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("model", "input"),
    [("bert-debug", INPUTS[0]), ("bert-debug", INPUTS[1]), (LARGE, "19x6"), (LARGE, "skewed-37x24")],
)
def test_every_implementation_matches_the_reference(small: None, model: str, input: str, impl: str):
    prepared = prepare(model=model, input=input, impl=impl)
    reference, task = prepared.reference(), bert_arms.task(input)
    assert reference.dtype == torch.float64 and prepared.reference_dtype == "float64"
    rows = task.batch * (1 if task.skewed else 1 + task.length)
    assert reference.numel() == rows * PRESETS[model].hidden_size
    pooled = reference.view(-1, PRESETS[model].hidden_size)[-task.batch :]
    assert not torch.allclose(pooled[0], pooled[1], atol=0.1)
    assert not prepared.model.training
    assert error(call(prepared), reference) < 3e-6


@pytest.mark.parametrize("input", INPUTS)
@pytest.mark.parametrize("name", ["layers.1.qkv.weight", "layers.2.output_norm.weight", "head.dense.bias"])
def test_a_wrong_weight_shows(input: str, name: str):
    prepared = prepare(input=input)
    with torch.no_grad():
        prepared.model.get_parameter(f"model.{name}").add_(0.1)
    assert error(call(prepared), prepared.reference()) > 1e-3


def test_a_ragged_batch_is_the_same_rows_packed_and_padded():
    padded, packed = prepare(input="skewed-4x32", impl="upstream"), prepare(input="skewed-4x32")
    batch = packed.inputs["input_ids"]
    assert isinstance(batch, PackedBatch)
    ids, mask = padded.inputs["input_ids"], padded.inputs["attention_mask"]
    real = int(mask.sum())
    assert real == padded.sizes["tokens"] == bert_arms.task("skewed-4x32").tokens
    assert torch.equal(batch.input_ids[:real], ids[mask.bool()])
    assert packed.sizes["packed_tokens"] == batch.input_ids.numel() < 4 * 32
    assert list(packed.preparation_seconds) == ["packing on the host"] and not padded.preparation_seconds
    assert "attention_mask" not in prepare(impl="upstream").inputs


def test_the_tuned_arm_does_not_look_at_the_mask(monkeypatch: pytest.MonkeyPatch):
    from transformers import masking_utils

    looked = []
    look = masking_utils._ignore_bidirectional_mask_sdpa
    monkeypatch.setattr(
        masking_utils,
        "_ignore_bidirectional_mask_sdpa",
        lambda *args, **kwargs: looked.append(1) or look(*args, **kwargs),
    )
    for impl, times in (("upstream", 1), ("upstream-tuned", 0)):
        looked.clear()
        call(prepare(input="skewed-4x32", impl=impl))
        assert len(looked) == times


@pytest.mark.parametrize(
    ("model", "regions"),
    [
        ("bert-debug", {"BertLayer": 3}),
        ("bert-debug-cut-layers-and-ends", {"BertEmbeddings": 1, "BertLayer": 3, "PoolerHead": 1}),
    ],
)
@pytest.mark.parametrize("input", INPUTS)
def test_each_of_the_zoo_s_regions_is_a_graph(input: str, model: str, regions: dict[str, int]):
    prepared = prepare(model=model, input=input, strategy="regional")
    assert error(call(prepared), prepared.reference()) < 3e-6
    expected, counter = call(prepared), CompileCounter()
    zoo.compile_regions(prepared.model, backend=counter, dynamic=False)
    found = {region.name: len(region.modules) for region in zoo.find_regions(prepared.model).regions}
    assert found == regions
    with zoo.enforce_budget(prepared.model):
        assert error(call(prepared), expected) < 1e-6
        call(prepared)
    assert counter.frame_count == len(regions)


def test_every_model_is_a_preset_and_every_input_a_task():
    assert {name.removesuffix("-dropout").partition("-cut-")[0] for name in WORKLOAD.models} <= set(PRESETS)
    assert "bert-base-cut-layers-and-ends" in WORKLOAD.models and "bert-base-cut-layers" not in WORKLOAD.models
    assert families.load("bert") is WORKLOAD
    for name in WORKLOAD.inputs:
        if name.startswith("epoch-"):
            continue  # of training
        task = bert_arms.task(name)
        assert len(task.lengths()) == task.batch and 2 <= min(task.lengths()) <= max(task.lengths()) <= task.length
    for wrong in ("32", "0x64", "2x1", "skewed-64", "full-2x32"):
        with pytest.raises(ValueError, match="is neither BATCHxTOKENS nor skewed-BATCHxTOKENS"):
            bert_arms.task(wrong)


def test_a_skewed_batch_is_half_filled_and_mostly_short():
    task = bert_arms.task("skewed-64x512")
    lengths = task.lengths()
    assert 0.45 < task.tokens / (64 * 512) < 0.55
    assert lengths[31] < 256 and lengths[-1] == 512 and lengths[0] < 64
    for seed in range(3):
        ids, mask = bert_arms.draw_inputs(PRESETS["bert-base"], task, seed=seed)
        assert sorted(mask.sum(1).tolist()) == list(lengths)
        assert (ids[mask == 0] == 0).all() and (ids[mask == 1] > 0).all()


@pytest.mark.parametrize("model", [name for name in WORKLOAD.models if name in PRESETS])
def test_parameters_are_those_of_both_libraries(model: str):
    config = PRESETS[model]
    with torch.device("meta"):
        ours: nn.Module = Bert(config)
    assert parameters_of(Bert, config) == sum(parameter.numel() for parameter in ours.parameters())
    assert parameters_of(Bert, config) == sum(torch.Size(s).numel() for s in bert_arms.shapes(config).values())


@pytest.mark.parametrize("impl", ["zoo", "upstream"])
def test_products_of_full_rows_are_those_counted_on_eager(small: None, impl: str):
    prepared = prepare(model=LARGE, input="19x6", impl=impl)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        prepared.model(**prepared.inputs)
    counted = counter.get_flop_counts()["Global"]
    products = sum(count for name, count in counted.items() if str(name) in ("aten.mm", "aten.addmm"))
    assert prepared.flops == products + 10 * 4 * 19 * 6 * 6 * 40


def test_padding_is_no_work():
    config = SMALL_LARGE
    full, ragged = bert_arms.task("37x24"), bert_arms.task("skewed-37x24")
    per_token = 10 * 2 * (4 * 40 * 40 + 2 * 40 * 72)
    pooled = 2 * 37 * 40 * 40
    assert bert_arms.flops(config, full.lengths()) == 37 * 24 * per_token + 10 * 4 * 37 * 24 * 24 * 40 + pooled
    squares = sum(length**2 for length in ragged.lengths())
    assert bert_arms.flops(config, ragged.lengths()) == ragged.tokens * per_token + 10 * 4 * squares * 40 + pooled


def test_bytes_by_hand():
    config, layer = SMALL_LARGE, 4 * 40 * 40 + 4 * 40 + 2 * 40 * 72 + 72 + 40 + 4 * 40
    fixed = 10 * layer + 40 * 40 + 40
    # 19 x 6 tokens take all 101 rows of the word table; 6 positions, a type, a norm.
    tables, returned = (101 + 6 + 1 + 2) * 40, (19 + 19 * 6) * 40
    assert bert_arms.bytes_moved(config, bert_arms.task("19x6"), 2) == 2 * (fixed + tables + returned) + 8 * 19 * 6
    ragged = bert_arms.task("skewed-4x24")
    expected = 4 * (fixed + (ragged.tokens + 24 + 1 + 2 + 4) * 40) + 8 * ragged.tokens
    assert bert_arms.bytes_moved(config, ragged, 4) == expected
