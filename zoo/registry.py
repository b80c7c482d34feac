"""The families of the zoo, and their models by name."""

import dataclasses
import difflib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zoo.weights import WeightMap, check_dtype, check_finite


@dataclass(frozen=True, kw_only=True)
class Family:
    """A family's models: how to build, convert, test and benchmark them.

    Every model keeps its config as ``model.config`` and its regions as ``type(model).regions``.
    """

    presets: Mapping[str, Any]  # name to frozen config dataclass
    example_inputs: Callable[..., dict[str, Any]]  # (model, **sizes) to keyword arguments for ``model(**inputs)``
    upstream_packages: tuple[str, ...]  # top-level packages whose modules the family converts: ("torch_geometric",)
    weights: WeightMap[Any]  # the name and model classes, and their conversion from and to the upstream library

    @property
    def name(self) -> str:
        """The family's name, also its folder's."""
        return self.weights.name


_FAMILIES: dict[str, Family] = {}


def register(family: Family) -> None:
    """Add a family. A preset name that another family has already taken is a ValueError."""
    for other in _FAMILIES.values():
        if other.name != family.name and (taken := set(other.presets) & set(family.presets)):
            raise ValueError(f"family {family.name!r}: preset names {sorted(taken)} already belong to {other.name!r}")
    _FAMILIES[family.name] = family


def families() -> tuple[Family, ...]:
    """All registered families, in order of registration."""
    return tuple(_FAMILIES.values())


def family_of(model: nn.Module) -> Family:
    """The family a zoo model belongs to; TypeError for a module that is not the zoo's."""
    for family in _FAMILIES.values():
        if type(model) in family.weights.classes:
            return family
    name = f"{type(model).__module__}.{type(model).__name__}"
    raise TypeError(f"{name} is not a model of the zoo; zoo.from_upstream(module) converts an upstream library's")


def list_models(family: str | None = None) -> list[str]:
    """Preset names, of one family or of all; ValueError if there is no such family."""
    if family is None:
        return [name for each in _FAMILIES.values() for name in each.presets]
    if family not in _FAMILIES:
        raise ValueError(f"no family {family!r}{did_you_mean(family, _FAMILIES)}; there are {', '.join(_FAMILIES)}")
    return list(_FAMILIES[family].presets)


def create(
    name: str, *, weights: Any = None, device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    **overrides: Any,
) -> nn.Module:  # fmt: skip
    """Build a model by its preset's name, in eval mode, nothing compiled.

    Args:
        name: One of ``list_models()``.
        weights: None for random weights, else a local file or folder (safetensors, or a ``.pt``/``.pth`` holding
            tensors only), a hub id, or the upstream library's own name (torchvision: ``"IMAGENET1K_V2"``). Keys may be
            the zoo's or the upstream library's.
        device: Where to build; torch's default device when left out.
        dtype: Floating-point dtype of the parameters; torch's default dtype when left out.
        overrides: Fields of the preset's config to replace.

    Raises:
        ValueError: If the name or an override does not exist, a folder describes another architecture, or a tensor of
            ``weights`` is missing, left over or of another shape.
        TypeError: If the name, an override or ``weights`` is of another kind.
        FileNotFoundError: If ``weights`` looks like a path and is not there.

    Warns:
        WeightsWarning: If a tensor of ``weights`` is NaN or infinite; the message names it.
    """
    if not isinstance(name, str):
        raise TypeError(f"name is a {type(name).__name__}, expected a name of zoo.list_models()")
    family = next((each for each in _FAMILIES.values() if name in each.presets), None)
    if family is None:
        known = list_models()
        hint = did_you_mean(name, known)
        raise ValueError(f"no model {name!r}{hint}; zoo.list_models() or `zoo list` names all {len(known)}")
    config = family.presets[name]
    fields = [field.name for field in dataclasses.fields(config) if field.init]
    for key, value in overrides.items():
        if key not in fields:
            raise ValueError(f"{name} has no option {key!r}{did_you_mean(key, fields)}; it has {', '.join(fields)}")
        if isinstance(value, str) and isinstance(number := getattr(config, key), int | float):
            raise TypeError(f"{key} is {value!r}, expected a value like {number!r}")
    config = dataclasses.replace(config, **overrides)
    check_dtype(dtype)
    # Tensors that inference mode makes could not be trained; a model outlives the mode that it was built in.
    with torch.inference_mode(False):
        default = torch.get_default_dtype()
        if weights is None:
            torch.set_default_dtype(dtype or default)
            try:
                with torch.device(torch.get_default_device() if device is None else device):
                    return family.weights.new(config).eval()
            finally:
                torch.set_default_dtype(default)
        path = family.weights.locate(name, weights)
        config = family.weights.config_for(path, config, overrides)
        return family.weights.read(path, config, str(weights), device=device, dtype=dtype or default)


def from_upstream(module: nn.Module) -> nn.Module:
    """The zoo's model with the weights, configuration and mode of an upstream library's: same outputs.

    Args:
        module: A model of torchvision, transformers, torch-geometric or diffusers.

    Raises:
        TypeError: If no family takes this class.
        ValueError: If the module uses an option that the zoo does not support, or the conversion would lose something:
            hooks (accelerate's and diffusers' too), tied weights, gradient checkpointing, parts in another mode.

    Warns:
        WeightsWarning: If a tensor is NaN or infinite; the message names it.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"module is of type {type(module).__name__}, expected a model, such as the unet of a pipeline")
    if hasattr(module, "_orig_mod"):
        raise TypeError("module is a wrapper of torch.compile: pass the model that it wraps, its _orig_mod")
    if hasattr(module, "merge_and_unload"):
        raise TypeError(f"module is a {type(module).__name__} of peft: convert module.merge_and_unload()")
    name, reasons = type(module).__name__, []
    packages = {cls.__module__.partition(".")[0] for cls in type(module).__mro__}
    for family in _FAMILIES.values():
        if packages.intersection(family.upstream_packages):
            try:
                model: nn.Module = family.weights.from_upstream(module)
            except NotImplementedError as error:
                reasons.append(str(error))
                continue
            check_finite(model, name)
            return model
    if not reasons:
        libraries = sorted({package for family in _FAMILIES.values() for package in family.upstream_packages})
        reasons = [f"{type(module).__module__}.{name} is no model of {', '.join(libraries)}"]
    raise TypeError(f"{'; '.join(reasons)}. zoo.compile_regions(model) compiles the blocks of any model as it is")


def to_upstream(model: nn.Module) -> nn.Module:
    """The upstream library's model with a zoo model's weights, configuration and mode; TypeError for other models."""
    return family_of(model).weights.to_upstream(model)


def example_inputs(model: nn.Module, **sizes: Any) -> dict[str, Any]:
    """Random but valid keyword arguments for ``model(**inputs)``, on the model's device and in its dtype.

    ``sizes`` are what the family lets you choose: ``num_nodes``, ``batch``, ... and ``seed``. TypeError if the model is
    not the zoo's or a size is no integer or not one of its family's, ValueError if one is out of range.
    """
    family = family_of(model)
    parameters = inspect.signature(family.example_inputs).parameters.values()
    known = [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
    for name, size in sizes.items():
        if name not in known:
            near = did_you_mean(name, known)
            raise TypeError(f"inputs of {family.name} have no size {name!r}{near}; they have {', '.join(known)}")
        if size is not None and (not isinstance(size, int) or isinstance(size, bool)):
            raise TypeError(f"{name} is {size!r}, expected an integer")
    return family.example_inputs(model, **sizes)


def did_you_mean(wrong: str, known: Any) -> str:
    """A question that names the closest known name; empty if none is close."""
    close = difflib.get_close_matches(str(wrong), list(known), n=1)
    return f", did you mean {close[0]!r}?" if close else ""
