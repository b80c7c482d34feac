"""The blocks of a UNet: resnet blocks, transformers, the levels that they form, and embeddings of the conditions.

    resnet block       x ─ group norm, SiLU ─ 3 × 3 ─ shift, group norm, SiLU ─ 3 × 3 ─ bias, add ─▶
                       └─────────────────────────── (1 × 1) ───────────────────────────────┘
    transformer        x ─ group norm ─ product ─ block ─ block ─ ... ─ product ─ add ─▶
                       └─────────────────────────────────────────────────────────┘
    transformer block  h ─ norm ─ self-attention ─ add, norm ─ attention to text ─ add, norm ─ MLP, add ─▶

A pixel is a token: in channels_last an image and its tokens are the same memory. Convolutions run without bias, which
cuDNN would add in a pass of its own: the first one's is part of the timestep's shift, the second one's of the residual
add. Where a product adds the residual, the norm before it adds its bias.

Shape legend: B images, C channels, H height, W width, T = H W tokens, R = B T rows, N heads, L tokens of the text and D
its width, K channels of all its keys and values, E width of the embedded timestep, S channels of all shifts.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.ops.attention import short_attention
from zoo.ops.common import compute_dtype, differentiated, is_unmodified, kernels_run, to_images, to_rows
from zoo.ops.conv import conv, conv3, conv_add, upsample
from zoo.ops.norms import add_norm, cat_group_norm, group_norm, layer_norm
from zoo.ops.products import gated_gelu, gated_gelu_product, low_add_linear, low_linear, takes_low
from zoo.unet.config import BlockShape, LevelShape, UNetConfig

# Diffusers' for the norm before a transformer, and torch's default for the norms inside.
ENTRY_EPS, EPS = 1e-6, 1e-5


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``F.linear``, whose gradients under autocast are summed in float32 by ``zoo.ops.products``."""
    if differentiated(x, weight, bias) and kernels_run(x, weight, bias):
        low = x.to(compute_dtype(x))  # as autocast would
        if takes_low(low, weight, bias):
            return low_linear(low, weight, bias)
    return F.linear(x, weight, bias)


def add_linear(added: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """Added [R, N] plus x [R, C] by weight [N, C], in one product; ``added`` may be overwritten."""
    learns = differentiated(added, x, weight) and kernels_run(added, x, weight)
    if learns and added.dtype == x.dtype and takes_low(x, weight, None):
        return low_add_linear(added, x, weight)
    if torch.is_grad_enabled() or not added.dtype == x.dtype == weight.dtype:
        return torch.addmm(added, x, weight.t())
    # Out of place torch 2.11 would copy `added` first.
    return added.addmm_(x, weight.t())


def product(x: Tensor, layer: nn.Linear) -> Tensor:
    """``linear`` with a layer's tensors; a layer that was replaced or has a hook is called."""
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

        A skip [B, C_skip, H, W], or None, comes from the way down; the shift [B, C_out] is the timestep's.
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
        assert self.conv2.bias is not None
        return to_images(conv_add(to_rows(hidden), self.conv2.bias, residual), hidden)


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
        self, x: Tensor, text: Tensor, self_bias: Tensor | None, text_bias: Tensor | None,
        ends: Sequence[Tensor | None] | None = None,
    ) -> Tensor:  # fmt: skip
        """X [R, C] -> [R, C]; with ``ends`` an image [B, C, H, W] -> the same.

        Text [B, L, 2 C] holds keys and values side by side. The biases [B, 1, 1, T] and [B, 1, 1, L], or None, are
        added to the scores of self-attention and of attention to the text. ``ends`` are given to the only block of a
        transformer: weight and bias of its norm, of the product before the block and of the one after it.
        """
        if ends is not None:
            image, x = x, enter(x, ends, self.groups)
        batch, heads = text.shape[0], (self.heads, x.shape[1] // self.heads)
        text_out, mlp_out = self.text_out, self.mlp_out
        # The bias of a product is added with the norm before it, unless the layer has to be called.
        text_bias_ahead, mlp_bias_ahead = is_unmodified(text_out), is_unmodified(mlp_out)
        normed = layer_norm(x, self.norm1.weight, self.norm1.bias, EPS)
        # One unbind, whose backward is one stack of the three gradients.
        q, k, v = product(normed, self.qkv).view(batch, -1, 3, *heads).unbind(2)
        attended = product(short_attention(q, k, v, self_bias), self.self_out)
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
        """The MLP's first product and its gate: [R, C] -> [R, 4 C]."""
        layer = self.mlp_in
        if not is_unmodified(layer):
            up, gate = layer(normed).chunk(2, dim=-1)
            return up * F.gelu(gate)
        if differentiated(normed, layer.weight, layer.bias):
            return gated_gelu(linear(normed, layer.weight), layer.bias)
        return gated_gelu_product(normed, layer.weight, layer.bias)


def enter(image: Tensor, ends: Sequence[Tensor | None], groups: int) -> Tensor:
    """Image [B, C, H, W] -> its normed rows after a product [R, C]."""
    norm_weight, norm_bias, weight, bias, *_ = ends
    assert norm_weight is not None and norm_bias is not None and weight is not None
    rows = to_rows(group_norm(image, None, norm_weight, norm_bias, groups, ENTRY_EPS, False))
    return linear(rows, weight.flatten(1), bias)


def leave(rows: Tensor, image: Tensor, ends: Sequence[Tensor | None]) -> Tensor:
    """Rows [R, C] and the image before [B, C, H, W] -> the image plus a product of the rows."""
    *_, weight, bias = ends
    assert weight is not None
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
        # Products over pixels either way; the checkpoint decides how many dimensions the weight has.
        self.proj_in = nn.Linear(width, width) if config.use_linear_projection else nn.Conv2d(width, width, 1)
        self.blocks = nn.ModuleList(TransformerBlock(width, shape.heads, self.groups) for _ in range(shape.depth))
        self.proj_out = nn.Linear(width, width) if config.use_linear_projection else nn.Conv2d(width, width, 1)

    def forward(self, x: Tensor, texts: Sequence[Tensor], self_bias: Tensor | None, text_bias: Tensor | None) -> Tensor:
        """[B, C, H, W], and keys and values [B, L, 2 C] for each block -> [B, C, H, W]."""
        norm, first, last = self.norm, self.proj_in, self.proj_out
        ends = norm.weight, norm.bias, first.weight, first.bias, last.weight, last.bias
        if len(self.blocks) == 1:  # both ends are part of its region
            return self.blocks[0](x, texts[0], self_bias, text_bias, ends)
        rows = enter(x, ends, self.groups)
        for block, text in zip(self.blocks, texts, strict=True):
            rows = block(rows, text, self_bias, text_bias)
        return leave(rows, x, ends)


@dataclass(frozen=True)
class Conditioning:
    """Inputs of a level's blocks, without the image."""

    shifts: Sequence[Tensor]  # [B, C] for each resnet block
    texts: Sequence[Sequence[Tensor]]  # for each, keys and values [B, L, 2 C] for all transformer blocks after it
    self_bias: Tensor | None  # [B, 1, 1, T], added to scores of self-attention
    text_bias: Tensor | None  # [B, 1, 1, L], added to scores of attention to the text


class Level(nn.Module):
    """Resnet blocks of one size, some followed by a transformer."""

    def __init__(self, config: UNetConfig, shape: LevelShape) -> None:
        super().__init__()
        self.resnets = nn.ModuleList(ResnetBlock(config, block) for block in shape.blocks)
        self.transformers = nn.ModuleList(
            nn.Identity() if block.depth is None else Transformer(config, block) for block in shape.blocks
        )

    def run(self, index: int, x: Tensor, skip: Tensor | None, conditioning: Conditioning) -> Tensor:
        """A resnet block and its transformer: [B, C_in, H, W] -> [B, C_out, H, W]."""
        x = self.resnets[index](x, skip, conditioning.shifts[index])
        transformer = self.transformers[index]
        if isinstance(transformer, Transformer):
            x = transformer(x, conditioning.texts[index], conditioning.self_bias, conditioning.text_bias)
        return x


class DownLevel(Level):
    """A level on the way down; a last convolution halves the size."""

    def __init__(self, config: UNetConfig, shape: LevelShape) -> None:
        super().__init__(config, shape)
        width, self.padding = shape.blocks[-1].outputs, config.downsample_padding
        self.downsample = nn.Conv2d(width, width, 3, stride=2, padding=self.padding) if shape.resample else None

    def forward(self, x: Tensor, conditioning: Conditioning) -> list[Tensor]:
        """[B, C_in, H, W] -> the outputs of all blocks [B, C_out, H, W], and the smaller one [B, C_out, H/2, W/2]."""
        outputs = []
        for index in range(len(self.resnets)):
            x = self.run(index, x, None, conditioning)
            outputs.append(x)
        if self.downsample is not None:
            outputs.append(conv(F.pad(x, (0, 1, 0, 1)) if self.padding == 0 else x, self.downsample))
        return outputs


class MiddleLevel(Level):
    """The blocks of the smallest size."""

    def forward(self, x: Tensor, conditioning: Conditioning) -> Tensor:
        """[B, C, H, W] -> [B, C, H, W]."""
        for index in range(len(self.resnets)):
            x = self.run(index, x, None, conditioning)
        return x


class UpLevel(Level):
    """A level on the way up; the size is doubled and convolved at the end."""

    def __init__(self, config: UNetConfig, shape: LevelShape) -> None:
        super().__init__(config, shape)
        width = shape.blocks[-1].outputs
        self.upsample = nn.Conv2d(width, width, 3, padding=1) if shape.resample else None

    def forward(self, x: Tensor, skips: Sequence[Tensor], conditioning: Conditioning) -> Tensor:
        """[B, C_in, H, W], and a [B, C_skip, H, W] for each block -> [B, C_out, 2 H, 2 W], or of the same size."""
        for index, skip in enumerate(skips):
            x = self.run(index, x, skip, conditioning)
        return x if self.upsample is None else conv(upsample(x), self.upsample)


class Embedding(nn.Module):
    """Two products with SiLU between them; diffusers' ``TimestepEmbedding``."""

    def __init__(self, inputs: int, width: int, cond: int | None = None) -> None:
        super().__init__()
        self.linear_1 = nn.Linear(inputs, width)
        self.cond_proj = None if cond is None else nn.Linear(cond, inputs, bias=False)
        self.linear_2 = nn.Linear(width, width)

    def forward(self, x: Tensor, cond: Tensor | None = None) -> Tensor:
        """[..., I], and a condition [..., F] of models that take one -> [..., E]."""
        if cond is not None:
            assert self.cond_proj is not None
            x = x + self.cond_proj(cond)
        return self.linear_2(F.silu(self.linear_1(x)))


class Conditions(nn.Module):
    """The embedded timestep, with the pooled text and image sizes of SDXL added."""

    def __init__(self, config: UNetConfig) -> None:
        super().__init__()
        self.config = config
        width = config.time_width
        self.time_embedding = Embedding(config.block_out_channels[0], width, config.time_cond_proj_dim)
        self.add_embedding = None
        if config.addition_embed_type == "text_time":
            assert config.projection_class_embeddings_input_dim is not None
            self.add_embedding = Embedding(config.projection_class_embeddings_input_dim, width)

    def forward(self, timesteps: Tensor, added: Mapping[str, Tensor] | None, cond: Tensor | None) -> Tensor:
        """Embed timesteps [B], [1] or, for a whole run, [steps, 1]: [B, E], [1, E] or [steps, B, E].

        ``added`` holds ``text_embeds`` [B, X] and ``time_ids`` [B, Y], and ``cond`` is [B, F], for models that take
        them.
        """
        config = self.config
        dtype = self.time_embedding.linear_1.weight.dtype
        options = config.flip_sin_to_cos, config.freq_shift
        embedded = sinusoids(timesteps, config.block_out_channels[0], *options)
        embedded = self.time_embedding(embedded.to(dtype), cond)
        if self.add_embedding is None:
            return embedded
        assert added is not None and config.addition_time_embed_dim is not None
        sizes = sinusoids(added["time_ids"], config.addition_time_embed_dim, *options).flatten(1)
        pooled = torch.cat([added["text_embeds"], sizes], dim=-1)
        return embedded + self.add_embedding(pooled.to(dtype))


class TimeProjections(nn.Module):
    """The products of all resnet blocks with the embedded timestep, in the order of the blocks, as one.

    The bias of each block's first convolution is part of its shift.
    """

    def __init__(self, width: int, channels: Sequence[int]) -> None:
        super().__init__()
        self.channels = tuple(channels)
        total = sum(channels)
        self.weight = nn.Parameter(torch.empty(total, width))
        self.bias = nn.Parameter(torch.empty(total))
        self.conv_bias = nn.Parameter(torch.empty(total))
        bound = width**-0.5
        for parameter in (self.weight, self.bias, self.conv_bias):
            nn.init.uniform_(parameter, -bound, bound)

    def forward(self, embedded: Tensor) -> Tensor:
        """[..., E] -> [..., S]."""
        return linear(F.silu(embedded), self.weight, self.bias + self.conv_bias)


class TextProjections(nn.Module):
    """Keys and values of all cross-attentions, in the order of their blocks, as one product."""

    def __init__(self, width: int, channels: Sequence[int]) -> None:
        super().__init__()
        self.channels = tuple(channels)
        self.weight = nn.Parameter(torch.empty(2 * sum(channels), width))
        nn.init.uniform_(self.weight, -(width**-0.5), width**-0.5)

    def forward(self, text: Tensor) -> Tensor:
        """[B, L, D] -> [B, L, K]: keys, then values, of one block after the other."""
        return linear(text, self.weight)


def sinusoids(values: Tensor, width: int, cosines_first: bool, freq_shift: float) -> Tensor:
    """[...] -> [..., width] in float32: sines and cosines of falling frequencies."""
    half = width // 2
    # In the order in which diffusers rounds: half an ulp of a frequency is many of the angle of a late timestep.
    exponents = -math.log(10000) * torch.arange(half, dtype=torch.float32, device=values.device)
    frequencies = torch.exp(exponents / (half - freq_shift))
    angles = values.float()[..., None] * frequencies
    pair = (angles.cos(), angles.sin()) if cosines_first else (angles.sin(), angles.cos())
    joined = torch.cat(pair, dim=-1)
    return F.pad(joined, (0, 1)) if width % 2 else joined


def hiding_bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask [B, T], 1 where a token is seen -> the bias of scores [B, 1, 1, T]: 0, or -10000 as in diffusers."""
    return ((1 - mask.to(dtype)) * -10000.0)[:, None, None, :]
