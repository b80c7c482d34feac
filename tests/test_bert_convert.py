"""What only encoders meet in conversion: losses of every kind, heads that come and go, names of old releases."""

import json
from pathlib import Path
from typing import Any

import bert_reference as reference
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

import zoo
from zoo.bert import Bert, load, save


def convert(module: nn.Module) -> Bert:
    model = zoo.from_upstream(module)
    assert isinstance(model, Bert) and model.training == module.training
    return model


@pytest.mark.parametrize(("kind", "head"), reference.CASES)
def test_outputs_and_losses(kind: str, head: str) -> None:
    theirs = reference.make(kind, head)
    model = convert(theirs)
    assert (model.config.kind, model.config.head) == (kind, head)
    batch, labels = reference.batch(kind), reference.labels(head)
    ids = batch["input_ids"]
    shifted = torch.arange(7, 18)[None]
    with torch.inference_mode():
        for inputs in (
            {"input_ids": ids},
            {"input_ids": ids, "attention_mask": batch["attention_mask"]},
            {**batch, "attention_mask": batch["attention_mask"].bool(), "position_ids": shifted},
            {"input_ids": ids, "position_ids": shifted.expand(4, -1).flip(1)},
            {"input_ids": ids.int(), **labels},
        ):
            reference.compare(model(**inputs), theirs(**inputs))
        # Positionally, as upstream's first four.
        reference.compare(
            model(ids, batch["attention_mask"], batch["token_type_ids"], shifted),
            theirs(ids, batch["attention_mask"], batch["token_type_ids"], shifted),
        )


@pytest.mark.parametrize("kind", reference.KINDS)
@pytest.mark.parametrize(
    ("options", "shape", "dtype"),
    [
        ({"num_labels": 1}, (4,), torch.float32),
        ({"num_labels": 1}, (4, 1), torch.float32),
        ({"num_labels": 3}, (4, 3), torch.float32),
        ({"num_labels": 3, "problem_type": "regression"}, (4, 3), torch.float32),
        ({"num_labels": 3, "problem_type": "multi_label_classification"}, (4, 3), torch.float32),
        ({"num_labels": 3, "problem_type": "single_label_classification"}, (4,), torch.int64),
        ({"num_labels": 3, "classifier_dropout": 0.3}, (4, 1), torch.int32),
    ],
)
def test_losses_of_sequences(kind: str, options: dict[str, Any], shape: tuple[int, ...], dtype: torch.dtype) -> None:
    theirs = reference.make(kind, "sequence-classification", **options)
    model = convert(theirs)
    labels = torch.randint(0, 2, shape).to(dtype)
    batch = reference.batch(kind)
    their_labels = labels.long() if dtype == torch.int32 else labels
    with torch.inference_mode():
        # Theirs remembers the problem in its config at the first call; ours has converted before.
        reference.compare(model(**batch, labels=labels), theirs(**batch, labels=their_labels))


def test_dropout_matches_transformers() -> None:
    """Means over many draws agree where single draws cannot: their order differs."""
    options = {"hidden_dropout_prob": 0.4, "attention_probs_dropout_prob": 0.4, "classifier_dropout": 0.4}
    ids = reference.batch("bert", rows=1, tokens=4)["input_ids"].expand(4000, -1)
    for kind in reference.KINDS:
        theirs = reference.make(kind, "sequence-classification", **options).train()
        model = convert(theirs)
        with torch.no_grad():
            ours, expected = model(ids).logits, theirs(ids).logits
        spread = expected.std(0)
        assert ((ours.mean(0) - expected.mean(0)).abs() < 6 * spread * (2 / 4000) ** 0.5).all()
        assert ((ours.std(0) / spread).log().abs() < 0.1).all()
        model.eval(), theirs.eval()
        assert not torch.allclose(ours.std(0), model(ids).logits.std(0))


# --- checkpoints ---


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


def test_folders_that_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    with pytest.raises(ValueError, match="model_type='gpt2' is not supported"):
        load(tmp_path)
    save(zoo.create("bert-debug", head="masked-lm"), tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    # A part of a head is a damaged file; a whole head that is missing would start from random weights.
    del stored["cls.predictions.bias"]
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"missing tensors \['cls.predictions.bias'\]"):
        load(tmp_path)
