"""What the kernels compute, in torch's own operators: for the CPU, float64 and where Triton is missing.

Each function has the signature of its namesake in zoo/gnn/kernels and the same results but for rounding, dropout
included. Tables of chunks are of no use here.

Sums go through ``embedding_bag``: rows are bags, and no tensor of E x C is made. It is a hundred times faster on a CPU
than gathering and ``index_add``, compiled or not, and deterministic. Half precision is summed in float32.

Shape legend: R rows, S gathered nodes, D destinations, E edges, H heads, C channels, W as in kernels/attention.py.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.gnn.split import Rows
from zoo.ops.common import wide

# Edges whose features are held at once where a dot product of both ends is needed.
EDGES_AT_ONCE = 1 << 18


def csr_sum(
    x: Tensor,
    rows: Rows,
    weight: Tensor | None = None,
    gather_scale: Tensor | None = None,
    row_scale: Tensor | None = None,
    root: Tensor | None = None,
    beside: bool = False,
) -> Tensor:
    """Weighted sum of gathered rows plus ``root`` [R or more, C], or with it beside: x [S, C] -> [R, C] or [R, 2 C]."""
    assert rows.nodes is not None
    if gather_scale is not None:
        factor = gather_scale.index_select(0, rows.nodes)
        weight = factor if weight is None else weight * factor
    total = _sum_bags(x.to(wide(x.dtype)), rows.nodes, rows.pointers, weight)
    if row_scale is not None:
        total = total * row_scale.to(total.dtype).unsqueeze(1)
    if root is not None:
        root = root[: rows.number]
        total = torch.cat([total, root.to(total.dtype)], dim=1) if beside else total + root
    return total.to(x.dtype)


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


def csr_max(x: Tensor, rows: Rows, count_ties: bool) -> tuple[Tensor, Tensor]:
    """Greatest of gathered rows, x [S, C] -> [R, C], and how many edges reach it, [R, C] float32 (or [0])."""
    rows = _without_padding(rows)
    assert rows.nodes is not None
    row = _rows_of(rows)
    messages = x.index_select(0, rows.nodes)
    where = row.long().unsqueeze(-1).expand_as(messages)
    zeros = x.new_zeros(rows.number, x.shape[1])
    values = zeros.scatter_reduce(0, where, messages, "amax", include_self=False)
    if not count_ties:
        return values, x.new_empty(0, dtype=torch.float32)
    reached = (messages == values.index_select(0, row)).float()
    # torch's scatter_reduce starts from zeros, and its gradient counts its start among the ties.
    return values, _sum_rows(reached, rows.pointers) + (values == 0)


def csr_max_backward(x: Tensor, values: Tensor, shares: Tensor, rows: Rows) -> Tensor:
    """Over the transpose, x [S, C], values and shares [D, C] -> [S, C]: the shares of all maxima that x reaches."""
    rows = _without_padding(rows)
    assert rows.nodes is not None
    reached = x.index_select(0, _rows_of(rows)) == values.index_select(0, rows.nodes)
    taken = torch.where(reached, shares.index_select(0, rows.nodes).to(wide(x.dtype)), 0.0)
    return _sum_rows(taken, rows.pointers).to(x.dtype)


def gat(
    table: Tensor,
    a_destination: Tensor | None,
    heads: int,
    channels: int,
    average: bool,
    slope: float,
    seed: Tensor | None,
    dropout: float,
    rows: Rows,
) -> tuple[Tensor, Tensor]:
    """Table [S, W], scores [D, H] unless in it -> weighted sums [D, H C] or their mean [D, C], log-sum-exp [D, H]."""
    assert rows.nodes is not None
    x, a_source, a_destination = _parts(table, a_destination, heads, channels)
    row = _rows_of(rows)
    score, _ = _scores(a_source, a_destination, slope, rows.nodes, row)
    where = row.long().unsqueeze(-1).expand_as(score)
    zeros = score.new_zeros(rows.number, heads)
    greatest = zeros.scatter_reduce(0, where, score, "amax", include_self=False)
    share = (score - greatest.index_select(0, row)).exp()
    exponents = _sum_rows(share, rows.pointers)
    lse = torch.where((rows.pointers.diff() > 0).unsqueeze(-1), greatest + exponents.log(), 0.0)
    # Not by the log: of a large greatest score it is lost in rounding.
    share = share / exponents.index_select(0, row)
    if seed is not None:
        share = share * _kept(seed, torch.arange(rows.nodes.shape[0], device=x.device), heads, dropout)
    out = _sum_heads(x, rows.nodes, rows.pointers, share)
    return (out.mean(1) if average else out.flatten(1)).to(table.dtype), lse


def gat_backward(
    grad: Tensor,
    table: Tensor,
    a_destination: Tensor | None,
    lse: Tensor,
    heads: int,
    channels: int,
    average: bool,
    slope: float,
    seed: Tensor | None,
    dropout: float,
    rows: Rows,
    transpose: Rows,
    permutation: Tensor,
) -> tuple[Tensor, Tensor]:
    """Gradients of the table [S, W] and of the destinations' scores [D, H], the latter empty if they are in it."""
    assert transpose.nodes is not None
    x, a_source, a_target = _parts(table, a_destination, heads, channels)
    if average:
        grad = (grad.to(lse.dtype) / heads).unsqueeze(1).expand(-1, heads, -1)
    else:
        grad = grad.unflatten(1, (heads, channels))
    node, end = _rows_of(transpose), transpose.nodes
    score, steepness = _scores(a_source, a_target, slope, node, end)
    share = (score - lse.index_select(0, end)).exp()
    place = permutation.long()
    # The log of a sum of large scores is rounded by more than the shares may be, and by the same for a whole row.
    share = share / _sum_rows(torch.empty_like(share).index_copy(0, place, share), rows.pointers).index_select(0, end)
    kept = share
    if seed is not None:
        kept = share * _kept(seed, permutation, heads, dropout)
    moved = kept * _dots(x, grad, node, end)
    delta = _sum_rows(torch.empty_like(moved).index_copy(0, place, moved), rows.pointers)
    change = (moved - share * delta.index_select(0, end)) * steepness
    grad_source = _sum_rows(change, transpose.pointers)
    grad_target = _sum_rows(torch.empty_like(change).index_copy(0, place, change), rows.pointers)
    parts = [_sum_heads(grad, end, transpose.pointers, kept).flatten(1), grad_source]
    if a_destination is None:
        return torch.cat([*parts, grad_target], dim=1).to(table.dtype), table.new_empty(0)
    return torch.cat(parts, dim=1).to(table.dtype), grad_target.to(table.dtype)


def _sum_bags(x: Tensor, index: Tensor, pointers: Tensor, weight: Tensor | None = None) -> Tensor:
    """Rows of x [S, C], gathered, weighed and summed: [R, C]."""
    weight = None if weight is None else weight.to(x.dtype).contiguous()
    offsets, padded = pointers.to(index.dtype), False
    # On GPUs and in float64 the last bag goes on to the end of the index, wherever it was said to end: padding is left
    # out, or is a bag of its own where looking for its start would wait for the device.
    if pointers.device.type == "cpu":
        edges = int(pointers[-1])
        index, weight = index[:edges], None if weight is None else weight[:edges]
    else:
        offsets, padded = F.pad(offsets, (0, 1), value=index.shape[0]), True
    bags = F.embedding_bag(index, x, offsets, mode="sum", per_sample_weights=weight, include_last_offset=True)
    return bags[:-1].clone() if padded else bags


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


def _without_padding(rows: Rows) -> Rows:
    """Rows without edges behind the last one, which batches of a static shape have; kernels never look there."""
    assert rows.nodes is not None
    return rows._replace(nodes=rows.nodes[: int(rows.pointers[-1])])


def _rows_of(rows: Rows) -> Tensor:
    """[E] row of each edge."""
    assert rows.nodes is not None
    numbers = torch.arange(rows.number, dtype=rows.nodes.dtype, device=rows.pointers.device)
    return torch.repeat_interleave(numbers, rows.pointers.diff(), output_size=rows.nodes.shape[0])


def _parts(table: Tensor, a_destination: Tensor | None, heads: int, channels: int) -> tuple[Tensor, Tensor, Tensor]:
    """Features [S, H, C], and the scores of sources [S, H] and destinations [D, H]."""
    x, scores = table[:, : heads * channels].unflatten(1, (heads, channels)), table[:, heads * channels :]
    return x, scores[:, :heads], scores[:, heads:] if a_destination is None else a_destination


def _scores(a_source: Tensor, a_destination: Tensor, slope: float, node: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
    """Leaky scores [E, H] in at least float32, and their slopes."""
    accumulate = wide(a_source.dtype)
    raw = a_source.index_select(0, node).to(accumulate) + a_destination.index_select(0, row).to(accumulate)
    steepness = torch.full_like(raw, slope).masked_fill(raw > 0, 1.0)
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
