"""GNNs in the benchmark: their shapes, torch-geometric's arms, and a GNN's FLOPs and memory.

Legend: N nodes, E edges with the self-loops that a layer adds, H heads, s bytes per value.
"""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.families.graphs import POWER_LAW
from benchmarks.plan import Case

BYTES_FORMULA = (
    "Each layer gathers, for every edge and without reuse, a row as wide as the narrower of the layer's input and its "
    "messages, a 4-byte source index, and for GAT a score of each head; it reads the edge offsets of every node "
    "(4 bytes each, GCN also a degree factor), writes its output, and reads its weights, once each; the dense input is "
    "read apart from the gather where the transformed features are gathered, which are then written as well, or where "
    "each node needs its own row (GraphSAGE, GAT); GAT writes two scores a head and node and reads one of them back."
)
# Nodes and edges of each layer.
Sizes = Sequence[tuple[int, int]]
HEADS = 8
SMALL = ("karate", "cora")
LARGE_EDGES = 20_000_000  # from this number on messages in float64 would not fit
_DEEP = re.compile(r"(?P<kind>\w+)-(?P<layers>\d+)x(?P<width>\d+)")


@dataclass(frozen=True, kw_only=True)
class Layer:
    """Widths of one message-passing layer. Heads are concatenated, or averaged with each as wide as the output."""

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
    """A model's shape. Without ``classes`` the output is ``hidden`` wide and the last layer like all others."""

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
        return edges + nodes if self.self_loops else edges


def architecture(model: str, input: str, *, features: int, classes: int) -> Architecture:
    """The shape of a model of this name on this input; a model of one width replaces features and classes."""
    heads = HEADS if model.startswith("gat") else 1
    if deep := _DEEP.fullmatch(model):
        layers, width = int(deep["layers"]), int(deep["width"])
        return Architecture(kind=deep["kind"], features=width, hidden=width, layers=layers, classes=None, heads=heads)
    layers, hidden = (2, 64) if input.removesuffix(POWER_LAW) in SMALL else (3, 256)
    return Architecture(kind=model, features=features, hidden=hidden, layers=layers, classes=classes, heads=heads)


# --- torch-geometric's arms: as its users would run it, at its documented best, and as the reference ---


def build(arch: Architecture, *, seed: int, **options: Any) -> nn.Module:
    """``torch_geometric.nn.GCN``, ``GAT`` or ``GraphSAGE`` in eval mode, float32 on the CPU, with seeded weights.

    Biases are drawn too: torch-geometric starts them at zero, where a forgotten bias would not show.
    """
    from torch_geometric.nn import GAT, GCN, GraphSAGE

    cls = {"gcn": GCN, "gat": GAT, "graphsage": GraphSAGE}[arch.kind]
    if arch.kind == "gat":
        options["heads"] = arch.heads
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: nn.Module = cls(arch.features, arch.hidden, arch.layers, arch.classes, **options)
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                nn.init.normal_(parameter, std=0.1)
    return model.eval()


def compile_convs(model: nn.Module, **options: Any) -> None:
    """Regional compilation as a user of the library does it: each convolution in place."""
    for conv in model.convs:  # type: ignore[union-attr]
        conv.compile(**options)


def tuned_layout(case: Case, kind: str) -> str:
    """The fastest adjacency of this arm: ``csr`` or ``sorted`` (edges by destination, with separate weights).

    With a CSR tensor GCN and GraphSAGE run one sparse product per layer. torch.compile cannot take sparse tensors
    (every convolution would fall back to eager), GAT has no sparse path, and the CPU has no sparse product in half
    precision. In these cases edges sorted by destination, already with self-loops and normalised, give one graph.
    ``EdgeIndex`` has no sparse path into these convolutions, fails under inference mode, and is no faster on the CPU.
    """
    sparse = kind != "gat" and case.strategy == "eager" and (case.device != "cpu" or case.dtype == "float32")
    return "csr" if sparse else "sorted"


def tune(
    arch: Architecture,
    shipped: nn.Module,
    edge_index: Tensor,
    nodes: int,
    layout: str,
    *,
    autocast: torch.dtype | None = None,
) -> tuple[nn.Module, dict[str, Any]]:
    """``shipped`` at the library's documented best for raw edges [2, E], and its inputs besides ``x``.

    GCN: ``GCNConv(normalize=False)`` on edges normalised once. GAT: ``add_self_loops=False`` on edges with self-loops.
    All: edges sorted by destination, or a ``torch.sparse_csr`` adjacency in autocast's dtype. Autocast would round a
    float32 adjacency in every forward but not in the backward, which has no product of it with narrow gradients.
    """
    from torch_geometric.nn.conv.gcn_conv import gcn_norm
    from torch_geometric.utils import add_self_loops, remove_self_loops

    reference = next(shipped.parameters())
    options: dict[str, Any] = {}
    weight = None
    if arch.kind == "gcn":
        options["normalize"] = False
        # Degrees are summed in at least float32: half precision cannot count beyond its mantissa.
        wide = torch.promote_types(reference.dtype, torch.float32)
        edge_index, weight = gcn_norm(edge_index, None, nodes, dtype=wide)
        weight = weight.to(reference.dtype)
    elif arch.kind == "gat":
        options["add_self_loops"] = False
        edge_index, _ = add_self_loops(remove_self_loops(edge_index)[0], num_nodes=nodes)
    model = build(arch, seed=0, **options).to(reference.device, reference.dtype)
    model.load_state_dict(shipped.state_dict())

    order = (edge_index[1] * nodes + edge_index[0]).argsort(stable=True)
    edge_index = edge_index[:, order].contiguous()
    weight = None if weight is None else weight[order]
    if layout == "csr":
        return model, {"edge_index": csr(edge_index, weight, nodes, autocast or reference.dtype)}
    return model, {"edge_index": edge_index} | ({} if weight is None else {"edge_weight": weight})


def csr(edge_index: Tensor, weight: Tensor | None, nodes: int, dtype: torch.dtype) -> Tensor:
    """Edges sorted by destination as a ``torch.sparse_csr`` adjacency, whose rows are destinations."""
    sources, destinations = edge_index
    narrow = torch.int32 if sources.numel() < 2**31 - 1 else torch.int64
    offsets = torch.zeros(nodes + 1, dtype=torch.int64, device=sources.device)
    offsets[1:] = torch.bincount(destinations, minlength=nodes).cumsum(0)
    values = torch.ones(sources.numel(), dtype=dtype, device=sources.device) if weight is None else weight.to(dtype)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse (CSR tensor support|invariant checks)")
        return torch.sparse_csr_tensor(offsets.to(narrow), sources.to(narrow), values, (nodes, nodes))


@torch.no_grad()
def reference_output(arch: Architecture, shipped: nn.Module, x: Tensor, edge_index: Tensor) -> Tensor:
    """Eager upstream in float64 on these weights and inputs: ``[N, classes]``."""
    model, x = copy.deepcopy(shipped).double(), x.double()
    if arch.kind == "gat" or edge_index.size(1) < LARGE_EDGES:
        return model(x, edge_index)
    tuned, inputs = tune(arch, model, edge_index, x.size(0), "csr")
    return tuned(x, **inputs)


# --- what a GNN must do and hold ---


def parameters(arch: Architecture) -> int:
    maps, scores = 1 + (arch.kind == "graphsage"), 2 * (arch.kind == "gat")
    stack = arch.stack()
    return sum(layer.transformed * (maps * layer.inputs + scores) + layer.outputs for layer in stack)


def flops(arch: Architecture, sizes: Sizes) -> int:
    """FLOPs (a multiply-add counts as two) of linear maps, attention scores, and sums over edges on the narrower side.

    Like torch's counter it omits element-wise work (activations, softmax, division by degrees).
    """
    total = 0
    for layer, (nodes, edges) in zip(arch.stack(), sizes, strict=True):
        messages = arch.edges(nodes, edges)
        dense = 2 * nodes * layer.inputs * layer.transformed
        if arch.kind == "gat":
            # Scores need the transformed features, and each head weights its own part of them.
            total += dense + 4 * nodes * layer.transformed + 2 * messages * layer.transformed
        else:
            maps = 2 if arch.kind == "graphsage" else 1
            total += maps * dense + 2 * messages * min(layer.inputs, layer.outputs)
    return total


def bytes_moved(arch: Architecture, sizes: Sizes, itemsize: int) -> int:
    total = parameters(arch) * itemsize
    for layer, (nodes, edges) in zip(arch.stack(), sizes, strict=True):
        messages = arch.edges(nodes, edges)
        narrow = min(layer.inputs, layer.transformed)
        values = messages * narrow + nodes * layer.outputs
        if layer.transformed < layer.inputs:
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
    """Memory of the largest layer's messages in upstream's eager message passing, which materialises all messages.

    GCN and GAT hold gathered and weighted rows, GraphSAGE only gathered rows. Indices with self-loops are copied, and
    GAT keeps about four values per head and edge.
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


def training_flops(arch: Architecture, sizes: Sizes) -> int:
    """Gradients of inputs and of weights cost as much as the forward each; the first layer's input needs none."""
    first, nodes = arch.stack()[0], sizes[0][0]
    maps = 2 if arch.kind == "graphsage" else 1
    return 3 * flops(arch, sizes) - 2 * maps * nodes * first.inputs * first.transformed


def training_memory(case: Case, arch: Architecture, nodes: int, edges: int, *, reference: bool) -> int:
    """What training keeps beyond inference: activations of all layers, gradients and two moments of every weight.

    Only upstream's eager materialises messages. GAT keeps those of every layer for the gradients of its edge weights.
    Edge weights of other models do not learn, so each layer frees its messages. The reference does the same in float64.
    """
    layers = arch.stack()
    kept = sum(2 * layer.inputs + 3 * layer.transformed + layer.outputs for layer in layers) * nodes
    messages = message_bytes(arch, nodes, edges, 4) * (arch.layers if arch.kind == "gat" else 1)
    held = messages if case.impl != "zoo" or case.device == "cpu" else 0
    running = 4 * kept + 16 * parameters(arch) + held
    return max(running, 2 * (4 * kept + messages)) if reference else running
