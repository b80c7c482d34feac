"""Losses whose memory hurts: cross entropy over a large vocabulary without ever holding all the logits.

Shapes: N rows (tokens), n rows of a chunk, C width, V classes (the vocabulary).
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from zoo.regions import Region

IGNORED = -100


class CrossEntropyRows(nn.Module):
    """Loss and its gradient by the logits of some rows, in one pass over them when it is fused."""

    def forward(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Sum of the losses and the gradient of that sum.

        Args:
            logits: [n, V].
            labels: [n] int64; rows of ``IGNORED`` have no loss.

        Returns:
            Float32 scalar, and [n, V] like ``logits``.
        """
        seen = labels != IGNORED
        index = torch.where(seen, labels, 0)[:, None]
        x = logits.float()
        total = torch.logsumexp(x, dim=-1, keepdim=True)
        loss = torch.where(seen, (total - x.gather(-1, index))[:, 0], 0.0).sum()
        hit = torch.arange(logits.shape[-1], device=logits.device) == index
        grad = torch.where(seen[:, None], (x - total).exp() - hit.to(x.dtype), 0.0)
        return loss, grad.to(logits.dtype)


class LinearCrossEntropy(nn.Module):
    """Mean cross entropy of ``F.linear(x, weight)``, some rows at a time, forward and backward in one go.

    The gradients are computed along with the loss, so logits exist for one chunk only: for 8,192 tokens and a
    vocabulary of 128,256 a chunk of 2,048 takes 0.5 GB in bfloat16 where all the logits and what a loss makes of them
    take 10 GB. (The idea is that of Liger's fused linear cross entropy; torch has its own as
    ``torch.nn.functional.linear_cross_entropy`` from 2.13 on, which leaves compiled graphs.)

    Its region is the work between the two products: ``zoo.compile_regions(loss)``.

    Args:
        chunk: Rows at a time. More is a little faster, and the gradient of a half-precision weight, summed chunk by
            chunk, a little more exact.
    """

    regions: ClassVar[tuple[Region, ...]] = (
        Region(CrossEntropyRows, graphs=1, why="two passes over the logits of a chunk instead of about ten"),
    )

    def __init__(self, chunk: int = 2048) -> None:
        super().__init__()
        if chunk < 1:
            raise ValueError(f"chunk is {chunk}; it is a number of rows, at least 1")
        self.chunk = chunk
        self.rows = CrossEntropyRows()

    def forward(self, x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        """The mean over rows that are not ignored; 0 if all are.

        Args:
            x: [..., C], what goes into the last product.
            weight: [V, C].
            labels: [...] int64 below V, or -100 for rows that have no loss.

        Returns:
            Float32 scalar. It can be differentiated once.

        Raises:
            TypeError, ValueError: If shapes or dtypes do not fit.
        """
        _check(x, weight, labels)
        device = x.device.type
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            x, weight = x.to(dtype), weight.to(dtype)
        loss: Tensor = _Chunked.apply(x.flatten(0, -2), weight, labels.flatten(), self.rows, self.chunk)
        return loss


class _Chunked(torch.autograd.Function):
    """Loss in the forward, with the gradients that the backward only scales."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, labels: Tensor, rows: nn.Module, chunk: int) -> Tensor:
        count = (labels != IGNORED).sum().clamp_min(1)
        total = torch.zeros((), device=x.device)
        wants_x, wants_weight = ctx.needs_input_grad[:2]
        grad_x = torch.zeros_like(x) if wants_x else None
        grad_weight = torch.zeros_like(weight) if wants_weight else None
        with torch.autocast(x.device.type, enabled=False):
            for start, part_labels in _chunks(labels, chunk):
                part = slice(start, start + len(part_labels))
                loss, grad = rows(x[part] @ weight.t(), part_labels)
                total = total + loss
                if grad_x is not None:
                    grad_x[part].addmm_(grad, weight)
                if grad_weight is not None:
                    grad_weight.addmm_(grad.t(), x[part])
        ctx.grads, ctx.count = (grad_x, grad_weight), count
        return total / count

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.grads is None:
            raise RuntimeError("LinearCrossEntropy frees its gradients in the backward; compute the loss anew")
        # Of one dimension, so that half precision is multiplied in float32 and not by a rounded scale.
        scale = (grad / ctx.count).reshape(1)
        scaled = [None if held is None else held.mul_(scale) for held in ctx.grads]
        ctx.grads = None
        return (*scaled, None, None, None)


def _chunks(labels: Tensor, size: int) -> list[tuple[int, Tensor]]:
    """First row and labels of each chunk, all of one size: the last one overlaps, and ignores what was counted."""
    rows = len(labels)
    size = min(size, rows)
    found = [(start, labels[start : start + size]) for start in range(0, rows - size + 1, size)]
    if left := rows % size if size else 0:
        last = labels[rows - size :]
        again = torch.arange(size, device=labels.device) < size - left
        found.append((rows - size, torch.where(again, IGNORED, last)))
    return found


def _check(x: Tensor, weight: Tensor, labels: Tensor) -> None:
    if weight.dim() != 2 or x.dim() < 2 or x.shape[-1] != weight.shape[1]:
        raise ValueError(f"x {list(x.shape)} and weight {list(weight.shape)} do not fit; expected [..., C] and [V, C]")
    if labels.shape != x.shape[:-1]:
        raise ValueError(f"labels are {list(labels.shape)}, expected one for each row of x: {list(x.shape[:-1])}")
    if labels.dtype != torch.int64:
        raise TypeError(f"labels are {labels.dtype}, expected torch.int64")
    if not labels.numel():
        raise ValueError("there are no rows: the mean of nothing is no loss")
