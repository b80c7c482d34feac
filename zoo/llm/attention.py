"""Attention of grouped queries, over the tokens at hand or over a cache.

Shapes: B batch, T tokens, S slots of the cache, H query heads, K key and value heads, G = H / K, D width of a head.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def attend(query: Tensor, cache: Tensor, positions: Tensor, window: int | None) -> Tensor:
    """Attention over a cache in which the token of position p lies in slot p.

    A query at position p sees slots 0 to p, or the last ``window`` of them; what lies behind p is not looked at.

    Args:
        query: [B, T, H, D].
        cache: [2, B, K, S, D], keys and values.
        positions: [B, T] int64, of the queries.
        window: How many last tokens are seen; None for all.

    Returns:
        [B, T, H, D].
    """
    batch, tokens, heads, width = query.shape
    _, _, key_heads, slots, _ = cache.shape
    groups = heads // key_heads
    slot = torch.arange(slots, device=positions.device)
    seen = slot <= positions[..., None]
    if window is not None:
        seen = seen & (slot > positions[..., None] - window)
    # Queries that share a key head stand below each other: every backend takes that, and no key is copied.
    rows = query.view(batch, tokens, key_heads, groups, width).permute(0, 2, 3, 1, 4)
    rows = rows.reshape(batch, key_heads, groups * tokens, width)
    mask = seen[:, None, None].expand(-1, 1, groups, -1, -1).reshape(batch, 1, groups * tokens, slots)
    out = F.scaled_dot_product_attention(rows, cache[0], cache[1], attn_mask=mask)
    return out.view(batch, key_heads, groups, tokens, width).permute(0, 3, 1, 2, 4).reshape(query.shape)


def attend_tokens(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """Attention among the tokens at hand, without a cache: scoring and training.

    Args:
        query: [B, T, H, D].
        key: [B, T, K, D].
        value: [B, T, K, D].
        mask: [B or 1, 1, T, T] bool, True where a query (row) sees a key; None for all up to the query's own.

    Returns:
        [B, T, H, D].
    """
    out = F.scaled_dot_product_attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        attn_mask=mask,
        is_causal=mask is None,
        enable_gqa=query.shape[2] != key.shape[2],
    )
    return out.transpose(1, 2)


def token_mask(tokens: int, attention_mask: Tensor | None, window: int | None, device: torch.device) -> Tensor | None:
    """The mask of ``attend_tokens``; None where plain causal attention is meant.

    Args:
        tokens: T.
        attention_mask: [B, T], 0 where a token is padding; or None.
        window: How many last tokens are seen; None for all.
        device: Where.
    """
    if window is not None and window >= tokens:
        window = None
    if attention_mask is None and window is None:
        return None
    index = torch.arange(tokens, device=device)
    distance = index[:, None] - index
    mask = distance >= 0
    if window is not None:
        mask = mask & (distance < window)
    mask = mask[None, None]
    if attention_mask is not None:
        # Padding sees itself: a row that sees nothing would be NaN, and poison all rows through its value.
        mask = (mask & attention_mask.bool()[:, None, None]) | (distance == 0)
    return mask
