"""The graphs for GNN benchmarks: one bundled, four real ones if they are on disk, else generated stand-ins.

A stand-in has the counts and the edge order of the real set's loader, seeded normal features, no self-loops, and
possibly duplicate edges, so that the counts are exact. Edges are counted as entries of ``edge_index``; an undirected
edge has two: ``arxiv`` has 1,166,243 directed citations and 2,315,598 entries after ``to_undirected``,
``products`` 61,859,140 undirected edges and 123,718,280 entries.
"""

from __future__ import annotations

import contextlib
import math
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# Density of node ranks in a power-law graph: degrees fall as k**-EXPONENT up to the hub's.
EXPONENT = 2.25
POWER_LAW = "-powerlaw"

# Below this many edges a graph is generated on the CPU, so that it is the same on every device.
_GENERATE_ON_CPU_EDGES = 10_000_000


@dataclass(frozen=True, kw_only=True)
class GraphSpec:
    """A graph's counts, known before anything is allocated."""

    nodes: int
    edges: int
    features: int  # width of a node's
    classes: int
    hub: int  # largest expected degree of the power-law stand-in, near the real set's largest degree
    # Edge order of the real set's loader: sorted by source, by destination, or in pairs (each edge next to its reverse,
    # otherwise unordered).
    order: str = "source"


SPECS: dict[str, GraphSpec] = {
    "karate": GraphSpec(nodes=34, edges=156, features=34, classes=4, hub=17),
    "cora": GraphSpec(nodes=2_708, edges=10_556, features=1_433, classes=7, hub=168, order="destination"),
    "arxiv": GraphSpec(nodes=169_343, edges=2_315_598, features=128, classes=40, hub=13_161),
    "reddit": GraphSpec(nodes=232_965, edges=114_615_892, features=602, classes=41, hub=21_657),
    "products": GraphSpec(nodes=2_449_029, edges=123_718_280, features=100, classes=47, hub=17_481, order="pairs"),
}

# karate is bundled with torch-geometric, so it needs no stand-in.
INPUTS: tuple[str, ...] = ("karate", *(name + tail for name in SPECS if name != "karate" for tail in ("", POWER_LAW)))


@dataclass(frozen=True, kw_only=True)
class Graph:
    """A graph with both directions of each edge."""

    x: Tensor  # features [N, F] float32
    edge_index: Tensor  # [2, E] int64
    classes: int
    data: str  # where it came from: bundled (KarateClub), real (Planetoid), generated, uniform ...

    @property
    def nodes(self) -> int:
        return self.x.size(0)

    @property
    def edges(self) -> int:
        return self.edge_index.size(1)

    @property
    def max_degree(self) -> int:
        """Maximum number of edges into a node."""
        return int(torch.bincount(self.edge_index[1], minlength=1).max())


def spec(name: str) -> GraphSpec:
    return SPECS[name.removesuffix(POWER_LAW)]


def load(
    name: str,
    *,
    data_root: str | None = None,
    features: int | None = None,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> Graph:
    """The input called ``name``: the real set if it is under ``data_root``, else a generated one.

    A name that ends in ``-powerlaw`` is always generated. ``features`` replaces the node features by seeded normal ones
    of this width. Equal seeds give equal graphs on one kind of device.
    """
    counts, device = spec(name), torch.device(device)
    real = None if name.endswith(POWER_LAW) else find_real(name, data_root)
    if real is None:
        graph = generate(counts, power_law=name.endswith(POWER_LAW), seed=seed, device=device, features=features)
    else:
        graph = replace(real, x=real.x.to(device), edge_index=real.edge_index.to(device))
    if features is not None and graph.x.size(1) != features:
        x = _normal(graph.nodes, features, seed=seed, device=device)
        graph = replace(graph, x=x, data=f"{graph.data}, features generated")
    return graph


def generate(
    counts: GraphSpec,
    *,
    power_law: bool = False,
    seed: int = 0,
    device: torch.device | str = "cpu",
    features: int | None = None,
) -> Graph:
    """A random undirected graph with these counts.

    Uniform: both ends of an edge are uniform over the nodes. Power law: both ends are drawn as in the Chung-Lu model,
    with node weights ``(rank + offset) ** (-1 / (EXPONENT - 1))``, the offset set so that the largest expected degree
    is ``counts.hub``; ranks are shuffled over the node ids. Large graphs are made on the device, others on the CPU.
    """
    device = torch.device(device)
    where = torch.device("cpu") if counts.edges < _GENERATE_ON_CPU_EDGES else device
    generator = torch.Generator(where).manual_seed(seed)

    nodes, pairs = counts.nodes, counts.edges // 2
    if power_law:
        ids = torch.randperm(nodes, generator=generator, device=where)
        left, right = (ids[_power_law_ranks(counts, pairs, generator)] for _ in range(2))
    else:
        left, right = (torch.randint(nodes, (pairs,), generator=generator, device=where) for _ in range(2))
    # The other end of a self-loop moves to another node, uniformly.
    shift = torch.randint(1, nodes, (pairs,), generator=generator, device=where)
    right = torch.where(left == right, (right + shift) % nodes, right)

    edge_index = torch.stack((left, right, right, left)).view(2, 2, pairs)
    if counts.order == "pairs":
        edge_index = edge_index.transpose(1, 2).reshape(2, -1)
    else:
        edge_index = _sort(edge_index.reshape(2, -1), nodes, by=counts.order)
    return Graph(
        x=_normal(nodes, features or counts.features, seed=seed, device=device),
        edge_index=edge_index.contiguous().to(device),
        classes=counts.classes,
        data="generated, power law" if power_law else "generated, uniform",
    )


def _power_law_ranks(counts: GraphSpec, size: int, generator: torch.Generator) -> Tensor:
    """Ranks in ``[0, nodes)``, rank r with a probability of the integral of ``t ** -a`` from offset + r to the next."""
    power = 1 - 1 / (EXPONENT - 1)
    offset = _offset(counts.nodes, counts.hub / counts.edges, power)
    low, high = offset**power, (offset + counts.nodes) ** power
    uniform = torch.rand(size, generator=generator, device=generator.device, dtype=torch.float64)
    ranks = uniform.mul_(high - low).add_(low).pow_(1 / power).sub_(offset)
    return ranks.long().clamp_(0, counts.nodes - 1)


def _offset(nodes: int, share: float, power: float) -> float:
    """The offset at which the first rank gets this share of all draws, by bisection in the logarithm."""
    low, high = 1e-9, 1e3 * nodes
    for _ in range(200):
        middle = math.sqrt(low * high)
        start = middle**power
        first = ((middle + 1) ** power - start) / ((middle + nodes) ** power - start)
        low, high = (middle, high) if first > share else (low, middle)
    return low


def _sort(edge_index: Tensor, nodes: int, *, by: str) -> Tensor:
    major, minor = edge_index if by == "source" else edge_index.flip(0)
    key = (major * nodes + minor).sort().values
    ordered = torch.stack((key // nodes, key % nodes))
    return ordered if by == "source" else ordered.flip(0)


def _normal(nodes: int, width: int, *, seed: int, device: torch.device) -> Tensor:
    """Seeded normal features, from a separate random stream, so that the graph does not depend on the width."""
    where = torch.device("cpu") if nodes * width < 8 * _GENERATE_ON_CPU_EDGES else device
    generator = torch.Generator(where).manual_seed(seed + 1)
    return torch.randn(nodes, width, generator=generator, device=where).to(device)


# Folders under the data root in which the loaders of torch-geometric and OGB keep the real graphs.
FOLDERS = {"cora": "Cora", "reddit": "Reddit", "arxiv": "ogbn_arxiv", "products": "ogbn_products"}


def find_real(name: str, data_root: str | None) -> Graph | None:
    """The real set on the CPU, or None if ``data_root`` has no set of this name."""
    if name == "karate":
        from torch_geometric.datasets import KarateClub

        data = KarateClub()[0]
        return Graph(x=data.x, edge_index=data.edge_index, classes=int(data.y.max()) + 1, data="bundled (KarateClub)")
    if data_root is None:
        return None
    root = Path(data_root).expanduser()
    if not root.is_dir():
        raise FileNotFoundError(f"the data root {str(root)!r} is not a folder; give one that holds the data sets")
    if not (root / FOLDERS[name]).is_dir():
        return None
    with contextlib.redirect_stdout(sys.stderr):  # standard output belongs to the harness
        dataset, source = _read(name, root)
    data = dataset[0]
    edge_index = data.edge_index
    if name == "arxiv":
        from torch_geometric.utils import to_undirected

        edge_index = to_undirected(edge_index, num_nodes=data.x.size(0))
    return Graph(x=data.x.float(), edge_index=edge_index, classes=int(dataset.num_classes), data=f"real ({source})")


def _read(name: str, root: Path) -> tuple[Any, str]:
    from torch_geometric.data.data import DataEdgeAttr, DataTensorAttr
    from torch_geometric.data.storage import GlobalStorage
    from torch_geometric.datasets import Planetoid, Reddit

    if name == "cora":
        return Planetoid(str(root), "Cora"), "Planetoid"
    if name == "reddit":
        return Reddit(str(root / "Reddit")), "Reddit"
    from ogb.nodeproppred import PygNodePropPredDataset

    # OGB reads its processed file with torch.load, which accepts only listed classes.
    with torch.serialization.safe_globals([DataEdgeAttr, DataTensorAttr, GlobalStorage]):
        return PygNodePropPredDataset(f"ogbn-{name}", root=str(root)), f"ogbn-{name}"
