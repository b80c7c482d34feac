"""Kernels of a decoding step of few rows. Each kernel begins while its predecessor ends.

Between two kernels of a few microseconds the GPU idles for about one microsecond. Programmatic dependent launch, on
Hopper and newer, overlaps them. A kernel starts as soon as all programs of its predecessor ``permit`` it. It must
``wait`` for the predecessor's end before it touches memory that any kernel writes; only weights are loaded earlier. So
the kernel right before a step must not write weights; in a model it is an embedding lookup.
A product reads every weight row once, fused with the activation and the residual add behind it. One row of features is
multiplied by ordinary instructions, fused with its norm too; several rows by tensor cores, after a norm of its own.
For more rows weights are read by TMA, and programs share the columns of a row; a kernel behind adds their parts. A
product permits the next kernel at once. Attention permits it late, so that loads of later weights do not delay its own.

Attention is split over the slots, as in flash decoding. Some programs share the filled part of a row's cache; its
length is read on the device. A second kernel merges the partial softmaxes in order, if there are several, so results
are bitwise reproducible. It is a kernel of its own because products load their weights while it runs: the last program
of attention, doing the same, would wait for them. Another kernel takes the greedy token of each row.

ResNet computes the convolutions of few pixels and the head of one image by the same products.

Shape legend: M or B rows of features, a few, N rows of the weight, C columns, H query heads, K key and value heads,
G = H / K, S slots of the cache, V vocabulary, P parts of either, D width of a head.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from zoo.engine.kernel import follow, kernel, permit, wait
from zoo.ops.common import ceil_div, next_power, tma_runs
from zoo.ops.triton import norms

# Slots per step of a program, and programs that fill a large GPU.
BLOCK, ENOUGH = 64, 256


@triton.jit
def _rotated(source, norm, cos, sin, half, inside, eps, D: tl.constexpr, COUNT: tl.constexpr):
    """Both halves of heads, [COUNT, D / 2] each, normed if ``norm`` is given, and rotated."""
    place = (tl.arange(0, COUNT) * D)[:, None] + half[None, :]
    first = tl.load(source + place, mask=inside[:, None], other=0.0).to(tl.float32)
    second = tl.load(source + place + D // 2, mask=inside[:, None], other=0.0).to(tl.float32)
    if norm is not None:
        scale = tl.rsqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / D + eps)[:, None]
        first *= scale * tl.load(norm + half).to(tl.float32)[None, :]
        second *= scale * tl.load(norm + D // 2 + half).to(tl.float32)[None, :]
    return first * cos[None, :] - second * sin[None, :], second * cos[None, :] + first * sin[None, :]


@kernel
def _attend(
    qkv, q_norm, k_norm, rotary, positions, cache, out, partial, stats, eps: tl.constexpr, scale: tl.constexpr, slots,
    window, HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, D: tl.constexpr, GROUP: tl.constexpr, PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    wait(OVERLAP)
    part = tl.program_id(0)
    key_head = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    half = tl.arange(0, D // 2)
    member = tl.arange(0, GROUP)
    real = member < HEADS // KEY_HEADS
    given = tl.load(positions + batch)
    # A position outside the cache reads as the nearest slot and is not written: its address is another head's slot.
    position = tl.minimum(tl.maximum(given, 0), slots - 1)
    oldest = tl.maximum(position - window + 1, 0)
    steps = tl.cdiv(tl.cdiv(position + 1 - oldest, BLOCK), PARTS)
    first = oldest + part * steps * BLOCK
    end = tl.minimum(first + steps * BLOCK, position + 1)
    row = qkv + batch * ((HEADS + 2 * KEY_HEADS) * D)
    cos = tl.load(rotary + batch * D + half)
    sin = tl.load(rotary + batch * D + D // 2 + half)
    keys = cache + (batch * KEY_HEADS + key_head) * slots * D
    values = keys + tl.num_programs(2).to(tl.int64) * KEY_HEADS * slots * D
    if (first <= position) & (position < end) & (position == given):
        # The new token belongs to this part. The loop below reads it from the cache like all other tokens.
        one = tl.arange(0, 1)
        source = row + (HEADS + key_head) * D
        left, right = _rotated(source, k_norm, cos, sin, half, one == 0, eps, D, 1)
        target = keys + position * D
        kind = cache.dtype.element_ty
        tl.store(target + half[None, :] + one[:, None], left.to(qkv.dtype.element_ty).to(kind))
        tl.store(target + D // 2 + half[None, :] + one[:, None], right.to(qkv.dtype.element_ty).to(kind))
        column = tl.arange(0, D)
        tl.store(values + position * D + column, tl.load(source + KEY_HEADS * D + column).to(kind))
        tl.debug_barrier()
    left, right = _rotated(row + key_head * (HEADS // KEY_HEADS) * D, q_norm, cos, sin, half, real, eps, D, GROUP)
    left = left.to(cache.dtype.element_ty)
    right = right.to(cache.dtype.element_ty)
    column = tl.arange(0, D)
    greatest = tl.full([GROUP], float("-inf"), tl.float32)
    exponents = tl.zeros([GROUP], tl.float32)
    total = tl.zeros([GROUP, D], tl.float32)
    for begin in range(first, end, BLOCK):
        slot = begin + tl.arange(0, BLOCK)
        live = slot < end
        place = (slot * D)[:, None]
        key_left = tl.load(keys + place + half[None, :], mask=live[:, None], other=0.0)
        key_right = tl.load(keys + place + D // 2 + half[None, :], mask=live[:, None], other=0.0)
        value = tl.load(values + place + column[None, :], mask=live[:, None], other=0.0)
        score = tl.dot(left, tl.trans(key_left), input_precision="ieee")
        score = tl.dot(right, tl.trans(key_right), score, input_precision="ieee") * scale
        score = tl.where(live[None, :], score, float("-inf"))
        top = tl.maximum(greatest, tl.max(score, 1))
        fade = tl.exp(greatest - top)
        share = tl.exp(score - top[:, None])
        exponents = exponents * fade + tl.sum(share, 1)
        total = tl.dot(share.to(value.dtype), value, total * fade[:, None], input_precision="ieee")
        greatest = top
    # Permitted only here: weight loads of later kernels would queue ahead of this kernel's keys and values.
    permit(OVERLAP)
    head = (batch * KEY_HEADS + key_head) * (HEADS // KEY_HEADS) + member
    place = head * PARTS + part
    target = (place * D)[:, None] + column[None, :]
    if PARTS == 1:
        tl.store(out + target, (total / exponents[:, None]).to(out.dtype.element_ty), mask=real[:, None])
    else:
        tl.store(partial + target, total, mask=real[:, None])
        tl.store(stats + place * 2, greatest, mask=real)
        tl.store(stats + place * 2 + 1, exponents, mask=real)


@kernel
def _merge(partial, stats, out, D: tl.constexpr, PARTS: tl.constexpr, BLOCK_PARTS: tl.constexpr, OVERLAP: tl.constexpr):
    follow(OVERLAP)
    head = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, BLOCK_PARTS)
    column = tl.arange(0, D)
    live = part < PARTS
    tops = tl.load(stats + (head * PARTS + part) * 2, mask=live, other=float("-inf"))
    # Parts beyond the filled slots add nothing: their maximum is minus infinity.
    fade = tl.exp(tops - tl.max(tops, 0))
    exponents = tl.sum(fade * tl.load(stats + (head * PARTS + part) * 2 + 1, mask=live, other=0.0), 0)
    place = ((head * PARTS + part) * D)[:, None] + column[None, :]
    total = tl.sum(fade[:, None] * tl.load(partial + place, mask=live[:, None], other=0.0), 0)
    tl.store(out + head * D + column, (total / exponents).to(out.dtype.element_ty))


def decode_attention(
    qkv: Tensor, cache: Tensor, positions: Tensor, rotary: Tensor, q_norm: Tensor | None, k_norm: Tensor | None,
    eps: float, heads: int, window: int | None,
) -> Tensor:  # fmt: skip
    """See ``zoo/ops/attention.py``."""
    qkv, positions, rotary = qkv.contiguous(), positions.contiguous(), rotary.contiguous()
    _, batch, key_heads, slots, width = cache.shape
    parts = max(1, min(ceil_div(slots, BLOCK), ceil_div(ENOUGH, batch * key_heads), 64))
    partial = stats = None
    if parts > 1:
        partial = qkv.new_empty(batch, heads, parts, width, dtype=torch.float32)
        stats = qkv.new_empty(batch, heads, parts, 2, dtype=torch.float32)
    out = qkv.new_empty(batch, heads * width)
    _attend[(parts, key_heads, batch)](
        qkv, q_norm, k_norm, rotary, positions, cache, out, partial, stats, eps, width**-0.5, slots,
        slots if window is None else window, HEADS=heads, KEY_HEADS=key_heads, D=width,
        GROUP=max(next_power(heads // key_heads), 16), PARTS=parts, BLOCK=BLOCK, OVERLAP=False, num_warps=4,
    )  # fmt: skip
    if parts > 1:
        _merge[(batch * heads,)](
            partial, stats, out, D=width, PARTS=parts, BLOCK_PARTS=next_power(parts), OVERLAP=False, num_warps=4
        )
    return out


@triton.jit
def _load_columns(weight, row, live, begin, C: tl.constexpr, BLOCK_C: tl.constexpr):
    """Load columns of weight rows, from ``begin`` on: [ROWS, BLOCK_C]."""
    column = begin + tl.arange(0, BLOCK_C)
    return tl.load(weight + (row * C)[:, None] + column[None, :], mask=live[:, None] & (column < C)[None, :], other=0.0)


@kernel
def _linear(
    x, norm, weight, scale, bias, residual, out, eps: tl.constexpr, N: tl.constexpr, C: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_C: tl.constexpr, GATED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One row of features times weight rows, whole ones if they fit into BLOCK_C columns."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = row < N
    permit(OVERLAP)
    first = _load_columns(weight, row, live, 0, C, BLOCK_C)
    if GATED:
        first_up = _load_columns(weight + N * C, row, live, 0, C, BLOCK_C)
    wait(OVERLAP)
    column = tl.arange(0, BLOCK_C)
    result = tl.zeros([ROWS], tl.float32)
    up = tl.zeros([ROWS], tl.float32)
    squares = tl.zeros([BLOCK_C], tl.float32)
    for begin in tl.static_range(0, C, BLOCK_C):
        inside = begin + column < C
        value = tl.load(x + begin + column, mask=inside, other=0.0).to(tl.float32)
        if norm is not None:
            squares += value * value
            value *= tl.load(norm + begin + column, mask=inside, other=0.0).to(tl.float32)
        # Summed at once, a product and its sum are one instruction.
        part = first if begin == 0 else _load_columns(weight, row, live, begin, C, BLOCK_C)
        result += tl.sum(part.to(tl.float32) * value[None, :], 1)
        if GATED:
            part = first_up if begin == 0 else _load_columns(weight + N * C, row, live, begin, C, BLOCK_C)
            up += tl.sum(part.to(tl.float32) * value[None, :], 1)
    if norm is not None:
        root = tl.rsqrt(tl.sum(squares, 0) / C + eps)
        result *= root
        up *= root
    if scale is not None:
        result *= tl.load(scale + row, mask=live, other=0.0).to(tl.float32)
        if GATED:
            up *= tl.load(scale + N + row, mask=live, other=0.0).to(tl.float32)
    if GATED:
        result = result * tl.sigmoid(result) * up
    if bias is not None:
        result += tl.load(bias + row, mask=live, other=0.0).to(tl.float32)
    if residual is not None:
        # Rounded before the addition, as if the product were a separate kernel.
        result = result.to(out.dtype.element_ty).to(tl.float32)
        result += tl.load(residual + row, mask=live, other=0.0).to(tl.float32)
    tl.store(out + row, result.to(out.dtype.element_ty), mask=live)


@kernel
def _linear_rows(
    x, weight, scale, bias, residual, out, M: tl.constexpr, N: tl.constexpr, C: tl.constexpr, SLOTS: tl.constexpr,
    TILE: tl.constexpr, PARTS: tl.constexpr, BLOCK_C: tl.constexpr, GATED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """A few rows of features, padded to SLOTS, times TILE weight rows on tensor cores.

    Each warp multiplies one of PARTS of the columns. A gated tile holds rows of both halves of the weight.
    """
    ROWS: tl.constexpr = TILE // 2 if GATED else TILE
    SPAN: tl.constexpr = (C + PARTS * BLOCK_C - 1) // (PARTS * BLOCK_C) * BLOCK_C
    member = tl.arange(0, TILE)
    n = tl.program_id(0).to(tl.int64) * ROWS + member % ROWS
    live = n < N
    row = n + member // ROWS * N
    m = tl.arange(0, SLOTS)
    column = tl.arange(0, PARTS)[:, None] * SPAN + tl.arange(0, BLOCK_C)[None, :]
    of_weight, there, across = row[None, :, None], live[None, :, None], column[:, None, :]
    of_x, down = m[None, None, :], column[:, :, None]
    total = tl.zeros([PARTS, TILE, SLOTS], tl.float32)
    place = weight + of_weight * C + across
    given = x + of_x * C + down
    permit(OVERLAP)
    wait(OVERLAP)
    for begin in range(0, SPAN, BLOCK_C):
        numbers = tl.load(place + begin, mask=there & (across + begin < C), other=0.0)
        value = tl.load(given + begin, mask=(of_x < M) & (down + begin < C), other=0.0)
        total = tl.dot(numbers.to(value.dtype), value, total, input_precision="ieee")
    result = tl.sum(total, 0)
    if scale is not None:
        result *= tl.load(scale + row, mask=live, other=0.0).to(tl.float32)[:, None]
    n = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(result, [2, ROWS, SLOTS]), [1, 2, 0]))
        result = gate * tl.sigmoid(gate) * up
    if bias is not None:
        result += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    place = (m * N)[None, :] + n[:, None]
    seen = (n < N)[:, None] & (m < M)[None, :]
    if residual is not None:
        result = result.to(out.dtype.element_ty).to(tl.float32)
        result += tl.load(residual + place, mask=seen, other=0.0).to(tl.float32)
    tl.store(out + place, result.to(out.dtype.element_ty), mask=seen)


@kernel
def _linear_tiles(
    x, weight, scale, out, M: tl.constexpr, N: tl.constexpr, SPAN: tl.constexpr, GATED: tl.constexpr,
    TILE: tl.constexpr, SLOTS: tl.constexpr, BLOCK_C: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Rows of features, padded to SLOTS, times TILE weight rows, both read by TMA; SPAN of the columns a program."""
    row = tl.program_id(0) * TILE
    part = tl.program_id(1)
    total = tl.zeros([TILE, SLOTS], tl.float32)
    up = tl.zeros([TILE, SLOTS], tl.float32)
    permit(OVERLAP)
    wait(OVERLAP)
    for begin in range(part * SPAN, part * SPAN + SPAN, BLOCK_C):
        value = x.load([0, begin])
        total = tl.dot(weight.load([row, begin]).to(value.dtype), value.T, total, input_precision="ieee")
        if GATED:
            up = tl.dot(weight.load([N + row, begin]).to(value.dtype), value.T, up, input_precision="ieee")
    m, n = tl.arange(0, SLOTS), row + tl.arange(0, TILE)
    if scale is not None:
        total *= tl.load(scale + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
        if GATED:
            up *= tl.load(scale + N + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    if GATED:
        total = total * tl.sigmoid(total) * up
    place = ((part * M + m) * N)[None, :] + n[:, None]
    tl.store(out + place, total.to(out.dtype.element_ty), mask=(n < N)[:, None] & (m < M)[None, :])


@kernel
def _add_parts(
    parts, bias, residual, out, N: tl.constexpr, SIZE: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """The sum of parts [PARTS, SIZE], plus a bias and a residual."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = place < SIZE
    follow(OVERLAP)
    part = (tl.arange(0, PARTS) * SIZE)[:, None] + place[None, :]
    total = tl.sum(tl.load(parts + part, mask=live[None, :], other=0.0), 0)
    if bias is not None:
        total += tl.load(bias + place % N, mask=live, other=0.0).to(tl.float32)
    if residual is not None:
        total = total.to(out.dtype.element_ty).to(tl.float32)
        total += tl.load(residual + place, mask=live, other=0.0).to(tl.float32)
    tl.store(out + place, total.to(out.dtype.element_ty), mask=live)


# Weight bytes that a thread holds at once, and programs that keep a large GPU busy. Measured on an H200 for the whole
# chain of a step: the best values for a single kernel are not the best for overlapping kernels.
THREAD_BYTES, ENOUGH_ROWS = 128, 1600
# More rows of features than FEW_ROWS are read by TMA, where it is. A program then takes TMA_TILE weight rows, in so
# many pipeline stages, and columns are split, at most into MOST_PARTS, while programs are at most MOST_PROGRAMS.
FEW_ROWS, TMA_TILE, TMA_STAGES, MOST_PARTS, MOST_PROGRAMS = 16, 64, 4, 8, 256


def linear(
    x: Tensor, weight: Tensor, norm: Tensor | None = None, eps: float = 0.0, bias: Tensor | None = None,
    residual: Tensor | None = None, gated: bool = False, scale: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Product of x [M, C], RMS-normed if ``norm`` is given, and weight [N, C], plus bias [N] and residual [M, N].

    Bias and residual are optional; the result is [M, N]. ``gated`` takes a weight [2 N, C], and returns SiLU of the
    first half times the second. ``scale`` [N] is what each row of a quantized weight is multiplied by.
    """
    x, weight, (n, columns) = x.contiguous(), weight.contiguous(), weight.shape
    residual = None if residual is None else residual.contiguous()
    n, m = n // 2 if gated else n, x.shape[0]
    out = x.new_empty(m, n)
    if m == 1:
        # Whole weight rows at once if they fit. Rows of one program share the features; enough programs must remain.
        block = min(next_power(columns), 8192)
        rows = 4 if n // 4 >= ENOUGH_ROWS else 2 if n // 2 >= ENOUGH_ROWS else 1
        warps = min(max(next_power(rows * block * x.element_size()) // (32 * THREAD_BYTES), 2), 8)
        _linear[(ceil_div(n, rows),)](
            x, norm, weight, scale, bias, residual, out, eps, N=n, C=columns, ROWS=rows, BLOCK_C=block, GATED=gated,
            OVERLAP=False, num_warps=warps,
        )  # fmt: skip
        return out
    if norm is not None:
        x = norms.norm(x, None, None, norm, None, eps, keep=False, early=True)[0]
    if m > FEW_ROWS and columns % 16 == 0 and tma_runs(x):
        return _linear_by_tma(x, weight, bias, residual, gated, scale)
    tile, parts = 16, 4
    block = min(256 // x.element_size(), max(next_power(ceil_div(columns, parts)), 16))
    _linear_rows[(ceil_div(n, tile // 2 if gated else tile),)](
        x, weight, scale, bias, residual, out, M=m, N=n, C=columns, SLOTS=max(next_power(m), 8), TILE=tile,
        PARTS=parts, BLOCK_C=block, GATED=gated, OVERLAP=False, num_warps=4,
    )  # fmt: skip
    return out


def _linear_by_tma(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, gated: bool, scale: Tensor | None
) -> Tensor:
    """``linear`` of more rows than FEW_ROWS, without a norm."""
    (m, columns), n = x.shape, weight.shape[0] // (1 + gated)
    tiles, parts = ceil_div(n, TMA_TILE), 1
    while not gated and parts < MOST_PARTS and 2 * parts * tiles <= MOST_PROGRAMS:
        parts *= 2
    alone = parts == 1 and bias is None and residual is None
    product = x.new_empty(parts, m, n, dtype=x.dtype if alone else torch.float32)
    slots, block = max(next_power(m), 16), 256 // x.element_size()
    _linear_tiles[(tiles, parts)](
        TensorDescriptor.from_tensor(x, [slots, block]), TensorDescriptor.from_tensor(weight, [TMA_TILE, block]), scale,
        product, M=m, N=n, SPAN=ceil_div(columns, parts * block) * block, GATED=gated, TILE=TMA_TILE, SLOTS=slots,
        BLOCK_C=block, OVERLAP=False, num_warps=4, num_stages=TMA_STAGES,
    )  # fmt: skip
    if alone:
        return product[0]
    out, block = x.new_empty(m, n), 512
    _add_parts[(ceil_div(m * n, block),)](
        product, bias, residual, out, N=n, SIZE=m * n, PARTS=parts, BLOCK=block, OVERLAP=False, num_warps=4
    )
    return out


@kernel
def _dequantize(weight, scale, rows, out, C: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64)
    row = place if rows is None else tl.load(rows + place)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(weight + row * C + column, mask=column < C, other=0.0).to(tl.float32)
    value *= tl.load(scale + row).to(tl.float32)
    tl.store(out + place * C + column, value.to(out.dtype.element_ty), mask=column < C)


def dequantized(weight: Tensor, scale: Tensor, rows: Tensor | None = None) -> Tensor:
    """See ``zoo/ops/attention.py``."""
    columns = weight.shape[1]
    out = scale.new_empty(*(scale if rows is None else rows).shape, columns)
    grid = (out.numel() // columns, ceil_div(columns, 2048))
    _dequantize[grid](
        weight, scale, None if rows is None else rows.contiguous(), out, C=columns, BLOCK=2048, num_warps=4
    )
    return out


# Logits of a program.
LOGITS = 1024


@kernel
def _accept(
    logits, values, indices, tokens, positions, finished, step, output, ends, pad, ended,
    B: tl.constexpr, V: tl.constexpr, PARTS: tl.constexpr, BLOCK_PARTS: tl.constexpr, ENDS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    column = part * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(logits + row * V + column, mask=column < V, other=float("-inf")).to(tl.float32)
    best = tl.max(value, 0)
    # The first of equal values, regardless of the order of comparisons.
    tl.store(values + row * PARTS + part, best)
    tl.store(indices + row * PARTS + part, tl.min(tl.where(value == best, column, V), 0))
    tl.debug_barrier()
    # The last program of a row to end chooses its token, and sets the count to 0 for the next step.
    if tl.atomic_add(ended + row, 1, sem="acq_rel") == PARTS - 1:
        tl.store(ended + row, 0)
        each = tl.arange(0, BLOCK_PARTS)
        live = each < PARTS
        bests = tl.load(values + row * PARTS + each, mask=live, other=float("-inf"), cache_modifier=".cg")
        index = tl.load(indices + row * PARTS + each, mask=live, other=V, cache_modifier=".cg")
        token = tl.min(tl.where(bests == tl.max(bests, 0), index, V), 0)
        # A maximum of NaN equals no logit.
        token = tl.minimum(token, V - 1).to(tl.int64)
        done = tl.load(finished + row)
        token = tl.where(done, tl.load(pad), token)
        now = tl.load(step)
        tl.store(output + now * B + row, token)
        tl.store(positions + row, tl.load(positions + row) + tl.where(done, 0, 1))
        meets = tl.max(tl.where(tl.load(ends + tl.arange(0, ENDS)) == token, 1, 0), 0) != 0
        tl.store(finished + row, done | meets)
        tl.store(tokens + row, token)
        # All rows have read the step once the last of them is here.
        if tl.atomic_add(ended + B, 1, sem="acq_rel") == B - 1:
            tl.store(ended + B, 0)
            tl.store(step, now + 1)


def accept_greedy(
    logits: Tensor, tokens: Tensor, positions: Tensor, finished: Tensor, step: Tensor, output: Tensor, ends: Tensor,
    pad: Tensor, ended: Tensor,
) -> None:  # fmt: skip
    """See ``zoo/llm/generate.py``. The length of ``ends`` is a power of two; ``ended`` [B + 1] int32 are zeros."""
    logits = logits.contiguous()
    batch, vocabulary = logits.shape
    parts = ceil_div(vocabulary, LOGITS)
    values = logits.new_empty(batch, parts, dtype=torch.float32)
    indices = logits.new_empty(batch, parts, dtype=torch.int32)
    _accept[(parts, batch)](
        logits, values, indices, tokens, positions, finished, step, output, ends, pad, ended,
        B=batch, V=vocabulary, PARTS=parts, BLOCK_PARTS=next_power(parts), ENDS=ends.shape[0], BLOCK=LOGITS,
        num_warps=4,
    )  # fmt: skip
