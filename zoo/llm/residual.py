"""Where the residual stream is read and written, by operators of our own where kernels run.

For prompts they leave the compiler nothing to write code for, in training each direction of an add and a norm is one
pass. A single token has operators that do more at once, see layer.py.

    x ─┬─ norm_beside ──▶ normed ── ... ──▶ mixed        backward: both gradients of x in one pass
       └─ add_norm with mixed ──▶ x and normed           forward: add and norm in one pass; backward the same
          x ─── add_linear with hidden ──▶ x             the add is part of the product

Elsewhere these are a norm, a linear layer and an add, for the compiler to fuse.

Shapes: B batch, T tokens, C width, I width inside.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from zoo.layers import plain
from zoo.llm import operators
from zoo.llm.norm import RMSNorm
from zoo.ops.common import differentiable_once, transformed


def norm_alone(x: Tensor, norm: RMSNorm) -> Tensor:
    """The norm of x [B, T, C], which nobody reads but the norm."""
    if not _norm_fits(x, norm):
        return norm(x)  # type: ignore[no-any-return]
    normed: Tensor = operators.rms_norm_rows(x, norm.weight, norm.eps)[0]
    return normed


def norm_beside(x: Tensor, norm: RMSNorm) -> tuple[Tensor, Tensor]:
    """X [B, T, C] and its norm. Go on with the x that is returned: its gradient is added in the norm's backward."""
    if not _norm_fits(x, norm):
        return x, norm(x)
    if not torch.is_grad_enabled():
        return x, operators.rms_norm_rows(x, norm.weight, norm.eps)[0]
    both: tuple[Tensor, Tensor] = _Beside.apply(x, norm.weight, norm.eps)
    return both


def add_norm(x: Tensor, added: Tensor, norm: RMSNorm) -> tuple[Tensor, Tensor]:
    """X [B, T, C] plus what is added [B, T, C], and the norm of that."""
    if added.dtype != x.dtype or not _norm_fits(x, norm):
        x = x + added
        return x, norm(x)
    total, normed, _ = operators.add_rms_norm(x, added, norm.weight, norm.eps)
    return total, normed


def add_linear(x: Tensor, hidden: Tensor, linear: nn.Module) -> Tensor:
    """X [B, T, C] plus a linear layer of hidden [B, T, I]."""
    if not plain(linear) or linear.bias is not None or hidden.dtype != x.dtype or not _fits(x, linear.weight):
        return x + linear(hidden)  # type: ignore[no-any-return]
    # The compiler finds an add behind a product only where both have two dimensions.
    return torch.addmm(x.flatten(0, -2), hidden.flatten(0, -2), linear.weight.t()).view_as(x)


def by_operators(x: Tensor) -> bool:
    """Whether x [B, T, C] is for the operators of many tokens: it has several a row or is of training, and kernels run.

    Not under a functional transform of torch's, which takes no backward of ours.
    """
    many = torch.is_grad_enabled() or (x.dim() == 3 and x.shape[1] > 1)
    return many and operators.kernels_run(x) and not transformed()


def _norm_fits(x: Tensor, norm: nn.Module) -> bool:
    return plain(norm, RMSNorm) and x.shape[-1] <= operators.WIDEST_NORM and _fits(x, norm.weight)


def _fits(x: Tensor, weight: Any) -> bool:
    """Whether x is for the operators, and kernels take it with this weight as they are."""
    if not by_operators(x) or torch.is_autocast_enabled(x.device.type):
        return False
    return weight.dtype == x.dtype and not hasattr(weight, "__tensor_flatten__")


class _Beside(torch.autograd.Function):
    """An operator cannot return what it was given, so that the gradient of x would be added to the norm's later."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        normed, scale = operators.rms_norm_rows(x, weight, eps)
        ctx.save_for_backward(x, weight, scale)
        return x.view_as(x), normed

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, above: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        return (*operators.rms_norm_backward(grad, x, weight, scale, above), None)
