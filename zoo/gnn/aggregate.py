"""What flows along the edges: the one place where features are gathered and reduced.

Everything goes through the operators of operators.py: a kernel of our own on a GPU, the best of torch's own elsewhere.
No sum holds a tensor of E x C, and every run gives the same bits.

Shape legend: S sources, D destinations, E edges, H heads, C channels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zoo.gnn import operators, split
from zoo.gnn.csr import GraphTensors, Transpose
from zoo.gnn.split import Split

_NO_SPLIT: tuple[None, None] = (None, None)


def sum_neighbours(x: Tensor, graph: GraphTensors) -> Tensor:
    """Sum over incoming edges, times the graph's weights if it has any. x [S, C] -> [D, C]."""
    return _csr_sum(x, graph, graph.weight, None)


def mean_neighbours(x: Tensor, graph: GraphTensors) -> Tensor:
    """Mean over incoming edges, zero where there are none. x [S, C] -> [D, C]. Needs ``inverse_degree``."""
    if graph.inverse_degree is None:
        raise ValueError("a mean needs the graph's inverse degrees: graph.prepared(Recipe(mean=True))")
    return _csr_sum(x, graph, None, graph.inverse_degree)


def max_neighbours(x: Tensor, graph: GraphTensors) -> Tensor:
    """Greatest value over incoming edges, zero where there are none; ties share the gradient. x [S, C] -> [D, C]."""
    count_ties = torch.is_grad_enabled() and x.requires_grad
    pointers, index, _, _, *t_split = _transposed(graph.transpose)
    rows = *_split(graph.split), split.EDGES_PER_CHUNK
    values, _ = operators.csr_max(x, graph.rowptr, graph.source, count_ties, *rows, pointers, index, *t_split)
    return values


def head_scores(x: Tensor, first: Tensor, second: Tensor | None = None) -> tuple[Tensor, ...]:
    """Dot products of every head with its part of each vector: x [S, H, C], vectors [1, H, C] -> [S, H] each."""
    return operators.head_scores(x, first.squeeze(0), None if second is None else second.squeeze(0)).unbind()


def attention(
    x: Tensor, a_source: Tensor, a_destination: Tensor, graph: GraphTensors, slope: float, dropout: float = 0.0
) -> Tensor:
    """Neighbours weighed by the softmax of their leaky scores.

    Args:
        x: [S, H, C].
        a_source: [S, H], one part of each edge's score.
        a_destination: [D, H], the other.
        graph: Its weights are not used.
        slope: Of the leaky relu below zero.
        dropout: Probability that a neighbour is left out.

    Returns:
        [D, H, C], zero where there is no neighbour.
    """
    # The seed is drawn on the device, so that each replay of a CUDA graph draws another.
    seed = torch.randint(2**62, (1,), device=x.device) if dropout > 0.0 else None
    pointers, index, permutation, _, *t_split = _transposed(graph.transpose)
    out, _ = operators.gat(
        x, a_source, a_destination, slope, seed, dropout, graph.rowptr, graph.source, *_split(graph.split),
        split.EDGES_PER_CHUNK, pointers, index, permutation, *t_split,
    )  # fmt: skip
    return out


def _csr_sum(x: Tensor, graph: GraphTensors, weight: Tensor | None, row_scale: Tensor | None) -> Tensor:
    pointers, index, _, t_weight, *t_split = _transposed(graph.transpose)
    return operators.csr_sum(
        x, graph.rowptr, graph.source, weight, None, row_scale, *_split(graph.split), split.EDGES_PER_CHUNK,
        graph.destination, pointers, index, t_weight, *t_split,
    )  # fmt: skip


def _split(tables: Split | None) -> tuple[Tensor | None, Tensor | None]:
    return _NO_SPLIT if tables is None else (tables.chunks, tables.rows)


def _transposed(transpose: Transpose | None) -> tuple[Tensor | None, ...]:
    """Its pointers, index, permutation, weight, chunks and long rows."""
    if transpose is None:
        return (None,) * 6
    return transpose.colptr, transpose.destination, transpose.permutation, transpose.weight, *_split(transpose.split)
