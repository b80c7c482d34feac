"""What a ResNet must do and hold, as formulas: floating-point operations, bytes moved, memory.

Legend: N images, C channels, H × W pixels.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from zoo.resnet import ResNetConfig
from zoo.resnet.model import STEM_WIDTH

BYTES_FORMULA = (
    "Convolutions are calls of their own: each reads its input and its weights and writes its output. Norm, activation "
    "and residual happen on the way, a block's residual is read once more, the shortcut's output is written and read; "
    "pooling reads and writes; the head reads the last stage and writes the logits. Activations are counted at any "
    "size, though those of a small batch may stay in the caches of the chip."
)
# Where a call's CUDA context, its libraries' work space and the compiler's buffers go.
PROCESS_BYTES = 1 << 30
# The reference takes so many images at a time.
REFERENCE_IMAGES = 16


@dataclass(frozen=True, kw_only=True)
class Conv:
    """One convolution: channels and pixels a side of its input and output, and the weights that an output sees."""

    inputs: int
    outputs: int
    size_in: int
    size_out: int
    taps: int

    @property
    def weights(self) -> int:
        """All of it."""
        return self.outputs * self.taps

    @property
    def values_in(self) -> int:
        """Of one image."""
        return self.inputs * self.size_in**2

    @property
    def values_out(self) -> int:
        """Of one image."""
        return self.outputs * self.size_out**2


@dataclass(frozen=True, kw_only=True)
class Block:
    """The convolutions of one block; the shortcut's, if any, apart."""

    convs: tuple[Conv, ...]
    shortcut: Conv | None


def stem(config: ResNetConfig, size: int) -> Conv:
    """The convolution of the images."""
    return Conv(
        inputs=config.in_channels,
        outputs=STEM_WIDTH,
        size_in=size,
        size_out=_half(size),
        taps=49 * config.in_channels,
    )


def blocks(config: ResNetConfig, size: int) -> Iterator[Block]:
    """All blocks in order, for images of so many pixels a side."""
    size = _half(_half(size))
    for stage in config.stages():
        for shape in stage:
            after = size if shape.stride == 1 else _half(size)
            if config.block == "basic":
                convs: tuple[Conv, ...] = (
                    _conv(shape.inputs, shape.inner, size, after, 9 * shape.inputs),
                    _conv(shape.inner, shape.outputs, after, after, 9 * shape.inner),
                )
            else:
                convs = (
                    _conv(shape.inputs, shape.inner, size, size, shape.inputs),
                    _conv(shape.inner, shape.inner, size, after, 9 * shape.inner // shape.groups),
                    _conv(shape.inner, shape.outputs, after, after, shape.inner),
                )
            shortcut = _conv(shape.inputs, shape.outputs, size, after, shape.inputs) if shape.projects else None
            yield Block(convs=convs, shortcut=shortcut)
            size = after


def convs(config: ResNetConfig, size: int) -> Iterator[Conv]:
    """All convolutions."""
    yield stem(config, size)
    for block in blocks(config, size):
        yield from block.convs
        if block.shortcut is not None:
            yield block.shortcut


def flops(config: ResNetConfig, batch: int, size: int) -> int:
    """Multiply-adds counted as two, of convolutions and head; element-wise work is left out, as by torch's counter."""
    products = sum(conv.values_out * conv.taps for conv in convs(config, size))
    return 2 * batch * (products + config.features * config.num_classes)


def parameters(config: ResNetConfig) -> int:
    """All weights: convolutions, a scale and a shift of every norm, the head."""
    found = sum(conv.weights + 2 * conv.outputs for conv in convs(config, 64))
    return found + (config.features + 1) * config.num_classes


def bytes_moved(config: ResNetConfig, batch: int, size: int, itemsize: int) -> int:
    """Fewest bytes that one call moves through device memory, as :data:`BYTES_FORMULA` says."""
    first = stem(config, size)
    pooled = STEM_WIDTH * _half(first.size_out) ** 2
    values = first.values_in + 2 * first.values_out + pooled
    last = pooled
    for block in blocks(config, size):
        values += sum(conv.values_in + conv.values_out for conv in block.convs)
        # With a shortcut its output is what is added, else the block's input.
        values += last if block.shortcut is None else block.shortcut.values_in + 2 * block.shortcut.values_out
        last = block.convs[-1].values_out
    return (batch * (values + last + config.num_classes) + parameters(config)) * itemsize


def memory(config: ResNetConfig, batch: int, size: int, itemsize: int) -> int:
    """Peak memory of an arm or of the reference, whichever takes more: weights, and what is alive at once.

    Around the largest activations there are four of their size: input, output and residual of a block's end, and one
    more where a norm is not fused. Weights are there twice, upstream's and ours.
    """
    alive = 4 * max(conv.values_out for conv in convs(config, size))
    images = config.in_channels * size**2
    running = (batch * (alive + images) + 2 * parameters(config)) * itemsize
    reference = (min(batch, REFERENCE_IMAGES) * alive + parameters(config)) * 8 + batch * images * itemsize
    return max(running, reference + 2 * parameters(config) * itemsize) + PROCESS_BYTES


def _conv(inputs: int, outputs: int, size_in: int, size_out: int, taps: int) -> Conv:
    return Conv(inputs=inputs, outputs=outputs, size_in=size_in, size_out=size_out, taps=taps)


def _half(size: int) -> int:
    return (size + 1) // 2
