"""torchvision's arms: as its users would run it, at its documented best, and as the reference for correctness."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from benchmarks.families.resnet_work import REFERENCE_IMAGES
from zoo.engine.compat import compile_limit_kwargs
from zoo.resnet import ResNetConfig


def build(config: ResNetConfig, *, seed: int) -> nn.Module:
    """The library's model in eval mode and channels_last, float32 on the CPU, with seeded weights and statistics.

    Norms start as ones and zeros, where a forgotten one would not show: they are drawn as well. Blocks add a little to
    what goes through them, as trained ones do, so that activations stay in the range of half precision.
    """
    import torchvision.models.resnet as library

    block = library.BasicBlock if config.block == "basic" else library.Bottleneck
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = library.ResNet(
            block,
            list(config.layers),
            num_classes=config.num_classes,
            groups=config.groups,
            width_per_group=config.width_per_group,
        )
        last = "bn2" if config.block == "basic" else "bn3"
        with torch.no_grad():
            for name, module in model.named_modules():
                if isinstance(module, nn.BatchNorm2d):
                    assert module.running_mean is not None and module.running_var is not None
                    module.running_mean.normal_(std=0.1)
                    module.running_var.uniform_(0.5, 1.5)
                    module.weight.uniform_(0.5, 1.5).mul_(0.3 if name.endswith(last) else 1.0)
                    module.bias.normal_(std=0.1)
    return model.eval().to(memory_format=torch.channels_last)


def draw_images(config: ResNetConfig, batch: int, size: int, *, seed: int) -> Tensor:
    """Images as they come out of preprocessing, normal: [N, C, H, W] float32 on the CPU, in channels_last."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(batch, config.in_channels, size, size, generator=generator)
    return images.contiguous(memory_format=torch.channels_last)


def fold(model: nn.Module) -> nn.Module:
    """Fold batch norms into convolutions by torch's public function, module by module; in place.

    ``torch.fx.experimental.optimization.fuse`` does the same and leaves no blocks to compile.
    """
    for parent in list(model.modules()):
        for norm_name, norm in list(parent.named_children()):
            if isinstance(norm, nn.BatchNorm2d):
                # bn1 follows conv1; in a shortcut 1 follows 0.
                conv_name = norm_name.replace("bn", "conv") if norm_name.startswith("bn") else "0"
                conv = getattr(parent, conv_name)
                setattr(parent, conv_name, fuse_conv_bn_eval(conv, norm))
                setattr(parent, norm_name, nn.Identity())
    return model.to(memory_format=torch.channels_last)


def freeze_weights() -> None:
    """Let Inductor fold weights as constants, in this process from now on.

    On a CPU it packs them for oneDNN and fuses the activation and the residual into the convolution. As an option of
    one ``torch.compile`` call it has no effect, and frozen graphs are not kept in the compiler's cache. Only for whole
    models: blocks would not share a graph any more, since each holds its own weights.
    """
    import torch._inductor.config as inductor

    inductor.freezing = True


def compile_blocks(model: nn.Module, *, raised_limit: bool, **options: Any) -> None:
    """Regional compilation as a user of the library does it: each residual block in place.

    Args:
        model: A model of :func:`build`, folded or not.
        raised_limit: Allow more graphs of a block than the eight after which it silently stays eager.
        options: What ``torch.compile`` takes.
    """
    if raised_limit:
        options |= compile_limit_kwargs()
    for stage in (model.layer1, model.layer2, model.layer3, model.layer4):
        for block in stage:  # type: ignore[union-attr]
            block.compile(**options)


@torch.no_grad()
def reference_output(model: nn.Module, images: Tensor) -> Tensor:
    """Eager upstream in float64 on these weights and images, some images at a time: [N, K]."""
    double = copy.deepcopy(model).double()
    return torch.cat([double(part.double()) for part in images.split(REFERENCE_IMAGES)])
