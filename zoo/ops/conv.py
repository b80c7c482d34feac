"""What lies around convolutions of channels_last images: biases, residuals, doubling, and the windows of a product.

Shape legend: B images, C channels, H height, W width, R rows (pixels of all images).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.modules import plain, to_images, to_rows
from zoo.ops.common import ceil_div, differentiable_once, differentiated, kernels_run
from zoo.ops.products import column_sums

# Convolutions to no more pixels, from no fewer channels, are a product of windows, measured on an H200.
MOST_PIXELS, LEAST_CHANNELS = 256, 640


def conv_add(x: Tensor, bias: Tensor, residual: Tensor | None = None) -> Tensor:
    """X [R, C] plus bias [C] plus residual [R, C], if any: [R, C], in the wider dtype of x and residual. Rounded once.

    torch adds a convolution's bias one number at a time in channels_last.

    Raises:
        ValueError: If x and residual differ in shape.
    """
    given = (x, bias) if residual is None else (x, bias, residual)
    if residual is not None and x.shape != residual.shape:
        raise ValueError(f"residual has shape {tuple(residual.shape)}, expected that of x, {tuple(x.shape)}")
    if kernels_run(*given):
        if differentiated(*given):
            return _ConvAdd.apply(x, bias, residual)  # type: ignore[no-any-return]
        from zoo.ops.triton import conv as kernels

        return kernels.conv_add(x, bias, residual)
    # Under autocast parameters stay wide, and would make activations wide as well.
    total = x + bias.to(x.dtype)
    return total if residual is None else total + residual


class _ConvAdd(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, residual: Tensor | None) -> Tensor:
        from zoo.ops.triton import conv as kernels

        ctx.dtypes = x.dtype, bias.dtype, None if residual is None else residual.dtype
        return kernels.conv_add(x, bias, residual)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Of a sum every summand has the gradient of the sum; the bias, which is in every row, that of them all."""
        x, bias, residual = ctx.dtypes
        grad_bias = column_sums(grad, bias) if ctx.needs_input_grad[1] else None
        return grad.to(x), grad_bias, None if residual is None else grad.to(residual)


def upsample(x: Tensor) -> Tensor:
    """Nearest neighbours: [B, C, H, W] -> [B, C, 2 H, 2 W] in channels_last, each pixel four times."""
    if differentiated(x) or not kernels_run(x):
        return F.interpolate(x, scale_factor=2.0, mode="nearest")
    from zoo.ops.triton import conv as kernels

    return kernels.upsample(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def conv3(x: Tensor, weight: Tensor) -> Tensor:
    """A 3 × 3 convolution with a padding of 1 and no bias: [B, C_in, H, W] -> [B, C_out, H, W]."""
    if windows_run(x, weight, 1):
        return _product_of_windows(x, weight, None, 1)
    return F.conv2d(x, weight, padding=1)


def conv(x: Tensor, layer: nn.Conv2d) -> Tensor:
    """A convolution with its bias: [B, C_in, H, W] -> [B, C_out, H', W']. Hooks of the layer are not for inference."""
    bias = layer.bias
    if bias is None or not kernels_run(x, layer.weight, bias):
        return layer(x)  # type: ignore[no-any-return]
    if differentiated(x, layer.weight, bias) and not plain(layer, nn.Conv2d):
        return layer(x)  # type: ignore[no-any-return]
    stride, usual = layer.stride[0], layer.kernel_size == (3, 3) and layer.padding == (1, 1)
    if usual and windows_run(x, layer.weight, stride):
        return _product_of_windows(x, layer.weight, bias, stride)
    x = layer._conv_forward(x, layer.weight, None)
    return to_images(conv_add(to_rows(x), bias), x)


def windows_run(x: Tensor, weight: Tensor, stride: int) -> bool:
    """Whether a 3 × 3 convolution of x [B, C, H, W], padded by 1, is to be a product of its windows.

    Of few pixels and many channels: what takes time there is to read the weights, and a product does it faster.
    """
    pixels = x.shape[0] * ceil_div(x.shape[2], stride) * ceil_div(x.shape[3], stride)
    few = pixels <= MOST_PIXELS and x.shape[1] >= LEAST_CHANNELS
    if not few or not weight.is_contiguous(memory_format=torch.channels_last):
        return False
    return not differentiated(x, weight) and kernels_run(x, weight)


def windows(x: Tensor, stride: int) -> Tensor:
    """What a 3 × 3 convolution with a padding of 1 multiplies: [B, H, W, C] -> [B H' W', 9 C].

    H' and W' are H / stride and W / stride, rounded up. Numbers of a row lie as those of a weight in channels_last.

    Raises:
        ValueError: If the stride is not positive.
    """
    if stride < 1:
        raise ValueError(f"stride is {stride}, expected at least 1")
    if kernels_run(x) and not differentiated(x):
        from zoo.ops.triton import conv as kernels

        return kernels.windows(x, stride)
    around = F.pad(x, (0, 0, 1, 1, 1, 1)).unfold(1, 3, stride).unfold(2, 3, stride)
    return around.permute(0, 1, 2, 4, 5, 3).reshape(-1, 9 * x.shape[3])


def _product_of_windows(x: Tensor, weight: Tensor, bias: Tensor | None, stride: int) -> Tensor:
    rows = F.linear(windows(x.permute(0, 2, 3, 1), stride), weight.permute(0, 2, 3, 1).flatten(1), bias)
    return rows.view(x.shape[0], ceil_div(x.shape[2], stride), -1, weight.shape[0]).permute(0, 3, 1, 2)
