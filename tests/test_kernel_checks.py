"""All checks of kernels, in Triton's interpreter and on a GPU."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.kernel_runs import run_checks

FILES = sorted(path.name for path in Path(__file__).parent.glob("*_checks.py") if path.name[:4] not in ("test", "kern"))
# Files that take minutes run in two parts; one small model of each family is quick.
HALVES = {"gnn": "attention", "llm": "norms"}
PARTS = [
    pytest.param(name, part, marks=[] if name[:5] == "model" else pytest.mark.slow)
    for name in FILES
    for part in ((HALVES[name[:3]], f"not {HALVES[name[:3]]}") if name[:3] in HALVES else ("",))
]


@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="torch came without Triton, which GPUs only need"
)
@pytest.mark.parametrize(("name", "part"), PARTS)
def test_in_the_interpreter(name: str, part: str) -> None:
    run_checks(name, *(("-k", part) if part else ()), interpret=True)


@pytest.mark.gpu
@pytest.mark.parametrize("name", FILES)
def test_on_a_gpu(name: str) -> None:
    run_checks(name, "-m", "gpu", interpret=False)
