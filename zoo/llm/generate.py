"""Continue prompts: one call for one set of them. A ``Session`` keeps the cache and the captured steps for more."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from zoo.llm.cache import KVCache
from zoo.llm.checks import check_is_cache
from zoo.llm.model import LLM
from zoo.llm.prompts import Prompts, prompt_rows
from zoo.llm.session import Session


def generate(
    model: LLM,
    tokens: Prompts,
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    eos: int | Sequence[int] | None = None,
    seed: int | None = None,
    cache: KVCache | None = None,
    stride: int = 16,
    cuda_graph: bool | None = None,
    buckets: Sequence[int] | None = None,
) -> Tensor:
    """Continue prompts.

    Args:
        model: A language model of the zoo, compiled or not.
        tokens: [B, T] integers, or B lists of token ids of any lengths. No padding.
        max_new_tokens: At most so many tokens a row.
        temperature: 0 takes the most likely token; else tokens are drawn, with logits divided by it.
        top_k: Draw from the most likely so many only; None for all.
        top_p: Draw from the fewest tokens that together have this probability; None for all.
        eos: Tokens that end a row; None for the config's, ``()`` to never stop.
        seed: Draws with the same seed are the same, on every device that gives the same logits. The global random
            state is neither used nor changed.
        cache: To use instead of a new one; what it holds is overwritten.
        stride: How often the host looks whether all rows have ended.
        cuda_graph: Run decoding as a CUDA graph; left out, where there is a GPU.
        buckets: Lengths that prompts are padded to; powers of two from 16 to 2048 when left out. Longer prompts go in
            pieces.

    Returns:
        [B, n] int64 on the model's device: the new tokens, end token included. n is the length of the longest answer;
        shorter ones end in padding (the config's ``pad_token_id``, else the first end token).

    Raises:
        TypeError: If the model or the tokens are not what they should be.
        ValueError: If a prompt is empty, holds a token that is not in the vocabulary, or is too long for the cache with
            what is asked for; if the cache has another number of rows; if a setting is out of range. Before anything
            runs.
    """
    session = _session(model, tokens, max_new_tokens, cache, cuda_graph, buckets)
    return session.generate(
        tokens,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        eos=eos,
        seed=seed,
        stride=stride,
    )


def stream(
    model: LLM,
    tokens: Prompts,
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    eos: int | Sequence[int] | None = None,
    seed: int | None = None,
    cache: KVCache | None = None,
    stride: int = 16,
    cuda_graph: bool | None = None,
    buckets: Sequence[int] | None = None,
) -> Iterator[Tensor]:
    """What ``generate`` returns, as it comes: [B, 1] first, then [B, up to stride], on the CPU."""
    session = _session(model, tokens, max_new_tokens, cache, cuda_graph, buckets)
    return session.stream(
        tokens,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        eos=eos,
        seed=seed,
        stride=stride,
    )


def fitting_slots(tokens: int, limit: int) -> int:
    """Slots for so many tokens: a power of two, so that texts of about a length meet the same graphs."""
    return min(max(16, 1 << (tokens - 1).bit_length()), limit)


def _session(
    model: LLM,
    tokens: Prompts,
    max_new_tokens: int,
    cache: KVCache | None,
    cuda_graph: bool | None,
    buckets: Sequence[int] | None,
) -> Session:
    if not isinstance(model, LLM):
        raise TypeError(f"model is a {type(model).__name__}, expected a language model of the zoo")
    rows = prompt_rows(tokens, model.config.vocab_size)
    if not isinstance(max_new_tokens, int) or isinstance(max_new_tokens, bool) or max_new_tokens < 1:
        raise ValueError(f"max_new_tokens is {max_new_tokens!r}, expected a positive integer")
    longest, limit = max(map(len, rows)) + max_new_tokens, model.config.max_position_embeddings
    if cache is None:
        if longest > limit:
            raise ValueError(
                f"the longest prompt and max_new_tokens are {longest} tokens together, but the model has {limit} "
                "positions"
            )
        slots = fitting_slots(longest, limit)
    else:
        check_is_cache(cache)
        slots = cache.slots
        if cache.batch != len(rows):
            raise ValueError(f"tokens has {len(rows)} rows, but the cache {cache.batch}")
    return Session(model, len(rows), slots, cache=cache, cuda_graph=cuda_graph, buckets=buckets, conversation=False)
