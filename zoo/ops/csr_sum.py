"""Sums, means and maxima over the edges of a graph. Kernels sum in float32 and without atomics: the same bits each run.

No sum by a kernel holds a tensor of E x C. Shape legend: S sources, D destinations, E edges, W columns, C channels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zoo.engine.autograd import differentiable_once
from zoo.ops import triton as kernels
from zoo.ops.common import accumulation_dtype, differentiated, kernels_run
from zoo.ops.csr import GraphTensors, Own, columns_of, edge_max, edge_sum, rows_from, rows_of


def sum_neighbours(
    x: Tensor, graph: GraphTensors, *, bias: Tensor | None = None, own: Own = None, channels: int | None = None
) -> Tensor:
    """Sum over incoming edges, times the graph's weights if it has any, plus bias [C]: x [S, W] -> [D, C].

    C is ``channels`` if columns follow in x that are padding, else W. With ``own="added"``, x [S, 2 W] holds what
    neighbours give beside what each node keeps, and the second half of each destination's own row (the source of the
    same number) is added. With ``own="beside"`` the destination's row is put beside its sum: [D, 2 C].

    Raises:
        RuntimeError: If kernels run, gradients are wanted and the graph has no transpose.
    """
    return _csr_sum(x, graph, graph.weight, None, bias, own, channels)


def mean_neighbours(
    x: Tensor, graph: GraphTensors, *, bias: Tensor | None = None, own: Own = None, channels: int | None = None
) -> Tensor:
    """Mean over incoming edges, zero where there are none; as ``sum_neighbours``. Needs ``inverse_degree``."""
    if graph.inverse_degree is None:
        raise ValueError("a mean needs the graph's inverse degrees: graph.prepared(Recipe(mean=True))")
    scale = graph.inverse_degree
    if x.dtype == torch.float64 != scale.dtype:
        # A sampled batch has them in float32, whatever its model.
        scale = graph.rowptr.diff().clamp(min=1).to(x.dtype).reciprocal()
    return _csr_sum(x, graph, None, scale, bias, own, channels)


def _csr_sum(
    x: Tensor, graph: GraphTensors, weight: Tensor | None, scale: Tensor | None, bias: Tensor | None, own: Own,
    channels: int | None,
) -> Tensor:  # fmt: skip
    width = x.shape[1] // 2 if own == "added" else x.shape[1]
    channels = width if channels is None else channels
    if kernels_run(x, weight, scale, bias):
        rows = rows_of(graph)
        if not differentiated(*[each for each in (x, weight, bias) if each is not None]):
            return kernels.csr_sum.csr_sum(x, rows, weight, None, scale, bias, own, channels)
        columns = columns_of(graph)
        t_weight = None if weight is None or graph.transpose is None else graph.transpose.weight
        return _CsrSum.apply(
            x, weight, bias, scale, own, channels, (rows.chunk_size, columns.chunk_size), t_weight, graph.destination,
            *rows[:4], *columns[:4],
        )  # fmt: skip
    dtype, number = accumulation_dtype(x.dtype), graph.rowptr.shape[0] - 1
    total = edge_sum(x[:, :channels].to(dtype), graph, None if weight is None else weight.to(dtype))
    if scale is not None:
        total = total * scale.to(dtype).unsqueeze(1)
    if own == "added":
        total = total + x[:number, width : width + channels]
    if bias is not None:
        total = total + bias
    total = total.to(x.dtype)
    return torch.cat([total, x[:number]], dim=1) if own == "beside" else total


_OTHER_WAY: dict[Own, Own] = {None: None, "added": "beside", "beside": "added"}


class _CsrSum(torch.autograd.Function):
    """The gradient of a sum is one over the transpose: what was added comes to lie beside, and the other way round."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, scale: Tensor | None, own: Own, channels: int,
        sizes: tuple[int, int], t_weight: Tensor | None, destination: Tensor, *tables: Any,
    ) -> Tensor:  # fmt: skip
        ctx.own, ctx.channels, ctx.sizes, ctx.width = own, channels, sizes, x.shape[1]
        ctx.weight_dtype = None if weight is None else weight.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        # The features are needed for the gradient of weights alone.
        x_kept = x if ctx.needs_input_grad[1] else None
        ctx.save_for_backward(x_kept, scale, t_weight, tables[1], destination, *tables[4:])
        return kernels.csr_sum.csr_sum(x, rows_from(tables[:4], sizes[0]), weight, None, scale, bias, own, channels)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, scale, t_weight, source, destination, *tables = ctx.saved_tensors
        grad_x = grad_weight = grad_bias = None
        channels = ctx.channels
        if ctx.needs_input_grad[0]:
            columns, own = rows_from(tables, ctx.sizes[1]), _OTHER_WAY[ctx.own]
            width = ctx.width // 2 if ctx.own == "added" else ctx.width
            grad_x = kernels.csr_sum.csr_sum(grad, columns, t_weight, scale, None, None, own, width)
        if ctx.needs_input_grad[1]:
            grad_weight = kernels.csr_sum.edge_dot(x, grad, source, destination, channels, ctx.weight_dtype)
        if ctx.needs_input_grad[2]:
            grad_bias = grad[:, :channels].sum(0, dtype=ctx.bias_dtype)
        return grad_x, grad_weight, grad_bias, *(None,) * 14


def max_neighbours(x: Tensor, graph: GraphTensors) -> Tensor:
    """Greatest value over incoming edges, zero where there are none: x [S, C] -> [D, C].

    Ties share the gradient as in torch's ``scatter_reduce``: a maximum of zero counts once more, for the zeros that it
    starts from.

    Raises:
        RuntimeError: If kernels run, gradients are wanted and the graph has no transpose.
    """
    if kernels_run(x):
        if differentiated(x):
            rows, columns = rows_of(graph), columns_of(graph)
            return _CsrMax.apply(x, (rows.chunk_size, columns.chunk_size), *rows[:4], *columns[:4])
        return kernels.csr_sum.csr_max(x, rows_of(graph), False)[0]
    return edge_max(x.index_select(0, graph.source), graph)


class _CsrMax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: tuple[int, int], *tables: Any) -> Tensor:
        values, ties = kernels.csr_sum.csr_max(x, rows_from(tables[:4], sizes[0]), True)
        ctx.size = sizes[1]
        ctx.save_for_backward(x, values, ties, *tables[4:])
        return values

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, values, ties, *tables = ctx.saved_tensors
        # Nodes without neighbours have no ties, and nobody asks for their shares.
        shares = (grad / ties).to(grad.dtype)
        return kernels.csr_sum.csr_max_backward(x, values, shares, rows_from(tables, ctx.size)), *(None,) * 9
