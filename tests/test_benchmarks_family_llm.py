"""What only the language models' arms do: steps that move on through a cache, answers, and chunks of a long loss."""

import dataclasses
from typing import Any

import pytest
import torch

from benchmarks.families import llm, llm_arms
from benchmarks.families.llm import WORKLOAD
from benchmarks.plan import IMPLEMENTATIONS, Case
from benchmarks.strategies import Trainer
from tests import workloads
from tests.workloads import Arms, call, error, first_call
from zoo.llm.model import PRESETS

pytestmark = pytest.mark.usefixtures("eager_backend")

# A stand-in for the preset of this name: norms of heads, an output product of its own, heads that do not add up.
QWEN = "qwen3-8b"
SMALL_QWEN = dataclasses.replace(
    PRESETS[QWEN], vocab_size=101, hidden_size=40, intermediate_size=72, num_hidden_layers=10, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=128, bos_token_id=None, eos_token_id=(),
)  # fmt: skip
CASE = Case(family="llm", model="llm-debug", input="2x16", workload="train")
INPUTS = ("decode-1x64", "prefill-1x32", "answer-1x32")

ARMS = Arms(family="llm", model="llm-debug", input="decode-1x64")
case, prepare = ARMS.case, ARMS.prepare


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The large preset's name means a small model, and batches of small inputs are known."""
    monkeypatch.setitem(PRESETS, QWEN, SMALL_QWEN)
    monkeypatch.setattr(type(WORKLOAD), "inputs", (*WORKLOAD.inputs, "decode-3x20", "prefill-2x12", "answer-2x12"))


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("input", ["decode-3x20", "prefill-2x12", "answer-2x12"])
def test_norms_of_heads_and_many_layers_match_the_reference(small: None, input: str, impl: str):
    prepared = prepare(model=QWEN, input=input, impl=impl)
    reference = prepared.reference()
    assert reference.shape == (llm_arms.task_of(input).batch, 101)
    assert not torch.allclose(reference[0], reference[1], atol=0.1)
    assert error(first_call(prepared), reference) < 3e-6


@pytest.mark.parametrize("input", INPUTS)
def test_the_reference_is_the_library_s_own_model(input: str):
    prepared = prepare(input=input, dtype="bfloat16", impl="upstream")
    whole: Any = prepared.model.float()
    if input.startswith("decode"):
        config, task = PRESETS["llm-debug"], llm_arms.task_of(input)

        def past(layer: int) -> tuple[torch.Tensor, torch.Tensor]:
            return llm_arms.draw_past(config, task, layer, seed=0, dtype=torch.bfloat16, device=torch.device("cpu"))

        tokens = llm_arms.draw_tokens(config, task, seed=0, device=torch.device("cpu"))
        whole = llm_arms.UpstreamDecode(whole.model, task, tokens, past)
        assert whole.cache.layers[0].keys.dtype == torch.float32
    if input.startswith("answer"):
        whole = llm_arms.UpstreamAnswer(whole.model, llm_arms.task_of(input), prepared.inputs["input_ids"])
    with torch.inference_mode():
        assert error(whole(**prepared.inputs), prepared.reference()) < 3e-6


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_what_lies_behind_the_position_is_not_seen_and_what_lies_before_is(impl: str):
    prepared = prepare(impl=impl)
    expected, step = first_call(prepared), prepared.model
    layer = step.cache.layers[1]
    keys = layer[0] if impl == "zoo" else layer.keys
    for slot, seen in ((33, False), (31, True)):
        prepared.reset()
        keys[:, :, slot] = 7.0
        assert (error(call(prepared), expected) > 1e-3) == seen


def test_all_implementations_decode_the_same_tokens(small: None):
    arms = [prepare(model=QWEN, input="decode-3x20", impl=impl) for impl in IMPLEMENTATIONS]
    for _ in range(12):
        outputs = [call(arm) for arm in arms]
        for output, arm in zip(outputs, arms, strict=True):
            assert error(output, outputs[0]) < 1e-5
            assert torch.equal(arm.model.tokens, output.view(3, -1).argmax(-1, keepdim=True))
            assert torch.equal(arm.model.positions, arms[0].model.positions)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_reset_makes_the_next_call_the_first_again(impl: str):
    prepared = prepare(impl=impl)
    first, second = call(prepared), call(prepared)
    assert error(second, first) > 0.1
    for _ in range(40):
        call(prepared)
    assert torch.equal(first_call(prepared), first)
    assert torch.equal(call(prepared), second)


def test_long_rows_are_checked_by_two_steps(monkeypatch: pytest.MonkeyPatch):
    assert workloads.prepare(CASE).training.checked == 6
    monkeypatch.setattr(llm, "_LONG", 15)
    prepared = workloads.prepare(CASE)
    arm = Trainer(CASE, prepared)
    losses = arm.losses(arm.eager())
    assert len(losses) == 2
    torch.testing.assert_close(losses, prepared.reference(), rtol=1e-4, atol=0)


def test_the_loss_in_parts_is_the_library_s(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(llm, "REFERENCE_ROWS", 7)
    prepared = workloads.prepare(dataclasses.replace(CASE, impl="upstream"))
    model, batch = prepared.model, prepared.training.batch(0)
    weights = list(model.parameters())
    losses = [loss(model, batch) for loss in (llm.upstream_loss, llm.loss_in_parts)]
    torch.testing.assert_close(losses[0], losses[1])
    gradients = [torch.autograd.grad(loss, weights) for loss in losses]
    torch.testing.assert_close(gradients[0], gradients[1])
