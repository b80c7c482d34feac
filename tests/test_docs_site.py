"""`make docs` builds the site, and fails on a broken link, a missing page and a docstring that it cannot read."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TOP_PAGES = sorted(ROOT.glob("*.md"))
LINK = re.compile(r"\]\(([^)\s]+)\)|(?:src|href)=\"([^\"]+)\"")


def build(folder: Path, site: Path) -> tuple[int, str]:
    """Run the command of `make docs` in a folder; its exit code and what it printed."""
    recipe = re.search(r"^docs:.*\n\t\$\(RUN\) (.*)$", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    done = subprocess.run(
        [sys.executable, *recipe[1].split(), "--site-dir", str(site)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=240,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
def test_the_build_fails_on_what_is_broken(tmp_path: Path) -> None:
    for name in ("docs", "zoo"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    index, module = tmp_path / "docs/index.md", tmp_path / "zoo/registry.py"
    index.write_text(index.read_text("utf-8") + "\nSee [nothing](not-there.md).\n", encoding="utf-8")
    (tmp_path / "docs/reference/faults.md").unlink()
    source = module.read_text("utf-8")
    assert source.count("    Args:\n") > 1
    module.write_text(
        source.replace("    Args:\n", "    Args:\n        not_there: No such argument.\n"), encoding="utf-8"
    )
    code, printed = build(tmp_path, tmp_path / "site")
    warnings = [line for line in printed.splitlines() if "WARNING" in line]
    assert code != 0, printed
    for fault in ("not-there.md", "faults.md", "not_there"):
        assert any(fault in line for line in warnings), f"nothing was said of {fault}:\n{printed}"


@pytest.mark.parametrize("page", TOP_PAGES, ids=lambda page: page.name)
def test_links_of_the_pages_outside_the_site_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    targets = ["".join(found) for found in LINK.findall(text)]
    local = [target for target in targets if not target.startswith("https://")]
    missing = [target for target in local if not (ROOT / target.partition("#")[0]).exists()]
    assert not missing, f"{page.name} links what is not there"
