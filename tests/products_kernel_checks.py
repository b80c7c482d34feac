"""Sums over rows, against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.kernel_checks import DEVICE, MARKS, kernels_run, values  # noqa: F401
from zoo.ops.products import column_sums, weight_gradient
from zoo.ops.triton import tiles as sums

pytestmark = MARKS
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = [(1, 7), (5, 100), (2, 3, 32)]


@pytest.fixture
def _programs_go_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of many rows, and of many columns."""
    for name, size in {"PARTS": 2, "PARTS_AT_ONCE": 2, "LAST_COLUMNS": 64, "ROWS": 2, "COLUMNS": 32}.items():
        monkeypatch.setattr(sums, name, size)


def check_sums(x: Tensor) -> None:
    found, expected = column_sums(x, torch.float32), x.double().flatten(0, -2).sum(0)
    assert found.dtype == torch.float32 and (found.double() - expected).norm() < 1e-6 * expected.norm()


@pytest.mark.usefixtures("_programs_go_round")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sums_of_columns(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = values(*shape, dtype=dtype)
    check_sums(x)
    assert torch.equal(column_sums(x, torch.float32), column_sums(x, torch.float32))


def test_programs_as_they_are() -> None:
    check_sums(values(3, 768))
    check_sums(values(20, 40).t())
    check_sums(values(1, 24).expand(17, -1))


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_gradients_of_weights_are_float32_sums(dtype: torch.dtype) -> None:
    grad, x = values(40, 16, dtype=dtype), values(40, 24, dtype=dtype)
    found, expected = weight_gradient(grad, x), grad.double().t() @ x.double()
    assert found.dtype == torch.float32 and (found.double() - expected).norm() < 1e-5 * expected.norm()


def test_no_rows() -> None:
    x = values(0, 32)
    assert not column_sums(x, torch.float32).any()
    product = weight_gradient(x.bfloat16(), x.bfloat16())
    assert product.shape == (32, 32) and not product.any()
