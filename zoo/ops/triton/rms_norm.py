# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs
"""Root-mean-square norms with the residual add before them: each direction reads and writes every number once.

    forward     the residual add, its sum, and the norm of that, a row a program
    backward    of each row, plus the gradient that reached it past the norm. Few programs go over all rows, so that
                each holds what its rows give to the weight's gradient until the end; ``sums.py`` adds the rest

Left to the compiler the residual add stands alone or the gradients are added on the way, and the weight's is summed by
few programs.

Shape legend: R rows, C columns, P programs.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from zoo.ops.common import next_power
from zoo.ops.triton.kernel import kernel
from zoo.ops.triton.norms import PROGRAMS, warps_of
from zoo.ops.triton.sums import add_parts


@kernel
def _forward(x, residual, weight, total, out, rstds, columns, eps: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    live = column < columns
    place = row * columns + column
    value = tl.load(x + place, mask=live, other=0.0)
    if residual is not None:
        value = value.to(tl.float32) + tl.load(residual + place, mask=live, other=0.0).to(tl.float32)
        # What is normed is what the next block will read.
        value = value.to(total.dtype.element_ty)
        tl.store(total + place, value, mask=live)
    factor = tl.load(weight + column, mask=live, other=0.0).to(tl.float32)
    wide = value.to(tl.float32)
    rstd = tl.rsqrt(tl.sum(wide * wide, 0) / columns + eps)
    tl.store(rstds + row, rstd)
    unit = (wide * rstd).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + place, (unit * factor).to(out.dtype.element_ty), mask=live)


@kernel(do_not_specialize=["rows"])
def _backward(grad, x, weight, rstds, past, out, part, rows, columns, COLUMNS: tl.constexpr):
    first = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    live = column < columns
    factor = tl.load(weight + column, mask=live, other=0.0)
    total = tl.zeros([COLUMNS], tl.float32)
    change = tl.load(grad + first * columns + column, mask=live, other=0.0)
    value = tl.load(x + first * columns + column, mask=live, other=0.0)
    rstd = tl.load(rstds + first)
    for row in range(first, rows, tl.num_programs(0)):
        place = row * columns + column
        if past is not None:
            beside = tl.load(past + place, mask=live, other=0.0)
        # The next row is under way while the sum of this one waits for all threads.
        following = row + tl.num_programs(0)
        seen = live & (following < rows)
        place_after = following * columns + column
        change_after = tl.load(grad + place_after, mask=seen, other=0.0)
        value_after = tl.load(x + place_after, mask=seen, other=0.0)
        rstd_after = tl.load(rstds + following, mask=following < rows, other=0.0)
        unit = value.to(tl.float32) * rstd
        wide = change.to(tl.float32)
        total += wide * unit.to(x.dtype.element_ty).to(tl.float32)
        wide *= factor.to(tl.float32)
        along = tl.sum(wide * unit, 0) / columns
        result = (wide - unit * along) * rstd
        if past is not None:
            result += beside.to(tl.float32)
        tl.store(out + place, result.to(out.dtype.element_ty), mask=live)
        change, value, rstd = change_after, value_after, rstd_after
    tl.store(part + first * columns + column, total, mask=live)


def rms_norm(x: Tensor, added: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """X [..., C] plus what is added, or x itself; the norm of that; and its factors [...]."""
    x = x.contiguous()
    out, rstd = torch.empty_like(x), x.new_empty(x.shape[:-1], dtype=torch.float32)
    total = x if added is None else torch.empty_like(x)
    if rows := rstd.numel():
        block = next_power(x.shape[-1])
        _forward[(rows,)](
            x, None if added is None else added.contiguous(), weight.contiguous(), None if added is None else total,
            out, rstd, x.shape[-1], eps, COLUMNS=block, num_warps=warps_of(block),
        )  # fmt: skip
    return total, out, rstd


def rms_norm_backward(
    grad: Tensor, past: Tensor | None, x: Tensor, weight: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of what was normed [..., C], with ``past``, which reached it past the norm; and of the weight [C]."""
    grad, x, weight, rstd = (each.contiguous() for each in (grad, x, weight, rstd))
    past = None if past is None else past.contiguous()
    out, grad_weight = torch.empty_like(x), torch.empty_like(weight)
    rows, columns = rstd.numel(), x.shape[-1]
    programs = min(rows, PROGRAMS)
    part = x.new_empty(programs, 1, columns, dtype=torch.float32)
    block = next_power(columns)
    if rows:
        _backward[(programs,)](
            grad, x, weight, rstd, past, out, part, rows, columns,
            COLUMNS=block, num_warps=warps_of(block),
        )  # fmt: skip
    add_parts(part, grad_weight)
    return out, grad_weight
