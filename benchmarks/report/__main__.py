"""Shows measured rows, and keeps the tables in the docs up to date.

python -m benchmarks.report runs/today                  a table here; report.html in runs/today
python -m benchmarks.report --update README.md docs     rewrite the generated blocks from benchmarks/results
python -m benchmarks.report --check README.md docs      exit 1 if a block differs from what the rows say
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.cli import UsageError, run_command
from benchmarks.record import RESULTS, Rows, load
from benchmarks.report.docs import drift, update
from benchmarks.report.show import folder_of_reports, render, write_html

ROOT = Path(__file__).resolve().parents[2]
PATHS = "Folder or file of rows. With --update or --check: Markdown files; README.md and docs if omitted."


def command(
    paths: Annotated[list[Path] | None, typer.Argument(help=PATHS)] = None,
    update_blocks: Annotated[bool, typer.Option("--update", help="Rewrite the generated blocks.")] = False,
    check_blocks: Annotated[bool, typer.Option("--check", help="Exit with 1 if a block differs.")] = False,
    results: Annotated[Path, typer.Option(help="Rows that the blocks are made from.")] = RESULTS,
) -> int:
    """Show rows as tables, or make the tables in Markdown files from them."""
    if update_blocks and check_blocks:
        raise UsageError("--update and --check exclude each other; give one")
    paths = paths or []
    if not paths and (update_blocks or check_blocks):
        paths = [root for root in (ROOT / "README.md", ROOT / "docs") if root.exists()]
    try:
        if not (update_blocks or check_blocks):
            if len(paths) != 1:
                said = f"give one folder or file of rows, got {len(paths)}; or did you mean --update or --check?"
                raise UsageError(said)
            rows = load(paths[0])
            if not rows.results:
                raise UsageError(f"{paths[0]} holds no rows; run python -m benchmarks.run --out {paths[0]} first")
            render(rows.results, rows.environments)
            print(f"\nreport: {write_html(rows, folder_of_reports(paths[0]) / 'report.html')}")
            return 0
        # Without committed rows the tables say that nothing was measured.
        rows = load(results) if results.exists() else Rows([], {})
        if update_blocks:
            for file in update(paths, rows):
                print(f"updated {file}")
        elif found := drift(paths, rows):
            again = " ".join(map(str, paths))
            print(f"{found}\nTables differ from the rows; run python -m benchmarks.report --update {again}")
            return 1
        return 0
    except (ValueError, OSError) as error:
        raise UsageError(str(error)) from error


if __name__ == "__main__":
    sys.exit(run_command(command, "python -m benchmarks.report"))
