"""A graph in compressed sparse rows; sums, means, maxima and attention over its edges; and sampling among them.

One node with 200,000 neighbours must not delay all others. A row several times longer than the mean is cut into chunks.
Chunks are reduced at the same time as short rows, and a second kernel merges the chunks of each row in order: without
atomics, results are bitwise reproducible. Kernels sum in float32 and materialise no tensor of E x C. Graph attention:
https://arxiv.org/abs/1710.10903.

Shape legend: S sources, D destinations, E edges, R rows (destinations; sources in the transpose), X chunks and L long
rows at most, H heads, W columns, C channels.
"""

from typing import Any, Literal, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.engine.autograd import differentiable_once, transformed
from zoo.ops import common
from zoo.ops import triton as kernels
from zoo.ops.common import accumulation_dtype, differentiated, kernels_run

# Whether a sum adds or concatenates a row's own features.
Own: TypeAlias = Literal["add", "concat"] | None
# Minimum edges of a chunk, a quarter of them in a graph of few edges. Each cut costs a large graph some bandwidth, and
# a small graph is as slow as its longest row: one program walks 128 edges in some 15 microseconds on an H200.
EDGES_PER_CHUNK = 128
FEW_EDGES = 2**17
# Number of pieces that keeps a large GPU busy to the end.
ENOUGH_PIECES = 8192


class Split(NamedTuple):
    """Tables of chunks, padded to powers of two, so that similar graphs of similar size share their shapes."""

    chunks: Tensor  # [X, 3] int64, (row, first edge, end) of each; chunks of a row are adjacent; padded at the end
    rows: Tensor  # [L, 3] int64, (row, first chunk, end) of each long row; row -1 at the end
    size: int  # maximum edges of a short row


class Transpose(NamedTuple):
    """The same edges sorted by source, for backward passes of kernels."""

    colptr: Tensor  # [S + 1] int64, where the edges of each source start
    destination: Tensor  # [E], the node that each edge goes to
    permutation: Tensor  # [E], each edge's place in CSR order
    weight: Tensor | None = None  # [E], the graph's weights in this order
    split: Split | None = None  # long columns in pieces, if there are any


class GraphTensors(NamedTuple):
    """The part of a graph that enters a region. Sizes come from the shapes of its tensors.

    Edges are sorted by destination, and keep the order of the input within one destination. Nodes are int32 where the
    graph has fewer than 2^31 nodes and edges, else int64.
    """

    rowptr: Tensor  # [D + 1] int64, where the edges of each destination start
    source: Tensor  # [E], the node that each edge comes from
    destination: Tensor  # [E], ascending, the node that each edge goes to; D for edges that are padding
    weight: Tensor | None = None  # [E], one factor per edge
    inverse_degree: Tensor | None = None  # [D], one over the number of incoming edges, 1 where there are none
    split: Split | None = None  # long rows in pieces, where kernels run on the graph's device and it has any
    transpose: Transpose | None = None  # for backward passes, where gradients are enabled
    rows: Tensor | None = None  # [] int64, how many of the D rows are nodes; later ones are padding; None for all


class Rows(NamedTuple):
    """One orientation of a graph (by destination or by source), as kernels walk it."""

    pointers: Tensor  # [R + 1] int64, where the edges of each row start
    nodes: Tensor | None  # [E], the node at the other end of each edge, or None if values have one row per edge
    chunks: Tensor | None = None  # [X, 3], as of ``Split``
    long_rows: Tensor | None = None  # [L, 3]
    chunk_size: int = 0  # maximum edges of a short row

    @property
    def limits(self) -> tuple[int, int, int]:
        """(R, X, chunk_size); X is 0 if no row is cut."""
        return self.pointers.shape[0] - 1, 0 if self.chunks is None else self.chunks.shape[0], self.chunk_size


def rows_of(graph: GraphTensors) -> Rows:
    """The edges by destination."""
    return Rows(graph.rowptr, graph.source, *(graph.split or ()))


def columns_of(graph: GraphTensors) -> Rows:
    """The edges by source, which the gradients of kernels walk."""
    if graph.transpose is None:
        raise RuntimeError(
            "the gradient of an aggregation walks the transposed graph, but this graph was prepared without it; run "
            "the forward with gradients enabled on a CSRGraph or on raw edges"
        )
    return Rows(graph.transpose.colptr, graph.transpose.destination, *(graph.transpose.split or ()))


def edge_sum(x: Tensor, graph: GraphTensors, weight: Tensor | None = None) -> Tensor:
    """Sums over incoming edges by torch's operators: x [S, C] -> [D, C], or [S, H, C] and weights [E, H] -> [D, H, C].

    On a CPU ``embedding_bag`` takes a twelfth of the time of a gather with ``index_add``.
    """
    if x.device.type == "cpu" and x.dtype == torch.float32 and not transformed():
        if x.dim() == 3:
            assert weight is not None
            return torch.stack([edge_sum(x[:, h], graph, weight[:, h]) for h in range(x.shape[1])], dim=1)
        # A last bag holds the padding edges.
        offsets = torch.cat([graph.rowptr, graph.rowptr.new_full((1,), graph.source.shape[0])]).to(graph.source.dtype)
        weight = None if weight is None else weight.contiguous()
        out = F.embedding_bag(graph.source, x, offsets, mode="sum", per_sample_weights=weight, include_last_offset=True)
        return out[:-1]
    messages = x.index_select(0, graph.source)
    if weight is not None:
        messages = messages * weight.unsqueeze(-1)
    return x.new_zeros(graph.rowptr.shape[0], *x.shape[1:]).index_add(0, graph.destination, messages)[:-1]


def edge_max(x: Tensor, graph: GraphTensors) -> Tensor:
    """Maximum over incoming edges by torch's operators, zero without edges: x [E, C] -> [D, C]."""
    where = graph.destination.long().unsqueeze(-1).expand_as(x)
    zeros = x.new_zeros(graph.rowptr.shape[0], x.shape[1])
    return zeros.scatter_reduce(0, where, x, "amax", include_self=False)[:-1]


def split_rows(pointers: Tensor, edges: int, size: int | None = None) -> Split | None:
    """The tables of a graph, or None if no row has more than ``size`` edges. Reads two numbers from the device.

    Pointers [R + 1] int64 say where the edges of each row start. ``size``, the maximum edges of a chunk, defaults to
    four times the mean row if that gives enough pieces, since every cut costs a partial result.
    """
    if size is None:
        mean = edges // max(pointers.shape[0] - 1, 1)
        least = EDGES_PER_CHUNK // 4 if edges < FEW_EDGES else EDGES_PER_CHUNK
        size = max(least, min(1 << (4 * mean).bit_length(), edges // ENOUGH_PIECES))
    if edges <= size or pointers.is_meta:
        return None
    degree = pointers.diff()
    is_long = degree > size
    count = ((degree + size - 1) // size) * is_long
    num_long, num_chunks = torch.stack([is_long.sum(), count.sum()]).tolist()
    if num_long == 0:
        return None
    end = count.cumsum(0)
    # The table is as small as possible: a program with an empty entry costs about as much to launch as one with work.
    number = torch.arange(common.next_power(num_chunks), device=pointers.device)
    row = torch.searchsorted(end, number, right=True)
    empty, row = row >= len(degree), row.clamp(max=len(degree) - 1)
    first_edge = pointers[row] + (number - (end - count)[row]) * size
    chunks = torch.stack([row, first_edge, torch.minimum(first_edge + size, pointers[row + 1])], dim=1)
    rank = torch.arange(1, common.next_power(num_long) + 1, device=pointers.device)
    row = torch.searchsorted(is_long.cumsum(0), rank)
    none, row = row >= len(degree), row.clamp(max=len(degree) - 1)
    rows = torch.stack([row, (end - count)[row], end[row]], dim=1)
    return Split(chunks.masked_fill(empty[:, None], 0), rows.masked_fill(none[:, None], -1), size)


def sum_neighbours(
    x: Tensor, graph: GraphTensors, *, bias: Tensor | None = None, own: Own = None, channels: int | None = None,
    relu: bool = False,
) -> Tensor:  # fmt: skip
    """Sum over incoming edges, times the graph's weights if it has any, plus bias [C]: x [S, W] -> [D, C].

    C is ``channels`` if x has padding columns, else W. With ``own="add"`` x is [S, 2 W]: the sums take its first half,
    and the second half of each destination's own row (the source of the same number) is added. With
    ``own="concat"`` the destination's own row is concatenated to its sum: [D, 2 C]. ``relu`` comes last, and does not
    combine with ``"concat"``. Raises RuntimeError if kernels run, gradients are needed and the graph has no transpose.
    """
    return _csr_sum(x, graph, graph.weight, None, bias, own, channels, relu)


def mean_neighbours(
    x: Tensor, graph: GraphTensors, *, bias: Tensor | None = None, own: Own = None, channels: int | None = None,
    relu: bool = False,
) -> Tensor:  # fmt: skip
    """Mean over incoming edges, zero without edges; arguments as in ``sum_neighbours``. Needs ``inverse_degree``."""
    if graph.inverse_degree is None:
        raise ValueError("a mean needs the graph's inverse degrees: graph.prepared(Recipe(mean=True))")
    scale = graph.inverse_degree
    if x.dtype == torch.float64 != scale.dtype:
        # A sampled batch has inverse degrees in float32, whatever its model's dtype.
        scale = graph.rowptr.diff().clamp(min=1).to(x.dtype).reciprocal()
    return _csr_sum(x, graph, None, scale, bias, own, channels, relu)


def _csr_sum(
    x: Tensor, graph: GraphTensors, weight: Tensor | None, scale: Tensor | None, bias: Tensor | None, own: Own,
    channels: int | None, relu: bool,
) -> Tensor:  # fmt: skip
    assert not (relu and own == "concat"), "relu does not combine with own='concat'"
    width = x.shape[1] // 2 if own == "add" else x.shape[1]
    channels = width if channels is None else channels
    if kernels_run(x, weight, scale, bias):
        rows = rows_of(graph)
        if not differentiated(x, weight, bias):
            return kernels.csr.csr_sum(x, rows, weight, None, scale, bias, own, channels, relu)
        columns = columns_of(graph)
        t_weight = None if weight is None or graph.transpose is None else graph.transpose.weight
        total = _CsrSum.apply(x, weight, bias, scale, own, channels, t_weight, graph.destination, *rows, *columns)
        return total.relu() if relu else total
    dtype, number = accumulation_dtype(x.dtype), graph.rowptr.shape[0] - 1
    total = edge_sum(x[:, :channels].to(dtype), graph, None if weight is None else weight.to(dtype))
    if scale is not None:
        total = total * scale.to(dtype).unsqueeze(1)
    if own == "add":
        total = total + x[:number, width : width + channels]
    if bias is not None:
        total = total + bias
    total = total.to(x.dtype)
    if relu:
        return total.relu()
    return torch.cat([total, x[:number]], dim=1) if own == "concat" else total


_OTHER_WAY: dict[Own, Own] = {None: None, "add": "concat", "concat": "add"}


class _CsrSum(torch.autograd.Function):
    """The gradient of a sum is a sum over the transpose, with ``"add"`` and ``"concat"`` exchanged."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, scale: Tensor | None, own: Own, channels: int,
        t_weight: Tensor | None, destination: Tensor, *tables: Any,
    ) -> Tensor:  # fmt: skip
        ctx.own, ctx.channels, ctx.width, ctx.chunk_size = own, channels, x.shape[1], tables[9]
        ctx.weight_dtype, ctx.bias_dtype = (None if each is None else each.dtype for each in (weight, bias))
        # Only the gradient of weights needs the features.
        kept = x if ctx.needs_input_grad[1] else None
        ctx.save_for_backward(kept, scale, t_weight, tables[1], destination, *tables[5:9])
        return kernels.csr.csr_sum(x, Rows(*tables[:5]), weight, None, scale, bias, own, channels)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, scale, t_weight, source, destination, *tables = ctx.saved_tensors
        grad_x = grad_weight = grad_bias = None
        of_sums = grad[:, : ctx.channels]
        if ctx.needs_input_grad[0]:
            columns, own = Rows(*(*tables, ctx.chunk_size)), _OTHER_WAY[ctx.own]
            width = ctx.width // 2 if ctx.own == "add" else ctx.width
            grad_x = kernels.csr.csr_sum(grad, columns, t_weight, scale, None, None, own, width)
        if ctx.needs_input_grad[1]:
            x = x[:, : ctx.channels].index_select(0, source).to(accumulation_dtype(x.dtype))
            grad_weight = (x * of_sums.index_select(0, destination)).sum(1).to(ctx.weight_dtype)
        if ctx.needs_input_grad[2]:
            grad_bias = of_sums.sum(0, dtype=ctx.bias_dtype)
        return grad_x, grad_weight, grad_bias, *(None,) * 15


def max_neighbours(x: Tensor, graph: GraphTensors) -> Tensor:
    """Maximum over incoming edges by torch's operators, zero without edges: x [S, C] -> [D, C]."""
    return edge_max(x.index_select(0, graph.source), graph)


# Maximum places that the kernel draws per node; it holds them in registers.
MOST_AT_ONCE = 512


def distinct(degree: Tensor, count: int, random: torch.Generator) -> Tensor:
    """Draw ``count`` distinct places below each degree [n] int64; every degree is at least ``count``: [n, count].

    Floyd's algorithm, one column at a time: a place that was drawn before is replaced by the last allowed place.
    """
    uniform = torch.rand(count, len(degree), generator=random, dtype=torch.float64, device=degree.device)
    if count <= MOST_AT_ONCE and common.triton_runs_on(degree.device):
        # The same draws in one launch. Column by column they would be most of a batch's launches.
        return kernels.csr.distinct(degree, uniform)
    places = torch.empty((len(degree), count), dtype=torch.int64, device=degree.device)
    for column in range(count):
        last = degree - count + column
        drawn = (uniform[column] * (last + 1)).long()
        taken = (places[:, :column] == drawn[:, None]).any(1)
        places[:, column] = torch.where(taken, last, drawn)
    return places


# The kernels hold all channels of a head at once.
WIDEST_HEAD = 4096


def attention(
    table: Tensor, a_destination: Tensor | None, heads: int, graph: GraphTensors, slope: float, dropout: float = 0.0, *,
    average: bool = False, bias: Tensor | None = None, relu: bool = False,
) -> Tensor:  # fmt: skip
    """Sum of neighbours weighted by the softmax of leaky scores: [D, H C] or, with ``average`` over heads, [D, C].

    The table [S, H C + H] holds the features of all heads, then the sources' part of each edge's score. The
    destinations' part is a_destination [D, H], or None if it is last in the table, [N, H C + 2 H]. Dropout is the
    probability that a neighbour is dropped. The graph's weights are not used; rows without neighbours are zero. A
    bias, as wide as the result, and ``relu`` come last. Raises RuntimeError if kernels run, gradients are needed and
    the graph has no transpose.
    """
    channels = table.shape[1] // heads - (2 if a_destination is None else 1)
    if channels <= WIDEST_HEAD and kernels_run(table, a_destination, bias):
        # The seed is drawn on the device, so that each replay of a CUDA graph draws another.
        seed = torch.randint(2**62, (1,), device=table.device) if dropout > 0.0 else None
        plan, rows = (heads, channels, average, slope), rows_of(graph)
        if not differentiated(table, a_destination, bias):
            return kernels.csr_attention.gat(table, a_destination, *plan, seed, dropout, rows, bias, relu)[0]
        columns = columns_of(graph)
        assert graph.transpose is not None
        order = graph.transpose.permutation
        out = _Attention.apply(table, a_destination, plan, seed, dropout, order, *rows, *columns)
    else:
        out = _edge_attention(table, a_destination, heads, graph, slope, dropout, average)
    out = add_bias(out, bias)
    return out.relu() if relu else out


def _edge_attention(
    table: Tensor, a_destination: Tensor | None, heads: int, graph: GraphTensors, slope: float, dropout: float,
    average: bool,
) -> Tensor:  # fmt: skip
    width = table.shape[1] - heads * (2 if a_destination is None else 1)
    x, scores = table[:, :width].unflatten(1, (heads, -1)), table[:, width:]
    own = scores[:, heads:] if a_destination is None else a_destination
    dtype = accumulation_dtype(table.dtype)
    own = F.pad(own[: graph.rowptr.shape[0] - 1].to(dtype), (0, 0, 0, 1))  # edges that are padding have a row too
    score = scores[:, :heads].to(dtype).index_select(0, graph.source) + own.index_select(0, graph.destination)
    score = F.leaky_relu(score, slope)
    # Subtracting the maximum score only prevents overflow, so it needs no gradient.
    greatest = F.pad(edge_max(score.detach(), graph), (0, 0, 0, 1))
    share = (score - greatest.index_select(0, graph.destination)).exp()
    total = share.new_zeros(graph.rowptr.shape[0], heads).index_add(0, graph.destination, share)
    share = F.dropout(share / total.index_select(0, graph.destination), dropout)
    sums = edge_sum(x.to(dtype), graph, share)
    return (sums.mean(1) if average else sums.flatten(1)).to(table.dtype)


def add_bias(x: Tensor, bias: Tensor | None) -> Tensor:
    """X [..., C] plus a bias [C], if given, in the dtype of x."""
    if bias is None:
        return x
    # The compiler would fuse even a cast to the same dtype with the sum.
    return x + (bias if bias.dtype == x.dtype else bias.to(x.dtype))


class _Attention(torch.autograd.Function):
    """The backward recomputes the weights from the log-sum-exp [D, H]."""

    @staticmethod
    def forward(
        ctx: Any, table: Tensor, a_destination: Tensor | None, plan: tuple[int, int, bool, float], seed: Tensor | None,
        dropout: float, permutation: Tensor, *tables: Any,
    ) -> Tensor:  # fmt: skip
        out, lse = kernels.csr_attention.gat(table, a_destination, *plan, seed, dropout, Rows(*tables[:5]))
        ctx.plan, ctx.dropout, ctx.sizes = plan, dropout, (tables[4], tables[9])
        ctx.save_for_backward(table, a_destination, lse, seed, permutation, *tables[:4], *tables[5:9])
        return out

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        table, a_destination, lse, seed, permutation, *tables = ctx.saved_tensors
        rows, columns = Rows(*(*tables[:4], ctx.sizes[0])), Rows(*(*tables[4:], ctx.sizes[1]))
        given = grad, table, a_destination, lse, *ctx.plan, seed, ctx.dropout, rows, columns, permutation
        return *kernels.csr_attention.gat_backward(*given), *(None,) * 14
