"""Cross entropy of rows of logits with its gradient in one pass, and gradients that are scaled in place.

Shape legend: n rows, V classes.
"""

import torch
from torch import Tensor

from zoo.ops import triton as kernels
from zoo.ops.common import kernels_run

# The label of a row without a loss.
IGNORED = -100


def cross_entropy_rows(logits: Tensor, labels: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Losses of rows float32 [n], and the gradient [n, V] of their sum times ``scale``; computed in float32.

    It is not differentiated. Logits [n, V] are not needed any more: where our kernel runs, the gradient is written over
    them. Rows whose label [n] int64 is ``IGNORED`` have no loss; by the kernel, loss and gradient of a row whose label
    is no class are not numbers. ``scale`` is a float32 scalar on the device.
    """
    if kernels_run(logits) and logits.is_contiguous():
        return kernels.cross_entropy.cross_entropy_rows_(logits, labels.contiguous(), scale, IGNORED), logits
    seen = labels != IGNORED
    index = torch.where(seen, labels, 0)[:, None]
    x = logits.float()
    total = torch.logsumexp(x, dim=-1, keepdim=True)
    losses = torch.where(seen, (total - x.gather(-1, index))[:, 0], 0.0)
    hit = torch.arange(logits.shape[-1], device=logits.device) == index
    grad = torch.where(seen[:, None], ((x - total).exp() - hit.to(x.dtype)) * scale, 0.0)
    return losses, grad.to(logits.dtype)


def scale_(x: Tensor, factor: Tensor) -> None:
    """Multiply in place by a scalar on the device, in float32. The kernel reads and writes nothing where it is one."""
    if kernels_run(x) and x.is_contiguous():
        kernels.cross_entropy.scale_(x, factor)
    else:
        # Of one dimension, so that half precision is multiplied in float32 and not by a rounded factor.
        x.mul_(factor.reshape(1))
