"""Rotary position embeddings (https://arxiv.org/abs/2104.09864) of queries and keys as they come from their product.

Shape legend: B batch, T tokens, H query heads, K key and value heads, S slots of the cache, D width of a head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zoo.engine.autograd import differentiable_once
from zoo.ops import triton as kernels
from zoo.ops.common import accumulation_dtype, differentiated, kernels_run
from zoo.ops.norms import reference_rms_norm


def rotate(x: Tensor, rotary: Tensor) -> Tensor:
    """Turn the two halves of each head against each other.

    x [B, T, H, D], rotary [B or 1, T, D] -> [B, T, H, D] in the dtype of x, computed in at least float32.
    """
    cos, sin = rotary.unsqueeze(2).chunk(2, dim=-1)
    first, second = x.to(accumulation_dtype(x.dtype)).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def heads_fit(width: int) -> bool:
    """Whether the kernels take heads of this width."""
    return width >= 32 and width & (width - 1) == 0


def split_rotated(
    qkv: Tensor, rotary: Tensor, q_norm: Tensor | None, k_norm: Tensor | None, eps: float, heads: int, key_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Qkv [B, T, (H + 2 K) D] -> queries [B, T, H, D], keys and values [B, T, K, D], the first two normed and rotated.

    Rotary [B or 1, T, D] float32 holds the cosines and sines of the tokens' positions; q_norm and k_norm [D] are the
    weights of RMS norms, or None.
    """
    if q_norm is None and heads_fit(rotary.shape[-1]) and kernels_run(qkv):
        if differentiated(qkv):
            return _SplitRotated.apply(qkv, rotary, heads, key_heads)
        return kernels.rotary.split_rotated(qkv, rotary, heads, key_heads)
    query, key, value = qkv.unflatten(-1, (-1, rotary.shape[-1])).split((heads, key_heads, key_heads), dim=2)
    if q_norm is not None and k_norm is not None:
        query, key = reference_rms_norm(query, q_norm, eps), reference_rms_norm(key, k_norm, eps)
    return rotate(query, rotary), rotate(key, rotary), value


class _SplitRotated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, rotary: Tensor, heads: int, key_heads: int) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(rotary)
        return kernels.rotary.split_rotated(qkv, rotary, heads, key_heads)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return kernels.rotary.join_rotated(*grads, *ctx.saved_tensors), None, None, None


def rotate_into(
    qkv: Tensor, cache: Tensor, positions: Tensor, rotary: Tensor, q_norm: Tensor | None, k_norm: Tensor | None,
    eps: float, heads: int,
) -> Tensor:  # fmt: skip
    """``split_rotated`` whose keys and values are written into cache [2, B, K, S, D]: queries [B, T, H, D].

    Positions [B, T] int64 may occur twice in a row if they are the same token; one without a slot is not written by
    kernels, and elsewhere an error.
    """
    if heads_fit(cache.shape[-1]) and kernels_run(qkv, cache):
        return kernels.rotary.rotate_into(qkv, cache, positions, rotary, q_norm, k_norm, eps, heads)
    query, key, value = split_rotated(qkv, rotary, q_norm, k_norm, eps, heads, cache.shape[2])
    row = torch.arange(positions.shape[0], device=positions.device)[:, None]
    # One write to the whole tensor: to keys and values apart it would be a copy of the cache for some compilers.
    cache[:, row, :, positions] = torch.stack((key, value), dim=2).to(cache.dtype)
    return query
