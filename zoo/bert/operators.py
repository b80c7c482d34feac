"""What stands between the products of a layer that learns, as torch operators, so that the layer stays one graph.

On a GPU each runs Triton kernels or one call of the library, elsewhere torch's own operators compute the same. Compiled
from torch's functions the norms and the sums of gradients are most of what a compiler writes for a layer; these cost it
nothing, and their kernels compile while the layer is traced. ``glue.py`` decides where they are used.

Products of float32 weights run in a lower precision under autocast, see ``zoo.ops.products``.

Shape legend: C columns, I width inside the MLP. All is computed and summed in float32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zoo.bert import fallback
from zoo.ops.common import KERNEL_DTYPES, triton_runs_on
from zoo.ops.opaque import OperatorLibrary, launcher

# A program holds a whole row of a norm.
WIDEST_NORM = 8192

_LIBRARY = OperatorLibrary("zoo_bert")


def kernels_run(x: Tensor) -> bool:
    """Whether operators on ``x`` run kernels of our own."""
    return x.dtype in KERNEL_DTYPES and triton_runs_on(x.device)


def _implementation(module: str, name: str, x: Tensor) -> Any:
    return launcher(f"zoo.bert.kernels.{module}", name, x) if kernels_run(x) else getattr(fallback, name)


# --- the residual add and its norm ---


@_LIBRARY.operator(
    "(Tensor x, Tensor added, Tensor? shift, Tensor weight, Tensor bias, float eps, ScalarType? low_dtype) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
def add_layer_norm(
    x: Tensor,
    added: Tensor,
    shift: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    low_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The residual stream plus what is added to it, and the layer norm of the sum. With a gradient.

    Args:
        x: [..., C], the stream.
        added: [..., C], of any dtype.
        shift: [C], added as well: the bias that the product before it lacks, whose gradient is one more sum of the same
            pass. None for none.
        weight: [C].
        bias: [C], of the dtype of ``weight``; so is ``shift``.
        eps: Added to the variance.
        low_dtype: Of a copy of the norm for the products that follow; None for none.

    Returns:
        The norm [..., C] in the dtype of x, its copy [..., C] or [0], and for the backward the sum [..., C] in the
        dtype of x, and the mean and the factor [...] of each row in float32.

    Raises:
        ValueError: If shapes or dtypes do not fit, or rows are wider than ``WIDEST_NORM``.
    """
    _check_norm(x, weight, added, bias=bias, shift=shift)
    arguments = x, added, shift, weight, bias, eps, low_dtype
    return _implementation("layer_norm", "add_layer_norm", x)(*arguments)  # type: ignore[no-any-return]


@_LIBRARY.fake("add_layer_norm")
def _(x: Tensor, added: Tensor, shift: Tensor | None, weight: Tensor, bias: Tensor, eps: float, low_dtype: Any) -> Any:
    low = x.new_empty(0) if low_dtype is None else x.new_empty(x.shape, dtype=low_dtype)
    mean, scale = (x.new_empty(x.shape[:-1], dtype=torch.float32) for _ in range(2))
    return x.new_empty(x.shape), low, x.new_empty(x.shape), mean, scale


@_LIBRARY.operator(
    "(Tensor total, Tensor mean, Tensor scale, Tensor weight, Tensor grad, Tensor? low_grad, ScalarType? added_dtype, "
    "bool shifted) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
def add_layer_norm_backward(
    total: Tensor,
    mean: Tensor,
    scale: Tensor,
    weight: Tensor,
    grad: Tensor,
    low_grad: Tensor | None,
    added_dtype: torch.dtype | None,
    shifted: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of ``add_layer_norm``, in one pass over the rows.

    Args:
        total: [..., C], the sum.
        mean: [...].
        scale: [...].
        weight: [C].
        grad: [..., C], of the norm.
        low_grad: [..., C], of its copy; None if there is none.
        added_dtype: Of what was added, if that is not the dtype of the sum; else None.
        shifted: Whether there was a shift.

    Returns:
        [..., C] of the sum; the same [..., C] for what was added, or [0]; [C] of weight and of bias, and of the shift,
        or [0].
    """
    _check_norm(total, weight, grad, low_grad)
    arguments = total, mean, scale, weight, grad, low_grad, added_dtype, shifted
    return _implementation("layer_norm", "add_layer_norm_backward", total)(*arguments)  # type: ignore[no-any-return]


@_LIBRARY.fake("add_layer_norm_backward")
def _(
    total: Tensor,
    mean: Tensor,
    scale: Tensor,
    weight: Tensor,
    grad: Tensor,
    low_grad: Tensor | None,
    added_dtype: torch.dtype | None,
    shifted: bool,
) -> Any:
    low = total.new_empty(0) if added_dtype is None else total.new_empty(total.shape, dtype=added_dtype)
    sums = [weight.new_empty(weight.shape) for _ in range(3)]
    return total.new_empty(total.shape), low, *sums[:2], sums[2] if shifted else total.new_empty(0)


def _check_norm(x: Tensor, weight: Tensor, *like: Tensor | None, **vectors: Tensor | None) -> None:
    if x.shape[-1] > WIDEST_NORM:
        raise ValueError(f"rows are {x.shape[-1]} wide, at most {WIDEST_NORM} are taken")
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"a weight {list(weight.shape)} does not fit rows {list(x.shape)}; expected [{x.shape[-1]}]")
    for other in like:
        if other is not None and other.shape != x.shape:
            raise ValueError(f"{list(other.shape)} does not fit rows {list(x.shape)}; expected the same shape")
    for name, vector in vectors.items():
        if vector is not None and (vector.shape != weight.shape or vector.dtype != weight.dtype):
            raise ValueError(
                f"{name} is {list(vector.shape)} of {vector.dtype}, expected it like the weight: "
                f"{list(weight.shape)} of {weight.dtype}"
            )


def _keep_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, added, shift, weight, _, _, ctx.low_dtype = inputs
    ctx.added_dtype = None if added.dtype == x.dtype else added.dtype
    ctx.shifted = shift is not None
    ctx.save_for_backward(*output[2:], weight)
    ctx.mark_non_differentiable(*output[2:])
    # Nobody reads zeros in place of a gradient that is not there.
    ctx.set_materialize_grads(False)


def _norm_gradients(ctx: Any, grad: Tensor | None, low_grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if ctx.low_dtype is None:
        low_grad = None
    if grad is None:
        grad, low_grad = low_grad, None
    if grad is None:
        return (None,) * 7
    out, low, weight, bias, shift = add_layer_norm_backward(
        *ctx.saved_tensors, grad, low_grad, ctx.added_dtype, ctx.shifted
    )
    added = out if ctx.added_dtype is None else low
    return out, added, shift if ctx.shifted else None, weight, bias, None, None


_LIBRARY.autograd("add_layer_norm", _norm_gradients, _keep_norm)


# --- the activation ---


@_LIBRARY.operator("(Tensor x, Tensor bias, bool tanh) -> Tensor")
def bias_gelu(x: Tensor, bias: Tensor, tanh: bool) -> Tensor:
    """GELU of x [..., I] plus bias [I], by erf or its approximation by tanh: [..., I]. With a gradient.

    The bias is that of the product before it. Here its gradient is a sum of the pass that writes the product's.
    """
    return _implementation("gelu", "bias_gelu", x)(x, bias, tanh)


@_LIBRARY.fake("bias_gelu")
def _(x: Tensor, bias: Tensor, tanh: bool) -> Tensor:
    return x.new_empty(x.shape)


@_LIBRARY.operator("(Tensor grad, Tensor x, Tensor bias, bool tanh) -> (Tensor, Tensor)")
def bias_gelu_backward(grad: Tensor, x: Tensor, bias: Tensor, tanh: bool) -> tuple[Tensor, Tensor]:
    """Gradients of x [..., I] and of the bias [I] from that of ``bias_gelu``'s output [..., I]."""
    return _implementation("gelu", "bias_gelu_backward", x)(grad, x, bias, tanh)  # type: ignore[no-any-return]


@_LIBRARY.fake("bias_gelu_backward")
def _(grad: Tensor, x: Tensor, bias: Tensor, tanh: bool) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), bias.new_empty(bias.shape)


def _keep_activation(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])
    ctx.tanh = inputs[2]


def _activation_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return (*bias_gelu_backward(grad, *ctx.saved_tensors, ctx.tanh), None)


_LIBRARY.autograd("bias_gelu", _activation_gradients, _keep_activation)
