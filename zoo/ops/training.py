"""Operators of training: AdamW's update, cross entropy with its gradient, a check for NaN, products in float8.

Eager code launches the kernels of the first three. The float8 products are part of a model's compiled blocks.

Shape legend: n rows, V classes.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.adamw import adamw as fused_adamw

from zoo.engine.autograd import differentiable_once
from zoo.ops import triton as kernels
from zoo.ops.common import compute_dtype, converts_float8, kernels_run

# Minimum elements of a launch, so that its start and end are a small part of its time. On an H200 twice as many made
# ResNet-50's step slower, since torch's launch for the other parameters took longer.
LARGE = 1 << 19
# Maximum parameters of a launch: the kernel takes this many pointers per state tensor.
TOGETHER = 8
# Minimum elements of a parameter in a launch. TOGETHER smaller parameters have fewer than LARGE; the host skips them.
SMALLEST = LARGE // TOGETHER
# Bytes of a vector load, which needs an address that is a multiple of them.
_VECTOR = 16


def adamw(group: dict[str, Any], tensors: list[list[Tensor]], scale: Tensor | None, skip: Tensor | None) -> None:
    """Update the parameters of a group in place: large ones by the zoo's kernel, all others by torch's fused kernel.

    ``group`` holds the options of ``torch.optim.AdamW``. The tensors are parameters, gradients, averages of gradients
    and of squared gradients, maxima of the latter (``amsgrad`` only), and step counts. Gradients are divided by the
    device scalar ``scale``. If the device scalar ``skip`` is 1, nothing is updated.
    """
    launches = _launches(group, tensors, scale, skip)
    if launches:
        taken = {index for launch in launches for index in launch}
        own_counts = [tensors[5][index] for index in sorted(taken)]
        torch._foreach_add_(own_counts, 1)
        # An int would compile the kernel again.
        rate = float(group["lr"]) if _is_on_host(group["lr"]) else group["lr"]
        options = group["betas"], float(group["eps"]), float(group["weight_decay"]), group["maximize"]
        for launch in launches:
            own = [[tensors[kind][index] for index in launch] for kind in (0, 1, 2, 3, 5)]
            kernels.training.adamw(*own, rate, scale, skip, *options)
            # As in torch's operators: a backward that still needs the old weights raises an error.
            torch.autograd.graph.increment_version([*own[0], *own[2], *own[3]])
        if skip is not None:
            torch._foreach_sub_(own_counts, [skip] * len(own_counts))
        tensors = [[each for index, each in enumerate(held) if index not in taken] for held in tensors]
    params, grads, averages, squares, greatest, counts = tensors
    if params:
        fused_adamw(
            params, grads, averages, squares, greatest, counts, fused=True, differentiable=group["differentiable"],
            grad_scale=scale, found_inf=skip, amsgrad=group["amsgrad"], beta1=group["betas"][0],
            beta2=group["betas"][1], lr=group["lr"], eps=group["eps"], weight_decay=group["weight_decay"],
            maximize=group["maximize"],
        )  # fmt: skip


def _launches(
    group: dict[str, Any], tensors: list[list[Tensor]], scale: Tensor | None, skip: Tensor | None
) -> list[list[int]]:
    if group["amsgrad"] or any(isinstance(beta, Tensor) for beta in group["betas"]):
        return []
    rate = None if _is_on_host(group["lr"]) else group["lr"]
    params, grads, averages, squares, _, counts = tensors
    if sum(map(Tensor.numel, params)) < LARGE:
        return []
    alike: dict[Any, list[int]] = {}
    for index, each in enumerate(zip(params, grads, averages, squares, strict=True)):
        param, count = params[index], counts[index]
        if _fits(*each) and _are_numbers_on(param.device, count):
            # A misaligned tensor would disable vector loads for its whole launch, and compile a kernel for its
            # position among the arguments. So a large misaligned parameter gets a launch of its own.
            aligned = all(tensor.data_ptr() % _VECTOR == 0 for tensor in each)
            kind = param.device, param.numel(), param.dtype, count.dtype
            alike.setdefault(kind if aligned else index, []).append(index)
    found = []
    for same in alike.values():
        first = params[same[0]]
        if kernels_run(first) and _are_numbers_on(first.device, rate, scale, skip):
            launches = (same[start : start + TOGETHER] for start in range(0, len(same), TOGETHER))
            found += [each for each in launches if len(each) * first.numel() >= LARGE]
    return found


def _is_on_host(rate: Tensor | float) -> bool:
    return not isinstance(rate, Tensor) or rate.device.type == "cpu"


def _fits(param: Tensor, *state: Tensor) -> bool:
    """Whether the kernel takes a parameter: it is large, and its gradient and state are alike in dtype and layout."""
    # This check comes first: most parameters are small, and the host checks all of them in every step.
    if param.numel() < SMALLEST:
        return False
    # Excludes sharded tensors and other tensor subclasses.
    plain = type(param) in (Tensor, nn.Parameter) and all(type(each) is Tensor for each in state)
    dense = param.is_contiguous() or (param.dim() == 4 and param.is_contiguous(memory_format=torch.channels_last))
    like = param.dtype, param.shape, param.stride()
    return plain and dense and all((each.dtype, each.shape, each.stride()) == like for each in state)


def _are_numbers_on(device: torch.device, *values: Tensor | float | None) -> bool:
    return all(not isinstance(each, Tensor) or (each.device == device and each.numel() == 1) for each in values)


@torch.no_grad()
def judge_step(
    loss: Tensor, norm: Tensor | None, count: Tensor, last: Tensor, last_loss: Tensor, skip: Tensor
) -> None:  # fmt: skip
    """Count a training step in ``count`` int64, and set ``skip`` to 1 unless its loss, and norm, are finite.

    ``last`` int64 and ``last_loss`` keep the step's number and loss, unless ``skip`` was already 1. All are scalars on
    one device, float32 unless stated otherwise.
    """
    if kernels_run(loss, norm):
        kernels.training.judge_step(loss, norm, count, last, last_loss, skip)
        return
    count += 1
    found = skip != 0
    torch.where(found, last, count, out=last)
    torch.where(found, last_loss, loss, out=last_loss)
    zero = loss - loss if norm is None else (loss - loss) + (norm - norm)
    skip.copy_(found | (zero != 0))  # infinity minus itself is NaN


# The label of a row without a loss.
IGNORED = -100


def cross_entropy_rows(logits: Tensor, labels: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Losses of rows float32 [n], and the gradient [n, V] of their sum times ``scale``; computed in float32.

    Autograd does not differentiate it. The zoo's kernel overwrites logits [n, V] with the gradient, so the caller must
    not need them again. Rows with the label ``IGNORED`` [n] int64 have no loss. In the kernel a label that is not a
    class makes its row's loss and gradient NaN. ``scale`` is a float32 scalar on the device.
    """
    if kernels_run(logits) and logits.is_contiguous():
        return kernels.training.cross_entropy_rows_(logits, labels.contiguous(), scale, IGNORED), logits
    seen = labels != IGNORED
    index = torch.where(seen, labels, 0)[:, None]
    x = logits.float()
    total = torch.logsumexp(x, dim=-1, keepdim=True)
    losses = torch.where(seen, (total - x.gather(-1, index))[:, 0], 0.0)
    hit = torch.arange(logits.shape[-1], device=logits.device) == index
    grad = torch.where(seen[:, None], ((x - total).exp() - hit.to(x.dtype)) * scale, 0.0)
    return losses, grad.to(logits.dtype)


def scale_(x: Tensor, factor: Tensor) -> None:
    """Multiply in place by a scalar on the device, in float32. For a factor of 1 the kernel does nothing."""
    if kernels_run(x) and x.is_contiguous():
        kernels.training.scale_(x, factor)
    else:
        # One dimension, so that half precision is multiplied in float32 instead of by a rounded factor.
        x.mul_(factor.reshape(1))


FLOAT8 = torch.float8_e4m3fn
# Sizes that torch's product of float8 takes are multiples of this.
MULTIPLE = 16


class Rounded(NamedTuple):
    """A matrix [n, K] in float8: each row's numbers times the row's scale."""

    numbers: Tensor  # [n, K] float8_e4m3fn
    scale: Tensor  # [n, 1] float32


def float8_linear(x: Tensor, weight: Tensor) -> Tensor:
    """``F.linear`` of operands rounded to float8, in the backward too: x [..., K], weight [N, K] -> [..., N].

    Each row of the left operand and each column of the right one has a scale, which maps its greatest magnitude to the
    maximum of float8, as in torchao's rowwise recipe. Torch multiplies float8 for bfloat16 and widths K and N that are
    multiples of 16, on NVIDIA GPUs of compute capability 8.9 or newer. Otherwise the rounded operands are multiplied
    in float32.
    """
    if not x.numel():
        return F.linear(x, weight)
    dtype = compute_dtype(x)
    x = x if x.dtype == dtype else x.to(dtype)
    if not torch.is_grad_enabled():
        # Under no_grad a Function is still told that its inputs need gradients, and would round columns.
        x, weight = x.detach(), weight.detach()
    out: Tensor = _Float8Linear.apply(x.flatten(0, -2), weight, dtype)
    return out.view(*x.shape[:-1], weight.shape[0])


class _Float8Linear(torch.autograd.Function):
    """Activations are saved in float8."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        rows, columns = _round(x, _magnitudes(x), True, ctx.needs_input_grad[1])
        of_weight = _magnitudes(weight)
        weight_rows, _ = _round(weight, of_weight, True, False)
        ctx.save_for_backward(*(columns or (None, None)), weight, of_weight)
        ctx.dtype = dtype
        return _multiply(rows, weight_rows, dtype, fast=True)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        numbers, scale, weight, of_weight = ctx.saved_tensors
        grad = grad.contiguous()
        rows, columns = _round(grad, _magnitudes(grad), *ctx.needs_input_grad[:2])
        grad_x = grad_weight = None
        # Fast sums over a layer's width add a twentieth of the rounding error. Sums over tokens may be much longer.
        if ctx.needs_input_grad[0]:
            grad_x = _multiply(rows, _round(weight, of_weight, False, True)[1], ctx.dtype, fast=True)
        if ctx.needs_input_grad[1]:
            grad_weight = _multiply(columns, Rounded(numbers, scale), ctx.dtype, fast=False).to(weight.dtype)
        return grad_x, grad_weight, None


def _multiply(a: Rounded, b: Rounded, dtype: torch.dtype, fast: bool) -> Tensor:
    """The product of a [m, K] and b [n, K], transposed: [m, n]. On Hopper ``fast`` sums have 14 bits (DeepSeek-V3)."""
    device, sizes = a.numbers.device, (a.numbers.shape[1], b.numbers.shape[0])
    fits = sizes[0] % MULTIPLE == sizes[1] % MULTIPLE == 0 and dtype == torch.bfloat16
    if fits and device.type == "cuda" and torch.version.hip is None and converts_float8(device):
        scales = a.scale, b.scale.t()
        return torch._scaled_mm(a.numbers, b.numbers.t(), *scales, out_dtype=dtype, use_fast_accum=fast)
    # Scaled afterwards: half precision, to which autocast rounds the operands, represents float8's numbers exactly.
    # The kernel pads a transpose's columns.
    numbers = b.numbers[:, : a.numbers.shape[1]]
    return (a.numbers.float() @ numbers.float().t() * a.scale * b.scale.t()).to(dtype)


def _magnitudes(x: Tensor) -> Tensor:
    """The greatest magnitudes of rows and columns of x, which the kernel of ``_round`` reads; empty if none runs."""
    return kernels.training.magnitudes(x) if kernels_run(x) else x.new_empty(0)


def _round(x: Tensor, greatest: Tensor, by_row: bool, by_column: bool) -> tuple[Any, Any]:
    """``Rounded`` of x [n, K], and of its transpose [K, n], perhaps padded with zeros. None if not asked for."""
    if kernels_run(x):
        return kernels.training.rounded(x, greatest, by_row, by_column)
    return _rounded(x) if by_row else None, _rounded(x.t()) if by_column else None


def _rounded(x: Tensor) -> Rounded:
    # The bound keeps the inverse finite. It is no global float, which Dynamo makes a symbol with dynamic=True.
    greatest = x.abs().amax(1, keepdim=True).float().clamp_min(1e-30)
    most = torch.finfo(FLOAT8).max
    return Rounded((x.float() * (greatest.reciprocal() * most)).to(FLOAT8).contiguous(), greatest * (1 / most))
