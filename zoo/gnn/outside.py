"""What must not be traced, and says so without importing Dynamo."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

_P = ParamSpec("_P")
_R = TypeVar("_R")


def outside_compile(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Keep Dynamo out of a function. ``torch.compiler.disable`` as a decorator would import Dynamo with the zoo."""

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if torch.compiler.is_compiling():
            return torch.compiler.disable(function)(*args, **kwargs)
        return function(*args, **kwargs)

    return call
