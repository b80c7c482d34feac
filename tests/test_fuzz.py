"""Random convolutions between two kinds of nodes against upstream's; see fuzzing.py."""

from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.fuzzing import Results, backward, fuzz, one_of, randomize, seeds
from zoo.gnn import CSRGraph, GATConv, SAGEConv

pytestmark = pytest.mark.usefixtures("one_thread")


@st.composite
def edges(draw: Any, sources: int, destinations: int) -> Tensor:
    """[2, E], with isolated nodes, loops and duplicates; none at all is likely."""
    pairs = st.tuples(st.integers(0, sources - 1), st.integers(0, destinations - 1))
    drawn = draw(st.lists(pairs, max_size=30))
    return torch.tensor(drawn, dtype=torch.int64).view(-1, 2).t().contiguous()


@fuzz
@given(
    data=st.data(), kind=one_of("sage", "gat"), sources=st.integers(1, 9), destinations=st.integers(1, 9),
    dtype=one_of(torch.float64, torch.float32), seed=seeds,
)  # fmt: skip
def test_bipartite_convolutions(data, kind, sources, destinations, dtype, seed):
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
