"""One file a family: its models, inputs and arms. A new family adds its file and its name here."""

from __future__ import annotations

import importlib

from benchmarks.workloads.base import Prepared, Workload

FAMILIES: tuple[str, ...] = ("gnn",)

__all__ = ["FAMILIES", "Prepared", "Workload", "load"]


def load(family: str) -> Workload:
    """The family's ``WORKLOAD``, imported when asked for.

    Raises:
        ValueError: If there is no such family.
    """
    if family not in FAMILIES:
        raise ValueError(f"there is no family {family!r}; choose one of {', '.join(FAMILIES)}")
    workload: Workload = importlib.import_module(f"benchmarks.workloads.{family}").WORKLOAD
    return workload
