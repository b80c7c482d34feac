"""A bidirectional encoder: BERT and RoBERTa, over padded or packed batches, with one of the usual heads.

    ids [B, T] ──────────────┐
    pack ─▶ ids [N], offsets ┴─ embeddings ─ layer ─ layer ─ ... ─ head ─▶ scores, loss
    mask or rows ───────────────────────────┴─ to every layer

The mask and the tables of a packed batch, which depend on lengths alone, are made outside the regions, once per call.
All layers share one graph, at any depth. Embeddings and small heads stay eager.

Shape legend: B rows, T tokens of a row, N tokens of a packed batch, C width, V vocabulary.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from zoo import validate
from zoo.bert.layer import (
    BertConfig,
    BertEmbeddings,
    BertLayer,
    Encoding,
    MaskedLMHead,
    Output,
    PoolerHead,
    SequenceHead,
    SpanHead,
    TokenHead,
    check_labels,
    key_mask,
    make_head,
    rows_of,
)
from zoo.bert.packing import PackedBatch, check_ids, counted_positions, pack, unpack
from zoo.engine.region import Region
from zoo.weights import initialise

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
    # The base's width at half its depth, as distilled models have it.
    "bert-base-6": _sized(_BERT, 6, 768),
    "bert-base": _sized(_BERT, 12, 768),
    "bert-large": _sized(_BERT, 24, 1024),
    "roberta-base": _sized(_ROBERTA, 12, 768),
    "roberta-large": _sized(_ROBERTA, 24, 1024),
}  # fmt: skip


# Embeddings and the other heads run once per call and take little of its time: compiling them would not pay off.
REGIONS = (
    Region(BertLayer, graphs=2, why="one graph for all layers, and one more for batches without a mask"),
    Region(MaskedLMHead, graphs=1, why="the widest product, and the loss over the whole vocabulary"),
)


class Bert(nn.Module):
    """BERT or RoBERTa with the head that its ``BertConfig`` names."""

    regions: ClassVar[tuple[Region, ...]] = REGIONS

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.config = config
        self.embeddings = BertEmbeddings(config)
        self.layers = nn.ModuleList(BertLayer(config) for _ in range(config.num_hidden_layers))
        self.head = make_head(config)
        # Tied weights exist once: forward passes the word table to the head.
        untied = config.head == "masked-lm" and not config.tie_word_embeddings
        self.decoder = nn.Linear(config.hidden_size, config.vocab_size, bias=False) if untied else None
        self.apply(initialise)

    def forward(
        self, input_ids: Tensor | PackedBatch, attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None, position_ids: Tensor | None = None, *, labels: Tensor | None = None,
        start_positions: Tensor | None = None, end_positions: Tensor | None = None,
    ) -> Output:  # fmt: skip
        """Encode a batch, score it, and compare it with labels.

        Returns ``Encoding``, ``TokenScores``, ``SequenceScores`` or ``Spans``, by the head. What belongs to tokens is
        [B, T, ...], or [N, ...] for a packed batch. A mask on the host that hides nothing counts as none; one on a
        device is never looked at: leave it out where all rows are full.

        Args:
            input_ids: [B, T] integers, or a batch of ``pack``, which brings its own types and positions.
            attention_mask: [B, T], 0 where there is padding, on any side.
            token_type_ids: [B, T]; None for type 0.
            position_ids: [B, T] or [1, T]; None for 0 to T - 1, or RoBERTa's.
            labels: [B, T] for ``masked-lm`` and ``token-classification`` (also [N] with a packed batch), -100 where
                there is none; [B], or [B, L] for several labels, for ``sequence-classification``.
            start_positions: [B], for ``question-answering``.
            end_positions: [B].

        Raises:
            TypeError, ValueError: If an input does not fit, before anything runs. Values are looked at on the host.
        """
        config, batch, mask, rows = self.config, None, None, None
        _check_inputs(config, input_ids, attention_mask, token_type_ids, position_ids)
        if isinstance(input_ids, PackedBatch):
            batch, tokens = input_ids, input_ids.input_ids.shape[0]
            check_labels(config, labels, start_positions, end_positions, batch.rows, batch.length, tokens)
            if labels is not None and config.head in ("masked-lm", "token-classification") and labels.dim() == 2:
                labels = batch.take(labels, fill=-100)
            x = self.embeddings(*map(_match_mode, (batch.input_ids, batch.token_type_ids, batch.position_ids)))
            rows = rows_of(batch.offsets, batch.length, tokens, x, config.hidden_size // config.num_attention_heads)
            rows = rows._replace(offsets=_match_mode(rows.offsets))
        else:
            count, length = input_ids.shape
            check_labels(config, labels, start_positions, end_positions, count, length, None)
            if position_ids is None and config.first_position:
                position_ids = counted_positions(input_ids, config.first_position - 1)
            x = self.embeddings(*map(_match_mode, (input_ids, token_type_ids, position_ids)))
            if attention_mask is not None and not (validate.on_host(attention_mask) and (attention_mask != 0).all()):
                mask = key_mask(attention_mask, x)
        for layer in self.layers:
            x = layer(x, mask, rows)
        return self._score(x, labels, start_positions, end_positions, batch)

    def without_padding(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None, *, buckets: Sequence[int] | None = None, **labels: Tensor | None,
    ) -> Output:  # fmt: skip
        """Like a call on the padded batch [B, T], with the padding taken out before and put back, as zeros, after.

        Waits for a device. Takes ``buckets`` as ``pack`` does, and labels as a call does.
        """
        batch = pack(input_ids, attention_mask, token_type_ids, position_ids, config=self.config, buckets=buckets)
        output: Output = self(batch, **labels)
        return unpack(output, batch)

    def _score(
        self, x: Tensor, labels: Tensor | None, start: Tensor | None, end: Tensor | None, batch: PackedBatch | None
    ) -> Output:
        head, labels = self.head, _match_mode(labels)
        match head:
            case PoolerHead():
                return Encoding(x, head(_first_tokens(x, batch)))
            case MaskedLMHead():
                weight = self.embeddings.word_embeddings.weight if self.decoder is None else self.decoder.weight
                return head(x, weight, labels)
            case SequenceHead():
                return head(_first_tokens(x, batch), labels)
            case TokenHead():
                return head(x, labels)
            case SpanHead():
                start, end = _match_mode(start), _match_mode(end)
                if batch is None:
                    return head(x, start, end)
                return head(x, start, end, batch.rows, batch.length, _match_mode(batch.places))
        return Encoding(x)


def _first_tokens(x: Tensor, batch: PackedBatch | None) -> Tensor:
    """[B, C], contiguous, so that padded and packed batches share the head's graph."""
    return x[:, 0].contiguous() if batch is None else x.index_select(0, batch.offsets[: batch.rows])


def _match_mode(ids: Tensor | None) -> Tensor | None:
    """A copy if the tensor was made in another inference mode: a region would compile another graph for it."""
    if ids is None or torch.compiler.is_compiling() or ids.is_inference() == torch.is_inference_mode_enabled():
        return ids
    return ids.clone()


def _check_inputs(
    config: BertConfig, input_ids: Tensor | PackedBatch, attention_mask: Tensor | None, token_type_ids: Tensor | None,
    position_ids: Tensor | None,
) -> None:  # fmt: skip
    if isinstance(input_ids, PackedBatch):
        batch = input_ids
        own = {"attention_mask": attention_mask, "token_type_ids": token_type_ids, "position_ids": position_ids}
        if twice := [name for name, value in own.items() if value is not None]:
            raise ValueError(f"{', '.join(twice)} given with a packed batch, which holds its own: pass them to pack()")
        if batch.length > config.positions:
            raise ValueError(f"the batch has rows of {batch.length} tokens, but the model {config.positions} positions")
        if batch.first_position not in (None, config.first_position):
            raise ValueError(f"the batch counts positions from {batch.first_position}: pack with config=model.config")
        input_ids, token_type_ids, position_ids = batch.input_ids, batch.token_type_ids, batch.position_ids
    else:
        check_ids(input_ids, attention_mask, token_type_ids, position_ids)
        if position_ids is None and (tokens := input_ids.shape[1]) > config.positions:
            raise ValueError(f"input_ids has {tokens} tokens, but the model has {config.positions} positions")
    validate.in_range("input_ids", input_ids, config.vocab_size, "vocab_size")
    if token_type_ids is not None:
        validate.in_range("token_type_ids", token_type_ids, config.type_vocab_size, "type_vocab_size")
    if position_ids is not None:
        validate.in_range("position_ids", position_ids, config.max_position_embeddings, "max_position_embeddings")


def example_inputs(model: Bert, *, batch: int = 2, tokens: int = 16, seed: int = 0) -> dict[str, Tensor]:
    """Ids, mask and token types of two segments, [batch, tokens] each; the same on every device.

    Rows end between half of ``tokens`` and all of it, the last before it; of several the first is full.
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
