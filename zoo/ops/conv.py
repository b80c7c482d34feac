"""Convolutions of channels_last images, and what lies around them: biases, residuals, doubling, windows of a product.

Shape legend: B or N images, C channels, H height, W width, R rows (pixels of all images), O channels of the output, D
channels of squares of pixels.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.engine.autograd import Function, differentiable_once
from zoo.engine.compat import name_fallbacks_alone
from zoo.ops import triton as kernels
from zoo.ops.common import KERNEL_DTYPES, ceil_div, differentiated, is_unmodified, kernels_run, to_images, to_rows
from zoo.ops.products import column_sums

# Convolutions to no more pixels, from no fewer channels, are a product of windows, measured on an H200.
MOST_PIXELS, LEAST_CHANNELS = 256, 640


def conv_add(x: Tensor, bias: Tensor, residual: Tensor | None = None) -> Tensor:
    """X [R, C] plus bias [C] plus residual [R, C], if any: [R, C], in the wider dtype of x and residual. Rounded once.

    torch adds a convolution's bias one number at a time in channels_last. Other shapes are a ValueError.
    """
    if residual is not None and x.shape != residual.shape:
        raise ValueError(f"residual has shape {tuple(residual.shape)}, expected that of x, {tuple(x.shape)}")
    if kernels_run(x, bias, residual):
        learn = differentiated(x, bias, residual)
        return _ConvAdd.apply(x, bias, residual) if learn else kernels.tiles.conv_add(x, bias, residual)
    # Under autocast parameters stay wide, and would make activations wide as well.
    total = x + bias.to(x.dtype)
    return total if residual is None else total + residual


class _ConvAdd(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, residual: Tensor | None) -> Tensor:
        ctx.dtypes = x.dtype, bias.dtype, None if residual is None else residual.dtype
        return kernels.tiles.conv_add(x, bias, residual)

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
    return kernels.tiles.upsample(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def conv3(x: Tensor, weight: Tensor) -> Tensor:
    """A 3 × 3 convolution with a padding of 1 and no bias: [B, C_in, H, W] -> [B, C_out, H, W]."""
    if windows_run(x, weight, 1):
        return _product_of_windows(x, weight, None, 1)
    return F.conv2d(x, weight, padding=1)


def conv(x: Tensor, layer: nn.Conv2d) -> Tensor:
    """A convolution with its bias: [B, C_in, H, W] -> [B, C_out, H', W']. Hooks of the layer are not for inference."""
    bias = layer.bias
    if bias is None or not kernels_run(x, layer.weight, bias):
        return layer(x)
    if differentiated(x, layer.weight, bias) and not is_unmodified(layer, nn.Conv2d):
        return layer(x)
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

    H' and W' are H / stride and W / stride, rounded up; a stride below 1 is a ValueError. Numbers of a row lie as those
    of a weight in channels_last.
    """
    if stride < 1:
        raise ValueError(f"stride is {stride}, expected at least 1")
    if kernels_run(x) and not differentiated(x):
        return kernels.tiles.windows(x, stride)
    around = F.pad(x, (0, 0, 1, 1, 1, 1)).unfold(1, 3, stride).unfold(2, 3, stride)
    return around.permute(0, 1, 2, 4, 5, 3).reshape(-1, 9 * x.shape[3])


def _product_of_windows(x: Tensor, weight: Tensor, bias: Tensor | None, stride: int) -> Tensor:
    rows = F.linear(windows(x.permute(0, 2, 3, 1), stride), weight.permute(0, 2, 3, 1).flatten(1), bias)
    return rows.view(x.shape[0], ceil_div(x.shape[2], stride), -1, weight.shape[0]).permute(0, 3, 1, 2)


# Where squares of pixels begin, so that the padding of 3 and a tap of zeros before the others come out even.
_IMAGE_OFFSET, _WEIGHT_OFFSET = 4, 1


def stem_conv(x: Tensor, conv: nn.Conv2d) -> Tensor:
    """The first convolution of a network, without its bias: images in any layout -> [N, O, H', W'] in channels_last.

    A convolution library's fast kernels want channels by the eight, and three leave most of a matrix unit idle. Where
    kernels run, a 7 × 7 convolution of stride 2 is computed as a 4 × 4 one of stride 1 over squares of 2 × 2 pixels,
    which have 16 channels: the same products, and zeros. With a, b in 0 .. 6, p, r in 0 .. 3 and q, s in 0, 1,

        y[i, j] = Σ w[a, b] x[2 i + a - 3, 2 j + b - 3]
                = Σ w[2 p + q - 1, 2 r + s - 1] x[2 (i + p - 2) + q, 2 (j + r - 2) + s]
    """
    options = conv.stride, conv.padding, conv.dilation, conv.groups
    usual = conv.kernel_size == (7, 7) and options == ((2, 2), (3, 3), (1, 1), 1) and conv.in_channels <= 4
    if not (usual and x.numel() and kernels_run(x, conv.weight)) or differentiated(x):
        x = x.contiguous(memory_format=torch.channels_last)
        return F.conv2d(x, conv.weight, None, *options)  # type: ignore[arg-type]
    kind = x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    height, width = (x.shape[2] + 1) // 2 + 3, (x.shape[3] + 1) // 2 + 3
    depth = 8 if x.shape[1] <= 2 else 16  # a multiple of eight, and a power of two
    squares = space_to_depth(x, _IMAGE_OFFSET, height, width, depth, dtype)
    # Under autocast the convolution narrows its weight.
    return F.conv2d(squares, space_to_depth(conv.weight, _WEIGHT_OFFSET, 4, 4, depth, conv.weight.dtype))


def space_to_depth(x: Tensor, offset: int, height: int, width: int, channels: int, dtype: torch.dtype) -> Tensor:
    """Squares of 2 × 2 pixels as channels: [N, C, H, W] -> [N, D, height, width] in channels_last.

    Channel (2 q + s) D / 4 + c of pixel (i, j) is channel c of pixel (2 i + q - offset, 2 j + s - offset), zero outside
    and where there is no channel c. D is at least 4 C and a power of two.
    """
    if kernels_run(x) and not differentiated(x):
        return kernels.tiles.space_to_depth(x, offset, height, width, channels, dtype)
    below, right = 2 * height - x.shape[2] - offset, 2 * width - x.shape[3] - offset
    wide = F.pad(x if x.dtype == dtype else x.to(dtype), (offset, right, offset, below, 0, channels // 4 - x.shape[1]))
    squares = wide.unflatten(3, (width, 2)).unflatten(2, (height, 2)).permute(0, 3, 5, 1, 2, 4)
    return squares.flatten(1, 3).contiguous(memory_format=torch.channels_last)


# The library calls below have bias, residual and relu in them, for models whose norms are folded. They stay behind
# torch.library: cuDNN's have no rule for the shapes of their outputs, so no compiler takes them, and Inductor takes
# aten::_addmm_activation apart into a product and an activation. Modes that watch each operator, such as a FLOP
# counter, do not know them: ask ``zoo.ops.common.watched`` first.


def operator(namespace: str, schema: str, shapes: Function) -> Callable[[Function], Any]:
    """Make a function the operator ``torch.ops.<namespace>.<its name>``, which has no gradient.

    ``shapes`` takes the same arguments, and returns tensors like the outputs. ``torch.library.custom_op`` would do the
    same, and import Dynamo at the first eager call.
    """

    def define(function: Function) -> Any:
        @functools.wraps(shapes)
        def traced(*arguments: Any) -> Any:
            # Whoever asks is about to compile a graph with the operator in it.
            name_fallbacks_alone()
            return shapes(*arguments)

        name = f"{namespace}::{function.__name__}"
        torch.library.define(name, schema, tags=torch.Tag.pt2_compliant_tag)
        torch.library.impl(name, "default", function)
        torch.library.register_fake(name, traced)
        return getattr(getattr(torch.ops, namespace), function.__name__).default

    return define


def _shape(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor | None, *options: Any) -> Tensor:
    out = torch.ops.aten.convolution.default(x, weight, bias, *options[:3], False, [0, 0], options[3])
    return out.contiguous(memory_format=torch.channels_last)


@operator(
    "zoo_resnet",
    "(Tensor x, Tensor weight, Tensor bias, Tensor? residual, int[] stride, int[] padding, int[] dilation, int groups)"
    " -> Tensor",
    _shape,
)
def conv_act(
    x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor | None, stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int], groups: int,
) -> Tensor:  # fmt: skip
    """Relu of a convolution with its bias, plus residual [N, C_out, H', W'] if any. Without gradients.

    X [N, C_in, H, W] and weight [C_out, C_in / groups, K, K] are in channels_last, and so is the result.
    """
    cudnn = x.is_cuda and torch.version.hip is None and x.dtype in KERNEL_DTYPES and torch.backends.cudnn.enabled
    if not cudnn:
        out = F.conv2d(x, weight, bias, stride, padding, dilation, groups)  # type: ignore[arg-type]
        out = (out if residual is None else out + residual).relu_()
    elif residual is None:
        out = torch.ops.aten.cudnn_convolution_relu(x, weight, bias, stride, padding, dilation, groups)
    else:
        out = torch.ops.aten.cudnn_convolution_add_relu(x, weight, residual, 1, bias, stride, padding, dilation, groups)
    return out.contiguous(memory_format=torch.channels_last)


@operator(
    "zoo_resnet",
    "(Tensor x, Tensor weight, Tensor bias) -> Tensor",
    lambda x, weight, bias: x.new_empty(x.shape[0], weight.shape[0]),
)
def linear_relu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Relu of rows x [R, C_in] times weight [C_out, C_in] plus bias [C_out]: [R, C_out]. Without gradients."""
    return torch.ops.aten._addmm_activation(bias, x, weight.t())
