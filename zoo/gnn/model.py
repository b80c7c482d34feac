"""GCN, GAT and GraphSAGE, and their convolutions, for use in the models' layers or alone.

    x [N, C_in] ─ layer ─ layer ─ ... ─ conv ─▶ [N, C_out]         layer: conv ─ epilogue (bias ─ norm ─ act ─ dropout)
    edge_index ─ prepared once ─▶ graph ─┴─ to every conv          with jk all are layers, and a linear head follows

Sorting, self-loops and degrees depend only on the graph, and are done once, outside the regions. A layer is a region.
The first layer, the last and all others compile to one graph each, at any depth.

A convolution takes features and a graph: prepared tensors inside a region, elsewhere also a CSRGraph or a raw
``edge_index``, which it prepares and caches. Arguments are torch-geometric's. On a rectangular graph of S sources and D
destinations, outputs belong to the destinations. Features are a pair ([S, C_s], [D, C_d]), or only those of the
sources, whose first D are the destinations.

Shape legend: N nodes (S sources and D destinations where they differ), E edges, C channels, H heads.
"""

from collections.abc import Sequence
from typing import Any, ClassVar, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo import validate
from zoo.engine.region import Region
from zoo.gnn.config import ACTIVATIONS, NORMS, GATConfig, GCNConfig, GNNConfig, SAGEConfig, make
from zoo.gnn.graph import CSRGraph, GraphMemory, Recipe, check_nodes, dynamo_disabled
from zoo.ops.common import accumulation_dtype, differentiated, is_unmodified, kernels_run
from zoo.ops.csr import GraphTensors, add_bias, attention, max_neighbours, mean_neighbours, sum_neighbours

Graph: TypeAlias = GraphTensors | CSRGraph | Tensor
Graphs: TypeAlias = tuple[GraphTensors, ...]  # the graphs of a sampled batch, one per layer
Features: TypeAlias = Tensor | tuple[Tensor, Tensor]  # features of all nodes, or of sources and destinations
VECTOR = 8  # half-precision values in 16 bytes
MANY_NODES = 2**16  # minimum nodes for which padding the weights pays off


class _Conv(nn.Module):
    """Base of convolutions: prepares graphs. The product runs before or after the sum, so that edges move less data."""

    recipe: Recipe

    def __init__(self, *widths: int) -> None:
        super().__init__()
        for width in widths:
            validate.count("the number of channels", width)
        self._memory = GraphMemory()

    @property
    def weight(self) -> Tensor:
        """The parameter whose dtype and device the features must match."""
        return next(self.parameters())

    def _tensors(
        self, graph: Graph, edge_weight: Tensor | None, x: Features, *linears: nn.Linear | None
    ) -> GraphTensors:
        """Prepare a graph for features with one linear layer, or with two for sources and destinations."""
        if isinstance(graph, GraphTensors):
            if edge_weight is not None:
                raise ValueError("edge_weight was given with prepared tensors; use graph.with_weights(edge_weight)")
            return graph
        if isinstance(x, tuple) and not len(x) == len(linears) == 2:
            takes = "features of the sources alone" if len(linears) == 1 else "two tensors, sources and destinations"
            raise TypeError(f"x is a tuple of {len(x)}, expected {takes}")
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

    ``add_self_loops`` defaults to ``normalize``. With ``input_layer`` the features need no gradient, so at equal widths
    the sum runs first and the backward need not walk the edges. ``improved`` self-loops weigh 2, only on graphs with
    edge weights.
    """

    def __init__(
        self, in_channels: int, out_channels: int, *, improved: bool = False, add_self_loops: bool | None = None,
        normalize: bool = True, bias: bool = True, input_layer: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(in_channels, out_channels)
        add_self_loops = normalize if add_self_loops is None else add_self_loops
        if add_self_loops and not normalize:
            raise ValueError("add_self_loops is True and normalize False: self-loops are added by the normalisation")
        self.recipe = Recipe(self_loops=add_self_loops, normalize=normalize, improved=improved and add_self_loops)
        # (A X) W and A (X W) differ only in rounding; edges move the narrower of X and X W.
        self.aggregate_first = in_channels < out_channels or (input_layer and in_channels == out_channels)
        self.lin = nn.Linear(in_channels, out_channels, bias=False)
        self.bias = nn.Parameter(torch.empty(out_channels)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Glorot for the weight, zero for the bias."""
        nn.init.xavier_uniform_(self.lin.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor, edge_index: Graph, edge_weight: Tensor | None = None, *, relu: bool = False) -> Tensor:
        """Features [N, C_in] -> [N, C_out]; a rectangular graph without normalisation takes [S, C_in] to [D, C_out].

        ``relu`` comes last. Without gradients the preceding kernel applies it.
        """
        graph = self._tensors(edge_index, edge_weight, x, self.lin)
        if not is_unmodified(self.lin):  # has an adapter or a hook
            return sum_neighbours(self.lin(x), graph, bias=self.bias, relu=relu)
        if self.aggregate_first:
            return _linear(sum_neighbours(x, graph), self.lin.weight, self.bias, relu)
        table = _product(x, self.lin.weight)
        return sum_neighbours(table, graph, bias=self.bias, channels=self.lin.out_features, relu=relu)


class SAGEConv(_Conv):
    """GraphSAGE convolution (https://arxiv.org/abs/1706.02216), torch-geometric's ``SAGEConv``.

    ``in_channels`` may be (sources, destinations), ``aggr`` is ``"mean"``, ``"max"`` or ``"sum"``, and ``input_layer``
    is the same as in ``GCNConv``.
    """

    def __init__(
        self, in_channels: int | tuple[int, int], out_channels: int, aggr: str = "mean", *, normalize: bool = False,
        root_weight: bool = True, project: bool = False, bias: bool = True, input_layer: bool = False,
    ) -> None:  # fmt: skip
        sources, destinations = in_channels if isinstance(in_channels, tuple | list) else (in_channels, in_channels)
        super().__init__(sources, destinations, out_channels)
        if aggr not in ("mean", "max", "sum"):
            raise ValueError(f"aggr is {aggr!r}, expected 'mean', 'max' or 'sum'")
        self.recipe = Recipe(mean=aggr == "mean", weighted=False)
        self.aggr, self.normalize = aggr, normalize
        # Mean and sum may follow the product, so that edges move the narrower features; a maximum may not.
        no_gradient = input_layer and not project
        self.aggregate_first = aggr == "max" or sources < out_channels or (no_gradient and sources == out_channels)
        # One product computes the parts of the neighbours and of the node itself.
        self.in_one = isinstance(in_channels, int) and root_weight and not project and aggr != "max"
        self.lin = nn.Linear(sources, sources) if project else None
        self.lin_l = nn.Linear(sources, out_channels, bias=bias)
        self.lin_r = nn.Linear(destinations, out_channels, bias=False) if root_weight else None

    def reset_parameters(self) -> None:
        """Initialise like ``nn.Linear``."""
        for linear in (self.lin, self.lin_l, self.lin_r):
            if linear is not None:
                linear.reset_parameters()

    def forward(
        self, x: Features, edge_index: Graph, edge_weight: Tensor | None = None, *, relu: bool = False
    ) -> Tensor:
        """Features [N, C_in] -> [N, C_out]; ([S, C_s], [D, C_d]) -> [D, C_out]. ``relu`` as for ``GCNConv``."""
        graph = self._tensors(edge_index, edge_weight, x, self.lin_l, self.lin_r)
        sources, root = x if isinstance(x, tuple) else (x, x)
        weight, fewer = self.lin_l.weight, graph.rowptr.shape[0] <= root.shape[0]
        aggregate: Any = {"mean": mean_neighbours, "max": max_neighbours, "sum": sum_neighbours}[self.aggr]
        whole = is_unmodified(self.lin_l)  # without an adapter or a hook
        bias = self.lin_l.bias if whole else None
        if whole and self.in_one and self.lin_r is not None and is_unmodified(self.lin_r) and isinstance(x, Tensor):
            weights, last = (weight, self.lin_r.weight), relu and not self.normalize
            if self.aggregate_first or fewer:
                # With fewer destinations than sources, a product before the sum would compute unneeded rows.
                out = _linear(aggregate(x, graph, own="concat"), torch.cat(weights, dim=1), bias, last)
            else:
                width = weight.shape[0]
                out = aggregate(_product(x, *weights), graph, own="add", bias=bias, channels=width, relu=last)
            if last:
                return out
        else:
            if self.lin is not None:
                sources = self.lin(sources).relu()
            if not whole:
                out = self.lin_l(aggregate(sources, graph))
            elif self.aggregate_first:
                out = F.linear(aggregate(sources, graph), weight)
            else:
                out = aggregate(F.linear(sources, weight), graph)
            if self.lin_r is not None:
                root = root[: graph.rowptr.shape[0] - 1] if fewer else root
                out = out + self.lin_r(root)
            out = add_bias(out, bias)
        out = F.normalize(out, p=2.0, dim=-1) if self.normalize else out
        return out.relu() if relu else out


class GATConv(_Conv):
    """Graph attention (https://arxiv.org/abs/1710.10903), torch-geometric's ``GATConv`` without edge features.

    ``out_channels`` is the width of one head. Heads are concatenated, or averaged with ``concat=False``.
    ``in_channels`` may be (sources, destinations), which then have separate weights. Training drops a neighbour with
    probability ``dropout``.
    """

    def __init__(
        self, in_channels: int | tuple[int, int], out_channels: int, heads: int = 1, *, concat: bool = True,
        negative_slope: float = 0.2, dropout: float = 0.0, add_self_loops: bool = True, bias: bool = True,
        residual: bool = False,
    ) -> None:  # fmt: skip
        sources, own = in_channels if isinstance(in_channels, tuple | list) else (in_channels, in_channels)
        super().__init__(sources, own, out_channels)
        validate.count("heads", heads)
        if not 0.0 <= dropout <= 1.0:
            raise ValueError(f"dropout is {dropout!r}, expected a probability, 0 to 1")
        self.recipe = Recipe(self_loops=add_self_loops, weighted=False)
        self.concat, self.negative_slope, self.dropout = concat, negative_slope, dropout
        shared = isinstance(in_channels, int)
        self.lin = nn.Linear(sources, heads * out_channels, bias=False) if shared else None
        self.lin_src = None if shared else nn.Linear(sources, heads * out_channels, bias=False)
        self.lin_dst = None if shared else nn.Linear(own, heads * out_channels, bias=False)
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
            nn.init.xavier_uniform_(vector[0])
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(
        self, x: Features, edge_index: Graph, edge_weight: Tensor | None = None, *, relu: bool = False
    ) -> Tensor:
        """Features [N, C_in] -> [N, H * C] or, without concat, [N, C]; ([S, C_s], [D, C_d]) -> [D, ...].

        ``relu`` comes last.
        """
        of_sources, of_own = self.lin or self.lin_src, self.lin or self.lin_dst
        assert of_sources is not None and of_own is not None
        graph = self._tensors(edge_index, edge_weight, x, of_sources, of_own)
        sources, own = x if isinstance(x, tuple) else (x, x)
        # Scores are linear in the features, so a product of the weights computes features and scores in one pass. In
        # TF32 the scores differ from torch-geometric's by 1e-4, with the same error.
        weight, a_destination = of_sources.weight, None
        if not (is_unmodified(of_sources) and is_unmodified(of_own)):  # has an adapter or a hook
            table = of_sources(sources)
            a_destination = _scores(table if own is sources and of_own is of_sources else of_own(own), self.att_dst)
            table = torch.cat([table, _scores(table, self.att_src)], dim=1)
        elif isinstance(x, Tensor) and of_own is of_sources:
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


def _scores(x: Tensor, vector: Tensor) -> Tensor:
    """Every head's scores of features [N, H C] for a vector [1, H, C]: [N, H]."""
    return (x.unflatten(1, vector.shape[1:]) * vector).sum(-1)


def _score_weights(weight: Tensor, *vectors: Tensor) -> Tensor:
    """Weights that map features to every head's scores: weight [H C, C_in], K vectors [1, H, C] -> [K H, C_in]."""
    stacked = torch.cat(vectors).transpose(0, 1)  # [H, K, C]
    by_head = torch.bmm(stacked, weight.view(stacked.shape[0], stacked.shape[2], -1))  # [H, K, C_in]
    return by_head.transpose(0, 1).reshape(-1, weight.shape[1])


def _product(x: Tensor, *weights: Tensor) -> Tensor:
    """Features [N, C_in] times K weights [C_out, C_in], concatenated: [N, K C], where C is C_out or a little more.

    For many nodes on a GPU zeros pad each weight's part to whole vectors, whose reads and writes are faster.
    """
    missing = -weights[0].shape[0] % VECTOR
    if missing and x.shape[0] >= MANY_NODES and kernels_run(x):
        weights = tuple(F.pad(weight, (0, 0, 0, missing)) for weight in weights)
    return F.linear(x, weights[0] if len(weights) == 1 else torch.cat(weights))


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, relu: bool) -> Tensor:
    """``F.linear`` and a relu; without gradients the relu needs no extra pass."""
    if (
        relu and bias is not None and x.dtype == weight.dtype == bias.dtype and kernels_run(x, weight, bias)
        and not differentiated(x, weight, bias) and not torch.is_autocast_enabled(x.device.type)
    ):  # fmt: skip
        return torch._addmm_activation(bias, x, weight.t())
    out = F.linear(x, weight, bias)
    return out.relu() if relu else out


def make_conv(config: GNNConfig, index: int) -> GCNConv | GATConv | SAGEConv:
    """The convolution of one layer."""
    in_channels, out_channels = config.widths()[index]
    options: dict[str, Any] = {name: getattr(config, name) for name in config.conv_fields()}
    if isinstance(config, GATConfig):
        options["dropout"] = config.dropout
        options["concat"] = config.concat and not (config.ends_in_conv and index == config.num_layers - 1)
        if options["concat"]:
            out_channels //= config.heads
    else:
        options["input_layer"] = index == 0
    return MODELS[type(config)][1](in_channels, out_channels, **options)


class GNNHead(nn.Module):
    """The end of a model with jumping knowledge: a linear layer over the last or all layers' outputs."""

    def __init__(self, config: GNNConfig) -> None:
        super().__init__()
        self.jk = config.jk
        width = config.hidden_channels * (config.num_layers if config.jk == "cat" else 1)
        self.lin = nn.Linear(width, config.output_width)

    def forward(self, xs: Sequence[Tensor]) -> Tensor:
        """Outputs of all layers, each [N, C] -> [N, C_out]."""
        if self.jk == "cat":
            return self.lin(torch.cat(list(xs), dim=-1))
        return self.lin(torch.stack(list(xs), dim=-1).max(dim=-1).values if self.jk == "max" else xs[-1])


class GNNEpilogue(nn.Module):
    """Norm, activation and dropout after a hidden layer's convolution; equal in all three models."""

    def __init__(self, config: GNNConfig) -> None:
        super().__init__()
        self.norm = make("norm", NORMS, config.norm, config.norm_kwargs, config.hidden_channels)
        self.act = make("act", ACTIVATIONS, config.act, config.act_kwargs)
        self.act_first = config.act_first
        # Without dropout a training graph ends in one pointwise operation, which needs no Inductor.
        self.dropout = nn.Dropout(config.dropout) if config.dropout > 0 else nn.Identity()

    def forward(self, x: Tensor, rows: Tensor | None = None) -> Tensor:
        """Sums of a convolution [N, C] -> [N, C]; ``rows`` [] int64: number of rows before padding, None for all."""
        x = self._norm(self.act(x), rows) if self.act_first else self.act(self._norm(x, rows))
        return self.dropout(x)

    def _norm(self, x: Tensor, rows: Tensor | None) -> Tensor:
        # Padding affects other rows only in a mean over all rows.
        return self.norm(x, rows) if rows is not None and getattr(self.norm, "over_nodes", False) else self.norm(x)


class GNNLayer(nn.Module):
    """The region: a convolution and its epilogue. With ``jk=None`` the last layer has no epilogue."""

    def __init__(self, config: GNNConfig, index: int) -> None:
        super().__init__()
        self.conv = make_conv(config, index)
        last = index == config.num_layers - 1 and config.jk is None
        self.epilogue = None if last else GNNEpilogue(config)

    def forward(self, x: Tensor, graph: GraphTensors) -> Tensor:
        """Features [N, C_in] -> [N, C_out]; for a sampled batch only the first D rows, [D, C_out]."""
        if x.dtype == torch.float32 and torch.is_autocast_enabled(x.device.type):
            # The product would round x anyway; rounded before the sum, edges move half the bytes.
            x = x.to(torch.get_autocast_dtype(x.device.type))
        if self._ends_in_relu():
            return self.conv(x, graph, relu=True)
        x = self.conv(x, graph)
        return x if self.epilogue is None else self.epilogue(x, graph.rows)

    def _ends_in_relu(self) -> bool:
        """Whether the epilogue is only a relu, and neither the convolution nor the relu has hooks."""
        after = self.epilogue
        if after is None or not is_unmodified(after, GNNEpilogue) or not is_unmodified(after.act, nn.ReLU):
            return False
        dropped = not after.dropout.training and is_unmodified(after.dropout, nn.Dropout)
        nothing_else = is_unmodified(after.norm, nn.Identity) and (dropped or is_unmodified(after.dropout, nn.Identity))
        return nothing_else and any(is_unmodified(self.conv, cls) for cls in (GCNConv, GATConv, SAGEConv))


# A graph has few kernels. This process compiles them before a worker could start. Their block sizes do not matter.
_PASSES = {"compile_threads": 1, "triton.autotune_pointwise": False}
REGIONS = (
    Region(GNNLayer, graphs=3, why="product, sum over edges, epilogue: first, last and other layers", options=_PASSES),
    Region(GNNHead, graphs=1, why="joins all layers' outputs without writing the join where it can", options=_PASSES),
)


class GNN(nn.Module):
    """Base of the three models: a chain of layers over a graph, which is prepared from raw edges if necessary."""

    config: GNNConfig
    regions: ClassVar[tuple[Region, ...]] = REGIONS
    static_arguments: ClassVar[tuple[str, ...]] = ("edge_index",)

    def __init__(self, config: GNNConfig) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(GNNLayer(config, index) for index in range(config.num_layers))
        self.head = None if config.jk is None else GNNHead(config)
        self.recipe: Recipe = self._first_conv.recipe
        self._memory = GraphMemory()

    @dynamo_disabled
    def prepare(
        self, edge_index: Tensor | CSRGraph, edge_weight: Tensor | None = None, num_nodes: int | None = None
    ) -> CSRGraph:
        """Prepare the graph for this model. Pass the result to ``forward`` as ``edge_index``.

        ``forward`` prepares raw edges itself and caches the last few graphs, but only a prepared graph works in
        ``torch.compile(model, fullgraph=True)`` and in an outer CUDA graph. Takes ``edge_index`` [2, E] int64 or a
        CSRGraph, ``edge_weight`` [E] for GCN, and the number of nodes N. The default N omits isolated nodes at the end.
        Errors are those of ``CSRGraph.from_edge_index``.
        """
        if not isinstance(edge_index, CSRGraph):
            edge_index = CSRGraph.from_edge_index(edge_index, edge_weight, num_nodes)
        else:
            if num_nodes not in (None, edge_index.num_sources):
                raise ValueError(f"num_nodes is {num_nodes}, but the graph has {edge_index.num_sources}; leave it out")
            if edge_weight is not None:
                edge_index = edge_index.with_weights(edge_weight)
        return edge_index.prepared(self.recipe, accumulation_dtype(self._first_conv.weight.dtype))

    @property
    def _first_conv(self) -> GCNConv | GATConv | SAGEConv:
        return self.layers[0].conv  # type: ignore[return-value]

    def forward(self, x: Tensor, edge_index: Tensor | CSRGraph | Graphs, edge_weight: Tensor | None = None) -> Tensor:
        """Features [N, C_in] -> [N, C_out].

        ``edge_index`` is [2, E] int64, with sources in the first row, or a CSRGraph. A GCN with raw edges also takes
        factors ``edge_weight`` [E]. A GraphSAGE also takes the features of ``SampledBatch.nodes`` with the batch's
        ``graphs`` -> [B, C_out]. Raises TypeError or ValueError if an input does not fit, before anything runs.
        """
        outputs: list[Tensor] = []
        for layer, graph in zip(self.layers, self._graphs(x, edge_index, edge_weight), strict=True):
            x = layer(x, graph)
            if self.config.jk in ("cat", "max"):
                outputs.append(x)
        if self.head is None:
            return x
        # In a sampled batch each layer has fewer rows.
        rows = x.shape[0]
        return self.head([each if each.shape[0] == rows else each[:rows] for each in outputs] or [x])

    def _graphs(self, x: Tensor, edge_index: Tensor | CSRGraph | Graphs, edge_weight: Tensor | None) -> Graphs:
        validate.tensor("x", x, f"N {self.config.in_channels}", kinds="floating", like=self._first_conv.weight)
        if isinstance(edge_index, tuple):
            if edge_weight is not None or not isinstance(self._first_conv, SAGEConv):
                takes = "; only a GraphSAGE without edge weights takes a sampled batch's graphs"
                raise ValueError(f"edge_index is a tuple, expected a tensor [2, E] or a CSRGraph{takes}")
            _check_sampled(x, edge_index, self.config.num_layers)
            return edge_index
        graph, wanted = edge_index, (self.recipe, accumulation_dtype(x.dtype))
        if not isinstance(graph, CSRGraph) or edge_weight is not None or (graph.recipe, graph.weight_dtype) != wanted:
            graph = self._memory.prepare(graph, edge_weight, x, self.recipe)
        if not graph.is_square:
            raise ValueError("the graph is rectangular; layers need one set of nodes: use convolutions on their own")
        tensors = graph.tensors
        check_nodes(x, tensors.rowptr.shape[0] - 1, tensors.rowptr.device)
        return (tensors,) * self.config.num_layers

    def region_sizes(self, x: Tensor, edge_index: Tensor | CSRGraph | Graphs, edge_weight: Tensor | None = None) -> int:
        """Number of input sizes that the regions see in one call; see ``zoo.enforce_budget``."""
        if not isinstance(edge_index, tuple):
            return 1
        return len({(graph.rowptr.shape, graph.source.shape) for graph in edge_index})


class GCN(GNN):
    """Graph convolutional network (https://arxiv.org/abs/1609.02907), torch-geometric's ``GCN``, of a ``GCNConfig``."""

    config: GCNConfig


class GAT(GNN):
    """Graph attention network (https://arxiv.org/abs/1710.10903), torch-geometric's ``GAT`` v1, of a ``GATConfig``."""

    config: GATConfig


class GraphSAGE(GNN):
    """GraphSAGE (https://arxiv.org/abs/1706.02216), torch-geometric's ``GraphSAGE``, of a ``SAGEConfig``."""

    config: SAGEConfig


def _check_sampled(x: Tensor, graphs: Graphs, layers: int) -> None:
    """Check that each layer's graph reads the rows of the previous layer and writes at most as many."""
    if not all(isinstance(graph, GraphTensors) for graph in graphs):
        raise TypeError(f"edge_index is a {type(graphs).__name__}; pass batch.graphs with x[batch.nodes]")
    if len(graphs) != layers:
        raise ValueError(f"there are {len(graphs)} graphs, but {layers} layers; sample as many hops as layers")
    known = x.shape[0]
    for index, graph in enumerate(graphs):
        rows = graph.rowptr.shape[0] - 1
        sources = known if graph.transpose is None else graph.transpose.colptr.shape[0] - 1
        if rows > known or sources != known:
            raise ValueError(
                f"layer {index} is given {known} rows, and its graph is of {sources} nodes; pass x[batch.nodes] with "
                "batch.graphs as it is"
            )
        known = rows


# {config: (model, convolution)}, which have torch-geometric's names.
MODELS: dict[type[GNNConfig], tuple[type[GCN | GAT | GraphSAGE], type[GCNConv | GATConv | SAGEConv]]] = {
    GCNConfig: (GCN, GCNConv), GATConfig: (GAT, GATConv), SAGEConfig: (GraphSAGE, SAGEConv),
}  # fmt: skip


def example_inputs(model: GNN, *, num_nodes: int = 64, num_edges: int = 256, seed: int = 0) -> dict[str, Tensor]:
    """Normal features ``x`` [N, C_in] and random edges ``edge_index`` [2, E], the same on every device for a seed.

    There are no self-loops (except with a single node), so that all seeds give prepared graphs of one shape.
    """
    validate.count("num_nodes", num_nodes)
    validate.count("num_edges", num_edges, 0)
    weight = next(model.parameters())
    on_cpu: dict[str, Any] = {"generator": validate.seeded(seed), "device": "cpu"}
    x = torch.randn(num_nodes, model.config.in_channels, dtype=torch.float32, **on_cpu)
    source = torch.randint(num_nodes, (num_edges,), **on_cpu)
    distance = torch.randint(max(num_nodes - 1, 1), (num_edges,), **on_cpu) + 1
    edges = torch.stack([source, (source + distance) % num_nodes])
    return {"x": x.to(weight.device, weight.dtype), "edge_index": edges.to(weight.device)}
