"""Continue prompts: one call for one set of them. A ``Session`` keeps the cache and the captured steps for more."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from zoo.engine.cuda_graph import cuda_graph as capture
from zoo.engine.graphed_step import GraphedStep
from zoo.llm.cache import KVCache, check_is_cache
from zoo.llm.model import LLM
from zoo.ops.common import kernels_run
from zoo.validate import check_seed

Prompts: TypeAlias = Tensor | Sequence[Sequence[int]]


def prompt_rows(tokens: Prompts, vocab_size: int) -> list[list[int]]:
    """Token ids of each row.

    Args:
        tokens: [B, T] integers on any device, or a list of lists of any lengths.
        vocab_size: Ids lie below it.

    Raises:
        TypeError: If it is neither, or not of integers.
        ValueError: If there is no row, a row is empty, or a token is not in the vocabulary; the message names it.
    """
    rows: list[Any]
    if isinstance(tokens, Tensor):
        if tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool:
            raise TypeError(f"tokens is {tokens.dtype}, expected integers")
        if tokens.dim() != 2:
            raise ValueError(f"tokens has shape {list(tokens.shape)}, expected [batch, tokens]")
        rows = tokens.tolist()
    elif isinstance(tokens, Sequence) and not isinstance(tokens, str):
        rows = [row.tolist() if isinstance(row, Tensor) and row.dim() == 1 else row for row in tokens]
    else:
        raise TypeError(f"tokens is a {type(tokens).__name__}, expected a tensor [batch, tokens] or a list of lists")
    if not rows:
        raise ValueError("tokens has no rows")
    for index, row in enumerate(rows):
        if not isinstance(row, Sequence) or isinstance(row, str):
            raise TypeError(f"row {index} of tokens is a {type(row).__name__}, expected a list of token ids: [[1, 2]]")
        if not row:
            raise ValueError(f"row {index} of tokens is empty, and there is nothing to continue: give it a first token")
        for token in row:
            if not isinstance(token, int) or isinstance(token, bool):
                raise TypeError(f"row {index} of tokens holds {token!r}, expected integers")
            if not 0 <= token < vocab_size:
                raise ValueError(f"row {index} of tokens holds {token}, but the vocabulary has {vocab_size} tokens")
    return [list(row) for row in rows]


def from_start(rows: list[list[int]], buckets: Sequence[int], slots: int) -> tuple[Tensor, Tensor] | None:
    """Rows that begin a text, padded on the right to one bucket: tokens [B, bucket], and each row's last position.

    Padding is written behind a row's end, where no token looks before it is written anew.

    Args:
        rows: Token ids, at least one a row.
        buckets: Lengths, ascending.
        slots: Of the cache.

    Returns:
        Tokens and positions [B, 1]; None where no bucket holds the longest row, or the cache not the bucket.
    """
    longest = max(map(len, rows))
    size = next((bucket for bucket in buckets if bucket >= longest), None)
    if size is None or size > slots:
        return None
    tokens = [row + row[-1:] * (size - len(row)) for row in rows]
    return torch.tensor(tokens), torch.tensor([[len(row) - 1] for row in rows])


def pieces(rows: list[list[int]], starts: list[int], buckets: Sequence[int]) -> Iterator[tuple[Tensor, Tensor]]:
    """Tokens and positions to feed, [B, bucket] each, until the longest row is done.

    A row that is done repeats its last token at the token's own position: the same keys and values are written once
    more where they are, and the last column is the last token of every row.

    Args:
        rows: Token ids, at least one a row.
        starts: Position of each row's first token.
        buckets: Lengths of pieces, ascending; the longest is used as often as is needed.
    """
    longest, done = max(map(len, rows)), 0
    while done < longest:
        size = next((bucket for bucket in buckets if bucket >= longest - done), buckets[-1])
        places = [[min(done + index, len(row) - 1) for index in range(size)] for row in rows]
        tokens = [[row[place] for place in of_row] for row, of_row in zip(rows, places, strict=True)]
        positions = torch.tensor(places) + torch.tensor(starts)[:, None]
        yield torch.tensor(tokens), positions
        done += size


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are chosen.

    Args:
        temperature: 0 takes the most likely token; else logits are divided by it.
        top_k: Only the most likely so many; None for all.
        top_p: Of those only the fewest that together have this probability; None for all.

    Raises:
        ValueError: If a value is out of range.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if not (isinstance(self.temperature, (int, float)) and 0 <= self.temperature < math.inf):
            raise ValueError(f"temperature is {self.temperature!r}, expected 0 for greedy or a positive number")
        if self.top_k is not None and (
            not isinstance(self.top_k, int) or isinstance(self.top_k, bool) or self.top_k < 1
        ):
            raise ValueError(f"top_k is {self.top_k!r}, expected a positive integer, or None for all tokens")
        if self.top_p is not None and not (isinstance(self.top_p, (int, float)) and 0 < self.top_p <= 1):
            raise ValueError(
                f"top_p is {self.top_p!r}, expected a probability above 0, up to 1, or None for all tokens"
            )

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken."""
        return self.temperature == 0


def sample(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, uniform: Tensor) -> Tensor:
    """Draw a token a row: first top-k, then top-p of what is left, as in transformers.

    One number a row decides, by the inverse of the cumulated probabilities: the draw depends on nothing but its
    arguments, and a captured step needs no random state.

    Args:
        logits: [B, V].
        temperature: Scalar, positive.
        top_k: Scalar int64.
        top_p: Scalar; 2 for all.
        uniform: [B] in [0, 1).

    Returns:
        [B] int64.
    """
    scaled, order = (logits.float() / temperature).sort(dim=-1, descending=True)
    weights = scaled.softmax(-1)
    weights = weights * (torch.arange(weights.shape[-1], device=weights.device) < top_k)
    weights = weights / weights.sum(-1, keepdim=True)
    # A token is kept if those before it have not yet the wanted mass: the first always is.
    weights = weights * (weights.cumsum(-1) - weights < top_p)
    mass = weights.cumsum(-1)
    place = (mass <= uniform[:, None] * mass[:, -1:]).sum(-1, keepdim=True)
    # Rounding could lead behind the last token that has a weight.
    place = torch.minimum(place, (weights > 0).sum(-1, keepdim=True) - 1)
    return order.gather(-1, place).squeeze(-1)


def draw_uniform(steps: int, batch: int, seed: int | None) -> Tensor:
    """The numbers of a whole generation, [steps, batch] on the CPU, from a generator of their own."""
    generator = torch.Generator("cpu")
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed)
    return torch.rand(steps, batch, generator=generator, device="cpu")


def end_tokens(eos: int | Sequence[int] | None, default: Sequence[int], vocab_size: int, most: int) -> tuple[int, ...]:
    """Tokens that end a row, checked.

    Raises:
        ValueError: If one is not in the vocabulary, or there are more than ``most``.
    """
    ends = tuple(default) if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)
    for end in ends:
        if not isinstance(end, int) or isinstance(end, bool) or not 0 <= end < vocab_size:
            raise ValueError(f"eos is {eos!r}, expected token ids, 0 to {vocab_size - 1}, or () to never stop")
    if len(ends) > most:
        raise ValueError(f"eos has {len(ends)} tokens, and a step compares with {most} at most")
    return ends


MOST_ENDS = 16


class DecodeState:
    """What a step reads and writes, in memory that never moves.

    Attributes:
        tokens: [B, 1], fed next.
        positions: [B, 1], theirs.
        finished: [B] bool, rows that have met an end token.
        step: [1], how many tokens were chosen.
        output: [S, B], the tokens chosen, by step.
        noise: [S, B], a uniform number for each draw.
        ends: [16], tokens that end a row; -1 where there are fewer.
        pad, temperature, top_k, top_p: scalars.
    """

    def __init__(self, batch: int, slots: int, device: torch.device) -> None:
        # Ordinary tensors whatever the caller's mode: see the cache.
        with torch.inference_mode(False), device:
            self.tokens = torch.zeros(batch, 1, dtype=torch.int64)
            self.positions = torch.zeros(batch, 1, dtype=torch.int64)
            self.finished = torch.zeros(batch, dtype=torch.bool)
            self.step = torch.zeros(1, dtype=torch.int64)
            self.output = torch.zeros(slots, batch, dtype=torch.int64)
            self.noise = torch.zeros(slots, batch)
            self.ends = torch.full((MOST_ENDS,), -1, dtype=torch.int64)
            self.pad = torch.zeros((), dtype=torch.int64)
            self.temperature = torch.ones(())
            self.top_k = torch.ones((), dtype=torch.int64)
            self.top_p = torch.ones(())

    def begin(self, sampling: Sampling, ends: tuple[int, ...], pad: int, noise: Tensor | None, vocab_size: int) -> None:
        """Set up a generation. No value of the settings is baked into a captured step."""
        self.finished.fill_(False)
        self.step.zero_()
        self.ends.copy_(torch.tensor([*ends, *([-1] * (MOST_ENDS - len(ends)))]))
        self.pad.fill_(pad)
        if noise is not None:
            self.temperature.fill_(sampling.temperature)
            self.top_k.fill_(sampling.top_k or vocab_size)
            # Rounding must not cut the tail off where all tokens are wanted.
            self.top_p.fill_(2.0 if sampling.top_p in (None, 1) else sampling.top_p)  # type: ignore[arg-type]
            self.noise[: noise.shape[0]].copy_(noise)

    def idle(self, positions: Tensor) -> None:
        """Let steps run without effect: rows that have ended write to the one slot given, [B, 1], and stay there."""
        self.finished.fill_(True)
        self.step.zero_()
        self.positions.copy_(positions)


def decode_step(model: LLM, cache: KVCache, state: DecodeState, greedy: bool) -> None:
    """Feed each row's last token and choose the next."""
    logits = model(state.tokens, position_ids=state.positions, cache=cache, logits_to_keep=1)
    accept(state, logits[:, -1], greedy)


def accept(state: DecodeState, logits: Tensor, greedy: bool) -> None:
    """Choose a token a row from logits [B, V], note it, and move on; rows that have ended get padding and stay.

    The greedy choice is the most likely token, the first of equals.
    """
    if greedy and kernels_run(logits):
        from zoo.ops.triton.greedy import accept_greedy

        accept_greedy(
            logits, state.tokens, state.positions, state.finished, state.step, state.output, state.ends, state.pad
        )
        return
    if greedy:
        token = logits.argmax(-1)
    else:
        uniform = state.noise.index_select(0, state.step)[0]
        token = sample(logits, state.temperature, state.top_k, state.top_p, uniform)
    token = torch.where(state.finished, state.pad, token)
    state.output.index_copy_(0, state.step, token[None])
    state.positions.add_((~state.finished)[:, None])
    state.finished.logical_or_((token[:, None] == state.ends).any(-1))
    state.tokens.copy_(token[:, None])
    state.step.add_(1)


# Longer prompts go in pieces of the largest bucket, so that neither shapes nor masks grow without end.
BUCKETS = tuple(2**power for power in range(4, 12))


@dataclass(frozen=True, kw_only=True)
class _Request:
    """A checked call."""

    rows: list[list[int]]
    max_new_tokens: int
    sampling: Sampling
    ends: tuple[int, ...]
    pad: int
    seed: int | None
    stride: int


class Session:
    """Holds a cache and the captured steps of a model for a fixed number of rows.

    A prompt is padded to a bucket, so that prefill is one graph a bucket; decoding is one graph. After an answer the
    next prompt goes on where each row ended.

    Args:
        model: A language model of the zoo, compiled or not.
        batch: Rows, each a text of its own.
        slots: Tokens that fit into a row, prompts and answers together.
        cache: A cache to use instead of a new one; its sizes must be these.
        cuda_graph: Run decoding as a CUDA graph; left out, where there is a GPU. Greedy and drawn decoding are captured
            at their first use.
        buckets: Lengths that prompts are padded to; powers of two from 16 to 2048 when left out.
        conversation: Whether prompts will follow answers. Then attention of a prompt is one that may go on from
            anywhere, the same graph for every turn. Without, a text's first prompt takes the library's causal
            attention, which is faster, and a later one would be another graph.

    Raises:
        TypeError: If ``model`` is not this family's.
        ValueError: If a size is not positive or more than the model has, or the cache has other sizes.
    """

    def __init__(
        self,
        model: LLM,
        batch: int,
        slots: int,
        *,
        cache: KVCache | None = None,
        cuda_graph: bool | None = None,
        buckets: Sequence[int] | None = None,
        conversation: bool = True,
    ) -> None:
        if not isinstance(model, LLM):
            raise TypeError(f"model is a {type(model).__name__}, expected a language model of the zoo")
        self.buckets = BUCKETS if buckets is None else tuple(sorted(set(buckets)))
        if not self.buckets or not all(isinstance(bucket, int) and bucket > 0 for bucket in self.buckets):
            raise ValueError(f"buckets is {buckets!r}, expected positive lengths")
        if cache is not None:
            check_is_cache(cache)
            if (cache.batch, cache.slots) != (batch, slots):
                raise ValueError(
                    f"cache has {cache.batch} rows of {cache.slots} slots, but batch is {batch} and slots {slots}"
                )
        self.model = model
        self.cache = model.make_cache(batch, slots) if cache is None else cache
        self.state = DecodeState(batch, slots, self.cache.device)
        self.captures = self.cache.device.type == "cuda" if cuda_graph is None else cuda_graph
        self.conversation = conversation
        self._steps: dict[bool, GraphedStep] = {}
        self._turn = 0
        self.reset()

    def reset(self) -> None:
        """Forget all texts. What was compiled and captured stays."""
        self.lengths = [0] * self.cache.batch
        # The last token of an answer was chosen but never fed: it goes before the next prompt.
        self._pending: list[list[int]] = [[] for _ in range(self.cache.batch)]
        self._turn += 1

    def generate(
        self,
        tokens: Prompts,
        *,
        max_new_tokens: int,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        eos: int | Sequence[int] | None = None,
        seed: int | None = None,
        stride: int = 16,
    ) -> Tensor:
        """The answer of each row, [B, n] int64 on the model's device; see ``zoo.llm.generate``."""
        chunks = self.stream(
            tokens,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            eos=eos,
            seed=seed,
            stride=stride,
        )
        return torch.cat(list(chunks), dim=1).to(self.cache.device)

    def stream(
        self,
        tokens: Prompts,
        *,
        max_new_tokens: int,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        eos: int | Sequence[int] | None = None,
        seed: int | None = None,
        stride: int = 16,
    ) -> Iterator[Tensor]:
        """The answers as they come: [B, 1] first, then [B, up to stride], on the CPU; see ``zoo.llm.stream``.

        The session goes on after what was yielded: leaving the loop early cuts the answer there.
        """
        model = self.model.config
        rows = prompt_rows(tokens, model.vocab_size)
        if len(rows) != self.cache.batch:
            raise ValueError(f"tokens has {len(rows)} rows, but the cache {self.cache.batch}")
        for name, value in (("max_new_tokens", max_new_tokens), ("stride", stride)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} is {value!r}, expected a positive integer")
        rows = [[*pending, *row] for pending, row in zip(self._pending, rows, strict=True)]
        for index, (length, row) in enumerate(zip(self.lengths, rows, strict=True)):
            if length + len(row) + max_new_tokens > self.cache.slots:
                raise ValueError(
                    f"row {index} has {length + len(row)} tokens and max_new_tokens is {max_new_tokens}, but the cache "
                    f"has {self.cache.slots} slots: take a larger one, or fewer tokens"
                )
        if seed is not None:
            check_seed(seed)
        ends = end_tokens(eos, model.eos_token_id, model.vocab_size, MOST_ENDS)
        pad = model.pad_token_id if model.pad_token_id is not None else next(iter(ends), 0)
        self._turn += 1
        return self._run(
            _Request(
                rows=rows,
                max_new_tokens=max_new_tokens,
                sampling=Sampling(temperature=temperature, top_k=top_k, top_p=top_p),
                ends=ends,
                pad=pad,
                seed=seed,
                stride=stride,
            ),
            self._turn,
        )

    def _run(self, request: _Request, turn: int) -> Iterator[Tensor]:
        self._check_turn(turn)
        before = self.lengths
        strides = self._strides(request)
        coming: _Coming | None = next(strides)
        answers: list[list[int]] = [[] for _ in request.rows]
        ended = [False] * len(answers)
        while coming is not None:
            # Captured, the device works on the next stride while the host looks at this one.
            following = next(strides, None) if self.captures else None
            chunk = coming.wait()
            live = 0
            for index, row in enumerate(chunk.tolist()):
                for count, token in enumerate(row, start=1):
                    if not ended[index]:
                        answers[index].append(token)
                        ended[index] = token in request.ends
                        live = max(live, count)
            self.lengths = [
                length + len(row) + len(answer) - 1
                for length, row, answer in zip(before, request.rows, answers, strict=True)
            ]
            self._pending = [answer[-1:] for answer in answers]
            yield chunk[:, :live]
            if all(ended):
                return
            self._check_turn(turn)
            coming = following if self.captures else next(strides, None)

    def _check_turn(self, turn: int) -> None:
        if self._turn != turn:
            raise RuntimeError("this session went on to another answer or was reset; an earlier stream cannot go on")

    def _strides(self, request: _Request) -> Iterator[_Coming]:
        """Launch the prefill, then a stride of steps whenever the next is asked for."""
        with torch.inference_mode():
            self._prefill(request)
        first, total, greedy = 1, request.max_new_tokens, request.sampling.greedy
        yield _Coming(self.state.output[:1])
        while first < total:
            last = min(first + request.stride, total)
            with torch.inference_mode():
                for _ in range(first, last):
                    step = self._steps[greedy] if self.captures else decode_step
                    step(self.model, self.cache, self.state, greedy)
            yield _Coming(self.state.output[first:last])
            first = last

    def _prefill(self, request: _Request) -> None:
        state, greedy, device = self.state, request.sampling.greedy, self.cache.device
        if self.captures and greedy not in self._steps:
            # Warm-up runs write to the slots that the prompt is about to fill.
            state.idle(torch.tensor(self.lengths)[:, None])
            self._steps[greedy] = capture(
                decode_step, (self.model, self.cache, state, greedy), static=(0, 1, 2), clone_outputs=False
            )
        batch, vocab_size = self.cache.batch, self.model.config.vocab_size
        noise = None if greedy else draw_uniform(request.max_new_tokens, batch, request.seed)
        state.begin(request.sampling, request.ends, request.pad, noise, vocab_size)
        whole = None
        if not (self.conversation or any(self.lengths)):
            whole = from_start(request.rows, self.buckets, self.cache.slots)
        if whole is not None:
            tokens, last = (each.to(device) for each in whole)
            logits = self.model(tokens, cache=self.cache, logits_to_keep=last)
        else:
            for tokens, positions in pieces(request.rows, self.lengths, self.buckets):
                tokens, positions = tokens.to(device), positions.to(device)
                logits = self.model(tokens, position_ids=positions, cache=self.cache, logits_to_keep=1)
            last = positions[:, -1:]
        state.positions.copy_(last)
        accept(state, logits[:, -1], greedy)


class _Coming:
    """Chosen tokens [n, B] on their way to the host."""

    def __init__(self, tokens: Tensor) -> None:
        on_gpu = tokens.is_cuda
        self._host = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=on_gpu, device="cpu")
        self._host.copy_(tokens, non_blocking=on_gpu)
        self._arrived = torch.cuda.Event() if on_gpu else None
        if self._arrived is not None:
            self._arrived.record(torch.cuda.current_stream(tokens.device))

    def wait(self) -> Tensor:
        """[B, n]."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._host.t().contiguous()


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
