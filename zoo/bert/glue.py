"""What stands between the products of a layer, in training, by operators of our own where kernels run.

    x ── beside ─┬─ x                                      backward: both gradients of x in one pass
                 └─ low ── linear ── attention ── product ──▶ added, and the bias that it lacks
    add_norm of x and added ─┬─ x                          backward: both gradients of the norm in one pass, and with
                             └─ low ── product             them the sums for weight, bias, and the product's bias
                                          └─ activated     backward: the product's bias as well

Under autocast the stream is float32 and products take the low copy of it; elsewhere both are one tensor. What is left
are products and attention, and the compiler has nearly nothing to write code for.

Only where x is for it (``by_operators``). A module that is not what it was built as (an adapter in its place, a hook, a
weight of another dtype) is called, with the stream and not its copy.

Shapes: as in layer.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.bert import operators
from zoo.layers import compute_dtype, ordinary, plain
from zoo.ops.common import differentiable_once, transformed
from zoo.ops.products import low_linear, takes_low


def by_operators(x: Tensor) -> bool:
    """Whether a layer in training goes this way with x: gradients are wanted, and kernels take it."""
    if not torch.is_grad_enabled() or not ordinary(x) or not operators.kernels_run(x) or transformed():
        return False
    # What autocast normalises is float32, whatever it is given.
    return x.dtype == torch.float32 or not torch.is_autocast_enabled(x.device.type)


def beside(x: Tensor) -> tuple[Tensor, Tensor]:
    """X [..., C] and what products take of it. Go on with the x that is returned."""
    low = compute_dtype(x)
    if low == x.dtype:
        return x, x
    both: tuple[Tensor, Tensor] = _Beside.apply(x, low)
    return both


def linear(x: Tensor, low: Tensor, layer: nn.Linear) -> Tensor:
    """A linear layer of x, of which ``low`` is what products take."""
    if not _takes_low(low, layer):
        return layer(x)  # type: ignore[no-any-return]
    return low_linear(low, layer.weight, layer.bias)


def product(x: Tensor, low: Tensor, layer: nn.Linear) -> tuple[Tensor, Tensor | None]:
    """A linear layer of x without its bias, and the bias, which whoever comes next adds; None where nothing is left."""
    if plain(layer) and ordinary(layer.bias):
        if _takes_low(low, layer):
            return low_linear(low, layer.weight, None), layer.bias
        if layer.weight.dtype == layer.bias.dtype == low.dtype == compute_dtype(low):
            return F.linear(low, layer.weight), layer.bias
    return linear(x, low, layer), None


def activated(
    x: Tensor, low: Tensor, layer: nn.Linear, function: Callable[[Tensor], Tensor], tanh: bool | None
) -> Tensor:
    """A linear layer of x and its activation.

    Args:
        x: [..., C].
        low: [..., C], what products take of it.
        layer: The layer.
        function: The activation.
        tanh: Which form of GELU it is; None if it is none.
    """
    if tanh is None:
        return function(linear(x, low, layer))
    out, bias = product(x, low, layer)
    if bias is None:
        return function(out)
    activated: Tensor = operators.bias_gelu(out, bias, tanh)
    return activated


def add_norm(x: Tensor, added: Tensor, shift: Tensor | None, norm: nn.LayerNorm) -> tuple[Tensor, Tensor]:
    """The norm of x [..., C] plus what is added [..., C], and what products take of it. See ``operators``."""
    low = compute_dtype(x)
    if low == x.dtype:
        stream = add_last_norm(x, added, shift, norm)
        return stream, stream
    if not _norm_fits(x, added, shift, norm):
        return beside(_called(x, added, shift, norm))
    stream, copy, *_ = operators.add_layer_norm(x, added, shift, norm.weight, norm.bias, norm.eps, low)
    return stream, copy


def add_last_norm(x: Tensor, added: Tensor, shift: Tensor | None, norm: nn.LayerNorm) -> Tensor:
    """The norm alone, where no product follows."""
    if not _norm_fits(x, added, shift, norm):
        return _called(x, added, shift, norm)
    stream: Tensor = operators.add_layer_norm(x, added, shift, norm.weight, norm.bias, norm.eps, None)[0]
    return stream


def _called(x: Tensor, added: Tensor, shift: Tensor | None, norm: nn.Module) -> Tensor:
    normed: Tensor = norm(x + (added if shift is None else added + shift))
    return normed


def _norm_fits(x: Tensor, added: Tensor, shift: Tensor | None, norm: nn.LayerNorm) -> bool:
    if not plain(norm, nn.LayerNorm) or not (ordinary(norm.weight) and ordinary(norm.bias)):
        return False
    if x.shape[-1] > operators.WIDEST_NORM or norm.weight.shape != x.shape[-1:]:
        return False
    dtypes = {x.dtype, norm.weight.dtype, norm.bias.dtype} | (set() if shift is None else {shift.dtype})
    return len(dtypes) == 1 and added.dtype in (x.dtype, compute_dtype(x))


def _takes_low(x: Tensor, layer: nn.Linear) -> bool:
    """Whether autocast would convert the layer's weight for x."""
    return plain(layer) and takes_low(x, layer.weight, layer.bias)


class _Beside(torch.autograd.Function):
    """One node with both outputs, so that both gradients of x are added in one pass. No operator returns x itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, low: torch.dtype) -> tuple[Tensor, Tensor]:
        return x.view_as(x), x.to(low)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor, low_grad: Tensor) -> tuple[Tensor, None]:
        return grad + low_grad, None
