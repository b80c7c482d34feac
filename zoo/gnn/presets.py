"""Models by name, and inputs to try them on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from zoo.gnn.config import GATConfig, GCNConfig, GNNConfig, SAGEConfig
from zoo.gnn.model import GAT, GCN, GraphSAGE
from zoo.validate import seeded

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

_MODELS: dict[type[GNNConfig], type[nn.Module]] = {GCNConfig: GCN, GATConfig: GAT, SAGEConfig: GraphSAGE}


def build(config: GNNConfig) -> nn.Module:
    """A randomly initialised model on the current default device and dtype.

    Raises:
        TypeError: If the config is none of the family's.
    """
    if type(config) not in _MODELS:
        raise TypeError(f"config is a {type(config).__name__}, expected one of {[c.__name__ for c in _MODELS]}")
    return _MODELS[type(config)](config)


def example_inputs(model: nn.Module, *, num_nodes: int = 64, num_edges: int = 256, seed: int = 0) -> dict[str, Tensor]:
    """Normal features and uniformly drawn edges on the model's device: ``x`` [N, C_in], ``edge_index`` [2, E].

    The same seed gives the same graph on every device. Edges may repeat. There are no self-loops (but for a single
    node): a graph's shape is its number of edges once self-loops are in, so that all seeds give graphs of one shape.
    """
    if num_nodes < 1 and num_edges > 0:
        raise ValueError(f"num_nodes is {num_nodes} and num_edges {num_edges}: edges need nodes")
    weight, config = next(model.parameters()), model.config
    if not isinstance(config, GNNConfig):
        raise TypeError(f"{type(model).__name__} is not a GCN, GAT or GraphSAGE of the zoo")
    generator = seeded(seed)
    on_cpu: dict[str, Any] = {"generator": generator, "device": "cpu"}
    x = torch.randn(num_nodes, config.in_channels, dtype=torch.float32, **on_cpu)
    source = torch.randint(max(num_nodes, 1), (num_edges,), **on_cpu)
    distance = torch.randint(max(num_nodes - 1, 1), (num_edges,), **on_cpu) + 1
    edges = torch.stack([source, (source + distance) % max(num_nodes, 1)])
    return {"x": x.to(weight.device, weight.dtype), "edge_index": edges.to(weight.device)}
