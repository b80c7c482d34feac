"""What the kernels of a training step compute, in torch's own operators.

Shape legend: n rows, V classes.
"""

from __future__ import annotations

import torch
from torch import Tensor


def cross_entropy_rows(logits: Tensor, labels: Tensor, scale: Tensor, ignored: int) -> tuple[Tensor, Tensor]:
    """Losses [n] of logits [n, V] in float32, and the gradient [n, V] of their sum times ``scale``."""
    seen = labels != ignored
    index = torch.where(seen, labels, 0)[:, None]
    x = logits.float()
    total = torch.logsumexp(x, dim=-1, keepdim=True)
    losses = torch.where(seen, (total - x.gather(-1, index))[:, 0], 0.0)
    hit = torch.arange(logits.shape[-1], device=logits.device) == index
    grad = torch.where(seen[:, None], ((x - total).exp() - hit.to(x.dtype)) * scale, 0.0)
    return losses, grad.to(logits.dtype)


def cross_entropy_rows_(logits: Tensor, labels: Tensor, scale: Tensor, ignored: int) -> Tensor:
    """Losses [n] of logits [n, V], in whose place the gradient is left, times ``scale``."""
    losses, grad = cross_entropy_rows(logits, labels, scale, ignored)
    logits.copy_(grad)
    return losses


def scale_(x: Tensor, factor: Tensor) -> None:
    """Multiply by a number on the device, in place."""
    # Of one dimension, so that half precision is multiplied in float32 and not by a rounded factor.
    x.mul_(factor.reshape(1))
