"""To and from diffusers' ``UNet2DConditionModel``. Only here is the library imported."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from diffusers import UNet2DConditionModel
from diffusers.models.attention_processor import AttnProcessor, AttnProcessor2_0
from torch import Tensor, nn

from zoo.unet.checkpoint import convert_config, placements, upstream_config, upstream_tensors
from zoo.unet.config import UNetConfig
from zoo.unet.model import UNet
from zoo.weights import fill

# All of them compute the same: how is up to us.
_PROCESSORS = (AttnProcessor, AttnProcessor2_0)
_FREE = ("s1", "s2", "b1", "b2")


def from_upstream(module: nn.Module) -> nn.Module:
    """The zoo's model with the weights of a diffusers UNet, copied; LoRA weights that are on it are merged into them.

    Raises:
        NotImplementedError: If it is another class.
        ValueError: If it uses an option that the zoo does not support, or was changed; the message names it.
    """
    config = config_of(module)
    with torch.device("meta"):
        model = UNet(config)
    tensors, trained = _merged(module)
    places = placements(config)
    device = next(iter(tensors.values())).device
    fill(model, tensors, places, device=device, dtype=None, source=type(module).__name__)
    ours, known = dict(model.named_parameters()), dict[str, bool]()
    for key, place in places.items():
        if known.setdefault(place.name, trained[key]) != trained[key]:
            raise ValueError(
                f"{key}.requires_grad is {trained[key]}, but what shares {place.name} with it differs; rows of one "
                "tensor are trained together"
            )
        ours[place.name].requires_grad_(trained[key])
    return model.train(module.training)


def to_upstream(model: nn.Module) -> nn.Module:
    """The diffusers model with a zoo model's weights, copied.

    Raises:
        TypeError: If the model is not of this family.
    """
    if not isinstance(model, UNet):
        raise TypeError(f"{type(model).__name__} is not a UNet of the zoo")
    module = _skeleton(model.config)
    state = {
        key: tensor.detach().clone(memory_format=torch.contiguous_format) for key, tensor in upstream_tensors(model)
    }
    module.load_state_dict(state, strict=True, assign=True)
    ours, places = dict(model.named_parameters()), placements(model.config)
    for key, parameter in module.named_parameters():
        parameter.requires_grad_(ours[places[key].name].requires_grad)
    result: nn.Module = module.train(model.training)
    return result


def convert_state_dict(state_dict: Mapping[str, Tensor], config: UNetConfig) -> dict[str, Tensor]:
    """Their tensors as ours: every key that the config needs, and no other.

    Raises:
        ValueError: If a tensor is missing, left over or of another shape.
    """
    with torch.device("meta"):
        model = UNet(config)
    device = next(iter(state_dict.values())).device if state_dict else "cpu"
    fill(model, state_dict, placements(config), device=device, dtype=None, source="the state dict")
    return model.state_dict()


def config_of(module: nn.Module) -> UNetConfig:
    """The configuration of a diffusers model.

    Raises:
        NotImplementedError: If it is no ``UNet2DConditionModel``.
        ValueError: If it has an option that the zoo does not support, or was changed; the message names it.
    """
    if not isinstance(module, UNet2DConditionModel):
        raise NotImplementedError(f"{type(module).__name__} is not a diffusers UNet2DConditionModel")
    if type(module) is not UNet2DConditionModel:
        raise ValueError(f"{type(module).__name__} is a subclass of UNet2DConditionModel, whose forward may differ")
    config = convert_config(dict(module.config))
    _check_unchanged(module, _skeleton(config))
    return config


def _skeleton(config: UNetConfig) -> Any:
    """Diffusers' model without memory for its weights."""
    with torch.device("meta"):
        return UNet2DConditionModel(**upstream_config(config))


def _check_unchanged(module: Any, expected: nn.Module) -> None:
    """Refuse a model that was changed after it was built: every submodule is what the configuration says."""
    if any(getattr(block, name, None) for block in module.up_blocks for name in _FREE):
        raise ValueError("FreeU is on, which is not supported; call disable_freeu() first")
    if getattr(module, "encoder_hid_proj", None) is not None:
        raise ValueError("encoder_hid_proj is set, as by an IP-Adapter, which is not supported; unload it first")
    theirs = {name: _base(child) for name, child in module.named_modules() if not _of_lora(name)}
    theirs = {name.replace(".base_layer", ""): child for name, child in theirs.items()}
    ours = dict(expected.named_modules())
    for name in {**ours, **theirs}:
        if name not in theirs or name not in ours:
            found = "missing" if name in ours else type(theirs[name]).__name__
            raise ValueError(f"{name} is {found}, and the configuration says otherwise; convert an unchanged model")
        found, wanted = theirs[name], ours[name]
        leaf = not list(wanted.children())
        # What a module without children does follows from its class and options, and its text holds both.
        if type(found) is not type(wanted) or (leaf and repr(found) != repr(wanted)):
            raise ValueError(f"{name} is {found!r}, expected {wanted!r}; convert an unchanged model")
        if found._forward_hooks or found._forward_pre_hooks:
            raise ValueError(f"{name} has a hook, as offloading sets one, which would be lost; remove it first")
        processor = getattr(found, "processor", None)
        if processor is not None and type(processor) not in _PROCESSORS:
            fused = "Fused" in type(processor).__name__
            remedy = "unfuse_qkv_projections()" if fused else "set_attn_processor(AttnProcessor2_0())"
            raise ValueError(f"{name} has a {type(processor).__name__}, which is not supported; call {remedy} first")


def _of_lora(name: str) -> bool:
    """Whether a module is an adapter's own."""
    return any(part.startswith("lora_") for part in name.split("."))


def _base(module: Any) -> Any:
    return module.get_base_layer() if _is_tuner(module) else module


def _is_tuner(module: nn.Module) -> bool:
    """Whether a layer is one that peft has put adapters on; peft is there if it is."""
    return any(cls.__module__.startswith("peft.") for cls in type(module).__mro__)


def _merged(module: nn.Module) -> tuple[dict[str, Tensor], dict[str, bool]]:
    """All tensors by the names that they have without adapters, with these merged, and which of them are trained."""
    tensors, trained = dict[str, Tensor](), dict[str, bool]()
    for name, parameter in module.named_parameters():
        if not _of_lora(name):
            plain = name.replace(".base_layer", "")
            tensors[plain], trained[plain] = parameter.detach(), parameter.requires_grad
    for name, child in module.named_modules():
        if _is_tuner(child) and not _of_lora(name):
            # On a copy of this layer alone: the model stays as it is, adapters apart. A layer that is merged computes
            # with what is merged and nothing else, unless its adapters are off.
            layer: Any = copy.deepcopy(child)
            if layer.disable_adapters and layer.merged:
                layer.unmerge()
            elif not layer.disable_adapters and not layer.merged:
                layer.merge(safe_merge=True)
            for kind, parameter in layer.get_base_layer().named_parameters():
                tensors[f"{name}.{kind}"] = parameter.detach()
    return tensors, trained
