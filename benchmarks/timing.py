"""Measurements in a worker: times of calls, the device's peak rates, and the kernels of a profile."""

from __future__ import annotations

import functools
import math
import re
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.record import KernelTime

ROUND_MS = 20.0  # minimum length of a round, so that timer resolution and a stray interrupt do not matter
_NO_STALL = 20  # rounds: a call longer than this is a long step, not a stalled one
# Length of warm-up calls before a round, since another process used the device, the caches and the clocks.
SETTLE_MS = ROUND_MS

PEAK_SECONDS = {"cuda": 3.0, "cpu": 1.0}  # time to search for one peak rate
MOST_KERNELS = 12  # maximum kernel names of a row
# Library templates that run their first argument: the kernel is named after that argument.
WRAPPER = re.compile(r"(?:cutlass::(?:Kernel2?|device_kernel)|(?:\w+::)*enable_sm\w+)<\s*([\w:]+)")

Step = Callable[[], Any]


@dataclass(frozen=True)
class Timed:
    """Milliseconds per call, over back-to-back calls. ``device_ms`` is None without a GPU."""

    calls: int
    wall_ms: float
    device_ms: float | None

    @property
    def milliseconds(self) -> float:
        return self.wall_ms if self.device_ms is None else self.device_ms


def synchronise(device: str) -> None:
    """Wait for the device; nothing on a CPU."""
    if device != "cpu":
        torch.cuda.synchronize()


def once(step: Step, device: str) -> float:
    """Wall seconds of one call to its result."""
    synchronise(device)
    began = time.perf_counter()
    step()
    synchronise(device)
    return time.perf_counter() - began


def back_to_back(step: Step, device: str, calls: int) -> Timed:
    """Time ``calls`` consecutive calls without synchronisation between them."""
    synchronise(device)
    if device == "cpu":
        began = time.perf_counter()
        for _ in range(calls):
            step()
        return Timed(calls, (time.perf_counter() - began) * 1e3 / calls, None)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    began = time.perf_counter()
    start.record()
    for _ in range(calls):
        step()
    end.record()
    torch.cuda.synchronize()
    wall = (time.perf_counter() - began) * 1e3 / calls
    return Timed(calls, wall, start.elapsed_time(end) / calls)


def host(step: Step, device: str) -> float | None:
    """Settle, and return the median milliseconds until its calls returned, or None on a CPU.

    A call that fills the device's queue waits for the device, and its time includes this wait.
    """
    taken = settle(step, device)
    return None if device == "cpu" else statistics.median(taken) * 1e3


def settle(step: Step, device: str, milliseconds: float = SETTLE_MS) -> list[float]:
    """Call for at least ``milliseconds`` and at least once, with the device's queue empty before each call.

    Returns the seconds until each call returned.
    """
    taken: list[float] = []
    synchronise(device)
    until = time.perf_counter() + milliseconds / 1e3
    while not taken or time.perf_counter() < until:
        began = time.perf_counter()
        step()
        taken.append(time.perf_counter() - began)
        synchronise(device)
    return taken


def calibrate(step: Step, device: str, milliseconds: float = ROUND_MS) -> int:
    """Number of back-to-back calls in a round of at least ``milliseconds``, by device clock and wall clock."""
    settle(step, device)
    calls = 1
    while True:
        # The fastest of three: one stalled call would look like a slow step, and rounds would be too short.
        # A first call of many rounds' length is not a stall, and is not repeated, since long steps are expensive.
        each = float("inf")
        for _ in range(3):
            timed = back_to_back(step, device, calls)
            each = min(each, timed.wall_ms, timed.milliseconds)
            if each * calls >= _NO_STALL * milliseconds:
                break
        if each * calls >= milliseconds:
            return calls
        # A tenth more than needed, since the next round may be a little faster.
        wanted = math.ceil(1.1 * milliseconds / each) if each > 0 else calls * 10
        calls = max(calls + 1, min(wanted, calls * 10))


# Peak rates -----------------------------------------------------------------------------------------------------------


def measure_peaks(device: str, dtypes: list[str], *, quick: bool = False) -> dict[str, Any]:
    """Bandwidths (byte/s; a copy counts its reads and writes) and FLOP/s of a matrix product by dtype.

    Each is the best of several rounds. ``quick`` takes a fifth of the time, on a CPU with smaller operands.
    ``float32_matmul_precision`` ``high`` means TF32 on GPUs that have it.
    """
    if device == "cpu":
        size, width = (64 << 20, 512) if quick else (256 << 20, 2048)
    else:
        torch.set_float32_matmul_precision("high")
        size, width = min(4 << 30, torch.cuda.mem_get_info()[0] // 4), 8192  # far beyond any cache, within free memory
    budget, flops = PEAK_SECONDS[device] / (5 if quick else 1), {}
    with torch.inference_mode():
        copy, read = _bandwidths(device, size, budget)
        for dtype in dict.fromkeys(dtypes):
            # Random operands: constant operands draw less power, so clocks would be higher than in real products.
            a, b = (torch.randn(width, width, device=device).to(getattr(torch, dtype)) for _ in range(2))
            flops[dtype] = 2 * width**3 / _best_seconds(functools.partial(torch.matmul, a, b), device, budget)
    return {
        "copy_bandwidth": copy,
        "read_bandwidth": read,
        "matmul_flops": flops,
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
    }


def _bandwidths(device: str, size: int, budget: float) -> tuple[float, float]:
    source = torch.ones(size // 4, device=device)
    target = torch.empty_like(source)
    copy = 2 * size / _best_seconds(lambda: target.copy_(source), device, budget)
    # Only rows are summed: a full reduction ends in a few blocks, which would dominate the measurement.
    rows = source.view(-1, 4096) if source.numel() % 4096 == 0 else source.view(1, -1)
    return copy, size / _best_seconds(lambda: rows.sum(1), device, budget)


def _best_seconds(step: Callable[[], Any], device: str, budget: float) -> float:
    began = time.perf_counter()
    calls = calibrate(step, device)
    best = float("inf")
    while True:
        best = min(best, back_to_back(step, device, calls).milliseconds)
        if time.perf_counter() - began > budget:
            return best / 1e3


# Kernels --------------------------------------------------------------------------------------------------------------


def gpu_kernels(events: Iterable[Any]) -> list[Any]:
    """The profiler's events of kernels that ran on a GPU, without copies and fills."""
    on_gpu = (event for event in events if event.device_type.name == "CUDA")
    ran = (event for event in on_gpu if not getattr(event, "is_user_annotation", False))
    return [event for event in ran if not event.name.startswith(("Memcpy", "Memset"))]


def longest_kernels(events: Iterable[Any], calls: int) -> tuple[list[KernelTime], KernelTime | None]:
    """The ``MOST_KERNELS`` longest kernels by name, and all others together; means over the profiled calls."""
    found: dict[str, list[float]] = defaultdict(list)
    for event in events:
        found[short_name(event.name)].append(event.time_range.elapsed_us())
    named = [_mean(name, times, calls) for name, times in found.items()]
    named.sort(key=lambda kernel: (-kernel.microseconds, kernel.name))
    left = named[MOST_KERNELS:]
    if not left:
        return named, None
    times = [time for kernel in left for time in found[kernel.name]]
    return named[:MOST_KERNELS], _mean(f"{len(left)} other{'s' if len(left) > 1 else ''}", times, calls)


def _mean(name: str, times: Sequence[float], calls: int) -> KernelTime:
    return KernelTime(name=name, launches=len(times) / calls, microseconds=round(sum(times) / calls, 3))


def short_name(name: str) -> str:
    """A kernel's name without its return type, template arguments and parameters."""
    name = re.sub(r"[<>]=", "=", name.replace("(anonymous namespace)::", ""))  # comparisons are not templates
    while (described := WRAPPER.search(name)) is not None:
        name = described[1] + name[described.end() :]
    plain, depth = "", 0
    for letter in name:
        depth += (letter == "<") - (letter == ">")
        if not depth and letter == "(":
            break
        plain += letter if not depth and letter != ">" else ""
    words = plain.split()  # a template's name follows its return type, for example "void"
    return words[-1] if words else name
