# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs
"""Attention of many new tokens a row over a cache that holds them already, whatever stands before them.

A program takes some tokens of one head and walks the slots that they see, and no others: where a prompt goes on from is
known on the device alone. Query heads that share a key head read the same keys, none is copied.

Attention to few keys, those of a text or the pixels of a small image: the library's kernels are made for long rows of
keys. They clear a counter first, which in a CUDA graph keeps the GPU idle on both sides, and take as long again to
begin. Here a program holds some queries of a head, and the keys of the head are one or two tiles; all three are read
where they lie, between others of the same product. One compilation for each power of two that a head's width fits in.

Shape legend: B rows or images, T tokens or queries of each, L keys of each, H or N query heads, K key and value heads,
S slots, D width of a head.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from zoo.engine.kernel import kernel
from zoo.ops.common import ceil_div, next_power


@triton.jit
def _step(
    query, keys, values, begin, position, oldest, greatest, exponents, total, scale, slots,
    D: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    slot = begin + tl.arange(0, BLOCK)
    column = tl.arange(0, D)
    place = (slot * D)[:, None] + column[None, :]
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
    # Scaled on the way into the exponential: a multiplication and a subtraction in one instruction.
    top = tl.maximum(greatest, tl.max(score, 1) * scale)
    # A token that has seen no slot yet would subtract infinity from infinity.
    base = tl.where(top == float("-inf"), 0.0, top)
    fade = tl.exp2(greatest - base)
    share = tl.exp2(score * scale - base[:, None])
    exponents = exponents * fade + tl.sum(share, 1)
    total = tl.dot(share.to(value.dtype), value, total * fade[:, None], input_precision="ieee")
    return top, exponents, total


@kernel(do_not_specialize=["tokens"])
def _prefill(
    query, cache, positions, out, scale: tl.constexpr, tokens, slots, window,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # The last tokens see the most: they go first, so that none is left over at the end.
    number = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    real = number < tokens
    column = tl.arange(0, D)
    position = tl.load(positions + batch * tokens + number, mask=real, other=-1)
    # A position that has no slot sees what the nearest one would.
    position = tl.where(real, tl.minimum(tl.maximum(position, 0), slots - 1), -1).to(tl.int32)
    oldest = tl.maximum(position - window + 1, 0)
    place = ((batch * tokens + number) * HEADS + head)[:, None] * D + column[None, :]
    rows = tl.load(query + place, mask=real[:, None], other=0.0)
    keys = cache + (batch * KEY_HEADS + head // (HEADS // KEY_HEADS)) * slots * D
    values = keys + tl.num_programs(2).to(tl.int64) * KEY_HEADS * slots * D
    greatest = tl.full([ROWS], float("-inf"), tl.float32)
    exponents = tl.zeros([ROWS], tl.float32)
    total = tl.zeros([ROWS, D], tl.float32)
    end = tl.max(position, 0) + 1
    # Slots that every token sees need no mask: from the youngest window's start to the oldest token's own slot.
    first = tl.min(tl.where(real, oldest, slots), 0) // BLOCK * BLOCK
    full_first = tl.cdiv(tl.max(oldest, 0), BLOCK) * BLOCK
    full_end = (tl.min(tl.where(real, position, slots), 0) + 1) // BLOCK * BLOCK
    full_first = tl.minimum(full_first, tl.maximum(full_end, first))
    for begin in range(first, full_first, BLOCK):
        greatest, exponents, total = _step(
            rows, keys, values, begin, position, oldest, greatest, exponents, total, scale, slots, D, BLOCK, True
        )
    for begin in range(full_first, full_end, BLOCK):
        greatest, exponents, total = _step(
            rows, keys, values, begin, position, oldest, greatest, exponents, total, scale, slots, D, BLOCK, False
        )
    for begin in range(tl.maximum(full_first, full_end), end, BLOCK):
        greatest, exponents, total = _step(
            rows, keys, values, begin, position, oldest, greatest, exponents, total, scale, slots, D, BLOCK, True
        )
    total = total / tl.where(real, exponents, 1.0)[:, None]
    tl.store(out + place, total.to(out.dtype.element_ty), mask=real[:, None])


def _prefill_tile(tokens: int, width: int) -> tuple[int, int, int, int]:
    """(tokens, slots at a step, warps, stages) of a program. Measured on an H200: one warp group holds narrow heads."""
    most, warps = (64, 4) if width <= 64 else (128, 8)
    rows = most if tokens >= most else max(16, next_power(tokens))
    return rows, 64, warps if rows == most else 4, 3


def prefill_attention(query: Tensor, cache: Tensor, positions: Tensor, window: int | None) -> Tensor:
    """Queries [B, T, H, D] over a cache [2, B, K, S, D], each up to its position [B, T]: [B, T, H, D]."""
    query, positions = query.contiguous(), positions.contiguous()
    batch, tokens, heads, width = query.shape
    key_heads, slots = cache.shape[2:4]
    out = torch.empty_like(query)
    rows, block, warps, stages = _prefill_tile(tokens, width)
    log2_e = 1.4426950408889634
    _prefill[(ceil_div(tokens, rows), heads, batch)](
        query, cache, positions, out, width**-0.5 * log2_e, tokens, slots, slots if window is None else window,
        HEADS=heads, KEY_HEADS=key_heads, D=width, ROWS=rows, BLOCK=block, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out


# Queries of a program, and keys that it looks at at once: the fastest of some for texts of 77 on an H200.
QUERIES, KEYS, WARPS, STAGES = 64, 64, 4, 2
# Numbers that a thread reads at once: widths and strides are multiples of it.
VECTOR = 8


@triton.jit
def _read(x, stride, row, units, limit, VECTOR: tl.constexpr, WIDTH: tl.constexpr):
    """Rows [R] of ``units`` vectors, ``stride`` vectors apart and below ``limit``, as [R, WIDTH]."""
    column = tl.arange(0, WIDTH)
    seen = (row < limit)[:, None] & (column < units * VECTOR)[None, :]
    return tl.load(x + row[:, None] * (stride * VECTOR) + column[None, :], mask=seen, other=0.0)


@kernel(
    do_not_specialize=[
        *("query_image", "query_row", "key_image", "key_row", "value_image", "value_row"),
        *("units", "queries", "keys", "scale"),
    ]
)
def _short(
    query, key, value, out, query_image, query_row, key_image, key_row, value_image, value_row, units, queries, keys,
    scale,
    VECTOR: tl.constexpr, WIDTH: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    image = tl.program_id(2).to(tl.int64)
    skipped = tl.program_id(1) * units * VECTOR
    row = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    asked = _read(query + image * query_image * VECTOR + skipped, query_row, row, units, queries, VECTOR, WIDTH)
    key += image * key_image * VECTOR + skipped
    value += image * value_image * VECTOR + skipped
    highest = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    mixed = tl.zeros([QUERIES, WIDTH], tl.float32)
    for first in range(0, keys, KEYS):
        place = first + tl.arange(0, KEYS)
        # Both are under way before either is waited for.
        answers = _read(key, key_row, place, units, keys, VECTOR, WIDTH)
        contents = _read(value, value_row, place, units, keys, VECTOR, WIDTH)
        scores = tl.dot(asked, tl.trans(answers)) * scale
        scores = tl.where((place < keys)[None, :], scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        shrunk = tl.exp2(highest - higher)
        total = total * shrunk + tl.sum(weights, 1)
        mixed = tl.dot(weights.to(contents.dtype), contents, mixed * shrunk[:, None])
        highest = higher
    mixed /= total[:, None]
    column = tl.arange(0, WIDTH)
    place = row[:, None] * (tl.num_programs(1) * units * VECTOR) + column[None, :]
    out += image * queries * tl.num_programs(1) * units * VECTOR + skipped
    seen = (row < queries)[:, None] & (column < units * VECTOR)[None, :]
    tl.store(out + place, mixed.to(out.dtype.element_ty), mask=seen)


def short_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Query [B, T, N, D], key and value [B, L, N, D] -> rows [B T, N D]."""
    images, queries, heads, width = query.shape
    out = query.new_empty(images * queries, heads * width)
    if not out.numel():
        return out
    given = [_in_vectors(each) for each in (query, key, value)]
    strides = [stride // VECTOR for each in given for stride in each.stride()[:2]]
    grid = (ceil_div(queries, QUERIES), heads, images)
    # The kernel's exponentials are powers of two.
    scale = math.log2(math.e) / math.sqrt(width)
    block = max(16, next_power(width))
    _short[grid](
        *given, out, *strides, width // VECTOR, queries, key.shape[1], scale,
        VECTOR=VECTOR, WIDTH=block, QUERIES=QUERIES, KEYS=KEYS, num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
    return out


def _in_vectors(x: Tensor) -> Tensor:
    """[B, L, N, D] with heads side by side, and rows that are whole vectors apart."""
    image, row, head, number = x.stride()
    fits = number == 1 and head == x.shape[3] and image % VECTOR == 0 and row % VECTOR == 0
    return x if fits else torch.clone(x, memory_format=torch.contiguous_format)
