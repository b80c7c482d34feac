"""What operators and compiled regions ask of the host; rows of images; products in a lower precision."""

import os
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from zoo.engine import compat
from zoo.engine.autograd import differentiable_once
from zoo.ops import common as operators
from zoo.ops import transformer
from zoo.ops.common import to_images, to_rows
from zoo.ops.transformer import column_sums, low_linear, takes_low


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.device]]:
    """Devices whose properties torch was asked for; odd ones are just too old for Triton."""
    devices: list[torch.device] = []

    def properties(device: torch.device) -> SimpleNamespace:
        devices.append(device)
        return SimpleNamespace(major=7 if (device.index or 0) % 2 else 8, minor=5)

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(operators, "HAS_TRITON", True)
    operators._triton_knows.cache_clear()
    yield devices
    operators._triton_knows.cache_clear()


def test_a_gpu_is_asked_once_what_it_is_and_modes_see_no_kernels(asked: list[torch.device]) -> None:
    first, second = torch.device("cuda", 0), torch.device("cuda", 1)
    for _ in range(3):
        assert operators.triton_runs_on(first) and not operators.triton_runs_on(second)
    assert asked == [first, second] and not operators.triton_runs_on(torch.device("cpu"))
    with FakeTensorMode() as mode:
        x = torch.empty(2, device="cuda")
    assert operators.kernels_run(x)
    with mode:
        assert not operators.kernels_run(x)


@pytest.mark.slow
def test_own_kernels_can_be_left_out(asked: list[torch.device], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operators, "ENABLED", False)
    assert not operators.triton_runs_on(torch.device("cuda", 0)) and not asked
    code = "from zoo.ops import common; assert not common.ENABLED"
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "ZOO_OWN_KERNELS": "0"}, check=True)


def test_a_region_asks_while_it_is_traced_and_guards_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operators, "HAS_TRITON", True)
    monkeypatch.setattr(operators, "_triton_knows", lambda device: True)

    @torch.compile(fullgraph=True, backend="eager")
    def region(x: Tensor) -> Tensor:
        return x + 1 if operators.triton_runs_on(torch.device("cuda", 0)) else x - 1

    assert region(torch.zeros(1)).tolist() == [1]
    monkeypatch.setattr(operators, "_triton_knows", lambda device: False)
    with torch.compiler.set_stance("fail_on_recompile"):
        assert region(torch.zeros(1)).tolist() == [1]


class Double(torch.autograd.Function):
    """Doubling, whose backward reads the input as a kernel's would."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2 * ctx.saved_tensors[0].sign() ** 2


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_second_derivative_of_an_input_alone_is_refused(checkpointed: bool) -> None:
    x = torch.randn(3, requires_grad=True)

    def both(x: Tensor) -> Tensor:
        doubled: Tensor = Double.apply(x)
        return doubled + x.square()

    out = checkpoint(both, x, use_reentrant=False) if checkpointed else both(x)
    for loss in (out.sum(), out.square().sum()):
        (grad,) = torch.autograd.grad(loss, x, create_graph=True)
        # Autograd runs only what leads to x, and there is another way to it than through the function.
        with pytest.raises(RuntimeError, match="differentiate twice"):
            torch.autograd.grad(grad.sum(), x)


def test_rows_of_a_channels_last_image_are_its_memory():
    x = torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    rows = to_rows(x)
    assert rows.shape == (40, 3) and rows.data_ptr() == x.data_ptr()
    torch.testing.assert_close(rows[7], x[0, :, 1, 2], rtol=0, atol=0)
    back = to_images(rows, x)
    assert back.data_ptr() == x.data_ptr() and back.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(back, x, rtol=0, atol=0)
    other = x.contiguous()  # of another memory format, which is copied
    assert torch.equal(to_rows(other), rows) and to_rows(other).data_ptr() != other.data_ptr()
    torch.testing.assert_close(to_images(to_rows(other), other), other, rtol=0, atol=0)
    x = x.requires_grad_()
    rows = to_rows(x)
    assert rows._base is None
    torch.testing.assert_close(torch.autograd.grad(rows.square().sum(), x)[0], 2 * x)


class Unreadable:
    def __str__(self) -> str:
        raise AssertionError("written out for a log that nobody reads")


def test_a_fallback_is_named_without_its_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import exc

    monkeypatch.setattr(exc.OperatorIssue, "operator_str", exc.OperatorIssue.operator_str)  # put back at the end
    monkeypatch.setattr(compat, "FALLBACKS_ARE_LAZY", (99, 0))
    compat.name_fallbacks_alone()
    for error in (exc.MissingOperatorWithDecomp, exc.MissingOperatorWithoutDecomp):
        assert "zoo.norm" in error.operator_str("zoo.norm", [Unreadable()], {"x": Unreadable()})


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
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-5)
    vector, row = torch.randn(8).bfloat16().requires_grad_(), grad[0, 0]  # a single row
    found = torch.autograd.grad(low_linear(vector, weight, bias), [vector, *given[1:]], row)
    assert found[0].shape == vector.shape
    torch.testing.assert_close(found[1:], (torch.outer(row.float(), vector.float()), row.float())[: len(found) - 1])


def test_gradients_of_a_low_product_and_what_it_is_added_to_and_sums_of_doubles() -> None:
    added, x = torch.randn(5, 6).bfloat16().requires_grad_(), torch.randn(5, 8).bfloat16().requires_grad_()
    weight, grad = torch.randn(6, 8).requires_grad_(), torch.randn(5, 6).bfloat16()
    out = low_linear(x, weight, None, added)
    assert torch.equal(out, torch.addmm(added, x, weight.bfloat16().t()))
    found = torch.autograd.grad(out, [added, x, weight], grad)
    assert found[0].data_ptr() == grad.data_ptr()
    torch.testing.assert_close(found[1].double(), grad.double() @ weight.bfloat16().double(), rtol=8e-3, atol=8e-3)
    torch.testing.assert_close(found[2].double(), grad.double().t() @ x.double(), rtol=1e-5, atol=1e-5)
    x = torch.randn(5, 7, 3, dtype=torch.float64)
    torch.testing.assert_close(column_sums(x, torch.float64), x.sum((0, 1)), rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("learns", ["x", "weight", "both"])
def test_a_product_holds_what_a_gradient_needs_and_no_more(learns: str) -> None:
    x = torch.randn(5, 8).bfloat16().requires_grad_(learns != "weight")
    weight, bias = torch.randn(7, 8).requires_grad_(learns != "x"), torch.randn(7).requires_grad_()
    added, held = torch.randn(5, 7).bfloat16().requires_grad_(), list[torch.Size]()
    with torch.autograd.graph.saved_tensors_hooks(lambda each: (held.append(each.shape), each)[1], lambda each: each):
        low_linear(x, weight, bias)
        low_linear(x, weight, None, added)
    # The weight is for the gradient of x, and x for that of the weight.
    needed = ([x.shape] if weight.requires_grad else []) + ([weight.shape] if x.requires_grad else [])
    assert held == 2 * needed


def test_only_what_autocast_would_convert_is_taken_low_and_what_does_not_learn_costs_nothing(monkeypatch):
    x, weight, bias = torch.randn(5, 8).bfloat16(), torch.randn(6, 8), torch.randn(6)
    assert not takes_low(x, weight, bias), "no autocast"
    with torch.autocast("cpu", torch.bfloat16):
        assert takes_low(x, weight, bias) and takes_low(x, weight, None)
        assert not takes_low(x.float(), weight, bias) and not takes_low(x.half(), weight, bias)
        assert not takes_low(x, weight.bfloat16(), bias) and not takes_low(x, weight, bias.bfloat16())
    for name in ("weight_gradient", "column_sums"):
        monkeypatch.setattr(transformer, name, lambda *_: pytest.fail("nobody asked"))
    x, weight, bias = torch.randn(5, 8).bfloat16().requires_grad_(), torch.randn(8, 8), torch.randn(8)
    (low_linear(x, weight, bias) + low_linear(x, weight, None, x)).sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_gradients_are_summed_in_float32(backend: str) -> None:
    x, weight = torch.randn(40, 8).bfloat16().requires_grad_(), torch.randn(6, 8).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        out = torch.compile(low_linear, fullgraph=True, backend=backend)(x, weight, None)
    grad = torch.randn_like(out)
    found = torch.autograd.grad(out, weight, grad)[0]
    torch.testing.assert_close(found.double(), grad.double().t() @ x.double(), rtol=1e-5, atol=1e-5)
