"""To and from transformers' Llama, Mistral, Qwen2 and Qwen3.

transformers is imported on first use. The zoo concatenates the weights of queries, keys and values, and those of the
two halves of the MLP.
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zoo.engine.call import outermost_call
from zoo.files import upstream
from zoo.llm.model import LLM, WEIGHT_DTYPES, LLMConfig, RopeScaling, products_of, quantize_products
from zoo.ops.common import is_sharded, is_unmodified
from zoo.weights import Placement, Table, WeightMap, check_class, unsupported

# The model type in the config.json of a quantized model: transformers would read the weights without their scales.
_QUANTIZED = "regional-zoo-quantized"
_CLASSES = {kind.lower(): f"{kind}ForCausalLM" for kind in ("Llama", "Mistral", "Qwen2", "Qwen3")}
# Fields of a rotary scaling, by its kind.
_SCALINGS: dict[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
# Fields with the same name in transformers and the zoo.
_SHARED = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings", "pad_token_id", "bos_token_id",
)  # fmt: skip


def table(config: LLMConfig) -> Table:
    """{transformers' name: the zoo's name}. The zoo's qkv_proj and gate_up_proj concatenate several tensors."""
    q, kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    inner = config.intermediate_size
    layer: dict[str, str | Placement] = {
        "input_layernorm": "layers.{}.input_layernorm",
        "self_attn.q_proj": Placement("layers.{}.qkv_proj", 0, q),
        "self_attn.k_proj": Placement("layers.{}.qkv_proj", q, kv),
        "self_attn.v_proj": Placement("layers.{}.qkv_proj", q + kv, kv),
        "self_attn.q_norm": "layers.{}.q_norm",
        "self_attn.k_norm": "layers.{}.k_norm",
        "self_attn.o_proj": "layers.{}.o_proj",
        "post_attention_layernorm": "layers.{}.post_attention_layernorm",
        "mlp.gate_proj": Placement("layers.{}.gate_up_proj", 0, inner),
        "mlp.up_proj": Placement("layers.{}.gate_up_proj", inner, inner),
        "mlp.down_proj": "layers.{}.down_proj",
    }
    return {
        "model.embed_tokens": "embed_tokens",
        **{"model.layers.{}." + theirs: ours for theirs, ours in layer.items()},
        "model.norm": "head.norm",
        "lm_head": Placement("embed_tokens", repeated=True) if config.tie_word_embeddings else "lm_head",
    }


def config_of(module: nn.Module) -> LLMConfig:
    """The config of a transformers model; NotImplementedError for other classes."""
    check_class(module, "transformers", *_CLASSES.values())
    generation: Any = getattr(module, "generation_config", None)
    return convert_config(module.config, generation)


def skeleton(config: LLMConfig) -> nn.Module:
    """The transformers model of a config, on the meta device."""
    theirs = upstream_config(config)
    with torch.device("meta"):
        return getattr(upstream("transformers"), _CLASSES[theirs.model_type])(theirs)


def reset_buffers(module: Any) -> None:
    """Compute the rotary frequencies (a non-persistent buffer) of a transformers model built on the meta device."""
    decoder = module.model
    decoder.rotary_emb = type(decoder.rotary_emb)(module.config).to(decoder.embed_tokens.weight.device)


def read_config(folder: Path, **overrides: Any) -> LLMConfig:
    """The config of a checkpoint folder's ``config.json``, with some fields replaced."""
    transformers = upstream("transformers")
    told, generation, ours = json.loads((folder / "config.json").read_text()), None, {}
    if told.get("model_type") == _QUANTIZED:
        ours["weight_dtype"] = told.pop("weight_dtype")
        told["model_type"] = told.pop("quantized_model_type")
        theirs = transformers.AutoConfig.for_model(**told)
    else:
        theirs = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    if (folder / "generation_config.json").exists():
        generation = transformers.GenerationConfig.from_pretrained(folder, local_files_only=True)
    return dataclasses.replace(convert_config(theirs, generation), **{**ours, **overrides})


def write_config(config: LLMConfig, dtype: torch.dtype, folder: Path) -> None:
    """Write transformers' ``config.json``; of a quantized model one that transformers refuses to read."""
    made = upstream_config(dataclasses.replace(config, weight_dtype=None))
    made.dtype = dtype
    made.save_pretrained(folder)
    if config.weight_dtype is not None:
        told = json.loads((folder / "config.json").read_text())
        told |= {
            "quantized_model_type": told["model_type"],
            "model_type": _QUANTIZED,
            "weight_dtype": config.weight_dtype,
        }
        (folder / "config.json").write_text(json.dumps(told, indent=2, sort_keys=True) + "\n")


def convert_config(theirs: Any, generation: Any = None) -> LLMConfig:
    """A transformers config as the zoo's; ValueError if it has an option that the zoo does not support.

    Stop tokens come from the generation config, as in transformers' ``generate``, or else from the config.
    """
    kind, whose = theirs.model_type, f"transformers' {theirs.model_type}"
    if kind not in _CLASSES:
        raise ValueError(f"model_type={kind!r} is not supported; the zoo has {', '.join(_CLASSES)}")
    for option, supported, why in (
        ("hidden_act", ("silu", "swish"), "the MLP is SwiGLU"),
        ("attention_dropout", (0, None), "attention has no dropout"),
        ("quantization_config", (None,), "load its original, and call zoo.llm.quantize(model)"),
    ):
        if (value := getattr(theirs, option, None)) not in supported:
            unsupported(whose, option, value, why)
    # Transformers' other classes do not read these two.
    for option in {"llama": ("attention_bias", "mlp_bias"), "qwen3": ("attention_bias",)}.get(kind, ()):
        if getattr(theirs, option, False):
            unsupported(whose, option, True, "only queries, keys and values may have a bias, as in qwen2")
    eos, window = getattr(generation, "eos_token_id", None), _window(kind, theirs)
    eos = theirs.eos_token_id if eos is None else eos
    shared = {name: getattr(theirs, name) for name in _SHARED}
    if shared["pad_token_id"] not in range(theirs.vocab_size):
        shared["pad_token_id"] = None  # some checkpoints have -1
    return LLMConfig(
        **shared, **_rope(whose, theirs.rope_parameters),
        head_dim=getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads,
        qkv_bias=kind == "qwen2", qk_norm=kind == "qwen3", sliding_window=window,
        eos_token_id=() if eos is None else (eos,) if isinstance(eos, int) else tuple(eos),
        model_type="mistral" if kind == "mistral" and window is None else None,
    )  # fmt: skip


def upstream_config(config: LLMConfig) -> Any:
    """The zoo's config as transformers': Qwen2 with a bias, Qwen3 with norms, Mistral with a window, else Llama."""
    if config.weight_dtype is not None:
        raise ValueError(
            f"transformers' classes have no weight_dtype={config.weight_dtype!r}: convert the model before "
            "zoo.llm.quantize, or zoo.llm.save it for zoo.llm.load"
        )
    if config.qkv_bias and config.qk_norm:
        raise ValueError("qkv_bias and qk_norm are both True, and no class of transformers has both")
    mistral = config.sliding_window is not None or config.model_type == "mistral"
    kind = "qwen2" if config.qkv_bias else "qwen3" if config.qk_norm else "mistral" if mistral else "llama"
    options: dict[str, Any] = {name: getattr(config, name) for name in _SHARED}
    eos = config.eos_token_id
    options["eos_token_id"] = None if not eos else eos[0] if len(eos) == 1 else list(eos)
    options["rope_parameters"] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if (scaling := config.rope_scaling) is not None:
        own = {name: getattr(scaling, name) for name in _SCALINGS[scaling.kind]}
        options["rope_parameters"] |= {"rope_type": scaling.kind, **own}
    # Qwen2's config has no head_dim field: by default it divides the width among the heads.
    if kind != "qwen2" or config.head_dim != config.hidden_size // config.num_attention_heads:
        options["head_dim"] = config.head_dim
    if kind == "mistral":
        options["sliding_window"] = config.sliding_window
    elif config.sliding_window is not None:
        options |= {"sliding_window": config.sliding_window, "use_sliding_window": True, "max_window_layers": 0}
    architecture = _CLASSES[kind]
    return getattr(upstream("transformers"), architecture).config_class(**options, architectures=[architecture])


def _rope(whose: str, parameters: Any) -> dict[str, Any]:
    if parameters.get("partial_rotary_factor") not in (None, 1, 1.0):
        unsupported(whose, "partial_rotary_factor", parameters["partial_rotary_factor"], "whole heads are turned")
    rope_type, scaling = parameters.get("rope_type", "default"), None
    if rope_type in _SCALINGS:
        scaling = RopeScaling(kind=rope_type, **{name: parameters[name] for name in _SCALINGS[rope_type]})
    elif rope_type != "default":
        unsupported(whose, "rope_type", rope_type, "default, linear and llama3 are supported")
    return {"rope_theta": parameters["rope_theta"], "rope_scaling": scaling}


def _window(kind: str, theirs: Any) -> int | None:
    window: int | None = getattr(theirs, "sliding_window", None) if kind != "llama" else None
    layers = set(getattr(theirs, "layer_types", None) or ()) if kind in ("qwen2", "qwen3") else set()
    if window is not None and len(layers) > 1:
        unsupported(f"transformers' {kind}", "layer_types", theirs.layer_types, "all layers must have the same window")
    return None if "full_attention" in layers else window


def adapt(tensors: Mapping[str, Tensor], config: LLMConfig, source: str) -> dict[str, Tensor]:
    """A checkpoint's tensors without the rotary frequencies of old releases; the config determines these.

    ValueError if the config says that weights are quantized and they are not, or the other way round.
    """
    scaled = any(key.endswith(".weight_scale") for key in tensors)
    if scaled != (config.weight_dtype is not None):
        held = "quantized" if scaled else "not quantized"
        raise ValueError(
            f"{source}: weight_dtype is {config.weight_dtype!r}, but the weights are {held}: load them as they are, "
            "and call zoo.llm.quantize(model) on the original"
        )
    return {key: tensor for key, tensor in tensors.items() if not key.endswith("rotary_emb.inv_freq")}


def quantize(model: LLM, weight_dtype: str = "int8") -> LLM:
    """Store a model's weights in one byte a number, in place: those of its products and of the embedding.

    Each row has a scale, so that its largest number is the dtype's largest. Products of few rows, as in decoding, read
    the bytes themselves, about half of what bfloat16 takes; others make a copy in the model's dtype first. Norms and
    biases stay as they are, and nothing learns any more. ``save`` and ``load`` keep the weights as they are.

    Args:
        model: A language model of the zoo, with its weights loaded.
        weight_dtype: ``"int8"``, or ``"float8_e4m3fn"``, which rounds small numbers less and large ones more.

    Returns:
        The model.

    Raises:
        TypeError: If the model is not a language model of the zoo.
        ValueError: If ``weight_dtype`` is another one, the model is quantized already, compiled or captured, or one of
            these modules has hooks, was replaced or is sharded.
    """
    if not isinstance(model, LLM):
        raise TypeError(f"model is a {type(model).__name__}, expected a language model of the zoo (zoo.llm.LLM)")
    if weight_dtype not in WEIGHT_DTYPES:
        raise ValueError(f"weight_dtype is {weight_dtype!r}, expected {' or '.join(map(repr, WEIGHT_DTYPES))}")
    if model.config.weight_dtype is not None:
        raise ValueError(f"the model's weights are {model.config.weight_dtype} already; quantize the original")
    if any(outermost_call(each) is not None for each in model.modules()):
        raise ValueError("the model is compiled or captured: quantize it before, or call zoo.uncompile(model) first")
    for name, each in products_of(model).items():
        plain = is_unmodified(each, nn.Embedding if name == "embed_tokens" else nn.Linear)
        if not plain or is_sharded(each.weight) or type(each.weight) is not nn.Parameter:
            raise ValueError(f"{name} is a {type(each).__name__} that was changed; quantize the model before that")
    quantize_products(model, weight_dtype)
    model.config = dataclasses.replace(model.config, weight_dtype=weight_dtype)
    return model


_OF_FOLDER = ("pad_token_id", "bos_token_id", "eos_token_id", "weight_dtype")
WEIGHTS = WeightMap(
    name="llm", noun="a language model", classes=(LLM,), table=table, config_of=config_of, skeleton=skeleton,
    finish=reset_buffers, adapt=adapt, read_config=read_config, write_config=write_config,
    use_fields=("max_position_embeddings", *_OF_FOLDER, "model_type"), folder_fields=_OF_FOLDER,
)  # fmt: skip
load = WEIGHTS.load
"""A model from a folder or hub id in transformers' format: :meth:`zoo.weights.WeightMap.load`."""
save = WEIGHTS.save
"""Write a folder that transformers loads: :meth:`zoo.weights.WeightMap.save`."""
