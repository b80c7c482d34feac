"""Texts as an implementation is given them: packed into declared sizes, or padded; and an epoch of them.

Shapes: B rows, T tokens, N tokens of a packed batch.
"""

from __future__ import annotations

import time
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.families import bert_texts
from benchmarks.families.bert_texts import Task, Texts
from zoo.bert import BertConfig, pack, token_buckets
from zoo.bert.packing import filling_rows

# Batches of an epoch, and how many of them are a round, which every arm runs: rounds go through the epoch in order.
EPOCH, ROUND = {"cuda": 1000, "cpu": 20}, {"cuda": 25, "cpu": 2}
# Sizes that packed batches are filled up to: most are spaced over the epoch's own numbers of tokens.
BUCKETS = 6


class Batches:
    """Batches of one implementation.

    Args:
        impl: ``zoo`` packs, ``upstream`` pads to the longest row of a batch, ``upstream-tuned`` to the longest of all
            and hands the mask over as attention takes it.
        config: The model's.
        task: What is trained on; rows of one length need neither.
        device: Where batches go.
        seed: Of the texts.
    """

    def __init__(self, impl: str, config: BertConfig, task: Task, device: torch.device, *, seed: int) -> None:
        self.impl, self.config, self.task, self.device, self.seed = impl, config, task, device, seed
        count = EPOCH[device.type] if task.epoch else 1
        self.texts = [bert_texts.draw(config, task, seed=self.seed_of(index)) for index in range(count)]
        self.buckets: tuple[int, ...] = ()
        if task.epoch:
            tokens = [sum(text.lengths) for text in self.texts]
            self.buckets = token_buckets(task.rows, task.length, steps=BUCKETS, typical=(min(tokens), max(tokens)))

    def seed_of(self, index: int) -> int:
        """Of one batch; those below zero are not of the epoch."""
        return (self.seed << 20) + (1 << 16) + index

    def checked(self, index: int) -> dict[str, Any]:
        """The batch of a step that is checked; of an epoch none of its own, and padded as far as any."""
        return self.to_device(
            self.arrange(bert_texts.draw(self.config, self.task, seed=self.seed_of(-1 - index), longest=True))
        )

    def arrange(self, texts: Texts) -> dict[str, Any]:
        """What the loss is called with, still on the host."""
        ids, mask, labels = texts
        if not self.task.epoch:
            return {"input_ids": ids, "labels": labels}
        rows, length = self.task.rows, self.task.length
        if self.impl == "zoo":
            packed = pack(ids, mask, config=self.config, buckets=self.buckets, rows=rows, length=length)
            return {"input_ids": packed, "labels": labels}
        if self.impl == "upstream-tuned":
            more = (0, length - ids.shape[1])
            pad = self.config.pad_token_id or 0
            ids = F.pad(ids, more, value=pad)
            mask = F.pad(mask, more).bool()[:, None, None]
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}

    def to_device(self, batch: dict[str, Any]) -> dict[str, Any]:
        """The same on the device."""
        return {name: value.to(self.device) for name, value in batch.items()}

    def shapes(self) -> tuple[dict[str, Any], ...]:
        """A packed batch of each bucket, the largest first; nothing for those that are padded."""
        if self.impl != "zoo":
            return ()
        rows, length = self.task.rows, self.task.length
        filling = filling_rows(self.buckets, rows, length)
        found = []
        for size in reversed(self.buckets):
            each, more = divmod(min(size - filling, rows * length), rows)
            lengths = each + (torch.arange(rows) < more).long()
            texts = bert_texts.draw_rows(self.config, lengths, torch.Generator().manual_seed(self.seed))
            found.append(self.to_device(self.arrange(texts)))
        return tuple(found)

    @cached_property
    def epoch(self) -> list[dict[str, Any]]:
        """All batches of the epoch in order, on the device."""
        began = time.perf_counter()
        ready = [self.arrange(texts) for texts in self.texts]
        self.seconds = time.perf_counter() - began
        return [self.to_device(batch) for batch in ready]

    def preparation(self) -> dict[str, float]:
        """Seconds of what a loader would do for the zoo beside padding."""
        return {"packing an epoch on the host": self.seconds} if self.task.epoch and self.impl == "zoo" else {}

    @property
    def lengths(self) -> list[list[int]]:
        """Tokens of every row of every batch."""
        return [texts.lengths for texts in self.texts]

    def sizes(self) -> dict[str, int]:
        """What a reader needs to know; of an epoch the means of its batches."""
        count = len(self.texts)
        found = {
            "batch": self.task.rows,
            "length": self.task.length,
            "tokens": sum(map(sum, self.lengths)) // count,
        }
        if self.task.epoch:
            found |= {"batches": count, "padded_tokens": sum(texts.input_ids.numel() for texts in self.texts) // count}
        if self.task.epoch and self.impl == "zoo":
            found["packed_tokens"] = sum(batch["input_ids"].input_ids.numel() for batch in self.epoch) // count
        return found
