"""The operators of the glue: kernels by resnet_kernel_checks.py, here what compilers and callers need of them."""

from __future__ import annotations

import importlib.util

import pytest

from tests.kernel_runs import run_checks


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="torch came without Triton, which GPUs only need"
)
def test_kernels_in_the_interpreter() -> None:
    run_checks("resnet_kernel_checks.py", interpret=True)


@pytest.mark.gpu
def test_kernels_on_a_gpu() -> None:
    run_checks("resnet_kernel_checks.py", "-m", "gpu", interpret=False)
