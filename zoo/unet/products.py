"""Products whose gradients are summed in float32 under autocast, and those that may be adapted.

Shape legend: R rows (pixels of all images), C channels, N rows of a weight.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.modules import compute_dtype, plain
from zoo.ops.common import differentiated, kernels_run
from zoo.ops.products import low_add_linear, low_linear, takes_low


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A product [..., C], [N, C] and [N] or None -> [..., N]; under autocast with gradients of ``zoo.ops.products``."""
    given = (x, weight) if bias is None else (x, weight, bias)
    if differentiated(*given) and kernels_run(*given):
        low = x.to(compute_dtype(x))  # as autocast would
        if takes_low(low, weight, bias):
            return low_linear(low, weight, bias)
    return F.linear(x, weight, bias)


def add_linear(added: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """Added [R, N], which nobody else reads any more, plus x [R, C] by weight [N, C], in one product."""
    learns = differentiated(added, x, weight) and kernels_run(added, x, weight)
    if learns and added.dtype == x.dtype and takes_low(x, weight, None):
        return low_add_linear(added, x, weight)
    if torch.is_grad_enabled() or not added.dtype == x.dtype == weight.dtype:
        return torch.addmm(added, x, weight.t())
    # Into another tensor torch 2.11 copies what is added first.
    return added.addmm_(x, weight.t())


def product(x: Tensor, layer: nn.Linear) -> Tensor:
    """``linear`` of a layer, which is called if it is not what it was built as."""
    if plain(layer):
        return linear(x, layer.weight, layer.bias)
    out: Tensor = layer(x)
    return out
