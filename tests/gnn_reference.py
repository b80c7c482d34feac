"""Aggregations by autograd through gathers and scatters: what the operators are held against, in float64.

Shape legend: S sources, D destinations, E edges, H heads, C channels.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.gnn import SampledBatch
from zoo.ops.csr import GraphTensors, attention

GRAPHS: dict[str, tuple[list[list[int]], tuple[int, int]]] = {
    "square": ([[0, 1, 2, 3, 1, 4], [1, 0, 1, 4, 3, 3]], (5, 5)),
    "duplicates and loops": ([[0, 0, 0, 1, 1, 1, 2], [1, 1, 1, 1, 1, 0, 2]], (3, 3)),
    "isolated ends": ([[2, 3], [3, 2]], (6, 6)),
    "no edges": ([[], []], (4, 4)),
    "one node": ([[], []], (1, 1)),
    "one node, one loop": ([[0], [0]], (1, 1)),
    "no nodes": ([[], []], (0, 0)),
    "rectangular, wide": ([[6, 0, 3, 3, 5], [1, 0, 1, 1, 0]], (7, 3)),
    "rectangular, tall": ([[1, 0, 1, 0], [6, 6, 2, 2]], (2, 8)),
}


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def edge_sum(
    x: Tensor, source: Tensor, destination: Tensor, rows: int, weight: Tensor | None = None,
    row_scale: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Sum over incoming edges of x [S, C] or [S, H, C], times a weight [E] or [E, H] and a row_scale [D]."""
    dtype = accumulation_dtype(x.dtype)
    messages = x.index_select(0, source).to(dtype)
    if weight is not None:
        messages = messages * _as_wide_as(weight.to(dtype), messages)
    total = messages.new_zeros(rows, *x.shape[1:]).index_add(0, destination, messages)
    if row_scale is not None:
        total = total * _as_wide_as(row_scale.to(dtype), total)
    return total.to(x.dtype)


def edge_max(x: Tensor, source: Tensor, destination: Tensor, rows: int) -> Tensor:
    """Greatest value over incoming edges, zero where there are none; ties share the gradient. x [S, C] -> [D, C]."""
    messages = x.index_select(0, source)
    index = destination.long().unsqueeze(-1).expand_as(messages)
    return x.new_zeros(rows, *x.shape[1:]).scatter_reduce(0, index, messages, "amax", include_self=False)


def edge_softmax(scores: Tensor, destination: Tensor, rows: int) -> Tensor:
    """Softmax over the incoming edges of each destination. scores [E, H] -> [E, H], at least float32."""
    scores = scores.to(accumulation_dtype(scores.dtype))
    zeros = scores.new_zeros(rows, scores.shape[1])
    index = destination.long().unsqueeze(-1).expand_as(scores)
    # Shifting by the greatest score changes nothing but overflow, so no gradient need pass.
    greatest = zeros.scatter_reduce(0, index, scores.detach(), "amax", include_self=False)
    exponent = (scores - greatest.index_select(0, destination)).exp()
    total = zeros.index_add(0, destination, exponent)
    return exponent / total.index_select(0, destination)


def edge_attention(
    x: Tensor, a_source: Tensor, a_destination: Tensor, slope: float, source: Tensor, destination: Tensor, rows: int
) -> Tensor:
    """Neighbours weighed by the softmax of their scores: x [S, H, C], scores [S, H] and [D, H] -> [D, H, C]."""
    score = a_source.index_select(0, source) + a_destination.index_select(0, destination)  # [E, H]
    return edge_sum(x, source, destination, rows, edge_softmax(F.leaky_relu(score, slope), destination, rows))


def exact(graph: GraphTensors) -> tuple[Tensor, Tensor, int]:
    """Sources and destinations of the edges, and how many rows there are: the last arguments of what is above."""
    return graph.source, graph.destination, graph.rowptr.shape[0] - 1


def edges_of(batch: SampledBatch) -> Tensor:
    """A sampled batch's edges as an ``edge_index`` [2, edges] of its own numbering, without padding."""
    graph = batch.graphs[0]
    return torch.stack([graph.source, graph.destination])[:, : graph.rowptr[-1]].long()


def attend(
    x: Tensor, a_source: Tensor, a_destination: Tensor, graph: GraphTensors, slope: float, dropout: float = 0.0, *,
    average: bool = False, joined: bool = False,
) -> Tensor:  # fmt: skip
    """Ours from features [S, H, C] and scores apart: -> [D, H, C] or [D, C]; ``joined`` has all of them in a table."""
    heads = x.shape[1]
    table = torch.cat([x.flatten(1), a_source, *([a_destination] if joined else [])], dim=1)
    out = attention(table, None if joined else a_destination, heads, graph, slope, dropout, average=average)
    return out if average else out.unflatten(1, (heads, -1))


def kept(seed: Tensor, edge: Tensor, heads: int, dropout: float) -> Tensor:
    """What dropout multiplies each (edge, head) with, [E, H]: Philox-4x32-10 of the seed and the edge's place."""
    low = 0xFFFFFFFF
    edge = edge.long().unsqueeze(-1)
    head = torch.arange(heads, device=edge.device)
    c0, c1, c2, c3 = ((value + 0 * head) & low for value in (edge, edge >> 32, 0 * edge, 0 * edge))
    c2 = c2 + head
    k0, k1 = seed & low, (seed >> 32) & low
    for _ in range(10):
        # Products of 64 bits wrap around, and their halves are right nevertheless.
        a, b = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (b >> 32 & low) ^ c1 ^ k0, b & low, (a >> 32 & low) ^ c3 ^ k1, a & low
        k0, k1 = (k0 + 0x9E3779B9) & low, (k1 + 0xBB67AE85) & low
    uniform = (c0 >> 8).float() * 2.0**-24
    return (uniform >= torch.tensor(dropout, dtype=torch.float32)).float() / (1.0 - dropout)


def _as_wide_as(factor: Tensor, like: Tensor) -> Tensor:
    return factor.view(*factor.shape, *(1,) * (like.dim() - factor.dim()))
