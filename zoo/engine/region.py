"""What a model declares: the block classes to compile, each with its graph budget."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn


@dataclass(frozen=True)
class Region:
    """A hot submodule class that is compiled once and reused by every copy.

    Args:
        cls: The exact module class. Subclasses do not count.
        graphs: The graph budget: how many unique graphs all copies of this class together may produce
            for one model input shape in one mode. ``None`` means one for each distinct layer signature.
        why: One sentence on why the block is cut here, for the report and the docs.
        dynamic: True compiles with symbolic sizes, on purpose: one graph for tensors of all sizes, for a block that
            holds no weights of its own. ``None`` keeps the argument of ``compile_regions``.
        options: Inductor options for this region, as ``torch.compile`` takes them. Those of ``compile_regions``
            override them.
        mode: A ``torch.compile`` mode for this region. This, ``backend`` and ``fullgraph`` override the arguments of
            ``compile_regions`` unless they are None.
        backend: A ``torch.compile`` backend for this region.
        fullgraph: False lets the graph of this region break.

    Raises:
        TypeError: If ``cls`` is not a module class (a string, say: names match by accident, classes do not), or
            ``dynamic``, ``fullgraph`` or ``options`` has another type.
        ValueError: If ``graphs`` is no positive integer.
    """

    cls: type[nn.Module]
    graphs: int | None = None
    why: str = ""
    dynamic: bool | None = None
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    mode: str | None = None
    backend: Any = None
    fullgraph: bool | None = None

    def __post_init__(self) -> None:
        if not (isinstance(self.cls, type) and issubclass(self.cls, nn.Module)):
            got = repr(self.cls) if isinstance(self.cls, str) else f"a {type(self.cls).__name__}"
            raise TypeError(
                f"a region is an nn.Module class, got {got}; pass a module's class, as in [Block]. Inputs of a call "
                "are args=(x,) or kwargs={...}"
            )
        for name, kinds in {"dynamic": bool | None, "fullgraph": bool | None, "options": Mapping}.items():
            if not isinstance(value := getattr(self, name), kinds):
                expected = "a dict" if name == "options" else "True, False or None"
                raise TypeError(f"region {self.cls.__name__}: {name} is {value!r}, expected {expected}")
        if self.graphs is not None and not (isinstance(self.graphs, int) and self.graphs >= 1):
            raise ValueError(f"region {self.cls.__name__}: graphs is {self.graphs!r}, expected a positive integer")
