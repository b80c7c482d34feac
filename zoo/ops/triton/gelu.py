# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs
"""GELU: the error function as it and its slope need it."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def erf_form(x):
    """|x|, and the normal distribution beyond it: the probability, and |x| times the density there.

    The probability by 7.1.26 of Abramowitz and Stegun, Handbook of Mathematical Functions, whose error is 1.5e-7 at
    most; it shares its exponential with the density. An exact erf has twice the instructions, and would take longer
    than memory.
    """
    # Behind 64 nothing is left of the tail, and infinity times nothing is not a number.
    size = tl.minimum(tl.abs(x), 64.0, propagate_nan=tl.PropagateNan.ALL)
    t = 1.0 + 0.23164189 * size
    t = tl.rsqrt(t * t)  # 1 / t in one instruction, where a division takes eight
    bell = tl.exp2(-0.72134752 * size * size)
    tail = 1.061405429 * t - 1.453152027
    tail = tail * t + 1.421413741
    tail = tail * t - 0.284496736
    tail = tail * t + 0.254829592
    return size, 0.5 * tail * t * bell, 0.39894228 * size * bell
