"""A tied table's two gradients in one: always autograd's own, in place where nobody sees it, or in a copy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zoo
from zoo.llm import LLM, tied
from zoo.training import LinearCrossEntropy, losses

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
VOCABULARY, WIDTH = 61, 12

Product = Callable[[nn.Embedding, Tensor], tuple[Tensor, Tensor]]


def plain(embedding: nn.Embedding, ids: Tensor) -> tuple[Tensor, Tensor]:
    return embedding(ids), embedding.weight


def table(device: str = "cpu", dtype: torch.dtype = torch.float32, padding: int | None = None) -> nn.Embedding:
    torch.manual_seed(0)
    return nn.Embedding(VOCABULARY, WIDTH, padding_idx=padding).to(device, dtype)


def tokens(device: str = "cpu", most: int = VOCABULARY) -> Tensor:
    """[2, 15]: some often, some once, some never."""
    return torch.randint(most, (2, 15), generator=torch.Generator().manual_seed(1)).square().div(most).long().to(device)


def loss_of(embedding: nn.Embedding, product: Product, ids: Tensor) -> Tensor:
    x, weight = product(embedding, ids)
    loss: Tensor = LinearCrossEntropy(8)(x.sin(), weight, ids.roll(1))
    return loss


def node_of(weight: Tensor) -> str:
    return type(weight.grad_fn).__name__


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Where the gradients lie that the loss made of its inputs."""
    places: list[int] = []
    scale = losses.scale_
    monkeypatch.setattr(losses, "scale_", lambda x, by: (places.append(x.data_ptr()), scale(x, by))[1])
    return places


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("padding", [None, 0, VOCABULARY - 1])
@pytest.mark.parametrize("most", [1, 5, VOCABULARY])
def test_the_gradient_is_autograds_to_the_last_bit(
    device: str, dtype: torch.dtype, padding: int | None, most: int, made: list[int]
) -> None:
    ours, theirs = table(device, dtype, padding), table(device, dtype, padding)
    ids = tokens(device, most)
    # Of the last token as well, which may be the padding's.
    ids[0, 0] = VOCABULARY - 1
    loss_of(ours, tied.look_up, ids).backward()
    assert ours.weight.grad is not None and ours.weight.grad.data_ptr() in made
    loss_of(theirs, plain, ids).backward()
    torch.testing.assert_close(ours.weight.grad, theirs.weight.grad, rtol=0, atol=0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("count", [1, 7, 4000, 5000])
@pytest.mark.parametrize("kind", [torch.int64, torch.int32], ids=str)
def test_rows_are_unique_and_in_order(device: str, count: int, kind: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(count)
    ids = torch.randint(5000, (count,), generator=generator).to(device, kind)
    ids[count // 2 :] = int(ids[0])
    grad = torch.randn(count, 33, generator=generator).to(device)
    for padding in (None, int(ids[0]), 4999):
        rows = tied.sparse_rows(grad, ids, 5000, padding)
        assert rows.is_coalesced() and rows.indices().shape == (1, count)
        assert (rows.indices()[0].diff() > 0).all() and set(ids.tolist()) <= set(rows.indices()[0].tolist())
        wanted = torch.ops.aten.embedding_dense_backward(grad, ids, 5000, -1 if padding is None else padding, False)
        torch.testing.assert_close(rows.to_dense(), wanted, rtol=0, atol=0)


def test_a_gradient_that_somebody_holds_is_left_alone(made: list[int]) -> None:
    ours, ids = table(), tokens()
    x, weight = tied.look_up(ours, ids)
    held: list[Tensor] = []
    weight.register_hook(held.append)
    LinearCrossEntropy(8)(x.sin(), weight, ids.roll(1)).backward()
    alone, features = table().weight, plain(table(), ids)[0].detach()
    (expected,) = torch.autograd.grad(LinearCrossEntropy(8)(features.sin(), alone, ids.roll(1)), alone)
    torch.testing.assert_close(held, [expected], rtol=0, atol=0)
    assert held[0].data_ptr() in made and ours.weight.grad is not None and ours.weight.grad.data_ptr() not in made
    torch.testing.assert_close(ours.weight.grad, gradient(plain, lambda loss: loss))


def test_a_gradient_that_the_caller_gives_is_left_alone() -> None:
    ours, ids = table(), tokens()
    given = torch.ones(VOCABULARY, WIDTH), torch.ones(2, 15, WIDTH)
    x, weight = tied.look_up(ours, ids)
    torch.autograd.backward([weight, x], list(given))
    assert (given[0] == 1).all()
    expected = 1 + torch.bincount(ids.flatten(), minlength=VOCABULARY)[:, None].expand(-1, WIDTH)
    torch.testing.assert_close(ours.weight.grad, expected.float())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["transposed", "sparse", "expanded"])
def test_other_kinds_of_gradients_of_the_table(kind: str, device: str) -> None:
    ours, ids = table(device), tokens(device)
    dense = torch.randn(WIDTH, VOCABULARY, device=device).t()
    if kind == "expanded":
        dense = dense[:, :1].expand(-1, WIDTH)
    x, weight = tied.look_up(ours, ids)
    torch.autograd.backward([weight, x], [dense.to_sparse(1) if kind == "sparse" else dense, torch.ones_like(x)])
    expected = dense + torch.bincount(ids.flatten(), minlength=VOCABULARY)[:, None]
    assert ours.weight.grad is not None and ours.weight.grad.layout == torch.strided
    torch.testing.assert_close(ours.weight.grad, expected)


def gradient(product: Product, change: Callable[[Tensor], Tensor]) -> Tensor:
    embedding = table()
    change(loss_of(embedding, product, tokens())).backward()
    assert embedding.weight.grad is not None
    return embedding.weight.grad


def only_looked_up(embedding: nn.Embedding, product: Product, ids: Tensor) -> Tensor:
    return product(embedding, ids)[0].square().sum()


def only_multiplied(embedding: nn.Embedding, product: Product, ids: Tensor) -> Tensor:
    x, weight = product(embedding, ids)
    return F.linear(x.detach(), weight).square().sum()


def both_twice(embedding: nn.Embedding, product: Product, ids: Tensor) -> Tensor:
    x, weight = product(embedding, ids)
    return F.linear(x.sin() + x.square(), weight).sin().sum() + weight.square().sum() + x.sum()


def looked_up_twice(embedding: nn.Embedding, product: Product, ids: Tensor) -> Tensor:
    return loss_of(embedding, product, ids) + loss_of(embedding, product, ids.flip(1))


def and_elsewhere(embedding: nn.Embedding, product: Product, ids: Tensor) -> Tensor:
    return loss_of(embedding, product, ids) + embedding.weight.square().sum() + embedding(ids).sum()


def of_one_token(embedding: nn.Embedding, product: Product, ids: Tensor) -> Tensor:
    x, weight = product(embedding, ids[0, 0])
    return (weight @ x).square().sum()


def checkpointed(reentrant: bool) -> Callable[[nn.Embedding, Product, Tensor], Tensor]:
    def loss(embedding: nn.Embedding, product: Product, ids: Tensor) -> Tensor:
        # An input with a gradient, or the older kind has none.
        one = torch.ones((), requires_grad=True)
        found: Tensor = checkpoint(lambda one: one * loss_of(embedding, product, ids), one, use_reentrant=reentrant)
        return found

    return loss


USES = {
    "the loss": loss_of,
    "only looked up": only_looked_up,
    "only multiplied": only_multiplied,
    "both twice": both_twice,
    "looked up twice": looked_up_twice,
    "used elsewhere": and_elsewhere,
    "one token": of_one_token,
    "checkpointed": checkpointed(False),
    "checkpointed, reentrant": checkpointed(True),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("device", DEVICES)
def test_uses_of_either_side(use: str, device: str) -> None:
    if "checkpointed" in use and device != "cpu":
        pytest.skip("on the CPU it is the same")
    ours, theirs, ids = table(device), table(device), tokens(device)
    seen: list[tuple[torch.layout, int]] = []
    after: list[bool] = []
    ours.weight.register_hook(lambda grad: seen.append((grad.layout, grad.numel())))
    ours.weight.register_post_accumulate_grad_hook(lambda weight: after.append(weight.grad is not None))
    for count in (1, 2):  # the second is added to what is there
        for embedding, product in ((ours, tied.look_up), (theirs, plain)):
            USES[use](embedding, product, ids).backward()
        torch.testing.assert_close(ours.weight.grad, theirs.weight.grad)
        assert ours.weight.grad is not None and ours.weight.grad.layout == torch.strided
        if "reentrant" not in use:
            assert len(seen) == len(after) == count
    assert set(seen) == {(torch.strided, VOCABULARY * WIDTH)}


def test_nothing_of_the_weight_is_computed_where_other_gradients_are_asked_for() -> None:
    ours, ids = table(), tokens()
    x, weight = tied.look_up(ours, ids)
    scale = torch.ones((), requires_grad=True)
    loss = F.linear(x * scale, weight).square().sum()
    other, features = torch.autograd.grad(loss, (scale, x), retain_graph=True)
    torch.testing.assert_close(other, 2 * loss)
    assert ours.weight.grad is None
    (head,) = torch.autograd.grad(loss, weight, retain_graph=True)
    (whole,) = torch.autograd.grad(loss, ours.weight)
    wanted = torch.ops.aten.embedding_dense_backward(features, ids, VOCABULARY, -1, False)
    torch.testing.assert_close(whole - head, wanted, rtol=1e-4, atol=1e-4)


def test_the_backward_runs_as_often_as_one_likes() -> None:
    ours, theirs, ids = table(), table(), tokens()
    for embedding, product in ((ours, tied.look_up), (theirs, plain)):
        loss = both_twice(embedding, product, ids)
        loss.backward(retain_graph=True)
        loss.backward()
    torch.testing.assert_close(ours.weight.grad, theirs.weight.grad)


def test_gradients_have_gradients() -> None:
    found = []
    for product in (tied.look_up, plain):
        embedding = table(dtype=torch.float64, padding=3)
        loss = both_twice(embedding, product, tokens())
        (first,) = torch.autograd.grad(loss, embedding.weight, create_graph=True)
        found.append((first, *torch.autograd.grad(first.square().sum(), embedding.weight)))
    torch.testing.assert_close(*found)


def test_autocast(made: list[int]) -> None:
    found = []
    for product in (tied.look_up, plain):
        embedding = table()
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(embedding, product, tokens())
        loss.backward()
        found.append(embedding.weight.grad)
    torch.testing.assert_close(*found, rtol=0, atol=0)
    assert found[0] is not None and found[0].dtype is torch.float32


def test_tokens_that_changed_before_the_backward_are_noticed() -> None:
    ours, ids = table(), tokens()
    loss = loss_of(ours, tied.look_up, ids)
    ids.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def frozen(embedding: nn.Embedding) -> None:
    embedding.requires_grad_(False)


def renormed(embedding: nn.Embedding) -> None:
    embedding.max_norm = 1.0


def by_frequency(embedding: nn.Embedding) -> None:
    embedding.scale_grad_by_freq = True


def sparse(embedding: nn.Embedding) -> None:
    embedding.sparse = True


def watched(embedding: nn.Embedding) -> None:
    embedding.register_forward_hook(lambda module, args, output: 2 * output)


def watched_backward(embedding: nn.Embedding) -> None:
    embedding.register_full_backward_hook(lambda module, before, after: None)


@pytest.mark.parametrize("change", [frozen, renormed, by_frequency, sparse, watched, watched_backward])
def test_what_is_not_a_lookup_alone_is_autograds(change: Callable[[nn.Embedding], Any]) -> None:
    embedding, ids = table(), tokens()
    assert node_of(tied.look_up(embedding, ids)[1]) == "_LookUpBackward"
    change(embedding)
    x, weight = tied.look_up(embedding, ids)
    assert weight is embedding.weight
    torch.testing.assert_close(x, embedding(ids))


def test_without_gradients_or_with_most_of_the_table_it_is_autograds() -> None:
    embedding = table()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert tied.look_up(embedding, tokens())[1] is embedding.weight
    for count, pays in ((0, False), (1, True), (VOCABULARY // 2, True), (VOCABULARY // 2 + 1, False)):
        _, weight = tied.look_up(embedding, torch.zeros(count, dtype=torch.int64))
        assert (weight is not embedding.weight) == pays


def test_functional_transforms_are_torchs() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = table()

        def forward(self, ids: Tensor) -> Tensor:
            return both_twice(self.table, tied.look_up, ids)

    both, ids = Both(), tokens()
    weights = dict(both.named_parameters())
    found = torch.func.grad(lambda weights: torch.func.functional_call(both, weights, (ids,)))(weights)
    theirs = table()
    both_twice(theirs, plain, ids).backward()
    torch.testing.assert_close(found["table.weight"], theirs.weight.grad)


def test_several_gradients_at_once_are_torchs() -> None:
    def jacobian(product: Product) -> Tensor:
        embedding, ids = table(), tokens()
        x, weight = product(embedding, ids)
        logits = F.linear(x.sin(), weight)[0, :2, :3].flatten()
        ones = torch.eye(len(logits))
        (found,) = torch.autograd.grad(logits, embedding.weight, ones, is_grads_batched=True)
        return found

    torch.testing.assert_close(jacobian(tied.look_up), jacobian(plain))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_around_it_is_one_graph(backend: str) -> None:
    ours, theirs, ids = table(), table(), tokens()
    both = torch.compile(lambda ids: tied.look_up(ours, ids), fullgraph=True, backend=backend)
    x, weight = both(ids)
    F.linear(x.sin(), weight).square().sum().backward()
    F.linear(theirs(ids).sin(), theirs.weight).square().sum().backward()
    torch.testing.assert_close(ours.weight.grad, theirs.weight.grad)


# --- the model ---


def language_model(**options: Any) -> LLM:
    torch.manual_seed(0)
    made = zoo.create("llm-debug", **options)
    assert isinstance(made, LLM)
    return made.train()


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("regions", [True, False])
def test_a_models_product_has_the_logits_and_their_gradients(tie: bool, regions: bool) -> None:
    ours, theirs = (language_model(tie_word_embeddings=tie) for _ in range(2))
    ids = torch.randint(ours.config.vocab_size, (2, 9))
    mask = torch.ones(2, 9)
    mask[0, :2] = 0
    if regions:
        zoo.compile_regions(ours, backend="aot_eager")
    chunked, labels = LinearCrossEntropy(8), ids.roll(-1)
    x, weight = ours.output_product(ids, attention_mask=mask)
    assert (weight is ours.output_weight) == (not tie) and torch.equal(weight, ours.output_weight)
    logits = theirs(ids, attention_mask=mask)
    torch.testing.assert_close(F.linear(x, weight), logits)
    chunked(x, weight, labels).backward()
    F.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
    for (name, found), expected in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_models_product_in_a_checkpoint(reentrant: bool, tie: bool) -> None:
    ours, theirs = (language_model(tie_word_embeddings=tie) for _ in range(2))
    ids = torch.randint(ours.config.vocab_size, (2, 9))

    def product(one: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ours.output_product(ids)
        return x * one, weight

    one = torch.ones((), requires_grad=True)
    x, weight = checkpoint(product, one, use_reentrant=reentrant)
    F.linear(x, weight).square().sum().backward()
    theirs(ids).square().sum().backward()
    for (name, found), expected in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert found.is_leaf
        torch.testing.assert_close(found.grad, expected.grad, rtol=1e-3, atol=1e-3, msg=name)


def test_a_models_inputs_are_checked() -> None:
    with pytest.raises(TypeError, match="input_ids"):
        language_model().output_product(torch.ones(1, 3))


@pytest.mark.gpu
def test_nothing_waits_for_the_device() -> None:
    ours, theirs = table("cuda", torch.bfloat16), table("cuda", torch.bfloat16)
    ids = tokens("cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            ours.weight.grad = None
            loss_of(ours, tied.look_up, ids).backward()
        ours.weight.grad = None
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            loss_of(ours, tied.look_up, ids).backward()
    ids.copy_(ids.flip(1) // 2)
    graph.replay()
    loss_of(theirs, plain, ids).backward()
    torch.testing.assert_close(ours.weight.grad, theirs.weight.grad, rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("words", [1, 512, 128_256])
def test_a_whole_vocabulary_on_a_gpu(words: int) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    ids = torch.randint(words, (8192,), device="cuda", generator=generator)
    grad = torch.randn(8192, 256, device="cuda", dtype=torch.bfloat16, generator=generator)
    above = torch.randn(128_256, 256, device="cuda", dtype=torch.bfloat16, generator=generator)
    wanted = above + torch.ops.aten.embedding_dense_backward(grad, ids, 128_256, -1, False)
    found = above.add_(tied.sparse_rows(grad, ids, 128_256, None))
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
