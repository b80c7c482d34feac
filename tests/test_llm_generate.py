"""Generation: transformers' tokens, reproducible draws, turns without recompiles, strides, and every error."""

import math
from typing import Any

import llm_reference as reference
import pytest
import torch

import zoo
from tests.blocks import graphs_of
from zoo.llm import LLM, Session
from zoo.llm.generate import sample

PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [3], [40, 41, 42]]


@pytest.fixture
def model() -> LLM:
    return zoo.create("llm-debug")


def left_padded(prompts: list[list[int]]) -> dict[str, torch.Tensor]:
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in prompts])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in prompts])
    return {"input_ids": ids, "attention_mask": mask}


def theirs_says(theirs: Any, prompts: list[list[int]], **options: Any) -> torch.Tensor:
    with torch.no_grad():
        whole = theirs.generate(**left_padded(prompts), do_sample=False, **options)
    new: torch.Tensor = whole[:, max(map(len, prompts)) :]
    return new


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize("kind", ["llama-tied-llama3", "mistral-window", "qwen2", "qwen3"])
def test_greedy_is_transformers_greedy_token_for_token(kind: str, captured: bool) -> None:
    theirs = reference.make(kind)
    expected = theirs_says(theirs, PROMPTS, max_new_tokens=24, eos_token_id=None, pad_token_id=0)
    got = zoo.from_upstream(theirs).generate(PROMPTS, max_new_tokens=24, cuda_graph=captured, stride=5)
    assert expected.shape == (3, 24) and expected.unique().numel() > 5
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


@pytest.mark.parametrize("stride", [1, 4, 16])
def test_rows_end_as_in_transformers(stride: int) -> None:
    theirs = reference.make("llama")
    free = theirs_says(theirs, PROMPTS, max_new_tokens=20, eos_token_id=None, pad_token_id=0)
    # Tokens that end the rows at different places, all before the limit.
    ends = sorted({int(free[0, 3]), int(free[1, 9]), int(free[2, 6])})
    expected = theirs_says(theirs, PROMPTS, max_new_tokens=20, eos_token_id=ends, pad_token_id=95)
    assert 1 < expected.shape[1] < 20 and (expected == 95).any()
    model = zoo.from_upstream(reference.make("llama", pad_token_id=95))
    model.load_state_dict(zoo.from_upstream(theirs).state_dict())
    for captured in (False, True):
        got = model.generate(PROMPTS, max_new_tokens=20, eos=ends, stride=stride, cuda_graph=captured)
        torch.testing.assert_close(got, expected, rtol=0, atol=0)
    chunks = list(model.stream(PROMPTS, max_new_tokens=20, eos=ends, stride=stride))
    assert chunks[0].shape == (3, 1) and all(1 <= chunk.shape[1] <= stride for chunk in chunks[1:])
    torch.testing.assert_close(torch.cat(chunks, 1), expected, rtol=0, atol=0)


def test_the_configs_end_tokens_are_the_default() -> None:
    theirs = reference.make("llama")
    free = zoo.from_upstream(theirs).generate([[5, 6]], max_new_tokens=12)
    theirs.config.eos_token_id = int(free[0, 5])
    model = zoo.from_upstream(theirs)
    first = free[0].tolist().index(int(free[0, 5]))
    assert model.generate([[5, 6]], max_new_tokens=12).shape == (1, first + 1)
    assert model.generate([[5, 6]], max_new_tokens=12, eos=()).shape == (1, 12)


def test_a_stream_gives_the_answer_in_strides(model: LLM) -> None:
    options: dict[str, Any] = {"max_new_tokens": 6, "temperature": 1.2, "top_k": 40, "seed": 3, "cuda_graph": True}
    expected = model.generate(PROMPTS, **options)
    chunks = list(model.stream(PROMPTS, stride=2, **options))
    assert [chunk.shape[1] for chunk in chunks] == [1, 2, 2, 1]
    torch.testing.assert_close(torch.cat(chunks, 1), expected, rtol=0, atol=0)
    with pytest.raises(TypeError, match="max_length"):
        model.generate(PROMPTS, max_length=6)
    with pytest.raises(TypeError, match="max_new_tokens"):
        model.generate(PROMPTS)


def test_tensors_and_lists_are_the_same_prompts(model: LLM) -> None:
    ids = torch.randint(256, (2, 5))
    expected = model.generate(ids.tolist(), max_new_tokens=4)
    for tokens in (ids, ids.int(), list(ids)):
        torch.testing.assert_close(model.generate(tokens, max_new_tokens=4), expected, rtol=0, atol=0)


GREEDY = ({"temperature": 1e-4}, {"temperature": 5.0, "top_k": 1}, {"temperature": 1.0, "top_p": 1e-6})
SAME = [*({"buckets": each} for each in ((4,), (1, 3, 64), (128,))), *({**each, "seed": 3} for each in GREEDY)]


@pytest.mark.parametrize("options", SAME, ids=str)
def test_what_does_not_change_the_answer(model: LLM, options: dict[str, Any]) -> None:
    expected = model.generate(PROMPTS, max_new_tokens=8)
    torch.testing.assert_close(model.generate(PROMPTS, max_new_tokens=8, **options), expected, rtol=0, atol=0)


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
def test_turns_and_prompts_of_any_length_recompile_nothing(captured: bool) -> None:
    model = zoo.compile_regions(zoo.create("llm-debug"), backend="aot_eager")
    eager = zoo.create("llm-debug")
    eager.load_state_dict(model.state_dict())
    session = Session(model, 2, 128, buckets=(16,), cuda_graph=captured)
    with zoo.enforce_budget(model):
        for seed in range(3):
            session.reset()
            texts: list[list[int]] = [[], []]
            for turn, settings in enumerate([{}, {"temperature": 0.8, "seed": seed, "top_k": 9}, {"top_p": 0.5}]):
                prompt = [[seed, turn, 5][: 1 + turn], [7] * (3 + 5 * seed)]
                answer = session.generate(prompt, max_new_tokens=6 + turn, **settings)
                texts = [text + row for text, row in zip(texts, prompt, strict=True)]
                if "temperature" not in settings:
                    # What a model that starts over says to the whole text.
                    expected = eager.generate(texts, max_new_tokens=6 + turn)
                    torch.testing.assert_close(answer, expected, rtol=0, atol=0)
                texts = [text + row for text, row in zip(texts, answer.tolist(), strict=True)]
    assert graphs_of(model) == {"LLMHead": 1, "LLMLayer": 2}


def test_a_row_that_ends_early_goes_on_from_its_end(model: LLM) -> None:
    free = model.generate(PROMPTS, max_new_tokens=10)
    end = int(free[0, 2])
    session = Session(model, 3, 64)
    first = session.generate(PROMPTS, max_new_tokens=10, eos=end)
    texts = []
    for prompt, row in zip(PROMPTS, first.tolist(), strict=True):
        answer = row[: row.index(end) + 1] if end in row else row
        texts.append(prompt + answer + [1, 2])
    assert len({len(text) for text in texts}) > 1
    second = session.generate([[1, 2]] * 3, max_new_tokens=7, eos=())
    torch.testing.assert_close(second, model.generate(texts, max_new_tokens=7, eos=()), rtol=0, atol=0)


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
def test_leaving_a_stream_early_cuts_the_answer_there(model: LLM, captured: bool) -> None:
    session = Session(model, 1, 64, cuda_graph=captured)
    answer: list[int] = []
    for chunk in session.stream([[4, 5]], max_new_tokens=30, stride=3):
        answer += chunk[0].tolist()
        if len(answer) >= 4:
            break
    assert len(answer) == 4 and session.lengths == [5]
    second = session.generate([[8]], max_new_tokens=5)
    torch.testing.assert_close(second, model.generate([[4, 5, *answer, 8]], max_new_tokens=5), rtol=0, atol=0)


def test_one_stream_at_a_time(model: LLM) -> None:
    session = Session(model, 1, 64)
    first = session.stream([[4, 5]], max_new_tokens=30, stride=3)
    next(first)
    session.reset()
    with pytest.raises(RuntimeError, match="cannot continue"):
        next(first)
    late = session.stream([[4, 5]], max_new_tokens=3)
    session.generate([[4]], max_new_tokens=3)
    with pytest.raises(RuntimeError, match="cannot continue"):
        next(late)


def test_draws_follow_the_seed_and_leave_the_global_state_alone(model: LLM) -> None:
    settings: dict[str, Any] = {"max_new_tokens": 20, "temperature": 1.5, "top_k": 50, "top_p": 0.95}
    before = torch.get_rng_state()
    first = model.generate(PROMPTS, seed=1, **settings)
    torch.manual_seed(99)
    torch.testing.assert_close(model.generate(PROMPTS, seed=1, **settings), first, rtol=0, atol=0)
    torch.testing.assert_close(model.generate(PROMPTS, seed=1, cuda_graph=True, **settings), first, rtol=0, atol=0)
    assert not torch.equal(model.generate(PROMPTS, seed=2, **settings), first)
    torch.set_rng_state(before)
    assert not torch.equal(model.generate(PROMPTS, **settings), model.generate(PROMPTS, **settings))
    assert torch.equal(torch.get_rng_state(), before)


def draws(logits: torch.Tensor, temperature: float, top_k: int, top_p: float, count: int = 20000) -> torch.Tensor:
    uniform = (torch.arange(count) + 0.5) / count
    scalars = torch.tensor(temperature), torch.tensor(top_k), torch.tensor(top_p)
    return torch.bincount(sample(logits.expand(count, -1), *scalars, uniform), minlength=logits.numel()) / count


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(1.0, 50, 2.0), (0.5, 50, 2.0), (2.0, 7, 2.0), (1.0, 50, 0.6), (1.3, 9, 0.7)]
)
def test_draws_have_the_distribution_of_transformers_processors(temperature: float, top_k: int, top_p: float) -> None:
    from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    torch.manual_seed(1)
    logits = torch.randn(1, 50) * 2
    processors = [TemperatureLogitsWarper(temperature), TopKLogitsWarper(top_k), TopPLogitsWarper(min(top_p, 1.0))]
    ids = torch.zeros(1, 1, dtype=torch.int64)
    expected = LogitsProcessorList(processors)(ids, logits.clone()).softmax(-1)[0]
    got = draws(logits, temperature, top_k, top_p)
    assert ((got > 0) <= (expected > 0)).all()
    # Evenly spread numbers give every token its share, but for the rounding at its two ends.
    torch.testing.assert_close(got, expected, rtol=0, atol=1.5e-4)


@pytest.mark.parametrize("uniform", [1 - 2**-24, 1 - 2**-26], ids=["largest", "rounded to one"])
def test_the_largest_uniform_number_stays_among_the_kept(uniform: float) -> None:
    logits = torch.tensor([[0.0, 3.0, -50.0, 2.0]])
    most = torch.tensor([uniform])
    scalars = torch.tensor(1.0), torch.tensor(2), torch.tensor(2.0)
    assert int(sample(logits, *scalars, most)) == 3


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"tokens": []}, ValueError, "no rows"),
        ({"tokens": [[1], []]}, ValueError, "row 1 of tokens is empty"),
        ({"tokens": torch.zeros(2, 0, dtype=torch.int64)}, ValueError, "row 0 of tokens is empty"),
        ({"tokens": [[1, 256]]}, ValueError, "row 0 of tokens holds 256, expected integers from 0 to 255"),
        ({"tokens": [[-1]]}, ValueError, "holds -1"),
        ({"tokens": [1, 2]}, TypeError, "row 0 of tokens is a int"),
        ({"tokens": [[1.5]]}, ValueError, "holds 1.5, expected integers"),
        ({"tokens": "hello"}, TypeError, "tokens is a str"),
        ({"tokens": torch.ones(2, 3)}, TypeError, "tokens is torch.float32"),
        ({"tokens": torch.ones(3, dtype=torch.int64)}, ValueError, r"tokens has shape \[3\]"),
        ({"max_new_tokens": 0}, ValueError, "max_new_tokens is 0"),
        (
            {"max_new_tokens": 511},
            ValueError,
            "row 0 has 2 tokens and max_new_tokens is 511, but the cache has 512 slots",
        ),
        ({"temperature": -0.1}, ValueError, "temperature is -0.1"),
        ({"temperature": math.nan}, ValueError, "temperature is nan"),
        ({"top_k": 0}, ValueError, "top_k is 0"),
        ({"top_p": 0.0}, ValueError, "top_p is 0.0"),
        ({"top_p": 1.1}, ValueError, "top_p is 1.1"),
        ({"eos": 256}, ValueError, "eos is 256"),
        ({"eos": list(range(17))}, ValueError, "eos has 17 tokens"),
        ({"stride": 0}, ValueError, "stride is 0"),
        ({"buckets": ()}, ValueError, "buckets is"),
        ({"seed": "a"}, TypeError, "seed is 'a', expected an integer"),
        ({"seed": -(2**63) - 1}, ValueError, "fits into 64 bits"),
    ],
)
def test_bad_calls_are_named_before_anything_runs(model, options, error, words):
    def never(*_: Any) -> None:
        raise AssertionError("the model ran")

    model.register_forward_pre_hook(never)
    call = {"tokens": [[1, 2]], "max_new_tokens": 4, **options}
    with pytest.raises(error, match=words):
        model.generate(**call)
    with pytest.raises(error, match=words):
        # Not only when the first chunk is asked for.
        model.stream(**call)


def test_texts_must_fit_into_a_session(model: LLM) -> None:
    session = Session(model, 2, 16)
    with pytest.raises(ValueError, match="tokens has 3 rows, but the cache 2"):
        session.generate(PROMPTS, max_new_tokens=3)
    session.generate([[1, 2], [3]], max_new_tokens=8)
    with pytest.raises(ValueError, match="row 0 has 11 tokens and max_new_tokens is 6, but the cache has 16"):
        session.generate([[1], [1]], max_new_tokens=6)
    session.generate([[1], [1]], max_new_tokens=5)
    with pytest.raises(TypeError, match="model is a Linear"):
        Session(torch.nn.Linear(1, 1), 1, 1)


def test_generation_under_autocast_has_a_cache_of_its_dtype(model: LLM) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert model.generate([[1, 2]], max_new_tokens=3).shape == (1, 3)
        assert model.make_cache(1, 8).dtype is torch.bfloat16
