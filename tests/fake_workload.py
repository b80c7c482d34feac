"""A workload of tiny models, some of which misbehave, for the tests of the harness. Loaded by its dotted name."""

import errno
import os
import pathlib
import time
from typing import Any

import torch
from torch import nn

from benchmarks.families.base import Prepared, Training
from benchmarks.plan import Case
from benchmarks.strategies import reference_losses
from tests.blocks import Block
from zoo.engine.region import Region

WIDTH = 8


class Model(nn.Module):
    regions = (Region(Block),)

    def __init__(self, behaviour: str, *, ours: bool = True) -> None:
        super().__init__()
        self.behaviour = behaviour
        self.ours = ours
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.behaviour != "good":
            misbehave(self.behaviour)
        if self.ours:
            x = x + 0.0  # made inside the mode, so that the first region's input is of the others' kind
        for block in self.blocks:
            x = block(x)
        return x * torch.nan if self.behaviour == "nan" else x


@torch.compiler.disable
def misbehave(behaviour: str) -> None:
    if behaviour == "crash":
        print("about to abort", file=__import__("sys").stderr, flush=True)
        os.abort()
    if behaviour == "raise":
        raise ValueError("this model does not like its input")
    if behaviour == "oom":
        raise torch.OutOfMemoryError("tried to allocate 7.00 GiB")
    if behaviour == "busy":
        raise RuntimeError("CUDA error: CUDA-capable device(s) is/are busy or unavailable")
    if behaviour == "full":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/caches/kernel.so")
    if behaviour == "sleep":
        time.sleep(60)
    if behaviour.startswith("hang") and (marker := os.environ.get("FAKE_HANGS")):
        pathlib.Path(marker).touch()
        time.sleep(60)
    if behaviour == "print":
        print("a stray print")
        os.write(1, b'{"ok": false}\n')


class FakeWorkload:
    """``good`` runs; ``upstream-<behaviour>`` misbehaves in upstream's arms only; other models in all arms."""

    family = "fake"
    models = (
        "good", "upstream-crash", "crash", "raise", "oom", "busy", "full", "sleep", "hang", "hang-too", "print", "nan",
        "huge",
    )  # fmt: skip
    inputs = ("small", "large")

    def default_races(self, device: str, quick: bool, workload: str = "inference") -> list[tuple[str, str]]:
        return [("good", "small")]

    def dtypes(self, device: str) -> tuple[str, ...]:
        return ("float32", "bfloat16")

    def refuses(self, case: Case) -> str | None:
        return "tuning a fake is pointless" if case.impl == "upstream-tuned" else None

    def memory_bytes(self, case: Case, *, reference: bool) -> int:
        return 1 << 60 if case.model == "huge" else 1 << 20

    def prepare(self, case: Case, *, data_root: str | None, seed: int) -> Prepared:
        torch.manual_seed(seed)
        behaviour = case.model
        if behaviour.startswith("upstream-"):
            behaviour = behaviour.removeprefix("upstream-") if case.impl == "upstream" else "good"
        model = Model(behaviour, ours=case.impl == "zoo").eval()
        x = torch.randn(16, WIDTH)
        exact = Model("good").double()
        exact.load_state_dict(model.state_dict())
        prepared = Prepared(
            model=model, inputs={"x": x}, compile_regions=compile_blocks, reference=lambda: exact(x.double()),
            bytes=1000, bytes_formula="input and output", data="generated", preparation_seconds={"nothing": 0.0},
            sizes={"rows": 16}, count=16, unit="rows",
        )  # fmt: skip
        if case.workload == "inference":
            return prepared
        training = Training(loss=squares, batch=draw, learning_rate=1e-2)
        return prepared.for_training(reference=lambda: reference_losses(exact, training), training=training)


def squares(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def draw(index: int) -> torch.Tensor:
    return torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(index))


def compile_blocks(model: nn.Module, **options: Any) -> None:
    for module in model.modules():
        if isinstance(module, Block):
            module.compile(**options)


WORKLOAD = FakeWorkload()
