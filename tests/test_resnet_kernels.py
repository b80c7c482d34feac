"""Operators of ResNets: kernels by resnet_kernel_checks.py, here what the compiler sees of them."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zoo
from zoo.engine.direct import has_nothing_to_fuse
from zoo.ops.batch_norm import Norm, bias_act, norm_act
from zoo.ops.conv import stem_conv
from zoo.ops.pooling import bias_act_pool, max_pool, norm_act_pool

ROOT = Path(__file__).resolve().parent.parent
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="torch came without Triton, which GPUs only need"
)


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


@pytest.fixture
def blocks() -> dict[str, tuple[nn.Module, Tensor]]:
    """The modules that are regions, and an input of each."""
    model = zoo.create("resnet-debug", layers=(1, 2, 1, 1))
    first, second = model.stages[1].blocks  # type: ignore[misc]
    basic = zoo.create("resnet-debug", block="basic", width_per_group=64).stages[1].blocks[0]  # type: ignore[index]
    shapes = {"stem": (2, 3, 32, 32), "shortcut": (2, 256, 8, 8), "plain": (2, 512, 4, 4), "basic": (2, 64, 8, 8)}
    modules = {"stem": model.stem, "shortcut": first, "plain": second, "basic": basic}
    images = {name: torch.randn(shape).contiguous(memory_format=torch.channels_last) for name, shape in shapes.items()}
    return {name: (module, images[name]) for name, module in modules.items()}


# Kernels of the forward in inference and in training, and of the backward.
LAUNCHES = {
    "stem": (3, 5, 4),  # two layouts, or one in training; statistics, norm and pooling
    "shortcut": (3, 4 * 2 + 3, 3 * 3),
    "plain": (3, 3 * 3, 3 * 3),
    "basic": (2, 3 * 2 + 2, 3 * 2),
}


@pytest.mark.slow
@needs_triton
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", LAUNCHES)
def test_a_block_is_one_graph_in_which_the_compiler_sees_the_kernels(
    name: str, training: bool, gpu: Any, monkeypatch: pytest.MonkeyPatch, blocks: dict[str, tuple[nn.Module, Tensor]]
) -> None:
    from tests.fake_gpu import traced

    block, x = blocks[name]
    block.train(training)
    with torch.set_grad_enabled(training):
        graphs = traced(monkeypatch, block, x.requires_grad_(training and name != "stem"))
    launches = [graph.count("triton_kernel_wrapper_functional") for graph in graphs]
    assert launches == list(LAUNCHES[name][1:] if training else LAUNCHES[name][:1])
    convolutions = sum(isinstance(module, nn.Conv2d) for module in block.modules())
    assert graphs[0].count("aten.convolution.default") == convolutions
    nothing: list[bool] = []

    def backend(graph: torch.fx.GraphModule, _: list[Any]) -> Any:
        nothing.append(has_nothing_to_fuse(graph))
        return graph.forward

    with torch.set_grad_enabled(training):
        torch.compile(block, fullgraph=True, dynamic=False, backend=backend)(x)
    assert nothing == [True]


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
