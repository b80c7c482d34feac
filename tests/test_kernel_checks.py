"""All checks of kernels, in Triton's interpreter and on a GPU."""

import importlib.util
from pathlib import Path

import pytest

from tests.kernel_runs import run_checks

FILES = sorted(path.name for path in Path(__file__).parent.glob("*_checks.py") if path.name[:4] not in ("test", "kern"))
# Each in a process of its own, which takes as long to begin as many a check to run: about a minute of checks in each.
GROUPS = ["gnn_ training_", "llm_ model_ operator_", "resnet_", "unet_"]


def checks(group: str) -> list[str]:
    return [name for name in FILES if name.startswith(tuple(group.split()))]


@pytest.fixture
def _triton() -> None:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("torch came without Triton, which GPUs only need")


@pytest.mark.usefixtures("_triton")
def test_a_call_of_each_kernel_in_the_interpreter() -> None:
    run_checks("call_kernel_checks.py", interpret=True)


@pytest.mark.slow
@pytest.mark.usefixtures("_triton")
@pytest.mark.parametrize("group", GROUPS)
def test_in_the_interpreter(group: str) -> None:
    run_checks(*checks(group), interpret=True)


def test_every_file_of_checks_is_in_one_group() -> None:
    assert sorted(name for group in ("call_", *GROUPS) for name in checks(group)) == FILES


@pytest.mark.gpu
# The calls lie on the CPU in part, and torch computes some of them there alone: other files hold each kernel.
@pytest.mark.parametrize("name", [name for name in FILES if name != "call_kernel_checks.py"])
def test_on_a_gpu(name: str) -> None:
    run_checks(name, options=("-m", "gpu"), interpret=False)
