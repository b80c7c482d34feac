"""Full-batch training of GCN, GAT and GraphSAGE: every step runs the whole graph, on labels of its own.

Weights and features are float32; in half precision autocast rounds them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.families import gnn_upstream, gnn_work
from benchmarks.families.base import Prepared, Training, autocast_of, dtype_of
from benchmarks.families.gnn_work import Architecture
from benchmarks.families.graphs import Graph
from benchmarks.plan import Case
from benchmarks.training import reference_losses

BYTES_FORMULA = (
    "Twice what inference must move: the backward gathers as much as the forward. Left out, so that it is a lower "
    "bound: activations that are kept, weight gradients, and the optimizer, which reads and writes 28 bytes a weight."
)
LEARNING_RATE = 1e-2


def training_of(
    graph: Graph, x: Tensor, inputs: dict[str, Any], *, seed: int, autocast: torch.dtype | None = None
) -> Training:
    """Cross entropy over half of the nodes, another half in each step, with labels of a random linear map of features.

    Args:
        graph: The graph, for its number of nodes and classes.
        x: Features [N, F] on the device.
        inputs: What else the model is called with: edges or a prepared graph.
        seed: Of labels and halves.
        autocast: Its dtype, or None for float32.
    """
    labels = labels_of(x, graph.classes, seed=seed).cpu()

    def batch(index: int) -> Tensor:
        generator = torch.Generator().manual_seed((seed << 20) + index)
        # Left out by value and not by selection, whose size would differ and be waited for; in every arm alike.
        left_out = torch.rand(graph.nodes, generator=generator) < 0.5
        return torch.where(left_out, -100, labels).to(x.device)

    def loss(model: nn.Module, labels: Tensor) -> Tensor:
        features = x.to(_weight_dtype(model))  # float64 for the reference, else as it is
        return F.cross_entropy(model(features, **inputs), labels)

    return Training(loss=loss, batch=batch, learning_rate=LEARNING_RATE, autocast=autocast)


def labels_of(x: Tensor, classes: int, *, seed: int) -> Tensor:
    """Labels [N] below ``classes``: the greatest of a random linear map of features [N, F]."""
    teacher = torch.randn(x.size(1), classes, generator=torch.Generator().manual_seed(seed)).to(x)
    return (x @ teacher).argmax(1)


def for_training(case: Case, prepared: Prepared, arch: Architecture, graph: Graph, *, seed: int) -> Prepared:
    """What inference prepares, made ready for training.

    Args:
        case: The arm.
        prepared: Of inference: its inputs are ``x`` and what else the model is called with.
        arch: The model's shape.
        graph: The graph.
        seed: Of weights, labels and halves.
    """
    x = prepared.inputs["x"]
    inputs = {name: value for name, value in prepared.inputs.items() if name != "x"}

    def reference() -> Tensor:
        shipped = gnn_upstream.build(arch, seed=seed).to(x.device)
        return reference_losses(shipped, training_of(graph, x, {"edge_index": graph.edge_index}, seed=seed))

    return replace(
        prepared,
        model=prepared.model.train(),
        inputs={},
        static=(),
        reference=reference,
        bytes=2 * prepared.bytes,
        bytes_formula=BYTES_FORMULA,
        flops=flops(arch, graph.nodes, graph.edges),
        data=f"{graph.data}, labels of a random linear map",
        count=graph.nodes,
        unit="nodes",
        training=training_of(graph, x, inputs, seed=seed, autocast=autocast_of(dtype_of(case))),
    )


def flops(arch: Architecture, nodes: int, edges: int) -> int:
    """Gradients by inputs and by weights each take what the forward does; the first layer's input needs none."""
    return flops_of_layers(arch, [(nodes, edges)] * arch.layers)


def flops_of_layers(arch: Architecture, sizes: Sequence[tuple[int, int]]) -> int:
    """:func:`flops` where each layer has (nodes, edges) of its own."""
    first, nodes = arch.stack()[0], sizes[0][0]
    maps = 2 if arch.kind == "graphsage" else 1
    return 3 * gnn_work.flops_of_layers(arch, sizes) - 2 * maps * nodes * first.inputs * first.transformed


def memory_bytes(case: Case, arch: Architecture, nodes: int, edges: int, *, reference: bool) -> int:
    """What training keeps beyond inference: activations of all layers, gradients and two moments of every weight.

    Where messages are held at all (upstream's eager), GAT keeps those of every layer for the gradients of its weights;
    the weights of the others do not learn, and theirs are gone with the layer. The reference does so in float64.

    Args:
        case: The arm.
        arch: The model's shape.
        nodes: Of the graph.
        edges: Of the graph.
        reference: Whether the arm computes the reference too.
    """
    layers = arch.stack()
    kept = sum(2 * layer.inputs + 3 * layer.transformed + layer.outputs for layer in layers) * nodes
    messages = gnn_work.message_bytes(arch, nodes, edges, 4) * (arch.layers if arch.kind == "gat" else 1)
    held = messages if case.impl != "zoo" or case.device == "cpu" else 0
    running = 4 * kept + 16 * gnn_work.parameters(arch) + held
    return max(running, 2 * (4 * kept + messages)) if reference else running


def _weight_dtype(model: nn.Module) -> torch.dtype:
    return next(model.parameters()).dtype
