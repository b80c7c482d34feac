"""Attention of pixels to each other, and to the text.

The library's, but where keys are few: its kernels are made for long rows of them.

Shape legend: B images, T queries of each, L keys of each, N heads, D their width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zoo.ops.common import differentiated, triton_runs_on
from zoo.ops.opaque import OperatorLibrary, launcher
from zoo.unet import fallback

# Attention to more keys than this is the library's, measured on an H200; the widest head that a program holds.
MOST_KEYS = 128
WIDEST_HEAD = 256

_LIBRARY = OperatorLibrary("zoo_unet")


def attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
    """Query [B, T, N, D], key and value [B, L, N, D], bias [B, 1, 1, L] or None -> rows [B T, N D]."""
    if bias is None and short_attention_runs(query, key, value):
        rows: Tensor = short_attention(query, key, value)
        return rows
    return fallback.attend(query, key, value, bias)


def short_attention_runs(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether attention of these, [B, T, N, D] and [B, L, N, D], is for our kernel: few keys, in half precision."""
    if differentiated(query, key, value) or query.dtype not in (torch.bfloat16, torch.float16):
        return False
    width, keys = key.shape[3], key.shape[1]
    fits = 0 < keys <= MOST_KEYS and 0 < width <= WIDEST_HEAD and width % 8 == 0
    return fits and query.dtype == key.dtype == value.dtype and triton_runs_on(query.device)


@_LIBRARY.operator("(Tensor query, Tensor key, Tensor value) -> Tensor")
def short_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention of all queries of an image to all its keys, of which there are few.

    Args:
        query: [B, T, N, D], T queries of N heads.
        key: [B, L, N, D].
        value: [B, L, N, D].

    Returns:
        [B T, N D]: heads side by side.

    Raises:
        ValueError: If the shapes do not fit.
    """
    expected = (query.shape[0], key.shape[1], *query.shape[2:])
    if key.shape != value.shape or tuple(key.shape) != expected:
        shapes = ", ".join(str(tuple(each.shape)) for each in (query, key, value))
        raise ValueError(f"query, key and value have shapes {shapes}; expected [B, T, N, D] and twice [B, L, N, D]")
    if short_attention_runs(query, key, value):
        return launcher("zoo.unet.kernels.attention", "short_attention", query)(query, key, value)
    return fallback.attend(query, key, value, None)


@_LIBRARY.fake("short_attention")
def _(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    images, queries, heads, width = query.shape
    return query.new_empty(images * queries, heads * width)
