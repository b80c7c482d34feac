"""The transformer behind a resnet block: self-attention, attention to the text, and an MLP.

    x ─ group norm ─ product ─ block ─ block ─ ... ─ product ─ add ─▶
    └─────────────────────────────────────────────────────────┘

    block    h ─ norm ─ self-attention ─ add, norm ─ attention to text ─ add, norm ─ MLP ─▶ added before the next norm

A pixel is a token, so that in channels_last an image is its tokens. Each residual add is one pass with the norm that
follows it, also from block to block: a block returns its last summand apart.

Shape legend: B images, C channels, H height, W width, T = H W tokens, R = B T rows, L tokens of the text, N heads.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.layers import to_images, to_rows, untracked
from zoo.unet import fallback, operators
from zoo.unet.config import BlockShape, UNetConfig
from zoo.unet.glue import AddNorm, GatedGelu, RowNorm

# Diffusers fixes the one before a transformer.
ENTRY_EPS = 1e-6


def attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
    """Query [B, T, N, D], key and value [B, L, N, D], bias [B, 1, 1, L] or None -> rows [B T, N D]."""
    if bias is None and operators.short_attention_runs(query, key, value):
        rows: Tensor = operators.short_attention(query, key, value)
        return rows
    return fallback.attend(query, key, value, bias)


class TransformerBlock(nn.Module):
    """Self-attention, attention to the text and an MLP.

    Args:
        width: C.
        heads: N.
        first: Whether it is the first of its transformer: nothing is to be added before its first norm.
    """

    def __init__(self, width: int, heads: int, first: bool) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = RowNorm(width) if first else AddNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.self_out = nn.Linear(width, width)
        self.norm2 = AddNorm(width)
        self.query = nn.Linear(width, width, bias=False)
        self.text_out = nn.Linear(width, width)
        self.norm3 = AddNorm(width)
        self.mlp_in = nn.Linear(width, 8 * width)
        self.gate = GatedGelu()
        self.mlp_out = nn.Linear(4 * width, width)

    def forward(
        self,
        x: Tensor,
        left: Tensor | None,
        key: Tensor,
        value: Tensor,
        self_bias: Tensor | None,
        text_bias: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Run the block.

        Args:
            x: [R, C].
            left: [R, C], what the block before has left to be added to it; None for the first block.
            key: [B, L, C], of the text.
            value: The same.
            self_bias: [B, 1, 1, T], added to the scores of self-attention, or None.
            text_bias: [B, 1, 1, L], of attention to the text, or None.

        Returns:
            The same two: [R, C], and [R, C] that is left to be added to it.
        """
        batch, heads = key.shape[0], (self.heads, -1)
        if left is None:
            normed = self.norm1(x)
        else:
            x, normed = self.norm1(left, x)
        query, own_key, own_value = self.qkv(normed).view(batch, -1, 3, self.heads, x.shape[1] // self.heads).unbind(2)
        x, normed = self.norm2(self.self_out(attend(query, own_key, own_value, self_bias)), x)
        query = self.query(normed).view(batch, -1, self.heads, x.shape[1] // self.heads)
        mixed = attend(query, key.unflatten(2, heads), value.unflatten(2, heads), text_bias)
        x, normed = self.norm3(self.text_out(mixed), x)
        # The bias is the gate's: with it the library takes a kernel that clears a buffer first.
        wide = F.linear(normed, self.mlp_in.weight)
        assert self.mlp_in.bias is not None
        return x, self.mlp_out(self.gate(wide, untracked(self.mlp_in.bias)))


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
        self.blocks = nn.ModuleList(TransformerBlock(width, shape.heads, index == 0) for index in range(shape.depth))
        self.proj_out = _product(config, width)

    def forward(
        self, x: Tensor, keys_values: Iterator[Tensor], self_bias: Tensor | None, text_bias: Tensor | None
    ) -> Tensor:
        """[B, C, H, W], and of each block keys [B, L, C] and values [B, L, C] in turn -> [B, C, H, W]."""
        norm = self.norm
        rows = to_rows(operators.group_norm(x, None, norm.weight, norm.bias, self.groups, norm.eps, False))
        rows = F.linear(rows, self.proj_in.weight.flatten(1), self.proj_in.bias)
        left: Tensor | None = None
        for block in self.blocks:
            key, value = next(keys_values), next(keys_values)
            rows, left = block(rows, left, key, value, self_bias, text_bias)
        if left is not None:
            rows = rows + left
        rows = F.linear(rows, self.proj_out.weight.flatten(1), self.proj_out.bias)
        return to_images(torch.add(rows, to_rows(x)), x)


def _product(config: UNetConfig, width: int) -> nn.Linear | nn.Conv2d:
    return nn.Linear(width, width) if config.use_linear_projection else nn.Conv2d(width, width, 1)
