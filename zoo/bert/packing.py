"""Batches without padding: the tokens of all rows end to end, in one of a few sizes.

    input_ids [B, T], attention_mask ── pack ──▶ tokens [N], offsets ── model ──▶ [N, ...] ── unpack ──▶ [B, T, ...]

N is one of a few declared sizes, so that an epoch of rows of any lengths compiles as many graphs as there are sizes.
The rest of the size is filled with rows of padding, which attend to themselves alone and count in no loss.

Shape legend: B rows, T tokens of the longest row, N tokens of a packed batch, S rows with those that fill it up.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from zoo import validate
from zoo.bert.layer import BertConfig, Output, TokenScores

_Packed = TypeVar("_Packed", bound=Tensor | Output)


class PackedBatch(NamedTuple):
    """What ``pack`` makes and a model takes in place of padded ids."""

    input_ids: Tensor  # [N]
    position_ids: Tensor  # [N]
    token_type_ids: Tensor | None  # [N], or None for type 0
    offsets: Tensor  # [S + 1] int32, where each row begins, and the end of the last
    places: Tensor  # [N] int64, the index of each token in B x T; B * T for filling
    rows: int  # B
    length: int  # T, which bounds all rows
    first_position: int | None  # where positions were counted from; None where they were given

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> PackedBatch:
        """The batch on another device."""
        validate.check_device(device, "a batch")
        return pytree.tree_map_only(Tensor, lambda tensor: tensor.to(device, non_blocking=non_blocking), self)

    def take(self, padded: Tensor, fill: float = 0) -> Tensor:
        """[B, T, ...] to [N, ...], ``fill`` where the batch is filled up."""
        flat = padded.flatten(0, 1)
        return torch.cat([flat, flat.new_full((1, *flat.shape[1:]), fill)])[self.places]


def token_buckets(rows: int, length: int, *, steps: int = 8, typical: tuple[int, int] | None = None) -> tuple[int, ...]:
    """Sizes for batches of up to ``rows`` rows of up to ``length`` tokens: at most ``steps``, evenly spaced.

    A batch is filled up by half a step on average. Each size is a graph for each region that sees it. ``typical``, the
    fewest and the most tokens of a usual batch, is the range that all but the largest size are spaced over. A
    ValueError if a number is not positive, ``length`` is 1, or ``typical`` is no range of tokens.
    """
    validate.count("rows", rows)
    validate.count("length", length, 2)
    validate.count("steps", steps)
    if typical is None:
        tokens = [step * rows * length / steps for step in range(1, steps + 1)]
    else:
        low, high = typical
        if not 1 <= low <= high <= rows * length or steps < 2:
            raise ValueError(
                f"typical is {typical} and steps {steps}; expected the fewest and the most tokens of a usual batch, "
                f"from 1 to {rows * length}, and at least 2 steps"
            )
        between = [low + (high - low) * step / (steps - 1) for step in range(1, steps)]
        tokens = [*between, rows * length]
    room = 1
    while True:
        # Multiples of 8, for which matrix products are fast.
        sizes = sorted({math.ceil((math.ceil(count) + room) / 8) * 8 for count in tokens})
        if sizes[-1] >= rows * length + filling_rows(sizes, rows, length):
            return tuple(sizes)
        room += 1


def filling_rows(buckets: Sequence[int], rows: int, length: int) -> int:
    """Rows of padding in a packed batch of these rising sizes, so that none is empty or longer than ``length``."""
    steps = (after - before for before, after in pairwise(buckets))
    return max(1, -(-(buckets[0] - rows) // length), *(-(-(step - 1) // (length - 1)) for step in steps))


def pack(
    input_ids: Tensor, attention_mask: Tensor | None = None, token_type_ids: Tensor | None = None,
    position_ids: Tensor | None = None, *, config: BertConfig | None = None, buckets: Sequence[int] | None = None,
    rows: int | None = None, length: int | None = None,
) -> PackedBatch:  # fmt: skip
    """Take the padding out of a batch. On tensors of a GPU this waits for it; pack on the host, then ``.to(device)``.

    Args:
        input_ids: [B, T] integers.
        attention_mask: [B, T], 0 where there is padding, on any side; None for none.
        token_type_ids: [B, T], or None for type 0.
        position_ids: [B, T] or [1, T]; counted when left out.
        config: The model's, by which positions are counted; BERT's way, a token's column, without it.
        buckets: Sizes in tokens, of which the smallest that fits is taken, as of ``token_buckets(rows, length)``. None
            for no filling: each number of tokens is then a graph of its own.
        rows: Rows of every batch, where the last of an epoch has fewer; B when left out.
        length: Most tokens of a row of any batch; T when left out.

    Raises:
        TypeError, ValueError: If an input does not fit, a row has no token, or no size is large enough.
    """
    check_ids(input_ids, attention_mask, token_type_ids, position_ids)
    if config is not None:
        validate.in_range("input_ids", input_ids, config.vocab_size, "vocab_size")
    batch, tokens = input_ids.shape
    rows, length = batch if rows is None else rows, tokens if length is None else length
    if rows < batch or length < tokens:
        raise ValueError(f"input_ids is {batch} x {tokens}, but rows is {rows} and length {length}: both must hold it")
    if config is not None and length > config.positions:
        raise ValueError(f"length is {length}, but the model has {config.positions} positions")
    kept = torch.ones_like(input_ids, dtype=torch.bool) if attention_mask is None else attention_mask != 0
    lengths = kept.sum(1)
    if bool((lengths == 0).any()):
        empty = (lengths == 0).nonzero().flatten().tolist()
        raise ValueError(f"attention_mask: row(s) {empty[:8]} have no token; leave them out of the batch")
    real = int(lengths.sum())
    added = _added_rows(real, rows - batch, rows, length, buckets)

    first, columns = None, torch.arange(tokens, device=input_ids.device)[None]  # BERT's positions
    if position_ids is None:
        first = 0 if config is None else config.first_position
        position_ids = counted_positions(input_ids, first - 1) if first else columns
    row = torch.arange(batch, device=input_ids.device)[:, None]
    pad = 0 if config is None or config.pad_token_id is None else config.pad_token_id

    def packed(padded: Tensor, fill: int) -> Tensor:
        values = padded.expand(batch, tokens)[kept]
        return torch.cat([values, values.new_full((sum(added),), fill)])

    all_lengths = torch.cat([lengths, lengths.new_tensor(added)])
    return PackedBatch(
        input_ids=packed(input_ids, pad), position_ids=packed(position_ids, 0),
        token_type_ids=None if token_type_ids is None else packed(token_type_ids, 0),
        offsets=torch.cat([lengths.new_zeros(1), all_lengths.cumsum(0)]).int(),
        places=packed(row * length + columns, rows * length), rows=rows, length=length, first_position=first,
    )  # fmt: skip


def unpack(packed: _Packed, batch: PackedBatch, fill: float = 0) -> _Packed:
    """Put the padding back, as ``fill``: [N, ...] -> [B, T, ...], or the same for all tensors of a model's output."""
    if isinstance(packed, Tensor):
        padded = packed.new_full((batch.rows * batch.length + 1, *packed.shape[1:]), fill)
        return padded.index_copy(0, batch.places, packed)[:-1].unflatten(0, (batch.rows, batch.length))
    output: Any = packed
    per_token = [name for name in output._fields if name in ("last_hidden_state", "start_logits", "end_logits")]
    if isinstance(packed, TokenScores):
        per_token = ["logits"]
    return output._replace(**{name: unpack(getattr(output, name), batch, fill) for name in per_token})


def check_ids(
    input_ids: Tensor, attention_mask: Tensor | None, token_type_ids: Tensor | None, position_ids: Tensor | None
) -> None:
    """Padded ids [B, T], and what belongs to each of them."""
    validate.tensor("input_ids", input_ids, "B T", kinds="integer", empty=False)
    sizes = {"B": input_ids.shape[0], "T": input_ids.shape[1]}
    for name, value, shape in (
        ("attention_mask", attention_mask, "B T"),
        ("token_type_ids", token_type_ids, "B T"),
        ("position_ids", position_ids, "B T | 1 T"),
    ):
        if value is not None:
            validate.tensor(name, value, shape, like=input_ids, like_name="input_ids", sizes=sizes)


def counted_positions(input_ids: Tensor, padding_idx: int) -> Tensor:
    """RoBERTa's positions of a padded batch [B, T]: from ``padding_idx + 1`` over the tokens."""
    token = input_ids != padding_idx
    return token.cumsum(1) * token + padding_idx


def _added_rows(real: int, missing: int, rows: int, length: int, buckets: Sequence[int] | None) -> list[int]:
    """Lengths of the rows that fill a batch up: one token for each missing row, the rest spread evenly."""
    if buckets is None:
        return [1] * missing
    sizes = sorted(set(buckets))
    if not sizes or sizes[0] < 1:
        raise ValueError(f"buckets is {buckets!r}, expected sizes in tokens; token_buckets(rows, length) makes them")
    if length < 2:
        raise ValueError(f"length is {length}, but rows that fill a bucket up need at least 2 tokens to differ")
    filling = filling_rows(sizes, rows, length)
    needed = real + missing + filling
    size = next((size for size in sizes if size >= needed), None)
    if size is None:
        raise ValueError(
            f"the batch has {real} tokens and needs room for {missing + filling} of padding, but the largest bucket "
            f"holds {sizes[-1]}; token_buckets({rows}, {length}) holds every batch of this kind"
        )
    each, more = divmod(size - real - missing, filling)
    return [1] * missing + [each + (place < more) for place in range(filling)]
