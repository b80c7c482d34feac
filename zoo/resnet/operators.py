"""Library calls that have bias, residual and relu in them, as operators that can be traced: for folded models.

torch has cuDNN's as ``aten::cudnn_convolution_relu`` and ``aten::cudnn_convolution_add_relu``, which have no rule for
the shapes of their outputs, so no compiler takes them. The matrix product it has as ``aten::_addmm_activation``, which
Inductor takes apart again.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.ops.common import KERNEL_DTYPES
from zoo.ops.opaque import OperatorLibrary

_LIBRARY = OperatorLibrary("zoo_resnet")


def cudnn_fuses(x: Tensor) -> bool:
    """Whether cuDNN does all of it at once for such a tensor."""
    return x.is_cuda and torch.version.hip is None and x.dtype in KERNEL_DTYPES and torch.backends.cudnn.enabled


def tell_flop_counter() -> None:
    """Register FLOP formulas if somebody counts. Importing torch's counter would bring Triton in."""
    if "torch.utils.flop_counter" in sys.modules:
        importlib.import_module("zoo.resnet.flops")


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


@_LIBRARY.operator("(Tensor x, Tensor weight, Tensor bias) -> Tensor")
def linear_relu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Relu of rows x [R, C_in] times weight [C_out, C_in] plus bias [C_out]: [R, C_out]. Without gradients."""
    return torch.ops.aten._addmm_activation(bias, x, weight.t())


@_LIBRARY.fake("linear_relu")
def _(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])
