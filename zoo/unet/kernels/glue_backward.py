# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs
"""Gradients of the glue: one pass over the rows, and a small kernel that adds what its programs have summed.

A program keeps to its columns and goes over rows at equal distances, so that what the rows give to a bias is held until
the end; see zoo/gradients/kernels/sums.py. Sizes are no part of the code: one compilation serves all levels of a model.
Sums that nobody asks for are: with a bias that does not learn the kernel has none.

Shape legend: R rows (pixels of all images), I width inside the MLP, P parts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from zoo.ahead import Kernel
from zoo.gradients.kernels.erf import erf_form
from zoo.gradients.kernels.sums import add_parts
from zoo.operators import ceil_div

# Rows and columns of a tile, 8 warps: a vector of 8 numbers a thread of each of the three that are read. Widths inside
# the MLP are multiples of 256: no lane is idle.
GATE_ROWS, GATE_COLUMNS = 8, 256
# Programs at most, shared between tiles of columns: three a multiprocessor of a large GPU, which holds as many.
GATE_PROGRAMS = 384


@Kernel
@triton.jit(do_not_specialize=["rows"])
def _gated_gelu(grad, x, bias, out, part, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    mine = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    below = tl.arange(0, ROWS)
    live = column < columns
    beside_value = tl.load(bias + column, mask=live, other=0.0).to(tl.float32)[None, :]
    beside_gate = tl.load(bias + columns + column, mask=live, other=0.0).to(tl.float32)[None, :]
    values = tl.zeros([ROWS, COLUMNS], tl.float32)
    gates = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(mine * ROWS, rows, tl.num_programs(1) * ROWS):
        seen = (first + below < rows)[:, None] & live[None, :]
        place = first * columns + below[:, None] * columns + column[None, :]
        # Rows of both halves are twice as long.
        wide = first * (2 * columns) + below[:, None] * (2 * columns) + column[None, :]
        change = tl.load(grad + place, mask=seen, other=0.0).to(tl.float32)
        value = tl.load(x + wide, mask=seen, other=0.0).to(tl.float32) + beside_value
        gate = tl.load(x + columns + wide, mask=seen, other=0.0).to(tl.float32) + beside_gate
        size, tail, inner = erf_form(gate)
        opened = tl.maximum(gate, 0.0, propagate_nan=tl.PropagateNan.ALL) - size * tail
        slope = tl.where(gate < 0.0, tail - inner, 1.0 - (tail - inner))
        of_value, of_gate = change * opened, change * value * slope
        tl.store(out + wide, of_value.to(out.dtype.element_ty), mask=seen)
        tl.store(out + columns + wide, of_gate.to(out.dtype.element_ty), mask=seen)
        if part is not None:
            values += of_value
            gates += of_gate
    if part is not None:
        part += mine * (2 * columns) + column
        tl.store(part, tl.sum(values, 0), mask=live)
        tl.store(part + columns, tl.sum(gates, 0), mask=live)


def gated_gelu_backward(grad: Tensor, x: Tensor, bias: Tensor, summed: bool) -> tuple[Tensor, Tensor]:
    """Gradient of the output [R, I] -> of x [R, 2 I] and, if summed, of the bias [2 I], else [0]."""
    columns = grad.shape[-1]
    out, grad_bias = torch.empty_like(x), bias.new_empty(2 * columns if summed else 0)
    rows = grad.numel() // max(columns, 1)
    across = ceil_div(columns, GATE_COLUMNS)
    parts = max(1, min(ceil_div(rows, GATE_ROWS), GATE_PROGRAMS // max(across, 1)))
    part = x.new_empty(parts, 1, 2 * columns, dtype=torch.float32) if summed else None
    if columns:
        _gated_gelu[(across, parts)](
            grad, x, bias, out, part, rows, columns, ROWS=GATE_ROWS, COLUMNS=GATE_COLUMNS, num_warps=8
        )
        if part is not None:
            add_parts(part, grad_bias)
    return out, grad_bias
