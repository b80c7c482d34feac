"""A GPU test on a machine without a GPU is left out, unless somebody asked for it: then it fails."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "code", "summary"),
    [
        ((), 0, {"passed": 1, "deselected": 1}),
        (("-m", "not slow"), 0, {"passed": 1, "deselected": 1}),
        (("-m", "gpu", "-n", "1"), 1, {"error": 1}),  # as make test calls it
    ],
)
def test_without_a_gpu(tmp_path: Path, arguments: tuple[str, ...], code: int, summary: dict[str, int]) -> None:
    tests = tmp_path / "tests"
    tests.mkdir()
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text(encoding="utf-8"), encoding="utf-8")
    (tests / "conftest.py").write_text((ROOT / "tests/conftest.py").read_text(encoding="utf-8"), encoding="utf-8")
    (tests / "test_two.py").write_text(
        "import pytest\n\ndef test_anywhere():\n    pass\n\n@pytest.mark.gpu\ndef test_device():\n    pass\n",
        encoding="utf-8",
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *arguments],
        cwd=tmp_path,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == code, done.stdout + done.stderr
    closing = done.stdout.strip().splitlines()[-1]
    assert {
        word: int(count) for count, word in re.findall(r"(\d+) (passed|failed|error|deselected)", closing)
    } == summary
