"""GELU with the bias before it, units gated by GELU or SiLU, their gradients, and a product fused with its gate.

Programs hold tiles of rows and columns. Sizes are arguments, so that one compilation serves all levels of a model. The
fused product loads tiles by Hopper's TMA, which fills with zeros what lies outside, and multiplies the same rows by a
tile of each half. Two programs fit a multiprocessor, so that one multiplies while the other is at its gate.

Shape legend: R rows, C channels, I width inside the MLP.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from zoo.engine.kernel import kernel
from zoo.ops.common import ceil_div
from zoo.ops.triton.tiles import COLUMNS, ROWS, add_parts, parts_of, tile_of


@triton.jit
def erf_form(x):
    """|x|, and the normal distribution beyond it: the probability, and |x| times the density there.

    The probability by 7.1.26 of Abramowitz and Stegun, Handbook of Mathematical Functions, whose error is 1.5e-7 at
    most; it shares its exponential with the density. An exact erf has twice the instructions, and would take longer
    than memory.
    """
    # Behind 64 nothing is left of the tail, and infinity times nothing is not a number.
    size = tl.minimum(tl.abs(x), 64.0, propagate_nan=tl.PropagateNan.ALL)
    t = 1.0 + 0.23164189 * size
    t = tl.rsqrt(t * t)  # 1 / t in one instruction, where a division takes eight
    bell = tl.exp2(-0.72134752 * size * size)
    tail = 1.061405429 * t - 1.453152027
    tail = tail * t + 1.421413741
    tail = tail * t - 0.284496736
    tail = tail * t + 0.254829592
    return size, 0.5 * tail * t * bell, 0.39894228 * size * bell


@triton.jit
def _tanh_form(x):
    """What x is multiplied with, a sigmoid, and the slope of what stands in it, times x."""
    square = x * x
    within = 1.5957691216 * x * (1.0 + 0.044715 * square)
    return tl.sigmoid(within), 1.5957691216 * x * (1.0 + 0.134145 * square)


@kernel(do_not_specialize=["rows"])
def _bias_gelu(x, bias, out, rows, columns, TANH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    # Rows lie along the axis that has no limit.
    first = tl.program_id(0).to(tl.int64) * ROWS
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    below = tl.arange(0, ROWS)
    seen = (first + below < rows)[:, None] & (column < columns)[None, :]
    place = first * columns + below[:, None] * columns + column[None, :]
    value = tl.load(x + place, mask=seen, other=0.0).to(tl.float32)
    value += tl.load(bias + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]
    if TANH:
        value *= _tanh_form(value)[0]
    else:
        size, tail, _ = erf_form(value)
        # Off what GELU tends to, the difference: nothing cancels.
        value = tl.maximum(value, 0.0, propagate_nan=tl.PropagateNan.ALL) - size * tail
    tl.store(out + place, value.to(out.dtype.element_ty), mask=seen)


@kernel(do_not_specialize=["rows"])
def _bias_gelu_backward(
    grad, x, bias, out, part, rows, columns, TANH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    mine = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    below = tl.arange(0, ROWS)
    added = tl.load(bias + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(mine * ROWS, rows, tl.num_programs(1) * ROWS):
        seen = (first + below < rows)[:, None] & (column < columns)[None, :]
        place = first * columns + below[:, None] * columns + column[None, :]
        change = tl.load(grad + place, mask=seen, other=0.0).to(tl.float32)
        value = tl.load(x + place, mask=seen, other=0.0).to(tl.float32) + added
        if TANH:
            opened, slope = _tanh_form(value)
            change *= opened + opened * (1.0 - opened) * slope
        else:
            _, tail, inner = erf_form(value)
            beyond = tail - inner
            change *= tl.where(value < 0.0, beyond, 1.0 - beyond)
        tl.store(out + place, change.to(out.dtype.element_ty), mask=seen)
        total += change
    tl.store(part + mine * columns + column, tl.sum(total, 0), mask=column < columns)


def bias_gelu(x: Tensor, bias: Tensor, tanh: bool) -> Tensor:
    """GELU of x [..., I] plus bias [I]: [..., I]."""
    x, bias = x.contiguous(), bias.contiguous()
    out, columns = torch.empty_like(x), x.shape[-1]
    if rows := x.numel() // columns:
        grid = ceil_div(rows, ROWS), ceil_div(columns, COLUMNS)
        _bias_gelu[grid](x, bias, out, rows, columns, TANH=tanh, ROWS=ROWS, COLUMNS=COLUMNS, num_warps=8)
    return out


def bias_gelu_backward(grad: Tensor, x: Tensor, bias: Tensor, tanh: bool) -> tuple[Tensor, Tensor]:
    """Gradient of the output [..., I] -> of x [..., I] and of the bias [I]."""
    grad, x, bias = grad.contiguous(), x.contiguous(), bias.contiguous()
    out, grad_bias, columns = torch.empty_like(x), torch.empty_like(bias), x.shape[-1]
    rows = x.numel() // columns
    part = x.new_empty(parts_of(rows), 1, columns, dtype=torch.float32)
    _bias_gelu_backward[(ceil_div(columns, COLUMNS), part.shape[0])](
        grad, x, bias, out, part, rows, columns, TANH=tanh, ROWS=ROWS, COLUMNS=COLUMNS, num_warps=8
    )
    add_parts(part, grad_bias)
    return out, grad_bias


# Rows and columns of a tile of the gate: a thread reads 16 numbers of each half. Widths are multiples of 256.
GATE_ROWS, GATE_COLUMNS = 8, 256
# Columns of a program of the gate with SiLU, which takes one row.
SILU_BLOCK = 2048
# Programs of the backward at most, shared between tiles of columns: three a multiprocessor of a large GPU.
PROGRAMS = 384
# Of a product's tile: rows, columns of each half, channels at once; and what is under way. The fastest on an H200.
PRODUCT_ROWS, PRODUCT_COLUMNS, CHANNELS, STAGES = 128, 64, 64, 3
# Tiles of rows that take turns at the same columns, so that these are still in the cache.
TURNS = 8
# Of more channels a product is long enough to be worth more threads.
FEW_CHANNELS = 512


@triton.jit
def _gelu(x):
    """The erf form. Taken off max(x, 0) the tail cancels nowhere: in float32 the error stays below 4e-7."""
    size, tail, _ = erf_form(x)
    return tl.maximum(x, 0.0) - size * tail


@kernel(do_not_specialize=["rows"])
def _gated_gelu(x, bias, out, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    first, row, column, seen = tile_of(rows, columns, ROWS, COLUMNS)
    x += first * (2 * columns)
    place = row[:, None] * (2 * columns) + column[None, :]
    live = column < columns
    value = tl.load(x + place, mask=seen, other=0.0).to(tl.float32)
    gate = tl.load(x + columns + place, mask=seen, other=0.0).to(tl.float32)
    value += tl.load(bias + column, mask=live, other=0.0).to(tl.float32)[None, :]
    gate += tl.load(bias + columns + column, mask=live, other=0.0).to(tl.float32)[None, :]
    place = row[:, None] * columns + column[None, :]
    tl.store(out + first * columns + place, (value * _gelu(gate)).to(out.dtype.element_ty), mask=seen)


@kernel(do_not_specialize=["rows"])
def _gated_gelu_backward(grad, x, bias, out, part, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    mine = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    below = tl.arange(0, ROWS)
    live = column < columns
    value_bias = tl.load(bias + column, mask=live, other=0.0).to(tl.float32)[None, :]
    gate_bias = tl.load(bias + columns + column, mask=live, other=0.0).to(tl.float32)[None, :]
    values = tl.zeros([ROWS, COLUMNS], tl.float32)
    gates = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(mine * ROWS, rows, tl.num_programs(1) * ROWS):
        seen = (first + below < rows)[:, None] & live[None, :]
        place = first * columns + below[:, None] * columns + column[None, :]
        # Rows of both halves are twice as long.
        wide = first * (2 * columns) + below[:, None] * (2 * columns) + column[None, :]
        change = tl.load(grad + place, mask=seen, other=0.0).to(tl.float32)
        value = tl.load(x + wide, mask=seen, other=0.0).to(tl.float32) + value_bias
        gate = tl.load(x + columns + wide, mask=seen, other=0.0).to(tl.float32) + gate_bias
        size, tail, inner = erf_form(gate)
        opened = tl.maximum(gate, 0.0, propagate_nan=tl.PropagateNan.ALL) - size * tail
        slope = tl.where(gate < 0.0, tail - inner, 1.0 - (tail - inner))
        of_value, of_gate = change * opened, change * value * slope
        tl.store(out + wide, of_value.to(out.dtype.element_ty), mask=seen)
        tl.store(out + columns + wide, of_gate.to(out.dtype.element_ty), mask=seen)
        values += of_value
        gates += of_gate
    part += mine * (2 * columns) + column
    tl.store(part, tl.sum(values, 0), mask=live)
    tl.store(part + columns, tl.sum(gates, 0), mask=live)


@kernel(do_not_specialize=["rows", "channels", "columns"])
def _gated_gelu_product(
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


def gated_gelu(x: Tensor, bias: Tensor) -> Tensor:
    """X [..., 2 I] plus bias [2 I]; GELU of the second half times the first: [..., I]."""
    x, columns = x.contiguous(), x.shape[-1] // 2
    out = x.new_empty(*x.shape[:-1], columns)
    if out.numel():
        rows = out.numel() // columns
        grid = (ceil_div(rows, GATE_ROWS) * ceil_div(columns, GATE_COLUMNS),)
        _gated_gelu[grid](x, bias.contiguous(), out, rows, columns, ROWS=GATE_ROWS, COLUMNS=GATE_COLUMNS, num_warps=4)
    return out


def gated_gelu_backward(grad: Tensor, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Gradient of the output [..., I] -> of x [..., 2 I] and of the bias [2 I]."""
    grad, x, columns = grad.contiguous(), x.contiguous(), grad.shape[-1]
    out, grad_bias = torch.empty_like(x), bias.new_empty(2 * columns)
    rows, across = grad.numel() // max(columns, 1), ceil_div(columns, GATE_COLUMNS)
    parts = max(1, min(ceil_div(rows, GATE_ROWS), PROGRAMS // max(across, 1)))
    part = x.new_empty(parts, 1, 2 * columns, dtype=torch.float32)
    if columns:
        _gated_gelu_backward[(across, parts)](
            grad, x, bias.contiguous(), out, part, rows, columns, ROWS=GATE_ROWS, COLUMNS=GATE_COLUMNS, num_warps=8
        )
        add_parts(part, grad_bias)
    return out, grad_bias


def gated_gelu_product(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """X [R, C] by weight [2 I, C], plus bias [2 I]; GELU of the second half times the first: [R, I]."""
    (rows, channels), columns = x.shape, weight.shape[0] // 2
    x, out = x.contiguous(), x.new_empty(rows, columns)
    if out.numel():
        grid = (ceil_div(rows, PRODUCT_ROWS) * ceil_div(columns, PRODUCT_COLUMNS),)
        _gated_gelu_product[grid](
            TensorDescriptor.from_tensor(x, [PRODUCT_ROWS, CHANNELS]),
            TensorDescriptor.from_tensor(weight, [PRODUCT_COLUMNS, CHANNELS]), bias.contiguous(),
            TensorDescriptor.from_tensor(out, [PRODUCT_ROWS, PRODUCT_COLUMNS]), rows, channels, columns,
            ROWS=PRODUCT_ROWS, COLUMNS=PRODUCT_COLUMNS, CHANNELS=CHANNELS, TURNS=TURNS,
            num_warps=4 if channels <= FEW_CHANNELS else 8, num_stages=STAGES,
        )  # fmt: skip
    return out


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
    _swiglu[(x.shape[:-1].numel(), ceil_div(inner, SILU_BLOCK))](x, out, inner, BLOCK=SILU_BLOCK, num_warps=8)
    return out


def swiglu_backward(grad: Tensor, x: Tensor) -> Tensor:
    """Gradient [..., I] and input [..., 2 I] -> gradient of the input."""
    grad, x = grad.contiguous(), x.contiguous()
    out, inner = torch.empty_like(x), grad.shape[-1]
    _swiglu_backward[(x.shape[:-1].numel(), ceil_div(inner, SILU_BLOCK))](
        grad, x, out, inner, BLOCK=SILU_BLOCK, num_warps=8
    )
    return out
