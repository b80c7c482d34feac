"""The small models that claims speak of, each with one property, and PPO with a vision transformer.

Legend: B batch, N environments, S steps, C channels, H × W or P × P pixels, I inputs, D width, T tokens, V vocabulary,
K ids of a bag.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Sizes = Mapping[str, Any]
Inputs = dict[str, Any]
Loss = Callable[[Any, Inputs], Tensor]


@dataclass(frozen=True, kw_only=True)
class Size:
    """How large a race is: what the model takes, and what its inputs take."""

    model: Sizes = field(default_factory=dict)
    inputs: Sizes = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model as people write it, in plain PyTorch; there is none of the zoo's beside it.

    Args:
        build: Makes the model.
        draw: Makes what one call is given: on the CPU, numbers in float32.
        draw_training: The same for a training step, where it is something else.
        sizes: By the name of the input; ``small`` is for a CPU and for tests.
        tuned: Makes the model as the claim says to write it, with weights of the same names; None if there is no such.
        part: The module that is compiled where only a part is; None if there is no such.
        loss: Of the model and what was drawn, for training; None for a model that is not trained.
        tuned_loss: The same for the tuned model, where it is another.
        infers: Whether there is inference of it.
    """

    build: Callable[..., nn.Module]
    draw: Callable[..., Inputs]
    draw_training: Callable[..., Inputs] | None = None
    sizes: Mapping[str, Size]
    tuned: Callable[..., nn.Module] | None = None
    part: Callable[[Any], nn.Module] | None = None
    loss: Loss | None = None
    tuned_loss: Loss | None = None
    infers: bool = True


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


# PPO: a policy that sees pictures of an environment on the device, and learns from what it did there ------------------

DISCOUNT, CLIP, VALUE_WEIGHT = 0.95, 0.2, 0.5
PIXELS = 32


class ViTPolicy(nn.Module):
    """A vision transformer with two heads: the mean of the next push, and the value of what is seen."""

    def __init__(self, patch: int = 8, width: int = 16, heads: int = 2, depth: int = 2) -> None:
        super().__init__()
        self.patches = nn.Conv2d(2, width, patch, stride=patch)
        self.positions = nn.Parameter(0.02 * torch.randn((PIXELS // patch) ** 2, width))
        self.blocks = nn.ModuleList(EncoderBlock(width, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 3)

    def forward(self, images: Tensor) -> Tensor:
        """[N, 2, P, P] to mean of the push and value, [N, 3]."""
        x = self.patches(images).flatten(2).mT + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


def seen(place: Tensor, goal: Tensor) -> Tensor:
    """The environment's picture: a spot where the player is, one where it should be: [N, 2, P, P]."""
    line = torch.linspace(-1, 1, PIXELS, device=place.device, dtype=place.dtype)
    spots = torch.stack([place, goal], 1)[..., None]  # [N, 2, 2, 1]
    across, down = torch.exp(-((line - spots) ** 2) / 0.02).unbind(2)
    return down[..., :, None] * across[..., None, :]


def rollout(policy: Any, state: Inputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Let the policy act: pictures [S·N, 2, P, P], pushes [S·N, 2], their log-probabilities and returns [S·N]."""
    place, goal = state["place"], state["goal"]
    pictures, pushes, likely, rewards = [], [], [], []
    for noise in state["noise"]:
        pictures.append(seen(place, goal))
        mean = policy(pictures[-1])[:, :2].to(place.dtype)
        push = mean + noise
        pushes.append(push)
        likely.append(log_probability(push, mean))
        place = (place + 0.2 * torch.tanh(push)).clamp(-1, 1)
        rewards.append(-torch.linalg.vector_norm(place - goal, dim=-1))
    returns = [rewards[-1]]
    for reward in reversed(rewards[:-1]):
        returns.insert(0, reward + DISCOUNT * returns[0])
    return torch.cat(pictures), torch.cat(pushes), torch.cat(likely), torch.cat(returns)


def log_probability(push: Tensor, mean: Tensor) -> Tensor:
    """Of a push whose noise has deviation one, but for a constant."""
    return -0.5 * (push - mean).square().sum(-1)


def ppo_loss(policy: Any, state: Inputs) -> Tensor:
    """A rollout and the clipped objective over all of it, once."""
    with torch.no_grad():
        pictures, pushes, before, returns = rollout(policy, state)
    output = policy(pictures).to(returns.dtype)
    advantage = returns - output[:, 2].detach()
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-6)
    ratio = torch.exp(log_probability(pushes, output[:, :2]) - before)
    gain = torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
    return VALUE_WEIGHT * F.mse_loss(output[:, 2], returns) - gain.mean()


def draw_pictures(generator: torch.Generator, *, environments: int = 4, steps: int = 3) -> Inputs:
    """What the policy is given to act on: ``images``."""
    state = draw_state(generator, environments=environments, steps=steps)
    return {"images": seen(state["place"], state["goal"])}


def draw_state(generator: torch.Generator, *, environments: int = 4, steps: int = 3) -> Inputs:
    """Where an episode begins and ends, and the noise of its pushes."""
    place, goal = (2 * torch.rand(2, environments, 2, generator=generator) - 1).unbind(0)
    return {"place": place, "goal": goal, "noise": torch.randn(steps, environments, 2, generator=generator)}


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
            "1-8-32-128": Size(model={"width": 2048, "depth": 8}, inputs={"batches": (1, 8, 32, 128), "width": 2048}),
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
        sizes={"small": Size(), "16x128": Size(model=_ENCODER, inputs={"batch": 16, "tokens": 128, "words": 16384})},
    ),
    "ppo-vit": Subject(
        build=ViTPolicy,
        draw=draw_pictures,
        draw_training=draw_state,
        loss=ppo_loss,
        sizes={
            "small": Size(),
            "256": Size(
                model={"patch": 4, "width": 192, "heads": 3, "depth": 12}, inputs={"environments": 256, "steps": 4}
            ),
        },
    ),
}
