"""torch-geometric's arms: as its users would run it, at its documented best, and as the reference for correctness."""

from __future__ import annotations

import copy
import os
import warnings
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.families.gnn_work import Architecture, dense_bytes, message_bytes
from benchmarks.plan import Case


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
    """Regional compilation as a user of the library does it: each convolution in place.

    Args:
        model: A model of :func:`build`.
        options: What ``torch.compile`` takes.
    """
    for conv in model.convs:  # type: ignore[union-attr]
        conv.compile(**options)


def tuned_layout(case: Case, kind: str) -> str:
    """The adjacency that serves this arm best: ``csr`` or ``sorted`` (edges by destination, weights beside them).

    A CSR tensor sends GCN and GraphSAGE through one sparse product a layer. torch.compile cannot take sparse tensors
    (every convolution would fall back to eager), GAT has no sparse path, and the CPU has no sparse product in half
    precision: there edges sorted by destination, with self-loops and normalisation done before, compile to one graph.
    ``EdgeIndex`` has no sparse path into these convolutions, fails under inference mode, and is no faster on the CPU.
    """
    if kind == "gat" or case.strategy != "eager":
        return "sorted"
    if case.device == "cpu" and case.dtype != "float32":
        return "sorted"
    return "csr"


def tune(
    arch: Architecture,
    shipped: nn.Module,
    edge_index: Tensor,
    nodes: int,
    layout: str,
    *,
    autocast: torch.dtype | None = None,
) -> tuple[nn.Module, dict[str, Any]]:
    """The same model at the library's documented best, and the inputs that go with it besides ``x``.

    GCN: ``GCNConv(normalize=False)`` on edges normalised once. GAT: ``add_self_loops=False`` on edges with self-loops.
    All: edges sorted by destination, or a ``torch.sparse_csr`` adjacency.

    Args:
        arch: The model's shape.
        shipped: The model of :func:`build`, on its device and in its dtype.
        edge_index: Raw edges ``[2, E]``.
        nodes: Number of nodes.
        layout: ``csr`` or ``sorted``.
        autocast: Its dtype, or None without autocast. A CSR adjacency is held in it: autocast would round it in every
            forward, and not in the backward, where a float32 one meets narrow gradients and there is no such product.
    """
    from torch_geometric.nn.conv.gcn_conv import gcn_norm
    from torch_geometric.utils import add_self_loops, remove_self_loops

    reference = next(shipped.parameters())
    options: dict[str, Any] = {}
    weight = None
    if arch.kind == "gcn":
        options["normalize"] = False
        # Degrees are summed in float32 at least: half precision cannot count past its mantissa.
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
    inputs = {"edge_index": edge_index}
    if weight is not None:
        inputs["edge_weight"] = weight
    return model, inputs


def csr(edge_index: Tensor, weight: Tensor | None, nodes: int, dtype: torch.dtype) -> Tensor:
    """Edges sorted by destination as a ``torch.sparse_csr`` adjacency, whose rows are destinations.

    Duplicates stay (the library's own converter would merge them); indices are narrow.
    """
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
    """Eager upstream in float64 on these weights and inputs, as shipped, or where memory is short in blocks.

    Args:
        arch: The model's shape.
        shipped: The model of :func:`build`, not compiled, in the dtype that is measured.
        x: Features ``[N, F]`` in the dtype that is measured.
        edge_index: Raw edges ``[2, E]``.

    Returns:
        ``[N, classes]`` in float64.
    """
    model, x = copy.deepcopy(shipped).double(), x.double()
    nodes, edges = x.size(0), edge_index.size(1)
    free = _free_bytes(x.device)
    if message_bytes(arch, nodes, edges, 8) + dense_bytes(arch, nodes, 8) < free // 4:
        return model(x, edge_index)
    # Eager message passing holds several times its messages, and other arms hold their models meanwhile.
    return output_in_blocks(arch, model, x, edge_index, budget=min(free // 16, 4 * 2**30))


@torch.no_grad()
def output_in_blocks(arch: Architecture, model: nn.Module, x: Tensor, edge_index: Tensor, *, budget: int) -> Tensor:
    """The model's output, each layer computed for one range of destinations after another.

    A destination needs all of its edges and no others, so each range is exact. The linear maps are repeated.

    Args:
        arch: The model's shape.
        model: The model of :func:`build`.
        x: Features ``[N, F]``.
        edge_index: Raw edges ``[2, E]``.
        budget: Bytes that one range's messages may take.
    """
    nodes = x.size(0)
    tuned, inputs = tune(arch, model, edge_index, nodes, "sorted")
    edges, weight = inputs["edge_index"], inputs.get("edge_weight")
    an_edge = max(1, message_bytes(arch, nodes, edge_index.size(1), x.element_size()) // max(1, edges.size(1)))
    starts = _block_starts(edges[1], nodes, max(1, budget // an_edge))
    for index, conv in enumerate(tuned.convs):  # type: ignore[arg-type]
        rows = []
        for (first, first_edge), (last, last_edge) in pairwise(starts):
            part = slice(first_edge, last_edge)
            extra = () if weight is None else (weight[part],)
            # Copied, or every range would keep the whole output that it was cut from.
            rows.append(conv(x, edges[:, part], *extra)[first:last].clone())
        x = torch.cat(rows)
        if index < arch.layers - 1:
            x = tuned.act(x)  # type: ignore[operator]
    return x


def _block_starts(destinations: Tensor, nodes: int, edges: int) -> list[tuple[int, int]]:
    """(node, edge) pairs that cut sorted destinations into ranges of about so many edges, ends included."""
    cuts = sorted({int(destinations[edge]) for edge in range(edges, destinations.numel(), edges)} - {0})
    borders = torch.tensor([0, *cuts, nodes], device=destinations.device)
    return list(zip(borders.tolist(), torch.searchsorted(destinations, borders).tolist(), strict=True))


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
