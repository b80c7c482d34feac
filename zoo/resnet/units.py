"""A convolution and what follows it, with a norm, or with a bias where the norm is folded.

Shape legend: N images, C channels, H height, W width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.modules import plain, to_images, to_rows
from zoo.ops.batch_norm import Norm, bias_act, norm_act
from zoo.ops.common import watched
from zoo.ops.conv_act import conv_act, linear_relu
from zoo.ops.pooling import bias_act_pool, norm_act_pool
from zoo.ops.stem_conv import stem_conv
from zoo.resnet.checks import check_norm
from zoo.resnet.config import STEM_WIDTH, BlockShape, ResNetConfig


class FrozenBatchNorm(nn.Module):
    """The tensors of a batch norm that never changes, torchvision's ``FrozenBatchNorm2d``.

    Args:
        channels: C.
        eps: Added to the variance.
    """

    weight: Tensor
    bias: Tensor
    running_mean: Tensor
    running_var: Tensor

    def __init__(self, channels: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        for name, value in (("weight", 1.0), ("bias", 0.0), ("running_mean", 0.0), ("running_var", 1.0)):
            self.register_buffer(name, torch.full((channels,), value))


def make_norm(config: ResNetConfig, channels: int) -> nn.Module | None:
    """A norm that holds tensors and is never called; None where norms are folded."""
    if config.folding is not None:
        return None
    if config.norm == "frozen":
        return FrozenBatchNorm(channels, **config.norm_options)
    return nn.BatchNorm2d(channels, **config.norm_options)


def norm_of(norm: Any) -> Norm:
    """A norm's tensors and options, as its own call would use them."""
    if isinstance(norm, FrozenBatchNorm):
        return Norm(norm.weight, norm.bias, norm.running_mean, norm.running_var, eps=norm.eps)
    if torch.compiler.is_compiling():  # elsewhere the model has checked all
        check_norm(norm)
    statistics = norm.running_mean, norm.running_var
    batches = norm.num_batches_tracked if norm.training else None
    of_batch = norm.training or norm.running_mean is None
    return Norm(norm.weight, norm.bias, *statistics, batches, of_batch, norm.momentum if of_batch else 0.0, norm.eps)


class Unit(nn.Module):
    """Convolution, norm and activation.

    Args:
        config: The model's.
        inputs: C_in.
        outputs: C_out.
        kernel: Pixels of a side.
        options: Of the convolution, which keeps the size but for its stride.
    """

    def __init__(self, config: ResNetConfig, inputs: int, outputs: int, kernel: int, **options: int) -> None:
        super().__init__()
        padding = options.get("dilation", 1) * (kernel // 2)
        self.folding = config.folding
        self.conv = nn.Conv2d(inputs, outputs, kernel, padding=padding, bias=config.folding is not None, **options)  # type: ignore[arg-type]
        self.norm = make_norm(config, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """[N, C_in, H, W] -> [N, C_out, H', W']."""
        return self.folded(x, None) if self.norm is None else norm_act(self.conv(x), norm_of(self.norm))

    def folded(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """Relu of convolution, bias and residual."""
        conv, weight, bias, folding = self.conv, self.conv.weight, self.conv.bias, self.folding
        assert bias is not None and folding is not None
        options = conv.stride, conv.padding, conv.dilation, conv.groups
        if folding.pointwise == "matmul" and options == ((1, 1), (0, 0), (1, 1), 1):
            rows = to_rows(x)
            if residual is None and not watched():
                return to_images(linear_relu(rows, weight.flatten(1), bias), x)
            return bias_act(to_images(F.linear(rows, weight.flatten(1)), x), bias, residual)
        if folding.convolutions == "fused" and not watched():
            return conv_act(x, weight, bias, residual, *options)
        return bias_act(F.conv2d(x, weight, None, *options), bias, residual)  # type: ignore[arg-type]


class Join(Unit):
    """The end of a block: convolution, norm, residual and activation; with a shortcut its convolution and norm."""

    def __init__(self, config: ResNetConfig, shape: BlockShape, kernel: int) -> None:
        super().__init__(config, shape.inner, shape.outputs, kernel)
        self.shortcut = self.shortcut_norm = None
        if shape.projects:
            # Its bias, where its norm is folded, is part of the other convolution's.
            self.shortcut = nn.Conv2d(shape.inputs, shape.outputs, 1, stride=shape.stride, bias=False)
            self.shortcut_norm = make_norm(config, shape.outputs)

    def forward(self, x: Tensor, block_input: Tensor) -> Tensor:  # type: ignore[override]
        """[N, C_in, H, W] inside the block, and the block's input -> [N, C_out, H, W]."""
        residual = block_input if self.shortcut is None else self.shortcut(block_input)
        if self.norm is None:
            return self.folded(x, residual)
        shortcut_norm = None if self.shortcut_norm is None else norm_of(self.shortcut_norm)
        return norm_act(self.conv(x), norm_of(self.norm), residual, shortcut_norm)


class Stem(Unit):
    """Convolution of the images, norm, activation and pooling."""

    def __init__(self, config: ResNetConfig) -> None:
        super().__init__(config, config.in_channels, STEM_WIDTH, 7, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        """Images [N, C_in, H, W] -> [N, 64, ⌈H / 4⌉, ⌈W / 4⌉]."""
        conv = self.conv
        if self.norm is None:
            return bias_act_pool(stem_conv(x, conv), conv.bias)  # type: ignore[arg-type]
        if plain(conv, nn.Conv2d):
            x = stem_conv(x, conv)
        else:
            x = conv(x.contiguous(memory_format=torch.channels_last))
        return norm_act_pool(x, norm_of(self.norm))
