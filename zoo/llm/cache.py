"""The static cache of keys and values.

Shapes: B batch, K key and value heads, S slots, D width of a head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from zoo.llm.config import LLMConfig


@dataclass(frozen=True, eq=False)
class KVCache:
    """Keys and values of all layers, in memory that never moves: made by ``model.make_cache``.

    The token at position p of a row lies in slot p, so rows of different lengths need no padding between their tokens.
    Slots after a row's last position are never read: to take tokens back, continue from an earlier position.

    Args:
        layers: One tensor per layer, [2, B, K, S, D]: keys, then values.
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
        """Dtype of the keys and values."""
        return self.layers[0].dtype

    @property
    def device(self) -> torch.device:
        """Device of the keys and values."""
        return self.layers[0].device

    @property
    def nbytes(self) -> int:
        """Memory of all layers in bytes."""
        return sum(layer.nbytes for layer in self.layers)

    def __repr__(self) -> str:
        shape = list(self.layers[0].shape)
        return f"KVCache({len(self.layers)} layers of {shape}, {self.dtype}, {self.nbytes / 2**20:.1f} MiB)"


def check_is_cache(cache: KVCache) -> None:
    """TypeError unless it is a cache."""
    if not isinstance(cache, KVCache):
        raise TypeError(f"cache is a {type(cache).__name__}, expected a KVCache from model.make_cache(batch, slots)")


def check_cache(cache: KVCache, config: LLMConfig, weight: Tensor, input_ids: Tensor, from_zero: bool) -> None:
    """Refuse a cache that does not fit the model and these tokens."""
    check_is_cache(cache)
    kind = weight.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
    batch, tokens = input_ids.shape
    heads, width = cache.layers[0].shape[2], cache.layers[0].shape[4]
    given = len(cache.layers), cache.batch, heads, width, cache.dtype, cache.device
    needed = (config.num_hidden_layers, batch, config.num_key_value_heads, config.head_dim, dtype, weight.device)
    if given != needed:
        text = "{} layers of {} rows, {} heads of width {}, {} on {}"
        raise ValueError(
            f"cache has {text.format(*given)}, but the model and input_ids need {text.format(*needed)}: "
            f"model.make_cache({batch}, slots, dtype={dtype}) makes one that fits"
        )
    if from_zero and tokens > cache.slots:
        raise ValueError(f"input_ids has {tokens} tokens, but the cache {cache.slots} slots")
