"""Configurations of the three models: one frozen dataclass each, named as torch-geometric names its arguments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class GNNConfig:
    """What the three models share. Widths and depth have no default; switches default as torch-geometric's do.

    Args:
        in_channels: Width of the features.
        hidden_channels: Width of every layer but the last.
        num_layers: Number of convolutions.
        out_channels: Width of the output; None for ``hidden_channels``.
        dropout: Probability of dropping an activation in training (and a neighbour, in GAT).
        act: Activation by name, or None; see ``zoo.gnn.norms.ACTIVATIONS``.
        act_first: Activate before and not after the normalisation.
        act_kwargs: Options of the activation.
        norm: ``"batch"``, ``"layer"`` or None.
        norm_kwargs: Options of the normalisation.
        jk: Jumping knowledge: ``"last"``, ``"cat"`` or ``"max"`` puts a linear layer at the end, over the last or all
            layers' outputs; None makes the last convolution the output.
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
        for name in ("in_channels", "hidden_channels", "num_layers", "out_channels"):
            value = getattr(self, name)
            if value is None and name == "out_channels":
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} is {value!r}, expected a positive integer")
        if not 0.0 <= self.dropout <= 1.0:
            raise ValueError(f"dropout is {self.dropout!r}, expected a probability, 0 to 1")
        if self.jk not in (None, "last", "cat", "max"):
            raise ValueError(f"jk is {self.jk!r}, expected None, 'last', 'cat' or 'max'")

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


@dataclass(frozen=True, kw_only=True)
class GCNConfig(GNNConfig):
    """A GCN.

    Args:
        improved: Added self-loops weigh 2; only graphs with edge weights notice, as in torch-geometric.
        add_self_loops: Give nodes a self-loop; None follows ``normalize``.
        normalize: Symmetric degree normalisation.
        bias: Of the convolutions.
        cached: Kept for the way back to torch-geometric. Prepared graphs are always remembered here, and unlike there
            another graph is never mistaken for the first.
    """

    improved: bool = False
    add_self_loops: bool | None = None
    normalize: bool = True
    bias: bool = True
    cached: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.add_self_loops is None:
            # Resolved here, so that configs of equal models are equal.
            object.__setattr__(self, "add_self_loops", self.normalize)
        if self.add_self_loops and not self.normalize:
            raise ValueError("add_self_loops is True and normalize False: self-loops are added by the normalisation")


@dataclass(frozen=True, kw_only=True)
class GATConfig(GNNConfig):
    """A GAT.

    Args:
        heads: Attention heads. With ``concat`` they share ``hidden_channels``; the last convolution averages them.
        concat: Put the heads of hidden layers side by side; else each has the full width and they are averaged.
        negative_slope: Of the leaky relu on attention scores.
        add_self_loops: Every node attends to itself.
        bias: Of the convolutions.
        residual: Add each layer's input, times a weight.
    """

    heads: int
    concat: bool = True
    negative_slope: float = 0.2
    add_self_loops: bool = True
    bias: bool = True
    residual: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.heads, int) or self.heads < 1:
            raise ValueError(f"heads is {self.heads!r}, expected a positive integer")
        hidden = self.num_layers > 1 or not self.ends_in_conv
        if self.concat and hidden and self.hidden_channels % self.heads:
            raise ValueError(
                f"hidden_channels is {self.hidden_channels} and heads {self.heads}: with concat=True the heads share "
                "the width, so it must be a multiple of their number"
            )


@dataclass(frozen=True, kw_only=True)
class SAGEConfig(GNNConfig):
    """A GraphSAGE.

    Args:
        aggr: ``"mean"``, ``"max"`` or ``"sum"``.
        normalize: Divide each row of a convolution's output by its Euclidean norm.
        root_weight: Add the node's own features, times a weight.
        project: Pass neighbours through a linear layer and relu first.
        bias: Of the convolutions.
    """

    aggr: str = "mean"
    normalize: bool = False
    root_weight: bool = True
    project: bool = False
    bias: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.aggr not in ("mean", "max", "sum"):
            raise ValueError(f"aggr is {self.aggr!r}, expected 'mean', 'max' or 'sum'")
