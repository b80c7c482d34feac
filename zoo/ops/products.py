"""A product in a lower precision than its float32 weight, as autocast has it, with gradients in float32.

Autocast converts the weight, and autograd what comes back: the gradient of the weight is written in the low dtype, and
then in float32. Here the product that makes it writes float32, and the bias' is one pass over the rows.

Shape legend: R rows, C columns, N rows of a weight. "Low" is what has the dtype of products.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.engine.autograd import differentiable_once
from zoo.ops import triton as kernels
from zoo.ops.common import (
    ENABLED,
    accumulation_dtype,
    compute_dtype,
    differentiated,
    forward_mode,
    is_plain_tensor,
    kernels_run,
    transformed,
)

_LOW = (torch.bfloat16, torch.float16)


def takes_low(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether autocast would convert weight and bias for x, and ``low_linear`` is for them."""
    if not ENABLED or x.dtype not in _LOW or not is_plain_tensor(weight) or weight.dtype != torch.float32:
        return False
    if bias is not None and not (is_plain_tensor(bias) and bias.dtype == torch.float32):
        return False
    if transformed() or forward_mode():
        return False
    return torch.is_autocast_enabled(x.device.type) and compute_dtype(x) == x.dtype


def with_low_copy(x: Tensor) -> tuple[Tensor, Tensor]:
    """X, and x in the dtype that products have under autocast. Go on with the x that is returned."""
    low = compute_dtype(x)
    if low == x.dtype:
        return x, x
    if kernels_run(x) and differentiated(x):
        return _WithLowCopy.apply(x, low)
    return x, x.to(low)


def low_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A low x [..., C] times a float32 weight [N, C], and a bias [N]: [..., N], low. With a gradient."""
    return _Linear.apply(x, weight, bias, None)


def low_add_linear(added: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """The same of x [R, C] without a bias, in one product with what it is added to [R, N], low as well."""
    return _Linear.apply(x, weight, None, added)


def weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """Gradient of a float32 weight [N, C] from those of its product [R, N] and its input [R, C], both low.

    On an NVIDIA GPU from Ampere on the product writes the float32 that it sums in, and no pass converts it.
    """
    if x.device.type == "cpu":
        with torch.autocast("cpu", enabled=False):
            return grad.float().t() @ x.float()
    if x.shape[0] and kernels_run(x) and torch.version.hip is None:
        return torch.mm(grad.t(), x, out_dtype=torch.float32)
    return (grad.t() @ x).float()


def column_sums(x: Tensor, dtype: torch.dtype) -> Tensor:
    """[..., C] -> [C] in another dtype: the gradient of a product's bias. Summed in float32, without a gradient."""
    if kernels_run(x):
        return kernels.tiles.column_sums(x, dtype)
    return x.reshape(-1, x.shape[-1]).sum(0, dtype=accumulation_dtype(x.dtype)).to(dtype)


class _WithLowCopy(torch.autograd.Function):
    """One node with both outputs, so that one pass adds both gradients of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, low: torch.dtype) -> tuple[Tensor, Tensor]:
        return x.view_as(x), x.to(low)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, low_grad: Tensor) -> tuple[Tensor, None]:
        return (grad + low_grad).to(grad.dtype), None


class _Linear(torch.autograd.Function):
    """Gradients of weight and bias are summed and kept in float32; what is added has the gradient of the sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, added: Tensor | None) -> Tensor:
        low = weight.to(x.dtype)
        x_learns, weight_learns = ctx.needs_input_grad[:2]
        # Each factor is for the gradient of the other: before a frozen weight no activation is held.
        ctx.save_for_backward(x if weight_learns else None, low if x_learns else None)
        ctx.biased, ctx.adds = bias is not None, added is not None
        if added is not None:
            return torch.addmm(added, x, low.t())
        return F.linear(x, low, None if bias is None else bias.to(x.dtype))

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, low = ctx.saved_tensors
        rows = grad.reshape(-1, grad.shape[-1])
        wanted = ctx.needs_input_grad
        return (
            grad @ low if wanted[0] else None,
            weight_gradient(rows, x.reshape(-1, x.shape[-1])) if wanted[1] else None,
            column_sums(rows, torch.float32) if ctx.biased and wanted[2] else None,
            grad if ctx.adds else None,
        )
