"""Maxima over the edges of a graph. Shape legend: S sources, D destinations, E edges, C channels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zoo.ops.common import differentiable_once, differentiated, kernels_run
from zoo.ops.csr import GraphTensors, Rows, columns_of, edge_max, rows_of


def max_neighbours(x: Tensor, graph: GraphTensors) -> Tensor:
    """Greatest value over incoming edges, zero where there are none: x [S, C] -> [D, C].

    Ties share the gradient as in torch's ``scatter_reduce``: a maximum of zero counts once more, for the zeros that it
    starts from.

    Raises:
        RuntimeError: If kernels run, gradients are wanted and the graph has no transpose.
    """
    if kernels_run(x):
        if differentiated(x):
            rows, columns = rows_of(graph), columns_of(graph, True)
            out: Tensor = _CsrMax.apply(x, (rows.chunk_size, columns.chunk_size), *rows[:4], *columns[:4])
            return out
        from zoo.ops.triton import csr_max as kernels

        return kernels.csr_max(x, rows_of(graph), False)[0]
    return edge_max(x.index_select(0, graph.source), graph)


class _CsrMax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: tuple[int, int], *tables: Any) -> Tensor:
        from zoo.ops.triton import csr_max as kernels

        values, ties = kernels.csr_max(x, Rows(*tables[:4])._replace(chunk_size=sizes[0]), True)
        ctx.size = sizes[1]
        ctx.save_for_backward(x, values, ties, *tables[4:])
        return values

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        from zoo.ops.triton import csr_max as kernels

        x, values, ties, *tables = ctx.saved_tensors
        # Nodes without neighbours have no ties, and nobody asks for their shares.
        shares = (grad / ties).to(grad.dtype)
        return kernels.csr_max_backward(x, values, shares, Rows(*tables)._replace(chunk_size=ctx.size)), *(None,) * 9
