# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs
"""The most likely token of each row, and all that follows from it for the next step: two kernels instead of a dozen.

Shape legend: B rows, V vocabulary, P parts of it.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from zoo.engine.kernel import kernel
from zoo.ops.common import ceil_div, next_power

BLOCK = 1024


@kernel
def _best_of_parts(logits, values, indices, V: tl.constexpr, BLOCK: tl.constexpr):
    part = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    column = part * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(logits + row * V + column, mask=column < V, other=float("-inf")).to(tl.float32)
    best = tl.max(value, 0)
    # The first of equals, whatever the order in which they are compared.
    index = tl.min(tl.where(value == best, column, V), 0)
    place = row * tl.num_programs(0) + part
    tl.store(values + place, best)
    tl.store(indices + place, index)


@kernel
def _accept(
    values, indices, tokens, positions, finished, step, output, ends, pad,
    B: tl.constexpr, V: tl.constexpr, PARTS: tl.constexpr, BLOCK_PARTS: tl.constexpr, ENDS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    part = tl.arange(0, BLOCK_PARTS)
    value = tl.load(values + row * PARTS + part, mask=part < PARTS, other=float("-inf"))
    index = tl.load(indices + row * PARTS + part, mask=part < PARTS, other=V)
    token = tl.min(tl.where(value == tl.max(value, 0), index, V), 0)
    # Nothing is equal to a maximum that is no number.
    token = tl.minimum(token, V - 1).to(tl.int64)
    ended = tl.load(finished + row) != 0
    token = tl.where(ended, tl.load(pad), token)
    tl.store(output + tl.load(step) * B + row, token)
    tl.store(positions + row, tl.load(positions + row) + tl.where(ended, 0, 1))
    meets = tl.max(tl.where(tl.load(ends + tl.arange(0, ENDS)) == token, 1, 0), 0) != 0
    tl.store(finished + row, (ended | meets).to(tl.int8))
    tl.store(tokens + row, token)


def accept_greedy(
    logits: Tensor, tokens: Tensor, positions: Tensor, finished: Tensor, step: Tensor, output: Tensor, ends: Tensor,
    pad: Tensor,
) -> None:  # fmt: skip
    """See ``zoo/llm/generate.py``; ``ends`` are a power of two."""
    logits = logits.contiguous()
    batch, vocabulary = logits.shape
    parts = ceil_div(vocabulary, BLOCK)
    values = logits.new_empty(batch, parts, dtype=torch.float32)
    indices = logits.new_empty(batch, parts, dtype=torch.int32)
    _best_of_parts[(parts, batch)](logits, values, indices, V=vocabulary, BLOCK=BLOCK, num_warps=4)
    _accept[(batch,)](
        values, indices, tokens, positions, finished.view(torch.int8), step, output, ends, pad,
        B=batch, V=vocabulary, PARTS=parts, BLOCK_PARTS=next_power(parts), ENDS=ends.shape[0], num_warps=4,
    )  # fmt: skip
    step.add_(1)
