"""The one place that decides how rows attend: padded or packed, with which kernel. Nothing here is built per layer.

A padded batch goes through torch's attention, with a mask of keys ([B, 1, 1, T], never T x T) where rows are short.
A packed batch goes through a variable-length kernel where there is one for it. Elsewhere (a CPU, float32, an old GPU)
its rows are put side by side for the attention alone, by tables made once for all layers. Which of the two it is,
``rows_of`` decides outside the regions: to change the kernel, change this file.

Shapes: B rows, T tokens of a row, N tokens of a packed batch, S rows of it with those that fill it up, C width,
H heads, D width of a head.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.modules import compute_dtype


class Rows(NamedTuple):
    """Where the rows of a packed batch begin and end, as the layers need it.

    Attributes:
        longest: No row has more tokens: a bound that holds for all batches, not this batch's own maximum.
        offsets: [S + 1] int32, where each row begins, and the end of the last; for the kernel, else None.
        table: [S, longest] int64, the token of each place; without the kernel, else None.
        inverse: [N] int64, the place of each token in the table; without the kernel, else None.
        mask: [S, 1, 1, longest], as of ``key_mask``; without the kernel, else None.
    """

    longest: int
    offsets: Tensor | None = None
    table: Tensor | None = None
    inverse: Tensor | None = None
    mask: Tensor | None = None


def attend(qkv: Tensor, heads: int, mask: Tensor | None, rows: Rows | None, dropout: float) -> Tensor:
    """Attention of every token to all tokens of its row.

    Args:
        qkv: [B, T, 3 C] or [N, 3 C], queries, keys and values side by side.
        heads: H.
        mask: Of ``key_mask`` for a padded batch; None where all rows are full.
        rows: Of ``rows_of`` for a packed batch, else None.
        dropout: Probability that a weight is dropped; 0 outside of training.

    Returns:
        [B, T, C] or [N, C].
    """
    if rows is None:
        return _attend_padded(qkv, heads, mask, dropout)
    if rows.offsets is not None:
        return _attend_packed(qkv, heads, rows.offsets, rows.longest, dropout)
    mixed = _attend_padded(qkv[rows.table], heads, rows.mask, dropout)
    return mixed.flatten(0, 1)[rows.inverse]


def key_mask(attention_mask: Tensor, like: Tensor) -> Tensor:
    """What ``attend`` adds to the scores of a padded batch: 0 for a token, minus infinity for padding.

    Made in the dtype of the scores, so that no layer converts it. A row that is all padding sees all of it, like a
    row that is full: its numbers mean nothing, and they are finite.

    Args:
        attention_mask: [B, T], 0 where there is padding.
        like: What the first layer gets.

    Returns:
        [B, 1, 1, T].
    """
    hidden = attention_mask == 0
    hidden = hidden & ~hidden.all(dim=1, keepdim=True)
    zeros = torch.zeros(hidden.shape, dtype=compute_dtype(like), device=like.device)
    return zeros.masked_fill(hidden, float("-inf"))[:, None, None]


def rows_of(offsets: Tensor, longest: int, tokens: int, like: Tensor, head_dim: int) -> Rows:
    """The rows of a packed batch, ready for the kernel that will run.

    Args:
        offsets: [S + 1] int32.
        longest: No row has more tokens.
        tokens: N.
        like: What the first layer gets.
        head_dim: D.
    """
    if kernel_runs(like, head_dim):
        return Rows(longest, offsets=offsets)
    starts, ends = offsets[:-1, None].long(), offsets[1:, None].long()
    place = torch.arange(longest, device=offsets.device)
    token = starts + place
    # An empty row shows its first place: a softmax over nothing would be NaN, and so would be gradients through it.
    there = (token < ends) | (place == 0)
    table = torch.where(there, token, 0).clamp(max=tokens - 1)
    index = torch.arange(tokens, device=offsets.device)
    row = torch.searchsorted(offsets[1:].long().contiguous(), index, right=True)
    inverse = row * longest + index - offsets.long()[row]
    return Rows(longest, table=table, inverse=inverse, mask=key_mask(there, like))


def kernel_runs(like: Tensor, head_dim: int) -> bool:
    """Whether torch's variable-length attention takes these tokens: half precision, on an Ampere GPU or newer."""
    if like.device.type != "cuda" or torch.version.hip is not None:
        return False
    if compute_dtype(like) not in (torch.float16, torch.bfloat16) or head_dim % 8 or head_dim > 256:
        return False
    return torch.backends.cuda.is_flash_attention_available() and (
        torch.cuda.get_device_capability(like.device) >= (8, 0)
    )


def _attend_padded(qkv: Tensor, heads: int, mask: Tensor | None, dropout: float) -> Tensor:
    query, key, value = (part.transpose(1, 2) for part in qkv.unflatten(-1, (3, heads, -1)).unbind(-3))
    mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout)
    return mixed.transpose(1, 2).flatten(2)


def _attend_packed(qkv: Tensor, heads: int, offsets: Tensor, longest: int, dropout: float) -> Tensor:
    query, key, value = qkv.unflatten(-1, (3, heads, -1)).unbind(-3)
    if dropout == 0.0:
        from torch.nn.attention.varlen import varlen_attn

        mixed: Tensor = varlen_attn(query, key, value, offsets, offsets, longest, longest)  # type: ignore[assignment]
    else:
        # The public function has no dropout. This is the operator below it, which torch's nested tensors call too.
        mixed = torch.ops.aten._flash_attention_forward(
            query, key, value, offsets, offsets, longest, longest, dropout, False, False
        )[0]
    return mixed.flatten(1)
