"""A memory-bandwidth AdamW, and a training step's questions to any optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from zoo.ops.adamw import adamw
from zoo.training.parallel import to_local


class AdamW(torch.optim.AdamW):
    """``torch.optim.AdamW(..., fused=True)`` that updates large parameters by a kernel of its own.

    Options, state and results are torch's, but for rounding, and states of either load into the other. A launch takes
    parameters of half a million numbers or more together; torch's kernel updates all others, those of groups with
    ``amsgrad``, and all where Triton does not run. Nothing waits for the device; for a CUDA graph, ``capturable=True``
    and ``lr`` a tensor on the device, as with torch's. ValueError if ``fused`` is False or ``foreach`` True,
    RuntimeError if ``differentiable`` is True.
    """

    # GradScaler and TrainingStep set a flag on the device, for which it skips the update.
    _step_supports_amp_scaling = True

    def __init__(
        self, params: Iterable[Any], lr: float | Tensor = 1e-3, *args: Any, foreach: bool | None = None,
        fused: bool | None = True, **options: Any,
    ) -> None:  # fmt: skip
        _refuse_other_than_fused(foreach, fused)
        super().__init__(params, lr, *args, fused=True, **options)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as torch's does; ValueError if its ``fused`` is False or its ``foreach`` True."""
        _refuse_other_than_fused(param_group.get("foreach"), param_group.get("fused"))
        super().add_param_group({**param_group, "fused": True, "foreach": None})

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # A state may have been saved by an optimizer that was not fused and counted on the host.
        for group in self.param_groups:
            group["fused"], group["foreach"] = True, None
            for param in group["params"]:
                held = self.state.get(param, {})
                if "step" in held:
                    held["step"] = held["step"].to(param.device, torch.float32)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update all parameters that have a gradient; return the result of ``closure``, which computes the loss."""
        self._accelerator_graph_capture_health_check()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            tensors: list[list[Tensor]] = [[] for _ in range(6)]
            has_complex = self._init_group(group, *tensors)  # type: ignore[no-untyped-call]
            # Each number is updated alone, so each process updates those that it holds.
            tensors = [[to_local(each) for each in held] for held in tensors]
            scale, skip = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
            adamw(group, tensors, scale, skip, has_complex=has_complex)
        return loss


def _refuse_other_than_fused(foreach: bool | None, fused: bool | None) -> None:
    if foreach or fused is False:
        raise ValueError(f"foreach is {foreach} and fused {fused}: this AdamW is fused; see torch.optim.AdamW")


class FrozenOptions:
    """An optimizer's options at the capture: the CUDA graph would not notice a change."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._seen, self._learning = self._options(), self._which_learn()

    def check(self) -> None:
        """RuntimeError if a number changed, a tensor (the learning rate) was replaced, or other parameters learn."""
        options = self._options()
        for place, value in (self._seen | options).items():
            was, value = self._seen.get(place), options.get(place)
            if value is not was and (isinstance(value, Tensor) or value != was):
                raise RuntimeError(
                    f"{place[1]} of parameter group {place[0]} was {was} when the step was captured and is {value} "
                    "now: write into a tensor (group['lr'].fill_(...)), give a schedule cycle_momentum=False, or call "
                    "step.release() to capture again"
                )
        if self._which_learn() != self._learning:
            raise RuntimeError("other parameters learn than when the step was captured: call step.release()")

    def _which_learn(self) -> list[bool]:
        return [param.requires_grad for group in self._optimizer.param_groups for param in group["params"]]

    def _options(self) -> dict[tuple[int, str], object]:
        groups, others = enumerate(self._optimizer.param_groups), ("params", "initial_lr", "param_names")
        return {(at, name): value for at, group in groups for name, value in group.items() if name not in others}


def can_skip(optimizer: Optimizer) -> bool:
    """Whether a flag on the device can make it skip an update, as torch's fused optimizers."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))
