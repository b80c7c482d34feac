"""The kernels of the family against float64, for which operators run their references."""

import math
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import zoo
from tests import kernel_checks
from tests.kernel_checks import DEVICE, MARKS, in_float64, kernels_run, values  # noqa: F401
from zoo.llm import KVCache, LLMLayer
from zoo.llm.generate import DecodeState, accept
from zoo.ops import common
from zoo.ops.attention import attend, decode_attention, decode_layer, quantized, rotate_into, split_rotated
from zoo.ops.transformer import rms_norm, swiglu
from zoo.ops.triton import decode as products

pytestmark = MARKS
RELATIVE = {torch.float32: 2e-6, torch.bfloat16: 1.2e-2, torch.float16: 2e-3}


def close(found: Tensor, expected: Tensor, dtype: torch.dtype, times: float = 1.0) -> None:
    kernel_checks.close(found, expected, dtype, RELATIVE[dtype], times=times)


@pytest.fixture
def by_tma(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter reads by TMA, as a Hopper does."""
    if DEVICE == "cpu":
        monkeypatch.setattr(common, "has_tma", lambda device: True)


@pytest.mark.parametrize("dtype", RELATIVE)
@pytest.mark.parametrize(
    ("rows", "columns", "out"),
    [(1, 64, 33), (3, 100, 40), (4, 2048, 24), (1, 9000, 3), (17, 32, 8192), (33, 400, 72), (20, 100, 40)],
)
def test_products(rows: int, columns: int, out: int, dtype: torch.dtype, by_tma: None) -> None:
    x, weight = values(rows, columns, dtype=dtype), values(out, columns, dtype=dtype, scale=columns**-0.5)
    norm, bias, residual = values(columns, dtype=dtype), values(out, dtype=dtype), values(rows, out, dtype=dtype)
    exact, exact_weight = x.double(), weight.double()
    normed = rms_norm(exact, norm.double(), 1e-5)
    for given in (None, bias):
        found = products.linear(x, weight, norm, 1e-5, given)
        close(found, F.linear(normed, exact_weight, *in_float64(given)), dtype)
    close(products.linear(x, weight, residual=residual), residual.double() + F.linear(exact, exact_weight), dtype)
    pair = values(2 * out, columns, dtype=dtype, scale=columns**-0.5)
    close(products.linear(x, pair, norm, 1e-5, gated=True), swiglu(F.linear(normed, pair.double())), dtype)


@pytest.mark.parametrize("dtype", RELATIVE)
@pytest.mark.parametrize("weight_dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize(("rows", "columns", "out"), [(3, 100, 40), (1, 9000, 3), (20, 32, 4096), (20, 320, 72)])
def test_products_of_quantized_weights(rows, columns, out, weight_dtype, dtype, by_tma) -> None:
    x, norm, bias = values(rows, columns, dtype=dtype), values(columns, dtype=dtype), values(out, dtype=dtype)
    numbers, scale = quantized(values(2 * out, columns, dtype=dtype, scale=columns**-0.5), weight_dtype)
    exact = numbers.double() * scale.double()[:, None]
    normed = rms_norm(x.double(), norm.double(), 1e-5)
    found = products.linear(x, numbers[:out], norm, 1e-5, bias, scale=scale[:out])
    close(found, F.linear(normed, exact[:out], bias.double()), dtype, times=2)
    found = products.linear(x, numbers, norm, 1e-5, gated=True, scale=scale)
    close(found, swiglu(F.linear(normed, exact)), dtype, times=2)
    close(products.dequantized(numbers, scale), exact, dtype)


@pytest.mark.parametrize("dtype", RELATIVE)
@pytest.mark.parametrize(("heads", "key_heads", "width"), [(4, 4, 32), (8, 2, 64), (6, 1, 32)])
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("norms", [False, True])
def test_attention(heads, key_heads, width, window, norms, dtype, monkeypatch):
    slots, positions = 300, torch.tensor([0, 7, 63, 64, 299], device=DEVICE)
    batch = len(positions)
    qkv = values(batch, (heads + 2 * key_heads) * width, dtype=dtype)
    cache = values(2, batch, key_heads, slots, width, dtype=dtype)
    rotary = torch.cat([values(batch, width // 2).cos(), values(batch, width // 2).sin()], dim=1)
    q_norm, k_norm = (values(width, dtype=dtype), values(width, dtype=dtype)) if norms else (None, None)
    ours, theirs = cache.clone(), cache.double()
    found = decode_attention(qkv, ours, positions, rotary, q_norm, k_norm, 1e-6, heads, window)
    monkeypatch.setattr(products, "ENOUGH", 1)  # one program for all slots of a row's head
    whole = decode_attention(qkv, cache.clone(), positions, rotary, q_norm, k_norm, 1e-6, heads, window)
    expected = decode_attention(
        qkv.double(), theirs, positions, rotary.double(), *in_float64(q_norm, k_norm), 1e-6, heads, window
    )
    close(found, expected, dtype)
    close(whole, expected, dtype)
    close(ours, theirs, dtype)
    row = torch.arange(batch, device=DEVICE)
    changed = (ours != cache).any(-1)
    allowed = torch.zeros_like(changed)
    allowed[:, row, :, positions] = True
    assert not (changed & ~allowed).any(), "a slot was written that is not the token's"


@pytest.mark.parametrize("dtype", RELATIVE)
@pytest.mark.parametrize(("heads", "key_heads", "width"), [(4, 4, 32), (8, 2, 64), (6, 1, 32), (9, 3, 128)])
@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("same", [False, True])
def test_rotation_into_the_cache(heads, key_heads, width, norms, same, dtype):
    positions = torch.tensor([[3, 4, 5], [0, 1, 1]], device=DEVICE)
    qkv = values(2, 3, (heads + 2 * key_heads) * width, dtype=dtype)
    qkv[1, 2] = qkv[1, 1]  # a position that occurs twice is the same token
    rotary = torch.cat(
        [values(1 if same else 2, 3, width // 2).cos(), values(1 if same else 2, 3, width // 2).sin()], -1
    )
    rotary[-1, 2] = rotary[-1, 1]
    cache = values(2, 2, key_heads, 9, width, dtype=dtype)
    q_norm, k_norm = (values(width, dtype=dtype), values(width, dtype=dtype)) if norms else (None, None)
    ours, theirs = cache.clone(), cache.double()
    found = rotate_into(qkv, ours, positions, rotary, q_norm, k_norm, 1e-6, heads)
    expected = rotate_into(qkv.double(), theirs, positions, rotary.double(), *in_float64(q_norm, k_norm), 1e-6, heads)
    close(found, expected, dtype)
    close(ours, theirs, dtype)
    row = torch.arange(2, device=DEVICE)[:, None]
    ours[:, row, :, positions] = cache[:, row, :, positions]
    assert torch.equal(ours, cache), "a slot was written that is not a token's"


@pytest.mark.parametrize("dtype", RELATIVE)
@pytest.mark.parametrize(("heads", "key_heads", "width"), [(4, 4, 32), (6, 1, 64), (20, 5, 128)])
@pytest.mark.parametrize("same", [False, True])
def test_rotation_of_parts_and_its_gradient(heads, key_heads, width, same, dtype):
    qkv = values(2, 3, (heads + 2 * key_heads) * width, dtype=dtype)
    # What rotates another channel by it would be NaN.
    qkv.view(2, 3, -1, width)[..., -1, 0] = math.inf
    angle = values(1 if same else 2, 3, width // 2)
    rotary = torch.cat([angle.cos(), angle.sin()], -1)
    found = split_rotated(qkv.requires_grad_(), rotary, None, None, 0.0, heads, key_heads)
    exact = qkv.detach().double().requires_grad_()
    expected = split_rotated(exact, rotary.double(), None, None, 0.0, heads, key_heads)
    for part, wanted in zip(found[:2], expected[:2], strict=True):
        close(part, wanted, dtype)
    assert torch.equal(found[2].double(), expected[2]), "values are not turned"
    assert all(part.is_contiguous() for part in found)
    grads = [values(*part.shape, dtype=dtype) for part in found]
    # As an attention may return one.
    grads[0] = grads[0].transpose(1, 2).contiguous().transpose(1, 2)
    (change,) = torch.autograd.grad(found, qkv, grads)
    (wanted,) = torch.autograd.grad(expected, exact, [grad.double() for grad in grads])
    close(change, wanted, dtype)


@pytest.mark.parametrize("dtype", RELATIVE)
@pytest.mark.parametrize(("heads", "key_heads", "width"), [(4, 4, 32), (4, 1, 64)])
@pytest.mark.parametrize("window", [None, 1, 70])
@pytest.mark.parametrize("tokens", [16, 150])
def test_prefill(tokens: int, heads: int, key_heads: int, width: int, window: int | None, dtype: torch.dtype) -> None:
    slots, starts = 300, torch.tensor([0, 61, 300 - tokens])
    positions = starts[:, None] + torch.arange(tokens)
    # A shorter row is padded by its last token.
    positions[1] = positions[1].clamp(max=61 + tokens // 2)
    positions = positions.to(DEVICE)
    query = values(3, tokens, heads, width, dtype=dtype)
    cache = values(2, 3, key_heads, slots, width, dtype=dtype)
    # What lies behind the last position is never looked at.
    cache[:, 1, :, 61 + tokens // 2 + 64 :] = float("nan")
    found = attend(query, cache, positions, window)
    clean = cache.double().nan_to_num()
    close(found, attend(query.double(), clean, positions, window), dtype)


def test_attention_reads_nothing_that_is_not_filled_or_not_there() -> None:
    cache = torch.full((2, 1, 2, 256, 32), float("nan"), device=DEVICE)
    cache[:, :, :, :10] = values(2, 1, 2, 10, 32)
    qkv, rotary = values(1, 8 * 32), values(1, 32)
    position = torch.tensor([10], device=DEVICE)
    assert decode_attention(qkv, cache, position, rotary, None, None, 1e-6, 4, None).isfinite().all()
    slots, positions = 70, torch.tensor([[0, 70, 69, 400]] * 2, device=DEVICE)
    memory, cache = fenced(2, 2, 2, slots, 32)
    held = cache.clone()
    memory.fill_(float("nan"))
    cache.copy_(held)
    query = values(2, 4, 4, 32)
    found = attend(query, cache, positions, None)
    expected = attend(query.double(), cache.double(), positions.clamp(max=slots - 1), None)
    close(found, expected, query.dtype)


def fenced(*shape: int) -> tuple[Tensor, Tensor]:
    """A cache, and the memory that it is the middle of."""
    size = math.prod(shape)
    memory = values(3 * size)
    return memory, memory[size : 2 * size].view(shape)


def test_a_position_without_a_slot_is_not_written_by_attention_nor_by_rotation() -> None:
    slots, positions = 70, torch.tensor([3, -1, 70, 90], device=DEVICE)
    memory, cache = fenced(2, 4, 2, slots, 32)
    qkv, rotary = values(4, 8 * 32), values(4, 32)
    before, own = memory.clone(), cache[:, :1].clone()
    found = decode_attention(qkv, cache, positions, rotary, None, None, 1e-6, 4, None)
    row = qkv[:1].double(), own.double(), positions[:1], rotary[:1].double()
    close(found[:1], decode_attention(*row, None, None, 1e-6, 4, None), found.dtype)
    assert found.isfinite().all()
    cache[:, 0, :, 3] = before[cache.numel() : 2 * cache.numel()].view(cache.shape)[:, 0, :, 3]
    assert torch.equal(memory, before), "a slot was written that is not the token's"
    slots, positions = 9, torch.tensor([[-1, 2, 9], [20, 8, -9]], device=DEVICE)
    memory, cache = fenced(2, 2, 2, slots, 32)
    qkv, rotary = values(2, 3, 8 * 32), values(2, 3, 32)
    before = memory.clone()
    rotate_into(qkv, cache, positions, rotary, None, None, 1e-6, 4)
    kept = before[cache.numel() : 2 * cache.numel()].view(cache.shape)
    for row, position in ((0, 2), (1, 8)):
        assert not torch.equal(cache[:, row, :, position], kept[:, row, :, position])
        cache[:, row, :, position] = kept[:, row, :, position]
    assert torch.equal(memory, before), "a slot was written that is not a token's"


OPTIONS: list[dict[str, object]] = [
    {}, {"qk_norm": True}, {"qkv_bias": True}, {"sliding_window": 9}, {"weight_dtype": "int8"},
]  # fmt: skip
# A single row's products have a program for a few outputs each, half a minute of interpreter for one model; fewer
# outputs there.
SMALLER = {"vocab_size": 64, "intermediate_size": 48, "num_hidden_layers": 2}
TOGETHER = [{name: value for options in (*OPTIONS, SMALLER) for name, value in options.items()}]


@pytest.mark.parametrize(
    ("batch", "options"),
    [*((6, options) for options in OPTIONS), *((1, options) for options in (TOGETHER if DEVICE == "cpu" else OPTIONS))],
    ids=str,
)
def test_a_model_decodes_as_without_kernels(options, batch, monkeypatch):
    model = zoo.create("llm-debug", head_dim=32, num_attention_heads=4, num_key_value_heads=2, device=DEVICE, **options)
    # A second one reads what the first wrote.
    last = 10 if DEVICE == "cpu" else 12
    tokens = torch.randint(model.config.vocab_size, (batch, last), device=DEVICE)
    logits = {}
    with torch.inference_mode():
        for kernels in (True, False):
            if not kernels:
                monkeypatch.setattr(common, "triton_runs_on", lambda device: False)
            cache: KVCache = model.make_cache(batch, 32)
            model(tokens[:, :8], cache=cache)
            logits[kernels] = torch.cat(
                [
                    model(tokens[:, t : t + 1], position_ids=torch.tensor([[t]], device=DEVICE), cache=cache)
                    for t in range(8, last)
                ],
                dim=1,
            )
    torch.testing.assert_close(logits[True], logits[False], rtol=1e-4, atol=1e-4)


class Waits(Exception):
    """A process cannot go on without what the other one computed."""


def test_a_layer_in_two_parts_decodes_as_the_whole() -> None:
    config = zoo.create(
        "llm-debug", device="meta", hidden_size=32, num_attention_heads=4, head_dim=32, **SMALLER
    ).config
    layer = LLMLayer(config).to(DEVICE).requires_grad_(False)
    heads, key_heads, width = layer.heads, layer.key_heads, layer.head_dim
    x, rotary, position = values(2, 32), values(2, width), torch.tensor([3, 5], device=DEVICE)
    cache = values(2, 2, key_heads, 8, width)
    whole = layer._decode(x, rotary, position, cache.clone())
    norms, qkv = (layer.input_layernorm, layer.post_attention_layernorm), layer.qkv_proj.weight
    sizes = [heads * width, key_heads * width, key_heads * width]
    sums: list[Tensor] = []
    for _ in range(2):
        parts = []
        for rank in range(2):

            def half(weight: Tensor, dim: int = 0, rank: int = rank) -> Tensor:
                return weight.chunk(2, dim)[rank].contiguous()

            known = iter(sums)

            def add_parts(part: Tensor, known: Iterator[Tensor] = known) -> Tensor:
                if (total := next(known, None)) is None:
                    raise Waits(part)
                return total

            with pytest.raises(Waits) as waits:
                decode_layer(
                    x, half(cache, 2), position, rotary, norms[0].weight,
                    (torch.cat([*map(half, qkv.split(sizes))]), None), None, None, None,
                    (half(layer.o_proj.weight, 1), None), norms[1].weight,
                    (torch.cat([*map(half, layer.gate_up_proj.weight.chunk(2))]), None),
                    (half(layer.down_proj.weight, 1), None), norms[0].eps, heads // 2, None, add_parts, rank == 0,
                )  # fmt: skip
            parts.append(waits.value.args[0])
        sums.append(parts[0] + parts[1])
    close(sums[1], whole.double(), whole.dtype)


@pytest.mark.parametrize("dtype", RELATIVE)
@pytest.mark.parametrize("vocabulary", [5, 1024, 3000])
def test_the_most_likely_token_and_what_follows(vocabulary: int, dtype: torch.dtype) -> None:
    logits = values(4, vocabulary, dtype=dtype)
    logits[1] = 1.0  # all equal: the first
    logits[2, [3, 4]] = 50.0
    best = logits.argmax(-1)
    best[1], best[2] = 0, 3
    state = DecodeState(4, 5, torch.device(DEVICE))
    state.positions.copy_(torch.tensor([[7], [8], [9], [1]]))
    state.step.fill_(2), state.pad.fill_(1), state.ends[:1].copy_(best[2]), state.finished[3:].fill_(True)
    accept(state, logits, greedy=True)
    expected = [best[0].item(), 0, 3, 1]
    assert state.tokens.flatten().tolist() == state.output[2].tolist() == expected
    assert not state.output[[0, 1, 3, 4]].any()
    assert state.positions.flatten().tolist() == [8, 9, 10, 1] and state.step.tolist() == [3]
    assert state.finished.tolist() == [expected[0] == 3, False, True, True]
