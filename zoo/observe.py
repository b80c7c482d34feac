"""One eager call watched from outside: what each region is fed, and its share of the device's time."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zoo.signature import input_signature

if TYPE_CHECKING:
    from zoo.regions import Region


def observe_inputs(
    model: nn.Module, chosen: Mapping[Region, Mapping[str, nn.Module]], inputs: Mapping[str, Any]
) -> dict[str, list[Hashable]]:
    """Distinct kinds of input that each region module meets in one eager call."""
    seen: dict[str, dict[Hashable, None]] = {name: {} for modules in chosen.values() for name in modules}
    handles = []
    for modules in chosen.values():
        for name, module in modules.items():

            def note(_: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
                seen[name][input_signature(*args, **kwargs)] = None

            handles.append(module.register_forward_pre_hook(note, with_kwargs=True))
    try:
        with torch.no_grad(), _eager():
            model(**inputs)
    finally:
        for handle in handles:
            handle.remove()
    return {name: list(kinds) for name, kinds in seen.items()}


def device_shares(
    model: nn.Module, chosen: Mapping[Region, Mapping[str, nn.Module]], inputs: Mapping[str, Any]
) -> dict[type[nn.Module], float]:
    """Each region class' share of the model's kernel time in one eager call; empty where there is no GPU."""
    if not any(p.is_cuda for p in model.parameters()):
        return {}
    from torch.profiler import ProfilerActivity, profile, record_function

    open_ranges: list[Any] = []
    handles = []

    def enter(module: nn.Module, *_: Any) -> None:
        open_ranges.append(record_function(f"zoo.region/{type(module).__name__}"))
        open_ranges[-1].__enter__()

    def leave(*_: Any) -> None:
        open_ranges.pop().__exit__(None, None, None)

    try:
        for modules in chosen.values():
            for module in modules.values():
                handles.append(module.register_forward_pre_hook(enter))
                handles.append(module.register_forward_hook(leave, always_call=True))
        with torch.no_grad(), _eager():
            with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
                with record_function("zoo.model"):
                    model(**inputs)
                torch.cuda.synchronize()
    finally:
        for handle in handles:
            handle.remove()
    # CPU-side ranges own the kernels launched inside them; the device-side copies of the ranges would count twice.
    ranges = [e for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CPU]
    total = sum(e.device_time_total for e in ranges if e.name == "zoo.model")
    if not total:
        return {}
    return {
        region.cls: sum(e.device_time_total for e in ranges if e.name == f"zoo.region/{region.cls.__name__}") / total
        for region in chosen
    }


@contextmanager
def _eager() -> Iterator[None]:
    # A hook on a compiled module would be traced into it, and compiling is not what a report should cost.
    with torch.compiler.set_stance("force_eager"):
        yield
