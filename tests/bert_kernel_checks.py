"""Kernels of a layer that learns against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import zoo
import zoo.ops.common
from tests import kernel_checks
from tests.kernel_checks import DEVICE, MARKS, kernels_run, values  # noqa: F401
from zoo.ops.glu import bias_gelu
from zoo.ops.norms import WIDEST_NORM, add_layer_norm
from zoo.ops.triton import glu, norms
from zoo.ops.triton import tiles as sums

pytestmark = MARKS
# The interpreter cuts numbers off where a GPU rounds them to bfloat16.
RELATIVE = {torch.float32: 1e-6, torch.bfloat16: 1.2e-2 if DEVICE == "cpu" else 6e-3, torch.float16: 1e-3}
# The stream, and what products give and take.
PAIRS = [
    (torch.float32, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
]
SHAPES = [(1, 7), (5, 100), (2, 3, 32)]


@pytest.fixture
def _programs_go_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of many rows, and of many columns."""
    monkeypatch.setattr(norms, "PROGRAMS", 4)
    monkeypatch.setattr(sums, "PARTS", 2)
    monkeypatch.setattr(sums, "PARTS_AT_ONCE", 2)
    monkeypatch.setattr(sums, "LAST_COLUMNS", 64)
    for module in (sums, glu):
        monkeypatch.setattr(module, "ROWS", 2)
        monkeypatch.setattr(module, "COLUMNS", 32)


def close(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    kernel_checks.close(found, expected, dtype, RELATIVE[dtype])


def gradients(outputs: Any, inputs: list[Tensor], grads: Any) -> tuple[Tensor, ...]:
    return torch.autograd.grad(outputs, inputs, grads, retain_graph=True)


@pytest.mark.usefixtures("_programs_go_round")
@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize(("dtype", "low"), PAIRS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_norm_of_a_sum_and_its_gradients(
    shape: tuple[int, ...], dtype: torch.dtype, low: torch.dtype, shifted: bool
) -> None:
    x, added = values(*shape, dtype=dtype, scale=3.0) + 1.0, values(*shape, dtype=low)
    weight, bias, shift = (values(shape[-1], dtype=dtype) for _ in range(3))
    given = [each.requires_grad_() for each in (x, added, weight, bias, *([shift] if shifted else []))]
    exact = [each.detach().double().requires_grad_() for each in given]
    low_dtype = None if low == dtype else low
    out, copy = add_layer_norm(x, added, shift if shifted else None, weight, bias, 1e-5, low_dtype)
    summed = exact[0] + exact[1] + (exact[4] if shifted else 0.0)
    wanted = F.layer_norm(summed, shape[-1:], exact[2], exact[3], 1e-5)
    close(out, wanted, dtype)
    grad, low_grad = values(*shape, dtype=dtype), values(*shape, dtype=low)
    outputs, grads = [out], [grad]
    if low_dtype is None:
        assert copy is out
    else:
        close(copy, wanted, low)
        outputs, grads = [out, copy], [grad, low_grad]
    expected = gradients([wanted] * len(outputs), exact, [each.double() for each in grads])
    found = gradients(outputs, given, grads)
    for ours, theirs, like in zip(found, expected, given, strict=True):
        close(ours, theirs, like.dtype)
    if DEVICE == "cuda":  # the interpreter runs one program after the other
        assert all(torch.equal(*both) for both in zip(found, gradients(outputs, given, grads), strict=True))
    if low_dtype is not None:
        # The copy alone is wanted, or the norm alone.
        for one in (0, 1):
            expected = gradients([wanted], exact, [grads[one].double()])
            for ours, theirs, like in zip(gradients(outputs[one], given, grads[one]), expected, given, strict=True):
                close(ours, theirs, like.dtype)


def test_programs_as_they_are() -> None:
    x, added = values(3, 768).requires_grad_(), values(3, 768).requires_grad_()
    weight, bias, shift = (values(768).requires_grad_() for _ in range(3))
    given = [x, added, weight, bias, shift]
    exact = [each.detach().double().requires_grad_() for each in given]
    out, _ = add_layer_norm(x, added, shift, weight, bias, 1e-12)
    normed = F.layer_norm(exact[0] + exact[1] + exact[4], (768,), *exact[2:4], 1e-12)
    close(out, normed, torch.float32)
    activated = F.gelu(exact[0] + exact[4])
    grad = values(3, 768)
    for ours, theirs in zip(gradients(out, given, grad), gradients(normed, exact, grad.double()), strict=True):
        close(ours, theirs, torch.float32)
    found = gradients(bias_gelu(x, shift, False), given[::4], grad)
    for ours, theirs in zip(found, gradients(activated, exact[::4], grad.double()), strict=True):
        close(ours, theirs, torch.float32)


def test_rows_of_equal_values_have_no_variance() -> None:
    # With the eps of BERT a rest of a rounded mean would be made a million times as large.
    x = values(1, 1).expand(5, 100).contiguous() * torch.tensor([[1.0], [3.3], [0.0], [1e4], [-7.7]], device=DEVICE)
    weight, bias = values(100).requires_grad_(), values(100)
    out, _ = add_layer_norm(x, torch.zeros_like(x), None, weight, bias, 1e-12)
    torch.testing.assert_close(out, bias.expand(5, 100), rtol=1e-5, atol=1e-5)


def test_the_norm_of_views() -> None:
    x, added = values(6, 5, 3).transpose(0, 2), values(3, 5, 12, dtype=torch.bfloat16)[..., ::2]
    weight, bias = values(12)[::2], values(6)
    for each in (x, added, weight, bias):
        each.requires_grad_()
    outputs = add_layer_norm(x, added, None, weight, bias, 1e-5, torch.bfloat16)
    grads = [values(6, 5, 3, dtype=each.dtype).transpose(0, 2) for each in outputs]
    found = gradients(outputs, [x, added, weight, bias], grads)
    exact = [each.detach().double().requires_grad_() for each in (x, added, weight, bias)]
    wanted = F.layer_norm(exact[0] + exact[1], (6,), *exact[2:], 1e-5)
    close(outputs[0], wanted, torch.float32)
    for ours, theirs in zip(found, gradients([wanted] * 2, exact, [each.double() for each in grads]), strict=True):
        close(ours, theirs, ours.dtype)


@pytest.mark.usefixtures("_programs_go_round")
@pytest.mark.parametrize("tanh", [False, True])
@pytest.mark.parametrize(("low", "dtype"), [(torch.float32, torch.float32), *PAIRS[1:]], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gelu_and_its_gradients(shape: tuple[int, ...], dtype: torch.dtype, low: torch.dtype, tanh: bool) -> None:
    """Of a low product, and a bias in the dtype of weights."""
    x, bias = values(*shape, dtype=dtype, scale=2.0).requires_grad_(), values(shape[-1], dtype=low).requires_grad_()
    exact = [each.detach().double().requires_grad_() for each in (x, bias)]
    out = bias_gelu(x, bias, tanh)
    wanted = F.gelu(exact[0] + exact[1], approximate="tanh" if tanh else "none")
    close(out, wanted, dtype)
    grad = values(*shape, dtype=dtype)
    found = gradients(out, [x, bias], grad)
    for ours, theirs, like in zip(found, gradients(wanted, exact, grad.double()), (x, bias), strict=True):
        close(ours, theirs, like.dtype)
    if DEVICE == "cuda":
        assert all(torch.equal(*both) for both in zip(found, gradients(out, [x, bias], grad), strict=True))


def test_gelu_of_nan_and_infinity() -> None:
    x = torch.tensor([[float("inf"), float("-inf"), float("nan"), 1e30, -1e30, -20.0]], device=DEVICE)
    x.requires_grad_()
    out = bias_gelu(x, torch.zeros(6, device=DEVICE), False)
    assert out[0].tolist()[:2] == [float("inf"), 0.0] and out[0, 2].isnan() and not out[0, 4:].any()
    (grad,) = torch.autograd.grad(out, x, torch.ones_like(out))
    assert grad[0].tolist()[:2] == [1.0, 0.0] and grad[0, 2].isnan() and grad[0].tolist()[3:] == [1.0, 0.0, 0.0]


def test_no_rows() -> None:
    x, weight, bias = values(0, 32).requires_grad_(), values(32).requires_grad_(), values(32).requires_grad_()
    out, copy = add_layer_norm(x, x.detach(), weight, weight, bias, 1e-5, torch.bfloat16)
    found = torch.autograd.grad([out, copy], [x, weight, bias], [out.detach(), copy.detach()])
    assert found[0].shape == (0, 32) and not found[1].any() and not found[2].any()
    out = bias_gelu(x, bias, False)
    found = torch.autograd.grad(out, [x, bias], out.detach())
    assert found[0].shape == (0, 32) and not found[1].any()


def test_a_second_derivative_is_refused() -> None:
    layer = zoo.create("bert-debug", device=DEVICE).layers[0].train()
    x = values(2, 5, 32).requires_grad_()
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        (grad,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            grad.square().sum().backward()


def test_what_does_not_fit_is_left_to_torch() -> None:
    x, weight = values(3, 8).requires_grad_(), values(8)
    row = values(8)
    out, _ = add_layer_norm(x, row, None, weight, weight, 1e-6)
    torch.testing.assert_close(out, F.layer_norm(x + row, (8,), weight, weight, 1e-6))
    with pytest.raises(RuntimeError):
        add_layer_norm(x, values(2, 8), None, weight, weight, 1e-6)
    wide = values(1, WIDEST_NORM + 1).requires_grad_()
    out, _ = add_layer_norm(wide, wide, None, wide[0], wide[0], 1e-6)
    assert out.shape == wide.shape and "AddLayerNorm" not in type(out.grad_fn).__name__
