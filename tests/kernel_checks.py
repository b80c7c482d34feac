"""What the checks of kernels share: where they run, what they draw, and how near is near.

A file ``*_checks.py`` runs in Triton's interpreter, or on a GPU::

    TRITON_INTERPRET=1 python -m pytest tests/unet_glue_checks.py
    python -m pytest tests/unet_glue_checks.py -m gpu
"""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

import zoo.ops.common

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
MARKS = [] if DEVICE == "cpu" else pytest.mark.gpu


@pytest.fixture(autouse=True)
def kernels_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels run in the interpreter as on a GPU, and every test draws the same numbers."""
    torch.manual_seed(0)
    # Off for products, but by default on for convolutions.
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    if DEVICE == "cpu":
        monkeypatch.setattr(zoo.ops.common, "triton_runs_on", lambda device: True)


def values(*shape: int, dtype: torch.dtype = torch.float32, mean: float = 0.0, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape) * scale + mean).to(DEVICE, dtype)


def check_close(found: Tensor, expected: Tensor, dtype: torch.dtype, relative: float) -> None:
    """Assert the dtype, finite values, and a relative error by norms below ``relative``."""
    assert found.shape == expected.shape and found.dtype == dtype and found.isfinite().all()
    error = (found.double() - expected).norm() / expected.norm()
    assert error < relative, error
