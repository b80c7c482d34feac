"""Products in a lower precision than their weights, whose gradients are summed in float32, as torch operators.

On a GPU each runs a Triton kernel or one call of the library, elsewhere torch's own operators compute the same. In a
compiled graph each is one node.

Shape legend: R rows, C columns, N rows of a weight. "Low" is what has the dtype of products.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from zoo.gradients import fallback
from zoo.ops.common import KERNEL_DTYPES, triton_runs_on
from zoo.ops.opaque import OperatorLibrary, launcher

_LIBRARY = OperatorLibrary("zoo_gradients")


def _implementation(name: str, x: Tensor) -> Any:
    kernel = x.dtype in KERNEL_DTYPES and triton_runs_on(x.device)
    return launcher("zoo.gradients.kernels.sums", name, x) if kernel else getattr(fallback, name)


@_LIBRARY.operator("(Tensor x, ScalarType dtype) -> Tensor")
def lowered(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy in another dtype. Without a gradient: who asks for a copy knows where its gradient goes."""
    return x.to(dtype, copy=True, memory_format=torch.contiguous_format)


@_LIBRARY.fake("lowered")
def _(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.new_empty(x.shape, dtype=dtype)


@functools.cache
def _writes_float32(device: torch.device) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device)[0] >= 8


@_LIBRARY.operator("(Tensor grad, Tensor x) -> Tensor")
def weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """Gradient of a float32 weight [N, C] from those of its product [R, N] and its input [R, C], both low.

    On an NVIDIA GPU from Ampere on the product writes the float32 that it sums in, and no pass converts it.
    """
    with torch.autocast(x.device.type, enabled=False):
        if x.device.type == "cpu":
            return grad.float().t() @ x.float()
        if x.shape[0] and _writes_float32(x.device):
            return torch.mm(grad.t(), x, out_dtype=torch.float32)
        return (grad.t() @ x).float()


@_LIBRARY.fake("weight_gradient")
def _(grad: Tensor, x: Tensor) -> Tensor:
    return x.new_empty(grad.shape[1], x.shape[1], dtype=torch.float32)


@_LIBRARY.operator("(Tensor x, ScalarType dtype) -> Tensor")
def column_sums(x: Tensor, dtype: torch.dtype) -> Tensor:
    """[..., C] -> [C] in another dtype: the gradient of a product's bias."""
    return _implementation("column_sums", x)(x, dtype)


@_LIBRARY.fake("column_sums")
def _(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.new_empty(x.shape[-1], dtype=dtype)


@_LIBRARY.operator("(Tensor x, Tensor low) -> Tensor")
def add_low(x: Tensor, low: Tensor) -> Tensor:
    """X plus a tensor of the same shape in another dtype, in the dtype of x."""
    return _implementation("add_low", x)(x, low)


@_LIBRARY.fake("add_low")
def _(x: Tensor, low: Tensor) -> Tensor:
    return x.new_empty(x.shape)
