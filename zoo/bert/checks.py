"""What can be known to be wrong before anything runs. Values are read on the host only: no device is waited for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from zoo.bert.config import BertConfig
from zoo.modules import bounds_outside, on_host

if TYPE_CHECKING:
    from zoo.bert.packing import PackedBatch

_INTEGERS = (torch.int64, torch.int32)


def check_ids(input_ids: Tensor, config: BertConfig | None) -> None:
    """Padded ids [B, T]; their range where the config is known and they are on the host."""
    if not isinstance(input_ids, Tensor):
        raise TypeError(f"input_ids is a {type(input_ids).__name__}, expected a tensor [rows, tokens]")
    if input_ids.dim() != 2 or not input_ids.numel():
        raise ValueError(f"input_ids has shape {list(input_ids.shape)}, expected [rows, tokens], neither empty")
    if config is not None:
        check_range("input_ids", input_ids, config.vocab_size, "vocab_size")
    elif input_ids.dtype not in _INTEGERS:
        raise TypeError(f"input_ids is {input_ids.dtype}, expected int64 or int32")


def check_range(name: str, ids: Tensor, limit: int, field: str) -> None:
    """Integers from 0 to below ``limit``."""
    if ids.dtype not in _INTEGERS:
        raise TypeError(f"{name} is {ids.dtype}, expected int64 or int32")
    if on_host(ids) and (bounds := bounds_outside(ids, limit)) is not None:
        low, high = bounds
        raise ValueError(f"{name} has values from {low} to {high}, but {field} is {limit}: 0 to {limit - 1}")


def check_mask(name: str, given: Tensor, input_ids: Tensor) -> None:
    """A tensor like the ids."""
    if not isinstance(given, Tensor) or given.shape != input_ids.shape:
        what = list(given.shape) if isinstance(given, Tensor) else type(given).__name__
        raise ValueError(f"{name} is {what}, expected a tensor like input_ids, {list(input_ids.shape)}")
    if given.device != input_ids.device:
        raise ValueError(f"{name} is on {given.device}, but input_ids on {input_ids.device}")


def check_padded(
    config: BertConfig,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    token_type_ids: Tensor | None,
    position_ids: Tensor | None,
) -> None:
    """The inputs of a padded batch."""
    check_ids(input_ids, config)
    batch, tokens = input_ids.shape
    if position_ids is None and tokens > config.positions:
        raise ValueError(f"input_ids has {tokens} tokens, but the model has {config.positions} positions")
    if attention_mask is not None:
        check_mask("attention_mask", attention_mask, input_ids)
    if token_type_ids is not None:
        check_mask("token_type_ids", token_type_ids, input_ids)
        check_range("token_type_ids", token_type_ids, config.type_vocab_size, "type_vocab_size")
    if position_ids is not None:
        if position_ids.dim() != 2 or position_ids.shape[1] != tokens or position_ids.shape[0] not in (1, batch):
            raise ValueError(
                f"position_ids has shape {list(position_ids.shape)}, expected {[batch, tokens]} or {[1, tokens]}"
            )
        check_range("position_ids", position_ids, config.max_position_embeddings, "max_position_embeddings")


def check_packed(config: BertConfig, batch: PackedBatch, **given: Tensor | None) -> None:
    """A batch of ``pack``, and nothing beside it that it holds itself."""
    twice = [name for name, value in given.items() if value is not None]
    if twice:
        raise ValueError(f"{', '.join(twice)} given beside a packed batch, which holds its own: pass them to pack()")
    if batch.length > config.positions:
        raise ValueError(
            f"the batch has rows of up to {batch.length} tokens, but the model {config.positions} positions"
        )
    if batch.first_position not in (None, config.first_position):
        raise ValueError(
            f"the batch counts positions from {batch.first_position}, the model from {config.first_position}: pack "
            "with config=model.config"
        )
    check_range("input_ids", batch.input_ids, config.vocab_size, "vocab_size")
    check_range("position_ids", batch.position_ids, config.max_position_embeddings, "max_position_embeddings")
    if batch.token_type_ids is not None:
        check_range("token_type_ids", batch.token_type_ids, config.type_vocab_size, "type_vocab_size")


def check_labels(
    config: BertConfig,
    labels: Tensor | None,
    start_positions: Tensor | None,
    end_positions: Tensor | None,
    rows: int,
    length: int,
    tokens: int | None,
) -> None:
    """Labels that the head takes, in a shape that it takes. ``tokens`` is N of a packed batch."""
    head = config.head
    spans = start_positions is not None or end_positions is not None
    if spans and head != "question-answering":
        raise ValueError(f"start_positions and end_positions are for head 'question-answering', and this is {head!r}")
    if (start_positions is None) != (end_positions is None):
        raise ValueError("start_positions and end_positions go together, and one of them is missing")
    for name, value in (("start_positions", start_positions), ("end_positions", end_positions)):
        if value is not None and value.shape not in ((rows,), (rows, 1)):
            raise ValueError(f"{name} has shape {list(value.shape)}, expected {[rows]}")
    if labels is None:
        return
    shapes: tuple[tuple[int, ...], ...]
    if head in ("masked-lm", "token-classification"):
        shapes = ((rows, length), *([(tokens,)] if tokens is not None else []))
    elif head == "sequence-classification":
        whole = config.num_labels > 1 and labels.dtype in _INTEGERS
        single = config.problem_type == "single_label_classification" or (config.problem_type is None and whole)
        shapes = ((rows,), (rows, 1)) if single or config.num_labels == 1 else ((rows, config.num_labels),)
    else:
        hint = "; pass start_positions and end_positions" if head == "question-answering" else ""
        raise ValueError(f"labels given, but head {head!r} takes none{hint}")
    if tuple(labels.shape) not in shapes:
        raise ValueError(
            f"labels has shape {list(labels.shape)} and dtype {labels.dtype}, expected shape "
            f"{' or '.join(str(list(shape)) for shape in shapes)}"
        )
    if head != "sequence-classification" or shapes[0] == (rows,):
        _check_classes(config, labels)


def _check_classes(config: BertConfig, labels: Tensor) -> None:
    classes = config.vocab_size if config.head == "masked-lm" else config.num_labels
    if config.head == "sequence-classification" and (classes == 1 or config.problem_type == "regression"):
        return
    if labels.dtype not in _INTEGERS:
        raise TypeError(f"labels is {labels.dtype}, expected int64 or int32 class numbers")
    if on_host(labels):
        wrong = labels[(labels != -100) & ((labels < 0) | (labels >= classes))]
        if wrong.numel():
            raise ValueError(
                f"labels has {int(wrong[0])}, but there are {classes} classes; -100 says that none is meant"
            )
