"""The tables in the README and the docs are what the committed rows say."""

from __future__ import annotations

from pathlib import Path

from benchmarks.rendering.blocks import markdown_files
from benchmarks.report import RESULTS, drift
from benchmarks.result import Rows, load

ROOT = Path(__file__).resolve().parents[1]


def test_tables_are_made_from_the_committed_rows() -> None:
    paths = [path for path in (ROOT / "README.md", ROOT / "docs") if path.exists()]
    assert markdown_files(paths), f"no Markdown below {ROOT}"
    rows = load(RESULTS) if RESULTS.exists() else Rows([], {})
    found = drift(paths, rows)
    assert not found, f"run python -m benchmarks.report --update README.md docs\n{found}"


def test_results_hold_rows_and_nothing_else() -> None:
    others = [path for path in RESULTS.rglob("*") if path.is_file() and path.suffix != ".jsonl"]
    assert others == []
