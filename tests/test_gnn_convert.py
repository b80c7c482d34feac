"""What only the conversion of graph models meets: test_convert.py holds outputs and gradients."""

from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn

from zoo.gnn.convert import WEIGHTS

from_upstream, to_upstream = WEIGHTS.from_upstream, WEIGHTS.to_upstream
IN, HIDDEN, OUT = 6, 8, 5


def graph(nodes: int = 14, edges: int = 50) -> tuple[Tensor, Tensor, Tensor]:
    """Duplicates, self-loops (one doubled) and isolated nodes at both ends of the numbering."""
    edge_index = torch.randint(1, nodes - 2, (2, edges))
    edge_index[:, 3] = edge_index[:, 4]
    edge_index[:, 7] = 5
    return torch.randn(nodes, IN), edge_index, torch.rand(edges) + 0.1


def error(ours: Tensor, theirs: Tensor) -> float:
    ours, theirs = ours.detach(), theirs.detach()
    return float((ours - theirs).norm() / theirs.norm().clamp(min=1e-12))


def make(cls: type[nn.Module], options: dict[str, Any]) -> nn.Module:
    sizes = {"in_channels": IN, "hidden_channels": HIDDEN, "num_layers": 2, "out_channels": OUT}
    return cls(**{**sizes, **options})


def test_a_weighted_degree_of_zero_gives_no_gradient_where_torch_geometric_gives_nan() -> None:
    theirs = make(pyg.GCN, {"num_layers": 1})
    x, edge_index = torch.randn(2, IN), torch.tensor([[0, 1], [1, 1]])
    outputs, gradients = [], []
    for model in (from_upstream(theirs), theirs):
        weight = torch.tensor([1.0, -1.0], requires_grad=True)
        outputs.append(model(x, edge_index, weight))
        outputs[-1].sum().backward()
        gradients.append(weight.grad)
    torch.testing.assert_close(*outputs)
    assert torch.equal(gradients[0], torch.zeros(2)) and gradients[1].isnan().all()


def test_lazy_width_is_read_from_the_weights() -> None:
    theirs = make(pyg.GraphSAGE, {"in_channels": -1})
    with pytest.raises(ValueError, match=r"in_channels=-1.*call the model once"):
        from_upstream(theirs)
    x, edge_index, _ = graph()
    theirs(x, edge_index)
    assert from_upstream(theirs).config.in_channels == IN


def test_a_model_changed_by_hand_is_refused() -> None:
    theirs = make(pyg.GCN, {"num_layers": 3})
    theirs.convs[1].improved = True
    with pytest.raises(ValueError, match=r"improved=True.*another convolution has False"):
        from_upstream(theirs)
    theirs = make(pyg.GAT, {})
    theirs.convs[0].dropout = 0.5
    with pytest.raises(ValueError, match=r"dropout=0\.5"):
        from_upstream(theirs)


@pytest.mark.parametrize(("cls", "options"), [(pyg.GCN, {}), (pyg.GAT, {"heads": 2}), (pyg.GraphSAGE, {})], ids=str)
def test_dropout_has_upstreams_effect(cls: type[nn.Module], options: dict[str, Any]) -> None:
    torch.manual_seed(1)
    theirs = make(cls, {"dropout": 0.4, **options})
    ours = from_upstream(theirs.train())
    x, edge_index, _ = graph()
    drawn = [torch.stack([model(x, edge_index).detach() for _ in range(600)]) for model in (ours, theirs)]
    assert error(drawn[0].mean(0), drawn[1].mean(0)) < 0.1
    assert error(drawn[0].std(0), drawn[1].std(0)) < 0.1
