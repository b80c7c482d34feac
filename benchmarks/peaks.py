"""What this very device does at best, measured shortly before: the roof that utilisation is held against."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.timing import back_to_back, calibrate

BUDGET_S = {"cuda": 3.0, "cpu": 1.0}  # per peak; the best of what fits


def measure(device: str, dtypes: list[str], *, quick: bool = False) -> dict[str, Any]:
    """Bandwidths and matrix-product rates of a device, the best of several rounds each.

    Args:
        device: ``cuda`` or ``cpu``.
        dtypes: The dtypes of the run's cases.
        quick: A fifth of the time, on smaller operands.

    Returns:
        ``copy_bandwidth`` and ``read_bandwidth`` in byte/s (a copy reads and writes, both counted); ``matmul_flops``
        in FLOP/s by dtype; ``float32_matmul_precision`` as it was set: ``high`` means TF32 where the GPU has it.
    """
    on_gpu = device != "cpu"
    if on_gpu:
        torch.set_float32_matmul_precision("high")
    budget = BUDGET_S[device] / (5 if quick else 1)
    with torch.inference_mode():
        copy, read = _bandwidths(device, _bandwidth_bytes(device, quick), budget)
        flops = {dtype: _matmul_flops(device, getattr(torch, dtype), quick, budget) for dtype in dict.fromkeys(dtypes)}
    return {
        "copy_bandwidth": copy,
        "read_bandwidth": read,
        "matmul_flops": flops,
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
    }


def _bandwidth_bytes(device: str, quick: bool) -> int:
    """Far beyond any cache, and within what is free."""
    if device == "cpu":
        return 64 << 20 if quick else 256 << 20
    free, _ = torch.cuda.mem_get_info()
    return min(4 << 30, free // 4)


def _bandwidths(device: str, size: int, budget: float) -> tuple[float, float]:
    source = torch.ones(size // 4, device=device)
    target = torch.empty_like(source)
    copy = 2 * size / _best_seconds(lambda: target.copy_(source), device, budget)
    # Only rows are summed: a full reduction ends in a few blocks, which would be what is measured.
    rows = source.view(-1, 4096) if source.numel() % 4096 == 0 else source.view(1, -1)
    read = size / _best_seconds(lambda: rows.sum(1), device, budget)
    return copy, read


def _matmul_flops(device: str, dtype: torch.dtype, quick: bool, budget: float) -> float:
    width = (512 if quick else 2048) if device == "cpu" else 8192
    # Random operands: constant ones draw less power, and the clocks would be higher than in any real product.
    a, b = (torch.randn(width, width, device=device).to(dtype) for _ in range(2))
    return 2 * width**3 / _best_seconds(lambda: a @ b, device, budget)


def _best_seconds(step: Callable[[], Any], device: str, budget: float) -> float:
    began = time.perf_counter()
    calls = calibrate(step, device)
    best = float("inf")
    while True:
        timed = back_to_back(step, device, calls)
        best = min(best, timed.wall_ms if timed.device_ms is None else timed.device_ms)
        if time.perf_counter() - began > budget:
            return best / 1e3
