"""Losses that are not finite: noticed on the device, never trained on, reported with their step."""

from __future__ import annotations

import math

import torch
from torch import Tensor


class NonFiniteError(RuntimeError):
    """A loss (or a gradient norm) was not finite. It was not trained on.

    Args:
        step: Number of the step, counted from 1.
        loss: Its loss.
        went_on: Whether later steps were trained on all the same, as with float16. Else weights and optimizer are as
            they were before that step.
    """

    def __init__(self, step: int, loss: float, went_on: bool = False) -> None:
        self.step, self.loss = step, loss
        what = (
            f"the loss is {loss}" if not math.isfinite(loss) else f"a gradient is not finite (the loss is {loss:.4g})"
        )
        missing = "this update was left out" if went_on else "no update was made from this step on"
        remedy = "Look at its batch, lower the learning rate, or clip gradients"
        super().__init__(f"step {step}: {what}; {missing}. {remedy}{', or train in bfloat16' if went_on else ''}")


class FiniteWatch:
    """Counts steps and remembers the first one that was not finite, on the device: nothing waits for it.

    From that step on :attr:`skip` stays 1, so that a fused optimizer leaves everything as it is until somebody looks.

    Args:
        device: Where losses are.
        goes_on: Whether later steps are trained on all the same.
    """

    def __init__(self, device: torch.device, *, goes_on: bool = False) -> None:
        self._goes_on = goes_on
        self._count = torch.zeros((), dtype=torch.int64, device=device)
        self._first = torch.full((), -1, dtype=torch.int64, device=device)
        self._loss = torch.zeros((), device=device)
        self.skip = torch.zeros((), device=device)

    @torch.no_grad()
    def see(self, loss: Tensor, norm: Tensor | None) -> None:
        """Count a step and judge its loss and, if it is there, its gradients' norm."""
        self._count += 1
        bad = ~torch.isfinite(loss)
        if norm is not None:
            bad = bad | ~torch.isfinite(norm)
        first = bad & (self._first < 0)
        self._first.copy_(torch.where(first, self._count, self._first))
        self._loss.copy_(torch.where(first, loss.to(self._loss.dtype), self._loss))
        self.skip.copy_((self._first >= 0).to(self.skip.dtype))

    def check(self) -> None:
        """Wait for the device and raise NonFiniteError for the first bad step, once: later steps then train again."""
        step = int(self._first)
        if step < 0:
            return
        error = NonFiniteError(step, float(self._loss), self._goes_on)
        self._forget()
        raise error

    def begin_at(self, count: int) -> None:
        """Go on after so many steps; one before that was not finite is nothing to this run."""
        self._count.fill_(count)
        self._forget()

    def _forget(self) -> None:
        self._first.fill_(-1)
        self.skip.zero_()

    @property
    def count(self) -> int:
        """Steps seen. Waits for the device."""
        return int(self._count)
