"""Graphs, cuts, masks and modes of the encoder; every wrong input and its error."""

from typing import Any

import bert_reference as reference
import pytest
import torch

import zoo
from tests.blocks import graphs_of
from zoo.bert import BertLayer, pack
from zoo.bert.model import PRESETS


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("head", ["none", *reference.NAMES])
def test_graphs_of_every_head(head: str, training: bool) -> None:
    model: Any = zoo.compile_regions(zoo.create("bert-debug", head=head), backend="eager").train(training)
    inputs = zoo.example_inputs(model)
    labels = reference.labels(head, rows=2, tokens=16) if head != "none" else {}
    if head in ("sequence-classification", "token-classification"):
        labels = {"labels": labels["labels"].clamp(max=1)}
    with zoo.enforce_budget(model):
        model(**inputs, **labels)
        model(**zoo.example_inputs(model, seed=1), **labels)
        found = graphs_of(model)
        assert found.pop("BertLayer") == 1 and sum(found.values()) == (head == "masked-lm")
        # Full rows have no mask: that is the second graph of a layer.
        model(inputs["input_ids"], **labels)
    assert graphs_of(model)["BertLayer"] == 2


def test_no_mask_where_all_rows_are_full(monkeypatch: pytest.MonkeyPatch) -> None:
    masks = []
    forward = BertLayer.forward
    monkeypatch.setattr(
        BertLayer, "forward", lambda self, x, mask, rows: (masks.append(mask), forward(self, x, mask, rows))[1]
    )
    model = zoo.create("bert-debug", num_hidden_layers=1)
    ids = zoo.example_inputs(model)["input_ids"]
    for mask in (None, torch.ones_like(ids), torch.ones_like(ids).bool(), torch.ones(ids.shape)):
        model(ids, mask)
    assert masks == [None] * 4
    short = torch.ones_like(ids)
    short[0, 3:] = 0
    model(ids, short)
    assert masks[-1].shape == (2, 1, 1, 16)


def test_a_row_that_is_all_padding_is_finite() -> None:
    model = zoo.create("bert-debug")
    ids = zoo.example_inputs(model)["input_ids"]
    mask = torch.ones_like(ids)
    mask[1] = 0
    with torch.no_grad():
        got = model(ids, mask).last_hidden_state
        torch.testing.assert_close(got, model(ids).last_hidden_state)
        # No row at all: the same again.
        assert model(ids, torch.zeros_like(ids)).last_hidden_state.isfinite().all()


IDS = torch.ones(2, 5, dtype=torch.int64)
MASK = torch.ones_like(IDS)


@pytest.mark.parametrize(
    ("options", "labels", "error", "message"),
    [
        ({"head": "masked-lm"}, {"labels": IDS[:, :3]}, ValueError, r"labels has shape \[2, 3\], expected \[2, 5\]"),
        ({"head": "masked-lm"}, {"labels": IDS * 128}, ValueError, "from 128 to 128, but the number of classes is 128"),
        ({"head": "masked-lm"}, {"labels": IDS.float()}, TypeError, "labels is torch.float32"),
        ({"head": "token-classification"}, {"labels": IDS * -1}, ValueError, "labels has values from -1"),
        ({"head": "sequence-classification"}, {"labels": IDS}, ValueError, r"expected \[2\] or \[2, 1\]; integers"),
        ({"head": "sequence-classification"}, {"labels": IDS[:, 0] * 2}, ValueError, "labels has values from 2"),
        ({"head": "sequence-classification"}, {"labels": IDS[:, 0] * 1.0}, ValueError, r"expected \[2, 2\]; integers"),
        ({"head": "question-answering"}, {"labels": IDS}, ValueError, "pass start_positions and end_positions"),
        ({"head": "question-answering"}, {"start_positions": IDS[:, 0]}, ValueError, "one of them is missing"),
        (
            {"head": "question-answering"},
            {"start_positions": IDS[0], "end_positions": IDS[0]},
            ValueError,
            r"start_positions has shape \[5\], expected \[2\] or \[2, 1\]",
        ),
    ],
)
def test_wrong_labels(options: dict[str, Any], labels: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        zoo.create("bert-debug", **options)(IDS, **labels)


@pytest.mark.parametrize(
    ("inputs", "error", "message"),
    [
        ({"input_ids": IDS.float()}, TypeError, "input_ids is torch.float32"),
        ({"attention_mask": MASK[:1]}, ValueError, r"attention_mask has shape \[1, 5\], expected \[2, 5\]"),
        ({"attention_mask": torch.tensor([[1, 0, 0, 0, 0], [0] * 5])}, ValueError, r"row\(s\) \[1\] have no token"),
        ({"attention_mask": MASK * 0}, ValueError, r"row\(s\) \[0, 1\] have no token"),
        ({"position_ids": MASK[0]}, ValueError, r"position_ids has shape \[5\], expected \[2, 5\] or \[1, 5\]"),
        ({"rows": 1}, ValueError, "input_ids is 2 x 5, but rows is 1 and length 5"),
        ({"length": 4}, ValueError, "rows is 2 and length 4"),
        ({"length": 65, "config": PRESETS["bert-debug"]}, ValueError, "length is 65, but the model has 64 positions"),
        ({"config": PRESETS["bert-debug"], "input_ids": IDS * 200}, ValueError, "input_ids has values from 200"),
        ({"buckets": (8,)}, ValueError, r"10 tokens and needs room for 2 of padding, but the largest bucket holds 8"),
        ({"buckets": ()}, ValueError, "expected sizes in tokens"),
        ({"buckets": (8,), "input_ids": IDS[:, :1]}, ValueError, "length is 1"),
    ],
)
def test_what_cannot_be_packed(inputs: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        pack(**{"input_ids": IDS, **inputs})


def test_packed_batches_of_another_model() -> None:
    model = zoo.create("bert-debug")
    with pytest.raises(ValueError, match="attention_mask given with a packed batch"):
        model(pack(IDS), MASK)
    with pytest.raises(ValueError, match="the batch has rows of 70 tokens, but the model 64 positions"):
        model(pack(IDS, length=70))
    with pytest.raises(ValueError, match="input_ids has values from 200 to 200"):
        model(pack(IDS * 200))
    with pytest.raises(ValueError, match="token_type_ids has values from 3"):
        model(pack(IDS, token_type_ids=IDS * 3))
    roberta = zoo.create("bert-debug", kind="roberta", pad_token_id=1)
    with pytest.raises(ValueError, match="counts positions from 0: pack with config=model.config"):
        roberta(pack(IDS))
    with pytest.raises(ValueError, match=r"labels has shape \[2, 4\]"):
        zoo.create("bert-debug", head="masked-lm")(pack(IDS), labels=IDS[:, :4])
