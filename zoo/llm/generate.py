"""Generation: the model reads prompts padded to buckets, then replays one CUDA graph per new token.

A ``Session`` keeps its cache and its captured steps for a conversation. ``model.generate`` creates one for its prompts.

Shapes: B batch, T tokens of a prompt, n new tokens, V vocabulary, S slots of the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from zoo import validate
from zoo.engine.captured import WeightsMovedError
from zoo.engine.cuda_graph import cuda_graph as capture
from zoo.engine.graphed_step import GraphedStep
from zoo.ops.common import kernels_run

Prompts: TypeAlias = Tensor | Sequence[Sequence[int]]
Rows: TypeAlias = list[list[int]]

# Prompts are padded to one of these lengths. Longer prompts are read in pieces of the largest.
BUCKETS = tuple(2**power for power in range(4, 12))
MOST_ENDS = 16


@dataclass(frozen=True, kw_only=True)
class GenerationOptions:
    """How tokens are chosen, and when an answer ends. Raises TypeError or ValueError if a value is out of range.

    Args:
        max_new_tokens: Maximum new tokens per row.
        temperature: 0 takes the most likely token; else tokens are sampled from logits divided by it.
        top_k: Sample from the k most likely tokens; None for all. Needs a temperature, as ``top_p`` does.
        top_p: Then sample from the smallest set of them with at least this total probability; None for all.
        eos: Tokens that end a row; None for the config's, ``()`` to never stop.
        seed: Equal seeds give equal tokens on every device that gives equal logits. The global random state is neither
            used nor changed.
        stride: Number of tokens between the host's checks whether all rows have ended.
    """

    max_new_tokens: int
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    eos: int | Sequence[int] | None = None
    seed: int | None = None
    stride: int = 16

    def __post_init__(self) -> None:
        validate.positive(self, "max_new_tokens", "stride")
        validate.positive(self, "top_k", or_none=True)
        heat = self.temperature
        if not (isinstance(heat, (int, float)) and (heat == 0 or 1e-6 <= heat <= 1e6)):
            raise ValueError(f"temperature is {heat!r}, expected 0 for greedy, or a number from 1e-6 to 1e6")
        if self.top_p is not None and not (isinstance(self.top_p, (int, float)) and 0 < self.top_p <= 1):
            raise ValueError(f"top_p is {self.top_p!r}, expected a probability above 0, or None for all tokens")
        for name in ("top_k", "top_p"):
            if self.greedy and (value := getattr(self, name)) is not None:
                raise ValueError(f"{name} is {value}, but temperature 0 does not sample: give one, such as 1.0")
        if self.seed is not None:
            validate.check_seed(self.seed)

    @property
    def greedy(self) -> bool:
        """True if the most likely token is taken."""
        return self.temperature == 0

    def end_tokens(self, config: Any) -> tuple[int, ...]:
        """Tokens that end a row; a ValueError if one is not in the vocabulary, or there are more than 16."""
        eos, vocab_size = self.eos, config.vocab_size
        ends: Any = config.eos_token_id if eos is None else eos if isinstance(eos, Sequence) else (eos,)
        if not all(validate.is_count(end, least=0) and end < vocab_size for end in ends):
            raise ValueError(f"eos is {eos!r}, expected token ids, 0 to {vocab_size - 1}, or () to never stop")
        if len(ends) > MOST_ENDS:
            raise ValueError(f"eos has {len(ends)} tokens, and a step compares with {MOST_ENDS} at most")
        return tuple(ends)


@dataclass(frozen=True, eq=False)
class KVCache:
    """Keys and values of all layers, at fixed addresses. From ``model.make_cache``.

    ``layers`` has one tensor per layer, [2, B, K, S, D]: keys, then values. The token at position p of a row is in slot
    p, so rows of different lengths need no padding between their tokens. Slots after a row's last position are never
    read: to drop tokens, continue from an earlier position.
    """

    layers: tuple[Tensor, ...]

    @property
    def batch(self) -> int:
        """Number of rows."""
        return self.layers[0].shape[1]

    @property
    def slots(self) -> int:
        """Maximum tokens of a row."""
        return self.layers[0].shape[3]

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the keys and values."""
        return self.layers[0].dtype

    @property
    def device(self) -> torch.device:
        """Device of the keys and values."""
        return self.layers[0].device

    def __repr__(self) -> str:
        return f"KVCache({len(self.layers)} layers of {list(self.layers[0].shape)}, {self.dtype})"


class GenerationMixin(nn.Module):
    """``generate`` and ``stream`` for a language model whose forward takes tokens and a cache, as ``LLM.forward``."""

    config: Any  # vocab_size, max_position_embeddings, pad_token_id and eos_token_id
    make_cache: Callable[..., KVCache]

    def generate(
        self, tokens: Prompts, *, cuda_graph: bool | None = None, buckets: Sequence[int] | None = None, **options: Any
    ) -> Tensor:
        """Continue prompts. Returns the new tokens [B, n] int64 on the model's device, including the end token.

        n is the longest answer's length. Shorter answers are padded with the config's ``pad_token_id``, else with the
        first end token.

        Args:
            tokens: [B, T] integers, or B lists of token ids of any lengths. No padding.
            cuda_graph: Run decoding as a CUDA graph; by default only on a GPU.
            buckets: Lengths that prompts are padded to; powers of two from 16 to 2048 by default. Longer prompts are
                read in pieces.
            options: Fields of ``GenerationOptions``.

        Raises:
            TypeError, ValueError: If an argument does not fit, or a prompt is empty, has a token outside the
                vocabulary, or has no room for ``max_new_tokens`` after it; before anything runs.
        """
        chunks = self.stream(tokens, cuda_graph=cuda_graph, buckets=buckets, **options)
        return torch.cat(list(chunks), dim=1).to(next(self.parameters()).device)

    def stream(
        self, tokens: Prompts, *, cuda_graph: bool | None = None, buckets: Sequence[int] | None = None, **options: Any
    ) -> Iterator[Tensor]:
        """Yield the result of ``generate`` in pieces: [B, 1] first, then [B, up to stride], on the CPU."""
        rows = prompt_rows(tokens, self.config.vocab_size)
        longest = max(map(len, rows)) + GenerationOptions(**options).max_new_tokens
        # A power of two, so that texts of similar lengths share their graphs.
        slots = min(max(16, 1 << (longest - 1).bit_length()), self.config.max_position_embeddings)
        session = Session(self, len(rows), slots, cuda_graph=cuda_graph, buckets=buckets, conversation=False)
        return session.stream(rows, **options)


class Session:
    """Holds a cache and the captured steps of a model for a fixed number of rows.

    Prefill has one graph per bucket, decoding one for greedy and one for sampled tokens. After an answer the next
    prompt continues where each row ended. TypeError or ValueError if model or size does not fit.

    Args:
        model: A language model of the zoo, compiled or not.
        batch: Number of rows, which are independent texts.
        slots: Maximum tokens of a row, prompts and answers together.
        cuda_graph: As for ``generate`` of the model.
        buckets: As for ``generate`` of the model.
        conversation: True if prompts will follow answers. All turns then share one graph per bucket, whose attention
            can begin at any position. False lets a first prompt use torch's causal attention, which is faster; a later
            prompt then needs another graph.
    """

    def __init__(
        self, model: GenerationMixin, batch: int, slots: int, *, cuda_graph: bool | None = None,
        buckets: Sequence[int] | None = None, conversation: bool = True,
    ) -> None:  # fmt: skip
        if not isinstance(model, GenerationMixin):
            raise TypeError(f"model is a {type(model).__name__}, expected a language model of the zoo")
        lengths = BUCKETS if buckets is None else buckets
        if not isinstance(lengths, Sequence) or not lengths or not all(map(validate.is_count, lengths)):
            raise ValueError(f"buckets is {buckets!r}, expected a list of positive lengths")
        self.buckets = tuple(sorted(set(lengths)))
        self.model, self.cache = model, model.make_cache(batch, slots)
        self.state = DecodeState(batch, slots, self.cache.device)
        self.captures = self.cache.device.type == "cuda" if cuda_graph is None else cuda_graph
        self.conversation = conversation
        self._steps: dict[bool, GraphedStep] = {}
        self._turn = 0
        self.reset()

    def reset(self) -> None:
        """Forget all texts. Compiled and captured code stays."""
        self.lengths = [0] * self.cache.batch
        # The model has not read the last token of an answer, so this token precedes the next prompt.
        self._pending: Rows = [[] for _ in range(self.cache.batch)]
        self._turn += 1

    def generate(self, tokens: Prompts, **options: Any) -> Tensor:
        """The answer of each row, [B, n] int64 on the model's device; options as in ``GenerationOptions``."""
        return torch.cat(list(self.stream(tokens, **options)), dim=1).to(self.cache.device)

    def stream(self, tokens: Prompts, **options: Any) -> Iterator[Tensor]:
        """Yield the answers in pieces: [B, 1] first, then [B, up to stride], on the CPU.

        The next prompt continues after the yielded tokens: leaving the loop early truncates the answer.
        """
        config, checked, slots = self.model.config, GenerationOptions(**options), self.cache.slots
        prompts, new = prompt_rows(tokens, config.vocab_size), checked.max_new_tokens
        if len(prompts) != self.cache.batch:
            raise ValueError(f"tokens has {len(prompts)} rows, but the cache {self.cache.batch}")
        rows = [[*pending, *row] for pending, row in zip(self._pending, prompts, strict=True)]
        for index, (length, row) in enumerate(zip(self.lengths, rows, strict=True)):
            if (held := length + len(row)) + new > slots:
                text = f"row {index} has {held} tokens and max_new_tokens is {new}, but the cache has {slots} slots"
                raise ValueError(f"{text}: take fewer tokens, or more slots where the model has as many positions")
        ends = checked.end_tokens(config)
        self._turn += 1
        return self._run(rows, checked, ends, self._turn)

    def _run(self, rows: Rows, options: GenerationOptions, ends: tuple[int, ...], turn: int) -> Iterator[Tensor]:
        self._check_turn(turn)
        before = self.lengths
        strides = self._strides(rows, options, ends)
        transfer: HostTransfer | None = next(strides)
        answers: Rows = [[] for _ in rows]
        ended = [False] * len(answers)
        while transfer is not None:
            # Captured, the device computes the next stride while the host checks this one.
            following = next(strides, None) if self.captures else None
            chunk = transfer.wait()
            live = 0
            for index, row in enumerate(chunk.tolist()):
                for count, token in enumerate(row, start=1):
                    if not ended[index]:
                        answers[index].append(token)
                        ended[index] = token in ends
                        live = max(live, count)
            self.lengths = [
                length + len(row) + len(answer) - 1 for length, row, answer in zip(before, rows, answers, strict=True)
            ]
            self._pending = [answer[-1:] for answer in answers]
            yield chunk[:, :live]
            if all(ended):
                return
            self._check_turn(turn)
            transfer = following if self.captures else next(strides, None)

    def _check_turn(self, turn: int) -> None:
        if self._turn != turn:
            raise RuntimeError("the session was reset or began another answer: this stream cannot continue")

    def _strides(self, rows: Rows, options: GenerationOptions, ends: tuple[int, ...]) -> Iterator[HostTransfer]:
        """Launch the prefill, then one stride of steps per ``next``."""
        with torch.inference_mode():
            self._prefill(rows, options, ends)
        first, total, greedy = 1, options.max_new_tokens, options.greedy
        yield HostTransfer(self.state.output[:1])
        while first < total:
            last = min(first + options.stride, total)
            with torch.inference_mode():
                step = self._steps[greedy] if self.captures else decode_step
                try:
                    for _ in range(first, last):
                        step(self.model, self.cache, self.state, greedy)
                except WeightsMovedError as error:
                    del self._steps[greedy]
                    raise WeightsMovedError(f"{error}. The session's next answer captures again") from None
            yield HostTransfer(self.state.output[first:last])
            first = last

    def _prefill(self, rows: Rows, options: GenerationOptions, ends: tuple[int, ...]) -> None:
        state, greedy, device, longest = self.state, options.greedy, self.cache.device, max(map(len, rows))
        if self.captures and greedy not in self._steps:
            # All rows are marked as ended, so that warm-up runs write one slot per row, which the prompt overwrites.
            state.finished.fill_(True)
            state.step.zero_()
            state.positions.copy_(torch.tensor(self.lengths)[:, None])
            self._steps[greedy] = capture(
                decode_step, (self.model, self.cache, state, greedy), static=(0, 1, 2), clone_outputs=False
            )
        state.begin(options, ends, self.model.config)
        bucket = next((size for size in self.buckets if longest <= size <= self.cache.slots), None)
        if bucket is not None and not self.conversation and not any(self.lengths):
            # Padding fills slots that are overwritten before a token reads them.
            tokens = torch.tensor([row + row[-1:] * (bucket - len(row)) for row in rows], device=device)
            last = torch.tensor([[len(row) - 1] for row in rows], device=device)
            logits = self.model(tokens, cache=self.cache, logits_to_keep=last)
        else:
            for tokens, positions in _in_pieces(rows, self.lengths, self.buckets):
                tokens, positions = tokens.to(device), positions.to(device)
                logits = self.model(tokens, position_ids=positions, cache=self.cache, logits_to_keep=1)
            last = positions[:, -1:]
        state.positions.copy_(last)
        accept(state, logits[:, -1], greedy)


class HostTransfer:
    """An asynchronous copy of chosen tokens [n, B] to the host."""

    def __init__(self, tokens: Tensor) -> None:
        self._host = tokens.to("cpu", non_blocking=True, copy=True)  # into pinned memory
        self._arrived = torch.cuda.current_stream(tokens.device).record_event() if tokens.is_cuda else None

    def wait(self) -> Tensor:
        """Wait for the copy and return it: [B, n]."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._host.t().contiguous()


class DecodeState:
    """Inputs and outputs of a decode step, at fixed addresses."""

    def __init__(self, batch: int, slots: int, device: torch.device) -> None:
        # As in make_cache: regions treat inference tensors as another kind of input.
        with torch.inference_mode(False), device:
            self.tokens = torch.zeros(batch, 1, dtype=torch.int64)  # inputs of the next step
            self.positions = torch.zeros(batch, 1, dtype=torch.int64)  # of ``tokens``
            self.finished = torch.zeros(batch, dtype=torch.bool)  # rows that have met an end token
            self.step = torch.zeros(1, dtype=torch.int64)  # number of chosen tokens
            self.output = torch.zeros(slots, batch, dtype=torch.int64)  # chosen tokens, by step
            self.noise = torch.zeros(slots, batch)  # a uniform number for each draw
            self.ends = torch.full((MOST_ENDS,), -1, dtype=torch.int64)  # tokens that end a row; -1 for none
            self.pad = torch.zeros((), dtype=torch.int64)
            self.ended = torch.zeros(batch + 1, dtype=torch.int32)  # counts the kernel's programs of a row, then rows
            self.temperature = torch.ones(())
            self.top_k = torch.ones((), dtype=torch.int64)
            self.top_p = torch.ones(())

    def begin(self, options: GenerationOptions, ends: tuple[int, ...], config: Any) -> None:
        """Set up an answer. All options are written to tensors, so that one captured step serves them all."""
        self.finished.fill_(False)
        self.step.zero_()
        self.ends.copy_(torch.tensor([*ends, *([-1] * (MOST_ENDS - len(ends)))]))
        self.pad.fill_(config.pad_token_id if config.pad_token_id is not None else next(iter(ends), 0))
        if options.greedy:
            return
        self.temperature.fill_(options.temperature)
        self.top_k.fill_(options.top_k or config.vocab_size)
        # A top_p above 1, so that rounding drops no token if all are kept.
        self.top_p.fill_(2.0 if options.top_p in (None, 1) else options.top_p)  # type: ignore[arg-type]
        # Drawn on the CPU for the whole answer, so that all devices get the same numbers.
        steps, generator = options.max_new_tokens, torch.Generator("cpu")
        if options.seed is None:
            generator.seed()
        else:
            generator.manual_seed(options.seed)
        self.noise[:steps].copy_(torch.rand(steps, self.noise.shape[1], generator=generator, device="cpu"))


def decode_step(model: GenerationMixin, cache: KVCache, state: DecodeState, greedy: bool) -> None:
    """Feed each row's last token and choose the next, on the device. The CUDA graph of decoding captures this call."""
    logits = model(state.tokens, position_ids=state.positions, cache=cache, logits_to_keep=1)
    accept(state, logits[:, -1], greedy)


def accept(state: DecodeState, logits: Tensor, greedy: bool) -> None:
    """Choose a token for each row from logits [B, V], store it and advance. Ended rows get padding and do not advance.

    The greedy choice is the first of the most likely tokens.
    """
    if greedy and kernels_run(logits):
        from zoo.ops.triton.decode import accept_greedy

        accept_greedy(
            logits, state.tokens, state.positions, state.finished, state.step, state.output, state.ends, state.pad,
            state.ended,
        )  # fmt: skip
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


def sample(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, uniform: Tensor) -> Tensor:
    """Draw a token [B] int64 per row of logits [B, V]: first top-k, then top-p of the rest, as in transformers.

    Inverse transform sampling: ``uniform`` [B] in [0, 1) is looked up in the cumulative probabilities, so that a
    captured step needs no random state. The options are scalars on the device; ``top_p`` 2 keeps all tokens.
    """
    scaled, order = (logits.float() / temperature).sort(dim=-1, descending=True)
    weights = scaled.softmax(-1)
    weights = weights * (torch.arange(weights.shape[-1], device=weights.device) < top_k)
    weights = weights / weights.sum(-1, keepdim=True)
    # A token is kept if all more likely tokens have less than the wanted mass, so the first is always kept.
    weights = weights * (weights.cumsum(-1) - weights < top_p)
    mass = weights.cumsum(-1)
    place = (mass <= uniform[:, None] * mass[:, -1:]).sum(-1, keepdim=True)
    # Rounding could select a place after the last token with a weight.
    place = torch.minimum(place, ((weights > 0).sum(-1, keepdim=True) - 1).clamp(min=0))  # NaN has no weight
    return order.gather(-1, place).squeeze(-1)


def prompt_rows(tokens: Prompts, vocab_size: int) -> Rows:
    """Token ids of each row; TypeError or ValueError if a row is empty or has an invalid token."""
    if isinstance(tokens, Tensor):
        validate.tensor("tokens", tokens, "B T", kinds="integer")
        tokens = tokens.tolist()
    if not isinstance(tokens, Sequence) or isinstance(tokens, str):
        raise TypeError(f"tokens is a {type(tokens).__name__}, expected a tensor [batch, tokens] or a list of lists")
    if not tokens:
        raise ValueError("tokens has no rows")
    rows: Rows = []
    for index, given in enumerate(tokens):
        row = given.tolist() if isinstance(given, Tensor) else given
        if not isinstance(row, Sequence) or isinstance(row, str):
            raise TypeError(f"row {index} of tokens is a {type(row).__name__}, expected a list of token ids: [[1, 2]]")
        if not row:
            raise ValueError(f"row {index} of tokens is empty: give it a first token")
        if wrong := [each for each in row if not validate.is_count(each, least=0) or each >= vocab_size]:
            raise ValueError(f"row {index} of tokens holds {wrong[0]!r}, expected integers from 0 to {vocab_size - 1}")
        rows.append(list(row))
    return rows


def _in_pieces(rows: Rows, starts: list[int], buckets: Sequence[int]) -> Iterator[tuple[Tensor, Tensor]]:
    """Split rows into pieces of tokens and positions [B, bucket] for the model, from positions ``starts`` on."""
    # A finished row repeats its last token at the same position, which rewrites the same keys and values. So the last
    # column has the last token of every row.
    longest, done = max(map(len, rows)), 0
    while done < longest:
        size = next((bucket for bucket in buckets if bucket >= longest - done), buckets[-1])
        places = [[min(done + index, len(row) - 1) for index in range(size)] for row in rows]
        tokens = [[row[place] for place in of_row] for row, of_row in zip(rows, places, strict=True)]
        positions = torch.tensor(places) + torch.tensor(starts)[:, None]
        yield torch.tensor(tokens), positions
        done += size
