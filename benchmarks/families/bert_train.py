"""Fine-tuning of BERT as a classifier of texts: float32 weights, autocast, batches of one shape or of many lengths.

Shapes: B rows, T tokens, N tokens of a packed batch, C width, K labels.
"""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.families import bert_arms
from benchmarks.families.base import (
    Prepared,
    SeededWeights,
    Training,
    accelerated,
    autocast_of,
    dtype_of,
    parameters_of,
    zoo_model,
)
from benchmarks.plan import Case
from benchmarks.training import checkpointed, reference_losses
from zoo.bert import Bert, BertConfig, pack, token_buckets
from zoo.bert.convert import placements
from zoo.bert.model import PRESETS
from zoo.bert.packing import filling_rows

# Times the width: wide models take smaller steps. 2e-6 at 768: with weights that nobody trained and no warm-up, two
# copies of one arm part after some twenty steps at a rate of fine-tuning.
_RATE_TIMES_WIDTH = 1.5e-3
LABELS = 4
# Every label has a few words of its own, and so much of each of its texts consists of them.
WORDS, SHARE = 8, 0.25
# Lengths are log-normal, as those of texts roughly are, with this median (of the longest that is allowed) and spread:
# padded to the longest of its batch, less than half of a batch is text.
MEDIAN, SPREAD = 0.25, 0.5
# Batches of an epoch, and how many of them are a round, which every arm runs: rounds go through the epoch in order.
EPOCH, ROUND = {"cuda": 1000, "cpu": 20}, {"cuda": 25, "cpu": 2}
# Sizes that packed batches are filled up to: most are spaced over the epoch's own numbers of tokens.
BUCKETS = 6
BYTES_FORMULA = (
    "Weights of the layers are read in the forward and again for gradients by inputs, in the dtype of autocast. And 32 "
    "bytes for every weight of all: its gradient is written, and the optimizer reads weight, gradient and two moments "
    "and writes three. Left out, so that it is a lower bound: activations."
)

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
    """A batch of texts, each of a few words of its label among others; with ``longest`` one has all its tokens."""
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
        self.texts = [draw(config, task, seed=self.seed_of(index)) for index in range(count)]
        self.buckets: tuple[int, ...] = ()
        if task.epoch:
            tokens = [sum(text.lengths) for text in self.texts]
            self.buckets = token_buckets(task.rows, task.length, steps=BUCKETS, typical=(min(tokens), max(tokens)))

    def seed_of(self, index: int) -> int:
        """Of one batch; those below zero are not of the epoch."""
        return (self.seed << 20) + (1 << 16) + index

    def checked(self, index: int) -> dict[str, Any]:
        """The batch of a step that is checked; of an epoch none of its own, and padded as far as any."""
        return self.to_device(self.arrange(draw(self.config, self.task, seed=self.seed_of(-1 - index), longest=True)))

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
        """Seconds of what a loader would do for the zoo beside padding."""
        return {"packing an epoch on the host": self.seconds} if self.task.epoch and self.impl == "zoo" else {}

    @property
    def lengths(self) -> list[list[int]]:
        """Tokens of every row of every batch."""
        return [texts.lengths for texts in self.texts]

    def sizes(self) -> dict[str, int]:
        """What a reader needs to know; of an epoch the means of its batches."""
        count = len(self.texts)
        found = {"batch": self.task.rows, "length": self.task.length, "tokens": sum(map(sum, self.lengths)) // count}
        if self.task.epoch:
            found |= {"batches": count, "padded_tokens": sum(texts.input_ids.numel() for texts in self.texts) // count}
        if self.task.epoch and self.impl == "zoo":
            found["packed_tokens"] = sum(batch["input_ids"].input_ids.numel() for batch in self.epoch) // count
        return found


def config_of(model: str) -> BertConfig:
    """The config of a classifier without dropout, which every arm would draw anew."""
    return replace(
        PRESETS[model],
        head="sequence-classification",
        num_labels=LABELS,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )


def cannot(case: Case) -> str | None:
    """Why there is no such training, names that exist taken for granted; or None."""
    asked = task(case.input)
    if asked is None:
        return f"{case.input} is an input of inference; training takes BxT, epoch-BxT or epoch-static-BxT"
    if asked.length > config_of(case.model).positions:
        return f"{case.input} needs {asked.length} positions, and {case.model} has {config_of(case.model).positions}"
    if asked.epoch and case.dynamic:
        if case.impl != "upstream":
            return f"{case.impl} has declared shapes; dynamic ones are for batches that are padded to their longest row"
        if asked.static:
            return f"{case.input} is about static shapes; dynamic ones are raced on {case.input.replace('static-', '')}"
    return None


def prepare(case: Case, *, seed: int) -> Prepared:
    """Build model and batches on the device."""
    config, asked = config_of(case.model), task(case.input)
    assert asked is not None
    device = torch.device(case.device)
    weights = SeededWeights(bert_arms.shapes(config), seed=seed, dtype=torch.float32, device=device)
    batches = Batches(case.impl, config, asked, device, seed=seed)

    model: nn.Module
    compile_layers: Callable[..., nn.Module] | None = None
    if case.impl == "zoo":
        model, loss = zoo_model(Bert, config, weights, placements(config)), zoo_loss
    else:
        model, loss = bert_arms.build(config, weights), upstream_loss
        compile_layers = functools.partial(accelerated, raised_limit=case.impl == "upstream-tuned")

    training = Training(
        loss=loss,
        batch=batches.checked,
        learning_rate=_RATE_TIMES_WIDTH / config.hidden_size,
        autocast=autocast_of(dtype_of(case)),
    )
    if asked.epoch:
        epoch = batches.epoch
        training = replace(training, shapes=batches.shapes(), loader=lambda: epoch, round=ROUND[device.type])

    def reference() -> Tensor:
        theirs = bert_arms.build(config, weights).requires_grad_(True)
        checkpointed(theirs.base_model.encoder.layer)
        padded = Batches("upstream", config, asked, device, seed=seed)
        return reference_losses(theirs, replace(training, loss=upstream_loss, batch=padded.checked))

    sizes, lengths = batches.sizes(), batches.lengths
    return Prepared(
        model=model.requires_grad_(True).train(),
        inputs={},
        compile_regions=compile_layers,
        dynamic=False if asked.static else None,
        reference=reference,
        bytes=bytes_moved(config, getattr(torch, case.dtype).itemsize),
        bytes_formula=BYTES_FORMULA,
        flops=sum(flops(config, rows) for rows in lengths) // len(lengths),
        data="generated (an epoch of log-normal lengths)" if asked.epoch else "generated (full rows)",
        preparation_seconds=batches.preparation(),
        sizes={
            **sizes,
            "layers": config.num_hidden_layers,
            "width": config.hidden_size,
            "parameters": parameters_of(Bert, config),
        },
        count=sizes["tokens"],
        unit="tokens",
        training=training,
    )


def zoo_loss(model: Any, batch: dict[str, Any]) -> Tensor:
    """Cross entropy of ids [B, T] or a packed batch, and labels [B]."""
    loss: Tensor = model(batch["input_ids"], labels=batch["labels"]).loss
    return loss


def upstream_loss(model: Any, batch: dict[str, Any]) -> Tensor:
    """The same of ids and, where rows are short, a mask."""
    loss: Tensor = model(**batch).loss
    return loss


def flops(config: BertConfig, lengths: list[int]) -> int:
    """Gradients by inputs and by weights each take what the forward does; padding is no work to be done."""
    return 3 * (bert_arms.flops(config, lengths) + 2 * len(lengths) * LABELS * config.hidden_size)


def bytes_moved(config: BertConfig, itemsize: int) -> int:
    """Fewest bytes that one step moves through device memory, as :data:`BYTES_FORMULA` says."""
    layers = config.num_hidden_layers * bert_arms.layer_weights(config)
    return 2 * layers * itemsize + 32 * parameters_of(Bert, config)


def memory(case: Case, *, reference: bool) -> int:
    """Estimated device memory of an arm, padded as far as any batch is, or of the reference if that takes more."""
    config, asked = config_of(case.model), task(case.input)
    assert asked is not None
    parameters, tokens, layers = parameters_of(Bert, config), asked.rows * asked.length, config.num_hidden_layers
    # Scores, their softmax and its gradient, where attention writes them out: on a CPU, and in float64.
    scores = 3 * asked.rows * config.num_attention_heads * asked.length**2
    running = 4 * layers * (tokens * inside(config) + (scores if case.device == "cpu" else 0))
    passing = layers * tokens * config.hidden_size
    exact = 8 * (passing + 2 * (tokens * inside(config) + scores) + 4 * parameters)
    epoch = 16 * EPOCH[case.device] * tokens if asked.epoch else 0
    return 20 * parameters + epoch + (max(running, exact) if reference else running)


def inside(config: BertConfig) -> int:
    """Values that a token leaves behind in a layer for the backward.

    Its input, three projections, what attention gives, what goes into both norms and comes out, and both sides of the
    activation.
    """
    return 10 * config.hidden_size + 2 * config.intermediate_size
