"""Library calls that have bias, residual and relu in them, for models whose norms are folded.

They stay behind ``torch.library``: cuDNN's, ``aten::cudnn_convolution_relu`` and ``aten::cudnn_convolution_add_relu``,
have no rule for the shapes of their outputs, so no compiler takes them; the matrix product,
``aten::_addmm_activation``, Inductor takes apart into a product and an activation. Modes that watch each operator, such
as a FLOP counter, do not know them: ask ``zoo.ops.common.watched`` first.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.engine.compat import name_fallbacks_alone
from zoo.ops.common import KERNEL_DTYPES, Function


def operator(namespace: str, schema: str, shapes: Function) -> Callable[[Function], Any]:
    """Make a function an operator, which has no gradient.

    ``torch.library.custom_op`` would do the same, and import Dynamo at the first eager call.

    Args:
        namespace: As in ``torch.ops.<namespace>``.
        schema: Arguments and outputs; an argument that is written to is marked in it.
        shapes: Says shapes and dtypes of the outputs; takes the same arguments.
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
