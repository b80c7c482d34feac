"""What a model is given, checked before anything runs. Each error says what was wrong and what to do.

Only ``node_counts`` reads values, and with them synchronises with the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zoo.ops.csr import GraphTensors


def check_features(x: Tensor, channels: int, weight: Tensor, what: str = "x") -> None:
    """Features that the weights can be applied to. Reads no value, so it never synchronises."""
    if not isinstance(x, Tensor) or x.layout != torch.strided:
        found = x.layout if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"{what} is a {found}, expected a dense tensor [N, {channels}] of features")
    if x.dim() != 2 or x.shape[1] != channels:
        raise ValueError(f"{what} has shape {tuple(x.shape)}, expected [N, {channels}]: a row of {channels} a node")
    if x.device != weight.device:
        raise ValueError(f"{what} is on {x.device} and the weights are on {weight.device}; move one of them")
    if not x.dtype.is_floating_point:
        raise TypeError(f"{what} is {x.dtype}, expected {weight.dtype}; use {what}.to({weight.dtype})")
    if x.dtype != weight.dtype:
        if torch.float64 in (x.dtype, weight.dtype):
            # Autocast leaves it as it is.
            raise TypeError(f"{what} is {x.dtype} and the weights are {weight.dtype}; use {what}.to({weight.dtype})")
        if not torch.is_autocast_enabled(x.device.type):
            raise TypeError(
                f"{what} is {x.dtype} and the weights are {weight.dtype}; use {what}.to({weight.dtype}), or "
                "torch.autocast"
            )


def check_nodes(x: Tensor, count: int, device: torch.device, what: str = "x") -> None:
    """One row of features for each node of the graph, beside it."""
    if x.shape[0] != count:
        raise ValueError(
            f"{what} has {x.shape[0]} rows and the graph has {count} nodes; prepare the graph with "
            f"num_nodes={x.shape[0]}"
        )
    if x.device != device:
        raise ValueError(f"{what} is on {x.device} and the graph on {device}; move one of them, graph.to({x.device})")


def check_layers(x: Tensor, graphs: tuple[GraphTensors, ...], layers: int) -> None:
    """A graph a layer, each from what the layer before it computes, or a part of that, to its own rows."""
    if len(graphs) != layers:
        raise ValueError(
            f"there are graphs of {len(graphs)} layers and the model has {layers}; sample as many hops as it has layers"
        )
    if (nodes := _sources(graphs[0], x.shape[0])) != x.shape[0]:
        raise ValueError(f"x has {x.shape[0]} rows and the batch {nodes} nodes; pass x[batch.nodes]")
    check_nodes(x, nodes, graphs[0].rowptr.device)
    known = x.shape[0]
    for index, graph in enumerate(graphs):
        rows = graph.rowptr.shape[0] - 1
        if rows > known or _sources(graph, known) != known:
            raise ValueError(
                f"the graph of layer {index} takes {_sources(graph, known)} rows to {rows}, and the layer is given "
                f"{known}; pass the graphs of a SampledBatch as they are"
            )
        known = rows


def _sources(graph: GraphTensors, default: int) -> int:
    return default if graph.transpose is None else graph.transpose.colptr.shape[0] - 1


def check_edges(edge_index: Tensor, edge_weight: Tensor | None) -> None:
    """Kinds and shapes of a raw graph, checked without reading a value."""
    if not isinstance(edge_index, Tensor):
        if isinstance(edge_index, list) and any(isinstance(each, GraphTensors) for each in edge_index):
            raise TypeError(
                "edge_index is a list of GraphTensors, as torch's DataLoader makes of a batch's graphs; pass "
                "tuple(batch.graphs), or move the batch by batch.to(device), which makes them a tuple again"
            )
        raise TypeError(
            f"edge_index is a {type(edge_index).__name__}, expected an int64 tensor [2, E] or a CSRGraph; build one "
            "with CSRGraph.from_edge_index"
        )
    if edge_index.layout != torch.strided:
        raise TypeError(f"edge_index is {edge_index.layout}, expected a dense int64 tensor [2, E] or a CSRGraph")
    if edge_index.dtype != torch.int64:
        raise TypeError(f"edge_index is {edge_index.dtype}, expected torch.int64; use edge_index.long()")
    if edge_index.dim() != 2 or edge_index.shape[0] != 2:
        hint = "; transpose it with .t()" if edge_index.dim() == 2 and edge_index.shape[1] == 2 else ""
        raise ValueError(f"edge_index has shape {tuple(edge_index.shape)}, expected [2, E]{hint}")
    if edge_weight is not None:
        check_edge_weight(edge_weight, edge_index.shape[1], edge_index.device)


def check_edge_weight(edge_weight: Tensor, edges: int, device: torch.device) -> None:
    """One real factor an edge."""
    if not isinstance(edge_weight, Tensor) or edge_weight.layout != torch.strided:
        raise TypeError(f"edge_weight is a {type(edge_weight).__name__}, expected a dense tensor [E] of floats")
    if not edge_weight.dtype.is_floating_point:
        raise TypeError(f"edge_weight is {edge_weight.dtype}, expected floating point; use edge_weight.float()")
    if tuple(edge_weight.shape) != (edges,):
        raise ValueError(
            f"edge_weight has shape {tuple(edge_weight.shape)} and there are {edges} edges, expected one weight an "
            f"edge, ({edges},)"
        )
    if edge_weight.device != device:
        raise ValueError(f"edge_weight is on {edge_weight.device} and the edges on {device}; move one of them")


def node_counts(edge_index: Tensor, num_nodes: int | tuple[int, int] | None) -> tuple[int, int]:
    """(S, D), with every index checked. Reads two numbers from the device."""
    least, greatest = [-1, -1], [-1, -1]
    if edge_index.shape[1]:
        low, high = edge_index.aminmax(dim=1)
        (least, greatest) = torch.stack([low, high]).tolist()
    given = num_nodes
    if num_nodes is None:
        num_nodes = max(*greatest, -1) + 1
    if isinstance(num_nodes, int):
        num_nodes = (num_nodes, num_nodes)
    if not isinstance(num_nodes, tuple) or len(num_nodes) != 2 or not all(_is_count(n) for n in num_nodes):
        raise ValueError(f"num_nodes is {given!r}, expected a count, or (sources, destinations)")
    if edge_index.shape[1]:
        for row, what in enumerate(("source", "destination")):
            if least[row] < 0:
                raise ValueError(f"edge_index holds the negative {what} {least[row]}; nodes are numbered from 0")
            if greatest[row] >= num_nodes[row]:
                raise ValueError(
                    f"edge_index holds {what} {greatest[row]}, but there are {num_nodes[row]} nodes (0 to "
                    f"{num_nodes[row] - 1}); give features for every node, or drop the edge"
                )
    return num_nodes


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
