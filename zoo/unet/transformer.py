"""The transformer behind a resnet block: self-attention, attention to the text, and an MLP.

    x ─ group norm ─ product ─ block ─ block ─ ... ─ product ─ add ─▶
    └─────────────────────────────────────────────────────────┘

    block    h ─ norm ─ self-attention ─ add, norm ─ attention to text ─ add, norm ─ MLP, add ─▶

A pixel is a token, so that in channels_last an image is its tokens. A residual add is one pass with the norm that
follows it, or part of a product. The bias of such a product is added where what it is added to is written, a norm
before: the library has products that add a bias and products that add a matrix, none that adds both.

Shape legend: B images, C channels, H height, W width, T = H W tokens, R = B T rows, L tokens of the text, N heads.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.modules import plain, to_images, to_rows
from zoo.ops.attention import short_attention
from zoo.ops.common import differentiated
from zoo.ops.glu import gated_gelu, gated_gelu_product
from zoo.ops.group_norm import group_norm
from zoo.ops.norms import add_norm, layer_norm
from zoo.unet.config import BlockShape, UNetConfig
from zoo.unet.products import add_linear, linear, product

# Diffusers fixes that of the norm before a transformer, and torch's default is that of the norms inside.
ENTRY_EPS, EPS = 1e-6, 1e-5


class TransformerBlock(nn.Module):
    """Self-attention, attention to the text and an MLP.

    Args:
        width: C.
        heads: N.
        groups: Of the norm before it, where ``forward`` is given the ends of a transformer.
    """

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
        self,
        x: Tensor,
        text: Tensor,
        self_bias: Tensor | None,
        text_bias: Tensor | None,
        ends: Sequence[Tensor | None] | None = None,
    ) -> Tensor:
        """Run the block.

        Args:
            x: [R, C]; with ``ends`` an image [B, C, H, W].
            text: [B, L, 2 C], keys and values of the text side by side.
            self_bias: [B, 1, 1, T], added to the scores of self-attention, or None.
            text_bias: [B, 1, 1, L], of attention to the text, or None.
            ends: Of a transformer of this block alone: weight and bias of its norm, and of both products around it.

        Returns:
            Like ``x``.
        """
        if ends is not None:
            image, x = x, enter(x, ends, self.groups)
        batch, heads = text.shape[0], (self.heads, x.shape[1] // self.heads)
        text_out, mlp_out = self.text_out, self.mlp_out
        text_bias_ahead, mlp_bias_ahead = plain(text_out), plain(mlp_out)
        normed = layer_norm(x, self.norm1.weight, self.norm1.bias, EPS)
        # Taken apart at once, so that their gradients are put side by side at once.
        own_query, own_key, own_value = product(normed, self.qkv).view(batch, -1, 3, *heads).unbind(2)
        mixed = product(short_attention(own_query, own_key, own_value, self_bias), self.self_out)
        ahead = text_out.bias if text_bias_ahead else None
        x, normed = add_norm(mixed, x, self.norm2.weight, self.norm2.bias, ahead, EPS)
        query = product(normed, self.query).view(batch, -1, *heads)
        key, value = text.unflatten(2, (2, *heads)).unbind(2)
        mixed = short_attention(query, key, value, text_bias)
        mixed = linear(mixed, text_out.weight) if text_bias_ahead else text_out(mixed)
        ahead = mlp_out.bias if mlp_bias_ahead else None
        x, normed = add_norm(mixed, x, self.norm3.weight, self.norm3.bias, ahead, EPS)
        hidden = self._hidden(normed)
        x = add_linear(x, hidden, mlp_out.weight) if mlp_bias_ahead else x + mlp_out(hidden)
        return x if ends is None else leave(x, image, ends)

    def _hidden(self, normed: Tensor) -> Tensor:
        """[R, C] -> [R, 4 C], inside the MLP."""
        layer = self.mlp_in
        if not plain(layer):
            value, gate = layer(normed).chunk(2, dim=-1)
            return value * F.gelu(gate)
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
        self.proj_in = _product(config, width)
        self.blocks = nn.ModuleList(TransformerBlock(width, shape.heads, self.groups) for _ in range(shape.depth))
        self.proj_out = _product(config, width)

    def forward(
        self,
        x: Tensor,
        texts: Sequence[Tensor],
        self_bias: Tensor | None,
        text_bias: Tensor | None,
    ) -> Tensor:
        """[B, C, H, W], and keys and values [B, L, 2 C] of each block -> [B, C, H, W]."""
        norm, first, last = self.norm, self.proj_in, self.proj_out
        ends = norm.weight, norm.bias, first.weight, first.bias, last.weight, last.bias
        if len(self.blocks) == 1:  # both ends are part of its region
            out: Tensor = self.blocks[0](x, texts[0], self_bias, text_bias, ends)
            return out
        rows = enter(x, ends, self.groups)
        for block, text in zip(self.blocks, texts, strict=True):
            rows = block(rows, text, self_bias, text_bias)
        return leave(rows, x, ends)


def _product(config: UNetConfig, width: int) -> nn.Linear | nn.Conv2d:
    return nn.Linear(width, width) if config.use_linear_projection else nn.Conv2d(width, width, 1)
