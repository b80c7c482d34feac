"""What a model declares: the block classes to compile, each with its graph budget."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class Region:
    """A hot submodule class that is compiled once and reused by every copy.

    Args:
        cls: The exact module class. Subclasses do not count.
        graphs: The graph budget: how many unique graphs all copies of this class together may produce
            for one model input shape in one mode. ``None`` means one for each distinct layer signature.
        why: One sentence on why the block is cut here, for the report and the docs.
        compile_threads: How many processes Inductor compiles the kernels of one graph in; ``None`` leaves its default.
            1 compiles in this process: faster for a region of a few kernels, where handing a kernel to a worker takes
            longer than compiling it. Or a function of the model's device (None without parameters) and of whether it
            is in training mode, which says one of these; it is not asked where kernels are tuned by trying many.
        autotune_pointwise: Whether Inductor compiles and times several block sizes for each pointwise kernel; ``None``
            leaves its default, which does. False takes the first: for passes over memory, which run as fast in any.
        dynamic: True compiles with symbolic sizes, on purpose: one graph for tensors of all sizes, for a block that
            holds no weights of its own. ``None`` leaves what ``compile_regions`` was asked for.
        mode: A ``torch.compile`` mode for this region; with ``backend`` and ``fullgraph`` it comes before what
            ``compile_regions`` was asked for, which None leaves.
        backend: A ``torch.compile`` backend for this region.
        fullgraph: False lets the graph of this region break.

    Raises:
        TypeError: If ``cls`` is not a module class (a string, say: names match by accident, classes do not).
        ValueError: If ``graphs`` or ``compile_threads`` is not positive.
    """

    cls: type[nn.Module]
    graphs: int | None = None
    why: str = ""
    compile_threads: int | Callable[[torch.device | None, bool], int | None] | None = None
    autotune_pointwise: bool | None = None
    dynamic: bool | None = None
    mode: str | None = None
    backend: Any = None
    fullgraph: bool | None = None

    def __post_init__(self) -> None:
        if not (isinstance(self.cls, type) and issubclass(self.cls, nn.Module)):
            raise TypeError(f"a region is an nn.Module class, got {self.cls!r}; pass the class itself, not its name")
        for name, value in (("graphs", self.graphs), ("compile_threads", self.compile_threads)):
            if value is not None and not callable(value) and value < 1:
                raise ValueError(f"region {self.cls.__name__}: {name} is {value}, but a region needs at least one")

    def threads(self, model: nn.Module) -> int | None:
        """Processes for the kernels of one graph of this model's; None is Inductor's default."""
        wanted = self.compile_threads
        found = wanted(_device_of(model), model.training) if callable(wanted) else wanted
        if found is not None and found < 1:
            raise ValueError(f"region {self.cls.__name__}: compile_threads gives {found}, but it takes at least one")
        return found


def in_process_on_gpus(device: torch.device | None, training: bool) -> int | None:
    """``compile_threads`` of a region that is a few Triton kernels in inference, and with its backward a dozen."""
    return 1 if device is not None and device.type == "cuda" and not training else None


def _device_of(model: nn.Module) -> torch.device | None:
    return next((parameter.device for parameter in model.parameters()), None)
