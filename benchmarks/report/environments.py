"""Where rows were measured, fact by fact."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from benchmarks.record import Result


def used_by(
    results: Iterable[Result], environments: Mapping[str, Mapping[str, Any]]
) -> dict[str, list[tuple[str, str]]]:
    """The environments that these rows name, by id, each as names and values."""
    used = dict.fromkeys(result.environment or "" for result in results)
    return {name: _flat(environments[name]) for name in used if name in environments}


def _flat(environment: Mapping[str, Any], before: str = "") -> list[tuple[str, str]]:
    """An environment's facts, those within others named ``peaks: copy_bandwidth``."""
    facts: list[tuple[str, str]] = []
    for key, value in environment.items():
        if isinstance(value, Mapping):
            facts += _flat(value, f"{before}{key}: ")
        elif (before or key not in ("kind", "id")) and value is not None:
            facts.append((f"{before}{key}", f"{value:,.6g}" if isinstance(value, float) else str(value)))
    return facts
