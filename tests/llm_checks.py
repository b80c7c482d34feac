"""What the checks of the LLM's kernels share: where they run, what they draw, and how near is near."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

import zoo.ops.common

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
MARKS = [] if DEVICE == "cpu" else pytest.mark.gpu


def let_kernels_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter as on a GPU, and the same numbers drawn in every test."""
    torch.manual_seed(0)
    if DEVICE == "cpu":
        monkeypatch.setattr(zoo.ops.common, "triton_runs_on", lambda device: True)


def values(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape) * scale).to(DEVICE, dtype)


def check_close(found: Tensor, expected: Tensor, dtype: torch.dtype, relative: float) -> None:
    """Of that dtype, finite, and no farther from the expected in double precision, by norms."""
    assert found.shape == expected.shape and found.dtype == dtype and found.isfinite().all()
    error = (found.double() - expected).norm() / expected.norm()
    assert error < relative, error
