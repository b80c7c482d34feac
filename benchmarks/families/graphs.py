"""The graphs that GNNs are measured on: one bundled, four real ones where they are on disk, else generated stand-ins.

Every input says where it came from (:attr:`Graph.data`). A stand-in has the counts and the edge order that the real
set's loader returns, seeded normal features, no self-loops, and may hold duplicate edges, which are not removed so that
the counts are exact.

Edges are always counted as the entries of ``edge_index``. An undirected edge is two entries, one each way:

- ``arxiv``: 1,166,243 directed citations, 2,315,598 entries after ``to_undirected``, the usual preprocessing.
- ``products``: OGB reports 61,859,140 undirected edges; its loader returns, and we use, 123,718,280 entries.
  "Products-size, 61.9M edges" in our notes on single kernels means half of this graph.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# Density of node ranks in a power-law graph: degrees fall as k**-EXPONENT up to the hub's.
EXPONENT = 2.25
POWER_LAW = "-powerlaw"

# Below this many edges a graph is generated on the CPU, so that it is the same one on every device.
_GENERATE_ON_CPU_EDGES = 10_000_000


@dataclass(frozen=True, kw_only=True)
class GraphSpec:
    """A graph's counts, known before anything is allocated.

    Args:
        nodes: Number of nodes.
        edges: Entries of ``edge_index``.
        features: Width of the node features.
        classes: Number of classes.
        hub: Largest expected degree of the power-law stand-in, near the real set's largest degree.
        order: How the real set's loader leaves the edges: sorted by ``source``, by ``destination``, or in ``pairs``
            (an edge and its reverse next to each other, otherwise in no order).
    """

    nodes: int
    edges: int
    features: int
    classes: int
    hub: int
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
    """A graph with features ``x`` [N, F] float32 and ``edge_index`` [2, E] int64, both directions of each edge.

    ``data`` says where it came from: ``bundled (KarateClub)``, ``real (Planetoid)``, ``generated, uniform`` ...
    """

    x: Tensor
    edge_index: Tensor
    classes: int
    data: str

    @property
    def nodes(self) -> int:
        return self.x.size(0)

    @property
    def edges(self) -> int:
        return self.edge_index.size(1)

    @property
    def max_degree(self) -> int:
        """Most edges that end in one node."""
        return int(torch.bincount(self.edge_index[1], minlength=1).max())


def spec(name: str) -> GraphSpec:
    """Counts of an input by name.

    Raises:
        ValueError: If there is no such input.
    """
    if name not in INPUTS:
        raise ValueError(f"there is no graph {name!r}; choose one of {', '.join(INPUTS)}")
    return SPECS[name.removesuffix(POWER_LAW)]


def load(
    name: str,
    *,
    data_root: str | None = None,
    features: int | None = None,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> Graph:
    """The input called ``name``: the real set when it lies under ``data_root``, else a generated one. Never downloads.

    Args:
        name: One of :data:`INPUTS`; a name that ends in ``-powerlaw`` is always generated.
        data_root: Folder of real data sets; its layout stands above the readers.
        features: Replace the node features by seeded normal ones of this width.
        seed: The same seed gives the same graph on the same kind of device.
        device: Where the tensors shall be.

    Raises:
        ValueError: If there is no such input.
        FileNotFoundError: If the set's folder is there and incomplete.
        ImportError: If the set is there and its loader's library is not installed.
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
    is ``counts.hub``; ranks are shuffled over the node ids, so that a hub's id says nothing.

    ``edges`` must be even. Large graphs are generated on the device, others on the CPU. ``features`` is the width of
    the node features if not ``counts.features``; their seed is apart from the graph's.

    Raises:
        ValueError: If the edges do not come in pairs, or there are fewer than two nodes to join.
    """
    if counts.edges % 2 or counts.nodes < 2:
        raise ValueError(f"an undirected graph needs an even number of edges and two nodes or more, got {counts}")
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
    """Seeded normal features; a stream of its own, so that the graph does not change with the width."""
    where = torch.device("cpu") if nodes * width < 8 * _GENERATE_ON_CPU_EDGES else device
    generator = torch.Generator(where).manual_seed(seed + 1)
    return torch.randn(nodes, width, generator=generator, device=where).to(device)


# Real graphs, read by the loaders of torch-geometric and OGB. Under the data root, as the loaders leave it:
#   Cora/raw/ind.cora.* (Planetoid)
#   Reddit/raw/reddit_data.npz and reddit_graph.npz
#   ogbn_arxiv/ and ogbn_products/ with RELEASE_v1.txt and raw/*.csv.gz (OGB; ogbn_arxiv_pyg/ as well)
# A set that a loader has processed already is read from its processed/ folder; the raw files may be gone then.


def find_real(name: str, data_root: str | None) -> Graph | None:
    """The real set on the CPU, or None if there is none of this name under ``data_root``."""
    if name == "karate":
        return _karate()
    if data_root is None:
        return None
    root = Path(data_root).expanduser()
    if not root.is_dir():
        raise FileNotFoundError(f"the data root {str(root)!r} is not a folder; give one that holds the data sets")
    for folder, read in _READERS[name]:
        if (root / folder).is_dir():
            with _quiet():
                return read(root / folder)
    return None


def _karate() -> Graph:
    from torch_geometric.datasets import KarateClub

    data = KarateClub()[0]
    return Graph(x=data.x, edge_index=data.edge_index, classes=int(data.y.max()) + 1, data="bundled (KarateClub)")


def _cora(folder: Path) -> Graph:
    from torch_geometric.datasets import Planetoid

    dataset = _offline(Planetoid)(str(folder.parent), "Cora")
    data = dataset[0]
    return Graph(x=data.x, edge_index=data.edge_index, classes=dataset.num_classes, data="real (Planetoid)")


def _reddit(folder: Path) -> Graph:
    from torch_geometric.datasets import Reddit

    dataset = _offline(Reddit)(str(folder))
    data = dataset[0]
    return Graph(x=data.x, edge_index=data.edge_index, classes=dataset.num_classes, data="real (Reddit)")


def _ogb(folder: Path) -> Graph:
    from torch_geometric.data.data import DataEdgeAttr, DataTensorAttr
    from torch_geometric.data.storage import GlobalStorage
    from torch_geometric.utils import to_undirected

    name = folder.name.removesuffix("_pyg").replace("_", "-")
    release = folder / "RELEASE_v1.txt"
    if not release.is_file():
        # Without it OGB's loader asks on the terminal whether it may delete the folder.
        raise FileNotFoundError(f"{release} is missing, so {name} is incomplete or another release; {_ADVICE}")
    # OGB reads its processed file back with torch.load, which by now takes listed classes only.
    with torch.serialization.safe_globals([DataEdgeAttr, DataTensorAttr, GlobalStorage]):
        dataset = _offline(_ogb_loader())(name, root=str(folder.parent))
    data = dataset[0]
    edge_index = data.edge_index
    if name == "ogbn-arxiv":
        edge_index = to_undirected(edge_index, num_nodes=data.x.size(0))
    return Graph(x=data.x.float(), edge_index=edge_index, classes=int(dataset.num_classes), data=f"real ({name})")


_READERS: dict[str, tuple[tuple[str, Callable[[Path], Graph]], ...]] = {
    "cora": (("Cora", _cora),),
    "reddit": (("Reddit", _reddit),),
    # OGB's loader prefers the folder with the tail.
    "arxiv": (("ogbn_arxiv_pyg", _ogb), ("ogbn_arxiv", _ogb)),
    "products": (("ogbn_products_pyg", _ogb), ("ogbn_products", _ogb)),
}

_ADVICE = "complete the folder, or move it away to run on a generated graph"


def _offline(loader: type[Any]) -> type[Any]:
    """The loader with its download taken out: complete data loads as ever, incomplete data is an error."""

    def download(self: Any) -> None:
        # Loaders ask for the raw files first even if the processed ones are there, which are all they need.
        if all(os.path.isfile(path) for path in self.processed_paths):
            return
        missing = [path for path in self.raw_paths if not os.path.isfile(path)]
        raise FileNotFoundError(
            f"{loader.__name__} under {self.root} is incomplete: {', '.join(missing)} missing; {_ADVICE}"
        )

    return type(loader.__name__, (loader,), {"download": download})


def _ogb_loader() -> type[Any]:
    missing = object()
    outdated = sys.modules.get("outdated", missing)
    try:
        # On import OGB asks the package index for its newest version, in a thread, unless this module is absent.
        sys.modules["outdated"] = None  # type: ignore[assignment]
        from ogb.nodeproppred import PygNodePropPredDataset
    except ImportError as error:
        raise ImportError(f"reading an OGB data set needs the ogb package ({error}); pip install ogb") from error
    finally:
        if outdated is missing:
            del sys.modules["outdated"]
        else:
            sys.modules["outdated"] = outdated  # type: ignore[assignment]
    loader: type[Any] = PygNodePropPredDataset
    return loader


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """What loaders print goes to stderr; standard output belongs to the harness."""
    with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
        # Labels come as read-only arrays from newer pandas; we do not write to them.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writ")
        yield
