"""A decoder's configuration, its fields named as in transformers; presets, inputs to try them on, and the cache.

Shapes: B batch, K key and value heads, S slots of the cache, D width of a head.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zoo.validate import divides, one_of, optional_index, positive, positive_number, seeded


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are stretched to longer texts than a model was first trained on.

    ``"linear"`` divides all frequencies by ``factor``. ``"llama3"`` divides those of waves longer than
    ``original_max_position_embeddings / low_freq_factor``, keeps those of waves shorter than
    ``original_max_position_embeddings / high_freq_factor`` and blends between (https://arxiv.org/abs/2407.21783).
    """

    kind: str
    factor: float
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position_embeddings: int | None = None

    def __post_init__(self) -> None:
        one_of(self, "kind", ("linear", "llama3"))
        positive_number(self, "factor")
        bounds = (self.low_freq_factor, self.high_freq_factor, self.original_max_position_embeddings)
        if self.kind == "linear" and bounds != (None, None, None):
            raise ValueError(f"kind 'linear' has a factor only, but low, high and original length are {bounds}")
        if self.kind == "llama3" and (None in bounds or not self.low_freq_factor < self.high_freq_factor):  # type: ignore[operator]
            raise ValueError(f"kind 'llama3' needs low < high and an original length, but they are {bounds}")


@dataclass(frozen=True, kw_only=True)
class LLMConfig:
    """A decoder with RMSNorm, rotary embeddings, grouped-query attention and SwiGLU.

    Fields are named and meant as in transformers.

    Args:
        head_dim: Width of a head. All heads together may be wider or narrower than ``hidden_size``.
        rope_theta: Base of the rotary frequencies.
        rope_scaling: None, linear or Llama 3's.
        qkv_bias: Bias of queries, keys and values (Qwen2).
        qk_norm: RMSNorm over each head of queries and keys (Qwen3).
        sliding_window: A token sees this many last tokens, itself included; None for all.
        pad_token_id: Its embedding gets no gradient, and ``generate`` fills rows that have ended with it.
        eos_token_id: Tokens that end a text, unless ``generate`` is given others.
        model_type: ``"mistral"`` converts a model without a window to transformers' Mistral; None lets the options
            decide.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rope_theta: float
    rms_norm_eps: float
    tie_word_embeddings: bool
    rope_scaling: RopeScaling | None = None
    qkv_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: tuple[int, ...] = ()
    model_type: str | None = None

    def __post_init__(self) -> None:
        positive(self, "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        positive(self, "num_key_value_heads", "head_dim", "max_position_embeddings")
        if self.sliding_window is not None:
            positive(self, "sliding_window")
        divides(self, "num_key_value_heads", "num_attention_heads")
        positive_number(self, "rope_theta", "rms_norm_eps")
        optional_index(self, "pad_token_id", "vocab_size")
        one_of(self, "model_type", (None, "mistral"))
        if self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}, but rotary embeddings turn pairs: it must be even")


_LLAMA_SCALING = RopeScaling(
    kind="llama3", factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
)
_LLAMA: dict[str, Any] = {
    "vocab_size": 128256, "num_key_value_heads": 8, "max_position_embeddings": 131072, "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "rope_scaling": _LLAMA_SCALING, "bos_token_id": 128000,
    "eos_token_id": (128001,),
}  # fmt: skip
_QWEN3: dict[str, Any] = {
    "vocab_size": 151936, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960,
    "rope_theta": 1000000.0, "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "qk_norm": True, "bos_token_id": 151643,
    "eos_token_id": (151645,),
}  # fmt: skip

PRESETS: dict[str, LLMConfig] = {
    "llm-debug": LLMConfig(
        vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=512, rope_theta=10000.0, rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        rope_scaling=dataclasses.replace(_LLAMA_SCALING, factor=4.0, original_max_position_embeddings=128),
    ),
    "llama-3.2-1b": LLMConfig(
        **_LLAMA, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32, head_dim=64,
    ),
    "llama-3.2-3b": LLMConfig(
        **_LLAMA, hidden_size=3072, intermediate_size=8192, num_hidden_layers=28, num_attention_heads=24, head_dim=128,
    ),
    "llama-3.1-8b": LLMConfig(
        **{**_LLAMA, "tie_word_embeddings": False, "rope_scaling": dataclasses.replace(_LLAMA_SCALING, factor=8.0)},
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, head_dim=128,
    ),
    "qwen3-0.6b": LLMConfig(
        **_QWEN3, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
    ),
    "qwen3-8b": LLMConfig(
        **{**_QWEN3, "tie_word_embeddings": False}, hidden_size=4096, intermediate_size=12288, num_hidden_layers=36,
        num_attention_heads=32,
    ),
}  # fmt: skip


def example_inputs(model: Any, *, batch: int = 2, tokens: int = 16, seed: int = 0) -> dict[str, Tensor]:
    """``input_ids`` [batch, tokens] on the model's device, uniformly drawn; the same on every device."""
    limit = model.config.max_position_embeddings
    if batch < 1 or not 1 <= tokens <= limit:
        raise ValueError(f"batch is {batch} and tokens {tokens}: both must be positive, and tokens at most {limit}")
    drawn = torch.randint(model.config.vocab_size, (batch, tokens), generator=seeded(seed), device="cpu")
    return {"input_ids": drawn.to(model.embed_tokens.weight.device)}


@dataclass(frozen=True, eq=False)
class KVCache:
    """Keys and values of all layers, in memory that never moves; ``model.make_cache`` makes it.

    ``layers`` has one tensor per layer, [2, B, K, S, D]: keys, then values. The token at position p of a row lies in
    slot p, so rows of different lengths need no padding between their tokens. Slots after a row's last position are
    never read: to take tokens back, continue from an earlier position.
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
