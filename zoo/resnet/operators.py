"""cuDNN's convolution with bias, residual and relu in one call, as an operator that can be traced.

torch has it as ``aten::cudnn_convolution_relu`` and ``aten::cudnn_convolution_add_relu``, which have no rule for the
shapes of their outputs, so no compiler takes them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.operators import OperatorLibrary

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_LIBRARY = OperatorLibrary("zoo_resnet")


def cudnn_fuses(x: Tensor) -> bool:
    """Whether cuDNN does all of it at once for such a tensor."""
    return x.is_cuda and torch.version.hip is None and x.dtype in DTYPES and torch.backends.cudnn.enabled


@_LIBRARY.operator(
    "(Tensor x, Tensor weight, Tensor bias, Tensor? residual, int[] stride, int[] padding, int[] dilation, int groups)"
    " -> Tensor"
)
def conv_act(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    residual: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    """Relu of convolution, bias and residual. Without gradients: for folded models.

    Args:
        x: [N, C_in, H, W], in channels_last.
        weight: [C_out, C_in / groups, K, K], in channels_last.
        bias: [C_out].
        residual: [N, C_out, H', W'], added before the relu, or None.
        stride: Of both directions, as padding and dilation.
        padding: Of zeros.
        dilation: Pixels between taps.
        groups: Of channels.

    Returns:
        [N, C_out, H', W'], in channels_last.
    """
    if not cudnn_fuses(x):
        out = F.conv2d(x, weight, bias, stride, padding, dilation, groups)  # type: ignore[arg-type]
        out = (out if residual is None else out + residual).relu_()
    elif residual is None:
        out = torch.ops.aten.cudnn_convolution_relu(x, weight, bias, stride, padding, dilation, groups)
    else:
        out = torch.ops.aten.cudnn_convolution_add_relu(x, weight, residual, 1, bias, stride, padding, dilation, groups)
    return out.contiguous(memory_format=torch.channels_last)


@_LIBRARY.fake("conv_act")
def _(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    residual: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    sides = [
        (size + 2 * pad - spread * (kernel - 1) - 1) // step + 1
        for size, kernel, step, pad, spread in zip(
            x.shape[2:], weight.shape[2:], stride, padding, dilation, strict=True
        )
    ]
    return x.new_empty(x.shape[0], weight.shape[0], *sides).contiguous(memory_format=torch.channels_last)
