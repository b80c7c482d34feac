"""ResNet (https://arxiv.org/abs/1512.03385), ResNeXt and wide ResNet, as torchvision builds them.

    images ─ stem ─ stage ─ stage ─ stage ─ stage ─ head ─▶ [N, K]      stem: 7 × 7 ─ norm ─ act ─ pool
                                                                        stage: blocks; the first halves the size
    basic block        x ─ 3 × 3 ─ norm ─ act ─ 3 × 3 ─ norm ─ add ─ act ─▶
                       └──────────────── (1 × 1 ─ norm) ────────┘

    bottleneck         x ─ 1 × 1 ─ norm ─ act ─ 3 × 3 ─ norm ─ act ─ 1 × 1 ─ norm ─ add ─ act ─▶
                       └──────────────────────── (1 × 1 ─ norm) ────────────────────┘

The regions are the blocks, stem and head. Activations are in channels_last. Norms hold tensors and are never called:
one operator after a convolution computes norm, residual and activation, or one product computes all of them. In a
folded model (``fold_batch_norm``) convolutions have biases instead of norms.

Shape legend: N images, C channels, H height, W width, K classes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo import validate
from zoo.engine.region import Region
from zoo.ops.common import differentiated, is_unmodified
from zoo.ops.images import (
    Norm,
    bias_act_pool,
    conv_bias_act,
    conv_norm_act,
    max_pool,
    mean_linear,
    norm_act_pool,
    stem_conv,
)
from zoo.weights import keep_channels_last

STEM_WIDTH = 64


@dataclass(frozen=True, kw_only=True)
class BlockShape:
    """Channels of one block, and its stride, which applies to the first 3 × 3 convolution and the shortcut."""

    inputs: int
    inner: int  # between the convolutions
    outputs: int
    stride: int
    dilation: int
    groups: int

    @property
    def projects(self) -> bool:
        """Whether the shortcut is a convolution: size or width change."""
        return self.stride != 1 or self.inputs != self.outputs


@dataclass(frozen=True, kw_only=True)
class ResNetConfig:
    """A ResNet, ResNeXt or wide ResNet. Fields are torchvision's, except these.

    Args:
        block: ``"basic"`` (two 3 × 3 convolutions) or ``"bottleneck"`` (1 × 1, 3 × 3, 1 × 1).
        layers: Blocks of each of the four stages.
        in_channels: Channels of the images.
        norm: ``"batch"``, or ``"frozen"`` for torchvision's ``FrozenBatchNorm2d``.
        norm_momentum: Share of a batch's statistics in the running ones, with ``norm="batch"``.
        track_running_stats: False for batch norms that use each batch's own statistics in eval mode too.
        folded: A model for inference without norms, which ``zoo.resnet.fold_batch_norm`` makes.
    """

    block: str
    layers: tuple[int, int, int, int]
    num_classes: int
    in_channels: int = 3
    groups: int = 1
    width_per_group: int = 64
    replace_stride_with_dilation: tuple[bool, bool, bool] = (False, False, False)
    norm: str = "batch"
    norm_eps: float = 1e-5
    norm_momentum: float = 0.1
    track_running_stats: bool = True
    zero_init_residual: bool = False
    folded: bool = False

    def __post_init__(self) -> None:
        # Configurations from files often have lists, which never equal tuples.
        object.__setattr__(self, "layers", tuple(self.layers))
        object.__setattr__(self, "replace_stride_with_dilation", tuple(map(bool, self.replace_stride_with_dilation)))
        validate.one_of(self, "block", ("basic", "bottleneck"))
        validate.one_of(self, "norm", ("batch", "frozen"))
        validate.positive(self, "num_classes", "in_channels", "groups", "width_per_group")
        dilated = self.replace_stride_with_dilation
        if len(self.layers) != 4 or not all(validate.is_count(count) for count in self.layers):
            raise ValueError(f"layers is {self.layers!r}, expected four positive numbers of blocks")
        if len(dilated) != 3:
            raise ValueError(f"replace_stride_with_dilation is {dilated}, expected three flags, for stages 2, 3 and 4")
        if self.norm_momentum is None:
            raise ValueError("norm_momentum is None, a cumulative average that reads the device at each step")
        if self.block == "basic" and (self.groups, self.width_per_group) != (1, 64):
            raise ValueError(f"groups is {self.groups} and width_per_group {self.width_per_group}: use bottlenecks")
        if self.block == "basic" and any(shape.dilation != 1 for stage in self.stages() for shape in stage):
            raise ValueError(f"replace_stride_with_dilation is {dilated}: basic blocks cannot be dilated")

    @property
    def expansion(self) -> int:
        """Ratio of a block's output width to its stage's width."""
        return 4 if self.block == "bottleneck" else 1

    def stages(self) -> Iterator[list[BlockShape]]:
        """The blocks of each stage."""
        inputs, dilation = STEM_WIDTH, 1
        for index, count in enumerate(self.layers):
            width, stride, before = 64 * 2**index, 1 if index == 0 else 2, dilation
            if index > 0 and self.replace_stride_with_dilation[index - 1]:
                stride, dilation = 1, dilation * 2
            inner = int(width * (self.width_per_group / 64)) * self.groups if self.block == "bottleneck" else width
            common = {"inner": inner, "outputs": width * self.expansion, "groups": self.groups}
            first = BlockShape(inputs=inputs, stride=stride, dilation=before, **common)
            inputs = first.outputs
            yield [first] + [BlockShape(inputs=inputs, stride=1, dilation=dilation, **common)] * (count - 1)


_DEEP: dict[str, Any] = {"block": "bottleneck", "num_classes": 1000}

# Names are torchvision's.
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


class FrozenBatchNorm(nn.Module):
    """The tensors of a batch norm with fixed statistics, torchvision's ``FrozenBatchNorm2d``."""

    weight: Tensor
    bias: Tensor
    running_mean: Tensor
    running_var: Tensor

    def __init__(self, channels: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        for name, value in (("weight", 1.0), ("bias", 0.0), ("running_mean", 0.0), ("running_var", 1.0)):
            self.register_buffer(name, torch.full((channels,), value))


def _make_norm(config: ResNetConfig, channels: int) -> nn.Module | None:
    """A norm that holds tensors and is never called; None in a folded model."""
    if config.folded:
        return None
    if config.norm == "frozen":
        return FrozenBatchNorm(channels, config.norm_eps)
    options = config.norm_eps, config.norm_momentum, True, config.track_running_stats
    return nn.BatchNorm2d(channels, *options)


def _norm_of(norm: Any) -> Norm:
    """A norm's tensors and options, as its own ``forward`` would use them."""
    weight, bias, mean, variance = norm.weight, norm.bias, norm.running_mean, norm.running_var
    if not norm.training or isinstance(norm, FrozenBatchNorm):
        return Norm(weight, bias, mean, variance, None, mean is None, 0.0, norm.eps)
    # Refuses user changes that the operators do not support.
    if isinstance(norm, nn.SyncBatchNorm):
        raise ValueError("a norm is a SyncBatchNorm, but statistics are those of one process: keep BatchNorm2d")
    if norm.momentum is None:
        raise ValueError(
            "the momentum of a norm is None, a cumulative average that reads the device at each step; of torch's "
            "update_bn, which sets it, the statistics come by way of zoo.to_upstream(model), to be loaded back"
        )
    return Norm(weight, bias, mean, variance, norm.num_batches_tracked, True, norm.momentum, norm.eps)


class Unit(nn.Module):
    """Convolution, norm and activation. ``kernel`` is the kernel size, ``options`` are the convolution's."""

    def __init__(self, config: ResNetConfig, inputs: int, outputs: int, kernel: int, **options: int) -> None:
        super().__init__()
        padding = options.get("dilation", 1) * (kernel // 2)
        self.conv = nn.Conv2d(inputs, outputs, kernel, padding=padding, bias=config.folded, **options)  # type: ignore[arg-type]
        self.norm = _make_norm(config, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """[N, C_in, H, W] -> [N, C_out, H', W']."""
        if self.norm is None:
            return conv_bias_act(x, self.conv)
        return conv_norm_act(x, self.conv, _norm_of(self.norm))


class Join(Unit):
    """The end of a block: convolution, norm, residual and activation; also the shortcut's convolution and norm."""

    def __init__(self, config: ResNetConfig, shape: BlockShape, kernel: int) -> None:
        super().__init__(config, shape.inner, shape.outputs, kernel)
        self.shortcut = self.shortcut_norm = None
        if shape.projects:
            # The bias of a folded shortcut is added to the main convolution's.
            self.shortcut = nn.Conv2d(shape.inputs, shape.outputs, 1, stride=shape.stride, bias=False)
            self.shortcut_norm = _make_norm(config, shape.outputs)

    def forward(self, x: Tensor, block_input: Tensor) -> Tensor:  # type: ignore[override]
        """[N, C_in, H, W] inside the block, and the block's input -> [N, C_out, H, W]."""
        residual = block_input if self.shortcut is None else self.shortcut(block_input)
        if self.norm is None:
            return conv_bias_act(x, self.conv, residual)
        shortcut_norm = None if self.shortcut_norm is None else _norm_of(self.shortcut_norm)
        return conv_norm_act(x, self.conv, _norm_of(self.norm), residual, shortcut_norm)


class Stem(Unit):
    """Convolution of the images, norm, activation and pooling."""

    def __init__(self, config: ResNetConfig) -> None:
        super().__init__(config, config.in_channels, STEM_WIDTH, 7, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        """Images [N, C_in, H, W] -> [N, 64, ⌈H / 4⌉, ⌈W / 4⌉]."""
        conv = self.conv
        unmodified = is_unmodified(conv, nn.Conv2d)
        x = stem_conv(x, conv) if unmodified else conv(x.contiguous(memory_format=torch.channels_last))
        if self.norm is not None:
            return norm_act_pool(x, _norm_of(self.norm))
        # A modified convolution has added its bias.
        return bias_act_pool(x, conv.bias) if unmodified else max_pool(F.relu(x))  # type: ignore[arg-type]


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
        options = {"stride": shape.stride, "dilation": shape.dilation, "groups": shape.groups}
        self.conv1 = Unit(config, shape.inputs, shape.inner, 1)
        self.conv2 = Unit(config, shape.inner, shape.inner, 3, **options)
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
        self.fc = nn.Linear(512 * config.expansion, config.num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """[N, C, H, W] -> [N, K]."""
        return mean_linear(x, self.fc)


# The model has few kernels: this process compiles all of them before a worker could start.
_HERE = {"compile_threads": 1}
_BLOCK: dict[str, Any] = {"graphs": 8, "why": "each stage's first block, and one for its repeats", "options": _HERE}
REGIONS = (
    Region(Stem, graphs=1, why="the largest activation of all, normalised and pooled"),
    Region(BasicBlock, **_BLOCK),
    Region(Bottleneck, **_BLOCK),
    Region(ResNetHead, graphs=1, why="mean over pixels and the output product", options=_HERE),
)


class ResNet(nn.Module):
    """A residual network over images, built from a ``ResNetConfig``.

    Weights and activations are in channels_last; the stem converts images in other layouts.
    """

    regions: ClassVar[tuple[Region, ...]] = REGIONS

    def __init__(self, config: ResNetConfig) -> None:
        super().__init__()
        self.config = config
        self.stem = Stem(config)
        self.stages = nn.ModuleList(ResNetStage(config, shapes) for shapes in config.stages())
        self.head = ResNetHead(config)
        # As in torchvision: He's normal initialisation over outputs.
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(module, Join) and config.zero_init_residual and isinstance(module.norm, nn.BatchNorm2d):
                nn.init.zeros_(module.norm.weight)
        keep_channels_last(self)

    def forward(self, images: Tensor, *, stages: bool = False) -> Tensor | tuple[Tensor, ...]:
        """Classify images [N, C_in, H, W], scaled and normalised as the weights' ``transforms()`` do: logits [N, K].

        With ``stages`` it returns the outputs of the four stages in channels_last, without running the head. The first
        is [N, C, H / 4, W / 4]; each later stage has twice the channels and half the size (unless dilated), rounded up.
        Raises TypeError or ValueError for images that do not fit, before anything runs.
        """
        _check_images(images, self.config, self.head.fc.weight)
        x = self.stem(images)
        outputs = []
        for stage in self.stages:
            x = stage(x)
            if stages:
                outputs.append(x)
        return tuple(outputs) if stages else self.head(x)


def _check_images(images: Tensor, config: ResNetConfig, weight: Tensor) -> None:
    if config.folded and torch.is_autocast_enabled(weight.device.type):
        # Autocast casts only convolutions: bias, residual and cuDNN's fused calls would get two dtypes.
        narrow = torch.get_autocast_dtype(weight.device.type)
        raise ValueError(f"a folded model runs in its own dtype: leave torch.autocast, use model.to({narrow})")
    hint = (
        "; images[None] makes a batch of one image, images.permute(0, 3, 1, 2) puts channels first, and the "
        "transforms() of torchvision's weights scale and normalise integers"
    )
    shape, kinds = f"N {config.in_channels} H W", (weight.dtype,) if config.folded else "floating"
    validate.tensor("images", images, shape, kinds=kinds, like=weight, empty=False, hint=hint)
    if config.folded and differentiated(images):
        raise ValueError("images requires a gradient, but a folded model is for inference; use the model it came from")


def example_inputs(model: ResNet, *, batch: int = 2, size: int = 64, seed: int = 0) -> dict[str, Tensor]:
    """Random normal images [batch, C_in, size, size] in channels_last, the same on every device."""
    validate.count("batch", batch)
    validate.count("size", size)
    shape = (batch, model.config.in_channels, size, size)
    images = torch.randn(shape, generator=validate.seeded(seed), device="cpu", dtype=torch.float32)
    weight = model.head.fc.weight
    return {"images": images.to(weight.device, weight.dtype).contiguous(memory_format=torch.channels_last)}
