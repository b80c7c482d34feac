"""Outputs and gradients against torch-geometric's own models, both ways, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn

import zoo
from zoo.gnn.convert import WEIGHTS

from_upstream, to_upstream = WEIGHTS.from_upstream, WEIGHTS.to_upstream
convert_state_dict = WEIGHTS.convert_state_dict
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


def assert_same(theirs: nn.Module, *, training: bool, weighted: bool = False) -> None:
    """Outputs, input gradient, every parameter's gradient and, for GCN, the edge weights' gradient."""
    with torch.no_grad():
        for parameter in theirs.parameters():
            # Biases start at zero, where a wrong one would not show.
            if parameter.dim() == 1:
                parameter.add_(torch.rand_like(parameter) * 0.1)
        for buffer_name, buffer in theirs.named_buffers():
            if "running" in buffer_name:
                buffer.add_(torch.rand_like(buffer))
    ours = from_upstream(theirs.train(training))
    assert ours.training is training
    x, edge_index, edge_weight = graph()
    runs = []
    for model in (ours, theirs):
        leaves = [x.clone().requires_grad_(), edge_weight.clone().requires_grad_()]
        out = model(leaves[0], edge_index, leaves[1]) if weighted else model(leaves[0], edge_index)
        (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
        runs.append((out, leaves, model))
    (out, leaves, _), (their_out, their_leaves, _) = runs
    assert error(out, their_out) < 1e-5
    assert error(leaves[0].grad, their_leaves[0].grad) < 1e-5
    if weighted:
        assert error(leaves[1].grad, their_leaves[1].grad) < 1e-5
    gradients = {name: p.grad for name, p in theirs.named_parameters()}
    converted = convert_state_dict({**theirs.state_dict(), **gradients}, ours.config)
    scale = max(float(g.norm()) for g in gradients.values())
    for name, parameter in ours.named_parameters():
        # A bias before a batch norm has a gradient of zero but for rounding: compare with the largest gradient.
        assert float((parameter.grad - converted[name]).norm()) < 1e-5 * max(scale, float(converted[name].norm())), name
    buffers = dict(ours.named_buffers())
    converted = convert_state_dict(theirs.state_dict(), ours.config)
    for name, buffer in buffers.items():
        torch.testing.assert_close(buffer, converted[name], rtol=1e-5, atol=1e-6)


# What test_fuzz_gnn.py does not draw.
CASES: list[tuple[type[nn.Module], dict[str, Any]]] = [
    (pyg.GCN, {"num_layers": 4, "act": "elu", "act_kwargs": {"alpha": 0.7}}),
    # Without a bias and a norm it would write into what the aggregation returned.
    *(
        (cls, {"act": "relu", "act_kwargs": {"inplace": True}, "bias": False})
        for cls in (pyg.GCN, pyg.GAT, pyg.GraphSAGE)
    ),
    (pyg.GAT, {"heads": 2, "norm": "batch_norm", "norm_kwargs": {"affine": False, "eps": 1e-3, "momentum": 0.3}}),
    (pyg.GCN, {"norm": "BatchNorm", "norm_kwargs": {"track_running_stats": False}, "act": "leaky_relu"}),
    (pyg.GraphSAGE, {"norm": "layer_norm", "norm_kwargs": {"mode": "node"}, "act": "sigmoid"}),
    (pyg.GAT, {"norm": "layer", "norm_kwargs": {"mode": "graph", "affine": False}, "act_first": True, "act": "silu"}),
    (pyg.GCN, {"add_self_loops": False}),
    (pyg.GCN, {"cached": True, "improved": True, "jk": "cat"}),
    (pyg.GCN, {"hidden_channels": IN, "out_channels": IN}),
    (pyg.GAT, {"heads": 8, "num_layers": 1, "hidden_channels": 3}),
    (pyg.GraphSAGE, {"aggr": "add", "project": True}),
    (pyg.GraphSAGE, {"hidden_channels": IN, "out_channels": IN, "num_layers": 3}),
]


def make(cls: type[nn.Module], options: dict[str, Any]) -> nn.Module:
    sizes = {"in_channels": IN, "hidden_channels": HIDDEN, "num_layers": 2, "out_channels": OUT}
    return cls(**{**sizes, **options})


@pytest.mark.parametrize(("cls", "options"), CASES, ids=str)
def test_matches_torch_geometric(cls: type[nn.Module], options: dict[str, Any]) -> None:
    for training in (False, True):
        assert_same(make(cls, options), training=training, weighted=cls is pyg.GCN and "bias" not in options)


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


@pytest.mark.parametrize(
    ("cls", "options", "message"),
    [
        (pyg.GAT, {"v2": True}, "v2=True"),
        (pyg.GAT, {"edge_dim": 3}, "edge_dim=3"),
        (pyg.GAT, {"in_channels": (IN, IN)}, r"in_channels=\(6, 6\)"),
        (pyg.GraphSAGE, {"in_channels": (IN, IN)}, r"in_channels=\(6, 6\)"),
        (pyg.GraphSAGE, {"aggr": "lstm"}, "aggr='lstm'|aggr='LSTM"),
        (pyg.GraphSAGE, {"aggr": ["mean", "max"]}, r"aggr=\['mean', 'max'\]"),
        (pyg.GCN, {"aggr": "mean"}, "aggr='mean'"),
        (pyg.GCN, {"jk": "lstm"}, "jk='lstm'"),
        (pyg.GCN, {"act": "prelu"}, "act=PReLU"),
        (pyg.GCN, {"act": lambda x: x}, "act=<function"),
        (pyg.GCN, {"norm": "graph_norm"}, "norm='GraphNorm'"),
        (pyg.GCN, {"norm": "batch", "norm_kwargs": {"momentum": None}}, "norm_kwargs={'momentum': None}"),
        (pyg.GCN, {"flow": "target_to_source"}, "flow='target_to_source'"),
        (pyg.GCN, {"decomposed_layers": 2}, "decomposed_layers=2"),
    ],
)
def test_unsupported_options_are_named(cls: type[nn.Module], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        zoo.from_upstream(make(cls, options))


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
