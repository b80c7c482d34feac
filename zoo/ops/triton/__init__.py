"""Triton kernels and their launches. A module is imported when it is first named: ``import zoo`` imports no Triton."""

import importlib
import pkgutil
from types import ModuleType

_MODULES = frozenset(module.name for module in pkgutil.iter_modules(__path__))


def __getattr__(name: str) -> ModuleType:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.{name}")
