"""A product in a lower precision than its float32 weight, as autocast has it, and its gradients.

Autocast converts the weight, and autograd what comes back: the gradient of the weight is written in the low dtype, and
then in float32. Here the product that makes it writes float32, and the bias' is one pass over the rows.

Shape legend: R rows, C columns, N rows of a weight.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.gradients import operators
from zoo.layers import compute_dtype, ordinary
from zoo.ops.common import differentiable_once

_LOW = (torch.bfloat16, torch.float16)


def takes_low(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether autocast would convert weight and bias for x, and ``low_linear`` is for them."""
    if x.dtype not in _LOW or not ordinary(weight) or weight.dtype != torch.float32:
        return False
    if bias is not None and not (ordinary(bias) and bias.dtype == torch.float32):
        return False
    return torch.is_autocast_enabled(x.device.type) and compute_dtype(x) == x.dtype


def low_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A low x [..., C] times a float32 weight [N, C], and a bias [N]: [..., N], low. With a gradient."""
    out: Tensor = _Linear.apply(x, weight, bias)
    return out


def low_add_linear(added: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """The same of x [R, C] without a bias, in one product with what it is added to [R, N], low as well."""
    out: Tensor = _AddLinear.apply(added, x, weight)
    return out


class _Linear(torch.autograd.Function):
    """Gradients of weight and bias are summed and kept in float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        low = operators.lowered(weight, x.dtype)
        _keep_factors(ctx, x, low, *ctx.needs_input_grad[:2])
        ctx.biased = bias is not None
        return F.linear(x, low, None if bias is None else operators.lowered(bias, x.dtype))

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, low = ctx.saved_tensors
        rows = _rows(grad)
        wanted = ctx.needs_input_grad
        return (
            grad @ low if wanted[0] else None,
            operators.weight_gradient(rows, _rows(x)) if wanted[1] else None,
            operators.column_sums(rows, torch.float32) if ctx.biased and wanted[2] else None,
        )


class _AddLinear(torch.autograd.Function):
    """Of what is added the gradient is the sum's as it is."""

    @staticmethod
    def forward(ctx: Any, added: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        low = operators.lowered(weight, x.dtype)
        _keep_factors(ctx, x, low, *ctx.needs_input_grad[1:])
        return torch.addmm(added, x, low.t())

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, low = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        return grad, grad @ low if wanted[1] else None, operators.weight_gradient(grad, x) if wanted[2] else None


def _keep_factors(ctx: Any, x: Tensor, low: Tensor, x_learns: bool, weight_learns: bool) -> None:
    """Each factor is for the gradient of the other: before a frozen weight no activation is held."""
    ctx.save_for_backward(x if weight_learns else None, low if x_learns else None)


def _rows(x: Tensor) -> Tensor:
    return torch.atleast_2d(x).flatten(0, -2)
