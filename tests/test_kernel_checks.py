"""All checks of kernels, each in a process of its own: in Triton's interpreter, chosen at import, and on a GPU."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FILES = sorted(path.name for path in (ROOT / "tests").glob("*_checks.py") if path.name[:4] not in ("test", "kern"))
# Each in a process of its own, which takes as long to begin as many a check to run: about a minute of checks in each.
GROUPS = ["gnn_ training_", "llm_ model_ operator_", "resnet_", "unet_"]


def checks(group: str) -> list[str]:
    return [name for name in FILES if name.startswith(tuple(group.split()))]


def run_checks(*files: str, interpret: bool, options: tuple[str, ...] = ()) -> None:
    """Fail unless every check of ``tests/<file>`` that pytest's options select passes, and at least one does.

    In the interpreter most cases are run in one dtype, see ``tests/dtypes_in_turn.py``. To run all:
    ``TRITON_INTERPRET=1 python -m pytest tests/<file>``.
    """
    if interpret:
        options = ("-p", "tests.dtypes_in_turn", *options)
    # Of its own, even where pytest runs in several processes: its plugins know that by the environment.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-q", *(f"tests/{file}" for file in files), "-p", "no:cacheprovider"]
    environment |= {"OMP_NUM_THREADS": "1", "TRITON_INTERPRET": str(int(interpret))}
    done = subprocess.run([*command, *options], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert re.search(r"\d+ passed", done.stdout) and "skipped" not in done.stdout, done.stdout


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
