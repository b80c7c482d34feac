"""Labelled texts for fine-tuning: batches of one shape, or an epoch whose texts have lengths of their own.

Legend: B rows, T tokens, K labels.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from zoo.bert import BertConfig

LABELS = 4
# Every label has a few words of its own, and so much of each of its texts consists of them.
WORDS, SHARE = 8, 0.25
# Lengths are log-normal, as those of texts roughly are, with this median (of the longest that is allowed) and spread:
# padded to the longest of its batch, less than half of a batch is text.
MEDIAN, SPREAD = 0.25, 0.5

_INPUT = re.compile(r"(?P<epoch>epoch-)?(?P<static>static-)?(?P<rows>\d+)x(?P<length>\d+)")


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is trained on.

    Args:
        rows: B.
        length: T, of every row, or the most that a row of an epoch has.
        epoch: Whether lengths differ.
        static: Whether upstream's compiled arms get a graph for each length, and none for lengths in general.
    """

    rows: int
    length: int
    epoch: bool = False
    static: bool = False


def task(name: str) -> Task | None:
    """The task called ``BxT``, ``epoch-BxT`` or ``epoch-static-BxT``; None if the name is another's."""
    found = _INPUT.fullmatch(name)
    if found is None or (found["static"] and not found["epoch"]):
        return None
    rows, length = int(found["rows"]), int(found["length"])
    if rows < 1 or length < 2:
        return None
    return Task(rows=rows, length=length, epoch=found["epoch"] is not None, static=found["static"] is not None)


class Texts(NamedTuple):
    """A batch on the host: ids and mask [B, T], padded on the right to the longest row; labels [B]."""

    input_ids: Tensor
    attention_mask: Tensor
    labels: Tensor

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row."""
        return self.attention_mask.sum(1).tolist()


def draw(config: BertConfig, task: Task, *, seed: int, longest: bool = False) -> Texts:
    """A batch of texts, each of a few words of its label among others.

    Args:
        config: The model's vocabulary and padding.
        task: What rows are like.
        seed: Of all that is drawn.
        longest: Let one row of an epoch's batch have all the tokens that it may, so that the shape is known.
    """
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.full((task.rows,), task.length)
    if task.epoch:
        lengths = _lengths(task, generator)
        if longest:
            lengths[0] = task.length
    return draw_rows(config, lengths, generator)


def draw_rows(config: BertConfig, lengths: Tensor, generator: torch.Generator) -> Texts:
    """Texts of these lengths [B]."""
    rows, longest = len(lengths), int(lengths.max())
    pad = config.pad_token_id
    first = 0 if pad is None else pad + 1
    labels = torch.randint(LABELS, (rows,), generator=generator)
    ids = torch.randint(first, config.vocab_size, (rows, longest), generator=generator)
    words = first + labels[:, None] * WORDS + torch.randint(WORDS, (rows, longest), generator=generator)
    ids = torch.where(torch.rand(rows, longest, generator=generator) < SHARE, words, ids)
    mask = torch.arange(longest) < lengths[:, None]
    return Texts(torch.where(mask, ids, 0 if pad is None else pad), mask.long(), labels)


def _lengths(task: Task, generator: torch.Generator) -> Tensor:
    normal = torch.randn(task.rows, generator=generator)
    return (task.length * MEDIAN * (SPREAD * normal).exp()).round().clamp(2, task.length).long()
