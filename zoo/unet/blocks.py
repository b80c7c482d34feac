"""Resnet blocks, and the levels that a UNet goes down and up through.

    x ─ group norm, SiLU ─ 3 × 3 ─ shift, group norm, SiLU ─ 3 × 3 ─ bias, add ─▶
    └──────────────────────── (1 × 1) ───────────────────────────────────┘

Convolutions run without bias: the library would add it in a pass of its own. Inside a block it is part of the shift
that comes from the timestep, at its end of the residual add.

Shape legend: B images, C channels, H height, W width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from zoo.modules import to_images, to_rows
from zoo.ops.conv import conv, conv3, conv_add, upsample
from zoo.ops.group_norm import cat_group_norm, group_norm
from zoo.unet.config import BlockShape, LevelShape, UNetConfig
from zoo.unet.products import linear
from zoo.unet.transformer import Transformer


@dataclass(frozen=True)
class Supply:
    """What the blocks take from outside, in the order in which they run.

    Args:
        shifts: [B, C] of each resnet block.
        texts: Keys and values [B, L, 2 C] of the text for each transformer block.
        self_bias: [B, 1, 1, T], added to scores of self-attention, or None.
        text_bias: [B, 1, 1, L], added to scores of attention to the text, or None.
    """

    shifts: Iterator[Tensor]
    texts: Iterator[Tensor]
    self_bias: Tensor | None
    text_bias: Tensor | None


class ResnetBlock(nn.Module):
    """Two 3 × 3 convolutions with group norms before them, and a residual; diffusers' ``ResnetBlock2D``."""

    def __init__(self, config: UNetConfig, shape: BlockShape) -> None:
        super().__init__()
        inputs, outputs = shape.inputs + shape.skip, shape.outputs
        self.groups, self.eps, self.dropout = config.norm_num_groups, config.norm_eps, config.dropout
        # The convolutions and norms hold tensors and are never called.
        self.norm1 = nn.GroupNorm(self.groups, inputs, eps=self.eps)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(self.groups, outputs, eps=self.eps)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.shortcut = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else None

    def forward(self, x: Tensor, skip: Tensor | None, shift: Tensor) -> Tensor:
        """Run the block.

        Args:
            x: [B, C_in, H, W].
            skip: [B, C_skip, H, W] from the way down, or None.
            shift: [B, C_out], of the timestep.

        Returns:
            [B, C_out, H, W].
        """
        weight, bias, groups, eps = self.norm1.weight, self.norm1.bias, self.groups, self.eps
        if skip is None:
            hidden = group_norm(x, None, weight, bias, groups, eps, True)
        else:
            hidden, x = cat_group_norm(x, skip, weight, bias, groups, eps, True)
        hidden = conv3(hidden, self.conv1.weight)
        hidden = group_norm(hidden, shift, self.norm2.weight, self.norm2.bias, groups, eps, True)
        if self.training and self.dropout:
            hidden = F.dropout(hidden, self.dropout)
        hidden = conv3(hidden, self.conv2.weight)
        residual = to_rows(x)
        if self.shortcut is not None:
            residual = linear(residual, self.shortcut.weight.flatten(1), self.shortcut.bias)
        assert self.conv2.bias is not None
        return to_images(conv_add(to_rows(hidden), self.conv2.bias, residual), hidden)


class Level(nn.Module):
    """Resnet blocks of one size, some with a transformer behind them."""

    def __init__(self, config: UNetConfig, shape: LevelShape) -> None:
        super().__init__()
        self.resnets = nn.ModuleList(ResnetBlock(config, block) for block in shape.blocks)
        self.transformers = nn.ModuleList(
            nn.Identity() if block.depth is None else Transformer(config, block) for block in shape.blocks
        )

    def run(self, index: int, x: Tensor, skip: Tensor | None, supply: Supply) -> Tensor:
        """A resnet block and what is behind it: [B, C_in, H, W] -> [B, C_out, H, W]."""
        x = self.resnets[index](x, skip, next(supply.shifts))
        transformer = self.transformers[index]
        if isinstance(transformer, Transformer):
            texts = [next(supply.texts) for _ in transformer.blocks]
            x = transformer(x, texts, supply.self_bias, supply.text_bias)
        return x


class DownLevel(Level):
    """A level on the way down; a convolution halves the size behind it."""

    def __init__(self, config: UNetConfig, shape: LevelShape) -> None:
        super().__init__(config, shape)
        width, self.padding = shape.blocks[-1].outputs, config.downsample_padding
        self.downsample = nn.Conv2d(width, width, 3, stride=2, padding=self.padding) if shape.resample else None

    def forward(self, x: Tensor, supply: Supply) -> list[Tensor]:
        """[B, C_in, H, W] -> the outputs of all blocks [B, C_out, H, W], and the smaller one [B, C_out, H/2, W/2]."""
        outputs = []
        for index in range(len(self.resnets)):
            x = self.run(index, x, None, supply)
            outputs.append(x)
        if self.downsample is not None:
            outputs.append(conv(F.pad(x, (0, 1, 0, 1)) if self.padding == 0 else x, self.downsample))
        return outputs


class MiddleLevel(Level):
    """The blocks of the smallest size."""

    def forward(self, x: Tensor, supply: Supply) -> Tensor:
        """[B, C, H, W] -> [B, C, H, W]."""
        for index in range(len(self.resnets)):
            x = self.run(index, x, None, supply)
        return x


class UpLevel(Level):
    """A level on the way up; the size is doubled and convolved behind it."""

    def __init__(self, config: UNetConfig, shape: LevelShape) -> None:
        super().__init__(config, shape)
        width = shape.blocks[-1].outputs
        self.upsample = nn.Conv2d(width, width, 3, padding=1) if shape.resample else None

    def forward(self, x: Tensor, skips: Sequence[Tensor], supply: Supply) -> Tensor:
        """[B, C_in, H, W], and a [B, C_skip, H, W] for each block -> [B, C_out, 2 H, 2 W], or of the same size."""
        for index, skip in enumerate(skips):
            x = self.run(index, x, skip, supply)
        return x if self.upsample is None else conv(upsample(x), self.upsample)
