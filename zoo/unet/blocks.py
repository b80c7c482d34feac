"""A UNet's configuration, presets and blocks: resnet blocks, transformers, and levels built from both.

    resnet block       x ─ group norm, SiLU ─ 3 × 3 ─ shift, group norm, SiLU ─ 3 × 3 ─ bias, add ─▶
                       └─────────────────────────── (1 × 1) ───────────────────────────────┘
    transformer        x ─ group norm ─ product ─ block ─ block ─ ... ─ product ─ add ─▶
                       └─────────────────────────────────────────────────────────┘
    transformer block  h ─ norm ─ self-attention ─ add, norm ─ attention to text ─ add, norm ─ MLP, add ─▶

A pixel is a token: in channels_last an image and its tokens are the same memory. Convolutions run without bias, since
cuDNN would add the bias in a separate pass. The first convolution's bias is part of the timestep's shift, the second
one's is added with the residual. If a product adds the residual, the norm before the product adds its bias.

Shape legend: B images, C channels, H height, W width, T = H W tokens, R = B T rows, N heads, L tokens of the text.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo import validate
from zoo.ops.common import compute_dtype, differentiated, is_unmodified, kernels_run, to_images, to_rows
from zoo.ops.images import cat_group_norm, conv, conv3, conv_add, group_norm
from zoo.ops.transformer import (
    add_norm,
    gated_gelu,
    gated_gelu_product,
    layer_norm,
    low_linear,
    short_attention,
    takes_low,
)

# Eps of the norm before a transformer (as in diffusers) and of the norms inside (torch's default).
ENTRY_EPS, EPS = 1e-6, 1e-5
_TYPES = {
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"), "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
}  # fmt: skip
_PER_LEVEL = ("layers_per_block", "transformer_layers_per_block", "num_attention_heads")


@dataclass(frozen=True, kw_only=True)
class BlockShape:
    """A resnet block and the transformer after it, if any."""

    inputs: int  # channels of the previous block's output
    skip: int  # channels of the skip connection; 0 on the way down and in the middle
    outputs: int  # output channels
    depth: int | None  # blocks of the transformer; None without a transformer
    heads: int  # heads of the transformer


@dataclass(frozen=True, kw_only=True)
class LevelShape:
    """Blocks of one size, and whether the size changes after them."""

    blocks: tuple[BlockShape, ...]
    resample: bool


@dataclass(frozen=True, kw_only=True)
class UNetConfig:
    """A conditional UNet like Stable Diffusion's.

    Fields are diffusers', except ``num_attention_heads``, which diffusers calls ``attention_head_dim``. Fields per
    level start at the largest size, and may be one value for all levels. ``up_block_types`` starts at the smallest
    size.

    Args:
        down_block_types: ``"DownBlock2D"`` or ``"CrossAttnDownBlock2D"`` for each level.
        up_block_types: ``"UpBlock2D"`` or ``"CrossAttnUpBlock2D"`` for each level.
        layers_per_block: Resnet blocks of each level on the way down; one more on the way up.
        transformer_layers_per_block: Blocks of each transformer of a level.
        addition_embed_type: ``"text_time"`` for a pooled condition and sizes in addition to the timestep, as in SDXL.
        projection_class_embeddings_input_dim: Width of the pooled condition and all embedded sizes together.
        time_cond_proj_dim: Width of an additional condition (guidance scale), or None.
        upcast_attention: Kept for the checkpoint only; attention always accumulates in float32.
        sample_size: Height and width of the training samples; for pipelines.
    """

    in_channels: int
    out_channels: int
    block_out_channels: tuple[int, ...]
    down_block_types: tuple[str, ...]
    up_block_types: tuple[str, ...]
    layers_per_block: int | tuple[int, ...]
    transformer_layers_per_block: int | tuple[int, ...]
    num_attention_heads: int | tuple[int, ...]
    cross_attention_dim: int
    use_linear_projection: bool = False
    addition_embed_type: str | None = None
    addition_time_embed_dim: int | None = None
    projection_class_embeddings_input_dim: int | None = None
    time_cond_proj_dim: int | None = None
    norm_num_groups: int = 32
    norm_eps: float = 1e-5
    dropout: float = 0.0
    upcast_attention: bool = False
    sample_size: int | tuple[int, int] | None = None

    def __post_init__(self) -> None:
        levels = len(self.block_out_channels)
        for name in ("block_out_channels", "down_block_types", "up_block_types", "sample_size", *_PER_LEVEL):
            value = getattr(self, name)
            if name in _PER_LEVEL and isinstance(value, int):
                value = (value,) * levels
            # Configurations from files have lists, which never equal tuples.
            object.__setattr__(self, name, tuple(value) if isinstance(value, list) else value)
        validate.positive(self, "in_channels", "out_channels", "cross_attention_dim", "norm_num_groups")
        validate.one_of(self, "addition_embed_type", (None, "text_time"))
        if self.addition_embed_type == "text_time":
            validate.positive(self, "addition_time_embed_dim", "projection_class_embeddings_input_dim")
        for name in ("block_out_channels", *_PER_LEVEL):
            values = getattr(self, name)
            if not levels or len(values) != levels or not all(map(validate.is_count, values)):
                raise ValueError(f"{name} is {values!r}, expected a positive integer for each of {levels} levels")
        for name, known in _TYPES.items():
            values = getattr(self, name)
            if len(values) != levels or not set(values) <= set(known):
                raise ValueError(f"{name} is {values!r}, expected {' or '.join(known)} for each of {levels} levels")
        for block in self.blocks():
            for channels in (block.inputs + block.skip, block.outputs):
                if channels % self.norm_num_groups:
                    raise ValueError(f"norm_num_groups is {self.norm_num_groups}, which does not divide {channels}")
            if block.depth is not None and block.outputs % block.heads:
                raise ValueError(f"num_attention_heads has {block.heads}, which does not divide {block.outputs}")

    @property
    def time_width(self) -> int:
        """Width of the embedded timestep."""
        return 4 * self.block_out_channels[0]

    @property
    def reduction(self) -> int:
        """Ratio of the sample's side to the smallest level's side."""
        return int(2 ** (len(self.block_out_channels) - 1))

    def down(self) -> tuple[LevelShape, ...]:
        """The levels on the way down, the largest size first."""
        return tuple(self._level(level, kind, up=False) for level, kind in enumerate(self.down_block_types))

    def middle(self) -> LevelShape:
        """The blocks in the middle: the first has a transformer, the second does not."""
        width, heads, depths = self.block_out_channels[-1], self.num_attention_heads, self.transformer_layers_per_block
        common: dict[str, Any] = {"inputs": width, "skip": 0, "outputs": width, "heads": heads[-1]}  # type: ignore[index]
        blocks = BlockShape(depth=depths[-1], **common), BlockShape(depth=None, **common)  # type: ignore[index]
        return LevelShape(blocks=blocks, resample=False)

    def up(self) -> tuple[LevelShape, ...]:
        """The levels on the way up, the smallest size first."""
        levels = reversed(range(len(self.up_block_types)))
        return tuple(self._level(level, kind, up=True) for level, kind in zip(levels, self.up_block_types, strict=True))

    def _level(self, level: int, kind: str, *, up: bool) -> LevelShape:
        """The blocks of a level (the largest is 0). Its last skip on the way up is its input on the way down."""
        widths, last = self.block_out_channels, len(self.block_out_channels) - 1
        layers: Any = self.layers_per_block
        heads: Any = self.num_attention_heads
        depths: Any = self.transformer_layers_per_block
        own, larger = [widths[level]] * layers[level], widths[max(level - 1, 0)]
        if up:
            inputs, skips = [widths[min(level + 1, last)], *own], [*own, larger]
        else:
            inputs, skips = [larger, *own[1:]], [0] * len(own)
        depth = depths[level] if kind.startswith("CrossAttn") else None
        blocks = tuple(
            BlockShape(inputs=each, skip=skip, outputs=widths[level], depth=depth, heads=heads[level])
            for each, skip in zip(inputs, skips, strict=True)
        )
        return LevelShape(blocks=blocks, resample=level > 0 if up else level < last)

    def levels(self) -> tuple[LevelShape, ...]:
        """All levels in the order in which they run."""
        return (*self.down(), self.middle(), *self.up())

    def blocks(self) -> tuple[BlockShape, ...]:
        """All blocks in the order in which they run."""
        return tuple(block for level in self.levels() for block in level.blocks)

    def skips(self) -> tuple[tuple[int, int], ...]:
        """(channels, reduction) of all skip connections, in the order of the way down."""
        found, reduction = [(self.block_out_channels[0], 1)], 1
        for level in self.down():
            found += [(block.outputs, reduction) for block in level.blocks]
            if level.resample:
                reduction *= 2
                found.append((level.blocks[-1].outputs, reduction))
        return tuple(found)


# Options of Stable Diffusion 1 and 2, and diffusers' defaults.
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
    # Like SD 1.5: projections by convolution, transformers on the larger sizes.
    "unet-debug": UNetConfig(
        in_channels=4, out_channels=4, block_out_channels=(16, 32, 32),
        down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
        layers_per_block=1, transformer_layers_per_block=1, num_attention_heads=2, cross_attention_dim=24,
        norm_num_groups=8, sample_size=16,
    ),
    # Like SDXL: deep transformers on the smaller sizes, a pooled condition and sizes.
    "unet-xl-debug": UNetConfig(
        block_out_channels=(16, 32),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        layers_per_block=1, transformer_layers_per_block=(1, 2), num_attention_heads=(2, 4), cross_attention_dim=24,
        addition_time_embed_dim=8, projection_class_embeddings_input_dim=12 + 6 * 8, norm_num_groups=8, sample_size=16,
        **_XL,
    ),
}  # fmt: skip


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``F.linear``; under autocast ``zoo.ops.transformer`` sums its gradients in float32."""
    if differentiated(x, weight, bias) and kernels_run(x, weight, bias):
        low = x.to(compute_dtype(x))  # as autocast would
        if takes_low(low, weight, bias):
            return low_linear(low, weight, bias)
    return F.linear(x, weight, bias)


def add_linear(added: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """Added [R, N] plus x [R, C] times weight [N, C], in one product. It may overwrite ``added``."""
    learns = differentiated(added, x, weight) and kernels_run(added, x, weight)
    if learns and added.dtype == x.dtype and takes_low(x, weight, None):
        return low_linear(x, weight, None, added)
    if torch.is_grad_enabled() or not added.dtype == x.dtype == weight.dtype:
        return torch.addmm(added, x, weight.t())
    # In place, since torch 2.11 would otherwise copy `added` first.
    return added.addmm_(x, weight.t())


def product(x: Tensor, layer: nn.Linear) -> Tensor:
    """``linear`` with a layer's tensors. A layer that was replaced or has a hook is called as a module."""
    return linear(x, layer.weight, layer.bias) if is_unmodified(layer) else layer(x)


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
        """[B, C_in, H, W] -> [B, C_out, H, W].

        The skip [B, C_skip, H, W] or None comes from the way down. The shift [B, C_out] comes from the timestep.
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
        return to_images(conv_add(to_rows(hidden), self.conv2.bias, residual), hidden)  # type: ignore[arg-type]


class TransformerBlock(nn.Module):
    """Self-attention, attention to the text and an MLP; diffusers' ``BasicTransformerBlock``."""

    def __init__(self, width: int, heads: int, groups: int = 32) -> None:
        super().__init__()
        self.heads, self.groups = heads, groups
        # The norms hold tensors and are never called.
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.self_out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.query = nn.Linear(width, width, bias=False)
        self.text_out = nn.Linear(width, width)
        self.norm3 = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 8 * width)
        self.mlp_out = nn.Linear(4 * width, width)

    def forward(
        self, x: Tensor, text: Tensor, ends: Sequence[Tensor | None] | None = None, text_bias: Tensor | None = None
    ) -> Tensor:
        """X [R, C] -> [R, C]; with ``ends`` an image [B, C, H, W] -> an image of the same shape.

        Text [B, L, 2 C] holds keys and values, concatenated. ``ends`` is for a transformer of one block: weight and
        bias of the transformer's norm, of its first product and of its last. ``text_bias`` [B, 1, 1, L] is added to the
        scores of attention to the text.
        """
        if ends is not None:
            image, x = x, enter(x, ends, self.groups)
        batch, heads = text.shape[0], (self.heads, x.shape[1] // self.heads)
        text_out, mlp_out = self.text_out, self.mlp_out
        # The norm before a product adds the product's bias, unless the layer must be called as a module.
        text_bias_ahead, mlp_bias_ahead = is_unmodified(text_out), is_unmodified(mlp_out)
        normed = layer_norm(x, self.norm1.weight, self.norm1.bias, EPS)
        # The backward of one unbind is one stack of the three gradients.
        q, k, v = product(normed, self.qkv).view(batch, -1, 3, *heads).unbind(2)
        attended = product(short_attention(q, k, v), self.self_out)
        ahead = text_out.bias if text_bias_ahead else None
        x, normed = add_norm(attended, x, self.norm2.weight, self.norm2.bias, ahead, EPS)
        q = product(normed, self.query).view(batch, -1, *heads)
        k, v = text.unflatten(2, (2, *heads)).unbind(2)
        attended = short_attention(q, k, v, text_bias)
        attended = linear(attended, text_out.weight) if text_bias_ahead else text_out(attended)
        ahead = mlp_out.bias if mlp_bias_ahead else None
        x, normed = add_norm(attended, x, self.norm3.weight, self.norm3.bias, ahead, EPS)
        gated = self._gated(normed)
        x = add_linear(x, gated, mlp_out.weight) if mlp_bias_ahead else x + mlp_out(gated)
        return x if ends is None else leave(x, image, ends)

    def _gated(self, normed: Tensor) -> Tensor:
        layer = self.mlp_in
        if not is_unmodified(layer):
            up, gate = layer(normed).chunk(2, dim=-1)
            return up * F.gelu(gate)
        if differentiated(normed, layer.weight, layer.bias):
            return gated_gelu(linear(normed, layer.weight), layer.bias)
        return gated_gelu_product(normed, layer.weight, layer.bias)


def enter(image: Tensor, ends: Sequence[Any], groups: int) -> Tensor:
    """Norm the image [B, C, H, W] and multiply its rows: [R, C]."""
    norm_weight, norm_bias, weight, bias, *_ = ends
    rows = to_rows(group_norm(image, None, norm_weight, norm_bias, groups, ENTRY_EPS, False))
    return linear(rows, weight.flatten(1), bias)


def leave(rows: Tensor, image: Tensor, ends: Sequence[Any]) -> Tensor:
    """Multiply rows [R, C] and add the transformer's input image [B, C, H, W]."""
    *_, weight, bias = ends
    rows = linear(rows, weight.flatten(1), bias)
    return to_images(torch.add(rows, to_rows(image)), image)


class Transformer(nn.Module):
    """Transformer blocks over the pixels of an image, and a residual around them; diffusers' ``Transformer2DModel``."""

    def __init__(self, config: UNetConfig, shape: BlockShape) -> None:
        super().__init__()
        width = shape.outputs
        assert shape.depth is not None
        self.groups = config.norm_num_groups
        self.norm = nn.GroupNorm(self.groups, width, eps=ENTRY_EPS)
        # Both are products over pixels. The checkpoint decides the weight's number of dimensions.
        self.proj_in = nn.Linear(width, width) if config.use_linear_projection else nn.Conv2d(width, width, 1)
        self.blocks = nn.ModuleList(TransformerBlock(width, shape.heads, self.groups) for _ in range(shape.depth))
        self.proj_out = nn.Linear(width, width) if config.use_linear_projection else nn.Conv2d(width, width, 1)

    def forward(self, x: Tensor, texts: Sequence[Tensor], text_bias: Tensor | None = None) -> Tensor:
        """X [B, C, H, W], keys and values [B, L, 2 C] per block, and a bias of scores [B, 1, 1, L] -> [B, C, H, W]."""
        norm, first, last = self.norm, self.proj_in, self.proj_out
        ends = norm.weight, norm.bias, first.weight, first.bias, last.weight, last.bias
        of_rows = first.weight.dim() == 2
        whole = all(is_unmodified(each, nn.Linear if of_rows else nn.Conv2d) for each in (first, last))
        if whole and len(self.blocks) == 1:  # both ends are part of its region
            return self.blocks[0](x, texts[0], ends, text_bias)
        if whole:
            rows = enter(x, ends, self.groups)
        else:  # a projection has an adapter or a hook
            normed = group_norm(x, None, norm.weight, norm.bias, self.groups, ENTRY_EPS, False)
            rows = first(to_rows(normed)) if of_rows else to_rows(first(normed))
        for block, text in zip(self.blocks, texts, strict=True):
            rows = block(rows, text, None, text_bias)
        if whole:
            return leave(rows, x, ends)
        return x + (to_images(last(rows), x) if of_rows else last(to_images(rows, x)))


@dataclass(frozen=True)
class Conditioning:
    """Inputs of a level's blocks, apart from the image."""

    shifts: Sequence[Tensor]  # [B, C] for each resnet block
    texts: Sequence[Sequence[Tensor]]  # per resnet block: keys and values [B, L, 2 C] of its transformer's blocks
    text_bias: Tensor | None  # [B, 1, 1, L], added to scores of attention to the text


class Level(nn.Module):
    """Resnet blocks of one size, some followed by a transformer, then a layer that halves or doubles the size."""

    def __init__(self, config: UNetConfig, shape: LevelShape) -> None:
        super().__init__()
        self.resnets = nn.ModuleList(ResnetBlock(config, block) for block in shape.blocks)
        self.transformers = nn.ModuleList(
            nn.Identity() if block.depth is None else Transformer(config, block) for block in shape.blocks
        )
        width, up = shape.blocks[-1].outputs, shape.blocks[0].skip > 0
        self.downsample = nn.Conv2d(width, width, 3, stride=2, padding=1) if shape.resample and not up else None
        self.upsample = nn.Conv2d(width, width, 3, padding=1) if shape.resample and up else None

    def forward(self, x: Tensor, conditioning: Conditioning, skips: Sequence[Tensor] | None = None) -> list[Tensor]:
        """X [B, C_in, H, W] -> outputs of all blocks [B, C_out, H, W], then the halved one [B, C_out, H/2, W/2].

        On the way up, with a skip [B, C_skip, H, W] per block: only the last output, doubled to [2 H, 2 W] pixels.
        """
        outputs = []
        for index, (resnet, transformer) in enumerate(zip(self.resnets, self.transformers, strict=True)):
            x = resnet(x, None if skips is None else skips[index], conditioning.shifts[index])
            if isinstance(transformer, Transformer):
                x = transformer(x, conditioning.texts[index], conditioning.text_bias)
            if skips is None:
                outputs.append(x)
        if self.downsample is not None:
            outputs.append(conv(x, self.downsample))
        if self.upsample is not None:
            x = conv(F.interpolate(x, scale_factor=2.0, mode="nearest"), self.upsample)
        return outputs or [x]
