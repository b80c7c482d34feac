"""The pattern pages show the code that is counted and raced. That their blocks run is tested with all other pages."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from benchmarks.record import RESULTS, load
from benchmarks.report.model import races

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs/patterns"
PAGES = [path for path in sorted(FOLDER.glob("*.md")) if path.stem != "index"]
MODULES = [path for path in sorted((ROOT / "benchmarks/patterns").glob("*.py")) if "\nPATTERN = " in path.read_text()]
EXCERPT = re.compile(r'^```python title="([^"]+)"\n(.*?)^```$', re.MULTILINE | re.DOTALL)
BLOCK = re.compile(r"^```python[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def excerpts(page: Path) -> list[tuple[str, str]]:
    """File and text of the page's blocks that name a file."""
    return EXCERPT.findall(page.read_text(encoding="utf-8"))


def pieces(text: str) -> list[str]:
    """What two blank lines separate: the imports, a class, a function."""
    return [piece.strip("\n") for piece in text.split("\n\n\n")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_what_a_page_shows_of_a_file_is_in_the_file(page: Path) -> None:
    for name, text in excerpts(page):
        source = (ROOT / name).read_text(encoding="utf-8")
        for piece in pieces(text):
            if piece.startswith(("import ", "from ")):
                there = set(piece.splitlines()) <= set(source.splitlines())
            else:
                there = f"\n{piece}\n" in source
            assert there, f"{page.name} shows what {name} does not hold, copy it again:\n{piece}"


@pytest.mark.parametrize("module", MODULES, ids=lambda path: path.stem)
def test_every_raced_pattern_has_a_page_with_before_and_after(module: Path) -> None:
    page = FOLDER / f"{module.stem.replace('_', '-')}.md"
    assert page in PAGES
    name = f"benchmarks/patterns/{module.stem}.py"
    assert [file for file, _ in excerpts(page) if file != name] == []
    shown = "\n".join(text for _, text in excerpts(page))
    pattern = importlib.import_module(f"benchmarks.patterns.{module.stem}").PATTERN
    for model in (pattern.before(), pattern.after()):
        regions = [region.cls for region in getattr(type(model), "regions", ())] or {type(b) for b in model.blocks}
        missing = [cls.__name__ for cls in regions if f"class {cls.__name__}(" not in shown]
        assert not missing, f"{page.name} does not show {missing}"
    assert f"table: race family=patterns model={page.stem} " in page.read_text(encoding="utf-8")


def test_a_page_says_where_its_after_is_slower_region_against_region() -> None:
    rows = load(RESULTS)
    slower = []
    for race in races((r for r in rows.results if r.case.family == "patterns"), rows.environments):
        before, after = (race.find(impl=impl, strategy="regional") for impl in ("upstream", "zoo"))
        if before and after and race.verdict(after, before) == "slower":
            slower.append(race.case.model)
    said = 'arm="zoo regional" against="upstream regional"'
    assert sorted(slower) == [page.stem for page in PAGES if said in page.read_text(encoding="utf-8")]


@pytest.mark.parametrize("page", [*PAGES, ROOT / "docs/migration.md"], ids=lambda page: page.stem)
def test_a_page_asserts_what_it_claims_and_names_files_that_are_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    named = re.findall(r"`((?:zoo|benchmarks|tests|docs)/[\w./-]+)`", text)
    assert [name for name in named if not (ROOT / name).exists()] == []
    if page in PAGES:
        assert any("assert " in block for block in BLOCK.findall(text)), f"{page.name} asserts nothing"
        assert "\n## In the zoo\n" in text and any(name.startswith("zoo/") for name in named)
        assert f"]({page.name})" in (FOLDER / "index.md").read_text(encoding="utf-8")
        assert f"- patterns/{page.name}\n" in (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
