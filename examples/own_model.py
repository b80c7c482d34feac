"""A model of your own: see what repeats in it, compile that once, and capture its calls in a CUDA graph.

python examples/own_model.py
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.benchmark import Timer

import zoo


class Block(nn.Module):
    """One of many copies: it reads no number of its own, so that all share one graph."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[B, width] -> [B, width]."""
        out: Tensor = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return out


class Model(nn.Module):
    """Blocks in a row."""

    def __init__(self, width: int = 256, depth: int = 24) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        """[B, width] -> [B, width]."""
        for block in self.blocks:
            x = block(x)
        return x


@torch.inference_mode()
def main() -> None:
    """Compare the compiled model with the eager one."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, x = Model().to(device).eval(), torch.randn(8, 256, device=device)
    expected, eager = model(x), Timer("model(x)", globals={"model": model, "x": x}).blocked_autorange()
    print(zoo.find_regions(model, args=(x,)))  # one region class, one graph

    zoo.compile_regions(model)
    print(zoo.warm_up(model, x))  # pays for compilation now
    fast = zoo.cuda_graph(model)
    with zoo.enforce_budget(model):  # an error if a second graph is compiled
        for _ in range(3):  # runs, is captured, replays
            torch.testing.assert_close(fast(x), expected, rtol=1e-3, atol=1e-3)
    compiled = Timer("model(x)", globals={"model": fast, "x": x}).blocked_autorange()
    print(f"{zoo.captures(fast).replays} replays; {eager.median * 1e3:.2f} ms eager, {compiled.median * 1e3:.2f} ms")


if __name__ == "__main__":
    main()
