"""What the kernels of the glue compute, in torch's own operators, and the gradients of it.

Shape legend: R rows, C channels, N images, H height, W width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.ops.common import wide


def batch_statistics(
    x: Tensor, running_mean: Tensor | None, running_variance: Tensor | None, momentum: float
) -> tuple[Tensor, Tensor]:
    """Mean and variance [C] of x [R, C] in at least float32; running ones are moved towards them in place."""
    rows = x.to(wide(x.dtype))
    variance, mean = torch.var_mean(rows, dim=0, correction=0)
    if running_mean is not None:
        running_mean.copy_(running_mean + (mean - running_mean) * momentum)
    if running_variance is not None:
        unbiased = variance * (rows.shape[0] / (rows.shape[0] - 1))
        running_variance.copy_(running_variance + (unbiased - running_variance) * momentum)
    return mean, variance


def norm_act(
    x: Tensor, mean: Tensor, variance: Tensor, weight: Tensor, bias: Tensor, residual: Tensor | None, eps: float
) -> Tensor:
    """Relu of the norm of x [R, C], plus residual [R, C] if there is one: [R, C]."""
    value = _normed(x, mean, variance, eps) * weight + bias
    return (value if residual is None else value + residual).relu().to(x.dtype).contiguous()


def norms_add_act(
    x: Tensor, mean: Tensor, variance: Tensor, weight: Tensor, bias: Tensor,
    shortcut: Tensor, shortcut_mean: Tensor, shortcut_variance: Tensor, shortcut_weight: Tensor, shortcut_bias: Tensor,
    eps: float,
) -> Tensor:  # fmt: skip
    """Relu of the sum of the norms of x and shortcut [R, C] each: [R, C]."""
    value = _normed(x, mean, variance, eps) * weight + bias
    more = _normed(shortcut, shortcut_mean, shortcut_variance, eps) * shortcut_weight + shortcut_bias
    return (value + more).relu().to(x.dtype).contiguous()


def bias_act(x: Tensor, bias: Tensor, residual: Tensor | None) -> Tensor:
    """Relu of x [R, C] plus bias [C] plus residual [R, C] if there is one: [R, C]."""
    value = x.to(wide(x.dtype)) + bias
    return (value if residual is None else value + residual).relu().to(x.dtype).contiguous()


def norm_act_pool(x: Tensor, mean: Tensor, variance: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Pooled relu of the norm of x [N, C, H, W]: [N, C, ⌈H / 2⌉, ⌈W / 2⌉] in channels_last."""
    value = norm_act(x.permute(0, 2, 3, 1), mean, variance, weight, bias, None, eps).permute(0, 3, 1, 2)
    return F.max_pool2d(value, 3, 2, 1).contiguous(memory_format=torch.channels_last)


def bias_act_pool(x: Tensor, bias: Tensor) -> Tensor:
    """Pooled relu of x [N, C, H, W] plus bias [C]: [N, C, ⌈H / 2⌉, ⌈W / 2⌉] in channels_last."""
    # A greatest value stays the greatest under both, so that they touch a quarter of the pixels.
    value = bias_act(F.max_pool2d(x, 3, 2, 1).permute(0, 2, 3, 1), bias, None).permute(0, 3, 1, 2)
    return value.contiguous(memory_format=torch.channels_last)


def max_pool(x: Tensor) -> tuple[Tensor, Tensor]:
    """Pooled x [N, C, H, W], and which of nine it was, uint8: [N, C, ⌈H / 2⌉, ⌈W / 2⌉] in channels_last each."""
    out, place = F.max_pool2d(x, 3, 2, 1, return_indices=True)
    down, across = place // x.shape[3] - _first(out, 2), place % x.shape[3] - _first(out, 3)
    return tuple(
        each.contiguous(memory_format=torch.channels_last) for each in (out, (3 * down + across).to(torch.uint8))
    )  # type: ignore[return-value]


def max_pool_backward(grad: Tensor, which: Tensor, height: int, width: int) -> Tensor:
    """Gradient of x: grad and which [N, C, ⌈H / 2⌉, ⌈W / 2⌉] -> [N, C, H, W] in channels_last."""
    index = which.to(torch.int64)
    place = (_first(which, 2) + index // 3) * width + _first(which, 3) + index % 3
    out = torch.zeros(*grad.shape[:2], height * width, dtype=wide(grad.dtype), device=grad.device)
    out.scatter_add_(2, place.flatten(2), grad.to(out.dtype).flatten(2))
    return out.unflatten(2, (height, width)).to(grad.dtype, memory_format=torch.channels_last)


def _first(windows: Tensor, dim: int) -> Tensor:
    """Line or column of each window's first pixel, -1 where that is none of the image."""
    count = windows.shape[dim]
    return (2 * torch.arange(count, device=windows.device) - 1).view(-1, *(1,) * (3 - dim))


def norm_act_backward(
    grad: Tensor, x: Tensor, mean: Tensor, variance: Tensor, weight: Tensor, bias: Tensor, out: Tensor | None,
    eps: float, of_batch: bool, affine: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of x [R, C], of the residual (empty without ``out``), of weight and bias (empty unless ``affine``)."""
    before = _normed(x, mean, variance, eps) * weight + bias if out is None else out
    change = _passed(grad, before)
    grad_x, grad_weight = _of_norm(change, x, mean, variance, weight, eps, of_batch, affine)
    grad_residual = x.new_empty(0) if out is None else change.to(x.dtype)
    return grad_x, grad_residual, grad_weight, change.sum(0).to(bias.dtype) if affine else x.new_empty(0)


def norms_add_act_backward(
    grad: Tensor, x: Tensor, mean: Tensor, variance: Tensor, weight: Tensor, bias: Tensor,
    shortcut: Tensor, shortcut_mean: Tensor, shortcut_variance: Tensor, shortcut_weight: Tensor, shortcut_bias: Tensor,
    out: Tensor, eps: float, of_batch: bool, affine: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of x and shortcut [R, C], then of weight, bias and the shortcut's (empty unless ``affine``)."""
    change = _passed(grad, out)
    grad_x, grad_weight = _of_norm(change, x, mean, variance, weight, eps, of_batch, affine)
    norm = (shortcut_mean, shortcut_variance, shortcut_weight)
    grad_shortcut, grad_shortcut_weight = _of_norm(change, shortcut, *norm, eps, of_batch, affine)
    biases = [change.sum(0).to(given.dtype) if affine else x.new_empty(0) for given in (bias, shortcut_bias)]
    return grad_x, grad_shortcut, grad_weight, biases[0], grad_shortcut_weight, biases[1]


def _normed(x: Tensor, mean: Tensor, variance: Tensor, eps: float) -> Tensor:
    dtype = wide(x.dtype)
    return (x.to(dtype) - mean.to(dtype)) * (variance.to(dtype) + eps).rsqrt()


def _passed(grad: Tensor, before: Tensor) -> Tensor:
    """The gradient, where the relu passed, in at least float32."""
    return torch.where(before <= 0, 0, grad.to(wide(grad.dtype))).contiguous()


def _of_norm(
    change: Tensor, x: Tensor, mean: Tensor, variance: Tensor, weight: Tensor, eps: float, of_batch: bool, affine: bool
) -> tuple[Tensor, Tensor]:
    """Gradients of x and of the weight (empty unless ``affine``), given that of the norm's output."""
    normed = _normed(x, mean, variance, eps)
    factor = weight.to(change.dtype) * (variance.to(change.dtype) + eps).rsqrt()
    inner = change - change.mean(0) - normed * (change * normed).mean(0) if of_batch else change
    grad_weight = (change * normed).sum(0).to(weight.dtype) if affine else x.new_empty(0)
    return (inner * factor).to(x.dtype).contiguous(), grad_weight
