"""What can be known to be wrong before anything runs. Values are read on the host only: no device is waited for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from zoo.llm.cache import KVCache
from zoo.llm.config import LLMConfig
from zoo.modules import bounds_outside, on_host

if TYPE_CHECKING:
    from zoo.llm.model import LLM

_INTEGERS = (torch.int64, torch.int32)


def check_call(
    model: LLM,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    cache: KVCache | None,
    logits_to_keep: int | Tensor,
) -> None:
    """Check the inputs of ``LLM.forward``."""
    if not isinstance(input_ids, Tensor):
        raise TypeError(f"input_ids is a {type(input_ids).__name__}, expected a tensor [batch, tokens]")
    if input_ids.dtype not in _INTEGERS:
        raise TypeError(f"input_ids is {input_ids.dtype}, expected int64 or int32")
    if input_ids.dim() != 2 or not input_ids.numel():
        raise ValueError(f"input_ids has shape {list(input_ids.shape)}, expected [batch, tokens], neither empty")
    vocabulary = model.config.vocab_size
    check_values("input_ids", input_ids, vocabulary, f"the vocabulary has {vocabulary} tokens")
    batch, tokens = input_ids.shape
    limit = model.config.max_position_embeddings
    if position_ids is None and tokens > limit:
        raise ValueError(f"input_ids has {tokens} tokens, but the model has {limit} positions")
    if position_ids is not None:
        if position_ids.dtype not in _INTEGERS:
            raise TypeError(f"position_ids is {position_ids.dtype}, expected int64 or int32")
        if position_ids.dim() != 2 or position_ids.shape[1] != tokens or position_ids.shape[0] not in (1, batch):
            raise ValueError(
                f"position_ids has shape {list(position_ids.shape)}, expected {[batch, tokens]} or {[1, tokens]}"
            )
    if attention_mask is not None:
        if cache is not None:
            raise ValueError(
                "attention_mask and cache cannot both be given: a row's token of position p lies in slot p, without "
                "padding; pass position_ids, and repeat the last token of short rows to fill them up"
            )
        if not isinstance(attention_mask, Tensor) or attention_mask.shape != input_ids.shape:
            given = list(attention_mask.shape) if isinstance(attention_mask, Tensor) else type(attention_mask).__name__
            raise ValueError(f"attention_mask is {given}, expected a tensor like input_ids, {[batch, tokens]}")
    if position_ids is not None:
        check_values("position_ids", position_ids, limit, f"the model has {limit} positions", seen=attention_mask)
    if cache is not None:
        check_cache(model, cache, batch, tokens, position_ids is None)
        if position_ids is not None:
            held = f"the cache has {cache.slots} slots"
            check_values("position_ids", position_ids, cache.slots, held, ", or make a cache with more slots")
    if isinstance(logits_to_keep, Tensor):
        if logits_to_keep.dtype != torch.int64:
            raise TypeError(f"logits_to_keep is {logits_to_keep.dtype}, expected int64 indices")
        if logits_to_keep.dim() not in (1, 2) or (logits_to_keep.dim() == 2 and logits_to_keep.shape[0] != batch):
            raise ValueError(
                f"logits_to_keep has shape {list(logits_to_keep.shape)}, expected [kept] or [{batch}, kept]"
            )
    elif not isinstance(logits_to_keep, int) or logits_to_keep < 0:
        raise ValueError(f"logits_to_keep is {logits_to_keep!r}, expected 0 for all, a number or a tensor of indices")


def check_values(
    name: str, given: Tensor, limit: int, why: str, otherwise: str = "", *, seen: Tensor | None = None
) -> None:
    """Whether values lie from 0 to below ``limit``, where they can be read at no cost and Python may depend on them.

    Of a batch that is padded only those are looked at that ``seen`` [B, T] marks: the others are nobody's.
    """
    if not all(on_host(each) for each in (given, seen) if each is not None):
        return
    if seen is not None:
        given = given.expand(seen.shape)[seen.bool()]
    if (bounds := bounds_outside(given, limit)) is not None:
        low, high = bounds
        raise ValueError(f"{name} has values from {low} to {high}, but {why}: pass 0 to {limit - 1}{otherwise}")


def check_is_cache(cache: KVCache) -> None:
    """Whether it is one at all."""
    if not isinstance(cache, KVCache):
        raise TypeError(f"cache is a {type(cache).__name__}, expected a KVCache from model.make_cache(batch, slots)")


def check_cache(model: LLM, cache: KVCache, batch: int, tokens: int, from_zero: bool) -> None:
    """Whether a cache is of this model and large enough."""
    check_is_cache(cache)
    config, weight = model.config, model.embed_tokens.weight
    kind = weight.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
    if (cache.dtype, cache.device) != (dtype, weight.device):
        raise ValueError(
            f"cache is {cache.dtype} on {cache.device}, but the model computes in {dtype} on {weight.device}: "
            f"model.make_cache(batch, slots, dtype={dtype}) makes one that fits"
        )
    if len(cache.layers) != config.num_hidden_layers:
        raise ValueError(f"cache has {len(cache.layers)} layers, but the model has {config.num_hidden_layers}")
    heads, width = cache.layers[0].shape[2], cache.layers[0].shape[4]
    if (heads, width) != (config.num_key_value_heads, config.head_dim):
        raise ValueError(
            f"cache has {heads} heads of width {width}, but the model {config.num_key_value_heads} of {config.head_dim}"
        )
    if cache.batch != batch:
        raise ValueError(f"cache has {cache.batch} rows, but input_ids {batch}")
    if from_zero and tokens > cache.slots:
        raise ValueError(f"input_ids has {tokens} tokens, but the cache {cache.slots} slots")


def check_cache_size(config: LLMConfig, batch: int, slots: int) -> None:
    """Whether a cache of this size makes sense."""
    for name, value in (("batch", batch), ("slots", slots)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name} is {value!r}, expected a positive integer")
    if slots > config.max_position_embeddings:
        raise ValueError(f"slots is {slots}, but the model has {config.max_position_embeddings} positions")
