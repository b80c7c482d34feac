"""ResNet (https://arxiv.org/abs/1512.03385), ResNeXt and wide ResNet, as torchvision builds them.

    images ─ stem ─ stage ─ stage ─ stage ─ stage ─ head ─▶ [N, K]      stem: 7 × 7 ─ norm ─ act ─ pool
                                                                        stage: blocks; the first halves the size
    basic block        x ─ 3 × 3 ─ norm ─ act ─ 3 × 3 ─ norm ─ add ─ act ─▶
                       └──────────────── (1 × 1 ─ norm) ────────┘

    bottleneck         x ─ 1 × 1 ─ norm ─ act ─ 3 × 3 ─ norm ─ act ─ 1 × 1 ─ norm ─ add ─ act ─▶
                       └──────────────────────── (1 × 1 ─ norm) ────────────────────┘

The regions are the blocks, stem and head. All of it is in channels_last.

Shape legend: N images, C channels, H height, W width, K classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from zoo.engine.discover import Region
from zoo.modules import channels_last
from zoo.resnet.checks import check_images, check_norms
from zoo.resnet.config import BlockShape, ResNetConfig
from zoo.resnet.units import Join, Stem, Unit


class BasicBlock(nn.Module):
    """Two 3 × 3 convolutions and a residual, torchvision's ``BasicBlock``."""

    def __init__(self, config: ResNetConfig, shape: BlockShape) -> None:
        super().__init__()
        self.conv1 = Unit(config, shape.inputs, shape.inner, 3, stride=shape.stride)
        self.join = Join(config, shape, 3)

    def forward(self, x: Tensor) -> Tensor:
        """[N, C_in, H, W] -> [N, C_out, H / stride, W / stride]."""
        return self.join(self.conv1(x), x)


class Bottleneck(nn.Module):
    """1 × 1, 3 × 3 and 1 × 1 convolutions and a residual, torchvision's ``Bottleneck``: the 3 × 3 has the stride."""

    def __init__(self, config: ResNetConfig, shape: BlockShape) -> None:
        super().__init__()
        wide = {"stride": shape.stride, "dilation": shape.dilation, "groups": shape.groups}
        self.conv1 = Unit(config, shape.inputs, shape.inner, 1)
        self.conv2 = Unit(config, shape.inner, shape.inner, 3, **wide)
        self.join = Join(config, shape, 1)

    def forward(self, x: Tensor) -> Tensor:
        """[N, C_in, H, W] -> [N, C_out, H / stride, W / stride]."""
        return self.join(self.conv2(self.conv1(x)), x)


class ResNetStage(nn.Module):
    """Blocks of one width; the first may change size and width."""

    def __init__(self, config: ResNetConfig, shapes: Sequence[BlockShape]) -> None:
        super().__init__()
        block = BasicBlock if config.block == "basic" else Bottleneck
        self.blocks = nn.ModuleList(block(config, shape) for shape in shapes)

    def forward(self, x: Tensor) -> Tensor:
        """[N, C_in, H, W] -> [N, C_out, H / stride, W / stride]."""
        for block in self.blocks:
            x = block(x)
        return x


class ResNetHead(nn.Module):
    """Mean over pixels and a linear layer."""

    def __init__(self, config: ResNetConfig) -> None:
        super().__init__()
        self.fc = nn.Linear(config.features, config.num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """[N, C, H, W] -> [N, K]."""
        return self.fc(x.mean((2, 3)))


_BLOCK: dict[str, Any] = {"graphs": 8, "compile_threads": 1, "why": "each stage's first block, and one for its repeats"}
REGIONS = (
    Region(Stem, graphs=1, why="the largest activation of all, normalised and pooled"),
    Region(BasicBlock, **_BLOCK),
    Region(Bottleneck, **_BLOCK),
    Region(ResNetHead, graphs=1, why="mean over pixels and the output product", compile_threads=1),
)


class ResNet(nn.Module):
    """A residual network over images.

    Weights and activations are in channels_last: images in it are used as they are, others are laid out by the stem,
    and loaded weights anew.

    Args:
        config: A ``ResNetConfig``.
    """

    regions: ClassVar[tuple[Region, ...]] = REGIONS

    def __init__(self, config: ResNetConfig) -> None:
        super().__init__()
        self.config = config
        self.stem = Stem(config)
        self.stages = nn.ModuleList(ResNetStage(config, shapes) for shapes in config.stages())
        self.head = ResNetHead(config)
        _initialise(self)
        channels_last(self)
        self.register_load_state_dict_post_hook(_loaded)  # type: ignore[no-untyped-call]

    def forward(self, images: Tensor, *, stages: bool = False) -> Tensor | tuple[Tensor, ...]:
        """Classify images.

        Args:
            images: [N, C_in, H, W], scaled and normalised (``zoo.resnet.transforms``), in any memory format.
            stages: Return the outputs of the four stages instead; see ``features``.

        Returns:
            Logits [N, K].

        Raises:
            TypeError, ValueError: If the images do not fit, before anything runs; the message says what to do.
        """
        check_images(images, self.config, self.head.fc.weight, self.training)
        if self.training and not torch.compiler.is_compiling():
            check_norms(self)
        x = self.stem(images)
        outputs = []
        for stage in self.stages:
            x = stage(x)
            if stages:
                outputs.append(x)
        return tuple(outputs) if stages else self.head(x)

    def features(self, images: Tensor) -> tuple[Tensor, ...]:
        """The outputs of the four stages, in channels_last; the head does not run.

        Args:
            images: As for ``forward``.

        Returns:
            [N, C, H / 4, W / 4] of the first stage, and of each next one twice as many channels and half the size
            (where it is not dilated), rounded up.
        """
        outputs = self(images, stages=True)
        assert isinstance(outputs, tuple)
        return outputs


def _initialise(model: ResNet) -> None:
    """As torchvision does."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    if model.config.zero_init_residual and model.config.folding is None and model.config.norm == "batch":
        for stage in model.stages:
            for block in stage.blocks:  # type: ignore[union-attr]
                nn.init.zeros_(block.join.norm.weight)


def _loaded(model: nn.Module, _: Any) -> None:
    # A loaded tensor that was assigned keeps the layout of its file.
    channels_last(model)
