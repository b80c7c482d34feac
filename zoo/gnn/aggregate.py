"""What flows along the edges: the one place where features are gathered and reduced.

Everything goes through the operators of operators.py: a kernel of our own on a GPU, the best of torch's own elsewhere.
No sum holds a tensor of E x C, and every run gives the same bits.

Shape legend: S sources, D destinations, E edges, H heads, C channels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zoo.gnn import operators
from zoo.gnn.csr import GraphTensors, Transpose
from zoo.gnn.split import Split
from zoo.ops.common import differentiated, forward_mode

_NO_SPLIT: tuple[None, None] = (None, None)


def sum_neighbours(x: Tensor, graph: GraphTensors, root: Tensor | None = None, *, beside: bool = False) -> Tensor:
    """Sum over incoming edges, times the graph's weights if it has any.

    Args:
        x: [S, C].
        graph: The edges.
        root: [D, C], what each destination adds of its own, in the same pass; of more rows the first D.
        beside: Put ``root`` beside the sums instead.

    Returns:
        [D, C], or [D, 2 C] with ``beside``.
    """
    return _csr_sum(x, graph, graph.weight, None, root, beside)


def mean_neighbours(x: Tensor, graph: GraphTensors, root: Tensor | None = None, *, beside: bool = False) -> Tensor:
    """Mean over incoming edges, zero where there are none; as ``sum_neighbours``. Needs ``inverse_degree``."""
    if graph.inverse_degree is None:
        raise ValueError("a mean needs the graph's inverse degrees: graph.prepared(Recipe(mean=True))")
    scale = graph.inverse_degree
    if x.dtype == torch.float64 != scale.dtype:
        # A sampled batch has them in float32, whatever its model.
        scale = graph.rowptr.diff().clamp(min=1).to(x.dtype).reciprocal()
    return _csr_sum(x, graph, None, scale, root, beside)


def max_neighbours(x: Tensor, graph: GraphTensors) -> Tensor:
    """Greatest value over incoming edges, zero where there are none; ties share the gradient. x [S, C] -> [D, C]."""
    _refuse_forward_mode()
    count_ties = differentiated(x)
    pointers, index, _, _, *t_split = _transposed(graph.transpose)
    values, _ = operators.csr_max(
        x, graph.rowptr, graph.source, count_ties, *_split(graph.split), pointers, index, *t_split
    )
    return values


def attention(
    table: Tensor,
    a_destination: Tensor | None,
    heads: int,
    graph: GraphTensors,
    slope: float,
    dropout: float = 0.0,
    *,
    average: bool = False,
) -> Tensor:
    """Neighbours weighed by the softmax of their leaky scores.

    Args:
        table: [S, H C + H], features of all heads, then one part of each edge's score; or [N, H C + 2 H] with the
            destinations' part last.
        a_destination: [D, H], the destinations' part, or None if it is in the table.
        heads: H.
        graph: Its weights are not used.
        slope: Of the leaky relu below zero.
        dropout: Probability that a neighbour is left out.
        average: Take the mean over heads.

    Returns:
        [D, H C] or, with ``average``, [D, C]; zero where there is no neighbour.
    """
    _refuse_forward_mode()
    channels = table.shape[1] // heads - (2 if a_destination is None else 1)
    # The seed is drawn on the device, so that each replay of a CUDA graph draws another.
    seed = torch.randint(2**62, (1,), device=table.device) if dropout > 0.0 else None
    pointers, index, permutation, _, *t_split = _transposed(graph.transpose)
    out, _ = operators.gat(
        table, a_destination, heads, channels, average, slope, seed, dropout, graph.rowptr, graph.source,
        *_split(graph.split), pointers, index, permutation, *t_split,
    )  # fmt: skip
    return out


def _csr_sum(
    x: Tensor,
    graph: GraphTensors,
    weight: Tensor | None,
    row_scale: Tensor | None,
    root: Tensor | None,
    beside: bool,
) -> Tensor:
    _refuse_forward_mode()
    pointers, index, _, t_weight, *t_split = _transposed(graph.transpose)
    return operators.csr_sum(
        x, graph.rowptr, graph.source, weight, None, row_scale, root, beside, *_split(graph.split),
        graph.destination, pointers, index, t_weight, *t_split,
    )  # fmt: skip


def _refuse_forward_mode() -> None:
    """An operator without such a derivative passes for a constant."""
    if forward_mode():
        raise NotImplementedError(
            "sums over neighbours have no derivative in forward mode (torch.func.jvp, torch.autograd.forward_ad); use "
            "reverse mode, torch.autograd.grad"
        )


def _split(tables: Split | None) -> tuple[Tensor | None, Tensor | None]:
    return _NO_SPLIT if tables is None else (tables.chunks, tables.rows)


def _transposed(transpose: Transpose | None) -> tuple[Tensor | None, ...]:
    """Its pointers, index, permutation, weight, chunks and long rows."""
    if transpose is None:
        return (None,) * 6
    return transpose.colptr, transpose.destination, transpose.permutation, transpose.weight, *_split(transpose.split)
