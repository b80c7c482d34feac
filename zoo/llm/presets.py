"""Models by name, and inputs to try them on."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from zoo.llm.config import LLMConfig, RopeScaling
from zoo.llm.model import LLM
from zoo.validate import seeded

_LLAMA: dict[str, Any] = {
    "vocab_size": 128256,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 128000,
    "eos_token_id": (128001,),
}
_LLAMA_32_SCALING = RopeScaling(
    kind="llama3",
    factor=32.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=8192,
)
_QWEN3: dict[str, Any] = {
    "vocab_size": 151936,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-6,
    "qk_norm": True,
    "bos_token_id": 151643,
    "eos_token_id": (151645,),
}

PRESETS: dict[str, LLMConfig] = {
    "llm-debug": LLMConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        rope_theta=10000.0,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        rope_scaling=dataclasses.replace(_LLAMA_32_SCALING, factor=4.0, original_max_position_embeddings=128),
    ),
    "llama-3.2-1b": LLMConfig(
        **_LLAMA,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        head_dim=64,
        tie_word_embeddings=True,
        rope_scaling=_LLAMA_32_SCALING,
    ),
    "llama-3.2-3b": LLMConfig(
        **_LLAMA,
        hidden_size=3072,
        intermediate_size=8192,
        num_hidden_layers=28,
        num_attention_heads=24,
        head_dim=128,
        tie_word_embeddings=True,
        rope_scaling=_LLAMA_32_SCALING,
    ),
    "llama-3.1-8b": LLMConfig(
        **_LLAMA,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        head_dim=128,
        tie_word_embeddings=False,
        rope_scaling=dataclasses.replace(_LLAMA_32_SCALING, factor=8.0),
    ),
    "qwen3-0.6b": LLMConfig(
        **_QWEN3,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        tie_word_embeddings=True,
    ),
    "qwen3-8b": LLMConfig(
        **_QWEN3,
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=36,
        num_attention_heads=32,
        tie_word_embeddings=False,
    ),
}


def example_inputs(model: nn.Module, *, batch: int = 2, tokens: int = 16, seed: int = 0) -> dict[str, Tensor]:
    """``input_ids`` [batch, tokens] on the model's device, uniformly drawn; the same on every device."""
    if not isinstance(model, LLM):
        raise TypeError(f"{type(model).__name__} is not a language model of the zoo")
    limit = model.config.max_position_embeddings
    if batch < 1 or not 1 <= tokens <= limit:
        raise ValueError(f"batch is {batch} and tokens {tokens}: both must be positive, and tokens at most {limit}")
    generator = seeded(seed)
    drawn = torch.randint(model.config.vocab_size, (batch, tokens), generator=generator, device="cpu")
    return {"input_ids": drawn.to(model.embed_tokens.weight.device)}
