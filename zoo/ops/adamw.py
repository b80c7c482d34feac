"""AdamW's update: large parameters by a kernel of our own, all others by torch's fused one.

An optimizer is not compiled: what is launched here is launched by eager code.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw as fused_adamw

from zoo.ops import triton as kernels
from zoo.ops.common import kernels_run

# Least numbers of a launch: its beginning and end are little of it then. On an H200 ResNet-50's step took longer with
# twice as many, since torch's launch for the rest does.
LARGE = 1 << 19
# Parameters of a launch: the kernel has pointers for as many.
TOGETHER = 8
# Least numbers of a parameter in it: of smaller ones no launch holds LARGE, and the host looks no further at them.
SMALLEST = LARGE // TOGETHER
# Bytes that a thread reads at once, if what it reads begins at a multiple of them.
_VECTOR = 16


def adamw(
    group: dict[str, Any], tensors: list[list[Tensor]], scale: Tensor | None, skip: Tensor | None, *, has_complex: bool
) -> None:
    """Update the parameters of a group in place; ``group`` holds the options of ``torch.optim.AdamW``.

    Tensors are parameters, gradients, averages of gradients and of their squares, the greatest of these, which only
    ``amsgrad`` has, and steps so far. Gradients are divided by ``scale``, on the device; nothing is updated where
    ``skip``, on the device, is 1.
    """
    params, grads, averages, squares, greatest, counts = tensors
    launches = _launches(group, tensors, scale, skip)
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
        fused_adamw(
            params, grads, averages, squares, greatest, counts,
            fused=True, capturable=group["capturable"], differentiable=group["differentiable"],
            grad_scale=scale, found_inf=skip, has_complex=has_complex, amsgrad=group["amsgrad"],
            beta1=group["betas"][0], beta2=group["betas"][1], lr=group["lr"], eps=group["eps"],
            weight_decay=group["weight_decay"], maximize=group["maximize"],
        )  # fmt: skip


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


def _is_on_host(rate: Tensor | float) -> bool:
    return not isinstance(rate, Tensor) or rate.device.type == "cpu"


def _launch(group: dict[str, Any], tensors: list[list[Tensor]], scale: Tensor | None, skip: Tensor | None) -> None:
    params, grads, averages, squares, counts = tensors
    # To the kernel a whole number would be of another type.
    rate = float(group["lr"]) if _is_on_host(group["lr"]) else group["lr"]
    kernels.adamw.adamw(
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
    if not size or not kernels_run(*tensors):
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
