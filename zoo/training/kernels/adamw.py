# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs
"""AdamW of one parameter at the memory's rate: four tensors read, three written, 16 bytes at a time.

torch's own takes all parameters in one launch, in pieces that few threads go through in turn, which leaves a third of
the memory's rate to small reads. Here each of a large parameter's programs reads all that it needs before it computes.

Shape legend: M numbers of a parameter.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from zoo.ahead import Kernel
from zoo.operators import ceil_div

# Numbers of a program, and its warps: 8 numbers of each tensor for a thread, a vector of half precision.
BLOCK, WARPS = 2048, 8


@triton.jit
def _one_minus_exp(x):
    """1 - e^x for x <= 0, to float32's last digits: next to zero by its series, where the difference cancels."""
    series = 1.0 + x * (1.0 / 8.0)
    series = 1.0 + x * (1.0 / 7.0) * series
    series = 1.0 + x * (1.0 / 6.0) * series
    series = 1.0 + x * (1.0 / 5.0) * series
    series = 1.0 + x * (1.0 / 4.0) * series
    series = 1.0 + x * (1.0 / 3.0) * series
    series = 1.0 + x * (1.0 / 2.0) * series
    return tl.where(x > -0.5, -x * series, 1.0 - tl.exp(x))


@Kernel
@triton.jit
def _adamw(
    param, grad, average, square, count, rate, scale, skip, numbers,
    keep, take, log_keep, keep_square, take_square, log_keep_square, eps, decay,
    RATE_ON_DEVICE: tl.constexpr, MAXIMIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # A table of words for every language has more numbers than 32 bits count bytes of.
    first = tl.program_id(0).to(tl.int64) * BLOCK
    place = tl.arange(0, BLOCK)
    seen = first + place < numbers
    param += first
    grad += first
    average += first
    square += first
    p = tl.load(param + place, mask=seen, other=0.0).to(tl.float32)
    g = tl.load(grad + place, mask=seen, other=0.0).to(tl.float32)
    m = tl.load(average + place, mask=seen, other=0.0).to(tl.float32)
    v = tl.load(square + place, mask=seen, other=0.0).to(tl.float32)
    steps = tl.load(count).to(tl.float32)
    if RATE_ON_DEVICE:
        rate = tl.load(rate).to(tl.float32)
    if skip is not None:  # noqa: SIM102 (what is None is nothing to load from)
        # Behind the reads, so that these do not wait for it: bad steps are rare.
        if tl.load(skip) == 1.0:
            return
    if scale is not None:
        g = g / tl.load(scale).to(tl.float32)
        tl.store(grad + place, g.to(grad.dtype.element_ty), mask=seen)
    if MAXIMIZE:
        g = -g
    p -= rate * decay * p
    m = keep * m + take * g
    v = keep_square * v + take_square * (g * g)
    size = rate / _one_minus_exp(steps * log_keep)
    root = 1.0 / tl.sqrt(_one_minus_exp(steps * log_keep_square))
    p -= size * m / (tl.sqrt(v) * root + eps)
    tl.store(param + place, p.to(param.dtype.element_ty), mask=seen)
    tl.store(average + place, m.to(average.dtype.element_ty), mask=seen)
    tl.store(square + place, v.to(square.dtype.element_ty), mask=seen)


def adamw(
    param: Tensor,
    grad: Tensor,
    average: Tensor,
    square: Tensor,
    count: Tensor,
    rate: Tensor | float,
    scale: Tensor | None,
    skip: Tensor | None,
    betas: tuple[float, float],
    eps: float,
    decay: float,
    maximize: bool,
) -> None:
    """One update, in place. The four tensors of M numbers lie alike, without gaps; ``count`` includes this step."""
    numbers = param.numel()
    coefficients: list[float] = []
    for beta in betas:
        # In double precision here: 0.999 rounded to float32 and taken off one is wrong in the fifth digit.
        coefficients += [beta, 1.0 - beta, math.log(beta) if beta else -math.inf]
    _adamw[(ceil_div(numbers, BLOCK),)](
        param, grad, average, square, count, rate, scale, skip, numbers,
        *coefficients, eps, decay,
        RATE_ON_DEVICE=isinstance(rate, Tensor), MAXIMIZE=maximize, BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip
