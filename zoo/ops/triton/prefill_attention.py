# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs
"""Attention of many new tokens a row over a cache that holds them already, whatever stands before them.

A program takes some tokens of one head and walks the slots that they see, and no others: where a prompt goes on from is
known on the device alone. Query heads that share a key head read the same keys, none is copied.

Shape legend: B rows, T tokens, H query heads, K key and value heads, S slots, D width of a head.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from zoo.ops.common import ceil_div, next_power
from zoo.ops.triton.kernel import kernel


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


def _tile(tokens: int, width: int) -> tuple[int, int, int, int]:
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
    rows, block, warps, stages = _tile(tokens, width)
    log2_e = 1.4426950408889634
    _prefill[(ceil_div(tokens, rows), heads, batch)](
        query, cache, positions, out, width**-0.5 * log2_e, tokens, slots, slots if window is None else window,
        HEADS=heads, KEY_HEADS=key_heads, D=width, ROWS=rows, BLOCK=block, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out
