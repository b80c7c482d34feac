"""Models by name, and inputs to try them on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from zoo.bert.config import BertConfig
from zoo.bert.model import Bert
from zoo.validate import seeded

_BERT: dict[str, Any] = {
    "vocab_size": 30522,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
    "pad_token_id": 0,
}
_ROBERTA: dict[str, Any] = {
    "kind": "roberta",
    "vocab_size": 50265,
    "max_position_embeddings": 514,
    "type_vocab_size": 1,
    "layer_norm_eps": 1e-5,
    "pad_token_id": 1,
}


def _sized(common: dict[str, Any], layers: int, width: int, **options: Any) -> BertConfig:
    """Heads of 64 and an MLP four times as wide: what all published sizes have."""
    return BertConfig(
        **common,
        **options,
        num_hidden_layers=layers,
        hidden_size=width,
        num_attention_heads=width // 64,
        intermediate_size=4 * width,
    )


PRESETS: dict[str, BertConfig] = {
    "bert-debug": BertConfig(
        **{**_BERT, "vocab_size": 128, "max_position_embeddings": 64},
        num_hidden_layers=3,
        hidden_size=32,
        num_attention_heads=4,
        intermediate_size=48,
    ),
    # https://arxiv.org/abs/1908.08962
    "bert-tiny": _sized(_BERT, 2, 128),
    "bert-mini": _sized(_BERT, 4, 256),
    "bert-small": _sized(_BERT, 4, 512),
    "bert-medium": _sized(_BERT, 8, 512),
    # The base's width at half its depth, as distilled models have it.
    "bert-base-6": _sized(_BERT, 6, 768),
    "bert-base": _sized(_BERT, 12, 768),
    "bert-large": _sized(_BERT, 24, 1024),
    "roberta-base": _sized(_ROBERTA, 12, 768),
    "roberta-large": _sized(_ROBERTA, 24, 1024),
}


def example_inputs(model: nn.Module, *, batch: int = 2, tokens: int = 16, seed: int = 0) -> dict[str, Tensor]:
    """Ids, mask and token types of two segments, [batch, tokens] each; the same on every device.

    Rows end between half of ``tokens`` and all of it, the last before it; of several rows the first is full.
    """
    if not isinstance(model, Bert):
        raise TypeError(f"{type(model).__name__} is not an encoder of the zoo")
    config = model.config
    if batch < 1 or not 1 <= tokens <= config.positions:
        raise ValueError(
            f"batch is {batch} and tokens {tokens}: both must be positive, and tokens at most {config.positions}"
        )
    generator = seeded(seed)
    column = torch.arange(tokens, device="cpu")
    lengths = torch.randint((tokens + 1) // 2, tokens + 1, (batch, 1), generator=generator, device="cpu")
    lengths[-1:] = lengths[-1:].clamp(max=max(1, tokens - 1))
    if batch > 1:
        lengths[0] = tokens
    mask = (column < lengths).long()
    ids = torch.randint(config.vocab_size, (batch, tokens), generator=generator, device="cpu")
    if (pad := config.pad_token_id) is not None:
        ids = torch.where(ids == pad, (pad + 1) % config.vocab_size, ids)
        ids = torch.where(mask == 1, ids, pad)
    types = ((column >= lengths // 2) & (mask == 1)).long().clamp(max=config.type_vocab_size - 1)
    device = model.embeddings.word_embeddings.weight.device
    inputs = {"input_ids": ids, "attention_mask": mask, "token_type_ids": types}
    return {name: tensor.to(device) for name, tensor in inputs.items()}
