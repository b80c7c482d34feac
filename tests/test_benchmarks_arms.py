"""What only one family's arms do: graphs and layouts, lengths, caches, whole runs, another library's generate()."""

import dataclasses
import gc
import gzip
import itertools
import pickle
import sys
import weakref
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers.models.unets.unet_2d_condition as library
import numpy as np
import pytest
import scipy.sparse
import torch
import torch_geometric.loader
from diffusers import DDPMScheduler
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch._dynamo.utils import counters
from torch.utils import _pytree as pytree

import zoo
from benchmarks import strategies
from benchmarks.families import bert_arms, gnn, gnn_arms, graphs, llm, llm_arms, unet, unet_arms
from benchmarks.families.bert import config_of
from benchmarks.families.bert_arms import LABELS, Task
from benchmarks.families.gnn import KINDS, _implementation
from benchmarks.families.gnn_arms import Architecture, architecture
from benchmarks.families.graphs import GraphSpec
from benchmarks.plan import IMPLEMENTATIONS, Case
from benchmarks.strategies import Trainer, apply
from tests import workloads
from tests.noted import noted
from tests.workloads import Arms, call, error, first_call, output_of, tensors
from zoo.bert import PackedBatch
from zoo.engine.captured import shapes_of
from zoo.engine.graphed_step import GraphedStep
from zoo.gnn import NeighborSampler
from zoo.llm.model import PRESETS as LLMS
from zoo.unet.blocks import PRESETS as UNETS
from zoo.unet.convert import WEIGHTS

pytestmark = pytest.mark.usefixtures("eager_backend")

BERT = Arms(family="bert", model="bert-debug", input="2x32")
LLM = Arms(family="llm", model="llm-debug", input="decode-1x64")
GNN = Arms(family="gnn", model="gcn", input="karate")
UNET = Arms(family="unet", model="unet-debug", input="2x8x8")
FOREIGN = Arms(family="foreign", model="llama-debug", input="static-4")
EPOCH = "epoch-4x32"


def test_labels_can_be_learnt_from_words():
    training = BERT.training(impl="upstream")
    config, rows = config_of("bert-debug"), Task(batch=64, length=32)
    words = nn.EmbeddingBag(config.vocab_size, LABELS)
    optimizer = torch.optim.AdamW(words.parameters(), lr=0.1)
    losses = []
    for index in range(60):
        texts = bert_arms.draw_texts(config, rows, seed=index)
        loss = nn.functional.cross_entropy(words(texts.input_ids), texts.labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert sum(losses[-5:]) / 5 < 0.5 < 1.2 < losses[0]
    assert set(training.batch(0)["labels"].tolist()) <= set(range(LABELS))


def test_every_arm_is_given_the_same_texts():
    epochs = {impl: list(BERT.training(input=EPOCH, impl=impl).loader()) for impl in IMPLEMENTATIONS}
    assert {len(epoch) for epoch in epochs.values()} == {20}
    widths = set()
    for packed, padded, tuned in zip(epochs["zoo"], epochs["upstream"], epochs["upstream-tuned"], strict=True):
        ids, mask = padded["input_ids"], padded["attention_mask"].bool()
        tokens, width = int(mask.sum()), ids.shape[1]
        widths.add(width)
        assert isinstance(packed["input_ids"], PackedBatch)
        assert torch.equal(packed["input_ids"].input_ids[:tokens], ids[mask])
        assert tuned["input_ids"].shape == (4, 32) and tuned["attention_mask"].shape == (4, 1, 1, 32)
        assert torch.equal(tuned["input_ids"][:, :width], ids) and int(tuned["attention_mask"].sum()) == tokens
        assert torch.equal(packed["labels"], padded["labels"]) and torch.equal(packed["labels"], tuned["labels"])
    assert len(widths) > 5
    # What is checked, and what lies ready, is as wide as any batch.
    assert BERT.training(input=EPOCH, impl="upstream").batch(0)["input_ids"].shape == (4, 32)


def test_declared_shapes_are_those_of_the_epoch(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(bert_arms.EPOCH, "cpu", 200)
    training = BERT.training(input=EPOCH)
    declared = [shapes_of(pytree.tree_leaves(batch)) for batch in training.shapes]
    sizes = [batch["input_ids"].input_ids.numel() for batch in training.shapes]
    assert len(set(declared)) == len(declared) <= bert_arms.BUCKETS
    assert sizes == sorted(sizes, reverse=True) and sizes[0] >= 4 * 32
    assert len({batch["input_ids"].offsets.shape for batch in training.shapes}) == 1
    for batch in (*training.loader(), *(training.batch(index) for index in range(6))):
        assert shapes_of(pytree.tree_leaves(batch)) in declared
    for impl in ("upstream", "upstream-tuned"):
        assert BERT.training(input=EPOCH, impl=impl).shapes == ()


# A stand-in for the preset of this name: norms of heads, an output product of its own, heads that do not add up.
QWEN = "qwen3-8b"
SMALL_QWEN = dataclasses.replace(
    LLMS[QWEN], vocab_size=101, hidden_size=40, intermediate_size=72, num_hidden_layers=10, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=128, bos_token_id=None, eos_token_id=(),
)  # fmt: skip
LLM_STEP = Case(family="llm", model="llm-debug", input="2x16", workload="train")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The large preset's name means a small model, and batches of small inputs are known."""
    monkeypatch.setitem(LLMS, QWEN, SMALL_QWEN)
    inputs = (*llm.WORKLOAD.inputs, "decode-3x20", "prefill-2x12", "answer-2x12")
    monkeypatch.setattr(type(llm.WORKLOAD), "inputs", inputs)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("input", ["decode-3x20", "prefill-2x12", "answer-2x12"])
def test_norms_of_heads_and_many_layers_match_the_reference(small: None, input: str, impl: str):
    prepared = LLM.prepare(model=QWEN, input=input, impl=impl)
    reference = prepared.reference()
    assert reference.shape == (llm_arms.task_of(input).batch, 101)
    assert not torch.allclose(reference[0], reference[1], atol=0.1)
    assert error(first_call(prepared), reference) < 3e-6


@pytest.mark.parametrize("input", ["decode-1x64", "prefill-1x32", "answer-1x32"])
def test_the_reference_is_the_library_s_own_model(input: str):
    prepared = LLM.prepare(input=input, dtype="bfloat16", impl="upstream")
    whole: Any = prepared.model.float()
    if input.startswith("decode"):
        config, task = LLMS["llm-debug"], llm_arms.task_of(input)

        def past(layer: int) -> tuple[torch.Tensor, torch.Tensor]:
            return llm_arms.draw_past(config, task, layer, seed=0, dtype=torch.bfloat16, device=torch.device("cpu"))

        tokens = llm_arms.draw_tokens(config, task, seed=0, device=torch.device("cpu"))
        whole = llm_arms.UpstreamDecode(whole.model, task, tokens, past)
        assert whole.cache.layers[0].keys.dtype == torch.float32
    if input.startswith("answer"):
        whole = llm_arms.UpstreamAnswer(whole.model, llm_arms.task_of(input), prepared.inputs["input_ids"])
    with torch.inference_mode():
        assert error(whole(**prepared.inputs), prepared.reference()) < 3e-6


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_what_lies_behind_the_position_is_not_seen_and_reset_makes_the_next_call_the_first_again(impl: str) -> None:
    prepared = LLM.prepare(impl=impl)
    expected, step = first_call(prepared), prepared.model
    layer = step.cache.layers[1]
    keys = layer[0] if impl == "zoo" else layer.keys
    for slot, seen in ((33, False), (31, True)):
        prepared.reset()
        keys[:, :, slot] = 7.0
        assert (error(call(prepared), expected) > 1e-3) == seen
    prepared = LLM.prepare(impl=impl)
    first, second = call(prepared), call(prepared)
    assert error(second, first) > 0.1
    for _ in range(40):
        call(prepared)
    assert torch.equal(first_call(prepared), first)
    assert torch.equal(call(prepared), second)


def test_all_implementations_decode_the_same_tokens(small: None):
    arms = [LLM.prepare(model=QWEN, input="decode-3x20", impl=impl) for impl in IMPLEMENTATIONS]
    for _ in range(12):
        outputs = [call(arm) for arm in arms]
        for output, arm in zip(outputs, arms, strict=True):
            assert error(output, outputs[0]) < 1e-5
            assert torch.equal(arm.model.tokens, output.view(3, -1).argmax(-1, keepdim=True))
            assert torch.equal(arm.model.positions, arms[0].model.positions)


def test_long_rows_are_checked_by_two_steps_and_the_loss_in_parts_is_the_library_s(monkeypatch):
    assert workloads.prepare(LLM_STEP).training.checked == 6
    monkeypatch.setattr(llm, "_LONG", 15)
    prepared = workloads.prepare(LLM_STEP)
    arm = Trainer(LLM_STEP, prepared)
    losses = arm.losses(arm.eager())
    assert len(losses) == 2
    torch.testing.assert_close(losses, prepared.reference(), rtol=1e-4, atol=0)
    monkeypatch.setattr(llm, "REFERENCE_ROWS", 7)
    prepared = workloads.prepare(dataclasses.replace(LLM_STEP, impl="upstream"))
    model, batch = prepared.model, prepared.training.batch(0)
    weights = list(model.parameters())
    losses = [loss(model, batch) for loss in (llm.upstream_loss, llm.loss_in_parts)]
    torch.testing.assert_close(losses[0], losses[1])
    gradients = [torch.autograd.grad(loss, weights) for loss in losses]
    torch.testing.assert_close(gradients[0], gradients[1])


SAMPLED = {"model": "graphsage", "input": "karate-sampled", "workload": "train"}


def small_architecture(kind: str, **changes: Any) -> Architecture:
    values = {"features": 12, "hidden": 16, "layers": 3, "classes": 5, "heads": 4 if kind == "gat" else 1}
    return Architecture(kind=kind, **(values | changes))


def skewed_graph() -> graphs.Graph:
    """Small and skewed: duplicate edges are certain."""
    graph = graphs.generate(GraphSpec(nodes=60, edges=800, features=12, classes=5, hub=160), power_law=True)
    assert torch.unique(graph.edge_index, dim=1).size(1) < 800
    return graph


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_stacks_and_graphs_with_repeated_edges_match_the_reference(kind: str, impl: str):
    prepared = GNN.prepare(model=f"{kind}-8x256", impl=impl)
    assert prepared.reference().shape == (34, 256) and error(call(prepared), prepared.reference()) < 1e-5
    # Without its duplicates the graph would give other numbers, so an arm that merges them is found here.
    prepared = GNN.prepare(seed=1, model=kind, impl=impl, input="cora-powerlaw")
    assert prepared.data == "generated, power law"
    assert error(call(prepared), prepared.reference()) < 1e-5


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", ["csr", "sorted"])
def test_tuned_layouts_give_the_same_numbers(kind: str, layout: str):
    if (kind, layout) == ("gat", "csr"):
        for strategy in ("eager", "full"):
            assert gnn_arms.tuned_layout(GNN.case(strategy=strategy), kind) == "sorted"
        return
    graph, arch = skewed_graph(), small_architecture(kind)
    shipped = gnn_arms.build(arch, seed=3).double()
    tuned, inputs = gnn_arms.tune(arch, shipped, graph.edge_index, graph.nodes, layout)
    assert (inputs["edge_index"].layout is torch.sparse_csr) == (layout == "csr")
    x = graph.x.double()
    with torch.no_grad():
        assert error(tuned(x, **inputs), shipped(x, graph.edge_index)) < 1e-7


@pytest.mark.parametrize(
    ("impl", "dynamic", "expected"),
    [("upstream", False, None), ("upstream", True, True), ("upstream-tuned", False, False)],
)
def test_regional_arms_of_upstream(monkeypatch: pytest.MonkeyPatch, impl: str, dynamic: bool, expected: bool | None):
    seen: list[dict[str, Any]] = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **options: seen.append({"module": self, **options}))
    prepared = GNN.prepare(impl=impl, strategy="regional", dynamic=dynamic)
    prepared.compile_regions(prepared.model, backend="inductor", mode="default", dynamic=dynamic)
    assert [options.pop("module") for options in seen] == list(prepared.model.convs)
    assert seen == [{"backend": "inductor", "mode": "default", "dynamic": expected}] * 2


@pytest.mark.parametrize("impl", ["upstream-tuned", "zoo"])
def test_an_arm_holds_only_what_it_runs_on(monkeypatch: pytest.MonkeyPatch, impl: str):
    loaded: list[weakref.ref[torch.Tensor]] = []
    load = graphs.load

    def spy(*args: Any, **options: Any) -> graphs.Graph:
        graph = load(*args, **options)
        loaded.extend((weakref.ref(graph.x), weakref.ref(graph.edge_index)))
        return graph

    monkeypatch.setattr(graphs, "load", spy)
    prepared = GNN.prepare(impl=impl, dtype="bfloat16")
    gc.collect()
    assert [ref() for ref in loaded] == [None, None]  # float32 features and raw edges would count as the arm's memory
    assert prepared.reference().shape == (34, 4)


@pytest.mark.parametrize("kind", ["gcn", "graphsage"])
def test_the_reference_of_a_large_graph_holds_no_messages(kind: str, monkeypatch: pytest.MonkeyPatch):
    graph, arch = skewed_graph(), small_architecture(kind)
    model = gnn_arms.build(arch, seed=0)
    expected = gnn_arms.reference_output(arch, model, graph.x, graph.edge_index)
    monkeypatch.setattr(gnn_arms, "LARGE_EDGES", 1)
    made = noted(monkeypatch, gnn_arms, "csr")
    found = gnn_arms.reference_output(arch, model, graph.x, graph.edge_index)
    assert made and error(found, expected) < 1e-7


@pytest.mark.parametrize("model", ["gcn", "graphsage"])
@pytest.mark.parametrize(("dtype", "held"), [("float32", torch.float32), ("bfloat16", torch.bfloat16)])
def test_a_tuned_adjacency_is_of_the_dtype_that_gradients_have(model: str, dtype: str, held: torch.dtype):
    # A CPU has no sparse product in bfloat16: what a GPU's arm would multiply is made, and not multiplied.
    asked = GNN.case(model=model, impl="upstream-tuned", dtype=dtype, device="cuda", workload="train")
    graph = graphs.load("karate", data_root=None, features=None, seed=0, device=torch.device("cpu"))
    arch = architecture(model, "karate", features=graph.x.size(1), classes=graph.classes)
    tuned, inputs, what = _implementation(asked, arch, gnn_arms.build(arch, seed=0), graph)
    assert what == "CSR adjacency" and inputs["edge_index"].values().dtype is held
    assert {parameter.dtype for parameter in tuned.parameters()} == {torch.float32}


def test_sampled_losses_are_the_reference_s_shapes_are_declared_and_epochs_differ() -> None:
    prepared = GNN.prepare(**SAMPLED | {"input": "cora-powerlaw-sampled"})
    arm = Trainer(GNN.case(**SAMPLED | {"input": "cora-powerlaw-sampled"}), prepared)
    torch.testing.assert_close(arm.losses(arm.eager()).double(), prepared.reference(), rtol=1e-4, atol=0)
    training = GNN.prepare(**SAMPLED, strategy="regional").training
    epochs = [list(training.loader()) for _ in range(3)]
    assert {len(epoch) for epoch in epochs} == {training.round}
    assert not torch.equal(epochs[0][0].seeds, epochs[1][0].seeds)
    declared, met = (
        {tuple(tensor.shape for tensor in tensors(batch)) for batch in batches}
        for batches in (training.shapes, itertools.chain(*epochs))
    )
    assert met <= declared and len(declared) == len(training.shapes)


def test_tuned_upstream_compiles_once_for_batches_of_many_sizes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("BENCHMARKS_BACKEND", "aot_eager")
    asked = GNN.case(**SAMPLED | {"impl": "upstream-tuned", "input": "cora-sampled", "strategy": "full"})
    prepared = workloads.prepare(asked)
    arm = Trainer(asked, prepared)
    step = arm.compiled(strategies.apply(asked, prepared))
    with arm.timed():
        step()
        # The first batch that is met may have a size that equals another one; after it nothing is compiled.
        step()
        before = counters["stats"]["unique_graphs"]
        for _ in range(12):
            step()
    assert counters["stats"]["unique_graphs"] == before
    assert len({len(batch["nodes"]) for batch in prepared.training.loader()}) > 5
    assert "compiled for batches of all sizes" in gnn.WORKLOAD.refuses(dataclasses.replace(asked, dynamic=True))


class Loader:
    """In place of torch-geometric's: what the zoo's sampler draws, in its form."""

    made: list[Any]

    def __init__(self, data: Any, **options: Any) -> None:
        self.options, self.epochs = options, itertools.count(1)
        self.sampler = NeighborSampler(
            data.edge_index, fanouts=options["num_neighbors"], batch_size=options["batch_size"],
            seeds=options["input_nodes"], num_nodes=data.num_nodes, workers=0,
        )  # fmt: skip
        self.made.append(self)

    def __iter__(self) -> Iterator[SimpleNamespace]:
        for part in self.sampler.subgraphs(next(self.epochs)):
            yield SimpleNamespace(
                n_id=part.nodes, edge_index=part.edge_index, batch_size=len(part.seeds),
                num_sampled_nodes=part.hop_nodes, num_sampled_edges=part.hop_edges,
            )  # fmt: skip


@pytest.mark.parametrize("impl", ["upstream", "upstream-tuned"])
def test_the_library_s_loader_where_it_can_be_had(impl: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Loader, "made", [], raising=False)
    monkeypatch.setattr(torch_geometric.loader, "NeighborLoader", Loader)
    monkeypatch.setattr(gnn, "library_samples", lambda: True)

    def epochs() -> list[list[dict[str, Any]]]:
        training = GNN.prepare(seed=3, **SAMPLED, impl=impl).training
        return [list(training.loader()) for _ in range(2)]

    first, again = epochs(), epochs()
    # One loader for all epochs, whose workers stay.
    options = Loader.made[0].options
    assert len(Loader.made) == 2
    assert options.pop("generator").initial_seed() == 3
    seeds = options.pop("input_nodes")
    assert (options["num_neighbors"], options["batch_size"], options["shuffle"]) == ([15, 10], 8, True)
    # In an order of its own each epoch, and the same when it is run again.
    orders = [
        [torch.cat([each["nodes"][: each["seeds"]] for each in epoch]) for epoch in run] for run in (first, again)
    ]
    assert torch.equal(orders[0][0], orders[1][0]) and torch.equal(orders[0][1], orders[1][1])
    assert not torch.equal(orders[0][0], orders[0][1])
    assert all(torch.equal(order.sort().values, seeds.sort().values) for order in orders[0])
    arm = Trainer(GNN.case(**SAMPLED, impl=impl), GNN.prepare(seed=3, **SAMPLED, impl=impl))
    with arm.timed():
        assert arm.eager()().isfinite()


LOOP = "loop-3x8x8"


def test_large_models_have_a_reference_in_float32():
    found = [unet_arms.reference_dtype(UNETS[name]) for name in ("sd15", "sd21", "sdxl")]
    assert found == [torch.float64, torch.float64, torch.float32]
    config = UNETS["unet-debug"]
    prepared = UNET.prepare(impl="upstream")
    weights = unet_arms.Weights(unet_arms.skeleton(config), seed=0, dtype=torch.float32, device=torch.device("cpu"))
    single = unet_arms.reference_output(config, weights, prepared.inputs, torch.float32)
    assert single.dtype == torch.float32
    assert 0 < error(single, prepared.reference()) < 1e-5
    # In which TF32 is off, and put back.
    before = torch.backends.cudnn.conv.fp32_precision
    with unet_arms.in_full_float32():
        assert torch.backends.cudnn.conv.fp32_precision != "tf32" and not torch.backends.cudnn.allow_tf32
    assert torch.backends.cudnn.conv.fp32_precision == before


@pytest.mark.parametrize(("impl", "dynamic", "graphs"), [("upstream", None, 2), ("upstream-tuned", False, 3)])
def test_upstream_s_regions_are_its_transformer_blocks(impl: str, dynamic: bool | None, graphs: int):
    prepared = UNET.prepare(impl=impl, strategy="regional")
    expected = call(prepared)
    counter = CompileCounter()
    assert prepared.compile_regions is not None and UNET.prepare(impl="zoo").compile_regions is None
    prepared.compile_regions(prepared.model, backend=counter, dynamic=dynamic)
    assert error(call(prepared), expected) < 1e-6
    # Three sizes in two widths; as shipped the second turns symbolic.
    assert counter.frame_count == graphs
    compiled = {type(module).__name__ for module in prepared.model.modules() if module._compiled_call_impl is not None}
    assert compiled == set(library.UNet2DConditionModel._repeated_blocks) == {"BasicTransformerBlock"}


def test_fused_weights_are_those_that_diffusers_adds():
    for config in UNETS.values():
        theirs, expected = unet_arms.skeleton(config), unet_arms.parameters(config) + unet_arms.fused_weights(config)
        unet_arms.fuse_projections(theirs)
        assert sum(p.numel() for p in theirs.parameters()) == expected


@pytest.mark.parametrize("model", ["unet-debug", "unet-xl-debug"])
@pytest.mark.parametrize(("impl", "input"), [*((impl, LOOP) for impl in IMPLEMENTATIONS), ("zoo", "pipeline-3x8x8")])
def test_every_implementation_ends_at_the_reference_captured_or_not(impl: str, input: str, model: str):
    prepared = UNET.prepare(impl=impl, input=input, model=model)
    reference = prepared.reference()
    assert reference.shape == (1, 4, 8, 8) and error(call(prepared), reference) < 1e-5
    prepared.capture()
    # On the CPU it copies and overwrites as a replay would.
    for _ in range(2):
        assert error(call(prepared), reference) < 1e-5
    loop: Any = prepared.model
    if isinstance(loop, unet.ZooLoop):
        assert loop.sampler.captures == 1
    else:
        assert loop.pipeline.unet is loop.unet and type(loop.unet).__module__.partition(".")[0] in (impl, "diffusers")
        captured = zoo.captures(loop.unet)
        # All calls but the first, which compiles.
        assert (len(captured.shapes), captured.replays, captured.uncaptured) == (1, 2 * 3 - 1, {})


@pytest.mark.slow
@pytest.mark.parametrize("model", ["unet-debug", "unet-xl-debug"])
def test_gradients_under_autocast_are_as_near_as_diffusers(model: str):
    exact = UNET.prepare(model=model, impl="upstream", workload="train")
    training = exact.training
    batch = training.batch(0)
    doubles = torch.utils._pytree.tree_map(lambda t: t.double() if t.is_floating_point() else t, batch)
    training.loss(torch.nn.Module.double(exact.model), doubles).backward()
    config = UNETS[model]
    expected = WEIGHTS.convert_state_dict({k: p.grad for k, p in exact.model.named_parameters()}, config)
    errors = {}
    for impl in ("zoo", "upstream"):
        prepared = UNET.prepare(model=model, impl=impl, dtype="bfloat16", workload="train")
        if impl == "zoo":
            zoo.compile_regions(prepared.model, backend="aot_eager")
        with torch.autocast("cpu", prepared.training.autocast):
            loss = prepared.training.loss(prepared.model, batch)
        loss.backward()
        found = {name: p.grad for name, p in prepared.model.named_parameters()}
        assert {gradient.dtype for gradient in found.values()} == {torch.float32}
        found = found if impl == "zoo" else WEIGHTS.convert_state_dict(found, config)
        errors[impl] = {name: error(found[name], expected[name]) for name in expected}
    for name, theirs in errors["upstream"].items():
        # Parameters of norms above all: their gradients are sums over all pixels, kept in float32.
        assert errors["zoo"][name] < max(2 * theirs, 0.02), (name, errors["zoo"][name], theirs)
    assert sum(errors["zoo"].values()) < 1.5 * sum(errors["upstream"].values())


@pytest.mark.slow
def test_noise_is_mixed_in_as_diffusers_does():
    loss = unet.NoiseLoss("cpu")
    scheduler = DDPMScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear")
    batch = UNET.training().batch(3)
    seen: dict[str, Any] = {}

    def model(sample: torch.Tensor, timesteps: torch.Tensor, text: torch.Tensor, **options: Any) -> tuple[torch.Tensor]:
        seen.update(sample=sample, timesteps=timesteps, text=text, options=options)
        return (torch.zeros_like(sample),)

    found = loss(model, batch)
    expected = scheduler.add_noise(batch["latents"], batch["noise"], batch["timesteps"])
    torch.testing.assert_close(seen["sample"], expected, rtol=1e-4, atol=1e-5)
    assert seen["timesteps"] is batch["timesteps"] and seen["text"] is batch["text"]
    assert seen["options"] == {"return_dict": False}
    torch.testing.assert_close(found, batch["noise"].square().mean())


symbolic = pytest.mark.filterwarnings("ignore:.*became symbolic:zoo.RegionWarning")


@symbolic
@pytest.mark.slow
@pytest.mark.parametrize("input", ["static-4", "dynamic-4"])
@pytest.mark.parametrize(
    ("impl", "strategy"),
    [("upstream", "full"), ("upstream", "regional"), ("upstream-tuned", "regional"), ("zoo", "regional")],
)
def test_generation_compiled(input: str, impl: str, strategy: str) -> None:
    arm = FOREIGN.case(input=input, impl=impl, strategy=strategy)
    prepared = workloads.prepare(arm)
    reference = prepared.reference()
    assert error(output_of(arm, prepared, apply(arm, prepared), calls=3), reference.repeat(3, 1)) < 1e-5


@symbolic
@pytest.mark.slow
@pytest.mark.parametrize("impl", ["upstream", "zoo"])
def test_a_step_of_generation_has_a_cuda_graph(impl: str) -> None:
    """Of the zoo, or in transformers' own way, which a CPU compiles without one."""
    arm = FOREIGN.case(impl=impl, strategy="regional" if impl == "zoo" else "full")
    prepared = workloads.prepare(arm)
    step, reference = prepared.model, prepared.reference()
    if impl == "zoo":
        step = apply(arm, prepared)
        output_of(arm, prepared, step)
        prepared.capture()
    else:
        prepared.compile_full(step, mode="reduce-overhead", dynamic=None, backend="eager")
    assert error(output_of(arm, prepared, step, calls=3), reference.repeat(3, 1)) < 1e-5
    assert isinstance(step.step, GraphedStep) if impl == "zoo" else hasattr(step.model, "_compiled_call")


@symbolic
@pytest.mark.slow
@pytest.mark.parametrize(("impl", "strategy"), [("upstream", "eager"), ("upstream", "full"), ("zoo", "regional")])
def test_continuous_batching(impl: str, strategy: str) -> None:
    pytest.importorskip("transformers", minversion="5.24")  # that of 5.20 ends the process on a CPU
    arm = FOREIGN.case(input="continuous-4", impl=impl, strategy=strategy)
    prepared = workloads.prepare(arm)
    step = prepared.model
    try:
        assert error(output_of(arm, prepared, apply(arm, prepared), calls=2), prepared.reference().repeat(2)) < 1e-5
        assert (step.manager.continuous_batching_config.varlen_compile_config is None) == (strategy != "full")
    finally:
        step.stop()


SMALL = GraphSpec(nodes=3_000, edges=40_000, features=16, classes=5, hub=900)


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
    assert uniform.max_degree < 4 * uniform.edges / uniform.nodes  # of the mean degree
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


def test_real_cora_and_reddit_and_a_folder_without_them(tmp_path: Path) -> None:
    assert graphs.load("cora", data_root=str(tmp_path)).data == "generated, uniform"
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(FileNotFoundError, match="is not a folder"):
        graphs.load("cora", data_root=str(tmp_path / "missing"))
    write_cora(tmp_path)
    graph = graphs.load("cora", data_root=str(tmp_path))
    assert graph.data == "real (Planetoid)" and graph.x.shape == (540, 6) and graph.classes == 3
    # Duplicates and self-loops go, each edge stays in both directions.
    assert pairs(graph) == [(0, 1), (1, 0), (1, 2), (2, 1), (5, 539), (539, 5)]
    write_reddit(tmp_path)
    graph = graphs.load("reddit", data_root=str(tmp_path))
    assert graph.data == "real (Reddit)" and graph.x.dtype == torch.float32 and graph.x.tolist()[1] == [3.0, 4.0, 5.0]
    assert pairs(graph) == [(0, 1), (1, 0), (1, 3), (3, 1)] and graph.classes == 3
