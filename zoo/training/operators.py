"""The kernels of a training step as torch operators: cross entropy of rows of logits, and a gradient that is scaled.

On a GPU each is one Triton launch, elsewhere torch's own operators compute the same.

Shape legend: n rows, V classes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zoo.ops.common import KERNEL_DTYPES, triton_runs_on
from zoo.ops.opaque import OperatorLibrary, launcher
from zoo.training import fallback

_LIBRARY = OperatorLibrary("zoo_training")


def kernels_run(x: Tensor) -> bool:
    """Whether operators on ``x`` run kernels of our own. May be asked inside a region."""
    return x.dtype in KERNEL_DTYPES and triton_runs_on(x.device)


def _implementation(name: str, x: Tensor) -> Any:
    # The kernels go through memory, and take no strides.
    fits = kernels_run(x) and x.is_contiguous()
    return launcher("zoo.training.kernels.rows", name, x) if fits else getattr(fallback, name)


@_LIBRARY.operator("(Tensor(a!) logits, Tensor labels, Tensor scale, int ignored) -> Tensor")
def cross_entropy_rows_(logits: Tensor, labels: Tensor, scale: Tensor, ignored: int) -> Tensor:
    """Cross entropy of rows, computed in float32; the gradient takes the logits' place.

    Args:
        logits: [n, V]; holds the gradient of the losses' sum afterwards, times ``scale``.
        labels: [n] int64. By the kernel a row whose label is no class has a loss and a gradient that are not numbers.
        scale: Float32 scalar, on the device.
        ignored: The label of rows without a loss, whose gradient is zero.

    Returns:
        Losses [n] in float32.
    """
    return _implementation("cross_entropy_rows_", logits)(logits, labels.contiguous(), scale, ignored)


@_LIBRARY.fake("cross_entropy_rows_")
def _(logits: Tensor, *_: Any) -> Tensor:
    return logits.new_empty(logits.shape[0], dtype=torch.float32)


@_LIBRARY.operator("(Tensor(a!) x, Tensor factor) -> ()")
def scale_(x: Tensor, factor: Tensor) -> None:
    """Multiply in place by a scalar on the device, in float32. The kernel reads and writes nothing where it is one."""
    _implementation("scale_", x)(x, factor)


@_LIBRARY.fake("scale_")
def _(x: Tensor, factor: Tensor) -> None:
    return None
