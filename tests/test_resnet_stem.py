"""The first convolution over squares of pixels, against the plain one."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from zoo.ops import conv as stem

SHAPES = [(2, 3, 32, 32), (1, 3, 33, 47), (2, 1, 7, 9), (2, 4, 30, 31), (3, 2, 224, 10)]


@pytest.fixture
def squares(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """Shapes of what was cut into squares, by torch's operators: kernels are said to run."""
    shapes: list[torch.Size] = []
    by_torch = stem.space_to_depth

    def noted(x: torch.Tensor, *sizes: object) -> torch.Tensor:
        shapes.append(x.shape)
        with monkeypatch.context() as patch:
            patch.setattr(stem, "kernels_run", lambda *_: False)
            return by_torch(x, *sizes)

    monkeypatch.setattr(stem, "kernels_run", lambda *_: True)
    monkeypatch.setattr(stem, "space_to_depth", noted)
    return shapes


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_output_and_gradient_of_the_weight(shape: tuple[int, ...], squares: list[torch.Size]):
    x = torch.randn(shape, dtype=torch.float64)
    conv = nn.Conv2d(shape[1], 8, 7, 2, 3, bias=False, dtype=torch.float64).to(memory_format=torch.channels_last)
    expected, found = conv(x), stem.stem_conv(x, conv)
    assert squares == [x.shape, conv.weight.shape]
    assert found.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(found, expected)
    (wanted,) = torch.autograd.grad(expected.sin().sum(), conv.weight)
    (given,) = torch.autograd.grad(found.sin().sum(), conv.weight)
    torch.testing.assert_close(given, wanted)


def test_autocast_narrows_images_and_weight(squares: list[torch.Size]):
    conv, x = nn.Conv2d(3, 8, 7, 2, 3, bias=False), torch.randn(2, 3, 32, 32)
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = stem.stem_conv(x, conv), conv(x)
    assert found.dtype == torch.bfloat16 and squares
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
    found.float().square().sum().backward()
    assert conv.weight.grad is not None


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
    options: dict[str, int], shape: tuple[int, ...], helps: bool, squares: list[torch.Size]
):
    conv = nn.Conv2d(shape[1], 4, **{"kernel_size": 7, "stride": 2, "padding": 3, **options})
    x = torch.randn(shape)
    found = stem.stem_conv(x, conv)
    assert bool(squares) == helps
    torch.testing.assert_close(found + conv.bias[:, None, None], conv(x))
    squares.clear()
    stem.stem_conv(x.requires_grad_(), conv)
    assert not squares  # images that want a gradient get it


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
        found = stem.stem_conv(images, conv)
        assert found.dtype == dtype and found.is_contiguous(memory_format=torch.channels_last)
        error = (found.double() - expected).norm() / expected.norm()
        assert error < {torch.float32: 2e-3, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]
    with torch.autocast("cuda", torch.bfloat16):
        assert stem.stem_conv(x, conv).dtype == torch.bfloat16
