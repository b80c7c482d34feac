# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs
"""Attention to few keys: those of a text, or the pixels of a small image.

The library's kernels are made for long rows of keys. They clear a counter first, which in a CUDA graph keeps the GPU
idle on both sides, and take as long again to begin. Here a program holds some queries of a head, and the keys of the
head are one or two tiles; queries, keys and values are read where they lie, between others of the same product.

Sizes are no part of the code: one compilation for each power of two that a head's width fits in. Without gradients.

Shape legend: B images, T queries of each, L keys of each, N heads, D their width.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from zoo.ops.common import ceil_div, next_power
from zoo.ops.triton.kernel import kernel

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
def _attend(
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
    _attend[grid](
        *given, out, *strides, width // VECTOR, queries, key.shape[1], scale,
        VECTOR=VECTOR, WIDTH=block, QUERIES=QUERIES, KEYS=KEYS, num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
    return out


def _in_vectors(x: Tensor) -> Tensor:
    """[B, L, N, D] with heads side by side, and rows that are whole vectors apart."""
    image, row, head, number = x.stride()
    fits = number == 1 and head == x.shape[3] and image % VECTOR == 0 and row % VECTOR == 0
    return x if fits else torch.clone(x, memory_format=torch.contiguous_format)
