"""The three convolutions, to build with or inside the layers of model.py.

Each takes features and a graph: prepared tensors inside a region, and elsewhere also a CSRGraph or a raw
``edge_index``, which it prepares and remembers.

Shape legend: N nodes (S sources and D destinations where they differ), E edges, C channels, H heads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.gnn.aggregate import attention, head_scores, max_neighbours, mean_neighbours, sum_neighbours
from zoo.gnn.checks import check_features, check_nodes
from zoo.gnn.csr import CSRGraph, GraphTensors, Recipe
from zoo.gnn.outside import outside_compile
from zoo.gnn.prepare import GraphMemory, weight_dtype
from zoo.step_buffers import is_step_input

Graph: TypeAlias = GraphTensors | CSRGraph | Tensor
Features: TypeAlias = Tensor | tuple[Tensor, Tensor]


@outside_compile
def prepare_graph(
    memory: GraphMemory,
    graph: CSRGraph | Tensor,
    edge_weight: Tensor | None,
    features: Sequence[Tensor],
    recipe: Recipe,
) -> CSRGraph:
    """Raw edges or any CSRGraph to what ``recipe`` asks for; ``features`` are those of sources and destinations."""
    if isinstance(graph, Tensor) and is_step_input(graph):
        raise ValueError(
            "edge_index is an input of zoo.cuda_graph, which would bake in the graph prepared from its first value; "
            "pass model.prepare(edge_index, num_nodes=N) and name it in static="
        )
    nodes = features[0].shape[0], features[-1].shape[0]
    if isinstance(graph, Tensor) and graph.device != features[0].device:
        raise ValueError(
            f"edge_index is on {graph.device} and x on {features[0].device}; use edge_index.to({features[0].device})"
        )
    return memory.graph(graph, edge_weight, nodes, recipe, weight_dtype(features[0]))


class _Conv(nn.Module):
    """What the convolutions share: how a graph becomes tensors."""

    recipe: Recipe

    def __init__(self) -> None:
        super().__init__()
        self._memory = GraphMemory()

    @property
    def weight(self) -> Tensor:
        """A parameter whose dtype and device the features must have."""
        return next(self.parameters())

    def _tensors(
        self, features: Sequence[Tensor], graph: CSRGraph | Tensor, edge_weight: Tensor | None
    ) -> GraphTensors:
        prepared = prepare_graph(self._memory, graph, edge_weight, features, self.recipe)
        check_nodes(features[0], prepared.num_sources, prepared.device)
        check_nodes(features[-1], prepared.num_destinations, prepared.device)
        return prepared.tensors


class GCNConv(_Conv):
    """Graph convolution of Kipf and Welling (https://arxiv.org/abs/1609.02907), torch-geometric's ``GCNConv``.

    Args:
        in_channels: Width of the input.
        out_channels: Width of the output.
        improved: Added self-loops weigh 2; without edge weights it has no effect, as in torch-geometric.
        add_self_loops: Give each node that has none a self-loop; follows ``normalize`` when left out.
        normalize: Weigh edges by the symmetric degree normalisation.
        bias: Add a bias.
        input_layer: The features are data and need no gradient: at equal widths neighbours are summed first, so that
            the backward need not walk the edges.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        improved: bool = False,
        add_self_loops: bool | None = None,
        normalize: bool = True,
        bias: bool = True,
        input_layer: bool = False,
    ) -> None:
        super().__init__()
        add_self_loops = normalize if add_self_loops is None else add_self_loops
        if add_self_loops and not normalize:
            raise ValueError("add_self_loops is True and normalize False: self-loops are added by the normalisation")
        self.recipe = Recipe(self_loops=add_self_loops, normalize=normalize, improved=improved and add_self_loops)
        # (A X) W and A (X W) are the same but for rounding; edges move the narrower of the two.
        self.aggregate_first = in_channels < out_channels or (input_layer and in_channels == out_channels)
        self.lin = nn.Linear(in_channels, out_channels, bias=False)
        self.bias = nn.Parameter(torch.empty(out_channels)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Glorot for the weight, zero for the bias."""
        nn.init.xavier_uniform_(self.lin.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor, graph: Graph, edge_weight: Tensor | None = None) -> Tensor:
        """Features [N, C_in] -> [N, C_out]; a rectangular graph without normalisation takes [S, C_in] to [D, C_out]."""
        if not isinstance(graph, GraphTensors):
            check_features(x, self.lin.in_features, self.lin.weight)
            sizes = (x, x.new_empty(graph.num_destinations, 0)) if isinstance(graph, CSRGraph) else (x,)
            graph = self._tensors(sizes, graph, edge_weight)
        if self.aggregate_first:
            return F.linear(sum_neighbours(x, graph), self.lin.weight, self.bias)
        out = self.propagate(x, graph)
        return out if self.bias is None else out + self.bias.to(out.dtype)

    def propagate(self, x: Tensor, graph: GraphTensors) -> Tensor:
        """The convolution without its bias, for whoever adds it with what follows."""
        return self.lin(sum_neighbours(x, graph)) if self.aggregate_first else sum_neighbours(self.lin(x), graph)


class SAGEConv(_Conv):
    """GraphSAGE convolution (https://arxiv.org/abs/1706.02216), torch-geometric's ``SAGEConv``.

    Args:
        in_channels: Width of the input, or of (sources, destinations).
        out_channels: Width of the output.
        aggr: ``"mean"``, ``"max"`` or ``"sum"`` over neighbours.
        normalize: Divide each row of the output by its Euclidean norm.
        root_weight: Add the node's own features, times a weight.
        project: Pass sources through a linear layer and relu first.
        bias: Add a bias.
        input_layer: As for ``GCNConv``.
    """

    def __init__(
        self,
        in_channels: int | tuple[int, int],
        out_channels: int,
        *,
        aggr: str = "mean",
        normalize: bool = False,
        root_weight: bool = True,
        project: bool = False,
        bias: bool = True,
        input_layer: bool = False,
    ) -> None:
        super().__init__()
        if aggr not in ("mean", "max", "sum"):
            raise ValueError(f"aggr is {aggr!r}, expected 'mean', 'max' or 'sum'")
        sources, destinations = (in_channels, in_channels) if isinstance(in_channels, int) else in_channels
        self.recipe = Recipe(mean=aggr == "mean", weighted=False)
        self.aggr = aggr
        self.normalize = normalize
        # Mean and sum are linear and may follow the weight; edges move the narrower side. A maximum must come first.
        self.aggregate_first = (
            aggr == "max" or sources < out_channels or (input_layer and sources == out_channels and not project)
        )
        self.lin = nn.Linear(sources, sources) if project else None
        self.lin_l = nn.Linear(sources, out_channels, bias=bias)
        self.lin_r = nn.Linear(destinations, out_channels, bias=False) if root_weight else None

    def reset_parameters(self) -> None:
        """The initialisation of ``nn.Linear`` for all of them."""
        for linear in (self.lin, self.lin_l, self.lin_r):
            if linear is not None:
                linear.reset_parameters()

    def forward(self, x: Features, graph: Graph, edge_weight: Tensor | None = None) -> Tensor:
        """Features [N, C_in] -> [N, C_out]; ([S, C_s], [D, C_d]) -> [D, C_out] on a rectangular graph."""
        sources, root = x if isinstance(x, tuple) else (x, x)
        if not isinstance(graph, GraphTensors):
            check_features(sources, self.lin_l.in_features, self.lin_l.weight)
            if self.lin_r is not None:
                check_features(root, self.lin_r.in_features, self.lin_r.weight)
            graph = self._tensors((sources, root), graph, edge_weight)
        out = self.propagate((sources, root), graph)
        if self.bias is not None:
            out = out + self.bias.to(out.dtype)
        return F.normalize(out, p=2.0, dim=-1) if self.normalize else out

    @property
    def bias(self) -> Tensor | None:
        """[C_out]."""
        return self.lin_l.bias

    def propagate(self, x: Features, graph: GraphTensors) -> Tensor:
        """The convolution without its bias and normalisation, for whoever does both with what follows."""
        sources, root = x if isinstance(x, tuple) else (x, x)
        if self.lin is not None:
            sources = self.lin(sources).relu()
        if self.aggregate_first:
            out = F.linear(self._aggregate(sources, graph), self.lin_l.weight)
        else:
            out = self._aggregate(F.linear(sources, self.lin_l.weight), graph)
        if self.lin_r is None:
            return out
        if out.dtype != self.lin_r.weight.dtype:
            return out + self.lin_r(root)  # under autocast, which casts nothing for an in-place product
        # The second product adds to the first as it goes; out of place it would copy the first before.
        return out.addmm_(root, self.lin_r.weight.t())

    def _aggregate(self, x: Tensor, graph: GraphTensors) -> Tensor:
        if self.aggr == "mean":
            return mean_neighbours(x, graph)
        return max_neighbours(x, graph) if self.aggr == "max" else sum_neighbours(x, graph)


class GATConv(_Conv):
    """Graph attention (https://arxiv.org/abs/1710.10903), torch-geometric's ``GATConv`` without edge features.

    Args:
        in_channels: Width of the input, or of (sources, destinations), which then have weights of their own.
        out_channels: Width of one head's output.
        heads: Number of heads.
        concat: Put heads side by side; else their mean is taken.
        negative_slope: Of the leaky relu on scores.
        dropout: Probability that a neighbour is left out in training.
        add_self_loops: Every node attends to itself, exactly once.
        bias: Add a bias.
        residual: Add the node's own features, times a weight.
    """

    def __init__(
        self,
        in_channels: int | tuple[int, int],
        out_channels: int,
        *,
        heads: int = 1,
        concat: bool = True,
        negative_slope: float = 0.2,
        dropout: float = 0.0,
        add_self_loops: bool = True,
        bias: bool = True,
        residual: bool = False,
    ) -> None:
        super().__init__()
        self.recipe = Recipe(self_loops=add_self_loops, weighted=False)
        self.concat = concat
        self.negative_slope = negative_slope
        self.dropout = dropout
        self.lin: nn.Linear | None = None
        self.lin_src: nn.Linear | None = None
        self.lin_dst: nn.Linear | None = None
        if isinstance(in_channels, int):
            self.lin = nn.Linear(in_channels, heads * out_channels, bias=False)
        else:
            self.lin_src = nn.Linear(in_channels[0], heads * out_channels, bias=False)
            self.lin_dst = nn.Linear(in_channels[1], heads * out_channels, bias=False)
        self.att_src = nn.Parameter(torch.empty(1, heads, out_channels))
        self.att_dst = nn.Parameter(torch.empty(1, heads, out_channels))
        total = heads * out_channels if concat else out_channels
        own = in_channels if isinstance(in_channels, int) else in_channels[1]
        self.res = nn.Linear(own, total, bias=False) if residual else None
        self.bias = nn.Parameter(torch.empty(total)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Glorot for weights and attention vectors, zero for the bias."""
        for linear in (self.lin, self.lin_src, self.lin_dst, self.res):
            if linear is not None:
                nn.init.xavier_uniform_(linear.weight)
        for vector in (self.att_src, self.att_dst):
            bound = math.sqrt(6.0 / (vector.shape[1] + vector.shape[2]))
            nn.init.uniform_(vector, -bound, bound)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Features, graph: Graph, edge_weight: Tensor | None = None) -> Tensor:
        """Features [N, C_in] -> [N, H * C] or, without concat, [N, C]; ([S, C_s], [D, C_d]) -> [D, ...]."""
        sources, own = x if isinstance(x, tuple) else (x, x)
        if not isinstance(graph, GraphTensors):
            for features, linear in ((sources, self.lin_src or self.lin), (own, self.lin_dst or self.lin)):
                assert linear is not None
                check_features(features, linear.in_features, linear.weight)
            graph = self._tensors((sources, own), graph, edge_weight)
        out = self.propagate(x, graph)
        if self.averages_later:
            out = out.mean(dim=1)
        return out if self.bias is None else out + self.bias.to(out.dtype)

    @property
    def averages_later(self) -> bool:
        """Whether ``propagate`` leaves the mean over heads to whoever follows."""
        return not self.concat and self.res is None

    def propagate(self, x: Features, graph: GraphTensors) -> Tensor:
        """The convolution without its bias and, but for a residual, its mean over heads: [D, H * C] or [D, H, C]."""
        sources, own = x if isinstance(x, tuple) else (x, x)
        heads, channels = self.att_src.shape[1:]
        if self.lin is not None:
            h_src = self.lin(sources).view(-1, heads, channels)
            h_dst = h_src if own is sources else self.lin(own).view(-1, heads, channels)
        else:
            assert self.lin_src is not None and self.lin_dst is not None
            h_src = self.lin_src(sources).view(-1, heads, channels)
            h_dst = self.lin_dst(own).view(-1, heads, channels)
        if h_dst is h_src:
            score_src, score_dst = head_scores(h_src, self.att_src, self.att_dst)
        else:
            (score_src,), (score_dst,) = head_scores(h_src, self.att_src), head_scores(h_dst, self.att_dst)
        dropout = self.dropout if self.training else 0.0
        out = attention(h_src, score_src, score_dst, graph, self.negative_slope, dropout)
        if self.averages_later:
            return out
        out = out.flatten(1) if self.concat else out.mean(dim=1)
        return out if self.res is None else out + self.res(own)
