"""Products in a lower precision than their float32 weight, and GELU and gated units, which follow products.

Autocast converts a float32 weight, and autograd what comes back: the gradient of the weight is written in the low
dtype, and then in float32. Here the product that makes it writes float32, and the bias' is one pass over the rows.

Shape legend: R rows, C columns, N rows of a weight, I width inside the MLP. "Low" is what has the dtype of products.
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
    is_plain_tensor,
    kernels_run,
    transformed,
)

_LOW = (torch.bfloat16, torch.float16)


def takes_low(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether autocast would convert weight and bias for x, and ``low_linear`` is for them."""
    if not ENABLED or x.dtype not in _LOW or transformed():
        return False
    for each in (weight, bias):
        if each is not None and not (is_plain_tensor(each) and each.dtype == torch.float32):
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


# Of fewer rows the library's product and a gate are faster, measured on an H200.
LEAST_ROWS = 2048


def bias_gelu(x: Tensor, bias: Tensor, tanh: bool) -> Tensor:
    """GELU of x [..., I] plus bias [I], by erf or its approximation by tanh: [..., I], in the dtype of x."""
    if kernels_run(x, bias):
        return _BiasGelu.apply(x, bias, tanh) if differentiated(x, bias) else kernels.glu.bias_gelu(x, bias, tanh)
    return F.gelu(x + bias, approximate="tanh" if tanh else "none").to(x.dtype)


class _BiasGelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, tanh: bool) -> Tensor:
        ctx.save_for_backward(x, bias)
        ctx.tanh = tanh
        return kernels.glu.bias_gelu(x, bias, tanh)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return *kernels.glu.bias_gelu_backward(grad, *ctx.saved_tensors, ctx.tanh), None


def gated_gelu(x: Tensor, bias: Tensor) -> Tensor:
    """X [..., 2 I] plus bias [2 I]; GELU of the second half, in its erf form, times the first: [..., I].

    Rounded once. Other shapes are a ValueError, here and in ``gated_gelu_product``.
    """
    if x.shape[-1] % 2:
        raise ValueError(f"x has {x.shape[-1]} columns, expected an even number: two halves")
    if bias.shape != x.shape[-1:]:
        raise ValueError(f"bias has shape {tuple(bias.shape)}, expected one number a column: ({x.shape[-1]},)")
    if kernels_run(x, bias):
        return _GatedGelu.apply(x, bias) if differentiated(x, bias) else kernels.glu.gated_gelu(x, bias)
    # Under autocast parameters stay in float32, and would make activations float32 as well.
    value, gate = (x + bias.to(x.dtype)).chunk(2, dim=-1)
    return value * F.gelu(gate)


class _GatedGelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, bias)
        return kernels.glu.gated_gelu(x, bias)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return kernels.glu.gated_gelu_backward(grad, *ctx.saved_tensors)


def gated_product_runs(x: Tensor, weight: Tensor, bias: Tensor) -> bool:
    """Whether ``gated_gelu_product`` of these is one kernel: on Hopper, of enough rows, without gradients and casts."""
    if x.dtype not in _LOW or x.dtype != weight.dtype or x.shape[0] < LEAST_ROWS:
        return False
    # What the copy engine takes: rows that begin on 16 bytes. Inside a region nobody can ask where a tensor begins.
    if x.shape[1] % 8 or weight.shape[0] % 16 or not weight.is_contiguous():
        return False
    if not torch.compiler.is_compiling() and any(each.storage_offset() % 8 for each in (x, weight)):
        return False
    if differentiated(x, weight, bias) or not kernels_run(x, weight, bias) or not _is_hopper(x.device):
        return False
    return not torch.is_autocast_enabled(x.device.type)


def _is_hopper(device: torch.device) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_properties(device).major == 9


def gated_gelu_product(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """``gated_gelu`` of x [R, C] by weight [2 I, C], with bias [2 I]: [R, I], one kernel if ``gated_product_runs``."""
    if weight.shape[0] % 2 or x.shape[1:] != weight.shape[1:] or bias.shape != weight.shape[:1]:
        shapes = ", ".join(str(tuple(each.shape)) for each in (x, weight, bias))
        raise ValueError(f"x, weight and bias have shapes {shapes}; expected [R, C], [2 I, C] and [2 I]")
    if gated_product_runs(x, weight, bias):
        return kernels.glu.gated_gelu_product(x, weight, bias)
    # The gate adds the bias: with it the library takes a kernel that clears a buffer first.
    return gated_gelu(F.linear(x, weight), bias)


def swiglu(x: Tensor) -> Tensor:
    """SiLU of the first half of x [..., 2 I] times the second: [..., I] (https://arxiv.org/abs/2002.05202)."""
    if kernels_run(x):
        return _SwiGLU.apply(x) if differentiated(x) else kernels.glu.swiglu(x)
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return kernels.glu.swiglu(x)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return kernels.glu.swiglu_backward(grad, *ctx.saved_tensors)
