# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs
"""SiLU of one half times the other, and its gradient: every value read once and written once.

Compiled from torch's functions the gradient, a concatenation, reads its inputs once for each half.

Shape legend: R rows, I columns of a half.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from zoo.ops.common import ceil_div
from zoo.ops.triton.kernel import kernel

# Columns that a program takes.
BLOCK = 2048


@kernel
def _swiglu(x, out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(x + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * width + width + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + column, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=inside)


@kernel
def _swiglu_backward(grad, x, out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    above = tl.load(grad + row * width + column, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(x + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * width + width + column, mask=inside, other=0.0).to(tl.float32)
    opened = tl.sigmoid(gate)
    silu = gate * opened
    slope = opened + silu * (1.0 - opened)
    tl.store(out + row * 2 * width + column, (above * up * slope).to(out.dtype.element_ty), mask=inside)
    tl.store(out + row * 2 * width + width + column, (above * silu).to(out.dtype.element_ty), mask=inside)


def swiglu(x: Tensor) -> Tensor:
    """[..., 2 I] -> [..., I]."""
    x, inner = x.contiguous(), x.shape[-1] // 2
    out = x.new_empty(*x.shape[:-1], inner)
    _swiglu[(x.shape[:-1].numel(), ceil_div(inner, BLOCK))](x, out, inner, BLOCK=BLOCK, num_warps=8)
    return out


def swiglu_backward(grad: Tensor, x: Tensor) -> Tensor:
    """Gradient [..., I] and input [..., 2 I] -> gradient of the input."""
    grad, x = grad.contiguous(), x.contiguous()
    out, inner = torch.empty_like(x), grad.shape[-1]
    _swiglu_backward[(x.shape[:-1].numel(), ceil_div(inner, BLOCK))](grad, x, out, inner, BLOCK=BLOCK, num_warps=8)
    return out
