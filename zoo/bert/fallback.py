"""What the kernels compute, in torch's own operators.

Shape legend: as in operators.py.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def add_layer_norm(
    x: Tensor,
    added: Tensor,
    shift: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    low_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The norm, its copy of another dtype, the sum [..., C], and the mean and the factor [...] of each row."""
    wide = x.float() + added.float()
    if shift is not None:
        wide = wide + shift.float()
    total = wide.to(x.dtype).contiguous()
    wide = total.float()
    mean = wide.mean(-1)
    apart = wide - mean[..., None]
    scale = torch.rsqrt(apart.square().mean(-1) + eps)
    out = apart * scale[..., None] * weight.float() + bias.float()
    low = x.new_empty(0) if low_dtype is None else out.to(low_dtype, copy=True)
    return out.to(x.dtype), low, total, mean, scale


def add_layer_norm_backward(
    total: Tensor,
    mean: Tensor,
    scale: Tensor,
    weight: Tensor,
    grad: Tensor,
    low_grad: Tensor | None,
    added_dtype: torch.dtype | None,
    shifted: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the sum [..., C], its copy of another dtype, and of weight, bias and shift [C]."""
    wide = grad.float() if low_grad is None else grad.float() + low_grad.float()
    unit = (total.float() - mean[..., None]) * scale[..., None]
    change = wide * weight.float()
    result = change - change.mean(-1, keepdim=True) - unit * (change * unit).mean(-1, keepdim=True)
    result = (result * scale[..., None]).contiguous()
    weights, biases, shifts = (_rows(each).sum(0).to(weight.dtype) for each in (wide * unit, wide, result))
    low = total.new_empty(0) if added_dtype is None else result.to(added_dtype, copy=True)
    return result.to(total.dtype), low, weights, biases, shifts if shifted else total.new_empty(0)


def bias_gelu(x: Tensor, bias: Tensor, tanh: bool) -> Tensor:
    """GELU of x [..., I] plus bias [I]: [..., I]."""
    out = F.gelu(x.float() + bias.float(), approximate=_form(tanh))
    return out.to(x.dtype).contiguous()


def bias_gelu_backward(grad: Tensor, x: Tensor, bias: Tensor, tanh: bool) -> tuple[Tensor, Tensor]:
    """Gradient of the output [..., I] -> of x [..., I] and of the bias [I]."""
    change = torch.ops.aten.gelu_backward(grad.float(), x.float() + bias.float(), approximate=_form(tanh))
    return change.to(x.dtype).contiguous(), _rows(change).sum(0).to(bias.dtype)


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _form(tanh: bool) -> str:
    return "tanh" if tanh else "none"
