"""A pytest plugin: of a check's cases that differ by dtype alone one is run, the dtypes in turn.

Triton's interpreter computes all dtypes by one code of NumPy: there a kernel is tested by shapes and options, and a
dtype by some of them. The first case of each check is run in all. On a GPU dtypes are different code, and nothing is
left out.
"""

from collections import defaultdict
from typing import Any

import pytest
import torch


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    cases: dict[str, dict[Any, list[pytest.Item]]] = defaultdict(lambda: defaultdict(list))
    for item in items:
        if isinstance(item, pytest.Function):
            cases[item.nodeid.partition("[")[0]][_but_dtypes(item)].append(item)
    left_out = {
        item.nodeid
        for of_check in cases.values()
        for turn, alike in enumerate(of_check.values())
        if turn
        for place, item in enumerate(alike)
        if place != turn % len(alike)
    }
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in left_out])
    items[:] = [item for item in items if item.nodeid not in left_out]


def _but_dtypes(item: pytest.Function) -> Any:
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    return tuple((name, repr(value)) for name, value in parameters.items() if not isinstance(value, torch.dtype))
