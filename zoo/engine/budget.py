"""Hold compiled regions to their graph budgets."""

from __future__ import annotations

import functools
import sys
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch.distributed as dist
from torch import nn

from zoo.engine.call import outermost_call, region_call
from zoo.engine.compile import Plan, compiled_plan
from zoo.engine.cuda_graph import Captures, CapturingCall
from zoo.engine.graph_log import GRAPH_LOG, Entry, place_of_break, recompile_reason
from zoo.engine.signature import Attribute, mode, without_ddp


class BudgetError(RuntimeError):
    """A region went over its graph budget, broke, recompiled or ran eagerly. ``violations`` lists each."""

    def __init__(self, violations: list[str]) -> None:
        self.violations = violations
        super().__init__("\n".join([f"{len(violations)} violation(s) of the graph budget:", *violations]))


@contextmanager
def enforce_budget(model: nn.Module, *, group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Raise at the end of the block if a region compiled more graphs than it declares, or did not run compiled.

    A violation is a region over its budget, a graph break, a recompile (one class, signature, mode and kind of input
    compiled twice), or a region that did not run compiled: bypassed by a direct ``forward``, disabled, or never
    reached. Graphs are counted since ``compile_regions``. After a ``load_compiled`` that left nothing out every
    compilation is a violation.

    The budget of a declared region applies to one model input shape in one mode. A region that was given or discovered
    without a budget may have one graph for each parameter structure, mode and kind of input, and one more when sizes
    become symbolic. An attribute allows another graph only if it selects code: it had two values in the blocks when
    they were compiled, or is a rate of zero. In training such a region may stay uncalled if other regions of its list
    ran, since some models drop layers at random; a bypassed region among these is not noticed.

    If one call of a model gives its regions inputs of several sizes, its method ``region_sizes``, which takes the
    arguments of ``forward``, returns the number of sizes: the budget applies to each.

    An exception raised in the block passes through unchanged.

    Args:
        model: A model with compiled regions, or the ``DistributedDataParallel`` around one.
        group: A group of ``torch.distributed``, whose processes leave the block together. Each of them raises the
            violations of all; a process that compiled more graphs than another is one. A process that leaves by an
            exception does not report; the others wait until it ends.

    Raises:
        ValueError: If the model is not compiled: a deepcopy or unpickled model is eager.
        BudgetError: On leaving, naming every violation.
    """
    model = without_ddp(model)
    plan = compiled_plan(model)
    GRAPH_LOG.listen()
    first = len(GRAPH_LOG.entries)
    breaks = _breaks()
    modules = plan.modules_of(model)
    modes: dict[str, set[str]] = {name: set() for name in modules}
    call = outermost_call(model)
    captures = call.captures if isinstance(call, CapturingCall) else Captures()
    replays = captures.replays
    with _noting_calls(modules, modes):
        yield
    new = [entry for entry in GRAPH_LOG.entries[first:] if entry.model == plan.log_id]
    violations = [
        *_over_budget(plan),
        *_recompiled(plan),
        *(f"graph break, {count} in all: {reason}" for reason, count in (_breaks() - breaks).items()),
        *_broken(GRAPH_LOG.of(plan.log_id)),
        *_not_loaded(plan, new),
        *_not_compiled(plan, modules, modes, replayed=captures.replays > replays),
    ]
    if group is not None:
        violations = _of_all(group, violations, new)
    if violations:
        raise BudgetError(violations)


@contextmanager
def _noting_calls(modules: Mapping[str, nn.Module], modes: dict[str, set[str]]) -> Iterator[None]:
    """Note the modes that each region's compiled call ran in."""

    def note(name: str, module: nn.Module) -> None:
        modes[name].add(mode(module))

    with ExitStack() as stack:
        for name, module in modules.items():
            if (call := region_call(module)) is not None:
                call.on_call.append(noting := functools.partial(note, name))
                stack.callback(call.on_call.remove, noting)
        yield


def _over_budget(plan: Plan) -> Iterator[str]:
    groups: dict[tuple[Any, ...], list[Entry]] = defaultdict(list)
    for entry in GRAPH_LOG.of(plan.log_id):
        if not entry.varied:
            groups[entry.region, entry.mode, entry.model_inputs].append(entry)
    for (_, in_mode, _), entries in groups.items():
        found = plan.region_of(entries[0].name)
        graphs = sum(entry.graphs for entry in entries)
        budget = found.budget * entries[0].model_sizes
        if graphs > budget and (plan.report.declared or found.region.graphs is not None):
            where = ", ".join(f"{entry.name} ({_reason(entry)})" for entry in entries[budget:])
            yield f"{found.name}: {graphs} graphs in mode {in_mode}, budget {budget}; beyond it: {where}"


def _broken(entries: list[Entry]) -> Iterator[str]:
    """Where graphs broke: also at branches on data, which Dynamo does not count."""
    places = Counter((entry.region.__name__, place) for entry in entries if (place := place_of_break(entry.compile_id)))
    for (region, place), count in places.items():
        yield (
            f"{region}: graph break at {place}, by a branch on data or a call that cannot be traced; the code after "
            f"the break compiled {count} time(s)"
        )


def _not_loaded(plan: Plan, new: list[Entry]) -> Iterator[str]:
    folders = " and ".join(plan.loaded)
    for entry in new if folders else ():
        if entry.seconds:  # a loaded graph took none
            yield (
                f"{entry.name}: compiled in mode {entry.mode}, since {folders} has no graph for these inputs: call "
                "zoo.save_compiled after a warm_up with them"
            )


def _recompiled(plan: Plan) -> Iterator[str]:
    seen: dict[Hashable, str] = {}
    entries = GRAPH_LOG.of(plan.log_id)
    graphs = Counter((entry.region, entry.mode, entry.model_inputs) for entry in entries if entry.graphs)
    for entry in entries:
        if not entry.graphs or entry.varied or place_of_break(entry.compile_id):
            continue  # ``_broken`` reports code after a graph break
        key, remedy, cls = entry.key, "", entry.region
        if not plan.report.declared:
            found = plan.region_of(entry.name)
            shown = plan.by_call and graphs[cls, entry.mode, entry.model_inputs] <= found.graphs_needed
            if shown or found.region.graphs is not None:
                continue  # no more graphs than the example call needed, or ``_over_budget`` counts them
            # Code mostly branches on a rate of zero.
            zero = Attribute("float", "0.0")
            chosen = tuple(each for each in entry.signature[1] if each[0] in found.choices or each[1] == zero)
            key = cls, entry.structure, chosen, entry.mode, entry.inputs
            remedy = f"; to allow it give a budget, regions=[zoo.Region({cls.__name__}, graphs=...)]"
        if key in seen:
            reason = _reason(entry)
            # Dynamo keeps only why the newest graph of the class did not serve.
            if reason.partition(":")[0] not in (seen[key], "first compilation"):
                reason = f"TORCH_LOGS=recompiles shows why graph {seen[key]} did not serve"
            yield (
                f"{cls.__name__} ({entry.name}): recompiled for a signature, mode and kind of input that was "
                f"compiled before: {reason}{remedy}"
            )
        seen[key] = entry.compile_id


def _not_compiled(
    plan: Plan, modules: Mapping[str, nn.Module], modes: dict[str, set[str]], *, replayed: bool
) -> Iterator[str]:
    """Regions that did not run compiled. A replay of a CUDA graph calls none of them.

    A stack that no call entered (the encoder of a model that decodes) is left out, unless nothing ran; so are layers
    that others of their stack may be trained without, in a model that was not written for regions.
    """
    entered = {name.rpartition(".")[0] for name in modules if modes[name]}
    bypassed: dict[str, list[str]] = {}
    for name, module in modules.items():
        if region_call(module) is None:
            what = "it took the place of a compiled region, and ran eagerly"
            if outermost_call(module) is not None:
                what = "module.compile(), or a helper that calls it, took the place of its region"
            yield (
                f"{type(module).__name__} ({name}): {what}: call zoo.uncompile(model) and "
                "zoo.compile_regions(model) again"
            )
            continue
        in_stack = name.rpartition(".")[0] in entered and (plan.report.declared or not module.training)
        if not modes[name] and not replayed and (not entered or in_stack):
            bypassed.setdefault(type(module).__name__, []).append(name)
        for in_mode in modes[name]:
            if not GRAPH_LOG.compiled(module, in_mode):
                yield (
                    f"{type(module).__name__} ({name}): was called in mode {in_mode} but no graph of it was ever "
                    "compiled: its forward is disabled or was skipped, and ran eagerly"
                )
    for cls, names in bypassed.items():
        yield (
            f"{cls} ({', '.join(names)}): its compiled call never ran; it was bypassed (block.forward(x), "
            "checkpoint(block.forward), torch.compile around the block or the model) or not reached: call the module "
            "itself"
        )


def _of_all(group: dist.ProcessGroup, violations: list[str], new: list[Entry]) -> list[str]:
    """The violations of all processes, and the processes that compiled more graphs than another."""
    graphs: Counter[str] = Counter()
    for entry in new:
        graphs[f"{entry.region.__name__} in mode {entry.mode}"] += entry.graphs
    everyone: list[Any] = [None] * group.size()
    dist.all_gather_object(everyone, (violations, graphs), group=group)
    found = [f"rank {rank}: {each}" for rank, (theirs, _) in enumerate(everyone) for each in theirs]
    for region in sorted(set().union(*(theirs for _, theirs in everyone))):
        counts = [theirs[region] for _, theirs in everyone]
        least = min(counts)
        found += [
            f"rank {rank} compiled {count} graphs of {region}, other ranks {least}"
            for rank, count in enumerate(counts)
            if count > least
        ]
    return found


def _reason(entry: Entry) -> str:
    return (recompile_reason(entry.compile_id) or "first compilation").splitlines()[0]


def _breaks() -> Counter[str]:
    dynamo = sys.modules.get("torch._dynamo.utils")  # if it was not imported, no graph has broken
    return Counter() if dynamo is None else Counter(dynamo.counters["graph_break"])
