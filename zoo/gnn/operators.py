"""The kernels as torch operators, so that a region that uses them stays one graph.

An operator runs a Triton kernel on a GPU and torch's own operators elsewhere (on the CPU, in float64, on GPUs that
Triton does not know, where it is not installed). Triton is imported when a kernel runs first. All operators are
deterministic where kernels run. Rows of the transpose are needed for backward passes alone and may be left out without
gradients.

Shape legend: S sources, D destinations, E edges, H heads, C channels; X chunks and L long rows as in split.py.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.gnn import fallback
from zoo.gnn.split import Rows
from zoo.ops.common import KERNEL_DTYPES, triton_runs_on, wide
from zoo.ops.opaque import OperatorLibrary, launcher

# Where kernels may run: long rows are cut for them.
DEVICES: tuple[str, ...] = ("cuda",)
# The kernels hold all channels of a head at once.
WIDEST_HEAD = 4096

_LIBRARY = OperatorLibrary("zoo_gnn")


def _implementation(module: str, name: str, x: Tensor) -> Callable[..., Any]:
    """The kernel's launcher of ``zoo.gnn.kernels.<module>``, or what stands in for it."""
    if x.dtype not in KERNEL_DTYPES or not triton_runs_on(x.device):
        return getattr(fallback, name)
    return launcher(f"zoo.gnn.kernels.{module}", name, x)


def tell_flop_counter() -> None:
    """Register FLOP formulas if somebody counts. Importing torch's counter would bring Triton in."""
    if "torch.utils.flop_counter" in sys.modules:
        importlib.import_module("zoo.gnn.flops")


def _transpose_of(pointers: Tensor | None) -> Tensor:
    if pointers is None:
        raise RuntimeError(
            "a gradient of an aggregation walks the transposed graph, which this one was prepared without; run the "
            "forward with gradients enabled on a CSRGraph or on raw edges"
        )
    return pointers


# --- sums ---


@_LIBRARY.operator(
    "(Tensor x, Tensor pointers, Tensor index, Tensor? weight, Tensor? gather_scale, Tensor? row_scale, Tensor? root, "
    "bool beside, Tensor? chunks, Tensor? long_rows, Tensor? row, Tensor? t_pointers, Tensor? t_index, "
    "Tensor? t_weight, Tensor? t_chunks, Tensor? t_long_rows) -> Tensor",
)
def csr_sum(
    x: Tensor,
    pointers: Tensor,
    index: Tensor,
    weight: Tensor | None,
    gather_scale: Tensor | None,
    row_scale: Tensor | None,
    root: Tensor | None,
    beside: bool,
    chunks: Tensor | None,
    long_rows: Tensor | None,
    row: Tensor | None,
    t_pointers: Tensor | None,
    t_index: Tensor | None,
    t_weight: Tensor | None,
    t_chunks: Tensor | None,
    t_long_rows: Tensor | None,
) -> Tensor:
    """Weighted sums over rows: x [S, C] -> [D, C], or [D, 2 C] with ``beside``.

    Args:
        x: [S, C].
        pointers: [D + 1] int64, where each row's edges start.
        index: [E], the source of each edge.
        weight: [E], a factor an edge.
        gather_scale: [S], a factor a source.
        row_scale: [D], a factor a sum.
        root: [D, C], added to the sums; of more rows the first D.
        beside: Put ``root`` beside the sums instead.
        chunks: Chunks of long rows; see split.py.
        long_rows: The long rows themselves.
        row: [E], the destination of each edge: for the gradient of ``weight``.
        t_pointers: [S + 1], as ``pointers`` and the following, of the transpose: for the gradient of ``x``.
        t_index: [E].
        t_weight: [E], the weights in the order of the transpose.
        t_chunks: Chunks of the transpose.
        t_long_rows: Long rows of the transpose.
    """
    rows = Rows(pointers, index, chunks, long_rows)
    return _implementation("sums", "csr_sum", x)(x, rows, weight, gather_scale, row_scale, root, beside)


@_LIBRARY.fake("csr_sum")
def _(
    x: Tensor,
    pointers: Tensor,
    index: Tensor,
    weight: Tensor | None,
    gather_scale: Tensor | None,
    row_scale: Tensor | None,
    root: Tensor | None,
    beside: bool,
    *_: Any,
) -> Tensor:
    return x.new_empty(pointers.shape[0] - 1, x.shape[1] * (2 if beside else 1))


def _csr_sum_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, pointers, index, weight, gather_scale, row_scale, root, ctx.beside, *tables = inputs
    ctx.own_root, ctx.root_rows = root is x, 0 if root is None else root.shape[0]
    # The features are needed for the gradient of weights alone.
    x = x if ctx.needs_input_grad[3] else None
    ctx.save_for_backward(x, pointers, index, weight, gather_scale, row_scale, *tables)


def _csr_sum_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, pointers, index, weight, gather_scale, row_scale, chunks, long_rows, row, *transpose = ctx.saved_tensors
    t_pointers, t_index, t_weight, t_chunks, t_long_rows = transpose
    if ctx.needs_input_grad[4] or ctx.needs_input_grad[5]:
        raise NotImplementedError("scales of nodes have no gradient; multiply outside of the operator")
    grad_x: Tensor | None = None
    grad_weight = grad_root = None
    grad, beside = grad.chunk(2, dim=1) if ctx.beside else (grad, grad)
    if ctx.needs_input_grad[0]:
        grad_x = csr_sum(
            grad, _transpose_of(t_pointers), t_index, t_weight, row_scale, gather_scale, None, False, t_chunks,
            t_long_rows, None, pointers, index, weight, chunks, long_rows,
        )  # fmt: skip
    if ctx.needs_input_grad[3]:
        if row is None and torch.is_grad_enabled():
            raise NotImplementedError("weights of edges have no second derivative")
        grad_weight = edge_dot(x, grad, index, _transpose_of(row), gather_scale, row_scale, weight.dtype)
    if ctx.own_root and grad_x is not None and not torch.is_grad_enabled():
        # One tensor's both: added where it has rows, which autograd would pad to those of all sources first.
        grad_x[: beside.shape[0]] += beside
    elif ctx.needs_input_grad[6]:
        more = ctx.root_rows - beside.shape[0]
        grad_root = F.pad(beside, (0, 0, 0, more)) if more else beside
    return grad_x, None, None, grad_weight, None, None, grad_root, *(None,) * 9


_LIBRARY.autograd("csr_sum", _csr_sum_backward, _csr_sum_context, twice=True)


@_LIBRARY.operator(
    "(Tensor x, Tensor grad, Tensor source, Tensor destination, Tensor? gather_scale, Tensor? row_scale, "
    "ScalarType dtype) -> Tensor",
)
def edge_dot(
    x: Tensor,
    grad: Tensor,
    source: Tensor,
    destination: Tensor,
    gather_scale: Tensor | None,
    row_scale: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Features x [S, C] times grad [D, C], summed over channels, for each edge [E] and times its nodes' scales."""
    return _implementation("sums", "edge_dot", x)(x, grad, source, destination, gather_scale, row_scale, dtype)


@_LIBRARY.fake("edge_dot")
def _(
    x: Tensor,
    grad: Tensor,
    source: Tensor,
    destination: Tensor,
    gather_scale: Tensor | None,
    row_scale: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    return x.new_empty(source.shape[0], dtype=dtype)


_LIBRARY.no_gradient("edge_dot", "weights of edges have no second derivative")


# --- maxima ---


@_LIBRARY.operator(
    "(Tensor x, Tensor pointers, Tensor index, bool count_ties, Tensor? chunks, Tensor? long_rows, "
    "Tensor? t_pointers, Tensor? t_index, Tensor? t_chunks, Tensor? t_long_rows) -> (Tensor, Tensor)",
)
def csr_max(
    x: Tensor,
    pointers: Tensor,
    index: Tensor,
    count_ties: bool,
    chunks: Tensor | None,
    long_rows: Tensor | None,
    t_pointers: Tensor | None,
    t_index: Tensor | None,
    t_chunks: Tensor | None,
    t_long_rows: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Maxima over rows, x [S, C] -> [D, C], zero for empty rows; arguments as of ``csr_sum``.

    With ``count_ties``, which a gradient needs, also how many edges share each maximum, [D, C] float32; else [0]. As in
    torch's ``scatter_reduce`` a maximum of zero counts once more, for the zeros that it starts from.
    """
    return _implementation("maxima", "csr_max", x)(x, Rows(pointers, index, chunks, long_rows), count_ties)


@_LIBRARY.fake("csr_max")
def _(x: Tensor, pointers: Tensor, index: Tensor, count_ties: bool, *_: Any) -> tuple[Tensor, Tensor]:
    shape = (pointers.shape[0] - 1, x.shape[1])
    return x.new_empty(shape), x.new_empty(shape if count_ties else (0,), dtype=torch.float32)


def _csr_max_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, _, _, count_ties, _, _, *transpose = inputs
    if not count_ties:
        raise RuntimeError("the gradient of a maximum needs its ties: count_ties=True")
    ctx.save_for_backward(x, *output, *transpose)


def _csr_max_backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    x, values, ties, t_pointers, t_index, t_chunks, t_long_rows = ctx.saved_tensors
    # Nodes without neighbours have no ties, and nobody asks for their shares.
    shares = (grad / ties).to(grad.dtype)
    grad_x = csr_max_backward(x, values, shares, _transpose_of(t_pointers), t_index, t_chunks, t_long_rows)
    return grad_x, *(None,) * 9


_LIBRARY.autograd("csr_max", _csr_max_backward, _csr_max_context)


@_LIBRARY.operator(
    "(Tensor x, Tensor values, Tensor shares, Tensor t_pointers, Tensor t_index, Tensor? t_chunks, "
    "Tensor? t_long_rows) -> Tensor",
)
def csr_max_backward(
    x: Tensor,
    values: Tensor,
    shares: Tensor,
    t_pointers: Tensor,
    t_index: Tensor,
    t_chunks: Tensor | None,
    t_long_rows: Tensor | None,
) -> Tensor:
    """The sum of ``shares`` [D, C] over all edges at whose end x [S, C] reaches ``values`` [D, C]: [S, C]."""
    rows = Rows(t_pointers, t_index, t_chunks, t_long_rows)
    return _implementation("maxima", "csr_max_backward", x)(x, values, shares, rows)


@_LIBRARY.fake("csr_max_backward")
def _(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape)


# --- attention ---


@_LIBRARY.operator(
    "(Tensor table, Tensor? a_destination, int heads, int channels, bool average, float slope, Tensor? seed, "
    "float dropout, Tensor pointers, Tensor index, Tensor? chunks, Tensor? long_rows, Tensor? t_pointers, "
    "Tensor? t_index, Tensor? permutation, Tensor? t_chunks, Tensor? t_long_rows) -> (Tensor, Tensor)",
)
def gat(
    table: Tensor,
    a_destination: Tensor | None,
    heads: int,
    channels: int,
    average: bool,
    slope: float,
    seed: Tensor | None,
    dropout: float,
    pointers: Tensor,
    index: Tensor,
    chunks: Tensor | None,
    long_rows: Tensor | None,
    t_pointers: Tensor | None,
    t_index: Tensor | None,
    permutation: Tensor | None,
    t_chunks: Tensor | None,
    t_long_rows: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Neighbours weighed by the softmax of their leaky scores, and the log of the sum of exponents.

    Args:
        table: [S, H C + H], features of all heads and one part of the score of an edge; or [N, H C + 2 H] with the
            other part as well, where sources and destinations are the same nodes.
        a_destination: [D, H], the other part of the scores, where the table has it not.
        heads: H.
        channels: C.
        average: Take the mean over heads.
        slope: Of the leaky relu below zero.
        seed: [1] int64 for dropout of weights, or None.
        dropout: Probability that an edge's weight is zero; the others grow by 1 / (1 - dropout).
        pointers: This and the others as of ``csr_sum``.
        index: [E].
        chunks: Of long rows.
        long_rows: Long rows.
        t_pointers: [S + 1].
        t_index: [E].
        permutation: [E], place in row order of each edge of the transpose.
        t_chunks: Of the transpose.
        t_long_rows: Of the transpose.

    Returns:
        [D, H C], or [D, C] with ``average``, in the dtype of the table, zero for empty rows; [D, H] in at least
        float32.
    """
    return _attention("gat", table, channels)(
        table, a_destination, heads, channels, average, slope, seed, dropout, Rows(pointers, index, chunks, long_rows)
    )


def _attention(name: str, table: Tensor, channels: int) -> Callable[..., Any]:
    if channels > WIDEST_HEAD:
        return getattr(fallback, name)
    return _implementation("attention", name, table)


@_LIBRARY.fake("gat")
def _(
    table: Tensor,
    a_destination: Tensor | None,
    heads: int,
    channels: int,
    average: bool,
    slope: float,
    seed: Tensor | None,
    dropout: float,
    pointers: Tensor,
    *_: Any,
) -> tuple[Tensor, Tensor]:
    rows = pointers.shape[0] - 1
    out = table.new_empty(rows, channels if average else heads * channels)
    return out, table.new_empty(rows, heads, dtype=wide(table.dtype))


def _gat_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    table, a_destination, ctx.heads, ctx.channels, ctx.average, ctx.slope, seed, ctx.dropout, *rest = inputs
    pointers, _, *tables = rest
    ctx.save_for_backward(table, a_destination, output[1], seed, pointers, *tables)


def _gat_backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    table, a_destination, lse, seed, pointers, chunks, long_rows, *transpose = ctx.saved_tensors
    t_pointers, t_index, permutation, t_chunks, t_long_rows = transpose
    grad_table, grad_a = gat_backward(
        grad, table, a_destination, lse, ctx.heads, ctx.channels, ctx.average, ctx.slope, seed, ctx.dropout, pointers,
        chunks, long_rows, _transpose_of(t_pointers), t_index, permutation, t_chunks, t_long_rows,
    )  # fmt: skip
    return grad_table, None if a_destination is None else grad_a, *(None,) * 15


_LIBRARY.autograd("gat", _gat_backward, _gat_context)


@_LIBRARY.operator(
    "(Tensor grad, Tensor table, Tensor? a_destination, Tensor lse, int heads, int channels, bool average, "
    "float slope, Tensor? seed, float dropout, Tensor pointers, Tensor? chunks, Tensor? long_rows, Tensor t_pointers, "
    "Tensor t_index, Tensor permutation, Tensor? t_chunks, Tensor? t_long_rows) -> (Tensor, Tensor)",
)
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
    pointers: Tensor,
    chunks: Tensor | None,
    long_rows: Tensor | None,
    t_pointers: Tensor,
    t_index: Tensor,
    permutation: Tensor,
    t_chunks: Tensor | None,
    t_long_rows: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Gradients of ``gat`` for the table and the destinations' scores, the latter empty if they are in the table."""
    return _attention("gat_backward", table, channels)(
        grad, table, a_destination, lse, heads, channels, average, slope, seed, dropout,
        Rows(pointers, None, chunks, long_rows), Rows(t_pointers, t_index, t_chunks, t_long_rows), permutation,
    )  # fmt: skip


@_LIBRARY.fake("gat_backward")
def _(grad: Tensor, table: Tensor, a_destination: Tensor | None, *_: Any) -> tuple[Tensor, Tensor]:
    grad_a = table.new_empty(0) if a_destination is None else a_destination.new_empty(a_destination.shape)
    return table.new_empty(table.shape), grad_a
