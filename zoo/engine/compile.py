"""Compile the regions of a model in place, compile them ahead of use (warm up), and undo it."""

from __future__ import annotations

import functools
import inspect
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.utils import _pytree as pytree

from zoo.engine import discover
from zoo.engine.call import (
    NOTICES,
    IdleWatch,
    RegionCall,
    RegionWarning,
    outermost_call,
    outside_of_hooks,
    region_call,
    set_call,
)
from zoo.engine.captured import tensors_in
from zoo.engine.compat import compile_limit_kwargs
from zoo.engine.cuda_graph import CapturingCall
from zoo.engine.direct import DirectOrInductor
from zoo.engine.discover import FoundRegion, Given, Obstacle, RegionReport
from zoo.engine.graph_log import GRAPH_LOG, Entry, recompile_reason
from zoo.engine.lifted import Checked
from zoo.engine.observe import Example, checked_example, given_example, undisturbed
from zoo.engine.region import Region
from zoo.engine.signature import check_model, without_ddp
from zoo.engine.signature import mode as mode_text

# Warn of a region that compiled for this many shapes of its inputs.
MANY_SHAPES = 16
# Warn of a region that compiled for more than this many blocks that were expected to share a graph.
MANY_BLOCKS = 4
_CUDA_GRAPH_MODES = {"reduce-overhead": "default", "max-autotune": "max-autotune-no-cudagraphs"}


@dataclass(frozen=True, kw_only=True)
class Choices:
    """The options of ``compile_regions``, as they were given."""

    regions: Sequence[Given] | None = None
    exclude: Sequence[type[nn.Module] | str] = ()
    mode: str | None = None
    backend: Any = "inductor"
    options: Mapping[str, Any] | None = None
    dynamic: bool | None = None
    fullgraph: bool = True


@dataclass(frozen=True)
class Plan:
    """What ``compile_regions`` did to a model, stored apart from it: no state dict and no copy holds it."""

    report: RegionReport
    log_id: int
    choices: Choices
    # Obstacles that no call has shown yet, by region; warned of when they cost a graph.
    pending: dict[str, Obstacle] = field(default_factory=dict)
    told: set[str] = field(default_factory=set)  # warnings that were given, by region or subject
    by_call: bool = False  # whether the regions were chosen by what a call showed
    loaded: set[str] = field(default_factory=set)  # folders of load_compiled

    def modules_of(self, model: nn.Module) -> dict[str, nn.Module]:
        """Region modules by name; ValueError if one is gone."""
        # The plan holds names and no modules: a model that is itself a region would never be freed.
        modules = dict(model.named_modules())
        names = [name for found in self.report.regions for name in found.modules]
        if gone := [name for name in names if name not in modules]:
            raise ValueError(
                f"{type(model).__name__} has lost {', '.join(gone[:4])} since it was compiled: call "
                "zoo.uncompile(model) and zoo.compile_regions(model) again"
            )
        return {name: modules[name] for name in names}

    def region_of(self, name: str) -> FoundRegion:
        """The region that a module was found in; its class may have changed, as by ``fully_shard``."""
        return next(found for found in self.report.regions if name in found.modules)


_PLANS: WeakKeyDictionary[nn.Module, Plan] = WeakKeyDictionary()
# Traces of modules that were uncompiled: Dynamo keeps their code, which can be saved if it runs again.
_UNCOMPILED: WeakKeyDictionary[nn.Module, list[Any]] = WeakKeyDictionary()


def plan_of(model: nn.Module) -> Plan | None:
    """The plan of a compiled model; None for an eager one, which every deepcopy and unpickled model is."""
    check_model(model)
    return _PLANS.get(model)


def compiled_plan(model: nn.Module) -> Plan:
    """The plan of a compiled model; ValueError for an eager one."""
    if (plan := plan_of(model)) is None:
        remedy = "call zoo.compile_regions(model) first (a deepcopy or unpickled model is eager until then)"
        if parts := [name for name, part in model.named_modules() if part in _PLANS]:
            remedy = (
                f"zoo.compile_regions was called on its part {parts[0]}: pass that part, or compile the whole model"
            )
        raise ValueError(f"{type(model).__name__} has no compiled regions: {remedy}")
    return plan


def compile_regions(
    model: nn.Module, *, regions: Sequence[Region | type[nn.Module] | str] | None = None,
    exclude: Sequence[type[nn.Module] | str] = (), args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None, mode: str | None = None, backend: Any = "inductor",
    options: Mapping[str, Any] | None = None, dynamic: bool | None = None, fullgraph: bool = True,
) -> nn.Module:  # fmt: skip
    """Compile each region of a model in place; nothing is compiled before the first call (or ``warm_up``).

    State-dict keys, parameters and the class of the model stay as they are. A deepcopy or a pickle of the model is
    eager again. To take back the per-block launch cost, put ``zoo.cuda_graph`` around the step.

    Args:
        model: Any module. Models of the zoo declare their regions; for others they are given or discovered.
        regions: Regions, exact classes or module paths to compile instead: see ``find_regions``.
        exclude: Classes or module paths to leave eager, with all that is inside of them.
        args: Positional arguments of one call, as ``find_regions`` takes them. With ``args`` or ``kwargs`` the model
            makes it eagerly: regions, graphs and obstacles are those of that call. Without them a model that declares
            no regions is warned of a per-layer value only when this costs a graph.
        kwargs: Keyword arguments of that call.
        mode: A ``torch.compile`` mode without CUDA graphs: ``"default"`` or ``"max-autotune-no-cudagraphs"``. Other
            backends than Inductor have none.
        backend: A ``torch.compile`` backend.
        options: Backend options, as ``torch.compile`` takes them; not together with ``mode``.
        dynamic: ``False`` compiles one graph for each shape, ``True`` one with symbolic sizes. ``None`` is ``False``
            for a model that declares its regions. For other models a module's first shape is static, and sizes that
            differ in a later call become symbolic, with a ``RegionWarning``. A region's own ``dynamic`` overrides
            ``None`` and ``False``.
        fullgraph: ``False`` lets graphs break inside a region. Only for models that cannot be changed.

    Returns:
        The same model.

    Raises:
        TypeError: If a region is neither a module class nor a path, or ``args``, ``kwargs``, ``backend``, ``options``,
            ``dynamic`` or ``fullgraph`` has another type.
        ValueError: If a region matches nothing, is a list that nothing calls, or is nested in another; if it needs more
            graphs than its budget or reads a per-layer value (for a model that declares its regions; others get a
            ``RegionWarning``); if something is compiled already; if ``mode``, ``options`` or ``backend`` turn CUDA
            graphs on; if a region has parameters without a shape yet. If the compiler refuses a region, the first call
            raises a ``RegionError``.
    """
    if not isinstance(dynamic, bool | None):
        raise TypeError(f"dynamic is {dynamic!r}, expected True, False or None")
    if not isinstance(fullgraph, bool):
        raise TypeError(f"fullgraph is {fullgraph!r}, expected True or False")
    if not (isinstance(backend, str) or callable(backend)):
        raise TypeError(f"backend is {backend!r}, expected a name as in torch._dynamo.list_backends(), or a function")
    if not isinstance(options, Mapping | None):
        raise TypeError(f"options is {options!r}, expected a dict of the backend's options")
    choices = Choices(
        regions=regions, exclude=exclude, mode=mode, backend=backend, options=options, dynamic=dynamic,
        fullgraph=fullgraph,
    )  # fmt: skip
    place_calls(without_ddp(model), choices, given_example(args, kwargs))
    return model


def place_calls(model: nn.Module, choices: Choices, example: Example | None = None, *, lazily: bool = False) -> None:
    """``compile_regions``; ``lazily`` delays the import of Dynamo, which takes seconds, to the first compilation."""
    chosen = discover.resolve(model, choices.regions, choices.exclude, example)
    if not chosen and choices.exclude:
        raise ValueError(f"exclude={list(choices.exclude)} leaves no region of {type(model).__name__}: keep it eager")
    if not chosen and not discover.declared_regions(model):
        raise ValueError(
            f"{type(model).__name__} declares no regions and none is discovered: {discover.nothing_repeats(model)}, "
            "or name classes with regions=[...], or give args= or kwargs= of a call that runs one block several times"
        )
    if not chosen:
        why = "has nothing to compile in this configuration; it runs on library kernels as it is"
        warnings.warn(f"{type(model).__name__} {why}", RegionWarning, stacklevel=3)
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    wrapper = () if dynamo is None else dynamo.OptimizedModule
    named = [(name or "the model itself", module) for name, module in model.named_modules()]
    if wrapped := [name for name, module in named if isinstance(module, wrapper)]:
        # The graph of torch.compile would contain the regions, and none would be compiled on its own.
        remedy = "its _orig_mod" if isinstance(model, wrapper) else "the model as it was before that"
        raise ValueError(f"already compiled: {', '.join(wrapped[:4])} by torch.compile(...); pass {remedy}")
    if captured := [name for name, module in named if isinstance(outermost_call(module), CapturingCall)]:
        order = "zoo.uncompile(model), then zoo.cuda_graph(zoo.compile_regions(model))"
        raise ValueError(f"the calls of {', '.join(captured[:4])} are captured: compile or load first, {order}")
    if taken := [name for name, module in named if outermost_call(module)]:
        raise ValueError(f"already compiled: {', '.join(taken[:4])}; call zoo.uncompile(model) first")
    report, symbols = discover.report_on(model, choices.regions, chosen, example)
    _judge(model, report)
    # All calls are made before one is placed: a refusal for one region leaves no other compiled.
    calls: list[RegionCall] = []
    for region, group in chosen.items():
        backend = choices.backend if region.backend is None else region.backend
        fullgraph = choices.fullgraph if region.fullgraph is None else region.fullgraph
        dynamic = region.dynamic if not choices.dynamic and region.dynamic is not None else choices.dynamic
        dynamic = bool(dynamic) if report.declared else dynamic
        how = functools.cache(functools.partial(_options, region, choices, backend, dynamic, fullgraph))
        lifted = None if report.declared else symbols[region]
        calls += [
            RegionCall(module, name=name, fullgraph=fullgraph, dynamic=dynamic, lifted=lifted, options=how)
            for name, module in group.items()
        ]
    if not lazily:
        for call in calls:
            _ = call.compiled
    for call in calls:
        set_call(call.module, call)
    modules = {name: module for group in chosen.values() for name, module in group.items()}
    if any(parameter.is_cuda for parameter in model.parameters()):
        IdleWatch(model, list(modules.values()))
    pending = {each.region: each for each in report.obstacles if not (each.certain or each.expected)}
    told = {each.region for each in report.obstacles if each.certain}
    _PLANS[model] = Plan(report, GRAPH_LOG.watch(model, modules), choices, pending, told, example is not None)
    if _warn_of_excess not in GRAPH_LOG.listeners:
        GRAPH_LOG.listeners.append(_warn_of_excess)


def uncompile(model: nn.Module) -> nn.Module:
    """Make a model eager again, whoever compiled its submodules in place. Returns the same model."""
    check_model(model)
    for module in model.modules():
        # compile_regions may have been called on any submodule.
        if _PLANS.pop(module, None) is not None:
            GRAPH_LOG.forget(module)
        if outermost_call(module) is not None:
            if (call := region_call(module)) is not None:
                _UNCOMPILED[module] = [origin for kept in call.entries.values() for _, _, origin in kept]
            set_call(module, None)
    return model


@dataclass(frozen=True)
class RegionCost:
    """What one region cost to compile: graphs, forward and backward seconds."""

    region: str
    graphs: int
    seconds: float
    first_module: str


@dataclass(frozen=True)
class WarmUp:
    """What ``warm_up`` spent, and in which modes.

    ``seconds`` is the whole call, and exceeds the sum of the costs by the time to run.
    """

    costs: tuple[RegionCost, ...]
    seconds: float
    mode: str

    @property
    def graphs(self) -> int:
        """Graphs of all regions together."""
        return sum(cost.graphs for cost in self.costs)

    def __str__(self) -> str:
        lines = [f"{self.graphs} graph(s) in {self.seconds:.2f} s ({self.mode})"]
        lines += [f"  {c.region} ({c.first_module}): {c.graphs} graph(s), {c.seconds:.2f} s" for c in self.costs]
        return "\n".join(lines)


def warm_up(model: nn.Module, /, *args: Any, **kwargs: Any) -> WarmUp:
    """Compile all regions now, by calls in the caller's mode, with a progress bar over regions.

        zoo.warm_up(model, input_ids=ids)                       # one call of the model
        zoo.warm_up(model, lambda: model.generate(ids))         # whatever calls it
        zoo.warm_up(model, *(partial(model, x) for x in shapes))  # several calls

    With gradients on and the model in training, the backward is compiled too. Gradients, random state and the
    buffers of a model in training are left as they were; what a model in eval mode writes into a buffer stays.

    Args:
        model: A model that ``compile_regions`` was called on.
        args: Positional arguments of one call, or functions without arguments, each of which calls the model.
        kwargs: Keyword arguments of that call. ``args=(x,), kwargs={...}`` works if forward has no such names.

    Returns:
        What each region cost; printable.

    Raises:
        TypeError: If ``args=`` is no tuple, ``kwargs=`` no mapping, or inputs by name are given as one argument.
        ValueError: If the model is not compiled.
    """
    from tqdm.auto import tqdm

    plan = compiled_plan(without_ddp(model))
    parameters = inspect.signature(without_ddp(model).forward).parameters.values()
    names = {each.name for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)}
    if not args and kwargs and kwargs.keys() <= {"args", "kwargs"} - names:
        args, kwargs = checked_example(**kwargs)  # as find_regions and cuda_graph take them
    functions = bool(args) and not kwargs and all(callable(each) and not isinstance(each, nn.Module) for each in args)
    calls = args if functions else [functools.partial(model, *args, **kwargs)]
    entries: list[Entry] = []
    started = time.perf_counter()
    with tqdm(total=plan.report.graphs_needed, desc="compiling regions", unit="graph", leave=False) as bar:

        def note(entry: Entry) -> None:
            if entry.model != plan.log_id:
                return
            entries.append(entry)
            if not entry.backward:
                bar.total = max(bar.total, bar.n + entry.graphs)
                bar.update(entry.graphs)
                bar.set_postfix_str(f"{entry.region.__name__} {entry.seconds:.1f} s")

        GRAPH_LOG.listen()
        GRAPH_LOG.listeners.append(note)
        try:
            with undisturbed(model):
                for call in calls:
                    outputs = call()
                    if model.training and torch.is_grad_enabled():
                        _run_backward(model, outputs)
        except Exception as error:
            if len(args) == 1 and isinstance(args[0], dict | tuple | list):
                stars = "**" if isinstance(args[0], dict) else "*"
                error.add_note(f"zoo.warm_up takes a call's own arguments: zoo.warm_up(model, {stars}inputs)")
                if isinstance(args[0], dict) and args[0].keys() <= names:
                    checked_example(*args)  # inputs by name: raises what cuda_graph says of them
            raise
        finally:
            GRAPH_LOG.listeners.remove(note)
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    regions = [] if entries else [*map(region_call, plan.modules_of(without_ddp(model)).values())]
    if regions and not any(call.entries for call in regions if call is not None):
        message = f"no region of {plan.report.model} was called: give functions that call it, as lambda: model(x)"
        warnings.warn(message, RegionWarning, stacklevel=2)
    alike: dict[Hashable, list[Entry]] = defaultdict(list)
    for entry in entries:
        alike[entry.key].append(entry)
    costs = [
        RegionCost(group[0].region.__name__, sum(e.graphs for e in group), sum(e.seconds for e in group), group[0].name)
        for group in alike.values()
    ]
    modes = list(dict.fromkeys(entry.mode for entry in entries)) or [mode_text(model)]
    return WarmUp(tuple(costs), time.perf_counter() - started, "; ".join(modes))


def _run_backward(model: nn.Module, outputs: Any) -> None:
    """Run the compiled backward without touching ``.grad``."""
    # A leaf may be a dataclass of tensors.
    tensors = [t for t in tensors_in(pytree.tree_leaves(outputs)) if t.requires_grad]
    wanted = [p for p in model.parameters() if p.requires_grad]
    if tensors and wanted:
        torch.autograd.grad([t.float().sum() for t in tensors], wanted, allow_unused=True)


def _refuse_cuda_graphs(mode: str | None, options: Mapping[str, Any] | None, backend: Any) -> None:
    why = "records a CUDA graph for every region, and the next region overwrites its outputs"
    if mode in _CUDA_GRAPH_MODES:
        instead = f"use mode={_CUDA_GRAPH_MODES[mode]!r} and put zoo.cuda_graph around the whole step"
        raise ValueError(f"mode={mode!r} {why}; {instead}")
    if mode not in (None, *_CUDA_GRAPH_MODES.values()):
        raise ValueError(f"mode is {mode!r}, expected {' or '.join(map(repr, _CUDA_GRAPH_MODES.values()))}")
    if backend == "cudagraphs":
        raise ValueError(f"backend={backend!r} {why}; take another, and put zoo.cuda_graph around the whole step")
    if options and options.get("triton.cudagraphs"):
        raise ValueError("options turn triton.cudagraphs on for every region; put zoo.cuda_graph around the step")


def _options(region: Region, choices: Choices, backend: Any, dynamic: bool | None, fullgraph: bool) -> dict[str, Any]:
    """Keyword arguments of ``torch.compile`` for a region, from its own settings and the model's."""
    mode = choices.mode if region.mode is None else region.mode
    options = choices.options
    _refuse_cuda_graphs(mode, options, backend)
    limit = compile_limit_kwargs()
    GRAPH_LOG.listen()
    if backend != "inductor":
        backend = backend if backend == "eager" else Checked(torch._dynamo.lookup_backend(backend))
        return {"backend": backend, "options": dict(options or {}), **limit}
    # torch.compile takes a mode or options, and a region's own settings are options.
    if mode is not None:
        if options is not None:
            raise ValueError("mode and options cannot both be given; options can hold what a mode stands for")
        from torch._inductor import list_mode_options

        options = list_mode_options(mode)
    # Dynamo's guards have already compared the sizes that compiled code would assert in every call.
    options = {"size_asserts": False, **region.options, **(options or {})}
    try:
        return {"backend": DirectOrInductor(options, dynamic, fullgraph), **limit}
    except RuntimeError as error:  # its message lists hundreds of options
        wrong = str(error).partition(", known options")[0]
        raise ValueError(f"{wrong}; torch._inductor.list_options() lists the known options") from error


def _judge(model: nn.Module, report: RegionReport) -> None:
    """Raise if obstacles or excess graphs would make a model that declares regions slow; warn for any other model."""
    complaints = [str(obstacle) for obstacle in report.obstacles if obstacle.certain or report.declared]
    complaints += [
        f"{found.name}: needs {found.graphs_needed} graphs, its budget is {found.budget}"
        + (f" ({'; '.join(found.differences)})" if found.differences else "")
        for found in report.regions
        if found.graphs_needed > found.budget
    ]
    if complaints and report.declared:
        raise ValueError(f"{type(model).__name__}: " + "; ".join(complaints))
    for complaint in complaints:
        warnings.warn(f"{type(model).__name__}: {complaint}", RegionWarning, stacklevel=4)


def _warn_of_excess(entry: Entry) -> None:
    """Warn, once each, of an obstacle that cost a second graph, of many input shapes, and of blocks that share none."""
    model, plan = next((each for each in _PLANS.items() if each[1].log_id == entry.model), (None, None))
    # A graph that took no time was loaded: no call of Dynamo follows, which would give the warning.
    if model is None or plan is None or entry.backward or not entry.seconds:
        return
    alike = [
        e
        for e in GRAPH_LOG.of(entry.model)
        if (e.region, e.structure, e.mode) == (entry.region, entry.structure, entry.mode) and not e.backward
    ]
    if "shapes" not in plan.told and len({e.inputs for e in alike}) >= MANY_SHAPES:
        plan.told.add("shapes")
        remedy = "pad them to fewer shapes, or zoo.compile_regions(model, dynamic=True)"
        discovered_without_call = not (plan.report.declared or plan.report.given or plan.by_call)
        if discovered_without_call and len({e.name for e in alike}) > MANY_BLOCKS:  # not one block in many calls
            call = "zoo.compile_regions(model, kwargs=...)"
            remedy = f"with the inputs of a call, {call} finds a larger block if the call repeats one; else {remedy}"
        NOTICES.append(
            f"{plan.report.model}: {entry.name} has compiled {MANY_SHAPES} graphs, one for each shape of its inputs; "
            f"{remedy}"
        )
    # The rest of a block after a graph break is a frame of its own.
    frame = entry.compile_id.partition("/")[0]
    alike = [e for e in alike if e.inputs == entry.inputs and e.graphs and e.compile_id.partition("/")[0] == frame]
    found, name, graphs = plan.region_of(entry.name), entry.region.__name__, sum(e.graphs for e in alike)
    places = ", ".join(dict.fromkeys(e.name for e in alike))
    if name in plan.pending and graphs > 1:
        obstacle = plan.pending.pop(name)
        plan.told.add(name)
        NOTICES.append(f"{plan.report.model}: {graphs} graphs compiled for {places}, where one would do: {obstacle}")
    elif name not in plan.told and len(alike) > MANY_BLOCKS and found.region.graphs is None:
        plan.told.add(name)
        # The reason of the previous compilation: Dynamo records the reason of this one later.
        reason = (recompile_reason(alike[-2].compile_id) or "unknown").splitlines()[0]
        NOTICES.append(
            f"{plan.report.model}: {graphs} graphs compiled for {places}, blocks of one structure with inputs of one "
            f"kind; further ones may follow. What differs: {reason}"
            + outside_of_hooks(model.get_submodule(entry.name), entry.name, reason)
        )
    in_call = entry.region, entry.mode, entry.model_inputs
    same = [e for e in GRAPH_LOG.of(entry.model) if (e.region, e.mode, e.model_inputs) == in_call]
    own = {e.name for e in same if e.graphs and not (e.backward or e.varied)}
    unexpected = len(own) == len(found.modules) > found.graphs_needed + MANY_BLOCKS
    foreign = not plan.report.declared and found.region.graphs is None
    if unexpected and foreign and plan.told.isdisjoint({name, "shapes"}):
        plan.told.add(name)
        NOTICES.append(
            f"{plan.report.model}: each of {len(own)} modules of {name} has compiled a graph of its own, where "
            f"{found.graphs_needed} would do if their inputs were alike: zoo.find_regions(model, kwargs=...) says in "
            f"what they differ; exclude=[{name}] leaves them eager, torch.compile(model) makes one graph"
        )
