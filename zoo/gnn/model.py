"""GCN, GAT and GraphSAGE.

    x [N, C_in] ─ layer ─ layer ─ ... ─ conv ─▶ [N, C_out]         layer: conv ─ epilogue (bias ─ norm ─ act ─ dropout)
    edge_index ─ prepared once ─▶ graph ─┴─ to every conv          with jk all are layers, and a linear head follows

Sorting, self-loops and degrees, which depend on the graph alone, are done outside the regions, once. A layer is a
region: the product with weights, the sum over edges by a kernel whose launch the compiler sees, and the epilogue. The
first layer, the last and all between compile to one graph each, at any depth.

Shape legend: N nodes, E edges, C channels, H heads.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from zoo import validate
from zoo.engine.region import Region
from zoo.gnn.convs import ACTIVATIONS, NORMS, GATConv, GCNConv, Graphs, SAGEConv, make
from zoo.gnn.graph import CSRGraph, GraphMemory, Recipe, check_nodes, dynamo_disabled
from zoo.ops.common import accumulation_dtype, is_unmodified
from zoo.ops.csr import GraphTensors


@dataclass(frozen=True, kw_only=True)
class GNNConfig:
    """Fields of all three models, named and meant as in torch-geometric.

    Args:
        num_layers: Number of convolutions.
        out_channels: Width of the output; None for ``hidden_channels``.
        dropout: Probability of dropping an activation in training (and a neighbour, in GAT).
        act: Activation by name, or None; see ``zoo.gnn.convs.ACTIVATIONS``.
        act_first: Activate before the normalisation.
        norm: ``"batch"``, ``"layer"`` or None.
        jk: ``"last"``, ``"cat"`` or ``"max"`` puts a linear layer over the last or all layers' outputs; None makes the
            last convolution the output.
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
        if self.out_channels is not None:
            validate.positive(self, "out_channels")
        if not 0.0 <= self.dropout <= 1.0:
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

    With ``concat`` the heads of hidden layers share ``hidden_channels``, else each has the full width and they are
    averaged. The last convolution always averages them.
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


# The convolution of a config, and the fields that it takes as arguments of the same names.
_CONVS: dict[type[GNNConfig], tuple[type[GCNConv | GATConv | SAGEConv], tuple[str, ...]]] = {
    GCNConfig: (GCNConv, ("improved", "add_self_loops", "normalize", "bias")),
    GATConfig: (GATConv, ("heads", "negative_slope", "dropout", "add_self_loops", "bias", "residual")),
    SAGEConfig: (SAGEConv, ("aggr", "normalize", "root_weight", "project", "bias")),
}


def make_conv(config: GNNConfig, index: int) -> GCNConv | GATConv | SAGEConv:
    """The convolution of one layer."""
    cls, names = _CONVS[type(config)]
    in_channels, out_channels = config.widths()[index]
    options: dict[str, Any] = {name: getattr(config, name) for name in names}
    if isinstance(config, GATConfig):
        options["concat"] = config.concat and not (config.ends_in_conv and index == config.num_layers - 1)
        if options["concat"]:
            out_channels //= config.heads
    else:
        options["input_layer"] = index == 0
    return cls(in_channels, out_channels, **options)


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
    """What follows the convolution of a hidden layer, the same in all three models."""

    def __init__(self, config: GNNConfig) -> None:
        super().__init__()
        self.norm = make("norm", NORMS, config.norm, config.norm_kwargs, config.hidden_channels)
        self.act = make("act", ACTIVATIONS, config.act, config.act_kwargs)
        self.act_first = config.act_first
        # Without dropout a training graph ends in one pointwise operation, which needs no Inductor.
        self.dropout = nn.Dropout(config.dropout) if config.dropout > 0 else nn.Identity()

    def forward(self, x: Tensor, rows: Tensor | None = None) -> Tensor:
        """Sums of a convolution [N, C] -> [N, C]; ``rows`` [] int64: how many are no padding, None for all."""
        x = self._norm(self.act(x), rows) if self.act_first else self.act(self._norm(x, rows))
        return self.dropout(x)

    def _norm(self, x: Tensor, rows: Tensor | None) -> Tensor:
        # Padding changes nothing for the others, unless a mean over all rows counts it.
        return self.norm(x, rows) if rows is not None and getattr(self.norm, "over_nodes", False) else self.norm(x)


class GNNLayer(nn.Module):
    """The region: a convolution and its epilogue, without which the last layer ends the model if ``jk`` is None."""

    def __init__(self, config: GNNConfig, index: int) -> None:
        super().__init__()
        self.conv = make_conv(config, index)
        last = index == config.num_layers - 1 and config.jk is None
        self.epilogue = None if last else GNNEpilogue(config)

    def forward(self, x: Tensor, graph: GraphTensors) -> Tensor:
        """Features [N, C_in] -> [N, C_out]; of a sampled batch the first D rows alone, [D, C_out]."""
        if x.dtype == torch.float32 and torch.is_autocast_enabled(x.device.type):
            # The product would round it anyway; rounded here, the edges move half the bytes.
            x = x.to(torch.get_autocast_dtype(x.device.type))
        if self._ends_in_relu():
            return self.conv(x, graph, relu=True)
        x = self.conv(x, graph)
        return x if self.epilogue is None else self.epilogue(x, graph.rows)

    def _ends_in_relu(self) -> bool:
        """Whether the epilogue is a relu alone, and nobody listens to what the convolution or the relu returns."""
        after = self.epilogue
        if after is None or not is_unmodified(after, GNNEpilogue) or not is_unmodified(after.act, nn.ReLU):
            return False
        dropped = not after.dropout.training and is_unmodified(after.dropout, nn.Dropout)
        nothing_else = is_unmodified(after.norm, nn.Identity) and (dropped or is_unmodified(after.dropout, nn.Identity))
        return nothing_else and any(is_unmodified(self.conv, cls) for cls, _ in _CONVS.values())


# A graph has few kernels, which this process compiles before a worker could start. Their block size does not matter.
_PASSES = {"compile_threads": 1, "triton.autotune_pointwise": False}
REGIONS = (
    Region(
        GNNLayer,
        graphs=3,
        why="product, sum over edges and epilogue: first, last and all other layers",
        options=_PASSES,
    ),
    Region(GNNHead, graphs=1, why="joins all layers' outputs without writing the join where it can", options=_PASSES),
)


class GNN(nn.Module):
    """Base of the three models: layers in a row, over a graph that is prepared from raw edges if need be."""

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
        """The graph with everything done that this model needs, to pass in place of ``edge_index``.

        ``forward`` does the same with raw edges and remembers the last few, but a prepared graph also goes through
        ``torch.compile(model, fullgraph=True)`` and an outer CUDA graph. Takes ``edge_index`` [2, E] int64 or a
        CSRGraph, ``edge_weight`` [E] for GCN, and the number of nodes N, without which isolated nodes at the end are
        forgotten. Raises as ``CSRGraph.from_edge_index``.
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

        Takes ``edge_index`` [2, E] int64, sources above destinations, or a CSRGraph; a GCN with raw edges factors
        ``edge_weight`` [E]; a GraphSAGE the features of ``SampledBatch.nodes`` with its ``graphs``, and gives [B,
        C_out]. What does not fit is a TypeError or ValueError before anything runs.
        """
        outputs: list[Tensor] = []
        for layer, graph in zip(self.layers, self._graphs(x, edge_index, edge_weight), strict=True):
            x = layer(x, graph)
            if self.config.jk in ("cat", "max"):
                outputs.append(x)
        if self.head is None:
            return x
        # Of a sampled batch each layer has fewer rows.
        rows = x.shape[0]
        return self.head([each if each.shape[0] == rows else each[:rows] for each in outputs] or [x])

    def _graphs(self, x: Tensor, edge_index: Tensor | CSRGraph | Graphs, edge_weight: Tensor | None) -> Graphs:
        """The graph of each layer."""
        validate.tensor("x", x, f"N {self.config.in_channels}", kinds="floating", like=self._first_conv.weight)
        if isinstance(edge_index, tuple):
            if edge_weight is not None or not isinstance(self._first_conv, SAGEConv):
                raise ValueError("graphs of a sampled batch are for GraphSAGE without edge weights; pass a CSRGraph")
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
        """How many sizes of input the regions see in one call; see ``zoo.enforce_budget``."""
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
    """Each layer's graph must read the rows that the layer before it computes, and write at most as many."""
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


_MODELS: dict[type[GNNConfig], type[GCN | GAT | GraphSAGE]] = {GCNConfig: GCN, GATConfig: GAT, SAGEConfig: GraphSAGE}


def build(config: GNNConfig) -> GCN | GAT | GraphSAGE:
    """A randomly initialised model on the current default device and dtype; TypeError for another family's config."""
    if type(config) not in _MODELS:
        raise TypeError(f"config is a {type(config).__name__}, expected one of {[c.__name__ for c in _MODELS]}")
    return _MODELS[type(config)](config)


def example_inputs(model: GNN, *, num_nodes: int = 64, num_edges: int = 256, seed: int = 0) -> dict[str, Tensor]:
    """Normal features ``x`` [N, C_in] and drawn edges ``edge_index`` [2, E], the same on every device for a seed.

    There are no self-loops (but for a single node), so that all seeds give prepared graphs of one shape.
    """
    validate.count("num_nodes", num_nodes)
    weight, config = next(model.parameters()), model.config
    generator = validate.seeded(seed)
    on_cpu: dict[str, Any] = {"generator": generator, "device": "cpu"}
    x = torch.randn(num_nodes, config.in_channels, dtype=torch.float32, **on_cpu)
    source = torch.randint(num_nodes, (num_edges,), **on_cpu)
    distance = torch.randint(max(num_nodes - 1, 1), (num_edges,), **on_cpu) + 1
    edges = torch.stack([source, (source + distance) % num_nodes])
    return {"x": x.to(weight.device, weight.dtype), "edge_index": edges.to(weight.device)}
