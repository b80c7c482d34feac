"""Shows measured rows, and keeps the tables in the docs equal to them.

python -m benchmarks.report runs/today                  a table here; report.md and report.html in runs/today
python -m benchmarks.report --update README.md docs     rewrite the generated blocks from benchmarks/results
python -m benchmarks.report --check README.md docs      exit 1 if a block differs from what the rows say
"""

from __future__ import annotations

import difflib
import sys
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.cli import UsageError, run_command
from benchmarks.record import RESULTS, Rows, load
from benchmarks.report import blocks, document, front, tables, terminal
from benchmarks.report.html import folder_of_reports, write_html
from benchmarks.report.race import races_of

ROOT = Path(__file__).resolve().parents[2]
PICTURE = "compile-and-call.svg"


def regenerated(file: Path, rows: Rows) -> tuple[str, str]:
    """The text of a Markdown file or the picture, as it is and as it follows from the rows.

    Raises:
        ValueError: Naming file and line, if a block cannot be made.
    """
    text = file.read_text(encoding="utf-8")
    if file.name == PICTURE:
        return text, front.picture(races_of(rows))
    try:
        return text, blocks.rewrite(
            text, lambda spec: tables.make_table(spec, rows), lambda spec: tables.make_value(spec, rows)
        )
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


def generated_files(paths: list[Path]) -> list[Path]:
    """Markdown files, and the picture where a folder holds it."""
    pictures = [path / PICTURE for path in paths if (path / PICTURE).exists()]
    return [*blocks.markdown_files(paths), *pictures]


def update(paths: list[Path], rows: Rows) -> list[Path]:
    """Rewrite the generated blocks and the picture in files and folders; return the files that changed."""
    made = [(file, *regenerated(file, rows)) for file in generated_files(paths)]  # all or none
    changed = [(file, after) for file, before, after in made if before != after]
    for file, after in changed:
        file.write_text(after, encoding="utf-8")
    return [file for file, _ in changed]


def drift(paths: list[Path], rows: Rows) -> str:
    """A diff of what is generated and differs from the rows; empty if nothing does."""
    parts: list[str] = []
    for file in generated_files(paths):
        before, after = (text.splitlines(keepends=True) for text in regenerated(file, rows))
        parts += difflib.unified_diff(before, after, str(file), f"{file} from the rows")
    return "".join(parts)


def command(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Folder or file of rows. With --update or --check: Markdown files; README.md and docs if omitted."
        ),
    ] = None,
    update_blocks: Annotated[bool, typer.Option("--update", help="Rewrite the generated blocks.")] = False,
    check_blocks: Annotated[
        bool, typer.Option("--check", help="Exit with 1 if a block differs from the rows.")
    ] = False,
    results: Annotated[Path, typer.Option(help="Rows that the blocks are made from.")] = RESULTS,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder or file name (.md, .html) of the reports; beside the rows if omitted."),
    ] = None,
) -> int:
    """Show rows as tables, or make the tables in Markdown files from them."""
    if update_blocks and check_blocks:
        raise UsageError("--update and --check exclude each other; give one")
    paths = paths or []
    if not paths and (update_blocks or check_blocks):
        paths = [root for root in (ROOT / "README.md", ROOT / "docs") if root.exists()]
    try:
        if update_blocks:
            # A clone without committed rows still has tables: they say that nothing was measured.
            for file in update(paths, load(results) if results.exists() else Rows([], {})):
                print(f"updated {file}")
            return 0
        if check_blocks:
            found = drift(paths, load(results) if results.exists() else Rows([], {}))
            if found:
                print(found)
                again = " ".join(map(str, paths))
                print(f"Tables differ from the rows; run python -m benchmarks.report --update {again}")
            return 1 if found else 0
        return _show(paths, out)
    except (ValueError, FileNotFoundError) as error:
        raise UsageError(str(error)) from error


def _show(paths: list[Path], out: Path | None) -> int:
    if len(paths) != 1:
        raise UsageError(f"give one folder or file of rows, got {len(paths)}; or did you mean --update or --check?")
    rows = load(paths[0])
    if not rows.results:
        raise UsageError(f"{paths[0]} holds no rows; run python -m benchmarks.run --out {paths[0]} first")
    target = out or folder_of_reports(paths[0]) / "report.md"
    if target.is_dir() or target.suffix not in (".md", ".html"):  # a folder, as --out of benchmarks.run is one
        target /= "report.md"
    page = target.with_suffix(".html")
    target = target.with_suffix(".md") if target == page else target
    _refuse_unwritable(target, page)  # first: the tables take a while
    terminal.render(rows.results, rows.environments)
    target.write_text(document.report(rows.results, rows.environments), encoding="utf-8")
    print(f"\nreport: {target}")
    print(f"report: {write_html(rows, page)}")
    return 0


def _refuse_unwritable(*targets: Path) -> None:
    """UsageError if one of these cannot be written; what is there is left as it is, and no empty file stays behind."""
    for target in targets:
        there = target.exists()
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.open("ab").close()
            if not there:
                target.unlink()
        except OSError as error:
            why = error.strerror or type(error).__name__
            raise UsageError(f"{target} cannot be written ({why}); name another place with --out") from error


def main(arguments: list[str] | None = None) -> int:
    return run_command(command, "python -m benchmarks.report", arguments)


if __name__ == "__main__":
    sys.exit(main())
