"""What the kernels compute, in torch's own operators, and the gradients of both.

Glue is written so that it can be differentiated and compiled for symbolic sizes: training runs it as it is.

Shape legend: as in operators.py; G groups.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def group_norm(
    x: Tensor, shift: Tensor | None, weight: Tensor, bias: Tensor, groups: int, eps: float, silu: bool
) -> Tensor:
    """Group norm of x [B, C, H, W] plus shift [B, C], and SiLU where asked for."""
    wide = _shifted(x, shift)
    out = F.group_norm(wide, groups, weight.to(wide.dtype), bias.to(wide.dtype), eps)
    out = F.silu(out) if silu else out
    return out.to(x.dtype, memory_format=torch.channels_last)


def cat_group_norm(
    x: Tensor, skip: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float, silu: bool
) -> tuple[Tensor, Tensor]:
    """Group norm of x [B, C, H, W] and skip [B, S, H, W] side by side, and both side by side."""
    joined = torch.cat([x, skip.to(x.dtype)], dim=1).contiguous(memory_format=torch.channels_last)
    return group_norm(joined, None, weight, bias, groups, eps, silu), joined


def group_norm_backward(
    grad: Tensor,
    x: Tensor,
    shift: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    more: Tensor | None,
    groups: int,
    eps: float,
    silu: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x [B, C, H, W] (plus ``more``), of shift [B, C] (empty without one), weight [C] and bias [C].

    Statistics are computed again.
    """
    wide = _shifted(x, shift)
    split = (x.shape[0], groups, -1, *x.shape[2:])
    variance, mean = torch.var_mean(wide.reshape(split), dim=(2, 3, 4), correction=0, keepdim=True)
    scale = (variance + eps).rsqrt()
    normed = ((wide.reshape(split) - mean) * scale).reshape(x.shape)
    grad, column = grad.to(wide.dtype), (1, -1, 1, 1)
    if silu:
        before = normed * weight.to(wide.dtype).view(column) + bias.to(wide.dtype).view(column)
        gate = before.sigmoid()
        grad = grad * gate * (1 + before * (1 - gate))
    grad_weight, grad_bias = (grad * normed).sum((0, 2, 3)), grad.sum((0, 2, 3))
    inner = (grad * weight.to(wide.dtype).view(column)).reshape(split)
    along = (inner * normed.reshape(split)).mean((2, 3, 4), keepdim=True)
    inner = scale * (inner - inner.mean((2, 3, 4), keepdim=True) - normed.reshape(split) * along)
    grad_x = inner.reshape(x.shape)
    grad_shift = x.new_empty(0) if shift is None else grad_x.sum((2, 3)).to(shift.dtype)
    if more is not None:
        grad_x = grad_x + more.to(grad_x.dtype)
    grad_x = grad_x.to(x.dtype, memory_format=torch.channels_last)
    return grad_x, grad_shift, grad_weight.to(weight.dtype), grad_bias.to(bias.dtype)


def gated_gelu(x: Tensor, bias: Tensor) -> Tensor:
    """X [R, 2 I] plus bias [2 I]; GELU of the second half times the first: [R, I]."""
    # Under autocast parameters stay wide, and would make activations wide as well.
    value, gate = (x + bias.to(x.dtype)).chunk(2, dim=-1)
    return value * F.gelu(gate)


def conv_add(x: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
    """[R, C] plus [C] plus [R, C]: [R, C]."""
    return x + bias.to(x.dtype) + residual


def conv_bias(x: Tensor, bias: Tensor) -> Tensor:
    """[R, C] plus [C]: [R, C]."""
    return x + bias.to(x.dtype)


def upsample(x: Tensor) -> Tensor:
    """[B, H, W, C] -> [B, 2 H, 2 W, C], each pixel four times."""
    count, height, width, channels = x.shape
    wide = x[:, :, None, :, None].expand(count, height, 2, width, 2, channels)
    return wide.reshape(count, 2 * height, 2 * width, channels)


def windows(x: Tensor, stride: int) -> Tensor:
    """[B, H, W, C] -> [B H' W', 9 C]: the 3 × 3 pixels around each, or each ``stride``-th, zero outside the image."""
    around = F.pad(x, (0, 0, 1, 1, 1, 1)).unfold(1, 3, stride).unfold(2, 3, stride)
    return around.permute(0, 1, 2, 4, 5, 3).reshape(-1, 9 * x.shape[3])


def add_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, shift: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """X [R, C] plus residual [R, C], plus shift [C]; and the layer norm of the first sum, with weight and bias [C]."""
    total = residual + x
    return total if shift is None else total + shift.to(total.dtype), row_norm(total, weight, bias, eps)


def row_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Layer norm of x [R, C] with weight [C] and bias [C]: [R, C]."""
    return F.layer_norm(x, weight.shape, weight, bias, eps).to(x.dtype)


def attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
    """Query [B, T, N, D], key and value [B, L, N, D], bias [B, 1, 1, L] or None -> rows [B T, N D]."""
    mixed = F.scaled_dot_product_attention(
        query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), attn_mask=bias
    )
    return mixed.transpose(1, 2).reshape(-1, query.shape[2] * query.shape[3])


def _shifted(x: Tensor, shift: Tensor | None) -> Tensor:
    wide = x if x.dtype == torch.float64 else x.float()
    return wide if shift is None else wide + shift.to(wide.dtype)[:, :, None, None]
