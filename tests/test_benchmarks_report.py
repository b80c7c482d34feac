from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.report import html as report
from benchmarks.report.__main__ import main
from tests.rows import failure, race, write

MARKED = """# Title

<!-- table: race model=gcn input=cora -->
<!-- end table -->

It takes <!-- value: p50 model=gcn input=cora arm="zoo regional" --><!-- end --> a call.
"""


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    folder = tmp_path / "docs"
    folder.mkdir()
    (folder / "page.md").write_text(MARKED)
    return folder


def test_report_of_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "run" / "rows.jsonl", [*race(), failure("timeout", "60 s", strategy="hierarchical")])
    assert main([str(tmp_path / "run")]) == 0
    shown = capsys.readouterr().out
    assert "zoo regional + CUDA graph" in shown and "zoo hierarchical: timeout: 60 s" in shown
    page = (tmp_path / "run" / "report.html").read_text()
    assert "zoo regional + CUDA graph" in page and "zoo hierarchical: timeout" in page


def test_report_of_committed_rows_does_not_land_among_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(report, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(report, "ROOT", tmp_path)
    write(tmp_path / "results" / "h200" / "rows.jsonl", race())
    assert main([str(tmp_path / "results" / "h200")]) == 0
    assert [path.suffix for path in (tmp_path / "results").rglob("*.*")] == [".jsonl"]
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"report.html"}


def test_update_then_check_then_drift(tmp_path: Path, docs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = write(tmp_path / "results" / "h200" / "rows.jsonl", race())
    options = ["--results", str(tmp_path / "results"), str(docs)]
    assert main(["--check", *options]) == 1
    assert main(["--update", *options]) == 0
    page = docs / "page.md"
    assert 'arm="zoo regional" -->0.236 ms<!-- end --> a call.' in page.read_text()
    assert main(["--check", *options]) == 0
    capsys.readouterr()

    stamp = page.stat().st_mtime_ns
    assert main(["--update", *options]) == 0  # nothing to do
    assert page.stat().st_mtime_ns == stamp and capsys.readouterr().out == ""

    page.write_text(page.read_text().replace("0.236 ms", "0.2 ms"))  # edited by hand
    assert main(["--check", *options]) == 1
    assert "+It takes" in (said := capsys.readouterr().out) and f"--update {docs}" in said
    assert main(["--update", *options]) == 0

    write(rows, race({"zoo regional": 0.5}))  # measured again
    assert main(["--check", *options]) == 1


def test_a_broken_block_changes_no_file(tmp_path: Path, docs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (docs / "zz.md").write_text("\n<!-- table: rase model=gcn input=cora -->\n<!-- end table -->\n")
    assert main(["--update", "--results", str(tmp_path / "none"), str(docs)]) == 2
    assert f"{docs / 'zz.md'}: line 2: rase model=gcn input=cora: there is no table 'rase'" in capsys.readouterr().err
    assert (docs / "page.md").read_text() == MARKED


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "got 0; or did you mean --update or --check?"),
        (["--update", "--check"], "exclude each other"),
        (["--chek"], "--check"),
        (["{here}/none"], "does not exist"),
        (["{here}"], "holds no rows; run python -m benchmarks.run --out"),
        (["--check", "{here}/none.md"], "does not exist; give Markdown"),
        (["--check", "{here}"], "holds no Markdown; give *.md files"),
        (["--update", "{here}"], "holds no Markdown; give *.md files"),
    ],
)
def test_wrong_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str) -> None:
    assert main([word.format(here=tmp_path) for word in arguments]) == 2
    captured = capsys.readouterr()
    assert said in captured.err and captured.err.count("\n") == 1


def test_a_place_that_cannot_be_written_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "run" / "rows.jsonl", race())
    (tmp_path / "run" / "report.html").mkdir()
    assert main([str(tmp_path / "run")]) == 2
    assert (said := capsys.readouterr().err).count("\n") == 1 and "report.html" in said
