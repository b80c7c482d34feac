"""The embeddings, and the block that an encoder repeats.

Shapes: B rows, T tokens of a row, N tokens of a packed batch, C width, I width inside the MLP. [..., C] is [B, T, C]
of a padded batch and [N, C] of a packed one.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.bert.attention import Rows, attend
from zoo.bert.config import BertConfig
from zoo.modules import compute_dtype, ordinary, plain
from zoo.ops.common import differentiated, kernels_run
from zoo.ops.gelu import bias_gelu
from zoo.ops.norms import add_layer_norm
from zoo.ops.products import low_linear, takes_low, with_low_copy


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_new": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "relu": F.relu,
}


def activation(name: str) -> Callable[[Tensor], Tensor]:
    """The function of a ``hidden_act``."""
    return _FUNCTIONS[name]


class BertEmbeddings(nn.Module):
    """Word, position and token type vectors, added up and normalised."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        width, pad = config.hidden_size, config.pad_token_id
        self.word_embeddings = nn.Embedding(config.vocab_size, width, padding_idx=pad)
        self.position_embeddings = nn.Embedding(
            config.max_position_embeddings, width, padding_idx=pad if config.kind == "roberta" else None
        )
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, width)
        self.norm = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, input_ids: Tensor, token_type_ids: Tensor | None, position_ids: Tensor | None) -> Tensor:
        """Look up and add.

        Args:
            input_ids: [B, T] or [N].
            token_type_ids: The same, or None for type 0.
            position_ids: The same or [1, T]; None for 0 to T - 1.

        Returns:
            [..., C].
        """
        positions, types = self.position_embeddings.weight, self.token_type_embeddings.weight
        x = self.word_embeddings(input_ids)
        place = positions[: input_ids.shape[-1]] if position_ids is None else self.position_embeddings(position_ids)
        if token_type_ids is None:
            # One type for all is added where there is less of it: to the positions, which rows mostly have in common.
            place = place + types[0]
        else:
            x = x + self.token_type_embeddings(token_type_ids)
        return self.dropout(self.norm(x + place))


class BertLayer(nn.Module):
    """Attention and MLP, each with its residual add and the norm after it.

    x ─┬─ qkv ── attention ── output product ─┐
       └──────────────────────────────────── add, norm ─┬─ product ── activation ── product ─┐
                                                        └───────────────────────────────── add, norm ── x

    Under autocast the residual stream is float32, and products take a copy in a lower precision, which the norm before
    them writes as well. Where gradients are wanted and kernels of our own run, the operator behind a product adds its
    bias, and the backward sums the bias' gradient in the same pass. A module that is not what it was built as (an
    adapter in its place, a hook) is called with the stream.
    """

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        width, inner, eps = config.hidden_size, config.intermediate_size, config.layer_norm_eps
        self.heads = config.num_attention_heads
        self.attention_dropout = config.attention_probs_dropout_prob
        self.activation = activation(config.hidden_act)
        self.qkv = nn.Linear(width, 3 * width)
        self.attention_output = nn.Linear(width, width)
        self.attention_norm = nn.LayerNorm(width, eps=eps)
        self.intermediate = nn.Linear(width, inner)
        self.output = nn.Linear(inner, width)
        self.output_norm = nn.LayerNorm(width, eps=eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, x: Tensor, mask: Tensor | None = None, rows: Rows | None = None) -> Tensor:
        """Run the block.

        Args:
            x: [B, T, C] or [N, C].
            mask: [B, 1, 1, T], added to the scores of a padded batch; None where its rows are full.
            rows: Of a packed batch, else None.

        Returns:
            Like ``x``.
        """
        dropout = self.attention_dropout if self.training else 0.0
        x, low = with_low_copy(x)
        qkv, _ = _product(x, low, self.qkv)
        mixed = attend(qkv, self.heads, mask, rows, dropout)
        x, low = self._add_norm(x, mixed, self.attention_output, self.attention_norm, low.dtype)
        hidden = self._activated(x, low)
        x, _ = self._add_norm(x, hidden, self.output, self.output_norm)
        return x

    def _activated(self, x: Tensor, low: Tensor) -> Tensor:
        """The first product of the MLP and its activation: [..., C] -> [..., I]."""
        gelu = self.activation is F.gelu or self.activation is _gelu_tanh
        hidden, bias = _product(x, low, self.intermediate, without_bias=gelu)
        if bias is None:
            return self.activation(hidden)
        return bias_gelu(hidden, bias, self.activation is _gelu_tanh)

    def _add_norm(
        self, x: Tensor, y: Tensor, layer: nn.Linear, norm: nn.LayerNorm, low_dtype: torch.dtype | None = None
    ) -> tuple[Tensor, Tensor]:
        """A product of y, dropout, the residual add, and the norm of the sum [..., C], in both dtypes."""
        # Dropout drops the bias with the rest.
        dropped = not plain(self.dropout, nn.Dropout) or (self.dropout.training and self.dropout.p > 0.0)
        added, bias = _product(y, y, layer, without_bias=not dropped)
        added = self.dropout(added)
        if plain(norm, nn.LayerNorm) and ordinary(norm.weight) and ordinary(norm.bias):
            return add_layer_norm(x, added, bias, norm.weight, norm.bias, norm.eps, low_dtype)
        x = norm(x + (added if bias is None else added + bias))
        return x, x if low_dtype is None else x.to(low_dtype)


def _product(x: Tensor, low: Tensor, layer: nn.Linear, *, without_bias: bool = False) -> tuple[Tensor, Tensor | None]:
    """A linear layer of x, of which ``low`` is what products take; and the bias, if it is still to be added."""
    if not plain(layer):
        return layer(x), None
    weight, bias = layer.weight, layer.bias
    if not (ordinary(bias) and kernels_run(low, weight, bias) and differentiated(low, weight, bias)):
        return layer(low), None
    if takes_low(low, weight, bias):
        return low_linear(low, weight, None if without_bias else bias), bias if without_bias else None
    if without_bias and low.dtype == weight.dtype == bias.dtype == compute_dtype(low):
        return F.linear(low, weight), bias
    return layer(low), None
