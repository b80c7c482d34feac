# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs
"""Pixels of 2 × 2 squares side by side in channels.

Shape legend: N images, C channels, D channels of the result, H and W height and width of the result.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from zoo.ops.common import ceil_div
from zoo.ops.triton.kernel import kernel

# Pixels of the result that a program writes.
PIXELS = 128


@kernel
def _space_to_depth(
    x, out, stride_n, stride_c, stride_y, stride_x, height, width, pixels, H, W, offset,
    C: tl.constexpr, D: tl.constexpr, PIXELS: tl.constexpr,
):  # fmt: skip
    pixel = tl.program_id(0).to(tl.int64) * PIXELS + tl.arange(0, PIXELS)
    channel = tl.arange(0, D)
    image, place = pixel // (H * W), pixel % (H * W)
    square, c = channel // (D // 4), channel % (D // 4)
    y = 2 * (place // W)[:, None] + (square // 2)[None, :] - offset
    column = 2 * (place % W)[:, None] + (square % 2)[None, :] - offset
    inside = (y >= 0) & (y < height) & (column >= 0) & (column < width)
    inside &= (pixel < pixels)[:, None] & (c < C)[None, :]
    source = (image * stride_n)[:, None] + (c * stride_c)[None, :] + y * stride_y + column * stride_x
    value = tl.load(x + source, mask=inside, other=0.0)
    tl.store(out + (pixel * D)[:, None] + channel, value.to(out.dtype.element_ty), mask=(pixel < pixels)[:, None])


def space_to_depth(x: Tensor, offset: int, height: int, width: int, channels: int, dtype: torch.dtype) -> Tensor:
    """As ``zoo.ops.stem_conv.space_to_depth``; ``channels`` is a power of two."""
    out = x.new_empty(x.shape[0], height, width, channels, dtype=dtype)
    pixels = x.shape[0] * height * width
    _space_to_depth[(ceil_div(pixels, PIXELS),)](
        x, out, *x.stride(), x.shape[2], x.shape[3], pixels, height, width, offset,
        C=x.shape[1], D=channels, PIXELS=PIXELS, num_warps=4,
    )  # fmt: skip
    return out.permute(0, 3, 1, 2)
