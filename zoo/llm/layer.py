"""The block that a decoder repeats, in five steps that each read and write memory once when they are fused.

    x ─┬─ 1 project ──▶ query, and keys and values into the cache
       │  2 attend ───▶ mixed
       ├─ 3 add_attention
       ├─ 4 gate ─────▶ hidden
       └─ 5 add_mlp ──▶ x

Shapes: B batch, T tokens, S slots, C width, I width inside the MLP, H query heads, K key and value heads, D width of a
head.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.llm import operators
from zoo.llm.attention import attend, attend_tokens
from zoo.llm.cache import write
from zoo.llm.config import LLMConfig
from zoo.llm.norm import RMSNorm
from zoo.llm.residual import add_linear, add_norm, by_operators, norm_alone, norm_beside
from zoo.llm.rope import rotate


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
        by_kernels = cache is not None and self._by_kernels(x)
        if cache is not None and positions is not None and by_kernels and x.shape[1] == 1:
            return self.decode(x[:, 0], rotary[:, 0], positions[:, 0], cache)[:, None]
        x, normed = norm_beside(x, self.input_layernorm)
        if cache is None or positions is None:
            query, key, value = self.project(normed, rotary)
            mixed = attend_tokens(query, key, value, mask)
        else:
            query = self.project_into(normed, rotary, positions, cache, by_kernels)
            if from_start:
                # The library's causal attention is faster than one that looks up where a prompt begins.
                key, value = cache[:, : x.shape[0], :, : x.shape[1]].transpose(2, 3)
                mixed = attend_tokens(query, key, value, None)
            else:
                attention = operators.prefill_attention if by_kernels else attend
                mixed = attention(query, cache, positions, self.window)
        x, normed = self.add_attention(x, mixed.flatten(2))
        return self.add_mlp(x, self.gate(normed))

    def _by_kernels(self, x: Tensor) -> bool:
        return operators.kernels_run(x) and operators.attention_fits(self.head_dim)

    def _head_norms(self) -> tuple[Tensor | None, Tensor | None]:
        return (None, None) if self.q_norm is None or self.k_norm is None else (self.q_norm.weight, self.k_norm.weight)

    def decode(self, x: Tensor, rotary: Tensor, positions: Tensor, cache: Tensor) -> Tensor:
        """All five steps for one new token a row, by the operators of operators.py.

        x [B, C], rotary [B, D], positions [B], cache [2, B, K, S, D] -> [B, C].
        """
        norm, norm_after = self.input_layernorm, self.post_attention_layernorm
        weights = self.qkv_proj.weight, self.o_proj.weight, self.gate_up_proj.weight, self.down_proj.weight
        few = operators.few_rows(x, *weights)
        if few:
            qkv = operators.norm_linear(x, norm.weight, norm.eps, self.qkv_proj.weight, self.qkv_proj.bias)
        else:
            qkv = self.qkv_proj(norm(x))
        norms = self._head_norms()
        mixed = operators.decode_attention(qkv, cache, positions, rotary, *norms, norm.eps, self.heads, self.window)
        if not few:
            x, normed = self.add_attention(x, mixed)
            return self.add_mlp(x, self.gate(normed))
        x = operators.linear_add(mixed, self.o_proj.weight, x)
        hidden = operators.norm_gate(x, norm_after.weight, norm_after.eps, self.gate_up_proj.weight)
        return operators.linear_add(hidden, self.down_proj.weight, x)

    def project(self, normed: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Step 1, after its norm: one product, bias, norms of heads, rotation.

        normed [B, T, C], rotary [B or 1, T, D] -> query [B, T, H, D], key and value [B, T, K, D].
        """
        qkv = self.qkv_proj(normed)
        if self.q_norm is None and operators.attention_fits(self.head_dim) and by_operators(qkv):
            parts: tuple[Tensor, Tensor, Tensor] = operators.split_rotated(qkv, rotary, self.heads, self.key_heads)
            return parts
        heads = qkv.unflatten(-1, (-1, self.head_dim))
        query, key, value = heads.split((self.heads, self.key_heads, self.key_heads), dim=2)
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        return rotate(query, rotary), rotate(key, rotary), value

    def project_into(
        self, normed: Tensor, rotary: Tensor, positions: Tensor, cache: Tensor, by_kernels: bool
    ) -> Tensor:
        """Step 1, after its norm, with a cache [2, B, K, S, D], which gets keys and values: -> query [B, T, H, D]."""
        if by_kernels:
            where, eps = (cache, positions, rotary), self.input_layernorm.eps
            return operators.rotate_into(self.qkv_proj(normed), *where, *self._head_norms(), eps, self.heads)
        query, key, value = self.project(normed, rotary)
        write(cache, positions, key, value)
        return query

    def add_attention(self, x: Tensor, mixed: Tensor) -> tuple[Tensor, Tensor]:
        """Step 3: product, residual add and the norm after it. x [B, T, C], mixed [B, T, H D] -> [B, T, C] of both."""
        return add_norm(x, self.o_proj(mixed), self.post_attention_layernorm)

    def gate(self, normed: Tensor) -> Tensor:
        """Step 4: one product for both halves, SiLU of one times the other. normed [B, T, C] -> [B, T, I]."""
        both = self.gate_up_proj(normed)
        if by_operators(both):
            # The compiler's gradient of the two halves reads everything twice, and its code takes time to compile.
            return operators.swiglu(both.flatten(0, -2)).view(*both.shape[:-1], -1)
        gate, up = both.chunk(2, dim=-1)
        return F.silu(gate) * up

    def add_mlp(self, x: Tensor, hidden: Tensor) -> Tensor:
        """Step 5: product and residual add. x [B, T, C], hidden [B, T, I] -> [B, T, C]."""
        return add_linear(x, hidden, self.down_proj)


class LLMHead(nn.Module):
    """The last norm, and the product with the vocabulary's vectors where logits are wanted."""

    def __init__(self, config: LLMConfig) -> None:
        super().__init__()
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, weight: Tensor | None) -> Tensor:
        """X [B, T, C], weight [V, C], which may be the embedding's -> logits [B, T, V]; without one x normalised."""
        if weight is None:
            return norm_alone(x, self.norm)
        if x.shape[1] == 1 and not torch.is_grad_enabled() and operators.kernels_run(x):
            rows = x[:, 0]
            if operators.few_rows(rows, weight):
                return operators.norm_linear(rows, self.norm.weight, self.norm.eps, weight, None)[:, None]
        return F.linear(norm_alone(x, self.norm), weight)
