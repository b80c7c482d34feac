"""What a call of an operator, or of a compiled region around it, asks of the host: each thing once."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from zoo.engine.autograd import differentiable_once
from zoo.ops import common as operators
from zoo.ops.conv import operator


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
    operators._triton_is_known_to_know.cache_clear()
    yield devices
    operators._triton_is_known_to_know.cache_clear()


def test_a_gpu_is_asked_once_what_it_is(asked: list[torch.device]) -> None:
    first, second = torch.device("cuda", 0), torch.device("cuda", 1)
    for _ in range(3):
        assert operators.triton_runs_on(first) and not operators.triton_runs_on(second)
    assert asked == [first, second]


@pytest.mark.slow
def test_own_kernels_can_be_left_out(asked: list[torch.device], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operators, "ENABLED", False)
    assert not operators.triton_runs_on(torch.device("cuda", 0)) and not asked
    code = "from zoo.ops import common; assert not common.ENABLED"
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "ZOO_OWN_KERNELS": "0"}, check=True)


def test_whichever_gpu_is_current_is_asked_every_time(asked: list[torch.device]) -> None:
    for _ in range(2):
        assert operators.triton_runs_on(torch.device("cuda"))
    assert len(asked) == 2


def test_a_region_asks_while_it_is_traced_and_guards_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operators, "HAS_TRITON", True)
    monkeypatch.setattr(operators, "_triton_is_known_to_know", lambda device: True)

    @torch.compile(fullgraph=True, backend="eager")
    def region(x: Tensor) -> Tensor:
        return x + 1 if operators.triton_runs_on(torch.device("cuda", 0)) else x - 1

    assert region(torch.zeros(1)).tolist() == [1]
    monkeypatch.setattr(operators, "_triton_is_known_to_know", lambda device: False)
    with torch.compiler.set_stance("fail_on_recompile"):
        assert region(torch.zeros(1)).tolist() == [1]


def test_a_cpu_is_not_asked(asked: list[torch.device]) -> None:
    assert not operators.triton_runs_on(torch.device("cpu")) and not asked


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


def test_modes_see_operators_and_no_kernels(asked: list[torch.device]) -> None:
    with FakeTensorMode() as mode:
        x = torch.empty(2, device="cuda")
    assert operators.kernels_run(x)
    with mode:
        assert not operators.kernels_run(x)


def test_a_second_derivative_is_refused() -> None:
    x = torch.randn(3, requires_grad=True)
    # Also where the gradient that comes in is a number.
    for loss, first in ((Double.apply(x).square().sum(), 8 * x), (Double.apply(x).sum(), torch.full((3,), 2.0))):
        (grad,) = torch.autograd.grad(loss, x, create_graph=True)
        torch.testing.assert_close(grad, first)
        with pytest.raises(RuntimeError, match="differentiate twice"):
            grad.square().sum().backward()


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


def test_an_opaque_operator_is_what_torch_expects() -> None:
    @operator("zoo_test", "(Tensor x) -> Tensor", torch.empty_like)
    def doubled(x: Tensor) -> Tensor:
        return x * 2

    torch.library.opcheck(doubled, (torch.randn(3),))
