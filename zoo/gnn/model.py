"""GCN, GAT and GraphSAGE.

    x [N, C_in] ─ layer ─ layer ─ ... ─ layer ─▶ [N, C_out]        layer: conv ─ norm ─ act ─ dropout
    edge_index ─ prepared once ─▶ graph ─┴─ to every layer         the last: conv, or (jk) a layer and a linear head

What depends on the graph alone (sorting, self-loops, degrees) is done outside the layers, once. The layers are the
regions.

Shape legend: N nodes, E edges, C channels, H heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from zoo.gnn.checks import check_features, check_nodes
from zoo.gnn.config import GATConfig, GCNConfig, GNNConfig, SAGEConfig
from zoo.gnn.convs import GATConv, GCNConv, SAGEConv, prepare_graph
from zoo.gnn.csr import CSRGraph, GraphTensors, Recipe
from zoo.gnn.norms import make_activation, make_norm
from zoo.gnn.outside import outside_compile
from zoo.gnn.prepare import GraphMemory, weight_dtype
from zoo.regions import Region


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


class _Layer(nn.Module):
    """What follows the convolution in every kind of layer.

    The last layer carries the head, so that no part of a model is left outside the regions.
    """

    def __init__(self, config: GNNConfig, index: int) -> None:
        super().__init__()
        last = index == config.num_layers - 1
        bare = last and config.jk is None
        self.input_layer = index == 0
        self.norm = nn.Identity() if bare else make_norm(config.norm, config.hidden_channels, config.norm_kwargs)
        self.act = nn.Identity() if bare else make_activation(config.act, config.act_kwargs)
        self.act_first = config.act_first
        self.dropout = nn.Identity() if bare else nn.Dropout(config.dropout)
        self.head = GNNHead(config) if last and config.jk is not None else None

    def _enter(self, x: Tensor) -> Tensor:
        """Under autocast features are rounded once, before edges move them. Later layers get rounded input anyway.

        Reading the flag also makes the first layer a signature of its own, which it is even at equal widths: its
        input requires no grad in training, is no inference tensor in inference mode and is float32 under autocast.
        """
        if self.input_layer and x.dtype == torch.float32 and torch.is_autocast_enabled(x.device.type):
            return x.to(torch.get_autocast_dtype(x.device.type))
        return x

    def _finish(self, x: Tensor, earlier: Sequence[Tensor]) -> Tensor:
        x = self.norm(self.act(x)) if self.act_first else self.act(self.norm(x))
        x = self.dropout(x)
        return x if self.head is None else self.head([*earlier, x])


class GCNLayer(_Layer):
    """Graph convolution, norm, activation and dropout."""

    def __init__(self, config: GCNConfig, index: int) -> None:
        super().__init__(config, index)
        self.conv = GCNConv(
            *config.widths()[index],
            improved=config.improved,
            add_self_loops=config.add_self_loops,
            normalize=config.normalize,
            bias=config.bias,
            input_layer=index == 0,
        )

    def forward(self, x: Tensor, graph: GraphTensors, earlier: Sequence[Tensor] = ()) -> Tensor:
        """Features [N, C_in] -> [N, C_out]; ``earlier`` layers' outputs, for the head."""
        return self._finish(self.conv(self._enter(x), graph), earlier)


class GATLayer(_Layer):
    """Graph attention, norm, activation and dropout."""

    def __init__(self, config: GATConfig, index: int) -> None:
        super().__init__(config, index)
        in_channels, out_channels = config.widths()[index]
        concat = config.concat and not (index == config.num_layers - 1 and config.ends_in_conv)
        self.conv = GATConv(
            in_channels,
            out_channels // config.heads if concat else out_channels,
            heads=config.heads,
            concat=concat,
            negative_slope=config.negative_slope,
            dropout=config.dropout,
            add_self_loops=config.add_self_loops,
            bias=config.bias,
            residual=config.residual,
        )

    def forward(self, x: Tensor, graph: GraphTensors, earlier: Sequence[Tensor] = ()) -> Tensor:
        """Features [N, C_in] -> [N, C_out]; ``earlier`` layers' outputs, for the head."""
        return self._finish(self.conv(self._enter(x), graph), earlier)


class SAGELayer(_Layer):
    """GraphSAGE convolution, norm, activation and dropout."""

    def __init__(self, config: SAGEConfig, index: int) -> None:
        super().__init__(config, index)
        self.conv = SAGEConv(
            *config.widths()[index],
            aggr=config.aggr,
            normalize=config.normalize,
            root_weight=config.root_weight,
            project=config.project,
            bias=config.bias,
            input_layer=index == 0,
        )

    def forward(self, x: Tensor, graph: GraphTensors, earlier: Sequence[Tensor] = ()) -> Tensor:
        """Features [N, C_in] -> [N, C_out]; ``earlier`` layers' outputs, for the head."""
        return self._finish(self.conv(self._enter(x), graph), earlier)


class _Model(nn.Module):
    """What the three models share: layers in a row, and raw edges made into a graph."""

    config: GNNConfig
    regions: ClassVar[tuple[Region, ...]] = ()

    def __init__(self, config: GNNConfig, layer: type[GCNLayer] | type[GATLayer] | type[SAGELayer]) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(layer(config, index) for index in range(config.num_layers))  # type: ignore[arg-type]
        self.recipe: Recipe = self._first_conv.recipe
        self._memory = GraphMemory()

    @outside_compile
    def prepare(
        self, edge_index: Tensor | CSRGraph, edge_weight: Tensor | None = None, num_nodes: int | None = None
    ) -> CSRGraph:
        """The graph with everything done that this model needs, to pass in place of ``edge_index``.

        Worth it where the edges stay: ``forward`` does the same with raw edges and remembers the last few, but a
        prepared graph also goes through ``torch.compile(model, fullgraph=True)`` and an outer CUDA graph.

        Args:
            edge_index: [2, E] int64, or a CSRGraph.
            edge_weight: [E], for GCN.
            num_nodes: N; one more than the greatest index when left out, which forgets isolated nodes at the end.

        Raises:
            TypeError, ValueError: As ``CSRGraph.from_edge_index``.
        """
        if not isinstance(edge_index, CSRGraph):
            if edge_weight is not None and not self.recipe.weighted:
                raise ValueError(f"edge_weight was given, but {type(self).__name__} does not use edge weights")
            edge_index = CSRGraph.from_edge_index(edge_index, edge_weight, num_nodes)
        elif edge_weight is not None:
            edge_index = edge_index.with_weights(edge_weight)
        return edge_index.prepared(self.recipe, weight_dtype(self._first_conv.weight))

    @property
    def _first_conv(self) -> GCNConv | GATConv | SAGEConv:
        return self.layers[0].conv  # type: ignore[return-value]

    def _graph(self, x: Tensor, edge_index: Tensor | CSRGraph, edge_weight: Tensor | None) -> GraphTensors:
        check_features(x, self.config.in_channels, self._first_conv.weight)
        if (
            isinstance(edge_index, CSRGraph)
            and edge_weight is None
            and edge_index.recipe == self.recipe
            and edge_index.weight_dtype == weight_dtype(x)
        ):
            graph = edge_index
        else:
            graph = prepare_graph(self._memory, edge_index, edge_weight, (x,), self.recipe)
        if not graph.is_square:
            raise ValueError(
                f"the graph has {graph.num_sources} sources and {graph.num_destinations} destinations, but a model of "
                "several layers needs one set of nodes; use GATConv or SAGEConv on their own"
            )
        tensors = graph.tensors
        check_nodes(x, tensors.rowptr.shape[0] - 1, tensors.rowptr.device)
        return tensors

    def _run(self, x: Tensor, graph: GraphTensors) -> Tensor:
        earlier: list[Tensor] = []
        *hidden, last = self.layers
        for layer in hidden:
            x = layer(x, graph)
            if self.config.jk in ("cat", "max"):
                earlier.append(x)
        return last(x, graph, earlier)


class GCN(_Model):
    """Graph convolutional network (https://arxiv.org/abs/1609.02907), torch-geometric's ``GCN``.

    Args:
        config: A ``GCNConfig``.
    """

    config: GCNConfig
    regions = (Region(GCNLayer, why="one kernel gathers, weighs and sums; what follows the convolution fuses with it"),)

    def __init__(self, config: GCNConfig) -> None:
        super().__init__(config, GCNLayer)

    def forward(self, x: Tensor, edge_index: Tensor | CSRGraph, edge_weight: Tensor | None = None) -> Tensor:
        """Run all layers.

        Args:
            x: [N, C_in] features.
            edge_index: [2, E] int64, sources above destinations, or a CSRGraph.
            edge_weight: [E] factors, beside a raw ``edge_index`` only.

        Returns:
            [N, C_out].

        Raises:
            TypeError, ValueError: If an input does not fit, before anything runs; the message says what to do.
        """
        return self._run(x, self._graph(x, edge_index, edge_weight))


class GAT(_Model):
    """Graph attention network (https://arxiv.org/abs/1710.10903), torch-geometric's ``GAT`` (not v2).

    Args:
        config: A ``GATConfig``.
    """

    config: GATConfig
    regions = (Region(GATLayer, why="scores, softmax and weighted sum run on edges without E x H x C in memory"),)

    def __init__(self, config: GATConfig) -> None:
        super().__init__(config, GATLayer)

    def forward(self, x: Tensor, edge_index: Tensor | CSRGraph, edge_weight: Tensor | None = None) -> Tensor:
        """Run all layers; see ``GCN.forward``. Edge weights are refused."""
        return self._run(x, self._graph(x, edge_index, edge_weight))


class GraphSAGE(_Model):
    """GraphSAGE (https://arxiv.org/abs/1706.02216), torch-geometric's ``GraphSAGE``.

    Args:
        config: A ``SAGEConfig``.
    """

    config: SAGEConfig
    regions = (Region(SAGELayer, why="the aggregation and both matrix products of a layer, with what follows them"),)

    def __init__(self, config: SAGEConfig) -> None:
        super().__init__(config, SAGELayer)

    def forward(self, x: Tensor, edge_index: Tensor | CSRGraph, edge_weight: Tensor | None = None) -> Tensor:
        """Run all layers; see ``GCN.forward``. Edge weights are refused."""
        return self._run(x, self._graph(x, edge_index, edge_weight))


REGIONS = {model: model.regions for model in (GCN, GAT, GraphSAGE)}
