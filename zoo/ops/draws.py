"""Draws without replacement, for sampling neighbours."""

from __future__ import annotations

import torch
from torch import Tensor

from zoo.ops import common
from zoo.ops import triton as kernels

# Places of a node that the kernel draws, which holds them in registers.
MOST_AT_ONCE = 512


def distinct(degree: Tensor, count: int, random: torch.Generator) -> Tensor:
    """For each degree [n] int64 ``count`` different places below it, none below ``count``: [n, count].

    Floyd's algorithm, a column at a time: a place that was drawn before gives way to the last one allowed.
    """
    uniform = torch.rand(count, len(degree), generator=random, dtype=torch.float64, device=degree.device)
    if count <= MOST_AT_ONCE and common.triton_runs_on(degree.device):
        # The same draws in one launch. By columns they are most of what the host launches for a batch.
        return kernels.draws.distinct(degree, uniform)
    places = torch.empty((len(degree), count), dtype=torch.int64, device=degree.device)
    for column in range(count):
        last = degree - count + column
        drawn = (uniform[column] * (last + 1)).long()
        taken = (places[:, :column] == drawn[:, None]).any(1)
        places[:, column] = torch.where(taken, last, drawn)
    return places
