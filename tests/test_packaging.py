"""What is shipped, and what `import zoo` costs."""

import subprocess
import sys
import tomllib
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
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


def test_the_extras_bring_the_libraries() -> None:
    # One installer call resolves a torch and a torchvision that belong together: only torch's has a lower bound.
    assert EXTRAS["vision"] == ["torchvision"]
    assert set(EXTRAS) == {"vision", "hf", "diffusers", "gnn", "bench", "dev"}
    assert "regional-zoo[vision,hf,diffusers,gnn]" in EXTRAS["bench"] and "regional-zoo[bench]" in EXTRAS["dev"]


def test_the_oldest_releases_tested_are_the_oldest_allowed() -> None:
    pinned = dict(line.split("==") for line in (ROOT / "tests/oldest.txt").read_text().splitlines() if "==" in line)
    libraries = (*PYPROJECT["project"]["dependencies"], *EXTRAS["hf"], *EXTRAS["diffusers"], *EXTRAS["gnn"])
    allowed = dict(each.split(">=") for each in libraries if ">=" in each)
    assert allowed and {name: pinned[name].startswith(oldest) for name, oldest in allowed.items()} == dict.fromkeys(
        allowed, True
    )


def test_nothing_points_the_installer_at_a_host() -> None:
    for name in ("pyproject.toml", "Makefile", ".ci/run"):
        text = (ROOT / name).read_text(encoding="utf-8")
        for word in ("index-url", "find-links", "://"):
            assert word not in text, f"{name} names a registry host: {word}"


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
BLOCKED = ("torchvision", "transformers", "diffusers", "torch_geometric", "accelerate", "huggingface_hub", "numpy")


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


def test_the_citation_and_the_changelog_name_the_version() -> None:
    import zoo

    assert f"version: {zoo.__version__}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert zoo.__version__ in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
