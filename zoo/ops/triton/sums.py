# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs
"""Sums over rows, in two steps: programs add up rows of their own, and a last kernel adds what they have.

Always in the same order, and in float32. No program waits for another, and none adds where another writes.

Shape legend: R rows, C columns, P parts, S sums that the parts hold side by side.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from zoo.engine.kernel import kernel
from zoo.ops.common import ceil_div

# Rows and columns of a tile, 8 warps: 32 bytes a thread in half precision, where a warp reads lines as they are.
ROWS, COLUMNS = 8, 512
# Parts of a tile's columns at most: three tiles of a width of 3,072 for each half of a multiprocessor of a large GPU.
PARTS = 128
# Parts that the last kernel reads at once, and its columns: many programs, for little is read.
PARTS_AT_ONCE, LAST_COLUMNS = 128, 16


@kernel(do_not_specialize=["rows"])
def _column_sums(x, part, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    mine = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    below = tl.arange(0, ROWS)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(mine * ROWS, rows, tl.num_programs(1) * ROWS):
        seen = (first + below < rows)[:, None] & (column < columns)[None, :]
        place = first * columns + below[:, None] * columns + column[None, :]
        total += tl.load(x + place, mask=seen, other=0.0).to(tl.float32)
    tl.store(part + mine * columns + column, tl.sum(total, 0), mask=column < columns)


@triton.jit
def total_of(part, parts, columns, column, live, PARTS: tl.constexpr, COLUMNS: tl.constexpr):
    """Parts [P, C], added up in their order, of columns [COLUMNS] where they are ``live``."""
    total = tl.zeros([PARTS, COLUMNS], tl.float32)
    for start in range(0, parts, PARTS):
        index = start + tl.arange(0, PARTS)
        seen = (index < parts)[:, None] & live[None, :]
        total += tl.load(part + index[:, None] * columns + column[None, :], mask=seen, other=0.0)
    return tl.sum(total, 0)


@kernel(do_not_specialize=["parts"])
def _add_parts(part, first, second, third, parts, columns, PARTS: tl.constexpr, COLUMNS: tl.constexpr):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    which = tl.program_id(1)
    total = tl.zeros([PARTS, COLUMNS], tl.float32)
    for start in range(0, parts, PARTS):
        row = start + tl.arange(0, PARTS)
        seen = (row < parts)[:, None] & (column < columns)[None, :]
        place = (row * tl.num_programs(1) + which)[:, None] * columns + column[None, :]
        total += tl.load(part + place, mask=seen, other=0.0)
    value = tl.sum(total, 0)
    live = column < columns
    tl.store(first + column, value.to(first.dtype.element_ty), mask=live & (which == 0))
    if second is not None:
        tl.store(second + column, value.to(second.dtype.element_ty), mask=live & (which == 1))
    if third is not None:
        tl.store(third + column, value.to(third.dtype.element_ty), mask=live & (which == 2))


def parts_of(rows: int, most: int | None = None) -> int:
    """How many programs share the rows of one tile of columns; ``PARTS`` at most if nothing is said."""
    return min(max(ceil_div(rows, ROWS), 1), most or PARTS)


def add_parts(part: Tensor, *sums: Tensor) -> None:
    """Parts [P, S, C] in float32 -> S sums [C], up to three, each written in its own dtype."""
    parts, _, columns = part.shape
    grid = ceil_div(columns, LAST_COLUMNS), len(sums)
    first, second, third = (*sums, None, None)[:3]
    _add_parts[grid](part, first, second, third, parts, columns, PARTS=PARTS_AT_ONCE, COLUMNS=LAST_COLUMNS, num_warps=8)


def column_sums(x: Tensor, dtype: torch.dtype) -> Tensor:
    """[..., C] -> [C] in another dtype."""
    x, columns = x.contiguous(), x.shape[-1]
    out = x.new_empty(columns, dtype=dtype)
    rows = x.numel() // columns
    # Where one tile holds all columns there are no others beside it to be read.
    parts = parts_of(rows, PARTS if columns > COLUMNS else 2 * PARTS)
    part = x.new_empty(parts, 1, columns, dtype=torch.float32)
    _column_sums[(ceil_div(columns, COLUMNS), part.shape[0])](
        x, part, rows, columns, ROWS=ROWS, COLUMNS=COLUMNS, num_warps=8
    )
    add_parts(part, out)
    return out
