"""GELU with the bias before it, and gated linear units: with GELU, alone and with the product before it, and with SiLU.

Shape legend: R rows, C channels, I width inside the MLP.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.engine.autograd import differentiable_once
from zoo.ops import triton as kernels
from zoo.ops.common import differentiated, kernels_run

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
        return kernels.glu.gated_gelu_backward(grad, *ctx.saved_tensors, ctx.needs_input_grad[1])


def gated_product_runs(x: Tensor, weight: Tensor, bias: Tensor) -> bool:
    """Whether ``gated_gelu_product`` of these is one kernel: on Hopper, of enough rows, without gradients and casts."""
    if x.dtype not in (torch.bfloat16, torch.float16) or x.dtype != weight.dtype or x.shape[0] < LEAST_ROWS:
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
