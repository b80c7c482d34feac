"""Attention to few keys: the library's kernels are made for long rows of them.

Shape legend: B images, T queries of each, L keys of each, N heads, D their width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.ops.common import differentiated, kernels_run

# Attention to more keys than this is the library's, measured on an H200; the widest head that a program holds.
MOST_KEYS = 128
WIDEST_HEAD = 256


def attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None) -> Tensor:
    """Attention of all queries of an image to all its keys; by a kernel of ours to few, without bias and gradients.

    Args:
        query: [B, T, N, D], T queries of N heads.
        key: [B, L, N, D].
        value: [B, L, N, D].
        bias: [B, 1, 1, L], added to scores, or None.

    Returns:
        [B T, N D]: heads side by side.

    Raises:
        ValueError: If the shapes do not fit.
    """
    expected = (query.shape[0], key.shape[1], *query.shape[2:])
    if key.shape != value.shape or tuple(key.shape) != expected:
        shapes = ", ".join(str(tuple(each.shape)) for each in (query, key, value))
        raise ValueError(f"query, key and value have shapes {shapes}; expected [B, T, N, D] and twice [B, L, N, D]")
    if bias is None and _kernel_fits(query, key, value):
        from zoo.ops.triton import short_attention as kernels

        return kernels.short_attention(query, key, value)
    mixed = F.scaled_dot_product_attention(
        query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), attn_mask=bias
    )
    return mixed.transpose(1, 2).reshape(-1, query.shape[2] * query.shape[3])


def _kernel_fits(query: Tensor, key: Tensor, value: Tensor) -> bool:
    if query.dtype not in (torch.bfloat16, torch.float16) or not query.dtype == key.dtype == value.dtype:
        return False
    width, keys = key.shape[3], key.shape[1]
    fits = 0 < keys <= MOST_KEYS and 0 < width <= WIDEST_HEAD and width % 8 == 0
    return fits and not differentiated(query, key, value) and kernels_run(query, key, value)
