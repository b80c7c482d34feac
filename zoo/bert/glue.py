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
from zoo.bert.attention import compute_dtype
from zoo.layers import plain
from zoo.operators import differentiable_once, transformed

_LOW = (torch.bfloat16, torch.float16)


def by_operators(x: Tensor) -> bool:
    """Whether a layer in training goes this way with x: gradients are wanted, and kernels take it."""
    if not torch.is_grad_enabled() or not _ordinary(x) or not operators.kernels_run(x) or transformed():
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
    out: Tensor = _Linear.apply(low, layer.weight, layer.bias)
    return out


def product(x: Tensor, low: Tensor, layer: nn.Linear) -> tuple[Tensor, Tensor | None]:
    """A linear layer of x without its bias, and the bias, which whoever comes next adds; None where nothing is left."""
    if plain(layer) and _ordinary(layer.bias):
        if _takes_low(low, layer):
            return _Linear.apply(low, layer.weight, None), layer.bias
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
    if not plain(norm, nn.LayerNorm) or not (_ordinary(norm.weight) and _ordinary(norm.bias)):
        return False
    if x.shape[-1] > operators.WIDEST_NORM or norm.weight.shape != x.shape[-1:]:
        return False
    dtypes = {x.dtype, norm.weight.dtype, norm.bias.dtype} | (set() if shift is None else {shift.dtype})
    return len(dtypes) == 1 and added.dtype in (x.dtype, compute_dtype(x))


def _takes_low(x: Tensor, layer: nn.Linear) -> bool:
    """Whether autocast would convert the layer's weight for x."""
    if not plain(layer) or not _ordinary(layer.weight) or x.dtype not in _LOW:
        return False
    if layer.bias is not None and not (_ordinary(layer.bias) and layer.bias.dtype == torch.float32):
        return False
    autocast = torch.is_autocast_enabled(x.device.type) and compute_dtype(x) == x.dtype
    return autocast and layer.weight.dtype == torch.float32


def _ordinary(tensor: Any) -> bool:
    """Whether a tensor is there, and not made of several that stand for it."""
    return tensor is not None and not hasattr(tensor, "__tensor_flatten__")


class _Beside(torch.autograd.Function):
    """One node with both outputs, so that both gradients of x are added in one pass. No operator returns x itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, low: torch.dtype) -> tuple[Tensor, Tensor]:
        return x.view_as(x), operators.lowered(x, low)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor, low_grad: Tensor) -> tuple[Tensor, None]:
        return operators.add_low(grad, low_grad), None


class _Linear(torch.autograd.Function):
    """A low x [..., C] times a float32 weight [N, C]: gradients of weight and bias are summed and kept in float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        low = operators.lowered(weight, x.dtype)
        ctx.save_for_backward(x, low)
        ctx.biased = bias is not None
        return F.linear(x, low, None if bias is None else operators.lowered(bias, x.dtype))

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, low = ctx.saved_tensors
        rows = grad.flatten(0, -2)
        wanted = ctx.needs_input_grad
        return (
            grad @ low if wanted[0] else None,
            operators.weight_gradient(rows, x.flatten(0, -2)) if wanted[1] else None,
            operators.column_sums(rows, torch.float32) if ctx.biased and wanted[2] else None,
        )
