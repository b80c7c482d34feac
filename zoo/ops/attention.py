"""Rotary embeddings, grouped-query attention over a KV cache, and the decoder layer of a decoding step.

The token at position p is in slot p of the cache. Rotary embeddings: https://arxiv.org/abs/2104.09864.

Shape legend: B batch, T tokens, S slots of the cache, H query heads, K key and value heads, G = H / K, D width of a
head, M rows of features, C columns, N rows of a weight.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.engine.autograd import differentiable_once
from zoo.ops import triton as kernels
from zoo.ops.common import accumulation_dtype, compute_dtype, converts_float8, differentiated, kernels_run, tma_runs
from zoo.ops.transformer import reference_rms_norm


def rotate(x: Tensor, rotary: Tensor) -> Tensor:
    """Apply rotary embeddings: rotate each pair of elements from the two halves of a head.

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
    """Qkv [B, T, (H + 2 K) D] -> queries [B, T, H, D], keys and values [B, T, K, D]; norm and rotate queries and keys.

    Rotary [B or 1, T, D] float32 holds the cosines and sines of the tokens' positions; q_norm and k_norm [D] are the
    weights of RMS norms, or None.
    """
    if q_norm is None and heads_fit(rotary.shape[-1]) and kernels_run(qkv):
        if differentiated(qkv):
            return _SplitRotated.apply(qkv, rotary, heads, key_heads)
        return kernels.attention.split_rotated(qkv, rotary, heads, key_heads)
    query, key, value = qkv.unflatten(-1, (-1, rotary.shape[-1])).split((heads, key_heads, key_heads), dim=2)
    if q_norm is not None and k_norm is not None:
        query, key = reference_rms_norm(query, q_norm, eps), reference_rms_norm(key, k_norm, eps)
    return rotate(query, rotary), rotate(key, rotary), value


class _SplitRotated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, rotary: Tensor, heads: int, key_heads: int) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(rotary)
        return kernels.attention.split_rotated(qkv, rotary, heads, key_heads)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return kernels.attention.join_rotated(*grads, *ctx.saved_tensors), None, None, None


def rotate_into(
    qkv: Tensor, cache: Tensor, positions: Tensor, rotary: Tensor, q_norm: Tensor | None, k_norm: Tensor | None,
    eps: float, heads: int,
) -> Tensor:  # fmt: skip
    """Do ``split_rotated`` and write keys and values into cache [2, B, K, S, D]: returns queries [B, T, H, D].

    A row of positions [B, T] int64 may repeat a position only for the same token. Kernels do not write a position
    outside the cache; torch's operators raise an error.
    """
    if _kernels_fit(qkv, cache):
        return kernels.attention.rotate_into(qkv, cache, positions, rotary, q_norm, k_norm, eps, heads)
    query, key, value = split_rotated(qkv, rotary, q_norm, k_norm, eps, heads, cache.shape[2])
    row = torch.arange(positions.shape[0], device=positions.device)[:, None]
    # One write to the whole tensor: for separate writes of keys and values some compilers copy the cache.
    cache[:, row, :, positions] = torch.stack((key, value), dim=2).to(cache.dtype)
    return query


# A weight [N, C], and the scale [N] of its rows if it is quantized.
Weight: TypeAlias = tuple[Tensor, Tensor | None]
# For more rows the vendor library's products are as fast or faster, but read a dequantized copy of quantized weights.
# With TMA our kernels take twice as many rows.
MOST_ROWS, MOST_QUANTIZED_ROWS = 16, 32


def attend(query: Tensor, cache: Tensor, positions: Tensor, window: int | None) -> Tensor:
    """Attention of query [B, T, H, D] over keys and values in cache [2, B, K, S, D]: [B, T, H, D].

    The cache already holds the queries' own tokens. A query at position p (positions [B, T] int64) sees slots 0 to p,
    or the last ``window`` of them.
    """
    if _kernels_fit(query, cache) and not differentiated(query, cache):
        return kernels.attention.prefill_attention(query, cache, positions, window)
    batch, tokens, heads, width = query.shape
    _, _, key_heads, slots, _ = cache.shape
    groups = heads // key_heads
    slot = torch.arange(slots, device=positions.device)
    seen = slot <= positions[..., None]
    if window is not None:
        seen = seen & (slot > positions[..., None] - window)
    # Queries that share a key head are rows of one matrix: every backend takes that, and no key is copied.
    rows = query.view(batch, tokens, key_heads, groups, width).permute(0, 2, 3, 1, 4)
    rows = rows.reshape(batch, key_heads, groups * tokens, width)
    mask = seen[:, None, None].expand(-1, 1, groups, -1, -1).reshape(batch, 1, groups * tokens, slots)
    out = F.scaled_dot_product_attention(rows, cache[0], cache[1], attn_mask=mask)
    return out.view(batch, key_heads, groups, tokens, width).permute(0, 3, 1, 2, 4).reshape(query.shape)


def decode_attention(
    qkv: Tensor, cache: Tensor, positions: Tensor, rotary: Tensor, q_norm: Tensor | None, k_norm: Tensor | None,
    eps: float, heads: int, window: int | None,
) -> Tensor:  # fmt: skip
    """``rotate_into`` and ``attend`` of one new token per row: qkv [B, (H + 2 K) D] -> [B, H D].

    The token's key and value are written into cache [2, B, K, S, D] at positions [B] int64. Kernels do not write a
    position outside the cache and clamp it for reads; torch's operators raise an error. Rotary [B, D] float32 holds the
    positions' cosines and sines; q_norm and k_norm [D] are the weights of RMS norms, or None.
    """
    if _kernels_fit(qkv, cache):
        return kernels.decode.decode_attention(qkv, cache, positions, rotary, q_norm, k_norm, eps, heads, window)
    where = positions[:, None]
    query = rotate_into(qkv[:, None], cache, where, rotary[:, None], q_norm, k_norm, eps, heads)
    return attend(query, cache, where, window).flatten(1)


def _kernels_fit(x: Tensor, cache: Tensor) -> bool:
    return heads_fit(cache.shape[-1]) and kernels_run(x, cache)


def few_rows(x: Tensor, *weights: Weight) -> bool:
    """Whether the decoding kernels take x [M, C]: few rows, the dtype of products, and no gradients."""
    most = MOST_ROWS if all(scale is None for _, scale in weights) else MOST_QUANTIZED_ROWS
    if all(weight.shape[-1] % 16 == 0 for weight, _ in weights) and tma_runs(x):
        most *= 2
    if x.dtype == torch.float32:
        most = 1  # tensor cores take dtypes of fewer bits
    numbers = [weight if scale is None else scale for weight, scale in weights]
    alike = x.shape[0] <= most and compute_dtype(x) == x.dtype and all(each.dtype == x.dtype for each in numbers)
    reads = all(_kernels_read(weight) for weight, _ in weights)
    return alike and reads and kernels_run(x, *numbers) and not differentiated(x, *numbers)


def _kernels_read(weight: Tensor) -> bool:
    return weight.dtype != torch.float8_e4m3fn or converts_float8(weight.device)


def decode_layer(
    x: Tensor, cache: Tensor, positions: Tensor, rotary: Tensor, norm: Tensor, qkv: Weight, qkv_bias: Tensor | None,
    q_norm: Tensor | None, k_norm: Tensor | None, o: Weight, norm_after: Tensor, gate_up: Weight, down: Weight,
    eps: float, heads: int, window: int | None,
    add_parts: Callable[[Tensor], Tensor] | None = None, first: bool = True,
) -> Tensor:  # fmt: skip
    """A decoder layer for one new token per row, in Triton kernels: x [M, C] -> [M, C]. ``zoo.llm.LLMLayer`` calls it.

    Each kernel begins while its predecessor ends, by programmatic dependent launch. A model compiled as a whole has no
    such overlap: Inductor of torch 2.11 ignores ``launch_pdl`` of a kernel that it traces. In one CUDA graph 24
    dependent products of a row take 78 us with the overlap and 102 us without it (one H200, Triton 3.6).

    Cache [2, M, K, S, D] is written in place at positions [M] int64; rotary [M, D] holds the positions' cosines and
    sines. If a layer is split over processes, ``add_parts`` sums their parts; the first part includes the residual.
    """
    linear = kernels.decode.linear
    projected = linear(x, qkv[0], norm, eps, qkv_bias, scale=qkv[1])
    mixed = kernels.decode.decode_attention(projected, cache, positions, rotary, q_norm, k_norm, eps, heads, window)
    x = linear(mixed, o[0], residual=x if first else None, scale=o[1])
    x = x if add_parts is None else add_parts(x)
    hidden = linear(x, gate_up[0], norm_after, eps, gated=True, scale=gate_up[1])
    x = linear(hidden, down[0], residual=x if first else None, scale=down[1])
    return x if add_parts is None else add_parts(x)


def norm_linear(x: Tensor, norm: Tensor, eps: float, weight: Weight) -> Tensor:
    """RMS norm of x [M, C], times weight [N, C]: [M, N]."""
    return kernels.decode.linear(x, weight[0], norm, eps, scale=weight[1])


def quantized(weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A weight [N, C] in int8 or float8_e4m3fn, and the scale [N] of its rows in the weight's dtype.

    The scale is rounded first, so that its rounding costs no accuracy.
    """
    most = 127.0 if dtype == torch.int8 else torch.finfo(dtype).max
    scale = (weight.abs().amax(1).float() / most).to(weight.dtype)
    scale = torch.where(scale == 0, 1, scale)
    numbers = (weight.float() / scale.float()[:, None]).clamp(-most, most)
    return (numbers.round() if dtype == torch.int8 else numbers).to(dtype), scale


def dequantized(weight: Tensor, scale: Tensor, rows: Tensor | None = None) -> Tensor:
    """The weight that ``quantized`` rounded, [N, C] in the dtype of the scale, or its rows [...]: [..., C]."""
    if kernels_run(scale) and _kernels_read(weight):
        return kernels.decode.dequantized(weight, scale, rows)
    if rows is not None:
        weight, scale = weight[rows], scale[rows]
    return (weight.float() * scale.float()[..., None]).to(scale.dtype)
