"""A decoder-only language model: Llama, Mistral, Qwen2 and Qwen3.

    tokens [B, T] ─ embedding ─ layer ─ layer ─ ... ─ head ─▶ logits [B, T, V]
    positions [B, T] ─ rotary rows ─┴─ to every layer
    cache ── a tensor a layer ──────┘

What depends on positions and padding alone (rotary rows, masks) is done outside the regions, once a step. All layers
are one graph, whatever their number: what differs between them is weights and a tensor of the cache.

Shapes: B batch, T tokens, S slots of the cache, V vocabulary, C width, D width of a head.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.engine.discover import Region
from zoo.llm.cache import KVCache, check_is_cache, make_cache
from zoo.llm.config import LLMConfig
from zoo.modules import bounds_outside, initialise, on_host, ordinary, plain
from zoo.ops.attention import attend, decode_attention, decode_layer, decodes, few_rows, norm_linear
from zoo.ops.glu import swiglu
from zoo.ops.norms import add_rms_norm, rms_norm
from zoo.ops.rotary import rotate_into, split_rotated
from zoo.validate import seeded

_INTEGERS = (torch.int64, torch.int32)


def check_call(
    model: LLM,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    cache: KVCache | None,
    logits_to_keep: int | Tensor,
) -> None:
    """Check the inputs of ``LLM.forward``."""
    if not isinstance(input_ids, Tensor):
        raise TypeError(f"input_ids is a {type(input_ids).__name__}, expected a tensor [batch, tokens]")
    if input_ids.dtype not in _INTEGERS:
        raise TypeError(f"input_ids is {input_ids.dtype}, expected int64 or int32")
    if input_ids.dim() != 2 or not input_ids.numel():
        raise ValueError(f"input_ids has shape {list(input_ids.shape)}, expected [batch, tokens], neither empty")
    vocabulary = model.config.vocab_size
    check_values("input_ids", input_ids, vocabulary, f"the vocabulary has {vocabulary} tokens")
    batch, tokens = input_ids.shape
    limit = model.config.max_position_embeddings
    if position_ids is None and tokens > limit:
        raise ValueError(f"input_ids has {tokens} tokens, but the model has {limit} positions")
    if position_ids is not None:
        if position_ids.dtype not in _INTEGERS:
            raise TypeError(f"position_ids is {position_ids.dtype}, expected int64 or int32")
        if position_ids.dim() != 2 or position_ids.shape[1] != tokens or position_ids.shape[0] not in (1, batch):
            raise ValueError(
                f"position_ids has shape {list(position_ids.shape)}, expected {[batch, tokens]} or {[1, tokens]}"
            )
    if attention_mask is not None:
        if cache is not None:
            raise ValueError(
                "attention_mask and cache cannot both be given: a row's token of position p lies in slot p, without "
                "padding; pass position_ids, and repeat the last token of short rows to fill them up"
            )
        if not isinstance(attention_mask, Tensor) or attention_mask.shape != input_ids.shape:
            given = list(attention_mask.shape) if isinstance(attention_mask, Tensor) else type(attention_mask).__name__
            raise ValueError(f"attention_mask is {given}, expected a tensor like input_ids, {[batch, tokens]}")
    if position_ids is not None:
        check_values("position_ids", position_ids, limit, f"the model has {limit} positions", seen=attention_mask)
    if cache is not None:
        check_cache(model, cache, batch, tokens, position_ids is None)
        if position_ids is not None:
            held = f"the cache has {cache.slots} slots"
            check_values("position_ids", position_ids, cache.slots, held, ", or make a cache with more slots")
    if isinstance(logits_to_keep, Tensor):
        if logits_to_keep.dtype != torch.int64:
            raise TypeError(f"logits_to_keep is {logits_to_keep.dtype}, expected int64 indices")
        if logits_to_keep.dim() not in (1, 2) or (logits_to_keep.dim() == 2 and logits_to_keep.shape[0] != batch):
            raise ValueError(
                f"logits_to_keep has shape {list(logits_to_keep.shape)}, expected [kept] or [{batch}, kept]"
            )
    elif not isinstance(logits_to_keep, int) or logits_to_keep < 0:
        raise ValueError(f"logits_to_keep is {logits_to_keep!r}, expected 0 for all, a number or a tensor of indices")


def check_values(
    name: str, given: Tensor, limit: int, why: str, otherwise: str = "", *, seen: Tensor | None = None
) -> None:
    """Whether values lie from 0 to below ``limit``, where they can be read at no cost and Python may depend on them.

    Of a batch that is padded only those are looked at that ``seen`` [B, T] marks: the others are nobody's.
    """
    if not all(on_host(each) for each in (given, seen) if each is not None):
        return
    if seen is not None:
        given = given.expand(seen.shape)[seen.bool()]
    if (bounds := bounds_outside(given, limit)) is not None:
        low, high = bounds
        raise ValueError(f"{name} has values from {low} to {high}, but {why}: pass 0 to {limit - 1}{otherwise}")


def check_cache(model: LLM, cache: KVCache, batch: int, tokens: int, from_zero: bool) -> None:
    """Whether a cache is of this model and large enough."""
    check_is_cache(cache)
    config, weight = model.config, model.embed_tokens.weight
    kind = weight.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
    if (cache.dtype, cache.device) != (dtype, weight.device):
        raise ValueError(
            f"cache is {cache.dtype} on {cache.device}, but the model computes in {dtype} on {weight.device}: "
            f"model.make_cache(batch, slots, dtype={dtype}) makes one that fits"
        )
    if len(cache.layers) != config.num_hidden_layers:
        raise ValueError(f"cache has {len(cache.layers)} layers, but the model has {config.num_hidden_layers}")
    heads, width = cache.layers[0].shape[2], cache.layers[0].shape[4]
    if (heads, width) != (config.num_key_value_heads, config.head_dim):
        raise ValueError(
            f"cache has {heads} heads of width {width}, but the model {config.num_key_value_heads} of {config.head_dim}"
        )
    if cache.batch != batch:
        raise ValueError(f"cache has {cache.batch} rows, but input_ids {batch}")
    if from_zero and tokens > cache.slots:
        raise ValueError(f"input_ids has {tokens} tokens, but the cache {cache.slots} slots")


def check_cache_size(config: LLMConfig, batch: int, slots: int) -> None:
    """Whether a cache of this size makes sense."""
    for name, value in (("batch", batch), ("slots", slots)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name} is {value!r}, expected a positive integer")
    if slots > config.max_position_embeddings:
        raise ValueError(f"slots is {slots}, but the model has {config.max_position_embeddings} positions")


def inverse_frequencies(config: LLMConfig, device: torch.device | None = None) -> Tensor:
    """Turn of each pair of channels from one position to the next, in radians: [D / 2], float32."""
    channels = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=device)
    turns = 1.0 / config.rope_theta ** (channels / config.head_dim)
    scaling = config.rope_scaling
    if scaling is None:
        return turns
    if scaling.kind == "linear":
        return turns / scaling.factor
    low, high, length = scaling.low_freq_factor, scaling.high_freq_factor, scaling.original_max_position_embeddings
    assert low is not None and high is not None and length is not None
    # 1 for waves that fit into the original length `high` times or more, 0 for those that fit `low` times or less.
    kept = ((length * turns / (2 * math.pi) - low) / (high - low)).clamp(0, 1)
    return turns * (kept + (1 - kept) / scaling.factor)


class RotaryTable(nn.Module):
    """Cosines and sines of all positions, float32 in every dtype of the model: made once, gathered once a step."""

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
        # A model that is rounded to bfloat16, moved, or given empty memory gets its table anew.
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


class LLMLayer(nn.Module):
    """Attention and MLP, each after a norm and with a residual add."""

    def __init__(self, config: LLMConfig) -> None:
        super().__init__()
        width, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
        self.heads, self.key_heads, self.head_dim = config.num_attention_heads, config.num_key_value_heads, head_dim
        self.window = config.sliding_window
        self.input_layernorm = RMSNorm(width, config.rms_norm_eps)
        self.qkv_proj = nn.Linear(width, (self.heads + 2 * self.key_heads) * head_dim, bias=config.qkv_bias)
        self.q_norm = RMSNorm(head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.o_proj = nn.Linear(self.heads * head_dim, width, bias=False)
        self.post_attention_layernorm = RMSNorm(width, config.rms_norm_eps)
        self.gate_up_proj = nn.Linear(width, 2 * inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(
        self,
        x: Tensor,
        rotary: Tensor,
        mask: Tensor | None = None,
        positions: Tensor | None = None,
        cache: Tensor | None = None,
        from_start: bool = False,
    ) -> Tensor:
        """Run the block; with a cache its tokens are written there first.

        Args:
            x: [B, T, C].
            rotary: [B or 1, T, D], cosines and sines of the tokens' positions.
            mask: [B or 1, 1, T, T] bool without a cache; None for causal.
            positions: [B, T] int64 with a cache.
            cache: [2, B, K, S, D], or None.
            from_start: Whether positions are 0 to T - 1 in every row, so that tokens see each other and nothing else.

        Returns:
            [B, T, C].
        """
        if cache is not None and positions is not None and x.shape[1] == 1 and self._decodes(x[:, 0], cache):
            return self._decode(x[:, 0], rotary[:, 0], positions[:, 0], cache)[:, None]
        x, normed = _add_norm(x, None, self.input_layernorm)
        mixed = self._attend(self.qkv_proj(normed), rotary, mask, positions, cache, from_start)
        x, normed = _add_norm(x, self.o_proj(mixed), self.post_attention_layernorm)
        return _add_linear(x, swiglu(self.gate_up_proj(normed)), self.down_proj)

    def _attend(
        self,
        qkv: Tensor,
        rotary: Tensor,
        mask: Tensor | None,
        positions: Tensor | None,
        cache: Tensor | None,
        from_start: bool,
    ) -> Tensor:
        """Queries, keys and values [B, T, (H + 2 K) D] -> mixed values [B, T, H D]."""
        qkv, q_norm, k_norm, eps = self._normed_heads(qkv)
        norms, window = (q_norm, k_norm, eps, self.heads), self.window
        if cache is None or positions is None:
            return attend_tokens(*split_rotated(qkv, rotary, *norms, self.key_heads), mask).flatten(2)
        batch, tokens = positions.shape
        if tokens == 1:
            return decode_attention(qkv[:, 0], cache, positions[:, 0], rotary[:, 0], *norms, window)[:, None]
        query = rotate_into(qkv, cache, positions, rotary, *norms)
        if not from_start:
            return attend(query, cache, positions, window).flatten(2)
        # The library's causal attention is faster than one that looks up where a prompt begins.
        key, value = cache[:, :batch, :, :tokens].transpose(2, 3)
        return attend_tokens(query, key, value, None).flatten(2)

    def _normed_heads(self, qkv: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, float]:
        """What comes of the product, weights of queries' and keys' norms that are still to be taken, and their eps."""
        q_norm, k_norm = self.q_norm, self.k_norm
        if q_norm is None or k_norm is None:
            return qkv, None, None, 0.0
        if plain(q_norm, RMSNorm) and plain(k_norm, RMSNorm):
            return qkv, q_norm.weight, k_norm.weight, q_norm.eps
        heads = qkv.unflatten(-1, (-1, self.head_dim))
        query, key, value = heads.split((self.heads, self.key_heads, self.key_heads), dim=2)
        return torch.cat((q_norm(query), k_norm(key), value), dim=2).flatten(2), None, None, 0.0

    def _decodes(self, x: Tensor, cache: Tensor) -> bool:
        products = self.qkv_proj, self.o_proj, self.gate_up_proj, self.down_proj
        norms = self.input_layernorm, self.post_attention_layernorm, self.q_norm, self.k_norm
        if not all(norm is None or plain(norm, RMSNorm) for norm in norms):
            return False
        return all(map(plain, products)) and decodes(x, cache, *(product.weight for product in products))

    def _decode(self, x: Tensor, rotary: Tensor, positions: Tensor, cache: Tensor) -> Tensor:
        """The block for one new token in each of few rows: x [B, C] -> [B, C]."""
        qkv, norm, norm_after = self.qkv_proj, self.input_layernorm, self.post_attention_layernorm
        head_norms = [None if each is None else each.weight for each in (self.q_norm, self.k_norm)]
        out: Tensor = decode_layer(
            x, cache, positions, rotary, norm.weight, qkv.weight, qkv.bias, *head_norms, self.o_proj.weight,
            norm_after.weight, self.gate_up_proj.weight, self.down_proj.weight, norm.eps, self.heads, self.window,
        )  # fmt: skip
        return out


class LLMHead(nn.Module):
    """The last norm, and the product with the vocabulary's vectors where logits are wanted."""

    def __init__(self, config: LLMConfig) -> None:
        super().__init__()
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, weight: Tensor | None) -> Tensor:
        """X [B, T, C], weight [V, C], which may be the embedding's -> logits [B, T, V]; without one x normalised."""
        norm = self.norm
        if weight is not None and x.shape[1] == 1 and plain(norm, RMSNorm) and few_rows(x[:, 0], norm.weight, weight):
            logits: Tensor = norm_linear(x[:, 0], norm.weight, norm.eps, weight)[:, None]
            return logits
        normed: Tensor = self.norm(x)
        return normed if weight is None else F.linear(normed, weight)


def attend_tokens(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """Attention among the tokens at hand, without a cache: scoring and training.

    Args:
        query: [B, T, H, D].
        key: [B, T, K, D].
        value: [B, T, K, D].
        mask: [B or 1, 1, T, T] bool, True where a query (row) sees a key; None for all up to the query's own.

    Returns:
        [B, T, H, D].
    """
    out = F.scaled_dot_product_attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        attn_mask=mask,
        is_causal=mask is None,
        enable_gqa=query.shape[2] != key.shape[2],
    )
    return out.transpose(1, 2)


def _add_norm(x: Tensor, added: Tensor | None, norm: nn.Module) -> tuple[Tensor, Tensor]:
    """X [B, T, C] plus what is added, and the norm of that, in one pass unless somebody listens to the norm."""
    if plain(norm, RMSNorm):
        return add_rms_norm(x, added, norm.weight, norm.eps)  # type: ignore[arg-type]
    x = x if added is None else x + added
    return x, norm(x)


def _add_linear(x: Tensor, hidden: Tensor, linear: nn.Module) -> Tensor:
    """X [B, T, C] plus a linear layer of hidden [B, T, I], in one product where that is the same."""
    autocast = torch.is_autocast_enabled(x.device.type)
    if autocast or not plain(linear) or linear.bias is not None or not ordinary(linear.weight):  # type: ignore[arg-type]
        return x + linear(hidden)  # type: ignore[no-any-return]
    if not x.dtype == hidden.dtype == linear.weight.dtype:
        return x + linear(hidden)  # type: ignore[no-any-return]
    # The compiler finds an add behind a product only where both have two dimensions.
    return torch.addmm(x.flatten(0, -2), hidden.flatten(0, -2), linear.weight.t()).view_as(x)  # type: ignore[operator]


REGIONS = (
    Region(
        LLMLayer,
        graphs=1,
        why="equal blocks: one graph for prefill, one for a decode step, one for scoring, any depth",
    ),
    Region(
        LLMHead,
        graphs=1,
        why="the last norm and the widest product, on the positions that are kept",
    ),
)


class LLM(nn.Module):
    """A decoder-only language model.

    Args:
        config: An ``LLMConfig``.
    """

    regions: ClassVar[tuple[Region, ...]] = REGIONS
    static_arguments: ClassVar[tuple[str, ...]] = ("cache",)

    def __init__(self, config: LLMConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, padding_idx=config.pad_token_id)
        self.rotary = RotaryTable(config)
        self.layers = nn.ModuleList(LLMLayer(config) for _ in range(config.num_hidden_layers))
        self.head = LLMHead(config)
        # Tied weights exist once: the head is handed the embedding's. No second name can come loose.
        self.lm_head = (
            None if config.tie_word_embeddings else nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        )
        self.apply(initialise)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: KVCache | None = None,
        logits_to_keep: int | Tensor = 0,
    ) -> Tensor:
        """Logits of the next token.

        Without a cache: scoring and training. With one: keys and values of the tokens are written into the slots of
        their positions, and each token sees the slots up to its own. Nothing waits for the device.

        Args:
            input_ids: [B, T] integers.
            attention_mask: [B, T], 0 where a token is padding, on either side; not with a cache.
            position_ids: [B, T] or [1, T] int64, each below ``max_position_embeddings`` and the cache's slots;
                0 to T - 1 when left out, which is the fastest way to start a prompt.
            cache: From ``make_cache``; needs ``no_grad`` or ``inference_mode``.
            logits_to_keep: Which positions get logits: 0 for all, n for the last n, a tensor of indices [L] for the
                same in all rows (these as in transformers), or [B, L] for each row's own.

        Returns:
            [B, T or L, V].

        Raises:
            TypeError, ValueError: If an input does not fit, before anything runs.
        """
        check_call(self, input_ids, attention_mask, position_ids, cache, logits_to_keep)
        x = self._run_layers(input_ids, attention_mask, position_ids, cache)
        return self.head(_kept(x, logits_to_keep), self.output_weight)

    def features(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None
    ) -> Tensor:
        """What the output product is taken of: ``F.linear(model.features(ids), model.output_weight)`` are the logits.

        For a loss that never holds all of them, as ``zoo.training.LinearCrossEntropy``.

        Args:
            input_ids: As ``forward`` takes them, without a cache.
            attention_mask: The same.
            position_ids: The same.

        Returns:
            [B, T, C].

        Raises:
            TypeError, ValueError: If an input does not fit, before anything runs.
        """
        check_call(self, input_ids, attention_mask, position_ids, None, 0)
        return self.head(self._run_layers(input_ids, attention_mask, position_ids, None), None)

    def output_product(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Both sides of the output product: ``F.linear(*model.output_product(ids))`` are the logits.

        Takes and returns what ``features`` does, and ``output_weight`` [V, C] beside.
        """
        weight = self.output_weight
        # A reentrant checkpoint would make the parameter itself an output of its own.
        weight = weight if torch.is_grad_enabled() else weight.detach()
        return self.features(input_ids, attention_mask, position_ids), weight

    def _run_layers(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        cache: KVCache | None,
    ) -> Tensor:
        """All before the head: [B, T] -> [B, T, C]."""
        x = self.embed_tokens(input_ids)
        batch, tokens = input_ids.shape
        if cache is not None and x.requires_grad:
            raise ValueError(
                "a cache is written in place and passes no gradients on: call the model under torch.inference_mode() "
                "or torch.no_grad(), or leave out the cache"
            )
        positions = position_ids
        if positions is None:
            positions = torch.arange(tokens, device=x.device)[None]
        mask = None
        if cache is None:
            mask = token_mask(tokens, attention_mask, self.config.sliding_window, x.device)
        else:
            positions = positions.expand(batch, tokens).long().contiguous()
        rotary = self.rotary(positions)
        window = self.config.sliding_window
        from_start = position_ids is None and tokens > 1 and (window is None or tokens <= window)
        for index, layer in enumerate(self.layers):
            if cache is None:
                x = layer(x, rotary, mask)
            else:
                held = cache.layers[index]
                x = layer(x, rotary, None, positions, held, from_start and held.dtype == x.dtype)
        return x

    @property
    def output_weight(self) -> Tensor:
        """Vectors of the vocabulary in the output product, [V, C]: the embedding's where they are tied."""
        return self.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    def make_cache(
        self,
        batch: int,
        slots: int,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> KVCache:
        """An empty cache for this model.

        Args:
            batch: Rows.
            slots: Tokens a row, at most ``max_position_embeddings``.
            dtype: Of keys and values; the weights' when left out.
            device: The weights' when left out.

        Raises:
            ValueError: If a size is not positive or ``slots`` is more than the model has positions.
        """
        check_cache_size(self.config, batch, slots)
        weight = self.embed_tokens.weight
        return make_cache(
            layers=self.config.num_hidden_layers,
            batch=batch,
            key_heads=self.config.num_key_value_heads,
            slots=slots,
            width=self.config.head_dim,
            dtype=dtype or weight.dtype,
            device=torch.device(device) if device is not None else weight.device,
        )


def _kept(x: Tensor, which: int | Tensor) -> Tensor:
    """The positions of x [B, T, C] that get logits, laid out anew: prefill and decoding share the head's graph."""
    if isinstance(which, int):
        # Not contiguous(): of one row the last position is, with the strides of the whole.
        return x if which in (0, x.shape[1]) else x[:, -which:].clone(memory_format=torch.contiguous_format)
    if which.dim() == 1:
        return x[:, which]
    return x.gather(1, which[..., None].expand(-1, -1, x.shape[-1]))


def token_mask(tokens: int, attention_mask: Tensor | None, window: int | None, device: torch.device) -> Tensor | None:
    """The mask of ``attend_tokens``; None where plain causal attention is meant.

    Args:
        tokens: T.
        attention_mask: [B, T], 0 where a token is padding; or None.
        window: How many last tokens are seen; None for all.
        device: Where.
    """
    if window is not None and window >= tokens:
        window = None
    if attention_mask is None and window is None:
        return None
    index = torch.arange(tokens, device=device)
    distance = index[:, None] - index
    mask = distance >= 0
    if window is not None:
        mask = mask & (distance < window)
    mask = mask[None, None]
    if attention_mask is not None:
        # Padding sees itself: a row that sees nothing would be NaN, and poison all rows through its value.
        mask = (mask & attention_mask.bool()[:, None, None]) | (distance == 0)
    return mask


def example_inputs(model: nn.Module, *, batch: int = 2, tokens: int = 16, seed: int = 0) -> dict[str, Tensor]:
    """``input_ids`` [batch, tokens] on the model's device, uniformly drawn; the same on every device."""
    if not isinstance(model, LLM):
        raise TypeError(f"{type(model).__name__} is not a language model of the zoo")
    limit = model.config.max_position_embeddings
    if batch < 1 or not 1 <= tokens <= limit:
        raise ValueError(f"batch is {batch} and tokens {tokens}: both must be positive, and tokens at most {limit}")
    generator = seeded(seed)
    drawn = torch.randint(model.config.vocab_size, (batch, tokens), generator=generator, device="cpu")
    return {"input_ids": drawn.to(model.embed_tokens.weight.device)}
