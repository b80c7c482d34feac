"""One arm of a race, as data: what is run, how it is compiled, on what."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

STRATEGIES = ("eager", "full", "regional", "hierarchical")
IMPLEMENTATIONS = ("zoo", "upstream", "upstream-tuned")
MODES = ("default", "reduce-overhead", "max-autotune-no-cudagraphs")
WORKLOADS = ("inference",)
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One arm. Cases that agree in everything but implementation, strategy, mode and cuda_graph race each other.

    ``cuda_graph`` puts our outer CUDA graph around the step; ``control`` marks the second copy of an arm that
    gives the A/A noise floor.
    """

    family: str
    model: str
    input: str
    workload: str = "inference"
    dtype: str = "float32"
    device: str = "cpu"
    impl: str = "zoo"
    strategy: str = "eager"
    mode: str = "default"
    cuda_graph: bool = False
    dynamic: bool = False
    control: bool = False

    @property
    def race(self) -> tuple[str, ...]:
        """What all arms of one race share."""
        return (self.family, self.model, self.input, self.workload, self.dtype, self.device)

    @property
    def arm(self) -> str:
        """The arm's name within its race: ``zoo regional + CUDA graph``."""
        name = f"{self.impl} {self.strategy}"
        if self.mode != "default":
            name += f" {self.mode}"
        if self.dynamic:
            name += " dynamic"
        if self.cuda_graph:
            name += " + CUDA graph"
        return name + (" (A/A)" if self.control else "")

    @property
    def key(self) -> str:
        """A stable identity across runs, for ``--resume`` and ``compare``."""
        return " / ".join((*self.race, self.arm))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
