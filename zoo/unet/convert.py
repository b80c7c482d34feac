"""Checkpoints in diffusers' format: a folder, or the ``unet`` folder of a pipeline, with config.json and safetensors.

Their queries, keys and values of self-attention are rows of one tensor here, and so are keys and values of all
cross-attentions, and all blocks' products with the timestep.
"""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zoo.unet.config import BlockShape, UNetConfig
from zoo.unet.model import UNet
from zoo.weights import Placement, check_dtype, check_finite, fill, locate, open_tensors, refuse_other_config, replacing

CLASS = "UNet2DConditionModel"
# {theirs: ours} of modules that are the same in both.
_RESNET = {"norm1": "norm1", "norm2": "norm2", "conv2": "conv2", "conv_shortcut": "shortcut"}
_TRANSFORMER = {"norm": "norm", "proj_in": "proj_in", "proj_out": "proj_out"}
_BLOCK = {
    "norm1": "norm1",
    "norm2": "norm2",
    "norm3": "norm3",
    "attn1.to_out.0": "self_out",
    "attn2.to_out.0": "text_out",
    "ff.net.0.proj": "mlp_in",
    "ff.net.2": "mlp_out",
}
_ENDS = {"conv_in": "conv_in", "conv_norm_out": "norm_out", "conv_out": "conv_out"}

# Options of theirs that are ours by the same name.
_SAME = tuple(field.name for field in dataclasses.fields(UNetConfig) if field.name != "num_attention_heads")
# What diffusers takes where a config.json is silent, if that differs from the zoo.
_THEIR_DEFAULTS: dict[str, Any] = {
    "in_channels": 4,
    "out_channels": 4,
    "block_out_channels": (320, 640, 1280, 1280),
    "down_block_types": ("CrossAttnDownBlock2D",) * 3 + ("DownBlock2D",),
    "up_block_types": ("UpBlock2D",) + ("CrossAttnUpBlock2D",) * 3,
    "layers_per_block": 2,
    "transformer_layers_per_block": 1,
    "attention_head_dim": 8,
    "cross_attention_dim": 1280,
}
# Options that are neither, with what is supported of each and why no more is.
_OTHERS: dict[str, tuple[tuple[Any, ...], str]] = {
    "mid_block_type": (("UNetMidBlock2DCrossAttn",), "the middle has a transformer"),
    "only_cross_attention": ((False,), "blocks have self-attention"),
    "mid_block_only_cross_attention": ((None, False), "blocks have self-attention"),
    "mid_block_scale_factor": ((1,), "residuals are added as they are"),
    "resnet_out_scale_factor": ((1.0,), "residuals are added as they are"),
    "act_fn": (("silu", "swish"), "the activation is SiLU"),
    "encoder_hid_dim": ((None,), "the condition is text of cross_attention_dim channels"),
    "encoder_hid_dim_type": ((None,), "the condition is text of cross_attention_dim channels"),
    "num_attention_heads": ((None,), "diffusers itself takes attention_head_dim for it"),
    "dual_cross_attention": ((False,), "there is one condition"),
    "class_embed_type": ((None,), "there is no condition by class"),
    "num_class_embeds": ((None,), "there is no condition by class"),
    "class_embeddings_concat": ((False,), "there is no condition by class"),
    "resnet_time_scale_shift": (("default",), "timesteps shift and do not scale"),
    "resnet_skip_time_act": ((False,), "the embedded timestep is activated in every block"),
    "time_embedding_type": (("positional",), "timesteps are embedded by sines and cosines"),
    "time_embedding_act_fn": ((None,), "the embedded timestep is activated in every block"),
    "timestep_post_act": ((None,), "the embedded timestep is activated in every block"),
    "attention_type": (("default",), "there is no gated attention"),
    "cross_attention_norm": ((None,), "the condition is not normalised"),
    "addition_embed_type_num_heads": ((64,), "added conditions have no attention"),
}
# Of a folder on the hub: weights once, whole or in shards.
_FILES = (
    "config.json",
    "diffusion_pytorch_model.safetensors",
    "diffusion_pytorch_model.safetensors.index.json",
    "diffusion_pytorch_model-*-of-*.safetensors",
)
# What older releases wrote, or a config.json holds beside the options.
_IGNORED = ("dual_cross_attention_dim", "upcast_softmax")


def convert_config(theirs: Mapping[str, Any]) -> UNetConfig:
    """Diffusers' configuration as the zoo's.

    Raises:
        ValueError: If an option has a value that the zoo does not support; the message names both.
    """
    for name, (supported, why) in _OTHERS.items():
        value = theirs.get(name, supported[0])
        if value not in supported:
            _refuse(name, value, why)
    known = {*_SAME, *_OTHERS, *_IGNORED, "attention_head_dim"}
    strange = [name for name in theirs if name not in known and not name.startswith("_")]
    if strange:
        _refuse(strange[0], theirs[strange[0]], "the zoo does not know this option")
    given = {**_THEIR_DEFAULTS, **theirs}
    width = given["cross_attention_dim"]
    if isinstance(width, (list, tuple)):
        if len(set(width)) != 1:
            _refuse("cross_attention_dim", width, "one text of one width goes to all levels")
        given["cross_attention_dim"] = width[0]
    if given.get("norm_num_groups", 32) is None:
        _refuse("norm_num_groups", None, "the last convolution has a norm before it")
    # Their attention_head_dim counts heads: a mistake of long ago that too many checkpoints rely on.
    heads = given["attention_head_dim"]
    return UNetConfig(num_attention_heads=heads, **{name: given[name] for name in _SAME if name in given})


def upstream_config(config: UNetConfig) -> dict[str, Any]:
    """The zoo's configuration as diffusers' options."""
    options = {name: getattr(config, name) for name in _SAME}
    options["attention_head_dim"] = config.num_attention_heads
    for name in ("layers_per_block", "transformer_layers_per_block", "attention_head_dim"):
        if len(set(options[name])) == 1 and not isinstance(options[name][0], tuple):
            # As most checkpoints have it.
            options[name] = options[name][0]
    return options


def placements(config: UNetConfig) -> dict[str, Placement]:
    """Where each tensor of a diffusers checkpoint goes."""
    return dict(_placed(config))


def _placed(config: UNetConfig) -> Iterator[tuple[str, Placement]]:
    added = ["add_embedding"] if config.addition_embed_type == "text_time" else []
    for name in ["time_embedding", *added]:
        for layer in ("linear_1", "linear_2"):
            yield from _same(f"{name}.{layer}", f"conditions.{name}.{layer}")
    if config.time_cond_proj_dim is not None:
        yield "time_embedding.cond_proj.weight", Placement("conditions.time_embedding.cond_proj.weight")
    for theirs, ours in _ENDS.items():
        yield from _same(theirs, ours)
    for number, level in enumerate(config.down()):
        if level.resample:
            yield from _same(f"down_blocks.{number}.downsamplers.0.conv", f"down.{number}.downsample")
    for number, level in enumerate(config.up()):
        if level.resample:
            yield from _same(f"up_blocks.{number}.upsamplers.0.conv", f"up.{number}.upsample")
    shifts = texts = 0
    for theirs, ours, index, shape in _blocks(config):
        yield from _placed_resnet(f"{theirs}.resnets.{index}", f"{ours}.resnets.{index}", shape, shifts)
        shifts += shape.outputs
        if shape.depth is not None:
            named = f"{theirs}.attentions.{index}", f"{ours}.transformers.{index}"
            yield from _placed_transformer(*named, shape, texts)
            texts += 2 * shape.outputs * shape.depth


def _placed_resnet(theirs: str, ours: str, shape: BlockShape, row: int) -> Iterator[tuple[str, Placement]]:
    """A resnet block's tensors; its shift is ``row`` and the following."""
    yield f"{theirs}.conv1.weight", Placement(f"{ours}.conv1.weight")
    for their_name, our_name in (
        ("conv1.bias", "conv_bias"),
        ("time_emb_proj.weight", "weight"),
        ("time_emb_proj.bias", "bias"),
    ):
        yield f"{theirs}.{their_name}", Placement(f"time_projections.{our_name}", row, shape.outputs)
    for their_name, our_name in _RESNET.items():
        if our_name != "shortcut" or shape.inputs + shape.skip != shape.outputs:
            yield from _same(f"{theirs}.{their_name}", f"{ours}.{our_name}")


def _placed_transformer(theirs: str, ours: str, shape: BlockShape, row: int) -> Iterator[tuple[str, Placement]]:
    """A transformer's tensors; its keys and values are ``row`` and the following."""
    width = shape.outputs
    for their_name, our_name in _TRANSFORMER.items():
        yield from _same(f"{theirs}.{their_name}", f"{ours}.{our_name}")
    for layer in range(shape.depth or 0):
        block, own = f"{theirs}.transformer_blocks.{layer}", f"{ours}.blocks.{layer}"
        for their_name, our_name in _BLOCK.items():
            yield from _same(f"{block}.{their_name}", f"{own}.{our_name}")
        for part, product in enumerate(("to_q", "to_k", "to_v")):
            yield f"{block}.attn1.{product}.weight", Placement(f"{own}.qkv.weight", part * width, width)
        yield f"{block}.attn2.to_q.weight", Placement(f"{own}.query.weight")
        for product in ("to_k", "to_v"):
            yield f"{block}.attn2.{product}.weight", Placement("text_projections.weight", row, width)
            row += width


def _same(theirs: str, ours: str) -> Iterator[tuple[str, Placement]]:
    """Weight and bias of a module that is the same in both."""
    for kind in ("weight", "bias"):
        yield f"{theirs}.{kind}", Placement(f"{ours}.{kind}")


def _blocks(config: UNetConfig) -> Iterator[tuple[str, str, int, BlockShape]]:
    """Their level, our level, the block's number in it and its shape, in the order in which blocks run."""
    levels = [(f"down_blocks.{number}", f"down.{number}", level) for number, level in enumerate(config.down())]
    levels.append(("mid_block", "middle", config.middle()))
    levels += [(f"up_blocks.{number}", f"up.{number}", level) for number, level in enumerate(config.up())]
    for theirs, ours, level in levels:
        for index, shape in enumerate(level.blocks):
            yield theirs, ours, index, shape


def upstream_tensors(model: UNet) -> Iterator[tuple[str, Tensor]]:
    """A model's tensors under diffusers' names, as views."""
    ours = model.state_dict()
    for key, place in placements(model.config).items():
        whole = ours[place.name]
        yield key, whole if place.rows is None else whole[place.start : place.start + place.rows]


def load(
    source: str | Path,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    strict: bool = False,
    **overrides: Any,
) -> UNet:
    """A model of any size from a folder or hub id in diffusers' format, in eval mode.

    Args:
        source: A folder with ``config.json`` and safetensors, a pipeline's folder with a ``unet`` folder in it, or
            the hub id ``"owner/name"`` of either.
        device: Where to; torch's default device when left out.
        dtype: Of the parameters; as they are stored when left out.
        strict: Refuse weights that are NaN or infinite.
        overrides: Fields of the config to replace.

    Raises:
        FileNotFoundError: If there is no such folder, or no config or weights in it.
        ValueError: If the config has an option that the zoo does not support, a tensor is missing, left over or of
            another shape, or one is NaN or infinite and ``strict`` is True.

    Warns:
        WeightsWarning: If a tensor is NaN or infinite; the message names it.
    """
    check_dtype(dtype)
    path = find_weights("", source) or locate(source)
    if not (path / "config.json").exists():
        raise FileNotFoundError(f"{path} has no config.json; zoo.create(name, weights=...) takes weights alone")
    config = dataclasses.replace(read_config(path), **overrides)
    with torch.device("meta"):
        model = UNet(config)
    with open_tensors(path) as tensors:
        where = device or torch.get_default_device()
        fill(model, tensors, placements(config), device=where, dtype=dtype, source=str(source))
    check_finite(model, str(source), strict=strict)
    return model.eval()


def save(model: UNet, folder: str | Path) -> None:
    """Write a model in diffusers' format, which ``UNet2DConditionModel.from_pretrained(folder)`` loads.

    Args:
        model: A UNet of the zoo.
        folder: Made if it is not there; its weights and config are replaced once the new ones are written.
            ``<pipeline>/unet`` replaces a pipeline's.

    Raises:
        TypeError: If the model is not of this family.
    """
    from safetensors.torch import save_file

    if not isinstance(model, UNet):
        raise TypeError(f"{type(model).__name__} is not a UNet of the zoo")
    options = {"_class_name": CLASS, **upstream_config(model.config)}
    # Rows of one tensor share its memory, which the format refuses, as it does tensors that are not contiguous.
    tensors = {
        key: tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        for key, tensor in upstream_tensors(model)
    }
    with replacing(Path(folder), "diffusion_pytorch_model*") as new:
        (new / "config.json").write_text(json.dumps(options, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        save_file(tensors, new / "diffusion_pytorch_model.safetensors", metadata={"format": "pt"})


def read_config(folder: Path) -> UNetConfig:
    """The configuration of a checkpoint folder; diffusers is not imported.

    Raises:
        ValueError: If it is of another class, or has an option that the zoo does not support.
    """
    theirs = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    found = theirs.get("_class_name", CLASS)
    if found != CLASS:
        raise ValueError(f"{folder}: config.json is of a {found}, expected a {CLASS}")
    return convert_config(theirs)


def check_folder(folder: Path, config: UNetConfig, overridden: Collection[str]) -> None:
    """Refuse a folder whose ``config.json`` describes another architecture.

    Raises:
        ValueError: If a field differs that the caller did not override; the message names it.
    """
    if not (folder / "config.json").exists():
        return
    stored = read_config(folder)
    refuse_other_config(folder, stored, config, (*overridden, "sample_size", "upcast_attention", "dropout"), "unet")


def find_weights(preset: str, weights: Any) -> Path | None:
    """The folder with a UNet's weights, where ``weights`` is a pipeline's folder or a hub id; else None."""
    path = Path(weights)
    if path.is_dir():
        return _unet_of(path)
    owned = len(path.parts) == 2 and not path.is_absolute() and path.parts[0] not in (".", "..", "~")
    if not owned or path.exists() or path.suffix in (".safetensors", ".pt", ".pth", ".bin", ".ckpt"):
        return None
    from huggingface_hub import snapshot_download

    # Of a pipeline its UNet alone: the single files that lie beside it are as large again.
    wanted = [f"{folder}{name}" for folder in ("unet/", "") for name in _FILES]
    return _unet_of(Path(snapshot_download(str(weights), allow_patterns=wanted)))


def _unet_of(folder: Path) -> Path:
    inner = folder / "unet"
    return inner if inner.is_dir() else folder


def _refuse(option: str, value: Any, why: str) -> None:
    raise ValueError(f"diffusers' {CLASS} with {option}={value!r} is not supported: {why}")


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
    from diffusers import UNet2DConditionModel

    if not isinstance(module, UNet2DConditionModel):
        raise NotImplementedError(f"{type(module).__name__} is not a diffusers UNet2DConditionModel")
    if type(module) is not UNet2DConditionModel:
        raise ValueError(f"{type(module).__name__} is a subclass of UNet2DConditionModel, whose forward may differ")
    config = convert_config(dict(module.config))
    _check_unchanged(module, _skeleton(config))
    return config


def _skeleton(config: UNetConfig) -> Any:
    """Diffusers' model without memory for its weights."""
    from diffusers import UNet2DConditionModel

    with torch.device("meta"):
        return UNet2DConditionModel(**upstream_config(config))


def _check_unchanged(module: Any, expected: nn.Module) -> None:
    """Refuse a model that was changed after it was built: every submodule is what the configuration says."""
    from diffusers.models.attention_processor import AttnProcessor, AttnProcessor2_0

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
        if processor is not None and type(processor) not in (AttnProcessor, AttnProcessor2_0):
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
