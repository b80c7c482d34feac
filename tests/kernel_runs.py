"""Runs kernel checks in a process of their own: in Triton's interpreter, which is chosen at import, or on a GPU."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


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
