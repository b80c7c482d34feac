"""Families and their models by name: the one place that knows what the zoo holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True, kw_only=True)
class Family:
    """What the zoo needs to know about a family to build, convert, test and benchmark its models.

    Args:
        name: The family's name, also its folder's: ``"gnn"``.
        presets: Preset name to frozen config dataclass.
        build: Config to a randomly initialised model on the current default device and dtype. Every model keeps
            its config as ``model.config`` and its regions as ``type(model).regions``.
        model_types: Exact classes that ``build`` returns.
        example_inputs: ``(model, **sizes)`` to keyword arguments for ``model(**inputs)``, on the model's device.
        upstream_module: Dotted name of the family's ``upstream.py``, imported only when asked for. It offers
            ``from_upstream(module)``, ``to_upstream(model)`` and ``convert_state_dict(state_dict, config)``.
        upstream_packages: Top-level packages whose modules ``from_upstream`` takes, e.g. ``("torch_geometric",)``.
    """

    name: str
    presets: Mapping[str, Any]
    build: Callable[[Any], nn.Module]
    model_types: tuple[type[nn.Module], ...]
    example_inputs: Callable[..., dict[str, Any]]
    upstream_module: str
    upstream_packages: tuple[str, ...]


_FAMILIES: dict[str, Family] = {}


def register(family: Family) -> Family:
    """Add a family; a preset name that another family has already taken is an error."""
    for other in _FAMILIES.values():
        if other.name != family.name and (taken := set(other.presets) & set(family.presets)):
            raise ValueError(f"family {family.name!r}: preset names {sorted(taken)} already belong to {other.name!r}")
    _FAMILIES[family.name] = family
    return family
