"""Training in the harness: every arm takes the same steps, and is timed on steps that train."""

import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.families import load
from benchmarks.families.base import Prepared
from benchmarks.strategies import Trainer
from tests import runs
from tests.runs import FAKE, handler

CASE = replace(runs.CASE, workload="train")


@pytest.fixture(autouse=True)
def _light_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BENCHMARKS_BACKEND", "aot_eager")


def prepare(**changes: Any) -> Prepared:
    return load(FAKE).prepare(replace(CASE, **changes), data_root=None, seed=0)


@pytest.mark.gpu
def test_a_captured_arm_takes_the_same_steps():
    case = replace(CASE, device="cuda", cuda_graph=True)
    prepared = prepare(device="cuda", cuda_graph=True)
    expected = prepared.reference().cpu()
    prepared.model.cuda()
    draw = prepared.training.batch
    prepared.training.batch = lambda index: draw(index).cuda()
    arm = Trainer(case, prepared)
    losses = arm.losses(arm.captured(prepared.model))
    torch.testing.assert_close(losses.double(), expected, rtol=1e-4, atol=0)


def noted(prepared: Prepared) -> list[torch.Tensor]:
    """The batches that the loss is given from now on."""
    seen: list[torch.Tensor] = []
    squares = prepared.training.loss

    def noting(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        seen.append(batch)
        return squares(model, batch)

    prepared.training.loss = noting
    return seen


def test_timed_steps_take_the_loader_s_batches_in_order_and_no_others_do():
    arm = handler(replace(CASE, impl="upstream", strategy="eager"))
    epochs = 0

    def loader() -> Iterator[torch.Tensor]:
        nonlocal epochs
        epochs += 1
        yield from (torch.full((16, 8), float(index)) for index in range(3))

    training, seen = arm.prepared.training, noted(arm.prepared)
    training.loader, training.round = loader, 5
    arm.first_call()
    arm.memory()
    assert epochs == 0
    seen.clear()
    assert arm.calibrate(milliseconds=1.0) == {"calls": 5}
    assert epochs == 1 and not seen  # started, and no step made
    taken = []
    for _ in range(2):
        assert arm.round(calls=5)["calls"] == 5
        assert not torch.equal(seen[0], seen[0][0, 0].expand(16, 8))  # what settles the clocks lies ready
        taken += [int(batch[0, 0]) for batch in seen[-5:]]
        seen.clear()
    assert taken == [0, 1, 2, 0, 1, 2, 0, 1, 2, 0]
    arm.curve(steps=3)
    arm.kernels()
    assert not any(torch.equal(batch, batch[0, 0].expand(16, 8)) for batch in seen)


def test_a_curve_that_no_row_could_hold_is_a_failure_that_names_its_step():
    arm = handler(replace(CASE, strategy="eager"))
    arm.first_call()
    arm.trainer._optimizer.param_groups[0]["lr"] = 1e30
    with pytest.raises(ValueError, match="the loss of step [23] of 9 is (nan|inf)"):
        arm.curve(steps=9)


@pytest.mark.slow
def test_declared_shapes_are_compiled_by_the_first_call_and_are_no_recompiles(tmp_path: Path):
    arm = handler(replace(CASE, strategy="full"))
    training, seen = arm.prepared.training, noted(arm.prepared)
    training.shapes = tuple(torch.randn(rows, 8) for rows in (48, 32, 16))
    arm.trainer = Trainer(arm.case, arm.prepared)
    arm.start_up(folder=str(tmp_path))
    assert [len(batch) for batch in seen[:3]] == [48, 32, 16]
    seen.clear()
    first = arm.first_call()
    assert (first["graphs"], first["recompiles"]) == (3, [])
    assert {len(batch) for batch in seen[:3]} == {48, 32, 16} and len(seen) % 3 == 0
    training.loader, training.round = (lambda: list(reversed(training.shapes))), 3
    arm.round(calls=3)
    assert arm.kernels()["recompiles"] == []


def test_every_declared_shape_is_captured():
    prepared = prepare()
    prepared.training.shapes = tuple(torch.randn(rows, 8) for rows in range(20, 9, -1))
    trainer = Trainer(CASE, prepared)
    seen = noted(prepared)
    step = trainer.captured(prepared.model)  # on the CPU it is as if
    assert [len(batch) for batch in seen] == [*range(20, 9, -1)] * 3  # two warm-ups, and as if captured
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(11):
            step()
