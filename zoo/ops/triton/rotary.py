# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs
"""What stands between a product of queries, keys and values and the attention: norms of heads, rotation, the cache.

Without a cache, the same taken apart, and in the backward put together again.

A program takes some heads of one token, of whichever of the three kinds they are.

Shape legend: B rows, T tokens, H query heads, K key and value heads, S slots, D width of a head.
"""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from zoo.engine.kernel import kernel
from zoo.ops.common import ceil_div

# Heads of a program.
COUNT = 16


@kernel(do_not_specialize=["tokens", "rotary_stride"])
def _rotate_into(
    qkv, cache, positions, rotary, q_norm, k_norm, query, eps: tl.constexpr, tokens, rotary_stride, slots, batches,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, D: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * COUNT + tl.arange(0, COUNT)
    half = tl.arange(0, D // 2)
    of_query = head < HEADS
    of_key = (head >= HEADS) & (head < HEADS + KEY_HEADS)
    of_value = (head >= HEADS + KEY_HEADS) & (head < HEADS + 2 * KEY_HEADS)
    batch = token // tokens
    turn = rotary + batch * rotary_stride + (token % tokens) * D
    cos, sin = tl.load(turn + half)[None, :], tl.load(turn + D // 2 + half)[None, :]
    place = (token * (HEADS + 2 * KEY_HEADS) + head)[:, None] * D + half[None, :]
    live = (head < HEADS + 2 * KEY_HEADS)[:, None]
    left = tl.load(qkv + place, mask=live, other=0.0).to(tl.float32)
    right = tl.load(qkv + place + D // 2, mask=live, other=0.0).to(tl.float32)
    normed_left, normed_right = left, right
    if q_norm is not None:
        scale = tl.rsqrt((tl.sum(left * left, 1) + tl.sum(right * right, 1)) / D + eps)[:, None]
        first = tl.where(of_query[:, None], tl.load(q_norm + half)[None, :], tl.load(k_norm + half)[None, :])
        second = tl.load(q_norm + D // 2 + half)[None, :]
        second = tl.where(of_query[:, None], second, tl.load(k_norm + D // 2 + half)[None, :])
        normed_left *= scale * first.to(tl.float32)
        normed_right *= scale * second.to(tl.float32)
    plain = of_value[:, None]
    turned_left = tl.where(plain, left, normed_left * cos - normed_right * sin).to(qkv.dtype.element_ty)
    turned_right = tl.where(plain, right, normed_right * cos + normed_left * sin).to(qkv.dtype.element_ty)
    place = (token * HEADS + head)[:, None] * D + half[None, :]
    tl.store(query + place, turned_left, mask=of_query[:, None])
    tl.store(query + place + D // 2, turned_right, mask=of_query[:, None])
    position = tl.load(positions + token)
    row = tl.where(of_value, batches * KEY_HEADS, 0).to(tl.int64) + batch * KEY_HEADS + (head - HEADS) % KEY_HEADS
    place = ((row * slots + position) * D)[:, None] + half[None, :]
    # A position that has no slot is not written: it would be a slot of another head.
    kept = ((of_key | of_value) & (position >= 0) & (position < slots))[:, None]
    tl.store(cache + place, turned_left.to(cache.dtype.element_ty), mask=kept)
    tl.store(cache + place + D // 2, turned_right.to(cache.dtype.element_ty), mask=kept)


def rotate_into(
    qkv: Tensor, cache: Tensor, positions: Tensor, rotary: Tensor, q_norm: Tensor | None, k_norm: Tensor | None,
    eps: float, heads: int,
) -> Tensor:  # fmt: skip
    """See ``zoo/ops/rotary.py``."""
    qkv, positions, rotary = qkv.contiguous(), positions.contiguous(), rotary.contiguous()
    batch, tokens = positions.shape
    _, _, key_heads, slots, width = cache.shape
    query = qkv.new_empty(batch, tokens, heads, width)
    _rotate_into[(batch * tokens, ceil_div(heads + 2 * key_heads, COUNT))](
        qkv, cache, positions, rotary, q_norm, k_norm, query, eps, tokens,
        0 if rotary.shape[0] == 1 else tokens * width, slots, batch,
        HEADS=heads, KEY_HEADS=key_heads, D=width, COUNT=COUNT, num_warps=2,
    )  # fmt: skip
    return query


@kernel(do_not_specialize=["tokens", "rotary_stride"])
def _apart(
    qkv, rotary, query, key, value, tokens, rotary_stride,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, D: tl.constexpr, COUNT: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * COUNT + tl.arange(0, COUNT)[:, None]
    half = tl.arange(0, D // 2)[None, :]
    of_query = head < HEADS
    of_key = (head >= HEADS) & (head < HEADS + KEY_HEADS)
    of_value = (head >= HEADS + KEY_HEADS) & (head < HEADS + 2 * KEY_HEADS)
    live = head < HEADS + 2 * KEY_HEADS
    turn = rotary + (token // tokens) * rotary_stride + (token % tokens) * D
    cos, sin = tl.load(turn + half), tl.load(turn + D // 2 + half)
    whole = qkv + (token * (HEADS + 2 * KEY_HEADS) + head) * D + half
    query += (token * HEADS + head) * D + half
    key += (token * KEY_HEADS + head - HEADS) * D + half
    value += (token * KEY_HEADS + head - HEADS - KEY_HEADS) * D + half
    if BACK:
        sin = -sin
        # Only one of the three is there.
        left = tl.load(query, mask=of_query, other=0.0) + tl.load(key, mask=of_key, other=0.0)
        left += tl.load(value, mask=of_value, other=0.0)
        right = tl.load(query + D // 2, mask=of_query, other=0.0) + tl.load(key + D // 2, mask=of_key, other=0.0)
        right += tl.load(value + D // 2, mask=of_value, other=0.0)
    else:
        left = tl.load(whole, mask=live, other=0.0)
        right = tl.load(whole + D // 2, mask=live, other=0.0)
    left, right = left.to(tl.float32), right.to(tl.float32)
    turned_left = tl.where(of_value, left, left * cos - right * sin).to(qkv.dtype.element_ty)
    turned_right = tl.where(of_value, right, right * cos + left * sin).to(qkv.dtype.element_ty)
    if BACK:
        tl.store(whole, turned_left, mask=live)
        tl.store(whole + D // 2, turned_right, mask=live)
    else:
        tl.store(query, turned_left, mask=of_query)
        tl.store(query + D // 2, turned_right, mask=of_query)
        tl.store(key, turned_left, mask=of_key)
        tl.store(key + D // 2, turned_right, mask=of_key)
        tl.store(value, turned_left, mask=of_value)
        tl.store(value + D // 2, turned_right, mask=of_value)


def _launch_apart(qkv: Tensor, rotary: Tensor, query: Tensor, key: Tensor, value: Tensor, back: bool) -> None:
    rotary = rotary.contiguous()
    batch, tokens, heads, width = query.shape
    key_heads = key.shape[2]
    _apart[(batch * tokens, ceil_div(heads + 2 * key_heads, COUNT))](
        qkv, rotary, query, key, value, tokens, 0 if rotary.shape[0] == 1 else tokens * width,
        HEADS=heads, KEY_HEADS=key_heads, D=width, COUNT=COUNT, BACK=back, num_warps=2,
    )  # fmt: skip


def split_rotated(qkv: Tensor, rotary: Tensor, heads: int, key_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """See ``zoo/ops/rotary.py``."""
    query, key, value = (qkv.new_empty(*qkv.shape[:2], n, rotary.shape[2]) for n in (heads, key_heads, key_heads))
    _launch_apart(qkv.contiguous(), rotary, query, key, value, back=False)
    return query, key, value


def join_rotated(query: Tensor, key: Tensor, value: Tensor, rotary: Tensor) -> Tensor:
    """Gradient of what ``split_rotated`` took apart, from those of its outputs."""
    heads = query.shape[2] + key.shape[2] + value.shape[2]
    qkv = query.new_empty(*query.shape[:2], heads * query.shape[3])
    _launch_apart(qkv, rotary, query.contiguous(), key.contiguous(), value.contiguous(), back=True)
    return qkv
