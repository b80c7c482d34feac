"""Kernels that begin while the one before them ends: programmatic dependent launch, on Hopper and newer.

A chain of kernels of a few microseconds each leaves the GPU idle for about one between two of them. A kernel launched
so starts as soon as all programs of the one before it have said that it may (``gdc_launch_dependents``), or have ended.
It waits for that one's end (``gdc_wait``) before it touches anything that any kernel writes, so that only loads of
weights go ahead. It waits in every program: its own end then means that everything before it has ended too.

A product lets the next kernel start at once. Attention lets it start late: its loads are few, follow one another, and
would stand in line behind weights that are not needed yet.

Weights may not be written by kernels right before a step. In a model a lookup stands there. Kernels that are not so
many, or follow the library's, wait before they load anything: ``take_turn``.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def take_turn(OVERLAP: tl.constexpr):
    """Wait for all kernels before this one, and let the next one begin, and wait in its turn."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


def overlapped(x: Tensor) -> dict[str, Any]:
    """Launch options of a kernel with a constant ``OVERLAP``, for the device of ``x``."""
    if not _can_overlap(x.device):
        return {"OVERLAP": False}
    return {"OVERLAP": True, "launch_pdl": True}


def _can_overlap(device: torch.device) -> bool:
    """Whether the GPU has it, and this Triton (from 3.4 on)."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_properties(device).major >= 9 and hasattr(tl.extra.cuda, "gdc_wait")
