"""Training of ResNets in the harness: the same steps in every arm, running statistics too; files and their loader."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zoo
from benchmarks import families
from benchmarks.families import resnet
from benchmarks.families.jpegs import CLASSES, Files, Loader
from benchmarks.families.resnet import WORKLOAD
from benchmarks.plan import Case
from benchmarks.training import Trainer, make_optimizer, plain_step
from benchmarks.worker import Handler
from zoo.engine.compile import plan_of
from zoo.engine.graph_log import LEDGER
from zoo.resnet.model import PRESETS
from zoo.training import TrainingStep


@pytest.fixture(autouse=True)
def _light(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, one_thread: None) -> None:
    """A light backend, a folder of the test's own, and one thread."""
    monkeypatch.setenv("BENCHMARKS_BACKEND", "aot_eager")
    monkeypatch.setenv("BENCHMARKS_SCRATCH", str(tmp_path))


def case(**changes: Any) -> Case:
    return Case(**{"family": "resnet", "model": "resnet-debug", "input": "4x32", "workload": "train", **changes})


def prepare(**changes: Any) -> families.Prepared:
    return WORKLOAD.prepare(case(**changes), data_root=None, seed=0)


def error(output: torch.Tensor, reference: torch.Tensor) -> float:
    return float((output.double() - reference.double()).norm() / reference.double().norm())


@pytest.mark.slow
def test_gradients_of_compiled_regions_are_torchvision_s():
    ours, theirs = prepare(), prepare(impl="upstream")
    assert ours.training is not None and theirs.training is not None
    zoo.compile_regions(ours.model, backend="aot_eager")
    batch = ours.training.batch(0)
    for prepared in (ours, theirs):
        assert prepared.training is not None
        prepared.training.loss(prepared.model, batch).backward()
    gradients = copy.deepcopy(ours.model)
    with torch.no_grad():
        for gradient, parameter in zip(gradients.parameters(), ours.model.parameters(), strict=True):
            gradient.copy_(parameter.grad)  # type: ignore[arg-type]
    for name, gradient in zoo.to_upstream(gradients).named_parameters():
        assert error(gradient.detach(), theirs.model.get_parameter(name).grad) < 1e-4, name  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_running_statistics_after_captured_steps_are_torchvision_s(device: str, monkeypatch: pytest.MonkeyPatch):
    # Products of ten bits each would part the two in a few steps, whose convolutions are not the same kernels.
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    # On the CPU a capture copies in and out and runs the compiled regions as a replay would.
    ours, theirs = prepare(device=device), prepare(impl="upstream", device=device)
    training = ours.training
    assert training is not None
    before = {name: buffer.clone() for name, buffer in theirs.model.named_buffers()}
    model = zoo.compile_regions(ours.model, backend="aot_eager")
    own = make_optimizer(model, training, capturable=device == "cuda")
    step = TrainingStep(model, training.loss, own, cuda_graph=True, warmup=2)
    optimizer = make_optimizer(theirs.model, training)
    for index in range(5):
        batch = training.batch(index)
        loss = step(batch)
        torch.testing.assert_close(loss, plain_step(theirs.model, training, optimizer, batch), rtol=1e-3, atol=1e-4)
    assert len(step.captured) == 1
    found = dict(zoo.to_upstream(zoo.uncompile(model)).named_buffers())
    for name, expected in theirs.model.named_buffers():
        assert not torch.equal(expected, before[name]), name
        if name.endswith("num_batches_tracked"):
            assert int(found[name]) == int(expected) == 5
        else:
            torch.testing.assert_close(found[name], expected, rtol=2e-3, atol=2e-3, msg=name)


@pytest.mark.slow
def test_other_cuts_train_the_same():
    prepared = prepare(model="resnet-debug-cut-stages")
    reference = prepared.reference()
    arm = Trainer(case(model="resnet-debug-cut-stages", strategy="regional"), prepared)
    model = zoo.compile_regions(prepared.model, backend="aot_eager")
    with zoo.enforce_budget(model):
        assert error(arm.losses(arm.compiled(model)), reference) < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_regions_hold_their_budget_in_training_steps(dtype: str):
    prepared = prepare(dtype=dtype)
    arm = Trainer(case(dtype=dtype, strategy="regional"), prepared)
    model = zoo.compile_regions(prepared.model, backend="aot_eager")
    step = arm.compiled(model)
    with zoo.enforce_budget(model):
        step()
        step()
    plan = plan_of(model)
    assert plan is not None
    found: dict[str, int] = {}
    for entry in LEDGER.of(plan.ledger_id):
        found[entry.region.__name__] = found.get(entry.region.__name__, 0) + entry.graphs
    assert found == {"Stem": 1, "Bottleneck": 6, "ResNetHead": 1}


def test_each_batch_is_its_own_and_the_same_each_time():
    training = prepare().training
    assert training is not None
    first, again, other = training.batch(3), training.batch(3), training.batch(4)
    assert torch.equal(first["images"], again["images"]) and torch.equal(first["labels"], again["labels"])
    assert not torch.equal(first["images"], other["images"])
    assert first["images"].is_contiguous(memory_format=torch.channels_last)
    seeded = WORKLOAD.prepare(case(), data_root=None, seed=1).training
    assert seeded is not None and not torch.equal(seeded.batch(3)["images"], first["images"])


def test_labels_can_be_learnt_from_images():
    training = resnet.training_of(PRESETS["resnet50"], 64, 32, seed=0, device="cpu", dtype=torch.float32)
    model = nn.Sequential(nn.AdaptiveAvgPool2d(resnet.SQUARES), nn.Flatten(), nn.Linear(48, 1000))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-1)
    losses = torch.stack([plain_step(model, training, optimizer, training.batch(index)) for index in range(60)])
    assert losses[0] > 6.5 and losses[-5:].mean() < 2.0  # of 10 classes in equal shares: 2.3
    assert len(training.batch(0)["labels"].unique()) == resnet.CLASSES


def test_files_are_those_of_the_seed_and_written_once(tmp_path: Path):
    files = Files(count=12, width=24, height=20, seed=0)
    folder = files.folder()
    assert folder.parent == tmp_path and list(tmp_path.iterdir()) == [folder]
    assert len(list(folder.glob("class-*/*.jpg"))) == 12 and len(list(folder.iterdir())) == CLASSES
    written = {path: path.stat().st_mtime_ns for path in folder.rglob("*.jpg")}
    assert files.folder() == folder
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*.jpg")} == written
    other = Files(count=12, width=24, height=20, seed=1).folder()
    assert (folder / "class-0" / "0.jpg").read_bytes() != (other / "class-0" / "0.jpg").read_bytes()


def test_files_without_a_harness_go_where_temporary_ones_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("BENCHMARKS_SCRATCH")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "elsewhere"))
    (tmp_path / "elsewhere").mkdir()
    assert Files(count=1, width=8, height=8, seed=0).folder().parent == tmp_path / "elsewhere"


@pytest.mark.slow
def test_timed_steps_wait_for_files_and_others_do_not(monkeypatch: pytest.MonkeyPatch):
    asked = case(input="jpeg-4x32", impl="upstream")
    arm = Handler()
    arm.load(workload="resnet")
    ready = arm.prepare(case=asked.to_json(), data_root=None, seed=0)
    assert ready["data"] == "generated, 20 JPEG files of 40 x 32"
    training, trainer = arm.prepared.training, arm.trainer
    assert training is not None and isinstance(training.loader, Loader) and trainer is not None
    before = torch.random.get_rng_state()
    assert arm.calibrate(milliseconds=1.0) == {"calls": training.loader.batches}  # its processes are up from here on
    seen: list[torch.Tensor] = []
    original = training.loss

    def noting(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        seen.append(batch["images"])
        return original(model, batch)

    training.loss = noting
    arm.first_call()
    timed = arm.round(calls=training.loader.batches)
    assert timed["calls"] == 3 and timed["wall_ms"] > 0
    for images in seen[-3:]:
        assert images.shape == (4, 3, 32, 32) and images.is_contiguous(memory_format=torch.channels_last)
        assert -3 < float(images.min()) < float(images.max()) < 3  # scaled and normalised; the others are wider
    assert max(float(images.max()) for images in seen[:-3]) > 3
    assert torch.equal(before, torch.random.get_rng_state())
