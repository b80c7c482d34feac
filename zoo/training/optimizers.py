"""AdamW that updates large parameters at the memory's rate."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from zoo.ops.common import KERNEL_DTYPES, triton_runs_on
from zoo.ops.opaque import launcher

# Least numbers of a launch: its beginning and end are little of it then. On an H200 ResNet-50's step took longer with
# twice as many, since torch's launch for the rest does.
LARGE = 1 << 19
# Parameters of a launch: the kernel has pointers for as many.
TOGETHER = 8
# Least numbers of a parameter in it: of smaller ones no launch holds LARGE, and the host looks no further at them.
SMALLEST = LARGE // TOGETHER
# Bytes that a thread reads at once, if what it reads begins at a multiple of them.
_VECTOR = 16


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
        params, grads, averages, squares, greatest, counts = tensors
        scale, skip = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        launches = self._launches(group, tensors, scale, skip)
        if launches:
            taken = {index for launch in launches for index in launch}
            own_counts = [counts[index] for index in sorted(taken)]
            torch._foreach_add_(own_counts, 1)
            for launch in launches:
                own = [[held[index] for index in launch] for held in (params, grads, averages, squares, counts)]
                _launch(group, own, scale, skip)
            if skip is not None:
                torch._foreach_sub_(own_counts, [skip] * len(own_counts))
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
    def _launches(
        group: dict[str, Any], tensors: list[list[Tensor]], scale: Tensor | None, skip: Tensor | None
    ) -> list[list[int]]:
        """Which parameters of a group the kernel takes, those of a launch together."""
        if group["amsgrad"] or any(isinstance(beta, Tensor) for beta in group["betas"]):
            return []
        rate = None if _is_on_host(group["lr"]) else group["lr"]
        params, grads, averages, squares, _, counts = tensors
        alike: dict[Any, list[int]] = {}
        for index, each in enumerate(zip(params, grads, averages, squares, strict=True)):
            if _fits(*each) and _are_numbers_on(params[index].device, counts[index]):
                # Among others, one that is not aligned would have them read a number at a time too, by a kernel
                # compiled for the place that it has there. Alone it is one more kernel, if it is large.
                kind = _kind(*each, counts[index]) if _are_aligned(*each) else index
                alike.setdefault(kind, []).append(index)
        found = []
        for same in alike.values():
            first = same[0]
            if _are_numbers_on(params[first].device, rate, scale, skip):
                several_dtypes = not _are_of_one_dtype(*(held[first] for held in tensors[:4]))
                launches = (same[start : start + TOGETHER] for start in range(0, len(same), TOGETHER))
                found += [each for each in launches if several_dtypes or len(each) * params[first].numel() >= LARGE]
        return found


def _refuse_other_than_fused(foreach: bool | None, fused: bool | None) -> None:
    if foreach or fused is False:
        raise ValueError(
            f"foreach is {foreach} and fused is {fused}, so it is not to be fused: for another than fused, "
            "torch.optim.AdamW"
        )


def _is_on_host(rate: Tensor | float) -> bool:
    return not isinstance(rate, Tensor) or rate.device.type == "cpu"


def _launch(group: dict[str, Any], tensors: list[list[Tensor]], scale: Tensor | None, skip: Tensor | None) -> None:
    params, grads, averages, squares, counts = tensors
    # To the kernel a whole number would be of another type.
    rate = float(group["lr"]) if _is_on_host(group["lr"]) else group["lr"]
    launcher("zoo.training.kernels.adamw", "adamw", params[0])(
        params, grads, averages, squares, counts, rate, scale, skip,
        group["betas"], float(group["eps"]), float(group["weight_decay"]), group["maximize"],
    )  # fmt: skip
    # As an operator of torch would: a backward that still needs the weights as they were says so.
    torch.autograd.graph.increment_version([*params, *averages, *squares])


def _kind(param: Tensor, grad: Tensor, average: Tensor, square: Tensor, count: Tensor) -> tuple[Any, ...]:
    """What parameters of one launch have in common."""
    return param.device, param.numel(), param.dtype, grad.dtype, average.dtype, square.dtype, count.dtype


def _fits(param: Tensor, grad: Tensor, average: Tensor, square: Tensor) -> bool:
    """Whether the kernel takes a parameter: no small one, or one of several dtypes, which torch's takes none of."""
    # Most parameters of a model are small, and the host looks at all of them in every step.
    if (size := param.numel()) < SMALLEST and _are_of_one_dtype(param, grad, average, square):
        return False
    tensors = param, grad, average, square
    if not size or not triton_runs_on(param.device) or not {each.dtype for each in tensors}.issubset(KERNEL_DTYPES):
        return False
    # Not a tensor that is in parts, or made of others.
    plain = type(param) in (Tensor, nn.Parameter) and type(grad) is type(average) is type(square) is Tensor
    dense = param.is_contiguous() or (param.dim() == 4 and param.is_contiguous(memory_format=torch.channels_last))
    stride, shape = param.stride(), param.shape
    return plain and dense and all(each.stride() == stride and each.shape == shape for each in tensors[1:])


def _are_of_one_dtype(param: Tensor, grad: Tensor, average: Tensor, square: Tensor) -> bool:
    return param.dtype == grad.dtype == average.dtype == square.dtype


def _are_aligned(param: Tensor, grad: Tensor, average: Tensor, square: Tensor) -> bool:
    return not (param.data_ptr() | grad.data_ptr() | average.data_ptr() | square.data_ptr()) % _VECTOR


def _are_numbers_on(device: torch.device, *values: Tensor | float | None) -> bool:
    """Whether those of these that are tensors hold one number each, on this device."""
    return all(not isinstance(each, Tensor) or (each.device == device and each.numel() == 1) for each in values)
