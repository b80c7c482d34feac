"""Products in a lower precision than their weights: kernels by the file of checks, here gradients and refusals."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.fake_gpu import Gpu, traced
from zoo.ops import products
from zoo.ops.products import column_sums, low_add_linear, low_linear, takes_low

KERNEL = "triton_kernel_wrapper_functional"


def test_sums_keep_the_precision_of_doubles() -> None:
    x = torch.randn(5, 7, 3, dtype=torch.float64)
    torch.testing.assert_close(column_sums(x, torch.float64), x.sum((0, 1)), rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("biased", [False, True])
def test_gradients_of_a_low_product_are_those_of_its_rounded_numbers(biased: bool) -> None:
    x = torch.randn(2, 5, 8).bfloat16().requires_grad_()
    weight, bias = torch.randn(6, 8).requires_grad_(), torch.randn(6).requires_grad_() if biased else None
    with torch.autocast("cpu", torch.bfloat16):
        assert takes_low(x, weight, bias)
        out = low_linear(x, weight, bias)
        assert torch.equal(out, F.linear(x, weight, bias))
    grad = torch.randn_like(out)
    given = [x, weight] if bias is None else [x, weight, bias]
    found = torch.autograd.grad(out, given, grad)
    exact = [each.detach().bfloat16().double().requires_grad_() for each in given]
    expected = torch.autograd.grad(F.linear(*exact), exact, grad.double())
    assert [each.dtype for each in found] == [torch.bfloat16, torch.float32, torch.float32][: len(given)]
    torch.testing.assert_close(found[0].double(), expected[0], rtol=8e-3, atol=8e-3)
    for ours, theirs in zip(found[1:], expected[1:], strict=True):
        # Never rounded to the low dtype.
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-5)


def test_gradients_of_a_low_product_and_what_it_is_added_to() -> None:
    added, x = torch.randn(5, 6).bfloat16().requires_grad_(), torch.randn(5, 8).bfloat16().requires_grad_()
    weight, grad = torch.randn(6, 8).requires_grad_(), torch.randn(5, 6).bfloat16()
    out = low_add_linear(added, x, weight)
    assert torch.equal(out, torch.addmm(added, x, weight.bfloat16().t()))
    found = torch.autograd.grad(out, [added, x, weight], grad)
    assert found[0].data_ptr() == grad.data_ptr()
    torch.testing.assert_close(found[1].double(), grad.double() @ weight.bfloat16().double(), rtol=8e-3, atol=8e-3)
    torch.testing.assert_close(found[2].double(), grad.double().t() @ x.double(), rtol=1e-5, atol=1e-5)


def test_what_does_not_learn_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("weight_gradient", "column_sums"):
        monkeypatch.setattr(products, name, lambda *_: pytest.fail("nobody asked"))
    x, weight, bias = torch.randn(5, 8).bfloat16().requires_grad_(), torch.randn(8, 8), torch.randn(8)
    (low_linear(x, weight, bias) + low_add_linear(x, x, weight)).sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("learns", ["x", "weight", "both"])
def test_a_product_holds_what_a_gradient_needs_and_no_more(learns: str) -> None:
    x = torch.randn(5, 8).bfloat16().requires_grad_(learns != "weight")
    weight, bias = torch.randn(7, 8).requires_grad_(learns != "x"), torch.randn(7).requires_grad_()
    added, held = torch.randn(5, 7).bfloat16().requires_grad_(), list[torch.Size]()
    with torch.autograd.graph.saved_tensors_hooks(lambda each: (held.append(each.shape), each)[1], lambda each: each):
        low_linear(x, weight, bias)
        low_add_linear(added, x, weight)
    # The weight is for the gradient of x, and x for that of the weight.
    needed = ([x.shape] if weight.requires_grad else []) + ([weight.shape] if x.requires_grad else [])
    assert held == 2 * needed


def test_a_low_product_of_a_single_row_may_be_a_vector() -> None:
    x = torch.randn(8).bfloat16().requires_grad_()
    weight, bias = torch.randn(6, 8).requires_grad_(), torch.randn(6).requires_grad_()
    grad = torch.randn(6).bfloat16()
    found = torch.autograd.grad(low_linear(x, weight, bias), [x, weight, bias], grad)
    assert found[0].shape == x.shape
    torch.testing.assert_close(found[1:], (torch.outer(grad.float(), x.float()), grad.float()))


def test_only_what_autocast_would_convert_is_taken_low() -> None:
    x, weight, bias = torch.randn(5, 8).bfloat16(), torch.randn(6, 8), torch.randn(6)
    assert not takes_low(x, weight, bias), "no autocast"
    with torch.autocast("cpu", torch.bfloat16):
        assert takes_low(x, weight, bias) and takes_low(x, weight, None)
        assert not takes_low(x.float(), weight, bias) and not takes_low(x.half(), weight, bias)
        assert not takes_low(x, weight.bfloat16(), bias) and not takes_low(x, weight, bias.bfloat16())
        assert not torch.func.vmap(lambda x: torch.tensor(takes_low(x, weight, bias)))(x).any(), "a transform"


@pytest.mark.parametrize("biased", [False, True])
def test_a_low_product_is_one_graph_whose_sums_are_kernels(
    biased: bool, gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weight = torch.randn(5, 8).bfloat16().requires_grad_(), torch.randn(6, 8).requires_grad_()
    bias = torch.randn(6).requires_grad_() if biased else None
    forward, backward = traced(monkeypatch, low_linear, x, weight, bias)
    assert KERNEL not in str(forward)
    # Parts of the sums, and what adds them.
    assert str(backward).count(KERNEL) == (2 if biased else 0)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_gradients_are_summed_in_float32(backend: str) -> None:
    x, weight = torch.randn(40, 8).bfloat16().requires_grad_(), torch.randn(6, 8).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        out = torch.compile(low_linear, fullgraph=True, backend=backend)(x, weight, None)
    grad = torch.randn_like(out)
    found = torch.autograd.grad(out, weight, grad)[0]
    torch.testing.assert_close(found.double(), grad.double().t() @ x.double(), rtol=1e-5, atol=1e-5)
