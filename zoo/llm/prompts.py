"""Prompts as users have them, checked, and cut into the padded pieces that a model is fed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

Prompts: TypeAlias = Tensor | Sequence[Sequence[int]]


def prompt_rows(tokens: Prompts, vocab_size: int) -> list[list[int]]:
    """Token ids of each row.

    Args:
        tokens: [B, T] integers on any device, or a list of lists of any lengths.
        vocab_size: Ids lie below it.

    Raises:
        TypeError: If it is neither, or not of integers.
        ValueError: If there is no row, a row is empty, or a token is not in the vocabulary; the message names it.
    """
    rows: list[Any]
    if isinstance(tokens, Tensor):
        if tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool:
            raise TypeError(f"tokens is {tokens.dtype}, expected integers")
        if tokens.dim() != 2:
            raise ValueError(f"tokens has shape {list(tokens.shape)}, expected [batch, tokens]")
        rows = tokens.tolist()
    elif isinstance(tokens, Sequence) and not isinstance(tokens, str):
        rows = [row.tolist() if isinstance(row, Tensor) and row.dim() == 1 else row for row in tokens]
    else:
        raise TypeError(f"tokens is a {type(tokens).__name__}, expected a tensor [batch, tokens] or a list of lists")
    if not rows:
        raise ValueError("tokens has no rows")
    for index, row in enumerate(rows):
        if not isinstance(row, Sequence) or isinstance(row, str):
            raise TypeError(f"row {index} of tokens is a {type(row).__name__}, expected a list of token ids: [[1, 2]]")
        if not row:
            raise ValueError(f"row {index} of tokens is empty, and there is nothing to continue: give it a first token")
        for token in row:
            if not isinstance(token, int) or isinstance(token, bool):
                raise TypeError(f"row {index} of tokens holds {token!r}, expected integers")
            if not 0 <= token < vocab_size:
                raise ValueError(f"row {index} of tokens holds {token}, but the vocabulary has {vocab_size} tokens")
    return [list(row) for row in rows]


def from_start(rows: list[list[int]], buckets: Sequence[int], slots: int) -> tuple[Tensor, Tensor] | None:
    """Rows that begin a text, padded on the right to one bucket: tokens [B, bucket], and each row's last position.

    Padding is written behind a row's end, where no token looks before it is written anew.

    Args:
        rows: Token ids, at least one a row.
        buckets: Lengths, ascending.
        slots: Of the cache.

    Returns:
        Tokens and positions [B, 1]; None where no bucket holds the longest row, or the cache not the bucket.
    """
    longest = max(map(len, rows))
    size = next((bucket for bucket in buckets if bucket >= longest), None)
    if size is None or size > slots:
        return None
    tokens = [row + row[-1:] * (size - len(row)) for row in rows]
    return torch.tensor(tokens), torch.tensor([[len(row) - 1] for row in rows])


def pieces(rows: list[list[int]], starts: list[int], buckets: Sequence[int]) -> Iterator[tuple[Tensor, Tensor]]:
    """Tokens and positions to feed, [B, bucket] each, until the longest row is done.

    A row that is done repeats its last token at the token's own position: the same keys and values are written once
    more where they are, and the last column is the last token of every row.

    Args:
        rows: Token ids, at least one a row.
        starts: Position of each row's first token.
        buckets: Lengths of pieces, ascending; the longest is used as often as is needed.
    """
    longest, done = max(map(len, rows)), 0
    while done < longest:
        size = next((bucket for bucket in buckets if bucket >= longest - done), buckets[-1])
        places = [[min(done + index, len(row) - 1) for index in range(size)] for row in rows]
        tokens = [[row[place] for place in of_row] for row, of_row in zip(rows, places, strict=True)]
        positions = torch.tensor(places) + torch.tensor(starts)[:, None]
        yield torch.tensor(tokens), positions
        done += size
