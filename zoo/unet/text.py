"""Prompts to what a UNet takes, by the tokenizers and text encoders of a pipeline's folder.

Shape legend: L tokens, D width of the text, X of the pooled text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zoo.unet.pipeline import PipelineFolder


@dataclass(frozen=True)
class Encoded:
    """A prompt.

    Args:
        text: [1, L, D].
        pooled: [1, X], where the model takes one.
        cut: How many tokens were too many, and are not in it.
    """

    text: Tensor
    pooled: Tensor | None
    cut: int


def encode(
    folder: PipelineFolder,
    prompt: str,
    negative: str | None,
    *,
    device: torch.device,
    dtype: torch.dtype | None = None,
) -> tuple[Encoded, Encoded]:
    """A prompt, and what guidance leads away from.

    Args:
        folder: Of a pipeline.
        prompt: The text.
        negative: None for what the pipeline takes then: an empty text, or zeros.
        device: Where to encode, and where the results are.
        dtype: Of the encoders; as they are stored when left out.
    """
    sides = [prompt] if negative is None and folder.zeros_for_no_negative else [prompt, negative or ""]
    texts, pooled, cut = [], None, [0, 0]
    for tokenizer_folder, encoder_folder, cls in folder.encoders:
        encoder = _load(folder, encoder_folder, cls).to(device=device, dtype=dtype).eval()
        tokens, over = _tokens(folder, tokenizer_folder, encoder.config.max_position_embeddings, sides)
        cut = [max(pair) for pair in zip(cut, [*over, 0], strict=False)]
        masks = tokens["attention_mask"].to(device) if getattr(encoder.config, "use_attention_mask", False) else None
        with torch.inference_mode():
            outputs = encoder(
                input_ids=tokens["input_ids"].to(device), attention_mask=masks, output_hidden_states=folder.pooled
            )
        # One layer before the last where there are two encoders; the last of these gives the pooled text.
        texts.append(outputs.hidden_states[-2] if folder.pooled else outputs.last_hidden_state)
        pooled = outputs.text_embeds if folder.pooled and cls == "CLIPTextModelWithProjection" else pooled
    text = torch.cat(texts, dim=-1)
    if len(sides) == 1:
        text = torch.cat([text, torch.zeros_like(text)])
        pooled = None if pooled is None else torch.cat([pooled, torch.zeros_like(pooled)])
    pools: Any = (None, None) if pooled is None else pooled.split(1)
    found, away = (Encoded(*parts) for parts in zip(text.split(1), pools, cut, strict=True))
    return found, away


def _load(folder: PipelineFolder, part: str, cls: str) -> Any:
    import transformers

    return getattr(transformers, cls).from_pretrained(folder.path / part, local_files_only=True)


def _tokens(folder: PipelineFolder, part: str, most: int, texts: list[str]) -> tuple[Any, list[int]]:
    """Tokens of texts, padded, and how many of each were too many."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder.path / part, local_files_only=True)
    # A tokenizer that was not told its length says a number beyond all.
    length = min(most, tokenizer.model_max_length)
    over = [max(0, len(tokenizer(text, truncation=False)["input_ids"]) - length) for text in texts]
    return tokenizer(texts, padding="max_length", max_length=length, truncation=True, return_tensors="pt"), over
