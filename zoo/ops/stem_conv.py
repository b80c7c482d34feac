"""The first convolution on 2 × 2 squares of pixels instead of pixels: 16 channels where images have 3.

A convolution library's fast kernels want channels by the eight, and three channels leave most of a matrix unit idle. A
7 × 7 convolution of stride 2 is a 4 × 4 one of stride 1 over squares of 2 × 2 pixels: the same products, and zeros.

    y[i, j] = Σ w[a, b] x[2 i + a - 3, 2 j + b - 3]          a, b in 0 .. 6
            = Σ w[2 p + q - 1, 2 r + s - 1] x[2 (i + p - 2) + q, 2 (j + r - 2) + s]      p, r in 0 .. 3, q, s in 0, 1

Shape legend: N images, C channels, H height, W width, O channels of the output, D channels of squares: (q, s, channel).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.ops.common import differentiated, kernels_run

# Where squares of pixels begin, so that the padding of 3 and a tap of zeros before the others come out even.
_IMAGE_OFFSET, _WEIGHT_OFFSET = 4, 1


def stem_conv(x: Tensor, conv: nn.Conv2d) -> Tensor:
    """The first convolution of a network, without its bias: on squares of pixels where kernels run.

    Args:
        x: Images [N, C, H, W], in any layout.
        conv: Of any kind.

    Returns:
        [N, O, H', W'] in channels_last.
    """
    if not (_is_stem(conv) and x.numel() and kernels_run(x, conv.weight)) or differentiated(x):
        x = x.contiguous(memory_format=torch.channels_last)
        return F.conv2d(x, conv.weight, None, conv.stride, conv.padding, conv.dilation, conv.groups)
    kind = x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    height, width = (x.shape[2] + 1) // 2 + 3, (x.shape[3] + 1) // 2 + 3
    depth = 8 if x.shape[1] <= 2 else 16  # a multiple of eight, and a power of two
    squares = space_to_depth(x, _IMAGE_OFFSET, height, width, depth, dtype)
    # Under autocast the convolution narrows its weight.
    return F.conv2d(squares, space_to_depth(conv.weight, _WEIGHT_OFFSET, 4, 4, depth, conv.weight.dtype))


def _is_stem(conv: nn.Conv2d) -> bool:
    """Whether the convolution is the stem's, over few channels."""
    fits = (conv.kernel_size, conv.stride, conv.padding) == ((7, 7), (2, 2), (3, 3))
    return fits and conv.dilation == (1, 1) and conv.groups == 1 and conv.in_channels <= 4


def space_to_depth(x: Tensor, offset: int, height: int, width: int, channels: int, dtype: torch.dtype) -> Tensor:
    """Squares of 2 × 2 pixels as channels.

    Args:
        x: [N, C, H, W], in any layout.
        offset: Rows and columns of zeros before the first pixel.
        height: Of the result.
        width: Of the result.
        channels: D, at least 4 C and a power of two.
        dtype: Of the result.

    Returns:
        [N, D, height, width] in channels_last: channel (2 q + s) D / 4 + c of pixel (i, j) is channel c of pixel
        (2 i + q - offset, 2 j + s - offset), zero outside and where there is no channel c.
    """
    if kernels_run(x) and not differentiated(x):
        from zoo.ops.triton import stem_conv as kernels

        return kernels.space_to_depth(x, offset, height, width, channels, dtype)
    below, right = 2 * height - x.shape[2] - offset, 2 * width - x.shape[3] - offset
    padded = F.pad(
        x if x.dtype == dtype else x.to(dtype), (offset, right, offset, below, 0, channels // 4 - x.shape[1])
    )
    squares = padded.unflatten(3, (width, 2)).unflatten(2, (height, 2)).permute(0, 3, 5, 1, 2, 4)
    return squares.flatten(1, 3).contiguous(memory_format=torch.channels_last)
