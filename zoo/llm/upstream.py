"""To and from transformers' Llama, Mistral, Qwen2 and Qwen3 for causal language modelling. Only here is it imported."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from zoo.llm.checkpoint import placements, upstream_tensors
from zoo.llm.config import LLMConfig, RopeScaling
from zoo.llm.model import LLM
from zoo.llm.quantize import refuse_quantized
from zoo.weights import fill

_CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
# Fields of theirs that are ours, by the same name.
_SHARED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
    "rms_norm_eps",
    "tie_word_embeddings",
    "pad_token_id",
    "bos_token_id",
)


def from_upstream(module: nn.Module) -> LLM:
    """The zoo's model with the weights of a transformers model, copied.

    Raises:
        NotImplementedError: If it is another class.
        ValueError: If it uses an option that the zoo does not support; the message names option and value.
    """
    name = type(module).__name__
    if name not in _CLASSES.values() or type(module) is not getattr(transformers, name):
        raise NotImplementedError(f"{name} is not one of {', '.join(_CLASSES.values())}, exactly")
    config = convert_config(module.config)
    with torch.device("meta"):
        model = LLM(config)
    state = dict(module.state_dict())
    device = state["model.embed_tokens.weight"].device
    fill(model, state, placements(config), device=device, dtype=None, source=name)
    ours = dict(model.named_parameters())
    trained: dict[str, bool] = {}
    for their_name, parameter in module.named_parameters():
        place = placements(config)[their_name]
        if place is None:
            continue
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
        ValueError: If no class has the model's options, or the weights were rounded by ``quantize_int8``.
    """
    if not isinstance(model, LLM):
        raise TypeError(f"{type(model).__name__} is not a language model of the zoo")
    refuse_quantized(model)
    config = upstream_config(model.config)
    with torch.device("meta"):
        module = getattr(transformers, _CLASSES[config.model_type])(config)
    state = {key: tensor.detach().clone() for key, tensor in upstream_tensors(model)}
    if model.config.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    module.load_state_dict(state, strict=True, assign=True)
    if model.config.tie_word_embeddings:
        module.lm_head.weight = module.model.embed_tokens.weight
    # Its frequencies are in no state dict, and were not computed on meta.
    module.model.rotary_emb = type(module.model.rotary_emb)(config).to(model.embed_tokens.weight.device)
    ours = dict(model.named_parameters())
    for their_name, parameter in module.named_parameters():
        place = placements(model.config)[their_name]
        if place is not None:
            parameter.requires_grad_(ours[place.name].requires_grad)
    result: nn.Module = module.train(model.training)
    return result


def convert_state_dict(state_dict: Mapping[str, Tensor], config: LLMConfig) -> dict[str, Tensor]:
    """Their tensors as ours, strictly: every key that the config needs, and no other.

    Raises:
        ValueError: If a tensor is missing, left over or of another shape.
    """
    with torch.device("meta"):
        model = LLM(config)
    device = next(iter(state_dict.values())).device if state_dict else "cpu"
    fill(model, state_dict, placements(config), device=device, dtype=None, source="the state dict")
    return model.state_dict()


def read_config(folder: Path) -> LLMConfig:
    """The config of a checkpoint folder, as transformers reads its ``config.json``.

    Raises:
        ValueError: If it is another kind of model, or has an option that the zoo does not support.
    """
    return convert_config(transformers.AutoConfig.from_pretrained(folder, local_files_only=True))


def convert_config(theirs: Any) -> LLMConfig:
    """A transformers config as the zoo's.

    Raises:
        ValueError: If it is another kind of model, or has an option that the zoo does not support.
    """
    kind = theirs.model_type
    if kind not in _CLASSES:
        raise ValueError(f"model_type={kind!r} is not supported; the zoo has {', '.join(_CLASSES)}")
    for option, supported, why in (
        ("hidden_act", ("silu", "swish"), "the MLP is SwiGLU"),
        ("attention_dropout", (0, None), "attention has no dropout"),
        ("quantization_config", (None,), "load the weights that were quantised instead"),
    ):
        if (value := getattr(theirs, option, None)) not in supported:
            _refuse(kind, option, value, why)
    # Their other classes do not look at these two.
    for option in {"llama": ("attention_bias", "mlp_bias"), "qwen3": ("attention_bias",)}.get(kind, ()):
        if getattr(theirs, option, False):
            _refuse(kind, option, True, "only queries, keys and values may have a bias, as in qwen2")
    eos = theirs.eos_token_id
    shared = {name: getattr(theirs, name) for name in _SHARED}
    pad = shared["pad_token_id"]
    if pad is not None and not 0 <= pad < theirs.vocab_size:
        # Some checkpoints say -1 for "none".
        shared["pad_token_id"] = None
    window = _window(kind, theirs)
    return LLMConfig(
        **shared,
        head_dim=getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads,
        **_rope(kind, theirs.rope_parameters),
        qkv_bias=kind == "qwen2",
        qk_norm=kind == "qwen3",
        sliding_window=window,
        eos_token_id=() if eos is None else (eos,) if isinstance(eos, int) else tuple(eos),
        model_type="mistral" if kind == "mistral" and window is None else None,
    )


def upstream_config(config: LLMConfig) -> Any:
    """The zoo's config as transformers': Qwen2 with a bias, Qwen3 with norms, Mistral with a window, else Llama.

    ``model_type`` makes it Mistral without a window.

    Raises:
        ValueError: If no class has both a bias and norms.
    """
    if config.qkv_bias and config.qk_norm:
        raise ValueError("qkv_bias and qk_norm are both True, and no class of transformers has both")
    mistral = config.sliding_window is not None or config.model_type == "mistral"
    kind = "qwen2" if config.qkv_bias else "qwen3" if config.qk_norm else "mistral" if mistral else "llama"
    options: dict[str, Any] = {name: getattr(config, name) for name in _SHARED}
    eos = config.eos_token_id
    options["eos_token_id"] = None if not eos else eos[0] if len(eos) == 1 else list(eos)
    options["rope_parameters"] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if (scaling := config.rope_scaling) is not None:
        options["rope_parameters"] |= {"rope_type": scaling.kind, "factor": scaling.factor}
        if scaling.kind == "llama3":
            for name in ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings"):
                options["rope_parameters"][name] = getattr(scaling, name)
    # Qwen2 has no such field of its own, and divides the width among the heads unless it is told otherwise.
    if kind != "qwen2" or config.head_dim != config.hidden_size // config.num_attention_heads:
        options["head_dim"] = config.head_dim
    if kind == "mistral" or config.sliding_window is not None:
        options["sliding_window"] = config.sliding_window
    if kind != "mistral" and config.sliding_window is not None:
        options |= {"use_sliding_window": True, "max_window_layers": 0}
    architecture = _CLASSES[kind]
    made = getattr(transformers, architecture).config_class(**options)
    made.architectures = [architecture]
    return made


def _rope(kind: str, parameters: Any) -> dict[str, Any]:
    if not isinstance(parameters, Mapping) or any(isinstance(value, Mapping) for value in parameters.values()):
        _refuse(kind, "rope_parameters", parameters, "one setting for all layers is needed")
    rope_type = parameters.get("rope_type", "default")
    if parameters.get("partial_rotary_factor") not in (None, 1, 1.0):
        _refuse(kind, "partial_rotary_factor", parameters["partial_rotary_factor"], "whole heads are turned")
    scaling = None
    if rope_type == "linear":
        scaling = RopeScaling(kind="linear", factor=parameters["factor"])
    elif rope_type == "llama3":
        names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        scaling = RopeScaling(kind="llama3", **{name: parameters[name] for name in names})
    elif rope_type != "default":
        _refuse(kind, "rope_type", rope_type, "default, linear and llama3 are supported")
    return {"rope_theta": parameters["rope_theta"], "rope_scaling": scaling}


def _window(kind: str, theirs: Any) -> int | None:
    """The window that all layers share."""
    window: int | None = getattr(theirs, "sliding_window", None) if kind != "llama" else None
    layers = getattr(theirs, "layer_types", None) if kind in ("qwen2", "qwen3") else None
    if window is not None and layers is not None:
        if len(set(layers)) > 1:
            _refuse(kind, "layer_types", layers, "all layers must have the same window")
        if "full_attention" in layers:
            return None
    return window


def _refuse(kind: str, option: str, value: Any, why: str) -> Any:
    raise ValueError(f"transformers' {kind} with {option}={value!r} is not supported: {why}")
