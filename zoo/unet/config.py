"""Configuration of a conditional UNet, the shapes of blocks that follow from it, and presets by name."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from zoo import validate

# Whether a level of this type has transformers.
DOWN_TYPES = {"DownBlock2D": False, "CrossAttnDownBlock2D": True}
UP_TYPES = {"UpBlock2D": False, "CrossAttnUpBlock2D": True}

Depths: TypeAlias = tuple[int | tuple[int, ...], ...]


@dataclass(frozen=True, kw_only=True)
class BlockShape:
    """A resnet block and the transformer after it, if there is one."""

    inputs: int  # channels of the block before
    skip: int  # channels of the way down; 0 on the way down and in the middle
    outputs: int  # channels that it gives
    depth: int | None  # blocks of the transformer; None where there is none
    heads: int  # of the transformer


@dataclass(frozen=True, kw_only=True)
class LevelShape:
    """Blocks of one size, and whether the size changes after them."""

    blocks: tuple[BlockShape, ...]
    resample: bool


@dataclass(frozen=True, kw_only=True)
class UNetConfig:
    """A conditional UNet as of Stable Diffusion.

    Fields are diffusers', but for ``num_attention_heads``, which diffusers calls ``attention_head_dim``. Those that
    belong to levels, the largest size first, take one value for all of them; ``up_block_types`` starts at the smallest
    size.

    Args:
        down_block_types: ``"DownBlock2D"`` or ``"CrossAttnDownBlock2D"`` for each level.
        up_block_types: ``"UpBlock2D"`` or ``"CrossAttnUpBlock2D"`` for each level.
        layers_per_block: Resnet blocks of each level on the way down; one more on the way up.
        transformer_layers_per_block: Blocks of the transformers of each level, or of each transformer of it.
        reverse_transformer_layers_per_block: The same on the way up, where it is not the mirror image.
        addition_embed_type: ``"text_time"`` for a pooled condition and sizes besides the timestep, as SDXL has.
        projection_class_embeddings_input_dim: Width of the pooled condition and all embedded sizes together.
        time_cond_proj_dim: Width of a further condition (guidance scale), or None.
        upcast_attention: Kept for the checkpoint; attention accumulates in float32 in any case.
        sample_size: Height and width of the samples that it was trained on; for pipelines.
    """

    in_channels: int
    out_channels: int
    block_out_channels: tuple[int, ...]
    down_block_types: tuple[str, ...]
    up_block_types: tuple[str, ...]
    layers_per_block: int | tuple[int, ...]
    transformer_layers_per_block: int | Depths
    num_attention_heads: int | tuple[int, ...]
    cross_attention_dim: int
    reverse_transformer_layers_per_block: Depths | None = None
    use_linear_projection: bool = False
    addition_embed_type: str | None = None
    addition_time_embed_dim: int | None = None
    projection_class_embeddings_input_dim: int | None = None
    time_cond_proj_dim: int | None = None
    time_embedding_dim: int | None = None
    norm_num_groups: int = 32
    norm_eps: float = 1e-5
    dropout: float = 0.0
    flip_sin_to_cos: bool = True
    freq_shift: int = 0
    downsample_padding: int = 1
    center_input_sample: bool = False
    conv_in_kernel: int = 3
    conv_out_kernel: int = 3
    upcast_attention: bool = False
    sample_size: int | tuple[int, int] | None = None

    def __post_init__(self) -> None:
        levels: int = len(self.block_out_channels)
        per_level = ("layers_per_block", "transformer_layers_per_block", "num_attention_heads")
        others = ("block_out_channels", "down_block_types", "up_block_types", "sample_size")
        # Lists are common in configurations that come from files, and not equal to tuples.
        for name in (*others, *per_level, "reverse_transformer_layers_per_block"):
            value = _frozen(getattr(self, name))
            value = (value,) * levels if name in per_level and not isinstance(value, tuple) else value
            object.__setattr__(self, name, value)
        validate.positive(self, "in_channels", "out_channels", "cross_attention_dim", "norm_num_groups")
        for name in ("conv_in_kernel", "conv_out_kernel"):
            validate.positive(self, name)
            if getattr(self, name) % 2 == 0:
                raise ValueError(f"{name} is {getattr(self, name)!r}, expected an odd number: others change the size")
        validate.one_of(self, "downsample_padding", (0, 1))
        validate.one_of(self, "addition_embed_type", (None, "text_time"))
        if not levels:
            raise ValueError("block_out_channels is empty: there must be a level")
        for name in ("block_out_channels", "layers_per_block", "num_attention_heads"):
            values = getattr(self, name)
            if len(values) != levels or not all(map(validate.is_count, values)):
                raise ValueError(f"{name} is {values!r}, expected a positive integer for each of {levels} levels")
        for name, known in (("down_block_types", DOWN_TYPES), ("up_block_types", UP_TYPES)):
            values = getattr(self, name)
            for value in values:
                if value not in known:
                    raise ValueError(f"{name} has {value!r}; the zoo has {', '.join(known)}")
            if len(values) != levels:
                raise ValueError(f"{name} is {values!r}, expected a type for each of {levels} levels")
        for name in ("addition_time_embed_dim", "projection_class_embeddings_input_dim"):
            if self.addition_embed_type == "text_time" and not validate.is_count(getattr(self, name)):
                raise ValueError(f"{name} is {getattr(self, name)!r}, which addition_embed_type 'text_time' needs")
        depths: Any = self.transformer_layers_per_block
        for name in ("transformer_layers_per_block", "reverse_transformer_layers_per_block"):
            values = getattr(self, name)
            if values is not None and len(values) != levels:
                raise ValueError(f"{name} is {values!r}, expected a depth for each of {levels} levels")
        if self.reverse_transformer_layers_per_block is None and any(isinstance(depth, tuple) for depth in depths):
            raise ValueError(f"a depth per transformer in {depths!r}: these need reverse_transformer_layers_per_block")
        for block in self.blocks():
            for channels in (block.inputs + block.skip, block.outputs):
                if channels % self.norm_num_groups:
                    raise ValueError(f"norm_num_groups is {self.norm_num_groups}, which does not divide {channels}")
            if block.depth is not None and block.outputs % block.heads:
                raise ValueError(f"num_attention_heads has {block.heads}, which does not divide {block.outputs}")

    @property
    def time_width(self) -> int:
        """Width of the embedded timestep."""
        return self.time_embedding_dim or 4 * self.block_out_channels[0]

    @property
    def reduction(self) -> int:
        """Pixels of the sample's side for one of the smallest level's."""
        return int(2 ** (len(self.block_out_channels) - 1))

    def down(self) -> tuple[LevelShape, ...]:
        """The levels on the way down, the largest size first."""
        levels, inputs = [], self.block_out_channels[0]
        for index, (kind, outputs) in enumerate(zip(self.down_block_types, self.block_out_channels, strict=True)):
            blocks = []
            for depth in _depths(self.transformer_layers_per_block, index, self._layers(index), DOWN_TYPES[kind]):
                blocks.append(self._block(inputs, 0, outputs, depth, index))
                inputs = outputs
            levels.append(LevelShape(blocks=tuple(blocks), resample=index < len(self.block_out_channels) - 1))
        return tuple(levels)

    def middle(self) -> LevelShape:
        """The blocks in the middle: the first has a transformer, the second none."""
        width = self.block_out_channels[-1]
        (depth,) = _depths(self.transformer_layers_per_block, -1, 1, True)
        blocks = self._block(width, 0, width, depth, -1), self._block(width, 0, width, None, -1)
        return LevelShape(blocks=blocks, resample=False)

    def up(self) -> tuple[LevelShape, ...]:
        """The levels on the way up, the smallest size first; the last block of each takes the level's own input."""
        widths = self.block_out_channels[::-1]
        depths = self.reverse_transformer_layers_per_block or tuple(reversed(self.transformer_layers_per_block))  # type: ignore[arg-type]
        levels, inputs = [], widths[0]
        for index, (kind, outputs) in enumerate(zip(self.up_block_types, widths, strict=True)):
            count = self._layers(-1 - index) + 1
            below = widths[min(index + 1, len(widths) - 1)]
            blocks = []
            for position, depth in enumerate(_depths(depths, index, count, UP_TYPES[kind])):
                skip = below if position == count - 1 else outputs
                blocks.append(self._block(inputs, skip, outputs, depth, -1 - index))
                inputs = outputs
            levels.append(LevelShape(blocks=tuple(blocks), resample=index < len(widths) - 1))
        return tuple(levels)

    def _layers(self, level: int) -> int:
        layers: Any = self.layers_per_block
        return int(layers[level])

    def _block(self, inputs: int, skip: int, outputs: int, depth: int | None, level: int) -> BlockShape:
        heads: Any = self.num_attention_heads
        return BlockShape(inputs=inputs, skip=skip, outputs=outputs, depth=depth, heads=heads[level])

    def blocks(self) -> tuple[BlockShape, ...]:
        """All blocks in the order in which they run."""
        levels = (*self.down(), self.middle(), *self.up())
        return tuple(block for level in levels for block in level.blocks)

    def skips(self) -> tuple[tuple[int, int], ...]:
        """(channels, reduction) of all that the way down leaves for the way up, in order."""
        found, reduction = [(self.block_out_channels[0], 1)], 1
        for level in self.down():
            found += [(block.outputs, reduction) for block in level.blocks]
            if level.resample:
                reduction *= 2
                found.append((level.blocks[-1].outputs, reduction))
        return tuple(found)


def _depths(depths: Any, level: int, count: int, attends: bool) -> tuple[int | None, ...]:
    """Depth of each of a level's transformers; None for a block without one."""
    depth = depths[level] if attends else None
    if not isinstance(depth, tuple):
        return (depth,) * count
    if len(depth) < count:
        raise ValueError(f"transformer_layers_per_block has {depth!r} for a level of {count} transformers")
    return depth[:count]


def _frozen(value: Any) -> Any:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return tuple(_frozen(item) for item in value)
    return value


# Of Stable Diffusion 1 and 2, and diffusers' defaults.
SD: dict[str, Any] = {
    "in_channels": 4, "out_channels": 4, "block_out_channels": (320, 640, 1280, 1280),
    "down_block_types": ("CrossAttnDownBlock2D",) * 3 + ("DownBlock2D",),
    "up_block_types": ("UpBlock2D",) + ("CrossAttnUpBlock2D",) * 3, "layers_per_block": 2,
    "transformer_layers_per_block": 1,
}  # fmt: skip
_XL: dict[str, Any] = {
    "in_channels": 4, "out_channels": 4, "use_linear_projection": True, "addition_embed_type": "text_time",
}  # fmt: skip

PRESETS: dict[str, UNetConfig] = {
    "sd15": UNetConfig(num_attention_heads=8, cross_attention_dim=768, sample_size=64, **SD),
    "sd21": UNetConfig(
        num_attention_heads=(5, 10, 20, 20), cross_attention_dim=1024, use_linear_projection=True,
        upcast_attention=True, sample_size=96, **SD,
    ),
    "sdxl": UNetConfig(
        block_out_channels=(320, 640, 1280),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        layers_per_block=2, transformer_layers_per_block=(1, 2, 10), num_attention_heads=(5, 10, 20),
        cross_attention_dim=2048, addition_time_embed_dim=256, projection_class_embeddings_input_dim=2816,
        sample_size=128, **_XL,
    ),
    # As SD 1.5: projections by convolution, transformers on the larger sizes.
    "unet-debug": UNetConfig(
        in_channels=4, out_channels=4, block_out_channels=(16, 32, 32),
        down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
        layers_per_block=1, transformer_layers_per_block=1, num_attention_heads=2, cross_attention_dim=24,
        norm_num_groups=8, sample_size=16,
    ),
    # As SDXL: deep transformers on the smaller sizes, a pooled condition and sizes.
    "unet-xl-debug": UNetConfig(
        block_out_channels=(16, 32),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        layers_per_block=1, transformer_layers_per_block=(1, 2), num_attention_heads=(2, 4), cross_attention_dim=24,
        addition_time_embed_dim=8, projection_class_embeddings_input_dim=12 + 6 * 8, norm_num_groups=8, sample_size=16,
        **_XL,
    ),
}  # fmt: skip
