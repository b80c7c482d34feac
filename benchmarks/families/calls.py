"""Eight blocks so small that a call is only host work: measures the cost of calling a compiled region.

A region call takes the difference of ``host_ms`` between ``regional`` and ``full``, divided by eight.

Shapes: B batch, D width.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zoo
from benchmarks import strategies
from benchmarks.compiler import other_cache
from benchmarks.families.base import Prepared, Training, Workload, autocast_of, dtype_of, weights_dtype
from benchmarks.plan import Case
from benchmarks.strategies import reference_losses
from zoo.ops.transformer import bias_gelu, layer_norm

BATCH, WIDTH, DEPTH = 4, 256, 8
GRAPHS = {f"graphs-{count}": count for count in (1, 8, 24)}


class Block(nn.Module):
    """A block in the usual style: Inductor compiles norm and activation."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """x: [B, D] to [B, D]."""
        return x + self.down(F.gelu(self.up(self.norm(x))))


class KernelBlock(Block):
    """A block in the zoo's style: norm and activation are kernels, and nothing is left to fuse."""

    def forward(self, x: Tensor) -> Tensor:
        up = F.linear(layer_norm(x, self.norm.weight, self.norm.bias, self.norm.eps), self.up.weight)
        return x + self.down(bias_gelu(up, self.up.bias, False))


BLOCKS = {"block-8": Block, "kernel-block-8": KernelBlock}


class Blocks(nn.Module):
    def __init__(self, block: type[Block], width: int) -> None:
        super().__init__()
        # Without this parameter only the first block's input would have no gradient, which gives two graphs.
        self.scale = nn.Parameter(torch.ones(width))
        self.blocks = nn.ModuleList(block(width) for _ in range(DEPTH))
        self.others: list[nn.Module] = []  # other models of the class with their graphs; a list hides submodules

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        for block in self.blocks:
            x = block(x)
        return x


class CallsWorkload(Workload):
    """A model of eight blocks. The input's name says how many graphs the compiler holds for the block's class."""

    family = "calls"
    models = tuple(BLOCKS)
    inputs = tuple(GRAPHS)
    workloads = ("inference", "train")
    gpu_dtypes = ("float32", "bfloat16")
    cpu_race = ("block-8", "graphs-1")
    gpu_races = tuple((model, name) for model in BLOCKS for name in GRAPHS)

    def cannot(self, case: Case) -> str | None:
        if case.strategy == "hierarchical":
            return "a whole trace calls no region"
        return None if case.impl == "zoo" else "these blocks are of no library"

    def estimate(self, case: Case, *, reference: bool) -> int:
        return 0

    def build(self, case: Case, *, data_root: str | None, seed: int) -> Prepared:
        model = _model(case, WIDTH, seed)
        if case.strategy == "regional":
            with tempfile.TemporaryDirectory() as folder, other_cache(Path(folder)):  # the case's own stays empty
                for width in (WIDTH + 8 * other for other in range(1, GRAPHS[case.input])):
                    model.others.append(zoo.compile_regions(_model(case, width, seed=0), backend=strategies.backend()))
                    with strategies.execution_mode(case):
                        model.others[-1](_input(case, width, seed=0))
        training = None
        if case.workload == "train":
            training = Training(
                loss=lambda model, batch: model(batch).square().mean(),
                batch=lambda index: _input(case, WIDTH, seed + 1 + index),
                learning_rate=1e-3,
                autocast=autocast_of(dtype_of(case)),
            )
        x = _input(case, WIDTH, seed + 1)

        def reference() -> Tensor:
            exact = _model(case, WIDTH, seed)
            output: Tensor = exact.double()(x.double()) if training is None else reference_losses(exact, training)
            return output

        return Prepared(
            model=model,
            inputs={"x": x} if training is None else {},
            reference=reference,
            bytes=sum(p.nbytes for p in model.parameters()) + 2 * x.nbytes,
            bytes_formula="Every weight is read once, the input is read and the output is written.",
            data="generated (normal)",
            sizes={"graphs": GRAPHS[case.input], "blocks": DEPTH, "width": WIDTH, "batch": BATCH},
            training=training,
        )


def _model(case: Case, width: int, seed: int) -> Blocks:
    """The case's model. Training keeps float32 weights, under autocast for other dtypes."""
    torch.manual_seed(seed)
    return Blocks(BLOCKS[case.model], width).train(case.workload == "train").to(case.device, weights_dtype(case))


def _input(case: Case, width: int, seed: int) -> Tensor:
    x = torch.randn(BATCH, width, generator=torch.Generator().manual_seed(seed))
    return x.to(case.device, weights_dtype(case))


WORKLOAD = CallsWorkload()
