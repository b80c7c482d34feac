"""PPO with a vision transformer: the policy acts in an environment on the device, and learns from what came of it.

Legend: N environments, S steps of a rollout, P pixels a side, T tokens, D width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.families.claims_small import EncoderBlock
from benchmarks.families.claims_subject import Inputs, Size, Subject

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


SUBJECTS = {
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
