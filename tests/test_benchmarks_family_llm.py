"""The language-model workload: every arm computes the same thing, and its formulas count what they say."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.utils.flop_counter import FlopCounterMode

import zoo
from benchmarks import families
from benchmarks.families import base, llm_arms, llm_steps, llm_train
from benchmarks.families.llm import WORKLOAD
from benchmarks.plan import IMPLEMENTATIONS, Case
from benchmarks.worker import Handler
from zoo.llm import LLM, LLMHead, LLMLayer
from zoo.llm.config import PRESETS

# A stand-in for the preset of this name: norms of heads, an output product of its own, heads that do not add up.
QWEN = "qwen3-8b"
SMALL_QWEN = dataclasses.replace(
    PRESETS[QWEN],
    vocab_size=101,
    hidden_size=40,
    intermediate_size=72,
    num_hidden_layers=10,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=128,
    bos_token_id=None,
    eos_token_id=(),
)
INPUTS = ("decode-1x64", "prefill-1x32", "answer-1x32")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The large preset's name means a small model, and batches of small inputs are known."""
    monkeypatch.setitem(PRESETS, QWEN, SMALL_QWEN)
    monkeypatch.setattr(type(WORKLOAD), "inputs", (*WORKLOAD.inputs, "decode-3x20", "prefill-2x12", "answer-2x12"))
    yield


def case(**changes: Any) -> Case:
    return Case(**{"family": "llm", "model": "llm-debug", "input": "decode-1x64", **changes})


def prepare(**changes: Any) -> families.Prepared:
    return WORKLOAD.prepare(case(**changes), data_root=None, seed=0)


def call(prepared: families.Prepared) -> torch.Tensor:
    with torch.inference_mode():
        return prepared.model(**prepared.inputs).clone()


def first_call(prepared: families.Prepared) -> torch.Tensor:
    assert prepared.reset is not None
    prepared.reset()
    return call(prepared)


def error(output: torch.Tensor, reference: torch.Tensor) -> float:
    return float((output.double() - reference.double()).norm() / reference.double().norm())


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("model", "input"),
    [
        ("llm-debug", INPUTS[0]),
        ("llm-debug", INPUTS[1]),
        ("llm-debug", INPUTS[2]),
        (QWEN, "decode-3x20"),
        (QWEN, "prefill-2x12"),
        (QWEN, "answer-2x12"),
    ],
)
def test_every_implementation_matches_the_reference(small: None, model: str, input: str, impl: str):
    prepared = prepare(model=model, input=input, impl=impl)
    reference = prepared.reference()
    assert reference.dtype == torch.float32 and prepared.reference_dtype == "float32"
    assert not prepared.model.training
    rows = llm_steps.task_of(input).batch
    assert reference.shape == (rows, PRESETS[model].vocab_size)
    assert rows == 1 or not torch.allclose(reference[0], reference[1], atol=0.1)
    assert error(first_call(prepared), reference) < 3e-6


@pytest.mark.parametrize("input", INPUTS)
def test_the_reference_is_the_library_s_own_model(input: str):
    prepared = prepare(input=input, dtype="bfloat16", impl="upstream")
    whole: Any = prepared.model.float()
    if input.startswith("decode"):
        config, task = PRESETS["llm-debug"], llm_steps.task_of(input)

        def past(layer: int) -> tuple[torch.Tensor, torch.Tensor]:
            return llm_arms.draw_past(config, task, layer, seed=0, dtype=torch.bfloat16, device=torch.device("cpu"))

        tokens = llm_arms.draw_tokens(config, task, seed=0, device=torch.device("cpu"))
        whole = llm_steps.UpstreamDecode(whole.model, task, tokens, past)
        assert whole.cache.layers[0].keys.dtype == torch.float32
    if input.startswith("answer"):
        whole = llm_steps.UpstreamAnswer(whole.model, llm_steps.task_of(input), prepared.inputs["input_ids"])
    with torch.inference_mode():
        assert error(whole(**prepared.inputs), prepared.reference()) < 3e-6


@pytest.mark.parametrize("input", INPUTS)
@pytest.mark.parametrize("name", ["layers.1.qkv_proj.weight", "layers.2.input_layernorm.weight", "head.norm.weight"])
def test_a_wrong_weight_shows(input: str, name: str):
    prepared = prepare(input=input)
    with torch.no_grad():
        prepared.model.get_parameter(f"model.{name}").mul_(0.8)
    assert error(first_call(prepared), prepared.reference()) > 1e-3


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
            assert torch.equal(arm.model.tokens, output.argmax(-1, keepdim=True))
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


def test_upstream_counts_its_tokens_as_the_positions_go():
    step = prepare(impl="upstream").model
    for _ in range(40):
        assert [int(length) for length in step.lengths] == [int(step.positions)] * 3
        with torch.inference_mode():
            step()


@pytest.mark.parametrize("length", [4, 20, 64, 1024])
def test_positions_meet_the_upper_half_evenly(length: int):
    task = llm_steps.Task(kind="decode", batch=2, length=length)
    step = llm_steps.Step(task, torch.zeros(2, 1, dtype=torch.int64))
    step.reset()
    met = []
    for _ in range(2 * (length - length // 2)):
        met.append(int(step.positions[0]))
        step.move_on(task.stride)
    half = length - length // 2
    assert sorted(met[:half]) == list(range(length // 2, length)) and met[half:] == met[:half]
    assert sum(met[:half]) / half + 1 == task.seen
    if length >= 64:
        for start in range(half):
            some = [met[(start + index) % half] for index in range(8)]
            assert abs(sum(some) / 8 + 1 - task.seen) < 0.07 * length


@pytest.mark.parametrize("input", INPUTS)
def test_the_zoo_s_regions_are_found_and_their_graphs_counted(input: str):
    prepared = prepare(input=input, strategy="regional")
    expected = first_call(prepared)
    counter = CompileCounter()
    zoo.compile_regions(prepared.model, backend=counter, dynamic=False)
    found = {region.region.cls: len(region.modules) for region in zoo.find_regions(prepared.model).regions}
    assert found == {LLMLayer: 3, LLMHead: 1}
    # A budget is of one shape of input, and in an answer layers meet two in one call.
    with nullcontext() if input.startswith("answer") else zoo.enforce_budget(prepared.model):
        assert error(first_call(prepared), expected) < 1e-6
        for _ in range(4):
            call(prepared)
    # The head's, and the layer's: for a prompt, for a token, or for both.
    assert counter.frame_count == (3 if input.startswith("answer") else 2)


@pytest.mark.slow
@pytest.mark.parametrize(("impl", "graphs"), [("upstream", 12), ("upstream-tuned", 14)])
def test_a_cache_costs_upstream_a_graph_a_layer(small: None, impl: str, graphs: int):
    prepared = prepare(model=QWEN, input="decode-3x20", impl=impl, strategy="regional")
    expected = first_call(prepared)
    counter = CompileCounter()
    assert prepared.compile_regions is not None
    # Before torch 2.13 who raises the limit raises it for the process, other tests too.
    with torch._dynamo.config.patch(recompile_limit=8):
        prepared.compile_regions(prepared.model, backend=counter, dynamic=False)
        assert error(first_call(prepared), expected) < 1e-6
    # Ten layers, embedding, rotation, norm and output product; as shipped, layers above the limit stay eager.
    assert counter.frame_count == graphs


@pytest.mark.parametrize("impl", ["zoo", "upstream"])
def test_the_harness_checks_the_first_call_however_many_came_before(tmp_path: Path, impl: str):
    def checked(*, reset: bool) -> dict[str, Any]:
        arm = Handler()
        arm.load(workload="llm")
        ready = arm.prepare(case=case(impl=impl).to_json(), data_root=None, seed=0)
        assert ready["sizes"] == {"batch": 1, "slots": 64, "layers": 3, "width": 64, "parameters": 108992}
        assert arm.start_up(folder=None)["flops"] == llm_arms.flops(
            PRESETS["llm-debug"], llm_steps.task_of("decode-1x64")
        )
        arm.first_call()
        arm.round(calls=3)
        if not reset:
            arm.prepared.reset = None
        return arm.check(reference=str(tmp_path / "reference.pt"))

    found = checked(reset=True)
    assert found["error"] < 3e-6 and found["eager_error"] < 3e-6 and found["reference_dtype"] == "float32"
    assert checked(reset=False)["error"] > 0.1


def test_arms_that_memory_cannot_hold_together_do_not_get_ready_together():
    from benchmarks.harness import _side_by_side

    assert _side_by_side([["arm"] * 9]) == 9
    assert _side_by_side([["arm"] * 4, ["arm"] * 3, ["arm"] * 2]) == 3
    assert _side_by_side([]) == 1


def test_weights_are_drawn_anew_and_alike():
    shapes = {"a.weight": (64, 4096), "b.weight": (64, 4096), "norm.weight": (4096,), "proj.bias": (4096,)}
    options: dict[str, Any] = {"dtype": torch.float32, "device": torch.device("cpu")}
    drawn = base.SeededWeights(shapes, seed=0, **options)
    assert torch.equal(drawn["a.weight"], drawn["a.weight"]) and drawn["a.weight"] is not drawn["a.weight"]
    assert not torch.equal(drawn["a.weight"], drawn["b.weight"])
    assert not torch.equal(drawn["a.weight"], base.SeededWeights(shapes, seed=1, **options)["a.weight"])
    assert float(drawn["a.weight"].std()) == pytest.approx(1 / 64, rel=0.02)
    assert float(drawn["norm.weight"].mean()) == pytest.approx(1, abs=0.01)
    assert float(drawn["proj.bias"].mean()) == pytest.approx(0, abs=0.01)


def test_every_model_is_a_preset_and_every_input_a_task():
    assert {name.removesuffix(llm_train.CHECKPOINTED) for name in WORKLOAD.models} <= set(PRESETS)
    of_inference = [name for name in WORKLOAD.inputs if llm_train.rows_of(name) is None]
    assert {llm_steps.task_of(name).kind for name in of_inference} == {"decode", "prefill", "answer"}
    assert families.load("llm") is WORKLOAD
    for wrong in ("decode-1", "decode-0x64", "prefill-1x2", "score-1x64"):
        with pytest.raises(
            ValueError, match="is none of decode-BATCHxSLOTS, prefill-BATCHxTOKENS and answer-BATCHxTOKENS"
        ):
            llm_steps.task_of(wrong)


@pytest.mark.parametrize("model", [name for name in WORKLOAD.models if name in PRESETS])
def test_parameters_are_those_of_both_libraries(model: str):
    config = PRESETS[model]
    with torch.device("meta"):
        ours: nn.Module = LLM(config)
    assert llm_arms.parameters(config) == sum(parameter.numel() for parameter in ours.parameters())
    shapes = llm_arms.shapes(config)
    assert llm_arms.parameters(config) == sum(torch.Size(shape).numel() for shape in shapes.values())
    assert ("lm_head.weight" in shapes) == (not config.tie_word_embeddings)


@pytest.mark.parametrize("impl", ["zoo", "upstream"])
@pytest.mark.parametrize("input", ["decode-3x20", "prefill-2x12", "answer-2x12"])
def test_products_are_those_counted_on_eager(small: None, input: str, impl: str):
    prepared = prepare(model=QWEN, input=input, impl=impl)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        prepared.model(**prepared.inputs)
    counted = sum(
        count
        for name, count in counter.get_flop_counts()["Global"].items()
        if str(name) in ("aten.mm", "aten.addmm", "aten.bmm")
    )
    task = llm_steps.task_of(input)
    attention = 4 * round(task.batch * task.tokens * task.seen) * 10 * 4 * 16
    assert prepared.flops == counted + attention


def test_attention_counts_the_pairs_that_are_seen():
    prompt, token = llm_steps.task_of("prefill-2x12"), llm_steps.task_of("decode-3x20")
    assert prompt.batch * prompt.tokens * prompt.seen == 2 * sum(range(1, 13))
    assert token.seen == sum(range(11, 21)) / 10
    assert (prompt.slots, prompt.first, token.slots, token.first) == (24, 0, 20, 10)


def test_bytes_by_hand():
    config = SMALL_QWEN
    layers = 10 * (40 * (4 + 2 + 2) * 16 + 4 * 16 * 40 + 3 * 40 * 72 + 2 * 40 + 2 * 16) + 40
    table = 101 * 40
    assert llm_arms.parameters(config) == layers + 2 * table
    a_token = 2 * 10 * 2 * 16
    step = llm_arms.bytes_moved(config, llm_steps.task_of("decode-3x20"), 2)
    assert step == 2 * (layers + table + 3 * 15.5 * a_token + 3 * 101)
    prompt = llm_arms.bytes_moved(config, llm_steps.task_of("prefill-2x12"), 4)
    assert prompt == 4 * (layers + table + 24 * a_token + 2 * 101)
    tied = dataclasses.replace(config, tie_word_embeddings=True)
    assert llm_arms.bytes_moved(tied, llm_steps.task_of("decode-3x20"), 2) == step
