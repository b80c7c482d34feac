"""Every public name is in the API reference, and says what it does."""

import ast
import contextlib
import importlib
import inspect
import re
import types
import typing
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ["zoo", *sorted(f"zoo.{path.parent.name}" for path in (ROOT / "zoo").glob("*/__init__.py"))]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
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


@pytest.mark.parametrize("package", [name for name in PACKAGES if public_names(name)])
def test_every_public_name_is_in_the_reference(package: str) -> None:
    missing = {f"{package}.{name}" for name in public_names(package)} - documented()
    assert not missing, f"add '::: name' to a page of docs/reference for {sorted(missing)}"


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_has_a_docstring_of_its_own(package: str) -> None:
    module = importlib.import_module(package)
    described = [getattr(module, name) for name in public_names(package)]
    described = [item for item in described if inspect.isclass(item) or inspect.isfunction(item)]
    bare = [item.__qualname__ for item in described if not own_docstring(item)]
    assert not bare


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
def test_names_that_a_page_mentions_exist_and_classes_are_in_the_reference(page: Path) -> None:
    missing, bare = [], []
    for name in sorted(set(DOTTED.findall(page.read_text("utf-8")))):
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


def test_what_functions_of_the_reference_return_and_raise_is_in_it_too() -> None:
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


def classes_in(annotation: Any) -> set[type]:
    inside = {found for each in typing.get_args(annotation) for found in classes_in(each)}
    return inside | {annotation} if inspect.isclass(annotation) else inside


def test_the_promised_names_are_found() -> None:
    promised = "create list_models from_upstream to_upstream example_inputs Region find_regions compile_regions warm_up"
    assert {*promised.split(), "uncompile", "enforce_budget", "cuda_graph"} <= set(public_names("zoo"))
    assert {"GCN", "CSRGraph"} <= set(public_names("zoo.gnn")) and "gnn" not in public_names("zoo")
