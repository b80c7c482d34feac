"""The three convolutions, to build with or inside the layers of model.py, and the normalisations between them.

Each takes features and a graph: prepared tensors inside a region, elsewhere also a CSRGraph or a raw ``edge_index``,
which it prepares and remembers. Arguments are torch-geometric's. On a rectangular graph of S sources and D
destinations, outputs are of the destinations, and features a pair ([S, C_s], [D, C_d]); or those of the sources alone,
of which the destinations are the first.

Shape legend: N nodes (S sources and D destinations where they differ), E edges, C channels, H heads.
"""

import math
from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo import validate
from zoo.gnn.graph import CSRGraph, GraphMemory, Recipe, check_nodes
from zoo.ops.common import accumulation_dtype, differentiated, kernels_run
from zoo.ops.csr import GraphTensors, add_bias, attention, max_neighbours, mean_neighbours, sum_neighbours

Graph: TypeAlias = GraphTensors | CSRGraph | Tensor
Graphs: TypeAlias = tuple[GraphTensors, ...]  # of a sampled batch, one for each layer
Features: TypeAlias = Tensor | tuple[Tensor, Tensor]  # of all nodes, or of sources and of destinations
VECTOR = 8  # values of half precision in 16 bytes
MANY_NODES = 2**16  # from here on padding the weights pays off


class _Conv(nn.Module):
    """How a graph becomes tensors. The product comes before or after the sum, where edges move fewer values."""

    recipe: Recipe

    def __init__(self) -> None:
        super().__init__()
        self._memory = GraphMemory()

    @property
    def weight(self) -> Tensor:
        """A parameter whose dtype and device the features must have."""
        return next(self.parameters())

    def _tensors(
        self, graph: Graph, edge_weight: Tensor | None, x: Features, *linears: nn.Linear | None
    ) -> GraphTensors:
        """Prepare a graph for features that go through one layer or, of sources and destinations, through two."""
        if isinstance(graph, GraphTensors):
            if edge_weight is not None:
                raise ValueError("edge_weight was given with prepared tensors; use graph.with_weights(edge_weight)")
            return graph
        if isinstance(x, tuple) and not len(x) == len(linears) == 2:
            takes = "features of the sources alone" if len(linears) == 1 else "two tensors, sources and destinations"
            raise TypeError(f"x is a tuple of {len(x)}, expected {takes}")
        sources: Any
        own: Any
        sources, own = x if isinstance(x, tuple) else (x, x)
        for each, linear in zip((sources, own), linears, strict=False):
            if linear is not None:
                validate.tensor("x", each, f"N {linear.in_features}", kinds="floating", like=linear.weight)
            elif not isinstance(each, Tensor):
                found = type(each).__name__
                raise TypeError(f"x of the destinations is a {found}, expected a tensor: torch.empty(D, 0)")
        prepared = self._memory.prepare(graph, edge_weight, sources, self.recipe, own.shape[0])
        check_nodes(sources, prepared.num_sources, prepared.device)
        if own is not sources:
            check_nodes(own, prepared.num_destinations, prepared.device)
        elif len(linears) == 2 and prepared.num_destinations > own.shape[0]:
            raise ValueError(
                f"the graph has {prepared.num_destinations} destinations and x {own.shape[0]} rows, of which they must "
                "be the first; pass x=(sources, destinations)"
            )
        return prepared.tensors


class GCNConv(_Conv):
    """Graph convolution of Kipf and Welling (https://arxiv.org/abs/1609.02907), torch-geometric's ``GCNConv``.

    Self-loops follow ``normalize`` when left out. ``input_layer``: the features need no gradient, so at equal widths
    neighbours are summed first, and the backward need not walk the edges. ``improved`` self-loops weigh 2, on graphs
    with edge weights alone.
    """

    def __init__(
        self, in_channels: int, out_channels: int, *, improved: bool = False, add_self_loops: bool | None = None,
        normalize: bool = True, bias: bool = True, input_layer: bool = False,
    ) -> None:  # fmt: skip
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

    def forward(
        self, x: Tensor, graph: Graph, edge_weight: Tensor | None = None, *, relu: bool = False
    ) -> Tensor:  # fmt: skip
        """Features [N, C_in] -> [N, C_out]; a rectangular graph without normalisation takes [S, C_in] to [D, C_out].

        ``relu`` comes last; where no gradient is recorded, the kernel before it applies it.
        """
        graph = self._tensors(graph, edge_weight, x, self.lin)
        if self.aggregate_first:
            return _linear(sum_neighbours(x, graph), self.lin.weight, self.bias, relu)
        table = _product(x, self.lin.weight)
        return sum_neighbours(table, graph, bias=self.bias, channels=self.lin.out_features, relu=relu)


class SAGEConv(_Conv):
    """GraphSAGE convolution (https://arxiv.org/abs/1706.02216), torch-geometric's ``SAGEConv``.

    ``in_channels`` may be (sources, destinations), ``aggr`` is ``"mean"``, ``"max"`` or ``"sum"``, and ``input_layer``
    is as for ``GCNConv``.
    """

    def __init__(
        self, in_channels: int | tuple[int, int], out_channels: int, *, aggr: str = "mean", normalize: bool = False,
        root_weight: bool = True, project: bool = False, bias: bool = True, input_layer: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        if aggr not in ("mean", "max", "sum"):
            raise ValueError(f"aggr is {aggr!r}, expected 'mean', 'max' or 'sum'")
        sources, destinations = (in_channels, in_channels) if isinstance(in_channels, int) else in_channels
        self.recipe = Recipe(mean=aggr == "mean", weighted=False)
        self.aggr = aggr
        self.normalize = normalize
        # Mean and sum may follow the weight, so that edges move the narrower side; a maximum may not.
        no_gradient = input_layer and not project
        self.aggregate_first = aggr == "max" or sources < out_channels or (no_gradient and sources == out_channels)
        # One product serves neighbours and the node itself.
        self.in_one = isinstance(in_channels, int) and root_weight and not project and aggr != "max"
        self.lin = nn.Linear(sources, sources) if project else None
        self.lin_l = nn.Linear(sources, out_channels, bias=bias)
        self.lin_r = nn.Linear(destinations, out_channels, bias=False) if root_weight else None

    def reset_parameters(self) -> None:
        """As ``nn.Linear`` draws them."""
        for linear in (self.lin, self.lin_l, self.lin_r):
            if linear is not None:
                linear.reset_parameters()

    def forward(
        self, x: Features, graph: Graph, edge_weight: Tensor | None = None, *, relu: bool = False
    ) -> Tensor:  # fmt: skip
        """Features [N, C_in] -> [N, C_out]; ([S, C_s], [D, C_d]) -> [D, C_out]. ``relu`` as for ``GCNConv``."""
        graph = self._tensors(graph, edge_weight, x, self.lin_l, self.lin_r)
        sources, root = x if isinstance(x, tuple) else (x, x)
        weight, bias, fewer = self.lin_l.weight, self.lin_l.bias, graph.rowptr.shape[0] <= root.shape[0]
        aggregate: Any = {"mean": mean_neighbours, "max": max_neighbours, "sum": sum_neighbours}[self.aggr]
        if self.in_one and isinstance(x, Tensor):
            assert self.lin_r is not None
            weights, last = (weight, self.lin_r.weight), relu and not self.normalize
            if self.aggregate_first or fewer:
                # With fewer rows than the features have, a product before the sum would compute all of them.
                out = _linear(aggregate(x, graph, own="concat"), torch.cat(weights, dim=1), bias, last)
            else:
                width = weight.shape[0]
                out = aggregate(_product(x, *weights), graph, own="add", bias=bias, channels=width, relu=last)
            if last:
                return out
        else:
            if self.lin is not None:
                sources = self.lin(sources).relu()
            if self.aggregate_first:
                out = F.linear(aggregate(sources, graph), weight)
            else:
                out = aggregate(F.linear(sources, weight), graph)
            if self.lin_r is not None:
                root = root[: graph.rowptr.shape[0] - 1] if fewer else root
                if out.dtype == root.dtype == self.lin_r.weight.dtype:
                    # In place the second product adds to the first; out of place torch would copy the first.
                    out = out.addmm_(root, self.lin_r.weight.t())
                else:  # under autocast, which casts nothing for an in-place product
                    out = out + self.lin_r(root)
            out = add_bias(out, bias)
        out = F.normalize(out, p=2.0, dim=-1) if self.normalize else out
        return out.relu() if relu else out


class GATConv(_Conv):
    """Graph attention (https://arxiv.org/abs/1710.10903), torch-geometric's ``GATConv`` without edge features.

    ``out_channels`` is the width of one head; heads stand side by side, or with ``concat=False`` their mean is taken.
    ``in_channels`` may be (sources, destinations), which then have weights of their own. In training a neighbour is
    left out with probability ``dropout``.
    """

    def __init__(
        self, in_channels: int | tuple[int, int], out_channels: int, *, heads: int = 1, concat: bool = True,
        negative_slope: float = 0.2, dropout: float = 0.0, add_self_loops: bool = True, bias: bool = True,
        residual: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        validate.count("heads", heads)
        if not 0.0 <= dropout <= 1.0:
            raise ValueError(f"dropout is {dropout!r}, expected a probability, 0 to 1")
        self.recipe = Recipe(self_loops=add_self_loops, weighted=False)
        self.concat = concat
        self.negative_slope = negative_slope
        self.dropout = dropout
        self.lin = self.lin_src = self.lin_dst = None
        if isinstance(in_channels, int):
            self.lin = nn.Linear(in_channels, heads * out_channels, bias=False)
            own = in_channels
        else:
            sources, own = in_channels
            self.lin_src = nn.Linear(sources, heads * out_channels, bias=False)
            self.lin_dst = nn.Linear(own, heads * out_channels, bias=False)
        self.att_src = nn.Parameter(torch.empty(1, heads, out_channels))
        self.att_dst = nn.Parameter(torch.empty(1, heads, out_channels))
        total = heads * out_channels if concat else out_channels
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

    def forward(
        self, x: Features, graph: Graph, edge_weight: Tensor | None = None, *, relu: bool = False
    ) -> Tensor:  # fmt: skip
        """Features [N, C_in] -> [N, H * C] or, without concat, [N, C]; ([S, C_s], [D, C_d]) -> [D, ...].

        ``relu`` comes last.
        """
        of_sources, of_own = self.lin or self.lin_src, self.lin or self.lin_dst
        assert of_sources is not None and of_own is not None
        graph = self._tensors(graph, edge_weight, x, of_sources, of_own)
        sources, own = x if isinstance(x, tuple) else (x, x)
        # Scores are linear in the features: a product of the weights gives them in the same pass. In TF32 they differ
        # from torch-geometric's by 1e-4, with the same error.
        weight, a_destination = of_sources.weight, None
        if isinstance(x, Tensor) and of_own is of_sources:
            table = F.linear(x, torch.cat([weight, _score_weights(weight, self.att_src, self.att_dst)]))
        else:
            table = F.linear(sources, torch.cat([weight, _score_weights(weight, self.att_src)]))
            a_destination = F.linear(own, _score_weights(of_own.weight, self.att_dst))
        dropout, heads = self.dropout if self.training else 0.0, self.att_src.shape[1]
        ends = self.res is None
        out = attention(
            table, a_destination, heads, graph, self.negative_slope, dropout, average=not self.concat,
            bias=self.bias if ends else None, relu=relu and ends,
        )  # fmt: skip
        if self.res is None:
            return out
        out = add_bias(out + self.res(own[: out.shape[0]] if out.shape[0] < own.shape[0] else own), self.bias)
        return out.relu() if relu else out


def _score_weights(weight: Tensor, *vectors: Tensor) -> Tensor:
    """What maps features to the scores of every head: weight [H C, C_in], K vectors [1, H, C] -> [K H, C_in]."""
    stacked = torch.cat(vectors).transpose(0, 1)  # [H, K, C]
    by_head = torch.bmm(stacked, weight.view(stacked.shape[0], stacked.shape[2], -1))  # [H, K, C_in]
    return by_head.transpose(0, 1).reshape(-1, weight.shape[1])


def _product(x: Tensor, *weights: Tensor) -> Tensor:
    """Features [N, C_in] times K weights [C_out, C_in], side by side: [N, K C], where C is C_out or a little more.

    For many nodes on a GPU zeros pad each weight's part to whole vectors, which are written and read faster.
    """
    missing = -weights[0].shape[0] % VECTOR
    if missing and x.shape[0] >= MANY_NODES and kernels_run(x):
        weights = tuple(F.pad(weight, (0, 0, 0, missing)) for weight in weights)
    return F.linear(x, weights[0] if len(weights) == 1 else torch.cat(weights))


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, relu: bool) -> Tensor:
    """``F.linear``, and a relu that costs no pass over the result where no gradient is wanted."""
    if (
        relu and bias is not None and x.dtype == weight.dtype == bias.dtype and kernels_run(x, weight, bias)
        and not differentiated(x, weight, bias) and not torch.is_autocast_enabled(x.device.type)
    ):  # fmt: skip
        return torch._addmm_activation(bias, x, weight.t())
    out = F.linear(x, weight, bias)
    return out.relu() if relu else out


class GraphBatchNorm(nn.BatchNorm1d):
    """Batch normalisation over nodes, torch-geometric's ``BatchNorm``: [N, C] -> [N, C], ``momentum`` is a number.

    A single node is refused in training. Where the last rows are padding the host does not know the number of nodes,
    and a single one becomes the bias.
    """

    @property
    def over_nodes(self) -> bool:
        """True if a node's output depends on other nodes: padding must then be left out."""
        return self.training or self.running_mean is None

    def forward(self, x: Tensor, rows: Tensor | None = None) -> Tensor:
        """Features [N, C] -> [N, C]; ``rows`` [] int64, how many of them are nodes, or None for all."""
        return self._over_first(x, rows) if rows is not None and self.over_nodes else super().forward(x)

    def _over_first(self, x: Tensor, rows: Tensor) -> Tensor:
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


class GraphLayerNorm(nn.Module):
    """Layer normalisation, torch-geometric's ``LayerNorm``: [N, C] -> [N, C].

    Over all nodes and channels (``mode="graph"``, eps added to the deviation), or over the channels of each node
    (``"node"``, eps added to the variance).
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
        values = x.to(accumulation_dtype(x.dtype))
        mean, variance = _moments(values, rows, (0, 1))
        deviation = variance.clamp(min=torch.finfo(values.dtype).tiny).sqrt()  # the root of zero has no derivative
        return ((values - mean) / (deviation + self.eps)).to(x.dtype)


def _moments(x: Tensor, rows: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Mean and variance over some dimensions of x [N, C], of the first ``rows`` rows; the others are padding."""
    is_node = (torch.arange(x.shape[0], device=x.device) < rows)[:, None]
    count = rows * (x.shape[1] if 1 in dims else 1)
    mean = torch.where(is_node, x, 0).sum(dims) / count
    return mean, torch.where(is_node, x - mean, 0).square().sum(dims) / count


# By the names that torch-geometric gives them.
ACTIVATIONS: dict[str, type[nn.Module]] = {
    **{"relu": nn.ReLU, "relu6": nn.ReLU6, "leaky_relu": nn.LeakyReLU, "elu": nn.ELU, "celu": nn.CELU, "selu": nn.SELU},
    **{"gelu": nn.GELU, "silu": nn.SiLU, "mish": nn.Mish, "softplus": nn.Softplus, "identity": nn.Identity},
    **{"tanh": nn.Tanh, "sigmoid": nn.Sigmoid, "hardtanh": nn.Hardtanh, "hardswish": nn.Hardswish},
}
NORMS: dict[str, type[nn.Module]] = {"batch": GraphBatchNorm, "layer": GraphLayerNorm}


def make(
    kind: str, classes: Mapping[str, type[nn.Module]], name: str | None, options: Mapping[str, Any], *sizes: int
) -> nn.Module:
    """A norm or an activation by name; None for none. ValueError if there is none, or its options do not fit."""
    if name is None:
        return nn.Identity()
    if name not in classes:
        raise ValueError(f"{kind} is {name!r}, expected None or one of {', '.join(classes)}")
    if options.get("momentum", 0.1) is None:
        raise ValueError("norm_kwargs has momentum=None, a cumulative average that reads the device at each step")
    if "inplace" in options:  # it would write into what an operator returned, which may be needed elsewhere
        options = {**options, "inplace": False}
    try:
        return classes[name](*sizes, **options)
    except TypeError as error:
        raise ValueError(f"{kind}_kwargs is {dict(options)}, which {name} does not take: {error}") from error
