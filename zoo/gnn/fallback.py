"""What the kernels compute, in torch's own operators: for the CPU, float64 and where Triton is missing.

Each function has the signature of its namesake in zoo/gnn/kernels and the same results but for rounding, dropout
included. ``pointers`` and ``index`` are rows of either orientation; tables of chunks are of no use here.

Sums go through ``embedding_bag``: rows are bags, and no tensor of E x C is made. It is a hundred times faster on a CPU
than gathering and ``index_add``, compiled or not, and deterministic. Half precision is summed in float32.

Shape legend: R rows, S gathered nodes, D destinations, E edges, H heads, C channels.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

# Edges whose features are held at once where a dot product of both ends is needed.
EDGES_AT_ONCE = 1 << 18


def wide(dtype: torch.dtype) -> torch.dtype:
    """What sums over edges are kept in."""
    return torch.promote_types(dtype, torch.float32)


def csr_sum(
    x: Tensor,
    pointers: Tensor,
    index: Tensor,
    weight: Tensor | None = None,
    gather_scale: Tensor | None = None,
    row_scale: Tensor | None = None,
    chunks: Tensor | None = None,
    long_rows: Tensor | None = None,
    chunk_size: int = 0,
) -> Tensor:
    """Weighted sum of gathered rows: x [S, C] -> [R, C]."""
    if gather_scale is not None:
        factor = gather_scale.index_select(0, index)
        weight = factor if weight is None else weight * factor
    total = _sum_bags(x.to(wide(x.dtype)), index, pointers, weight)
    return (total if row_scale is None else total * row_scale.to(total.dtype).unsqueeze(1)).to(x.dtype)


def edge_dot(
    x: Tensor,
    grad: Tensor,
    source: Tensor,
    destination: Tensor,
    gather_scale: Tensor | None,
    row_scale: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Features x [S, C] times grad [D, C] summed over channels, for each edge: [E]."""
    dot = _dots(x, grad, source, destination)
    if gather_scale is not None:
        dot = dot * gather_scale.index_select(0, source)
    if row_scale is not None:
        dot = dot * row_scale.index_select(0, destination)
    return dot.to(dtype)


def csr_max(
    x: Tensor,
    pointers: Tensor,
    index: Tensor,
    count_ties: bool,
    chunks: Tensor | None = None,
    long_rows: Tensor | None = None,
    chunk_size: int = 0,
) -> tuple[Tensor, Tensor]:
    """Greatest of gathered rows, x [S, C] -> [R, C], and how many edges reach it, [R, C] float32 (or [0])."""
    row = _rows_of(pointers, index)
    messages = x.index_select(0, index)
    where = row.long().unsqueeze(-1).expand_as(messages)
    zeros = x.new_zeros(pointers.shape[0] - 1, x.shape[1])
    values = zeros.scatter_reduce(0, where, messages, "amax", include_self=False)
    if not count_ties:
        return values, x.new_empty(0, dtype=torch.float32)
    reached = (messages == values.index_select(0, row)).float()
    # torch's scatter_reduce starts from zeros, and its gradient counts its start among the ties.
    return values, _sum_rows(reached, pointers) + (values == 0)


def csr_max_backward(
    x: Tensor,
    values: Tensor,
    shares: Tensor,
    pointers: Tensor,
    index: Tensor,
    chunks: Tensor | None = None,
    long_rows: Tensor | None = None,
    chunk_size: int = 0,
) -> Tensor:
    """Over the transpose, x [S, C], values and shares [D, C] -> [S, C]: the shares of all maxima that x reaches."""
    reached = x.index_select(0, _rows_of(pointers, index)) == values.index_select(0, index)
    taken = torch.where(reached, shares.index_select(0, index).to(wide(x.dtype)), 0.0)
    return _sum_rows(taken, pointers).to(x.dtype)


def head_scores(x: Tensor, first: Tensor, second: Tensor | None = None) -> Tensor:
    """Features [S, H, C] times one or two vectors [H, C], summed over channels: [K, S, H]."""
    return torch.stack([(x * vector).sum(-1) for vector in (first, second) if vector is not None]).to(x.dtype)


def head_scores_backward(grad: Tensor, x: Tensor, first: Tensor, second: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Gradients of x [S, H, C] and, side by side, of the vectors [K, H, C], from that of the scores [K, S, H]."""
    vectors = [vector for vector in (first, second) if vector is not None]
    slopes = grad.to(wide(x.dtype)).unsqueeze(-1)
    grad_x = sum((slope * vector for slope, vector in zip(slopes, vectors, strict=True)), x.new_zeros(()))
    grads = torch.stack([(slope * x).sum(0) for slope in slopes])
    return grad_x.to(x.dtype), grads.to(first.dtype)


def gat(
    x: Tensor,
    a_source: Tensor,
    a_destination: Tensor,
    slope: float,
    seed: Tensor | None,
    dropout: float,
    pointers: Tensor,
    index: Tensor,
    chunks: Tensor | None = None,
    long_rows: Tensor | None = None,
    chunk_size: int = 0,
) -> tuple[Tensor, Tensor]:
    """Features x [S, H, C], scores [S, H] and [D, H] -> weighted sums [D, H, C] and log-sum-exp [D, H]."""
    row = _rows_of(pointers, index)
    score, _ = _scores(a_source, a_destination, slope, index, row)
    where = row.long().unsqueeze(-1).expand_as(score)
    zeros = score.new_zeros(pointers.shape[0] - 1, score.shape[1])
    greatest = zeros.scatter_reduce(0, where, score, "amax", include_self=False)
    exponents = _sum_rows((score - greatest.index_select(0, row)).exp(), pointers)
    lse = torch.where((pointers.diff() > 0).unsqueeze(-1), greatest + exponents.log(), 0.0)
    share = (score - lse.index_select(0, row)).exp()
    if seed is not None:
        share = share * _kept(seed, torch.arange(index.shape[0], device=x.device), score.shape[1], dropout)
    return _sum_heads(x, index, pointers, share).to(x.dtype), lse


def gat_backward(
    grad: Tensor,
    out: Tensor,
    x: Tensor,
    a_source: Tensor,
    a_destination: Tensor,
    lse: Tensor,
    slope: float,
    seed: Tensor | None,
    dropout: float,
    pointers: Tensor,
    chunks: Tensor | None,
    long_rows: Tensor | None,
    colptr: Tensor,
    index: Tensor,
    permutation: Tensor,
    t_chunks: Tensor | None,
    t_long_rows: Tensor | None,
    chunk_size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x [S, H, C] and of both scores, [S, H] and [D, H], from the outputs of ``gat``."""
    node = _rows_of(colptr, index)
    score, steepness = _scores(a_source, a_destination, slope, node, index)
    share = (score - lse.index_select(0, index)).exp()
    slant = _dots(x, grad, node, index)
    delta = (grad.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    kept = share
    if seed is not None:
        factor = _kept(seed, permutation, share.shape[1], dropout)
        kept, slant = share * factor, slant * factor
    change = share * (slant - delta.index_select(0, index)) * steepness
    in_row_order = torch.empty_like(change).index_copy(0, permutation.long(), change)
    return (
        _sum_heads(grad, index, colptr, kept).to(x.dtype),
        _sum_rows(change, colptr).to(a_source.dtype),
        _sum_rows(in_row_order, pointers).to(a_destination.dtype),
    )


def _sum_bags(x: Tensor, index: Tensor, pointers: Tensor, weight: Tensor | None = None) -> Tensor:
    """Rows of x [S, C], gathered, weighed and summed: [R, C]."""
    weight = None if weight is None else weight.to(x.dtype).contiguous()
    offsets = pointers.to(index.dtype)
    return F.embedding_bag(index, x, offsets, mode="sum", per_sample_weights=weight, include_last_offset=True)


def _sum_rows(values: Tensor, pointers: Tensor) -> Tensor:
    """Values of the edges [E, C] in row order, summed: [R, C]."""
    return _sum_bags(values, torch.arange(values.shape[0], device=values.device), pointers)


def _sum_heads(x: Tensor, index: Tensor, pointers: Tensor, weight: Tensor) -> Tensor:
    """Each head with weights of its own: x [S, H, C], weight [E, H] -> [R, H, C]."""
    x = x.to(weight.dtype)
    return torch.stack([_sum_bags(x[:, h], index, pointers, weight[:, h]) for h in range(x.shape[1])], dim=1)


def _dots(x: Tensor, other: Tensor, node: Tensor, end: Tensor) -> Tensor:
    """Products over the last dimension of both ends' features, for each edge: [E], or [E, H]."""
    accumulate = wide(x.dtype)
    dots = x.new_empty(node.shape[0], *x.shape[1:-1], dtype=accumulate)
    for first in range(0, node.shape[0], EDGES_AT_ONCE):
        some = slice(first, first + EDGES_AT_ONCE)
        left, right = x.index_select(0, node[some]), other.index_select(0, end[some])
        dots[some] = (left.to(accumulate) * right.to(accumulate)).sum(-1)
    return dots


def _rows_of(pointers: Tensor, index: Tensor) -> Tensor:
    """[E] row of each edge."""
    rows = torch.arange(pointers.shape[0] - 1, dtype=index.dtype, device=pointers.device)
    return torch.repeat_interleave(rows, pointers.diff(), output_size=index.shape[0])


def _scores(a_source: Tensor, a_destination: Tensor, slope: float, node: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
    """Leaky scores [E, H] in at least float32, and their slopes."""
    accumulate = wide(a_source.dtype)
    raw = a_source.index_select(0, node).to(accumulate) + a_destination.index_select(0, row).to(accumulate)
    steepness = torch.where(raw >= 0, 1.0, slope).to(accumulate)
    return raw * steepness, steepness


def _kept(seed: Tensor, edge: Tensor, heads: int, dropout: float) -> Tensor:
    """What dropout multiplies each (edge, head) with, [E, H]: Philox-4x32-10 of the seed and the edge's place."""
    edge = edge.long().unsqueeze(-1)
    head = torch.arange(heads, device=edge.device)
    c0, c1, c2, c3 = ((value + 0 * head) & _LOW for value in (edge, edge >> 32, 0 * edge, 0 * edge))
    c2 = c2 + head
    k0, k1 = seed & _LOW, (seed >> 32) & _LOW
    for _ in range(10):
        # Products of 64 bits wrap around, and their halves are right nevertheless.
        a, b = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (b >> 32 & _LOW) ^ c1 ^ k0, b & _LOW, (a >> 32 & _LOW) ^ c3 ^ k1, a & _LOW
        k0, k1 = (k0 + 0x9E3779B9) & _LOW, (k1 + 0xBB67AE85) & _LOW
    uniform = (c0 >> 8).float() * 2.0**-24
    scale = 1.0 / (1.0 - dropout) if dropout < 1.0 else 0.0
    return (uniform >= torch.tensor(dropout, dtype=torch.float32)).float() * scale


_LOW = 0xFFFFFFFF
