"""Ways to write one attention: of a new token a row over a half-filled cache, and of rows of unequal lengths.

A choice is a function of what its layer holds and of what is made ready once for all layers: a mask, a table of
positions, the offsets of the rows.

Shapes: B rows, T tokens of the longest, N tokens of all, H query heads, K key and value heads, G = H / K, S slots,
D width of a head, C = H D.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from zoo.bert.layer import Rows, attend, key_mask
from zoo.ops.attention import decode_attention

# As its documentation calls it. Uncompiled it holds the scores of all tokens with all.
_FLEX: Callable[..., Any] = flex_attention
_COMPILED_FLEX: Callable[..., Any] = torch.compile(flex_attention, dynamic=False)
_jagged: Callable[..., Tensor] = torch.nested.nested_tensor_from_jagged


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One way to write the attention.

    Args:
        ready: What its layers share, from the positions [B] of new tokens or the lengths [B] of rows, and from what
            the first layer gets.
        attend: Called as ``attend(heads, tokens, cache, ready)``; returns the mixed values.
        layout: How it is given rows of unequal lengths: ``packed`` as [N, 3 C], ``padded`` with zeros as [B, T, 3 C],
            or ``apart`` as [3, N, C], which three products would leave, and of which no nested tensor is a copy.
    """

    ready: Callable[[Tensor, Tensor, Tensor | None], Any]
    attend: Callable[[int, Tensor, Tensor | None, Any], Tensor]
    layout: str = "packed"


# Decoding: tokens [B, (H + 2 K) D], queries, keys and values as they come from their product; cache [2, B, K, S, D],
# which holds these keys and values already -> [B, H D].


def _grouped(heads: int, tokens: Tensor, cache: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [B, H, D], keys and values [B, K, S, D]."""
    assert cache is not None
    key, value = cache.unbind(0)
    return tokens.unflatten(1, (-1, key.shape[-1]))[:, :heads], key, value


def _seen(positions: Tensor, tokens: Tensor, cache: Tensor | None) -> Tensor:
    """[B, 1, 1, S] bool, over all slots."""
    assert cache is not None
    return (torch.arange(cache.shape[3], device=positions.device) <= positions[:, None])[:, None, None]


def _unturned(positions: Tensor, tokens: Tensor, cache: Tensor | None) -> tuple[Tensor, Tensor]:
    """Positions, and rotary rows [B, D] that turn nothing."""
    assert cache is not None
    half = torch.ones(len(positions), cache.shape[4] // 2, device=positions.device)
    return positions, torch.cat([half, torch.zeros_like(half)], dim=1)


def _decode_triton(heads: int, tokens: Tensor, cache: Tensor | None, ready: tuple[Tensor, Tensor]) -> Tensor:
    # It turns queries and keys and writes the cache as well, which the others are spared.
    positions, rotary = ready
    assert cache is not None
    return decode_attention(tokens, cache, positions, rotary, None, None, 0.0, heads, None)


def _decode_sdpa_gqa(heads: int, tokens: Tensor, cache: Tensor | None, seen: Tensor) -> Tensor:
    query, key, value = _grouped(heads, tokens, cache)
    return F.scaled_dot_product_attention(query[:, :, None], key, value, attn_mask=seen, enable_gqa=True).flatten(1)


def _decode_sdpa_repeated(heads: int, tokens: Tensor, cache: Tensor | None, seen: Tensor) -> Tensor:
    query, key, value = _grouped(heads, tokens, cache)
    key, value = (held.repeat_interleave(heads // held.shape[1], dim=1) for held in (key, value))
    return F.scaled_dot_product_attention(query[:, :, None], key, value, attn_mask=seen).flatten(1)


def _decode_sdpa_stacked(heads: int, tokens: Tensor, cache: Tensor | None, seen: Tensor) -> Tensor:
    # Queries that share a key head stand below each other, as tokens of it.
    query, key, value = _grouped(heads, tokens, cache)
    rows = query.unflatten(1, (key.shape[1], -1))
    mask = seen.expand(-1, -1, rows.shape[2], -1)
    return F.scaled_dot_product_attention(rows, key, value, attn_mask=mask).flatten(1)


def _blocks_up_to(positions: Tensor, tokens: Tensor, cache: Tensor | None) -> BlockMask:
    assert cache is not None

    def seen(row: Tensor, head: Tensor, query: Tensor, slot: Tensor) -> Tensor:
        return slot <= positions[row]

    return create_block_mask(seen, len(positions), None, 1, cache.shape[3], device=positions.device.type)


def _decode_flex(heads: int, tokens: Tensor, cache: Tensor | None, blocks: BlockMask) -> Tensor:
    query, key, value = _grouped(heads, tokens, cache)
    return _flex(query[:, :, None], key, value, blocks).flatten(1)


# Rows of unequal lengths: tokens in the layout of the choice -> [N, C], or [B, T, C] where they are padded.


def offsets_of(lengths: Tensor) -> Tensor:
    """Where each row begins, and the end of the last: [B + 1] int32."""
    return F.pad(lengths.cumsum(0), (1, 0)).int()


def _packed(lengths: Tensor, tokens: Tensor, cache: Tensor | None) -> Rows:
    return Rows(int(lengths.max()), offsets=offsets_of(lengths))


def _packed_varlen(heads: int, tokens: Tensor, cache: Tensor | None, rows: Rows) -> Tensor:
    return attend(tokens, heads, None, rows, 0.0)


def _padding(lengths: Tensor, tokens: Tensor, cache: Tensor | None) -> Tensor:
    return key_mask(torch.arange(tokens.shape[1], device=lengths.device) < lengths[:, None], tokens)


def _packed_padded(heads: int, tokens: Tensor, cache: Tensor | None, mask: Tensor) -> Tensor:
    return attend(tokens, heads, mask, None, 0.0)


def _documents(lengths: Tensor, tokens: Tensor, cache: Tensor | None) -> BlockMask:
    number = torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths)

    def same(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return number[query] == number[key]

    return create_block_mask(same, None, None, len(number), len(number), device=lengths.device.type)


def _packed_flex(heads: int, tokens: Tensor, cache: Tensor | None, blocks: BlockMask) -> Tensor:
    query, key, value = tokens.unflatten(-1, (3, heads, -1)).permute(1, 2, 0, 3).unsqueeze(1)
    return _flex(query, key, value, blocks)[0].transpose(0, 1).flatten(1)


def _lengths_and_offsets(lengths: Tensor, tokens: Tensor, cache: Tensor | None) -> tuple[Tensor, int, int]:
    return offsets_of(lengths), int(lengths.min()), int(lengths.max())


def _packed_nested(heads: int, tokens: Tensor, cache: Tensor | None, ready: tuple[Tensor, int, int]) -> Tensor:
    offsets, shortest, longest = ready
    query, key, value = (
        _jagged(part, offsets, min_seqlen=shortest, max_seqlen=longest).transpose(1, 2)
        for part in tokens.unflatten(-1, (heads, -1)).unbind(0)
    )
    mixed = F.scaled_dot_product_attention(query, key, value).transpose(1, 2)
    return mixed.values().flatten(1)


def _flex(query: Tensor, key: Tensor, value: Tensor, blocks: BlockMask) -> Tensor:
    compiled = query.device.type != "cpu" and not torch.compiler.is_compiling()
    run = _COMPILED_FLEX if compiled else _FLEX
    mixed: Tensor = run(query, key, value, block_mask=blocks, enable_gqa=query.shape[1] != key.shape[1])
    return mixed


DECODE = {
    "decode-triton": Choice(ready=_unturned, attend=_decode_triton),
    "decode-sdpa-gqa": Choice(ready=_seen, attend=_decode_sdpa_gqa),
    "decode-sdpa-repeated": Choice(ready=_seen, attend=_decode_sdpa_repeated),
    "decode-sdpa-stacked": Choice(ready=_seen, attend=_decode_sdpa_stacked),
    "decode-flex": Choice(ready=_blocks_up_to, attend=_decode_flex),
}
PACKED = {
    "packed-varlen": Choice(ready=_packed, attend=_packed_varlen),
    "packed-flex": Choice(ready=_documents, attend=_packed_flex),
    "packed-nested": Choice(ready=_lengths_and_offsets, attend=_packed_nested, layout="apart"),
    "packed-padded": Choice(ready=_padding, attend=_packed_padded, layout="padded"),
}
CHOICES = {**DECODE, **PACKED}
