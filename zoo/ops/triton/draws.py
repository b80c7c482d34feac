# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs
"""Draws without replacement, for sampling neighbours: a row of places a node."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from zoo.engine.kernel import kernel
from zoo.ops.common import ceil_div, next_power
from zoo.ops.draws import MOST_AT_ONCE

# Places that a program holds in registers, 16 a thread: of two nodes at least.
_HELD = 2 * MOST_AT_ONCE


@kernel(do_not_specialize=["nodes"])
def _distinct(
    degree, uniform, out, nodes, COUNT: tl.constexpr, COLUMNS: tl.constexpr, NODES: tl.constexpr
):  # fmt: skip
    node = tl.program_id(0).to(tl.int64) * NODES + tl.arange(0, NODES)
    inside = node < nodes
    column = tl.arange(0, COLUMNS)
    size = tl.load(degree + node, mask=inside, other=COUNT)
    places = tl.full([NODES, COLUMNS], -1, tl.int64)
    uniform += node
    for index in range(COUNT):
        last = size - COUNT + index
        share = tl.load(uniform, mask=inside, other=0.0)
        uniform += nodes
        # Rounded as torch rounds it: the same draws as without this kernel.
        drawn = (share * (last + 1).to(tl.float64)).to(tl.int64)
        taken = tl.max((places == drawn[:, None]).to(tl.int32), 1) > 0
        place = tl.where(taken, last, drawn)
        places = tl.where(column[None, :] == index, place[:, None], places)
    mask = inside[:, None] & (column < COUNT)[None, :]
    tl.store(out + (node * COUNT)[:, None] + column[None, :], places, mask=mask)


def distinct(degree: Tensor, uniform: Tensor) -> Tensor:
    """For each degree [n] int64 as many different places below it as ``uniform`` [K, n] float64 has rows: [n, K].

    K is ``MOST_AT_ONCE`` at most.
    """
    count, nodes = uniform.shape
    out = torch.empty((nodes, count), dtype=torch.int64, device=degree.device)
    if nodes:
        columns = next_power(count)
        block = _HELD // columns
        _distinct[(ceil_div(nodes, block),)](
            degree, uniform, out, nodes, COUNT=count, COLUMNS=columns, NODES=block, num_warps=2
        )
    return out
