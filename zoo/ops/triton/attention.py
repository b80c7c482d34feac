"""Prefill attention over a KV cache, attention to few keys and in packed rows, and rotary embeddings.

Prefill: a program takes a tile of tokens of one head and walks only the slots that these tokens see. Only the device
knows the position where a prompt continues.

Few keys: the tokens of a text or the pixels of a small image. The library's kernels are made for long rows of keys.
They clear a counter first, which leaves the GPU idle before and after in a CUDA graph. Here the keys of a head are one
or two tiles, read in place from the projection's output. Each power of two of a head's padded width compiles once.
Packed rows, of any lengths, run the same kernel: a program reads where its row begins and ends.

Rotation: one kernel between the QKV projection and attention norms heads, rotates them and writes the cache. Without a
cache it splits the projection into heads; its backward joins them. A program takes some heads of one token.

Shape legend: B rows or images, T tokens or queries of each, L keys of each, H or N query heads, K key and value heads,
S slots, D width of a head.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from zoo.engine.kernel import kernel
from zoo.ops.common import ceil_div, next_power

# The kernels compute exponentials with exp2.
LOG2_E = 1.4426950408889634


@triton.jit
def _walk(
    query, keys, values, first, end, position, oldest, state, scale, slots,
    D: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Update the online softmax and the weighted sums of a tile of tokens with the slots ``first`` to ``end``."""
    greatest, exponents, total = state
    for begin in range(first, end, BLOCK):
        slot = begin + tl.arange(0, BLOCK)
        place = (slot * D)[:, None] + tl.arange(0, D)[None, :]
        if MASKED:
            live = slot < slots
            key = tl.load(keys + place, mask=live[:, None], other=0.0)
            value = tl.load(values + place, mask=live[:, None], other=0.0)
        else:
            key = tl.load(keys + place)
            value = tl.load(values + place)
        score = tl.dot(query, tl.trans(key), input_precision="ieee")
        if MASKED:
            seen = (slot[None, :] <= position[:, None]) & (slot[None, :] >= oldest[:, None])
            score = tl.where(seen, score, float("-inf"))
        # The scale is applied inside the exponential: multiplication and subtraction are one instruction.
        top = tl.maximum(greatest, tl.max(score, 1) * scale)
        # Without this, a token that has seen no slot yet would compute infinity minus infinity.
        base = tl.where(top == float("-inf"), 0.0, top)
        fade = tl.exp2(greatest - base)
        share = tl.exp2(score * scale - base[:, None])
        exponents = exponents * fade + tl.sum(share, 1)
        total = tl.dot(share.to(value.dtype), value, total * fade[:, None], input_precision="ieee")
        greatest = top
    return greatest, exponents, total


@kernel(do_not_specialize=["tokens"])
def _prefill(
    query, cache, positions, out, scale: tl.constexpr, tokens, slots, window,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # The last tokens see the most slots. They start first, which balances the end of the launch.
    number = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    real = number < tokens
    column = tl.arange(0, D)
    position = tl.load(positions + batch * tokens + number, mask=real, other=-1)
    # A position outside the cache is clamped to the nearest slot.
    position = tl.where(real, tl.minimum(tl.maximum(position, 0), slots - 1), -1).to(tl.int32)
    oldest = tl.maximum(position - window + 1, 0)
    place = ((batch * tokens + number) * HEADS + head)[:, None] * D + column[None, :]
    rows = tl.load(query + place, mask=real[:, None], other=0.0)
    keys = cache + (batch * KEY_HEADS + head // (HEADS // KEY_HEADS)) * slots * D
    values = keys + tl.num_programs(2).to(tl.int64) * KEY_HEADS * slots * D
    state = tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, D], tl.float32)
    end = tl.max(position, 0) + 1
    # Slots that every token sees need no mask: from the last token's window start to the first token's own slot.
    first = tl.min(tl.where(real, oldest, slots), 0) // BLOCK * BLOCK
    full_first = tl.cdiv(tl.max(oldest, 0), BLOCK) * BLOCK
    full_end = (tl.min(tl.where(real, position, slots), 0) + 1) // BLOCK * BLOCK
    full_first = tl.minimum(full_first, tl.maximum(full_end, first))
    last = tl.maximum(full_first, full_end)
    state = _walk(rows, keys, values, first, full_first, position, oldest, state, scale, slots, D, BLOCK, True)
    state = _walk(rows, keys, values, full_first, full_end, position, oldest, state, scale, slots, D, BLOCK, False)
    _, exponents, total = _walk(rows, keys, values, last, end, position, oldest, state, scale, slots, D, BLOCK, True)
    total = total / tl.where(real, exponents, 1.0)[:, None]
    tl.store(out + place, total.to(out.dtype.element_ty), mask=real[:, None])


def prefill_attention(query: Tensor, cache: Tensor, positions: Tensor, window: int | None) -> Tensor:
    """Causal attention of queries [B, T, H, D] at positions [B, T] over a cache [2, B, K, S, D] -> [B, T, H, D]."""
    query, positions = query.contiguous(), positions.contiguous()
    batch, tokens, heads, width = query.shape
    key_heads, slots = cache.shape[2:4]
    out = torch.empty_like(query)
    # Tokens and warps of a program, measured on an H200. One warp group is enough for narrow heads.
    most, warps = (64, 4) if width <= 64 else (128, 8)
    rows = most if tokens >= most else max(16, next_power(tokens))
    _prefill[(ceil_div(tokens, rows), heads, batch)](
        query, cache, positions, out, width**-0.5 * LOG2_E, tokens, slots, slots if window is None else window,
        HEADS=heads, KEY_HEADS=key_heads, D=width, ROWS=rows, BLOCK=64, num_warps=warps if rows == most else 4,
        num_stages=3,
    )  # fmt: skip
    return out


# Tile of a program (queries, keys), its warps and pipeline stages: the fastest measured for 77 keys on an H200.
QUERIES, KEYS, WARPS, STAGES = 64, 64, 4, 2
# Elements per vector load. Widths and strides are multiples of it.
VECTOR = 8


@triton.jit
def _load_rows(x, stride, row, units, limit, VECTOR: tl.constexpr, WIDTH: tl.constexpr):
    """Load rows [R] below ``limit``, each of ``units`` vectors and ``stride`` vectors apart, padded to [R, WIDTH]."""
    column = tl.arange(0, WIDTH)
    seen = (row < limit)[:, None] & (column < units * VECTOR)[None, :]
    return tl.load(x + row[:, None] * (stride * VECTOR) + column[None, :], mask=seen, other=0.0)


_STRIDES = "query_image", "query_row", "key_image", "key_row", "value_image", "value_row"


@kernel(do_not_specialize=[*_STRIDES, "units", "queries", "keys"])
def _short_attention(
    query, key, value, out, offsets, query_image, query_row, key_image, key_row, value_image, value_row, units, queries,
    keys, scale: tl.constexpr, VECTOR: tl.constexpr, WIDTH: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    image = tl.program_id(2).to(tl.int64)
    skipped = tl.program_id(1) * units * VECTOR
    row = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    first_query = image * queries
    if offsets is not None:
        # Rows of different lengths, one behind the other.
        first_query = tl.load(offsets + image).to(tl.int64)
        queries = (tl.load(offsets + image + 1) - first_query).to(tl.int32)
        keys = queries
        query += first_query * query_row * VECTOR
        key += first_query * key_row * VECTOR
        value += first_query * value_row * VECTOR
    else:
        query += image * query_image * VECTOR
        key += image * key_image * VECTOR
        value += image * value_image * VECTOR
    if tl.program_id(0) * QUERIES >= queries:
        return
    q = _load_rows(query + skipped, query_row, row, units, queries, VECTOR, WIDTH)
    key += skipped
    value += skipped
    highest = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    total_v = tl.zeros([QUERIES, WIDTH], tl.float32)
    for first in range(0, keys, KEYS):
        place = first + tl.arange(0, KEYS)
        # Both loads are issued before either result is used.
        k = _load_rows(key, key_row, place, units, keys, VECTOR, WIDTH)
        v = _load_rows(value, value_row, place, units, keys, VECTOR, WIDTH)
        scores = tl.dot(q, tl.trans(k)) * scale
        scores = tl.where((place < keys)[None, :], scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        shrunk = tl.exp2(highest - higher)
        total = total * shrunk + tl.sum(weights, 1)
        total_v = tl.dot(weights.to(v.dtype), v, total_v * shrunk[:, None])
        highest = higher
    total_v /= total[:, None]
    column = tl.arange(0, WIDTH)
    place = row[:, None] * (tl.num_programs(1) * units * VECTOR) + column[None, :]
    out += first_query * tl.num_programs(1) * units * VECTOR + skipped
    seen = (row < queries)[:, None] & (column < units * VECTOR)[None, :]
    tl.store(out + place, total_v.to(out.dtype.element_ty), mask=seen)


def short_attention(
    query: Tensor, key: Tensor, value: Tensor, offsets: Tensor | None = None, longest: int = 0
) -> Tensor:
    """Query [B, T, N, D], key and value [B, L, N, D] -> rows [B T, N D].

    With offsets [S + 1] int32, query, key and value [1, R, N, D] are S rows of at most ``longest`` tokens.
    """
    images, queries, heads, width = query.shape
    out = query.new_empty(images * queries, heads * width)
    if not out.numel():
        return out
    if offsets is not None:
        images, queries = offsets.shape[0] - 1, longest
    given = [_in_vectors(each) for each in (query, key, value)]
    strides = [stride // VECTOR for each in given for stride in each.stride()[:2]]
    _short_attention[(ceil_div(queries, QUERIES), heads, images)](
        *given, out, offsets, *strides, width // VECTOR, queries, key.shape[1], LOG2_E / math.sqrt(width),
        VECTOR=VECTOR, WIDTH=max(16, next_power(width)), QUERIES=QUERIES, KEYS=KEYS, num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
    return out


def _in_vectors(x: Tensor) -> Tensor:
    """X [B, L, N, D] with contiguous heads and strides that are multiples of VECTOR; copied if it has others."""
    image, row, head, number = x.stride()
    fits = number == 1 and head == x.shape[3] and image % VECTOR == 0 and row % VECTOR == 0
    return x if fits else torch.clone(x, memory_format=torch.contiguous_format)


# Heads of a program.
COUNT = 16


@kernel(do_not_specialize=["tokens", "rotary_stride"])
def _rotate(
    qkv, rotary, query, key, value, positions, q_norm, k_norm, eps: tl.constexpr, tokens, rotary_stride, slots, batches,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, D: tl.constexpr, COUNT: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """Split ``qkv`` into query, key and value; ``BACK`` joins them. With positions ``key`` is the KV cache."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * COUNT + tl.arange(0, COUNT)[:, None]
    half = tl.arange(0, D // 2)[None, :]
    of_query = head < HEADS
    of_key = (head >= HEADS) & (head < HEADS + KEY_HEADS)
    of_value = (head >= HEADS + KEY_HEADS) & (head < HEADS + 2 * KEY_HEADS)
    live = head < HEADS + 2 * KEY_HEADS
    batch = token // tokens
    turn = rotary + batch * rotary_stride + (token % tokens) * D
    cos, sin = tl.load(turn + half), tl.load(turn + D // 2 + half)
    whole = qkv + (token * (HEADS + 2 * KEY_HEADS) + head) * D + half
    query += (token * HEADS + head) * D + half
    if positions is None:
        key += (token * KEY_HEADS + head - HEADS) * D + half
        value += (token * KEY_HEADS + head - HEADS - KEY_HEADS) * D + half
    if BACK:
        sin = -sin
        # Masks leave exactly one of the three loads nonzero.
        left = tl.load(query, mask=of_query, other=0.0) + tl.load(key, mask=of_key, other=0.0)
        left += tl.load(value, mask=of_value, other=0.0)
        right = tl.load(query + D // 2, mask=of_query, other=0.0) + tl.load(key + D // 2, mask=of_key, other=0.0)
        right += tl.load(value + D // 2, mask=of_value, other=0.0)
    else:
        left = tl.load(whole, mask=live, other=0.0)
        right = tl.load(whole + D // 2, mask=live, other=0.0)
    left, right = left.to(tl.float32), right.to(tl.float32)
    normed_left, normed_right = left, right
    if q_norm is not None:
        scale = tl.rsqrt((tl.sum(left * left, 1) + tl.sum(right * right, 1)) / D + eps)[:, None]
        # One-dimensional loads: the layout of loads of [1, D / 2] would spread, and sums would need shared memory.
        one = tl.arange(0, D // 2)
        first = tl.where(of_query, tl.load(q_norm + one)[None, :], tl.load(k_norm + one)[None, :])
        one += D // 2
        second = tl.where(of_query, tl.load(q_norm + one)[None, :], tl.load(k_norm + one)[None, :])
        normed_left *= scale * first.to(tl.float32)
        normed_right *= scale * second.to(tl.float32)
    turned_left = tl.where(of_value, left, normed_left * cos - normed_right * sin).to(qkv.dtype.element_ty)
    turned_right = tl.where(of_value, right, normed_right * cos + normed_left * sin).to(qkv.dtype.element_ty)
    if BACK:
        tl.store(whole, turned_left, mask=live)
        tl.store(whole + D // 2, turned_right, mask=live)
    else:
        tl.store(query, turned_left, mask=of_query)
        tl.store(query + D // 2, turned_right, mask=of_query)
        if positions is None:
            tl.store(key, turned_left, mask=of_key)
            tl.store(key + D // 2, turned_right, mask=of_key)
            tl.store(value, turned_left, mask=of_value)
            tl.store(value + D // 2, turned_right, mask=of_value)
        else:
            position = tl.load(positions + token)
            row = tl.where(of_value, batches * KEY_HEADS, 0).to(tl.int64)
            row += batch * KEY_HEADS + (head - HEADS) % KEY_HEADS
            place = (row * slots + position) * D + half
            # A position outside the cache is not written: its address is a slot of another head.
            kept = (of_key | of_value) & (position >= 0) & (position < slots)
            tl.store(key + place, turned_left.to(key.dtype.element_ty), mask=kept)
            tl.store(key + place + D // 2, turned_right.to(key.dtype.element_ty), mask=kept)


def _launch_rotate(
    qkv: Tensor, rotary: Tensor, query: Tensor, key: Tensor, value: Tensor | None, positions: Tensor | None = None,
    q_norm: Tensor | None = None, k_norm: Tensor | None = None, eps: float = 0.0, back: bool = False,
) -> None:  # fmt: skip
    rotary = rotary.contiguous()
    batch, tokens, heads, width = query.shape
    key_heads, slots = key.shape[2:4]
    _rotate[(batch * tokens, ceil_div(heads + 2 * key_heads, COUNT))](
        qkv, rotary, query, key, value, positions, q_norm, k_norm, eps, tokens,
        0 if rotary.shape[0] == 1 else tokens * width, slots, batch,
        HEADS=heads, KEY_HEADS=key_heads, D=width, COUNT=COUNT, BACK=back, num_warps=2,
    )  # fmt: skip


def rotate_into(
    qkv: Tensor, cache: Tensor, positions: Tensor, rotary: Tensor, q_norm: Tensor | None, k_norm: Tensor | None,
    eps: float, heads: int,
) -> Tensor:  # fmt: skip
    """See ``zoo/ops/attention.py``."""
    query = qkv.new_empty(*positions.shape, heads, cache.shape[4])
    _launch_rotate(qkv.contiguous(), rotary, query, cache, None, positions.contiguous(), q_norm, k_norm, eps)
    return query


def split_rotated(qkv: Tensor, rotary: Tensor, heads: int, key_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """See ``zoo/ops/attention.py``."""
    query, key, value = (qkv.new_empty(*qkv.shape[:2], n, rotary.shape[2]) for n in (heads, key_heads, key_heads))
    _launch_rotate(qkv.contiguous(), rotary, query, key, value)
    return query, key, value


def join_rotated(query: Tensor, key: Tensor, value: Tensor, rotary: Tensor) -> Tensor:
    """Backward of ``split_rotated``: the gradient of qkv from the gradients of query, key and value."""
    heads = query.shape[2] + key.shape[2] + value.shape[2]
    qkv = query.new_empty(*query.shape[:2], heads * query.shape[3])
    _launch_rotate(qkv, rotary, query.contiguous(), key.contiguous(), value.contiguous(), back=True)
    return qkv
