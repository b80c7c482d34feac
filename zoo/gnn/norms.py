"""Normalisations and activations by the names that torch-geometric gives them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "relu": nn.ReLU,
    "relu6": nn.ReLU6,
    "elu": nn.ELU,
    "celu": nn.CELU,
    "selu": nn.SELU,
    "leaky_relu": nn.LeakyReLU,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "mish": nn.Mish,
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
    "hardtanh": nn.Hardtanh,
    "hardswish": nn.Hardswish,
    "softplus": nn.Softplus,
    "identity": nn.Identity,
}


class GraphBatchNorm(nn.BatchNorm1d):
    """Batch normalisation over nodes, torch-geometric's ``BatchNorm``. [N, C] -> [N, C].

    Args:
        channels: C.
        eps, momentum, affine, track_running_stats: As for ``nn.BatchNorm1d``; ``momentum`` must be a number.
        allow_single_element: A single node in training is normalised by the running statistics, not refused.
    """

    def __init__(
        self,
        channels: int,
        eps: float = 1e-5,
        momentum: float = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        allow_single_element: bool = False,
    ) -> None:
        if momentum is None:
            raise ValueError("norm_kwargs has momentum=None, a cumulative average that reads the device at each step")
        if allow_single_element and not track_running_stats:
            raise ValueError("norm_kwargs has allow_single_element=True, which needs track_running_stats=True")
        super().__init__(channels, eps, momentum, affine, track_running_stats)
        self.allow_single_element = allow_single_element

    @property
    def over_nodes(self) -> bool:
        """Whether what a node gets depends on the others, so that padding would count."""
        return self.training or self.running_mean is None

    def forward(self, x: Tensor) -> Tensor:
        """Features [N, C] -> [N, C]."""
        if self.allow_single_element and x.shape[0] <= 1:
            return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps)
        return super().forward(x)


class GraphLayerNorm(nn.Module):
    """Layer normalisation over a whole graph or over each node, torch-geometric's ``LayerNorm``. [N, C] -> [N, C].

    Args:
        channels: C.
        eps: Added to the standard deviation (graph) or to the variance (node).
        affine: Have a weight and a bias.
        mode: ``"graph"`` or ``"node"``.
    """

    def __init__(self, channels: int, eps: float = 1e-5, affine: bool = True, mode: str = "graph") -> None:
        super().__init__()
        if mode not in ("graph", "node"):
            raise ValueError(f"norm_kwargs has mode={mode!r}, expected 'graph' or 'node'")
        self.eps = eps
        self.over_nodes = mode == "graph"
        node = nn.LayerNorm(channels, eps=eps, elementwise_affine=affine)
        self.weight, self.bias = node.weight, node.bias

    def forward(self, x: Tensor) -> Tensor:
        """Features [N, C] -> [N, C]."""
        if not self.over_nodes:
            return F.layer_norm(x, (x.shape[1],), self.weight, self.bias, self.eps)
        x = x - x.mean()
        x = x / (x.std(unbiased=False) + self.eps)
        return x if self.weight is None else x * self.weight + self.bias


NORMS: dict[str, type[nn.Module]] = {"batch": GraphBatchNorm, "layer": GraphLayerNorm}


def make_activation(name: str | None, options: Mapping[str, Any]) -> nn.Module:
    """An activation by name; None for none."""
    if name is None:
        return nn.Identity()
    if name not in ACTIVATIONS:
        raise ValueError(f"act is {name!r}, expected None or one of {', '.join(ACTIVATIONS)}")
    if "inplace" in options:
        # It changes where, not what is computed; and what an operator returned is not always ours to write to.
        options = {**options, "inplace": False}
    return _make("act_kwargs", ACTIVATIONS[name], options)


def make_norm(name: str | None, channels: int, options: Mapping[str, Any]) -> nn.Module:
    """A normalisation by name; None for none."""
    if name is None:
        return nn.Identity()
    if name not in NORMS:
        raise ValueError(f"norm is {name!r}, expected None or one of {', '.join(NORMS)}")
    return _make("norm_kwargs", NORMS[name], {"channels": channels, **options})


def _make(what: str, cls: type[nn.Module], options: Mapping[str, Any]) -> nn.Module:
    known = inspect.signature(cls).parameters
    wrong = [key for key in options if key not in known]
    if wrong and cls is not nn.Identity:
        raise ValueError(
            f"{what} has {', '.join(wrong)}, which {cls.__name__} does not take; it takes {', '.join(known)}"
        )
    return cls(**options)
