"""What a decode step must read, against what this device can read: the floor of decoding."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from zoo.llm.model import LLM


def bytes_per_token(model: LLM, cache_bytes: int, slots: int, length: float) -> float:
    """Bytes that one decode step of a row reads at least: every weight once, and the keys and values that it sees.

    Args:
        model: Whose weights. Of an embedding that is not tied only a row is read, which is left out.
        cache_bytes: Of the whole cache.
        slots: Tokens that the whole cache holds, all rows together.
        length: Tokens before the step, on average over steps.
    """
    weights = sum(_stored_bytes(parameter) for parameter in model.parameters())
    if model.lm_head is not None:
        weights -= model.embed_tokens.weight.nbytes
    window = model.config.sliding_window
    seen = length if window is None else min(length, window)
    return weights + cache_bytes / slots * seen


def _stored_bytes(tensor: Tensor) -> int:
    """Of a tensor that is made of others (rounded weights and their scales), theirs."""
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        return sum(_stored_bytes(getattr(tensor, name)) for name in names)
    return tensor.nbytes


def read_bandwidth(device: torch.device, repeats: int = 8) -> float:
    """Bytes a second that a sum over memory far larger than caches reads here: the best of some milliseconds."""
    size = 2**30 if device.type == "cuda" else 2**28
    if device.type == "cuda":
        size = min(size, torch.cuda.mem_get_info(device)[0] // 4)
    numbers = torch.ones(max(size // 4, 2**20), dtype=torch.float32, device=device)
    best = float("inf")
    for _ in range(repeats):
        _wait(device)
        started = time.perf_counter()
        numbers.sum()
        _wait(device)
        best = min(best, time.perf_counter() - started)
    return numbers.nbytes / best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
