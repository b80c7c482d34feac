"""A conversation of growing length over one cache: prompts and answers in turns, compiled and captured once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zoo.engine.cuda_graph import cuda_graph as capture
from zoo.engine.graphed_step import GraphedStep
from zoo.llm.cache import KVCache
from zoo.llm.checks import check_is_cache
from zoo.llm.decode import MOST_ENDS, DecodeState, accept, decode_step
from zoo.llm.model import LLM
from zoo.llm.prompts import Prompts, from_start, pieces, prompt_rows
from zoo.llm.sampling import Sampling, draw_uniform, end_tokens
from zoo.validate import check_seed

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
