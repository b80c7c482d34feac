"""diffusers' arms of the UNet (as shipped, at its documented best, the reference), and a UNet's bytes and memory.

Legend: B rows, C channels, H × W pixels of a level, L tokens of the text, D its width. Counts are those of one row.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from benchmarks.families.base import SeededWeights, converted, count_flops, draw, parameters_of
from zoo.unet import UNet, UNetConfig
from zoo.unet.convert import upstream_config

BYTES_FORMULA = (
    "Convolutions, products and attention are calls of their own: each reads its input and writes its output, and the "
    "weights are read once for all rows. Norm, activation, gate, shift and residual happen on the way, a residual is "
    "read once more, a skip connection is read where it is used; the text is read, its keys and values are written "
    "and read. Left out: the timestep. Activations are counted at any size, though those of a small level may stay in "
    "the caches of the chip."
)
# Tokens of a text from CLIP.
TOKENS = 77
# Timestep of the inputs, in the middle of a run.
_TIMESTEP = 601
# A reference with more weight values than this is in float32, otherwise in float64.
FLOAT64_VALUES = 1 << 30
# Last weights of residual branches. They are small, so that branches add little, like trained ones.
_BRANCH_ENDS = ("conv2.weight", "to_out.0.weight", "ff.net.2.weight", "proj_out.weight")
_BRANCH_SCALE = 0.3


class Weights(SeededWeights):
    """Weights under diffusers' names, drawn on access; activations stay in the range of half precision.

    Norm weights are not ones, and no bias is zero, so that a forgotten one shows.
    """

    def __getitem__(self, name: str) -> Tensor:
        drawn, shape = super().__getitem__(name), self.shapes[name]
        if len(shape) == 1:
            return drawn
        # The base class scales a weight by its last dimension, which is the kernel's in a convolution.
        drawn = drawn.mul_(math.sqrt(shape[-1] / math.prod(shape[1:])))
        return drawn.mul_(_BRANCH_SCALE) if name.endswith(_BRANCH_ENDS) else drawn


def skeleton(config: UNetConfig) -> Any:
    from diffusers import UNet2DConditionModel

    with torch.device("meta"):
        return UNet2DConditionModel(**upstream_config(config)).eval()


def build(config: UNetConfig, weights: Mapping[str, Tensor]) -> Any:
    """The library's model with these weights in channels_last, as its documentation recommends before compiling."""
    model = skeleton(config)
    model.load_state_dict(dict(weights), strict=True, assign=True)
    return model.to(memory_format=torch.channels_last).requires_grad_(False)


def fuse_projections(model: Any) -> None:
    """Fuse queries, keys and values into one product, in place, by the library's own switch."""
    # The switch draws random weights for the new products before it overwrites them.
    with torch.random.fork_rng(devices=[]):
        model.fuse_qkv_projections()
    model.requires_grad_(False)


def compile_blocks(model: Any, **options: Any) -> None:
    """Regional compilation by the library's own helper: it compiles transformer blocks in place, not resnet blocks."""
    model.compile_repeated_blocks(fullgraph=True, **options)


def reference_model(config: UNetConfig, weights: Mapping[str, Tensor], dtype: torch.dtype) -> Any:
    model = skeleton(config)
    model.load_state_dict({name: weights[name].to(dtype) for name in weights}, strict=True, assign=True)
    return model.requires_grad_(False)


@torch.no_grad()
def reference_output(
    config: UNetConfig, weights: Mapping[str, Tensor], inputs: Mapping[str, Any], dtype: torch.dtype
) -> Tensor:
    """Eager upstream in another precision on these weights, a row at a time: [B, C_out, H, W]."""
    model = reference_model(config, weights, dtype)

    def row(index: int) -> dict[str, Any]:
        one = tree_map_only(Tensor, lambda value: value[index : index + 1] if value.dim() else value, dict(inputs))
        return converted(one, inputs["sample"].device, dtype)

    with in_full_float32():
        return torch.cat([model(**row(index))[0] for index in range(inputs["sample"].shape[0])])


def in_full_float32() -> AbstractContextManager[None]:
    """Disable TF32 in convolutions, which the harness' switch for products does not affect."""
    return torch.backends.cudnn.flags(enabled=True, allow_tf32=False)


def draw_inputs(
    config: UNetConfig, batch: int, size: int, *, seed: int, dtype: torch.dtype, device: torch.device
) -> dict[str, Any]:
    """A pipeline's inputs of a step, drawn on the device; on the meta device only shapes.

    Returns:
        ``sample`` [B, C_in, H, W], contiguous as pipelines hold latents, ``timestep`` [] on the device,
        ``encoder_hidden_states`` [B, L, D], ``return_dict``, and ``added_cond_kwargs`` if the model takes them.
    """

    def normal(name: str, *shape: int) -> Tensor:
        if device.type == "meta":
            return torch.empty(shape, dtype=dtype, device=device)
        return draw(shape, name, seed=seed, dtype=dtype, device=device)

    inputs: dict[str, Any] = {
        "sample": normal("sample", batch, config.in_channels, size, size),
        "timestep": torch.tensor(_TIMESTEP, device=device),
        "encoder_hidden_states": normal("text", batch, TOKENS, config.cross_attention_dim),
        "return_dict": False,
    }
    if config.addition_embed_type is not None:
        pooled, time_ids = added_conditions(config, batch, size, device)
        added = {"text_embeds": normal("pooled text", batch, pooled), "time_ids": time_ids.to(dtype)}
        inputs["added_cond_kwargs"] = added
    return inputs


def added_conditions(config: UNetConfig, batch: int, size: int, device: torch.device | str) -> tuple[int, Tensor]:
    """Width of the pooled text, and sizes [B, 6] float32: original size, upper left corner and target size in pixels.

    For models that take them. An image has eight times as many pixels per side as its latents.
    """
    assert config.addition_time_embed_dim is not None and config.projection_class_embeddings_input_dim is not None
    pixels = torch.tensor([8.0 * size, 8.0 * size, 0.0, 0.0, 8.0 * size, 8.0 * size])
    pooled = config.projection_class_embeddings_input_dim - 6 * config.addition_time_embed_dim
    return pooled, pixels.repeat(batch, 1).to(device)


# --- what a UNet must move and hold ---


parameters = functools.partial(parameters_of, UNet)


def model_sizes(config: UNetConfig) -> dict[str, int]:
    return {"tokens": TOKENS, "parameters": parameters(config)}


def reference_dtype(config: UNetConfig, copies: int = 1) -> torch.dtype:
    """Precision of a reference with ``copies`` values per weight."""
    return torch.float64 if copies * parameters(config) <= FLOAT64_VALUES else torch.float32


def flops(config: UNetConfig, batch: int, size: int, *, training: bool = False) -> int:
    """Counted on diffusers' model; element-wise work is left out."""
    inputs = draw_inputs(config, batch, size, seed=0, dtype=torch.float32, device=torch.device("meta"))
    return count_flops(skeleton(config), backward=training, **inputs)


def bytes_moved(config: UNetConfig, batch: int, size: int, itemsize: int) -> int:
    return (batch * sum(calls(config, size)) + parameters(config)) * itemsize


def calls(config: UNetConfig, size: int) -> Iterator[int]:
    """Values that each convolution, product and attention reads and writes, for samples of ``size`` pixels per side."""
    first, pixels = config.block_out_channels[0], size**2
    yield TOKENS * config.cross_attention_dim
    yield (config.in_channels + first) * pixels
    for level, pixels, after in _levels(config, size):
        for block in level.blocks:
            inputs, image = (block.inputs + block.skip) * pixels, block.outputs * pixels
            yield inputs + image
            yield 3 * image  # with the residual
            if inputs != image:
                yield inputs + image
            if block.depth is not None:
                keys = 2 * block.outputs * TOKENS  # keys and values; the text is read once for all blocks
                # Queries, keys and values, attention, output; query, keys, attention, output; both sides of the gate,
                # of whose eight widths half are written.
                yield from (2 * image, *(4 * image, 4 * image, 3 * image) * block.depth)
                yield from (2 * image, keys, 2 * image + keys, 3 * image, 5 * image, 6 * image) * block.depth
                yield 3 * image
        if after != pixels:
            # A convolution that doubles the size reads the small image: upsampling happens inside.
            yield level.blocks[-1].outputs * (pixels + after)
    yield (first + config.out_channels) * size**2


def _levels(config: UNetConfig, size: int) -> Iterator[tuple[Any, int, int]]:
    """Levels on the way down, in the middle and up, with the pixels of their blocks and of their outputs."""
    pixels = size**2
    for level in config.down():
        after = pixels // 4 if level.resample else pixels
        yield level, pixels, after
        pixels = after
    yield config.middle(), pixels, pixels
    for level in config.up():
        after = 4 * pixels if level.resample else pixels
        yield level, pixels, after
        pixels = after


def skips(config: UNetConfig, size: int) -> int:
    """Values of the skip connections."""
    return sum(channels * (size // reduction) ** 2 for channels, reduction in config.skips())


def alive(config: UNetConfig, size: int) -> int:
    """Live values around the largest call: four times the values that it reads and writes, with its neighbours'."""
    return 4 * max(calls(config, size))


def scores(config: UNetConfig, size: int) -> int:
    """Values of the largest attention's scores: in float64 a GPU can only materialise them."""
    levels = _levels(config, size)
    return max(block.heads * pixels**2 for level, pixels, _ in levels for block in level.blocks if block.depth)


def fused_weights(config: UNetConfig) -> int:
    """Weights of diffusers' fused projections, which it keeps in addition to the original ones."""
    return sum(
        (block.depth or 0) * block.outputs * (3 * block.outputs + 2 * config.cross_attention_dim)
        for block in config.blocks()
    )


def text_projections(config: UNetConfig) -> tuple[int, int]:
    """Weights of the text's key and value projections, and values per row that these read and write."""
    width = config.cross_attention_dim
    channels = sum(2 * (block.depth or 0) * block.outputs for block in config.blocks())
    return channels * width, TOKENS * (width + channels)
