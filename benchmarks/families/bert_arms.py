"""What BERT is given in inference, transformers' arms, and what an encoder must do and move.

Legend: B rows, T tokens of the longest, N tokens of all, C width, I width inside the MLP, L layers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zoo.bert import BertConfig
from zoo.bert.convert import reset_buffers, skeleton

BYTES_FORMULA = (
    "Every weight of the layers and the pooler is read once, of the word table the rows of the tokens, of the position "
    "table as many rows as the longest text has tokens; ids are read, and what is returned is written. Padding counts "
    "for nothing. Activations are taken to stay in the caches of the chip."
)
# The reference takes so many rows at once: it writes scores out.
REFERENCE_ROWS = 16
_INPUT = re.compile(r"(?P<skewed>skewed-)?(?P<batch>\d+)x(?P<length>\d+)")
# Lengths of texts are roughly log-normal. With this median and spread about half of a batch is filled when what is
# longer than the batch is wide is cut off, as a tokenizer does.
_MEDIAN, _SPREAD = 0.42, 0.75


@dataclass(frozen=True, kw_only=True)
class Task:
    """What one call is given: ``batch`` rows of ``length`` tokens, or where ``skewed`` most of them well shorter."""

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


# --- transformers' arms: as its users would run it, at its documented best, and as the reference ---


def shapes(config: BertConfig) -> dict[str, tuple[int, ...]]:
    """Of all weights under transformers' names."""
    return {name: tuple(parameter.shape) for name, parameter in skeleton(config).named_parameters()}


def build(config: BertConfig, weights: Mapping[str, Tensor]) -> Any:
    """The library's model, ``BertModel`` or with a head, in eval mode with these weights, which become its own."""
    model = skeleton(config)
    model.load_state_dict(dict(weights), strict=True, assign=True)
    reset_buffers(model)
    return model.requires_grad_(False).eval()


class UpstreamStep(nn.Module):
    """One call of the library's model: of full rows all that it returns, of others what is pooled.

    Args:
        model: A model of :func:`build`.
        ready_mask: Hand over the mask as attention takes it, which the library documents. By its own means it looks
            at the mask in every call, and waits for the GPU, to find out whether it is needed.
    """

    def __init__(self, model: nn.Module, *, ready_mask: bool) -> None:
        super().__init__()
        self.model, self.ready_mask = model, ready_mask

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Ids and mask [B, T] -> hidden states [B, T, C] and pooled [B, C], or these alone."""
        if attention_mask is not None and self.ready_mask:
            output = self.model(input_ids, attention_mask=attention_mask.bool()[:, None, None])
        else:
            output = self.model(input_ids, attention_mask=attention_mask)
        pooled: Tensor = output.pooler_output
        return pooled if attention_mask is not None else (output.last_hidden_state, pooled)


@torch.no_grad()
def reference_output(
    config: BertConfig, weights: Mapping[str, Tensor], input_ids: Tensor, mask: Tensor | None
) -> Tensor:
    """What a step returns, as one vector: eager upstream in float64 on these weights, some rows at a time."""
    step = UpstreamStep(build(config, weights).double(), ready_mask=False)
    blocks = []
    for start in range(0, input_ids.shape[0], REFERENCE_ROWS):
        rows = slice(start, start + REFERENCE_ROWS)
        output = step(input_ids[rows], None if mask is None else mask[rows])
        blocks.append(output if isinstance(output, tuple) else (output,))
    return torch.cat([torch.cat(parts).flatten() for parts in zip(*blocks, strict=True)])


# --- what an encoder must do and move ---


def layer_weights(config: BertConfig) -> int:
    """Weights of one layer: four square products, two of the MLP, their biases, two norms."""
    width, inner = config.hidden_size, config.intermediate_size
    return 4 * width * width + 2 * width * inner + 4 * width + inner + width + 4 * width


def flops(config: BertConfig, lengths: Sequence[int]) -> int:
    """Multiply-adds counted as two: products of every token, scores and their sums within rows, the pooler.

    Padding is no work to be done, whoever does it, which is why this is not counted on a model.
    """
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
