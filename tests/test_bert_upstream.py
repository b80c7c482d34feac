"""The same outputs, losses, gradients and weights as transformers' encoders; what is not supported is named."""

from __future__ import annotations

from typing import Any

import bert_reference as reference
import pytest
import torch
import transformers
from torch import nn

import zoo
from zoo.bert import Bert


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
            batch,
            {**batch, "attention_mask": batch["attention_mask"].bool(), "position_ids": shifted},
            {"input_ids": ids, "position_ids": shifted.expand(4, -1).flip(1)},
            {**batch, **labels},
            {"input_ids": ids.int(), **labels},
        ):
            reference.compare(model(**inputs), theirs(**inputs))
        # Positionally, as upstream's first four.
        reference.compare(
            model(ids, batch["attention_mask"], batch["token_type_ids"], shifted),
            theirs(ids, batch["attention_mask"], batch["token_type_ids"], shifted),
        )


def test_left_padding_and_holes() -> None:
    for kind in reference.KINDS:
        theirs = reference.make(kind, "token-classification")
        batch = reference.batch(kind)
        mask = batch["attention_mask"].flip(1)
        mask[0, 3:5] = 0
        inputs = {"input_ids": batch["input_ids"].flip(1), "attention_mask": mask}
        with torch.inference_mode():
            reference.compare(convert(theirs)(**inputs), theirs(**inputs))


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


@pytest.mark.parametrize("options", [{"hidden_act": "gelu_new"}, {"hidden_act": "relu"}, {"layer_norm_eps": 1e-3}])
@pytest.mark.parametrize("kind", reference.KINDS)
def test_options(kind: str, options: dict[str, Any]) -> None:
    theirs = reference.make(kind, "masked-lm", **options)
    model, batch = convert(theirs), reference.batch(kind)
    with torch.inference_mode():
        reference.compare(model(**batch), theirs(**batch))
    assert zoo.from_upstream(zoo.to_upstream(model)).config == model.config


def test_no_pooler() -> None:
    theirs = reference.make("bert", "pooled", add_pooling_layer=False)
    model = convert(theirs)
    assert model.config.head == "none"
    batch = reference.batch("bert")
    with torch.inference_mode():
        reference.compare(model(**batch), theirs(**batch))
    assert zoo.to_upstream(model).pooler is None


@pytest.mark.parametrize(("kind", "head"), reference.CASES)
def test_gradients(kind: str, head: str) -> None:
    theirs = reference.make(kind, head)
    model = convert(theirs)
    inputs = {**reference.batch(kind), **reference.labels(head)}
    for each in (theirs, model):
        output = each(**inputs)
        (output.pooler_output.square().sum() if head == "pooled" else output.loss).backward()
    # Their names and shapes for our gradients, by way of the model that goes back.
    for parameter in model.parameters():
        parameter.data.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    back = dict(zoo.to_upstream(model).named_parameters())
    # A bias of keys moves all scores of a query alike, and softmax takes it out again: its gradient is rounding.
    for name, parameter in theirs.named_parameters():
        if parameter.grad is not None and not name.endswith("self.key.bias"):
            assert reference.relative_error(back[name].detach(), parameter.grad) < 1e-4, name


@pytest.mark.parametrize("kind", reference.KINDS)
@pytest.mark.parametrize("given", [(), ("token_type_ids",), ("position_ids",), ("token_type_ids", "position_ids")])
def test_embeddings_and_the_gradients_of_their_tables(kind: str, given: tuple[str, ...]) -> None:
    theirs = reference.make(kind, "pooled")
    model = convert(theirs)
    every = {**reference.batch(kind), "position_ids": torch.arange(5, 16)[None]}
    inputs = {name: every[name] for name in ("input_ids", *given)}
    # By way of the model, which counts RoBERTa's positions.
    embedded: list[torch.Tensor] = []
    model.embeddings.register_forward_hook(lambda module, args, output: embedded.append(output))
    model(**inputs)
    (ours,), expected = embedded, theirs.embeddings(**inputs)
    assert reference.relative_error(ours.detach(), expected.detach()) < 1e-6
    direction = torch.randn(expected.shape)
    for output in (ours, expected):
        (output * direction).sum().backward()
    for table in ("word_embeddings", "position_embeddings", "token_type_embeddings"):
        got, wanted = (each.embeddings.get_submodule(table).weight.grad for each in (model, theirs))
        assert reference.relative_error(got, wanted) < 1e-6, table


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize(("kind", "head"), reference.CASES)
def test_there_and_back(kind: str, head: str, tied: bool) -> None:
    theirs = reference.make(kind, head, tie_word_embeddings=tied)
    model = convert(theirs)
    back = zoo.to_upstream(model)
    assert type(back) is type(theirs) and not back.training
    # Before a call, at which theirs writes into its config what it has told from the labels.
    assert zoo.from_upstream(back).config == model.config
    assert back.state_dict().keys() == theirs.state_dict().keys()
    torch.testing.assert_close(back.state_dict(), theirs.state_dict(), rtol=0, atol=0)
    if head == "masked-lm":
        assert (back.get_output_embeddings().weight is back.get_input_embeddings().weight) == tied
    inputs = {**reference.batch(kind), **reference.labels(head)}
    with torch.inference_mode():
        torch.testing.assert_close(dict(back(**inputs)), dict(theirs(**inputs)), rtol=0, atol=0)
        reference.compare(model(**inputs), theirs(**inputs))


def test_weights_are_copies_and_flags_are_kept() -> None:
    theirs = reference.make("bert", "masked-lm").to(torch.bfloat16)
    theirs.bert.embeddings.requires_grad_(False)
    theirs.train()
    model = zoo.from_upstream(theirs)
    assert model.training and {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert not model.embeddings.norm.weight.requires_grad and model.layers[0].qkv.weight.requires_grad
    back = dict(zoo.to_upstream(model).named_parameters())
    assert {name: p.requires_grad for name, p in back.items()} == {
        name: p.requires_grad for name, p in theirs.named_parameters()
    }
    with torch.no_grad():
        model.layers[0].qkv.weight.zero_()
    assert theirs.bert.encoder.layer[0].attention.self.query.weight.abs().sum() > 0
    theirs.bert.encoder.layer[0].attention.self.key.weight.requires_grad_(False)
    with pytest.raises(ValueError, match="key.weight.requires_grad is False, but what shares layers.0.qkv.weight"):
        zoo.from_upstream(theirs)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("is_decoder", True),
        ("add_cross_attention", True),
        ("position_embedding_type", "relative_key"),
        ("hidden_act", "silu"),
    ],
)
def test_options_that_are_not_supported_are_named(option: str, value: Any) -> None:
    theirs = reference.make("bert", "pooled")
    setattr(theirs.config, option, value)
    with pytest.raises(ValueError, match=f"{option}={value!r} is not supported"):
        zoo.from_upstream(theirs)


def test_other_classes_are_refused() -> None:
    config = transformers.BertConfig(**reference.SIZES)
    for cls in (transformers.BertForPreTraining, transformers.BertForNextSentencePrediction):
        with pytest.raises(TypeError, match=f"no family converts .*{cls.__name__}"):
            zoo.from_upstream(cls(config))
    with pytest.raises(TypeError, match="Linear is not an encoder of the zoo"):
        zoo.bert.FAMILY.upstream().to_upstream(nn.Linear(2, 2))


def test_dropout_is_where_theirs_is() -> None:
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
