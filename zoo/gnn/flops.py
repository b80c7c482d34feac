"""Floating-point operations of the operators, for ``torch.utils.flop_counter``: multiply-adds count as two.

Importing this brings Triton in, as torch's counter does, so nothing of the package does it before somebody counts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from zoo.gnn import operators as _operators  # noqa: F401 - registers the operators

Shape = tuple[int, ...]
_OPS = torch.ops.zoo_gnn


@register_flop_formula(_OPS.csr_sum)
def csr_sum_flops(x: Shape, pointers: Shape, index: Shape, weight: Shape | None, *_: Any, **__: Any) -> int:
    """An addition for each edge and channel, and a multiplication if edges have weights."""
    return index[0] * x[1] * (1 if weight is None else 2)


@register_flop_formula(_OPS.edge_dot)
def edge_dot_flops(x: Shape, grad: Shape, source: Shape, *_: Any, **__: Any) -> int:
    """A multiply-add for each edge and channel."""
    return 2 * source[0] * x[1]


@register_flop_formula(_OPS.csr_max)
def csr_max_flops(x: Shape, pointers: Shape, index: Shape, *_: Any, **__: Any) -> int:
    """A comparison for each edge and channel."""
    return index[0] * x[1]


@register_flop_formula(_OPS.csr_max_backward)
def csr_max_backward_flops(
    x: Shape, values: Shape, shares: Shape, pointers: Shape, index: Shape, *_: Any, **__: Any
) -> int:
    """An addition for each edge and channel."""
    return index[0] * x[1]


@register_flop_formula(_OPS.gat)
def gat_flops(table: Shape, a_destination: Shape | None, heads: int, channels: int, *arguments: Any, **_: Any) -> int:
    """A multiply-add for each edge, head and channel; scores are few beside it."""
    return 2 * arguments[5][0] * heads * channels


@register_flop_formula(_OPS.gat_backward)
def gat_backward_flops(
    grad: Shape, table: Shape, a_destination: Shape | None, lse: Shape, heads: int, channels: int, *arguments: Any,
    **_: Any,
) -> int:  # fmt: skip
    """Two multiply-adds for each edge, head and channel: of the features' gradient and of the weights'."""
    return 4 * arguments[8][0] * heads * channels
