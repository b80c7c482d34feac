"""One file per family: its models, inputs and arms. A file that declares a ``WORKLOAD`` is a family."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

from benchmarks.cli import did_you_mean
from benchmarks.families.base import Prepared, Workload

__all__ = ["Prepared", "Workload", "families", "load"]


def families() -> list[str]:
    """Names of all families, found in the text of the files, so that no library is imported."""
    files = sorted(Path(__path__[0]).glob("*.py"))
    return [file.stem for file in files if re.search(r"^WORKLOAD\b", file.read_text(), re.MULTILINE)]


def load(name: str) -> Workload:
    """The ``WORKLOAD`` of a family, or of a module by its dotted name, imported here; ValueError if there is none."""
    if "." not in name and name not in families():
        raise ValueError(f"there is no family {name!r}; {did_you_mean(name, families())}")
    workload: Workload = importlib.import_module(name if "." in name else f"benchmarks.families.{name}").WORKLOAD
    return workload
