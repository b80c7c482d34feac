"""What only the ResNets' arms do: references in parts, freezing, running statistics."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import zoo
from benchmarks.families import Prepared, resnet
from benchmarks.families.base import count_flops
from benchmarks.plan import Case
from benchmarks.training import plain_step
from tests import workloads
from zoo.resnet.model import PRESETS

pytestmark = pytest.mark.usefixtures("eager_backend")


def case(**changes: Any) -> Case:
    return Case(**{"family": "resnet", "model": "resnet-debug", "input": "2x32", **changes})


def prepare(**changes: Any) -> Prepared:
    return workloads.prepare(case(**changes))


@pytest.mark.parametrize(
    ("impl", "strategy", "frozen"),
    [
        ("upstream-tuned", "full", True),
        ("upstream-tuned", "regional", False),
        ("upstream-tuned", "eager", False),
        ("upstream", "full", False),
        ("zoo", "full", False),
    ],
)
def test_only_the_whole_tuned_model_is_frozen(impl: str, strategy: str, frozen: bool):
    import torch._inductor.config as inductor

    prepare(impl=impl, strategy=strategy)
    assert inductor.freezing is frozen


def test_dilation_counts():
    model: Any = zoo.create("resnet-debug", device="meta", replace_stride_with_dilation=(False, True, True))
    theirs = zoo.to_upstream(model)
    images = torch.empty(1, 3, 64, 64, device="meta")
    for training in (False, True):
        assert resnet.flops(model.config, 1, 64, training=training) == count_flops(theirs, images, backward=training)


# Training


def test_labels_can_be_learnt_from_images():
    training = resnet.training_of(PRESETS["resnet50"], 64, 32, seed=0, device="cpu", dtype=torch.float32)
    model = nn.Sequential(nn.AdaptiveAvgPool2d(resnet.SQUARES), nn.Flatten(), nn.Linear(48, 1000))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-1)
    losses = torch.stack([plain_step(model, training, optimizer, training.batch(index)) for index in range(60)])
    assert losses[0] > 6.5 and losses[-5:].mean() < 2.0  # of 10 classes in equal shares: 2.3
    assert len(training.batch(0)["labels"].unique()) == resnet.CLASSES
    assert training.batch(0)["images"].is_contiguous(memory_format=torch.channels_last)
