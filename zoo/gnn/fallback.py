"""What the kernels compute, in torch's own operators: for the CPU, float64 and where Triton is missing.

Each function has the signature of its namesake in zoo/gnn/kernels and the same results but for rounding, dropout
included. ``pointers`` and ``index`` are rows of either orientation; tables of chunks are of no use here.

Shape legend: R rows, S gathered nodes, D destinations, E edges, H heads, C channels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zoo.gnn import plain


def rows_of(pointers: Tensor, edges: int) -> Tensor:
    """[E] row of each edge."""
    rows = torch.arange(pointers.shape[0] - 1, device=pointers.device)
    return torch.repeat_interleave(rows, pointers.diff(), output_size=edges)


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
    row = rows_of(pointers, index.shape[0])
    return plain.edge_sum(x, index, row, pointers.shape[0] - 1, weight, gather_scale, row_scale)


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
    accumulate = plain.wide(x.dtype)
    dot = (x.index_select(0, source).to(accumulate) * grad.index_select(0, destination).to(accumulate)).sum(1)
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
    row = rows_of(pointers, index.shape[0])
    values = plain.edge_max(x, index, row, pointers.shape[0] - 1)
    if not count_ties:
        return values, x.new_empty(0, dtype=torch.float32)
    reached = (x.index_select(0, index) == values.index_select(0, row)).float()
    # torch's scatter_reduce starts from zeros, and counts its start among the ties.
    return values, (values == 0).float().index_add(0, row, reached)


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
    row = rows_of(pointers, index.shape[0])
    accumulate = plain.wide(x.dtype)
    reached = x.index_select(0, row) == values.index_select(0, index)
    taken = torch.where(reached, shares.index_select(0, index).to(accumulate), 0.0)
    return taken.new_zeros(x.shape).index_add(0, row, taken).to(x.dtype)


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
    row, rows = rows_of(pointers, index.shape[0]), pointers.shape[0] - 1
    score = _scores(a_source, a_destination, slope, index, row)[0]
    zeros = score.new_zeros(rows, score.shape[1])
    wide_row = row.unsqueeze(-1).expand_as(score)
    greatest = zeros.scatter_reduce(0, wide_row, score, "amax", include_self=False)
    exponents = zeros.index_add(0, row, (score - greatest.index_select(0, row)).exp())
    lse = torch.where((pointers.diff() > 0).unsqueeze(-1), greatest + exponents.log(), 0.0)
    share = (score - lse.index_select(0, row)).exp()
    if seed is not None:
        share = share * _kept(seed, torch.arange(index.shape[0], device=x.device), score.shape[1], dropout)
    return plain.edge_sum(x, index, row, rows, share), lse


def gat_backward(
    grad: Tensor,
    x: Tensor,
    a_source: Tensor,
    a_destination: Tensor,
    lse: Tensor,
    delta: Tensor,
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
    """Gradients of x [S, H, C] and of both scores, [S, H] and [D, H]. ``delta`` [D, H] is grad times out, summed."""
    node = rows_of(colptr, index.shape[0])
    score, steepness = _scores(a_source, a_destination, slope, node, index)
    share = (score - lse.index_select(0, index)).exp()
    message = grad.index_select(0, index).to(plain.wide(x.dtype))
    slant = (message * x.index_select(0, node)).sum(-1)
    kept = share
    if seed is not None:
        factor = _kept(seed, permutation, share.shape[1], dropout)
        kept, slant = share * factor, slant * factor
    change = share * (slant - delta.index_select(0, index)) * steepness
    grad_x = message.new_zeros(x.shape).index_add(0, node, kept.unsqueeze(-1) * message)
    grad_a_source = change.new_zeros(a_source.shape).index_add(0, node, change)
    grad_a_destination = change.new_zeros(a_destination.shape).index_add(0, index, change)
    return grad_x.to(x.dtype), grad_a_source.to(a_source.dtype), grad_a_destination.to(a_destination.dtype)


def _scores(a_source: Tensor, a_destination: Tensor, slope: float, node: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
    """Leaky scores [E, H] in at least float32, and their slopes."""
    accumulate = plain.wide(a_source.dtype)
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


def head_scores(x: Tensor, vectors: Tensor) -> Tensor:
    """Features [S, H, C] times vectors [K, H, C], summed over channels: [K, S, H]."""
    return (x * vectors.unsqueeze(1)).sum(-1)
