"""One file a family: its models, inputs and arms. A file that declares a ``WORKLOAD`` is a family."""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path

from benchmarks.families.base import Prepared, Workload

__all__ = ["Prepared", "Workload", "families", "load"]


def families() -> list[str]:
    """Families that have a workload file."""
    names = [module.name for module in pkgutil.iter_modules(__path__)]
    return [name for name in names if _declares_workload(Path(__path__[0]) / f"{name}.py")]


def load(family: str) -> Workload:
    """The family's ``WORKLOAD``, imported when asked for.

    Raises:
        ValueError: If there is no such family.
    """
    if family not in families():
        raise ValueError(f"there is no family {family!r}; choose one of {', '.join(families())}")
    workload: Workload = importlib.import_module(f"benchmarks.families.{family}").WORKLOAD
    return workload


def _declares_workload(path: Path) -> bool:
    """Told from the text, so that listing families imports none of their libraries."""
    return path.exists() and any(line.startswith(("WORKLOAD =", "WORKLOAD:")) for line in path.read_text().splitlines())
