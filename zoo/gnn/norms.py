"""Normalisations and activations by the names that torch-geometric gives them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
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

    Over the first ``rows`` nodes alone, where the ones behind are padding: their number is not known to the host, so
    that a single one is not refused there. It becomes the bias.

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

    def forward(self, x: Tensor, rows: Tensor | None = None) -> Tensor:
        """Features [N, C] -> [N, C]; ``rows`` [] int64, how many of them are nodes, or None for all."""
        if rows is not None and self.over_nodes:
            return self._over_first(x, rows)
        if self.allow_single_element and x.shape[0] <= 1:
            return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps)
        return super().forward(x)

    def _over_first(self, x: Tensor, rows: Tensor) -> Tensor:
        wide, counts = _wide(x), _counts(x, rows)
        rows = rows.to(wide.dtype)
        mean = torch.where(counts, wide, 0).sum(dim=0) / rows
        variance = torch.where(counts, wide - mean, 0).square().sum(dim=0) / rows
        if self.training and self.running_mean is not None:
            assert self.running_var is not None and self.num_batches_tracked is not None and self.momentum is not None
            if self.allow_single_element:
                alone = rows < 2
                mean = torch.where(alone, self.running_mean, mean)
                variance = torch.where(alone, self.running_var, variance)
            with torch.no_grad():
                # Of nodes in general, which these are a sample of.
                unbiased = variance * (rows / (rows - 1).clamp(min=1))
                if self.allow_single_element:
                    unbiased = torch.where(alone, self.running_var, unbiased)
                self.running_mean.lerp_(mean.to(self.running_mean.dtype), self.momentum)
                self.running_var.lerp_(unbiased.to(self.running_var.dtype), self.momentum)
                self.num_batches_tracked.add_(rows > 1 if self.allow_single_element else 1)
        out = (wide - mean) * torch.rsqrt(variance + self.eps)
        if self.weight is not None:
            out = out * self.weight + self.bias
        return out.to(x.dtype)


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

    def forward(self, x: Tensor, rows: Tensor | None = None) -> Tensor:
        """Features [N, C] -> [N, C]; ``rows`` [] int64, how many of them are nodes, or None for all."""
        if not self.over_nodes:
            return F.layer_norm(x, (x.shape[1],), self.weight, self.bias, self.eps)
        if rows is None:
            x = x - x.mean()
            x = x / (x.std(unbiased=False) + self.eps)
        else:
            x = self._over_first(x, rows)
        return x if self.weight is None else x * self.weight + self.bias

    def _over_first(self, x: Tensor, rows: Tensor) -> Tensor:
        wide, counts, numbers = _wide(x), _counts(x, rows), rows * x.shape[1]
        wide = wide - torch.where(counts, wide, 0).sum() / numbers
        variance = torch.where(counts, wide, 0).square().sum() / numbers
        deviation = variance.clamp(min=torch.finfo(wide.dtype).tiny).sqrt()  # the root of zero has no derivative
        return (wide / (deviation + self.eps)).to(x.dtype)


def _counts(x: Tensor, rows: Tensor) -> Tensor:
    """[N, 1], whether a row is one of the first."""
    return (torch.arange(x.shape[0], device=x.device) < rows)[:, None]


def _wide(x: Tensor) -> Tensor:
    """In what sums over many rows are taken in."""
    return x if x.dtype == torch.float64 else x.float()


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
