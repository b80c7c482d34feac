"""Random language models and prompts against transformers'; see fuzzing.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from fuzzing import Results, backward, compare, convert, dtypes, fuzz, one_of, randomize, rarely, round_trips, seeds
from hypothesis import given
from hypothesis import strategies as st
from llm_reference import exact_norms
from torch import Tensor, nn

from zoo.llm import generate

pytestmark = pytest.mark.usefixtures("one_thread", "_exact_norms")
POSITIONS = 40


@pytest.fixture(scope="module")
def _exact_norms() -> Iterator[None]:
    with exact_norms():
        yield


@st.composite
def models(draw: Any) -> tuple[str, dict[str, Any]]:
    name = draw(one_of("Llama", "Mistral", "Qwen2", "Qwen3"))
    key_heads, groups = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    width = draw(one_of(2, 4, 6, 16))
    options: dict[str, Any] = {
        "vocab_size": draw(st.integers(8, 40)),
        "hidden_size": key_heads * groups * draw(one_of(2, 4, 6)),
        "intermediate_size": draw(st.integers(1, 20)),
        "num_hidden_layers": draw(st.integers(1, 2)),
        "num_attention_heads": key_heads * groups,
        "num_key_value_heads": key_heads,
        "max_position_embeddings": POSITIONS,
        "rms_norm_eps": draw(one_of(1e-6, 1e-3)),
        "tie_word_embeddings": draw(st.booleans()),
        "pad_token_id": draw(one_of(None, 0, 3)),
        "bos_token_id": None,
        "eos_token_id": None,
        "hidden_act": "gelu" if draw(rarely) else "silu",
    }
    if name in ("Llama", "Qwen3") or draw(st.booleans()):
        options["head_dim"] = width
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": draw(one_of(100.0, 10000.0))}
    kind = "yarn" if draw(rarely) else draw(one_of("default", "linear", "llama3"))
    if kind != "default":
        rope |= {"rope_type": kind, "factor": draw(one_of(1.5, 8.0))}
    if kind == "llama3":
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
    options["rope_parameters"] = rope
    if name == "Llama":
        options |= {"attention_bias": draw(rarely), "mlp_bias": draw(rarely)}
    elif name == "Mistral":
        options["sliding_window"] = draw(one_of(None, 1, 2, 3, 5, 12))
    elif draw(st.booleans()):
        layers = options["num_hidden_layers"]
        options |= {"use_sliding_window": True, "sliding_window": draw(st.integers(1, 12))}
        options["max_window_layers"] = 1 if draw(rarely) else draw(one_of(0, layers))
    return name, options


def build(name: str, options: dict[str, Any], seed: int) -> Any:
    cls = getattr(transformers, f"{name}ForCausalLM")
    return randomize(cls(cls.config_class(**options)), seed).eval()


@fuzz
@given(data=st.data(), made=models(), dtype=dtypes, rows=st.integers(1, 3), tokens=st.integers(1, 14), seed=seeds)
def test_prompts(data: st.DataObject, made: Any, dtype: torch.dtype, rows: int, tokens: int, seed: int) -> None:
    name, options = made
    theirs = build(name, options, seed)
    named = {"head_dim", "layer_types", "rope_type", *options}
    if convert(theirs, named) is None:
        return
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(options["vocab_size"], (rows, tokens), generator=generator)
    mask = None
    if data.draw(st.booleans()):
        holes = st.lists(st.booleans(), min_size=rows * tokens, max_size=rows * tokens)
        mask = torch.tensor(data.draw(holes)).view(rows, tokens).long()
    shift = data.draw(one_of(None, 0, 7))
    positions = None if shift is None else torch.arange(shift, shift + tokens)[None]
    # Of padding nobody reads a logit.
    read = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()

    def run(model: nn.Module, dtype: torch.dtype) -> Results:
        logits = model(ids, attention_mask=mask, position_ids=positions)
        logits = logits if isinstance(logits, Tensor) else logits.logits
        assert read.all() or logits.isfinite().all()
        return backward({"logits": logits[read]})

    # Rotary tables are float32 in both, by formulas that differ in the last bit.
    ours = compare(theirs, run, dtype, floor=1e-6)

    round_trips(theirs, ours)


@fuzz
@given(
    made=models(), lengths=st.lists(st.integers(1, 12), min_size=1, max_size=3), new=st.integers(1, 8), seed=seeds,
    dtype=one_of(torch.float32, torch.float64),
)  # fmt: skip
def test_generation(made: Any, lengths: list[int], new: int, seed: int, dtype: torch.dtype) -> None:
    """Each token is the most likely one after the whole text before it, and logits of one token a time are the same."""
    name, options = made
    theirs = build(name, options, seed).to(dtype)
    model = convert(theirs, {"head_dim", "layer_types", "rope_type", *options})
    if model is None:
        return
    generator = torch.Generator().manual_seed(seed)
    prompts = [torch.randint(options["vocab_size"], (n,), generator=generator).tolist() for n in lengths]
    answers = generate(model, prompts, max_new_tokens=new)
    tight = 1e-4 if dtype == torch.float32 else 1e-6
    with torch.no_grad():
        for prompt, answer in zip(prompts, answers, strict=True):
            text = torch.tensor([prompt + answer.tolist()])
            logits = theirs(text).logits[0]
            scale = logits.abs().max()
            for at, token in enumerate(answer.tolist(), start=len(prompt) - 1):
                assert logits[at, token] >= logits[at].max() - tight * scale
            cache = model.make_cache(1, text.shape[1])
            stepped = [
                model(text[:, at : at + 1], position_ids=torch.tensor([[at]]), cache=cache)[0, 0]
                for at in range(text.shape[1])
            ]
            torch.testing.assert_close(torch.stack(stepped), logits, rtol=0, atol=float(tight * scale))
