"""Graph attention over the edges of a graph (https://arxiv.org/abs/1710.10903).

Shape legend: S sources, D destinations, E edges, H heads, C channels.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.engine.autograd import differentiable_once
from zoo.ops import triton as kernels
from zoo.ops.common import accumulation_dtype, differentiated, kernels_run
from zoo.ops.csr import GraphTensors, columns_of, edge_max, edge_sum, rows_from, rows_of

# The kernels hold all channels of a head at once.
WIDEST_HEAD = 4096


def attention(
    table: Tensor, a_destination: Tensor | None, heads: int, graph: GraphTensors, slope: float, dropout: float = 0.0, *,
    average: bool = False,
) -> Tensor:  # fmt: skip
    """Neighbours weighed by the softmax of their leaky scores: [D, H C] or, the ``average`` over heads, [D, C].

    The table [S, H C + H] holds the features of all heads, then the sources' part of each edge's score. The
    destinations' part is a_destination [D, H], or None if it is last in the table, [N, H C + 2 H]. Dropout is the
    probability that a neighbour is left out. The graph's weights are not used; rows without neighbours are zero. A
    RuntimeError if kernels run, gradients are wanted and the graph has no transpose.
    """
    channels = table.shape[1] // heads - (2 if a_destination is None else 1)
    if channels <= WIDEST_HEAD and kernels_run(table, a_destination):
        # The seed is drawn on the device, so that each replay of a CUDA graph draws another.
        seed = torch.randint(2**62, (1,), device=table.device) if dropout > 0.0 else None
        plan = heads, channels, average, slope
        if differentiated(*[each for each in (table, a_destination) if each is not None]):
            rows, columns = rows_of(graph), columns_of(graph)
            assert graph.transpose is not None
            return _Attention.apply(
                table, a_destination, plan, seed, dropout, (rows.chunk_size, columns.chunk_size),
                graph.transpose.permutation, *rows[:4], *columns[:4],
            )  # fmt: skip
        return kernels.csr_attention.gat(table, a_destination, *plan, seed, dropout, rows_of(graph))[0]
    x, scores = table[:, : heads * channels].unflatten(1, (heads, channels)), table[:, heads * channels :]
    own = scores[:, heads:] if a_destination is None else a_destination
    dtype = accumulation_dtype(table.dtype)
    own = F.pad(own[: graph.rowptr.shape[0] - 1].to(dtype), (0, 0, 0, 1))  # edges that are padding have a row too
    score = scores[:, :heads].to(dtype).index_select(0, graph.source) + own.index_select(0, graph.destination)
    score = F.leaky_relu(score, slope)
    # Shifting by the greatest score changes nothing but overflow, so no gradient need pass.
    greatest = F.pad(edge_max(score.detach(), graph), (0, 0, 0, 1))
    share = (score - greatest.index_select(0, graph.destination)).exp()
    total = share.new_zeros(graph.rowptr.shape[0], heads).index_add(0, graph.destination, share)
    share = F.dropout(share / total.index_select(0, graph.destination), dropout)
    sums = edge_sum(x.to(dtype), graph, share)
    return (sums.mean(1) if average else sums.flatten(1)).to(table.dtype)


class _Attention(torch.autograd.Function):
    """The backward computes the weights anew, from the log of the sum of exponents [D, H]."""

    @staticmethod
    def forward(
        ctx: Any, table: Tensor, a_destination: Tensor | None, plan: tuple[int, int, bool, float], seed: Tensor | None,
        dropout: float, sizes: tuple[int, int], permutation: Tensor, *tables: Any,
    ) -> Tensor:  # fmt: skip
        rows = rows_from(tables[:4], sizes[0])
        out, lse = kernels.csr_attention.gat(table, a_destination, *plan, seed, dropout, rows)
        ctx.plan, ctx.dropout, ctx.sizes = plan, dropout, sizes
        ctx.save_for_backward(table, a_destination, lse, seed, permutation, *tables)
        return out

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        table, a_destination, lse, seed, permutation, *tables = ctx.saved_tensors
        rows, columns = rows_from(tables[:4], ctx.sizes[0]), rows_from(tables[4:], ctx.sizes[1])
        grads = kernels.csr_attention.gat_backward(
            grad, table, a_destination, lse, *ctx.plan, seed, ctx.dropout, rows, columns, permutation
        )
        return *grads, *(None,) * 13
