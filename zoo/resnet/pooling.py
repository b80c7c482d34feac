"""The end of the stem as operators: a Triton kernel on a GPU, torch's own operators elsewhere.

The compiler norms and activates in one kernel what it pools in another. For inference ours reads the images once, and
writes what is pooled alone. In training pooling is an operator of its own, whose gradient the compiler would gather
pixel by pixel.

Shape legend: N images, C channels, H height, W width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zoo.ops.opaque import OperatorLibrary, launcher
from zoo.resnet import fallback, norms

_LIBRARY = OperatorLibrary("zoo_resnet")


def _run(name: str, x: Tensor, *arguments: Any) -> Any:
    if x.dim() != 4:
        raise ValueError(f"x has shape {tuple(x.shape)}, expected images [N, C, H, W]")
    module = "max_pool" if name.startswith("max_pool") else "pool"
    kernel = norms.kernels_run(x)
    implementation = launcher(f"zoo.resnet.kernels.{module}", name, x) if kernel else getattr(fallback, name)
    return implementation(x, *arguments)


def _pooled_like(x: Tensor, *_: Any) -> Tensor:
    lines, columns = (x.shape[2] + 1) // 2, (x.shape[3] + 1) // 2
    return x.new_empty(x.shape[0], lines, columns, x.shape[1]).permute(0, 3, 1, 2)


@_LIBRARY.operator("(Tensor x, Tensor mean, Tensor variance, Tensor weight, Tensor bias, float eps) -> Tensor")
def norm_act_pool(x: Tensor, mean: Tensor, variance: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Norm, relu and the greatest of 3 × 3 pixels at a stride of 2, rounded once. Without gradients.

    Args:
        x: [N, C, H, W]; in channels_last it is read as it is.
        mean: [C].
        variance: [C].
        weight: [C].
        bias: [C].
        eps: Added to the variance.

    Returns:
        [N, C, ⌈H / 2⌉, ⌈W / 2⌉] in channels_last, in the dtype of ``x``; NaN where a window has one.

    Raises:
        ValueError: If x is not four-dimensional.
    """
    out: Tensor = _run("norm_act_pool", x, mean, variance, weight, bias, eps)
    return out


@_LIBRARY.operator("(Tensor x, Tensor bias) -> Tensor")
def bias_act_pool(x: Tensor, bias: Tensor) -> Tensor:
    """The same of x [N, C, H, W] and bias [C], without a norm."""
    out: Tensor = _run("bias_act_pool", x, bias)
    return out


for _name in ("norm_act_pool", "bias_act_pool"):
    _LIBRARY.fake(_name)(_pooled_like)
    _LIBRARY.no_gradient(_name, "use torch.nn.functional where one is wanted")


# --- with gradients ---


@_LIBRARY.operator("(Tensor x) -> (Tensor, Tensor)")
def max_pool(x: Tensor) -> tuple[Tensor, Tensor]:
    """The greatest of 3 × 3 pixels at a stride of 2, the first of equals, and which of the nine it is.

    Args:
        x: [N, C, H, W]; in channels_last it is read as it is.

    Returns:
        In the dtype of ``x``, NaN where a window has one, and uint8 below 9 in reading order; [N, C, ⌈H / 2⌉, ⌈W / 2⌉]
        in channels_last each. The second has no gradient.

    Raises:
        ValueError: If x is not four-dimensional.
    """
    out: tuple[Tensor, Tensor] = _run("max_pool", x)
    return out


@_LIBRARY.fake("max_pool")
def _(x: Tensor) -> tuple[Tensor, Tensor]:
    out = _pooled_like(x)
    return out, torch.empty_like(out, dtype=torch.uint8)


def _max_pool_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.size = inputs[0].shape[2:]
    ctx.save_for_backward(output[1])
    ctx.mark_non_differentiable(output[1])


def _max_pool_backward(ctx: Any, grad: Tensor, _: Any) -> Tensor:
    (which,) = ctx.saved_tensors
    grad_x: Tensor = max_pool_backward(grad, which, *ctx.size)
    return grad_x


_LIBRARY.autograd("max_pool", _max_pool_backward, _max_pool_context)


@_LIBRARY.operator("(Tensor grad, Tensor which, SymInt height, SymInt width) -> Tensor")
def max_pool_backward(grad: Tensor, which: Tensor, height: int, width: int) -> Tensor:
    """Gradient of ``max_pool`` for x [N, C, height, width], given those of its output and ``which``."""
    grad_x: Tensor = _run("max_pool_backward", grad, which, height, width)
    return grad_x


@_LIBRARY.fake("max_pool_backward")
def _(grad: Tensor, which: Tensor, height: int, width: int) -> Tensor:
    return grad.new_empty(grad.shape[0], height, width, grad.shape[1]).permute(0, 3, 1, 2)
