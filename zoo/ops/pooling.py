"""The end of a ResNet's stem: norm or bias, relu, and the maximum of 3 × 3 pixels at a stride of 2.

Shape legend: N images, C channels, H height, W width.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, autograd

from zoo.engine.autograd import differentiable_once
from zoo.ops import triton as kernels
from zoo.ops.batch_norm import Norm, norm_act, rows_run
from zoo.ops.common import differentiated, kernels_run


def norm_act_pool(x: Tensor, norm: Norm) -> Tensor:
    """Norm, relu and the maximum of 3 × 3 pixels at a stride of 2: [N, C, H, W] -> [N, C, ⌈H / 2⌉, ⌈W / 2⌉].

    The result is in channels_last, in the dtype of ``x``; NaN where a window has one.
    """
    given = x, norm.weight, norm.bias
    if rows_run(x) and kernels_run(*given) and not norm.of_batch and not differentiated(*given):
        return kernels.pooling.norm_act_pool(x, norm.running_mean, norm.running_variance, *given[1:], norm.eps)
    return max_pool(norm_act(x, norm))


def bias_act_pool(x: Tensor, bias: Tensor) -> Tensor:
    """The same of x [N, C, H, W] and bias [C], without a norm."""
    if rows_run(x) and kernels_run(x, bias) and not differentiated(x, bias):
        return kernels.pooling.bias_act_pool(x, bias)
    # A maximum stays the maximum under both, so that they touch a quarter of the pixels.
    return F.relu(F.max_pool2d(x, 3, 2, 1) + bias[:, None, None])


def max_pool(x: Tensor) -> Tensor:
    """The maximum of 3 × 3 pixels at a stride of 2, the first of equals: [N, C, H, W] -> [N, C, ⌈H / 2⌉, ⌈W / 2⌉].

    Where kernels run the result is in channels_last, and the gradient has no gradient.
    """
    if rows_run(x) and kernels_run(x):
        return _MaxPool.apply(x) if differentiated(x) else kernels.pooling.max_pool(x)[0]
    return F.max_pool2d(x, 3, 2, 1)


class _MaxPool(autograd.Function):
    """Keeps which of nine pixels it was, a byte for each window, and no image."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.height, ctx.width = x.shape[2:]
        out, which = kernels.pooling.max_pool(x)
        ctx.save_for_backward(which)
        return out

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return kernels.pooling.max_pool_backward(grad, *ctx.saved_tensors, ctx.height, ctx.width)
