"""A short real training: as accurate as torch-geometric's, within the noise of seeds."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import zoo
from zoo.training import TrainingStep

SEEDS, STEPS = 10, 60


def library(kind: str, features: int, classes: int, hidden: int = 16) -> nn.Module:
    from torch_geometric.nn import GAT, GCN, GraphSAGE

    options: dict[str, Any] = {"heads": 4} if kind == "gat" else {}
    cls = {"gcn": GCN, "gat": GAT, "graphsage": GraphSAGE}[kind]
    return cls(features, hidden, 2, classes, dropout=0.5, **options)


def accuracy(model: nn.Module, data: Any, seed: int, steps: int) -> float:
    """Of the nodes that were not trained on."""
    torch.manual_seed(seed + 1000)

    def loss(model: nn.Module, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(data.x, data.edge_index), labels)

    labels = torch.where(data.train_mask, data.y, -100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2, weight_decay=5e-3, fused=True)
    step = TrainingStep(model.train(), loss, optimizer)
    for _ in range(steps):
        step(labels)
    step.check()
    model.eval()
    with torch.no_grad():
        right = model(data.x, data.edge_index).argmax(1) == data.y
    return right[data.test_mask].float().mean().item()


def compare(kind: str, data: Any, steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    ours, theirs = [], []
    for seed in range(SEEDS):
        torch.manual_seed(seed)
        upstream = library(kind, data.x.shape[1], int(data.y.max()) + 1)
        model = zoo.from_upstream(upstream)
        zoo.compile_regions(model, backend="aot_eager")
        # Dropout is drawn apart, so that nothing but the distribution agrees.
        ours.append(accuracy(model, data, seed, steps))
        theirs.append(accuracy(upstream, data, seed + SEEDS, steps))
    return torch.tensor(ours), torch.tensor(theirs)


def assert_equal_within_noise(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    noise = ((ours.var() + theirs.var()) / SEEDS).sqrt()
    assert (ours.mean() - theirs.mean()).abs() < 3 * noise + 0.01, (ours, theirs)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gcn", "gat", "graphsage"])
def test_karate(kind: str):
    from torch_geometric.datasets import KarateClub

    data = KarateClub()[0]
    data.test_mask = ~data.train_mask
    ours, theirs = compare(kind, data, STEPS)
    assert_equal_within_noise(ours, theirs)
    assert ours.mean() > 0.5  # of four classes


@pytest.mark.skipif("REGIONAL_ZOO_DATA" not in os.environ, reason="REGIONAL_ZOO_DATA names no folder of data sets")
@pytest.mark.parametrize("kind", ["gcn", "gat", "graphsage"])
def test_cora(kind: str):
    from torch_geometric.datasets import Planetoid

    data = Planetoid(os.environ["REGIONAL_ZOO_DATA"], "Cora")[0]
    ours, theirs = compare(kind, data, 100)
    assert_equal_within_noise(ours, theirs)
    assert ours.mean() > 0.7
