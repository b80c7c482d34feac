"""The block that a decoder repeats, and the head behind the last one.

    x ─┬─ norm ─ qkv_proj ─ rotary ─ attention ─ o_proj ─ + ─┬─ norm ─ gate_up_proj ─ SwiGLU ─ down_proj ─ + ─▶ x
       └─────────────── keys, values: cache ──────────────┘  └─────────────────────────────────────────────┘

Shapes: B batch, T tokens, S slots, V vocabulary, C width, I width inside the MLP, H query heads, K key and value heads,
D width of a head.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.llm.config import LLMConfig
from zoo.modules import ordinary, plain
from zoo.ops.attention import attend, decode_attention, decode_layer, decodes, few_rows, norm_linear
from zoo.ops.glu import swiglu
from zoo.ops.norms import add_rms_norm, rms_norm
from zoo.ops.rotary import rotate_into, split_rotated


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
