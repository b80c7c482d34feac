"""Graph attention in one pass: scores, leaky relu, softmax, dropout and the weighted sum. Each edge is read once.

A table row holds a node's features and scores, so that an edge gathers both together. The softmax is online. Only its
log-sum-exp [D, H] is saved; the backward recomputes the weights. The rounding of the log-sum-exp leaves gradients with
four or five correct digits if scores are 100.

The backward walks the transpose: a source's features stay in registers and each edge gathers one row of the gradient.
The rest of the softmax's backward is one value per edge and head, summed by rows and then by sources.

A head's channels are split into a power of two and a smaller tail (40 is 32 and 8): padding costs registers and time.

Shape legend: S sources, D destinations, E edges, X chunks, H heads, C channels, W = H C + H or, with the destinations'
scores in the table as well, H C + 2 H.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from zoo.engine.kernel import kernel
from zoo.ops.common import ceil_div, next_power
from zoo.ops.csr import Rows, add_bias
from zoo.ops.triton import csr
from zoo.ops.triton.csr import csr_sum, span, written


@triton.jit
def _scores(table, a_destination, HEADS: tl.constexpr, CHANNELS: tl.constexpr):
    """Pointers to the scores of sources and destinations: after the features in a table row, or in their own tensor."""
    if a_destination is None:
        return table + HEADS * CHANNELS, table + (HEADS * CHANNELS + HEADS)
    else:
        return table + HEADS * CHANNELS, a_destination


@triton.jit
def _after_dropout(share, seed, edge, head, dropout: tl.constexpr):
    """Dropout of shares [edges, heads] by a hash of seed and edge place in row order; surviving shares are rescaled."""
    zero = (edge[:, None] * 0 + head[None, :] * 0).to(tl.int32)
    low = edge.to(tl.int32)[:, None] + zero
    high = (edge >> 32).to(tl.int32)[:, None] + zero
    bits, _, _, _ = tl.philox(seed, low, high, head[None, :] + zero, zero)
    survives = (bits >> 8).to(tl.float32) * (1.0 / (1 << 24)) >= dropout
    keep_scale: tl.constexpr = 1.0 / (1.0 - dropout) if dropout < 1.0 else 0.0
    return tl.where(survives, share * keep_scale, 0.0)


@triton.jit
def _gather(
    x, node, live, head, column,
    HEADS: tl.constexpr, CHANNELS: tl.constexpr, HEAD_STRIDE: tl.constexpr, STRIDE: tl.constexpr,
):  # fmt: skip
    """Gather some columns of every head from the rows of nodes: [nodes, heads, columns] float32."""
    lane = (head * HEAD_STRIDE)[:, None] + column[None, :]
    inside = (head < HEADS)[:, None] & (column < CHANNELS)[None, :]
    place = (node * STRIDE)[:, None, None] + lane[None, :, :]
    return tl.load(x + place, mask=live[:, None, None] & inside[None, :, :], other=0.0).to(tl.float32)


@triton.jit
def _store(out, place, lane, result, mask, bias, RELU: tl.constexpr):
    if bias is not None:
        result += tl.load(bias + lane, mask=mask, other=0.0).to(tl.float32)
    if RELU:
        result = tl.where(result < 0, 0.0, result)  # NaN stays
    tl.store(out + place + lane, result.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _write(
    out, row, result, in_row, head, column, HEADS: tl.constexpr, CHANNELS: tl.constexpr, STRIDE: tl.constexpr,
    AVERAGE: tl.constexpr = False, bias=None, RELU: tl.constexpr = False,
):  # fmt: skip
    """Store some columns of every head of one row, [heads, columns], or their mean over heads."""
    if AVERAGE:
        mask = column < tl.max(tl.where(in_row, CHANNELS, 0), 0)
        _store(out, row * STRIDE, column, tl.sum(result, 0) / HEADS, mask, bias, RELU)
    else:
        lane = (head * CHANNELS)[:, None] + column[None, :]
        mask = in_row[:, None] & (column < CHANNELS)[None, :]
        _store(out, row * STRIDE, lane, result, mask, bias, RELU)


@kernel(do_not_specialize=["rows", "num_chunks", "chunk_size"])
def _gat(
    table, a_destination, index, pointers, seed, bias, chunks, out, lse, partial, partial_stats,
    rows, num_chunks, chunk_size, slope: tl.constexpr, dropout: tl.constexpr, HEADS: tl.constexpr,
    CHANNELS: tl.constexpr, STRIDE: tl.constexpr, OUT_STRIDE: tl.constexpr, AVERAGE: tl.constexpr, RELU: tl.constexpr,
    EDGES: tl.constexpr, HEAD_BLOCK: tl.constexpr, COLUMNS: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1) * HEAD_BLOCK + tl.arange(0, HEAD_BLOCK)
    column = tl.arange(0, COLUMNS)
    item = tl.program_id(0).to(tl.int64)
    row, first, end, whole, used, piece = span(item, 0, pointers, chunks, rows, num_chunks, chunk_size, 1)
    in_whole, in_used = head < tl.where(whole, HEADS, 0), head < tl.where(used, HEADS, 0)
    A_STRIDE: tl.constexpr = STRIDE if a_destination is None else HEADS
    a_source, a_destination = _scores(table, a_destination, HEADS, CHANNELS)
    own = tl.load(a_destination + row * A_STRIDE + head, mask=in_used, other=0.0).to(tl.float32)
    if seed is not None:
        seed = tl.load(seed)
    greatest = tl.full([HEAD_BLOCK], float("-inf"), tl.float32)
    exponents = tl.zeros([HEAD_BLOCK], tl.float32)
    total = tl.zeros([EDGES, HEAD_BLOCK, COLUMNS], tl.float32)
    if TAIL > 0:
        rest = COLUMNS + tl.arange(0, TAIL)
        total_rest = tl.zeros([EDGES, HEAD_BLOCK, TAIL], tl.float32)
    for offset in range(0, (end - first).to(tl.int32), EDGES):
        edge = first + offset + tl.arange(0, EDGES)
        live = edge < end
        node = tl.load(index + edge, mask=live, other=0).to(tl.int64)
        value = _gather(table, node, live, head, column, HEADS, CHANNELS, CHANNELS, STRIDE)
        if TAIL > 0:
            value_rest = _gather(table, node, live, head, rest, HEADS, CHANNELS, CHANNELS, STRIDE)
        both = live[:, None] & (head < HEADS)[None, :]
        score = tl.load(a_source + (node * STRIDE)[:, None] + head[None, :], mask=both, other=0.0).to(tl.float32)
        score += own[None, :]
        score = tl.where(score > 0, score, score * slope)
        score = tl.where(live[:, None], score, float("-inf"))
        top = tl.maximum(greatest, tl.max(score, 0))
        fade = tl.exp(greatest - top)
        share = tl.exp(score - top[None, :])
        exponents = exponents * fade + tl.sum(share, 0)
        if seed is not None:
            share = _after_dropout(share, seed, edge, head, dropout)
        total = total * fade[None, :, None] + share[:, :, None] * value
        if TAIL > 0:
            total_rest = total_rest * fade[None, :, None] + share[:, :, None] * value_rest
        greatest = top
    result = tl.sum(total, 0)
    if TAIL > 0:
        result_rest = tl.sum(total_rest, 0)
    if chunks is not None:  # noqa: SIM102 (whose programs are one or the other at run time)
        if piece:
            inside = head < HEADS
            _write(partial, item, result, inside, head, column, HEADS, CHANNELS, HEADS * CHANNELS)
            if TAIL > 0:
                _write(partial, item, result_rest, inside, head, rest, HEADS, CHANNELS, HEADS * CHANNELS)
            stats = partial_stats + (item * HEADS + head) * 2
            tl.store(stats, greatest, mask=inside)
            tl.store(stats + 1, exponents, mask=inside)
    isolated = end == first
    row = written(item, 0, num_chunks, 1)
    exponents = tl.where(isolated, 1.0, exponents)
    greatest = tl.where(isolated, 0.0, greatest)
    result = result / exponents[:, None]
    _write(out, row, result, in_whole, head, column, HEADS, CHANNELS, OUT_STRIDE, AVERAGE, bias, RELU)
    if TAIL > 0:
        result_rest = result_rest / exponents[:, None]
        _write(out, row, result_rest, in_whole, head, rest, HEADS, CHANNELS, OUT_STRIDE, AVERAGE, bias, RELU)
    tl.store(lse + row * HEADS + head, greatest + tl.log(exponents), mask=in_whole)


@kernel(do_not_specialize=["num_rows"])
def _merge_attention(
    partial, partial_stats, long_rows, bias, out, lse, num_rows, HEADS: tl.constexpr, CHANNELS: tl.constexpr,
    AVERAGE: tl.constexpr, RELU: tl.constexpr, CHUNKS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < CHANNELS
    number = tl.program_id(0)
    row = tl.load(long_rows + number * 3)
    while row >= 0:
        first = tl.load(long_rows + number * 3 + 1)
        end = tl.load(long_rows + number * 3 + 2)
        count = (end - first).to(tl.int32)
        mean = tl.zeros([COLUMNS], tl.float32)
        first_head = 0 if AVERAGE else tl.program_id(2)
        for head in range(first_head, HEADS if AVERAGE else first_head + 1):
            tops = tl.full([CHUNKS], float("-inf"), tl.float32)
            for offset in range(0, count, CHUNKS):
                chunk = first + offset + tl.arange(0, CHUNKS)
                stats = partial_stats + (chunk * HEADS + head) * 2
                tops = tl.maximum(tops, tl.load(stats, mask=chunk < end, other=float("-inf")))
            greatest = tl.max(tops, 0)
            exponents = tl.zeros([CHUNKS], tl.float32)
            total = tl.zeros([CHUNKS, COLUMNS], tl.float32)
            for offset in range(0, count, CHUNKS):
                chunk = first + offset + tl.arange(0, CHUNKS)
                live = chunk < end
                stats = partial_stats + (chunk * HEADS + head) * 2
                fade = tl.exp(tl.load(stats, mask=live, other=float("-inf")) - greatest)
                exponents += fade * tl.load(stats + 1, mask=live, other=0.0)
                place = ((chunk * HEADS + head) * CHANNELS)[:, None] + column[None, :]
                total += fade[:, None] * tl.load(partial + place, mask=live[:, None] & inside[None, :], other=0.0)
            sum_of_exponents = tl.sum(exponents, 0)
            result = tl.sum(total, 0) / sum_of_exponents
            if AVERAGE:
                mean += result / HEADS
            else:
                _store(out, row * HEADS * CHANNELS, head * CHANNELS + column, result, inside, bias, RELU)
            value = greatest + tl.log(sum_of_exponents)
            tl.store(lse + row * HEADS + head, value, mask=tl.program_id(1) == 0)
        if AVERAGE:
            _store(out, row * CHANNELS, column, mean, inside, bias, RELU)
        number += tl.num_programs(0)
        row = tl.load(long_rows + number * 3, mask=number < num_rows, other=-1)


@kernel(do_not_specialize=["rows", "num_chunks", "chunk_size"])
def _gat_backward(
    table, grad, a_destination, lse, index, permutation, pointers, seed, chunks,
    grad_table, moved, partial, rows, num_chunks, chunk_size, slope: tl.constexpr, dropout: tl.constexpr,
    grad_scale: tl.constexpr, HEADS: tl.constexpr, CHANNELS: tl.constexpr, STRIDE: tl.constexpr,
    GRAD_STRIDE: tl.constexpr, GRAD_HEAD_STRIDE: tl.constexpr, EDGES: tl.constexpr, HEAD_BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """Gradient of the features, and ``moved`` [E, H]: each edge's weight times the gradient of that weight."""
    head = tl.program_id(1) * HEAD_BLOCK + tl.arange(0, HEAD_BLOCK)
    column = tl.arange(0, COLUMNS)
    item = tl.program_id(0).to(tl.int64)
    row, first, end, whole, used, piece = span(item, 0, pointers, chunks, rows, num_chunks, chunk_size, 1)
    in_whole, in_used = head < tl.where(whole, HEADS, 0), head < tl.where(used, HEADS, 0)
    one = tl.where(used, row, -1) + tl.zeros([1], tl.int64)
    own = _gather(table, one, one >= 0, head, column, HEADS, CHANNELS, CHANNELS, STRIDE)
    A_STRIDE: tl.constexpr = STRIDE if a_destination is None else HEADS
    a_source, a_destination = _scores(table, a_destination, HEADS, CHANNELS)
    own_score = tl.load(a_source + row * STRIDE + head, mask=in_used, other=0.0).to(tl.float32)
    if seed is not None:
        seed = tl.load(seed)
    total = tl.zeros([EDGES, HEAD_BLOCK, COLUMNS], tl.float32)
    if TAIL > 0:
        rest = COLUMNS + tl.arange(0, TAIL)
        own_rest = _gather(table, one, one >= 0, head, rest, HEADS, CHANNELS, CHANNELS, STRIDE)
        total_rest = tl.zeros([EDGES, HEAD_BLOCK, TAIL], tl.float32)
    for offset in range(0, (end - first).to(tl.int32), EDGES):
        edge = first + offset + tl.arange(0, EDGES)
        live = edge < end
        node = tl.load(index + edge, mask=live, other=0).to(tl.int64)
        origin = tl.load(permutation + edge, mask=live, other=0).to(tl.int64)
        value = _gather(grad, node, live, head, column, HEADS, CHANNELS, GRAD_HEAD_STRIDE, GRAD_STRIDE)
        slant = tl.sum(value * own, 2)
        if TAIL > 0:
            value_rest = _gather(grad, node, live, head, rest, HEADS, CHANNELS, GRAD_HEAD_STRIDE, GRAD_STRIDE)
            slant += tl.sum(value_rest * own_rest, 2)
        both = live[:, None] & (head < HEADS)[None, :]
        score = tl.load(a_destination + (node * A_STRIDE)[:, None] + head[None, :], mask=both, other=0.0)
        score = score.to(tl.float32) + own_score[None, :]
        score = tl.where(score > 0, score, score * slope)
        top = tl.load(lse + (node * HEADS)[:, None] + head[None, :], mask=both, other=float("inf"))
        share = tl.exp(score - top) * grad_scale  # 0 past the end
        if seed is not None:
            share = _after_dropout(share, seed, origin, head, dropout)
        tl.store(moved + (origin * HEADS)[:, None] + head[None, :], share * slant, mask=both)
        total += share[:, :, None] * value
        if TAIL > 0:
            total_rest += share[:, :, None] * value_rest
    result = tl.sum(total, 0)
    row = written(item, 0, num_chunks, 1)
    _write(grad_table, row, result, in_whole, head, column, HEADS, CHANNELS, STRIDE)
    if TAIL > 0:
        result_rest = tl.sum(total_rest, 0)
        _write(grad_table, row, result_rest, in_whole, head, rest, HEADS, CHANNELS, STRIDE)
    if chunks is not None:  # noqa: SIM102 (whose programs are one or the other at run time)
        if piece:
            inside = head < HEADS
            _write(partial, item, result, inside, head, column, HEADS, CHANNELS, HEADS * CHANNELS)
            if TAIL > 0:
                _write(partial, item, result_rest, inside, head, rest, HEADS, CHANNELS, HEADS * CHANNELS)


@kernel(do_not_specialize=["rows", "num_chunks", "chunk_size"])
def _softmax_backward(
    table, a_destination, lse, delta, index, permutation, pointers, chunks, moved, grad_table, partial,
    rows, num_chunks, chunk_size, slope: tl.constexpr, HEADS: tl.constexpr, CHANNELS: tl.constexpr,
    STRIDE: tl.constexpr, ROWS: tl.constexpr, EDGES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Turn ``moved`` into the gradient of each edge's score, in place, and sum it over the edges of each source."""
    head = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = head < HEADS
    program = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, ROWS)
    row, first, end, whole, used, piece = span(program, slot, pointers, chunks, rows, num_chunks, chunk_size, ROWS)
    mask = used[:, None] & inside[None, :]
    A_STRIDE: tl.constexpr = STRIDE if a_destination is None else HEADS
    a_source, a_destination = _scores(table, a_destination, HEADS, CHANNELS)
    own = tl.load(a_source + (row * STRIDE)[:, None] + head[None, :], mask=mask, other=0.0).to(tl.float32)
    total = tl.zeros([ROWS, EDGES, COLUMNS], tl.float32)
    longest = tl.max(end - first, 0).to(tl.int32)
    for offset in range(0, longest, EDGES):
        edge = first[:, None] + (offset + tl.arange(0, EDGES))[None, :]
        live = edge < end[:, None]
        node = tl.load(index + edge, mask=live, other=0).to(tl.int64)
        origin = tl.load(permutation + edge, mask=live, other=0).to(tl.int64)
        both = live[:, :, None] & inside[None, None, :]
        score = tl.load(a_destination + (node * A_STRIDE)[:, :, None] + head[None, None, :], mask=both, other=0.0)
        score = score.to(tl.float32) + own[:, None, :]
        steepness = tl.where(score > 0, 1.0, slope)
        place = (node * HEADS)[:, :, None] + head[None, None, :]
        share = tl.exp(score * steepness - tl.load(lse + place, mask=both, other=float("inf")))
        target = moved + (origin * HEADS)[:, :, None] + head[None, None, :]
        change = tl.load(target, mask=both, other=0.0) - share * tl.load(delta + place, mask=both, other=0.0)
        change *= steepness
        tl.store(target, change, mask=both)
        total += change
    result = tl.sum(total, 1)
    if chunks is not None:  # noqa: SIM102 (whose programs are one or the other at run time)
        if piece:
            tl.store(partial + program * HEADS + head, tl.sum(result, 0), mask=inside)
    row = written(program, slot, num_chunks, ROWS)
    place = (row * STRIDE)[:, None] + (HEADS * CHANNELS + head)[None, :]
    tl.store(grad_table + place, result.to(grad_table.dtype.element_ty), mask=whole[:, None] & inside[None, :])


def choose_tile(heads: int, channels: int, itemsize: int = 4) -> dict[str, int]:
    """Tile, measured on an H200: one warp, 16 values per thread in flight, twice as many edges in half precision."""
    columns, tail = next_power(channels), 0
    head_block = min(next_power(heads), max(512 // columns, 1))
    half = columns // 2
    if channels > 8 and half + next_power(channels - half) <= 0.8 * columns:
        columns, tail = half, next_power(channels - half)
    edges = 2 if head_block * columns >= 256 and itemsize > 2 else 4
    warps = min(max(edges * head_block * columns // 1024, 1), 8)
    return {"EDGES": edges, "HEAD_BLOCK": head_block, "COLUMNS": columns, "TAIL": tail, "num_warps": warps}


def gat(
    table: Tensor, a_destination: Tensor | None, heads: int, channels: int, average: bool, slope: float,
    seed: Tensor | None, dropout: float, rows: Rows, bias: Tensor | None = None, relu: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Table [S, W] and scores [D, H], unless in the table -> sums [D, H C] or mean [D, C], and log-sum-exp [D, H].

    A bias, as wide as the result, and a relu come last.
    """
    table, a_destination = table.contiguous(), None if a_destination is None else a_destination.contiguous()
    number, tile = rows.limits[0], choose_tile(heads, channels, table.element_size())
    average_here = average and tile["HEAD_BLOCK"] >= heads
    width = channels if average_here else heads * channels
    bias_here, relu_here = (bias, relu) if average_here or not average else (None, False)
    out = table.new_empty(number, width)
    lse = table.new_empty(number, heads, dtype=torch.float32)
    if number and width:
        partial, stats = csr.partial_of(rows, table, heads * channels), csr.partial_of(rows, table, heads, 2)
        _gat[(rows.limits[1] + number, ceil_div(heads, tile["HEAD_BLOCK"]))](
            table, a_destination, rows.nodes, rows.pointers, seed, bias_here, rows.chunks, out, lse, partial, stats,
            *rows.limits, slope, dropout, HEADS=heads, CHANNELS=channels, STRIDE=table.shape[1], OUT_STRIDE=width,
            AVERAGE=average_here, RELU=relu_here, **tile,
        )  # fmt: skip
        if rows.long_rows is not None:
            merged = csr.merge_tile(channels)
            _merge_attention[(*csr.merge_grid(rows.long_rows, channels, merged), 1 if average_here else heads)](
                partial, stats, rows.long_rows, bias_here, out, lse, rows.long_rows.shape[0],
                HEADS=heads, CHANNELS=channels, AVERAGE=average_here, RELU=relu_here, **merged,
            )  # fmt: skip
    if average and not average_here:
        out = add_bias(out.view(number, heads, channels).mean(1), bias)
        out = out.relu() if relu else out
    return out, lse


def gat_backward(
    grad: Tensor, table: Tensor, a_destination: Tensor | None, lse: Tensor, heads: int, channels: int, average: bool,
    slope: float, seed: Tensor | None, dropout: float, rows: Rows, transpose: Rows, permutation: Tensor,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Gradients of the table [S, W] and of the destinations' scores [D, H]; None if the table holds these scores."""
    grad = grad.contiguous()
    table, a_destination = table.contiguous(), None if a_destination is None else a_destination.contiguous()
    number, tile = transpose.limits[0], choose_tile(heads, channels)
    grad_table = torch.empty_like(table)
    moved = table.new_empty(permutation.shape[0], heads, dtype=torch.float32)
    by_edge = rows._replace(nodes=None)
    if number:
        partial, partial_a = csr.partial_of(transpose, table, heads * channels), csr.partial_of(transpose, table, heads)
        _gat_backward[(transpose.limits[1] + number, ceil_div(heads, tile["HEAD_BLOCK"]))](
            table, grad, a_destination, lse, transpose.nodes, permutation, transpose.pointers, seed, transpose.chunks,
            grad_table, moved, partial, *transpose.limits, slope, dropout, 1.0 / heads if average else 1.0, HEADS=heads,
            CHANNELS=channels, STRIDE=table.shape[1], GRAD_STRIDE=grad.shape[1],
            GRAD_HEAD_STRIDE=0 if average else channels, **tile,
        )  # fmt: skip
        if partial is not None:
            csr.merge_sums(partial, transpose, grad_table)
        delta, blocks = csr_sum(moved, by_edge), csr.choose_blocks(heads, itemsize=4)
        _softmax_backward[csr.grid_of(transpose, heads, blocks)](
            table, a_destination, lse, delta, transpose.nodes, permutation, transpose.pointers, transpose.chunks,
            moved, grad_table, partial_a, *transpose.limits, slope, HEADS=heads, CHANNELS=channels,
            STRIDE=table.shape[1], **blocks,
        )  # fmt: skip
        if partial_a is not None:
            csr.merge_sums(partial_a, transpose, grad_table, heads * channels)
    if a_destination is None:
        csr_sum(moved, by_edge, out=grad_table, out_column=heads * (channels + 1))
        return grad_table, None
    return grad_table, csr_sum(moved, by_edge, out=torch.empty_like(a_destination))
