"""transformers' arms (as shipped, at its documented best, the reference), and what a decoder must do and move.

Legend: B batch, T tokens of a prompt, S slots of a cache, K key and value heads, D width of a head, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.families.base import draw, parameters_of
from benchmarks.families.llm_steps import Past, Task, cache_argument
from zoo.llm import LLM, LLMConfig
from zoo.llm.convert import upstream_config

BYTES_FORMULA = (
    "Every weight is read once, the embedding only where the output product shares it, since of its own only the rows "
    "of the tokens are read, which are left out; a decoding step reads the keys and values of the slots before its "
    "position, three quarters of the cache on average, and writes those of its token; a prefill writes those of its "
    "prompt; an answer is both, one after the other; the logits of last tokens are written. Activations are taken to "
    "stay in the caches of the chip."
)
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


def shapes(config: LLMConfig) -> dict[str, tuple[int, ...]]:
    """Of all weights under transformers' names, tied ones once."""
    return {name: tuple(parameter.shape) for name, parameter in skeleton(config).named_parameters()}


def build(config: LLMConfig, weights: Mapping[str, Tensor]) -> nn.Module:
    """The library's model with these weights, which become its own."""
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
    """Its frequencies are no weights, and those of a skeleton are not there."""
    return type(model.model.rotary_emb)(model.config).to(device)


def without_mask(model: Any) -> None:
    """Leave the mask of a prompt to torch's causal attention: for prompts without padding, at transformers' best.

    By its own means transformers looks at the positions for packed prompts, which synchronises, or hands over a mask
    where it cannot look (compiled, or captured), and with a mask there is no flash attention. An attention function
    that is registered without a mask function gets none.
    """
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register(_UNMASKED, sdpa_attention_forward)
    model.set_attn_implementation(_UNMASKED)


def without_scores(model: Any) -> None:
    """:func:`without_mask` for training in float32: never hold a layer's scores [B, H, T, T], 128 GiB of 32k tokens.

    transformers hands grouped queries over as they are, and of those torch has kernels for 16-bit types alone; in
    float32 it falls back to the one that holds all scores. Here each key and value is repeated for its queries first.
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
    """Stands in for a cache in one layer: hands out what was cached before the tokens, and then the tokens'."""

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
    """Eager upstream in float32 on these weights, a layer in memory at a time.

    Returns:
        Logits [B, V] after the last token, float32.
    """
    model: Any = skeleton(config)
    embedding = weights["model.embed_tokens.weight"]
    x = torch.nn.functional.embedding(tokens, embedding).float()
    del embedding
    positions = torch.arange(task.first, task.first + task.tokens, device=tokens.device)[None]
    rotary = _rotary(model, tokens.device)(x, positions)
    for index, layer in enumerate(model.model.layers):
        _fill(layer, weights, f"model.layers.{index}.")
        # Without a mask a prompt is causal, and a single token sees all that there is.
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
    return torch.nn.functional.linear(model.model.norm(x[:, -1]), weights[head].float())


def _fill(module: nn.Module, weights: Mapping[str, Tensor], prefix: str) -> None:
    state = {name.removeprefix(prefix): weights[name].float() for name in weights if name.startswith(prefix)}
    module.load_state_dict(state, strict=True, assign=True)


# --- tokens and cached keys and values from a seed ---


def draw_past(
    config: LLMConfig, task: Task, layer: int, *, seed: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Keys and values of a layer that a decoding step finds in its cache, each [B, K, S, D]."""
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


def parameters(config: LLMConfig) -> int:
    """All weights; tied ones once."""
    return parameters_of(LLM, config)


def flops(config: LLMConfig, task: Task) -> int:
    """Multiply-adds counted as two: products of every token, the output product of the last, scores and their sums.

    Attention counts the pairs that are seen: of a prompt half of all. Element-wise work is not counted, as torch's own
    counter does not.
    """
    fed = task.batch * task.tokens
    outputs = task.passes * task.batch
    products = 2 * fed * config.num_hidden_layers * layer_matrices(config) + 2 * outputs * vocabulary(config)
    pairs = round(fed * task.seen)
    return products + 4 * pairs * config.num_hidden_layers * config.num_attention_heads * config.head_dim


def bytes_moved(config: LLMConfig, task: Task, itemsize: int) -> int:
    """Fewest bytes that one call moves through device memory, as :data:`BYTES_FORMULA` says."""
    weights = parameters(config) - (0 if config.tie_word_embeddings else vocabulary(config))
    # A decoding step reads what lies before its token and writes its own; a prefill reads its own from the chip.
    slots = {"decode": task.seen, "prefill": task.length, "answer": 2 * task.length + 1}[task.kind]
    logits = task.batch * config.vocab_size
    return round((task.passes * (weights + logits) + task.batch * slots * slot_values(config)) * itemsize)


def slot_values(config: LLMConfig) -> int:
    """Keys and values of one token, of all layers."""
    return 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
