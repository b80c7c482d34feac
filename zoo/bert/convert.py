"""To and from transformers' BERT and RoBERTa, the encoder alone or with a head.

The zoo concatenates the weights of queries, keys and values. A checkpoint's names depend on its head and its age. A
model with another head than the checkpoint's gets random weights for the head. transformers is imported on first use.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zoo.bert.layer import ACTIVATIONS, BertConfig, make_head
from zoo.bert.model import Bert
from zoo.files import read_tensors, upstream
from zoo.validate import warn
from zoo.weights import Placement, Table, WeightMap, WeightsWarning, check_class, initialise, unsupported

_KINDS = {"bert": "Bert", "roberta": "Roberta"}
_HEADS = {
    "none": "Model",
    "pooled": "Model",
    "masked-lm": "ForMaskedLM",
    "sequence-classification": "ForSequenceClassification",
    "token-classification": "ForTokenClassification",
    "question-answering": "ForQuestionAnswering",
}
_CLASSES = {f"{name}{suffix}": head for name in _KINDS.values() for head, suffix in _HEADS.items()}
# {transformers' name: the zoo's name} of the heads.
_HEAD_TABLES: dict[str, dict[str, str]] = {
    "bert masked-lm": {
        "cls.predictions.transform.dense": "head.dense", "cls.predictions.transform.LayerNorm": "head.norm",
    },
    "roberta masked-lm": {"lm_head.dense": "head.dense", "lm_head.layer_norm": "head.norm"},
    "bert sequence-classification": {"bert.pooler.dense": "head.dense", "classifier": "head.classifier"},
    "roberta sequence-classification": {"classifier.dense": "head.dense", "classifier.out_proj": "head.classifier"},
    "pooled": {"pooler.dense": "head.dense"},
    "token-classification": {"classifier": "head.classifier"},
    "question-answering": {"qa_outputs": "head.outputs"},
}  # fmt: skip
# Prefixes of tensors of other heads in a checkpoint, and of buffers of old releases.
_OTHERS = ("cls.", "lm_head.", "classifier.", "qa_outputs.", "pooler.")
_OLD_BUFFERS = ("embeddings.position_ids", "embeddings.token_type_ids")
# Fields with the same name in transformers and the zoo.
_SHARED = tuple(field.name for field in dataclasses.fields(BertConfig) if field.name not in ("kind", "head"))


def table(config: BertConfig) -> Table:
    """{transformers' name: the zoo's name} of a checkpoint that was saved with this head."""
    base, width = _base(config), config.hidden_size
    layer = f"{base}encoder.layer.{{}}"
    names: dict[str, str | Placement] = {
        f"{base}embeddings.word_embeddings": "embeddings.word_embeddings",
        f"{base}embeddings.position_embeddings": "embeddings.position_embeddings",
        f"{base}embeddings.token_type_embeddings": "embeddings.token_type_embeddings",
        f"{base}embeddings.LayerNorm": "embeddings.norm",
        f"{layer}.attention.self.query": Placement("layers.{}.qkv", 0, width),
        f"{layer}.attention.self.key": Placement("layers.{}.qkv", width, width),
        f"{layer}.attention.self.value": Placement("layers.{}.qkv", 2 * width, width),
        f"{layer}.attention.output.dense": "layers.{}.attention_output",
        f"{layer}.attention.output.LayerNorm": "layers.{}.attention_norm",
        f"{layer}.intermediate.dense": "layers.{}.intermediate",
        f"{layer}.output.dense": "layers.{}.output",
        f"{layer}.output.LayerNorm": "layers.{}.output_norm",
    }
    names |= _HEAD_TABLES.get(f"{config.kind} {config.head}") or _HEAD_TABLES.get(config.head, {})
    if config.head == "masked-lm":
        theirs = "cls.predictions" if config.kind == "bert" else "lm_head"
        names[f"{theirs}.bias"] = "head.bias"
        names[f"{theirs}.decoder.weight"] = Placement("embeddings.word_embeddings.weight", repeated=True)
        names[f"{theirs}.decoder.bias"] = Placement("head.bias", repeated=True)
    return names


def adapt(tensors: Mapping[str, Tensor], config: BertConfig, source: str) -> dict[str, Tensor]:
    """A checkpoint's tensors under the names of :func:`table`, without those of other heads.

    A head that is missing in the checkpoint gets random weights, with a warning.
    """
    places, base = WEIGHTS.placements(config), _base(config)
    fitted: dict[str, Tensor] = {}
    for key in tensors:
        name = key.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")
        bare = name.removeprefix(config.kind + ".")
        name = base + bare if bare.startswith(("embeddings.", "encoder.", "pooler.")) else name
        if name in places:
            fitted[name] = tensors[key]
        elif not bare.startswith(_OTHERS) and bare not in _OLD_BUFFERS:
            fitted[key] = tensors[key]  # unknown: fill() reports it
    of_head = [key for key, place in places.items() if place.name.startswith("head.")]
    for what, is_pooler in (("pooler", True), (f"{config.head} head", False)):
        group = [key for key in of_head if ("pooler." in key) == is_pooler and not places[key].repeated]
        if group and not fitted.keys() & group:
            with torch.device("cpu"):
                head: Any = make_head(config)
            drawn = dict(head.apply(initialise).requires_grad_(False).named_parameters())
            like = next(iter(fitted.values()), torch.empty(0))
            fitted |= {key: drawn[places[key].name.removeprefix("head.")].to(like) for key in group}
            warn(f"{source} has no {what}: it starts from random weights and needs training", WeightsWarning)
    return fitted


def config_of(module: Any) -> BertConfig:
    """The config of a transformers model; NotImplementedError for other classes."""
    check_class(module, "transformers", *_CLASSES)
    head = _CLASSES[type(module).__name__]
    return convert_config(module.config, "none" if head == "pooled" and module.pooler is None else head)


def skeleton(config: BertConfig) -> Any:
    """Transformers' model on the meta device."""
    options = {"add_pooling_layer": config.head == "pooled"} if config.head in ("none", "pooled") else {}
    theirs = upstream_config(config)
    with torch.device("meta"):
        return getattr(upstream("transformers"), theirs.architectures[0])(theirs, **options)


def reset_buffers(module: Any) -> None:
    """Compute the non-persistent buffers of a model that was built on the meta device."""
    embeddings = module.base_model.embeddings
    rows, device = embeddings.position_embeddings.num_embeddings, embeddings.word_embeddings.weight.device
    embeddings.position_ids = torch.arange(rows, device=device).expand((1, -1))
    embeddings.token_type_ids = torch.zeros_like(embeddings.position_ids)


def read_config(folder: Path, *, head: str | None = None, **overrides: Any) -> BertConfig:
    """The config of a checkpoint folder's ``config.json``, with some fields replaced.

    ``head`` defaults to the checkpoint's. For heads that the zoo lacks it is ``pooled``, or ``none`` without a pooler.
    """
    theirs = upstream("transformers").AutoConfig.from_pretrained(folder, local_files_only=True)
    # A pretraining model has two heads. The zoo keeps the head of the masked language model.
    named = (getattr(theirs, "architectures", None) or [""])[0].replace("ForPreTraining", "ForMaskedLM")
    config = convert_config(theirs, head or _CLASSES.get(named, "pooled"))
    if head is None and config.head == "pooled" and not any("pooler." in key for key in read_tensors(folder)):
        overrides = {"head": "none", **overrides}
    return dataclasses.replace(config, **overrides)


def convert_config(theirs: Any, head: str) -> BertConfig:
    """A transformers config as the zoo's; ValueError if it has an option that the zoo does not support."""
    kind = theirs.model_type
    if kind not in _KINDS:
        raise ValueError(f"model_type={kind!r} is not supported; the zoo has {', '.join(_KINDS)}")
    for option, supported, why in (
        ("is_decoder", (False,), "the zoo's is an encoder: all tokens see each other"),
        ("add_cross_attention", (False,), "there is no decoder"),
        ("position_embedding_type", ("absolute", None), "positions are learned, one vector each"),
        ("quantization_config", (None,), "load the weights that were quantised instead"),
        ("hidden_act", tuple(ACTIVATIONS), f"there are {', '.join(ACTIVATIONS)}"),
    ):
        if (value := getattr(theirs, option, supported[0])) not in supported:
            unsupported(f"transformers' {kind}", option, value, why)
    if head == "masked-lm" and not theirs.tie_word_embeddings:
        unsupported(f"transformers' {kind}", "tie_word_embeddings", False, "the head shares the word embeddings")
    shared: dict[str, Any] = {name: getattr(theirs, name, None) for name in _SHARED}
    if head in ("none", "pooled", "masked-lm"):
        # These heads ignore a classifier's fields. Its values would make configs of equal models differ.
        shared |= {"num_labels": 2, "problem_type": None, "classifier_dropout": None}
    return BertConfig(**shared, kind=kind, head=head)


def upstream_config(config: BertConfig) -> Any:
    """The zoo's config as transformers'."""
    architecture = _KINDS[config.kind] + _HEADS[config.head]
    options = {name: getattr(config, name) for name in _SHARED}
    return getattr(upstream("transformers"), architecture).config_class(**options, architectures=[architecture])


def write_config(config: BertConfig, dtype: torch.dtype, folder: Path) -> None:
    """Write transformers' ``config.json``."""
    made = upstream_config(config)
    made.dtype = dtype
    made.save_pretrained(folder)


def _base(config: BertConfig) -> str:
    return "" if config.head in ("none", "pooled") else config.kind + "."


WEIGHTS = WeightMap(
    name="bert", noun="an encoder", classes=(Bert,), table=table, config_of=config_of, skeleton=skeleton,
    finish=reset_buffers, adapt=adapt, read_config=read_config, write_config=write_config,
    use_fields=(
        "head", "num_labels", "problem_type", "hidden_dropout_prob", "attention_probs_dropout_prob",
        "classifier_dropout",
    ),
)  # fmt: skip
load = WEIGHTS.load
"""A model from a folder or hub id in transformers' format: :meth:`zoo.weights.WeightMap.load`, with ``head=`` of
``BertConfig`` among the fields to replace; the head that the checkpoint was saved with when left out."""
save = WEIGHTS.save
"""Write a folder that ``AutoModel...from_pretrained`` loads: :meth:`zoo.weights.WeightMap.save`."""
