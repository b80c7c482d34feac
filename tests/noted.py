"""Calls of a function are noted while it runs as before."""

from typing import Any

import pytest


def noted(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[tuple[Any, ...]]:
    """The positional arguments of each call of ``owner.name`` from now on, in order."""
    seen: list[tuple[Any, ...]] = []
    function = getattr(owner, name)

    def call(*given: Any, **options: Any) -> Any:
        seen.append(given)
        return function(*given, **options)

    monkeypatch.setattr(owner, name, call)
    return seen
