# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs
"""A product whose two halves are gated before they are written: the wide activation of an MLP never reaches memory.

Tiles come through descriptors: Hopper's copy engine brings them, and fills with zeros what lies outside. A program
multiplies the same rows by a tile of each half, and holds both results. Two programs fit a multiprocessor, so that one
multiplies while the other is at its gate, which takes half as long as the product.

Sizes are no part of the code. Without gradients.

Shape legend: R rows, C channels, I width inside the MLP.
"""

from __future__ import annotations

import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from zoo.ops.common import ceil_div
from zoo.ops.triton.kernel import kernel
from zoo.unet.kernels.glue import _gelu

# Of a tile: rows, columns of each half, channels at once; and what is under way. The fastest of some on an H200.
ROWS, COLUMNS, CHANNELS, STAGES = 128, 64, 64, 3
# Tiles of rows that take turns at the same columns, so that these are still in the cache.
TURNS = 8
# Of more channels a product is long enough to be worth more threads.
FEW_CHANNELS = 512


@kernel(do_not_specialize=["rows", "channels", "columns"])
def _gated_gelu(
    x, weight, bias, out, rows, channels, columns,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, CHANNELS: tl.constexpr, TURNS: tl.constexpr,
):  # fmt: skip
    down, across = tl.cdiv(rows, ROWS), tl.cdiv(columns, COLUMNS)
    turn = tl.program_id(0) // (TURNS * across)
    within = tl.program_id(0) % (TURNS * across)
    together = tl.minimum(down - turn * TURNS, TURNS)
    row = (turn * TURNS + within % together) * ROWS
    column = within // together * COLUMNS
    value = tl.zeros([ROWS, COLUMNS], tl.float32)
    gate = tl.zeros([ROWS, COLUMNS], tl.float32)
    for channel in range(0, channels, CHANNELS):
        tile = x.load([row, channel])
        value = tl.dot(tile, weight.load([column, channel]).T, value)
        gate = tl.dot(tile, weight.load([columns + column, channel]).T, gate)
    place = column + tl.arange(0, COLUMNS)
    value += tl.load(bias + place, mask=place < columns, other=0.0).to(tl.float32)[None, :]
    gate += tl.load(bias + columns + place, mask=place < columns, other=0.0).to(tl.float32)[None, :]
    out.store([row, column], (value * _gelu(gate)).to(out.dtype))


def gated_gelu_product(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """X [R, C] by weight [2 I, C], plus bias [2 I]; GELU of the second half times the first: [R, I]."""
    (rows, channels), columns = x.shape, weight.shape[0] // 2
    out = x.new_empty(rows, columns)
    if out.numel():
        grid = (ceil_div(rows, ROWS) * ceil_div(columns, COLUMNS),)
        _gated_gelu[grid](
            TensorDescriptor.from_tensor(x, [ROWS, CHANNELS]),
            TensorDescriptor.from_tensor(weight, [COLUMNS, CHANNELS]),
            bias,
            TensorDescriptor.from_tensor(out, [ROWS, COLUMNS]),
            rows, channels, columns,
            ROWS=ROWS, COLUMNS=COLUMNS, CHANNELS=CHANNELS, TURNS=TURNS,
            num_warps=4 if channels <= FEW_CHANNELS else 8, num_stages=STAGES,
        )  # fmt: skip
    return out
