"""Random graph models, graphs and features against torch-geometric's; see fuzzing.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from fuzzing import Results, backward, compare, convert, dtypes, fuzz, one_of, randomize, rarely, round_trips, seeds
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import zoo
from zoo.gnn import CSRGraph, GATConv, NeighborSampler, SAGEConv

pytestmark = pytest.mark.usefixtures("one_thread")
PRESETS = {"GCN": "gcn-debug", "GAT": "gat-debug", "GraphSAGE": "graphsage-debug"}


@st.composite
def edges(draw: Any, sources: int, destinations: int) -> Tensor:
    """[2, E], with isolated nodes, loops and duplicates; none at all is likely."""
    pairs = st.tuples(st.integers(0, sources - 1), st.integers(0, destinations - 1))
    drawn = draw(st.lists(pairs, max_size=30))
    return torch.tensor(drawn, dtype=torch.int64).view(-1, 2).t().contiguous()


@st.composite
def models(draw: Any) -> tuple[str, dict[str, Any]]:
    name = draw(one_of(*PRESETS))
    heads = draw(st.integers(1, 3)) if name == "GAT" else 1
    options = {
        "in_channels": draw(st.integers(1, 9)),
        "hidden_channels": heads * draw(st.integers(1, 5)),
        "num_layers": draw(st.integers(1, 3)),
        "out_channels": draw(one_of(None, 1, 3)),
        "act": draw(one_of("relu", "elu", "gelu", "tanh", None)),
        "act_first": draw(st.booleans()),
        "norm": "graph_norm" if draw(rarely) else draw(one_of(None, "batch", "layer")),
        "jk": "lstm" if draw(rarely) else draw(one_of(None, "last", "cat", "max")),
        "bias": draw(st.booleans()),
    }
    if options["jk"] == "lstm":
        options["num_layers"] = 2  # or it may have no width in torch-geometric
    if options["out_channels"] is not None and name == "GAT":
        options["out_channels"] *= heads
    if name == "GCN":
        options |= {"improved": draw(st.booleans()), "normalize": draw(st.booleans())}
    elif name == "GAT":
        options |= {"heads": heads, "concat": draw(st.booleans()), "negative_slope": draw(one_of(0.2, 0.0, 0.7))}
        options |= {"add_self_loops": draw(st.booleans()), "residual": draw(st.booleans())}
        options |= {"v2": draw(rarely)}
    else:
        options |= {
            "aggr": "lstm" if draw(rarely) else draw(one_of("mean", "max", "sum")),
            "normalize": draw(st.booleans()),
        }
        options |= {"root_weight": draw(st.booleans()), "project": draw(st.booleans())}
    return name, options


@fuzz
@given(data=st.data(), made=models(), dtype=dtypes, nodes=st.integers(1, 12), seed=seeds, training=st.booleans())
def test_models(data: st.DataObject, made: Any, dtype: torch.dtype, nodes: int, seed: int, training: bool) -> None:
    name, options = made
    edge_index = data.draw(edges(nodes, nodes))
    # Multiples of a quarter: a degree is zero in each dtype or in none.
    quarters = st.lists(st.integers(-8, 12), min_size=edge_index.shape[1], max_size=edge_index.shape[1])
    weights = data.draw(st.none() | quarters) if name == "GCN" else None
    scale = data.draw(one_of(0.1, 1.0, 20.0))
    theirs = randomize(getattr(pyg, name)(**options), seed).train(training)
    if convert(theirs, options) is None:
        return
    features = scale * torch.randn(nodes, options["in_channels"], generator=torch.Generator().manual_seed(seed))

    def run(model: nn.Module, dtype: torch.dtype) -> Results:
        inputs = [features.to(dtype, copy=True).requires_grad_()]
        if weights is not None:
            inputs.append((torch.tensor(weights) / 4).to(dtype, copy=True).requires_grad_())
        return backward({"output": model(inputs[0], edge_index, *inputs[1:])}, *inputs)

    try:
        # Batch norm of rows that are nearly equal divides their rounding by the root of eps; in bfloat16 that is all.
        normed = training and options["norm"] == "batch"
        dtype = torch.float32 if normed and dtype == torch.bfloat16 else dtype
        # GraphSAGE that normalises a single channel returns signs: the outputs' weights, cosines, cancel in gradients.
        signs = (
            name == "GraphSAGE" and options["normalize"] and 1 in (options["hidden_channels"], options["out_channels"])
        )
        floor = 1e-3 if normed and dtype == torch.float32 else 0.0
        ours = compare(theirs, run, dtype, floor=floor, least_gradient=1.0 if signs else 0.0)
    except ValueError:
        # Batch norm of one row in training: both refuse.
        with pytest.raises(ValueError, match="more than 1 value per channel"):
            run(theirs, dtype)
        return

    round_trips(theirs, ours, PRESETS[name])


@fuzz
@given(
    data=st.data(), kind=one_of("sage", "gat"), sources=st.integers(1, 9), destinations=st.integers(1, 9),
    dtype=one_of(torch.float64, torch.float32), seed=seeds,
)  # fmt: skip
def test_bipartite_convolutions(
    data: st.DataObject, kind: str, sources: int, destinations: int, dtype: torch.dtype, seed: int
) -> None:
    edge_index = data.draw(edges(sources, destinations))
    widths, out = (data.draw(st.integers(1, 5)), data.draw(st.integers(1, 5))), data.draw(st.integers(1, 5))
    if kind == "sage":
        options = {name: data.draw(st.booleans()) for name in ("normalize", "root_weight", "project", "bias")}
        options |= {"aggr": data.draw(one_of("mean", "max", "sum"))}
        theirs, ours = pyg.SAGEConv(widths, out, **options), SAGEConv(widths, out, **options)
    else:
        options = {"heads": data.draw(st.integers(1, 3)), "concat": data.draw(st.booleans()), "add_self_loops": False}
        options |= {name: data.draw(st.booleans()) for name in ("bias", "residual")}
        theirs, ours = pyg.GATConv(widths, out, **options), GATConv(widths, out, **options)
    randomize(theirs, seed)
    ours.load_state_dict(theirs.state_dict())
    generator = torch.Generator().manual_seed(seed)
    features = [torch.randn(*shape, generator=generator) for shape in zip((sources, destinations), widths, strict=True)]

    def run(conv: nn.Module, graph: Any, dtype: torch.dtype) -> Results:
        inputs = [each.to(dtype, copy=True).requires_grad_() for each in features]
        results = backward({"output": conv.to(dtype)(tuple(inputs), graph)}, *inputs)
        return results | {n: p.grad.double() for n, p in conv.named_parameters() if p.grad is not None}

    graph = CSRGraph.from_edge_index(edge_index, num_nodes=(sources, destinations))
    expected, found = run(theirs, edge_index, dtype), run(ours, graph, dtype)
    tolerance = 1e-4 if dtype == torch.float32 else 1e-9
    for name in found:
        torch.testing.assert_close(
            found[name], expected[name], rtol=tolerance, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )


@fuzz
@given(
    data=st.data(), nodes=st.integers(1, 30), batch_size=st.integers(1, 9), layers=st.integers(1, 3), seed=seeds,
    dtype=one_of(torch.float64, torch.float32),
)  # fmt: skip
def test_sampled_training(
    data: st.DataObject, nodes: int, batch_size: int, layers: int, seed: int, dtype: torch.dtype
) -> None:
    edge_index = data.draw(edges(nodes, nodes))
    fanouts = data.draw(st.lists(one_of(-1, 1, 2, 5), min_size=layers, max_size=layers))
    options = {name: data.draw(st.booleans()) for name in ("normalize", "root_weight", "project", "bias")}
    options |= {"aggr": data.draw(one_of("mean", "max", "sum")), "jk": data.draw(one_of(None, "cat", "last"))}
    sizes = {"in_channels": data.draw(st.integers(1, 6)), "hidden_channels": data.draw(st.integers(1, 6))}
    theirs = randomize(pyg.GraphSAGE(**sizes, num_layers=layers, out_channels=3, **options), seed).to(dtype)
    sampler = NeighborSampler(
        edge_index, fanouts=fanouts, batch_size=batch_size, num_nodes=nodes, seed=seed % 1000, workers=0
    )
    x = torch.randn(nodes, sizes["in_channels"], generator=torch.Generator().manual_seed(seed)).to(dtype)
    met = []
    for batch in sampler.epoch(0):
        count = int((batch.seeds >= 0).sum())
        met += batch.seeds[:count].tolist()

        def run(model: nn.Module, graph: Any, x: Tensor, count: int = count) -> list[Tensor]:
            output = model(x, graph)[:count]
            return [output, *torch.autograd.grad(output.square().sum(), list(model.parameters()), allow_unused=True)]

        ours = zoo.from_upstream(theirs)
        found = run(ours, batch.graphs, x[batch.nodes])
        drawn = sampler.edges_of(batch)
        plain = run(theirs, drawn, x[batch.nodes])
        named = dict(zip((n for n, _ in theirs.named_parameters()), plain[1:], strict=True))
        expected = zoo.gnn.convert.WEIGHTS.convert_state_dict({**theirs.state_dict(), **named}, ours.config)
        tolerance = 1e-4 if dtype == torch.float32 else 1e-9
        torch.testing.assert_close(found[0], plain[0], rtol=tolerance, atol=tolerance)
        scale = 1 + max(float(each.norm()) for each in plain[1:] if each is not None)
        for (name, _), gradient in zip(ours.named_parameters(), found[1:], strict=True):
            torch.testing.assert_close(gradient, expected[name], rtol=tolerance, atol=tolerance * scale)
    assert sorted(met) == list(range(nodes))
