"""Every public name is in the API reference, and says what it does."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import types
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ["zoo", *sorted(f"zoo.{path.parent.name}" for path in (ROOT / "zoo").glob("*/__init__.py"))]
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


@pytest.mark.parametrize("package", [name for name in PACKAGES if public_names(name)])
def test_every_public_name_is_in_the_reference(package: str) -> None:
    missing = {f"{package}.{name}" for name in public_names(package)} - documented()
    assert not missing, f"add '::: name' to docs/api.md or the family's page for {sorted(missing)}"


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_has_a_docstring_of_its_own(package: str) -> None:
    module = importlib.import_module(package)
    described = [getattr(module, name) for name in public_names(package)]
    described = [item for item in described if inspect.isclass(item) or inspect.isfunction(item)]
    bare = [item.__qualname__ for item in described if not own_docstring(item)]
    assert not bare


def test_the_public_names_are_found() -> None:
    assert {"create", "compile_regions", "Region"} <= set(public_names("zoo"))
    assert {"GCN", "CSRGraph"} <= set(public_names("zoo.gnn"))
    assert "gnn" not in public_names("zoo")


def test_every_reference_is_to_something() -> None:
    for name in documented():
        module, _, attribute = name.rpartition(".")
        assert hasattr(importlib.import_module(module), attribute), f"the reference names {name}, which is not there"
