"""What lies between two convolutions: batch norm or bias, residual and relu, over images in channels_last or rows.

    norm_act     relu(norm(x))   relu(norm(x) + residual)   relu(norm(x) + norm(residual))
    bias_act     relu(x + bias)  relu(x + bias + residual)
    ..._pool     the same without a residual, then the maximum of 3 × 3 pixels at a stride of 2: the end of a stem

Shape legend: N images, C channels, H height, W width, R rows.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, autograd

from zoo.engine.autograd import differentiable_once
from zoo.ops import triton as kernels
from zoo.ops.common import differentiated, kernels_run

# Mean, variance, weight and bias of a norm; of one that is not there None.
Tensors: TypeAlias = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]
NO_NORM: Tensors = (None, None, None, None)


class Norm(NamedTuple):
    """A batch norm as operators take it; vectors are [C]."""

    weight: Tensor
    bias: Tensor
    running_mean: Tensor | None  # None for a norm that keeps no statistics
    running_variance: Tensor | None
    batches: Tensor | None = None  # how many were counted, int64
    of_batch: bool = False  # normalise x by its own statistics, and move the running ones towards them in place
    momentum: float = 0.0
    eps: float = 1e-5


def norm_act(x: Tensor, norm: Norm, residual: Tensor | None = None, residual_norm: Norm | None = None) -> Tensor:
    """Relu of the batch norm of x [N, C, H, W] or [R, C], plus a residual or the batch norm of one: like x.

    Images in channels_last are read as they are, and so is the result. Where kernels run all is computed in float32 and
    rounded once, and gradients have no gradients. A ValueError if the statistics of a single row are wanted.
    """
    given = x, *norm[:2], residual, *(() if residual_norm is None else residual_norm[:2])
    alike = residual_norm is None or residual_norm[5:] == norm[5:]
    if alike and _kernels_fit(x, residual, *given):
        _check(x, residual, norm, residual_norm or ())
        own, other = _tensors(x, norm), _tensors(residual, residual_norm)
        if differentiated(*given):
            return _NormAct.apply(x, *own, residual, *other, norm.eps, norm.of_batch)
        return kernels.batch_norm.norm_act(x, own, residual, other, norm.eps)
    out = _normalised(x, norm)
    if residual is not None:
        out = out + (residual if residual_norm is None else _normalised(residual, residual_norm))
    return F.relu(out)


def _kernels_fit(x: Tensor, residual: Tensor | None, *vectors: Tensor | None) -> bool:
    """Whether there is a row, and all have dtypes that kernels take them in."""
    alike = x.numel() > 0 and (residual is None or residual.dtype == x.dtype)
    return alike and kernels_run(x, residual, *vectors)


def _check(x: Tensor, residual: Tensor | None, *norms: Sequence[Any]) -> None:
    """Refuse what kernels would read beyond the ends of; a traced block fits, and Dynamo would take twice as long."""
    if torch.compiler.is_compiling():
        return
    shape, channels, device = x.shape, x.shape[1:2], x.device
    if len(shape) not in (2, 4):
        raise ValueError(f"x has shape {tuple(shape)}, expected rows [R, C] or images [N, C, H, W]")
    if residual is not None and (residual.shape != shape or residual.device != device):
        found = f"{tuple(residual.shape)} on {residual.device}"
        raise ValueError(f"residual has shape {found}, expected that of x, {tuple(shape)} on {device}")
    for norm in norms:
        for name, each in zip(Norm._fields[:4], norm[:4], strict=False):
            if each is not None and not (each.shape == channels and each.device == device and each.is_contiguous()):
                found = f"{tuple(each.shape)} and stride {each.stride()} on {each.device}"
                raise ValueError(f"{name} has shape {found}, expected {tuple(channels)} without gaps on {device}")


def _normalised(x: Tensor, norm: Norm) -> Tensor:
    if norm.batches is not None and norm.of_batch:
        norm.batches.add_(1)
    statistics = norm.running_mean, norm.running_variance
    return F.batch_norm(x, *statistics, norm.weight, norm.bias, norm.of_batch, norm.momentum, norm.eps)


def _tensors(x: Tensor | None, norm: Norm | None) -> Tensors:
    """Mean and variance that x is normalised by, weight and bias; of the batch they move the running ones."""
    if x is None or norm is None:
        return NO_NORM
    mean, variance = norm.running_mean, norm.running_variance
    if norm.of_batch:
        mean, variance = kernels.batch_norm.batch_statistics(x.detach(), mean, variance, norm.batches, norm.momentum)
    return mean, variance, norm.weight, norm.bias


class _NormAct(autograd.Function):
    """Statistics of the batch are inputs here; the gradient of x goes through them all the same."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        x, mean, variance, weight, bias, residual, *other, ctx.eps, ctx.of_batch = arguments
        out: Tensor = kernels.batch_norm.norm_act(x, (mean, variance, weight, bias), residual, tuple(other), ctx.eps)
        # Without a residual the relu is computed again, and one that is not normalised is not needed.
        kept = None if other[0] is None else residual
        ctx.save_for_backward(x, mean, variance, weight, bias, kept, *other, None if residual is None else out)
        return out

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, mean, variance, weight, bias, residual, *other, out = ctx.saved_tensors
        affine = any(ctx.needs_input_grad[3:5]) or any(ctx.needs_input_grad[8:10])
        grad_x, grad_weight, grad_bias, grad_residual, *grad_other = kernels.batch_norm.norm_act_backward(
            grad, x, (mean, variance, weight, bias), residual, tuple(other), out, ctx.eps, ctx.of_batch, affine
        )
        return grad_x, None, None, grad_weight, grad_bias, grad_residual, None, None, *grad_other, None, None


def bias_act(x: Tensor, bias: Tensor, residual: Tensor | None = None) -> Tensor:
    """Relu of x [N, C, H, W] plus bias [C] plus residual, if there is one: as ``norm_act``, where a norm is folded."""
    if _kernels_fit(x, residual, bias) and not differentiated(x, residual, bias):
        _check(x, residual, (None, bias))
        return kernels.batch_norm.norm_act(x, (None, None, None, bias), residual, NO_NORM, 0.0)
    out = x + (bias if x.dim() == 2 else bias[:, None, None])
    return F.relu(out if residual is None else out + residual)


def norm_act_pool(x: Tensor, norm: Norm) -> Tensor:
    """Norm, relu and the maximum of 3 × 3 pixels at a stride of 2: [N, C, H, W] -> [N, C, ⌈H / 2⌉, ⌈W / 2⌉].

    The result is in channels_last, in the dtype of ``x``; NaN where a window has one.
    """
    weight, bias, mean, variance = norm[:4]
    if not norm.of_batch and _kernels_fit(x, None, weight, bias) and not differentiated(x, weight, bias):
        _check(x, None, norm)
        return kernels.batch_norm.norm_act_pool(x, mean, variance, weight, bias, norm.eps)
    return max_pool(norm_act(x, norm))


def bias_act_pool(x: Tensor, bias: Tensor) -> Tensor:
    """The same of x [N, C, H, W] and bias [C], without a norm."""
    if _kernels_fit(x, None, bias) and not differentiated(x, bias):
        _check(x, None, (None, bias))
        return kernels.batch_norm.norm_act_pool(x, None, None, None, bias, 0.0)
    # A maximum stays the maximum under both, so that they touch a quarter of the pixels.
    return F.relu(F.max_pool2d(x, 3, 2, 1) + bias[:, None, None])


def max_pool(x: Tensor) -> Tensor:
    """The maximum of 3 × 3 pixels at a stride of 2, the first of equals: [N, C, H, W] -> [N, C, ⌈H / 2⌉, ⌈W / 2⌉].

    Where kernels run the result is in channels_last, and the gradient has no gradient.
    """
    if _kernels_fit(x, None):
        return _MaxPool.apply(x) if differentiated(x) else kernels.batch_norm.max_pool(x)[0]
    return F.max_pool2d(x, 3, 2, 1)


class _MaxPool(autograd.Function):
    """Keeps which of nine pixels it was, a byte for each window, and no image."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.height, ctx.width = x.shape[2:]
        out, which = kernels.batch_norm.max_pool(x)
        ctx.save_for_backward(which)
        return out

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return kernels.batch_norm.max_pool_backward(grad, *ctx.saved_tensors, ctx.height, ctx.width)
