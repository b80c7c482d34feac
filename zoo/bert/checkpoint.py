"""Checkpoints in transformers' format: a folder with ``config.json`` and safetensors.

Their queries, keys and values are rows of one tensor here. Names differ by the head that a checkpoint was saved with,
and by its age; a checkpoint of one head may be loaded under another, which then starts from random weights.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zoo.bert.config import USE_FIELDS, BertConfig
from zoo.bert.heads import make_head
from zoo.bert.model import Bert
from zoo.modules import initialise
from zoo.weights import (
    Placement,
    WeightsWarning,
    check_dtype,
    check_finite,
    fill,
    locate,
    open_tensors,
    refuse_other_config,
    replacing,
)

# {theirs: ours} of modules that are the same in both; {} is the layer's index.
_EMBEDDINGS = {
    "embeddings.word_embeddings": "embeddings.word_embeddings",
    "embeddings.position_embeddings": "embeddings.position_embeddings",
    "embeddings.token_type_embeddings": "embeddings.token_type_embeddings",
}
_LAYER = {
    "attention.output.dense": "attention_output",
    "attention.output.LayerNorm": "attention_norm",
    "intermediate.dense": "intermediate",
    "output.dense": "output",
    "output.LayerNorm": "output_norm",
}
_HEADS = {
    ("bert", "masked-lm"): {
        "cls.predictions.transform.dense": "head.dense",
        "cls.predictions.transform.LayerNorm": "head.norm",
    },
    ("roberta", "masked-lm"): {"lm_head.dense": "head.dense", "lm_head.layer_norm": "head.norm"},
    ("bert", "sequence-classification"): {"classifier": "head.classifier"},
    ("roberta", "sequence-classification"): {
        "classifier.dense": "head.dense",
        "classifier.out_proj": "head.classifier",
    },
}
_SAME_HEADS = {
    "token-classification": {"classifier": "head.classifier"},
    "question-answering": {"qa_outputs": "head.outputs"},
}
# What other heads leave in a checkpoint, and buffers of old releases.
_OTHERS = ("cls.", "lm_head.", "classifier.", "qa_outputs.", "pooler.")
_OLD_BUFFERS = ("embeddings.position_ids", "embeddings.token_type_ids")


def prefix(config: BertConfig) -> str:
    """What transformers puts before the encoder's names."""
    return "" if config.head in ("none", "pooled") else config.kind + "."


def placements(config: BertConfig) -> dict[str, Placement]:
    """Where each tensor of a transformers checkpoint goes that was saved with this head."""
    places: dict[str, Placement] = {}
    base, width = prefix(config), config.hidden_size

    def module(theirs: str, ours: str) -> None:
        for kind in ("weight", "bias"):
            places[f"{theirs}.{kind}"] = Placement(f"{ours}.{kind}")

    for theirs, ours in _EMBEDDINGS.items():
        places[f"{base}{theirs}.weight"] = Placement(f"{ours}.weight")
    module(base + "embeddings.LayerNorm", "embeddings.norm")
    for index in range(config.num_hidden_layers):
        layer = f"{base}encoder.layer.{index}."
        for kind in ("weight", "bias"):
            for part, name in enumerate(("query", "key", "value")):
                places[f"{layer}attention.self.{name}.{kind}"] = Placement(
                    f"layers.{index}.qkv.{kind}", part * width, width
                )
        for theirs, ours in _LAYER.items():
            module(layer + theirs, f"layers.{index}.{ours}")
    if config.head == "pooled" or (config.kind, config.head) == ("bert", "sequence-classification"):
        module(base + "pooler.dense", "head.dense")
    for theirs, ours in (_HEADS.get((config.kind, config.head)) or _SAME_HEADS.get(config.head, {})).items():
        module(theirs, ours)
    if config.head == "masked-lm":
        theirs = "cls.predictions" if config.kind == "bert" else "lm_head"
        if config.tie_word_embeddings:
            places[f"{theirs}.bias"] = Placement("head.bias")
            places[f"{theirs}.decoder.weight"] = Placement("embeddings.word_embeddings.weight", repeated=True)
            places[f"{theirs}.decoder.bias"] = Placement("head.bias", repeated=True)
        else:
            # Untied, their product has a bias of its own, and the other one is not used.
            places[f"{theirs}.bias"] = Placement("head.unused_bias")
            places[f"{theirs}.decoder.weight"] = Placement("decoder.weight")
            places[f"{theirs}.decoder.bias"] = Placement("head.bias")
    return places


def upstream_tensors(model: Bert) -> Iterator[tuple[str, Tensor]]:
    """A model's tensors under transformers' names, as views; tied weights once."""
    ours = model.state_dict()
    for key, place in placements(model.config).items():
        if not place.repeated:
            whole = ours[place.name]
            yield key, whole if place.rows is None else whole[place.start : place.start + place.rows]


def fit(tensors: Mapping[str, Tensor], config: BertConfig, *, source: str) -> dict[str, Tensor]:
    """A checkpoint's tensors under the names that :func:`placements` knows.

    Tensors of other heads are left out. A head that is not in the checkpoint gets random weights, and a warning.
    """
    wanted, base = placements(config), prefix(config)
    fitted: dict[str, Tensor] = {}
    for key in tensors:
        name = key.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")
        bare = name.removeprefix(config.kind + ".")
        name = base + bare if bare.startswith(("embeddings.", "encoder.", "pooler.")) else name
        if name in wanted:
            fitted[name] = tensors[key]
        elif not bare.startswith(_OTHERS) and bare not in _OLD_BUFFERS:
            fitted[key] = tensors[key]  # unknown: fill() names it
    needed = {key: place.name for key, place in wanted.items() if not place.repeated}
    for of_pooler in (True, False):
        group = {
            key: ours
            for key, ours in needed.items()
            if ours.startswith(("head.", "decoder.")) and (".pooler." in f".{key}") == of_pooler
        }
        if group and not group.keys() & fitted.keys():
            like = next(iter(fitted.values()), torch.empty(0))
            drawn = _drawn_head(config)
            fitted |= {key: drawn[ours].to(like) for key, ours in group.items()}
            warnings.warn(
                f"{source} has no {'pooler' if of_pooler else config.head + ' head'}: it starts from random weights "
                "and needs training",
                WeightsWarning,
                stacklevel=3,
            )
    return fitted


def load(
    source: str | Path,
    *,
    head: str | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    strict: bool = False,
    **overrides: Any,
) -> Bert:
    """A model of any size from a folder or hub id in transformers' format, in eval mode.

    Args:
        source: A folder with ``config.json`` and safetensors, or a hub id ``"owner/name"``.
        head: Of ``BertConfig``; the one that the checkpoint was saved with when left out: ``none`` if it is an encoder
            alone, without a pooler.
        device: Where to; torch's default device when left out.
        dtype: Of the parameters; as they are stored when left out.
        strict: Refuse weights that are NaN or infinite.
        overrides: Further fields of the config to replace: ``num_labels``, ...

    Raises:
        FileNotFoundError: If there is no such folder, or no config or weights in it.
        ValueError: If the config has an option that the zoo does not support, a tensor is missing, left over or of
            another shape, or one is NaN or infinite and ``strict`` is True.

    Warns:
        WeightsWarning: If the checkpoint has no such head, which then starts from random weights, or a tensor is NaN
            or infinite.
    """
    from zoo.bert.upstream import read_config

    check_dtype(dtype)
    path = locate(source)
    if not (path / "config.json").exists():
        raise FileNotFoundError(f"{path} has no config.json; zoo.create(name, weights=...) takes weights alone")
    config = read_config(path, head)
    with open_tensors(path) as tensors:
        if head is None and config.head == "pooled" and not any("pooler." in key for key in tensors):
            # transformers' class is the same with and without a pooler.
            overrides = {"head": "none", **overrides}
        config = dataclasses.replace(config, **overrides)
        with torch.device("meta"):
            model = Bert(config)
        fitted = fit(tensors, config, source=str(source))
        where = device or torch.get_default_device()
        fill(model, fitted, placements(config), device=where, dtype=dtype, source=str(source))
    check_finite(model, str(source), strict=strict)
    return model.eval()


def save(model: Bert, folder: str | Path) -> None:
    """Write a model in transformers' format, which ``AutoModel...from_pretrained(folder)`` loads.

    Args:
        model: An encoder of the zoo.
        folder: Made if it is not there; its weights and config are replaced once the new ones are written.

    Raises:
        TypeError: If the model is not of this family.
    """
    from safetensors.torch import save_file

    from zoo.bert.upstream import upstream_config

    if not isinstance(model, Bert):
        raise TypeError(f"{type(model).__name__} is not an encoder of the zoo")
    config = upstream_config(model.config)
    config.dtype = model.embeddings.word_embeddings.weight.dtype
    # Rows of one tensor share its memory, which the format refuses.
    tensors = {key: tensor.detach().cpu().clone() for key, tensor in upstream_tensors(model)}
    with replacing(Path(folder), "model*.safetensors*") as new:
        config.save_pretrained(new)
        save_file(tensors, new / "model.safetensors", metadata={"format": "pt"})


def check_folder(folder: Path, config: BertConfig, overridden: Collection[str]) -> None:
    """Refuse a folder whose ``config.json`` describes another architecture.

    Raises:
        ValueError: If a field differs that the caller did not override; the message names it.
    """
    if not (folder / "config.json").exists():
        return
    from zoo.bert.upstream import read_config

    stored = read_config(folder, config.head)
    refuse_other_config(folder, stored, config, (*overridden, *USE_FIELDS), "bert")


def _drawn_head(config: BertConfig) -> dict[str, Tensor]:
    """A new head's tensors by our names, on the CPU."""
    with torch.device("cpu"):
        head = make_head(config)
        assert head is not None
        head.apply(initialise)
        drawn = {f"head.{name}": tensor.detach() for name, tensor in head.named_parameters()}
        if config.head == "masked-lm" and not config.tie_word_embeddings:
            drawn["decoder.weight"] = torch.empty(config.vocab_size, config.hidden_size).normal_(std=0.02)
    return drawn
