"""The static cache of keys and values."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class KVCache:
    """Keys and values of all layers, in memory that never moves: made by ``model.make_cache``.

    The token of a row's position p lies in slot p, so that rows of different lengths need no padding inside. What lies
    behind a row's last position is never looked at; taking tokens back is no more than going on from an earlier
    position.

    Args:
        layers: A tensor a layer, [2, B, K, S, D]: keys and values, batch, key heads, slots, width of a head.
    """

    layers: tuple[Tensor, ...]

    @property
    def batch(self) -> int:
        """Rows."""
        return self.layers[0].shape[1]

    @property
    def slots(self) -> int:
        """Tokens that fit into a row."""
        return self.layers[0].shape[3]

    @property
    def dtype(self) -> torch.dtype:
        """Of the keys and values."""
        return self.layers[0].dtype

    @property
    def device(self) -> torch.device:
        """Where it lies."""
        return self.layers[0].device

    @property
    def nbytes(self) -> int:
        """Memory of all layers in bytes."""
        return sum(layer.nbytes for layer in self.layers)

    def __repr__(self) -> str:
        shape = list(self.layers[0].shape)
        return f"KVCache({len(self.layers)} layers of {shape}, {self.dtype}, {self.nbytes / 2**20:.1f} MiB)"


def make_cache(
    *, layers: int, batch: int, key_heads: int, slots: int, width: int, dtype: torch.dtype, device: torch.device
) -> KVCache:
    """A cache of zeros."""
    # An ordinary tensor whatever the caller's mode: a cache made under inference mode would be another kind of input,
    # and cost every region a second graph. Zeros, because a masked NaN is a NaN all the same.
    with torch.inference_mode(False):
        shape = (2, batch, key_heads, slots, width)
        return KVCache(tuple(torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers)))


def check_is_cache(cache: KVCache) -> None:
    """Whether it is one at all."""
    if not isinstance(cache, KVCache):
        raise TypeError(f"cache is a {type(cache).__name__}, expected a KVCache from model.make_cache(batch, slots)")
