"""Find the regions of a model, predict their graphs, and name what would cost more graphs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.nn.modules.module import _forward_unimplemented
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized

from zoo.engine.cut import Cut
from zoo.engine.lifted import TAKE_SYMBOLS, Lifted, lifted_in, number_at
from zoo.engine.observe import Chosen, Example, Observed, count_calls, device_shares, given_example, observe_call
from zoo.engine.region import Region
from zoo.engine.signature import (
    Attribute,
    check_model,
    choices_of,
    differing_inputs,
    numbers_in,
    own_class,
    read_attributes,
    signature,
    structure,
    without_ddp,
)

# How a region is given, its modules by name, and what a call showed of them.
Given = Region | type[nn.Module] | str
Modules = Mapping[str, nn.Module]
Seen = Mapping[str, Observed]
_ANY_NUMBER = "other numbers"  # in a kind of input, in place of a number that is a symbol


def has_library_hook(module: nn.Module) -> bool:
    """Whether accelerate or diffusers keep a hook on a module, which replaces its forward."""
    return hasattr(module, "_hf_hook") or hasattr(module, "_diffusers_hook")


@dataclass(frozen=True)
class Obstacle:
    """Something that costs graphs or hides a region from the compiler, and what to do about it.

    ``certain`` is False if the cost depends on a branch that no call has shown to be taken; ``expected`` is True if
    the cost is part of the model's design, and reported without a warning.
    """

    region: str
    message: str
    certain: bool = True
    expected: bool = False

    def __str__(self) -> str:
        return f"{self.region}: {self.message}"


@dataclass(frozen=True)
class FoundRegion:
    """One region of a model: its modules by signature.

    ``signatures`` holds a tuple of module names for each distinct signature, in model order; with an example call, a
    module that gets several kinds of input is in several tuples. ``device_share`` is the region's fraction of the
    model's device time, or None if it was not measured. ``weight_share`` is its fraction of the model's weights, except
    those of ``nn.Embedding``, which are looked up and not multiplied. ``at_least`` says that more graphs may be needed,
    for example if objects that ``forward`` reads hold other values in some modules. ``choices`` are attributes that
    select code: those with two values in the modules.
    """

    region: Region
    signatures: tuple[tuple[str, ...], ...]
    differences: tuple[str, ...] = ()
    device_share: float | None = None
    weight_share: float = 0.0
    at_least: bool = False
    choices: frozenset[str] = frozenset()

    @property
    def name(self) -> str:
        """The class name."""
        return self.region.cls.__name__

    @property
    def modules(self) -> tuple[str, ...]:
        """Names of all modules, each once."""
        return tuple(dict.fromkeys(name for names in self.signatures for name in names))

    @property
    def graphs_needed(self) -> int:
        """One for each signature."""
        return len(self.signatures)

    @property
    def budget(self) -> int:
        """The declared budget, or as many graphs as are needed."""
        return self.region.graphs if self.region.graphs is not None else self.graphs_needed


@dataclass(frozen=True)
class RegionReport:
    """What ``find_regions`` found. Print it."""

    model: str
    regions: tuple[FoundRegion, ...]
    obstacles: tuple[Obstacle, ...]
    declared: bool
    given: bool = False  # whether the caller named the regions
    why_none: str = ""
    by_call: bool = False  # whether other regions are found without the arguments of a call

    @property
    def coverage(self) -> float:
        """The part of the model's weights that regions hold, 0 to 1."""
        return sum(found.weight_share for found in self.regions)

    @property
    def graphs_needed(self) -> int:
        """Graphs of all regions together."""
        return sum(found.graphs_needed for found in self.regions)

    @property
    def graphs(self) -> str:
        """``graphs_needed`` as text, which marks a lower bound."""
        return _counted(self.graphs_needed, any(found.at_least for found in self.regions))

    def __str__(self) -> str:
        origin = "declared" if self.declared else "given" if self.given else "discovered"
        if not self.regions:
            return f"{self.model}: no regions: {self.why_none}"
        lines = [
            f"{self.model}: {len(self.regions)} region class(es), {origin}; {self.graphs} graph(s) needed, "
            f"{self.coverage:.0%} of the weights in regions"
        ]
        for found in self.regions:
            share = f", {found.weight_share:.0%} of the weights"
            share += "" if found.device_share is None else f", {found.device_share:.0%} of device time"
            graphs = _counted(found.graphs_needed, found.at_least)
            held = f"{len(found.modules)} module(s), {graphs} graph(s), budget {found.budget}"
            lines.append(f"  {found.name}: {held}{share}")
            lines += [f"    {len(names)} x {_abbreviate(names)}" for names in found.signatures]
            lines += [f"    differs: {difference}" for difference in found.differences]
        if self.by_call:
            lines.append("  Only a call shows these regions: give zoo.compile_regions the same args= and kwargs=.")
        if self.obstacles:
            lines.append("  obstacles:")
            lines += [f"    - {obstacle}" for obstacle in self.obstacles]
        return "\n".join(lines)


def find_regions(
    model: nn.Module, regions: Sequence[Region | type[nn.Module] | str] | None = None, *,
    exclude: Sequence[type[nn.Module] | str] = (), args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> RegionReport:  # fmt: skip
    """Report which submodules can be compiled as regions, how many graphs they need and what stands in the way.

    Args:
        model: Any module, the zoo's or not.
        regions: Regions, classes or module paths to use; in a path ``*`` stands for one part, as in ``"layers.*"``.
            The default is the model's own ``regions``. For a model that declares none, it is the regions that models
            inside of it declare, and in its other parts the repeated classes with the least cost. The cost is the
            layers of each distinct block, plus one for each call of a region and two for each layer outside of regions.
        exclude: Classes or module paths to leave out, with all that is inside of them.
        args: Positional arguments of one call. With ``args`` or ``kwargs`` the model runs eagerly, in its mode (with
            gradients in training), so that a block that is called several times is discovered, layers that differ only
            in their inputs are told apart, and attributes count only where a branch that was taken reads them; on a GPU
            each region's share of device time is measured as well.
        kwargs: Keyword arguments of that call; ``{}`` if it has no arguments at all.

    Raises:
        TypeError: If a region is no module class, ``regions`` no list, ``args`` no tuple or ``kwargs`` no mapping.
        ValueError: If a region matches nothing, is nested in another, or has parameters without a shape yet.
    """
    model = without_ddp(model)
    example = given_example(args, kwargs)
    chosen = resolve(model, regions, exclude, example)
    report, _ = report_on(model, regions, chosen, example)
    if report.declared or regions is not None or example is None:
        return report
    return replace(report, by_call=chosen.keys() != resolve(model, None, exclude).keys())


def report_on(
    model: nn.Module, regions: Sequence[Given] | None, chosen: Chosen, example: Example | None = None
) -> tuple[RegionReport, dict[Region, Lifted]]:
    """The report of ``find_regions`` on the modules that ``resolve`` chose, and each region's symbols.

    The symbols are numbers that differ from block to block; there are none if the model declares the regions.
    """
    declared = regions is None and bool(declared_regions(model))
    lifted = {region: Lifted() if declared else lifted_in(modules.values()) for region, modules in chosen.items()}
    observed = observe_call(model, chosen, example, lifted) if example else {}
    shares = device_shares(model, chosen, example) if example else {}
    found, obstacles = [], []
    weights = _weights(model)
    for region, modules in chosen.items():
        groups: dict[tuple[Any, Any], list[str]] = defaultdict(list)
        passed, differ = Lifted(), False
        computed: dict[Hashable, set[Hashable]] = {}
        symbols = lifted[region].names
        skipped = {}
        for name, module in modules.items():
            seen = observed.get(name)
            static = signature(module, reads=seen.reads if seen else None, without=symbols)
            for call, ran in seen.inputs.items() if seen else [(None, set())]:
                kind = call if call is None or declared else _without_symbols(module, static, call, groups, passed)
                groups[static, kind].append(name)
                differ |= computed.setdefault((static, kind), ran) != ran
            if seen and not seen.inputs:
                skipped[name] = static
        for name, static in skipped.items():
            alike = next((names for (built, _), names in groups.items() if built[0] == static[0]), None)
            (groups[static, None] if alike is None else alike).append(name)
        # A layer may be dropped at random in training.
        dropped = not declared and model.training and len(skipped) < len(modules)
        choices = choices_of(modules.values())
        obstacles += list(_obstacles(region, modules, observed, choices.union(symbols), () if dropped else skipped))
        # Most code reads no rate in eval mode; a call shows whether this code does.
        looked = model.training or example is not None
        zeros = list(_zero_rates(region, modules, observed, lifted[region])) if looked else []
        obstacles += zeros
        obstacles += _numbers_alone(region, modules, observed, lifted[region]) if observed else ()
        signatures = tuple(tuple(names) for names in groups.values())
        held = {id(weight) for module in modules.values() for weight in module.parameters()}
        share = sum(weights.get(weight, 0) for weight in held) / max(sum(weights.values()), 1)
        differences = (*_differences(modules, observed, symbols), *dict.fromkeys(_differing_inputs(groups, declared)))
        # Not all operations take a symbol of a float.
        floats = any(not each.reads.isdisjoint(lifted[region].floats) for each in map(observed.get, modules) if each)
        unseen = not observed and bool(symbols)  # only a call shows what depends on these numbers
        at_least = bool(zeros or passed.varying or differ or floats or unseen) or _contents_differ(modules, observed)
        of_device = shares.get(region.cls)
        found.append(FoundRegion(region, signatures, differences, of_device, share, at_least, frozenset(choices)))
    why = "" if chosen else nothing_repeats(model)
    return RegionReport(
        type(model).__name__, tuple(found), tuple(obstacles), declared, regions is not None, why
    ), lifted


def _weights(model: nn.Module) -> dict[int, int]:
    """Sizes of the parameters by identity, without those of embeddings."""
    modules = (module for module in model.modules() if not isinstance(module, nn.Embedding))
    weights = (weight for module in modules for weight in module.parameters(recurse=False))
    return {id(weight): 0 if is_lazy(weight) else weight.numel() for weight in weights}


def resolve(
    model: nn.Module,
    regions: Sequence[Given] | None,
    exclude: Sequence[type[nn.Module] | str],
    example: Example | None = None,
) -> dict[Region, dict[str, nn.Module]]:
    """Regions with their modules by name, checked: used by ``find_regions`` and ``compile_regions`` alike."""
    check_model(model)
    for argument, given in {"regions": regions, "exclude": exclude}.items():
        if given is not None and not isinstance(given, list | tuple | set | frozenset):
            what, remedy = f"a {type(given).__name__}", "; inputs of a call are args=(x,) and kwargs={...}"
            if isinstance(given, str | type | Region):
                what, remedy = repr(given), f": {argument}=[...]"
            raise TypeError(f"{argument} is {what}, expected a list of classes and paths{remedy}")
    if regions is not None and not regions:
        raise ValueError("regions is empty: leave it out and they are found, or name some")
    excluded = {id(part) for item in exclude for m in _matching(model, item, "exclude") for part in m.modules()}
    declared = declared_regions(model)
    if regions is None and not declared:
        calls = count_calls(model, example) if example else None
        found, within = _declared_inside(model)
        for cls, modules in Cut(model, calls).regions().items():
            if within.isdisjoint(id(part) for module in modules.values() for part in module.modules()):
                found[Region(cls)] = modules
    else:
        found = _given(model, declared if regions is None else regions, required=regions is not None)
    chosen = {
        region: left
        for region, modules in found.items()
        if (left := {name: m for name, m in modules.items() if id(m) not in excluded})
    }
    _refuse_uncallable_nested_and_lazy(chosen)
    return chosen


def declared_regions(model: nn.Module) -> tuple[Region, ...]:
    """The regions that the model's class declares; an unrelated attribute called ``regions`` declares none."""
    given = getattr(type(model), "regions", ())
    if not isinstance(given, tuple | list) or not all(
        isinstance(item, Region) or (isinstance(item, type) and issubclass(item, nn.Module)) for item in given
    ):
        return ()
    return tuple(item if isinstance(item, Region) else Region(item) for item in given)


def _declared_inside(model: nn.Module) -> tuple[dict[Region, dict[str, nn.Module]], set[int]]:
    """Static regions that models inside of this one declare, and the identities of all parts of those models."""
    found: dict[type[nn.Module], dict[str, nn.Module]] = defaultdict(dict)
    regions: dict[type[nn.Module], Region] = {}
    within: set[int] = set()
    for name, inner in model.named_modules():
        if id(inner) not in within and (declared := declared_regions(inner)):
            within.update(map(id, inner.modules()))
            for region, modules in _given(inner, declared, required=False).items():
                # The budget is for one model, and there may be several.
                regions.setdefault(region.cls, replace(region, graphs=None, dynamic=bool(region.dynamic)))
                found[region.cls].update((f"{name}.{path}", module) for path, module in modules.items())
    return {regions[cls]: modules for cls, modules in found.items()}, within


def _given(model: nn.Module, given: Sequence[Given], *, required: bool) -> dict[Region, dict[str, nn.Module]]:
    """Modules of regions that are declared, or given by class or path."""
    names = {id(module): name for name, module in model.named_modules()}
    chosen: dict[Region, dict[str, nn.Module]] = {}
    for item in given:
        if isinstance(item, str):
            for module in _matching(model, item, "regions"):
                cls = own_class(module)
                region = next((region for region in chosen if region.cls is cls), Region(cls))
                chosen.setdefault(region, {})[names[id(module)]] = module
            continue
        region = item if isinstance(item, Region) else Region(item)
        if any(region.cls is other.cls for other in chosen):
            raise ValueError(f"region {region.cls.__name__} given more than once")
        modules = {name: m for name, m in model.named_modules() if own_class(m) is region.cls}
        if not modules and required:
            parts = list(dict.fromkeys(own_class(m).__name__ for m in model.modules()))
            hint = f"it has {_abbreviate(parts, 8)}"
            if relatives := sorted({type(m).__name__ for m in model.modules() if isinstance(m, region.cls)}):
                hint = f"its subclasses {relatives} do not count, name them"
            raise ValueError(f"region {region.cls.__name__} matches no module of {type(model).__name__}; {hint}")
        # A configuration of a declared model need not have every kind of block.
        if modules:
            chosen[region] = modules
    return chosen


def _matching(model: nn.Module, item: type[nn.Module] | str, argument: str) -> list[nn.Module]:
    """The modules of an exact class, or at a path in which ``*`` stands within one part: ``layers.*.mlp``."""
    if not isinstance(item, str):
        return [module for module in model.modules() if own_class(module) is item]
    parts = item.split(".")
    found = [
        module
        for name, module in model.named_modules()
        if len(own := name.split(".")) == len(parts) and all(map(fnmatchcase, own, parts))
    ]
    if not found:
        raise ValueError(
            f"{argument} names {item!r}, but {type(model).__name__} has no such module; a path reads as in "
            "named_modules(), with * for any one part, as in 'layers.*'; a class is given itself, without quotes"
        )
    return found


def _refuse_uncallable_nested_and_lazy(chosen: Chosen) -> None:
    every = [(region.cls.__name__, name, module) for region, group in chosen.items() for name, module in group.items()]
    owner = {id(module): cls for cls, _, module in every}
    for cls, name, module in every:
        if type(module).forward is _forward_unimplemented:
            what = f"{name} is a {type(module).__name__}, which nothing calls"
            raise ValueError(f"{what}: regions=['{name}.*'] names its parts")
        for path, inner in module.named_modules():
            if path and id(inner) in owner:
                raise ValueError(
                    f"region {owner[id(inner)]} ({name}.{path}) is nested in region {cls} ({name}): the outer one "
                    "would compile it again; name one of the two"
                )
        for path, tensor in (*module.named_parameters(), *module.named_buffers()):
            if is_lazy(tensor):
                raise ValueError(f"region {cls}: {name}.{path} has no shape yet; call the model once on an example")


def nothing_repeats(model: nn.Module) -> str:
    """Why no region is discovered in this model; a message adds what to do."""
    if repeated := Cut(model).repeated:
        names = ", ".join(cls.__name__ for cls in repeated[:4])
        return f"its repeated blocks ({names}) are too small or too varied to gain by regions; use torch.compile(model)"
    alike = "occurs twice with weights of the same shapes and requires_grad"
    reason = f"no block repeats: no class but those of torch.nn {alike}"
    once = dict(model.named_modules())
    again = ((name, each) for name, each in model.named_modules(remove_duplicate=False) if name not in once)
    if shared := next((name for name, each in again if next(each.parameters(), None) is not None), None):
        reason += f"; blocks that share a module ({shared}) do not count as copies: name their class in regions=[...]"
    if any(map(is_parametrized, model.modules())):
        reason += "; weight_norm and other parametrizations give each module a class, and so a graph, of its own"
    return f"{reason}; use torch.compile(model)"


def _obstacles(
    region: Region, modules: Modules, observed: Seen, skip: Collection[str], skipped: Iterable[str]
) -> Iterator[Obstacle]:
    """What costs graphs or hides a region; attributes to ``skip`` are symbols, or choose code."""
    cls = region.cls
    if "forward" not in vars(cls):
        owner = next(base for base in cls.__mro__ if "forward" in vars(base))
        yield Obstacle(
            cls.__name__,
            f"inherits forward from {owner.__name__}, and classes that share a forward share one recompile limit and "
            f"one guard list; define forward in {cls.__name__} itself",
        )
    for group in _by_structure(modules):
        attributes = [_read(name, module, observed, configuration=False) for name, module in group.items()]
        for key in attributes[0]:
            if key in skip:
                continue
            values = [attribute[key] for attribute in attributes if key in attribute and attribute[key].countable]
            fewest = 3 if any(value.kind == "str" for value in values) else 2  # two strings choose code
            if len(values) == len(group) >= fewest and len(set(values)) == len(values):
                yield Obstacle(
                    cls.__name__,
                    f"forward reads {key}{'' if observed else ' (in some branch)'}, which differs in every layer "
                    f"({_abbreviate([str(v) for v in values])}): one graph per layer, {len(values)} in total; pass the "
                    "selected value as a tensor, or register it as a buffer",
                    certain=bool(observed),
                )
    inner = (each for name, module in modules.items() for each in module.named_modules(prefix=name))
    hooked = [name for name, part in inner if has_library_hook(part)]
    if hooked:
        yield Obstacle(
            cls.__name__,
            f"{_abbreviate(hooked)} have hooks of accelerate or diffusers (offloading, casting by layer, a cache) that "
            f"no graph can hold; remove them, or allow graph breaks: zoo.Region({cls.__name__}, fullgraph=False)",
            certain=False,
        )
    for name in skipped:
        yield Obstacle(
            cls.__name__,
            f"{name} was not called as a module: call block(x) instead of block.forward(x), or exclude a module that "
            f"no call reaches: exclude=[{name!r}]",
        )


def _differences(modules: Modules, observed: Seen, symbols: Collection[str]) -> Iterator[str]:
    """What makes modules of one class differ: tensors in one line, then attributes one by one."""
    shapes: dict[str, dict[str, None]] = defaultdict(dict)
    for module in modules.values():
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            shapes[name][str(tuple(tensor.shape))] = None
    different = [f"{name} {' / '.join(kinds)}" for name, kinds in shapes.items() if len(kinds) > 1]
    if different:
        yield f"parameters: {_abbreviate(different, 2)}"
    elif len({structure(module) for module in modules.values()}) > 1:
        yield "parameters, buffers or submodules that only some have"
    by_name = {name: _read(name, module, observed, configuration=True) for name, module in modules.items()}
    own = {key for name, module in modules.items() for key in _read(name, module, observed, configuration=False)}
    groups = [[by_name[name] for name in group] for group in _by_structure(modules)]
    among_equal_tensors = {
        key
        for group in groups
        for key in set().union(*group)
        if len({attribute[key] for attribute in group if key in attribute}) > 1
    }
    attributes = by_name.values()
    for key in dict.fromkeys(key for attribute in attributes for key in attribute if key not in symbols):
        values = dict.fromkeys(str(attribute[key]) for attribute in attributes if key in attribute)
        # The configuration of torch's own modules differs where tensors do, and would only repeat them.
        if len(values) > 1 and (key in own or key in among_equal_tensors):
            texts = list(values)
            if any(attribute[key].kind == "contents" for attribute in attributes if key in attribute):
                held = [text.split(", ") for text in texts]  # a configuration is long: only what differs in it
                texts = [" and ".join(each for each in own if not all(each in other for other in held)) for own in held]
            yield f"{key}: {_abbreviate(texts)}"


def _differing_inputs(groups: Iterable[tuple[Hashable, Any]], declared: bool) -> Iterator[str]:
    """How the inputs of blocks of one signature differ; a number that is no symbol is an input like all others."""
    calls: dict[Hashable, list[Any]] = defaultdict(list)
    for built, kind in groups:
        if kind is not None:
            places = () if declared else ((name.removeprefix("L"), number) for name, number in kind[1])
            numbers = ((each if each.startswith("[0]") else f"[1]{each}", number) for each, number in places)
            calls[built].append((*(kind if declared else kind[0]), *numbers))
    for alike in calls.values():
        yield from differing_inputs(alike)


def _by_structure(modules: Modules) -> list[dict[str, nn.Module]]:
    groups: dict[Hashable, dict[str, nn.Module]] = defaultdict(dict)
    for name, module in modules.items():
        groups[structure(module)][name] = module
    return list(groups.values())


def _without_symbols(module: nn.Module, static: Hashable, call: Any, groups: Iterable[Any], passed: Lifted) -> Hashable:
    """A kind of input without the numbers that are symbols; similar calls get the kind of the first of them."""
    numbers, _ = numbers_in(call)
    rest = tuple(kind for kind in call if kind[1] not in numbers.values())
    for built, kind in groups:
        if built != static or kind is None or kind[0] != rest:
            continue
        if all(name in numbers and number in (_ANY_NUMBER, numbers[name]) for name, number in kind[1]):
            return kind
    passed.note_numbers(module, call)
    varying = dict.fromkeys(passed.varying & numbers.keys(), _ANY_NUMBER)
    return rest, frozenset({**numbers, **varying}.items())


def _zero_rates(region: Region, modules: Modules, observed: Seen, symbols: Lifted) -> Iterator[Obstacle]:
    """Rates (of drop paths) that are zero in only some modules of a structure: most code branches on zero."""
    groups = _by_structure(modules)
    if not symbols.floats:
        return
    read = {key for name, module in modules.items() for key in _read(name, module, observed, configuration=False)}
    for name in (each for each in symbols.floats if each in read):
        rates = [{path: number_at(module, name) for path, module in group.items()} for group in groups]
        mixed = [each for each in rates if 0.0 in each.values() and len(set(each.values())) > 1]
        zero = [path for each in mixed for path, rate in each.items() if rate == 0.0]
        if mixed:
            yield Obstacle(
                region.cls.__name__,
                f"{name} is 0.0 in {_abbreviate(zero)} and not in others of the same structure; most code branches on "
                f"zero, so expect {len(mixed)} graph(s) more; with a small nonzero rate they share the others' graph",
                certain=False,
                expected=True,
            )


def _numbers_alone(region: Region, modules: Modules, observed: Seen, symbols: Lifted) -> Iterator[Obstacle]:
    """Floats that an operation needs as a number, such as ``clamp(max=...)``: no symbol stands for them."""
    for name in symbols.floats:
        for group in _by_structure(modules):
            values = {path: value for path, module in group.items() if (value := number_at(module, name)) is not None}
            given = [observed[path].given(value) for path, value in values.items() if observed[path].inputs]
            shared = set.intersection(*given) if given else set()
            needing = sorted(each for each in shared if each.rstrip("_") not in TAKE_SYMBOLS)
            texts = [str(value) for value in dict.fromkeys(values.values())]
            if needing and len(texts) > 1:
                yield Obstacle(
                    region.cls.__name__,
                    f"{name} ({_abbreviate(texts)}) is given to {', '.join(needing)}, where the compiler needs a "
                    f"number and no symbol: one graph for each value, {len(texts)} in total; use one value, or a "
                    "tensor where that can be given",
                    certain=False,
                )


def _contents_differ(modules: Modules, observed: Seen) -> bool:
    """Whether dicts and objects of modules of one structure hold different values."""
    held: dict[Hashable, set[str]] = defaultdict(set)
    for name, module in modules.items():
        for key, attribute in _read(name, module, observed, configuration=False).items():
            if attribute.kind == "contents":
                held[structure(module), key].add(attribute.text)
    return any(len(texts) > 1 for texts in held.values())


def _read(name: str, module: nn.Module, observed: Seen, *, configuration: bool) -> dict[str, Attribute]:
    reads = observed[name].reads if name in observed else None
    return read_attributes(module, configuration=configuration, reads=reads, contents=True)


def _counted(graphs: int, at_least: bool) -> str:
    return f"at least {graphs}" if at_least else str(graphs)


def _abbreviate(items: Sequence[str], most: int = 4) -> str:
    return ", ".join(items[:most]) + (f", ... ({len(items)})" if len(items) > most else "")
