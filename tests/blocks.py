"""Small models for tests of the engine, and the graphs of compiled ones."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from zoo import Region
from zoo.engine.compile import plan_of
from zoo.engine.graph_log import GRAPH_LOG

MODES: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "grad": nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}


def graphs_of(model: nn.Module) -> dict[str, int]:
    """Graphs of each region of a compiled model since it was compiled, by the region's name."""
    found: dict[str, int] = {}
    for entry in GRAPH_LOG.of(plan_of(model).log_id):
        found[entry.region.__name__] = found.get(entry.region.__name__, 0) + entry.graphs
    return found


class Wired(nn.Module):
    """Has a linear layer, and the attributes that it is given; what a block does with them, its forward says."""

    def __init__(self, width: int = 4, **attributes: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        for name, value in attributes.items():
            setattr(self, name, value)


class Block(Wired):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.linear(x))


class Stack(nn.Module):
    """A stem and a few copies of one block, declared."""

    regions: ClassVar[tuple[Region, ...]] = (Region(Block, graphs=1),)

    def __init__(self, width: int = 8, depth: int = 3) -> None:
        super().__init__()
        self.stem = nn.Linear(4, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x


class IndexedBlock(Wired):
    """Reads its index: a graph a layer."""

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * (self.index + 1)


class Asserting(Wired):
    """Stands in this module since pytest rewrites assertions in modules of tests."""

    def forward(self, x: Tensor) -> Tensor:
        assert x.shape[-2] == 2, "two rows are expected"
        return self.linear(x)


class Disabled(Wired):
    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class Child(Block):
    """Inherits forward."""


class Doubled(nn.Linear):
    """A product that was modified, which only its forward knows."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Dropping(Wired):
    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(self.norm(self.linear(x)), 0.5, self.training)


class Sequence(nn.Module):
    """Any blocks, one after the other, each given what the call gives; declares nothing."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor, *given: Any) -> Tensor:
        for block in self.blocks:
            x = block(x, *given)
        return x


class Declared(Sequence):
    regions: ClassVar[tuple[Region, ...]] = ()


def declared(*regions: Region) -> type[Declared]:
    return type("DeclaredHere", (Declared,), {"regions": regions})


def nested() -> nn.Module:
    """A class that repeats within another that does."""
    return nn.Sequential(Sequence(Block(4)), Sequence(Block(4)))


def outputs_and_gradients(model: nn.Module, inputs: Any, autocast: bool = False) -> list[Tensor]:
    """The first output, and the gradients of all parameters; inputs that are no dict are the first argument."""
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = model(**inputs)[0] if isinstance(inputs, dict) else model(inputs)[0]
    above = torch.linspace(-1, 1, out.numel()).view(out.shape)
    return [out.detach(), *torch.autograd.grad((out.float() * above).sum(), list(model.parameters()))]


def doubles(call: Callable[[], Tensor], layers: Iterable[nn.Module]) -> None:
    """Assert that a call whose layers a hook doubles gives what it gives with weights of twice the size."""
    layers, before = list(layers), call()
    for layer in layers:
        layer.register_forward_hook(lambda layer, x, out: 2 * out)
    found = call()
    for layer in layers:
        layer._forward_hooks.clear()
        with torch.no_grad():
            for weight in layer.parameters():
                weight *= 2
    torch.testing.assert_close(found, call())
    assert not torch.allclose(found, before)


def same_gradients(ours: nn.Module, theirs: nn.Module, **limits: float) -> None:
    for (name, found), expected in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, **limits, msg=lambda text, name=name: f"{name}: {text}")
