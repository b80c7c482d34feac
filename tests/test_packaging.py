"""What is shipped, and what `import zoo` costs."""

from __future__ import annotations

import subprocess
import sys
import tomllib
import zipfile
from email import message_from_bytes
from email.message import Message
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    folder = tmp_path_factory.mktemp("wheel")
    # hatchling itself, not pip: nothing is fetched, and no environment is made for the build.
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)],
        cwd=ROOT,
        check=True,
        capture_output=True,
        timeout=120,
    )
    (path,) = folder.glob("*.whl")
    return zipfile.ZipFile(path)


@pytest.fixture(scope="module")
def metadata(wheel: zipfile.ZipFile) -> Message:
    (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    return message_from_bytes(wheel.read(name))


def test_the_wheel_ships_all_of_zoo_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    sources = {path.relative_to(ROOT).as_posix() for path in (ROOT / "zoo").rglob("*.py")} | {"zoo/py.typed"}
    assert sources <= names and not [name for name in names if "__pycache__" in name]
    assert {root for name in names if not (root := name.split("/")[0]).endswith(".dist-info")} == {"zoo"}


def test_the_wheel_carries_its_licence(wheel: zipfile.ZipFile, metadata: Message) -> None:
    assert metadata["License-Expression"] == "BSD-3-Clause"
    (name,) = [name for name in wheel.namelist() if name.endswith("LICENSE")]
    assert wheel.read(name) == (ROOT / "LICENSE").read_bytes()


def test_the_distribution_and_what_it_requires(metadata: Message) -> None:
    assert metadata["Name"] == "regional-zoo"
    assert metadata["Requires-Python"] == ">=3.11"
    required = [entry for entry in metadata.get_all("Requires-Dist") if "extra ==" not in entry]
    # One installer call resolves a torch and a torchvision that belong together: only torch's has a lower bound.
    assert "torch>=2.11" in required
    assert "torchvision" in required


def test_the_oldest_releases_tested_are_the_oldest_allowed() -> None:
    pinned = dict(line.split("==") for line in (ROOT / "tests/oldest.txt").read_text().splitlines() if "==" in line)
    allowed = dict(each.split(">=") for each in PYPROJECT["project"]["dependencies"] if ">=" in each)
    assert allowed and {name: pinned[name].startswith(oldest) for name, oldest in allowed.items()} == dict.fromkeys(
        allowed, True
    )


def test_nothing_points_the_installer_at_a_host() -> None:
    for name in ("pyproject.toml", "Makefile", ".ci/run"):
        text = (ROOT / name).read_text(encoding="utf-8")
        for word in ("index-url", "find-links", "://"):
            assert word not in text, f"{name} names a registry host: {word}"


def test_import_zoo_imports_torch_and_nothing_heavier() -> None:
    # Everything else that the distribution depends on, under the names it is imported by, and the harness.
    names = {requirement.split(">")[0].replace("-", "_") for requirement in PYPROJECT["project"]["dependencies"]}
    heavy = sorted(
        {*names, *PYPROJECT["project"]["optional-dependencies"]["bench"], "triton", "benchmarks"} - {"torch"}
    )
    assert {"torch_geometric", "rich"} <= set(heavy)
    # torch may load some of these by itself: only what zoo adds counts.
    program = (
        "import sys, torch; before = set(sys.modules); import zoo; "
        f"print([name for name in {heavy!r} if name in set(sys.modules) - before])"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_the_citation_and_the_changelog_name_the_version() -> None:
    import zoo

    assert f"version: {zoo.__version__}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert zoo.__version__ in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
