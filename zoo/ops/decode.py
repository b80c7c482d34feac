"""A step of decoding few rows, by kernels that begin while the one before them ends: programmatic dependent launch.

A graph of such a step has nothing to fuse and runs as it was traced. Where Inductor compiles it (a model compiled as a
whole) kernels do not overlap: torch 2.11 ignores ``launch_pdl`` of a kernel that it traces. In one CUDA graph 24
dependent products of a row take 78 us with Triton's own launch and 102 us without the overlap (one H200, Triton 3.6).

Shape legend: M rows, N rows of a weight, C columns, K key and value heads, S slots of the cache, D width of a head.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from zoo.ops.common import differentiated, kernels_run
from zoo.ops.rotary import heads_fit

# From here on a matrix product of the vendor's library reads weights as fast.
MOST_ROWS = 4


def few_rows(x: Tensor, *weights: Tensor) -> bool:
    """Whether these functions take x [M, C] with these weights: few rows, all of one dtype, no gradients."""
    alike = x.shape[0] <= MOST_ROWS and all(each.dtype == x.dtype for each in weights)
    return alike and kernels_run(x, *weights) and not differentiated(x, *weights)


def decodes(x: Tensor, cache: Tensor, *weights: Tensor) -> bool:
    """Whether ``decode_layer`` takes x [M, C] with this cache and these weights."""
    return heads_fit(cache.shape[-1]) and few_rows(x, *weights) and kernels_run(cache)


def decode_layer(x: Tensor, *arguments: Any) -> Tensor:
    """A decoder layer for one new token a row: x [M, C] -> [M, C]. See ``zoo.llm.LLMLayer``, which it runs for.

    Cache [2, M, K, S, D] is written in place at positions [M] int64; rotary [M, D] are the positions' cosines and
    sines; the rest are the layer's weights and numbers.
    """
    from zoo.ops.triton import decode_products as kernels

    return kernels.decode_layer(x, *arguments)


def norm_linear(x: Tensor, norm: Tensor, eps: float, weight: Tensor) -> Tensor:
    """RMS norm of x [M, C], times weight [N, C]: [M, N]."""
    from zoo.ops.triton import decode_products as kernels
    from zoo.ops.triton.decode_attention import can_overlap

    return kernels.norm_linear(x, norm, eps, weight, None, can_overlap(x.device))
