"""The pattern pages assert what they claim. That their blocks run is tested with all other pages."""

import re
from pathlib import Path

import pytest

from benchmarks.families.patterns import PATTERNS
from benchmarks.record import RESULTS, load
from benchmarks.report.model import races

ROOT = Path(__file__).resolve().parent.parent
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
    rows = load(RESULTS)
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
