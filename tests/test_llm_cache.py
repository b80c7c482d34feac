"""The static cache: rows of any length, padding that is never seen, windows, and its errors."""

from typing import Any

import pytest
import torch

import zoo
from zoo.llm import LLM, attend
from zoo.llm.model import attend_tokens, token_mask


@pytest.fixture(params=[None, 5], ids=["full", "window"])
def model(request: pytest.FixtureRequest) -> LLM:
    return zoo.create("llm-debug", sliding_window=request.param)


def ids(batch: int, tokens: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(256, (batch, tokens), generator=torch.Generator().manual_seed(seed))


def test_ragged_prompts_are_padded_on_the_right_and_padding_is_never_seen(model: LLM) -> None:
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


def test_a_second_turn_goes_on_and_tokens_can_be_taken_back(model: LLM) -> None:
    tokens = ids(2, 16)
    with torch.inference_mode():
        expected = model(tokens)
        cache = model.make_cache(2, 16)
        model(ids(2, 16, seed=5), cache=cache)
        model(tokens[:, :7], cache=cache)
        got = model(tokens[:, 7:], position_ids=torch.arange(7, 16)[None], cache=cache)
        torch.testing.assert_close(got, expected[:, 7:], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize("key_heads", [1, 2, 4])
def test_attention_against_a_plain_sum(key_heads: int, window: int | None) -> None:
    torch.manual_seed(0)
    batch, tokens, heads, slots, width = 2, 3, 4, 9, 8
    query = torch.randn(batch, tokens, heads, width, dtype=torch.float64)
    cache = torch.randn(2, batch, key_heads, slots, width, dtype=torch.float64)
    positions = torch.tensor([[0, 1, 2], [4, 8, 6]])
    got = attend(query, cache, positions, window)
    assert got.shape == query.shape
    for row in range(batch):
        for token in range(tokens):
            last = int(positions[row, token]) + 1
            first = 0 if window is None else max(0, last - window)
            for head in range(heads):
                key, value = cache[:, row, head // (heads // key_heads), first:last]
                weights = torch.softmax(key @ query[row, token, head] * width**-0.5, 0)
                torch.testing.assert_close(got[row, token, head], weights @ value)


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


def test_sizes_and_dtypes() -> None:
    model = zoo.create("llm-debug")
    cache = model.make_cache(2, 32, dtype=torch.bfloat16)
    assert (cache.batch, cache.slots, cache.dtype, cache.device.type) == (2, 32, torch.bfloat16, "cpu")
    assert cache.nbytes == 3 * 2 * 2 * 2 * 32 * 16 * 2
    assert "3 layers of [2, 2, 2, 32, 16]" in repr(cache)
    assert zoo.create("llm-debug", dtype=torch.bfloat16).make_cache(1, 8).dtype is torch.bfloat16


def test_errors() -> None:
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
