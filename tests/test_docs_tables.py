"""The tables and the picture in the README and the docs equal what the committed rows give."""

import functools
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from benchmarks.families.patterns import PATTERNS
from benchmarks.record import RESULTS, Rows, load
from benchmarks.report.docs import PICTURE, drift, markdown_files, update
from benchmarks.report.model import races

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


FOLDER = ROOT / "docs/patterns"
PAGES = [path for path in sorted(FOLDER.glob("*.md")) if path.stem != "index"]
BLOCK = re.compile(r"^```python[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("name", PATTERNS)
def test_a_raced_pattern_shows_its_rows(name: str) -> None:
    tables = (ROOT / "docs/results/patterns.md").read_text(encoding="utf-8")
    assert f"table: race family=patterns model={name} " in tables
    page = (FOLDER / f"{name}.md").read_text(encoding="utf-8")
    assert f"value: p50 family=patterns model={name} " in page and "](../results/patterns.md#" in page


def test_a_page_says_where_its_after_is_slower_region_against_region() -> None:
    rows = committed()
    slower = []
    for race in races((r for r in rows.results if r.case.family == "patterns"), rows.environments):
        before, after = (race.find(impl=impl, strategy="regional") for impl in ("upstream", "zoo"))
        if before and after and race.verdict(after, before) == "slower":
            slower.append(race.case.model)
    said = 'arm="zoo regional" against="upstream regional"'
    assert sorted(slower) == [page.stem for page in PAGES if said in page.read_text(encoding="utf-8")]


@pytest.mark.parametrize("page", [*PAGES, ROOT / "docs/start/migration.md"], ids=lambda page: page.stem)
def test_a_page_asserts_what_it_claims_and_names_files_that_are_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    named = re.findall(r"`((?:zoo|benchmarks|tests|docs)/[\w./-]+)`", text)
    assert [name for name in named if not (ROOT / name).exists()] == []
    if page in PAGES:
        assert any("assert " in block for block in BLOCK.findall(text)), f"{page.name} asserts nothing"
        assert "\n## In the zoo\n" in text and any(name.startswith("zoo/") for name in named)
        assert f"]({page.name})" in (FOLDER / "index.md").read_text(encoding="utf-8")
        assert f"- patterns/{page.name}\n" in (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
