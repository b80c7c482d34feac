"""Checkpoints in transformers' format: a folder with ``config.json`` and safetensors, one file or many.

Their queries, keys and values, and their two halves of the MLP, are rows of one tensor each here.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zoo.llm.config import USE_FIELDS, LLMConfig
from zoo.llm.model import LLM
from zoo.llm.quantize import refuse_quantized
from zoo.weights import Placement, check_dtype, check_finite, fill, locate, open_tensors, refuse_other_config, replacing

# {theirs: ours} of tensors that are the same in both; {} is the layer's index.
_LAYER = {
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attn.q_norm.weight": "q_norm.weight",
    "self_attn.k_norm.weight": "k_norm.weight",
    "self_attn.o_proj.weight": "o_proj.weight",
    "post_attention_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.down_proj.weight": "down_proj.weight",
}
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}


def placements(config: LLMConfig) -> dict[str, Placement | None]:
    """Where each tensor of a transformers checkpoint goes."""
    places: dict[str, Placement | None] = {
        "model.embed_tokens.weight": Placement("embed_tokens.weight"),
        "model.norm.weight": Placement("head.norm.weight"),
        "lm_head.weight": (
            Placement("embed_tokens.weight", repeated=True)
            if config.tie_word_embeddings
            else Placement("lm_head.weight")
        ),
    }
    query_rows = config.num_attention_heads * config.head_dim
    key_rows = config.num_key_value_heads * config.head_dim
    inner = config.intermediate_size
    for index in range(config.num_hidden_layers):
        theirs, ours = f"model.layers.{index}.", f"layers.{index}."
        for their_name, our_name in _LAYER.items():
            if config.qk_norm or "_norm." not in their_name:
                places[theirs + their_name] = Placement(ours + our_name)
        for kind in ("weight", "bias") if config.qkv_bias else ("weight",):
            start = 0
            for name, rows in (("q", query_rows), ("k", key_rows), ("v", key_rows)):
                places[f"{theirs}self_attn.{name}_proj.{kind}"] = Placement(f"{ours}qkv_proj.{kind}", start, rows)
                start += rows
        places[theirs + "mlp.gate_proj.weight"] = Placement(ours + "gate_up_proj.weight", 0, inner)
        places[theirs + "mlp.up_proj.weight"] = Placement(ours + "gate_up_proj.weight", inner, inner)
        # Old checkpoints hold the frequencies, which follow from the config.
        places[theirs + "self_attn.rotary_emb.inv_freq"] = None
    return places


def upstream_tensors(model: LLM) -> Iterator[tuple[str, Tensor]]:
    """A model's tensors under transformers' names, as views; tied weights once."""
    ours = model.state_dict()
    for key, place in placements(model.config).items():
        if place is not None and not place.repeated:
            whole = ours[place.name]
            yield key, whole if place.rows is None else whole[place.start : place.start + place.rows]


def load(
    source: str | Path,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    strict: bool = False,
) -> LLM:
    """A model of any size from a folder or hub id in transformers' format, in eval mode.

    It is built without memory and filled shard by shard, tensor by tensor: the weights are never in memory twice.

    Args:
        source: A folder with ``config.json`` and safetensors, or a hub id ``"owner/name"``.
        device: Where to; torch's default device when left out.
        dtype: Of the parameters; as they are stored when left out.
        strict: Refuse weights that are NaN or infinite.

    Raises:
        FileNotFoundError: If there is no such folder, or no config or weights in it.
        ValueError: If the config has an option that the zoo does not support, a tensor is missing, left over or of
            another shape, or one is NaN or infinite and ``strict`` is True.

    Warns:
        WeightsWarning: If a tensor is NaN or infinite; the message names it.
    """
    from zoo.llm.upstream import read_config

    check_dtype(dtype)
    path = locate(source)
    if not (path / "config.json").exists():
        raise FileNotFoundError(f"{path} has no config.json; zoo.create(name, weights=...) takes weights alone")
    with torch.device("meta"):
        model = LLM(read_config(path))
    with open_tensors(path) as tensors:
        fill(
            model,
            tensors,
            placements(model.config),
            device=device or torch.get_default_device(),
            dtype=dtype,
            source=str(source),
        )
    check_finite(model, str(source), strict=strict)
    return model.eval()


def save(model: LLM, folder: str | Path, *, max_shard_size: int | str = "5GB") -> None:
    """Write a model in transformers' format, which ``AutoModelForCausalLM.from_pretrained(folder)`` loads.

    Args:
        model: A language model of the zoo.
        folder: Made if it is not there; its weights and config are replaced once the new ones are written.
        max_shard_size: Bytes of a file, or a number with KB, MB or GB. A larger tensor gets a file of its own.

    Raises:
        TypeError: If the model is not of this family.
        ValueError: If the size is not positive, no transformers class has the model's options, or the weights were
            rounded by ``quantize_int8``.
    """
    from safetensors.torch import save_file

    from zoo.llm.upstream import upstream_config

    if not isinstance(model, LLM):
        raise TypeError(f"{type(model).__name__} is not a language model of the zoo")
    refuse_quantized(model)
    limit = _bytes(max_shard_size)
    config = upstream_config(model.config)
    config.dtype = model.embed_tokens.weight.dtype
    shards: list[list[str]] = [[]]
    sizes: dict[str, int] = {}
    for key, tensor in upstream_tensors(model):
        if shards[-1] and sum(sizes[name] for name in shards[-1]) + tensor.nbytes > limit:
            shards.append([])
        shards[-1].append(key)
        sizes[key] = tensor.nbytes
    names = (
        ["model.safetensors"]
        if len(shards) == 1
        else [f"model-{index + 1:05d}-of-{len(shards):05d}.safetensors" for index in range(len(shards))]
    )
    views = dict(upstream_tensors(model))
    with replacing(Path(folder), "model*.safetensors*") as new:
        config.save_pretrained(new)
        for name, keys in zip(names, shards, strict=True):
            # Rows of one tensor share its memory, which the format refuses: a shard at a time is copied.
            save_file({key: views[key].detach().cpu().clone() for key in keys}, new / name, metadata={"format": "pt"})
        if len(shards) > 1:
            index = {
                "metadata": {"total_size": sum(sizes.values())},
                "weight_map": {key: name for name, keys in zip(names, shards, strict=True) for key in keys},
            }
            (new / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def check_folder(folder: Path, config: LLMConfig, overridden: Collection[str]) -> None:
    """Refuse a folder whose ``config.json`` describes another architecture.

    Raises:
        ValueError: If a field differs that the caller did not override; the message names it.
    """
    if not (folder / "config.json").exists():
        return
    from zoo.llm.upstream import read_config

    stored = read_config(folder)
    refuse_other_config(folder, stored, config, (*overridden, *USE_FIELDS), "llm")


def _bytes(size: Any) -> int:
    if isinstance(size, str):
        number, unit = size[:-2].strip(), size[-2:].upper()
        if unit not in _UNITS or not number.replace(".", "", 1).isdigit():
            raise ValueError(f"max_shard_size is {size!r}, expected bytes or a number with {', '.join(_UNITS)}")
        size = int(float(number) * _UNITS[unit])
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ValueError(f"max_shard_size is {size!r}, expected a positive number of bytes")
    return size
