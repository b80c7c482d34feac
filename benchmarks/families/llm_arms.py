"""One call of an arm, in both libraries; transformers' arms; a decoder's FLOPs and bytes.

Shapes: B batch, T tokens, S slots of the cache, K key and value heads, D width of a head, V vocabulary, L layers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.families.base import cache_argument, draw, parameters_of
from zoo.llm import LLM, LLMConfig
from zoo.llm.convert import upstream_config
from zoo.llm.generate import DecodeState, accept

BYTES_FORMULA = (
    "Every weight is read once, the embedding only where the output product shares it, since of its own only the rows "
    "of the tokens are read, which are left out; a decoding step reads the keys and values of the slots before its "
    "position, three quarters of the cache on average, and writes those of its token; a prefill writes those of its "
    "prompt; an answer is both, one after the other; the logits of last tokens are written. Activations are taken to "
    "stay in the caches of the chip."
)
# Number of tokens that occur, and the probability that a token's fixed successor follows it.
WORDS, FOLLOWED = 512, 0.9

# A layer's index to its keys and values, [B, K, S, D] each.
Past = Callable[[int], tuple[Tensor, Tensor]]

_INPUT = re.compile(r"(?:(?P<kind>decode|prefill|answer)-)?(?P<batch>\d+)x(?P<length>\d+)")


@dataclass(frozen=True, kw_only=True)
class Task:
    """The work of one call, or one training step, with ``batch`` rows.

    ``decode``: one token per row, over a cache of ``length`` slots that is at least half full. ``prefill``: prompts of
    ``length`` tokens. ``answer``: a prompt, and one more token over its cache. No kind: rows to train on.
    """

    kind: str | None
    batch: int
    length: int

    @property
    def tokens(self) -> int:
        """Tokens that one call feeds in each row."""
        return {"decode": 1, "answer": self.length + 1}.get(self.kind or "", self.length)

    @property
    def slots(self) -> int:
        """Slots of the cache: a prompt leaves room for an answer of equal length."""
        return 2 * self.length if self.kind in ("prefill", "answer") else self.length

    @property
    def first(self) -> int:
        return self.length // 2 if self.kind == "decode" else 0

    @property
    def stride(self) -> int:
        """Step of the position, modulo the upper half of the cache, per decoding step.

        It is near the golden section and coprime to the range, so that all positions occur, and any few consecutive
        steps mix early and late positions: rounds of a race then have equal work.
        """
        half = self.length - self.first
        steps = (step for step in range(1, half) if math.gcd(step, half) == 1)
        return min(steps, key=lambda step: abs(step - 0.618 * half))

    @property
    def seen(self) -> float:
        """Average number of tokens that a token attends to, including itself, over the tokens of all calls."""
        last = self.length if self.kind == "answer" else self.length - 1
        return (self.first + last) / 2 + 1

    @property
    def passes(self) -> int:
        return 2 if self.kind == "answer" else 1


def task_of(name: str) -> Task:
    """The task called ``decode-BxS``, ``prefill-BxT``, ``answer-BxT`` or ``BxT``."""
    found = _INPUT.fullmatch(name)
    assert found is not None, name
    return Task(kind=found["kind"], batch=int(found["batch"]), length=int(found["length"]))


class Step(nn.Module):
    """Common state of both libraries' steps: the next tokens, their positions, and the cache's contents."""

    logits: Any  # computes the logits after ids, and stores the next ``tokens``
    tokens: Tensor
    positions: Tensor
    last: Tensor

    def __init__(self, model: nn.Module, task: Task, tokens: Tensor, past: Past | None) -> None:
        super().__init__()
        self.model: Any = model
        self.task = task
        self.past: Any = past
        self.stride = task.stride  # a search, which a compiler cannot trace
        self.first_tokens = tokens[:, -1:].cpu()
        self.hold("tokens", torch.empty_like(tokens[:, -1:]))
        self.hold("positions", torch.empty_like(self.tokens))
        self.hold("last", torch.full_like(self.tokens, task.length))  # position of an answer's token

    def forward(self, input_ids: Tensor) -> Tensor:
        """Logits [B, V] of the token after the prompt [B, T]."""
        logits: Tensor = self.logits(input_ids)
        return logits

    def layers(self) -> list[tuple[Tensor, Tensor]]:
        return []

    def hold(self, name: str, tensor: Tensor) -> None:
        """Make a tensor part of the step, at a fixed address."""
        self.register_buffer(name, tensor, persistent=False)
        torch._dynamo.mark_static_address(tensor)

    def reset(self) -> None:
        """Restore the position of the first call and the cache's initial contents."""
        self.tokens.copy_(self.first_tokens)
        self.positions.fill_(self.task.first)
        for index, layer in enumerate(self.layers() if self.past is not None else ()):
            for held, drawn in zip(layer, self.past(index), strict=True):
                held.copy_(drawn)

    def move_on(self, by: int) -> None:
        """Advance the position within the upper half of the cache."""
        moved = self.positions + by
        half = self.task.length - self.task.first
        self.positions.copy_(torch.where(moved < self.task.length, moved, moved - half))


class ZooStep(Step):
    """A prompt through the zoo's model into its cache; tokens are chosen as in ``LLM.generate``."""

    regions = LLM.regions

    def __init__(self, model: LLM, task: Task, tokens: Tensor, past: Past | None = None) -> None:
        super().__init__(model, task, tokens, past)
        self.state = DecodeState(task.batch, 1, tokens.device)
        self.state.tokens, self.state.positions = self.tokens, self.positions
        for name in ("finished", "step", "output", "ends", "pad", "ended"):
            torch._dynamo.mark_static_address(getattr(self.state, name))
        self.cache = model.make_cache(task.batch, task.slots)
        for layer in self.cache.layers:
            torch._dynamo.mark_static_address(layer)
        self.reset()

    def layers(self) -> list[tuple[Tensor, Tensor]]:
        return [(layer[0], layer[1]) for layer in self.cache.layers]

    def logits(self, ids: Tensor, positions: Tensor | None = None) -> Tensor:
        """Logits [B, V] after ids [B, T]; the most likely tokens become the next tokens, at the next position."""
        logits: Tensor = self.model(ids, position_ids=positions, cache=self.cache, logits_to_keep=1)[:, -1]
        accept(self.state, logits, greedy=True)
        self.state.step.zero_()
        return logits


class ZooDecode(ZooStep):
    """A token for each row from the zoo's model over its cache, which holds ``past``."""

    def forward(self) -> Tensor:  # type: ignore[override]
        """Logits [B, V] of the tokens after the ones that were fed."""
        logits = self.logits(self.tokens, self.positions)
        self.move_on(self.stride - 1)
        return logits


class ZooAnswer(ZooStep):
    """A prompt through the zoo's model into its cache, then one more token."""

    def forward(self, input_ids: Tensor) -> Tensor:
        """Logits [B, V] of the token after the prompt and the one behind it, [B, T + 1] together."""
        self.logits(input_ids[:, :-1])
        # A given token instead of the chosen one, which may differ between dtypes.
        return self.logits(input_ids[:, -1:], self.last)


class UpstreamStep(Step):
    """A prompt through transformers' model without a cache: its fastest variant, and less work than the zoo's.

    Other steps use its ``StaticCache``.
    """

    def __init__(self, model: nn.Module, task: Task, tokens: Tensor, past: Past | None = None) -> None:
        super().__init__(model, task, tokens, past)
        self.held: dict[str, Any] = {"use_cache": False, "logits_to_keep": 1}
        if task.kind != "prefill":
            from transformers import StaticCache

            config: Any = model.config
            self.cache: Any = StaticCache(config=config, max_cache_len=task.slots)
            dtype, device = next(model.parameters()).dtype, tokens.device
            heads, width = config.num_key_value_heads, config.head_dim
            self.cache.early_initialization(task.batch, heads, width, dtype=dtype, device=device)
            self.held |= {"use_cache": True, cache_argument(model): self.cache}
            # Each layer of the cache counts its tokens itself.
            self.lengths: list[Tensor] = [layer.cumulative_length for layer in self.cache.layers]
        self.reset()

    def layers(self) -> list[tuple[Tensor, Tensor]]:
        return [(layer.keys, layer.values) for layer in self.cache.layers]

    def logits(self, ids: Tensor, **positions: Tensor) -> Tensor:
        """Logits [B, V] after ids [B, T]; the most likely tokens become the next tokens."""
        logits: Tensor = self.model(input_ids=ids, **positions, **self.held).logits[:, -1]
        self.tokens.copy_(logits.argmax(-1, keepdim=True))
        return logits


class UpstreamDecode(UpstreamStep):
    """A token for each row from transformers' model over its ``StaticCache``, which holds ``past``."""

    def reset(self) -> None:
        super().reset()
        for length in self.lengths:
            length.fill_(self.task.first)

    def forward(self) -> Tensor:  # type: ignore[override]
        """Logits [B, V] of the tokens after the ones that were fed."""
        logits = self.logits(self.tokens, position_ids=self.positions)
        self.move_on(self.stride)
        # The cache's counts follow the positions, by one cheap launch for all layers.
        torch._foreach_copy_(self.lengths, [self.positions[0, 0]] * len(self.lengths))
        return logits


class UpstreamAnswer(UpstreamStep):
    """A prompt through transformers' model into its ``StaticCache``, then one more token."""

    def forward(self, input_ids: Tensor) -> Tensor:
        """Logits [B, V] of the token after the prompt and the one behind it, [B, T + 1] together."""
        torch._foreach_zero_(self.lengths)
        self.logits(input_ids[:, :-1])
        return self.logits(input_ids[:, -1:], position_ids=self.last)


# {kind of a task: step}.
ZOO = {"decode": ZooDecode, "prefill": ZooStep, "answer": ZooAnswer}
UPSTREAM = {"decode": UpstreamDecode, "prefill": UpstreamStep, "answer": UpstreamAnswer}

# --- transformers' arms: as shipped, at its documented best, and the reference ---

# The name of torch's attention without transformers' masks, among transformers' own.
_UNMASKED = "sdpa_without_mask"
_UNGROUPED = "sdpa_without_groups"


def skeleton(config: LLMConfig) -> nn.Module:
    """``LlamaForCausalLM`` or its like in eval mode, without memory for its weights."""
    import transformers

    theirs = upstream_config(config)
    with torch.device("meta"):
        model: nn.Module = getattr(transformers, theirs.architectures[0])(theirs)
    return model.eval()


def build(config: LLMConfig, weights: Mapping[str, Tensor]) -> nn.Module:
    """The library's model; it takes ownership of these weights."""
    model: Any = skeleton(config)
    state = dict(weights)
    if config.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, strict=True, assign=True)
    if config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
    model.model.rotary_emb = _rotary(model, model.model.embed_tokens.weight.device)
    return model.requires_grad_(False)


def _rotary(model: Any, device: torch.device) -> nn.Module:
    """The model's rotary module, rebuilt: its frequencies are not weights, and a skeleton lacks them."""
    return type(model.model.rotary_emb)(model.config).to(device)


def without_mask(model: Any) -> None:
    """Use torch's causal attention instead of a prompt's mask: transformers at its best for prompts without padding.

    By default transformers checks the positions for packed prompts, which synchronises. If it cannot check (compiled or
    captured) it passes a mask, which rules out flash attention. An attention function registered without a mask
    function gets no mask.
    """
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register(_UNMASKED, sdpa_attention_forward)
    model.set_attn_implementation(_UNMASKED)


def without_scores(model: Any) -> None:
    """:func:`without_mask` for training in float32: never hold a layer's scores [B, H, T, T], 128 GiB of 32k tokens.

    transformers passes grouped queries to torch, whose kernels for them take only 16-bit types; in float32 torch falls
    back to a kernel that materialises all scores. Here keys and values are first repeated for their queries.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(_UNGROUPED, _ungrouped_attention)
    model.set_attn_implementation(_UNGROUPED)


def _ungrouped_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, scaling: float | None = None, **__: Any
) -> tuple[Tensor, None]:
    key, value = (x.repeat_interleave(module.num_key_value_groups, dim=1) for x in (key, value))
    out = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
    return out.transpose(1, 2).contiguous(), None


class _PastOnly:
    """A stand-in for one layer's cache: returns the cached keys and values, followed by the new tokens'."""

    def __init__(self, past: Past, first: int) -> None:
        self.past, self.first = past, first

    def update(self, key: Tensor, value: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        before = (tensor[:, :, : self.first].to(key.dtype) for tensor in self.past(layer))
        joined = (torch.cat(pair, dim=2) for pair in zip(before, (key, value), strict=True))
        return next(joined), next(joined)


@torch.no_grad()
def reference_output(
    config: LLMConfig, weights: Mapping[str, Tensor], task: Task, tokens: Tensor, past: Past | None
) -> Tensor:
    """Eager upstream in float32, a layer in memory at a time: logits [B, V] after the last token."""
    model: Any = skeleton(config)
    x = nn.functional.embedding(tokens, weights["model.embed_tokens.weight"]).float()
    positions = torch.arange(task.first, task.first + task.tokens, device=tokens.device)[None]
    rotary = _rotary(model, tokens.device)(x, positions)
    for index, layer in enumerate(model.model.layers):
        _fill(layer, weights, f"model.layers.{index}.")
        # Without a mask a prompt is causal, and a single token sees the whole cache.
        x = layer(
            x,
            attention_mask=None,
            position_ids=positions,
            **{cache_argument(layer): None if past is None else _PastOnly(past, task.first)},
            use_cache=past is not None,
            position_embeddings=rotary,
        )
        layer.to("meta")
    _fill(model.model.norm, weights, "model.norm.")
    head = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
    return nn.functional.linear(model.model.norm(x[:, -1]), weights[head].float())


def _fill(module: nn.Module, weights: Mapping[str, Tensor], prefix: str) -> None:
    state = {name.removeprefix(prefix): weights[name].float() for name in weights if name.startswith(prefix)}
    module.load_state_dict(state, strict=True, assign=True)


# --- tokens, and cached keys and values, from a seed ---


def draw_past(
    config: LLMConfig, task: Task, layer: int, *, seed: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Initial keys and values of a layer's cache for decoding, each [B, K, S, D]."""
    shape = (task.batch, config.num_key_value_heads, task.slots, config.head_dim)
    key = draw(shape, f"keys of layer {layer}", seed=seed, dtype=dtype, device=device)
    return key, draw(shape, f"values of layer {layer}", seed=seed, dtype=dtype, device=device)


def draw_tokens(config: LLMConfig, task: Task, *, seed: int, device: torch.device) -> Tensor:
    """The tokens of the first call, [B, T] int64, uniformly drawn; the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(config.vocab_size, (task.batch, task.tokens), generator=generator).to(device)


# --- what a decoder must do and move ---


def layer_matrices(config: LLMConfig) -> int:
    """Weights of one layer's products."""
    attention = (2 * config.num_attention_heads + 2 * config.num_key_value_heads) * config.head_dim
    return config.hidden_size * (attention + 3 * config.intermediate_size)


def vocabulary(config: LLMConfig) -> int:
    """Weights of the output product."""
    return config.vocab_size * config.hidden_size


def flops(config: LLMConfig, task: Task) -> int:
    """FLOPs (a multiply-add counts as two): products of every token, attention, the output product.

    Attention counts visible pairs: in a prompt half of all pairs. Inference computes only the last tokens' logits.
    """
    fed = task.batch * task.tokens
    outputs = task.passes * task.batch if task.kind else fed
    products = 2 * fed * config.num_hidden_layers * layer_matrices(config) + 2 * outputs * vocabulary(config)
    pairs = round(fed * task.seen)
    return products + 4 * pairs * config.num_hidden_layers * config.num_attention_heads * config.head_dim


def bytes_moved(config: LLMConfig, task: Task, itemsize: int) -> int:
    weights = parameters_of(LLM, config) - (0 if config.tie_word_embeddings else vocabulary(config))
    # A decoding step reads the earlier slots and writes its own. A prefill has its own slots on the chip.
    slots = {"decode": task.seen, "prefill": task.length, "answer": 2 * task.length + 1}[str(task.kind)]
    logits = task.batch * config.vocab_size
    return round((task.passes * (weights + logits) + task.batch * slots * slot_values(config)) * itemsize)


def slot_values(config: LLMConfig) -> int:
    """Keys and values of one token, of all layers."""
    return 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim


class Words:
    """Learnable sequences: few words of the vocabulary, each mostly followed by a fixed successor."""

    def __init__(self, vocabulary: int, *, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        count = min(WORDS, vocabulary)
        self.words = torch.randperm(vocabulary, generator=generator)[:count]
        self.next = torch.randperm(count, generator=generator)

    def draw(self, task: Task, *, seed: int) -> Tensor:
        """[B, T] int64 on the CPU."""
        generator = torch.Generator().manual_seed(seed)
        words = torch.randint(len(self.words), (task.batch, task.length), generator=generator)
        follows = torch.rand(task.batch, task.length, generator=generator) < FOLLOWED
        rows, after = words.tolist(), self.next.tolist()
        for row, follow in zip(rows, follows.tolist(), strict=True):
            for place in range(1, task.length):
                if follow[place]:
                    row[place] = after[row[place - 1]]
        return self.words[torch.tensor(rows)]
