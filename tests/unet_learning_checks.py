"""Gradients of the glue against float64. Run by test_unet_kernels.py in Triton's interpreter, and on a GPU.

TRITON_INTERPRET=1 python -m pytest tests/unet_learning_checks.py
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.gradients import operators as gradients
from zoo.gradients.kernels import sums
from zoo.unet import fallback, learning, operators
from zoo.unet.kernels import glue_backward as kernels

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
pytestmark = [] if DEVICE == "cpu" else pytest.mark.gpu
# The interpreter cuts numbers off where a GPU rounds them to bfloat16.
RELATIVE = {torch.float32: 1e-6, torch.bfloat16: 8e-3 if DEVICE == "cpu" else 4e-3, torch.float16: 5e-4}
# The rows' dtype, and the parameters'.
PAIRS = [*((dtype, dtype) for dtype in RELATIVE), (torch.bfloat16, torch.float32)]
SIZES = [(9, 40), (1, 8), (5, 60), (3, 7)]


@pytest.fixture(autouse=True)
def _kernels_run(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    if DEVICE == "cpu":
        for module in (operators, gradients):
            monkeypatch.setattr(module, "triton_runs_on", lambda device: True)


@pytest.fixture
def _programs_go_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of many rows, and of many columns."""
    for name, size in {"GATE_ROWS": 2, "GATE_COLUMNS": 16, "GATE_PROGRAMS": 8}.items():
        monkeypatch.setattr(kernels, name, size)
    for name, size in {"PARTS": 2, "PARTS_AT_ONCE": 2, "LAST_COLUMNS": 64, "ROWS": 2, "COLUMNS": 32}.items():
        monkeypatch.setattr(sums, name, size)


def values(*shape: int, dtype: torch.dtype = torch.float32, mean: float = 0.0, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape) * scale + mean).to(DEVICE, dtype).requires_grad_()


def close(found: Tensor, expected: Tensor, dtype: torch.dtype, times: float = 1.0) -> None:
    assert found.shape == expected.shape and found.dtype == dtype and found.isfinite().all()
    error = (found.double() - expected).norm() / expected.norm()
    assert error < RELATIVE[dtype] * times, error


def check(ours: Callable[..., Any], theirs: Callable[..., Any], given: Sequence[Tensor], times: float = 1.0) -> None:
    """Outputs and gradients of tensors, of all of them and of each alone, against those of float64."""
    exact = [each.detach().double().requires_grad_() for each in given]
    outputs, wanted = ours(*given), theirs(*exact)
    outputs, wanted = ((each,) if isinstance(each, Tensor) else each for each in (outputs, wanted))
    grads = [torch.randn(each.shape).to(each) for each in outputs]
    expected = torch.autograd.grad(wanted, exact, [grad.double() for grad in grads])
    found = torch.autograd.grad(outputs, given, grads, retain_graph=True)
    for one, other in zip(outputs, wanted, strict=True):
        close(one, other, one.dtype)
    for one, other, like in zip(found, expected, given, strict=True):
        close(one, other, like.dtype, times)
    again = torch.autograd.grad(outputs, given, grads)
    assert all(torch.equal(*both) for both in zip(found, again, strict=True))
    for index, like in enumerate(given):
        alone = [each.detach().requires_grad_(each is like) for each in given]
        outputs = ours(*alone)
        outputs = (outputs,) if isinstance(outputs, Tensor) else outputs
        needed = [(out, grad) for out, grad in zip(outputs, grads, strict=True) if out.requires_grad]
        (one,) = torch.autograd.grad([out for out, _ in needed], alone[index], [grad for _, grad in needed])
        assert torch.equal(one, found[index])


# --- the gate ---


@pytest.mark.usefixtures("_programs_go_round")
@pytest.mark.parametrize(("dtype", "wide"), PAIRS, ids=str)
@pytest.mark.parametrize(("rows", "columns"), SIZES)
def test_gates(rows: int, columns: int, dtype: torch.dtype, wide: torch.dtype) -> None:
    x, bias = values(rows, 2 * columns, dtype=dtype, scale=2.0), values(2 * columns, dtype=wide)
    check(learning.gated_gelu, fallback.gated_gelu, [x, bias])


def test_gates_of_programs_as_they_are() -> None:
    check(learning.gated_gelu, fallback.gated_gelu, [values(20, 600, scale=2.0), values(600)])


def slope_alone(gate: Tensor) -> Tensor:
    x = torch.cat([torch.ones_like(gate), gate])[None].requires_grad_()
    out = learning.gated_gelu(x, torch.zeros_like(x[0].detach()))
    (grad,) = torch.autograd.grad(out, x, torch.ones_like(out))
    return grad[0, gate.numel() :]


def test_the_slope_of_gelu_is_near_everywhere() -> None:
    gate = torch.cat([torch.linspace(-100, 3, 2001, dtype=torch.float64).exp2() * sign for sign in (1, -1)])
    gate = torch.cat([gate, torch.linspace(-7, 7, 2001, dtype=torch.float64)]).float().to(DEVICE)
    exact = gate.double().requires_grad_()
    (expected,) = torch.autograd.grad(F.gelu(exact).sum(), exact)
    assert (slope_alone(gate).double() - expected).abs().max() < 4e-7


def test_the_slope_of_gelu_of_what_is_not_finite() -> None:
    gate = torch.tensor([float("inf"), float("nan"), -1e30, 3e38, 0.0, -20.0], device=DEVICE)
    expected = torch.tensor([1.0, float("nan"), 0.0, 1.0, 0.5, 0.0], device=DEVICE)
    torch.testing.assert_close(slope_alone(gate), expected, equal_nan=True)


def test_gradients_that_are_not_contiguous() -> None:
    x, bias = values(12, 6).detach().t().requires_grad_(), values(24).detach()[::2].requires_grad_()
    out = learning.gated_gelu(x, bias)
    exact = [each.detach().double().requires_grad_() for each in (x, bias)]
    wanted = fallback.gated_gelu(*exact)
    for grad in (values(6, 6).detach().t(), values(1, 6).detach().expand(6, -1)):
        found = torch.autograd.grad(out, [x, bias], grad, retain_graph=True)
        expected = torch.autograd.grad(wanted, exact, grad.double(), retain_graph=True)
        for one, other in zip(found, expected, strict=True):
            close(one, other, torch.float32)


def test_no_rows() -> None:
    x, bias = values(0, 24), values(24)
    out = learning.gated_gelu(x, bias)
    found = torch.autograd.grad(out, [x, bias], out.detach())
    assert found[0].shape == (0, 24) and found[1].shape == (24,) and not found[1].any()
