"""What a UNet is told beside the sample: the timestep, the text, and how each reaches the blocks.

Both come down to tensors that do not depend on the sample: a shift for every resnet block, keys and values for every
cross-attention. Each is one product for all blocks, and may be computed once for a whole run instead of in every step.

Shape legend: B rows, E width of the embedded timestep, S channels of all shifts, L tokens of the condition, D its
width, K channels of all keys and values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.unet.config import UNetConfig
from zoo.unet.products import linear


class TimeShifts(NamedTuple):
    """What timesteps add inside the resnet blocks; ``UNet.time_shifts`` makes it.

    Attributes:
        shifts: [B, S], or [1, S] for all rows alike. ``time_shifts`` of many steps gives [steps, B, S]; one of
            them is ``TimeShifts(many.shifts[step])``.
    """

    shifts: Tensor


class TextKeysValues(NamedTuple):
    """Keys and values of a condition in every cross-attention; ``UNet.text_keys_values`` makes it.

    Attributes:
        keys_values: [B, L, K].
    """

    keys_values: Tensor


def sinusoids(values: Tensor, width: int, cosines_first: bool, freq_shift: float) -> Tensor:
    """[...] to [..., width] in float32: sines and cosines of falling frequencies."""
    half = width // 2
    step = -math.log(10000) / (half - freq_shift)
    frequencies = torch.exp(step * torch.arange(half, dtype=torch.float32, device=values.device))
    angles = values.float()[..., None] * frequencies
    pair = (angles.cos(), angles.sin()) if cosines_first else (angles.sin(), angles.cos())
    joined = torch.cat(pair, dim=-1)
    return F.pad(joined, (0, 1)) if width % 2 else joined


class Embedding(nn.Module):
    """Two products with SiLU between them; diffusers' ``TimestepEmbedding``."""

    def __init__(self, inputs: int, width: int, further: int | None = None) -> None:
        super().__init__()
        self.linear_1 = nn.Linear(inputs, width)
        self.cond_proj = None if further is None else nn.Linear(further, inputs, bias=False)
        self.linear_2 = nn.Linear(width, width)

    def forward(self, x: Tensor, further: Tensor | None = None) -> Tensor:
        """[..., I], and a further condition [..., F] where there is one, to [..., E]."""
        if further is not None:
            assert self.cond_proj is not None
            x = x + self.cond_proj(further)
        return self.linear_2(F.silu(self.linear_1(x)))


class TimeProjections(nn.Module):
    """The products of all resnet blocks with the embedded timestep, in the order of the blocks, as one.

    The bias of each block's first convolution is part of its shift: a convolution without one is a pass less.
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
        """[..., E] to [..., S]."""
        return linear(F.silu(embedded), self.weight, self.bias + self.conv_bias)


class TextProjections(nn.Module):
    """Keys and values of all cross-attentions, in the order of their blocks, as one product."""

    def __init__(self, width: int, channels: Sequence[int]) -> None:
        super().__init__()
        self.channels = tuple(channels)
        self.weight = nn.Parameter(torch.empty(2 * sum(channels), width))
        nn.init.uniform_(self.weight, -(width**-0.5), width**-0.5)

    def forward(self, text: Tensor) -> Tensor:
        """[B, L, D] to [B, L, K]: keys, then values, of one block after the other."""
        return linear(text, self.weight)


class Conditions(nn.Module):
    """All that is computed from timesteps and sizes, up to the embedded timestep."""

    def __init__(self, config: UNetConfig) -> None:
        super().__init__()
        self.config = config
        width = config.time_width
        self.time_embedding = Embedding(config.block_out_channels[0], width, config.time_cond_proj_dim)
        self.add_embedding = None
        if config.addition_embed_type == "text_time":
            assert config.projection_class_embeddings_input_dim is not None
            self.add_embedding = Embedding(config.projection_class_embeddings_input_dim, width)

    def forward(self, timesteps: Tensor, added: Mapping[str, Tensor] | None, further: Tensor | None) -> Tensor:
        """Embed timesteps, the pooled condition and sizes.

        Args:
            timesteps: [B], [1], or [steps, 1] for a whole run.
            added: ``text_embeds`` [B, X] and ``time_ids`` [B, Y], where the model takes them.
            further: [B, F], where the model takes it.

        Returns:
            [B, E], [1, E], or [steps, B, E].
        """
        config = self.config
        dtype = self.time_embedding.linear_1.weight.dtype
        embedded = sinusoids(timesteps, config.block_out_channels[0], config.flip_sin_to_cos, config.freq_shift)
        embedded = self.time_embedding(embedded.to(dtype), further)
        if self.add_embedding is None:
            return embedded
        assert added is not None and config.addition_time_embed_dim is not None
        sizes = sinusoids(
            added["time_ids"], config.addition_time_embed_dim, config.flip_sin_to_cos, config.freq_shift
        ).flatten(1)
        pooled = torch.cat([added["text_embeds"], sizes], dim=-1)
        return embedded + self.add_embedding(pooled.to(dtype))


def hiding_bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask [B, T], 1 where a token is seen, as what is added to scores: [B, 1, 1, T], 0 or -10000 as diffusers'."""
    return ((1 - mask.to(dtype)) * -10000.0)[:, None, None, :]
