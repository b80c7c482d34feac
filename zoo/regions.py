"""What can be compiled on its own, and what stands in its way."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class Region:
    """A hot submodule class that is compiled once and reused by every copy.

    Args:
        cls: The exact module class. Subclasses do not count, and a class whose ``forward`` lives in
            ``torch.nn`` is refused.
        graphs: The graph budget: how many unique graphs all copies of this class together may produce
            for one model input shape in one mode. ``None`` means one for each distinct layer signature.
        why: One sentence on why the block is cut here, for the report and the docs.
    """

    cls: type[nn.Module]
    graphs: int | None = None
    why: str = ""
