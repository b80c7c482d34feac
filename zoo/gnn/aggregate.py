"""What flows along the edges, in torch's own operators: the one place where features are gathered and reduced.

Sums are kept in float32 for half-precision features: it is as fast once compiled (half-precision atomics are several
times slower) and a node with thousands of neighbours keeps its digits. Gather, weight and reduction compile into one
kernel, in which no tensor of E x C exists; eagerly there is one.

Shape legend: S sources, D destinations, E edges, H heads, C channels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zoo.gnn.csr import GraphTensors


def sum_neighbours(x: Tensor, graph: GraphTensors) -> Tensor:
    """Sum over incoming edges, times the graph's weights if it has any. x [S, ...] -> [D, ...]."""
    return weighted_sum(x, graph.weight, graph)


def weighted_sum(x: Tensor, weight: Tensor | None, graph: GraphTensors) -> Tensor:
    """Sum over incoming edges times a weight.

    Takes x [S, C] with weight [E] (or None) to [D, C], and x [S, H, C] with weight [E, H] to [D, H, C].
    """
    return _reduce(x, weight, graph).to(x.dtype)


def mean_neighbours(x: Tensor, graph: GraphTensors) -> Tensor:
    """Mean over incoming edges, zero where there are none. x [S, C] -> [D, C]. Needs ``inverse_degree``."""
    if graph.inverse_degree is None:
        raise ValueError("a mean needs the graph's inverse degrees: graph.prepared(Recipe(mean=True))")
    return (_reduce(x, None, graph) * graph.inverse_degree.unsqueeze(-1)).to(x.dtype)


def max_neighbours(x: Tensor, graph: GraphTensors) -> Tensor:
    """Greatest value over incoming edges, zero where there are none; ties share the gradient. x [S, C] -> [D, C]."""
    zeros = x.new_zeros(_destinations(graph), *x.shape[1:])
    messages = x.index_select(0, graph.source)
    index = graph.destination.unsqueeze(-1).expand_as(messages)
    return zeros.scatter_reduce(0, index, messages, "amax", include_self=False)


def edge_softmax(scores: Tensor, graph: GraphTensors) -> Tensor:
    """Softmax over the incoming edges of each destination. scores [E, H] -> [E, H], at least float32."""
    scores = scores.to(_wide(scores.dtype))
    zeros = scores.new_zeros(_destinations(graph), scores.shape[1])
    index = graph.destination.unsqueeze(-1).expand_as(scores)
    # Shifting by the greatest score changes nothing but overflow, so no gradient need pass.
    greatest = zeros.scatter_reduce(0, index, scores.detach(), "amax", include_self=False)
    exponent = (scores - greatest.index_select(0, graph.destination)).exp()
    total = zeros.index_add(0, graph.destination, exponent)
    return exponent / total.index_select(0, graph.destination)


def _reduce(x: Tensor, weight: Tensor | None, graph: GraphTensors) -> Tensor:
    """The weighted sum in the dtype that it is kept in."""
    wide = _wide(x.dtype)
    messages = x.index_select(0, graph.source).to(wide)
    if weight is not None:
        messages = messages * weight.to(wide).view(*weight.shape, *(1,) * (x.dim() - weight.dim()))
    zeros = messages.new_zeros(_destinations(graph), *x.shape[1:])
    return zeros.index_add(0, graph.destination, messages)


def _destinations(graph: GraphTensors) -> int:
    return graph.rowptr.shape[0] - 1


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
