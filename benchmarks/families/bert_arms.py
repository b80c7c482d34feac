"""Inputs of BERT, transformers' arms, and an encoder's FLOPs and bytes.

Legend: B rows, T tokens of the longest, N tokens of all, C width, K labels.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.families.base import parameters_of
from zoo.bert import Bert, BertConfig, PackedBatch, pack, token_buckets
from zoo.bert.convert import reset_buffers, skeleton
from zoo.bert.model import filling_rows

BYTES_FORMULA = (
    "Every weight of the layers and the pooler is read once, of the word table the rows of the tokens, of the position "
    "table as many rows as the longest text has tokens; ids are read, and what is returned is written. Padding counts "
    "for nothing. Activations are taken to stay in the caches of the chip."
)
TRAINING_BYTES_FORMULA = (
    "Weights of the layers are read in the forward and again for gradients by inputs, in the dtype of autocast. And 32 "
    "bytes for every weight of all: its gradient is written, and the optimizer reads weight, gradient and two moments "
    "and writes three. Left out, so that it is a lower bound: activations."
)
# Rows that the reference takes at once, since it materialises scores.
REFERENCE_ROWS = 16
_INPUT = re.compile(r"(?:(?P<kind>skewed|masked|epoch|epoch-static)-)?(?P<batch>\d+)x(?P<length>\d+)")
# Text lengths are roughly log-normal. With this median (relative to the maximum) and spread, texts fill about half of a
# skewed batch and less of an epoch's batches, after truncation as by a tokenizer.
_SKEWED, _EPOCH = (0.42, 0.75), (0.25, 0.5)
LABELS = 4
# Number of words specific to a label, and their share of each of the label's texts.
WORDS, SHARE = 8, 0.25
# Batches of an epoch, and batches of a round. Every arm runs the rounds in the order of the epoch.
EPOCH, ROUND = {"cuda": 1000, "cpu": 20}, {"cuda": 25, "cpu": 2}
# Number of sizes of packed batches. Most sizes are spaced over the range of the epoch's numbers of tokens.
BUCKETS = 6


@dataclass(frozen=True, kw_only=True)
class Task:
    """The input of one call or step: ``batch`` rows of ``length`` tokens, or of at most ``length`` tokens.

    ``kind``: none, all rows are full; ``skewed`` and ``masked``, most rows are much shorter; ``epoch``, batches of any
    lengths; ``epoch-static``, the same with one graph per length in upstream's compiled arms.
    """

    batch: int
    length: int
    kind: str | None = None

    @property
    def skewed(self) -> bool:
        return self.kind in ("skewed", "masked")

    @property
    def epoch(self) -> bool:
        return self.kind in ("epoch", "epoch-static")

    def lengths(self) -> tuple[int, ...]:
        """Tokens of each row, ascending: evenly spaced quantiles, so that every seed has equal work."""
        if not self.skewed:
            return (self.length,) * self.batch
        quantiles = (torch.arange(self.batch, dtype=torch.float64) + 0.5) / self.batch
        return tuple(self.log_normal(math.sqrt(2) * torch.erfinv(2 * quantiles - 1), *_SKEWED).tolist())

    def log_normal(self, normal: Tensor, median: float, spread: float) -> Tensor:
        return (self.length * median * (spread * normal).exp()).round().clamp(2, self.length).long()

    @property
    def tokens(self) -> int:
        return sum(self.lengths())


def task(name: str) -> Task:
    """The task called ``BxT``, ``skewed-BxT``, ``masked-BxT``, ``epoch-BxT`` or ``epoch-static-BxT``."""
    found = _INPUT.fullmatch(name)
    assert found is not None, name
    return Task(batch=int(found["batch"]), length=int(found["length"]), kind=found["kind"])


def draw_inputs(config: BertConfig, task: Task, *, seed: int) -> tuple[Tensor, Tensor]:
    """Ids and mask [B, T] on the CPU; ids uniformly drawn, rows in random order, padded on the right."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(task.batch, generator=generator)
    mask = torch.arange(task.length) < torch.tensor(task.lengths())[order][:, None]
    pad = 0 if config.pad_token_id is None else config.pad_token_id
    ids = torch.randint(pad + 1, config.vocab_size, mask.shape, generator=generator)
    return torch.where(mask, ids, pad), mask.long()


# --- training: texts with labels, and batches of them ---


class Texts(NamedTuple):
    """A batch on the host: ids and mask [B, T], padded on the right to the longest row; labels [B]."""

    input_ids: Tensor
    attention_mask: Tensor
    labels: Tensor

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row."""
        return self.attention_mask.sum(1).tolist()


def draw_texts(config: BertConfig, task: Task, *, seed: int, longest: bool = False) -> Texts:
    """A batch of texts, each of a few words of its label among others; with ``longest`` one has all its tokens."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.full((task.batch,), task.length)
    if task.epoch:
        lengths = task.log_normal(torch.randn(task.batch, generator=generator), *_EPOCH)
        if longest:
            lengths[0] = task.length
    return draw_rows(config, lengths, generator)


def draw_rows(config: BertConfig, lengths: Tensor, generator: torch.Generator) -> Texts:
    rows, longest = len(lengths), int(lengths.max())
    pad = config.pad_token_id
    first = 0 if pad is None else pad + 1
    labels = torch.randint(LABELS, (rows,), generator=generator)
    ids = torch.randint(first, config.vocab_size, (rows, longest), generator=generator)
    words = first + labels[:, None] * WORDS + torch.randint(WORDS, (rows, longest), generator=generator)
    ids = torch.where(torch.rand(rows, longest, generator=generator) < SHARE, words, ids)
    mask = torch.arange(longest) < lengths[:, None]
    return Texts(torch.where(mask, ids, 0 if pad is None else pad), mask.long(), labels)


class Batches:
    """Batches of training: ``zoo`` packs them, ``upstream`` pads to the longest row of a batch.

    ``upstream-tuned`` pads to the longest of all and hands the mask over as attention takes it. Rows of one length need
    none of it.
    """

    def __init__(self, impl: str, config: BertConfig, task: Task, device: torch.device, *, seed: int) -> None:
        self.impl, self.config, self.task, self.device, self.seed = impl, config, task, device, seed
        count = EPOCH[device.type] if task.epoch else 1
        self.texts = [draw_texts(config, task, seed=self.seed_of(index)) for index in range(count)]
        self.buckets: tuple[int, ...] = ()
        if task.epoch:
            tokens = [sum(text.lengths) for text in self.texts]
            self.buckets = token_buckets(task.batch, task.length, steps=BUCKETS, typical=(min(tokens), max(tokens)))

    def seed_of(self, index: int) -> int:
        """The seed of one batch. Negative indices are outside the epoch."""
        return (self.seed << 20) + (1 << 16) + index

    def checked(self, index: int) -> dict[str, Any]:
        """The batch of a checked step. It is not one of the epoch's batches, and has maximum padding."""
        texts = draw_texts(self.config, self.task, seed=self.seed_of(-1 - index), longest=True)
        return self.to_device(self.arrange(texts))

    def arrange(self, texts: Texts) -> dict[str, Any]:
        """The loss's input batch, still on the host."""
        ids, mask, labels = texts
        if not self.task.epoch:
            return {"input_ids": ids, "labels": labels}
        rows, length = self.task.batch, self.task.length
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
        return {name: value.to(self.device) for name, value in batch.items()}

    def shapes(self) -> tuple[dict[str, Any], ...]:
        """One packed batch per bucket, the largest first; empty for padded batches."""
        if self.impl != "zoo":
            return ()
        rows, length = self.task.batch, self.task.length
        filling = filling_rows(self.buckets, rows, length)
        found = []
        for size in reversed(self.buckets):
            each, more = divmod(min(size - filling, rows * length), rows)
            lengths = each + (torch.arange(rows) < more).long()
            texts = draw_rows(self.config, lengths, torch.Generator().manual_seed(self.seed))
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
        """Seconds of the zoo's additional work in a loader, instead of padding."""
        return {"packing an epoch on the host": self.seconds} if self.task.epoch and self.impl == "zoo" else {}

    @property
    def lengths(self) -> list[list[int]]:
        """Tokens of every row of every batch."""
        return [texts.lengths for texts in self.texts]

    def sizes(self) -> dict[str, int]:
        """Sizes for the reader; for an epoch the means of its batches."""
        count = len(self.texts)
        found = {"batch": self.task.batch, "length": self.task.length, "tokens": sum(map(sum, self.lengths)) // count}
        if self.task.epoch:
            found |= {"batches": count, "padded_tokens": sum(texts.input_ids.numel() for texts in self.texts) // count}
        if self.task.epoch and self.impl == "zoo":
            found["packed_tokens"] = sum(batch["input_ids"].input_ids.numel() for batch in self.epoch) // count
        return found


# --- transformers' arms: as its users would run it, at its documented best, and as the reference ---


def build(config: BertConfig, weights: Mapping[str, Tensor]) -> Any:
    """The library's model, ``BertModel`` or with a head, in eval mode; it takes ownership of these weights."""
    model = skeleton(config)
    model.load_state_dict(dict(weights), strict=True, assign=True)
    reset_buffers(model)
    return model.requires_grad_(False).eval()


class Step(nn.Module):
    """One call of a model: returns all outputs for full rows, else the pooled output.

    ``ready_mask`` passes the mask in attention's format, as the library documents. Otherwise the library reads the mask
    in every call, and waits for the GPU, to decide whether the mask is needed.
    """

    def __init__(self, model: nn.Module, *, ready_mask: bool = False) -> None:
        super().__init__()
        self.model, self.ready_mask = model, ready_mask

    def forward(
        self, input_ids: Tensor | PackedBatch, attention_mask: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Ids and mask [B, T], or a packed batch -> hidden states [B, T, C] and pooled [B, C], or only the pooled."""
        mask = attention_mask
        if mask is not None and self.ready_mask:
            mask = mask.bool()[:, None, None]
        output = self.model(input_ids, attention_mask=mask)
        pooled: Tensor = output.pooler_output
        ragged = mask is not None or isinstance(input_ids, PackedBatch)
        return pooled if ragged else (output.last_hidden_state, pooled)


class ZooStep(Step):
    """The same step with the zoo's model."""

    regions = Bert.regions


@torch.no_grad()
def reference_output(
    config: BertConfig, weights: Mapping[str, Tensor], input_ids: Tensor, mask: Tensor | None
) -> Tensor:
    """A step's output as one vector: eager upstream in float64 on these weights, some rows at a time."""
    step = Step(build(config, weights).double())
    ids = input_ids.split(REFERENCE_ROWS)
    masks = [None] * len(ids) if mask is None else mask.split(REFERENCE_ROWS)
    outputs = [step(*rows) for rows in zip(ids, masks, strict=True)]
    blocks = [output if isinstance(output, tuple) else (output,) for output in outputs]
    return torch.cat([torch.cat(parts).flatten() for parts in zip(*blocks, strict=True)])


# --- what an encoder must do and move ---


def layer_weights(config: BertConfig) -> int:
    """Weights of one layer: four square products, two of the MLP, their biases, two norms."""
    width, inner = config.hidden_size, config.intermediate_size
    return 4 * width * width + 2 * width * inner + 4 * width + inner + width + 4 * width


def flops(config: BertConfig, lengths: Sequence[int]) -> int:
    """FLOPs (a multiply-add counts as two) of every token's products, attention within rows, and the pooler.

    Work on padding does not count, so this is not measured on a model.
    """
    width, inner = config.hidden_size, config.intermediate_size
    pairs = sum(length * length for length in lengths)
    products = 2 * sum(lengths) * (4 * width * width + 2 * width * inner)
    return config.num_hidden_layers * (products + 4 * pairs * width) + 2 * len(lengths) * width * width


def bytes_moved(config: BertConfig, task: Task, itemsize: int) -> int:
    width = config.hidden_size
    weights = config.num_hidden_layers * layer_weights(config) + width * width + width
    rows = min(task.tokens, config.vocab_size) + task.length + 1 + 2
    written = task.batch + (0 if task.skewed else task.tokens)
    return (weights + (rows + written) * width) * itemsize + 8 * task.tokens


def training_flops(config: BertConfig, lengths: Sequence[int]) -> int:
    """Three times the forward: gradients of inputs and of weights cost as much each. Padding does not count."""
    return 3 * (flops(config, lengths) + 2 * len(lengths) * LABELS * config.hidden_size)


def training_bytes(config: BertConfig, itemsize: int) -> int:
    layers = config.num_hidden_layers * layer_weights(config)
    return 2 * layers * itemsize + 32 * parameters_of(Bert, config)
