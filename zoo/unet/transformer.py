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

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.layers import plain, to_images, to_rows, untracked
from zoo.unet import operators
from zoo.unet.attention import attend
from zoo.unet.config import BlockShape, UNetConfig
from zoo.unet.glue import AddNorm, GatedGelu, RowNorm
from zoo.unet.learning import add_linear, linear, product

# Diffusers fixes the one before a transformer.
ENTRY_EPS = 1e-6


class TransformerBlock(nn.Module):
    """Self-attention, attention to the text and an MLP.

    Args:
        width: C.
        heads: N.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = RowNorm(width)
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
        self, x: Tensor, key: Tensor, value: Tensor, self_bias: Tensor | None, text_bias: Tensor | None
    ) -> Tensor:
        """Run the block.

        Args:
            x: [R, C].
            key: [B, L, C], of the text.
            value: The same.
            self_bias: [B, 1, 1, T], added to the scores of self-attention, or None.
            text_bias: [B, 1, 1, L], of attention to the text, or None.

        Returns:
            [R, C].
        """
        batch, width, heads = key.shape[0], x.shape[1], (self.heads, -1)
        text_out, mlp_out = self.text_out, self.mlp_out
        text_bias_ahead, mlp_bias_ahead = plain(text_out), plain(mlp_out)
        # Taken apart at once, so that their gradients are put side by side at once.
        own = product(self.norm1(x), self.qkv).view(batch, -1, 3, self.heads, width // self.heads)
        own_query, own_key, own_value = own.unbind(2)
        mixed = attend(own_query, own_key, own_value, self_bias)
        x, normed = self.norm2(product(mixed, self.self_out), x, untracked(text_out.bias) if text_bias_ahead else None)
        query = product(normed, self.query).view(batch, -1, self.heads, width // self.heads)
        mixed = attend(query, key.unflatten(2, heads), value.unflatten(2, heads), text_bias)
        mixed = linear(mixed, text_out.weight) if text_bias_ahead else text_out(mixed)
        x, normed = self.norm3(mixed, x, untracked(mlp_out.bias) if mlp_bias_ahead else None)
        hidden = self._hidden(normed)
        return _add_product(x, hidden, mlp_out.weight) if mlp_bias_ahead else x + mlp_out(hidden)

    def _hidden(self, normed: Tensor) -> Tensor:
        """[R, C] -> [R, 4 C], inside the MLP."""
        layer = self.mlp_in
        if plain(layer):
            out: Tensor = self.gate(normed, untracked(layer.weight, normed.shape[1]), untracked(layer.bias))
            return out
        value, gate = layer(normed).chunk(2, dim=-1)
        return value * F.gelu(gate)


def _add_product(x: Tensor, hidden: Tensor, weight: Tensor) -> Tensor:
    """X [R, C], which nobody else reads any more, plus hidden [R, I] by weight [C, I]."""
    if torch.is_grad_enabled() or not x.dtype == hidden.dtype == weight.dtype:
        return add_linear(x, hidden, weight)
    # Into another tensor torch 2.11 copies x first.
    return x.addmm_(hidden, weight.t())


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
        self.blocks = nn.ModuleList(TransformerBlock(width, shape.heads) for _ in range(shape.depth))
        self.proj_out = _product(config, width)

    def forward(
        self, x: Tensor, keys_values: Iterator[Tensor], self_bias: Tensor | None, text_bias: Tensor | None
    ) -> Tensor:
        """[B, C, H, W], and of each block keys [B, L, C] and values [B, L, C] in turn -> [B, C, H, W]."""
        norm = self.norm
        rows = to_rows(operators.group_norm(x, None, norm.weight, norm.bias, self.groups, norm.eps, False))
        rows = linear(rows, self.proj_in.weight.flatten(1), self.proj_in.bias)
        for block in self.blocks:
            key, value = next(keys_values), next(keys_values)
            rows = block(rows, key, value, self_bias, text_bias)
        rows = linear(rows, self.proj_out.weight.flatten(1), self.proj_out.bias)
        return to_images(torch.add(rows, to_rows(x)), x)


def _product(config: UNetConfig, width: int) -> nn.Linear | nn.Conv2d:
    return nn.Linear(width, width) if config.use_linear_projection else nn.Conv2d(width, width, 1)
