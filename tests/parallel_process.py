"""One of several processes of the parallel tests: ``parallel_process.py rank group folder``.

It runs all checks of its group in turn and writes, for each, an empty text or what went wrong.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import math
import os
import re
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils import _pytree as pytree

import zoo
import zoo.ops.common
from zoo.engine.call import RegionCall
from zoo.gnn import NeighborSampler
from zoo.llm import LLMLayer
from zoo.training import (
    AdamW,
    LinearCrossEntropy,
    NonFiniteError,
    TrainingStep,
    float8_products,
    parallelize,
    tensor_parallel,
)
from zoo.training.parallel import collective_obstacles, groups_of

NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
OVERRIDES: dict[str, dict[str, Any]] = {
    "bert-debug": NO_DROPOUT,
    "gcn-debug": {"dropout": 0.0},
    "graphsage-debug": {"dropout": 0.0},
    "resnet-debug": {"dtype": torch.float64},
}
STEPS = 5


def build(name: str, **overrides: Any) -> nn.Module:
    torch.manual_seed(0)
    return zoo.create(name, **{**OVERRIDES.get(name, {}), **overrides}).train()


def batches(model: nn.Module, part: int) -> list[dict[str, Any]]:
    """A batch for each step; each part of the processes has others, of equal shapes."""
    inputs = zoo.example_inputs(model)
    generator = torch.Generator().manual_seed(part)

    def drawn(name: str, value: Any) -> Any:
        if name in ("input_ids", "token_type_ids"):
            return torch.randint(1, 2 if name == "token_type_ids" else 100, value.shape, generator=generator)
        if isinstance(value, Tensor) and value.is_floating_point():
            return torch.randn(value.shape, generator=generator).to(value.dtype)
        return value

    return [{name: drawn(name, value) for name, value in inputs.items()} for _ in range(STEPS)]


def loss_of(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    outputs = [each for each in pytree.tree_leaves(model(**batch)) if isinstance(each, Tensor)]
    return torch.stack([(each.float() - 0.5).square().mean() for each in outputs]).sum()


def sampled(model: nn.Module, part: int) -> list[Any]:
    """Sampled batches with labels for each step; each process has seeds of its own."""
    edges = torch.randint(64, (2, 400), generator=torch.Generator().manual_seed(0))
    seeds = torch.arange(64)[part::2]
    sampler = NeighborSampler(edges, fanouts=(3, 2, 2), batch_size=4, seeds=seeds, num_nodes=64, workers=0)
    return [sampler.batch(0, index) for index in range(STEPS)]


def sampled_loss(model: nn.Module, batch: Any) -> Tensor:
    x = torch.randn(64, 12, generator=torch.Generator().manual_seed(0))
    return F.cross_entropy(model(x[batch.nodes], batch.graphs), batch.labels(torch.arange(64) % 5))


def whole(model: nn.Module) -> dict[str, Tensor]:
    state = {name.removeprefix("module."): value for name, value in model.state_dict().items()}
    return {name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in state.items()}


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Its updates are the gradients, so that equal weights mean equal gradients."""
    return torch.optim.SGD(model.parameters(), lr=0.05, foreach=False)


def same_as_one_process(
    name: str, sizes: dict[str, int], *, loss: Any = loss_of, drawn: Any = batches, overrides: Any = None,
    **options: Any,
) -> None:  # fmt: skip
    """Five steps give the losses, norms and weights of one process that has all batches."""
    one, mesh = build(name, **(overrides or {})), mesh_of(sizes)
    several = parallelize(copy.deepcopy(one), mesh, backend="eager", **options)
    parts = math.prod(size for each, size in sizes.items() if each != "tp")
    own = dist.get_rank() // sizes.get("tp", 1)
    alone = TrainingStep(one, loss, optimizer_of(one), clip_norm=1.0)
    step = TrainingStep(several, loss, optimizer_of(several), clip_norm=1.0)
    all_batches = list(zip(*(drawn(one, part) for part in range(parts)), strict=True))
    with zoo.enforce_budget(several, group=dist.group.WORLD):
        for several_batches in all_batches:
            torch.testing.assert_close(step(several_batches[own]), alone(*several_batches), rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(step.grad_norm, alone.grad_norm, rtol=1e-3, atol=1e-5)
    found, expected = whole(several), one.state_dict()
    assert found.keys() == expected.keys()
    for key, _ in one.named_parameters():
        torch.testing.assert_close(
            found[key], expected[key], rtol=1e-3, atol=1e-5, msg=lambda m, key=key: f"{key}: {m}"
        )


def mesh_of(sizes: dict[str, int]) -> DeviceMesh:
    return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def refused(words: str, call: Callable[[], Any]) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        call()


def refusals(sizes: dict[str, int]) -> None:
    from torch.distributed.fsdp import fully_shard

    shard, tp, dp = mesh_of({"dp_shard": 2}), mesh_of({"tp": 2}), mesh_of({"dp": 2})
    llm = build("llm-debug")
    refused("('dp',), expected some of ('dp_replicate', 'dp_shard', 'tp')", lambda: parallelize(llm, dp))
    refused("are None", lambda: parallelize(llm, init_device_mesh("cpu", (2,))))
    three = build("llm-debug", num_attention_heads=3, num_key_value_heads=3)
    refused("layers.0 has heads 3, which tp=2 does not divide", lambda: parallelize(three, tp))
    rounded = zoo.llm.quantize(zoo.create("llm-debug"))
    refused("layers.0 has quantized weights, which tp=2 does not split", lambda: parallelize(rounded, tp))
    in_float8 = float8_products(build("llm-debug"), LLMLayer)
    refused("layers.0 has products of float8, which tp=2 does not split", lambda: parallelize(in_float8, tp))
    refused("no tensor-parallel plan for ResNet", lambda: parallelize(build("resnet-debug"), tp))
    refused("sharding is {'mp_policy': 1}, but", lambda: parallelize(llm, tp, sharding={"mp_policy": 1}))
    refused("compile is False, but backend", lambda: parallelize(llm, tp, compile=False, backend="eager"))
    refused("compile is False, but checkpoint", lambda: parallelize(llm, tp, compile=False, checkpoint=LLMLayer))
    refused("the mesh has no tp", lambda: parallelize(llm, shard, plan={"layers.0.o_proj": None}))
    refused("are on meta, the mesh is of cpu", lambda: parallelize(copy.deepcopy(llm).to("meta"), shard))
    both = mesh_of({"dp_replicate": 1, "tp": 2})
    refused("name a dp_shard dimension too", lambda: parallelize(llm, both))
    assert all(type(each) is nn.Parameter for each in llm.parameters())
    compiled = zoo.compile_regions(build("llm-debug"), backend="eager")
    compiled(**zoo.example_inputs(compiled))
    refused("layers.0 (LLMLayer) is compiled already: call zoo.uncompile", lambda: parallelize(compiled, shard))
    sharded = build("llm-debug")
    fully_shard(sharded.layers[1], mesh=shard)
    refused("layers.1 (FSDPLLMLayer) is sharded or replicated already; the order is", lambda: parallelize(sharded, tp))
    split = parallelize(build("llm-debug"), tp, compile=False)
    refused("is a DTensor already", lambda: parallelize(split, shard))
    step = TrainingStep(split, loss_of, AdamW(split.parameters()))
    refused("torch.distributed.checkpoint.save", lambda: step.save("nowhere"))
    refused("torch.distributed.checkpoint.save", lambda: step.load("nowhere"))
    refused(
        "spread in 2 ways: take zoo.training.AdamW",
        lambda: TrainingStep(split, loss_of, torch.optim.AdamW(split.parameters())),
    )
    stale = AdamW(build("llm-debug").parameters())
    stale.add_param_group({"params": list(split.embed_tokens.parameters())})
    refused("of AdamW's parameters are not of this LLM: make it after", lambda: TrainingStep(split, loss_of, stale))
    refused("whose loss scale", lambda: TrainingStep(split, loss_of, AdamW(split.parameters()), autocast=torch.float16))
    assert "collectives of gloo run on the host" in collective_obstacles(split)[0]
    with mock.patch.object(dist, "get_backend", return_value="nccl"), mock.patch.dict(os.environ):
        os.environ.pop("NCCL_GRAPH_REGISTER", None)
        assert "NCCL_GRAPH_REGISTER=0" in collective_obstacles(split)[0]
        os.environ["NCCL_GRAPH_REGISTER"] = "0"
        assert collective_obstacles(split) == []
        replicated = parallelize(llm, mesh_of(sizes), compile=False)
        assert "name the dimension dp_shard" in collective_obstacles(replicated)[0]


def budget(sizes: dict[str, int]) -> None:
    rank = dist.get_rank()
    one = build("gcn-debug")
    inputs = batches(one, 0)[0]
    half = {"x": inputs["x"][:32], "edge_index": inputs["edge_index"] % 32}
    model = parallelize(one, mesh_of(sizes), backend="eager")
    over = pytest.raises(zoo.BudgetError)
    with over as caught, zoo.enforce_budget(model, group=dist.group.WORLD), torch.no_grad():
        model(**inputs)
        if rank == 1:
            model(**half)
    assert any("rank 1 compiled" in each and "GNNLayer" in each for each in caught.value.violations), caught.value


def begun(sizes: dict[str, int]) -> tuple[nn.Module, TrainingStep, dict[str, Any]]:
    """A spread model, its training step after one batch, and the batch."""
    one = build("gcn-debug")
    batch = batches(one, 0)[0]
    model = parallelize(one, mesh_of(sizes), backend="eager")
    step = TrainingStep(model, loss_of, AdamW(model.parameters()))
    step(batch)
    return model, step, batch


def not_finite(sizes: dict[str, int]) -> None:
    """A loss of one process that is not finite stops all, and no weight becomes NaN."""
    model, step, batch = begun(sizes)
    if dist.get_rank() == 1:
        batch["x"] = batch["x"] * float("nan")
    step(batch)
    with pytest.raises(NonFiniteError) as caught:
        step.check()
    assert caught.value.step == 2
    assert all(value.isfinite().all() for value in whole(model).values())


def decoding(sizes: dict[str, int]) -> None:
    one = build("llm-debug", qk_norm=True, qkv_bias=True, head_dim=32).eval()
    ids = batches(one, 0)[0]["input_ids"]
    for learns in (True, False):
        split = parallelize(copy.deepcopy(one).requires_grad_(learns), mesh_of(sizes), backend="eager")
        assert split.make_cache(1, 8).layers[0].shape[2] == 1
        torch.testing.assert_close(split(ids), one(ids))
        torch.testing.assert_close(split.generate(ids, max_new_tokens=3), one.generate(ids, max_new_tokens=3))
        assert any(hasattr(each, "placements") for each in split.parameters()) == learns
        with mock.patch.object(RegionCall, "_by_dynamo", side_effect=AssertionError("not a direct call")):
            split.generate(ids, max_new_tokens=3)
        with mock.patch.object(zoo.ops.common, "triton_runs_on", return_value=True), torch.no_grad():
            token, cache = torch.zeros(1, split.config.hidden_size), split.make_cache(1, 8).layers[0]
            assert split.layers[0]._decodes(token, cache) != learns, "only plain weights are for kernels"
        torch.testing.assert_close(whole(split), dict(one.state_dict()))
        assert len(groups_of(split)) == 1
    split.load_state_dict({name: torch.zeros_like(value) for name, value in split.state_dict().items()})
    assert not any(value.any() for value in whole(split).values())


def encoding(sizes: dict[str, int]) -> None:
    one = build("bert-debug").eval().requires_grad_(False)
    split = parallelize(copy.deepcopy(one), mesh_of(sizes), backend="eager")
    inputs = batches(one, 0)[0]
    torch.testing.assert_close(split(**inputs), one(**inputs))


def sums(sizes: dict[str, int], folder: Path, dtype: torch.dtype) -> None:
    """Few numbers are added up by a kernel, here in Triton's interpreter, in memory that all processes map."""
    from torch.distributed import _symmetric_memory as symmetric

    mesh, rank, ranks = mesh_of(sizes), dist.get_rank(), dist.get_world_size()
    split: Any = parallelize(build("llm-debug", dtype=dtype).requires_grad_(False), mesh, compile=False)
    layer = split.layers[0].o_proj
    assert layer.shared is None, "no memory is shared by processes on the CPU"
    starts: list[Tensor] = []

    def empty(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        name, size = f"{folder}/memory-{len(list(folder.glob('memory-*-0')))}", 64 + math.prod(shape)
        dist.barrier()
        files = [torch.from_file(f"{name}-{each}", shared=True, size=size, dtype=dtype) for each in range(ranks)]
        starts[:] = files
        return files[rank][8 * (1 + rank) :][: math.prod(shape)].view(shape)

    def rendezvous(memory: Tensor, group: Any) -> Any:
        return SimpleNamespace(buffer_ptrs=[each.data_ptr() for each in starts])

    def make() -> Any:
        return tensor_parallel._make_shared(300, dtype, torch.device("cpu", rank), mesh)

    with contextlib.ExitStack() as patched:
        for owner, name, value in (
            (torch.cuda, "device_count", lambda: ranks),
            (torch.cuda, "can_device_access_peer", lambda one, other: True),
            (torch.cuda, "synchronize", lambda device: None),
            (symmetric, "empty", empty),
            (symmetric, "rendezvous", rendezvous),
            (tensor_parallel, "kernels_run", lambda part: part.dtype == dtype),
        ):
            patched.enter_context(mock.patch.object(owner, name, value))
        with mock.patch("socket.gethostname", lambda: f"host {rank}"):
            assert make() is None
        with mock.patch.object(symmetric, "rendezvous", side_effect=RuntimeError if rank else rendezvous):
            assert make() is None, "one process cannot"
        assert "TORCH_SYMM_MEM_DISABLE_MULTICAST" not in os.environ
        layer.shared = make()
        layer.shared.counts.fill_(2**31 - 6)
        torch.manual_seed(rank)
        # Of all sizes: programs beyond a sum's end take no part in it. The last one is too large for the memory.
        sizes_of_sums = (300, 7, 256, 128, 384, 1, 300, 129, 300, 2, 7, 300, 385)
        own = [torch.randn(1, size).to(dtype) for size in sizes_of_sums]
        parts = [[torch.empty_like(part) for _ in range(ranks)] for part in own]
        for part, of_all in zip(own, parts, strict=True):
            dist.all_gather(of_all, part)
        found = []
        for index, part in enumerate(own):
            if index % 3 == rank:  # now one process is ahead, now the other
                time.sleep(0.05)
            with torch.no_grad():
                found.append(layer.add_parts(part))
        for total, of_all in zip(found, parts, strict=True):
            assert torch.equal(total, torch.stack(of_all).float().sum(0).to(dtype)), total.shape
        assert layer.shared.counts[0] == 6 - 2**31  # twelve more


def artifacts(sizes: dict[str, int], folder: Path, *, learns: bool = True) -> None:
    """What the first process saves all load, and none compiles."""

    def losses(load: bool) -> list[Any]:
        one = build("llm-debug").requires_grad_(learns)
        steps = batches(one, 0)[:3]
        with torch.inference_mode():
            whole = [one.eval()(**batch) for batch in steps]
        model = parallelize(one.train(learns), mesh_of(sizes))
        inner = getattr(model, "module", model)
        if load:
            zoo.load_compiled(inner, path, strict=True)
        if learns:
            step = TrainingStep(model, loss_of, AdamW(model.parameters()))
            found: list[Any] = [step(batch) for batch in steps]
        else:
            with torch.inference_mode():
                found = [model(**batch) for batch in steps]
            assert inner.split_logits is not None
            torch.testing.assert_close(found, whole, rtol=1e-4, atol=1e-5)
        if dist.get_rank() == 0 and not load:
            assert not zoo.save_compiled(inner, path).skipped
        dist.barrier()
        return found

    path = folder / f"artifacts-{'-'.join(sizes)}"
    expected = losses(load=False)
    torch.compiler.reset()
    with mock.patch.object(RegionCall, "_by_dynamo", side_effect=AssertionError("compiled")):
        torch.testing.assert_close(losses(load=True), expected)


def chunked_loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    hidden, weight = model.output_product(**batch)
    return LinearCrossEntropy(chunk=8)(hidden, weight, batch["input_ids"])


def save(sizes: dict[str, int], folder: Path, name: str) -> None:
    one = build(name)
    steps = batches(one, 0)
    model = parallelize(one, mesh_of(sizes), backend="eager")
    step = TrainingStep(model, loss_of, AdamW(model.parameters(), lr=1e-2), clip_norm=1.0)
    for batch in steps[:3]:
        step(batch)
    kind = "-".join(sizes)
    dcp.save({"step": step}, checkpoint_id=folder / f"{name}-{kind}")
    losses = [float(step(batch)) for batch in steps[3:]]
    if dist.get_rank() == 0:
        (folder / f"{name}-{kind}.json").write_text(json.dumps(losses))


def resume(folder: Path, name: str, kind: str, model: nn.Module) -> None:
    """Go on from a checkpoint of any number of processes, with other weights before."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    step = TrainingStep(model, loss_of, AdamW(model.parameters(), lr=1e-2), clip_norm=1.0)
    dcp.load({"step": step}, checkpoint_id=folder / f"{name}-{kind}")
    assert step.steps == 3
    losses = [float(step(batch)) for batch in batches(build(name), 0)[3:]]
    expected = json.loads((folder / f"{name}-{kind}.json").read_text())
    torch.testing.assert_close(losses, expected, rtol=1e-3, atol=1e-5)


def one_dies(sizes: dict[str, int]) -> None:
    _, step, batch = begun(sizes)
    if dist.get_rank() == 1:
        os._exit(3)
    began = time.monotonic()
    with pytest.raises(Exception, match="(?i)rank|peer"):
        for _ in range(3):
            step(batch)
    assert time.monotonic() - began < 30


DP, FSDP, TP = {"dp_replicate": 2}, {"dp_shard": 2}, {"tp": 2}
BOTH, HYBRID = {"dp_shard": 2, "tp": 2}, {"dp_replicate": 2, "dp_shard": 2}
PROCESSES = {"quick": 2, "one": 1, "interpreter": 2, "families": 2, "artifacts": 2, "four": 4}


def checks(group: str, folder: Path) -> dict[str, Callable[[], None]]:
    """The checks of a group by name, in order. Groups of one and of four read checkpoints of the first."""
    same = functools.partial(functools.partial, same_as_one_process)
    if group == "quick":
        return {
            "refusals": lambda: refusals(DP),
            "llm-debug ddp": same("llm-debug", DP),
            "llm-debug fsdp": same("llm-debug", FSDP),
            "llm-debug tp": same("llm-debug", TP, overrides={"qk_norm": True, "qkv_bias": True}),
            "llm-debug checkpoint": same("llm-debug", FSDP, checkpoint=LLMLayer),
            "llm-debug chunked": same("llm-debug", FSDP, loss=chunked_loss),
            "bert-debug tp": same("bert-debug", TP),
            "graphsage sampled": same("graphsage-debug", DP, loss=sampled_loss, drawn=sampled),
            "decoding": lambda: decoding(TP),
            "encoding": lambda: encoding(TP),
            "budget": lambda: budget(DP),
            "not finite": lambda: not_finite(FSDP),
            "save fsdp": lambda: save(FSDP, folder, "llm-debug"),
            "save tp": lambda: save(TP, folder, "llm-debug"),
            "save ddp": lambda: save(DP, folder, "gcn-debug"),
            "one dies": lambda: one_dies(FSDP),
        }
    if group == "one":
        kinds = (("llm-debug", "dp_shard"), ("llm-debug", "tp"), ("gcn-debug", "dp_replicate"))
        return {f"{name} of {kind}": functools.partial(resume, folder, name, kind, build(name)) for name, kind in kinds}
    if group == "interpreter":
        return {f"sums {each}": functools.partial(sums, TP, folder, each) for each in (torch.float32, torch.float16)}
    ways = {"ddp": DP, "fsdp": FSDP}
    if group == "families":
        names = ("bert-debug", "resnet-debug", "unet-debug", "gcn-debug")
        return {f"{name} {way}": same(name, sizes) for name in names for way, sizes in ways.items()}
    if group == "artifacts":
        found = {way: functools.partial(artifacts, sizes, folder) for way, sizes in ways.items()}
        return {**found, "tp": functools.partial(artifacts, TP, folder, learns=False)}

    def resumed(kind: str, sizes: dict[str, int]) -> None:
        resume(folder, "llm-debug", kind, parallelize(build("llm-debug"), mesh_of(sizes), backend="eager"))

    return {
        "llm-debug fsdp and tp": same("llm-debug", BOTH),
        "bert-debug fsdp and tp": same("bert-debug", BOTH),
        "llm-debug hybrid": same("llm-debug", HYBRID),
        "fsdp resumed by 4": lambda: resumed("dp_shard", {"dp_shard": 4}),
        "fsdp resumed by fsdp and tp": lambda: resumed("dp_shard", BOTH),
        "tp resumed by fsdp and tp": lambda: resumed("tp", BOTH),
        "tp resumed by 4": lambda: resumed("tp", {"dp_shard": 4}),
    }


def main(rank: int, group: str, folder: Path) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder}/store-{group}"
    dist.init_process_group("gloo", store, timedelta(seconds=60), world_size=PROCESSES[group], rank=rank)
    results: dict[str, str] = {}
    for name, check in checks(group, folder).items():
        began = time.monotonic()
        try:
            check()
            results[name] = ""
        except Exception:
            results[name] = f"rank {rank}: {traceback.format_exc()}"
        torch.compiler.reset()
        print(f"{name}: {time.monotonic() - began:.1f} s", flush=True)
        (folder / f"{group}-{rank}.json").write_text(json.dumps(results))
    # One of them may have died on purpose.
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
