"""Work beside other work, in a CUDA graph."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch

import zoo
from zoo.engine.side_stream import branch
from zoo.unet import ResnetBlock


@pytest.mark.gpu
def test_a_branch_runs_beside_and_is_waited_for() -> None:
    x = torch.randn(512, 512, device="cuda")
    streams = []

    def step(x: torch.Tensor) -> torch.Tensor:
        with branch(x.device) as wait:
            beside = x
            for _ in range(20):
                beside = (beside @ x).tanh()
            streams.append(torch.cuda.current_stream())
        other = x.cos()
        streams.append(torch.cuda.current_stream())
        if wait is not None:
            wait()
        return beside + other

    expected = step(x)
    assert streams[0] == streams[1]
    graphed = zoo.cuda_graph(step, (x,))
    assert streams[-2] != streams[-1]
    for _ in range(3):
        torch.testing.assert_close(graphed(x), expected)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_unet_waits_before_it_reads_what_the_branch_computes(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = zoo.create("unet-debug")
    inputs = zoo.example_inputs(model)
    with torch.inference_mode():
        expected = model(**inputs).sample
    happened: list[str] = []

    @contextmanager
    def noting(_: torch.device) -> Iterator[Any]:
        happened.append("branch")
        yield lambda: happened.append("wait")
        happened.append("left")

    def read(*_: Any) -> None:
        happened.append("read")

    monkeypatch.setattr("zoo.unet.model.branch", noting)
    if compiled:
        zoo.compile_regions(model, backend="eager")
    for block in model.modules():
        if isinstance(block, ResnetBlock):
            block.register_forward_pre_hook(read)
    with torch.inference_mode(), zoo.enforce_budget(model) if compiled else nullcontext():
        torch.testing.assert_close(model(**inputs).sample, expected)
    assert happened[:3] == ["branch", "left", "wait"] and set(happened[3:]) == {"read"}
