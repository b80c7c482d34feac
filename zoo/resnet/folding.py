"""Batch norms folded into the convolutions before them, for inference."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from zoo.resnet.model import Folding, Join, ResNet, Unit


@torch.no_grad()
def fold_batch_norm(model: ResNet, *, convolutions: str = "glue", pointwise: str = "convolution") -> ResNet:
    """A new model for inference that computes what this one does in eval mode, without its norms.

    A norm scales and shifts each channel by numbers that no longer change. The scale goes into the weights of the
    convolution before it and the shift into its bias; a shortcut's shift goes into the bias that it is added to. Folded
    in float64 and rounded once to the weights' dtype.

    Args:
        model: A ResNet of the zoo, which stays as it is.
        convolutions: ``"glue"``: the library's convolution, then bias, residual and activation in one pass.
            ``"fused"``: all in one call of cuDNN on an NVIDIA GPU, elsewhere torch's own operators.
        pointwise: 1 × 1 convolutions of stride 1 as ``"convolution"``, or as ``"matmul"``, a matrix product over
            pixels; it has bias and activation in it where no residual is added.

    Returns:
        The model, in eval mode, without gradients, with ``config.folding`` set.

    Raises:
        TypeError: If the model is not a ResNet of the zoo.
        ValueError: If it is folded already, or its norms keep no running statistics; or an option is unknown.
    """
    if not isinstance(model, ResNet):
        raise TypeError(f"{type(model).__name__} is not a ResNet of the zoo; zoo.from_upstream(module) makes one")
    if model.config.folding is not None:
        raise ValueError("the batch norms of this model are folded already; fold the one it came from")
    if not model.config.norm_options.get("track_running_stats", True):
        raise ValueError(
            "norm_kwargs has track_running_stats=False: its norms take the statistics of each batch, which no weight "
            "can hold"
        )
    folding = Folding(convolutions=convolutions, pointwise=pointwise)
    with torch.device("meta"):
        folded = ResNet(dataclasses.replace(model.config, folding=folding))
    state = {f"head.{key}": tensor.clone() for key, tensor in model.head.state_dict().items()}
    for name, module in model.named_modules():
        if isinstance(module, Unit):
            weight, bias = _folded(module.conv, module.norm)
            if isinstance(module, Join) and module.shortcut is not None and module.shortcut_norm is not None:
                state[f"{name}.shortcut.weight"], shift = _folded(module.shortcut, module.shortcut_norm)
                bias = bias + shift
            state[f"{name}.conv.weight"], state[f"{name}.conv.bias"] = weight, bias
    like = model.head.fc.weight
    folded.load_state_dict({key: tensor.to(like.dtype) for key, tensor in state.items()}, strict=True, assign=True)
    return folded.requires_grad_(False).eval()


def _folded(conv: nn.Conv2d, norm: Any) -> tuple[Tensor, Tensor]:
    """Weight and bias in float64 of a convolution that does what this one and its norm do in eval mode."""
    scale = (norm.running_var.double() + norm.eps).rsqrt() * norm.weight.double()
    shift = norm.bias.double() - norm.running_mean.double() * scale
    return conv.weight.double() * scale[:, None, None, None], shift
