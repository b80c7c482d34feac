"""Tiny transformers models to compare with, one for each kind that the zoo takes."""

from typing import Any

import torch
import transformers
from torch import Tensor, nn

SIZES: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": None, "bos_token_id": None,
    "eos_token_id": None,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied-llama3": ("Llama", {"tie_word_embeddings": True, "rope_parameters": LLAMA3}),
    "llama-linear-one-head": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.5}, "num_key_value_heads": 1},
    ),
    "llama-wide-heads": ("Llama", {"head_dim": 16, "num_key_value_heads": 6, "rms_norm_eps": 1e-3}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral-window": ("Mistral", {"sliding_window": 5}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
}


def make(kind: str, seed: int = 0, **options: Any) -> nn.Module:
    """A model with weights that leave no norm and no bias at its initial value."""
    name, own = KINDS[kind]
    torch.manual_seed(seed)
    model_class = getattr(transformers, f"{name}ForCausalLM")
    module: nn.Module = model_class(model_class.config_class(**{**SIZES, **own, **options})).eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2 + (1.0 if parameter.dim() == 1 else 0.0))
    return module


def tokens(batch: int, count: int) -> Tensor:
    return torch.randint(SIZES["vocab_size"], (batch, count), generator=torch.Generator().manual_seed(1))
