"""Real graphs that are on disk already, read by the loaders of torch-geometric and OGB. Nothing is ever downloaded.

Layout under the data root, as the loaders leave it:

- ``Cora/raw/ind.cora.*`` (Planetoid)
- ``Reddit/raw/reddit_data.npz`` and ``reddit_graph.npz``
- ``ogbn_arxiv/`` and ``ogbn_products/`` with ``RELEASE_v1.txt`` and ``raw/*.csv.gz`` (OGB; ``ogbn_arxiv_pyg/`` as well)

A set that a loader has processed already is read from its ``processed/`` folder; the raw files may be gone then.
"""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class RealGraph:
    """What a loader returned: features ``[N, F]`` float32, ``edge_index`` ``[2, E]`` int64, both on the CPU."""

    x: Tensor
    edge_index: Tensor
    classes: int
    data: str


def find(name: str, data_root: str | None) -> RealGraph | None:
    """The real set, or None if there is none of this name under ``data_root``.

    Raises:
        FileNotFoundError: If ``data_root`` does not exist, or the set's folder is there and incomplete.
        ImportError: If the set needs OGB and OGB is not installed.
    """
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


def _karate() -> RealGraph:
    from torch_geometric.datasets import KarateClub

    data = KarateClub()[0]
    return RealGraph(x=data.x, edge_index=data.edge_index, classes=int(data.y.max()) + 1, data="bundled (KarateClub)")


def _cora(folder: Path) -> RealGraph:
    from torch_geometric.datasets import Planetoid

    dataset = _offline(Planetoid)(str(folder.parent), "Cora")
    data = dataset[0]
    return RealGraph(x=data.x, edge_index=data.edge_index, classes=dataset.num_classes, data="real (Planetoid)")


def _reddit(folder: Path) -> RealGraph:
    from torch_geometric.datasets import Reddit

    dataset = _offline(Reddit)(str(folder))
    data = dataset[0]
    return RealGraph(x=data.x, edge_index=data.edge_index, classes=dataset.num_classes, data="real (Reddit)")


def _ogb(folder: Path) -> RealGraph:
    import torch
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
    return RealGraph(x=data.x.float(), edge_index=edge_index, classes=int(dataset.num_classes), data=f"real ({name})")


_READERS: dict[str, tuple[tuple[str, Callable[[Path], RealGraph]], ...]] = {
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
