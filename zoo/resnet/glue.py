"""What lies between the library's convolutions: norm or bias, residual, activation. The regions of the family.

In channels_last the output of a convolution is a matrix with a row for each pixel. On it these modules are the same for
every width and size: they hold no weights, which would tie a graph to their shapes, but are handed the norm's tensors.

Where our kernels run they are operators of ours (``zoo.resnet.norms``, ``zoo.resnet.pooling``), and the compiler has
little to do. Elsewhere they are torch's functions, which it fuses.

Shape legend: R rows (pixels of all images), C channels, N images, H height, W width, K classes.
"""

from __future__ import annotations

from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.layers import in_words, to_images, to_rows
from zoo.ops.common import differentiated
from zoo.resnet.config import ResNetConfig
from zoo.resnet.norms import batch_statistics, bias_act, kernels_run, norm_act, norms_add_act
from zoo.resnet.pooling import bias_act_pool, max_pool, norm_act_pool

# Running mean and variance (None for a norm that keeps none), weight and bias, [C] each.
NormTensors: TypeAlias = tuple[Tensor | None, Tensor | None, Tensor, Tensor]


class FrozenBatchNorm(nn.Module):
    """The tensors of a batch norm that never changes, torchvision's ``FrozenBatchNorm2d``.

    Args:
        channels: C.
        eps: Added to the variance.
    """

    weight: Tensor
    bias: Tensor
    running_mean: Tensor
    running_var: Tensor

    def __init__(self, channels: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        for name, value in (("weight", 1.0), ("bias", 0.0), ("running_mean", 0.0), ("running_var", 1.0)):
            self.register_buffer(name, torch.full((channels,), value))


class _Glue(nn.Module):
    """Glue around a norm: how to normalise, without the norm's tensors."""

    def __init__(self, config: ResNetConfig) -> None:
        super().__init__()
        options = config.norm_options
        self.eps_text, self.momentum_text = (repr(float(options.get(name, 0.0))) for name in ("eps", "momentum"))
        self.frozen = config.norm == "frozen"

    eps = in_words("eps_text")  # added to the variance
    momentum = in_words("momentum_text")  # how far running statistics are moved, of 1

    def of_batch(self, tensors: NormTensors) -> bool:
        """Whether statistics are those of the batch."""
        return tensors[0] is None or (self.training and not self.frozen)

    def normalise(self, x: Tensor, tensors: NormTensors) -> Tensor:
        """[R, C] or [N, C, H, W]; in training running statistics are updated in place."""
        return F.batch_norm(x, *tensors, self.of_batch(tensors), self.momentum, self.eps)

    def settled(self, x: Tensor, tensors: NormTensors) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Of x [R, C]: the mean and variance that it is normalised with, weight and bias. Updates as ``normalise``."""
        mean, variance, weight, bias = tensors
        if mean is None or variance is None or self.of_batch(tensors):
            mean, variance = batch_statistics(x.detach(), mean, variance, self.momentum)
        return mean, variance, weight, bias


class NormAct(_Glue):
    """Norm and activation."""

    def forward(self, x: Tensor, norm: NormTensors) -> Tensor:
        """[R, C] -> [R, C]."""
        if kernels_run(x):
            return norm_act(x, *self.settled(x, norm), None, self.eps, self.of_batch(norm))
        return F.relu(self.normalise(x, norm))


class NormAddAct(_Glue):
    """Norm, residual and activation: the end of a block."""

    def forward(self, x: Tensor, norm: NormTensors, residual: Tensor) -> Tensor:
        """[R, C] and the block's input [R, C] -> [R, C]."""
        if kernels_run(x, residual):
            return norm_act(x, *self.settled(x, norm), residual, self.eps, self.of_batch(norm))
        return F.relu(self.normalise(x, norm) + residual)


class NormsAddAct(_Glue):
    """Two norms, their sum and activation: the end of a block whose shortcut is a convolution."""

    def forward(self, x: Tensor, norm: NormTensors, shortcut: Tensor, shortcut_norm: NormTensors) -> Tensor:
        """[R, C] of the block's convolutions and [R, C] of its shortcut's -> [R, C]."""
        if kernels_run(x, shortcut):
            own, other = self.settled(x, norm), self.settled(shortcut, shortcut_norm)
            return norms_add_act(x, *own, shortcut, *other, self.eps, self.of_batch(norm))
        return F.relu(self.normalise(x, norm) + self.normalise(shortcut, shortcut_norm))


class NormActPool(_Glue):
    """Norm, activation and pooling: the end of the stem."""

    def forward(self, x: Tensor, norm: NormTensors) -> Tensor:
        """[N, C, H, W] -> [N, C, ⌈H / 2⌉, ⌈W / 2⌉]."""
        mean, variance, weight, bias = norm
        settled = mean is not None and variance is not None and not self.of_batch(norm)
        if settled and kernels_run(x) and not differentiated(x, weight, bias):
            return norm_act_pool(x, mean, variance, weight, bias, self.eps)
        if kernels_run(x):
            # The kernels that every other norm of the model has compiled by then, or will.
            rows = to_rows(x)
            active = norm_act(rows, *self.settled(rows, norm), None, self.eps, self.of_batch(norm))
            pooled: Tensor = max_pool(to_images(active, x))[0]
            return pooled
        return F.max_pool2d(F.relu(self.normalise(x, norm)), 3, 2, 1)


class BiasAct(nn.Module):
    """Bias and activation, where the norm is folded."""

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        """[R, C] and [C] -> [R, C]."""
        if kernels_run(x, bias):
            return bias_act(x, bias, None)
        return F.relu(x + bias)


class BiasAddAct(nn.Module):
    """Bias, residual and activation, where the norm is folded; a shortcut's own bias is in the first already."""

    def forward(self, x: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
        """[R, C], [C] and [R, C] -> [R, C]."""
        if kernels_run(x, bias, residual):
            return bias_act(x, bias, residual)
        return F.relu(x + bias + residual)


class BiasActPool(nn.Module):
    """Bias, activation and pooling, where the norm is folded."""

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        """[N, C, H, W] and [C] -> [N, C, ⌈H / 2⌉, ⌈W / 2⌉]."""
        if kernels_run(x, bias) and not differentiated(x, bias):
            return bias_act_pool(x, bias)
        # A greatest value stays the greatest under both, so that they touch a quarter of the pixels.
        return F.relu(F.max_pool2d(x, 3, 2, 1) + bias[:, None, None])


class ResNetHead(nn.Module):
    """Mean over pixels and a linear layer."""

    def __init__(self, config: ResNetConfig) -> None:
        super().__init__()
        self.fc = nn.Linear(config.features, config.num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """[N, C, H, W] -> [N, K]."""
        return self.fc(x.mean((2, 3)))
