"""What the heads return: named tuples, with transformers' names for what is in them.

A named tuple is a tree of tensors to the compiler and to an outer CUDA graph as it stands.

Shapes: B rows, T tokens of a row, C width, L labels, V vocabulary. A packed batch of N tokens has [N, ...] where a
padded one has [B, T, ...]; ``unpack`` puts the padding back.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Encoding(NamedTuple):
    """Of heads ``none`` and ``pooled``.

    Attributes:
        last_hidden_state: [B, T, C].
        pooler_output: [B, C], of each row's first token; None without a pooler.
    """

    last_hidden_state: Tensor
    pooler_output: Tensor | None = None


class SequenceScores(NamedTuple):
    """Of head ``sequence-classification``.

    Attributes:
        logits: [B, L].
        loss: A scalar where labels were given.
    """

    logits: Tensor
    loss: Tensor | None = None


class TokenScores(NamedTuple):
    """Of heads ``masked-lm`` and ``token-classification``.

    Attributes:
        logits: [B, T, V or L].
        loss: A scalar where labels were given.
    """

    logits: Tensor
    loss: Tensor | None = None


class Spans(NamedTuple):
    """Of head ``question-answering``.

    Attributes:
        start_logits: [B, T].
        end_logits: [B, T].
        loss: A scalar where both positions were given.
    """

    start_logits: Tensor
    end_logits: Tensor
    loss: Tensor | None = None


Output = Encoding | SequenceScores | TokenScores | Spans
