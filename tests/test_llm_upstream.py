"""The same logits, gradients and weights as transformers' models; what is not supported is named."""

from __future__ import annotations

from typing import Any

import llm_reference as reference
import pytest
import torch
import transformers
from torch import nn

import zoo
from benchmarks.families.llm_steps import cache_argument
from zoo.llm import LLM, LLMConfig, RopeScaling
from zoo.llm.model import inverse_frequencies

TIGHT = 1e-5


def convert(module: nn.Module) -> LLM:
    model = zoo.from_upstream(module)
    assert isinstance(model, LLM) and not model.training
    return model


@pytest.mark.parametrize("kind", reference.KINDS)
def test_whole_prompts(kind: str) -> None:
    theirs = reference.make(kind)
    model = convert(theirs)
    ids = reference.tokens(3, 17)
    with torch.inference_mode():
        expected = theirs(ids).logits
        assert reference.relative_error(model(ids), expected) < TIGHT
        assert reference.relative_error(model(ids, logits_to_keep=2), expected[:, -2:]) < TIGHT
        which = torch.tensor([3, 0])
        assert reference.relative_error(model(ids, logits_to_keep=which), expected[:, which]) < TIGHT
        shifted = torch.arange(40, 57)[None]
        assert (
            reference.relative_error(model(ids, position_ids=shifted), theirs(ids, position_ids=shifted).logits) < TIGHT
        )


@pytest.mark.parametrize("kind", [kind for kind in reference.KINDS if "llama3" not in kind])
def test_nothing_but_the_rotary_table_is_rounded_to_float32_in_float64(kind: str) -> None:
    theirs = reference.make(kind).double()
    ids = reference.tokens(2, 17)
    with torch.inference_mode(), reference.exact_norms():
        assert reference.relative_error(convert(theirs)(ids), theirs(ids).logits) < 1e-13


def test_a_padding_token_of_minus_one_freezes_no_row() -> None:
    # torch counts padding_idx=-1 from the end: transformers' last token would get no gradient.
    model = convert(reference.make("llama", pad_token_id=-1))
    last = model.config.vocab_size - 1
    model(torch.tensor([[3, last]])).sum().backward()
    assert model.config.pad_token_id is None and model.embed_tokens.weight.grad[last].norm() > 0


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", reference.KINDS)
def test_padded_batches(kind: str, side: str) -> None:
    theirs = reference.make(kind)
    model = convert(theirs)
    ids = reference.tokens(3, 12)
    mask = torch.ones_like(ids)
    for row, padding in enumerate((0, 4, 11)):
        mask[row, slice(0, padding) if side == "left" else slice(12 - padding, None)] = 0
    with torch.inference_mode():
        got, expected = model(ids, attention_mask=mask), theirs(ids, attention_mask=mask).logits
    assert got.isfinite().all()
    assert reference.relative_error(got[mask.bool()], expected[mask.bool()]) < TIGHT


@pytest.mark.parametrize("kind", reference.KINDS)
def test_prefill_and_decode_with_a_cache(kind: str) -> None:
    theirs = reference.make(kind)
    model = convert(theirs)
    ids = reference.tokens(2, 14)
    with torch.inference_mode():
        expected = theirs(ids).logits
        cache = model.make_cache(2, 20)
        first = model(ids[:, :9], cache=cache)
        assert reference.relative_error(first, expected[:, :9]) < TIGHT
        their_cache = theirs(ids[:, :9], use_cache=True).past_key_values
        for at in range(9, 14):
            one = ids[:, at : at + 1]
            step = model(one, position_ids=torch.full((2, 1), at), cache=cache)
            assert reference.relative_error(step, expected[:, at : at + 1]) < TIGHT
            their_step = theirs(one, use_cache=True, **{cache_argument(theirs): their_cache}).logits
            assert reference.relative_error(step, their_step) < TIGHT


@pytest.mark.parametrize("kind", reference.KINDS)
def test_gradients(kind: str) -> None:
    theirs = reference.make(kind)
    model = convert(theirs)
    ids = reference.tokens(2, 8)
    for each in (lambda x: theirs(x).logits, model):
        nn.functional.cross_entropy(each(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    # Their names and shapes for our gradients, by way of the model that goes back.
    for parameter in model.parameters():
        parameter.data.copy_(parameter.grad)
    back = dict(zoo.to_upstream(model).named_parameters())
    for name, parameter in theirs.named_parameters():
        assert reference.relative_error(back[name].detach(), parameter.grad) < 1e-4, name


@pytest.mark.parametrize("kind", reference.KINDS)
def test_there_and_back(kind: str) -> None:
    theirs = reference.make(kind)
    model = convert(theirs)
    back = zoo.to_upstream(model)
    assert type(back) is type(theirs)
    assert back.state_dict().keys() == theirs.state_dict().keys()
    for key, tensor in theirs.state_dict().items():
        torch.testing.assert_close(back.state_dict()[key], tensor, rtol=0, atol=0)
    tied = theirs.config.tie_word_embeddings
    assert (back.lm_head.weight is back.model.embed_tokens.weight) == tied
    ids = reference.tokens(2, 9)
    with torch.inference_mode():
        torch.testing.assert_close(back(ids).logits, theirs(ids).logits, rtol=0, atol=0)
    assert zoo.from_upstream(back).config == model.config


def test_weights_are_copies_and_flags_are_kept() -> None:
    theirs = reference.make("qwen2").to(torch.bfloat16)
    theirs.model.norm.weight.requires_grad_(False)
    theirs.train()
    model = zoo.from_upstream(theirs)
    assert model.training and {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert not model.head.norm.weight.requires_grad and model.layers[0].qkv_proj.weight.requires_grad
    with torch.no_grad():
        model.layers[0].qkv_proj.weight.zero_()
    assert theirs.model.layers[0].self_attn.q_proj.weight.abs().sum() > 0
    back = zoo.to_upstream(model)
    assert back.training and not back.model.norm.weight.requires_grad
    theirs.model.layers[1].self_attn.k_proj.weight.requires_grad_(False)
    with pytest.raises(ValueError, match=r"k_proj.weight.requires_grad is False.*layers.1.qkv_proj.weight"):
        zoo.from_upstream(theirs)


def test_bfloat16_is_as_near_to_float64_as_theirs() -> None:
    theirs = reference.make("llama-tied-llama3").to(torch.bfloat16).to(torch.float64)
    ids = reference.tokens(16, 60)

    def error(logits: torch.Tensor) -> float:
        return float((logits.double() - exact).norm() / exact.norm())

    with torch.inference_mode():
        theirs.model.rotary_emb = type(theirs.model.rotary_emb)(theirs.config)
        exact = theirs(ids).logits
        theirs.to(torch.bfloat16)
        # Their frequencies were rounded with the weights, which is not what from_pretrained(dtype=...) gives.
        theirs.model.rotary_emb = type(theirs.model.rotary_emb)(theirs.config)
        their_error, our_error = error(theirs(ids).logits), error(zoo.from_upstream(theirs)(ids))
    assert our_error < 1.1 * their_error
    assert their_error < 0.1


def test_tokens_are_kept() -> None:
    theirs = reference.make("llama", pad_token_id=3, bos_token_id=1, eos_token_id=[2, 5])
    config = convert(theirs).config
    assert (config.pad_token_id, config.bos_token_id, config.eos_token_id) == (3, 1, (2, 5))
    assert zoo.to_upstream(zoo.from_upstream(theirs)).config.eos_token_id == [2, 5]
    assert convert(reference.make("llama", eos_token_id=7)).config.eos_token_id == (7,)
    assert convert(reference.make("llama")).config.eos_token_id == ()


@pytest.mark.parametrize("kind", ["llama", "llama-linear-one-head", "llama-tied-llama3"])
def test_rotary_frequencies(kind: str) -> None:
    theirs = reference.make(kind)
    torch.testing.assert_close(inverse_frequencies(convert(theirs).config), theirs.model.rotary_emb.inv_freq)


def test_published_frequencies_of_llama() -> None:
    config = zoo.create("llama-3.2-1b", device="meta").config
    scaling = config.rope_scaling
    assert scaling == RopeScaling(
        kind="llama3", factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
    )
    parameters = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0}
    theirs = transformers.LlamaConfig(
        hidden_size=2048,
        num_attention_heads=32,
        max_position_embeddings=131072,
        rope_parameters={**parameters, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
    )
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    torch.testing.assert_close(inverse_frequencies(config), LlamaRotaryEmbedding(theirs).inv_freq)


YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
PARTIAL = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        ("llama", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ("llama", {"attention_bias": True}, "attention_bias=True"),
        ("llama", {"mlp_bias": True}, "mlp_bias=True"),
        ("qwen3", {"attention_bias": True}, "attention_bias=True"),
        ("llama", {"attention_dropout": 0.1}, "attention_dropout=0.1"),
        ("llama", {"rope_parameters": YARN}, "rope_type='yarn'"),
        ("qwen2", {"rope_parameters": {**YARN, "rope_type": "dynamic"}}, "rope_type='dynamic'"),
        ("llama", {"rope_parameters": PARTIAL}, "partial_rotary_factor=0.5"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}, "layer_types="),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2}, "layer_types="),
    ],
)
def test_unsupported_options_are_named(kind: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=f"transformers' {kind} with {words}"):
        zoo.from_upstream(reference.make(kind, **options))


def test_other_classes_are_not_taken() -> None:
    theirs = reference.make("llama")
    with pytest.raises(TypeError, match="LlamaModel"):
        zoo.from_upstream(theirs.model)
    gpt = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=9))
    with pytest.raises(TypeError, match="GPT2LMHeadModel"):
        zoo.from_upstream(gpt)


def test_options_without_a_class_of_theirs() -> None:
    config = dict(zoo.create("llm-debug").config.__dict__)
    with pytest.raises(ValueError, match="qkv_bias and qk_norm"):
        zoo.to_upstream(LLM(LLMConfig(**{**config, "qkv_bias": True, "qk_norm": True})))


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("kind", ["qkv_bias", "qk_norm"])
def test_windows_with_biases_and_norms_go_back(kind: str, window: int | None) -> None:
    model = zoo.create("llm-debug", sliding_window=window, tie_word_embeddings=False, **{kind: True})
    theirs = zoo.to_upstream(model)
    assert type(theirs).__name__ == {"qkv_bias": "Qwen2ForCausalLM", "qk_norm": "Qwen3ForCausalLM"}[kind]
    ids = torch.randint(256, (2, 13))
    with torch.inference_mode():
        assert reference.relative_error(model(ids), theirs(ids).logits) < TIGHT
