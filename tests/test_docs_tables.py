"""The tables and the picture in the README and the docs equal what the committed rows give."""

import functools
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from benchmarks.record import RESULTS, Rows, load
from benchmarks.report.docs import PICTURE, drift, markdown_files, update

ROOT = Path(__file__).resolve().parents[1]


@functools.cache
def committed() -> Rows:
    return load(RESULTS) if RESULTS.exists() else Rows([], {})


def test_tables_are_made_from_the_committed_rows() -> None:
    paths = [path for path in (ROOT / "README.md", ROOT / "docs") if path.exists()]
    assert markdown_files(paths), f"no Markdown below {ROOT}"
    found = drift(paths, committed())
    assert not found, f"run python -m benchmarks.report --update README.md docs\n{found}"


def test_the_docs_name_the_training_that_is_measured_and_no_other() -> None:
    rows = [r for r in committed().results if (r.case.workload, r.case.impl, r.status) == ("train", "zoo", "ok")]
    rows = [r for r in rows if r.case.family != "calls"]  # blocks, and no model that anybody trains
    measured = {f"{r.case.model} {r.case.input}" for r in rows}
    curves = {f"{r.case.model} {r.case.input}" for r in rows if len(r.curve or []) >= 200}
    text = (ROOT / "docs/results/training.md").read_text(encoding="utf-8")
    table = text[text.index("| Family | A step and its peak memory |") :].split("\n\n")[0]
    cells = [line.split("|")[2:5] for line in table.splitlines()[2:]]
    named = [{name for line in cells for name in re.findall("`([^`]+)`", line[column])} for column in range(3)]
    assert named[0] == measured and named[1] == curves
    known = measured | {word for name in measured for word in name.split()}
    assert not named[2] & known


def test_the_readme_links_pages_of_every_section() -> None:
    sections = {path.parent.name for path in (ROOT / "docs").rglob("*.md")} - {"docs"}
    linked = set(re.findall(r"\]\(docs/(?:([\w-]+)/)?[\w-]+\.md", (ROOT / "README.md").read_text(encoding="utf-8")))
    assert sections == linked - {""}


def test_the_picture_is_checked_against_the_rows(tmp_path: Path) -> None:
    picture = tmp_path / PICTURE
    (tmp_path / "page.md").write_text("no tables\n", encoding="utf-8")
    drawn = (ROOT / "docs" / PICTURE).read_text(encoding="utf-8")
    ElementTree.fromstring(drawn)  # well-formed
    picture.write_text(re.sub(r"ours \S+ s", "ours 9 s", drawn), encoding="utf-8")
    assert PICTURE in drift([tmp_path], committed())
    assert update([tmp_path], committed()) == [picture]
    assert picture.read_text(encoding="utf-8") == drawn


def test_results_hold_rows_and_nothing_else() -> None:
    others = [path for path in RESULTS.rglob("*") if path.is_file() and path.suffix != ".jsonl"]
    assert others == []
