"""Small models, each with one property that a claim speaks of.

Legend: B batch, C channels, H × W pixels, I inputs, D width, T tokens, V vocabulary, K ids of a bag.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.families.claims_subject import Inputs, Size, Subject


class CNN(nn.Module):
    """Convolution, batch norm and ReLU, a few times, and a classifier."""

    def __init__(self, width: int = 8, stages: int = 2, classes: int = 4) -> None:
        super().__init__()
        widths = [3, *(width * 2**stage for stage in range(stages))]
        self.blocks = nn.Sequential(
            *(
                nn.Sequential(
                    nn.Conv2d(inside, outside, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(outside), nn.ReLU(),
                    nn.Conv2d(outside, outside, 3, padding=1, bias=False), nn.BatchNorm2d(outside), nn.ReLU(),
                )
                for inside, outside in itertools.pairwise(widths)
            )
        )  # fmt: skip
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        """Images [B, 3, H, W] to logits."""
        return self.head(self.blocks(x).mean((2, 3)))


class MLP(nn.Module):
    """Layers of one width."""

    def __init__(self, width: int = 16, depth: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        """[B, D] to [B, D]."""
        for layer in self.layers:
            x = F.gelu(layer(x))
        return x


class ManyKernels(nn.Module):
    """Nothing but pointwise operators and means, a kernel each."""

    def __init__(self, width: int = 16, depth: int = 3) -> None:
        super().__init__()
        self.scale = nn.Parameter(1 + 0.1 * torch.randn(depth, width))
        self.shift = nn.Parameter(0.1 * torch.randn(depth, width))

    def forward(self, x: Tensor) -> Tensor:
        """[B, D] to [B, D]."""
        for scale, shift in zip(self.scale, self.shift, strict=True):
            centred = x - x.mean(-1, keepdim=True)
            normal = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + 1e-5)
            moved = normal * scale + shift
            x = x + moved * torch.sigmoid(1.702 * moved)
        return x


class BreakingBlock(nn.Module):
    """Small operators, and in their midst something that the compiler cannot follow: a log, a print, a lookup."""

    def __init__(self, width: int, *, breaks: bool) -> None:
        super().__init__()
        self.norm, self.linear, self.breaks = nn.LayerNorm(width), nn.Linear(width, width), breaks

    def forward(self, x: Tensor) -> Tensor:
        """[B, D] to [B, D]."""
        hidden = self.linear(self.norm(x))
        if self.breaks:
            torch._dynamo.graph_break()
        return x + hidden * torch.tanh(F.softplus(hidden))


class GraphBreaks(nn.Module):
    """A break in each block, or none."""

    def __init__(self, width: int = 16, depth: int = 3, *, breaks: bool = True) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(BreakingBlock(width, breaks=breaks) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        """[B, D] to [B, D]."""
        for block in self.blocks:
            x = block(x)
        return x


class BatchSizes(nn.Module):
    """A server that gets batches of several sizes in turn."""

    def __init__(self, width: int = 16, depth: int = 3) -> None:
        super().__init__()
        self.model = MLP(width, depth)

    def forward(self, batches: list[Tensor]) -> list[Tensor]:
        """[B_i, D] to [B_i, D], each."""
        return [self.model(x) for x in batches]


class Recommender(nn.Module):
    """Bags of ids and dense features, joined by a dense network."""

    def __init__(self, tables: int = 2, rows: int = 50, width: int = 8, dense: int = 12, hidden: int = 16) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum") for _ in range(tables))
        self.bottom = nn.Sequential(nn.Linear(dense, hidden), nn.ReLU(), nn.Linear(hidden, width), nn.ReLU())
        self.top = nn.Sequential(
            nn.Linear((tables + 1) * width, hidden), nn.ReLU(), nn.LayerNorm(hidden), nn.Linear(hidden, hidden),
            nn.ReLU(), nn.LayerNorm(hidden), nn.Linear(hidden, 1),
        )  # fmt: skip

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        """Features [B, I] and ids [tables, B, K] to a logit each, [B]."""
        found = [table(bag) for table, bag in zip(self.tables, ids, strict=True)]
        return self.top(torch.cat([self.bottom(dense), *found], -1)).squeeze(-1)


class Encoder(nn.Module):
    """A transformer that says a word for each token, from as many words as there are."""

    def __init__(self, words: int = 40, width: int = 16, heads: int = 2, depth: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(EncoderBlock(width, heads) for _ in range(depth))
        self.head = nn.Linear(width, words)

    def forward(self, ids: Tensor) -> Tensor:
        """[B, T] to logits [B, T, V]."""
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class EncoderWithLoss(Encoder):
    """The same, its loss in the same graph."""

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
        """[B, T] and [B, T] to a scalar."""
        return F.cross_entropy(super().forward(ids).flatten(0, 1), labels.flatten())


class EncoderBlock(nn.Module):
    """Attention and a network, each with its norm before it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, D] to [B, T, D]."""
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


def _rows(generator: torch.Generator, *, batch: int = 2, width: int = 16) -> Inputs:
    return {"x": torch.randn(batch, width, generator=generator)}


def _images(generator: torch.Generator, *, batch: int = 2, pixels: int = 16) -> Inputs:
    return {"x": torch.randn(batch, 3, pixels, pixels, generator=generator)}


def _batches(generator: torch.Generator, *, batches: tuple[int, ...] = (1, 2, 3), width: int = 16) -> Inputs:
    return {"batches": [torch.randn(batch, width, generator=generator) for batch in batches]}


def _clicks(
    generator: torch.Generator, *, batch: int = 64, dense: int = 12, tables: int = 2, rows: int = 50, bag: int = 3
) -> Inputs:
    return {
        "dense": torch.randn(batch, dense, generator=generator),
        "ids": torch.randint(rows, (tables, batch, bag), generator=generator),
    }


def _texts(generator: torch.Generator, *, batch: int = 2, tokens: int = 8, words: int = 40) -> Inputs:
    return {"ids": torch.randint(words, (batch, tokens), generator=generator)}


def _click_loss(model: Any, batch: Inputs) -> Tensor:
    # Who clicks depends on the first features: something to learn.
    logits, clicked = model(**batch), batch["dense"][:, :4].sum(-1) > 0
    return F.binary_cross_entropy_with_logits(logits.to(batch["dense"].dtype), clicked.to(batch["dense"].dtype))


def _word_loss(model: Any, batch: Inputs) -> Tensor:
    return F.cross_entropy(model(batch["ids"]).flatten(0, 1), batch["ids"].flatten())


def _inner_word_loss(model: Any, batch: Inputs) -> Tensor:
    loss: Tensor = model(batch["ids"], batch["ids"])
    return loss


def _row_sizes(batches: tuple[int, ...], *, width: int, depth: int) -> dict[str, Size]:
    large = {
        str(batch): Size(model={"width": width, "depth": depth}, inputs={"batch": batch, "width": width})
        for batch in batches
    }
    return {"small": Size(), **large}


_CNN = {"width": 64, "stages": 4, "classes": 1000}
_RECOMMENDER = {"tables": 16, "rows": 100_000, "width": 64, "dense": 256, "hidden": 1024}
_CLICKS = {"batch": 16384, "dense": 256, "tables": 16, "rows": 100_000, "bag": 8}
_ENCODER = {"words": 16384, "width": 768, "heads": 12, "depth": 6}

SUBJECTS = {
    "cnn": Subject(
        build=CNN,
        draw=_images,
        sizes={
            "small": Size(),
            **{str(batch): Size(model=_CNN, inputs={"batch": batch, "pixels": 128}) for batch in (1, 256)},
        },
    ),
    "mlp": Subject(build=MLP, draw=_rows, sizes=_row_sizes((1, 4096), width=2048, depth=8)),
    "one-operator": Subject(
        build=lambda width=16, depth=1: nn.Sequential(*(nn.Linear(width, width) for _ in range(depth))),
        draw=lambda generator, **sizes: {"input": _rows(generator, **sizes)["x"]},
        sizes=_row_sizes((64,), width=8192, depth=1),
    ),
    "many-kernels": Subject(build=ManyKernels, draw=_rows, sizes=_row_sizes((64,), width=4096, depth=16)),
    "graph-breaks": Subject(
        build=GraphBreaks,
        tuned=lambda **sizes: GraphBreaks(**sizes, breaks=False),
        draw=_rows,
        sizes=_row_sizes((64,), width=512, depth=24),
    ),
    "batch-sizes": Subject(
        build=BatchSizes,
        tuned=BatchSizes,
        part=lambda model: model.model,
        draw=_batches,
        sizes={
            "small": Size(),
            "1-8-32-128": Size(
                model={"width": 2048, "depth": 8}, inputs={"batches": (1, 8, 32, 128), "width": 2048}
            ),
        },
    ),
    "recommender": Subject(
        build=Recommender,
        draw=_clicks,
        loss=_click_loss,
        sizes={"small": Size(), "16384": Size(model=_RECOMMENDER, inputs=_CLICKS)},
    ),
    "whole-step": Subject(
        build=Encoder,
        tuned=EncoderWithLoss,
        part=lambda model: model.blocks[0],
        draw=_texts,
        loss=_word_loss,
        tuned_loss=_inner_word_loss,
        infers=False,
        sizes={
            "small": Size(),
            "16x128": Size(model=_ENCODER, inputs={"batch": 16, "tokens": 128, "words": 16384}),
        },
    ),
}  # fmt: skip
