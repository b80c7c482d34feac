"""A decoder-only language model: Llama, Mistral, Qwen2 and Qwen3.

    input_ids ─ embedding ─ layer ─ layer ─ ... ─ head ─▶ logits
    positions ─ rotary rows ──┴───────┴─ to every layer
    cache ─ one tensor per layer

One layer:

    x ─┬─ norm ─ qkv_proj ─ rotary ─ attention ─ o_proj ─ + ─┬─ norm ─ gate_up_proj ─ SwiGLU ─ down_proj ─ + ─▶ x
       └─────────────── keys, values: cache ──────────────┘  └─────────────────────────────────────────────┘

Rotary rows and masks depend only on positions and padding. They are computed outside the regions, once per step. All
layers share one graph at any depth: they differ only in weights and in their cache tensor, which are inputs.

Shapes: B batch, T tokens, L tokens that get logits, V vocabulary, C width, I width inside the MLP, H query heads, K key
and value heads, D width of a head, S slots of the cache, P positions.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo import validate
from zoo.engine.region import Region
from zoo.llm.generate import GenerationMixin, KVCache
from zoo.ops.attention import (
    Weight,
    attend,
    decode_attention,
    decode_layer,
    dequantized,
    few_rows,
    heads_fit,
    norm_linear,
    quantized,
    rotate_into,
    split_rotated,
)
from zoo.ops.common import compute_dtype, is_unmodified, kernels_run
from zoo.ops.transformer import add_rms_norm, rms_norm, swiglu
from zoo.weights import check_dtype, initialise


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are scaled for longer texts than those of a model's first training.

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
        validate.one_of(self, "kind", ("linear", "llama3"))
        validate.positive_number(self, "factor")
        bounds = (self.low_freq_factor, self.high_freq_factor, self.original_max_position_embeddings)
        if self.kind == "linear" and bounds != (None, None, None):
            raise ValueError(f"kind 'linear' has a factor only, but low, high and original length are {bounds}")
        if self.kind == "llama3" and (None in bounds or not self.low_freq_factor < self.high_freq_factor):  # type: ignore[operator]
            raise ValueError(f"kind 'llama3' needs low < high and an original length, but they are {bounds}")


WEIGHT_DTYPES = ("int8", "float8_e4m3fn")


@dataclass(frozen=True, kw_only=True)
class LLMConfig:
    """A decoder with RMSNorm, rotary embeddings, grouped-query attention and SwiGLU.

    Fields have transformers' names and meanings.

    Args:
        head_dim: Width of a head. All heads together may be wider or narrower than ``hidden_size``.
        rope_theta: Base of the rotary frequencies.
        rope_scaling: None, linear or Llama 3's.
        qkv_bias: Bias of queries, keys and values (Qwen2).
        qk_norm: RMSNorm over each head of queries and keys (Qwen3).
        sliding_window: A token sees this many last tokens, including itself; None for all.
        pad_token_id: The token that fills ended rows in ``generate``. Its embedding gets no gradient.
        eos_token_id: Tokens that end a text, unless ``generate`` gets others.
        weight_dtype: Of the products' weights and the embedding, which then have a scale a row: ``"int8"`` or
            ``"float8_e4m3fn"``, as by ``quantize``; None for the model's own dtype.
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
    weight_dtype: str | None = None
    model_type: str | None = None

    def __post_init__(self) -> None:
        validate.positive(self, "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim")
        validate.positive(self, "num_attention_heads", "num_key_value_heads", "max_position_embeddings")
        validate.positive(self, "sliding_window", or_none=True)
        validate.divides(self, "num_key_value_heads", "num_attention_heads")
        validate.positive_number(self, "rope_theta", "rms_norm_eps")
        validate.optional_index(self, "pad_token_id", "vocab_size")
        validate.one_of(self, "weight_dtype", (None, *WEIGHT_DTYPES))
        validate.one_of(self, "model_type", (None, "mistral"))
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


def inverse_frequencies(config: LLMConfig, device: torch.device | None = None) -> Tensor:
    """Rotation angle of each channel pair per position, in radians: [D / 2], float32."""
    channels = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=device)
    turns = 1.0 / config.rope_theta ** (channels / config.head_dim)
    scaling = config.rope_scaling
    if scaling is None:
        return turns
    if scaling.kind == "linear":
        return turns / scaling.factor
    low, high, length = scaling.low_freq_factor, scaling.high_freq_factor, scaling.original_max_position_embeddings
    assert low is not None and high is not None and length is not None
    # 1 for waves that fit at least `high` times into the original length, 0 for waves that fit at most `low` times.
    kept = ((length * turns / (2 * math.pi) - low) / (high - low)).clamp(0, 1)
    return turns * (kept + (1 - kept) / scaling.factor)


class RotaryTable(nn.Module):
    """Cosines and sines of all positions, float32 for any dtype of the model (https://arxiv.org/abs/2104.09864)."""

    table: Tensor

    def __init__(self, config: LLMConfig) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("table", None, persistent=False)
        self.reset_buffers(torch.get_default_device())

    def reset_buffers(self, device: torch.device) -> None:
        """Compute the table on a device."""
        positions = torch.arange(self.config.max_position_embeddings, dtype=torch.float32, device=device)
        angles = torch.outer(positions, inverse_frequencies(self.config, device))
        self.table = torch.cat((angles.cos(), angles.sin()), dim=-1)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RotaryTable:
        # After a change of dtype or device the table is recomputed instead of rounded.
        before = self.table
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.table is not before:
            self.reset_buffers(self.table.device)
        return self

    def forward(self, positions: Tensor) -> Tensor:
        """Positions [B, T] -> [B, T, D]: cosines [D / 2], then sines [D / 2]."""
        return self.table[positions]


class RMSNorm(nn.Module):
    """Division by the root mean square, in at least float32 (https://arxiv.org/abs/1910.07467)."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """X [..., C] -> [..., C]."""
        return rms_norm(x, self.weight, self.eps)


class QuantizedLinear(nn.Module):
    """``nn.Linear`` with a weight [N, C] of one byte a number, and a scale [N] of its rows. The weight does not learn.

    Numbers of float8 are stored by their bits, as uint8: ``model.to(dtype)`` would round them.
    """

    def __init__(self, weight: Tensor, bias: nn.Parameter | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype, self.bias = dtype, bias
        with torch.inference_mode(False), torch.no_grad():  # a model outlives the mode that it was made in
            numbers, scale = quantized(weight.detach().clone() if weight.is_inference() else weight, dtype)
            numbers = numbers if dtype == torch.int8 else numbers.view(torch.uint8)
            self.weight = nn.Parameter(numbers, requires_grad=False)
            self.weight_scale = nn.Parameter(scale, requires_grad=False)

    def _load_from_state_dict(self, state: dict[str, Tensor], prefix: str, *rest: Any) -> None:
        given = state.get(f"{prefix}weight")
        if given is not None and given.dtype != self.weight.dtype:
            raise ValueError(
                f"{prefix}weight is {given.dtype}, expected {self.weight.dtype} for {self.dtype}: it was quantized to "
                "another weight_dtype, or not by zoo.llm.quantize"
            )
        super()._load_from_state_dict(state, prefix, *rest)

    def extra_repr(self) -> str:
        """What ``print`` shows."""
        rows, columns = self.weight.shape
        return f"in_features={columns}, out_features={rows}, bias={self.bias is not None}, {self.dtype}"

    @property
    def numbers(self) -> Tensor:
        """The weight in its dtype."""
        return self.weight if self.dtype == torch.int8 else self.weight.view(self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """X [..., C] -> [..., N]."""
        return F.linear(x, dense_weight(self), self.bias)


class QuantizedEmbedding(QuantizedLinear):
    """``nn.Embedding`` with such a weight, which can also be that of the output product."""

    def forward(self, ids: Tensor) -> Tensor:
        """Ids [B, T] -> [B, T, C]."""
        return dequantized(self.numbers, self.weight_scale, ids)


def weight_of(product: Any) -> Weight:
    """The weight [N, C] of a linear layer or embedding, and its scale [N] if it is quantized."""
    if isinstance(product, QuantizedLinear):
        return product.numbers, product.weight_scale
    return product.weight, None


def dense_weight(product: Any) -> Tensor:
    """The weight [N, C] of a linear layer or embedding in the model's dtype, computed if it is quantized."""
    weight, scale = weight_of(product)
    return weight if scale is None else dequantized(weight, scale)


class LLMLayer(nn.Module):
    """Attention and MLP, each with a norm before it and a residual add after it."""

    def __init__(self, config: LLMConfig) -> None:
        super().__init__()
        width, inner, head_dim, eps = config.hidden_size, config.intermediate_size, config.head_dim, config.rms_norm_eps
        self.heads, self.key_heads, self.head_dim = config.num_attention_heads, config.num_key_value_heads, head_dim
        self.window = config.sliding_window
        self.input_layernorm = RMSNorm(width, eps)
        self.qkv_proj = nn.Linear(width, (self.heads + 2 * self.key_heads) * head_dim, bias=config.qkv_bias)
        self.q_norm = RMSNorm(head_dim, eps) if config.qk_norm else None
        self.k_norm = RMSNorm(head_dim, eps) if config.qk_norm else None
        self.o_proj = nn.Linear(self.heads * head_dim, width, bias=False)
        self.post_attention_layernorm = RMSNorm(width, eps)
        self.gate_up_proj = nn.Linear(width, 2 * inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(
        self, x: Tensor, rotary: Tensor, mask: Tensor | None = None, positions: Tensor | None = None,
        cache: Tensor | None = None, from_start: bool = False,
    ) -> Tensor:  # fmt: skip
        """Run the block: x [B, T, C] -> [B, T, C].

        Rotary [B or 1, T, D] holds cosines and sines of the tokens' positions. Without a cache ``mask`` is
        [B or 1, 1, T, T] bool, or None for causal. Keys and values are first written into the cache [2, B, K, S, D] at
        positions [B, T] int64. ``from_start`` means that positions are 0 to T - 1 in every row, so that tokens see only
        tokens of this call.
        """
        if cache is not None and positions is not None and x.shape[1] == 1 and self._decodes(x[:, 0], cache):
            return self._decode(x[:, 0], rotary[:, 0], positions[:, 0], cache)[:, None]
        x, normed = _add_norm(x, None, self.input_layernorm)
        mixed = self._attend(self.qkv_proj(normed), rotary, mask, positions, cache, from_start)
        x, normed = _add_norm(x, self.o_proj(mixed), self.post_attention_layernorm)
        return _add_linear(x, swiglu(self.gate_up_proj(normed)), self.down_proj)

    def _attend(
        self, qkv: Tensor, rotary: Tensor, mask: Tensor | None, positions: Tensor | None, cache: Tensor | None,
        from_start: bool,
    ) -> Tensor:  # fmt: skip
        """Queries, keys and values [B, T, (H + 2 K) D] -> attention's output [B, T, H D]."""
        qkv, q_norm, k_norm, eps = self._normed_heads(qkv)
        norms, window = (q_norm, k_norm, eps, self.heads), self.window
        if cache is None or positions is None:
            return attend_tokens(*split_rotated(qkv, rotary, *norms, self.key_heads), mask).flatten(2)
        batch, tokens = positions.shape
        if tokens == 1:
            return decode_attention(qkv[:, 0], cache, positions[:, 0], rotary[:, 0], *norms, window)[:, None]
        q = rotate_into(qkv, cache, positions, rotary, *norms)
        if not from_start:
            return attend(q, cache, positions, window).flatten(2)
        # torch's causal attention is faster than a kernel that looks up where each prompt begins.
        k, v = cache[:, :batch, :, :tokens].transpose(2, 3)
        return attend_tokens(q, k, v, None).flatten(2)

    def _normed_heads(self, qkv: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, float]:
        """The heads, and weights and eps of the norms if the rotary kernel applies them. Modified norms run here."""
        q_norm, k_norm = self.q_norm, self.k_norm
        if q_norm is None or k_norm is None:
            return qkv, None, None, 0.0
        if is_unmodified(q_norm, RMSNorm) and is_unmodified(k_norm, RMSNorm):
            return qkv, q_norm.weight, k_norm.weight, q_norm.eps
        heads = qkv.unflatten(-1, (-1, self.head_dim))
        q, k, v = heads.split((self.heads, self.key_heads, self.key_heads), dim=2)
        return torch.cat((q_norm(q), k_norm(k), v), dim=2).flatten(2), None, None, 0.0

    def _decodes(self, x: Tensor, cache: Tensor) -> bool:
        """True if the decoding kernels take x [B, C]: few rows, and no submodule was replaced or has hooks."""
        # A layer with ``split_over`` (zoo.training.tensor_parallel) multiplies by this process's shard of a weight.
        products = self.qkv_proj, self.o_proj, self.gate_up_proj, self.down_proj
        norms = self.input_layernorm, self.post_attention_layernorm, self.q_norm, self.k_norm
        expected: list[tuple[nn.Module, type[nn.Module]]] = [(norm, RMSNorm) for norm in norms if norm is not None]
        ours = [hasattr(each, "split_over") or isinstance(each, QuantizedLinear) for each in products]
        expected += [(each, type(each) if own else nn.Linear) for each, own in zip(products, ours, strict=True)]
        unmodified = all(is_unmodified(module, cls) for module, cls in expected)
        fits = heads_fit(cache.shape[-1]) and kernels_run(cache)
        return unmodified and fits and few_rows(x, *map(weight_of, products))

    def _decode(self, x: Tensor, rotary: Tensor, positions: Tensor, cache: Tensor) -> Tensor:
        """The block for one new token per row, for few rows: x [B, C] -> [B, C]."""
        qkv, norm, norm_after = self.qkv_proj, self.input_layernorm, self.post_attention_layernorm
        q_norm, k_norm = (None if each is None else each.weight for each in (self.q_norm, self.k_norm))
        add_parts, first = getattr(self.o_proj, "add_parts", None), getattr(self.o_proj, "is_first", True)
        return decode_layer(
            x, cache, positions, rotary, norm.weight, weight_of(qkv), qkv.bias, q_norm, k_norm, weight_of(self.o_proj),
            norm_after.weight, weight_of(self.gate_up_proj), weight_of(self.down_proj), norm.eps, self.heads,
            self.window, add_parts, first,
        )  # fmt: skip


class LLMHead(nn.Module):
    """The last norm, and the product with the vocabulary's weights."""

    def __init__(self, config: LLMConfig) -> None:
        super().__init__()
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, weight: Tensor | None, scale: Tensor | None = None) -> Tensor:
        """X [B, L, C], weight [V, C] -> logits [B, L, V]; without a weight -> normed x [B, L, C].

        ``scale`` [V] is that of the rows of a quantized weight.
        """
        norm = self.norm
        if weight is None:
            return norm(x)
        one = x.shape[1] == 1 and is_unmodified(norm, RMSNorm)
        if one and few_rows(x[:, 0], (norm.weight, None), (weight, scale)):
            return norm_linear(x[:, 0], norm.weight, norm.eps, (weight, scale))[:, None]
        return F.linear(norm(x), weight if scale is None else dequantized(weight, scale))


def attend_tokens(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Attention among the tokens of this call: q [B, T, H, D], k and v [B, T, K, D] -> [B, T, H, D].

    ``mask`` [B or 1, 1, T, T] is True where a query (row) sees a key; None for causal.
    """
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    grouped = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped)
    return out.transpose(1, 2)


def _add_norm(x: Tensor, added: Tensor | None, norm: nn.Module) -> tuple[Tensor, Tensor]:
    """The sum of x and ``added`` [B, T, C], and its norm: one kernel, unless the norm was replaced or has hooks."""
    if is_unmodified(norm, RMSNorm):
        return add_rms_norm(x, added, norm.weight, norm.eps)  # type: ignore[arg-type]
    x = x if added is None else x + added
    return x, norm(x)


def _add_linear(x: Tensor, hidden: Tensor, linear: nn.Module) -> Tensor:
    """X [B, T, C] plus a linear layer of hidden [B, T, I], as one product if that gives the same numbers."""
    fusible = (is_unmodified(linear) or is_unmodified(linear, QuantizedLinear)) and linear.bias is None
    weight = dense_weight(linear) if fusible and not torch.is_autocast_enabled(x.device.type) else None
    if weight is None or hasattr(weight, "__tensor_flatten__") or not x.dtype == hidden.dtype == weight.dtype:
        return x + linear(hidden)  # type: ignore[no-any-return]
    # Inductor fuses an add after a product only if both have two dimensions.
    return torch.addmm(x.flatten(0, -2), hidden.flatten(0, -2), weight.t()).view_as(x)


REGIONS = (
    Region(LLMLayer, graphs=1, why="one graph for prefill, one for a decode step, one for scoring, at any depth"),
    Region(LLMHead, graphs=1, why="the last norm and the widest product, on the positions that are kept"),
)


class LLM(GenerationMixin):
    """A decoder-only language model, built from an ``LLMConfig``."""

    regions: ClassVar[tuple[Region, ...]] = REGIONS
    static_arguments: ClassVar[tuple[str, ...]] = ("cache",)

    def __init__(self, config: LLMConfig) -> None:
        super().__init__()
        self.config = config
        words, width = config.vocab_size, config.hidden_size
        self.embed_tokens: Any = nn.Embedding(words, width, padding_idx=config.pad_token_id)
        self.rotary = RotaryTable(config)
        self.layers = nn.ModuleList(LLMLayer(config) for _ in range(config.num_hidden_layers))
        self.head = LLMHead(config)
        # Tied weights exist once: forward passes the embedding's weight to the head.
        self.lm_head: Any = None if config.tie_word_embeddings else nn.Linear(width, words, bias=False)
        # Set by tensor parallelism: what computes logits from the head, its input and the weight.
        self.split_logits: Callable[[nn.Module, Tensor, Tensor], Tensor] | None = None
        self.apply(initialise)
        if config.weight_dtype is not None:
            quantize_products(self, config.weight_dtype)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None,
        cache: KVCache | None = None, logits_to_keep: int | Tensor = 0,
    ) -> Tensor:  # fmt: skip
        """Logits of the next token, [B, T or L, V].

        Scoring and training use no cache. With a cache, keys and values of the tokens are written into the slots of
        their positions, and each token sees the slots up to its own. The call never synchronises with the device.

        Args:
            input_ids: [B, T] integers.
            attention_mask: [B, T], 0 for padding, on either side; not with a cache.
            position_ids: [B, T] or [1, T] int64, each below ``max_position_embeddings`` and the cache's slots. The
                default, 0 to T - 1, is the fastest way to start a prompt. Positions that begin again do not separate
                texts.
            cache: From ``make_cache``; needs ``no_grad`` or ``inference_mode``.
            logits_to_keep: Positions that get logits: 0 for all, n for the last n, a tensor of indices [L] for the
                same in all rows (all three as in transformers), or [B, L] per row.

        Raises:
            TypeError, ValueError: If an input does not fit, before anything runs.
        """
        _check_inputs(self, input_ids, attention_mask, position_ids, cache, logits_to_keep)
        x = self._run_layers(input_ids, attention_mask, position_ids, cache)
        x, (weight, scale) = _select_positions(x, logits_to_keep), weight_of(self.lm_head or self.embed_tokens)
        if self.split_logits is not None and not torch.is_grad_enabled():
            return self.split_logits(self.head, x, weight)
        return self.head(x, weight, scale)

    def features(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None
    ) -> Tensor:
        """Normed output of the last layer, [B, T, C]: the logits are ``F.linear(features, model.output_weight)``.

        For losses that compute the logits in chunks, such as ``zoo.training.LinearCrossEntropy``. Arguments and errors
        are those of ``forward`` without a cache.
        """
        _check_inputs(self, input_ids, attention_mask, position_ids, None, 0)
        return self.head(self._run_layers(input_ids, attention_mask, position_ids, None), None)

    def output_product(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """``features`` [B, T, C] and ``output_weight`` [V, C], whose product are the logits."""
        features = self.features(input_ids, attention_mask, position_ids)
        weight = self.output_weight  # read last: hooks of FSDP2 gather it in the call before
        # A reentrant checkpoint would return the parameter itself as its output.
        return features, weight if torch.is_grad_enabled() else weight.detach()

    @property
    def output_weight(self) -> Tensor:
        """Weights of the output product, [V, C]: the embedding's if tied. Those of a quantized model are a copy."""
        return dense_weight(self.lm_head or self.embed_tokens)

    def make_cache(self, batch: int, slots: int, *, dtype: torch.dtype | None = None) -> KVCache:
        """An empty cache of ``batch`` rows of ``slots`` tokens on the weights' device, in their or autocast's dtype.

        Raises ValueError if a size is not positive or ``slots`` exceeds ``max_position_embeddings``.
        """
        config, weight = self.config, self.head.norm.weight
        validate.count("batch", batch)
        validate.count("slots", slots)
        if slots > config.max_position_embeddings:
            raise ValueError(f"slots is {slots}, but the model has {config.max_position_embeddings} positions")
        shape = (2, batch, config.num_key_value_heads, slots, config.head_dim)
        dtype = dtype or compute_dtype(weight)
        check_dtype(dtype)
        # Regions would compile a second graph for inference tensors. Zeros, since NaN survives masking.
        with torch.inference_mode(False), weight.device:
            return KVCache(tuple(torch.zeros(shape, dtype=dtype) for _ in range(config.num_hidden_layers)))

    def _run_layers(
        self, input_ids: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None, cache: KVCache | None
    ) -> Tensor:
        """Embedding and layers: [B, T] -> [B, T, C]."""
        x = self.embed_tokens(input_ids)
        batch, tokens = input_ids.shape
        if cache is not None and torch.is_grad_enabled() and any(each.requires_grad for each in self.parameters()):
            raise ValueError("a cache has no gradients: call the model under torch.inference_mode(), or without it")
        window = self.config.sliding_window
        positions = torch.arange(tokens, device=x.device)[None] if position_ids is None else position_ids
        if cache is None:
            mask, rotary = token_mask(tokens, attention_mask, window, x.device), self.rotary(positions)
            for layer in self.layers:
                x = layer(x, rotary, mask)
            return x
        positions = positions.expand(batch, tokens).long().contiguous()
        rotary = self.rotary(positions)
        from_start = position_ids is None and tokens > 1 and (window is None or tokens <= window)
        for layer, held in zip(self.layers, cache.layers, strict=True):
            x = layer(x, rotary, None, positions, held, from_start and held.dtype == x.dtype)
        return x


def products_of(model: LLM) -> dict[str, Any]:
    """The linear layers and the embedding, by name: all whose weights ``quantize`` stores in one byte a number."""
    names = re.compile(r"layers\.\d+\.\w+_proj|lm_head|embed_tokens")
    return {name: each for name, each in model.named_modules() if names.fullmatch(name)}


def quantize_products(model: LLM, weight_dtype: str) -> None:
    """Replace each of ``products_of`` by a quantized one, in place."""
    products = products_of(model)
    while products:
        name, each = products.popitem()  # not kept, so that only one is in memory twice
        made = QuantizedEmbedding if name == "embed_tokens" else QuantizedLinear
        new = made(each.weight, getattr(each, "bias", None), getattr(torch, weight_dtype))
        owner, _, last = name.rpartition(".")
        setattr(model.get_submodule(owner), last, new.train(each.training))
    model.requires_grad_(False)  # norms that learn would give all layers but the first an input that does


def _select_positions(x: Tensor, which: int | Tensor) -> Tensor:
    """The positions of x [B, T, C] that get logits, contiguous, so that prefill and decoding share the head's graph."""
    if isinstance(which, int):
        # contiguous() would not copy the last position of a single row; its strides would be those of x.
        return x if which in (0, x.shape[1]) else x[:, -which:].clone(memory_format=torch.contiguous_format)
    if which.dim() == 1:
        return x[:, which]
    return x.gather(1, which[..., None].expand(-1, -1, x.shape[-1]))


def token_mask(tokens: int, attention_mask: Tensor | None, window: int | None, device: torch.device) -> Tensor | None:
    """The mask of ``attend_tokens`` for padding and a window; None if causal attention is enough."""
    narrow = window is not None and window < tokens
    if attention_mask is None and not narrow:
        return None
    index = torch.arange(tokens, device=device)
    distance = index[:, None] - index
    mask = distance >= 0
    mask = (mask & (distance < window) if narrow else mask)[None, None]  # type: ignore[operator]
    if attention_mask is not None:
        # Padding sees itself: a row that sees nothing would be NaN, and its value would spread NaN to all rows.
        mask = (mask & attention_mask.bool()[:, None, None]) | (distance == 0)
    return mask


def _check_inputs(
    model: LLM, input_ids: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None, cache: KVCache | None,
    logits_to_keep: int | Tensor,
) -> None:  # fmt: skip
    config = model.config
    validate.tensor("input_ids", input_ids, "B T", kinds="integer", empty=False)
    validate.in_range("input_ids", input_ids, config.vocab_size, "vocab_size")
    batch, tokens = input_ids.shape
    sizes, limit = {"B": batch, "T": tokens}, config.max_position_embeddings
    if attention_mask is not None:
        if cache is not None:
            raise ValueError("attention_mask and cache cannot both be given; repeat the last token of short rows")
        validate.tensor("attention_mask", attention_mask, "B T", sizes=sizes)
    if cache is not None:
        _check_cache(cache, model, input_ids, position_ids is None)
    if position_ids is None and tokens > limit:
        raise ValueError(f"input_ids has {tokens} tokens, but the model has {limit} positions")
    if position_ids is not None:
        validate.tensor("position_ids", position_ids, "1 T | B T", kinds="integer", sizes=sizes)
        if cache is not None:
            remedy = ", or make a cache with more slots"
            validate.in_range("position_ids", position_ids, cache.slots, "cache.slots", remedy)
        elif attention_mask is None:
            validate.in_range("position_ids", position_ids, limit, "max_position_embeddings")
        elif validate.on_host(position_ids) and validate.on_host(attention_mask):
            # Positions of padding may have any value.
            seen = position_ids.expand(batch, tokens)[attention_mask.bool()]
            validate.in_range("position_ids", seen, limit, "max_position_embeddings")
    if isinstance(logits_to_keep, Tensor):
        validate.tensor("logits_to_keep", logits_to_keep, "L | B L", kinds=(torch.int64,), sizes={"B": batch})
    elif not validate.is_count(logits_to_keep, least=0):
        raise ValueError(f"logits_to_keep is {logits_to_keep!r}, expected 0 for all, a number or a tensor of indices")


def _check_cache(cache: KVCache, model: LLM, input_ids: Tensor, from_zero: bool) -> None:
    if not isinstance(cache, KVCache):
        raise TypeError(f"cache is a {type(cache).__name__}, expected a KVCache from model.make_cache(batch, slots)")
    config, weight = model.config, model.head.norm.weight
    batch, tokens = input_ids.shape
    dtype = compute_dtype(weight)
    _, _, heads, _, width = cache.layers[0].shape
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


def example_inputs(model: LLM, *, batch: int = 2, tokens: int = 16, seed: int = 0) -> dict[str, Tensor]:
    """``input_ids`` [batch, tokens] on the model's device, uniformly drawn; the same on every device."""
    limit = model.config.max_position_embeddings
    if batch < 1 or not 1 <= tokens <= limit:
        raise ValueError(f"batch is {batch} and tokens {tokens}: both must be positive, and tokens at most {limit}")
    drawn = torch.randint(model.config.vocab_size, (batch, tokens), generator=validate.seeded(seed), device="cpu")
    return {"input_ids": drawn.to(model.embed_tokens.weight.device)}
