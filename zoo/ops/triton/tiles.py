"""How rows and lines of images are cut into programs, and sums over rows.

Sums take two steps: programs add up rows of their own, and a last kernel adds their parts in float32, in a fixed order.

Shape legend: R rows, C channels or columns, K chunks of rows, P parts, S sums that the parts hold side by side.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from zoo.engine.kernel import kernel
from zoo.ops.common import ceil_div


@dataclass(frozen=True)
class Tile:
    """Rows and channels that a program holds at once, and its warps. Channels are a power of two."""

    rows: int
    channels: int
    warps: int

    def code(self) -> dict[str, int]:
        """As a launch takes it."""
        return {"ROWS": self.rows, "BLOCK": self.channels, "num_warps": self.warps}


# What writes rows: the forward, and gradients of rows.
APPLY = Tile(rows=64, channels=64, warps=4)
GRADIENTS = Tile(rows=32, channels=64, warps=4)
# A program takes several tiles where there are more than this many, and at most so many.
ENOUGH = 4096
MOST_TILES = 4
# What pools: of the output so many columns, whose lines a program goes down. 56 columns are whole tiles.
POOL = Tile(rows=8, channels=64, warps=2)
# What sums up rows: the statistics of a batch, and their gradients. Chunks are cut so that about so many programs run.
MOMENTS = Tile(rows=64, channels=64, warps=8)
SUMS = Tile(rows=64, channels=64, warps=8)
PROGRAMS = 512
# What puts chunks together: few channels a program, since there is little else to spread over a GPU.
FINISH = Tile(rows=512, channels=8, warps=8)


def rows_to_write(rows: int, channels: int, tile: Tile) -> tuple[int, int]:
    """(rows of a program, programs) of a kernel that writes rows."""
    blocks = ceil_div(channels, tile.channels)
    tiles = ceil_div(rows, tile.rows)
    share = tile.rows * max(1, min(MOST_TILES, tiles * blocks // ENOUGH))
    return share, ceil_div(rows, share) * blocks


def lines_to_pool(images: int, lines: int, columns: int, channels: int) -> tuple[int, int]:
    """(lines of a program, programs) of the kernel that pools, by the size of its output."""
    strips = ceil_div(columns, POOL.rows) * ceil_div(channels, POOL.channels)
    share = max(1, min(MOST_TILES, images * lines * strips // ENOUGH))
    return share, images * ceil_div(lines, share) * strips


def rows_to_sum(rows: int, channels: int, tile: Tile) -> tuple[int, int, int]:
    """(rows of a chunk, chunks, programs) of a kernel that sums up rows."""
    blocks = ceil_div(channels, tile.channels)
    wanted = max(1, PROGRAMS // blocks)
    share = ceil_div(ceil_div(rows, wanted), tile.rows) * tile.rows
    chunks = ceil_div(rows, share)
    return share, chunks, chunks * blocks


def pixels_of(x: Tensor) -> Tensor:
    """[N, C, H, W] -> [N, H, W, C], without a copy in channels_last; rows [R, C] as they are."""
    return (x if x.dim() == 2 else x.permute(0, 2, 3, 1)).contiguous()


def images_of(pixels: Tensor) -> Tensor:
    """[N, H, W, C] -> [N, C, H, W] in channels_last; rows [R, C] as they are."""
    return pixels if pixels.dim() == 2 else pixels.permute(0, 3, 1, 2)


def size_of(pixels: Tensor) -> tuple[int, int]:
    """(R, C) of pixels as rows."""
    channels = pixels.shape[-1]
    return pixels.numel() // channels, channels


def check(
    x: Tensor, like: tuple[Tensor | None, ...], channels: tuple[Tensor | None, ...], names: tuple[str, ...]
) -> None:
    """Refuse shapes that a kernel would read beyond the ends of: ``like`` is to be like x, ``channels`` [C].

    Not in a traced block, whose own shapes fit: Dynamo takes a comparison of shapes apart, and would take twice as long
    for a block with these.
    """
    if torch.compiler.is_compiling():
        return
    shape, device = x.shape, x.device
    if len(shape) not in (2, 4):
        raise ValueError(f"x has shape {tuple(shape)}, expected rows [R, C] or images [N, C, H, W]")
    wanted = [shape] * len(like) + [shape[1:2]] * len(channels)
    for name, tensor, expected in zip(names, (*like, *channels), wanted, strict=True):
        if tensor is None:
            continue
        if tensor.shape != expected:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected {tuple(expected)} as of x")
        if tensor.device != device:
            raise ValueError(f"{name} is on {tensor.device} and x on {device}; move one of them")
        if len(expected) == 1 and not tensor.is_contiguous():
            raise ValueError(f"{name} has stride {tensor.stride(0)}, expected 1; use {name}.contiguous()")


@triton.jit
def span(rows, channels, share, BLOCK: tl.constexpr):
    """Of this program: its chunk, channels [BLOCK], which of them there are, first row, and the row behind its last."""
    blocks = tl.cdiv(channels, BLOCK)
    program = tl.program_id(0)
    # Neighbours share rows, so that what runs at a time lies together.
    chunk = program // blocks
    channel = (program % blocks) * BLOCK + tl.arange(0, BLOCK)
    begin = chunk * share
    return chunk, channel, channel < channels, begin, tl.minimum(begin + share, rows)


@triton.jit
def strip(height, width, channels, share, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Of a pooling program: image, all lines and columns, its channels [BLOCK], columns [ROWS], lines from and to."""
    lines, columns = (height + 1) // 2, (width + 1) // 2
    blocks, strips, bands = tl.cdiv(channels, BLOCK), tl.cdiv(columns, ROWS), tl.cdiv(lines, share)
    program = tl.program_id(0)
    channel = (program % blocks) * BLOCK + tl.arange(0, BLOCK)
    column = (program // blocks) % strips * ROWS + tl.arange(0, ROWS)
    begin = (program // (blocks * strips)) % bands * share
    image = (program // (blocks * strips * bands)).to(tl.int64)
    return image, lines, columns, channel, column, begin, tl.minimum(begin + share, lines)


@triton.jit
def greater(a, b):
    """The greater, or NaN if either is one."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def norm_of(mean, variance, channel, live, eps):
    """Mean and rstd of channels [BLOCK]."""
    middle = tl.load(mean + channel, mask=live, other=0.0).to(tl.float32)
    spread = tl.load(variance + channel, mask=live, other=1.0).to(tl.float32)
    return middle, tl.rsqrt(spread + eps)


@triton.jit
def of_channels(tensor, channel, live):
    """Values of channels [BLOCK] in float32."""
    return tl.load(tensor + channel, mask=live, other=0.0).to(tl.float32)


@triton.jit
def of_rows(tensor, place, inner, seen):
    """Values of a tile [ROWS, BLOCK] in float32, at places ``inner`` behind the first."""
    return tl.load(tensor + place + inner, mask=seen, other=0.0).to(tl.float32)


@triton.jit
def tile_of(rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """A program's first row, rows [ROWS] from there on, columns [COLUMNS], and which of them are there."""
    across = tl.cdiv(columns, COLUMNS)
    first = (tl.program_id(0) // across).to(tl.int64) * ROWS
    row = tl.arange(0, ROWS)
    column = (tl.program_id(0) % across) * COLUMNS + tl.arange(0, COLUMNS)
    seen = (first + row < rows)[:, None] & (column < columns)[None, :]
    return first, row, column, seen


# Rows and columns of a tile, 8 warps: 32 bytes a thread in half precision, where a warp reads lines as they are.
ROWS, COLUMNS = 8, 512
# Parts of a tile's columns at most: three tiles of a width of 3,072 for each half of a multiprocessor of a large GPU.
PARTS = 128
# Parts that the last kernel reads at once, and its columns: many programs, for little is read.
PARTS_AT_ONCE, LAST_COLUMNS = 128, 16


@kernel(do_not_specialize=["rows"])
def _column_sums(x, part, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    mine = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    below = tl.arange(0, ROWS)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(mine * ROWS, rows, tl.num_programs(1) * ROWS):
        seen = (first + below < rows)[:, None] & (column < columns)[None, :]
        place = first * columns + below[:, None] * columns + column[None, :]
        total += tl.load(x + place, mask=seen, other=0.0).to(tl.float32)
    tl.store(part + mine * columns + column, tl.sum(total, 0), mask=column < columns)


@triton.jit
def total_of(part, parts, columns, column, live, PARTS: tl.constexpr, COLUMNS: tl.constexpr):
    """Parts [P, C], added up in their order, of columns [COLUMNS] where they are ``live``."""
    total = tl.zeros([PARTS, COLUMNS], tl.float32)
    for start in range(0, parts, PARTS):
        index = start + tl.arange(0, PARTS)
        seen = (index < parts)[:, None] & live[None, :]
        total += tl.load(part + index[:, None] * columns + column[None, :], mask=seen, other=0.0)
    return tl.sum(total, 0)


@kernel(do_not_specialize=["parts"])
def _add_parts(part, first, second, third, parts, columns, PARTS: tl.constexpr, COLUMNS: tl.constexpr):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    which = tl.program_id(1)
    total = tl.zeros([PARTS, COLUMNS], tl.float32)
    for start in range(0, parts, PARTS):
        row = start + tl.arange(0, PARTS)
        seen = (row < parts)[:, None] & (column < columns)[None, :]
        place = (row * tl.num_programs(1) + which)[:, None] * columns + column[None, :]
        total += tl.load(part + place, mask=seen, other=0.0)
    value = tl.sum(total, 0)
    live = column < columns
    tl.store(first + column, value.to(first.dtype.element_ty), mask=live & (which == 0))
    if second is not None:
        tl.store(second + column, value.to(second.dtype.element_ty), mask=live & (which == 1))
    if third is not None:
        tl.store(third + column, value.to(third.dtype.element_ty), mask=live & (which == 2))


def parts_of(rows: int, most: int | None = None) -> int:
    """How many programs share the rows of one tile of columns; ``PARTS`` at most if nothing is said."""
    return min(max(ceil_div(rows, ROWS), 1), most or PARTS)


def add_parts(part: Tensor, *sums: Tensor) -> None:
    """Parts [P, S, C] in float32 -> S sums [C], up to three, each written in its own dtype."""
    parts, _, columns = part.shape
    grid = ceil_div(columns, LAST_COLUMNS), len(sums)
    first, second, third = (*sums, None, None)[:3]
    _add_parts[grid](part, first, second, third, parts, columns, PARTS=PARTS_AT_ONCE, COLUMNS=LAST_COLUMNS, num_warps=8)


def column_sums(x: Tensor, dtype: torch.dtype) -> Tensor:
    """[..., C] -> [C] in another dtype."""
    x, columns = x.contiguous(), x.shape[-1]
    out = x.new_empty(columns, dtype=dtype)
    rows = x.numel() // columns
    # Where one tile holds all columns there are no others beside it to be read.
    parts = parts_of(rows, PARTS if columns > COLUMNS else 2 * PARTS)
    part = x.new_empty(parts, 1, columns, dtype=torch.float32)
    _column_sums[(ceil_div(columns, COLUMNS), part.shape[0])](
        x, part, rows, columns, ROWS=ROWS, COLUMNS=COLUMNS, num_warps=8
    )
    add_parts(part, out)
    return out
