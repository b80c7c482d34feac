"""A bidirectional encoder: BERT and RoBERTa, over padded or packed batches, with one of the usual heads.

    ids [B, T] ──────────────┐
    pack ─▶ ids [N], offsets ┴─ embeddings ─ layer ─ layer ─ ... ─ head ─▶ scores [B, T, ...] or [N, ...] ─ unpack
    mask or rows ───────────────────────────┴─ to every layer

The mask and the tables of a packed batch depend only on lengths. They are made outside the regions, once per call. All
layers share one graph, at any depth. Embeddings and small heads stay eager.

A packed batch concatenates the tokens of all rows, without padding. N is one of a few declared sizes, so that an epoch
of rows of any lengths compiles as many graphs as there are sizes. Filler rows fill the rest of the size. They attend
only to themselves and count in no loss.

Shape legend: B rows, T tokens of a row, N tokens of a packed batch, S rows with filler rows, C width, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from zoo import validate
from zoo.bert.layer import (
    BertConfig,
    BertEmbeddings,
    BertLayer,
    Encoding,
    MaskedLMHead,
    Output,
    PoolerHead,
    Rows,
    SequenceHead,
    SpanHead,
    TokenHead,
    TokenScores,
    check_labels,
    kernel_runs,
    key_mask,
    make_head,
    rows_of,
)
from zoo.engine.region import Region
from zoo.ops.common import is_unmodified
from zoo.ops.transformer import LEAST_ROWS
from zoo.weights import initialise

_Packed = TypeVar("_Packed", bound=Tensor | Output)
_BERT: dict[str, Any] = {
    "vocab_size": 30522, "max_position_embeddings": 512, "type_vocab_size": 2, "layer_norm_eps": 1e-12,
    "pad_token_id": 0,
}  # fmt: skip
_ROBERTA: dict[str, Any] = {
    "kind": "roberta", "vocab_size": 50265, "max_position_embeddings": 514, "type_vocab_size": 1,
    "layer_norm_eps": 1e-5, "pad_token_id": 1,
}  # fmt: skip


def _sized(common: dict[str, Any], layers: int, width: int, **options: Any) -> BertConfig:
    """A published size: heads of 64 and an MLP four times as wide."""
    return BertConfig(
        **common, **options, num_hidden_layers=layers, hidden_size=width, num_attention_heads=width // 64,
        intermediate_size=4 * width,
    )  # fmt: skip


PRESETS: dict[str, BertConfig] = {
    "bert-debug": BertConfig(
        **{**_BERT, "vocab_size": 128, "max_position_embeddings": 64}, num_hidden_layers=3, hidden_size=32,
        num_attention_heads=4, intermediate_size=48,
    ),
    # https://arxiv.org/abs/1908.08962
    "bert-tiny": _sized(_BERT, 2, 128),
    "bert-mini": _sized(_BERT, 4, 256),
    "bert-small": _sized(_BERT, 4, 512),
    "bert-medium": _sized(_BERT, 8, 512),
    # The width of base at half its depth, as in distilled models.
    "bert-base-6": _sized(_BERT, 6, 768),
    "bert-base": _sized(_BERT, 12, 768),
    "bert-large": _sized(_BERT, 24, 1024),
    "roberta-base": _sized(_ROBERTA, 12, 768),
    "roberta-large": _sized(_ROBERTA, 24, 1024),
}  # fmt: skip


# Embeddings and the other heads run once per call and take little time: compiling them would not pay off.
REGIONS = (
    Region(BertLayer, graphs=2, why="one graph for all layers, and one more for batches without a mask"),
    Region(MaskedLMHead, graphs=1, why="the widest product, and the loss over the whole vocabulary"),
)


class PackedBatch(NamedTuple):
    """A batch from ``pack``, which a model takes instead of padded ids."""

    input_ids: Tensor  # [N]
    position_ids: Tensor  # [N]
    token_type_ids: Tensor | None  # [N], or None for type 0
    offsets: Tensor  # [S + 1] int32, where each row begins, and the end of the last
    places: Tensor  # [N] int64, the index of each token in B x T; B * T for filler tokens
    rows: int  # B
    length: int  # T, the maximum length of rows
    first_position: int  # the model's, from which positions were counted

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> PackedBatch:
        """The batch on another device."""
        validate.check_device(device, "a batch")
        return pytree.tree_map_only(Tensor, lambda tensor: tensor.to(device, non_blocking=non_blocking), self)

    def take(self, padded: Tensor, fill: float = 0) -> Tensor:
        """Gather [B, T, ...] into [N, ...], with ``fill`` for filler tokens."""
        flat = padded.flatten(0, 1)
        return torch.cat([flat, flat.new_full((1, *flat.shape[1:]), fill)])[self.places]


def token_buckets(rows: int, length: int, *, steps: int = 8, typical: tuple[int, int] | None = None) -> tuple[int, ...]:
    """Sizes for batches of up to ``rows`` rows of up to ``length`` tokens: at most ``steps``, evenly spaced.

    A batch gets half a step of filler tokens on average. Each size is one graph for each region that sees it.
    ``typical``, the minimum and maximum tokens of a usual batch, is the range of all sizes except the largest. Raises
    ValueError if a number is not positive, ``length`` is 1, or ``typical`` is not a range of tokens.
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
    """Filler rows of a packed batch of these rising sizes, so that none is empty or longer than ``length``."""
    steps = (after - before for before, after in pairwise(buckets))
    return max(1, -(-(buckets[0] - rows) // length), *(-(-(step - 1) // (length - 1)) for step in steps))


def pack(
    input_ids: Tensor, attention_mask: Tensor | None = None, token_type_ids: Tensor | None = None, *,
    config: BertConfig | None = None, buckets: Sequence[int] | None = None, rows: int | None = None,
    length: int | None = None,
) -> PackedBatch:  # fmt: skip
    """Remove the padding of a batch. On GPU tensors this synchronises; pack on the host, then call ``.to(device)``.

    Args:
        input_ids: [B, T] integers.
        attention_mask: [B, T], 0 for padding, on any side; None for no padding.
        token_type_ids: [B, T], or None for type 0.
        config: The model's config, which determines how positions are counted; by default they are columns, as in BERT.
        buckets: Sizes in tokens, as from ``token_buckets(rows, length)``; a batch is padded to the smallest that fits.
            Without them each number of tokens needs its own graph.
        rows: Rows of every batch; the last batch of an epoch may have fewer. B by default.
        length: Maximum tokens of a row in any batch; T by default.

    Raises:
        TypeError, ValueError: If an input does not fit, a row has no token, or no size is large enough.
    """
    _check_ids(input_ids, attention_mask=attention_mask, token_type_ids=token_type_ids)
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
    if empty := (lengths == 0).nonzero().flatten().tolist():
        raise ValueError(f"attention_mask: row(s) {empty[:8]} have no token; leave them out of the batch")
    added = _added_rows(int(lengths.sum()), rows - batch, rows, length, buckets)

    columns = torch.arange(tokens, device=input_ids.device)[None]
    first = 0 if config is None else config.first_position
    position_ids = _counted_positions(input_ids, first - 1) if first else columns
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
    """Restore padding with ``fill``: [N, ...] -> [B, T, ...], for one tensor or all tensors of a model's output."""
    if isinstance(packed, Tensor):
        padded = packed.new_full((batch.rows * batch.length + 1, *packed.shape[1:]), fill)
        return padded.index_copy(0, batch.places, packed)[:-1].unflatten(0, (batch.rows, batch.length))
    output: Any = packed
    names = ("logits",) if isinstance(packed, TokenScores) else ("last_hidden_state", "start_logits", "end_logits")
    padded_fields = {name: unpack(getattr(output, name), batch, fill) for name in names if hasattr(output, name)}
    return output._replace(**padded_fields)


class Bert(nn.Module):
    """BERT or RoBERTa with the head that its ``BertConfig`` names."""

    regions: ClassVar[tuple[Region, ...]] = REGIONS

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.config = config
        self.head_width = config.hidden_size // config.num_attention_heads
        self.embeddings = BertEmbeddings(config)
        self.layers = nn.ModuleList(BertLayer(config) for _ in range(config.num_hidden_layers))
        self.head = make_head(config)
        self.apply(initialise)

    def forward(
        self, input_ids: Tensor | PackedBatch, attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None, position_ids: Tensor | None = None, *, labels: Tensor | None = None,
        start_positions: Tensor | None = None, end_positions: Tensor | None = None,
    ) -> Output:  # fmt: skip
        """Encode a batch, score it, and compare it with labels.

        Returns ``Encoding``, ``TokenScores``, ``SequenceScores`` or ``Spans``, by the head. Results per token are
        [B, T, ...], or [N, ...] for a packed batch. A host mask without padding is ignored. The host never reads a mask
        on a GPU. There, without gradients and labels, padding of large batches is skipped: its hidden states are zero.

        Args:
            input_ids: [B, T] integers, or a batch from ``pack``, which includes types and positions.
            attention_mask: [B, T], 0 for padding, on any side.
            token_type_ids: [B, T]; None for type 0.
            position_ids: [B, T] or [1, T]; None for 0 to T - 1, or RoBERTa's.
            labels: [B, T] for ``masked-lm`` and ``token-classification`` (also [N] with a packed batch), -100 for no
                label; [B], or [B, L] for several labels, for ``sequence-classification``.
            start_positions: [B], for ``question-answering``.
            end_positions: [B].

        Raises:
            TypeError, ValueError: If an input does not fit, before anything runs. Only values on the host are checked.
        """
        config, batch, mask, rows, back = self.config, None, None, None, None
        _check_inputs(config, input_ids, attention_mask, token_type_ids, position_ids)
        if isinstance(input_ids, PackedBatch):
            batch, tokens = input_ids, input_ids.input_ids.shape[0]
            check_labels(config, labels, start_positions, end_positions, batch.rows, batch.length, tokens)
            if labels is not None and config.head in ("masked-lm", "token-classification") and labels.dim() == 2:
                labels = batch.take(labels, fill=-100)
            x = self.embeddings(*map(_match_mode, (batch.input_ids, batch.token_type_ids, batch.position_ids)))
            rows = rows_of(batch.offsets, batch.length, tokens, x, self.head_width)
            rows = rows._replace(offsets=_match_mode(rows.offsets))
        else:
            count, length = input_ids.shape
            check_labels(config, labels, start_positions, end_positions, count, length, None)
            if position_ids is None and config.first_position:
                position_ids = _counted_positions(input_ids, config.first_position - 1)
            if attention_mask is not None and validate.on_host(attention_mask) and (attention_mask != 0).all():
                attention_mask = None
            x = self.embeddings(*map(_match_mode, (input_ids, token_type_ids, position_ids)))
            if attention_mask is not None and labels is None and start_positions is None and self._skips_padding(x):
                x, rows, back = self._without_padding(x, attention_mask)
            elif attention_mask is not None:
                mask = key_mask(attention_mask, x)
        for layer in self.layers:
            x = layer(x, mask, rows)
        if back is not None:
            real, place = back
            x = torch.where(real[..., None], x[place], 0.0)
        return self._score(x, labels, start_positions, end_positions, batch)

    def _skips_padding(self, x: Tensor) -> bool:
        """Whether the GPU skips the padding of this batch. Nothing may learn: what it leaves out is not initialised."""
        if x.numel() < LEAST_ROWS * x.shape[-1] or not kernel_runs(x, self.head_width):
            return False
        if torch.is_grad_enabled() and any(each.requires_grad for each in self.parameters()):
            return False
        # An answer is the highest score of a row: of zeros, padding would have the score of the bias.
        if isinstance(self.head, SpanHead):
            return False
        # A hook would see tokens where it expects rows.
        return all(is_unmodified(layer, BertLayer) for layer in self.layers)

    def _without_padding(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Rows, tuple[Tensor, Tensor]]:
        """X [B, T, C] -> [B T, C], its real tokens and then others, as many as the GPU alone knows; and their rows.

        Then which tokens of x are real, and where they are now, both [B, T].
        """
        count, length, _ = x.shape
        real = mask != 0
        ends = real.flatten().cumsum(0)
        tokens = torch.searchsorted(ends, torch.arange(1, count * length + 1, device=x.device))
        x = x.flatten(0, 1)[tokens.clamp(max=count * length - 1)]
        offsets = F.pad(ends.view(count, length)[:, -1], (1, 0)).int()
        rows = rows_of(offsets, length, count * length, x, self.head_width)
        return x, rows._replace(real=ends[-1:].int()), (real, (ends - 1).clamp(min=0).view(count, length))

    def _score(
        self, x: Tensor, labels: Tensor | None, start: Tensor | None, end: Tensor | None, batch: PackedBatch | None
    ) -> Output:
        labels, start, end = map(_match_mode, (labels, start, end))
        match self.head:
            case PoolerHead() as head:
                return Encoding(x, head(_first_tokens(x, batch)))
            case MaskedLMHead() as head:
                return head(x, self.embeddings.word_embeddings.weight, labels)  # tied weights exist once
            case SequenceHead() as head:
                return head(_first_tokens(x, batch), labels)
            case TokenHead() as head:
                return head(x, labels)
            case SpanHead() as head:
                packing = () if batch is None else (batch.rows, batch.length, _match_mode(batch.places))
                return head(x, start, end, *packing)
        return Encoding(x)


def _first_tokens(x: Tensor, batch: PackedBatch | None) -> Tensor:
    """First tokens [B, C], contiguous, so that padded and packed batches share the head's graph."""
    return x[:, 0].contiguous() if batch is None else x.index_select(0, batch.offsets[: batch.rows])


def _match_mode(ids: Tensor | None) -> Tensor | None:
    """Copy the tensor if its inference mode differs: a region would compile another graph for it."""
    if ids is None or torch.compiler.is_compiling() or ids.is_inference() == torch.is_inference_mode_enabled():
        return ids
    return ids.clone()


def _check_ids(input_ids: Tensor, **others: Tensor | None) -> None:
    validate.tensor("input_ids", input_ids, "B T", kinds="integer", empty=False)
    sizes = {"B": input_ids.shape[0], "T": input_ids.shape[1]}
    for name, value in others.items():
        if value is not None:
            shape = "B T | 1 T" if name == "position_ids" else "B T"
            validate.tensor(name, value, shape, like=input_ids, like_name="input_ids", sizes=sizes)


def _counted_positions(input_ids: Tensor, padding_idx: int) -> Tensor:
    """RoBERTa's positions of a padded batch [B, T]: tokens count from ``padding_idx + 1``."""
    token = input_ids != padding_idx
    return token.cumsum(1) * token + padding_idx


def _added_rows(real: int, missing: int, rows: int, length: int, buckets: Sequence[int] | None) -> list[int]:
    """Lengths of filler rows: one token for each missing row, the remaining tokens spread evenly over further rows."""
    if buckets is None:
        return [1] * missing
    sizes = sorted(set(buckets))
    if not sizes or sizes[0] < 1 or length < 2:
        raise ValueError(
            f"buckets is {buckets!r} and length {length}, expected sizes in tokens and rows of at least 2; "
            "token_buckets(rows, length) makes them"
        )
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


def _check_inputs(
    config: BertConfig, input_ids: Tensor | PackedBatch, attention_mask: Tensor | None, token_type_ids: Tensor | None,
    position_ids: Tensor | None,
) -> None:  # fmt: skip
    if isinstance(input_ids, PackedBatch):
        batch = input_ids
        if any(each is not None for each in (attention_mask, token_type_ids, position_ids)):
            raise ValueError("a packed batch holds its own mask, token types and positions: pass them to pack()")
        if batch.length > config.positions:
            raise ValueError(f"the batch has rows of {batch.length} tokens, but the model {config.positions} positions")
        if batch.first_position != config.first_position:
            raise ValueError(f"the batch counts positions from {batch.first_position}: pack with config=model.config")
        input_ids, token_type_ids, position_ids = batch.input_ids, batch.token_type_ids, batch.position_ids
    else:
        given = {"attention_mask": attention_mask, "token_type_ids": token_type_ids, "position_ids": position_ids}
        _check_ids(input_ids, **given)
        if position_ids is None and (tokens := input_ids.shape[1]) > config.positions:
            raise ValueError(f"input_ids has {tokens} tokens, but the model has {config.positions} positions")
    validate.in_range("input_ids", input_ids, config.vocab_size, "vocab_size")
    if token_type_ids is not None:
        validate.in_range("token_type_ids", token_type_ids, config.type_vocab_size, "type_vocab_size")
    if position_ids is not None:
        validate.in_range("position_ids", position_ids, config.max_position_embeddings, "max_position_embeddings")


def example_inputs(model: Bert, *, batch: int = 2, tokens: int = 16, seed: int = 0) -> dict[str, Tensor]:
    """Ids, mask and token types of two segments, [batch, tokens] each; the same on every device.

    Row lengths are between half of ``tokens`` and ``tokens``. The last row is not full; the first of several is.
    """
    config = model.config
    if batch < 1 or not 1 <= tokens <= config.positions:
        raise ValueError(f"batch is {batch}, tokens {tokens}: expected 1 or more, at most {config.positions} tokens")
    generator = validate.seeded(seed)
    column = torch.arange(tokens, device="cpu")
    lengths = torch.randint((tokens + 1) // 2, tokens + 1, (batch, 1), generator=generator, device="cpu")
    lengths[-1:] = lengths[-1:].clamp(max=max(1, tokens - 1))
    if batch > 1:
        lengths[0] = tokens
    mask = (column < lengths).long()
    ids = torch.randint(config.vocab_size, (batch, tokens), generator=generator, device="cpu")
    if (pad := config.pad_token_id) is not None:
        ids = torch.where(ids == pad, (pad + 1) % config.vocab_size, ids)
        ids = torch.where(mask == 1, ids, pad)
    types = ((column >= lengths // 2) & (mask == 1)).long().clamp(max=config.type_vocab_size - 1)
    device = model.embeddings.word_embeddings.weight.device
    inputs = {"input_ids": ids, "attention_mask": mask, "token_type_ids": types}
    return {name: tensor.to(device) for name, tensor in inputs.items()}
