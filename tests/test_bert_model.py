"""The encoder: graphs, cuts, masks and modes; packed batches give what padded ones give; every wrong input."""

from collections import Counter
from itertools import pairwise
from typing import Any

import bert_reference as reference
import pytest
import torch
from torch import Tensor

import zoo
from tests.blocks import graphs_of
from zoo.bert import BertLayer, layer, pack, token_buckets, unpack
from zoo.bert.layer import Rows, attend, rows_of
from zoo.bert.model import PRESETS
from zoo.bert.packing import filling_rows
from zoo.engine.graph_log import GRAPH_LOG


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


def model_of(kind: str, head: str, **options: Any) -> Any:
    return zoo.from_upstream(reference.make(kind, head, **options))


@pytest.mark.parametrize("sizes", [None, (28, 40, 60)], ids=["exact", "buckets"])
@pytest.mark.parametrize(("kind", "head"), reference.CASES)
def test_packed_is_padded(kind: str, head: str, sizes: tuple[int, ...] | None) -> None:
    theirs = reference.make(kind, head)
    model: Any = zoo.from_upstream(theirs)
    batch, labels = reference.batch(kind), reference.labels(head)
    mask = batch["attention_mask"].bool()
    if "labels" in labels and labels["labels"].shape == mask.shape:
        labels = {"labels": labels["labels"].masked_fill(~mask, -100)}
    packed = pack(**batch, config=model.config, buckets=sizes)
    assert packed.input_ids.shape == ((int(mask.sum()) if sizes is None else 28),)
    with torch.inference_mode():
        # Their span loss also asks padding where the answer starts; ours does not, and has a test of its own.
        given = {} if head == "question-answering" else labels
        expected = theirs(**batch, **given)
        output = model(packed, **given)
        got = unpack(output, packed)
        reference.compare(got, expected, where=mask)
        for name, value in got._asdict().items():
            if value is not None and value.shape[:2] == mask.shape:
                assert not value[~mask].any(), name
        if sizes is None:
            torch.testing.assert_close(model.without_padding(**batch, **given), got)
        if "labels" in labels and labels["labels"].dim() == 2:
            torch.testing.assert_close(model(packed, labels=packed.take(labels["labels"], -100)).loss, output.loss)


def test_the_loss_of_a_span_asks_tokens_only() -> None:
    model = model_of("bert", "question-answering")
    batch = reference.batch("bert")
    batch["attention_mask"][3] = (torch.arange(11) < 6).long()
    packed = pack(**batch, buckets=(60,))
    # Row 1 has one token, so that its answer ends where none is; row 2's begins beyond the row, row 3's before it.
    start, end = torch.tensor([4, 0, 99, -1]), torch.tensor([5, 1, 99, 5])
    with torch.inference_mode():
        output = model(packed, start_positions=start, end_positions=end)
        padded = unpack(output, packed)
    losses = []
    for logits, answers in ((padded.start_logits, {0: 4, 1: 0, 3: 0}), (padded.end_logits, {0: 5, 3: 5})):
        scores = logits.masked_fill(batch["attention_mask"] == 0, float("-inf")).log_softmax(-1)
        losses.append(-torch.stack([scores[row, place] for row, place in answers.items()]).mean())
    torch.testing.assert_close(output.loss, (losses[0] + losses[1]) / 2)


def test_padding_anywhere_and_given_positions() -> None:
    for kind in reference.KINDS:
        theirs = reference.make(kind, "token-classification")
        model: Any = zoo.from_upstream(theirs)
        batch = {name: tensor.flip(1) for name, tensor in reference.batch(kind).items()}
        batch["attention_mask"][0, 3:6] = 0
        mask = batch["attention_mask"].bool()
        positions = torch.randint(2, 40, (4, 11))
        with torch.inference_mode():
            for given in ({}, {"position_ids": positions}, {"position_ids": positions[:1]}):
                packed = pack(**batch, **given, config=model.config, buckets=(44, 60))
                got = unpack(model(packed), packed)
                reference.compare(got, theirs(**batch, **given), where=mask)


@pytest.mark.parametrize("head", reference.NAMES)
def test_gradients_are_those_of_padded_batches(head: str) -> None:
    model = model_of("bert", head)
    batch, labels = reference.batch("bert"), reference.labels(head)
    if head == "question-answering":
        batch["attention_mask"] = torch.ones_like(batch["attention_mask"])
    mask = batch["attention_mask"].bool()

    def gradients(packing: bool) -> list[Tensor]:
        if packing:
            packed = pack(**batch, buckets=(64,), rows=4, length=16)
            output = model(packed, **labels)
        else:
            if "labels" in labels and labels["labels"].dim() == 2:
                given = {"labels": labels["labels"].masked_fill(~mask, -100)}
            else:
                given = labels
            output = model(**batch, **given)
        loss = output.pooler_output.square().sum() if head == "pooled" else output.loss
        found = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
        return [torch.zeros(()) if each is None else each for each in found]

    if head in ("masked-lm", "token-classification"):
        labels = {"labels": torch.nn.functional.pad(labels["labels"], (0, 5), value=-100)}
        batch = {name: torch.nn.functional.pad(tensor, (0, 5)) for name, tensor in batch.items()}
        mask = batch["attention_mask"].bool()
    for got, expected in zip(gradients(True), gradients(False), strict=True):
        assert got.isfinite().all()
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_every_batch_fits_one_of_few_sizes() -> None:
    generator = torch.Generator().manual_seed(0)
    for rows, length, steps in ((1, 2, 8), (3, 7, 4), (8, 16, 8), (5, 33, 1), (64, 512, 8)):
        buckets = token_buckets(rows, length, steps=steps)
        assert 1 <= len(buckets) <= steps and list(buckets) == sorted(set(buckets))
        slots = rows + filling_rows(buckets, rows, length) + 1
        seen = set()
        for lengths in (
            [1] * rows,
            [length] * rows,
            *(torch.randint(1, length + 1, (rows,), generator=generator).tolist() for _ in range(20)),
            *([1] * short for short in range(1, rows)),
        ):
            ids = torch.zeros(len(lengths), length, dtype=torch.int64)
            mask = torch.arange(length) < torch.tensor(lengths)[:, None]
            batch = pack(ids, mask, buckets=buckets, rows=rows)
            spans = batch.offsets.diff()
            assert batch.input_ids.numel() in buckets and batch.offsets.shape == (slots,)
            assert int(spans.min()) >= 1 and int(spans.max()) <= length
            assert int(batch.offsets[-1]) == batch.input_ids.numel()
            assert spans[: len(lengths)].tolist() == lengths
            seen.add(batch.input_ids.numel())
        assert len(seen) > 1 or len(buckets) == 1
    # No size is far too large: half a step is lost on average.
    assert token_buckets(64, 512)[-1] < 64 * 512 + 100


def test_buckets_of_typical_sizes_and_one_for_the_rest() -> None:
    rows, length, typical = 8, 64, (100, 160)
    buckets = token_buckets(rows, length, steps=5, typical=typical)
    filling = filling_rows(buckets, rows, length)
    usual = [size - filling for size in buckets[:-1]]
    assert len(buckets) == 5 and buckets[-1] >= rows * length + filling
    assert usual[-2] < typical[1] <= usual[-1] < typical[1] + 8
    steps = {after - before for before, after in pairwise(usual)}
    assert typical[0] < usual[0] and steps <= {8, 16}
    for lengths in ([1] * 8, [13] * 4 + [12] * 4, [20] * 8, [64] * 8, [64, 30]):
        mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
        batch = pack(torch.zeros_like(mask, dtype=torch.int64), mask, buckets=buckets, rows=rows, length=length)
        assert batch.input_ids.numel() in buckets and batch.offsets.shape == (rows + filling + 1,)
    assert len(token_buckets(rows, length, steps=5, typical=(512, 512))) == 1
    for wrong, how in (((0, 9), 2), ((9, 8), 2), ((9, 513), 2), ((9, 99), 1)):
        with pytest.raises(ValueError, match="from 1 to 512, and at least 2 steps"):
            token_buckets(rows, length, steps=how, typical=wrong)


@pytest.mark.parametrize("way", ["table", "kernel"])
def test_rows_attend_to_themselves_alone(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways through the seam, against a loop over rows; the kernel's is played by that loop."""
    heads, offsets = 2, torch.tensor([0, 3, 4, 9, 16], dtype=torch.int32)
    qkv = torch.randn(16, 3 * 8)

    def one_by_one(query: Tensor, key: Tensor, value: Tensor, begins: Tensor, *_: Any) -> Tensor:
        rows = []
        for start, end in zip(begins[:-1].tolist(), begins[1:].tolist(), strict=True):
            scores = torch.einsum("qhd,khd->hqk", query[start:end], key[start:end]) * query.shape[-1] ** -0.5
            rows.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), value[start:end]))
        return torch.cat(rows)

    parts = qkv.unflatten(-1, (3, heads, 4)).unbind(1)
    expected = one_by_one(*parts, offsets).flatten(1)
    if way == "kernel":
        monkeypatch.setattr(layer, "kernel_runs", lambda like, head_dim: True)
        monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", one_by_one)
    rows = rows_of(offsets, 7, 16, qkv, 4)
    assert (rows.table is None) == (way == "kernel")
    torch.testing.assert_close(attend(qkv, heads, None, rows, 0.0), expected)


def test_an_empty_row_gives_finite_outputs_and_gradients() -> None:
    qkv = torch.randn(5, 3 * 8, requires_grad=True)
    rows = rows_of(torch.tensor([0, 2, 2, 5], dtype=torch.int32), 4, 5, qkv, 4)
    out = attend(qkv, 2, None, rows, 0.0)
    (gradient,) = torch.autograd.grad(out.square().sum(), qkv)
    assert out.isfinite().all() and gradient.isfinite().all()
    short = rows_of(torch.tensor([0, 2, 5], dtype=torch.int32), 4, 5, qkv, 4)
    torch.testing.assert_close(out, attend(qkv, 2, None, short, 0.0))


def test_a_thousand_batches_compile_what_was_declared_and_nothing_more() -> None:
    model: Any = zoo.create("bert-debug")
    rows, length = 4, 16
    buckets = token_buckets(rows, length, steps=4)
    zoo.compile_regions(model, backend="eager")
    generator = torch.Generator().manual_seed(0)
    before, seen = len(GRAPH_LOG.entries), Counter[int]()
    with torch.inference_mode(), zoo.enforce_budget(model):
        for index in range(1000):
            # Most rows are short; of some batches all are nearly as long as any.
            lengths = (torch.rand(rows, 1, generator=generator) ** (0.1 if index % 20 == 0 else 3) * length).long() + 1
            mask = torch.arange(int(lengths.max())) < lengths
            ids = torch.randint(1, 128, mask.shape, generator=generator)
            batch = pack(ids, mask, config=model.config, buckets=buckets, rows=rows, length=length)
            assert model(batch).pooler_output.shape == (rows, 32)
            seen[batch.input_ids.numel()] += 1
    assert set(seen) == set(buckets)
    assert sum(entry.graphs for entry in GRAPH_LOG.entries[before:]) == len(buckets)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_kernels_agree_with_padded_attention(dtype: torch.dtype, compiled: bool) -> None:
    model: Any = zoo.create("bert-tiny", device="cuda", dtype=dtype, hidden_dropout_prob=0.0)
    mask = torch.arange(160) < torch.tensor([160, 1, 31, 97])[:, None]
    ids = torch.randint(1, 30000, mask.shape)
    batch = pack(ids, mask, config=model.config, buckets=token_buckets(4, 160)).to("cuda")
    rows = rows_of(batch.offsets, batch.length, len(batch.places), model.embeddings.norm.weight, 64)
    assert isinstance(rows, Rows) and (rows.offsets is not None) == (dtype != torch.float32)
    with torch.inference_mode():
        expected = model.float()(ids.cuda(), mask.cuda()).last_hidden_state[mask.cuda()]
    model.to(dtype)
    if compiled:
        zoo.compile_regions(model)
    limit = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 1e-5}[dtype]
    with torch.inference_mode():
        got = unpack(model(batch).last_hidden_state, batch)[mask.cuda()]
        assert reference.relative_error(got.float(), expected) < limit
        step = zoo.cuda_graph(model, (batch,))
        torch.testing.assert_close(step(batch).last_hidden_state, model(batch).last_hidden_state)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:\\s*Online softmax is disabled:UserWarning")  # the compiler's, of a tiny head
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_kernels_train(dropout: float, compiled: bool) -> None:
    options = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": dropout, "head": "token-classification"}
    model: Any = zoo.create("bert-tiny", device="cuda", **options).train()
    mask = torch.arange(160) < torch.tensor([160, 1, 31, 97])[:, None]
    ids, labels = torch.randint(1, 30000, mask.shape), torch.randint(2, mask.shape).masked_fill(~mask, -100).cuda()
    batch = pack(ids, mask, config=model.config, buckets=token_buckets(4, 160)).to("cuda")

    def gradients(*args: Any) -> list[Tensor]:
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(*args, labels=labels).loss
        found = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
        return [each for each in found if each is not None]

    expected = gradients(ids.cuda(), mask.cuda())
    if compiled:
        zoo.compile_regions(model)
    got = gradients(batch)
    assert all(each.isfinite().all() for each in got)
    if dropout == 0:
        joined = [torch.cat([each.flatten() for each in side]) for side in (got, expected)]
        assert reference.relative_error(*joined) < 5e-2
