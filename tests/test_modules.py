"""Images as rows: the same memory in channels_last, and nothing that a compiler would guard on beyond it."""

from __future__ import annotations

import torch
from torch import nn

from zoo.ops.common import to_images, to_rows
from zoo.weights import keep_channels_last


def test_rows_of_a_channels_last_image_are_its_memory():
    x = torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    rows = to_rows(x)
    assert rows.shape == (40, 3) and rows.data_ptr() == x.data_ptr()
    torch.testing.assert_close(rows[7], x[0, :, 1, 2], rtol=0, atol=0)
    back = to_images(rows, x)
    assert back.data_ptr() == x.data_ptr() and back.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(back, x, rtol=0, atol=0)


def test_rows_of_another_memory_format_are_copied():
    x = torch.randn(2, 3, 4, 5)
    torch.testing.assert_close(to_images(to_rows(x), x), x, rtol=0, atol=0)
    assert to_rows(x).data_ptr() != x.data_ptr()


def test_gradients_pass_and_no_base_is_known():
    x = torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last).requires_grad_()
    rows = to_rows(x)
    assert rows._base is None
    (grad,) = torch.autograd.grad(rows.square().sum(), x)
    torch.testing.assert_close(grad, 2 * x)


def test_weights_of_convolutions_are_laid_out():
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.Linear(8, 8))
    keep_channels_last(model)
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
    model.load_state_dict({key: tensor.contiguous() for key, tensor in model.state_dict().items()}, assign=True)
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
