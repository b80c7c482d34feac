"""The encoder: graphs, masks and modes, packed batches like padded ones, layers that run kernels, every wrong input."""

import contextlib
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zoo
from tests import bert_reference as reference
from tests.blocks import Doubled, graphs_of, outputs_and_gradients
from tests.fake_gpu import LAUNCH, traced
from tests.noted import noted
from zoo.bert import Bert, BertLayer, layer, pack, token_buckets, unpack
from zoo.bert.layer import attend, rows_of
from zoo.bert.model import filling_rows
from zoo.engine.graph_log import GRAPH_LOG
from zoo.ops import common, transformer


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
    called = noted(monkeypatch, BertLayer, "forward")
    model = zoo.create("bert-debug", num_hidden_layers=1)
    ids = zoo.example_inputs(model)["input_ids"]
    for mask in (None, torch.ones_like(ids), torch.ones_like(ids).bool(), torch.ones(ids.shape)):
        model(ids, mask)
    assert [mask for _, _, mask, _ in called] == [None] * 4
    short = torch.ones_like(ids)
    short[0, 3:] = 0
    model(ids, short)
    assert called[-1][2].shape == (2, 1, 1, 16)


def test_a_packed_row_that_is_empty_is_finite_and_like_none() -> None:
    qkv = torch.randn(5, 3 * 8, requires_grad=True)
    rows = rows_of(torch.tensor([0, 2, 2, 5], dtype=torch.int32), 4, 5, qkv, 4)
    out = attend(qkv, 2, None, rows, 0.0)
    (gradient,) = torch.autograd.grad(out.square().sum(), qkv)
    assert out.isfinite().all() and gradient.isfinite().all()
    short = rows_of(torch.tensor([0, 2, 5], dtype=torch.int32), 4, 5, qkv, 4)
    torch.testing.assert_close(out, attend(qkv, 2, None, short, 0.0))


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
        if "labels" in labels and labels["labels"].dim() == 2:
            torch.testing.assert_close(model(packed, labels=packed.take(labels["labels"], -100)).loss, output.loss)


def test_the_loss_of_a_span_asks_tokens_only() -> None:
    model = zoo.from_upstream(reference.make("bert", "question-answering"))
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


@pytest.mark.parametrize("head", reference.NAMES)
def test_gradients_are_those_of_padded_batches(head: str) -> None:
    model = zoo.from_upstream(reference.make("bert", head))
    batch, labels = reference.batch("bert"), reference.labels(head)
    if head == "question-answering":
        batch["attention_mask"] = torch.ones_like(batch["attention_mask"])
    given = dict(labels)
    if head in ("masked-lm", "token-classification"):
        labels = {"labels": F.pad(labels["labels"], (0, 5), value=-100)}
        batch = {name: F.pad(tensor, (0, 5)) for name, tensor in batch.items()}
        given = {"labels": labels["labels"].masked_fill(batch["attention_mask"] == 0, -100)}
    packed = pack(**batch, buckets=(64,), rows=4, length=16)

    def gradients(output: Any) -> list[Tensor]:
        loss = output.pooler_output.square().sum() if head == "pooled" else output.loss
        found = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
        return [torch.zeros(()) if each is None else each for each in found]

    for got, expected in zip(gradients(model(packed, **labels)), gradients(model(**batch, **given)), strict=True):
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


@pytest.mark.parametrize("kind", ["bert", "roberta"])
@pytest.mark.parametrize("given", [True, False], ids=["types and positions", "ids alone"])
def test_padding_that_is_skipped_changes_no_real_token(kind: str, given: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = zoo.compile_regions(zoo.create("bert-debug", kind=kind), backend="aot_eager")
    ids = torch.randint(2, 100, (5, 11))
    mask = torch.rand(ids.shape) < 0.6
    mask[0], mask[1] = True, False
    options = {"token_type_ids": torch.randint(model.config.type_vocab_size, ids.shape)} if given else {}
    options |= {"position_ids": torch.randint(2, 20, (1, 11))} if given else {}
    with torch.no_grad():
        expected = model(ids, mask, **options).last_hidden_state
        monkeypatch.setattr(Bert, "_skips_padding", lambda *_: True)
        with zoo.enforce_budget(model):
            found = model(ids, mask, **options).last_hidden_state
    torch.testing.assert_close(found, torch.where(mask[..., None], expected, 0))


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_padding_of_a_device_mask_is_skipped(compiled: bool) -> None:
    model: Any = zoo.create("bert-tiny", device="cuda", dtype=torch.bfloat16, head="sequence-classification").eval()
    ids = torch.randint(1, 30000, (32, 96), device="cuda")
    masks = [torch.arange(96, device="cuda") < torch.randint(1, 97, (32, 1), device="cuda") for _ in range(3)]
    masks.append(torch.ones_like(masks[0]))
    expected = [model(ids, mask).logits.detach() for mask in masks]  # with gradients all is computed
    if compiled:
        zoo.compile_regions(model)
    with torch.inference_mode(), zoo.enforce_budget(model) if compiled else contextlib.nullcontext():
        step = zoo.cuda_graph(model, (ids, masks[0]))
        for mask, wanted in zip(masks, expected, strict=True):
            with torch.profiler.profile(acc_events=True) as profile:
                model(ids, mask)
            launched = sum(event.name.startswith("_product") for event in profile.events())
            assert launched == (4 * len(model.layers) if common.has_tma(ids.device) else 0)
            assert reference.relative_error(model(ids, mask).logits.float(), wanted.float()) < 2e-2
            torch.testing.assert_close(step(ids, mask).logits, model(ids, mask).logits)
    hook = model.layers[0].register_forward_hook(lambda layer, args, out: shapes.append(out.shape))
    shapes: list[torch.Size] = []
    with torch.inference_mode():
        model(ids, masks[0])
        hook.remove()
        answers: Any = zoo.create("bert-tiny", device="cuda", dtype=torch.bfloat16, head="question-answering")
        assert shapes == [(32, 96, 128)] and not answers._skips_padding(answers.embeddings(ids, None, None))


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


STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def calls() -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    def grown(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*shape).to(dtype).requires_grad_()

    low, norm = torch.bfloat16, transformer.add_layer_norm
    return {
        "norm": (norm, (grown(2, 3, 8), grown(2, 3, 8), None, grown(8), grown(8), 1e-6)),
        "norm and its copy": (norm, (grown(2, 8), grown(2, 8, dtype=low), grown(8), grown(8), grown(8), 1e-6, low)),
        "norm of a low sum": (norm, (grown(2, 8), grown(2, 8, dtype=low), None, grown(8), grown(8), 1e-6)),
        "norm of low rows": (norm, (*grown(2, 2, 8, dtype=low).unbind(), None, *grown(2, 8, dtype=low).unbind(), 1e-6)),
        "GELU": (transformer.bias_gelu, (grown(2, 3, 8), grown(8), False)),
        "GELU by tanh": (transformer.bias_gelu, (grown(3, 8, dtype=low), grown(8), True)),
        "bias of a product": (transformer.column_sums, (torch.randn(2, 3, 8), low)),
    }


NORM, ACTIVATION = "add_layer_norm", "bias_gelu"


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """As where kernels run; what they would compute torch does, and it is counted."""
    ran: Counter[str] = Counter()

    def count(name: str) -> None:
        if not torch.compiler.is_compiling():
            ran.update([name])

    class Norm:
        @staticmethod
        def apply(x: Tensor, added: Tensor, shift: Tensor | None, *rest: Any) -> Any:
            count(NORM)
            weight, bias, eps, low_dtype, _ = rest
            total = x + added if shift is None else x + added + shift
            out = F.layer_norm(total, x.shape[-1:], weight, bias, eps).to(x.dtype)
            return out if low_dtype is None else (out, out.to(low_dtype))

    class Activation:
        @staticmethod
        def apply(kernel: Any, gradients: Any, x: Tensor, bias: Tensor, tanh: bool) -> Tensor:
            count(ACTIVATION)
            return F.gelu(x.float() + bias.float(), approximate="tanh" if tanh else "none").to(x.dtype)

    monkeypatch.setattr(common, "triton_runs_on", lambda device: True)
    monkeypatch.setattr(transformer, "_Norm", Norm)
    monkeypatch.setattr(transformer, "_Activation", Activation)
    sums = lambda x, dtype: (count("column_sums"), x.flatten(0, -2).float().sum(0).to(dtype))[1]  # noqa: E731
    monkeypatch.setattr(transformer, "column_sums", sums)
    return ran


def leave_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "triton_runs_on", lambda device: False)


def near(found: list[Tensor], expected: list[Tensor], relative: float) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == theirs.dtype
        assert (ours - theirs).norm() <= relative * theirs.norm() + 1e-6


def test_under_autocast_a_layer_is_one_graph_each_way_with_all_kernels_in_it(gpu, monkeypatch):
    layer = zoo.create("bert-debug", **STILL).train().layers[0]
    with torch.autocast("cpu", torch.bfloat16):
        forward, backward = traced(monkeypatch, layer.__call__, torch.randn(2, 5, 32, requires_grad=True))
    # Two norms and the activation; backward each has a pass that adds parts of sums up, as has the bias of one product.
    assert forward.count(LAUNCH) == 3 and backward.count(LAUNCH) == 8
    # A gradient of the layer's input is all that is left to add.
    assert "aten.add.Tensor" not in forward and backward.count("aten.add.Tensor") == 1


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("kind", ["float32", "autocast", "bfloat16"])
def test_compiled_layers_train_as_uncompiled_on_a_gpu(kind: str, packed: bool) -> None:
    dtype = torch.bfloat16 if kind == "bfloat16" else torch.float32
    model: Any = zoo.create("bert-debug", device="cuda", dtype=dtype, **STILL).train()
    inputs: Any = {name: value.cuda() for name, value in zoo.example_inputs(model).items()}
    if packed:
        ids, mask = inputs["input_ids"].cpu(), inputs["attention_mask"].cpu()
        inputs = {"input_ids": pack(ids, mask, config=model.config).to("cuda")}
    found = []
    for compiled in (False, True):
        budget = zoo.enforce_budget(zoo.compile_regions(model)) if compiled else contextlib.nullcontext()
        with budget, torch.autocast("cuda", torch.bfloat16, enabled=kind == "autocast"):
            hidden = model(**inputs)[0]
        loss = (hidden.float() * torch.linspace(-1, 1, hidden.numel(), device="cuda").view(hidden.shape)).sum()
        found.append([hidden.detach(), *torch.autograd.grad(loss, list(model.layers.parameters()))])
    near(found[1], found[0], 1e-5 if kind == "float32" else 2e-2)


def test_dropout_draws_the_same_numbers_with_kernels_and_without(counted: Counter[str]) -> None:
    model = zoo.create("bert-debug", head="none", num_hidden_layers=2).train()
    inputs = zoo.example_inputs(model)
    torch.manual_seed(1)
    expected = outputs_and_gradients(model, inputs)
    assert counted[NORM] == 4 and counted[ACTIVATION] == 2
    torch.manual_seed(1)
    # What is kept is as it was without operators: the same numbers are drawn in the same places.
    with pytest.MonkeyPatch.context() as without:
        leave_to_torch(without)
        near(expected, outputs_and_gradients(model, inputs), 2e-6)


@pytest.mark.parametrize("act", ["gelu", "gelu_new", "relu"])
def test_every_activation(act: str, counted: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    model = zoo.create("bert-debug", head="none", hidden_act=act, num_hidden_layers=1, **STILL).train()
    found = outputs_and_gradients(model, zoo.example_inputs(model))
    assert counted[ACTIVATION] == (act != "relu") and counted[NORM] == 2
    leave_to_torch(monkeypatch)
    near(found, outputs_and_gradients(model, zoo.example_inputs(model)), 2e-6)


def test_kernels_take_what_they_know(counted: Counter[str]) -> None:
    layer = zoo.create("bert-debug", **STILL).layers[0].eval()
    x = torch.randn(2, 5, 32)
    layer(x)
    assert counted == {NORM: 2, ACTIVATION: 1}, "gradients are wanted, in evaluation too"
    counted.clear()
    layer.train().double()(x.double())
    with torch.autocast("cpu", torch.bfloat16):
        # What autocast would widen for the norm.
        layer.bfloat16()(x.bfloat16())
    assert NORM not in counted
    counted.clear()
    layer(x.bfloat16())
    assert counted == {NORM: 2, ACTIVATION: 1}


@pytest.mark.parametrize("change", ["subclass", "hook on gradients", "forward"])
@pytest.mark.parametrize("name", ["qkv", "attention_output", "intermediate", "output", "attention_norm", "output_norm"])
def test_a_modified_submodule_is_called(name, change, counted, monkeypatch):
    model = zoo.create("bert-debug", head="none", num_hidden_layers=1, **STILL).train()
    layer, heard, autocast = model.layers[0], Counter[str](), change == "subclass"
    module = getattr(layer, name)
    if change == "hook on gradients":
        module.register_full_backward_hook(lambda *_: heard.update([name]))
    elif change == "forward":
        before = module.forward
        monkeypatch.setattr(module, "forward", lambda x: (heard.update([name]), 2 * before(x))[1], raising=False)
    else:
        if isinstance(module, nn.Linear):
            scaled = Doubled(module.in_features, module.out_features)
            scaled.load_state_dict(module.state_dict())
            setattr(layer, name, scaled)
        getattr(layer, name).register_forward_pre_hook(lambda *_: heard.update([name]))
    found = outputs_and_gradients(model, zoo.example_inputs(model), autocast)
    assert heard == {name: 1} and counted[NORM] == (1 if "norm" in name else 2)
    assert counted[ACTIVATION] == (name != "intermediate")
    leave_to_torch(monkeypatch)
    near(found, outputs_and_gradients(model, zoo.example_inputs(model), autocast), 3e-2 if autocast else 2e-6)


def test_forward_mode_and_functional_transforms_run_without_kernels(counted: Counter[str]) -> None:
    layer, x = zoo.create("bert-debug", **STILL).layers[0].train(), torch.randn(2, 5, 32, requires_grad=True)
    with torch.autograd.forward_ad.dual_level(), torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        out = layer(torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)))
        assert torch.autograd.forward_ad.unpack_dual(out).tangent is not None
    parameters = dict(layer.named_parameters())

    def loss(parameters: dict[str, Tensor]) -> Tensor:
        out: Tensor = torch.func.functional_call(layer, parameters, (x.detach(),))
        return out.square().mean()

    found = torch.func.grad(loss)(parameters)
    assert not counted
    loss(parameters).backward()
    assert counted[NORM] == 2
    for name, parameter in parameters.items():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-4, atol=1e-6)


def test_tokens_lie_along_the_axis_of_the_grid_that_has_no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="torch came without Triton, which GPUs only need")
    from zoo.engine.kernel import Kernel
    from zoo.ops.triton import norms, tiles

    grids: dict[str, tuple[int, ...]] = {}
    monkeypatch.setattr(Kernel, "launch", lambda kernel, grid, *_, **__: grids.update({kernel.fn.__name__: grid}))
    tokens = 1 << 21
    x, vector, row = (torch.empty(shape, device="meta") for shape in ((tokens, 1024), (1024,), (tokens,)))
    tiles.bias_gelu(x, vector, False)
    tiles.bias_gelu_backward(x, x, vector, False)
    norms.norm(x, x, None, vector, vector, 1e-6)
    norms.norm_backward(x, row, row, vector, x, None, None, None, 2)
    tiles.column_sums(x, torch.float32)
    assert len(grids) == 6 and all(size < 1 << 16 for grid in grids.values() for size in grid[1:])
    assert grids["_bias_gelu"][0] * tiles.ROWS == tokens
