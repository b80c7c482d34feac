"""The end of the stem as operators, for inference: a Triton kernel on a GPU, torch's own operators elsewhere.

The compiler norms and activates in one kernel what it pools in another. Ours reads the images once, and writes what is
pooled alone.

Shape legend: N images, C channels, H height, W width.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from zoo.operators import OperatorLibrary, launcher
from zoo.resnet import fallback, norms

_LIBRARY = OperatorLibrary("zoo_resnet")


def _run(name: str, x: Tensor, *arguments: Any) -> Tensor:
    if x.dim() != 4:
        raise ValueError(f"x has shape {tuple(x.shape)}, expected images [N, C, H, W]")
    kernel = norms.kernels_run(x)
    implementation = launcher("zoo.resnet.kernels.pool", name, x) if kernel else getattr(fallback, name)
    out: Tensor = implementation(x, *arguments)
    return out


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
    return _run("norm_act_pool", x, mean, variance, weight, bias, eps)


@_LIBRARY.operator("(Tensor x, Tensor bias) -> Tensor")
def bias_act_pool(x: Tensor, bias: Tensor) -> Tensor:
    """The same of x [N, C, H, W] and bias [C], without a norm."""
    return _run("bias_act_pool", x, bias)


def _no_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    pass


def _no_backward(ctx: Any, grad: Tensor) -> None:
    raise RuntimeError(
        "norm_act_pool and bias_act_pool have no gradients; use torch.nn.functional where they are wanted"
    )


for _name in ("norm_act_pool", "bias_act_pool"):
    _LIBRARY.fake(_name)(_pooled_like)
    _LIBRARY.autograd(_name, _no_backward, _no_context)
