"""Glue and products where gradients are wanted: the operators of operators.py, and what their backward runs.

Written in torch's functions the backward of a gate or a norm is several passes, and the sum over rows for each bias is
one more. Here each is a pass, with what weight and biases get summed on the way. Where a kernel of ours does not run,
or more is asked for than a gradient, ``fallback`` is differentiated as it is: ``runs`` tells.

Shape legend: R rows (pixels of all images), C channels, I width inside the MLP, N rows of a weight.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.layers import compute_dtype, ordinary, plain
from zoo.ops.common import differentiated, forward_mode, transformed, wide
from zoo.ops.opaque import OperatorLibrary
from zoo.ops.products import column_sums, low_add_linear, low_linear, takes_low
from zoo.unet import operators

_LIBRARY = OperatorLibrary("zoo_unet")


def runs(*tensors: Tensor) -> bool:
    """Whether glue of these learns by operators of ours: a gradient is wanted, nothing else, and kernels take them.

    May be asked inside a region.
    """
    if not differentiated(*tensors) or transformed() or forward_mode():
        return False
    return all(ordinary(tensor) for tensor in tensors) and operators.kernels_take(*tensors)


# --- the gate ---

gated_gelu = operators.gated_gelu


@_LIBRARY.operator("(Tensor grad, Tensor x, Tensor bias, bool summed) -> (Tensor, Tensor)")
def gated_gelu_backward(grad: Tensor, x: Tensor, bias: Tensor, summed: bool) -> tuple[Tensor, Tensor]:
    """Gradients of ``gated_gelu``.

    Args:
        grad: [R, I].
        x: [R, 2 I].
        bias: [2 I].
        summed: Whether that of the bias is wanted.

    Returns:
        [R, 2 I] of x, and [2 I] of the bias, or [0].
    """
    found: tuple[Tensor, Tensor] = operators.run_glue(
        "gated_gelu_backward", grad, x, bias, summed, module="glue_backward"
    )
    return found


@_LIBRARY.fake("gated_gelu_backward")
def _(grad: Tensor, x: Tensor, bias: Tensor, summed: bool) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), bias.new_empty(bias.shape if summed else 0)


def _keep_gate(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gate_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    summed = ctx.needs_input_grad[1]
    grad_x, grad_bias = gated_gelu_backward(grad, *ctx.saved_tensors, summed)
    return grad_x, grad_bias if summed else None


_LIBRARY.autograd("gated_gelu", _gate_gradients, _keep_gate)


# --- the norms ---


@_LIBRARY.operator(
    "(Tensor x, Tensor residual, Tensor weight, Tensor bias, Tensor? shift, float eps) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
def kept_add_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, shift: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """``operators.add_norm``, and what its backward needs: the sum that is normed, and mean and factor of its rows.

    Args:
        x: [R, C].
        residual: [R, C].
        weight: [C].
        bias: [C].
        shift: [C], added to the sum that is returned and not to the one that is normed, or None.
        eps: Added to the variance.

    Returns:
        Sum and norm, [R, C] each; the sum without the shift [R, C], or [0] where there is none; and mean and factor
        [R] of its rows in float32, of float64 in float64.
    """
    operators.check_sum(x, residual, shift)
    return operators.run_glue("kept_add_norm", x, residual, weight, bias, shift, eps)  # type: ignore[no-any-return]


@_LIBRARY.fake("kept_add_norm")
def _(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, shift: Tensor | None, eps: float) -> Any:
    total = x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, residual.dtype))
    kept = total.new_empty(0 if shift is None else x.shape)
    return total, torch.empty_like(total), kept, *_statistics(total)


@_LIBRARY.operator("(Tensor x, Tensor weight, Tensor bias, float eps) -> (Tensor, Tensor, Tensor)")
def kept_row_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """``operators.row_norm`` of x [R, C], and mean and factor [R] of its rows, as of ``kept_add_norm``."""
    return operators.run_glue("kept_row_norm", x, weight, bias, eps)  # type: ignore[no-any-return]


@_LIBRARY.fake("kept_row_norm")
def _(x: Tensor, *_: Any) -> Any:
    return x.new_empty(x.shape), *_statistics(x)


def _statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    mean, scale = (x.new_empty(x.shape[0], dtype=wide(x.dtype)) for _ in range(2))
    return mean, scale


@_LIBRARY.operator(
    "(Tensor grad, Tensor? more, Tensor summed, Tensor mean, Tensor scale, Tensor weight, bool weighted, bool shifted) "
    "-> (Tensor, Tensor, Tensor, Tensor)"
)
def norm_backward(
    grad: Tensor, more: Tensor | None, summed: Tensor, mean: Tensor, scale: Tensor, weight: Tensor, weighted: bool,
    shifted: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of both norms.

    Args:
        grad: [R, C], of the norm.
        more: [R, C], of the sum that is returned, if there is one.
        summed: [R, C], what was normed.
        mean: [R].
        scale: [R], the factor of each row.
        weight: [C].
        weighted: Whether those of weight and bias are wanted.
        shifted: Whether that of the shift is wanted, the sum of ``more`` over rows.

    Returns:
        [R, C] of each summand; and in the dtype of the weight [C] of weight and of bias, and of the shift, each [0]
        where it is not wanted.
    """
    arguments = grad, more, summed, mean, scale, weight, weighted, shifted
    return operators.run_glue("norm_backward", *arguments, module="glue_backward")  # type: ignore[no-any-return]


@_LIBRARY.fake("norm_backward")
def _(
    grad: Tensor, more: Tensor | None, summed: Tensor, mean: Tensor, scale: Tensor, weight: Tensor, weighted: bool,
    shifted: bool,
) -> Any:  # fmt: skip
    sizes = summed.shape[-1] if weighted else 0, summed.shape[-1] if shifted else 0
    return summed.new_empty(summed.shape), *(weight.new_empty(size) for size in (sizes[0], *sizes))


def add_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, shift: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """``operators.add_norm`` with a gradient."""
    total, out, *_ = kept_add_norm(x, residual, weight, bias, shift, eps)
    return total, out


def row_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """``operators.row_norm`` with a gradient."""
    out: Tensor = kept_row_norm(x, weight, bias, eps)[0]
    return out


def _keep_sum(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, residual, weight, bias, shift, _ = inputs
    total, _, kept, *statistics = output
    ctx.dtypes = x.dtype, residual.dtype, bias.dtype, weight.dtype if shift is None else shift.dtype
    ctx.save_for_backward(total if shift is None else kept, *statistics, weight)
    ctx.mark_non_differentiable(kept, *statistics)
    # Nobody reads zeros in place of a gradient that is not there.
    ctx.set_materialize_grads(False)


def _sum_gradients(ctx: Any, more: Tensor | None, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    weighted, shifted = any(ctx.needs_input_grad[2:4]), ctx.needs_input_grad[4] and more is not None
    weight, bias, shift = None, None, None
    if grad is not None:
        out, *sums = norm_backward(grad, more, *ctx.saved_tensors, weighted, shifted)
        if weighted:
            weight, bias = sums[0], sums[1].to(ctx.dtypes[2])
        if shifted:
            shift = sums[2].to(ctx.dtypes[3])
    elif more is not None:
        out = more
        shift = column_sums(more, ctx.dtypes[3]) if shifted else None
    else:
        return (None,) * 6
    return out.to(ctx.dtypes[0]), out.to(ctx.dtypes[1]), weight, bias, shift, None


_LIBRARY.autograd("kept_add_norm", _sum_gradients, _keep_sum)


def _keep_rows(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, bias, _ = inputs
    ctx.bias_dtype = bias.dtype
    ctx.save_for_backward(x, *output[1:], weight)
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _row_gradients(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 4
    weighted = any(ctx.needs_input_grad[1:3])
    out, weight, bias, _ = norm_backward(grad, None, *ctx.saved_tensors, weighted, False)
    return out, weight if weighted else None, bias.to(ctx.bias_dtype) if weighted else None, None


_LIBRARY.autograd("kept_row_norm", _row_gradients, _keep_rows)


# --- biases of convolutions ---

conv_add, conv_bias = operators.conv_add, operators.conv_bias


def _keep_dtypes(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.dtypes = tuple(each.dtype for each in inputs)


def _added_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Of a sum every summand has the gradient of the sum; the bias, which is in every row, that of them all."""
    bias = column_sums(grad, ctx.dtypes[1]) if ctx.needs_input_grad[1] else None
    x, *residual = (grad.to(dtype) for dtype in (ctx.dtypes[0], *ctx.dtypes[2:]))
    return x, bias, *residual


_LIBRARY.autograd("conv_add", _added_gradients, _keep_dtypes)
_LIBRARY.autograd("conv_bias", _added_gradients, _keep_dtypes)


# --- products ---


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A product [..., C], [N, C] and [N] or None -> [..., N]; under autocast with gradients of ``zoo.ops.products``."""
    if not runs(x, weight, *(() if bias is None else (bias,))):
        return F.linear(x, weight, bias)
    # As autocast would.
    low = x.to(compute_dtype(x))
    return low_linear(low, weight, bias) if takes_low(low, weight, bias) else F.linear(x, weight, bias)


def add_linear(added: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """The same of x [R, C] without a bias, in one product with what it is added to [R, N]."""
    if runs(added, x, weight) and added.dtype == x.dtype and takes_low(x, weight, None):
        return low_add_linear(added, x, weight)
    return torch.addmm(added, x, weight.t())


def product(x: Tensor, layer: nn.Linear) -> Tensor:
    """``linear`` of a layer, which is called if it is not what it was built as."""
    if plain(layer):
        return linear(x, layer.weight, layer.bias)
    out: Tensor = layer(x)
    return out
