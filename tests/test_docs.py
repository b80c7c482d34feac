"""The documentation is run, and names what there is; what is shipped, and what `import zoo` costs."""

import ast
import contextlib
import dataclasses
import functools
import importlib
import inspect
import os
import re
import shutil
import subprocess
import sys
import tomllib
import types
import typing
import xml.etree.ElementTree as ElementTree
import zipfile
from email import message_from_bytes
from pathlib import Path
from typing import Any

import pytest

from benchmarks import record
from benchmarks.families.patterns import PATTERNS
from benchmarks.record import RESULTS, Rows, load
from benchmarks.report import docs
from benchmarks.report.docs import PICTURE, drift, markdown_files, update
from benchmarks.report.model import races
from tests.runs import LIGHT
from zoo import registry

ROOT = Path(__file__).resolve().parent.parent
PAGES = [path for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))] if path.exists()]
BLOCK = re.compile(r"^```(\w+)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"python -m (benchmarks\.\w+)((?: +[^\s`]+)*)")


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path, *languages: str) -> list[tuple[int, str]]:
    """Line number and text of the page's fenced blocks in these languages."""
    text = page.read_text(encoding="utf-8")
    return [(text.count("\n", 0, match.start(2)), match[2]) for match in BLOCK.finditer(text) if match[1] in languages]


FAMILY_PAGE = ROOT / "docs/reference/adding-a-family.md"  # whose blocks are files
FIRST, *OTHERS = (page for page in PAGES if page != FAMILY_PAGE and blocks(page, "python"))


# Most pages compile what other tests compile, too.
@pytest.mark.parametrize("page", [FIRST, *(pytest.param(page, marks=pytest.mark.slow) for page in OTHERS)], ids=name_of)
def test_python_blocks_run(page: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # One module a page, its blocks in order. Classes need a module that can be found by name, and what a page
    # registers stays in this test.
    module = types.ModuleType("page_" + page.stem.replace("-", "_"))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(registry, "_FAMILIES", dict(registry._FAMILIES))
    monkeypatch.chdir(tmp_path)
    for line, source in blocks(page, "python"):
        # Blank lines in front make the traceback point at the page's own line.
        exec(compile("\n" * line + source, str(page), "exec"), module.__dict__)


@pytest.mark.slow
def test_a_family_is_added_by_the_words_of_its_page(tmp_path: Path) -> None:
    for name in ("zoo", "benchmarks", "tests"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("results", "__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    text = FAMILY_PAGE.read_text(encoding="utf-8")
    files: dict[str, list[str]] = {}
    for name, block in re.findall(r'^```python title="([^"]+)"\n(.*?)^```$', text, re.MULTILINE | re.DOTALL):
        files.setdefault(name, []).append(block)
    for name, parts in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("\n\n".join(parts), encoding="utf-8")
    (line,) = re.findall(r"^One line in `zoo/__init__.py` .*: `(.+)`\.$", text, re.MULTILINE)
    with (tmp_path / "zoo/__init__.py").open("a", encoding="utf-8") as file:
        file.write(f"{line}\n")

    def python(*arguments: str) -> str:
        environment = {**os.environ, **LIGHT, "PYTHONPATH": str(tmp_path)}
        command = [sys.executable, "-m", *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    tests = python("pytest", "-q", "-n", "0", "tests/test_contract.py", "tests/test_mlp.py", "-k", "mlp")
    assert int(re.findall(r"(\d+) passed", tests)[0]) > 14
    arms = ("--strategy", "regional,full", "--out", str(tmp_path / "runs"))
    run = python("benchmarks.run", "--family", "mlp", "--device", "cpu", "--quick", *arms)
    assert "zoo regional" in run and "upstream full" in run
    python("ruff", "check", *files)
    python("ruff", "format", "--check", *files)


def test_only_known_kinds_of_block() -> None:
    # A block that is meant to run and is spelled "py" would never be run.
    known = {"python", "text", "pycon", "console", "sh", "json", "toml", "make"}
    for page in PAGES:
        kinds = {match[1] for match in BLOCK.finditer(page.read_text(encoding="utf-8"))}
        assert kinds <= known, f"{name_of(page)} has blocks of kind {kinds - known}"


def test_the_home_page_has_at_most_400_words_as_rendered() -> None:
    text = (ROOT / "docs/index.md").read_text(encoding="utf-8")
    rendered = re.sub(r"<!--.*?-->|\]\([^)]*\)|^```\w*$", "", text, flags=re.MULTILINE | re.DOTALL)
    words = [word for word in rendered.replace("|", " ").split() if re.search(r"\w", word)]
    assert len(words) <= 400


def commands() -> dict[str, set[tuple[str, str]]]:
    """Harness module -> (page, option) for every command line in the documentation."""
    found: dict[str, set[tuple[str, str]]] = {}
    for page in PAGES:
        for match in COMMAND.finditer(page.read_text(encoding="utf-8").replace("\\\n", " ")):
            options = re.findall(r"(--[\w-]+)", match[2])
            found.setdefault(match[1], set()).update((name_of(page), option) for option in options)
    return found


@functools.cache
def options_of(module: str) -> frozenset[str]:
    environment, command = {"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}, [sys.executable, "-m", module, "--help"]
    environment = os.environ | environment
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return frozenset(re.findall(r"--[a-z][\w-]*", done.stdout))


@pytest.mark.slow
@pytest.mark.parametrize("module", sorted(commands()))
def test_options_in_commands_exist(module: str) -> None:
    wrong = [(page, option) for page, option in sorted(commands()[module]) if option not in options_of(module)]
    assert not wrong, f"{module} has no such options: {wrong}"


def test_options_values_and_fields_of_a_row_are_documented() -> None:
    text = (ROOT / "docs/reference/cli.md").read_text(encoding="utf-8")
    table = text[text.index("## Options") : text.index("## Rows")]
    assert set(re.findall(r"`(--[\w-]+)`", table)) == options_of("benchmarks.run") - {"--help"}
    lines = [line for line in text.splitlines() if line.startswith("| `value: ")]
    listed = {name for line in lines for name in re.findall(r"`([\w :-]+)`", line.split("|")[1])}
    assert {name.removeprefix("value: ") for name in listed} == docs.VALUES.keys()
    parts = (record.Compile, record.Steady, record.Memory, record.Check, record.Work, record.KernelTime)
    names = [field.name for section in (record.Result, *parts) for field in dataclasses.fields(section)]
    assert not [name for name in names if f"`{name}`" not in text]
    assert all(f"`{status}`" in text for status in record.STATUSES)


LINK = re.compile(r"\]\(([^)\s]+)\)|(?:src|href)=\"([^\"]+)\"")


@pytest.mark.parametrize("page", sorted(ROOT.glob("*.md")), ids=lambda page: page.name)
def test_links_of_the_pages_outside_the_site_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    targets = ["".join(found) for found in LINK.findall(text)]
    local = [target for target in targets if not target.startswith("https://")]
    missing = [target for target in local if not (ROOT / target.partition("#")[0]).exists()]
    assert not missing, f"{page.name} links what is not there"


PACKAGES = ["zoo", *sorted(f"zoo.{path.parent.name}" for path in (ROOT / "zoo").glob("*/__init__.py"))]
# `zoo.` in front of a name, and no path or host before it.
DOTTED = re.compile(r"(?<![\w./-])zoo(?:\.[A-Za-z_]\w*)+")
RAISED = re.compile(r"^\s+(\w+(?:Error|Warning)):", re.MULTILINE)
REFERENCE = re.compile(r"^::: (zoo[\w.]*)$", re.MULTILINE)


def public_names(package: str) -> list[str]:
    """What the package's __init__ re-exports as ``name as name``, subpackages apart."""
    module = importlib.import_module(package)
    tree = ast.parse((ROOT / package.replace(".", "/") / "__init__.py").read_text(encoding="utf-8"))
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    names = [alias.name for node in imports for alias in node.names if alias.asname == alias.name]
    return [name for name in names if not isinstance(getattr(module, name), types.ModuleType)]


def own_docstring(item: type | types.FunctionType) -> str | None:
    """Not a parent's, and not the signature that a dataclass makes do with."""
    text = vars(item).get("__doc__") if isinstance(item, type) else item.__doc__
    return None if text and text.startswith(f"{item.__name__}(") else text


def documented() -> set[str]:
    return {name for page in (ROOT / "docs").rglob("*.md") for name in REFERENCE.findall(page.read_text("utf-8"))}


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_is_in_the_reference_and_has_a_docstring_of_its_own(package: str) -> None:
    module = importlib.import_module(package)
    described = [getattr(module, name) for name in public_names(package)]
    described = [item for item in described if inspect.isclass(item) or inspect.isfunction(item)]
    bare = [item.__qualname__ for item in described if not own_docstring(item)]
    assert not bare
    missing = {f"{package}.{name}" for name in public_names(package)} - documented()
    assert not missing, f"add '::: name' to a page of docs/reference for {sorted(missing)}"


def documented_things() -> list[Any]:
    return [thing(name) for name in sorted(documented())]


def thing(name: str) -> Any:
    """What a dotted name says, a module or something in one.

    Raises:
        AttributeError: If there is nothing of that name.
    """
    found: Any = importlib.import_module("zoo")
    for place, part in enumerate(name.split(".")[1:], start=2):
        if not hasattr(found, part):
            with contextlib.suppress(ModuleNotFoundError):
                importlib.import_module(".".join(name.split(".")[:place]))
        found = getattr(found, part)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_files_and_names_that_a_page_mentions_exist_and_classes_are_in_the_reference(page: Path) -> None:
    text, missing, bare = page.read_text("utf-8"), [], []
    made = re.findall(r'title="([^"]+)"', text)
    named = re.findall(r"`((?:zoo|benchmarks|tests|docs|examples)/[\w./-]+)`", text)
    assert [name for name in named if not (ROOT / name).exists() and name not in made] == []
    for name in sorted(set(DOTTED.findall(text))):
        if page.stem == "adding-a-family" and name.startswith("zoo.mlp"):
            continue  # the family that is added
        try:
            found = thing(name)
        except AttributeError:
            missing.append(name)
            continue
        if inspect.isclass(found) and found not in documented_things():
            bare.append(name)
    assert not missing, f"{page.name} names what is not there"
    assert not bare, f"{page.name} names classes that no page describes"


def test_the_promised_names_and_what_functions_of_the_reference_return_and_raise_are_in_it() -> None:
    things, expected = documented_things(), set()
    for item in things:
        if inspect.isfunction(item):
            expected |= classes_in(typing.get_type_hints(item).get("return"))
        for made in [item, *vars(item).values()] if inspect.isclass(item) else [item]:
            if inspect.isfunction(made):
                raised = (made.__globals__.get(name) for name in RAISED.findall(made.__doc__ or ""))
                expected |= {error for error in raised if inspect.isclass(error)}
    ours = {item for item in expected if item.__module__.startswith("zoo.")}
    assert ours and sorted(item.__qualname__ for item in ours - {t for t in things if inspect.isclass(t)}) == []
    promised = "create list_models from_upstream to_upstream example_inputs Region find_regions compile_regions warm_up"
    assert {*promised.split(), "uncompile", "enforce_budget", "cuda_graph"} <= set(public_names("zoo"))
    assert {"GCN", "CSRGraph"} <= set(public_names("zoo.gnn")) and "gnn" not in public_names("zoo")


def classes_in(annotation: Any) -> set[type]:
    inside = {found for each in typing.get_args(annotation) for found in classes_in(each)}
    return inside | {annotation} if inspect.isclass(annotation) else inside


@functools.cache
def committed() -> Rows:
    return load(RESULTS) if RESULTS.exists() else Rows([], {})


def test_tables_are_made_from_the_committed_rows_beside_which_there_is_nothing_else() -> None:
    paths = [path for path in (ROOT / "README.md", ROOT / "docs") if path.exists()]
    assert markdown_files(paths), f"no Markdown below {ROOT}"
    found = drift(paths, committed())
    assert not found, f"run python -m benchmarks.report --update README.md docs\n{found}"
    others = [path for path in RESULTS.rglob("*") if path.is_file() and path.suffix != ".jsonl"]
    assert others == []


def test_the_docs_name_the_training_that_is_measured_and_say_where_a_pattern_is_slower() -> None:
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
    rows = committed()
    slower = []
    for race in races((r for r in rows.results if r.case.family == "patterns"), rows.environments):
        before, after = (race.find(impl=impl, strategy="regional") for impl in ("upstream", "zoo"))
        if before and after and race.verdict(after, before) == "slower":
            slower.append(race.case.model)
    said = 'arm="zoo regional" against="upstream regional"'
    told = [page.stem for page in (ROOT / "docs/patterns").glob("*.md") if said in page.read_text(encoding="utf-8")]
    assert sorted(slower) == sorted(told)


def test_the_picture_is_checked_against_the_rows(tmp_path: Path) -> None:
    picture = tmp_path / PICTURE
    (tmp_path / "page.md").write_text("no tables\n", encoding="utf-8")
    drawn = (ROOT / "docs" / PICTURE).read_text(encoding="utf-8")
    ElementTree.fromstring(drawn)  # well-formed
    picture.write_text(re.sub(r"ours \S+ s", "ours 9 s", drawn), encoding="utf-8")
    assert PICTURE in drift([tmp_path], committed())
    assert update([tmp_path], committed()) == [picture]
    assert picture.read_text(encoding="utf-8") == drawn


@pytest.mark.parametrize("name", PATTERNS)
def test_a_raced_pattern_shows_its_rows(name: str) -> None:
    tables = (ROOT / "docs/results/patterns.md").read_text(encoding="utf-8")
    assert f"table: race family=patterns model={name} " in tables
    page = (ROOT / f"docs/patterns/{name}.md").read_text(encoding="utf-8")
    assert f"value: p50 family=patterns model={name} " in page and "](../results/patterns.md#" in page


PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
EXTRAS: dict[str, list[str]] = PYPROJECT["project"]["optional-dependencies"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    folder = tmp_path_factory.mktemp("wheel")
    # hatchling itself, not pip: nothing is fetched, and no environment is made for the build.
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True, timeout=120)
    (path,) = folder.glob("*.whl")
    return zipfile.ZipFile(path)


def test_the_wheel_ships_all_of_zoo_its_licence_its_command_and_says_what_it_requires(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    sources = {path.relative_to(ROOT).as_posix() for path in (ROOT / "zoo").rglob("*.py")} | {"zoo/py.typed"}
    assert sources <= names and not [name for name in names if "__pycache__" in name]
    assert {root for name in names if not (root := name.split("/")[0]).endswith(".dist-info")} == {"zoo"}
    (licence,), (commands,) = ([n for n in names if n.endswith(end)] for end in ("LICENSE", "entry_points.txt"))
    assert wheel.read(licence) == (ROOT / "LICENSE").read_bytes()
    assert "zoo = zoo.__main__:main" in wheel.read(commands).decode()
    (name,) = [name for name in names if name.endswith(".dist-info/METADATA")]
    metadata = message_from_bytes(wheel.read(name))
    assert metadata["Name"] == "regional-zoo"
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["License-Expression"] == "BSD-3-Clause"
    required = [entry for entry in metadata.get_all("Requires-Dist") if "extra ==" not in entry]
    assert sorted(required) == ["safetensors", "torch>=2.11", "tqdm"]


def test_the_extras_bring_the_libraries_and_the_oldest_releases_allowed_are_tested() -> None:
    assert "regional-zoo[vision,hf,diffusers,gnn]" in EXTRAS["bench"] and "regional-zoo[bench]" in EXTRAS["dev"]
    pinned = dict(line.split("==") for line in (ROOT / "tests/oldest.txt").read_text().splitlines() if "==" in line)
    libraries = (*PYPROJECT["project"]["dependencies"], *EXTRAS["hf"], *EXTRAS["diffusers"], *EXTRAS["gnn"])
    allowed = dict(each.split(">=") for each in libraries if ">=" in each)
    others = [name for name, oldest in allowed.items() if not pinned[name].startswith(oldest)]
    assert allowed and not others


def test_nothing_points_the_installer_at_a_host_and_all_name_one_version() -> None:
    for name in ("pyproject.toml", "Makefile", ".ci/run"):
        text = (ROOT / name).read_text(encoding="utf-8")
        for word in ("index-url", "find-links", "://"):
            assert word not in text, f"{name} names a registry host: {word}"
    import zoo

    assert f"version: {zoo.__version__}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert zoo.__version__ in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_import_zoo_imports_torch_and_nothing_heavier() -> None:
    # Everything else that the distribution and the harness depend on, under the names it is imported by.
    needed = [
        *PYPROJECT["project"]["dependencies"],
        *(each for name in EXTRAS if name != "dev" for each in EXTRAS[name]),
    ]
    names = {requirement.split(">")[0].replace("-", "_") for requirement in needed if "[" not in requirement}
    heavy = sorted({*names, "triton", "benchmarks"} - {"torch"})
    assert {"torch_geometric", "rich"} <= set(heavy)
    # torch may load some of these by itself: only what zoo adds counts.
    program = (
        "import sys, torch; before = set(sys.modules); import zoo; "
        f"print([name for name in {heavy!r} if name in set(sys.modules) - before])"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


WITHOUT = """
import sys

class Without:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in {blocked!r} else self.finder.find_spec(name, path, target)

sys.meta_path[:] = map(Without, sys.meta_path)
import torch
import zoo
"""
BLOCKED = (
    "torchvision", "transformers", "diffusers", "torch_geometric", "accelerate", "huggingface_hub", "numpy", "triton",
)  # fmt: skip


def without_libraries(program: str) -> str:
    program = WITHOUT.format(blocked=BLOCKED) + program
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_every_family_and_a_model_of_torch_work_without_the_libraries() -> None:
    said = without_libraries("""
for name in ("bert-debug", "gcn-debug", "gat-debug", "graphsage-debug", "llm-debug", "resnet-debug", "unet-debug"):
    model = zoo.create(name)
    zoo.compile_regions(model, backend="eager")
    with torch.inference_mode():
        zoo.warm_up(model, **zoo.example_inputs(model))
layers = [torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True) for _ in range(3)]
print(len(zoo.compile_regions(torch.nn.Sequential(*layers), backend="eager")(torch.randn(2, 4, 16))))
import zoo.__main__
sys.exit(zoo.__main__.main(["list"]))
""")
    assert said.startswith("2\n") and "gcn-debug" in said


def test_a_family_without_its_library_says_which_extra_to_install() -> None:
    said = without_libraries("""
for name in ("bert-debug", "gcn-debug", "llm-debug", "resnet-debug", "unet-debug"):
    try:
        zoo.to_upstream(zoo.create(name))
    except ImportError as error:
        print(error)
""")
    libraries = {"transformers": "hf", "torch_geometric": "gnn", "torchvision": "vision", "diffusers": "diffusers"}
    wanted = {f'{name} is not installed: pip install "regional-zoo[{extra}]"' for name, extra in libraries.items()}
    assert set(said.splitlines()) == wanted
