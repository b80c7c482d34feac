"""What a profile says of kernels: how many a call launches, and which of them it spends its time in."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.record import Kernel

MOST = 12  # names that a row holds
# Templates of libraries that run what their first argument describes: that is the kernel's name, not the template's.
WRAPPER = re.compile(r"cutlass::(Kernel2?|device_kernel)|(\w+::)*enable_sm\w+")


def kernels(events: Iterable[Any]) -> list[Any]:
    """The profiler's events of kernels that ran on a GPU; copies and fills are none."""
    return [
        event
        for event in events
        if event.device_type.name == "CUDA"
        and not getattr(event, "is_user_annotation", False)
        and not event.name.startswith(("Memcpy", "Memset"))
    ]


def longest(events: Iterable[Any], calls: int) -> tuple[list[Kernel], Kernel | None]:
    """Kernels of one call by name, those first that take longest, and all that are not among the first ``MOST``.

    Args:
        events: The events of ``kernels``.
        calls: How many calls were profiled; figures are means over them.
    """
    found: dict[str, list[float]] = defaultdict(list)
    for event in events:
        found[shortened(event.name)].append(event.time_range.elapsed_us())
    named = [_mean(name, times, calls) for name, times in found.items()]
    named.sort(key=lambda kernel: (-kernel.microseconds, kernel.name))
    left = named[MOST:]
    if not left:
        return named, None
    times = [time for kernel in left for time in found[kernel.name]]
    return named[:MOST], _mean(f"{len(left)} other{'s' if len(left) > 1 else ''}", times, calls)


def _mean(name: str, times: Sequence[float], calls: int) -> Kernel:
    return Kernel(name=name, launches=len(times) / calls, microseconds=round(sum(times) / calls, 3))


def shortened(name: str) -> str:
    """A kernel's name without its return type, template arguments and parameters.

    Names of cuBLAS, cuDNN and Triton, which have none of these, stay as they are.
    """
    plain, first = _without_templates(name.replace("(anonymous namespace)::", ""))
    words = plain.split()  # a template's name follows its return type, and "void" is one
    if not words:
        return name
    return shortened(first) if first and WRAPPER.fullmatch(words[-1]) else words[-1]


def _without_templates(name: str) -> tuple[str, str]:
    """The name up to its parameters without what stands in angle brackets, and the last template's first argument."""
    kept, first = [], ""
    angles = parentheses = commas = 0
    for letter in name:
        if letter == "(":
            if not angles:
                break
            parentheses += 1
        if not parentheses:  # an angle bracket within parentheses may be a comparison
            if letter == "<":
                angles += 1
                if angles == 1:
                    first, commas = "", 0
                    continue
            elif letter == ">" and angles:
                angles -= 1
                if not angles:
                    continue
            elif letter == "," and angles == 1:
                commas += 1
        if not angles:
            kept.append(letter)
        elif not commas:
            first += letter
        if letter == ")":
            parentheses -= 1
    return "".join(kept), first
