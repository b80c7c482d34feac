"""Random encoders and padded batches against transformers', padded and packed; see fuzzing.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from bert_reference import NAMES
from fuzzing import Results, backward, compare, convert, dtypes, fuzz, one_of, randomize, rarely, round_trips, seeds
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from zoo.bert import pack, unpack

pytestmark = pytest.mark.usefixtures("one_thread")
OUTPUTS = ("last_hidden_state", "pooler_output", "logits", "start_logits", "end_logits", "loss")


@st.composite
def models(draw: Any) -> tuple[str, str, dict[str, Any], dict[str, Any]]:
    kind, head = draw(one_of("Bert", "Roberta")), draw(one_of(*NAMES))
    heads, pad = draw(st.integers(1, 3)), draw(st.integers(0, 3))
    options = {
        "vocab_size": draw(st.integers(6, 30)),
        "hidden_size": heads * draw(one_of(1, 3, 4, 8)),
        "num_hidden_layers": draw(st.integers(1, 2)),
        "num_attention_heads": heads,
        "intermediate_size": draw(st.integers(1, 20)),
        "max_position_embeddings": 12 + (pad + 1 if kind == "Roberta" else 0) + draw(st.integers(0, 5)),
        "type_vocab_size": draw(st.integers(1, 3)),
        "layer_norm_eps": draw(one_of(1e-12, 1e-5, 1e-2)),
        "pad_token_id": pad,
        "hidden_act": "silu" if draw(rarely) else draw(one_of("gelu", "gelu_new", "gelu_pytorch_tanh", "relu")),
        "is_decoder": kind == "Bert" and draw(rarely),
        "tie_word_embeddings": draw(one_of(True, False)),
    }
    if "classification" in head:
        options |= {"num_labels": draw(st.integers(1, 4)), "classifier_dropout": draw(one_of(None, 0.3))}
    extra = {"add_pooling_layer": draw(one_of(True, False))} if head == "pooled" else {}
    return kind, head, options, extra


def build(made: Any, seed: int) -> Any:
    kind, head, options, extra = made
    cls = getattr(transformers, kind + NAMES[head])
    return randomize(cls(cls.config_class(**options), **extra), seed).eval()


@pytest.mark.slow
@fuzz
@given(data=st.data(), made=models(), dtype=dtypes, rows=st.integers(1, 4), tokens=st.integers(1, 12), seed=seeds)
def test_encoders(data: st.DataObject, made: Any, dtype: torch.dtype, rows: int, tokens: int, seed: int) -> None:
    _, head, options, _ = made
    theirs = build(made, seed)
    if convert(theirs, options) is None:
        return
    generator = torch.Generator().manual_seed(seed)
    batch = {"input_ids": torch.randint(options["vocab_size"], (rows, tokens), generator=generator)}
    if data.draw(st.booleans()):
        # With holes, and rows of nothing but padding.
        holes = st.lists(st.booleans(), min_size=rows * tokens, max_size=rows * tokens)
        batch["attention_mask"] = torch.tensor(data.draw(holes)).view(rows, tokens).long()
    if data.draw(st.booleans()):
        batch["token_type_ids"] = torch.randint(options["type_vocab_size"], (rows, tokens), generator=generator)
    labels = {}
    if head == "question-answering":
        labels = {f"{end}_positions": torch.randint(tokens, (rows,), generator=generator) for end in ("start", "end")}
    elif head == "sequence-classification" and options["num_labels"] > 1:
        labels = {"labels": torch.randint(options["num_labels"], (rows,), generator=generator)}
    elif head in ("token-classification", "masked-lm"):
        classes = options["num_labels"] if head == "token-classification" else options["vocab_size"]
        labels = {"labels": torch.randint(classes, (rows, tokens), generator=generator)}
    if not data.draw(st.booleans()):
        labels = {}
    seen = batch.get("attention_mask", torch.ones(rows, tokens)).bool()
    # Of a row of nothing but padding nobody asks for a loss.
    ignored = tokens if head == "question-answering" else -100
    for name, value in labels.items():
        labels[name] = value.where(seen if value.dim() == 2 else seen.any(1), ignored)

    def per_token(name: str) -> bool:
        return name != "pooler_output" and head != "sequence-classification"

    def run(model: nn.Module, dtype: torch.dtype) -> Results:
        output = model(**batch, **labels)
        found = {name: value for name in OUTPUTS if (value := getattr(output, name, None)) is not None}
        for name, value in found.items():
            assert name == "loss" or value.isfinite().all()
            if value.dim():
                found[name] = value[seen if per_token(name) else seen.any(1)]
        return backward(found)

    ours = compare(theirs, run, dtype)

    round_trips(theirs, ours)
    if seen.any(1).all():
        packed = pack(**batch, config=ours.config)
        with torch.no_grad():
            padded, unpacked = ours(**batch), unpack(ours(packed), packed)
        tight = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 0.2}[dtype]
        for name in OUTPUTS[:-1]:
            if (expected := getattr(padded, name, None)) is None:
                continue
            found = getattr(unpacked, name)
            if per_token(name):
                found, expected = found[seen], expected[seen]
            elif not seen[:, 0].all():
                # Padded, it is read off the first column; packed, off the first token.
                continue
            torch.testing.assert_close(found, expected, rtol=tight, atol=tight * float(expected.abs().max()))
