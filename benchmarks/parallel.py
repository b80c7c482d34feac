"""Arms spread over the processes of ``torchrun``, each compared with the same arm in one process.

    torchrun --nproc-per-node 2 -m benchmarks.run --family llm --input 4x2048 --workload train --parallel fsdp

All processes run every arm in turn; in other races each arm has its own process. Under ``tp`` all processes have the
same batches; otherwise each trains on its own, which are ready on the device.
"""

from __future__ import annotations

import functools
import gc
import itertools
import math
import os
import shlex
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pydantic import TypeAdapter
from rich.console import Console
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import zoo
from benchmarks import machine, strategies
from benchmarks.cli import WIDTH, UsageError, pick
from benchmarks.compiler import Recorder
from benchmarks.families import Prepared, Workload
from benchmarks.families.base import tensors
from benchmarks.families.llm_arms import ZooDecode, ZooStep
from benchmarks.plan import Case, matching, refusal
from benchmarks.record import Rows, Steady, Store
from benchmarks.report.cells import NOTHING, significant
from benchmarks.report.model import machine_name
from benchmarks.report.show import print_table
from benchmarks.report.tables import filled, markdown
from benchmarks.strategies import READY_BATCHES, library_step, make_optimizer, our_step
from benchmarks.timing import ROUND_MS, back_to_back, once
from zoo.bert import Bert
from zoo.llm import LLM
from zoo.training import parallelize
from zoo.training.parallel import collective_obstacles

# {value of --parallel: dimension of the mesh}.
WAYS = {"ddp": "dp_replicate", "fsdp": "dp_shard", "zero2": "dp_shard", "tp": "tp"}
# Options of fully_shard. ZeRO-2 gathers weights once a step: blocks keep them from the forward to the backward.
SHARDING: dict[str, dict[str, Any]] = {"zero2": {"reshard_after_forward": False}}
# (implementation, strategy, CUDA graph). Upstream's plans for tp need models that it loads from a file.
ARMS = (("zoo", "eager", False), ("zoo", "regional", False), ("zoo", "regional", True), ("upstream", "regional", False))
# FSDP2 frees memory that NCCL would register in a captured step. Not every machine with NVLink supports multicast.
NCCL = {"NCCL_GRAPH_REGISTER": "0", "NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}


class _LeftOut(Exception):
    """The arm does not exist; the message says why."""


@dataclass(kw_only=True)
class RankTimes:
    """An arm in one process: its calls, each with ``count`` of ``unit``, and its peak of memory in bytes on a GPU."""

    steady: Steady
    graphs: int
    breaks: list[str]
    allocated: int | None
    losses: list[float]  # of the first steps, each on a batch of its own
    count: int | None
    unit: str | None
    output: Any = None  # of inference; in no row

    @property
    def ms(self) -> float:
        return statistics.median(self.steady.samples)


@dataclass(kw_only=True)
class Row:
    """An arm in all processes, by rank, and ``alone`` in the first process while the others wait.

    ``losses`` are means over all processes; ``error`` is the relative difference of the output from ``alone``'s output.
    """

    case: Case
    parallel: str
    ranks: int
    status: str = "ok"
    reason: str | None = None
    of_ranks: list[RankTimes] = field(default_factory=list)
    alone: RankTimes | None = None
    alone_reason: str | None = None
    losses: list[float] = field(default_factory=list)
    error: float | None = None
    command: str | None = None
    environment: str | None = None

    @property
    def per_rank(self) -> float:
        """Tokens (images, nodes, ...) per second of each process."""
        shared = self.ranks if self.parallel == "tp" else 1
        return (self.of_ranks[0].count or 1) * 1e3 / self.of_ranks[0].ms / shared

    @property
    def scaling(self) -> float | None:
        """Throughput of all processes over the throughput of one alone."""
        if self.alone is None:
            return None
        return self.per_rank * self.ranks * self.alone.ms / ((self.alone.count or 1) * 1e3)


class _Group:
    """The processes that measure an arm together: all of torchrun's processes, or one alone."""

    def __init__(self, way: str = "", mesh: DeviceMesh | None = None, control: Any = None) -> None:
        self.way, self.mesh, self._control = way, mesh, control
        self.rank, self.ranks = (0, 1) if mesh is None else (mesh.get_local_rank(), mesh.size())

    def everyone(self, value: Any) -> list[Any]:
        found: list[Any] = [value] * self.ranks
        if self.mesh is not None:
            dist.all_gather_object(found, value, group=self._control)
        return found

    def part(self, index: int) -> int:
        """The number of this process's batch of a step."""
        return index if self.way == "tp" else index * self.ranks + self.rank


def main(
    workload: Workload, bases: Sequence[Case], parallel: str, *, only: Sequence[str], out: Path, rounds: int,
    timeout: float, data_root: str | None, seed: int,
) -> int:  # fmt: skip
    """Measure in each process of torchrun; the first one writes the rows. 1 if an arm of the zoo failed."""
    pick("--parallel", [parallel], WAYS)
    base, on_gpu, limit = bases[0], bases[0].device != "cpu", timedelta(seconds=timeout)
    words = ["--family", base.family, "--model", base.model, "--input", base.input, "--workload", base.workload]
    words = ["-m", "benchmarks.run", *words, "--dtype", base.dtype, "--device", base.device, "--parallel", parallel]
    if "RANK" not in os.environ:
        line = shlex.join(["torchrun", "--nproc-per-node", "2", *words])
        raise UsageError(f"--parallel {parallel} runs in several processes: {line}")
    if len(bases) != 1:
        raise UsageError(f"--parallel takes one model and input, not {len(bases)}; name them by --model and --input")
    if parallel != "tp" and base.workload != "train":
        raise UsageError(f"--parallel {parallel} is for --workload train; for inference there is --parallel tp")
    cases = [replace(base, impl=impl, strategy=how, cuda_graph=graph) for impl, how, graph in ARMS]
    wanted = matching([case.arm for case in cases], only)
    cases = [case for case in cases if case.arm in wanted]

    os.environ.update({name: value for name, value in NCCL.items() if name not in os.environ})
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.set_float32_matmul_precision("high")
    where = torch.device("cuda", torch.cuda.current_device()) if on_gpu else None
    dist.init_process_group("nccl" if on_gpu else "gloo", timeout=limit, device_id=where)
    mesh = init_device_mesh(base.device, (dist.get_world_size(),), mesh_dim_names=(WAYS[parallel],))
    group = _Group(parallel, mesh, dist.new_group(backend="gloo", timeout=limit))
    console = Console(width=WIDTH, quiet=group.rank != 0, markup=False, highlight=False)
    facts = {**machine.device_facts(base.device), "collectives": dist.get_backend(), **{n: os.environ[n] for n in NCCL}}
    environment = machine.row(facts, {})
    name = f"{base.family}-{base.workload}-{base.dtype}-{parallel}.jsonl"
    store = Store(out if out.suffix == ".jsonl" else out / name)
    rows: list[Row] = []
    for case in cases:
        command = shlex.join(["torchrun", "--nproc-per-node", str(group.ranks), *words, "--arm", case.arm])
        row = Row(case=case, parallel=parallel, ranks=group.ranks, command=command, environment=environment["id"])
        prepare = functools.partial(workload.prepare, case, data_root=data_root, seed=seed)
        told = group.everyone(_attempt(case, prepare, group, rounds))
        failed = [each for each in told if isinstance(each, tuple)]
        if failed:
            row.status, row.reason = failed[0]
        else:
            row.of_ranks = told
            row.losses = [sum(each) / group.ranks for each in zip(*(each.losses for each in told), strict=True)]
            if group.rank == 0:
                _compare(row, workload, prepare, rounds)
        group.everyone(None)  # the others wait
        console.print(f"{case.arm}: {row.reason or f'{row.of_ranks[0].ms:.3g} ms'}")
        if row.status != "left-out":
            rows.append(row)
            for content in ([environment] if len(rows) == 1 else []) + [{"kind": "parallel", **asdict(row)}]:
                if group.rank == 0:
                    store.append(content)
        if failed and len(failed) < group.ranks:
            break  # a collective of other processes may still wait for the failed one
    if done := [row for row in rows if row.status == "ok"]:
        title, head, lines = _table(done)
        console.print(f"\n{title}")
        print_table(console, "", (head, lines))
    console.print(f"rows: {store.path}")
    time.sleep(0.5)  # lets gloo's threads free tensors; after Python's end this would abort the process
    return 1 if any(row.status != "ok" and row.case.impl == "zoo" for row in rows) else 0


def _attempt(case: Case, prepare: Callable[[], Prepared], group: _Group, rounds: int) -> RankTimes | tuple[str, str]:
    torch.compiler.reset()
    gc.collect()
    try:
        if why := refusal(case):
            raise _LeftOut(why)
        return _measure(case, prepare(), group, rounds)
    except _LeftOut as reason:
        return "left-out", str(reason)
    except torch.OutOfMemoryError as error:
        return "out-of-memory", str(error).partition(". ")[0]
    except Exception as error:
        return "failed", f"{type(error).__name__}: {str(error)[:600]}"


def _compare(row: Row, workload: Workload, prepare: Callable[[], Prepared], rounds: int) -> None:
    needed = workload.memory_bytes(row.case, reference=False)
    if row.case.device != "cpu" and needed > (there := torch.cuda.get_device_properties().total_memory):
        row.alone_reason = f"one process needs {needed / 2**30:.0f} GiB, there are {there / 2**30:.0f}"
    elif isinstance(alone := _attempt(row.case, prepare, _Group(), rounds), tuple):
        row.alone_reason = ": ".join(alone)
    else:
        row.alone = alone
        if alone.output is not None:
            expected = torch.linalg.vector_norm(alone.output)
            row.error = float(torch.linalg.vector_norm(row.of_ranks[0].output - alone.output) / expected)
            alone.output = None
    for each in row.of_ranks:
        each.output = None


def _measure(case: Case, prepared: Prepared, group: _Group, rounds: int) -> RankTimes:
    """Spread the model, compile it, and time consecutive calls."""
    model, training, output = _spread(case, prepared, group), prepared.training, None
    if case.cuda_graph and (obstacles := collective_obstacles(model)):
        raise _LeftOut("; ".join(obstacles))
    if case.device != "cpu":
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    recorder, losses = Recorder(model), []
    call: Callable[[], Any] = functools.partial(model, **prepared.inputs)
    with strategies.execution_mode(case):
        if training is not None:
            optimizer = make_optimizer(model, training, capturable=case.cuda_graph, ours=case.impl == "zoo")
            step: Callable[[Any], torch.Tensor] = functools.partial(library_step, model, training, optimizer)
            if case.impl == "zoo":
                step = our_step(model, training, optimizer, cuda_graph=case.cuda_graph)
            losses = [float(step(training.batch(group.part(index)))) for index in range(training.checked)]
            for batch in training.shapes * 4:  # the third call of a shape may capture it
                step(batch)
            ready = itertools.cycle([training.batch(group.part(index)) for index in range(READY_BATCHES)])
            call = lambda: step(next(ready))  # noqa: E731
        else:
            if case.cuda_graph:
                graphed = zoo.cuda_graph(model, kwargs=prepared.inputs, static=prepared.static, clone_outputs=False)
                call = functools.partial(graphed, **prepared.inputs)
            call()
            if prepared.reset is not None:
                prepared.reset()
            output = torch.cat([each.flatten().float().cpu() for each in tensors(call())])
        facts = recorder.facts()
        ms = 1e3 * max(group.everyone(min(once(call, case.device) for _ in range(3))))
        calls = max(1, math.ceil(ROUND_MS / ms))
        timed = [back_to_back(call, case.device, calls) for _ in range(rounds + 1)][1:]
    steady = Steady(wall_ms=[each.wall_ms for each in timed], rounds=list(range(rounds)), calls_per_round=calls)
    steady.device_ms = [each.device_ms for each in timed if each.device_ms is not None]
    peak = None if case.device == "cpu" else torch.cuda.max_memory_allocated()
    return RankTimes(
        steady=steady, graphs=facts.graphs or 0, breaks=facts.breaks, allocated=peak, losses=losses, output=output,
        count=prepared.count, unit=prepared.unit,
    )  # fmt: skip


def _spread(case: Case, prepared: Prepared, group: _Group) -> nn.Module:
    """Spread an arm's model over a group, compile it if the case says so; returns the model for a call or a loss."""
    model: Any = prepared.model
    training, how = prepared.training, dict[str, Any](backend=strategies.backend())
    if training is not None and training.after_compile is not None:
        raise _LeftOut("checkpointed models are not measured in several processes")
    if case.impl == "upstream":
        return _spread_upstream(model, {"dynamic": prepared.dynamic, **how}, group)
    compiles = case.strategy == "regional"
    if compiles and training is not None and training.loss_module is not None:
        zoo.compile_regions(training.loss_module, **how)
    if group.mesh is None:
        return zoo.compile_regions(model, **how) if compiles else model
    # The wrappers around an LLM or a Bert have no layers to split.
    found = model if group.way != "tp" else next((m for m in model.modules() if isinstance(m, LLM | Bert)), model)
    sharding = SHARDING.get(group.way)
    spread = parallelize(found, group.mesh, compile=compiles, sharding=sharding, **(how if compiles else {}))
    if group.way != "tp":
        return spread
    if isinstance(model, ZooStep):  # the step's cache has all heads
        model.cache = model.model.make_cache(model.task.batch, model.task.slots)
        if isinstance(model, ZooDecode):
            past: Any = model.past
            model.past = lambda layer: tuple(half.chunk(group.ranks, 1)[group.rank] for half in past(layer))
        model.reset()
    return model  # type: ignore[no-any-return]


def _spread_upstream(model: nn.Module, how: dict[str, Any], group: _Group) -> nn.Module:
    """Upstream's model, compiled as accelerate does before FSDP2: repeated blocks, and other modules with a forward."""
    from torch.distributed.fsdp import fully_shard

    if group.way == "tp":
        raise _LeftOut("transformers splits models that it loads by from_pretrained(tp_plan=...)")
    lists = [each for each in model.modules() if isinstance(each, nn.ModuleList)]
    blocks = [block for each in lists if len(each) > 1 and len(set(map(type, each))) == 1 for block in each]
    try:
        from accelerate.utils import compile_regions_fsdp2

        compile_regions_fsdp2(model, **how)
    except ImportError:  # accelerate is missing or older than 1.15
        for block in blocks:
            block.compile(**how)
    if group.way == "ddp":
        return nn.parallel.DistributedDataParallel(model, device_mesh=group.mesh)
    if WAYS.get(group.way) == "dp_shard":
        for block in blocks:
            fully_shard(block, mesh=group.mesh, **SHARDING.get(group.way, {}))
        fully_shard(model, mesh=group.mesh)
    return model


def _table(rows: Sequence[Row]) -> tuple[str, list[str], list[list[str]]]:
    """Results of one model: a title, the table head and one line per arm."""
    case, unit = rows[0].case, rows[0].of_ranks[0].unit or "calls"
    columns: dict[str, Callable[[Row], str]] = {
        "arm": lambda row: row.case.arm,
        "ranks": lambda row: str(row.ranks),
        "ms": lambda row: significant(row.of_ranks[0].ms),
        f"{unit} / s": lambda row: significant(row.per_rank),
        "scaling": lambda row: significant(row.scaling),
        "graphs": lambda row: _by_rank([str(each.graphs) for each in row.of_ranks]),
        "GiB": lambda row: _by_rank([f"{each.allocated / 2**30:.1f}" for each in row.of_ranks if each.allocated]),
        "last loss": lambda row: f"{row.losses[-1]:.4f}" if row.losses else NOTHING,
        "error": lambda row: significant(row.error),
    }
    said = f"{case.model} on {case.input}, {case.workload}, {case.dtype}, {rows[0].parallel}"
    title = f"{said}: {unit} a second of each rank; scaling is over one process"
    return title, *filled(list(columns), [[text(row) for text in columns.values()] for row in rows])


def tables(rows: Rows) -> str:
    """Markdown of rows of several GPUs: a table per model and input, and below it the machine and the command."""
    found: dict[tuple[str, ...], list[Row]] = {}
    for row in rows.parallel:
        if row["status"] == "ok":
            read: Row = TypeAdapter(Row).validate_python({key: value for key, value in row.items() if key != "kind"})
            found.setdefault((*read.case.race, read.parallel), []).append(read)
    parts = []
    for arms in found.values():
        title, head, lines = _table(arms)
        environments = [rows.environments.get(row.environment or "", {}) for row in arms]
        where = machine_name(environments[0], arms[0].case.device)
        commits = ", ".join(dict.fromkeys(str(each.get("commit"))[:10] for each in environments))
        commands = "\n".join(dict.fromkeys((row.command or "").split(" --arm ")[0] for row in arms))
        parts += [f"**{title}**", markdown(head, lines), f"{where}, commit {commits}.", f"```sh\n{commands}\n```"]
    return "\n\n".join(parts)


def _by_rank(values: Sequence[str]) -> str:
    return ", ".join(values[:1] if len(set(values)) == 1 else values)
