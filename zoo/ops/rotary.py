"""Rotary position embeddings (https://arxiv.org/abs/2104.09864) of queries and keys as they come from their product.

Shape legend: B batch, T tokens, H query heads, K key and value heads, S slots of the cache, D width of a head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zoo.ops.common import accumulation_dtype, differentiable_once, differentiated, kernels_run
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
    """Queries, keys and values, the first two normed and rotated.

    Args:
        qkv: [B, T, (H + 2 K) D].
        rotary: [B or 1, T, D] float32, cosines and sines of the tokens' positions.
        q_norm: [D], weight of the queries' RMS norm, or None.
        k_norm: [D], of the keys'.
        eps: Of both.
        heads: H.
        key_heads: K.

    Returns:
        [B, T, H, D], [B, T, K, D] and [B, T, K, D].
    """
    if q_norm is None and heads_fit(rotary.shape[-1]) and kernels_run(qkv):
        if differentiated(qkv):
            parts: tuple[Tensor, Tensor, Tensor] = _SplitRotated.apply(qkv, rotary, heads, key_heads)
            return parts
        from zoo.ops.triton import rotary as kernels

        return kernels.split_rotated(qkv, rotary, heads, key_heads)
    query, key, value = qkv.unflatten(-1, (-1, rotary.shape[-1])).split((heads, key_heads, key_heads), dim=2)
    if q_norm is not None and k_norm is not None:
        query, key = reference_rms_norm(query, q_norm, eps), reference_rms_norm(key, k_norm, eps)
    return rotate(query, rotary), rotate(key, rotary), value


class _SplitRotated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, rotary: Tensor, heads: int, key_heads: int) -> tuple[Tensor, Tensor, Tensor]:
        from zoo.ops.triton import rotary as kernels

        ctx.save_for_backward(rotary)
        return kernels.split_rotated(qkv, rotary, heads, key_heads)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        from zoo.ops.triton import rotary as kernels

        return kernels.join_rotated(*grads, *ctx.saved_tensors), None, None, None


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
    """``split_rotated`` of which keys and values go into the cache, at their positions.

    Args:
        qkv: [B, T, (H + 2 K) D].
        cache: [2, B, K, S, D], written in place.
        positions: [B, T] int64. One may occur twice in a row if it is the same token; one without a slot is not written
            by kernels, and elsewhere an error.
        rotary: As ``split_rotated`` takes them, like all that follows.
        q_norm: The same.
        k_norm: The same.
        eps: The same.
        heads: The same.

    Returns:
        Queries [B, T, H, D].
    """
    if heads_fit(cache.shape[-1]) and kernels_run(qkv, cache):
        from zoo.ops.triton import rotary as kernels

        return kernels.rotate_into(qkv, cache, positions, rotary, q_norm, k_norm, eps, heads)
    query, key, value = split_rotated(qkv, rotary, q_norm, k_norm, eps, heads, cache.shape[2])
    row = torch.arange(positions.shape[0], device=positions.device)[:, None]
    # One write to the whole tensor: to keys and values apart it would be a copy of the cache for some compilers.
    cache[:, row, :, positions] = torch.stack((key, value), dim=2).to(cache.dtype)
    return query
