"""Training of language models in the harness: every implementation takes the same steps on sequences that teach."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

import zoo
from benchmarks import strategies
from benchmarks.families import llm_train
from benchmarks.families.llm import WORKLOAD
from benchmarks.plan import Case
from benchmarks.training import Trainer
from zoo.llm import LLMLayer
from zoo.llm.config import PRESETS

CASE = Case(family="llm", model="llm-debug", input="2x16", workload="train")


@pytest.fixture(autouse=True)
def _light_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BENCHMARKS_BACKEND", "aot_eager")


@pytest.mark.parametrize("model", ["llm-debug", "llm-debug-checkpointed"])
@pytest.mark.parametrize(
    ("impl", "strategy"), [("zoo", "eager"), ("zoo", "regional"), ("upstream", "eager"), ("upstream-tuned", "eager")]
)
def test_losses_are_the_reference_s(model: str, impl: str, strategy: str):
    case = replace(CASE, model=model, impl=impl, strategy=strategy)
    if WORKLOAD.refuses(case):
        assert (model, impl, strategy) == ("llm-debug-checkpointed", "zoo", "eager")
        return
    prepared = WORKLOAD.prepare(case, data_root=None, seed=0)
    assert prepared.model.training and prepared.reference_dtype == "float32"
    arm = Trainer(case, prepared)
    step = arm.compiled(strategies.apply(case, prepared)) if strategy == "regional" else arm.eager()
    losses = arm.losses(step)
    torch.testing.assert_close(losses, prepared.reference(), rtol=1e-4, atol=0)
    curve = arm.losses(step, 30)
    assert curve[-1] < 0.95 * curve[0]


def test_long_rows_are_checked_by_two_steps(monkeypatch: pytest.MonkeyPatch):
    assert WORKLOAD.prepare(CASE, data_root=None, seed=0).training.checked == 6
    monkeypatch.setattr(llm_train, "_LONG", 15)
    prepared = WORKLOAD.prepare(CASE, data_root=None, seed=0)
    arm = Trainer(CASE, prepared)
    losses = arm.losses(arm.eager())
    assert len(losses) == 2
    torch.testing.assert_close(losses, prepared.reference(), rtol=1e-4, atol=0)


class _Attention(TorchFunctionMode):
    def __init__(self) -> None:
        self.calls: list[tuple[int, int, bool]] = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is torch.nn.functional.scaled_dot_product_attention:
            self.calls.append((args[0].shape[1], args[1].shape[1], kwargs.get("attn_mask") is None))
        return function(*args, **kwargs)


def test_the_reference_holds_no_scores():
    # In float32 torch's kernels take neither grouped queries nor, without a copy of it, a mask.
    prepared = WORKLOAD.prepare(CASE, data_root=None, seed=0)
    config = PRESETS["llm-debug"]
    assert config.num_key_value_heads < config.num_attention_heads
    with _Attention() as attention:
        prepared.reference()
    assert set(attention.calls) == {(config.num_attention_heads, config.num_attention_heads, True)}


def test_the_loss_in_parts_is_the_library_s(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(llm_train, "REFERENCE_ROWS", 7)
    prepared = WORKLOAD.prepare(replace(CASE, impl="upstream"), data_root=None, seed=0)
    assert prepared.training is not None
    model, batch = prepared.model, prepared.training.batch(0)
    weights = list(model.parameters())
    losses = [loss(model, batch) for loss in (llm_train.upstream_loss, llm_train.loss_in_parts)]
    torch.testing.assert_close(losses[0], losses[1])
    gradients = [torch.autograd.grad(loss, weights) for loss in losses]
    torch.testing.assert_close(gradients[0], gradients[1])


@pytest.mark.slow
def test_checkpointed_arms_keep_less_and_are_no_more_graphs():
    kept = {}
    for model in ("llm-debug", "llm-debug-checkpointed"):
        case = replace(CASE, model=model, strategy="regional")
        prepared = WORKLOAD.prepare(case, data_root=None, seed=0)
        training = prepared.training
        assert training is not None
        call = strategies.apply(case, prepared)
        training.loss(call, training.batch(0)).backward()
        sizes = []

        def pack(tensor: torch.Tensor, sizes: list[int] = sizes) -> torch.Tensor:
            sizes.append(tensor.numel())
            return tensor

        with (
            zoo.enforce_budget(prepared.model),
            torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        ):
            training.loss(call, training.batch(0))
        kept[model] = sum(sizes)
        layers = [module for module in prepared.model.modules() if isinstance(module, LLMLayer)]
        assert all(layer._compiled_call_impl is not None for layer in layers)
    assert kept["llm-debug-checkpointed"] < 0.7 * kept["llm-debug"]


def test_labels_are_the_next_tokens():
    training = WORKLOAD.prepare(CASE, data_root=None, seed=0).training
    assert training is not None
    batch = training.batch(0)
    assert batch["input_ids"].shape == batch["labels"].shape == (2, 16)
    assert torch.equal(batch["labels"][:, :-1], batch["input_ids"][:, 1:])
    assert (batch["labels"][:, -1] == -100).all()
    assert torch.equal(training.batch(0)["input_ids"], batch["input_ids"])
    assert not torch.equal(training.batch(1)["input_ids"], batch["input_ids"])


def test_most_tokens_are_followed_by_one_certain_other():
    words = llm_train._Words(10_000, seed=0)
    drawn = words.draw(llm_train.Rows(batch=8, length=400), seed=0)
    assert len(drawn.unique()) <= 512
    pairs = torch.stack([drawn[:, :-1].flatten(), drawn[:, 1:].flatten()])
    certain = dict(zip(words.words.tolist(), words.words[words.next].tolist(), strict=True))
    share = sum(certain[a] == b for a, b in pairs.t().tolist()) / pairs.shape[1]
    assert 0.87 < share < 0.93


def test_flops_are_those_counted_on_eager():
    case = replace(CASE, impl="upstream")
    prepared = WORKLOAD.prepare(case, data_root=None, seed=0)
    training = prepared.training
    assert training is not None
    with FlopCounterMode(display=False) as counter:
        training.loss(prepared.model, training.batch(0)).backward()
    config = PRESETS["llm-debug"]
    width = config.num_attention_heads * config.head_dim
    causal = 3 * 4 * (32 * 17 // 2) * config.num_hidden_layers * width
    # The counter takes all pairs of a causal attention for seen, forward and backward; or knows nothing of the kind
    # that the library chose for a CPU, which changes from release to release.
    by_name = {str(name): value for name, value in counter.get_flop_counts()["Global"].items()}
    attention = sum(value for name, value in by_name.items() if "bmm" in name or "attention" in name)
    assert (attention == 0 or attention > causal) and prepared.flops is not None
    assert counter.get_total_flops() - attention == prepared.flops - causal
