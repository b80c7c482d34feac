"""Operators over rows against float64, which no kernel takes: outputs, gradients, views, no rows and refusals."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.kernel_checks import DEVICE, MARKS, RELATIVE, close, kernels_run  # noqa: F401
from zoo.ops.images import conv_add
from zoo.ops.transformer import (
    WIDEST_NORM,
    add_layer_norm,
    add_norm,
    add_rms_norm,
    bias_gelu,
    column_sums,
    gated_gelu,
    layer_norm,
    reference_rms_norm,
    rms_norm,
    swiglu,
    weight_gradient,
)
from zoo.ops.triton import norms, tiles

pytestmark = MARKS
Call = tuple[Callable[..., Any], list[Tensor]]
# The rows' dtype, and the parameters'.
PAIRS = [*((dtype, dtype) for dtype in RELATIVE), (torch.bfloat16, torch.float32)]
# Rows and columns of programs that go round: less than a tile, what vectors do not divide, many rows, many columns.
SIZES = [(1, 8), (3, 7), (16, 64), (2, 1280)]
CASES = [*((9, 40, *pair) for pair in PAIRS), *((*size, *PAIRS[-1]) for size in SIZES)]


@pytest.fixture
def small_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small sizes take what many rows and many columns do."""
    small = {
        norms: {"PROGRAMS": 4},
        tiles: {
            "PARTS": 2, "PARTS_AT_ONCE": 2, "LAST_COLUMNS": 64, "ROWS": 2, "COLUMNS": 32, "PROGRAMS": 8,
            "GATE": {"ROWS": 2, "COLUMNS": 16}, "SILU": {"ROWS": 1, "COLUMNS": 32}, "MOST_PROGRAMS": 4,
        },
    }  # fmt: skip
    for module, sizes in small.items():
        for name, size in sizes.items():
            monkeypatch.setattr(module, name, size)


def values(*shape: int, dtype: torch.dtype = torch.float32, mean: float = 0.0, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape) * scale + mean).to(DEVICE, dtype).requires_grad_()


def calls(rows: int, columns: int, dtype: torch.dtype, affine: torch.dtype) -> dict[str, Call]:
    """Each operator and its arguments: rows in one dtype, parameters in another where the operator takes two."""
    # Sums without an error, so that float64 norms what we norm.
    x, added, stream = (
        (values(rows, columns).detach() * 4).round().div(4).to(kind).requires_grad_() for kind in (dtype, dtype, affine)
    )
    weight, bias, shift = (values(columns, dtype=affine, mean=mean) for mean in (1.0, 0.0, 0.0))
    # Much larger than what is normed, which is not to be told from the sum that is returned.
    large = values(columns, dtype=affine, mean=300.0)
    own, gates = values(columns, dtype=dtype, mean=1.0), values(rows, 2 * columns, dtype=dtype, scale=2.0)
    low = None if dtype == affine else dtype
    return {
        "gated GELU": (gated_gelu, [gates, values(2 * columns, dtype=affine)]),
        "SwiGLU": (swiglu, [gates]),
        "GELU": (lambda x, bias: bias_gelu(x, bias, False), [x, bias]),
        "GELU by tanh": (lambda x, bias: bias_gelu(x, bias, True), [x, bias]),
        "bias": (conv_add, [x, bias]),
        "bias and residual": (conv_add, [x, bias, added]),
        "norm": (lambda *given: layer_norm(*given, 1e-3), [x, weight, bias]),
        "sum and norm": (lambda *given: add_norm(*given, None, 1e-3), [x, added, weight, bias]),
        "sum, shift and norm": (lambda *given: add_norm(*given, 1e-3), [x, added, weight, bias, large]),
        "norm of a stream": (
            lambda x, added, *norm: add_layer_norm(x, added, None, *norm, 1e-5, low), [stream, added, weight, bias]
        ),
        "norm of a shifted stream": (
            lambda *given: add_layer_norm(*given, 1e-5, low), [stream, added, shift, weight, bias]
        ),
        "RMS norm": (lambda *given: rms_norm(*given, 1e-5), [x, own]),
        "sum and RMS norm": (lambda *given: add_rms_norm(*given, 1e-5), [x, added, own]),
        "RMS norm beside its rows": (lambda x, weight: add_rms_norm(x, None, weight, 1e-5), [x, own]),
    }  # fmt: skip


NAMES = list(calls(1, 2, torch.float32, torch.float32))


def tensors(found: Any) -> tuple[Tensor, ...]:
    return (found,) if isinstance(found, Tensor) else tuple(found)


def check(call: Call, alone: bool = True, times: float = 2.0) -> None:
    """Outputs and gradients against those of float64, on a GPU the same each time; each as if it learnt alone, too."""
    function, given = call
    exact = [each.detach().double().requires_grad_() for each in given]
    outputs, wanted = tensors(function(*given)), tensors(function(*exact))
    grads = [torch.randn(each.shape).to(each) for each in outputs]
    expected = torch.autograd.grad(wanted, exact, [grad.to(each) for grad, each in zip(grads, wanted, strict=True)])
    found = torch.autograd.grad(outputs, given, grads, retain_graph=True)
    for one, other, like in zip((*outputs, *found), (*wanted, *expected), (*outputs, *given), strict=True):
        close(one, other.double(), like.dtype, times=times)
    if DEVICE == "cuda":  # the interpreter runs one program after the other
        assert all(map(torch.equal, found, torch.autograd.grad(outputs, given, grads)))
    with torch.no_grad():
        for one, other in zip(tensors(function(*given)), wanted, strict=True):
            close(one, other.double(), one.dtype, times=times)
    for index, like in enumerate(given if alone else ()):
        frozen = [each.detach().requires_grad_(each is like) for each in given]
        (one,) = torch.autograd.grad(tensors(function(*frozen)), frozen[index], grads)
        assert torch.equal(one, found[index])


@pytest.mark.usefixtures("small_programs")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("rows", "columns", "dtype", "affine"), CASES)
def test_outputs_and_gradients(name: str, rows: int, columns: int, dtype: torch.dtype, affine: torch.dtype) -> None:
    check(calls(rows, columns, dtype, affine)[name], alone=rows == 9)


@pytest.mark.parametrize("name", NAMES)
def test_programs_as_they_are(name: str) -> None:
    check(calls(3, 768, torch.float32, torch.float32)[name], alone=False)


@pytest.mark.parametrize("name", NAMES)
def test_views_and_gradients_that_are_not_contiguous(name: str) -> None:
    function, given = calls(12, 6, torch.float32, torch.float32)[name]
    given = [
        (each.detach().t().contiguous().t() if each.dim() == 2 else each.detach().repeat_interleave(2)[::2])
        for each in given
    ]
    given = [each.requires_grad_() for each in given]
    exact = [each.detach().double().requires_grad_() for each in given]
    outputs, wanted = tensors(function(*given)), tensors(function(*exact))
    rows, columns = outputs[0].shape
    for grad in (values(columns, rows).detach().t(), values(1, columns).detach().expand(rows, -1)):
        found = torch.autograd.grad(outputs, given, [grad] * len(outputs), retain_graph=True)
        expected = torch.autograd.grad(wanted, exact, [grad.double()] * len(outputs), retain_graph=True)
        for one, other in zip(found, expected, strict=True):
            close(one, other, torch.float32, times=2.0)


@pytest.mark.parametrize("name", NAMES)
def test_no_rows(name: str) -> None:
    function, given = calls(3, 32, torch.float32, torch.float32)[name]
    given = [each[:0].detach().requires_grad_() if each.dim() == 2 else each for each in given]
    outputs = tensors(function(*given))
    found = torch.autograd.grad(outputs, given, [torch.ones_like(each) for each in outputs])
    for one, like in zip(found, given, strict=True):
        assert one.shape == like.shape and not one.any()


def test_an_unused_output_has_no_gradient_and_a_gradient_goes_through_a_sum_as_it_is() -> None:
    function, given = calls(5, 40, torch.float32, torch.float32)["sum, shift and norm"]
    exact = [each.detach().double().requires_grad_() for each in given]
    outputs, wanted, grad = function(*given), function(*exact), values(5, 40).detach()
    for out, plain in zip(outputs, wanted, strict=True):
        found = torch.autograd.grad(out, given, grad, retain_graph=True)
        expected = torch.autograd.grad(plain, exact, grad.double(), retain_graph=True, allow_unused=True)
        for one, other in zip(found, expected, strict=True):
            close(one, torch.zeros_like(one).double() if other is None else other, torch.float32)
    x, bias, residual = values(5, 40), values(40).detach(), values(5, 40)
    grad = values(5, 40).detach()
    found = torch.autograd.grad(conv_add(x, bias, residual), [x, residual], grad)
    assert all(each.data_ptr() == grad.data_ptr() for each in found)


@pytest.mark.parametrize(
    ("function", "given"),
    [
        (conv_add, lambda low, x, row: [low, row, x]),
        (lambda *given: add_norm(*given, None, 1e-5), lambda low, x, row: [low, x, row, row.detach().clone()]),
    ],
)
def test_summands_of_two_dtypes(function: Callable[..., Any], given: Callable[..., list[Tensor]]) -> None:
    tensors = given(values(5, 40, dtype=torch.bfloat16), values(5, 40), values(40))
    check((function, [each.requires_grad_() for each in tensors]))


def test_equal_rows_have_no_variance_and_what_does_not_fit_is_left_to_torch() -> None:
    # With the eps of BERT a rest of a rounded mean would be made a million times as large.
    x = torch.tensor([[1.0], [3.3], [0.0], [1e4], [-7.7]], device=DEVICE).expand(5, 100).contiguous()
    weight, bias = values(100), values(100)
    out, _ = add_layer_norm(x, torch.zeros_like(x), None, weight, bias, 1e-12)
    torch.testing.assert_close(out, bias.expand(5, 100), rtol=1e-5, atol=1e-5)
    x, weight, row = values(3, 8), values(8).detach(), values(8).detach()
    out, _ = add_layer_norm(x, row, None, weight, weight, 1e-6)
    torch.testing.assert_close(out, F.layer_norm(x + row, (8,), weight, weight, 1e-6))
    with pytest.raises(RuntimeError):
        add_layer_norm(x, values(2, 8), None, weight, weight, 1e-6)
    long_row = values(1, WIDEST_NORM + 1)
    out, _ = add_layer_norm(long_row, long_row, None, long_row[0], long_row[0], 1e-6)
    assert out.shape == long_row.shape and "AddLayerNorm" not in type(out.grad_fn).__name__


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_rms_norms_round_where_torch_rounds(dtype: torch.dtype) -> None:
    x, added, weight = (values(*shape, dtype=dtype).detach() for shape in ((20, 96), (20, 96), (96,)))
    total, normed = add_rms_norm(x, added, weight, 1e-5)
    expected = reference_rms_norm(x + added, weight, 1e-5)
    assert torch.equal(total, x + added)
    # Sums in another order move a few numbers by their last digit before they are rounded.
    assert (normed != expected).float().mean() < (0.5 if dtype is torch.float32 else 0.01)
    torch.testing.assert_close(normed, expected, rtol=2e-6 if dtype is torch.float32 else 2e-3, atol=0)


def gelu_and_slope(gate: Tensor, gated: bool) -> tuple[Tensor, Tensor]:
    """GELU of numbers [N], and its slope at each, by one of the two kernels."""
    x = (torch.cat([torch.ones_like(gate), gate]) if gated else gate)[None].requires_grad_()
    zeros = torch.zeros_like(x[0].detach())
    out = gated_gelu(x, zeros) if gated else bias_gelu(x, zeros, False)
    (grad,) = torch.autograd.grad(out, x, torch.ones_like(out))
    return out[0].detach(), grad[0, -len(gate) :]


def test_gated_gelu_and_its_slope_are_near_everywhere() -> None:
    # From 2^-100 to 2^6, both signs, and densely where it bends.
    gate = torch.linspace(-100, 6, 4001, dtype=torch.float64).exp2()
    gate = torch.cat([-gate, gate, torch.linspace(-7, 7, 4001, dtype=torch.float64)]).float().to(DEVICE)
    found, slope = (each.double() for each in gelu_and_slope(gate, True))
    exact = gate.double().requires_grad_()
    expected = F.gelu(exact)
    (expected_slope,) = torch.autograd.grad(expected.sum(), exact)
    assert ((found - expected).abs() <= 4e-7 * exact.abs()).all()
    assert (slope - expected_slope).abs().max() < 4e-7
    # Below zero it fades, where one less an error function would be rounded off.
    fading = (gate < 0) & (gate > -4)
    torch.testing.assert_close(found[fading], expected[fading].detach(), rtol=2e-3, atol=0)


@pytest.mark.parametrize("gated", [True, False])
def test_gelu_and_its_slope_at_nan_and_infinity(gated: bool) -> None:
    inf, nan = float("inf"), float("nan")
    found, slope = gelu_and_slope(torch.tensor([inf, nan, -1e30, 1e30, 0.0, -20.0], device=DEVICE), gated)
    torch.testing.assert_close(found, torch.tensor([inf, nan, 0.0, 1e30, 0.0, 0.0], device=DEVICE), equal_nan=True)
    torch.testing.assert_close(slope, torch.tensor([1.0, nan, 0.0, 1.0, 0.5, 0.0], device=DEVICE), equal_nan=True)


@pytest.mark.usefixtures("small_programs")
@pytest.mark.parametrize("dtype", RELATIVE)
@pytest.mark.parametrize("layout", [lambda x: x, lambda x: x.t(), lambda x: x[:1].expand(17, -1)])
def test_sums_of_columns(layout: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    for rows, columns in ((1, 7), (5, 100), (40, 24)):
        x = layout(values(rows, columns, dtype=dtype).detach())
        found, expected = column_sums(x, torch.float32), x.double().sum(0)
        assert found.dtype == torch.float32 and (found.double() - expected).norm() < 1e-6 * expected.norm()
    assert not column_sums(x[:0], torch.float32).any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_of_weights_are_float32_sums(dtype: torch.dtype) -> None:
    grad, x = values(40, 16, dtype=dtype).detach(), values(40, 24, dtype=dtype).detach()
    found, expected = weight_gradient(grad, x), grad.double().t() @ x.double()
    assert found.dtype == torch.float32 and (found.double() - expected).norm() < 1e-5 * expected.norm()
    assert not weight_gradient(grad[:0], x[:0]).any()
