"""To and from transformers' BERT and RoBERTa, the encoder alone or with a head. Only here is the library imported."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from zoo.bert.checkpoint import fit, placements, upstream_tensors
from zoo.bert.config import ACTIVATIONS, BertConfig
from zoo.bert.model import Bert
from zoo.weights import fill

_KINDS = {"bert": "Bert", "roberta": "Roberta"}
_HEADS = {
    "none": "Model",
    "pooled": "Model",
    "masked-lm": "ForMaskedLM",
    "sequence-classification": "ForSequenceClassification",
    "token-classification": "ForTokenClassification",
    "question-answering": "ForQuestionAnswering",
}
_CLASSES = {f"{name}{suffix}": (kind, head) for kind, name in _KINDS.items() for head, suffix in _HEADS.items()}
# Fields of theirs that are ours, by the same name.
_SHARED = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "max_position_embeddings",
    "type_vocab_size",
    "layer_norm_eps",
    "pad_token_id",
    "hidden_act",
    "hidden_dropout_prob",
    "attention_probs_dropout_prob",
    "num_labels",
    "problem_type",
    "classifier_dropout",
    "tie_word_embeddings",
)


def from_upstream(module: nn.Module) -> Bert:
    """The zoo's model with the weights of a transformers model, copied.

    Raises:
        NotImplementedError: If it is another class.
        ValueError: If it uses an option that the zoo does not support; the message names option and value.
    """
    name = type(module).__name__
    if name not in _CLASSES or type(module) is not getattr(transformers, name):
        raise NotImplementedError(f"{name} is not one of {', '.join(_CLASSES)}, exactly")
    _, head = _CLASSES[name]
    if head == "pooled" and module.pooler is None:
        head = "none"
    config = convert_config(module.config, head)
    with torch.device("meta"):
        model = Bert(config)
    state, places = dict(module.state_dict()), placements(config)
    device = next(iter(state.values())).device
    fill(model, state, places, device=device, dtype=None, source=name)
    ours = dict(model.named_parameters())
    trained: dict[str, bool] = {}
    for their_name, parameter in module.named_parameters():
        place = places[their_name]
        if trained.setdefault(place.name, parameter.requires_grad) != parameter.requires_grad:
            raise ValueError(
                f"{name}: {their_name}.requires_grad is {parameter.requires_grad}, but what shares {place.name} with "
                "it differs; rows of one tensor are trained together"
            )
        ours[place.name].requires_grad_(parameter.requires_grad)
    return model.train(module.training)


def to_upstream(model: nn.Module) -> nn.Module:
    """The transformers model with a zoo model's weights, copied; its class follows from the config.

    Raises:
        TypeError: If the model is not of this family.
    """
    if not isinstance(model, Bert):
        raise TypeError(f"{type(model).__name__} is not an encoder of the zoo")
    module = skeleton(model.config)
    state = {key: tensor.detach().clone() for key, tensor in upstream_tensors(model)}
    tied = model.config.head == "masked-lm" and model.config.tie_word_embeddings
    if tied:
        state = {**state, **_tied(model.config, state)}
    module.load_state_dict(state, strict=True, assign=True)
    if tied:
        decoder = module.get_output_embeddings()
        decoder.weight = module.get_input_embeddings().weight
        holder = module.cls.predictions if model.config.kind == "bert" else module.lm_head
        decoder.bias = holder.bias
    reset_buffers(module)
    ours, places = dict(model.named_parameters()), placements(model.config)
    for their_name, parameter in module.named_parameters():
        parameter.requires_grad_(ours[places[their_name].name].requires_grad)
    result: nn.Module = module.train(model.training)
    return result


def convert_state_dict(state_dict: Mapping[str, Tensor], config: BertConfig) -> dict[str, Tensor]:
    """Their tensors as ours: every key that the config needs; what other heads have left is not looked at.

    Raises:
        ValueError: If a tensor is missing, left over or of another shape.

    Warns:
        WeightsWarning: If there is no tensor of the head at all, which then gets random weights.
    """
    with torch.device("meta"):
        model = Bert(config)
    fitted = fit(state_dict, config, source="the checkpoint")
    device = next(iter(fitted.values())).device if fitted else "cpu"
    fill(model, fitted, placements(config), device=device, dtype=None, source="the checkpoint")
    return model.state_dict()


def skeleton(config: BertConfig) -> Any:
    """Transformers' model without memory for its weights."""
    options = {"add_pooling_layer": config.head == "pooled"} if config.head in ("none", "pooled") else {}
    with torch.device("meta"):
        return getattr(transformers, _KINDS[config.kind] + _HEADS[config.head])(upstream_config(config), **options)


def reset_buffers(module: Any) -> None:
    """Compute what is in no state dict and was not computed on meta."""
    embeddings = module.base_model.embeddings
    rows, device = embeddings.position_embeddings.num_embeddings, embeddings.word_embeddings.weight.device
    embeddings.position_ids = torch.arange(rows, device=device).expand((1, -1))
    embeddings.token_type_ids = torch.zeros_like(embeddings.position_ids)


def read_config(folder: Path, head: str | None = None) -> BertConfig:
    """The config of a checkpoint folder, as transformers reads its ``config.json``.

    Args:
        folder: With the file.
        head: None for the one that the file names, or ``pooled`` where the zoo does not have it.

    Raises:
        ValueError: If it is another kind of model, or has an option that the zoo does not support.
    """
    theirs = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    if head is None:
        # The one that pretraining used has two heads, of which this is the one that is kept.
        named = (getattr(theirs, "architectures", None) or [""])[0].replace("ForPreTraining", "ForMaskedLM")
        head = _CLASSES.get(named, ("", "pooled"))[1]
    return convert_config(theirs, head)


def convert_config(theirs: Any, head: str) -> BertConfig:
    """A transformers config as the zoo's.

    Raises:
        ValueError: If it is another kind of model, or has an option that the zoo does not support.
    """
    kind = theirs.model_type
    if kind not in _KINDS:
        raise ValueError(f"model_type={kind!r} is not supported; the zoo has {', '.join(_KINDS)}")
    for option, supported, why in (
        ("is_decoder", (False,), "the zoo's is an encoder: all tokens see each other"),
        ("add_cross_attention", (False,), "there is no decoder"),
        ("position_embedding_type", ("absolute", None), "positions are learned, one vector each"),
        ("quantization_config", (None,), "load the weights that were quantised instead"),
        ("hidden_act", ACTIVATIONS, f"there are {', '.join(ACTIVATIONS)}"),
    ):
        value = getattr(theirs, option, supported[0])
        if value not in supported:
            raise ValueError(f"transformers' {kind} with {option}={value!r} is not supported: {why}")
    shared: dict[str, Any] = {name: getattr(theirs, name, None) for name in _SHARED}
    if head in ("none", "pooled", "masked-lm"):
        # Of no meaning there, and whatever a checkpoint of a classifier says would make equal models differ.
        shared |= {"num_labels": 2, "problem_type": None, "classifier_dropout": None}
    return BertConfig(**shared, kind=kind, head=head)


def upstream_config(config: BertConfig) -> Any:
    """The zoo's config as transformers'."""
    architecture = _KINDS[config.kind] + _HEADS[config.head]
    made = getattr(transformers, architecture).config_class(**{name: getattr(config, name) for name in _SHARED})
    made.architectures = [architecture]
    return made


def _tied(config: BertConfig, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Their second names of tied weights."""
    places = placements(config)
    named = {place.name: key for key, place in places.items() if not place.repeated}
    return {key: state[named[place.name]] for key, place in places.items() if place.repeated}
