"""The decoder and its static cache: regions in every way they are called, padding that is never seen, every error."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import zoo
from tests.blocks import graphs_of
from zoo.llm import LLM, RopeScaling, attend
from zoo.llm.model import attend_tokens, token_mask
from zoo.training import LinearCrossEntropy


@pytest.fixture
def model() -> LLM:
    return zoo.create("llm-debug")


def ids(batch: int = 2, tokens: int = 12, seed: int = 0) -> torch.Tensor:
    return torch.randint(256, (batch, tokens), generator=torch.Generator().manual_seed(seed))


@pytest.mark.slow
@pytest.mark.parametrize(("depth", "mode"), [(1, torch.no_grad), (6, torch.inference_mode)])
def test_prefill_decode_and_scoring_are_a_graph_each_at_any_depth(depth, mode):
    model = zoo.compile_regions(zoo.create("llm-debug", num_hidden_layers=depth), backend="aot_eager")
    eager = zoo.create("llm-debug", num_hidden_layers=depth)
    eager.load_state_dict(model.state_dict())
    tokens = ids(2, 12)
    with mode(), zoo.enforce_budget(model):
        expected = eager(tokens)
        cache = model.make_cache(2, 16)
        torch.testing.assert_close(model(tokens), expected)
        got = model(tokens[:, :8], cache=cache, logits_to_keep=1)
        torch.testing.assert_close(got, expected[:, 7:8])
        for at in range(8, 12):
            got = model(tokens[:, at : at + 1], position_ids=torch.full((2, 1), at), cache=cache, logits_to_keep=1)
            torch.testing.assert_close(got, expected[:, at : at + 1])
    # The head sees one position in prefill and in decoding, and shares that graph.
    assert graphs_of(model) == {"LLMLayer": 3, "LLMHead": 2}


def test_a_mask_is_one_more_graph(model: LLM) -> None:
    zoo.compile_regions(model, backend="eager")
    with torch.inference_mode(), zoo.enforce_budget(model):
        for seed in range(3):
            mask = torch.ones(2, 12)
            mask[0, : seed + 1] = 0
            model(ids(seed=seed), attention_mask=mask)
            model(ids(seed=seed))
    assert graphs_of(model) == {"LLMLayer": 2, "LLMHead": 1}


def test_norms_that_are_listened_to_or_replaced_are_called() -> None:
    model = zoo.create("llm-debug", num_hidden_layers=1, qk_norm=True).eval()
    tokens, heard = ids(2, 7), list[str]()
    layer = model.layers[0]
    expected = model(tokens)
    for name in ("q_norm", "k_norm", "input_layernorm", "post_attention_layernorm"):
        getattr(layer, name).register_forward_hook(lambda *_, name=name: heard.append(name))
    with torch.inference_mode():
        torch.testing.assert_close(model(tokens), expected)
        cache = model.make_cache(2, 8)
        torch.testing.assert_close(model(tokens[:, :6], cache=cache), expected[:, :6])
        last = model(tokens[:, 6:], position_ids=torch.full((2, 1), 6), cache=cache)
        torch.testing.assert_close(last, expected[:, 6:])
    assert heard == 3 * ["input_layernorm", "q_norm", "k_norm", "post_attention_layernorm"]
    layer.input_layernorm = nn.Identity()
    layer.q_norm = nn.Identity()
    assert model(tokens).isfinite().all()


def test_each_row_keeps_its_own_positions(model: LLM) -> None:
    tokens = ids(3, 10)
    with torch.inference_mode():
        everything = model(tokens)
        which = torch.tensor([[9, 0], [4, 4], [1, 8]])
        got = model(tokens, logits_to_keep=which)
        torch.testing.assert_close(model(tokens, logits_to_keep=which[0]), everything[:, which[0]])
        torch.testing.assert_close(model(tokens, logits_to_keep=2), everything[:, -2:])
    torch.testing.assert_close(got, torch.stack([everything[row, which[row]] for row in range(3)]))


def test_the_rotary_table_stays_in_float32_wherever_the_model_goes(model: LLM) -> None:
    table = model.rotary.table.clone()
    assert not [key for key in model.state_dict() if "rotary" in key]
    assert model.to(torch.bfloat16).rotary.table.dtype is torch.float32
    torch.testing.assert_close(model.float().rotary.table, table, rtol=0, atol=0)
    empty = zoo.create("llm-debug", device="meta").to_empty(device="cpu")
    torch.testing.assert_close(empty.rotary.table, table, rtol=0, atol=0)


def test_the_paddings_vector_gets_no_gradient() -> None:
    model = zoo.create("llm-debug", pad_token_id=3, tie_word_embeddings=False)
    assert model.embed_tokens.weight[3].abs().sum() == 0
    tokens = ids()
    tokens[0, 0] = 3
    model(tokens).square().sum().backward()
    gradient = model.embed_tokens.weight.grad
    assert gradient is not None and gradient[3].abs().sum() == 0 and gradient[int(tokens[0, 1])].abs().sum() > 0


def test_positions_of_masked_tokens_are_not_checked(model: LLM) -> None:
    tokens = torch.randint(model.config.vocab_size, (2, 6))
    mask = torch.ones(2, 6, dtype=torch.long)
    mask[0, :2] = 0
    positions = mask.cumsum(-1) - 1
    assert positions.min() == -1
    with torch.no_grad():
        found = model(tokens, attention_mask=mask, position_ids=positions)
        expected = model(tokens[:1, 2:])
        torch.testing.assert_close(found[:1, 2:], expected)
        positions[1, 3] = -1
        with pytest.raises(ValueError, match="position_ids has values from -1 to 5"):
            model(tokens, attention_mask=mask, position_ids=positions)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_values_that_torch_transforms_are_not_looked_at(model: LLM) -> None:
    tokens = torch.randint(model.config.vocab_size, (3, 2, 4))
    with torch.no_grad():
        found = torch.vmap(model)(tokens)
        torch.testing.assert_close(found, torch.stack([model(ids) for ids in tokens]))
        make_fx(model)(tokens[0])


def test_a_position_behind_the_cache_is_named(model: LLM) -> None:
    cache = model.make_cache(2, 16)
    with pytest.raises(ValueError, match="from 5 to 16, but cache.slots is 16: .* more slots"), torch.inference_mode():
        model(ids(), position_ids=torch.arange(5, 17)[None], cache=cache)
    assert not any(layer.any() for layer in cache.layers)


def test_bad_scalings_are_named() -> None:
    with pytest.raises(ValueError, match="kind is 'yarn'"):
        RopeScaling(kind="yarn", factor=2.0)
    with pytest.raises(ValueError, match="needs low < high"):
        RopeScaling(kind="llama3", factor=2.0, low_freq_factor=4.0, high_freq_factor=1.0)
    with pytest.raises(ValueError, match="has a factor only"):
        RopeScaling(kind="linear", factor=2.0, low_freq_factor=4.0)
    with pytest.raises(ValueError, match="factor is 0"):
        RopeScaling(kind="linear", factor=0)


# --- both sides of the output product ---


def language_model(**options: Any) -> LLM:
    torch.manual_seed(0)
    return zoo.create("llm-debug", **options).train()


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("regions", [pytest.param(True, marks=pytest.mark.slow), False])
def test_a_models_product_has_the_logits_and_their_gradients(tie: bool, regions: bool) -> None:
    ours, theirs = (language_model(tie_word_embeddings=tie) for _ in range(2))
    ids = torch.randint(ours.config.vocab_size, (2, 9))
    mask = torch.ones(2, 9)
    mask[0, :2] = 0
    if regions:
        zoo.compile_regions(ours, backend="aot_eager")
    chunked, labels = LinearCrossEntropy(8), ids.roll(-1)
    x, weight = ours.output_product(ids, attention_mask=mask)
    assert weight is ours.output_weight
    logits = theirs(ids, attention_mask=mask)
    torch.testing.assert_close(F.linear(x, weight), logits)
    chunked(x, weight, labels).backward()
    F.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
    for (name, found), expected in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, rtol=1e-4, atol=1e-6, msg=name)


windows = pytest.mark.parametrize("window", [None, 5], ids=["full", "window"])


@windows
def test_ragged_prompts_are_padded_on_the_right_and_padding_is_never_seen(window: int | None) -> None:
    model = zoo.create("llm-debug", sliding_window=window)
    tokens, lengths = ids(3, 14), torch.tensor([9, 3, 6])
    with torch.inference_mode():
        expected = model(tokens)
        cache = model.make_cache(3, 14)
        prompt, positions = tokens[:, :9].clone(), torch.arange(9).repeat(3, 1)
        for row, length in enumerate(lengths.tolist()):
            prompt[row, length:] = 77
        got = model(prompt, position_ids=positions, cache=cache, logits_to_keep=lengths[:, None] - 1)
        torch.testing.assert_close(got[:, 0], expected[torch.arange(3), lengths - 1], rtol=1e-4, atol=1e-5)
        for step in range(5):
            at = lengths + step
            one = tokens.gather(1, at[:, None])
            got = model(one, position_ids=at[:, None], cache=cache)
            torch.testing.assert_close(got[:, 0], expected[torch.arange(3), at], rtol=1e-4, atol=1e-5)


@windows
def test_a_second_turn_goes_on_and_tokens_can_be_taken_back(window: int | None) -> None:
    model = zoo.create("llm-debug", sliding_window=window)
    tokens = ids(2, 16)
    with torch.inference_mode():
        expected = model(tokens)
        cache = model.make_cache(2, 16)
        model(ids(2, 16, seed=5), cache=cache)
        model(tokens[:, :7], cache=cache)
        got = model(tokens[:, 7:], position_ids=torch.arange(7, 16)[None], cache=cache)
        torch.testing.assert_close(got, expected[:, 7:], rtol=1e-4, atol=1e-5)


def test_attention_without_a_cache_is_the_same() -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(2, 6, 4, 8), torch.randn(2, 6, 2, 8), torch.randn(2, 6, 2, 8)
    cache, positions = torch.stack((key, value)).transpose(2, 3), torch.arange(6).repeat(2, 1)
    for window in (None, 3, 6, 100):
        mask = token_mask(6, None, window, query.device)
        assert (mask is None) == (window != 3)
        torch.testing.assert_close(attend_tokens(query, key, value, mask), attend(query, cache, positions, window))


def test_a_cache_is_one_kind_of_input_wherever_it_is_made() -> None:
    model = zoo.compile_regions(zoo.create("llm-debug"), backend="eager")
    with torch.inference_mode():
        inside = model.make_cache(2, 16)
    outside = model.make_cache(2, 16)
    assert not inside.layers[0].is_inference()
    with torch.inference_mode(), zoo.enforce_budget(model):
        model(ids(2, 4), cache=inside)
        model(ids(2, 4), cache=outside)


@pytest.mark.parametrize("options", [{}, {"sliding_window": 4}, {"sliding_window": 9}, {"qk_norm": True}], ids=str)
def test_a_prompt_from_the_start_is_one_at_those_positions(options: dict[str, Any]) -> None:
    model, tokens = zoo.create("llm-debug", **options), ids(2, 9)
    with torch.inference_mode():
        expected, cache = model(tokens), model.make_cache(2, 16)
        torch.testing.assert_close(model(tokens, cache=cache), expected)
        other = model.make_cache(2, 16)
        torch.testing.assert_close(model(tokens, position_ids=torch.arange(9)[None], cache=other), expected)
    torch.testing.assert_close(cache.layers, other.layers)


def test_sizes_and_dtypes_of_a_cache() -> None:
    model = zoo.create("llm-debug")
    cache = model.make_cache(2, 32, dtype=torch.bfloat16)
    assert (cache.batch, cache.slots, cache.dtype, cache.device.type) == (2, 32, torch.bfloat16, "cpu")
    assert "3 layers of [2, 2, 2, 32, 16]" in repr(cache)
    assert zoo.create("llm-debug", dtype=torch.bfloat16).make_cache(1, 8).dtype is torch.bfloat16


def test_caches_that_do_not_fit_are_refused() -> None:
    model, other = zoo.create("llm-debug"), zoo.create("llm-debug", num_hidden_layers=2, num_key_value_heads=1)
    with pytest.raises(ValueError, match="batch is 0"):
        model.make_cache(0, 8)
    with pytest.raises(ValueError, match="slots is 513, but the model has 512"):
        model.make_cache(1, 513)
    cache = model.make_cache(2, 8)
    with torch.inference_mode():
        with pytest.raises(ValueError, match="cache has 3 layers of 2 rows, .* need 3 layers of 3 rows"):
            model(ids(3, 4), cache=cache)
        with pytest.raises(ValueError, match="9 tokens, but the cache 8 slots"):
            model(ids(2, 9), cache=cache)
        with pytest.raises(ValueError, match="cache has 3 layers of 2 rows, .* need 2 layers"):
            other(ids(2, 4), cache=cache)
        with pytest.raises(ValueError, match="2 heads of width 16, .* 1 heads of width 16"):
            zoo.create("llm-debug", num_key_value_heads=1)(ids(2, 4), cache=cache)
        narrow = model.make_cache(2, 8, dtype=torch.bfloat16)
        with pytest.raises(
            ValueError, match=r"torch.bfloat16 on cpu, but the model and input_ids need .* torch.float32 on cpu"
        ):
            model(ids(2, 4), cache=narrow)
        with torch.autocast("cpu", torch.bfloat16):
            assert model(ids(2, 4), cache=narrow).isfinite().all()
            with pytest.raises(ValueError, match=r"float32 on cpu, but .*bfloat16 on cpu.*dtype=torch.bfloat16"):
                model(ids(2, 4), cache=cache)
        with pytest.raises(ValueError, match="attention_mask and cache"):
            model(ids(2, 4), attention_mask=torch.ones(2, 4), cache=cache)
    with pytest.raises(ValueError, match="a cache has no gradients"):
        model(ids(2, 4), cache=cache)
    assert all(layer.abs().sum() == 0 for layer in cache.layers)
