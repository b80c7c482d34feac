"""The embeddings, and the block that an encoder repeats.

Shapes: B rows, T tokens of a row, N tokens of a packed batch, C width, I width inside the MLP. [..., C] is [B, T, C]
of a padded batch and [N, C] of a packed one.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from zoo.bert import glue
from zoo.bert.attention import Rows, attend
from zoo.bert.config import BertConfig
from zoo.layers import plain


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


def _is_tanh(function: Callable[[Tensor], Tensor]) -> bool | None:
    """Which form of GELU a function is, by tanh or by erf; None if it is another."""
    return True if function is _gelu_tanh else False if function is F.gelu else None


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
    """Attention and MLP, each with its residual add and the norm after it."""

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
        if self.training and glue.by_operators(x):
            return self._learn(x, mask, rows)
        dropout = self.attention_dropout if self.training else 0.0
        mixed = attend(self.qkv(x), self.heads, mask, rows, dropout)
        x = self.attention_norm(self.dropout(self.attention_output(mixed)) + x)
        hidden = self.activation(self.intermediate(x))
        return self.output_norm(self.dropout(self.output(hidden)) + x)

    def _learn(self, x: Tensor, mask: Tensor | None, rows: Rows | None) -> Tensor:
        """The same by operators of our own, which have gradients in as few passes; see glue.py."""
        x, low = glue.beside(x)
        mixed = attend(glue.linear(x, low, self.qkv), self.heads, mask, rows, self.attention_dropout)
        x, low = glue.add_norm(x, *self._added(mixed, self.attention_output), self.attention_norm)
        hidden = glue.activated(x, low, self.intermediate, self.activation, _is_tanh(self.activation))
        return glue.add_last_norm(x, *self._added(hidden, self.output), self.output_norm)

    def _added(self, x: Tensor, layer: nn.Linear) -> tuple[Tensor, Tensor | None]:
        """What a product adds to the stream, and the bias that is still to be added."""
        if plain(self.dropout, nn.Dropout) and self.dropout.p == 0.0:
            return glue.product(x, x, layer)
        # The bias is dropped with the rest.
        return self.dropout(glue.linear(x, x, layer)), None
