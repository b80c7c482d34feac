"""Glue where gradients are wanted: the operators of operators.py, and those that their backward runs.

Written in torch's functions the backward of a gate or a norm is several passes, and the sum over rows for each bias is
one more. Here each is a pass, with what weight and biases get summed on the way. Where a kernel of ours does not run,
or more is asked for than a gradient, ``fallback`` is differentiated as it is: ``runs`` tells.

Shape legend: R rows (pixels of all images), C channels, I width inside the MLP.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from zoo.layers import ordinary
from zoo.operators import OperatorLibrary, differentiated, forward_mode, transformed
from zoo.unet import operators

_LIBRARY = OperatorLibrary("zoo_unet")


def runs(*tensors: Tensor) -> bool:
    """Whether glue of these learns by operators of ours: a gradient is wanted, nothing else, and kernels take them.

    May be asked inside a region.
    """
    if not differentiated(*tensors) or transformed() or forward_mode():
        return False
    return all(ordinary(tensor) for tensor in tensors) and operators.kernels_take(*tensors)


# --- the gate ---

gated_gelu = operators.gated_gelu


@_LIBRARY.operator("(Tensor grad, Tensor x, Tensor bias, bool summed) -> (Tensor, Tensor)")
def gated_gelu_backward(grad: Tensor, x: Tensor, bias: Tensor, summed: bool) -> tuple[Tensor, Tensor]:
    """Gradients of ``gated_gelu``.

    Args:
        grad: [R, I].
        x: [R, 2 I].
        bias: [2 I].
        summed: Whether that of the bias is wanted.

    Returns:
        [R, 2 I] of x, and [2 I] of the bias, or [0].
    """
    found: tuple[Tensor, Tensor] = operators.run_glue(
        "gated_gelu_backward", grad, x, bias, summed, module="glue_backward"
    )
    return found


@_LIBRARY.fake("gated_gelu_backward")
def _(grad: Tensor, x: Tensor, bias: Tensor, summed: bool) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), bias.new_empty(bias.shape if summed else 0)


def _keep_gate(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gate_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    summed = ctx.needs_input_grad[1]
    grad_x, grad_bias = gated_gelu_backward(grad, *ctx.saved_tensors, summed)
    return grad_x, grad_bias if summed else None


_LIBRARY.autograd("gated_gelu", _gate_gradients, _keep_gate)
