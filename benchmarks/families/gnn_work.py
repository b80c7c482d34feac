"""What a GNN must do and hold, as formulas: floating-point operations, bytes moved, memory.

Legend: N nodes, E edges with the self-loops that a layer adds, H heads, s bytes a value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

BYTES_FORMULA = (
    "Each layer gathers, for every edge and without reuse, a row as wide as the narrower of the layer's input and its "
    "messages, a 4-byte source index, and for GAT a score of each head; it reads the edge offsets of every node "
    "(4 bytes each, GCN also a degree factor), writes its output, and reads its weights, once each; the dense input is "
    "read apart from the gather where the transformed features are gathered, which are then written as well, or where "
    "each node needs its own row (GraphSAGE, GAT); GAT writes two scores a head and node and reads one of them back."
)


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One message-passing layer's widths.

    Args:
        inputs: Features in.
        outputs: Features out.
        heads: Attention heads, 1 for GCN and GraphSAGE.
        concat: Whether heads are concatenated; else averaged, and each is as wide as the output.
    """

    inputs: int
    outputs: int
    heads: int = 1
    concat: bool = True

    @property
    def transformed(self) -> int:
        """Width after the linear map, all heads together."""
        return self.outputs if self.concat else self.heads * self.outputs


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A model's shape.

    Args:
        kind: ``gcn``, ``gat`` or ``graphsage``.
        features: Width of the node features.
        hidden: Width between layers.
        layers: Number of layers.
        classes: Output width, or None for ``hidden`` and a last layer like all others.
        heads: Attention heads of GAT.
    """

    kind: str
    features: int
    hidden: int
    layers: int
    classes: int | None
    heads: int = 1

    @property
    def self_loops(self) -> bool:
        return self.kind != "graphsage"

    def stack(self) -> list[Layer]:
        """The layers from input to output, as torch-geometric builds them; a GAT averages heads into classes."""
        widths = [self.features, *[self.hidden] * (self.layers - 1), self.classes or self.hidden]
        last = self.layers - 1 if self.classes is not None else self.layers
        return [
            Layer(inputs=a, outputs=b, heads=self.heads, concat=index != last)
            for index, (a, b) in enumerate(pairwise(widths))
        ]

    def edges(self, nodes: int, edges: int) -> int:
        """Messages a layer sends."""
        return edges + nodes if self.self_loops else edges


def parameters(arch: Architecture) -> int:
    """Weights and biases."""
    return sum(_layer_parameters(arch.kind, layer) for layer in arch.stack())


def _layer_parameters(kind: str, layer: Layer) -> int:
    matrix, bias = layer.inputs * layer.transformed, layer.outputs
    return {"gcn": matrix, "gat": matrix + 2 * layer.transformed, "graphsage": 2 * matrix}[kind] + bias


def flops(arch: Architecture, nodes: int, edges: int) -> int:
    """Multiply-adds counted as two: linear maps, attention scores, and a sum over edges on the narrower side.

    Element-wise work (activations, softmax, division by degrees) is not counted, as torch's own counter does not.
    """
    return flops_of_layers(arch, [(nodes, edges)] * arch.layers)


def flops_of_layers(arch: Architecture, sizes: Sequence[tuple[int, int]]) -> int:
    """:func:`flops` where each layer has (nodes, edges) of its own."""
    total = 0
    for layer, (nodes, edges) in zip(arch.stack(), sizes, strict=True):
        messages = arch.edges(nodes, edges)
        dense = 2 * nodes * layer.inputs * layer.transformed
        if arch.kind == "gat":
            # Scores need the transformed features, and each head weighs its own part of them.
            total += dense + 4 * nodes * layer.transformed + 2 * messages * layer.transformed
        else:
            maps = 2 if arch.kind == "graphsage" else 1
            total += maps * dense + 2 * messages * min(layer.inputs, layer.outputs)
    return total


def bytes_moved(arch: Architecture, nodes: int, edges: int, itemsize: int) -> int:
    """Fewest bytes that one forward moves through device memory, as :data:`BYTES_FORMULA` says."""
    return bytes_of_layers(arch, [(nodes, edges)] * arch.layers, itemsize)


def bytes_of_layers(arch: Architecture, sizes: Sequence[tuple[int, int]], itemsize: int) -> int:
    """:func:`bytes_moved` where each layer has (nodes, edges) of its own."""
    total = parameters(arch) * itemsize
    for layer, (nodes, edges) in zip(arch.stack(), sizes, strict=True):
        messages = arch.edges(nodes, edges)
        narrow = min(layer.inputs, layer.transformed)
        values = messages * narrow + nodes * layer.outputs
        transform_first = layer.transformed < layer.inputs
        if transform_first:
            values += nodes * (layer.inputs + layer.transformed)
        elif arch.kind != "gcn":
            values += nodes * layer.inputs
        if arch.kind == "gcn":
            values += nodes
        if arch.kind == "gat":
            values += layer.heads * (messages + 3 * nodes)
        total += values * itemsize + 4 * messages + 4 * (nodes + 1)
    return total


def message_bytes(arch: Architecture, nodes: int, edges: int, itemsize: int) -> int:
    """Memory of the largest layer's messages in upstream's eager message passing, which holds them all.

    GCN and GAT hold the gathered rows and the weighted ones, GraphSAGE the gathered rows; indices with self-loops are
    copied, and GAT keeps about four values a head and edge.
    """
    messages = arch.edges(nodes, edges)
    rows = [layer.inputs if arch.kind == "graphsage" else 2 * layer.transformed for layer in arch.stack()]
    scores = 4 * arch.heads if arch.kind == "gat" else 0
    indices = 32 if arch.self_loops else 0
    return messages * ((max(rows) + scores) * itemsize + indices)


def dense_bytes(arch: Architecture, nodes: int, itemsize: int) -> int:
    """Memory of weights, features in the dtype and in float32, and the activations alive at once around a layer."""
    widest = max(layer.inputs + 2 * layer.transformed + layer.outputs for layer in arch.stack())
    return parameters(arch) * itemsize + nodes * (arch.features * (4 + itemsize) + widest * itemsize)
