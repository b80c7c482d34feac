"""Weights and configs from and to transformers' Llama, Mistral, Qwen2 and Qwen3, and weights in 8 bits.

transformers is imported when it is first needed. Its queries, keys and values, and its two halves of the MLP, are rows
of one tensor each here.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zoo.engine.compile import plan_of
from zoo.llm.config import USE_FIELDS, LLMConfig, RopeScaling
from zoo.llm.model import LLM
from zoo.weights import Placement, check_dtype, check_finite, fill, locate, open_tensors, refuse_other_config, replacing

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
# {theirs: ours} of a layer's tensors that are the same in both.
_LAYER = {
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attn.q_norm.weight": "q_norm.weight",
    "self_attn.k_norm.weight": "k_norm.weight",
    "self_attn.o_proj.weight": "o_proj.weight",
    "post_attention_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.down_proj.weight": "down_proj.weight",
}


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


def from_upstream(module: nn.Module) -> LLM:
    """The zoo's model with the weights of a transformers model, copied.

    Raises:
        NotImplementedError: If it is another class.
        ValueError: If it uses an option that the zoo does not support; the message names option and value.
    """
    import transformers

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


def to_upstream(model: LLM) -> nn.Module:
    """The transformers model with a zoo model's weights, copied; its class follows from the config.

    Raises:
        TypeError: If the model is not of this family.
        ValueError: If no class has the model's options, or the weights were rounded by ``quantize_int8``.
    """
    import transformers

    _check_convertible(model)
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
        max_shard_size: Bytes of a file, or a number with KB, MB, GB or TB. A larger tensor gets a file of its own.

    Raises:
        TypeError: If the model is not of this family.
        ValueError: If the size is not positive, no transformers class has the model's options, or the weights were
            rounded by ``quantize_int8``.
    """
    from huggingface_hub import split_state_dict_into_shards_factory
    from safetensors.torch import save_file

    _check_convertible(model)
    config = upstream_config(model.config)
    config.dtype = model.embed_tokens.weight.dtype
    views = dict(upstream_tensors(model))
    try:
        if not isinstance(max_shard_size, str) and max_shard_size < 1:
            raise ValueError("expected a positive number of bytes")
        shards = split_state_dict_into_shards_factory(
            views,
            get_storage_size=lambda tensor: tensor.nbytes,
            filename_pattern="model{suffix}.safetensors",
            max_shard_size=max_shard_size,
        )
    except ValueError as error:
        raise ValueError(f"max_shard_size is {max_shard_size!r}: {error}") from error
    with replacing(Path(folder), "model*.safetensors*") as new:
        config.save_pretrained(new)
        for name, keys in shards.filename_to_tensors.items():
            # Rows of one tensor share its memory, which the format refuses: one shard at a time is copied.
            save_file({key: views[key].detach().cpu().clone() for key in keys}, new / name, metadata={"format": "pt"})
        if shards.is_sharded:
            index = {"metadata": shards.metadata, "weight_map": shards.tensor_to_filename}
            (new / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def check_folder(folder: Path, config: LLMConfig, overridden: Collection[str]) -> None:
    """Refuse a folder whose ``config.json`` describes another architecture, but for fields that were overridden."""
    if (folder / "config.json").exists():
        refuse_other_config(folder, read_config(folder), config, (*overridden, *USE_FIELDS), "llm")


def read_config(folder: Path) -> LLMConfig:
    """The config of a checkpoint folder, as transformers reads its ``config.json``."""
    import transformers

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
    import transformers

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


def quantize_int8(model: LLM) -> LLM:
    """Round the weights of all products to int8, a scale for each row, in place. Opt-in: outputs change a little.

    Activations, the cache, norms and the embedding stay as they are; so does the output product where it is tied to
    the embedding. What was rounded cannot be saved or taken to transformers.

    Args:
        model: Not compiled yet.

    Returns:
        The same model.

    Raises:
        ImportError: If torchao is not installed.
        TypeError: If the model is not of this family.
        ValueError: If its regions are compiled already.
    """
    try:
        from torchao.quantization import (  # type: ignore[import-not-found, import-untyped]
            Int8WeightOnlyConfig,
            quantize_,
        )
    except ImportError as error:
        raise ImportError("quantize_int8 needs torchao: pip install torchao") from error
    if not isinstance(model, LLM):
        raise TypeError(f"model is a {type(model).__name__}, expected a language model of the zoo")
    if plan_of(model) is not None:
        raise ValueError("the model's regions are compiled already; call zoo.uncompile(model) first")
    quantize_(model, Int8WeightOnlyConfig())
    return model


def _check_convertible(model: LLM) -> None:
    if not isinstance(model, LLM):
        raise TypeError(f"{type(model).__name__} is not a language model of the zoo")
    if any(hasattr(parameter, "__tensor_flatten__") for parameter in model.parameters()):
        raise ValueError("the model's weights were rounded to int8; save or convert it before quantize_int8")
