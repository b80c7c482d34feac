"""The norms of the residual stream against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import zoo
import zoo.ops.common
from tests.kernel_checks import DEVICE, MARKS, check_close, kernels_run, values  # noqa: F401
from zoo.ops.norms import add_rms_norm, reference_rms_norm, rms_norm
from zoo.ops.triton import norms as kernels
from zoo.ops.triton import sums

pytestmark = MARKS
# The interpreter cuts numbers off where a GPU rounds them to bfloat16.
RELATIVE = {torch.float32: 2e-6, torch.bfloat16: 1.2e-2 if DEVICE == "cpu" else 6e-3, torch.float16: 1e-3}


def close(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    check_close(found, expected, dtype, RELATIVE[dtype])


@pytest.fixture(params=[4, None], ids=["programs that go round", "programs as they are"])
def _programs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param is not None:
        monkeypatch.setattr(kernels, "PROGRAMS", request.param)
        monkeypatch.setattr(sums, "PARTS_AT_ONCE", 2)


@pytest.mark.usefixtures("_programs")
@pytest.mark.parametrize("dtype", RELATIVE)
@pytest.mark.parametrize("shape", [(1, 7), (5, 100), (2, 3, 2048), (9, 3), (3, 4097), (150, 48)], ids=str)
def test_norms_of_the_residual_stream_and_their_gradients(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, added = values(*shape, dtype=dtype, scale=3.0), values(*shape, dtype=dtype)
    weight = values(shape[-1], dtype=dtype)
    above, grad = values(*shape, dtype=dtype), values(*shape, dtype=dtype)
    given = [each.requires_grad_() for each in (x, added, weight)]
    exact = [each.detach().double().requires_grad_() for each in given]
    total, normed = add_rms_norm(*given, 1e-5)
    sums = exact[0] + exact[1]
    wanted = rms_norm(sums, exact[2], 1e-5)
    close(total, sums, dtype)
    close(normed, wanted, dtype)
    expected = torch.autograd.grad((sums, wanted), exact, (above.double(), grad.double()))
    found = torch.autograd.grad((total, normed), given, (above, grad), retain_graph=True)
    for ours, theirs in zip(found, expected, strict=True):
        close(ours, theirs, dtype)
    if DEVICE == "cuda":  # the interpreter runs one program after the other
        again = torch.autograd.grad((total, normed), given, (above, grad))
        assert all(torch.equal(*both) for both in zip(found, again, strict=True))
    # Where nothing is added, with and without a gradient past the norm.
    weight = given[2]
    beside, normed = add_rms_norm(x, None, weight, 1e-5)
    alone = rms_norm(x, weight, 1e-5)
    assert torch.equal(beside, x) and torch.equal(alone, normed)
    wanted = rms_norm(exact[0], exact[2], 1e-5)
    close(normed, wanted, dtype)
    expected = torch.autograd.grad(
        (exact[0] * 1, wanted), exact[::2], (above.double(), grad.double()), retain_graph=True
    )
    for ours, theirs in zip(torch.autograd.grad((beside, normed), (x, weight), (above, grad)), expected, strict=True):
        close(ours, theirs, dtype)
    expected = torch.autograd.grad(wanted, exact[::2], grad.double())
    for ours, theirs in zip(torch.autograd.grad(alone, (x, weight), grad), expected, strict=True):
        close(ours, theirs, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_norms_round_where_torch_rounds(dtype: torch.dtype) -> None:
    x, added, weight = values(20, 96, dtype=dtype), values(20, 96, dtype=dtype), values(96, dtype=dtype)
    total, normed = add_rms_norm(x, added, weight, 1e-5)
    expected = reference_rms_norm(x + added, weight, 1e-5)
    assert torch.equal(total, x + added)
    # Sums in another order move a few numbers by their last digit before they are rounded.
    assert (normed != expected).float().mean() < (0.5 if dtype is torch.float32 else 0.01)
    torch.testing.assert_close(normed, expected, rtol=RELATIVE[dtype], atol=0)


def test_norms_of_no_rows() -> None:
    x, weight = values(0, 32).requires_grad_(), values(32).requires_grad_()
    total, normed = add_rms_norm(x, x.detach(), weight, 1e-5)
    grads = torch.autograd.grad((total, normed), (x, weight), (total.detach(), normed.detach()))
    assert normed.shape == grads[0].shape == (0, 32) and not grads[1].any()


def test_a_model_trains_as_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    model = zoo.create("llm-debug", device=DEVICE)
    tokens = torch.randint(model.config.vocab_size, (2, 9), device=DEVICE)
    gradients = {}
    for own in (True, False):
        if not own:
            monkeypatch.setattr(zoo.ops.common, "triton_runs_on", lambda device: False)
        gradients[own] = torch.autograd.grad(model(tokens).square().mean(), list(model.parameters()))
    for found, expected in zip(gradients[True], gradients[False], strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-6)
