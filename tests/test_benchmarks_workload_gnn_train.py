"""Training of GNNs in the harness: every implementation takes the same steps."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.case import Case
from benchmarks.training import Trainer
from benchmarks.workloads import gnn_work
from benchmarks.workloads.gnn import KINDS, WORKLOAD, architecture

CASE = Case(family="gnn", model="gcn", input="karate", workload="train")


@pytest.mark.parametrize("impl", ["zoo", "upstream", "upstream-tuned"])
@pytest.mark.parametrize("model", KINDS)
def test_losses_are_the_reference_s(model: str, impl: str):
    case = replace(CASE, model=model, impl=impl)
    prepared = WORKLOAD.prepare(case, data_root=None, seed=0)
    assert prepared.model.training
    arm = Trainer(case, prepared)
    losses = arm.losses(arm.eager())
    torch.testing.assert_close(losses.double(), prepared.reference(), rtol=1e-4, atol=0)
    curve = arm.losses(arm.eager(), 40)
    assert curve[-10:].mean() < 0.9 * curve[:10].mean()


def test_each_step_has_labels_of_its_own_and_the_same_each_time():
    training = WORKLOAD.prepare(CASE, data_root=None, seed=0).training
    assert training is not None
    assert not torch.equal(training.batch(0), training.batch(1))
    assert torch.equal(training.batch(3), training.batch(3))
    left_out = (training.batch(0) == -100).float().mean()
    assert 0.2 < left_out < 0.8
    other = WORKLOAD.prepare(CASE, data_root=None, seed=1).training
    assert other is not None and not torch.equal(training.batch(0), other.batch(0))


def test_work_is_more_than_that_of_inference():
    train = WORKLOAD.prepare(CASE, data_root=None, seed=0)
    inference = WORKLOAD.prepare(replace(CASE, workload="inference"), data_root=None, seed=0)
    assert inference.flops is not None and train.flops is not None
    assert 2 * inference.flops < train.flops < 3 * inference.flops
    assert train.bytes == 2 * inference.bytes
    assert (train.count, train.unit) == (34, "nodes")


@pytest.mark.parametrize("impl", ["zoo", "upstream"])
def test_training_takes_more_memory_than_inference(impl: str):
    case = replace(CASE, input="arxiv", device="cuda", impl=impl)
    assert WORKLOAD.memory_bytes(case) > WORKLOAD.memory_bytes(replace(case, workload="inference"))
    arch = architecture("gcn", "arxiv", features=128, classes=40)
    assert WORKLOAD.memory_bytes(case) > 16 * gnn_work.parameters(arch)


def test_half_precision_is_refused():
    assert WORKLOAD.refuses(replace(CASE, dtype="bfloat16")) == "training runs in float32; bfloat16 is for inference"
    assert WORKLOAD.refuses(CASE) is None


# --- sampled ---

SAMPLED = replace(CASE, model="graphsage", input="karate-sampled")


@pytest.mark.parametrize("impl", ["zoo", "upstream"])
def test_sampled_losses_are_the_reference_s(impl: str):
    case = replace(SAMPLED, impl=impl)
    prepared = WORKLOAD.prepare(case, data_root=None, seed=0)
    arm = Trainer(case, prepared)
    step = arm.eager()
    torch.testing.assert_close(arm.losses(step).double(), prepared.reference(), rtol=1e-4, atol=0)
    with arm.timed():
        losses = [step().item() for _ in range(40)]
    assert sum(losses[-10:]) < 0.9 * sum(losses[:10])


def test_sampled_shapes_are_declared():
    case = replace(SAMPLED, strategy="regional")
    prepared = WORKLOAD.prepare(case, data_root=None, seed=0)
    training = prepared.training
    assert training is not None and training.loader is not None
    declared = {(len(batch.nodes), len(batch.graph.source)) for batch in training.shapes}
    met = {(len(batch.nodes), len(batch.graph.source)) for _ in range(3) for batch in training.loader()}
    assert met <= declared and len(declared) == len(training.shapes)
    assert (prepared.count, prepared.unit) == (8, "seeds")


def test_rounds_are_epochs_of_new_batches():
    training = WORKLOAD.prepare(SAMPLED, data_root=None, seed=0).training
    assert training is not None and training.loader is not None
    first, second = list(training.loader()), list(training.loader())
    assert len(first) == len(second) == training.round
    assert not torch.equal(first[0].seeds, second[0].seeds)


@pytest.mark.parametrize("changes", [{"workload": "inference"}, {"model": "gcn"}])
def test_sampled_inputs_are_for_training_graphsage(changes: dict[str, str]):
    assert WORKLOAD.refuses(replace(SAMPLED, **changes)) == "karate-sampled is for training, of graphsage"
