"""What the checks of kernels share: where they run, what they draw, and how near is near.

A file ``*_checks.py`` runs in Triton's interpreter, or on a GPU::

    TRITON_INTERPRET=1 python -m pytest tests/unet_kernel_checks.py
    python -m pytest tests/unet_kernel_checks.py -m gpu
"""

import os

import pytest
import torch
from torch import Tensor

import zoo.ops.common

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
MARKS = [] if DEVICE == "cpu" else pytest.mark.gpu
RELATIVE = {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}


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


def in_float64(*tensors: Tensor | None) -> list[Tensor | None]:
    return [None if tensor is None else tensor.double() for tensor in tensors]


def close(
    found: Tensor, expected: Tensor, dtype: torch.dtype, relative: float | None = None, *, times: float = 1.0,
    layout: torch.memory_format = torch.preserve_format,
) -> None:  # fmt: skip
    """Assert dtype, layout, finite values, and an error by norms of at most ``relative``, by default the dtype's."""
    assert found.shape == expected.shape and found.dtype == dtype and found.isfinite().all()
    assert layout is torch.preserve_format or found.is_contiguous(memory_format=layout)
    error = (found.double() - expected).norm()
    assert error <= (relative or RELATIVE[dtype]) * times * expected.norm(), error / expected.norm()
