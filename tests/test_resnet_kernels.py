"""Calls that launch all kernels of ResNets, and regions on a GPU against eager blocks."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import zoo
from zoo.ops.batch_norm import Norm, bias_act, bias_act_pool, max_pool, norm_act, norm_act_pool
from zoo.ops.conv import stem_conv


def calls() -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    """Operators and arguments that launch all kernels, with gradients and without."""
    x, more = (torch.randn(2, 6, 7, 4).contiguous(memory_format=torch.channels_last) for _ in range(2))
    mean, variance, count = torch.randn(6), torch.rand(6) + 0.5, torch.tensor(0)
    learning = [each.clone().requires_grad_() for each in (x, more, mean, variance, mean, variance)]
    frozen, batch = (mean, variance), (mean, variance, count, True, 0.1)
    conv = nn.Conv2d(3, 8, 7, 2, 3, bias=False)
    half = x.bfloat16()
    return {
        "norm": (lambda x, *norm: norm_act(x, Norm(*norm, *frozen)), (learning[0], *learning[2:4])),
        "norm of the batch": (lambda x, *norm: norm_act(x, Norm(*norm, *batch)), (learning[0], *learning[2:4])),
        "wider weights": (lambda x, *norm: norm_act(x, Norm(*norm, *frozen)), (half, *learning[2:4])),
        "residual": (lambda x, r, *norm: norm_act(x, Norm(*norm, *batch), r), learning[:4]),
        "two norms": (lambda x, r, w, b, *norm: norm_act(x, Norm(w, b, *batch), r, Norm(*norm, *batch)), learning),
        "two frozen norms": (norm_act, (x, Norm(*frozen, *frozen), more, Norm(*frozen, *frozen))),
        "bias": (bias_act, (x, mean)),
        "bias and residual": (bias_act, (x, mean, more)),
        "pooled norm": (norm_act_pool, (x, Norm(*frozen, *frozen))),
        "pooled bias": (bias_act_pool, (x, mean)),
        "pool": (max_pool, learning[:1]),
        "stem": (stem_conv, (torch.randn(2, 3, 16, 12), conv.requires_grad_(False))),
    }


@pytest.mark.gpu
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_regions_compute_and_learn_as_eager_blocks_do_on_a_gpu(training: bool) -> None:
    model = zoo.create("resnet-debug", device="cuda").train(training)
    eager = copy.deepcopy(model)
    images = torch.randn(4, 3, 40, 33, device="cuda")
    zoo.compile_regions(model)
    with torch.set_grad_enabled(training), zoo.enforce_budget(model):
        for own in (model, eager):
            out = own(images)
            if training:
                out.square().sum().backward()
        torch.testing.assert_close(model(images), eager(images), rtol=1e-3, atol=1e-4)
    for ours, theirs in ((model.named_parameters(), eager.parameters()), (model.named_buffers(), eager.buffers())):
        for (name, found), expected in zip(ours, theirs, strict=True):
            found, expected = (found, expected) if found.grad is None else (found.grad, expected.grad)
            torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3, msg=name)
