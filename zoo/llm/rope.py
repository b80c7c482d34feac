"""Rotary position embeddings (https://arxiv.org/abs/2104.09864): the table of turns.

Shapes: P positions, B batch, T tokens, H heads, D width of a head.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from zoo.llm.config import LLMConfig


def inverse_frequencies(config: LLMConfig, device: torch.device | None = None) -> Tensor:
    """Turn of each pair of channels from one position to the next, in radians: [D / 2], float32."""
    channels = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=device)
    turns = 1.0 / config.rope_theta ** (channels / config.head_dim)
    scaling = config.rope_scaling
    if scaling is None:
        return turns
    if scaling.kind == "linear":
        return turns / scaling.factor
    low, high, length = scaling.low_freq_factor, scaling.high_freq_factor, scaling.original_max_position_embeddings
    assert low is not None and high is not None and length is not None
    # 1 for waves that fit into the original length `high` times or more, 0 for those that fit `low` times or less.
    kept = ((length * turns / (2 * math.pi) - low) / (high - low)).clamp(0, 1)
    return turns * (kept + (1 - kept) / scaling.factor)


class RotaryTable(nn.Module):
    """Cosines and sines of all positions, float32 in every dtype of the model: made once, gathered once a step."""

    table: Tensor

    def __init__(self, config: LLMConfig) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("table", None, persistent=False)
        self.reset_buffers(torch.get_default_device())

    def reset_buffers(self, device: torch.device) -> None:
        """Compute the table on a device."""
        positions = torch.arange(self.config.max_position_embeddings, dtype=torch.float32, device=device)
        angles = torch.outer(positions, inverse_frequencies(self.config, device))
        self.table = torch.cat((angles.cos(), angles.sin()), dim=-1)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RotaryTable:
        # A model that is rounded to bfloat16, moved, or given empty memory gets its table anew.
        before = self.table
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.table is not before:
            self.reset_buffers(self.table.device)
        return self

    def forward(self, positions: Tensor) -> Tensor:
        """Positions [B, T] -> [B, T, D]: cosines [D / 2], then sines [D / 2]."""
        return self.table[positions]
