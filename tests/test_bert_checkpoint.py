"""Checkpoints in transformers' format, both ways and of any head and age; every wrong folder and its error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import bert_reference as reference
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import zoo
from zoo.bert import load, save

AUTO = {
    "pooled": transformers.AutoModel,
    "masked-lm": transformers.AutoModelForMaskedLM,
    "sequence-classification": transformers.AutoModelForSequenceClassification,
    "token-classification": transformers.AutoModelForTokenClassification,
    "question-answering": transformers.AutoModelForQuestionAnswering,
}


def same(ours: Any, theirs: Any, kind: str) -> None:
    batch = reference.batch(kind)
    with torch.inference_mode():
        reference.compare(ours(**batch), theirs(**batch))


@pytest.mark.parametrize(("kind", "head"), reference.CASES)
def test_folders_there_and_back(kind: str, head: str, tmp_path: Path) -> None:
    theirs = reference.make(kind, head)
    theirs.save_pretrained(tmp_path / "theirs")
    model = load(tmp_path / "theirs")
    assert not model.training and model.config == zoo.from_upstream(theirs).config
    same(model, theirs, kind)
    save(model, tmp_path / "ours")
    read, report = AUTO[head].from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert type(read) is type(theirs)
    assert not any(report.get(key) for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    same(model, read.eval(), kind)
    again = load(tmp_path / "ours", dtype=torch.bfloat16)
    assert again.config == model.config and again.layers[0].qkv.weight.dtype is torch.bfloat16


def test_untied_weights(tmp_path: Path) -> None:
    for kind in reference.KINDS:
        theirs = reference.make(kind, "masked-lm", tie_word_embeddings=False)
        theirs.save_pretrained(tmp_path / kind)
        model = load(tmp_path / kind)
        same(model, theirs, kind)
        save(model, tmp_path / f"{kind}-ours")
        again = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / f"{kind}-ours").eval()
        same(model, again, kind)
        torch.testing.assert_close(again.state_dict(), theirs.state_dict(), rtol=0, atol=0)


def test_own_files_from_before_the_unused_bias_was_kept(tmp_path: Path) -> None:
    options = {"head": "masked-lm", "tie_word_embeddings": False}
    source = zoo.create("bert-debug", **options)
    state = source.state_dict()
    del state["head.unused_bias"]
    save_file(state, tmp_path / "own.safetensors")
    model = zoo.create("bert-debug", weights=tmp_path / "own.safetensors", **options, dtype=torch.bfloat16)
    assert model.head.unused_bias.dtype is torch.bfloat16 and not model.head.unused_bias.any()
    del state["head.bias"]
    save_file(state, tmp_path / "own.safetensors")
    with pytest.raises(ValueError, match=r"missing tensors \['head.bias'\], unexpected tensors \[\]"):
        zoo.create("bert-debug", weights=tmp_path / "own.safetensors", **options)


@pytest.mark.parametrize("kind", reference.KINDS)
def test_an_encoder_without_a_pooler(kind: str, tmp_path: Path) -> None:
    theirs = reference.make(kind, "pooled", add_pooling_layer=False)
    theirs.save_pretrained(tmp_path / "theirs")
    save(zoo.from_upstream(theirs), tmp_path / "ours")
    for folder in ("theirs", "ours"):
        model = load(tmp_path / folder)
        assert model.config.head == "none"
        same(model, theirs, kind)


@pytest.mark.parametrize("kind", reference.KINDS)
def test_a_new_head_on_a_pretrained_encoder(kind: str, tmp_path: Path) -> None:
    theirs = reference.make(kind, "masked-lm")
    theirs.save_pretrained(tmp_path)
    with pytest.warns(zoo.WeightsWarning, match="starts from random weights and needs training") as caught:
        model = load(tmp_path, head="token-classification", num_labels=5)
    assert [warning.filename for warning in caught] == [__file__] and model.head.classifier.weight.shape == (5, 32)
    assert 0.01 < float(model.head.classifier.weight.detach().std()) < 0.03
    encoder = getattr(theirs, kind)
    batch = reference.batch(kind)
    with torch.inference_mode():
        expected = encoder(**batch).last_hidden_state
        # Neither a pooler nor anything else is needed, and the head of masked words is left out.
        got = load(tmp_path, head="none")(**batch).last_hidden_state
    assert reference.relative_error(got, expected) < 1e-5
    with pytest.warns(UserWarning, match="has no pooler"):
        load(tmp_path, head="pooled")


def test_an_encoder_alone_carries_a_head(tmp_path: Path) -> None:
    reference.make("bert", "pooled").save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="has no sequence-classification head") as caught:
        model = load(tmp_path, head="sequence-classification")
    # Its pooler was there.
    assert len(caught) == 1
    stored = load_file(tmp_path / "model.safetensors")
    torch.testing.assert_close(model.head.dense.weight.detach(), stored["pooler.dense.weight"], rtol=0, atol=0)


def test_names_of_old_releases(tmp_path: Path) -> None:
    """As published: the norms' old names, two heads, a buffer."""
    theirs = transformers.BertForPreTraining(transformers.BertConfig(**reference.SIZES)).eval()
    theirs.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    old = {
        key.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for key, tensor in stored.items()
    }
    assert len(old.keys() - stored.keys()) == 2 * (2 * 3 + 2)
    old["bert.embeddings.position_ids"] = torch.arange(40)[None]
    save_file(old, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = load(tmp_path)
    assert model.config.head == "masked-lm"
    batch = reference.batch("bert")
    with torch.inference_mode():
        expected = theirs(**batch)
        assert reference.relative_error(model(**batch).logits, expected.prediction_logits) < 1e-5
        pooled = load(tmp_path, head="pooled")(**batch).pooler_output
        assert reference.relative_error(pooled, theirs.bert(**batch).pooler_output) < 1e-5


def test_presets_take_a_folder_that_agrees(tmp_path: Path) -> None:
    source = zoo.create("bert-debug", head="masked-lm")
    save(source, tmp_path)
    model = zoo.create("bert-debug", weights=tmp_path, head="masked-lm")
    inputs = zoo.example_inputs(model)
    torch.testing.assert_close(model(**inputs).logits, source(**inputs).logits, rtol=0, atol=0)
    # The zoo's own keys, as torch saves them.
    torch.save(source.state_dict(), tmp_path / "own.pt")
    model = zoo.create("bert-debug", weights=tmp_path / "own.pt", head="masked-lm", dtype=torch.bfloat16)
    torch.testing.assert_close(model.head.bias, source.head.bias.bfloat16(), rtol=0, atol=0)
    with pytest.warns(UserWarning, match="token-classification head"):
        zoo.create("bert-debug", weights=tmp_path, head="token-classification")
    with pytest.raises(ValueError, match="config.json has vocab_size=128, the preset 30522"):
        zoo.create("bert-base", weights=tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "is_decoder": True}))
    with pytest.raises(ValueError, match="is_decoder=True is not supported"):
        load(tmp_path)


def test_tensors_that_do_not_fit(tmp_path: Path) -> None:
    source = zoo.create("bert-debug", head="masked-lm")
    save(source, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")

    def refused(message: str, **changes: Any) -> None:
        changed = {key: tensor for key, tensor in {**stored, **changes}.items() if tensor is not None}
        save_file(changed, tmp_path / "model.safetensors")
        with pytest.raises(ValueError, match=message):
            load(tmp_path)

    query = "bert.encoder.layer.1.attention.self.query.weight"
    refused(f"missing tensors \\['{query}'\\]", **{query: None})
    refused("unexpected tensors \\['adapter.weight'\\]", **{"adapter.weight": torch.zeros(2)})
    refused(f"{query} has shape \\(2, 32\\), expected \\(32, 32\\)", **{query: torch.zeros(2, 32)})
    # Half a head is a broken one, not a new one.
    refused("missing tensors \\['cls.predictions.bias'\\]", **{"cls.predictions.bias": None})
    other = torch.zeros(128, 32)
    refused("decoder.weight differs from embeddings.word_embeddings", **{"cls.predictions.decoder.weight": other})


def test_folders_and_arguments_that_are_wrong(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="has no config.json"):
        load(tmp_path)
    with pytest.raises(FileNotFoundError, match="not a hub id"):
        load(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="dtype is torch.int8"):
        load(tmp_path, dtype=torch.int8)
    with pytest.raises(TypeError, match="Linear is not an encoder of the zoo"):
        save(torch.nn.Linear(2, 2), tmp_path)  # type: ignore[arg-type]
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    with pytest.raises(ValueError, match="model_type='gpt2' is not supported"):
        load(tmp_path)


def test_a_dtype_by_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="dtype is 'bfloat16', but parameters need a floating-point torch.dtype"):
        load(tmp_path, dtype="bfloat16")  # type: ignore[arg-type]
