"""What lies between the library's convolutions, products and attention: the regions of the family, and what needs none.

Where Triton knows the GPU each is one kernel of our own (``kernels/glue.py``), the gate with a product of the library's
or its own, and so is each gradient (``learning.py``): the compiler's for symbolic sizes are slower. Everywhere else the
compiler fuses torch's own operators, and differentiates them.

Shape legend: R rows (pixels of all images), C channels, I width inside the MLP, B images, H height, W width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.layers import in_words, plain, to_images, to_rows
from zoo.ops.common import ceil_div
from zoo.unet import fallback, learning, operators


def _glue_for(*tensors: Tensor) -> Any:
    """Which module's functions are for these: without gradients, with gradients of ours, or the compiler's."""
    if operators.glue_kernels_run(*tensors):
        return operators
    return learning if learning.runs(*tensors) else fallback


class ConvAdd(nn.Module):
    """The end of a resnet block: the convolution's bias and the residual. Holds nothing: one graph for all widths."""

    def forward(self, x: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
        """[R, C], [C] and [R, C] -> [R, C]."""
        return _glue_for(x, bias, residual).conv_add(x, bias, residual)


def conv3(x: Tensor, weight: Tensor) -> Tensor:
    """A 3 × 3 convolution with a padding of 1 and no bias: [B, C_in, H, W] -> [B, C_out, H, W]."""
    if operators.windows_run(x, weight, 1):
        return _product_of_windows(x, weight, None, 1)
    return F.conv2d(x, weight, padding=1)


def _product_of_windows(x: Tensor, weight: Tensor, bias: Tensor | None, stride: int) -> Tensor:
    rows = F.linear(operators.windows(x.permute(0, 2, 3, 1), stride), weight.permute(0, 2, 3, 1).flatten(1), bias)
    return rows.view(x.shape[0], ceil_div(x.shape[2], stride), -1, weight.shape[0]).permute(0, 3, 1, 2)


def conv(x: Tensor, layer: nn.Conv2d) -> Tensor:
    """A convolution with its bias: [B, C_in, H, W] -> [B, C_out, H', W']. Hooks of the layer are not for inference."""
    bias = layer.bias
    kind = fallback if bias is None else _glue_for(x, layer.weight, bias)
    if bias is None or kind is fallback or (kind is learning and not plain(layer, nn.Conv2d)):
        out: Tensor = layer(x)
        return out
    stride, usual = layer.stride[0], layer.kernel_size == (3, 3) and layer.padding == (1, 1)
    if usual and operators.windows_run(x, layer.weight, stride):
        return _product_of_windows(x, layer.weight, bias, stride)
    x = layer._conv_forward(x, layer.weight, None)
    return to_images(kind.conv_bias(to_rows(x), bias), x)


def upsample(x: Tensor) -> Tensor:
    """Nearest neighbours: [B, C, H, W] -> [B, C, 2 H, 2 W]."""
    if not operators.glue_kernels_run(x):
        return F.interpolate(x, scale_factor=2.0, mode="nearest")
    doubled: Tensor = operators.upsample(x.permute(0, 2, 3, 1))
    return doubled.permute(0, 3, 1, 2)


class _Norm(nn.Module):
    def __init__(self, width: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))
        self.eps_text = repr(float(eps))

    eps = in_words("eps_text")  # added to the variance


class AddNorm(_Norm):
    """Residual add and layer norm, both results. The weights fix the width; one graph for any number of rows."""

    def forward(self, x: Tensor, residual: Tensor, shift: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """[R, C] and [R, C] -> their sum [R, C], with a shift [C] that the norm does not see, and its norm [R, C]."""
        weight, bias = self.weight, self.bias
        given = (x, residual, weight, bias) if shift is None else (x, residual, weight, bias, shift)
        kind = _glue_for(*given) if operators.row_fits(weight.shape[0]) else fallback
        return kind.add_norm(x, residual, weight, bias, shift, self.eps)


class RowNorm(_Norm):
    """Layer norm where nothing is to be added: one pass as it is, and no region."""

    def forward(self, x: Tensor) -> Tensor:
        """[R, C] -> [R, C]."""
        weight, bias = self.weight, self.bias
        kind = _glue_for(x, weight, bias) if operators.row_fits(weight.shape[0]) else fallback
        return kind.row_norm(x, weight, bias, self.eps)


class GatedGelu(nn.Module):
    """A product, its bias, and GELU of its second half times the first. Holds nothing: one graph for all widths."""

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """[R, C], [2 I, C] and [2 I] -> [R, I]."""
        if operators.gated_product_runs(x, weight, bias):
            out: Tensor = operators.gated_gelu_product(x, weight, bias)
            return out
        wide = learning.linear(x, weight)
        return _glue_for(wide, bias).gated_gelu(wide, bias)
