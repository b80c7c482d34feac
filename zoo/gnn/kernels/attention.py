# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs
"""Graph attention in one pass: scores, leaky relu, softmax, dropout and the weighted sum, each edge read once.

The softmax is an online one: a running greatest score, a running sum of exponents, and a weighted sum that is scaled
down whenever the greatest grows. Only the log of the sum of exponents, [D, H], is kept for the backward, which computes
the weights anew. The backward walks the transpose: a source's features stay in registers and each edge gathers one row
of the gradient, which serves the gradient of the features and of the score alike. The scores' gradient of an edge
[E, H] is written once, in the order of the rows, and summed into destinations by a second kernel: it is narrower than
the features by their width, and saves a second walk that would gather them all again.

Shape legend: S sources, D destinations, E edges, X chunks, H heads, C channels.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from zoo.gnn.kernels.common import next_power, span
from zoo.gnn.kernels.scores import head_dots
from zoo.gnn.kernels.sums import csr_sum, merge_sums


@triton.jit
def _kept(seed, edge, head, dropout):
    """Which (edge, head) pairs dropout leaves in: a hash of the seed and the edge's place in row order."""
    zero = (edge[:, None] * 0 + head[None, :] * 0).to(tl.int32)
    low = edge.to(tl.int32)[:, None] + zero
    high = (edge >> 32).to(tl.int32)[:, None] + zero
    bits, _, _, _ = tl.philox(seed, low, high, head[None, :] + zero, zero)
    return (bits >> 8).to(tl.float32) * (1.0 / (1 << 24)) >= dropout


@triton.jit(do_not_specialize=["rows", "num_chunks", "chunk_size"])
def _gat(
    x, a_source, a_destination, index, pointers, seed, chunks, out, lse, partial, partial_stats,
    rows, num_chunks, chunk_size, slope, dropout, keep_scale,
    HEADS: tl.constexpr, CHANNELS: tl.constexpr, EDGES: tl.constexpr, HEAD_BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1) * HEAD_BLOCK + tl.arange(0, HEAD_BLOCK)
    column = tl.arange(0, COLUMNS)
    real_head = head < HEADS
    inside = real_head[:, None] & (column < CHANNELS)[None, :]
    lane = (head * CHANNELS)[:, None] + column[None, :]
    item = tl.program_id(0).to(tl.int64)
    row, first, end, whole, piece = span(item, num_chunks, pointers, chunks, rows, num_chunks, chunk_size)
    in_whole, in_piece = head < tl.where(whole, HEADS, 0), head < tl.where(piece, HEADS, 0)
    own = tl.load(a_destination + row * HEADS + head, mask=in_whole | in_piece, other=0.0).to(tl.float32)
    if seed is not None:
        seed = tl.load(seed)
    greatest = tl.full([HEAD_BLOCK], float("-inf"), tl.float32)
    exponents = tl.zeros([HEAD_BLOCK], tl.float32)
    total = tl.zeros([EDGES, HEAD_BLOCK, COLUMNS], tl.float32)
    for offset in range(0, (end - first).to(tl.int32), EDGES):
        edge = first + offset + tl.arange(0, EDGES)
        live = edge < end
        node = tl.load(index + edge, mask=live, other=0).to(tl.int64)
        both = live[:, None] & real_head[None, :]
        place = (node * (HEADS * CHANNELS))[:, None, None] + lane[None, :, :]
        value = tl.load(x + place, mask=live[:, None, None] & inside[None, :, :], other=0.0).to(tl.float32)
        score = tl.load(a_source + (node * HEADS)[:, None] + head[None, :], mask=both, other=0.0).to(tl.float32)
        score += own[None, :]
        score = tl.where(score >= 0, score, score * slope)
        score = tl.where(live[:, None], score, float("-inf"))
        top = tl.maximum(greatest, tl.max(score, 0))
        fade = tl.exp(greatest - top)
        share = tl.exp(score - top[None, :])
        exponents = exponents * fade + tl.sum(share, 0)
        if seed is not None:
            share = tl.where(_kept(seed, edge, head, dropout), share * keep_scale, 0.0)
        total = total * fade[None, :, None] + share[:, :, None] * value
        greatest = top
    result = tl.sum(total, 0)
    if chunks is not None:
        tl.store(partial + item * (HEADS * CHANNELS) + lane, result, mask=in_piece[:, None] & inside)
        stats = partial_stats + (item * HEADS + head) * 2
        tl.store(stats, greatest, mask=in_piece)
        tl.store(stats + 1, exponents, mask=in_piece)
    isolated = end == first
    exponents = tl.where(isolated, 1.0, exponents)
    greatest = tl.where(isolated, 0.0, greatest)
    result = result / exponents[:, None]
    tl.store(out + row * (HEADS * CHANNELS) + lane, result.to(out.dtype.element_ty), mask=in_whole[:, None] & inside)
    tl.store(lse + row * HEADS + head, greatest + tl.log(exponents), mask=in_whole)


@triton.jit
def _merge_attention(
    partial, partial_stats, long_rows, out, lse,
    HEADS: tl.constexpr, CHANNELS: tl.constexpr, CHUNKS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < CHANNELS
    entry = long_rows + tl.program_id(0) * 3
    row = tl.load(entry)
    if row >= 0:
        first = tl.load(entry + 1)
        end = tl.load(entry + 2)
        count = (end - first).to(tl.int32)
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
        tl.store(out + (row * HEADS + head) * CHANNELS + column, result.to(out.dtype.element_ty), mask=inside)
        tl.store(lse + row * HEADS + head, greatest + tl.log(sum_of_exponents), mask=tl.program_id(2) == 0)


@triton.jit(do_not_specialize=["rows", "num_chunks", "chunk_size"])
def _gat_backward(
    x, grad, a_source, a_destination, lse, delta, index, permutation, pointers, seed, chunks,
    grad_x, grad_a_source, grad_score, partial, partial_a,
    rows, num_chunks, chunk_size, slope, dropout, keep_scale,
    HEADS: tl.constexpr, CHANNELS: tl.constexpr, EDGES: tl.constexpr, HEAD_BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1) * HEAD_BLOCK + tl.arange(0, HEAD_BLOCK)
    column = tl.arange(0, COLUMNS)
    real_head = head < HEADS
    inside = real_head[:, None] & (column < CHANNELS)[None, :]
    lane = (head * CHANNELS)[:, None] + column[None, :]
    item = tl.program_id(0).to(tl.int64)
    row, first, end, whole, piece = span(item, num_chunks, pointers, chunks, rows, num_chunks, chunk_size)
    in_whole, in_piece = head < tl.where(whole, HEADS, 0), head < tl.where(piece, HEADS, 0)
    own = tl.load(x + row * (HEADS * CHANNELS) + lane, mask=(in_whole | in_piece)[:, None] & inside, other=0.0).to(
        tl.float32
    )
    own_score = tl.load(a_source + row * HEADS + head, mask=in_whole | in_piece, other=0.0).to(tl.float32)
    if seed is not None:
        seed = tl.load(seed)
    total = tl.zeros([EDGES, HEAD_BLOCK, COLUMNS], tl.float32)
    total_a = tl.zeros([EDGES, HEAD_BLOCK], tl.float32)
    for offset in range(0, (end - first).to(tl.int32), EDGES):
        edge = first + offset + tl.arange(0, EDGES)
        live = edge < end
        node = tl.load(index + edge, mask=live, other=0).to(tl.int64)
        origin = tl.load(permutation + edge, mask=live, other=0).to(tl.int64)
        both = live[:, None] & real_head[None, :]
        place = (node * (HEADS * CHANNELS))[:, None, None] + lane[None, :, :]
        value = tl.load(grad + place, mask=live[:, None, None] & inside[None, :, :], other=0.0).to(tl.float32)
        place = (node * HEADS)[:, None] + head[None, :]
        score = tl.load(a_destination + place, mask=both, other=0.0).to(tl.float32) + own_score[None, :]
        steepness = tl.where(score >= 0, 1.0, slope)
        share = tl.exp(score * steepness - tl.load(lse + place, mask=both, other=float("inf")))  # 0 past the end
        kept = share
        slant = tl.sum(value * own[None, :, :], 2)  # the gradient of an edge's weight
        if seed is not None:
            factor = tl.where(_kept(seed, origin, head, dropout), keep_scale, 0.0)
            kept = share * factor
            slant = slant * factor
        change = share * (slant - tl.load(delta + place, mask=both, other=0.0).to(tl.float32)) * steepness
        tl.store(grad_score + (origin * HEADS)[:, None] + head[None, :], change, mask=both)
        total_a += change
        total += kept[:, :, None] * value
    result = tl.sum(total, 0)
    result_a = tl.sum(total_a, 0)
    if chunks is not None:
        tl.store(partial + item * (HEADS * CHANNELS) + lane, result, mask=in_piece[:, None] & inside)
        tl.store(partial_a + item * HEADS + head, result_a, mask=in_piece)
    tl.store(
        grad_x + row * (HEADS * CHANNELS) + lane, result.to(grad_x.dtype.element_ty), mask=in_whole[:, None] & inside
    )
    place = row * HEADS + head
    tl.store(grad_a_source + place, result_a.to(grad_a_source.dtype.element_ty), mask=in_whole)


def choose_tile(heads: int, channels: int, degree: float) -> tuple[int, int, int, int]:
    """(edges, heads, columns, warps) of a program. Measured on an H200: few edges at a time and 16 values a thread."""
    columns = next_power(channels)
    head_block = min(next_power(heads), max(512 // columns, 1))
    edges = 4
    return edges, head_block, columns, min(max(edges * head_block * columns // 512, 1), 8)


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
    tile: tuple[int, int, int, int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Features x [S, H, C], scores [S, H] and [D, H] -> weighted sums [D, H, C] and log-sum-exp [D, H] float32."""
    x, a_source, a_destination = x.contiguous(), a_source.contiguous(), a_destination.contiguous()
    rows, (heads, channels) = pointers.shape[0] - 1, x.shape[1:]
    out = x.new_empty(rows, heads, channels)
    lse = x.new_empty(rows, heads, dtype=torch.float32)
    if not out.numel():
        return out, lse
    edges, head_block, columns, warps = tile or choose_tile(heads, channels, index.shape[0] / rows)
    num_chunks, partial, stats = 0, None, None
    if chunks is not None:
        num_chunks = chunks.shape[0]
        partial = x.new_empty(num_chunks, heads, channels, dtype=torch.float32)
        stats = x.new_empty(num_chunks, heads, 2, dtype=torch.float32)
    _gat[(num_chunks + rows, triton.cdiv(heads, head_block))](
        x, a_source, a_destination, index, pointers, seed, chunks, out, lse, partial, stats,
        rows, num_chunks, chunk_size, slope, dropout, _keep_scale(dropout),
        HEADS=heads, CHANNELS=channels, EDGES=edges, HEAD_BLOCK=head_block, COLUMNS=columns, num_warps=warps,
    )  # fmt: skip
    if partial is not None and long_rows is not None:
        columns = min(columns, 64)
        _merge_attention[(long_rows.shape[0], heads, triton.cdiv(channels, columns))](
            partial, stats, long_rows, out, lse,
            HEADS=heads, CHANNELS=channels, CHUNKS=32, COLUMNS=columns, num_warps=4,
        )  # fmt: skip
    return out, lse


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
    tile: tuple[int, int, int, int] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x [S, H, C] and of both scores, [S, H] and [D, H], from the outputs of ``gat``."""
    grad, x = grad.contiguous(), x.contiguous()
    a_source, a_destination = a_source.contiguous(), a_destination.contiguous()
    delta = head_dots(grad, out)
    rows, heads, channels = x.shape
    grad_x, grad_a_source = torch.empty_like(x), torch.empty_like(a_source)
    grad_score = x.new_empty(index.shape[0], heads, dtype=torch.float32)
    if grad_x.numel():
        edges, head_block, columns, warps = tile or choose_tile(heads, channels, index.shape[0] / rows)
        num_chunks, partial, partial_a = 0, None, None
        if t_chunks is not None:
            num_chunks = t_chunks.shape[0]
            partial = x.new_empty(num_chunks, heads * channels, dtype=torch.float32)
            partial_a = x.new_empty(num_chunks, heads, dtype=torch.float32)
        _gat_backward[(num_chunks + rows, triton.cdiv(heads, head_block))](
            x, grad, a_source, a_destination, lse, delta, index, permutation, colptr, seed, t_chunks,
            grad_x, grad_a_source, grad_score, partial, partial_a,
            rows, num_chunks, chunk_size, slope, dropout, _keep_scale(dropout),
            HEADS=heads, CHANNELS=channels, EDGES=edges, HEAD_BLOCK=head_block, COLUMNS=columns, num_warps=warps,
        )  # fmt: skip
        if partial is not None and partial_a is not None and t_long_rows is not None:
            merge_sums(partial, t_long_rows, None, grad_x.view(rows, -1))
            merge_sums(partial_a, t_long_rows, None, grad_a_source)
    grad_a_destination = csr_sum(grad_score, pointers, None, None, None, None, chunks, long_rows, chunk_size)
    return grad_x, grad_a_source, grad_a_destination.to(a_destination.dtype)


def _keep_scale(dropout: float) -> float:
    return 1.0 / (1.0 - dropout) if dropout < 1.0 else 0.0
