"""Kernels that begin while the one before them ends: programmatic dependent launch, on Hopper and newer.

A step of decoding is a chain of kernels of a few microseconds each, and the GPU is idle for about one between two of
them. A kernel launched so starts as soon as all programs of the one before it have said that it may
(``gdc_launch_dependents``). It waits for that one's end (``gdc_wait``) before it touches anything that any kernel
writes, so that only loads of weights go ahead. It waits in every program: its own end then means that everything before
it has ended too.

A product lets the next kernel start at once. Attention lets it start late: its loads are few, follow one another, and
would stand in line behind weights that are not needed yet.

Weights may not be written by kernels right before a step. In a model a lookup stands there.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton.language as tl
from torch import Tensor


def overlapped(x: Tensor) -> dict[str, Any]:
    """Launch options of a kernel with a constant ``OVERLAP``, for the device of ``x``."""
    if not _can_overlap(x.device):
        return {"OVERLAP": False}
    return {"OVERLAP": True, "launch_pdl": True}


@functools.cache
def _can_overlap(device: torch.device) -> bool:
    """Whether the GPU has it, and this Triton (from 3.4 on)."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_properties(device).major >= 9 and hasattr(tl.extra.cuda, "gdc_wait")
