"""Training of ResNets in the harness: the same steps in every arm, running statistics too; files and their loader."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from torchvision import models

import zoo
from benchmarks import workloads
from benchmarks.families import resnet_train, resnet_work
from benchmarks.families.jpegs import CLASSES, Files, Loader
from benchmarks.families.resnet import WORKLOAD
from benchmarks.plan import Case
from benchmarks.training import Trainer, make_optimizer, plain_step
from benchmarks.worker import Handler
from zoo.engine.compile import plan_of
from zoo.engine.graph_log import LEDGER
from zoo.resnet import ResNetConfig
from zoo.resnet.model import PRESETS
from zoo.training import TrainingStep

GIB = 1 << 30


@pytest.fixture(autouse=True)
def _light(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, one_thread: None) -> None:
    """A light backend, a folder of the test's own, and one thread."""
    monkeypatch.setenv("BENCHMARKS_BACKEND", "aot_eager")
    monkeypatch.setenv("BENCHMARKS_SCRATCH", str(tmp_path))


def case(**changes: Any) -> Case:
    return Case(**{"family": "resnet", "model": "resnet-debug", "input": "4x32", "workload": "train", **changes})


def prepare(**changes: Any) -> workloads.Prepared:
    return WORKLOAD.prepare(case(**changes), data_root=None, seed=0)


def error(output: torch.Tensor, reference: torch.Tensor) -> float:
    return float((output.double() - reference.double()).norm() / reference.double().norm())


# --- the same steps ---


def test_losses_are_the_reference_s():
    arms = {impl: prepare(impl=impl) for impl in ("zoo", "upstream")}
    reference = arms["upstream"].reference()
    assert reference.shape == (arms["zoo"].training.checked,) and reference.dtype == torch.float64
    for impl, prepared in arms.items():
        assert prepared.model.training and all(p.requires_grad for p in prepared.model.parameters())
        arm = Trainer(case(impl=impl), prepared)
        assert error(arm.losses(arm.eager()), reference) < 1e-3
    # What an arm holds does not change what the reference is.
    torch.testing.assert_close(arms["zoo"].reference(), reference, rtol=1e-12, atol=0)


def test_autocast_narrows_convolutions_and_nothing_that_is_kept():
    prepared = prepare(dtype="bfloat16", impl="upstream")
    seen = set()
    for module in prepared.model.modules():
        if isinstance(module, nn.Conv2d):
            module.register_forward_hook(lambda _, __, output: seen.add(output.dtype))
    arm = Trainer(case(dtype="bfloat16", impl="upstream"), prepared)
    arm.eager()()
    assert seen == {torch.bfloat16}
    assert {p.dtype for p in prepared.model.parameters()} == {torch.float32}
    assert prepare().training.autocast is None  # type: ignore[union-attr]


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


def test_other_cuts_train_the_same():
    prepared = prepare(model="resnet-debug-cut-stages")
    reference = prepared.reference()
    arm = Trainer(case(model="resnet-debug-cut-stages", strategy="regional"), prepared)
    model = zoo.compile_regions(prepared.model, backend="aot_eager")
    with zoo.enforce_budget(model):
        assert error(arm.losses(arm.compiled(model)), reference) < 1e-3


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


@pytest.mark.parametrize("impl", ["zoo", "upstream"])
def test_through_the_harness(tmp_path: Path, impl: str):
    arm = Handler()
    arm.load(workload="resnet")
    asked = case(impl=impl, strategy="regional", dtype="bfloat16")
    ready = arm.prepare(case=asked.to_json(), data_root=None, seed=0)
    assert (ready["count"], ready["unit"]) == (4, "images")
    assert arm.start_up(folder=None)["flops"] == resnet_train.flops(PRESETS["resnet-debug"], 4, 32)
    arm.first_call()
    found = arm.check(reference=str(tmp_path / "reference.pt"))
    assert found["error"] < 5e-2 and found["eager_error"] < 5e-2 and found["reference_dtype"] == "float64"
    assert arm.kernels()["recompiles"] == []


# --- batches ---


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
    training = resnet_train.training_of(PRESETS["resnet50"], 64, 32, seed=0, device="cpu", dtype=torch.float32)
    model = nn.Sequential(nn.AdaptiveAvgPool2d(resnet_train.SQUARES), nn.Flatten(), nn.Linear(48, 1000))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-1)
    losses = torch.stack([plain_step(model, training, optimizer, training.batch(index)) for index in range(60)])
    assert losses[0] > 6.5 and losses[-5:].mean() < 2.0  # of 10 classes in equal shares: 2.3
    assert len(training.batch(0)["labels"].unique()) == resnet_train.CLASSES


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


# --- what is run, and what is not ---


def test_plain_runs_exist():
    assert WORKLOAD.default_races("cpu", False, "train") == [("resnet-debug", "4x32")]
    (race,) = WORKLOAD.default_races("cuda", False, "train")
    assert race == ("resnet50", "128x224")
    for impl in ("zoo", "upstream"):
        for input in ("128x224", "jpeg-128x224"):
            asked = case(model="resnet50", input=input, device="cuda", dtype="bfloat16", impl=impl, strategy="full")
            assert WORKLOAD.refuses(asked) is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model": "resnet50-folded"}, "folded models are for inference"),
        ({"model": "resnet-debug-folded-cut-stages"}, "folded models are for inference"),
        ({"impl": "upstream-tuned"}, "tuned is folded, which is for inference"),
        ({"dtype": "float16", "device": "cuda"}, "needs the loss scaled"),
        ({"workload": "inference", "input": "jpeg-4x32"}, "jpeg-4x32 is for training"),
    ],
)
def test_refusals(changes: dict[str, Any], reason: str):
    assert reason in (WORKLOAD.refuses(case(**changes)) or "")
    with pytest.raises(ValueError, match=reason):
        prepare(**changes)


# --- formulas ---


def test_products_are_those_that_torch_counts():
    config = PRESETS["resnet50"]
    with torch.device("meta"):
        model, images = models.resnet50(), torch.empty(2, 3, 64, 64)
    with FlopCounterMode(display=False) as counter:
        model(images).sum().backward()
    assert resnet_train.flops(config, 2, 64) == counter.get_total_flops()


def test_bytes_by_hand():
    config = ResNetConfig(block="basic", layers=(1, 1, 1, 1), num_classes=10)
    forward = resnet_work.bytes_moved(config, 2, 32, 2)
    parameters = resnet_work.parameters(config)
    assert resnet_train.bytes_moved(config, 2, 32, 2) == 3 * forward - 2 * 2 * 3 * 32 * 32 + 32 * parameters


def test_memory_of_large_cases():
    inference, training = (
        WORKLOAD.memory_bytes(case(model="resnet50", input="128x224", dtype="bfloat16", device="cuda", workload=name))
        for name in ("inference", "train")
    )
    # Kept for the backward are some 22 million values an image; the reference keeps less of them, four times as wide.
    assert inference < 128 * 20e6 * 2 < training < 20 * GIB
    shown = models.resnet50().to(memory_format=torch.channels_last)
    kept = count_kept(shown, torch.randn(1, 3, 64, 64))
    assert kept < resnet_train.kept(PRESETS["resnet50"], 64) < 1.2 * kept


def count_kept(model: nn.Module, image: torch.Tensor) -> int:
    """Values that autograd keeps for one image in training, weights apart; measured with two."""
    weights = {p.data_ptr() for p in (*model.parameters(), *model.buffers())}
    kept: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() not in weights:
            kept[tensor.data_ptr()] = tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        output = model(image.repeat(2, 1, 1, 1))
    assert output.requires_grad
    return sum(kept.values()) // 2
