"""What an encoder is given, and what it must do and hold, as formulas: operations, bytes moved, memory.

Legend: B rows, T tokens of the longest, N tokens of all, C width, I width inside the MLP, L layers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zoo.bert import BertConfig

BYTES_FORMULA = (
    "Every weight of the layers and the pooler is read once, of the word table the rows of the tokens, of the position "
    "table as many rows as the longest text has tokens; ids are read, and what is returned is written. Padding counts "
    "for nothing. Activations are taken to stay in the caches of the chip."
)
# Where a call's CUDA context, its libraries' work space and the compiler's buffers go.
PROCESS_BYTES = 1 << 30

_INPUT = re.compile(r"(?P<skewed>skewed-)?(?P<batch>\d+)x(?P<length>\d+)")
# Lengths of texts are roughly log-normal. With this median and spread about half of a batch is filled when what is
# longer than the batch is wide is cut off, as a tokenizer does.
_MEDIAN, _SPREAD = 0.42, 0.75


@dataclass(frozen=True, kw_only=True)
class Task:
    """What one call is given.

    Args:
        batch: B.
        length: T.
        skewed: Whether rows end early, most of them well before the longest; else all are full.
    """

    batch: int
    length: int
    skewed: bool

    def lengths(self) -> tuple[int, ...]:
        """Tokens of each row, rising: evenly spaced quantiles, so that every seed has equal work."""
        if not self.skewed:
            return (self.length,) * self.batch
        quantiles = (torch.arange(self.batch, dtype=torch.float64) + 0.5) / self.batch
        normal = math.sqrt(2) * torch.erfinv(2 * quantiles - 1)
        drawn = (self.length * _MEDIAN * (_SPREAD * normal).exp()).round().clamp(2, self.length)
        return tuple(int(length) for length in drawn)

    @property
    def tokens(self) -> int:
        """N, without padding."""
        return sum(self.lengths())


def task(name: str) -> Task:
    """The task called ``BxT`` or ``skewed-BxT``.

    Raises:
        ValueError: If the name is neither.
    """
    found = _INPUT.fullmatch(name)
    if found is None or int(found["batch"]) < 1 or int(found["length"]) < 2:
        raise ValueError(f"input {name!r} is neither BATCHxTOKENS nor skewed-BATCHxTOKENS (2 or more)")
    return Task(batch=int(found["batch"]), length=int(found["length"]), skewed=found["skewed"] is not None)


def draw_inputs(config: BertConfig, task: Task, *, seed: int) -> tuple[Tensor, Tensor]:
    """Ids and mask [B, T] on the CPU; ids uniformly drawn, rows in random order, padded on the right."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(task.batch, generator=generator)
    mask = torch.arange(task.length) < torch.tensor(task.lengths())[order][:, None]
    pad = 0 if config.pad_token_id is None else config.pad_token_id
    ids = torch.randint(pad + 1, config.vocab_size, mask.shape, generator=generator)
    return torch.where(mask, ids, pad), mask.long()


def layer_weights(config: BertConfig) -> int:
    """Weights of one layer: four square products, two of the MLP, their biases, two norms."""
    width, inner = config.hidden_size, config.intermediate_size
    return 4 * width * width + 2 * width * inner + 4 * width + inner + width + 4 * width


def parameters(config: BertConfig) -> int:
    """All weights, with the pooler's."""
    width = config.hidden_size
    tables = config.vocab_size + config.max_position_embeddings + config.type_vocab_size
    return config.num_hidden_layers * layer_weights(config) + tables * width + 2 * width + width * width + width


def flops(config: BertConfig, task: Task) -> int:
    """Multiply-adds counted as two: products of every token, scores and their sums within rows, the pooler.

    Padding is no work to be done, whoever does it.
    """
    return flops_of_rows(config, task.lengths())


def flops_of_rows(config: BertConfig, lengths: Sequence[int]) -> int:
    """The same for rows of any lengths."""
    width, inner = config.hidden_size, config.intermediate_size
    pairs = sum(length * length for length in lengths)
    products = 2 * sum(lengths) * (4 * width * width + 2 * width * inner)
    return config.num_hidden_layers * (products + 4 * pairs * width) + 2 * len(lengths) * width * width


def bytes_moved(config: BertConfig, task: Task, itemsize: int) -> int:
    """Fewest bytes that one call moves through device memory, as :data:`BYTES_FORMULA` says."""
    width = config.hidden_size
    weights = config.num_hidden_layers * layer_weights(config) + width * width + width
    rows = min(task.tokens, config.vocab_size) + task.length + 1 + 2
    written = task.batch + (0 if task.skewed else task.tokens)
    return (weights + (rows + written) * width) * itemsize + 8 * task.tokens


def memory(config: BertConfig, task: Task, itemsize: int) -> int:
    """Peak memory of an arm: weights, and what is alive at once in a layer whose steps are not fused."""
    alive = task.batch * task.length * (8 * config.hidden_size + 3 * config.intermediate_size)
    # A mask that is written out, as numbers.
    masks = task.batch * task.length * task.length * (1 + itemsize) if task.skewed else 0
    return (parameters(config) + alive) * itemsize + masks + PROCESS_BYTES


def reference_memory(config: BertConfig, task: Task, rows: int) -> int:
    """Peak memory of the float64 reference, which takes so many rows at a time and writes scores out."""
    rows = min(rows, task.batch)
    wide = 8 * config.hidden_size + 3 * config.intermediate_size + 3 * config.num_attention_heads * task.length
    return 8 * (parameters(config) + task.batch * task.length * config.hidden_size + rows * task.length * wide)
