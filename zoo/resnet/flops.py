"""Floating-point operations of the operators, for ``torch.utils.flop_counter``: multiply-adds count as two.

Importing this brings Triton in, as torch's counter does, so nothing of the package does it before somebody counts.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from zoo.resnet import depth as _depth  # noqa: F401 - registers the operators
from zoo.resnet import operators as _operators  # noqa: F401

Shape = tuple[int, ...]
_OPS = torch.ops.zoo_resnet


@register_flop_formula(_OPS.conv_act)
def conv_act_flops(x: Shape, weight: Shape, *_: Any, out_shape: Shape, **__: Any) -> int:
    """A multiply-add for each output and weight that it sees; bias, residual and relu are left out, as torch does."""
    return 2 * prod(out_shape) * prod(weight[1:])


@register_flop_formula(_OPS.linear_relu)
def linear_relu_flops(x: Shape, weight: Shape, *_: Any, **__: Any) -> int:
    """A multiply-add for each row and weight."""
    return 2 * x[0] * prod(weight)


@register_flop_formula(_OPS.stem_conv)
def stem_conv_flops(x: Shape, weight: Shape, *_: Any, out_shape: Shape, **__: Any) -> int:
    """Those of the 7 × 7 convolution: the zeros among squares are no work that was asked for."""
    return 2 * prod(out_shape) * prod(weight[1:])


@register_flop_formula(_OPS.stem_conv_weight_grad)
def stem_conv_weight_grad_flops(grad: Shape, x: Shape, weight: Shape, *_: Any, **__: Any) -> int:
    """The same again."""
    return 2 * prod(grad) * prod(weight[1:])


@register_flop_formula(_OPS.space_to_depth)
def space_to_depth_flops(*_: Any, **__: Any) -> int:
    """None: values are moved."""
    return 0
