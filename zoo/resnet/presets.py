"""Models by torchvision's names, and inputs to try them on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from zoo.resnet.config import ResNetConfig
from zoo.resnet.model import ResNet
from zoo.validate import seeded

_DEEP: dict[str, Any] = {"block": "bottleneck", "num_classes": 1000}

PRESETS: dict[str, ResNetConfig] = {
    "resnet18": ResNetConfig(block="basic", layers=(2, 2, 2, 2), num_classes=1000),
    "resnet34": ResNetConfig(block="basic", layers=(3, 4, 6, 3), num_classes=1000),
    "resnet50": ResNetConfig(layers=(3, 4, 6, 3), **_DEEP),
    "resnet101": ResNetConfig(layers=(3, 4, 23, 3), **_DEEP),
    "resnet152": ResNetConfig(layers=(3, 8, 36, 3), **_DEEP),
    "resnext50_32x4d": ResNetConfig(layers=(3, 4, 6, 3), groups=32, width_per_group=4, **_DEEP),
    "resnext101_32x8d": ResNetConfig(layers=(3, 4, 23, 3), groups=32, width_per_group=8, **_DEEP),
    "resnext101_64x4d": ResNetConfig(layers=(3, 4, 23, 3), groups=64, width_per_group=4, **_DEEP),
    "wide_resnet50_2": ResNetConfig(layers=(3, 4, 6, 3), width_per_group=128, **_DEEP),
    "wide_resnet101_2": ResNetConfig(layers=(3, 4, 23, 3), width_per_group=128, **_DEEP),
    "resnet-debug": ResNetConfig(block="bottleneck", layers=(2, 2, 1, 1), num_classes=10, width_per_group=16),
}


def build(config: ResNetConfig) -> nn.Module:
    """A randomly initialised model on the current default device and dtype.

    Raises:
        TypeError: If the config is none of the family's.
    """
    if not isinstance(config, ResNetConfig):
        raise TypeError(f"config is a {type(config).__name__}, expected a ResNetConfig")
    return ResNet(config)


def example_inputs(model: nn.Module, *, batch: int = 2, size: int = 64, seed: int = 0) -> dict[str, Tensor]:
    """Normal values in place of images: ``images`` [batch, C_in, size, size] in channels_last.

    The same seed gives the same images on every device.
    """
    if not isinstance(model, ResNet):
        raise TypeError(f"{type(model).__name__} is not a ResNet of the zoo")
    if batch < 1 or size < 1:
        raise ValueError(f"batch is {batch} and size {size}; both must be positive")
    generator = seeded(seed)
    shape = (batch, model.config.in_channels, size, size)
    images = torch.randn(shape, generator=generator, device="cpu", dtype=torch.float32)
    weight = model.head.fc.weight
    return {"images": images.to(weight.device, weight.dtype).contiguous(memory_format=torch.channels_last)}
