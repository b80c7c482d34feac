"""What a training step has to know of an optimizer, whichever it is."""

from __future__ import annotations

import inspect

import torch
from torch.optim import Optimizer


def can_skip(optimizer: Optimizer) -> bool:
    """Whether an update can be skipped by a flag on the device: torch's fused optimizers can."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def has_fused(optimizer: Optimizer) -> bool:
    """Whether an optimizer of this class could be fused."""
    return "fused" in inspect.signature(type(optimizer)).parameters


def wants_closure(optimizer: Optimizer) -> bool:
    """Whether its ``step()`` must be given a function that computes the loss, as that of LBFGS."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def starts_defined(optimizer: Optimizer) -> bool:
    """Whether the optimizer's state is defined if its first update is skipped. Makes it so where that can be done.

    Torch's fused SGD takes momentum of memory as it is, and writes it in the first update, unless that is skipped; and
    it takes no parameter without momentum beside others that have one, as one that was unfrozen later.
    """
    if not can_skip(optimizer):
        return True
    if isinstance(optimizer, torch.optim.SGD):
        with_momentum = [group for group in optimizer.param_groups if group["momentum"]]
        if any(group["dampening"] for group in with_momentum):
            return bool(optimizer.state)  # whose first update is unlike all later ones
        for group in with_momentum:
            for param in group["params"]:
                if param.requires_grad and optimizer.state[param].get("momentum_buffer") is None:
                    optimizer.state[param]["momentum_buffer"] = torch.zeros_like(param)
        return True
    return bool(optimizer.state) or isinstance(optimizer, (torch.optim.Adam, torch.optim.Adagrad))
