"""Configurations of the three models, their presets, and the norms and activations that they name.

Shape legend: N nodes, C channels.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor, nn

from zoo import validate
from zoo.ops.common import accumulation_dtype


@dataclass(frozen=True, kw_only=True)
class GNNConfig:
    """Fields of all three models, with torch-geometric's names and meanings.

    Args:
        num_layers: Number of convolutions.
        out_channels: Width of the output; None for ``hidden_channels``.
        dropout: Probability of dropping an activation in training (and a neighbour, in GAT).
        act: Activation by name, or None; see ``zoo.gnn.config.ACTIVATIONS``.
        act_first: Activate before the normalisation.
        norm: ``"batch"``, ``"layer"`` or None.
        jk: ``"last"``, ``"cat"`` or ``"max"`` adds a linear layer on the last layer's or all layers' outputs; None
            makes the last convolution the output.
    """

    in_channels: int
    hidden_channels: int
    num_layers: int
    out_channels: int | None
    dropout: float = 0.0
    act: str | None = "relu"
    act_first: bool = False
    act_kwargs: Mapping[str, Any] = field(default_factory=dict)
    norm: str | None = None
    norm_kwargs: Mapping[str, Any] = field(default_factory=dict)
    jk: str | None = None

    def __post_init__(self) -> None:
        validate.positive(self, "in_channels", "hidden_channels", "num_layers")
        validate.positive(self, "out_channels", or_none=True)
        if not isinstance(self.dropout, int | float) or not 0.0 <= self.dropout <= 1.0:
            raise ValueError(f"dropout is {self.dropout!r}, expected a probability, 0 to 1")
        validate.one_of(self, "jk", (None, "last", "cat", "max"))

    @property
    def output_width(self) -> int:
        """Width of the output."""
        return self.hidden_channels if self.out_channels is None else self.out_channels

    @property
    def ends_in_conv(self) -> bool:
        """Whether the last convolution has the output's width."""
        return self.out_channels is not None and self.jk is None

    def widths(self) -> list[tuple[int, int]]:
        """(input, output) of each layer's convolution."""
        outputs = [self.hidden_channels] * self.num_layers
        if self.ends_in_conv:
            outputs[-1] = self.output_width
        return list(zip([self.in_channels, *outputs[:-1]], outputs, strict=True))

    @classmethod
    def conv_fields(cls) -> list[str]:
        """Names of the fields of one model only; its convolutions take arguments with these names."""
        return [each.name for each in fields(cls)[len(fields(GNNConfig)) :]]


@dataclass(frozen=True, kw_only=True)
class GCNConfig(GNNConfig):
    """A GCN; see ``GCNConv``."""

    improved: bool = False
    add_self_loops: bool | None = None
    normalize: bool = True
    bias: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.add_self_loops is None:
            # Resolved here, so that configs of equal models are equal.
            object.__setattr__(self, "add_self_loops", self.normalize)


@dataclass(frozen=True, kw_only=True)
class GATConfig(GNNConfig):
    """A GAT; see ``GATConv``.

    With ``concat`` the heads of hidden layers share ``hidden_channels``; else each head has the full width and heads
    are averaged. The last convolution always averages heads.
    """

    heads: int
    concat: bool = True
    negative_slope: float = 0.2
    add_self_loops: bool = True
    bias: bool = True
    residual: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        validate.positive(self, "heads")
        hidden = self.num_layers > 1 or not self.ends_in_conv
        if self.concat and hidden and self.hidden_channels % self.heads:
            raise ValueError(f"heads is {self.heads}, which does not divide hidden_channels {self.hidden_channels}")


@dataclass(frozen=True, kw_only=True)
class SAGEConfig(GNNConfig):
    """A GraphSAGE; see ``SAGEConv``."""

    aggr: str = "mean"
    normalize: bool = False
    root_weight: bool = True
    project: bool = False
    bias: bool = True


# ogbn-arxiv: 128 features and 40 classes, at the widths of the benchmark's own examples.
_ARXIV: dict[str, Any] = {"in_channels": 128, "hidden_channels": 256, "num_layers": 3, "out_channels": 40}
# Cora: 1433 features and 7 classes, at the widths of the papers.
_CORA: dict[str, Any] = {"in_channels": 1433, "hidden_channels": 64, "num_layers": 2, "out_channels": 7}
_DEBUG: dict[str, Any] = {"in_channels": 12, "hidden_channels": 16, "num_layers": 3, "out_channels": 5}

PRESETS: dict[str, GNNConfig] = {
    "gcn": GCNConfig(**_ARXIV),
    "gat": GATConfig(**_ARXIV, heads=8),
    "graphsage": SAGEConfig(**_ARXIV),
    "gcn-cora": GCNConfig(**_CORA),
    "gat-cora": GATConfig(**_CORA, heads=8, act="elu"),
    "graphsage-cora": SAGEConfig(**_CORA),
    "gcn-debug": GCNConfig(**_DEBUG),
    "gat-debug": GATConfig(**_DEBUG, heads=4),
    "graphsage-debug": SAGEConfig(**_DEBUG),
}


class GraphBatchNorm(nn.BatchNorm1d):
    """Batch normalisation over nodes, torch-geometric's ``BatchNorm``: [N, C] -> [N, C], ``momentum`` is a number.

    Training refuses a single node. If the last rows are padding, the host does not know the number of nodes, and a
    single node becomes the bias.
    """

    @property
    def over_nodes(self) -> bool:
        """True if a node's output depends on other nodes, so that padding must be excluded."""
        return self.training or self.running_mean is None

    def forward(self, x: Tensor, rows: Tensor | None = None) -> Tensor:
        """Features [N, C] -> [N, C]; ``rows`` [] int64, how many of them are nodes, or None for all."""
        if rows is None or not self.over_nodes:
            return super().forward(x)
        values, rows = x.to(accumulation_dtype(x.dtype)), rows.to(accumulation_dtype(x.dtype))
        mean, variance = _moments(values, rows, (0,))
        if self.training and self.running_mean is not None:
            assert self.running_var is not None and self.num_batches_tracked is not None and self.momentum is not None
            with torch.no_grad():
                unbiased = variance * (rows / (rows - 1).clamp(min=1))
                self.running_mean.lerp_(mean.to(self.running_mean.dtype), self.momentum)
                self.running_var.lerp_(unbiased.to(self.running_var.dtype), self.momentum)
                self.num_batches_tracked.add_(1)
        out = (values - mean) * torch.rsqrt(variance + self.eps)
        if self.weight is not None:
            out = out * self.weight + self.bias
        return out.to(x.dtype)


class GraphLayerNorm(nn.LayerNorm):
    """Layer normalisation, torch-geometric's ``LayerNorm``: [N, C] -> [N, C].

    It normalises over all nodes and channels (``mode="graph"``, eps added to the deviation), or over the channels of
    each node (``"node"``, eps added to the variance).
    """

    def __init__(self, channels: int, eps: float = 1e-5, affine: bool = True, mode: str = "graph") -> None:
        super().__init__(channels, eps=eps, elementwise_affine=affine)
        if mode not in ("graph", "node"):
            raise ValueError(f"norm_kwargs has mode={mode!r}, expected 'graph' or 'node'")
        self.over_nodes = mode == "graph"

    def forward(self, x: Tensor, rows: Tensor | None = None) -> Tensor:
        """Features [N, C] -> [N, C]; ``rows`` [] int64, how many of them are nodes, or None for all."""
        if not self.over_nodes:
            return super().forward(x)
        if rows is None:
            x = x - x.mean()
            x = x / (x.std(unbiased=False) + self.eps)
        else:
            values = x.to(accumulation_dtype(x.dtype))
            mean, variance = _moments(values, rows, (0, 1))
            deviation = variance.clamp(min=torch.finfo(values.dtype).tiny).sqrt()  # the root of zero has no derivative
            x = ((values - mean) / (deviation + self.eps)).to(x.dtype)
        return x if self.weight is None else x * self.weight + self.bias


def _moments(x: Tensor, rows: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Mean and variance of the first ``rows`` rows of x [N, C] over ``dims``; the other rows are padding."""
    is_node = (torch.arange(x.shape[0], device=x.device) < rows)[:, None]
    count = rows * (x.shape[1] if 1 in dims else 1)
    mean = torch.where(is_node, x, 0).sum(dims) / count
    return mean, torch.where(is_node, x - mean, 0).square().sum(dims) / count


# By torch-geometric's names.
ACTIVATIONS: dict[str, type[nn.Module]] = {
    **{"relu": nn.ReLU, "relu6": nn.ReLU6, "leaky_relu": nn.LeakyReLU, "elu": nn.ELU, "celu": nn.CELU, "selu": nn.SELU},
    **{"gelu": nn.GELU, "silu": nn.SiLU, "mish": nn.Mish, "softplus": nn.Softplus, "identity": nn.Identity},
    **{"tanh": nn.Tanh, "sigmoid": nn.Sigmoid, "hardtanh": nn.Hardtanh, "hardswish": nn.Hardswish},
}
NORMS: dict[str, type[nn.Module]] = {"batch": GraphBatchNorm, "layer": GraphLayerNorm}


def make(
    kind: str, classes: Mapping[str, type[nn.Module]], name: str | None, options: Mapping[str, Any], *sizes: int
) -> nn.Module:
    """A norm or an activation by name; None for none. ValueError if the name is unknown or options do not fit."""
    if name is None:
        return nn.Identity()
    if name not in classes:
        raise ValueError(f"{kind} is {name!r}, expected None or one of {', '.join(classes)}")
    if options.get("momentum", 0.1) is None:
        raise ValueError("norm_kwargs has momentum=None, a cumulative average that reads the device at each step")
    if "inplace" in options:  # it would overwrite an operator's output, which may be needed elsewhere
        options = {**options, "inplace": False}
    try:
        return classes[name](*sizes, **options)
    except TypeError as error:
        raise ValueError(f"{kind}_kwargs is {dict(options)}, which {name} does not take: {error}") from error
