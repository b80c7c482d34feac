"""A convolution and its glue, with norms and with norms folded in.

    x ─ conv ─ NormAct ─▶                      x ─ conv ─ BiasAct ─▶             or in one call of cuDNN

    x ─── conv ─── NormAddAct ─▶               x ─── conv ─── BiasAddAct ─▶      or in one call of cuDNN
    residual ────────┘                         residual ────────┘

Convolutions run outside the regions: they are the vendor library's, and each shape would be a graph of its own.

Shape legend: R rows (pixels of all images), C channels, N images, H height, W width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.layers import to_images, to_rows, untracked
from zoo.resnet.config import STEM_WIDTH, BlockShape, Folding, ResNetConfig
from zoo.resnet.depth import convolve_images
from zoo.resnet.glue import (
    BiasAct,
    BiasActPool,
    BiasAddAct,
    FrozenBatchNorm,
    NormAct,
    NormActPool,
    NormAddAct,
    NormsAddAct,
    NormTensors,
)
from zoo.resnet.operators import conv_act, linear_relu


def convolve(conv: nn.Conv2d, x: Tensor) -> Tensor:
    """The convolution without its bias, which the glue adds."""
    return F.conv2d(x, conv.weight, None, conv.stride, conv.padding, conv.dilation, conv.groups)


def make_norm(config: ResNetConfig, channels: int) -> nn.Module:
    """A norm that holds tensors and is never called."""
    if config.norm == "frozen":
        return FrozenBatchNorm(channels, **config.norm_options)
    return nn.BatchNorm2d(channels, **config.norm_options)


def tensors_of(norm: nn.Module, glue: nn.Module) -> NormTensors:
    """The tensors that glue is handed. In training the batch is counted, as a call of the norm would."""
    if isinstance(norm, nn.modules.batchnorm._BatchNorm) and norm.running_mean is not None:
        _check_norm(norm, glue)
        if norm.training and norm.num_batches_tracked is not None:
            norm.num_batches_tracked.add_(1)
    return (
        norm.running_mean,  # type: ignore[return-value]
        norm.running_var,
        untracked(norm.weight),  # type: ignore[arg-type]
        untracked(norm.bias),  # type: ignore[arg-type]
    )


def _check_norm(norm: nn.modules.batchnorm._BatchNorm, glue: nn.Module) -> None:
    """ValueError if a norm was given another mode or momentum than the glue, which computes in its place, knows of."""
    if isinstance(norm, nn.SyncBatchNorm):
        raise ValueError("a norm is a SyncBatchNorm, but statistics are those of one process: keep BatchNorm2d")
    if norm.training != glue.training:
        modes = [f"in {'training' if module.training else 'eval'} mode" for module in (norm, glue)]
        raise ValueError(
            f"a norm is {modes[0]}, and what is around it {modes[1]}, which decides: call train() or eval() of the "
            "module that holds the norm; norm='frozen' makes a model whose statistics stay in training too"
        )
    # A compiler of the whole model would make a tensor of the number.
    compiling = torch.compiler.is_compiling()
    if norm.training and (norm.momentum is None or not (compiling or norm.momentum == glue.momentum)):
        raise ValueError(
            f"the momentum of a norm is {norm.momentum}, and was {glue.momentum} when the model was made, which stays: "
            "make it with norm_kwargs={'momentum': ...}. Of torch's update_bn, which sets None, the statistics come "
            "by way of zoo.to_upstream(model), to be loaded back"
        )


class ConvNormAct(nn.Module):
    """Convolution, norm and activation. [N, C_in, H, W] -> [N, C_out, H', W']."""

    def __init__(self, config: ResNetConfig, conv: nn.Conv2d) -> None:
        super().__init__()
        self.conv = conv
        self.norm = make_norm(config, conv.out_channels)
        self.glue = NormAct(config)

    def forward(self, x: Tensor) -> Tensor:
        """[N, C_in, H, W] -> [N, C_out, H', W']."""
        x = self.conv(x)
        return to_images(self.glue(to_rows(x), tensors_of(self.norm, self.glue)), x)


class ConvNormJoin(nn.Module):
    """The end of a block: convolution, norm, residual and activation; with a shortcut its convolution and norm."""

    def __init__(self, config: ResNetConfig, conv: nn.Conv2d, shortcut: nn.Conv2d | None) -> None:
        super().__init__()
        self.conv = conv
        self.norm = make_norm(config, conv.out_channels)
        self.shortcut = shortcut
        self.shortcut_norm = None if shortcut is None else make_norm(config, conv.out_channels)
        self.glue: nn.Module = NormAddAct(config) if shortcut is None else NormsAddAct(config)

    def forward(self, x: Tensor, block_input: Tensor) -> Tensor:
        """[N, C_in, H, W] inside the block, and the block's input -> [N, C_out, H, W]."""
        x = self.conv(x)
        rows, norm = to_rows(x), tensors_of(self.norm, self.glue)
        if self.shortcut is None or self.shortcut_norm is None:
            rows = self.glue(rows, norm, to_rows(block_input))
        else:
            rows = self.glue(rows, norm, to_rows(self.shortcut(block_input)), tensors_of(self.shortcut_norm, self.glue))
        return to_images(rows, x)


class Stem(nn.Module):
    """Convolution of the images, norm, activation and pooling."""

    def __init__(self, config: ResNetConfig, conv: nn.Conv2d) -> None:
        super().__init__()
        self.conv = conv
        self.norm = make_norm(config, conv.out_channels)
        self.glue = NormActPool(config)

    def forward(self, x: Tensor) -> Tensor:
        """Images [N, C_in, H, W] -> [N, 64, ⌈H / 4⌉, ⌈W / 4⌉]."""
        return self.glue(convolve_images(self.conv, x), tensors_of(self.norm, self.glue))


class FoldedConvAct(nn.Module):
    """Convolution, bias and activation."""

    def __init__(self, folding: Folding, conv: nn.Conv2d) -> None:
        super().__init__()
        self.conv = conv
        self.as_matmul = folding.pointwise == "matmul" and is_pointwise(conv)
        self.glue = BiasAct() if folding.convolutions == "glue" and not self.as_matmul else None

    def forward(self, x: Tensor) -> Tensor:
        """[N, C_in, H, W] -> [N, C_out, H', W']."""
        conv, bias = self.conv, self.conv.bias
        assert bias is not None
        if self.as_matmul:
            return to_images(linear_relu(to_rows(x), conv.weight.flatten(1), bias), x)
        if self.glue is None:
            return conv_act(x, conv.weight, bias, None, conv.stride, conv.padding, conv.dilation, conv.groups)
        x = convolve(conv, x)
        return to_images(self.glue(to_rows(x), untracked(bias)), x)


class FoldedConvJoin(nn.Module):
    """The end of a block: convolution, bias, residual and activation; with a shortcut its convolution."""

    def __init__(self, folding: Folding, conv: nn.Conv2d, shortcut: nn.Conv2d | None) -> None:
        super().__init__()
        self.conv = conv
        self.shortcut = shortcut
        self.as_matmul = folding.pointwise == "matmul" and is_pointwise(conv)
        self.glue = BiasAddAct() if folding.convolutions == "glue" or self.as_matmul else None

    def forward(self, x: Tensor, block_input: Tensor) -> Tensor:
        """[N, C_in, H, W] inside the block, and the block's input -> [N, C_out, H, W]."""
        conv, bias = self.conv, self.conv.bias
        assert bias is not None
        residual = block_input if self.shortcut is None else self.shortcut(block_input)
        if self.glue is None:
            return conv_act(x, conv.weight, bias, residual, conv.stride, conv.padding, conv.dilation, conv.groups)
        rows = F.linear(to_rows(x), conv.weight.flatten(1)) if self.as_matmul else to_rows(convolve(conv, x))
        return to_images(self.glue(rows, untracked(bias), to_rows(residual)), residual)


class FoldedStem(nn.Module):
    """Convolution of the images, bias, activation and pooling."""

    def __init__(self, folding: Folding, conv: nn.Conv2d) -> None:
        super().__init__()
        self.conv = conv
        self.glue = BiasActPool()

    def forward(self, x: Tensor) -> Tensor:
        """Images [N, C_in, H, W] -> [N, 64, ⌈H / 4⌉, ⌈W / 4⌉]."""
        return self.glue(convolve_images(self.conv, x), self.conv.bias)


def is_pointwise(conv: nn.Conv2d) -> bool:
    """Whether the convolution is a product of pixels and weights."""
    return conv.kernel_size == (1, 1) and conv.stride == (1, 1) and conv.groups == 1


def make_conv(
    config: ResNetConfig, inputs: int, outputs: int, kernel: int, *, stride: int = 1, dilation: int = 1, groups: int = 1
) -> nn.Conv2d:
    """A convolution that keeps the size but for its stride; a bias only where a norm is folded into it."""
    padding, bias = dilation * (kernel // 2), config.folding is not None
    return nn.Conv2d(inputs, outputs, kernel, stride, padding, dilation, groups, bias)


def make_stem(config: ResNetConfig) -> nn.Module:
    """The stem of a configuration."""
    conv = make_conv(config, config.in_channels, STEM_WIDTH, 7, stride=2)
    return Stem(config, conv) if config.folding is None else FoldedStem(config.folding, conv)


def make_unit(config: ResNetConfig, conv: nn.Conv2d) -> nn.Module:
    """A convolution inside a block with what follows it."""
    return ConvNormAct(config, conv) if config.folding is None else FoldedConvAct(config.folding, conv)


def make_join(config: ResNetConfig, conv: nn.Conv2d, shape: BlockShape) -> nn.Module:
    """The last convolution of a block with what follows it."""
    shortcut = None
    if shape.projects:
        # Its bias, where there is one, is part of the other convolution's.
        shortcut = nn.Conv2d(shape.inputs, shape.outputs, 1, stride=shape.stride, bias=False)
    join = ConvNormJoin if config.folding is None else FoldedConvJoin
    return join(config if config.folding is None else config.folding, conv, shortcut)  # type: ignore[arg-type]
