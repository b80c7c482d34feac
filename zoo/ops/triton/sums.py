"""All-reduce of few numbers over the processes of a host, in one kernel that can begin while its predecessor ends.

Each process writes its numbers into the memory of all processes. Each word holds a number and the count of the sum. A
reader that finds the count has the number, so no process waits at a barrier. NCCL calls this protocol LL; see Hu et
al., 2025, https://arxiv.org/abs/2507.04786. All processes add in the order of ranks, in float32, and get equal bits. On
two H200s a sum of 4,096 numbers takes 1.8 us of a CUDA graph; with flags after the numbers 4.3 us, torch's one-shot
all-reduce 6.6 us, NCCL 7.8 us.

A process has two slots for the numbers of each rank: one for sums of even count, one for sums of odd count. No number
is overwritten before it is read. Proof: a process that writes for sum e + 2 has ended sum e + 1, so it has read what
every rank wrote for e + 1. Each rank wrote that after its sum e ended, so it has read the numbers that are overwritten
now. Kernels of one stream, also early ones, touch shared memory only after all earlier kernels have ended: ``wait``
waits for the predecessor, which waited for its own predecessor. The same holds for each program, whatever the size of a
sum: a program writes and reads all words of its block every time. Until the new number arrives a word holds the count
of the sum before the last, so the lowest 16 bits of a count are enough.

Shape legend: R processes, P programs, W words of a program.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from zoo.engine.kernel import kernel, permit, wait
from zoo.ops.common import ceil_div

# Words of a program. A program is one warp, independent of others. Half-precision threads write 16 bytes at once.
WORDS = 128


@triton.jit
def _pointer(addresses, rank, word: tl.constexpr):
    """The address of a rank as a pointer. GPU memory is aligned to 16 bytes."""
    return tl.multiple_of(tl.load(addresses + rank).to(tl.pointer_type(word)), 16)


class Shared(NamedTuple):
    """State of a process's sums. Before the first sum all but the addresses is zero. All sums run on one stream."""

    memory: Tensor  # [2, R, P W], words twice as wide as a number: the ranks' numbers of the last two sums
    addresses: Tensor  # int64 [R + 1]: this process's slot in the memory of each rank, then its own memory
    counts: Tensor  # int32 [P]: sums that each program has computed


@kernel
def _sum(
    part, out, counts, addresses, n, RANKS: tl.constexpr, CAPACITY: tl.constexpr, WORDS: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    # Permitted at once: the next kernel loads weights while this kernel waits for the other ranks' numbers.
    permit(OVERLAP)
    bits: tl.constexpr = part.dtype.element_ty.primitive_bitwidth
    number: tl.constexpr = tl.int16 if bits == 16 else tl.int32
    word: tl.constexpr = tl.int32 if bits == 16 else tl.int64
    program = tl.program_id(0)
    place = program * WORDS + tl.arange(0, WORDS)
    own = _pointer(addresses, RANKS, word)
    wait(OVERLAP)
    count = tl.load(counts + program) + 1
    label = (count & 0xFFFF).to(word)
    start = (count & 1) * (RANKS * CAPACITY) + place
    value = tl.load(part + place, mask=place < n, other=0.0)
    packed = (value.to(number, bitcast=True).to(word) << bits) | label
    for rank in tl.static_range(RANKS):
        # Written through, and read past the L1 cache. A word arrives whole, independent of its neighbours.
        tl.store(_pointer(addresses, rank, word) + start, packed, cache_modifier=".wt")
    total = tl.zeros([WORDS], tl.float32)
    waits = 1
    while waits != 0:
        total = tl.zeros([WORDS], tl.float32)
        missing = tl.zeros([WORDS], tl.int32)
        for rank in tl.static_range(RANKS):
            packed = tl.load(own + rank * CAPACITY + start, volatile=True)
            missing |= ((packed & 0xFFFF) != label).to(tl.int32)
            total += (packed >> bits).to(number).to(value.dtype, bitcast=True).to(tl.float32)
        waits = tl.max(missing, 0)
    tl.store(out + place, total.to(value.dtype), mask=place < n)
    tl.store(counts + program, count)


def sum_of_parts(part: Tensor, shared: Shared) -> Tensor:
    """Sum of the processes' parts. They have one shape, at most ``capacity`` numbers and the dtype of ``shared``."""
    part = part.contiguous()
    out, n = torch.empty_like(part), part.numel()
    _sum[(ceil_div(n, WORDS),)](
        part, out, shared.counts, shared.addresses, n, RANKS=shared.addresses.shape[0] - 1, CAPACITY=capacity(shared),
        WORDS=WORDS, OVERLAP=False, num_warps=1,
    )  # fmt: skip
    return out


def capacity(shared: Shared) -> int:
    """Maximum count of numbers in a sum."""
    return shared.counts.shape[0] * WORDS
