"""What a model is given, checked before anything runs. Each error says what was wrong and what to do."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zoo.ops.common import differentiated
from zoo.resnet.config import ResNetConfig


def check_images(images: Tensor, config: ResNetConfig, weight: Tensor, training: bool) -> None:
    """Images [N, C, H, W] that the weights can be applied to. Reads no value, so it never synchronises.

    Raises:
        TypeError: If they are no dense floating-point tensor of the weights' dtype.
        ValueError: If their shape, their size or their device does not fit.
    """
    channels = config.in_channels
    if not isinstance(images, Tensor) or images.layout != torch.strided:
        found = images.layout if isinstance(images, Tensor) else type(images).__name__
        raise TypeError(f"images is a {found}, expected a dense tensor [N, {channels}, H, W]")
    shape = tuple(images.shape)
    if images.dim() == 3:
        raise ValueError(f"images has shape {shape}, expected [N, {channels}, H, W]; use images[None] for one image")
    if images.dim() != 4 or shape[1] != channels:
        hint = "; channels come first here, use images.permute(0, 3, 1, 2)" if shape[-1:] == (channels,) else ""
        raise ValueError(f"images has shape {shape}, expected [N, {channels}, H, W]{hint}")
    if 0 in shape:
        raise ValueError(f"images has shape {shape}; there must be an image, and a pixel in each")
    if images.device != weight.device:
        raise ValueError(f"images is on {images.device} and the weights are on {weight.device}; move one of them")
    if not images.dtype.is_floating_point:
        raise TypeError(
            f"images is {images.dtype}, expected {weight.dtype}; zoo.resnet.transforms scales and normalises integers"
        )
    autocast = torch.is_autocast_enabled(images.device.type)
    if autocast and config.folding is not None:
        # Bias and residual would widen what the convolutions narrow, and cuDNN's fused calls would get both dtypes.
        narrow = torch.get_autocast_dtype(images.device.type)
        raise ValueError(
            f"torch.autocast is on, but a folded model runs in the dtype of its weights, {weight.dtype}; leave "
            f"autocast, and use model.to({narrow}) for half precision"
        )
    if images.dtype != weight.dtype and not autocast:
        hint = "" if config.folding is not None else ", or torch.autocast"
        raise TypeError(
            f"images is {images.dtype} and the weights are {weight.dtype}; use images.to({weight.dtype}){hint}"
        )
    if config.folding is not None and differentiated(images):
        raise ValueError("images requires a gradient, but a folded model is for inference; use the model it came from")
    if shape[0] == 1 and max(shape[2:]) <= config.reduction and _normalises_by_batch(config, training):
        hint = ", or call model.eval()" if config.norm_options["track_running_stats"] else ""
        raise ValueError(
            f"images has shape {shape}: the last stage would have one value a channel, of which the norms take a "
            f"variance; give more images or larger ones than {config.reduction} pixels{hint}"
        )


def _normalises_by_batch(config: ResNetConfig, training: bool) -> bool:
    """Whether norms take the statistics of these very images."""
    if config.folding is not None or config.norm != "batch":
        return False
    return training or not config.norm_options["track_running_stats"]


def check_norms(model: nn.Module) -> None:
    """``check_norm`` of all norms of a model."""
    modules = [model]
    while modules:
        module = modules.pop()
        modules.extend(child for child in module._modules.values() if child is not None)
        check_norm(module)


def check_norm(module: nn.Module) -> None:
    """Refuse what a norm was turned into since the model was made, and no kernel computes in training.

    Raises:
        ValueError: If it is a ``SyncBatchNorm`` in training, or has no momentum there.
    """
    if not (isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training):
        return
    if isinstance(module, nn.SyncBatchNorm):
        raise ValueError("a norm is a SyncBatchNorm, but statistics are those of one process: keep BatchNorm2d")
    if module.momentum is None:
        raise ValueError(
            "the momentum of a norm is None, a cumulative average that reads the device at each step; of torch's "
            "update_bn, which sets it, the statistics come by way of zoo.to_upstream(model), to be loaded back"
        )
