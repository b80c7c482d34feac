"""What a UNet must do and hold, as formulas: floating-point operations, bytes moved, memory.

Legend: B rows, C channels, T = H W pixels of a level, L tokens of the text, D its width, E width of the embedded
timestep. All counts of a :class:`Call` are those of one row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from zoo.unet import UNetConfig
from zoo.unet.config import BlockShape, LevelShape

BYTES_FORMULA = (
    "Convolutions, products and attention are calls of their own: each reads its input and writes its output, and the "
    "weights are read once for all rows. Norm, activation, gate, shift and residual happen on the way, a residual is "
    "read once more, a skip connection is read where it is used; the text is read, its keys and values are written "
    "and read. Left out: the timestep. Activations are counted at any size, though those of a small level may stay in "
    "the caches of the chip."
)
# Of the text, as CLIP gives it.
TOKENS = 77
# Where a call's CUDA context, its libraries' work space and the compiler's buffers go.
PROCESS_BYTES = 1 << 30
# A reference that holds more values than this for weights is in float32, and in float64 otherwise.
FLOAT64_VALUES = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Call:
    """A call of the vendor's library, or with weights alone what happens on the way of one.

    Args:
        weights: All that belong to it, biases too.
        reads: Values, weights apart.
        writes: Values.
        products: Multiply-adds.
        given: Whether what it reads is given to the model, and has no gradient.
    """

    weights: int
    reads: int = 0
    writes: int = 0
    products: int = 0
    given: bool = False


def calls(config: UNetConfig, size: int) -> Iterator[Call]:
    """All of them, for samples of so many pixels a side."""
    first, pixels = config.block_out_channels[0], size**2
    yield from _conditions(config)
    yield replace(_conv(config.in_channels, first, config.conv_in_kernel, pixels, pixels), given=True)
    reduction = 1
    for level in config.down():
        yield from _blocks(config, level, size // reduction)
        if level.resample:
            width, before = level.blocks[-1].outputs, (size // reduction) ** 2
            yield _conv(width, width, 3, before, before // 4)
            reduction *= 2
    yield from _blocks(config, config.middle(), size // reduction)
    for level in config.up():
        yield from _blocks(config, level, size // reduction)
        if level.resample:
            # It reads the small image: doubling happens on the way.
            width, before = level.blocks[-1].outputs, (size // reduction) ** 2
            yield _conv(width, width, 3, before, 4 * before)
            reduction //= 2
    yield _norm(first)
    yield _conv(first, config.out_channels, config.conv_out_kernel, pixels, pixels)


def flops(config: UNetConfig, batch: int, size: int) -> int:
    """Multiply-adds counted as two; element-wise work is left out, as by torch's counter."""
    return 2 * batch * sum(call.products for call in calls(config, size))


def given_products(config: UNetConfig, size: int) -> int:
    """Multiply-adds of one row with what is given to the model."""
    return sum(call.products for call in calls(config, size) if call.given)


def parameters(config: UNetConfig) -> int:
    """All weights."""
    return sum(call.weights for call in calls(config, config.reduction))


def activations(config: UNetConfig, size: int) -> int:
    """Values of one row that calls read and write."""
    return sum(call.reads + call.writes for call in calls(config, size))


def bytes_moved(config: UNetConfig, batch: int, size: int, itemsize: int) -> int:
    """Fewest bytes that one call of the model moves through device memory, as :data:`BYTES_FORMULA` says."""
    return (batch * activations(config, size) + parameters(config)) * itemsize


def memory(config: UNetConfig, batch: int, size: int, itemsize: int, *, fused: bool) -> int:
    """Peak memory of an arm or of the reference, whichever takes more: weights, skips, and what is alive at once.

    The reference takes a row at a time. In float64 it writes scores out, their softmax beside them, and there is no
    attention on a GPU that does not.

    Args:
        config: The model's.
        batch: B.
        size: H and W.
        itemsize: Bytes of a value.
        fused: Whether diffusers' fused projections are there, which it keeps beside those that they were made of.
    """
    held = (parameters(config) + (fused_weights(config) if fused else 0)) * itemsize
    row = skips(config, size) + alive(config, size)
    running = batch * row * itemsize
    wide = reference_dtype(config).itemsize
    reference = (parameters(config) + row + (3 * scores(config, size) if wide == 8 else 0)) * wide
    return held + max(running, reference) + PROCESS_BYTES


def reference_dtype(config: UNetConfig, copies: int = 1) -> torch.dtype:
    """Of a reference that holds so many values for each weight."""
    return torch.float64 if copies * parameters(config) <= FLOAT64_VALUES else torch.float32


def added_conditions(config: UNetConfig, batch: int, size: int, device: torch.device | str) -> tuple[int, Tensor]:
    """Width of the pooled text, and sizes [B, 6] float32: original size, upper left corner and target size in pixels.

    For models that take them; an image has eight pixels a side for one of its latents.
    """
    assert config.addition_time_embed_dim is not None and config.projection_class_embeddings_input_dim is not None
    pixels = torch.tensor([8.0 * size, 8.0 * size, 0.0, 0.0, 8.0 * size, 8.0 * size])
    pooled = config.projection_class_embeddings_input_dim - 6 * config.addition_time_embed_dim
    return pooled, pixels.repeat(batch, 1).to(device)


def skips(config: UNetConfig, size: int) -> int:
    """Values of one row that wait on the way down for the way up."""
    return sum(channels * (size // reduction) ** 2 for channels, reduction in config.skips())


def alive(config: UNetConfig, size: int) -> int:
    """Values of one row around the largest call: what it reads and writes, and as much before and behind it, twice."""
    return 4 * max(call.reads + call.writes for call in calls(config, size))


def scores(config: UNetConfig, size: int) -> int:
    """Values of one row's largest attention, written out."""
    return max(block.heads * pixels**2 for block, pixels in _attending(config, size))


def fused_weights(config: UNetConfig) -> int:
    """Of diffusers' fused projections: of queries, keys and values of a level's pixels, keys and values of the text."""
    return sum(
        (block.depth or 0) * block.outputs * (3 * block.outputs + 2 * config.cross_attention_dim)
        for block in config.blocks()
    )


def text_projections(config: UNetConfig) -> tuple[int, int]:
    """Weights of all keys and values of the text; and values of one row that making them reads and writes."""
    width, tokens = config.cross_attention_dim, TOKENS
    channels = sum(2 * (block.depth or 0) * block.outputs for block in config.blocks())
    return channels * width, tokens * (width + channels)


def _conditions(config: UNetConfig) -> Iterator[Call]:
    """What comes before the first block; of the timestep weights and products alone."""
    width = config.time_width
    embedded = [config.block_out_channels[0]]
    if config.addition_embed_type is not None:
        assert config.projection_class_embeddings_input_dim is not None
        embedded.append(config.projection_class_embeddings_input_dim)
    for inputs in embedded:
        yield Call(weights=(inputs + 1) * width, products=inputs * width, given=True)
        yield Call(weights=(width + 1) * width, products=width * width)
    if config.time_cond_proj_dim is not None:
        product = config.time_cond_proj_dim * config.block_out_channels[0]
        yield Call(weights=product, products=product, given=True)
    yield Call(weights=0, reads=TOKENS * config.cross_attention_dim)


def _blocks(config: UNetConfig, level: LevelShape, size: int) -> Iterator[Call]:
    """A level's, for images of so many pixels a side."""
    for block in level.blocks:
        yield from _resnet(config, block, size**2)
        if block.depth is not None:
            yield from _transformer(config, block, size**2)


def _resnet(config: UNetConfig, block: BlockShape, pixels: int) -> Iterator[Call]:
    inputs, outputs = block.inputs + block.skip, block.outputs
    shift = config.time_width * outputs
    yield Call(weights=shift + outputs, products=shift)
    yield _norm(inputs)
    yield _conv(inputs, outputs, 3, pixels, pixels)
    yield _norm(outputs)
    residual = outputs * pixels
    yield _conv(outputs, outputs, 3, pixels, pixels, more=residual)
    if inputs != outputs:
        yield _conv(inputs, outputs, 1, pixels, pixels)


def _transformer(config: UNetConfig, block: BlockShape, pixels: int) -> Iterator[Call]:
    width, text = block.outputs, config.cross_attention_dim
    image, written = width * pixels, 2 * width * TOKENS
    yield _norm(width)
    yield _conv(width, width, 1, pixels, pixels)
    for _ in range(block.depth or 0):
        for _ in range(3):
            yield _norm(width)
        yield Call(weights=3 * width**2, reads=image, writes=3 * image, products=3 * width * image)
        yield Call(weights=0, reads=3 * image, writes=image, products=2 * image * pixels)
        yield _conv(width, width, 1, pixels, pixels, more=image)
        yield Call(weights=width**2, reads=image, writes=image, products=width * image)
        # The text was read once for all blocks.
        yield Call(weights=2 * width * text, writes=written, products=written * text, given=True)
        yield Call(weights=0, reads=image + written, writes=image, products=2 * image * TOKENS)
        yield _conv(width, width, 1, pixels, pixels, more=image)
        # Of the eight widths half are written: the gate is on the way.
        inner = 4 * image
        yield Call(weights=8 * width**2 + 8 * width, reads=image, writes=inner, products=2 * width * inner)
        yield Call(weights=4 * width**2 + width, reads=inner + image, writes=image, products=width * inner)
    yield _conv(width, width, 1, pixels, pixels, more=image)


def _conv(inputs: int, outputs: int, kernel: int, before: int, after: int, *, more: int = 0) -> Call:
    """A convolution, or a product over pixels where the kernel is 1, with its bias; ``more`` is read as well."""
    taps = kernel**2 * inputs
    return Call(
        weights=outputs * taps + outputs,
        reads=inputs * before + more,
        writes=outputs * after,
        products=outputs * taps * after,
    )


def _norm(width: int) -> Call:
    return Call(weights=2 * width)


def _attending(config: UNetConfig, size: int) -> Iterator[tuple[BlockShape, int]]:
    """Blocks with transformers, and the pixels that these see."""
    reduction = 1
    for level in config.down():
        yield from ((block, (size // reduction) ** 2) for block in level.blocks if block.depth)
        reduction *= 2 if level.resample else 1
    yield from ((block, (size // reduction) ** 2) for block in config.middle().blocks if block.depth)
    for level in config.up():
        yield from ((block, (size // reduction) ** 2) for block in level.blocks if block.depth)
        reduction //= 2 if level.resample else 1
