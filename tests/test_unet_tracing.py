"""What the compiler sees of a block on a GPU: one graph, in which kernels of ours are launches."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

import zoo
from tests import fake_gpu
from zoo.unet import ResnetBlock, TransformerBlock, UNet
from zoo.unet.config import PRESETS, BlockShape

pytest.importorskip("triton")
LAUNCH = "triton_kernel_wrapper_functional"


def block_of(cls: type) -> Any:
    model = zoo.create("unet-debug", dtype=torch.bfloat16)
    assert isinstance(model, UNet)
    return next(each for each in model.modules() if type(each) is cls)


def images(*shape: int) -> Tensor:
    return torch.randn(shape).bfloat16().contiguous(memory_format=torch.channels_last)


def launches(graphs: list[list[str]]) -> list[int]:
    return [Counter(graph)[LAUNCH] for graph in graphs]


def opaque(graphs: list[list[str]]) -> set[str]:
    return {node for graph in graphs for node in graph if node.startswith("zoo")}


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_a_resnet_block_is_a_graph(training: bool, gpu: fake_gpu.Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    block = block_of(ResnetBlock)
    x, shift = images(2, 16, 40, 40), torch.randn(2, 16).bfloat16()
    with torch.set_grad_enabled(training):
        graphs = fake_gpu.traced(monkeypatch, block, x, None, shift)
    # Two norms of two launches, and the sum at the end; back a norm of three, one of two whose input does not learn,
    # and a bias of two.
    assert launches(graphs) == ([5, 7] if training else [5]) and not opaque(graphs)


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_a_resnet_block_with_a_skip_is_a_graph(
    training: bool, gpu: fake_gpu.Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = zoo.create("unet-debug", dtype=torch.bfloat16)
    block = model.get_submodule("up.0.resnets.0")
    x, skip, shift = images(2, 32, 4, 4), images(2, 32, 4, 4), torch.randn(2, 32).bfloat16()
    with torch.set_grad_enabled(training):
        graphs = fake_gpu.traced(monkeypatch, block, x, skip, shift)
    assert launches(graphs) == ([3, 7] if training else [3]) and not opaque(graphs)


def test_convolutions_of_few_pixels_are_products_in_a_graph(gpu: fake_gpu.Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = BlockShape(inputs=640, skip=0, outputs=640, depth=None, heads=1)
    block = ResnetBlock(PRESETS["unet-debug"], shape).to(torch.bfloat16, memory_format=torch.channels_last)
    with torch.no_grad():
        graphs = fake_gpu.traced(monkeypatch, block, images(2, 640, 4, 4), None, torch.randn(2, 640).bfloat16())
    # Two norms, two of windows, and the sum at the end.
    assert launches(graphs) == [5] and not opaque(graphs)
    assert not any("convolution" in node for node in graphs[0])


@pytest.mark.parametrize("ends", [False, True], ids=["deep", "alone"])
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_a_transformer_block_is_a_graph(
    training: bool, ends: bool, gpu: fake_gpu.Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    block = TransformerBlock(16, 2, 8).bfloat16()
    text = torch.randn(2, 7, 32).bfloat16()
    x = images(2, 16, 40, 40) if ends else torch.randn(2 * 1600, 16).bfloat16()
    both = [torch.randn(shape).bfloat16() for shape in (16, 16, (16, 16), 16, (16, 16), 16)] if ends else None
    with torch.set_grad_enabled(training):
        graphs = fake_gpu.traced(monkeypatch, block, x, text, None, None, both)
    # Three norms, attention to the text and the gated product, and the norm before; in training no attention.
    assert launches(graphs)[0] == (4 if training else 5) + 2 * ends and not opaque(graphs)
