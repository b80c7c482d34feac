"""Neighbour sampling: real edges, no more than asked for, the same for a seed, and in static shapes."""

import contextlib
import copy
import itertools
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters

import zoo
from tests.gnn_reference import edges_of
from zoo.gnn import Bucket, GraphSAGE, NeighborSampler, SAGEConfig, SampledBatch
from zoo.ops.csr import distinct
from zoo.training import TrainingStep

NODES, EDGES = 200, 3000
WHOLE = Bucket(NODES, ((NODES, EDGES), (100, EDGES)))


def graph() -> Tensor:
    """Without repeated edges, so that one drawn twice shows."""
    generator = torch.Generator().manual_seed(0)
    places = torch.randperm(NODES * NODES, generator=generator)[:EDGES]
    return torch.stack([places // NODES, places % NODES])


def model(layers: int = 2, **options: Any) -> GraphSAGE:
    torch.manual_seed(0)
    options = {"in_channels": 6, "out_channels": 3} | options
    config = zoo.create("graphsage-debug", num_layers=layers, **options).config
    assert isinstance(config, SAGEConfig)
    return GraphSAGE(config)


def shapes_of(batch: SampledBatch) -> tuple[tuple[int, int], ...]:
    return tuple((len(graph.rowptr) - 1, len(graph.source)) for graph in batch.graphs)


@pytest.mark.parametrize("fanouts", [(3,), (5, 4), (-1, 2), (15, 10, 5)])
def test_sampled_edges_are_edges_of_the_graph_and_no_more_than_asked_for(fanouts: tuple[int, ...], device: str):
    edge_index = graph()
    known = set(zip(*edge_index.tolist(), strict=True))
    degree = Counter(edge_index[1].tolist())
    sampler = NeighborSampler(edge_index, fanouts=fanouts, batch_size=16, num_nodes=NODES, device=device)
    seeds: list[int] = []
    for batch in sampler.epoch(0):
        seeds += batch.seeds[batch.seeds >= 0].tolist()
        assert {tensor.device.type for tensor in (batch.nodes, batch.seeds, batch.graphs[0].source)} == {device}
        edges = list(zip(*batch.nodes[edges_of(batch)].tolist(), strict=True))
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
    assert sorted(seeds) == list(range(NODES))


def test_a_seed_gives_the_same_batches_with_any_number_of_threads():
    def all_of(seed: int, epoch: int, workers: int) -> list[SampledBatch]:
        sampler = NeighborSampler(
            graph(), fanouts=(4, 3), batch_size=25, num_nodes=NODES, seed=seed, workers=workers, buckets=[WHOLE]
        )
        return list(sampler.epoch(epoch))

    before = torch.get_rng_state()
    first = all_of(0, 0, 0)
    list(NeighborSampler(graph(), fanouts=(4, 3), batch_size=25, num_nodes=NODES).epoch(0))
    assert torch.equal(torch.get_rng_state(), before)
    for workers in (1, 3):
        torch.testing.assert_close(all_of(0, 0, workers), first, rtol=0, atol=0)
    for other in (all_of(1, 0, 0), all_of(0, 1, 0)):
        assert not torch.equal(other[0].nodes, first[0].nodes)


def test_any_batch_can_be_had_alone_and_in_any_bucket():
    sampler = NeighborSampler(graph(), fanouts=(4, 3), batch_size=25, num_nodes=NODES)
    *_, last = sampler.epoch(2)
    torch.testing.assert_close(sampler.batch(2, len(sampler) - 1), last, rtol=0, atol=0)
    torch.testing.assert_close(sampler.batch(2, -1), last, rtol=0, atol=0)
    assert torch.equal(sampler.subgraph(2, -1).edge_index, edges_of(last))
    for index in (len(sampler), -len(sampler) - 1):
        with pytest.raises(IndexError, match=f"index is {index}, but an epoch has 8 batches; use 0 to 7"):
            sampler.batch(2, index)
    for bucket in sampler.buckets:
        batch = sampler.padded_to(bucket)
        assert (len(batch.nodes), len(batch.graphs[0].source), len(batch.seeds)) == (bucket.nodes, bucket.edges, 25)
        assert shapes_of(batch) == bucket.layers
    with pytest.raises(TypeError, match=r"for batch in sampler\.epoch\(0\)"):
        list(sampler)


def test_neighbours_are_drawn_with_equal_chance(device: str):
    places = distinct(torch.full((20_000,), 9, device=device), 3, torch.Generator(device).manual_seed(0)).cpu()
    assert (places.sort(1).values.diff(dim=1) > 0).all()
    shares = places.flatten().bincount(minlength=9) / places.shape[0]
    torch.testing.assert_close(shares, torch.full((9,), 3 / 9), rtol=0.05, atol=0)
    sets = Counter(map(tuple, places.sort(1).values.tolist()))
    assert len(sets) == 84 and max(sets.values()) < 1.5 * min(sets.values())


def test_more_neighbours_than_a_kernel_holds_are_drawn_by_columns(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("zoo.ops.common.triton_runs_on", lambda device: True)
    monkeypatch.setattr("zoo.ops.triton.csr.distinct", lambda *_: pytest.fail("launched"))
    places = distinct(torch.full((3,), 600), 513, torch.Generator().manual_seed(0))
    assert places.shape == (3, 513) and (places.sort(1).values.diff(dim=1) > 0).all()


@pytest.mark.parametrize("options", [{}, {"jk": "cat"}], ids=str)
def test_a_layer_computes_what_the_next_one_reads(options: dict[str, Any]):
    net = model(layers=3, **options)
    sampler = NeighborSampler(graph(), fanouts=(3, 2, 2), batch_size=8, num_nodes=NODES)
    batch = sampler.batch(0, 1)
    rows = [rows for rows, _ in shapes_of(batch)]
    assert len(batch.nodes) > rows[0] > rows[1] > rows[2] == 8
    computed: list[int] = []
    for layer in net.layers:
        if layer.epilogue is not None:
            layer.epilogue.register_forward_hook(lambda module, args, out: computed.append(len(out)))
    net(torch.randn(NODES, 6)[batch.nodes], batch.graphs)
    assert computed == rows[: len(computed)] and len(computed) >= 2


def test_a_batch_beyond_any_cap_goes_to_the_largest_bucket():
    options: dict[str, Any] = {"fanouts": (4, 3), "batch_size": 16, "num_nodes": NODES}
    (most,) = NeighborSampler(graph(), **options).buckets
    (rows, edges), last = most.layers
    small = Bucket(most.nodes, ((70, edges), last))
    sampler = NeighborSampler(graph(), **options, buckets=[most, small])
    met = Counter()
    for batch in itertools.chain(*map(sampler.epoch, range(3))):
        needed = int((batch.graphs[0].rowptr.diff() > 0).nonzero().max()) + 1
        met[shapes_of(batch)[0][0]] += 1
        assert shapes_of(batch) in (small.layers, most.layers)
        assert needed <= 70 or shapes_of(batch)[0][0] == rows
    assert set(met) == {70, rows}


def test_padding_is_never_read():
    net, x = model(), torch.randn(NODES, 6)
    sampler = NeighborSampler(graph(), fanouts=(4, 3), batch_size=32, num_nodes=NODES, buckets=[WHOLE])
    batch = next(iter(sampler.epoch(0)))
    edges = edges_of(batch)
    nodes = max(int(edges.max()) + 1, 32)
    features = x[batch.nodes]
    poisoned = features.clone()
    poisoned[nodes:] = torch.nan
    seeds = net(features, batch.graphs)[:32]
    torch.testing.assert_close(net(poisoned, batch.graphs)[:32], seeds, rtol=0, atol=0)
    changed = tuple(graph._replace(source=graph.source.clone()) for graph in batch.graphs)
    for each in changed:
        each.source[int(each.rowptr[-1]) :] = 7
    torch.testing.assert_close(net(features, changed)[:32], seeds, rtol=0, atol=0)


@pytest.mark.parametrize("jk", [None, "cat"])
def test_after_the_declared_shapes_nothing_compiles(jk: str | None):
    net = model(layers=3, jk=jk).train()
    x, y = torch.randn(NODES, 6), torch.randint(3, (NODES,))
    options: dict[str, Any] = {"fanouts": (3, 2, 2), "batch_size": 8, "num_nodes": NODES}
    sampler = NeighborSampler(graph(), **options)
    (most,) = sampler.buckets
    usual = sorted(sum(drawn.hop_nodes[:-1]) for drawn in sampler.subgraphs(0))[len(sampler) // 2]
    small = Bucket(most.nodes, ((usual, most.edges), *most.layers[1:]))
    sampler = NeighborSampler(graph(), **options, buckets=[small, most])
    zoo.compile_regions(net, backend="aot_eager")
    counters.clear()

    def train(batch: SampledBatch) -> None:
        F.cross_entropy(net(x[batch.nodes], batch.graphs), batch.labels(y)).backward()

    with zoo.enforce_budget(net):
        for bucket in sampler.buckets:
            train(sampler.padded_to(bucket))
    # A graph for each layer; those of the first two differ from bucket to bucket, by what they give or are given.
    compiled = counters["stats"]["unique_graphs"]
    assert compiled == len(net.layers) + 2 + (jk is not None)
    with zoo.enforce_budget(net):
        shapes = {shapes_of(batch) for batch in sampler.epoch(0) if train(batch) is None}
    assert shapes == {bucket.layers for bucket in sampler.buckets}
    assert counters["stats"]["unique_graphs"] == compiled


NORMS: list[dict[str, Any]] = [
    {"norm": "batch"}, {"norm": "batch", "norm_kwargs": {"affine": False, "momentum": 0.3}, "act_first": True},
    {"norm": "batch", "norm_kwargs": {"track_running_stats": False}, "jk": "cat"}, {"norm": "layer"},
    {"norm": "layer", "norm_kwargs": {"affine": False}, "jk": "last"},
    {"norm": "layer", "norm_kwargs": {"mode": "node"}},
]  # fmt: skip


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("options", NORMS, ids=str)
def test_norms_never_count_padding(options: dict[str, Any], dtype: torch.dtype, training: bool):
    net, x = model(**options).train(training).to(dtype), torch.randn(NODES, 6, dtype=dtype)
    recipe: dict[str, Any] = {"fanouts": (3, 2), "batch_size": 8, "num_nodes": NODES}
    sampler = NeighborSampler(graph(), **recipe)
    batch, drawn = sampler.batch(0, 0), sampler.subgraph(0, 0)
    (rows, edges) = (list(itertools.accumulate(each)) for each in (drawn.hop_nodes, drawn.hop_edges))
    sizes = Bucket(rows[-1], tuple(zip(rows[-2::-1], edges[::-1], strict=True)))
    exact = NeighborSampler(graph(), **recipe, buckets=[*sampler.buckets, sizes]).batch(0, 0)
    assert shapes_of(exact) == sizes.layers and shapes_of(batch)[0] > sizes.layers[0]

    def results(batch: SampledBatch) -> list[Tensor]:
        ours = copy.deepcopy(net)
        output = ours(x[batch.nodes], batch.graphs)[:8]
        gradients = torch.autograd.grad(output.square().sum() + output.sum(), list(ours.parameters()))
        return [output, *gradients, *ours.buffers()]

    # Nothing there is padding, and the norms are torch's own.
    expected = results(exact._replace(graphs=tuple(each._replace(rows=None) for each in exact.graphs)))
    exactly = 1e-4 if dtype == torch.float32 else 1e-10
    for found in (results(batch), results(exact)):
        torch.testing.assert_close(found, expected, rtol=exactly, atol=exactly)


@pytest.mark.parametrize("options", [{"norm": "batch"}, {"norm": "layer"}], ids=str)
def test_norms_over_nodes_add_no_graph_and_train_in_a_captured_step(options: dict[str, Any]):
    x = torch.randn(NODES, 6)
    labels = x[:, :3].argmax(dim=1)
    sampler = NeighborSampler(graph(), fanouts=(3, 2), batch_size=64, num_nodes=NODES)

    def loss(net: Any, batch: SampledBatch) -> Tensor:
        return F.cross_entropy(net(x[batch.nodes], batch.graphs), batch.labels(labels))

    found = []
    for compiled in (False, True):
        net = model(layers=2, **options).train()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        if compiled:
            zoo.compile_regions(net, backend="aot_eager")
        step = TrainingStep(net, loss, optimizer, cuda_graph=compiled)
        with zoo.enforce_budget(net) if compiled else contextlib.nullcontext():
            losses = [step(batch).item() for epoch in range(4) for batch in sampler.epoch(epoch)]
        found.append([torch.tensor(losses), *(value.detach().clone() for value in net.state_dict().values())])
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)
    assert found[0][0][-1] < found[0][0][0]


def test_labels_of_missing_seeds_are_ignored_and_a_batch_moves_as_a_whole() -> None:
    sampler = NeighborSampler(graph(), fanouts=(2,), batch_size=150, num_nodes=NODES, shuffle=False)
    *_, last = sampler.epoch(0)
    labels = last.labels(torch.arange(NODES))
    assert labels.tolist() == [*range(150, 200), *[-100] * 100]
    # Several a node: as many as seeds would pass for a row.
    several = last.labels(torch.arange(NODES)[:, None].expand(-1, 150))
    torch.testing.assert_close(several, labels[:, None].expand(-1, 150), rtol=0, atol=0)
    assert last.labels(torch.arange(NODES)[:, None]).shape == (150, 1)
    with pytest.raises(TypeError, match=r"labels are torch\.float32, .* and output\[real\], with real ="):
        last.labels(torch.zeros(NODES))
    sampler = NeighborSampler(graph(), fanouts=(2, 2), batch_size=8, seeds=torch.tensor([5, 3]), num_nodes=NODES)
    batch = sampler.batch(0, 0)
    assert sampler.batch_size == len(batch.seeds) == 2
    assert {each.source.device.type for each in batch.to("meta").graphs} == {"meta"}


@pytest.mark.gpu
def test_a_gpu_samples_the_seeds_of_the_host_and_the_same_batches_every_time():
    options: dict[str, Any] = {"fanouts": (4, 3), "batch_size": 25, "num_nodes": NODES, "seed": 3}
    host, ours = (NeighborSampler(graph(), **options, device=device) for device in ("cpu", "cuda"))
    busy = torch.randn(4096, 4096, device="cuda")
    batches = []
    for batch in ours.epoch(1):
        busy = busy @ busy / 64  # what a step would be: the batch is read when all of it is done
        batches.append(batch.graphs[0].source.clone())
        assert busy.is_cuda
    assert len(batches) == len(ours)
    for index, source in enumerate(batches):
        again = ours.batch(1, index)
        assert torch.equal(again.graphs[0].source, source)
        assert torch.equal(again.seeds.cpu(), host.batch(1, index).seeds)
    assert not torch.equal(ours.batch(2, 0).graphs[0].source, batches[0])


def test_threads_that_sample_take_no_cores_from_each_other():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        sampler = NeighborSampler(graph(), fanouts=(4, 3), batch_size=16, num_nodes=NODES, workers=4)
        seen = list(sampler.epoch(0, lambda _: torch.get_num_threads()))
        assert seen == [1] * len(sampler)
        with ThreadPoolExecutor(1) as other:
            assert [torch.get_num_threads(), other.submit(torch.get_num_threads).result()] == [3, 3]
    finally:
        torch.set_num_threads(before)
