"""From and to diffusers' ``UNet2DConditionModel``, and checkpoints in its format. Diffusers is imported on first use.

The zoo concatenates weights into one tensor for: queries, keys and values of a self-attention; keys and values of all
cross-attentions; all blocks' products with the timestep.
"""

import copy
import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zoo.files import locate, upstream
from zoo.unet.blocks import SD, UNetConfig
from zoo.unet.model import UNet
from zoo.weights import Placement, Table, WeightMap, check_class, refuse_changed, unsupported

CLASS = "UNet2DConditionModel"
_WHOSE = f"diffusers' {CLASS}"
# {diffusers' name: the zoo's name} of modules that are equal in both.
_ENDS = {
    "conv_in": "conv_in",
    "conv_norm_out": "norm_out",
    "conv_out": "conv_out",
    "time_embedding": "conditions.time_embedding",
    "add_embedding": "conditions.add_embedding",
    "down_blocks.{}.downsamplers.0.conv": "down.{}.downsample",
    "up_blocks.{}.upsamplers.0.conv": "up.{}.upsample",
}
_RESNET = {
    "norm1": "norm1", "conv1.weight": "conv1.weight", "norm2": "norm2", "conv2": "conv2", "conv_shortcut": "shortcut",
}  # fmt: skip
_SHIFTS = {"conv1.bias": "conv_bias", "time_emb_proj.weight": "weight", "time_emb_proj.bias": "bias"}
_BLOCK = {
    "norm1": "norm1", "norm2": "norm2", "norm3": "norm3", "attn1.to_out.0": "self_out", "attn2.to_q": "query",
    "attn2.to_out.0": "text_out", "ff.net.0.proj": "mlp_in", "ff.net.2": "mlp_out",
}  # fmt: skip

# Options with the same name in diffusers and the zoo.
_SAME = tuple(field.name for field in dataclasses.fields(UNetConfig) if field.name != "num_attention_heads")
# Diffusers' defaults for options that a config.json omits and that have no default in the zoo.
_THEIR_DEFAULTS: dict[str, Any] = {**SD, "attention_head_dim": 8, "cross_attention_dim": 1280}
# Diffusers' options that the zoo lacks, and their values that agree with the zoo.
_FIXED: dict[str, tuple[Any, ...]] = {
    "mid_block_type": ("UNetMidBlock2DCrossAttn",), "only_cross_attention": (False,),
    "mid_block_only_cross_attention": (None, False), "mid_block_scale_factor": (1,), "resnet_out_scale_factor": (1.0,),
    "act_fn": ("silu", "swish"), "encoder_hid_dim": (None,), "encoder_hid_dim_type": (None,),
    "num_attention_heads": (None,), "dual_cross_attention": (False,), "class_embed_type": (None,),
    "num_class_embeds": (None,), "class_embeddings_concat": (False,), "resnet_time_scale_shift": ("default",),
    "resnet_skip_time_act": (False,), "time_embedding_type": ("positional",), "time_embedding_act_fn": (None,),
    "timestep_post_act": (None,), "attention_type": ("default",), "cross_attention_norm": (None,),
    "addition_embed_type_num_heads": (64,), "reverse_transformer_layers_per_block": (None,),
    "time_embedding_dim": (None,), "flip_sin_to_cos": (True,), "freq_shift": (0,), "center_input_sample": (False,),
    "conv_in_kernel": (3,), "conv_out_kernel": (3,), "downsample_padding": (1,),
}  # fmt: skip
_STEM = "diffusion_pytorch_model"
# Files to fetch from the hub: weights once, whole or in shards.
_FILES = ("config.json", f"{_STEM}.safetensors", f"{_STEM}.safetensors.index.json", f"{_STEM}-*-of-*.safetensors")
# Options of older releases.
_IGNORED = ("dual_cross_attention_dim", "upcast_softmax")


def convert_config(theirs: Mapping[str, Any]) -> UNetConfig:
    """Diffusers' configuration as the zoo's; ValueError if it has an option that the zoo does not support."""
    for name, value in theirs.items():
        if name in _FIXED and value not in _FIXED[name]:
            unsupported(_WHOSE, name, value, f"expected {' or '.join(map(repr, _FIXED[name]))}")
        if name not in {*_SAME, *_FIXED, *_IGNORED, "attention_head_dim"} and not name.startswith("_"):
            unsupported(_WHOSE, name, value, "the zoo does not know this option")
    given = {**_THEIR_DEFAULTS, **theirs}
    # Diffusers' attention_head_dim is the number of heads: an old mistake that checkpoints rely on.
    heads = given["attention_head_dim"]
    return UNetConfig(num_attention_heads=heads, **{name: given[name] for name in _SAME if name in given})


def upstream_config(config: UNetConfig) -> dict[str, Any]:
    """The zoo's configuration as diffusers' options."""
    return {"attention_head_dim": config.num_attention_heads, **{name: getattr(config, name) for name in _SAME}}


def table(config: UNetConfig) -> Table:
    """{diffusers' name: the zoo's name}; {} stands for an index."""
    names: dict[str, str | Placement] = {**_ENDS}
    counts = range(len(config.block_out_channels))
    levels = [
        *((f"down_blocks.{number}", f"down.{number}") for number in counts), ("mid_block", "middle"),
        *((f"up_blocks.{number}", f"up.{number}") for number in counts),
    ]  # fmt: skip
    shift = text = 0  # the next free row of the shifts, and of the text's keys and values
    for (their_level, our_level), level in zip(levels, config.levels(), strict=True):
        for index, shape in enumerate(level.blocks):
            theirs, ours, width = f"{their_level}.resnets.{index}", f"{our_level}.resnets.{index}", shape.outputs
            names |= {f"{theirs}.{their}": f"{ours}.{our}" for their, our in _RESNET.items()}
            for their, our in _SHIFTS.items():
                names[f"{theirs}.{their}"] = Placement(f"time_projections.{our}", shift, width)
            shift += width
            theirs, ours = f"{their_level}.attentions.{index}", f"{our_level}.transformers.{index}"
            names |= {f"{theirs}.{name}": f"{ours}.{name}" for name in ("norm", "proj_in", "proj_out")}
            for layer in range(shape.depth or 0):
                block, own = f"{theirs}.transformer_blocks.{layer}", f"{ours}.blocks.{layer}"
                names |= {f"{block}.{their}": f"{own}.{our}" for their, our in _BLOCK.items()}
                for part, product in enumerate(("to_q", "to_k", "to_v")):
                    names[f"{block}.attn1.{product}"] = Placement(f"{own}.qkv", part * width, width)
                for product in ("to_k", "to_v"):
                    names[f"{block}.attn2.{product}"] = Placement("text_projections", text, width)
                    text += width
    return names


def read_config(folder: Path, **overrides: Any) -> UNetConfig:
    """The configuration of a checkpoint folder, with some fields replaced; diffusers is not imported."""
    theirs = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    found = theirs.get("_class_name", CLASS)
    if found != CLASS:
        raise ValueError(f"{folder}: config.json is of a {found}, expected a {CLASS}")
    return dataclasses.replace(convert_config(theirs), **overrides)


def write_config(config: UNetConfig, dtype: torch.dtype, folder: Path) -> None:
    """Write diffusers' ``config.json``, which holds no dtype."""
    options = {"_class_name": CLASS, **upstream_config(config)}
    (folder / "config.json").write_text(json.dumps(options, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def find_weights(preset: str, weights: Any) -> Path:
    """The file or folder of weights; for a pipeline's folder or hub id the weights of its UNet."""
    # A pipeline's repository also has other single files, as large as its UNet.
    path = locate(weights, [f"{folder}{name}" for folder in ("unet/", "") for name in _FILES])
    inner = path / "unet"
    return inner if inner.is_dir() else path


def config_of(module: Any) -> UNetConfig:
    """The configuration of a diffusers model. NotImplementedError if it is not a UNet, ValueError if it was changed."""
    check_class(module, "diffusers", CLASS)
    config = convert_config(dict(module.config))
    _check_unchanged(module, skeleton(config))
    return config


def skeleton(config: UNetConfig) -> Any:
    """Diffusers' model on the meta device."""
    theirs = upstream("diffusers").UNet2DConditionModel
    with torch.device("meta"):
        return theirs(**upstream_config(config))


# Names of what adapters add, and of projections that diffusers fused and keeps after unfuse_qkv_projections().
_ADDED = re.compile(r"\.lora_|\.to_q?kv\b").search


def _check_unchanged(module: Any, expected: nn.Module) -> None:
    from diffusers.models.attention_processor import AttnProcessor, AttnProcessor2_0

    if any(getattr(block, name, None) for block in module.up_blocks for name in ("s1", "s2", "b1", "b2")):
        raise ValueError("FreeU is on, which is not supported; call disable_freeu() first")
    for name, processor in module.attn_processors.items():
        if type(processor) not in (AttnProcessor, AttnProcessor2_0):
            kind, remedy = type(processor).__name__, "pipe.unload_ip_adapter()"
            if "IPAdapter" not in kind:
                remedy = "unfuse_qkv_projections() or set_attn_processor(AttnProcessor2_0())"
            raise ValueError(f"{name} is a {kind}, which is not supported; call {remedy} first")
    theirs = {
        name.replace(".base_layer", ""): child.get_base_layer() if hasattr(child, "get_base_layer") else child
        for name, child in module.named_modules()
        if not _ADDED(name)
    }
    # The attention processors, checked above, decide whether fused projections are used.
    refuse_changed(theirs, expected, _WHOSE, "sample_size", "fused_projections")


def _merged_tensors(module: nn.Module) -> dict[str, Tensor]:
    """All tensors by their names without adapters, with active adapters merged."""
    own = ((name, tensor) for name, tensor in module.named_parameters() if not _ADDED(name))
    tensors: dict[str, Tensor] = {name.replace(".base_layer", ""): tensor for name, tensor in own}
    for name, child in module.named_modules():
        if hasattr(child, "get_base_layer"):  # peft has put adapters on this layer
            # A merged layer applies only its merged adapters, unless adapters are disabled.
            layer: Any = copy.deepcopy(child)
            if layer.disable_adapters and layer.merged:
                layer.unmerge()
            elif not layer.disable_adapters and not layer.merged:
                layer.merge(safe_merge=True)
            for kind, tensor in layer.get_base_layer().named_parameters():
                key = f"{name}.{kind}"
                tensors[key] = tensor.detach().requires_grad_(tensors[key].requires_grad)
    return tensors


WEIGHTS = WeightMap(
    name="unet", noun="a UNet", classes=(UNet,), table=table, config_of=config_of, skeleton=skeleton,
    finish=lambda module: module.to(memory_format=torch.contiguous_format),  # the zoo's weights are in channels_last
    tensors_of=_merged_tensors, read_config=read_config, write_config=write_config, stem=_STEM, locate=find_weights,
    use_fields=("sample_size", "upcast_attention", "dropout"),
)  # fmt: skip
load = WEIGHTS.load
"""A model from a folder or hub id in diffusers' format: :meth:`zoo.weights.WeightMap.load`."""
save = WEIGHTS.save
"""Write a folder that diffusers loads: :meth:`zoo.weights.WeightMap.save`."""
