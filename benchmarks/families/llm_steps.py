"""What one call of an arm does, both libraries alike: from tokens to the next tokens, all of it on the device.

Shapes: B batch, T tokens, S slots of the cache, K key and value heads, D width of a head, V vocabulary, L layers.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zoo.llm import LLM
from zoo.llm.generate import DecodeState, accept

# A layer's index to its keys and values, [B, K, S, D] each.
Past = Callable[[int], tuple[Tensor, Tensor]]

_INPUT = re.compile(r"(?P<kind>decode|prefill|answer)-(?P<batch>\d+)x(?P<length>\d+)")


@dataclass(frozen=True, kw_only=True)
class Task:
    """What one call does.

    Args:
        kind: ``decode``: one token for each row, over a cache that is half full at least. ``prefill``: a prompt from
            its first token on. ``answer``: a prompt, and one token more over the cache that it left.
        batch: Rows.
        length: Slots of the cache (decode) or tokens of the prompt (prefill, answer).
    """

    kind: str
    batch: int
    length: int

    @property
    def tokens(self) -> int:
        """Tokens that one call feeds in each row."""
        return {"decode": 1, "prefill": self.length, "answer": self.length + 1}[self.kind]

    @property
    def slots(self) -> int:
        """Slots of the cache: a prompt leaves as much room for an answer as it takes."""
        return self.length if self.kind == "decode" else 2 * self.length

    @property
    def first(self) -> int:
        """Position of the first token that is fed."""
        return self.length // 2 if self.kind == "decode" else 0

    @property
    def stride(self) -> int:
        """How far a decoding step moves on in the upper half of the cache, round and round.

        Near the golden section and without a common divisor, so that all positions are met, and any few steps on end
        meet early and late ones alike: rounds of a race then hold equal work.
        """
        half = self.length - self.first
        steps = (step for step in range(1, half) if math.gcd(step, half) == 1)
        return min(steps, key=lambda step: abs(step - 0.618 * half))

    @property
    def seen(self) -> float:
        """Tokens that a token attends to, itself included, on average over the tokens of all calls."""
        last = self.length if self.kind == "answer" else self.length - 1
        return (self.first + last) / 2 + 1

    @property
    def passes(self) -> int:
        """How often a call goes through the model."""
        return 2 if self.kind == "answer" else 1


def task_of(name: str) -> Task:
    """The task called ``decode-BxS``, ``prefill-BxT`` or ``answer-BxT``.

    Raises:
        ValueError: If the name is none of them.
    """
    found = _INPUT.fullmatch(name)
    if found is None or int(found["batch"]) < 1 or int(found["length"]) < 4:
        raise ValueError(
            f"input {name!r} is none of decode-BATCHxSLOTS, prefill-BATCHxTOKENS and answer-BATCHxTOKENS (4 or more)"
        )
    return Task(kind=found["kind"], batch=int(found["batch"]), length=int(found["length"]))


class Step(nn.Module):
    """What both libraries' steps share: the tokens that are fed next, and where they go."""

    tokens: Tensor
    positions: Tensor

    def __init__(self, task: Task, tokens: Tensor) -> None:
        super().__init__()
        self.task = task
        self.stride = task.stride  # a search, which a compiler cannot trace
        self.first_tokens = tokens[:, -1:].cpu()
        self.hold("tokens", torch.empty_like(tokens[:, -1:]))
        self.hold("positions", torch.empty_like(self.tokens))

    def hold(self, name: str, tensor: Tensor) -> None:
        """Make a tensor part of the step, in memory that never moves."""
        self.register_buffer(name, tensor, persistent=False)
        torch._dynamo.mark_static_address(tensor)

    def reset(self) -> None:
        """Make the next call the first one again."""
        self.tokens.copy_(self.first_tokens)
        self.positions.fill_(self.task.first)

    def move_on(self, by: int) -> None:
        """Move on within the upper half of the cache."""
        moved = self.positions + by
        half = self.task.length - self.task.first
        self.positions.copy_(torch.where(moved < self.task.length, moved, moved - half))


class ZooStep(Step):
    """Tokens chosen as ``LLM.generate`` chooses them, by the zoo's operator."""

    regions = LLM.regions

    def __init__(self, model: LLM, task: Task, tokens: Tensor) -> None:
        super().__init__(task, tokens)
        self.model = model
        self.state = DecodeState(task.batch, 1, tokens.device)
        self.state.tokens, self.state.positions = self.tokens, self.positions
        for name in ("finished", "step", "output", "ends", "pad"):
            torch._dynamo.mark_static_address(getattr(self.state, name))
        self.cache = model.make_cache(task.batch, task.slots)
        for layer in self.cache.layers:
            torch._dynamo.mark_static_address(layer)

    def accept(self, logits: Tensor) -> None:
        """Take the most likely tokens of logits [B, V] as the next, and move on by one."""
        accept(self.state, logits, greedy=True)
        self.state.step.zero_()


class ZooDecode(ZooStep):
    """A token for each row from the zoo's model over its cache, which holds ``past``."""

    def __init__(self, model: LLM, task: Task, tokens: Tensor, past: Past) -> None:
        super().__init__(model, task, tokens)
        self.past = past
        self.reset()

    def reset(self) -> None:
        """Make the next call the first one again, and the cache what it was."""
        super().reset()
        for index, layer in enumerate(self.cache.layers):
            for half, drawn in zip(layer, self.past(index), strict=True):
                half.copy_(drawn)

    def forward(self) -> Tensor:
        """Logits [B, V] of the tokens after the ones that were fed."""
        logits = self.model(self.tokens, position_ids=self.positions, cache=self.cache, logits_to_keep=1)[:, -1]
        self.accept(logits)
        self.move_on(self.stride - 1)
        return logits


class ZooPrefill(ZooStep):
    """A prompt through the zoo's model into its cache."""

    def __init__(self, model: LLM, task: Task, tokens: Tensor) -> None:
        super().__init__(model, task, tokens)
        self.reset()

    def forward(self, input_ids: Tensor) -> Tensor:
        """Logits [B, V] of the token after the prompt [B, T]."""
        logits = self.model(input_ids, cache=self.cache, logits_to_keep=1)[:, -1]
        self.accept(logits)
        return logits


class ZooAnswer(ZooPrefill):
    """A prompt through the zoo's model into its cache, and one token more from there."""

    last: Tensor

    def __init__(self, model: LLM, task: Task, tokens: Tensor) -> None:
        super().__init__(model, task, tokens)
        self.hold("last", torch.full_like(self.positions, task.length))

    def forward(self, input_ids: Tensor) -> Tensor:
        """Logits [B, V] of the token after the prompt and the one behind it, [B, T + 1] together."""
        super().forward(input_ids[:, :-1])
        # Not the token that was chosen, which may be another in another dtype.
        logits = self.model(input_ids[:, -1:], position_ids=self.last, cache=self.cache, logits_to_keep=1)[:, -1]
        self.accept(logits)
        return logits


def cache_argument(model: nn.Module) -> str:
    """What a model of transformers, or a layer, calls its cache: ``cache`` from 5.24 on, ``past_key_values`` before."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


class _UpstreamCached(Step):
    """Transformers' model with its ``StaticCache``."""

    def __init__(self, model: nn.Module, task: Task, tokens: Tensor) -> None:
        super().__init__(task, tokens)
        from transformers import StaticCache

        config: Any = model.config
        self.model = model
        self.cache: Any = StaticCache(config=config, max_cache_len=task.slots)
        self.cache.early_initialization(
            batch_size=task.batch,
            num_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            dtype=next(model.parameters()).dtype,
            device=tokens.device,
        )
        self.held = {cache_argument(model): self.cache}
        # Each layer of the cache counts its tokens itself.
        self.lengths: list[Tensor] = [layer.cumulative_length for layer in self.cache.layers]


class UpstreamDecode(_UpstreamCached):
    """A token for each row from transformers' model over its ``StaticCache``, which holds ``past``."""

    def __init__(self, model: nn.Module, task: Task, tokens: Tensor, past: Past) -> None:
        super().__init__(model, task, tokens)
        self.past = past
        self.reset()

    def reset(self) -> None:
        """Make the next call the first one again, and the cache what it was."""
        super().reset()
        for index, layer in enumerate(self.cache.layers):
            for held, drawn in zip((layer.keys, layer.values), self.past(index), strict=True):
                held.copy_(drawn)
            layer.cumulative_length.fill_(self.task.first)

    def forward(self) -> Tensor:
        """Logits [B, V] of the tokens after the ones that were fed."""
        output = self.model(
            input_ids=self.tokens, position_ids=self.positions, **self.held, use_cache=True, logits_to_keep=1
        )
        logits: Tensor = output.logits[:, -1]
        self.tokens.copy_(logits.argmax(-1, keepdim=True))
        self.move_on(self.stride)
        # The counts go where the positions went: one launch for all layers, so that it costs next to nothing.
        torch._foreach_copy_(self.lengths, [self.positions[0, 0]] * len(self.lengths))
        return logits


class UpstreamAnswer(_UpstreamCached):
    """A prompt through transformers' model into its ``StaticCache``, and one token more from there."""

    last: Tensor

    def __init__(self, model: nn.Module, task: Task, tokens: Tensor) -> None:
        super().__init__(model, task, tokens)
        self.hold("last", torch.full_like(self.positions, task.length))
        self.reset()

    def forward(self, input_ids: Tensor) -> Tensor:
        """Logits [B, V] of the token after the prompt and the one behind it, [B, T + 1] together."""
        torch._foreach_zero_(self.lengths)
        held = {**self.held, "use_cache": True, "logits_to_keep": 1}
        self.tokens.copy_(self.model(input_ids=input_ids[:, :-1], **held).logits[:, -1].argmax(-1, keepdim=True))
        logits: Tensor = self.model(input_ids=input_ids[:, -1:], position_ids=self.last, **held).logits[:, -1]
        self.tokens.copy_(logits.argmax(-1, keepdim=True))
        return logits


class UpstreamPrefill(Step):
    """A prompt through transformers' model, which keeps no keys and values: less work than ours, and its fastest."""

    def __init__(self, model: nn.Module, task: Task, tokens: Tensor) -> None:
        super().__init__(task, tokens)
        self.model = model
        self.reset()

    def forward(self, input_ids: Tensor) -> Tensor:
        """Logits [B, V] of the token after the prompt [B, T]."""
        logits: Tensor = self.model(input_ids=input_ids, use_cache=False, logits_to_keep=1).logits[:, -1]
        self.tokens.copy_(logits.argmax(-1, keepdim=True))
        return logits
