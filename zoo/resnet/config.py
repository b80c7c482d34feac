"""Configuration of a ResNet, and the blocks that follow from it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

BLOCKS = ("basic", "bottleneck")
NORMS: dict[str, dict[str, Any]] = {
    "batch": {"eps": 1e-5, "momentum": 0.1, "track_running_stats": True},
    "frozen": {"eps": 1e-5},
}
STEM_WIDTH = 64


@dataclass(frozen=True, kw_only=True)
class Folding:
    """How a model runs whose batch norms are folded into its convolutions; see ``zoo.resnet.fold_batch_norm``.

    Args:
        convolutions: ``"glue"``: the library's convolution, then bias, residual and activation in one pass.
            ``"fused"``: all in one call of cuDNN where it runs.
        pointwise: 1 × 1 convolutions of stride 1 as ``"convolution"``, or as ``"matmul"``: a matrix product over
            pixels, with bias and activation in it where no residual is added.
    """

    convolutions: str = "glue"
    pointwise: str = "convolution"

    def __post_init__(self) -> None:
        for name, known in (("convolutions", ("glue", "fused")), ("pointwise", ("convolution", "matmul"))):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} is {getattr(self, name)!r}, expected one of {', '.join(known)}")


@dataclass(frozen=True, kw_only=True)
class BlockShape:
    """What one block needs to know.

    Args:
        inputs: Channels that it gets.
        inner: Channels inside.
        outputs: Channels that it gives.
        stride: Of its first 3 × 3 convolution, and of the shortcut.
        dilation: Of its 3 × 3 convolution.
        groups: Of the same.
    """

    inputs: int
    inner: int
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
    """A ResNet, ResNeXt or wide ResNet. Architecture has no default; switches default as torchvision's do.

    Args:
        block: ``"basic"`` (two 3 × 3 convolutions) or ``"bottleneck"`` (1 × 1, 3 × 3, 1 × 1).
        layers: Blocks of each of the four stages.
        num_classes: Width of the output.
        in_channels: Channels of the images.
        groups: Of the 3 × 3 convolutions; bottlenecks only.
        width_per_group: Width of a bottleneck's inside in the first stage, for each group.
        replace_stride_with_dilation: For stages 2, 3 and 4: keep the size and dilate instead; bottlenecks only.
        norm: ``"batch"``, or ``"frozen"`` for torchvision's ``FrozenBatchNorm2d``.
        norm_kwargs: Options of the norm that differ from ``NORMS``.
        zero_init_residual: Random weights only: start every block as its shortcut.
        folding: How a model runs whose norms are folded; None for one with norms.
    """

    block: str
    layers: tuple[int, int, int, int]
    num_classes: int
    in_channels: int = 3
    groups: int = 1
    width_per_group: int = 64
    replace_stride_with_dilation: tuple[bool, bool, bool] = (False, False, False)
    norm: str = "batch"
    norm_kwargs: Mapping[str, Any] = field(default_factory=dict)
    zero_init_residual: bool = False
    folding: Folding | None = None

    def __post_init__(self) -> None:
        # Lists are common in configurations that come from files, and not equal to tuples.
        object.__setattr__(self, "layers", tuple(self.layers))
        object.__setattr__(self, "replace_stride_with_dilation", tuple(map(bool, self.replace_stride_with_dilation)))
        if self.block not in BLOCKS:
            raise ValueError(f"block is {self.block!r}, expected one of {', '.join(BLOCKS)}")
        if len(self.layers) != 4 or not all(_positive(count) for count in self.layers):
            raise ValueError(f"layers is {self.layers!r}, expected four positive numbers of blocks")
        if len(self.replace_stride_with_dilation) != 3:
            raise ValueError(
                f"replace_stride_with_dilation is {self.replace_stride_with_dilation!r}, expected three flags, for "
                "stages 2, 3 and 4"
            )
        for name in ("num_classes", "in_channels", "groups", "width_per_group"):
            if not _positive(getattr(self, name)):
                raise ValueError(f"{name} is {getattr(self, name)!r}, expected a positive integer")
        if self.norm not in NORMS:
            raise ValueError(f"norm is {self.norm!r}, expected one of {', '.join(NORMS)}")
        unknown = sorted(set(self.norm_kwargs) - set(NORMS[self.norm]))
        if unknown:
            raise ValueError(
                f"norm_kwargs has {', '.join(unknown)}, which norm {self.norm!r} does not take; it takes "
                f"{', '.join(NORMS[self.norm])}"
            )
        if self.norm_options.get("momentum", 0.1) is None:
            raise ValueError("norm_kwargs has momentum=None, a cumulative average that reads the device at each step")
        self._check_block_kind()

    def _check_block_kind(self) -> None:
        if self.block == "basic":
            if self.groups != 1 or self.width_per_group != 64:
                raise ValueError(
                    f"groups is {self.groups} and width_per_group {self.width_per_group}: basic blocks have neither; "
                    "use block='bottleneck'"
                )
            if any(shape.dilation != 1 for stage in self.stages() for shape in stage):
                raise ValueError(
                    f"replace_stride_with_dilation is {self.replace_stride_with_dilation}: basic blocks cannot be "
                    "dilated; use block='bottleneck'"
                )
        elif int(64 * (self.width_per_group / 64)) * self.groups < 1:
            raise ValueError(f"width_per_group is {self.width_per_group}, too narrow for any channel")

    @property
    def norm_options(self) -> dict[str, Any]:
        """Options of the norm, all of them."""
        return {**NORMS[self.norm], **self.norm_kwargs}

    @property
    def expansion(self) -> int:
        """How many times wider a block gives than its stage's width."""
        return 4 if self.block == "bottleneck" else 1

    @property
    def features(self) -> int:
        """Channels of the last stage."""
        return 512 * self.expansion

    @property
    def reduction(self) -> int:
        """Pixels of an image's side for one of the last stage's."""
        return 4 * 2 ** sum(not replaced for replaced in self.replace_stride_with_dilation)

    def stages(self) -> Iterator[list[BlockShape]]:
        """The blocks of each stage."""
        inputs, dilation = STEM_WIDTH, 1
        for index, count in enumerate(self.layers):
            width, stride, before = 64 * 2**index, 1 if index == 0 else 2, dilation
            if index > 0 and self.replace_stride_with_dilation[index - 1]:
                stride, dilation = 1, dilation * 2
            inner = int(width * (self.width_per_group / 64)) * self.groups if self.block == "bottleneck" else width
            outputs = width * self.expansion
            blocks = []
            for position in range(count):
                first = position == 0
                shape = BlockShape(
                    inputs=inputs,
                    inner=inner,
                    outputs=outputs,
                    stride=stride if first else 1,
                    dilation=before if first else dilation,
                    groups=self.groups,
                )
                blocks.append(shape)
                inputs = outputs
            yield blocks


def _positive(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
