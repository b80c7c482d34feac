"""Static caches: a cache that grows has another shape in every step; one that is written in place has one."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.patterns.pattern import Pattern
from zoo import Region

HEADS = 2


class GrowingBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        query, *new = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        cache = torch.cat([cache, torch.stack(new)], dim=3)  # [2, B, H, S + 1, D]
        key, value = cache.unbind()
        mixed = F.scaled_dot_product_attention(query, key, value)
        return x + self.out(mixed.transpose(1, 2).flatten(2)), cache


class Before(nn.Module):
    def __init__(self, width: int = 16, depth: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(GrowingBlock(width) for _ in range(depth))

    def forward(self, tokens: Tensor, past: Tensor) -> Tensor:
        caches = list(past.clone())
        outputs = []
        for x in tokens.clone():  # a step: one new token a row, [B, 1, C]
            for layer, block in enumerate(self.blocks):
                x, caches[layer] = block(x, caches[layer])
            outputs.append(x)
        return torch.cat(outputs, dim=1)


class WritingBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, cache: Tensor, position: Tensor, mask: Tensor) -> Tensor:
        query, *new = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        cache.index_copy_(3, position, torch.stack(new))  # [2, B, H, S, D], always
        key, value = cache.unbind()
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


class After(nn.Module):
    regions = (Region(WritingBlock, graphs=1, why="cache, position and mask have one shape in every step"),)

    def __init__(self, width: int = 16, depth: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(WritingBlock(width) for _ in range(depth))

    def forward(self, tokens: Tensor, past: Tensor) -> Tensor:
        before, steps = past.shape[4], tokens.shape[0]
        caches = list(F.pad(past, (0, 0, 0, steps)))  # room for all steps, once
        slots = torch.arange(before + steps, device=tokens.device)
        outputs = []
        for x, position in zip(tokens.clone(), slots[before:].split(1), strict=True):
            mask = (slots <= position)[None]  # [1, S]
            for block, cache in zip(self.blocks, caches, strict=True):
                x = block(x, cache, position, mask)
            outputs.append(x)
        return torch.cat(outputs, dim=1)


def inputs(
    generator: torch.Generator, *, batch: int = 2, steps: int = 6, past: int = 5, depth: int = 2, width: int = 16
) -> dict[str, Tensor]:
    shape = (depth, 2, batch, HEADS, past, width // HEADS)
    return {
        "tokens": torch.randn(steps, batch, 1, width, generator=generator),
        "past": torch.randn(shape, generator=generator),
    }


PATTERN = Pattern(
    before=Before,
    after=After,
    inputs=inputs,
    model_sizes={"width": 256, "depth": 8},
    input_sizes={"batch": 4, "steps": 8, "past": 1024, "depth": 8, "width": 256},
)
