"""The first convolution over squares of pixels, against the plain one."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import zoo
from zoo.resnet import depth

SHAPES = [(2, 3, 32, 32), (1, 3, 33, 47), (2, 1, 7, 9), (2, 4, 30, 31), (3, 2, 224, 10)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_output_and_gradient_of_the_weight(shape: tuple[int, ...]):
    x = torch.randn(shape, dtype=torch.float64)
    weight = torch.randn(8, shape[1], 7, 7, dtype=torch.float64, requires_grad=True)
    expected, found = F.conv2d(x, weight, None, 2, 3), depth.stem_conv(x, weight)
    assert found.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(found, expected)
    (wanted,) = torch.autograd.grad(expected.sin().sum(), weight)
    (given,) = torch.autograd.grad(found.sin().sum(), weight)
    torch.testing.assert_close(given, wanted)


def test_operators_keep_their_promises():
    x, weight = torch.randn(2, 3, 9, 10), torch.randn(4, 3, 7, 7, requires_grad=True)
    torch.library.opcheck(depth.stem_conv, (x, weight))
    torch.library.opcheck(depth.space_to_depth, (x, 4, 8, 8, 16))
    torch.library.opcheck(depth.stem_conv_weight_grad, (torch.randn(2, 4, 5, 5), x, weight.detach()))


def test_images_get_no_gradient_without_a_word():
    x = torch.randn(1, 3, 8, 8, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"stem_conv has no gradient for images; call torch.nn.functional.conv2d"):
        depth.stem_conv(x, torch.randn(4, 3, 7, 7)).sum().backward()


def test_operations_are_those_of_the_plain_convolution():
    zoo.create("resnet-debug")  # registers the formulas
    x, weight = torch.randn(2, 3, 32, 32), torch.randn(8, 3, 7, 7, requires_grad=True)
    counts = []
    for convolve in (depth.stem_conv, lambda x, weight: F.conv2d(x, weight, None, 2, 3)):
        with FlopCounterMode(display=False) as counter:
            convolve(x, weight).sum().backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize(
    ("options", "shape", "helps"),
    [
        ({}, (1, 3, 8, 8), True),
        ({"kernel_size": 3, "padding": 1}, (1, 3, 8, 8), False),
        ({"stride": 1}, (1, 3, 8, 8), False),
        ({"dilation": 2}, (1, 3, 20, 20), False),
        ({}, (1, 6, 8, 8), False),
    ],
)
def test_which_convolutions_are_computed_so(
    options: dict[str, int], shape: tuple[int, ...], helps: bool, monkeypatch: pytest.MonkeyPatch
):
    conv = nn.Conv2d(shape[1], 4, **{"kernel_size": 7, "stride": 2, "padding": 3, **options})
    x, called = torch.randn(shape), []

    def stem_conv(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        called.append(x.shape)
        return F.conv2d(x, weight, None, 2, 3)

    monkeypatch.setattr(depth, "stem_conv", stem_conv)
    monkeypatch.setattr(depth, "_on_gpu", lambda x: True)
    found = depth.convolve_images(conv, x)
    assert bool(called) == helps
    assert conv.bias is not None
    torch.testing.assert_close(found + conv.bias[:, None, None], conv(x))
    called.clear()
    depth.convolve_images(conv, x.requires_grad_())
    assert not called  # images that want a gradient get it


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_on_a_gpu(shape: tuple[int, ...], dtype: torch.dtype):
    x, weight = torch.randn(shape), torch.randn(8, shape[1], 7, 7)
    x, weight = (tensor.to("cuda", dtype) for tensor in (x, weight))
    conv = nn.Conv2d(shape[1], 8, 7, 2, 3, bias=False, device="cuda", dtype=dtype)
    conv.load_state_dict({"weight": weight})
    expected = F.conv2d(x.double(), weight.double(), None, 2, 3)
    for images in (x, x.contiguous(memory_format=torch.channels_last)):
        found = depth.convolve_images(conv, images)
        assert found.dtype == dtype and found.is_contiguous(memory_format=torch.channels_last)
        error = (found.double() - expected).norm() / expected.norm()
        assert error < {torch.float32: 2e-3, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]
    with torch.autocast("cuda", torch.bfloat16):
        assert depth.convolve_images(conv, x).dtype == torch.bfloat16
