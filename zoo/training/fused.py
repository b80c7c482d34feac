"""Parts of a training step with kernels of their own: chunked cross entropy, AdamW, and linear layers in float8.

Shapes: N rows (tokens), n rows of a chunk, C width, V classes (the vocabulary).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from zoo import validate
from zoo.engine.autograd import differentiable_once
from zoo.engine.call import outermost_call
from zoo.engine.region import Region
from zoo.ops.common import is_sharded, to_local
from zoo.ops.training import IGNORED, adamw, cross_entropy_rows, float8_linear, scale_


class CrossEntropyRows(nn.Module):
    """``cross_entropy_rows`` as a region."""

    def forward(self, logits: Tensor, labels: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        """Float32 losses [n] of ``logits`` [n, V], and the gradient of their sum times ``scale``."""
        return cross_entropy_rows(logits, labels, scale)


class LinearCrossEntropy(nn.Module):
    """Mean cross entropy of ``F.linear(x, weight)``, some rows at a time, forward and backward in one go.

    The gradients are computed along with the loss, so logits exist for one ``chunk`` of rows only: for 8,192 tokens and
    a vocabulary of 128,256 a chunk of 2,048 takes 0.5 GB in bfloat16, where a loss over all logits takes 10 GB. (After
    Liger's fused linear cross entropy; torch's, from 2.13 on, breaks compiled graphs.) A larger chunk is a little
    faster, and the gradient of a half-precision weight, summed chunk by chunk, a little more exact.

    Rows with the label -100 are ignored. If all are, the mean is 0, where torch's is NaN.

    Its region is the work between the two products: ``zoo.compile_regions(loss)``.
    """

    regions: ClassVar[tuple[Region, ...]] = (
        Region(CrossEntropyRows, graphs=1, why="two passes over the logits of a chunk instead of about ten"),
    )

    def __init__(self, chunk: int = 2048) -> None:
        super().__init__()
        validate.count("chunk", chunk)
        self.chunk = chunk
        self.rows = CrossEntropyRows()

    def forward(self, x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        """The mean over rows that are not ignored, 0 if all are: a float32 scalar that can be differentiated once.

        Args:
            x: [..., C], what goes into the last product.
            weight: [V, C].
            labels: [...] int64 below V, or -100 for rows that have no loss.

        Raises:
            TypeError, ValueError: If shapes or dtypes do not fit or, checked only on a CPU, a label is not a class.
        """
        _check(x, weight, labels)
        if not torch.is_grad_enabled():
            # Under no_grad a Function is still told that its inputs need gradients.
            x, weight = x.detach(), weight.detach()
        device = x.device.type
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            x, weight = x.to(dtype), weight.to(dtype)
        return _Chunked.apply(x.flatten(0, -2), weight, labels.flatten(), self.rows, self.chunk)


class _Chunked(torch.autograd.Function):
    """The forward computes the loss and the gradients, the backward only scales these."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, labels: Tensor, rows: nn.Module, chunk: int) -> Tensor:
        share = (labels != IGNORED).sum().clamp_min(1).float().reciprocal()
        # Gradients of a mean over many rows underflow in float16: there the backward divides the sum.
        later = x.dtype == torch.float16
        scale = torch.ones_like(share) if later else share
        losses: list[Tensor] = []
        grad_x = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        grad_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        with torch.autocast(x.device.type, enabled=False):
            for start, repeated, part_labels in _chunks(labels, chunk):
                part_losses, grad = rows(x[start : start + len(part_labels)] @ weight.t(), part_labels, scale)
                losses.append(part_losses)
                part, grad = slice(start + repeated, start + len(part_labels)), grad[repeated:]
                # With beta=0 the uninitialised memory is not read.
                if grad_x is not None:
                    grad_x[part].addmm_(grad, weight, beta=0)
                if grad_weight is not None:
                    grad_weight.addmm_(grad.t(), x[part], beta=0 if start == 0 else 1)
        ctx.grads, ctx.share = (grad_x, grad_weight), share if later else None
        # Summed outside the region, which is then one kernel of ours and needs no generated code.
        return torch.cat(losses).sum() * share

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.grads is None:
            raise RuntimeError("LinearCrossEntropy frees its gradients in the backward; compute the loss again")
        # The scale is 1 if the loss itself is differentiated, for which scale_ does nothing.
        scale = grad if ctx.share is None else grad * ctx.share
        for held in ctx.grads:
            if held is not None:
                scale_(held, scale)
        scaled, ctx.grads = ctx.grads, None
        return (*scaled, None, None, None)


def _chunks(labels: Tensor, size: int) -> list[tuple[int, int, Tensor]]:
    """First row of each chunk, number of rows that repeat the chunk before and are ignored, and labels."""
    # All chunks have the size that the region is compiled for, so the last one may overlap the chunk before.
    rows, size = len(labels), min(size, len(labels))
    found = [(start, 0, labels[start : start + size]) for start in range(0, rows - size + 1, size)]
    if left := rows % size:
        repeated = torch.arange(size, device=labels.device) < size - left
        found.append((rows - size, size - left, torch.where(repeated, IGNORED, labels[rows - size :])))
    return found


def _check(x: Tensor, weight: Tensor, labels: Tensor) -> None:
    if not isinstance(weight, Tensor):
        raise TypeError(f"weight is a {type(weight).__name__}, expected a tensor [V, C]: of a layer pass its .weight")
    if weight.dim() != 2 or x.dim() < 2 or x.shape[-1] != weight.shape[1]:
        raise ValueError(f"x {list(x.shape)} and weight {list(weight.shape)} do not fit; expected [..., C] and [V, C]")
    if labels.shape != x.shape[:-1]:
        raise ValueError(f"labels are {list(labels.shape)}, expected one for each row of x: {list(x.shape[:-1])}")
    validate.tensor("labels", labels, kinds=(torch.int64,))
    if x.dtype != weight.dtype and not torch.is_autocast_enabled(x.device.type):
        raise TypeError(f"x is {x.dtype} and weight {weight.dtype}; convert one, or run under autocast")
    if not labels.numel():
        raise ValueError("there are no rows: the mean of nothing is no loss")
    hint = f", or {IGNORED} for a row without a loss"
    validate.in_range("labels", labels, len(weight), "the number of classes", hint, ignored=IGNORED)


class AdamW(torch.optim.AdamW):
    """``torch.optim.AdamW(..., fused=True)`` that updates large parameters by a kernel of the zoo.

    Options and state are torch's, results equal torch's but for rounding, and each loads the other's state. A launch
    takes parameters with at least half a million numbers together. Torch's kernel updates all other parameters, those
    of groups with ``amsgrad``, and all if Triton does not run. The host never waits for the device. A CUDA graph needs
    ``capturable=True`` and ``lr`` as a tensor on the device, as with torch's. ValueError if ``fused`` is False,
    RuntimeError if ``foreach`` or ``differentiable`` is True.
    """

    # GradScaler and TrainingStep set a flag on the device, for which it skips the update.
    _step_supports_amp_scaling = True

    def __init__(
        self, params: Iterable[Any], lr: float | Tensor = 1e-3, *args: Any, fused: bool | None = True, **options: Any
    ) -> None:
        if fused is False:
            raise ValueError("fused is False, but this AdamW is fused: leave it out, or take torch.optim.AdamW")
        super().__init__(params, lr, *args, fused=True, **options)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as torch's does; ValueError if its ``fused`` is False or its ``foreach`` True."""
        if param_group.get("fused") is False or param_group.get("foreach"):
            raise ValueError("a group has fused=False or foreach=True, but this AdamW is fused: see torch.optim.AdamW")
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
            self._init_group(group, *tensors)  # type: ignore[no-untyped-call]
            # Each number is updated alone, so each process updates those that it holds.
            if any(map(is_sharded, tensors[0])):
                tensors = [[to_local(each) for each in held] for held in tensors]
            scale, skip = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
            adamw(group, tensors, scale, skip)
        return loss


class Float8Linear(nn.Linear):
    """``nn.Linear`` whose products are of float8, in the forward and in the backward; see ``float8_linear``."""

    def forward(self, x: Tensor) -> Tensor:
        """X [..., C] -> [..., N]."""
        out = float8_linear(x, self.weight)
        return out if self.bias is None else out + self.bias.to(out.dtype)


def float8_products(model: nn.Module, cls: type[nn.Module]) -> nn.Module:
    """Train the linear layers in blocks of a class with products of float8 (e4m3); returns the same model.

    Weights, their names and the optimizer stay as they are: operands are rounded at each product, each row by a scale
    of its own. Torch multiplies float8 on NVIDIA GPUs of compute capability 8.9 or newer (Ada, Hopper), in bfloat16
    models or under autocast, if a layer's widths are multiples of 16. Otherwise the rounded operands are multiplied in
    float32, which is slow and gives the same numbers. Call this before ``zoo.compile_regions``.

    Args:
        model: A model of any library.
        cls: The exact class of the blocks. What is outside of them, mostly embedding and output, keeps its products.

    Raises:
        TypeError: If ``cls`` is no class.
        ValueError: If the model is compiled or captured, or no block of the class has an ``nn.Linear``.
    """
    if not isinstance(cls, type):
        raise TypeError(f"cls is {cls!r}, expected the class of the blocks")
    if any(outermost_call(module) is not None for module in model.modules()):
        order = "call float8_products before zoo.compile_regions and zoo.cuda_graph"
        raise ValueError(f"the model is compiled or captured: zoo.uncompile(model) undoes it; {order}")
    blocks = [module for module in model.modules() if type(module) is cls]
    linears = [each for block in blocks for each in block.modules() if type(each) is nn.Linear]
    if not linears:
        classes = sorted({type(module).__name__ for module in model.modules()})
        what = f"has no {cls.__name__}" if not blocks else f"has no nn.Linear in its {cls.__name__}"
        raise ValueError(f"the model {what}; its modules are of {', '.join(classes)}")
    for linear in linears:
        linear.__class__ = Float8Linear  # parameters, hooks and whatever refers to the layer stay
    return model
