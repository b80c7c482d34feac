"""What the kernels compute, in torch's own operators, and the gradients of both.

Glue is written so that it can be differentiated and compiled for symbolic sizes: where no kernel runs training takes it
as it is.

Shape legend: as in operators.py; G groups.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.ops.common import wide


def group_norm(
    x: Tensor, shift: Tensor | None, weight: Tensor, bias: Tensor, groups: int, eps: float, silu: bool
) -> tuple[Tensor, Tensor]:
    """Group norm of x [B, C, H, W] plus shift [B, C], and SiLU where asked for; statistics [B, G, 2]."""
    shifted = _shifted(x, shift)
    if shifted.device.type != "cpu":
        shifted = shifted.contiguous()  # torch's own norm on a GPU takes channels first alone
    affine = weight.to(shifted.dtype), bias.to(shifted.dtype)
    out, *statistics = torch.native_group_norm(
        shifted, *affine, x.shape[0], x.shape[1], x.shape[2] * x.shape[3], groups, eps
    )
    out = F.silu(out) if silu else out
    return out.to(x.dtype, memory_format=torch.channels_last), torch.stack(statistics, dim=-1)


def cat_group_norm(
    x: Tensor, skip: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float, silu: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Group norm of x [B, C, H, W] and skip [B, S, H, W] side by side, both side by side, and statistics [B, G, 2]."""
    joined = torch.cat([x, skip.to(x.dtype)], dim=1).contiguous(memory_format=torch.channels_last)
    out, statistics = group_norm(joined, None, weight, bias, groups, eps, silu)
    return out, joined, statistics


def group_norm_backward(
    grad: Tensor,
    x: Tensor,
    shift: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    statistics: Tensor,
    more: Tensor | None,
    first: int,
    silu: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x [B, C, H, W] (plus ``more``), first channels and rest; of shift, weight [C] and bias [C]."""
    shifted = _shifted(x, shift)
    groups = statistics.shape[1]
    split = (x.shape[0], groups, x.shape[1] // groups, *x.shape[2:])
    mean, scale = (part[:, :, None, None, None] for part in statistics.unbind(-1))
    normed = ((shifted.reshape(split) - mean) * scale).reshape(x.shape)
    grad, column = grad.to(shifted.dtype), (1, -1, 1, 1)
    if silu:
        before = normed * weight.to(shifted.dtype).view(column) + bias.to(shifted.dtype).view(column)
        gate = before.sigmoid()
        grad = grad * gate * (1 + before * (1 - gate))
    grad_weight, grad_bias = (grad * normed).sum((0, 2, 3)), grad.sum((0, 2, 3))
    inner = (grad * weight.to(shifted.dtype).view(column)).reshape(split)
    along = (inner * normed.reshape(split)).mean((2, 3, 4), keepdim=True)
    inner = scale * (inner - inner.mean((2, 3, 4), keepdim=True) - normed.reshape(split) * along)
    grad_x = inner.reshape(x.shape)
    grad_shift = x.new_empty(0) if shift is None else grad_x.sum((2, 3)).to(shift.dtype)
    if more is not None:
        grad_x = grad_x + more.to(grad_x.dtype)
    both = (
        part.to(x.dtype, copy=True, memory_format=torch.channels_last)
        for part in grad_x.split([first, x.shape[1] - first], dim=1)
    )
    return *both, grad_shift, grad_weight.to(weight.dtype), grad_bias.to(bias.dtype)


def gated_gelu(x: Tensor, bias: Tensor) -> Tensor:
    """X [R, 2 I] plus bias [2 I]; GELU of the second half times the first: [R, I]."""
    # Under autocast parameters stay wide, and would make activations wide as well.
    value, gate = (x + bias.to(x.dtype)).chunk(2, dim=-1)
    return value * F.gelu(gate)


def gated_gelu_backward(grad: Tensor, x: Tensor, bias: Tensor, summed: bool) -> tuple[Tensor, Tensor]:
    """Gradient of the output [R, I] -> of x [R, 2 I] and, if summed, of the bias [2 I], else [0]."""
    value, gate = (_wide(x) + _wide(bias)).chunk(2, dim=-1)
    grad = _wide(grad)
    out = torch.cat([grad * F.gelu(gate), torch.ops.aten.gelu_backward(grad * value, gate)], dim=-1)
    return out.to(x.dtype), out.sum(0).to(bias.dtype) if summed else bias.new_empty(0)


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
    # Also of no images a copy: an operator may not return what it was given.
    return wide.clone(memory_format=torch.contiguous_format).view(count, 2 * height, 2 * width, channels)


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


def kept_add_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, shift: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """``add_norm``, the sum without the shift [R, C], or [0] without one, and mean and factor of each row [R]."""
    dtype, wide = torch.promote_types(x.dtype, residual.dtype), _wide(x) + _wide(residual)
    summed = wide.to(dtype)
    out, mean, scale = kept_row_norm(summed, weight, bias, eps)
    if shift is None:
        return summed, out, summed.new_empty(0), mean, scale
    return (wide + _wide(shift)).to(dtype), out, summed, mean, scale


def kept_row_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """``row_norm``, and mean and factor of each row [R]."""
    wide = _wide(x)
    mean = wide.mean(-1)
    apart = wide - mean[:, None]
    scale = torch.rsqrt(apart.square().mean(-1) + eps)
    return (apart * scale[:, None] * _wide(weight) + _wide(bias)).to(x.dtype), mean, scale


def norm_backward(
    grad: Tensor, more: Tensor | None, summed: Tensor, mean: Tensor, scale: Tensor, weight: Tensor, weighted: bool,
    shifted: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of the sum [R, C], of weight and bias [C] if weighted, and of the shift [C] if shifted; else [0]."""
    unit = (_wide(summed) - mean[:, None]) * scale[:, None]
    change = _wide(grad) * _wide(weight)
    out = change - change.mean(-1, keepdim=True) - unit * (change * unit).mean(-1, keepdim=True)
    out = out * scale[:, None] if more is None else out * scale[:, None] + _wide(more)
    sums = [(_wide(grad) * unit).sum(0), _wide(grad).sum(0)] if weighted else [weight.new_empty(0)] * 2
    moved = _wide(more).sum(0) if shifted and more is not None else weight.new_empty(0)
    grad_weight, grad_bias, grad_shift = (each.to(weight.dtype, copy=True) for each in (*sums, moved))
    return out.to(summed.dtype), grad_weight, grad_bias, grad_shift


def attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
    """Query [B, T, N, D], key and value [B, L, N, D], bias [B, 1, 1, L] or None -> rows [B T, N D]."""
    mixed = F.scaled_dot_product_attention(
        query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), attn_mask=bias
    )
    return mixed.transpose(1, 2).reshape(-1, query.shape[2] * query.shape[3])


def _wide(x: Tensor) -> Tensor:
    return x.to(wide(x.dtype))


def _shifted(x: Tensor, shift: Tensor | None) -> Tensor:
    return _wide(x) if shift is None else _wide(x) + _wide(shift)[:, :, None, None]
