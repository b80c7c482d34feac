"""Kernels that begin while the one before them ends: programmatic dependent launch, on Hopper and newer.

A step of decoding is a chain of kernels of a few microseconds each, and the GPU is idle for about one between two of
them. A kernel launched so starts as soon as all programs of the one before it have said that it may
(``gdc_launch_dependents``), or ended. It waits for that one's end (``gdc_wait``) before it touches anything that any
kernel writes, so that only loads of weights go ahead; and it waits in every program before it lets the next one start,
so that its own start means that everything before the kernel before it has ended.

Weights may be written by anything but the kernel right before. In a model that is a lookup, or one of these.
"""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor


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
