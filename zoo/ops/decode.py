"""A step of decoding few rows, by kernels that begin while the one before them ends: programmatic dependent launch.

These two operators are opaque to the compiler, by ``torch.library``: torch 2.11 ignores ``launch_pdl`` of a kernel that
it traces. In one CUDA graph 24 dependent products of a row take 78 us with Triton's own launch and 102 us traced (one
H200, torch 2.11, Triton 3.6). All kernels of a layer are one operator, since the host pays for each call of one.

Shape legend: M rows, N rows of a weight, C columns, K key and value heads, S slots of the cache, D width of a head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zoo.ops.common import differentiated, kernels_run
from zoo.ops.opaque import OperatorLibrary
from zoo.ops.rotary import heads_fit

# From here on a matrix product of the vendor's library reads weights as fast.
MOST_ROWS = 4

_LIBRARY = OperatorLibrary("zoo_llm")


def few_rows(x: Tensor, *weights: Tensor) -> bool:
    """Whether the operators take x [M, C] with these weights: few rows, all of one dtype, no gradients."""
    alike = x.shape[0] <= MOST_ROWS and all(each.dtype == x.dtype for each in weights)
    return alike and kernels_run(x, *weights) and not differentiated(x, *weights)


def decodes(x: Tensor, cache: Tensor, *weights: Tensor) -> bool:
    """Whether ``decode_layer`` takes x [M, C] with this cache and these weights."""
    return heads_fit(cache.shape[-1]) and few_rows(x, *weights) and kernels_run(cache)


@_LIBRARY.operator(
    "(Tensor x, Tensor(a!) cache, Tensor positions, Tensor rotary, Tensor norm, Tensor qkv_weight, Tensor? qkv_bias, "
    "Tensor? q_norm, Tensor? k_norm, Tensor o_weight, Tensor norm_after, Tensor gate_up_weight, Tensor down_weight, "
    "float eps, int heads, int? window) -> Tensor"
)
def decode_layer(x: Tensor, *arguments: Any) -> Tensor:
    """A decoder layer for one new token a row: x [M, C] -> [M, C]. See ``zoo.llm.LLMLayer``, which it runs for.

    Cache [2, M, K, S, D] is written in place at positions [M] int64; rotary [M, D] are the positions' cosines and
    sines; the rest are the layer's weights and numbers.
    """
    from zoo.ops.triton import decode_products as kernels

    return kernels.decode_layer(x, *arguments)


@_LIBRARY.fake("decode_layer")
def _(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@_LIBRARY.operator("(Tensor x, Tensor norm, float eps, Tensor weight) -> Tensor")
def norm_linear(x: Tensor, norm: Tensor, eps: float, weight: Tensor) -> Tensor:
    """RMS norm of x [M, C], times weight [N, C]: [M, N]."""
    from zoo.ops.triton import decode_products as kernels

    return kernels.norm_linear(x, norm, eps, weight, None)


@_LIBRARY.fake("norm_linear")
def _(x: Tensor, norm: Tensor, eps: float, weight: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])
