"""The first convolution on 2 × 2 squares of pixels instead of pixels: 16 channels where images have 3.

A convolution library's fast kernels want channels by the eight, and three channels leave most of a matrix unit idle. A
7 × 7 convolution of stride 2 is a 4 × 4 one of stride 1 over squares of 2 × 2 pixels: the same products, and zeros.

    y[i, j] = Σ w[a, b] x[2 i + a - 3, 2 j + b - 3]          a, b in 0 .. 6
            = Σ w[2 p + q - 1, 2 r + s - 1] x[2 (i + p - 2) + q, 2 (j + r - 2) + s]      p, r in 0 .. 3, q, s in 0, 1

Shape legend: N images, C channels, H height, W width, O channels of the output, D channels of squares: (q, s, channel)
and zeros.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.ops.common import KERNEL_DTYPES, differentiated, triton_runs_on
from zoo.ops.opaque import OperatorLibrary, launcher

_LIBRARY = OperatorLibrary("zoo_resnet")
# Where squares of pixels begin, so that the padding of 3 and a tap of zeros before the others come out even.
_IMAGE_OFFSET, _WEIGHT_OFFSET = 4, 1


def convolve_images(conv: nn.Conv2d, x: Tensor) -> Tensor:
    """The first convolution of a network, without its bias: on squares of pixels where that helps.

    Args:
        conv: Of any kind.
        x: Images [N, C, H, W], in any layout.

    Returns:
        [N, O, H', W'] in channels_last.
    """
    if not _squares_help(conv, x):
        x = x.contiguous(memory_format=torch.channels_last)
        return F.conv2d(x, conv.weight, None, conv.stride, conv.padding, conv.dilation, conv.groups)
    kind = x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    out: Tensor = stem_conv(x.to(dtype), conv.weight.to(dtype))
    return out


def _squares_help(conv: nn.Conv2d, x: Tensor) -> bool:
    fits = (conv.kernel_size, conv.stride, conv.padding) == ((7, 7), (2, 2), (3, 3))
    plain = conv.dilation == (1, 1) and conv.groups == 1 and x.shape[1] <= 4
    return fits and plain and _on_gpu(x) and not differentiated(x)


def _on_gpu(x: Tensor) -> bool:
    return x.is_cuda


@_LIBRARY.operator("(Tensor x, int offset, int height, int width, int channels) -> Tensor")
def space_to_depth(x: Tensor, offset: int, height: int, width: int, channels: int) -> Tensor:
    """Squares of 2 × 2 pixels as channels.

    Args:
        x: [N, C, H, W], in any layout.
        offset: Rows and columns of zeros before the first pixel.
        height: Of the result.
        width: Of the result.
        channels: D, at least 4 C; the last are zeros.

    Returns:
        [N, D, height, width] in channels_last: channel (2 q + s) C + c of pixel (i, j) is channel c of pixel
        (2 i + q - offset, 2 j + s - offset), zero outside.
    """
    if triton_runs_on(x.device) and x.numel() and x.dtype in KERNEL_DTYPES and channels & (channels - 1) == 0:
        result: Tensor = launcher("zoo.resnet.kernels.depth", "space_to_depth", x)(x, offset, height, width, channels)
        return result
    below, right = 2 * height - x.shape[2] - offset, 2 * width - x.shape[3] - offset
    squares = F.pad(x, (offset, right, offset, below)).unflatten(3, (width, 2)).unflatten(2, (height, 2))
    deep = squares.permute(0, 3, 5, 1, 2, 4).flatten(1, 3)
    deep = F.pad(deep, (0, 0, 0, 0, 0, channels - deep.shape[1]))
    return deep.contiguous(memory_format=torch.channels_last)


@_LIBRARY.fake("space_to_depth")
def _(x: Tensor, offset: int, height: int, width: int, channels: int) -> Tensor:
    return x.new_empty(x.shape[0], height, width, channels).permute(0, 3, 1, 2)


@_LIBRARY.operator("(Tensor x, Tensor weight) -> Tensor")
def stem_conv(x: Tensor, weight: Tensor) -> Tensor:
    """The 7 × 7 convolution of stride 2 and padding 3, with a gradient for the weight alone.

    Args:
        x: Images [N, C, H, W], in any layout.
        weight: [O, C, 7, 7], of the same dtype.

    Returns:
        [N, O, ⌈H / 2⌉, ⌈W / 2⌉] in channels_last.
    """
    out = F.conv2d(_deep_images(x), _deep_weight(weight))
    return out.contiguous(memory_format=torch.channels_last)


@_LIBRARY.fake("stem_conv")
def _(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], (x.shape[2] + 1) // 2, (x.shape[3] + 1) // 2, weight.shape[0]).permute(0, 3, 1, 2)


def _depth(channels: int) -> int:
    """Channels of squares: a multiple of eight, and a power of two."""
    return 8 if channels <= 2 else 16


def _deep_images(x: Tensor) -> Tensor:
    height, width = (x.shape[2] + 1) // 2 + 3, (x.shape[3] + 1) // 2 + 3
    deep: Tensor = space_to_depth(x, _IMAGE_OFFSET, height, width, _depth(x.shape[1]))
    return deep


def _deep_weight(weight: Tensor) -> Tensor:
    deep: Tensor = space_to_depth(weight, _WEIGHT_OFFSET, 4, 4, _depth(weight.shape[1]))
    return deep


@_LIBRARY.operator("(Tensor grad, Tensor x, Tensor weight) -> Tensor")
def stem_conv_weight_grad(grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """Gradient of the weight [O, C, 7, 7] from that of the output [N, O, ⌈H / 2⌉, ⌈W / 2⌉] and images [N, C, H, W]."""
    deep = torch.ops.aten.convolution_backward(
        grad, _deep_images(x), _deep_weight(weight), None,
        [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [False, True, False],
    )[1]  # fmt: skip
    outputs, channels = weight.shape[:2]
    squares = deep[:, : 4 * channels].unflatten(1, (2, 2, channels))
    taps = squares.permute(0, 3, 4, 1, 5, 2).reshape(outputs, channels, 8, 8)
    return taps[:, :, _WEIGHT_OFFSET:, _WEIGHT_OFFSET:].contiguous(memory_format=torch.channels_last)


@_LIBRARY.fake("stem_conv_weight_grad")
def _(grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    return torch.empty_like(weight, memory_format=torch.channels_last)


def _setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None]:
    x, weight = ctx.saved_tensors
    if ctx.needs_input_grad[0]:
        raise RuntimeError("stem_conv has no gradient for images; call torch.nn.functional.conv2d where it is wanted")
    return None, stem_conv_weight_grad(grad, x, weight) if ctx.needs_input_grad[1] else None


_LIBRARY.autograd("stem_conv", _backward, _setup_context)
