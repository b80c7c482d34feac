"""What the kernels compute, in torch's own operators.

Shape legend: as in operators.py.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.llm.attention import attend
from zoo.llm.cache import write
from zoo.llm.norm import rms_norm
from zoo.llm.rope import rotate


def norm_linear(x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None) -> Tensor:
    """RMS norm of x [M, C], times weight [N, C], plus bias [N]: [M, N]."""
    return F.linear(rms_norm(x, norm, eps), weight, bias)


def linear_add(x: Tensor, weight: Tensor, residual: Tensor) -> Tensor:
    """Features x [M, C] times weight [N, C], plus residual [M, N]."""
    return residual + F.linear(x, weight)


def norm_gate(x: Tensor, norm: Tensor, eps: float, weight: Tensor) -> Tensor:
    """RMS norm of x [M, C] times weight [2 N, C]; SiLU of the first half times the second: [M, N]."""
    gate, up = F.linear(rms_norm(x, norm, eps), weight).chunk(2, dim=-1)
    return F.silu(gate) * up


def decode_attention(
    qkv: Tensor,
    cache: Tensor,
    positions: Tensor,
    rotary: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    heads: int,
    window: int | None,
) -> Tensor:
    """Attention of one new token a row over the cache, which gets the token's key and value: [B, H D]."""
    key_heads, width = cache.shape[2], cache.shape[4]
    query, key, value = qkv.view(-1, 1, heads + 2 * key_heads, width).split((heads, key_heads, key_heads), dim=2)
    if q_norm is not None and k_norm is not None:
        query, key = rms_norm(query, q_norm, eps), rms_norm(key, k_norm, eps)
    rows = rotary.unsqueeze(1)
    write(cache, positions.unsqueeze(1), rotate(key, rows), value)
    return attend(rotate(query, rows), cache, positions.unsqueeze(1), window).flatten(1).contiguous()


def rotate_into(
    qkv: Tensor,
    cache: Tensor,
    positions: Tensor,
    rotary: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    heads: int,
) -> Tensor:
    """Norms of heads, rotation, keys and values into the cache: [B, T, (H + 2 K) D] -> queries [B, T, H, D]."""
    key_heads, width = cache.shape[2], cache.shape[4]
    query, key, value = qkv.unflatten(-1, (-1, width)).split((heads, key_heads, key_heads), dim=2)
    if q_norm is not None and k_norm is not None:
        query, key = rms_norm(query, q_norm, eps), rms_norm(key, k_norm, eps)
    write(cache, positions, rotate(key, rotary), value)
    return rotate(query, rotary).contiguous()


def split_rotated(qkv: Tensor, rotary: Tensor, heads: int, key_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """[B, T, (H + 2 K) D] taken apart: [B, T, H, D], [B, T, K, D] and [B, T, K, D], the first two rotated."""
    query, key, value = qkv.unflatten(-1, (-1, rotary.shape[-1])).split((heads, key_heads, key_heads), dim=2)
    return rotate(query, rotary), rotate(key, rotary), value.clone(memory_format=torch.contiguous_format)


def join_rotated(query: Tensor, key: Tensor, value: Tensor, rotary: Tensor) -> Tensor:
    """Gradient of [B, T, (H + 2 K) D] from those of its parts: a turn back is one by negative sines."""
    cos, sin = rotary.chunk(2, dim=-1)
    back = torch.cat((cos, -sin), dim=-1)
    return torch.cat((rotate(query, back), rotate(key, back), value), dim=2).flatten(2)


def prefill_attention(query: Tensor, cache: Tensor, positions: Tensor, window: int | None) -> Tensor:
    """Attention of many new tokens a row over a cache that holds them already: [B, T, H, D]."""
    return attend(query, cache, positions, window).contiguous()


def swiglu(x: Tensor) -> Tensor:
    """SiLU of the first half of x [R, 2 I] times the second: [R, I]."""
    gate, up = x.chunk(2, dim=-1)
    return (F.silu(gate) * up).contiguous()


def swiglu_backward(grad: Tensor, x: Tensor) -> Tensor:
    """Gradient of x [R, 2 I] from that of the output [R, I]."""
    gate, up = x.chunk(2, dim=-1)
    opened = gate.sigmoid()
    return torch.cat([grad * up * (opened + gate * opened * (1 - opened)), grad * gate * opened], dim=-1)


def rms_norm_rows(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """RMS norm of x [..., C], and the factors [...] that it multiplied with."""
    return rms_norm(x, weight, eps).contiguous(), torch.rsqrt(x.float().square().mean(-1) + eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """X [..., C] plus residual, the RMS norm of that, and its factors [...]."""
    total = (x + residual).contiguous()
    return total, *rms_norm_rows(total, weight, eps)


def rms_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor, above: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Gradients of what was normed [..., C], with the one past the norm, and of the weight [C]."""
    wide, factor = grad.float(), scale[..., None]
    unit = x.float() * factor
    change = wide * weight.float()
    result = factor * (change - unit * (change * unit).mean(-1, keepdim=True))
    if above is not None:
        result = result + above.float()
    summed = (wide * unit.to(x.dtype).float()).flatten(0, -2).sum(0)
    return result.to(x.dtype).contiguous(), summed.to(weight.dtype)


def accept_greedy(
    logits: Tensor,
    tokens: Tensor,
    positions: Tensor,
    finished: Tensor,
    step: Tensor,
    output: Tensor,
    ends: Tensor,
    pad: Tensor,
) -> None:
    """Take each row's most likely token and move on to the next step."""
    accept(logits.argmax(-1), tokens, positions, finished, step, output, ends, pad)


def accept(
    token: Tensor,
    tokens: Tensor,
    positions: Tensor,
    finished: Tensor,
    step: Tensor,
    output: Tensor,
    ends: Tensor,
    pad: Tensor,
) -> None:
    """Note the tokens [B] that were chosen, and move on; rows that have ended get padding and stay."""
    token = torch.where(finished, pad, token)
    output.index_copy_(0, step, token[None])
    positions.add_((~finished)[:, None])
    finished.logical_or_((token[:, None] == ends).any(-1))
    tokens.copy_(token[:, None])
    step.add_(1)
