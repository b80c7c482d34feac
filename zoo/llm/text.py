"""Text to tokens and back, by the tokenizer that lies beside the weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


def read_tokenizer(folder: Path) -> Any | None:
    """The tokenizer of a checkpoint folder, through transformers; None where there is none."""
    if not any((folder / name).exists() for name in _FILES):
        return None
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


def read_end_tokens(folder: Path, tokenizer: Any | None, default: tuple[int, ...]) -> tuple[int, ...]:
    """Tokens that end a text: the folder's ``generation_config.json`` says, else the config, else the tokenizer."""
    path = folder / "generation_config.json"
    ends = json.loads(path.read_text()).get("eos_token_id") if path.exists() else None
    if ends is None:
        ends = default or getattr(tokenizer, "eos_token_id", None)
    if ends is None:
        return ()
    return (ends,) if isinstance(ends, int) else tuple(ends)


def encode(prompt: str, tokenizer: Any | None) -> list[int]:
    """Token ids of a prompt; without a tokenizer the prompt is the ids themselves.

    Raises:
        ValueError: If there is no tokenizer and the prompt is not a list of numbers, or it has no tokens.
    """
    if tokenizer is not None:
        ids: list[int] = list(tokenizer(prompt)["input_ids"])
    else:
        try:
            ids = [int(word) for word in prompt.replace(",", " ").split()]
        except ValueError:
            raise ValueError(
                f"there is no tokenizer beside the weights, so the prompt must be token ids like '12 7 99', "
                f"not {prompt!r}"
            ) from None
    if not ids:
        raise ValueError(f"the prompt {prompt!r} has no tokens, and there is nothing to continue")
    return ids


class TextStream:
    """Text of tokens as they come: what is new, once its characters are whole."""

    def __init__(self, tokenizer: Any | None) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._shown = 0

    def push(self, ids: list[int], *, last: bool = False) -> str:
        """The text that these tokens add; half a character is kept back until the rest, or the end, has come."""
        if self._tokenizer is None:
            return "".join(f"{token} " for token in ids)
        self._ids += ids
        text: str = self._tokenizer.decode(self._ids, skip_special_tokens=True)
        if text.endswith("\N{REPLACEMENT CHARACTER}") and not last:
            return ""
        new, self._shown = text[self._shown :], len(text)
        return new
