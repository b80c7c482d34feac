"""AdamW that updates large parameters at the memory's rate."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from zoo.ops.adamw import adamw


class AdamW(torch.optim.AdamW):
    """``torch.optim.AdamW(..., fused=True)`` that updates large parameters by a kernel of its own.

    It has the same options, state and numbers but for rounding, and states of either load into the other. A launch
    takes one parameter, or up to eight of one dtype and as many numbers, whatever their shapes, that begin at multiples
    of 16 bytes; in all half a million numbers or more. All others, those that do not lie without gaps, ``amsgrad``, and
    all where Triton does not run are left to torch's; not so a parameter whose gradient or averages are of another
    dtype, which torch's refuses. Nothing waits for the device; for a CUDA graph, ``capturable=True`` and ``lr`` a
    tensor on the device, as with torch's.

    Args:
        params: Parameters, or groups of them.
        lr: A number, or a tensor of one.
        betas: Of the averages of gradients and of their squares.
        eps: Added to the root of the second.
        weight_decay: Times the learning rate, taken off the weights.
        amsgrad: As torch's.
        maximize: As torch's.
        foreach: Not ``True``, as for any fused optimizer.
        capturable: Whether a CUDA graph may hold its step.
        differentiable: Not ``True``, as for any fused optimizer.
        fused: Always.

    Raises:
        ValueError: If it is not to be fused.
        RuntimeError: If it is to be differentiable.
    """

    # GradScaler and TrainingStep hand it what tells on the device whether to skip.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = True,
    ) -> None:
        _refuse_other_than_fused(foreach, fused)
        super().__init__(
            params, lr, betas, eps, weight_decay, amsgrad,
            maximize=maximize, capturable=capturable, differentiable=differentiable, fused=True,
        )  # fmt: skip

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as torch's does.

        Raises:
            ValueError: If it is not to be fused.
        """
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
        """Update all parameters that have a gradient.

        Args:
            closure: Computes the loss again and returns it, or None.

        Returns:
            What the closure returned, or None.
        """
        self._accelerator_graph_capture_health_check()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self._update(group)
        return loss

    def _update(self, group: dict[str, Any]) -> None:
        tensors: list[list[Tensor]] = [[] for _ in range(6)]
        has_complex = self._init_group(group, *tensors)  # type: ignore[no-untyped-call]
        scale, skip = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        adamw(group, tensors, scale, skip, has_complex=has_complex)


def _refuse_other_than_fused(foreach: bool | None, fused: bool | None) -> None:
    if foreach or fused is False:
        raise ValueError(
            f"foreach is {foreach} and fused is {fused}, so it is not to be fused: for another than fused, "
            "torch.optim.AdamW"
        )
