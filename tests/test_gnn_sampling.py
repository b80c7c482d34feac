"""Neighbour sampling: real edges, no more than asked for, the same for a seed, and in static shapes."""

from __future__ import annotations

import importlib.util
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import zoo
from zoo.gnn import GraphSAGE, NeighborSampler, SAGEConfig, SampledBatch
from zoo.gnn.sampling import _distinct
from zoo.training import TrainingStep

NODES, EDGES = 200, 3000
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def graph(nodes: int = NODES, edges: int = EDGES) -> Tensor:
    """Without repeated edges, so that one drawn twice shows."""
    generator = torch.Generator().manual_seed(0)
    places = torch.randperm(nodes * nodes, generator=generator)[:edges]
    return torch.stack([places // nodes, places % nodes])


def model(layers: int = 2, **options: Any) -> GraphSAGE:
    torch.manual_seed(0)
    config = zoo.create("graphsage-debug", num_layers=layers, in_channels=6, out_channels=3, **options).config
    assert isinstance(config, SAGEConfig)
    return GraphSAGE(config)


def global_edges(sampler: NeighborSampler, batch: SampledBatch) -> list[tuple[int, int]]:
    local = sampler.edges_of(batch)
    return list(zip(*batch.nodes[local].tolist(), strict=True))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fanouts", [(3,), (5, 4), (-1, 2), (15, 10, 5)])
def test_sampled_edges_are_edges_of_the_graph_and_no_more_than_asked_for(fanouts: tuple[int, ...], device: str):
    edge_index = graph()
    known = set(zip(*edge_index.tolist(), strict=True))
    degree = Counter(edge_index[1].tolist())
    sampler = NeighborSampler(edge_index, fanouts=fanouts, batch_size=16, num_nodes=NODES, device=device)
    for batch in sampler.epoch(0):
        assert {tensor.device.type for tensor in (batch.nodes, batch.seeds, batch.graph.source)} == {device}
        edges = global_edges(sampler, batch)
        assert set(edges) <= known and len(set(edges)) == len(edges)
        into = Counter(destination for _, destination in edges)
        hop = {int(seed) for seed in batch.seeds if seed >= 0}
        met = set(hop)
        for fanout in fanouts:
            # Each hop expands the nodes that the one before it met first, and no node is expanded twice.
            reached = {source for source, destination in edges if destination in hop}
            for node in hop:
                assert into.pop(node, 0) == (degree[node] if fanout < 0 else min(degree[node], fanout))
            hop = reached - met
            met |= hop
        assert not into
        assert met == set(batch.nodes[: len(met)].tolist())


def test_every_node_is_a_seed_once_an_epoch():
    sampler = NeighborSampler(graph(), fanouts=(2,), batch_size=30, num_nodes=NODES)
    batches = list(sampler.epoch(3))
    assert len(batches) == len(sampler) == 7
    seeds = torch.cat([batch.seeds for batch in batches])
    assert sorted(seeds[seeds >= 0].tolist()) == list(range(NODES))
    assert (batches[-1].seeds >= 0).sum() == 20
    assert all(torch.equal(b.nodes[: (b.seeds >= 0).sum()], b.seeds[b.seeds >= 0]) for b in batches)


def test_a_seed_gives_the_same_batches_with_any_number_of_threads():
    def all_of(seed: int, epoch: int, workers: int) -> list[SampledBatch]:
        sampler = NeighborSampler(
            graph(), fanouts=(4, 3), batch_size=25, num_nodes=NODES, seed=seed, workers=workers, buckets=[(200, 3000)]
        )
        return list(sampler.epoch(epoch))

    first = all_of(0, 0, 0)
    for workers in (1, 3):
        torch.testing.assert_close(all_of(0, 0, workers), first, rtol=0, atol=0)
    for other in (all_of(1, 0, 0), all_of(0, 1, 0)):
        assert not torch.equal(other[0].nodes, first[0].nodes)


def test_any_batch_can_be_had_alone_and_in_any_bucket():
    sampler = NeighborSampler(graph(), fanouts=(4, 3), batch_size=25, num_nodes=NODES)
    *_, last = sampler.epoch(2)
    torch.testing.assert_close(sampler.batch(2, len(sampler) - 1), last, rtol=0, atol=0)
    for nodes, edges in sampler.buckets:
        batch = sampler.padded_to((nodes, edges))
        assert (len(batch.nodes), len(batch.graph.source), len(batch.seeds)) == (nodes, edges, 25)
    with pytest.raises(ValueError, match=r"\(1, 1\) is none of the buckets"):
        sampler.padded_to((1, 1))


def test_the_random_state_of_the_caller_is_left_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    list(NeighborSampler(graph(), fanouts=(4, 3), batch_size=25, num_nodes=NODES).epoch(0))
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("device", DEVICES)
def test_neighbours_are_drawn_with_equal_chance(device: str):
    places = _distinct(torch.full((20_000,), 9, device=device), 3, torch.Generator(device).manual_seed(0)).cpu()
    assert (places.sort(1).values.diff(dim=1) > 0).all()
    shares = places.flatten().bincount(minlength=9) / places.shape[0]
    torch.testing.assert_close(shares, torch.full((9,), 3 / 9), rtol=0.05, atol=0)
    sets = Counter(map(tuple, places.sort(1).values.tolist()))
    assert len(sets) == 84 and max(sets.values()) < 1.5 * min(sets.values())


def test_with_all_neighbours_seeds_get_what_the_whole_graph_gives():
    edge_index, net = graph(), model()
    x = torch.randn(NODES, 6)
    whole = net(x, net.prepare(edge_index, num_nodes=NODES))
    sampler = NeighborSampler(edge_index, fanouts=(-1, -1), batch_size=32, num_nodes=NODES)
    for batch in sampler.epoch(0):
        count = int((batch.seeds >= 0).sum())
        output = net(x[batch.nodes], batch.graph)
        torch.testing.assert_close(output[:count], whole[batch.seeds[:count]])


@pytest.mark.parametrize("aggr", ["mean", "sum", "max"])
def test_gradients_are_those_of_the_same_edges_without_padding(aggr: str):
    edge_index, net = graph(), model(aggr=aggr)
    x = torch.randn(NODES, 6)
    sampler = NeighborSampler(edge_index, fanouts=(4, 3), batch_size=32, num_nodes=NODES)
    batch = next(iter(sampler.epoch(0)))
    nodes = int(sampler.edges_of(batch).max()) + 1
    weights = list(net.parameters())
    features = x[batch.nodes]

    def gradients(output: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(output[:32].square().sum(), weights)

    padded = gradients(net(features, batch.graph))
    plain = gradients(net(features[:nodes], net.prepare(sampler.edges_of(batch), num_nodes=nodes)))
    torch.testing.assert_close(padded, plain)


def test_padding_is_never_read():
    net, x = model(), torch.randn(NODES, 6)
    sampler = NeighborSampler(graph(), fanouts=(4, 3), batch_size=32, num_nodes=NODES, buckets=[(200, 3000)])
    batch = next(iter(sampler.epoch(0)))
    edges = sampler.edges_of(batch)
    nodes = max(int(edges.max()) + 1, 32)
    features = x[batch.nodes]
    poisoned = features.clone()
    poisoned[nodes:] = torch.nan
    seeds = net(features, batch.graph)[:32]
    torch.testing.assert_close(net(poisoned, batch.graph)[:32], seeds, rtol=0, atol=0)
    changed = batch.graph._replace(source=batch.graph.source.clone())
    changed.source[edges.shape[1] :] = 7
    torch.testing.assert_close(net(features, changed)[:32], seeds, rtol=0, atol=0)


def test_an_epoch_has_as_many_shapes_as_buckets_and_compiles_no_more():
    edge_index, net = graph(), model().train()
    x, y = torch.randn(NODES, 6), torch.randint(3, (NODES,))
    sampler = NeighborSampler(edge_index, fanouts=(4, 3), batch_size=16, num_nodes=NODES)
    zoo.compile_regions(net, backend="aot_eager")

    def loss(net: GraphSAGE, batch: SampledBatch) -> Tensor:
        return F.cross_entropy(net(x[batch.nodes], batch.graph)[:16], batch.labels(y))

    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-2, fused=True)
    step = TrainingStep(net, loss, optimizer, cuda_graph=True, warmup=2)
    shapes = set()
    losses = []
    with zoo.enforce_budget(net):
        for epoch in range(6):
            for batch in sampler.epoch(epoch):
                shapes.add((batch.nodes.shape, batch.graph.source.shape))
                losses.append(step(batch).item())
    assert len(shapes) <= len(sampler.buckets) <= 2
    assert len(step.captured) >= 1
    assert sum(losses[-13:]) < 0.95 * sum(losses[:13])


def test_labels_of_missing_seeds_are_ignored():
    sampler = NeighborSampler(graph(), fanouts=(2,), batch_size=150, num_nodes=NODES, shuffle=False)
    *_, last = sampler.epoch(0)
    labels = last.labels(torch.arange(NODES))
    assert labels.tolist() == [*range(150, 200), *[-100] * 100]


@pytest.mark.gpu
def test_a_gpu_samples_the_seeds_of_the_host_and_the_same_batches_every_time():
    options: dict[str, Any] = {"fanouts": (4, 3), "batch_size": 25, "num_nodes": NODES, "seed": 3}
    host, ours = (NeighborSampler(graph(), **options, device=device) for device in ("cpu", "cuda"))
    busy = torch.randn(4096, 4096, device="cuda")
    batches = []
    for batch in ours.epoch(1):
        busy = busy @ busy / 64  # what a step would be: the batch is read when all of it is done
        batches.append(batch.graph.source.clone())
        assert busy.is_cuda
    assert len(batches) == len(ours)
    for index, source in enumerate(batches):
        again = ours.batch(1, index)
        assert torch.equal(again.graph.source, source)
        assert torch.equal(again.seeds.cpu(), host.batch(1, index).seeds)
    assert not torch.equal(ours.batch(2, 0).graph.source, batches[0])


@pytest.mark.gpu
def test_a_captured_step_learns_from_batches_of_the_gpu():
    net = model().train().cuda()
    x, y = torch.randn(NODES, 6, device="cuda"), torch.arange(NODES, device="cuda") % 3
    x[:, :3] += 2 * F.one_hot(y, 3)
    sampler = NeighborSampler(graph(), fanouts=(4, 3), batch_size=16, num_nodes=NODES, device="cuda")

    def loss(net: GraphSAGE, batch: SampledBatch) -> Tensor:
        return F.cross_entropy(net(x[batch.nodes], batch.graph)[:16], batch.labels(y))

    step = TrainingStep(net, loss, torch.optim.AdamW(net.parameters(), lr=3e-2, fused=True, capturable=True))
    losses = [step(batch).item() for epoch in range(8) for batch in sampler.epoch(epoch)]
    assert step.captured and sum(losses[-13:]) < 0.6 * sum(losses[:13])


@pytest.mark.gpu
def test_a_batch_moves_to_a_device():
    batch = next(NeighborSampler(graph(), fanouts=(2,), batch_size=8, num_nodes=NODES).epoch(0))
    moved = batch.pin_memory().to("cuda", non_blocking=True)
    assert moved.nodes.is_cuda and moved.graph.transpose is not None and moved.graph.transpose.colptr.is_cuda
    torch.testing.assert_close(moved.to("cpu"), batch, rtol=0, atol=0)


def test_other_models_refuse_sampled_tensors():
    batch = next(NeighborSampler(graph(), fanouts=(2,), batch_size=8, num_nodes=NODES).epoch(0))
    gcn = zoo.create("gcn-debug", in_channels=6)
    with pytest.raises(ValueError, match=r"GCN was given prepared tensors .* use GraphSAGE"):
        gcn(torch.randn(len(batch.nodes), 6), batch.graph)
    with pytest.raises(ValueError, match="x has 3 rows and the graph has"):
        model()(torch.randn(3, 6), batch.graph)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fanouts": ()}, r"fanouts are \[\]; one a hop"),
        ({"fanouts": (5, 0)}, r"fanouts are \[5, 0\]"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"workers": -1}, "workers is -1"),
        ({"device": "meta"}, "device is meta; batches are sampled on the host, 'cpu', or on a GPU, 'cuda'"),
        ({"seeds": torch.tensor([200])}, "seeds must be nodes of the graph, 0 to 199"),
        ({"seeds": torch.tensor([], dtype=torch.int64)}, "and at least one"),
        ({"buckets": [(64, 64)]}, r"up to 200 nodes and .* edges; the largest bucket is \(64, 64\)"),
    ],
)
def test_what_is_out_of_range_is_refused(options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        NeighborSampler(graph(), **{"fanouts": (4, 3), "batch_size": 16, "num_nodes": NODES} | options)


@pytest.mark.skipif(
    not (importlib.util.find_spec("pyg_lib") or importlib.util.find_spec("torch_sparse")),
    reason="torch-geometric's NeighborLoader needs pyg-lib or torch-sparse",
)
def test_it_draws_as_many_nodes_and_edges_as_the_loader_of_torch_geometric():
    from torch_geometric.data import Data
    from torch_geometric.loader import NeighborLoader

    edge_index = graph()
    loader = NeighborLoader(Data(edge_index=edge_index, num_nodes=NODES), num_neighbors=[4, 3], batch_size=NODES)
    theirs = [next(iter(loader)) for _ in range(5)]
    sampler = NeighborSampler(edge_index, fanouts=(4, 3), batch_size=NODES, num_nodes=NODES)
    ours = [next(sampler.epoch(epoch)) for epoch in range(5)]
    edges = [int(batch.graph.rowptr[-1]) for batch in ours]
    assert sum(edges) == pytest.approx(sum(batch.num_edges for batch in theirs), rel=0.05)
