"""Gradients of the glue against float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.kernel_checks import DEVICE, MARKS, RELATIVE, close, kernels_run  # noqa: F401
from zoo.ops.conv import conv_add
from zoo.ops.glu import gated_gelu
from zoo.ops.norms import add_norm, layer_norm
from zoo.ops.triton import glu as gate_kernels
from zoo.ops.triton import norms as norm_kernels
from zoo.ops.triton import tiles as sums

pytestmark = MARKS
# The rows' dtype, and the parameters'.
PAIRS = [*((dtype, dtype) for dtype in RELATIVE), (torch.bfloat16, torch.float32)]
# Rows, columns and dtypes: programs that go round, less than a tile, what vectors do not divide, widths of the models.
SIZES = [(1, 8), (3, 7), (16, 64), (5, 320), (2, 1280)]
CASES = [*((9, 40, *pair) for pair in PAIRS), *((*size, *PAIRS[-1]) for size in SIZES)]


@pytest.fixture
def _programs_go_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of many rows, and of many columns."""
    for name, size in {"GATE_ROWS": 2, "GATE_COLUMNS": 16, "PROGRAMS": 8}.items():
        monkeypatch.setattr(gate_kernels, name, size)
    monkeypatch.setattr(norm_kernels, "ROW_PROGRAMS", 2)
    for name, size in {"PARTS": 2, "PARTS_AT_ONCE": 2, "LAST_COLUMNS": 64, "ROWS": 2, "COLUMNS": 32}.items():
        monkeypatch.setattr(sums, name, size)


def values(*shape: int, dtype: torch.dtype = torch.float32, mean: float = 0.0, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape) * scale + mean).to(DEVICE, dtype).requires_grad_()


def check(function: Callable[..., Any], given: Sequence[Tensor], alone: bool = True) -> None:
    """Outputs and gradients against those of float64, which no kernel takes; and of each as if it learnt alone."""
    exact = [each.detach().double().requires_grad_() for each in given]
    outputs, wanted = function(*given), function(*exact)
    outputs, wanted = ((each,) if isinstance(each, Tensor) else each for each in (outputs, wanted))
    grads = [torch.randn(each.shape).to(each) for each in outputs]
    expected = torch.autograd.grad(wanted, exact, [grad.double() for grad in grads])
    found = torch.autograd.grad(outputs, given, grads, retain_graph=True)
    for one, other in zip(outputs, wanted, strict=True):
        close(one, other, one.dtype)
    for one, other, like in zip(found, expected, given, strict=True):
        close(one, other, like.dtype)
    again = torch.autograd.grad(outputs, given, grads)
    assert all(torch.equal(*both) for both in zip(found, again, strict=True))
    with torch.no_grad():
        alike = function(*given)
    for one, other in zip(outputs, (alike,) if isinstance(alike, Tensor) else alike, strict=True):
        assert torch.equal(one, other)
    for index, like in enumerate(given if alone else ()):
        frozen = [each.detach().requires_grad_(each is like) for each in given]
        outputs = function(*frozen)
        outputs = (outputs,) if isinstance(outputs, Tensor) else outputs
        (one,) = torch.autograd.grad(outputs, frozen[index], grads)
        assert torch.equal(one, found[index])


# --- the gate ---


@pytest.mark.usefixtures("_programs_go_round")
@pytest.mark.parametrize(("rows", "columns", "dtype", "wide"), CASES)
def test_gates(rows: int, columns: int, dtype: torch.dtype, wide: torch.dtype) -> None:
    x, bias = values(rows, 2 * columns, dtype=dtype, scale=2.0), values(2 * columns, dtype=wide)
    check(gated_gelu, [x, bias])


def test_gates_of_programs_as_they_are() -> None:
    check(gated_gelu, [values(20, 600, scale=2.0), values(600)])


def slope_alone(gate: Tensor) -> Tensor:
    x = torch.cat([torch.ones_like(gate), gate])[None].requires_grad_()
    out = gated_gelu(x, torch.zeros_like(x[0].detach()))
    (grad,) = torch.autograd.grad(out, x, torch.ones_like(out))
    return grad[0, gate.numel() :]


def test_the_slope_of_gelu_is_near_everywhere() -> None:
    gate = torch.cat([torch.linspace(-100, 3, 2001, dtype=torch.float64).exp2() * sign for sign in (1, -1)])
    gate = torch.cat([gate, torch.linspace(-7, 7, 2001, dtype=torch.float64)]).float().to(DEVICE)
    exact = gate.double().requires_grad_()
    (expected,) = torch.autograd.grad(F.gelu(exact).sum(), exact)
    assert (slope_alone(gate).double() - expected).abs().max() < 4e-7


def test_the_slope_of_gelu_at_nan_and_infinity() -> None:
    gate = torch.tensor([float("inf"), float("nan"), -1e30, 3e38, 0.0, -20.0], device=DEVICE)
    expected = torch.tensor([1.0, float("nan"), 0.0, 1.0, 0.5, 0.0], device=DEVICE)
    torch.testing.assert_close(slope_alone(gate), expected, equal_nan=True)


# --- the norms ---


@pytest.mark.usefixtures("_programs_go_round")
@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize(("rows", "columns", "dtype", "wide"), CASES)
def test_norms_of_sums(rows: int, columns: int, dtype: torch.dtype, wide: torch.dtype, shifted: bool) -> None:
    # Sums without an error, so that float64 norms what we norm.
    x, residual = (values(rows, columns).detach().mul(4).round().div(4).to(dtype).requires_grad_() for _ in range(2))
    given = [x, residual, values(columns, dtype=wide, mean=1.0), values(columns, dtype=wide)]
    if shifted:
        # Much larger than what is normed, which is not to be told from the sum that is returned.
        given.append(values(columns, dtype=wide, mean=300.0))

    check(lambda x, residual, weight, bias, shift=None: add_norm(x, residual, weight, bias, shift, 1e-3), given)


@pytest.mark.usefixtures("_programs_go_round")
@pytest.mark.parametrize(("rows", "columns", "dtype", "wide"), CASES)
def test_norms_of_rows(rows: int, columns: int, dtype: torch.dtype, wide: torch.dtype) -> None:
    given = [values(rows, columns, dtype=dtype, mean=2.0), values(columns, dtype=wide, mean=1.0)]
    given.append(values(columns, dtype=wide))

    check(lambda *given: layer_norm(*given, 1e-3), given)


@pytest.mark.parametrize(("rows", "columns"), [(9, 320), (2, 2048)])
def test_norms_of_programs_as_they_are(rows: int, columns: int) -> None:
    given = [values(rows, columns), values(rows, columns), *(values(columns) for _ in range(3))]
    check(lambda *given: add_norm(*given, 1e-5), given, alone=False)


def test_what_is_kept_is_what_was_normed() -> None:
    x, residual, weight, bias = values(5, 40), values(5, 40), values(40), values(40)
    with torch.no_grad():
        out, total, kept, mean, scale = norm_kernels.layer_norm(x, residual, weight, bias, None, 1e-5, True)
        assert kept is total
        for one, other in zip((total, out), add_norm(x, residual, weight, bias, None, 1e-5), strict=True):
            assert torch.equal(one, other)
        same, moved, kept, *_ = norm_kernels.layer_norm(x, residual, weight, bias, bias, 1e-5, True)
    assert torch.equal(same, out) and torch.equal(kept, total) and torch.equal(moved, x + residual + bias)
    torch.testing.assert_close(mean.double(), total.double().mean(-1), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(
        scale.double(), (total.double().var(-1, correction=0) + 1e-5).rsqrt(), rtol=1e-6, atol=1e-6
    )


def test_summands_of_two_dtypes() -> None:
    x, residual, weight, bias = values(5, 40, dtype=torch.bfloat16), values(5, 40), values(40), values(40)
    check(lambda *given: add_norm(*given, None, 1e-5), [x, residual, weight, bias])


def test_an_unused_output_has_no_gradient() -> None:
    x, residual, weight, bias, shift = values(5, 40), values(5, 40), values(40), values(40), values(40)
    given = [x, residual, weight, bias, shift]
    exact = [each.detach().double().requires_grad_() for each in given]
    outputs, wanted = add_norm(*given, 1e-5), add_norm(*exact, 1e-5)
    grad = values(5, 40).detach()
    for out, plain, none in ((outputs[0], wanted[0], (2, 3)), (outputs[1], wanted[1], (4,))):
        found = torch.autograd.grad(out, given, grad, retain_graph=True, allow_unused=True)
        expected = torch.autograd.grad(plain, exact, grad.double(), retain_graph=True, allow_unused=True)
        for index, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert (one is None) == (other is None) == (index in none)
            if one is not None and other is not None:
                close(one, other, torch.float32)


# --- biases of convolutions ---


@pytest.mark.usefixtures("_programs_go_round")
@pytest.mark.parametrize(("rows", "columns", "dtype", "wide"), CASES)
def test_biases_of_convolutions(rows: int, columns: int, dtype: torch.dtype, wide: torch.dtype) -> None:
    x, residual, bias = (
        values(rows, columns, dtype=dtype),
        values(rows, columns, dtype=dtype),
        values(columns, dtype=wide),
    )

    check(conv_add, [x, bias, residual])
    check(conv_add, [x, bias])


def test_residuals_of_another_dtype() -> None:
    x, bias, residual = values(5, 40, dtype=torch.bfloat16), values(40), values(5, 40)
    check(conv_add, [x, bias, residual])


def test_a_gradient_goes_through_a_sum_as_it_is() -> None:
    x, bias, residual = values(5, 40), values(40).detach(), values(5, 40)
    grad = values(5, 40).detach()
    found = torch.autograd.grad(conv_add(x, bias, residual), [x, residual], grad)
    assert all(each.data_ptr() == grad.data_ptr() for each in found)


# --- all of them ---


def glue() -> dict[str, tuple[Callable[..., Any], list[Tensor]]]:
    """Functions and arguments that are views."""
    x, y = (values(12, 6).detach().t().requires_grad_() for _ in range(2))
    weight, bias, shift = (values(24).detach()[::2].requires_grad_() for _ in range(3))
    return {
        "gate": (gated_gelu, [x, bias]),
        "bias": (conv_add, [x, bias]),
        "bias and residual": (conv_add, [x, bias, y]),
        "add and norm": (lambda *given: add_norm(*given, 1e-3), [x, y, weight, bias, shift]),
        "norm": (lambda *given: layer_norm(*given, 1e-3), [x, weight, bias]),
    }


@pytest.mark.parametrize("name", glue())
def test_gradients_that_are_not_contiguous(name: str) -> None:
    function, given = glue()[name]
    exact = [each.detach().double().requires_grad_() for each in given]
    outputs, wanted = function(*given), function(*exact)
    outputs, wanted = ((each,) if isinstance(each, Tensor) else each for each in (outputs, wanted))
    rows, columns = outputs[0].shape
    for grad in (values(columns, rows).detach().t(), values(1, columns).detach().expand(rows, -1)):
        found = torch.autograd.grad(outputs, given, [grad] * len(outputs), retain_graph=True)
        expected = torch.autograd.grad(wanted, exact, [grad.double()] * len(outputs), retain_graph=True)
        for one, other in zip(found, expected, strict=True):
            close(one, other, torch.float32)


@pytest.mark.parametrize("name", glue())
def test_no_rows(name: str) -> None:
    function, given = glue()[name]
    given = [each[:0].detach().requires_grad_() if each.dim() == 2 else each for each in given]
    outputs = function(*given)
    outputs = (outputs,) if isinstance(outputs, Tensor) else outputs
    found = torch.autograd.grad(outputs, given, [torch.ones_like(each) for each in outputs])
    for one, like in zip(found, given, strict=True):
        assert one.shape == like.shape and not one.any()
