# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs
"""Tiles of rows and columns."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tile_of(rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """A program's first row, rows [ROWS] from there on, columns [COLUMNS], and which of them are there."""
    across = tl.cdiv(columns, COLUMNS)
    first = (tl.program_id(0) // across).to(tl.int64) * ROWS
    row = tl.arange(0, ROWS)
    column = (tl.program_id(0) % across) * COLUMNS + tl.arange(0, COLUMNS)
    seen = (first + row < rows)[:, None] & (column < columns)[None, :]
    return first, row, column, seen
