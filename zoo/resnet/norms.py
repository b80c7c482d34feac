"""The glue around a norm as operators: Triton kernels on a GPU, torch's own operators elsewhere, on rows [R, C].

Compiled with symbolic sizes, glue that is written in torch's operators divides for each element to find its channel,
and reads the norm's tensors one by one. These kernels know that a row is C wide, and serve all sizes as they are.

Shape legend: R rows, C channels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zoo.ops.common import KERNEL_DTYPES, triton_runs_on, wide
from zoo.ops.opaque import OperatorLibrary, launcher
from zoo.resnet import fallback

_LIBRARY = OperatorLibrary("zoo_resnet")


def kernels_run(x: Tensor, *others: Tensor | None) -> bool:
    """Whether operators on rows x run kernels of our own: rows of one dtype that kernels know, and at least one.

    Glue asks, and uses the operators only there.
    """
    dtype = x.dtype
    for other in others:
        if other is not None and other.dtype != dtype:
            return False
    return dtype in KERNEL_DTYPES and x.numel() > 0 and triton_runs_on(x.device)


def _implementation(name: str, x: Tensor, *others: Tensor | None) -> Any:
    if not kernels_run(x, *others):
        return getattr(fallback, name)
    module = "backward" if name.endswith("_backward") else "forward"
    return launcher(f"zoo.resnet.kernels.{module}", name, x)


# --- statistics ---


@_LIBRARY.operator(
    "(Tensor x, Tensor(a!)? running_mean, Tensor(b!)? running_variance, float momentum) -> (Tensor, Tensor)"
)
def batch_statistics(
    x: Tensor, running_mean: Tensor | None, running_variance: Tensor | None, momentum: float
) -> tuple[Tensor, Tensor]:
    """Statistics of the rows of a batch, towards which the running ones are moved. Without gradients.

    Args:
        x: [R, C], detached; how the norm's gradient goes through them is part of the operators below.
        running_mean: [C], moved in place, or None.
        running_variance: [C], moved in place towards the variance with Bessel's correction, or None.
        momentum: How far they are moved, of 1.

    Returns:
        Mean and variance, without the correction: [C] each, in at least float32.

    Raises:
        ValueError: If there is one row, which has no variance.
    """
    if x.shape[0] < 2:
        raise ValueError(f"x has shape {tuple(x.shape)}: one row has no variance; give more, or use model.eval()")
    return _implementation("batch_statistics", x)(x, running_mean, running_variance, momentum)


@_LIBRARY.fake("batch_statistics")
def _(x: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    mean = x.new_empty(x.shape[1], dtype=wide(x.dtype))
    return mean, torch.empty_like(mean)


# --- one norm ---


@_LIBRARY.operator(
    "(Tensor x, Tensor mean, Tensor variance, Tensor weight, Tensor bias, Tensor? residual, float eps, bool of_batch)"
    " -> Tensor"
)
def norm_act(
    x: Tensor,
    mean: Tensor,
    variance: Tensor,
    weight: Tensor,
    bias: Tensor,
    residual: Tensor | None,
    eps: float,
    of_batch: bool,
) -> Tensor:
    """Relu of a norm and a residual, rounded once.

    Args:
        x: [R, C].
        mean: [C].
        variance: [C], without Bessel's correction where it is of the batch.
        weight: [C].
        bias: [C].
        residual: [R, C], added before the relu, or None.
        eps: Added to the variance.
        of_batch: Whether mean and variance are those of x, so that its gradient goes through them too.

    Returns:
        [R, C], in the dtype of ``x``.
    """
    return _implementation("norm_act", x, residual)(x, mean, variance, weight, bias, residual, eps)


@_LIBRARY.fake("norm_act")
def _(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape)


def _norm_act_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, mean, variance, weight, bias, residual, ctx.eps, ctx.of_batch = inputs
    ctx.save_for_backward(x, mean, variance, weight, bias, None if residual is None else output)


def _norm_act_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    affine = ctx.needs_input_grad[3] or ctx.needs_input_grad[4]
    grad_x, grad_residual, grad_weight, grad_bias = norm_act_backward(
        grad, *ctx.saved_tensors, ctx.eps, ctx.of_batch, affine
    )
    grad_residual = grad_residual if ctx.needs_input_grad[5] else None
    return grad_x, None, None, *((grad_weight, grad_bias) if affine else (None, None)), grad_residual, None, None


_LIBRARY.autograd("norm_act", _norm_act_backward, _norm_act_context)


@_LIBRARY.operator(
    "(Tensor grad, Tensor x, Tensor mean, Tensor variance, Tensor weight, Tensor bias, Tensor? out, float eps, "
    "bool of_batch, bool affine) -> (Tensor, Tensor, Tensor, Tensor)"
)
def norm_act_backward(
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    variance: Tensor,
    weight: Tensor,
    bias: Tensor,
    out: Tensor | None,
    eps: float,
    of_batch: bool,
    affine: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of ``norm_act``.

    Args:
        grad: [R, C], of its output.
        x: This and the others as of ``norm_act``.
        mean: [C].
        variance: [C].
        weight: [C].
        bias: [C].
        out: [R, C], its output where there was a residual, else None: then the relu is computed again.
        eps: Of the norm.
        of_batch: As of ``norm_act``.
        affine: Whether gradients of weight and bias are wanted.

    Returns:
        Gradients of x, of the residual (empty without ``out``), of weight and of bias (empty unless wanted).
    """
    arguments = grad, x, mean, variance, weight, bias, out, eps, of_batch, affine
    return _implementation("norm_act_backward", x, grad, out)(*arguments)


@_LIBRARY.fake("norm_act_backward")
def _(
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    variance: Tensor,
    weight: Tensor,
    bias: Tensor,
    out: Tensor | None,
    eps: float,
    of_batch: bool,
    affine: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    grad_x, grad_residual = x.new_empty(x.shape), x.new_empty(0 if out is None else x.shape)
    return grad_x, grad_residual, *(_affine_like(x, given, affine) for given in (weight, bias))  # type: ignore[return-value]


def _affine_like(x: Tensor, parameter: Tensor, wanted: bool) -> Tensor:
    return parameter.new_empty(parameter.shape) if wanted else x.new_empty(0)


# --- two norms ---


@_LIBRARY.operator(
    "(Tensor x, Tensor mean, Tensor variance, Tensor weight, Tensor bias, Tensor shortcut, Tensor shortcut_mean, "
    "Tensor shortcut_variance, Tensor shortcut_weight, Tensor shortcut_bias, float eps, bool of_batch) -> Tensor"
)
def norms_add_act(
    x: Tensor,
    mean: Tensor,
    variance: Tensor,
    weight: Tensor,
    bias: Tensor,
    shortcut: Tensor,
    shortcut_mean: Tensor,
    shortcut_variance: Tensor,
    shortcut_weight: Tensor,
    shortcut_bias: Tensor,
    eps: float,
    of_batch: bool,
) -> Tensor:
    """Relu of the sum of two norms, rounded once; arguments of each as of ``norm_act``: [R, C]."""
    norm, other = (mean, variance, weight, bias), (shortcut_mean, shortcut_variance, shortcut_weight, shortcut_bias)
    return _implementation("norms_add_act", x, shortcut)(x, *norm, shortcut, *other, eps)


@_LIBRARY.fake("norms_add_act")
def _(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape)


def _norms_add_act_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.eps, ctx.of_batch = inputs
    ctx.save_for_backward(*tensors, output)


def _norms_add_act_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    affine = any(ctx.needs_input_grad[index] for index in (3, 4, 8, 9))
    grad_x, grad_shortcut, *grads = norms_add_act_backward(grad, *ctx.saved_tensors, ctx.eps, ctx.of_batch, affine)
    grads = grads if affine else [None] * 4
    return grad_x, None, None, *grads[:2], grad_shortcut, None, None, *grads[2:], None, None


_LIBRARY.autograd("norms_add_act", _norms_add_act_backward, _norms_add_act_context)


@_LIBRARY.operator(
    "(Tensor grad, Tensor x, Tensor mean, Tensor variance, Tensor weight, Tensor bias, Tensor shortcut, "
    "Tensor shortcut_mean, Tensor shortcut_variance, Tensor shortcut_weight, Tensor shortcut_bias, Tensor out, "
    "float eps, bool of_batch, bool affine) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
def norms_add_act_backward(
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    variance: Tensor,
    weight: Tensor,
    bias: Tensor,
    shortcut: Tensor,
    shortcut_mean: Tensor,
    shortcut_variance: Tensor,
    shortcut_weight: Tensor,
    shortcut_bias: Tensor,
    out: Tensor,
    eps: float,
    of_batch: bool,
    affine: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of ``norms_add_act`` for x and shortcut, then weight, bias and the shortcut's (empty unless wanted)."""
    norm, other = (mean, variance, weight, bias), (shortcut_mean, shortcut_variance, shortcut_weight, shortcut_bias)
    arguments = grad, x, *norm, shortcut, *other, out, eps, of_batch, affine
    return _implementation("norms_add_act_backward", x, grad, shortcut, out)(*arguments)


@_LIBRARY.fake("norms_add_act_backward")
def _(grad: Tensor, x: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    _, _, weight, bias, shortcut, _, _, shortcut_weight, shortcut_bias, _, _, _, affine = rest
    affines = (_affine_like(x, given, affine) for given in (weight, bias, shortcut_weight, shortcut_bias))
    return x.new_empty(x.shape), shortcut.new_empty(shortcut.shape), *affines  # type: ignore[return-value]


# --- a bias ---


@_LIBRARY.operator("(Tensor x, Tensor bias, Tensor? residual) -> Tensor")
def bias_act(x: Tensor, bias: Tensor, residual: Tensor | None) -> Tensor:
    """Relu of x [R, C], bias [C] and residual [R, C] or None, rounded once: [R, C] in the dtype of ``x``."""
    return _implementation("bias_act", x, residual)(x, bias, residual)


@_LIBRARY.fake("bias_act")
def _(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape)


def _bias_act_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.dtype = inputs[1].dtype
    ctx.save_for_backward(output)


def _bias_act_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    # Folded models are for inference: this is for those who build with the glue, and torch's operators will do.
    (out,) = ctx.saved_tensors
    change = torch.where(out <= 0, 0, grad)
    grad_bias = change.sum(0).to(ctx.dtype) if ctx.needs_input_grad[1] else None
    return change, grad_bias, change if ctx.needs_input_grad[2] else None


_LIBRARY.autograd("bias_act", _bias_act_backward, _bias_act_context, twice=True)
