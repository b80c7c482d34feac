"""What a captured training step asks of the model and the optimizer, said before anything runs."""

from __future__ import annotations

import inspect

import torch
from torch import nn
from torch.optim import Optimizer

from zoo.training.checkpointing import restores_random_state


def capture_obstacles(model: nn.Module, optimizer: Optimizer) -> list[str]:
    """Why a step of this model and optimizer cannot be captured, each with its remedy; nothing if it can.

    What the loss does is not looked at here: a step that waits for the device is noticed when it runs.

    Args:
        model: The model, on its device.
        optimizer: Of its parameters.
    """
    devices = {parameter.device for parameter in model.parameters()}
    if {device.type for device in devices} != {"cuda"}:
        found = ", ".join(sorted(map(str, devices))) or "no device"
        return [f"the parameters are on {found}; CUDA graphs need a GPU: model.to('cuda')"]
    if len(devices) > 1:
        return [f"the parameters are on {', '.join(sorted(map(str, devices)))}; a CUDA graph runs on one device"]
    name = type(optimizer).__name__
    obstacles = []
    if not can_skip(optimizer):
        remedy = (
            f"{name}(..., fused=True)" if _has_fused(optimizer) else "torch.optim has AdamW and SGD with fused=True"
        )
        obstacles.append(f"{name} is not fused, and could not skip a bad step without waiting: {remedy}")
    if any(group.get("capturable") is False for group in optimizer.param_groups):
        obstacles.append(f"{name} keeps its step count on the host: {name}(..., capturable=True)")
    for index, group in enumerate(optimizer.param_groups):
        rate = group["lr"]
        if not isinstance(rate, torch.Tensor):
            obstacles.append(
                f"the learning rate {rate} of parameter group {index} is a number, which would be baked in: "
                f"lr=torch.tensor({rate}, device='cuda'); schedulers of torch.optim write into it"
            )
        elif rate.device.type == "cpu":
            # Torch reads a number from it, once.
            obstacles.append(
                f"the learning rate of parameter group {index} is a tensor on the CPU, whose number would be baked in: "
                "put it on the device, lr=torch.tensor(..., device='cuda')"
            )
    if restores_random_state(model):
        obstacles.append(
            "checkpointed regions restore the random state for their second run, which cannot be captured: "
            "checkpoint_regions(..., preserve_rng_state=False) where nothing in them is random"
        )
    return obstacles


class FrozenOptions:
    """The options of an optimizer as they were captured: what is baked into a CUDA graph must not change unnoticed."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._seen = [self._options(group) for group in optimizer.param_groups]
        self._learning = self._which_learn()

    def check(self) -> None:
        """Raise RuntimeError if a number changed, a tensor (the learning rate) was replaced, or others learn now."""
        groups = self._optimizer.param_groups
        if len(groups) != len(self._seen):
            raise RuntimeError(
                f"the optimizer has {len(groups)} parameter groups, {len(self._seen)} were captured: call "
                "step.release() to capture anew"
            )
        for index, (group, seen) in enumerate(zip(groups, self._seen, strict=True)):
            for name, value in self._options(group).items():
                was = seen.get(name)
                if value is was or (not isinstance(value, torch.Tensor) and value == was):
                    continue
                remedy = "write into the tensor (group['lr'].fill_(...))"
                if name in ("momentum", "betas"):
                    remedy = f"a schedule that cycles {name} cannot be captured: give it cycle_momentum=False"
                elif name != "lr":
                    remedy = "keep it as it was"
                raise RuntimeError(
                    f"{name} of parameter group {index} was {was} when the step was captured and is {value} now; "
                    f"{remedy}, or call step.release() to capture anew"
                )

        if (learning := self._which_learn()) != self._learning:
            raise RuntimeError(
                f"of the optimizer's parameters {sum(self._learning)} learnt when the step was captured, and "
                f"{sum(learning)} do now, or others: call step.release() to capture anew"
            )

    def _which_learn(self) -> list[bool]:
        return [param.requires_grad for group in self._optimizer.param_groups for param in group["params"]]

    @staticmethod
    def _options(group: dict[str, object]) -> dict[str, object]:
        return {name: value for name, value in group.items() if name not in ("params", "initial_lr", "param_names")}


def can_skip(optimizer: Optimizer) -> bool:
    """Whether an update can be skipped by a flag on the device: torch's fused optimizers can."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def _has_fused(optimizer: Optimizer) -> bool:
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
