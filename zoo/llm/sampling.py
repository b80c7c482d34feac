"""From logits to the next token: greedy, or drawn after temperature, top-k and top-p. All settings are tensors.

Shapes: B batch, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are chosen.

    Args:
        temperature: 0 takes the most likely token; else logits are divided by it.
        top_k: Only the most likely so many; None for all.
        top_p: Of those only the fewest that together have this probability; None for all.

    Raises:
        ValueError: If a value is out of range.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if not (isinstance(self.temperature, (int, float)) and 0 <= self.temperature < math.inf):
            raise ValueError(f"temperature is {self.temperature!r}, expected 0 for greedy or a positive number")
        if self.top_k is not None and (
            not isinstance(self.top_k, int) or isinstance(self.top_k, bool) or self.top_k < 1
        ):
            raise ValueError(f"top_k is {self.top_k!r}, expected a positive integer, or None for all tokens")
        if self.top_p is not None and not (isinstance(self.top_p, (int, float)) and 0 < self.top_p <= 1):
            raise ValueError(
                f"top_p is {self.top_p!r}, expected a probability above 0, up to 1, or None for all tokens"
            )

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken."""
        return self.temperature == 0


def sample(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, uniform: Tensor) -> Tensor:
    """Draw a token a row: first top-k, then top-p of what is left, as in transformers.

    One number a row decides, by the inverse of the cumulated probabilities: the draw depends on nothing but its
    arguments, and a captured step needs no random state.

    Args:
        logits: [B, V].
        temperature: Scalar, positive.
        top_k: Scalar int64.
        top_p: Scalar; 2 for all.
        uniform: [B] in [0, 1).

    Returns:
        [B] int64.
    """
    scaled, order = (logits.float() / temperature).sort(dim=-1, descending=True)
    weights = scaled.softmax(-1)
    weights = weights * (torch.arange(weights.shape[-1], device=weights.device) < top_k)
    weights = weights / weights.sum(-1, keepdim=True)
    # A token is kept if those before it have not yet the wanted mass: the first always is.
    weights = weights * (weights.cumsum(-1) - weights < top_p)
    mass = weights.cumsum(-1)
    place = (mass <= uniform[:, None] * mass[:, -1:]).sum(-1, keepdim=True)
    # Rounding could lead behind the last token that has a weight.
    place = torch.minimum(place, (weights > 0).sum(-1, keepdim=True) - 1)
    return order.gather(-1, place).squeeze(-1)


def draw_uniform(steps: int, batch: int, seed: int | None) -> Tensor:
    """The numbers of a whole generation, [steps, batch] on the CPU, from a generator of their own."""
    generator = torch.Generator("cpu")
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed)
    return torch.rand(steps, batch, generator=generator, device="cpu")


def end_tokens(eos: int | Sequence[int] | None, default: Sequence[int], vocab_size: int, most: int) -> tuple[int, ...]:
    """Tokens that end a row, checked.

    Raises:
        ValueError: If one is not in the vocabulary, or there are more than ``most``.
    """
    ends = tuple(default) if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)
    for end in ends:
        if not isinstance(end, int) or isinstance(end, bool) or not 0 <= end < vocab_size:
            raise ValueError(f"eos is {eos!r}, expected token ids, 0 to {vocab_size - 1}, or () to never stop")
    if len(ends) > most:
        raise ValueError(f"eos has {len(ends)} tokens, and a step compares with {most} at most")
    return ends
