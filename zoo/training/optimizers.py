"""AdamW that updates large parameters at the memory's rate."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from zoo import ahead
from zoo.operators import KERNEL_DTYPES, launcher, triton_runs_on

# Numbers from which on a parameter has a launch of its own: its beginning and end are little of it then.
LARGE = 1 << 21


class AdamW(torch.optim.AdamW):
    """``torch.optim.AdamW(..., fused=True)`` that updates large parameters by a kernel of its own.

    It has the same options, state and numbers but for rounding, and states of either load into the other. Parameters of
    fewer than two million numbers, those that do not lie without gaps, ``amsgrad``, and all where Triton does not run
    are left to torch's; not so a parameter whose gradient or averages are of another dtype, which torch's refuses.
    Nothing waits for the device; for a CUDA graph, ``capturable=True`` and ``lr`` a tensor on the device, as with
    torch's.

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

    def begin_kernels(self, skip: Tensor | None = None) -> None:
        """Begin to compile what the first step will launch, in threads, while the model is still being compiled.

        Args:
            skip: The flag on the device that will be there as ``found_inf``, or None.
        """
        if not ahead.ENABLED:
            return
        begun = set()
        for group in self.param_groups:
            for param in group["params"]:
                kind = param.dtype, param.shape, param.stride()
                if kind in begun or not param.requires_grad or param.is_complex():
                    continue
                begun.add(kind)
                self._begin_kernel(group, param, skip)

    def _begin_kernel(self, group: dict[str, Any], param: Tensor, skip: Tensor | None) -> None:
        plain, count = param.detach(), torch.zeros((), device=param.device)
        # The gradient and the averages will be like the parameter.
        tensors = param, plain, plain, plain, count
        if self._for_the_kernel(group, [[each] for each in (*tensors[:4], count, count)], None, skip):
            with suppress(Exception):  # the launch compiles what was not begun, and says what is wrong with it
                ahead.run_without_data(functools.partial(_launch, group), ahead.describe((*tensors, None, skip)))

    def _update(self, group: dict[str, Any]) -> None:
        tensors: list[list[Tensor]] = [[] for _ in range(6)]
        has_complex = self._init_group(group, *tensors)  # type: ignore[no-untyped-call]
        params, grads, averages, squares, greatest, counts = tensors
        scale, skip = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        ours = self._for_the_kernel(group, tensors, scale, skip)
        if ours:
            own_counts = [counts[index] for index in ours]
            torch._foreach_add_(own_counts, 1)
            for index in ours:
                each = params[index], grads[index], averages[index], squares[index], counts[index]
                _launch(group, *each, scale, skip)
            if skip is not None:
                torch._foreach_sub_(own_counts, [skip] * len(ours))
            taken = set(ours)
            params, grads, averages, squares, greatest, counts = (
                [each for index, each in enumerate(held) if index not in taken] for held in tensors
            )
        if params:
            adamw(
                params, grads, averages, squares, greatest, counts,
                fused=True, capturable=group["capturable"], differentiable=group["differentiable"],
                grad_scale=scale, found_inf=skip, has_complex=has_complex, amsgrad=group["amsgrad"],
                beta1=group["betas"][0], beta2=group["betas"][1], lr=group["lr"], eps=group["eps"],
                weight_decay=group["weight_decay"], maximize=group["maximize"],
            )  # fmt: skip

    @staticmethod
    def _for_the_kernel(
        group: dict[str, Any], tensors: list[list[Tensor]], scale: Tensor | None, skip: Tensor | None
    ) -> list[int]:
        """Which parameters of a group the kernel takes."""
        if group["amsgrad"] or any(isinstance(beta, Tensor) for beta in group["betas"]):
            return []
        rate = None if _is_on_host(group["lr"]) else group["lr"]
        params, grads, averages, squares, _, counts = tensors
        return [
            index
            for index, each in enumerate(zip(params, grads, averages, squares, strict=True))
            if _fits(*each) and _are_numbers_on(params[index].device, counts[index], rate, scale, skip)
        ]


def _refuse_other_than_fused(foreach: bool | None, fused: bool | None) -> None:
    if foreach or fused is False:
        raise ValueError(
            f"foreach is {foreach} and fused is {fused}, so it is not to be fused: for another than fused, "
            "torch.optim.AdamW"
        )


def _is_on_host(rate: Tensor | float) -> bool:
    return not isinstance(rate, Tensor) or rate.device.type == "cpu"


def _launch(
    group: dict[str, Any],
    param: Tensor,
    grad: Tensor,
    average: Tensor,
    square: Tensor,
    count: Tensor,
    scale: Tensor | None,
    skip: Tensor | None,
) -> None:
    # To the kernel a whole number would be of another type.
    rate = float(group["lr"]) if _is_on_host(group["lr"]) else group["lr"]
    launcher("zoo.training.kernels.adamw", "adamw", param)(
        param, grad, average, square, count, rate, scale, skip,
        group["betas"], float(group["eps"]), float(group["weight_decay"]), group["maximize"],
    )  # fmt: skip
    # As an operator of torch would: a backward that still needs the weights as they were says so.
    torch.autograd.graph.increment_version((param, average, square))


def _fits(param: Tensor, grad: Tensor, average: Tensor, square: Tensor) -> bool:
    """Whether the kernel takes a parameter: a large one, or one of several dtypes, which torch's takes none of."""
    tensors = param, grad, average, square
    dtypes = {tensor.dtype for tensor in tensors}
    if not param.numel() or (param.numel() < LARGE and len(dtypes) == 1) or not triton_runs_on(param.device):
        return False
    # Not a tensor that is in parts, or made of others.
    plain = type(param) in (Tensor, nn.Parameter) and all(type(tensor) is Tensor for tensor in tensors[1:])
    dense = param.is_contiguous() or (param.dim() == 4 and param.is_contiguous(memory_format=torch.channels_last))
    alike = all(tensor.stride() == param.stride() and tensor.shape == param.shape for tensor in tensors)
    return plain and dense and alike and dtypes.issubset(KERNEL_DTYPES)


def _are_numbers_on(device: torch.device, *values: Tensor | float | None) -> bool:
    """Whether those of these that are tensors hold one number each, on this device."""
    return all(not isinstance(each, Tensor) or (each.device == device and each.numel() == 1) for each in values)
