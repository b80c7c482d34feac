"""The benchmark's graphs: counts, seeds and skew of generated ones, and small files in the real sets' formats."""

import gzip
import pickle
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse
import torch

from benchmarks.families import graphs
from benchmarks.families.graphs import GraphSpec

SMALL = GraphSpec(nodes=3_000, edges=40_000, features=16, classes=5, hub=900)


def skew(graph: graphs.Graph) -> float:
    """Largest degree over the mean degree."""
    return graph.max_degree * graph.nodes / graph.edges


def test_karate_is_the_real_club():
    graph = graphs.load("karate")
    assert (graph.nodes, graph.edges, graph.classes, graph.data) == (34, 156, 4, "bundled (KarateClub)")
    # Instructor and president, the two hubs of the paper, are not friends.
    degree = torch.bincount(graph.edge_index[1])
    assert degree[0] == 16 and degree[33] == 17
    assert not ((graph.edge_index[0] == 0) & (graph.edge_index[1] == 33)).any()


@pytest.mark.parametrize("power_law", [False, True])
@pytest.mark.parametrize("order", ["source", "destination", "pairs"])
def test_generated_graph_is_undirected_without_loops(power_law: bool, order: str):
    counts = GraphSpec(nodes=50, edges=600, features=3, classes=2, hub=60, order=order)
    edge_index = graphs.generate(counts, power_law=power_law).edge_index
    assert edge_index.shape == (2, 600) and edge_index.is_contiguous()
    assert edge_index.min() >= 0 and edge_index.max() < 50
    assert (edge_index[0] != edge_index[1]).all()
    key, reverse = edge_index[0] * 50 + edge_index[1], edge_index[1] * 50 + edge_index[0]
    assert torch.equal(key.sort().values, reverse.sort().values)
    if order == "pairs":
        assert torch.equal(edge_index[:, ::2], edge_index[:, 1::2].flip(0))
    else:
        ordered = key if order == "source" else reverse
        assert (ordered.diff() >= 0).all()


def test_power_law_is_skewed_and_uniform_is_not():
    uniform, power_law = graphs.generate(SMALL), graphs.generate(SMALL, power_law=True)
    assert skew(uniform) < 4
    assert 0.8 * SMALL.hub < power_law.max_degree < 1.2 * SMALL.hub
    median = torch.bincount(power_law.edge_index[1], minlength=SMALL.nodes).median()
    assert median < 0.7 * SMALL.edges / SMALL.nodes
    # Ids are shuffled: the hub sits anywhere, so two seeds put it at two places.
    seeded = [graphs.generate(SMALL, power_law=True, seed=seed) for seed in range(3)]
    hubs = {int(torch.bincount(graph.edge_index[1]).argmax()) for graph in seeded}
    assert len(hubs) > 1


@pytest.mark.parametrize("power_law", [False, True])
def test_seeds(power_law: bool):
    one, again, other = (graphs.generate(SMALL, power_law=power_law, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(one.edge_index, again.edge_index) and torch.equal(one.x, again.x)
    assert not torch.equal(one.edge_index, other.edge_index) and not torch.equal(one.x, other.x)


def write_cora(root: Path) -> None:
    """540 nodes in Planetoid's eight files: 20 labelled, 530 in allx, the last 10 the test nodes, in another order."""
    rng = np.random.default_rng(0)
    raw = root / "Cora" / "raw"
    raw.mkdir(parents=True)
    features = scipy.sparse.csr_matrix((rng.random((540, 6)) < 0.4).astype(np.float32))
    labels = np.eye(3, dtype=np.int32)[rng.integers(3, size=540)]
    neighbours: dict[int, list[int]] = defaultdict(list)
    for a, b in [(0, 1), (1, 2), (5, 539), (7, 7), (0, 1)]:  # with a self-loop and a duplicate, as in the real files
        neighbours[a].append(b)
        neighbours[b].append(a)
    test = rng.permutation(np.arange(530, 540))
    files = {"x": features[:20], "y": labels[:20], "allx": features[:530], "ally": labels[:530], "graph": neighbours}
    files |= {"tx": features[530:], "ty": labels[530:]}
    for name, value in files.items():
        (raw / f"ind.cora.{name}").write_bytes(pickle.dumps(value))
    (raw / "ind.cora.test.index").write_text("".join(f"{index}\n" for index in test))


def write_reddit(root: Path) -> None:
    raw = root / "Reddit" / "raw"
    raw.mkdir(parents=True)
    np.savez(
        raw / "reddit_data.npz",
        feature=np.arange(12, dtype=np.float64).reshape(4, 3),
        label=np.array([0, 1, 2, 1]),
        node_types=np.array([1, 1, 2, 3]),
    )
    row, col = np.array([0, 1, 1, 3]), np.array([1, 0, 3, 1])
    scipy.sparse.save_npz(raw / "reddit_graph.npz", scipy.sparse.coo_matrix((np.ones(4), (row, col)), shape=(4, 4)))


def write_ogb(root: Path, folder: str, *, year: bool) -> None:
    raw = root / folder / "raw"
    raw.mkdir(parents=True)
    (root / folder / "RELEASE_v1.txt").touch()
    files = {"edge": "0,1\n2,1\n1,2\n", "num-node-list": "4\n", "num-edge-list": "3\n", "node-label": "0\n1\n2\n0\n"}
    files |= {"node-feat": "0.5,1.5\n-1.0,0.0\n2.0,3.0\n4.0,5.5\n"}
    files |= {"node_year": "2010\n2011\n2012\n2013\n"} if year else {}
    for name, text in files.items():
        with gzip.open(raw / f"{name}.csv.gz", "wt") as file:
            file.write(text)


def pairs(graph: graphs.Graph) -> list[tuple[int, int]]:
    return sorted(zip(*graph.edge_index.tolist(), strict=True))


def test_real_cora(tmp_path: Path):
    write_cora(tmp_path)
    graph = graphs.load("cora", data_root=str(tmp_path))
    assert graph.data == "real (Planetoid)"
    assert graph.x.shape == (540, 6) and graph.classes == 3
    # Duplicates and self-loops go, each edge stays in both directions.
    assert pairs(graph) == [(0, 1), (1, 0), (1, 2), (2, 1), (5, 539), (539, 5)]


def test_real_reddit(tmp_path: Path):
    write_reddit(tmp_path)
    graph = graphs.load("reddit", data_root=str(tmp_path))
    assert graph.data == "real (Reddit)"
    assert graph.x.dtype == torch.float32 and graph.x.tolist()[1] == [3.0, 4.0, 5.0]
    assert pairs(graph) == [(0, 1), (1, 0), (1, 3), (3, 1)] and graph.classes == 3


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writ")
@pytest.mark.parametrize(("name", "folder"), [("arxiv", "ogbn_arxiv"), ("products", "ogbn_products")])
def test_real_graphs_of_ogb_have_both_directions(tmp_path, name, folder, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "outdated", None)  # by which OGB would ask the index for its newest version
    write_ogb(tmp_path, folder, year=name == "arxiv")
    graph = graphs.load(name, data_root=str(tmp_path))
    assert graph.data == f"real (ogbn-{name})" and capsys.readouterr().out == ""
    once = [(0, 1), (1, 0), (1, 2), (2, 1)]
    assert pairs(graph) == (once if name == "arxiv" else sorted([*once, (1, 2), (2, 1)]))
    assert torch.equal(graphs.load(name, data_root=str(tmp_path)).x, graph.x)  # from its processed file


def test_data_root_without_the_set_falls_back_and_says_so(tmp_path: Path):
    assert graphs.load("cora", data_root=str(tmp_path)).data == "generated, uniform"
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(FileNotFoundError, match="is not a folder"):
        graphs.load("cora", data_root=str(tmp_path / "missing"))
