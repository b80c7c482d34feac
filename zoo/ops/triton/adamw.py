"""AdamW at the memory's rate: four tensors read, three written, 16 bytes at a time.

torch's own kernel takes all parameters in one launch, in pieces that few threads go through in turn, and a third of the
memory's rate is lost. Here each program loads all before it computes, and up to eight parameters of one size share a
launch, whose end leaves multiprocessors idle.

Shape legend: K parameters of a launch, M numbers of each.
"""

import math

import triton
import triton.language as tl
from torch import Tensor

from zoo.engine.kernel import kernel
from zoo.ops.adamw import TOGETHER
from zoo.ops.common import ceil_div

# Numbers of a program, and its warps: 8 numbers of each tensor for a thread, a vector of half precision.
BLOCK, WARPS = 1024, 4


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


@triton.jit
def _select(index, a, b, c, d, e, f, g, h):
    """A pointer by the bits of its index. What is selected of aligned pointers the compiler knows to be aligned."""
    bit = index % 2 == 1
    a, c, e, g = tl.where(bit, b, a), tl.where(bit, d, c), tl.where(bit, f, e), tl.where(bit, h, g)
    bit = index // 2 % 2 == 1
    a, e = tl.where(bit, c, a), tl.where(bit, g, e)
    return tl.where(index // 4 == 1, e, a)


# One counter that lies elsewhere is no reason to compile another.
@kernel(do_not_specialize_on_alignment=[f"count{index}" for index in range(TOGETHER)])
def _adamw(
    param0, param1, param2, param3, param4, param5, param6, param7,
    grad0, grad1, grad2, grad3, grad4, grad5, grad6, grad7,
    average0, average1, average2, average3, average4, average5, average6, average7,
    square0, square1, square2, square3, square4, square5, square6, square7,
    count0, count1, count2, count3, count4, count5, count6, count7,
    rate, scale, skip, numbers, keep, take, log_keep, keep_square, take_square, log_keep_square, eps, decay,
    RATE_ON_DEVICE: tl.constexpr, MAXIMIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # One parameter after the other, as memory likes it.
    index = tl.program_id(1)
    param = _select(index, param0, param1, param2, param3, param4, param5, param6, param7)
    grad = _select(index, grad0, grad1, grad2, grad3, grad4, grad5, grad6, grad7)
    average = _select(index, average0, average1, average2, average3, average4, average5, average6, average7)
    square = _select(index, square0, square1, square2, square3, square4, square5, square6, square7)
    count = _select(index, count0, count1, count2, count3, count4, count5, count6, count7)
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
    params: list[Tensor], grads: list[Tensor], averages: list[Tensor], squares: list[Tensor], counts: list[Tensor],
    rate: Tensor | float, scale: Tensor | None, skip: Tensor | None, betas: tuple[float, float], eps: float,
    decay: float, maximize: bool,
) -> None:  # fmt: skip
    """One update of K parameters, in place. Each one's four tensors of M numbers lie alike, without gaps.

    The dtypes are the first's, and ``counts`` include this step.
    """
    numbers = params[0].numel()
    coefficients: list[float] = []
    for beta in betas:
        # In double precision here: 0.999 rounded to float32 and taken off one is wrong in the fifth digit.
        coefficients += [beta, 1.0 - beta, math.log(beta) if beta else -math.inf]
    # No program is launched for those that fill up the arguments.
    fill = TOGETHER - len(params)
    pointers = [each for held in (params, grads, averages, squares, counts) for each in held + held[-1:] * fill]
    _adamw[ceil_div(numbers, BLOCK), len(params)](
        *pointers, rate, scale, skip, numbers, *coefficients, eps, decay,
        RATE_ON_DEVICE=isinstance(rate, Tensor), MAXIMIZE=maximize, BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip
