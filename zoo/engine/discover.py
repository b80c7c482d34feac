"""What can be compiled on its own, and what stands in its way."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from zoo.engine.lifted import lifted_in
from zoo.engine.observe import Observed, device_shares, observe_call
from zoo.engine.region import Region
from zoo.engine.signature import Attribute, forward_in_torch_nn, read_attributes, signature, structure


@dataclass(frozen=True)
class Obstacle:
    """Something that costs graphs or hides a region from the compiler, and what to do about it."""

    region: str
    message: str

    def __str__(self) -> str:
        return f"{self.region}: {self.message}"


@dataclass(frozen=True)
class FoundRegion:
    """One region of a model: its modules by signature.

    ``signatures`` holds a tuple of module names for each distinct signature, in model order; with inputs given, a
    module that meets several kinds of input stands in several of them. ``device_share`` is the region's part of the
    model's device time, 0 to 1, or None when it was not measured.
    """

    region: Region
    signatures: tuple[tuple[str, ...], ...]
    differences: tuple[str, ...] = ()
    device_share: float | None = None

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

    @property
    def graphs_needed(self) -> int:
        """Graphs of all regions together."""
        return sum(found.graphs_needed for found in self.regions)

    def __str__(self) -> str:
        origin = "declared" if self.declared else "given or discovered"
        lines = [f"{self.model}: {len(self.regions)} region class(es), {origin}; {self.graphs_needed} graph(s) needed"]
        for found in self.regions:
            share = "" if found.device_share is None else f", {found.device_share:.0%} of device time"
            lines.append(
                f"  {found.name}: {len(found.modules)} module(s), {found.graphs_needed} graph(s), "
                f"budget {found.budget}{share}"
            )
            lines += [f"    {len(names)} x {_abbreviate(names)}" for names in found.signatures]
            lines += [f"    differs: {difference}" for difference in found.differences]
        if self.obstacles:
            lines.append("  obstacles:")
            lines += [f"    - {obstacle}" for obstacle in self.obstacles]
        return "\n".join(lines)


def find_regions(
    model: nn.Module,
    regions: Sequence[Region | type[nn.Module]] | None = None,
    *,
    exclude: Sequence[type[nn.Module] | str] = (),
    inputs: Mapping[str, Any] | None = None,
) -> RegionReport:
    """Report which submodules can be compiled as regions, how many graphs they need and what stands in the way.

    Args:
        model: Any module, the zoo's or not.
        regions: Regions or classes to use. Left out, the model's own ``regions`` are taken, and for a model that
            declares none they are discovered: the outermost repeated classes whose copies share signatures.
        exclude: Classes, or exact module names, to leave out, with all that is inside of them.
        inputs: Keyword arguments of one call. With them the model runs once, eagerly and without gradients, so that
            layers that differ only in their inputs are told apart and attributes count only where a branch that was
            taken reads them; on a GPU each region's share of device time is measured as well.

    Raises:
        TypeError: If something that is not a module class is given as a region, or no list.
        ValueError: If a region matches nothing, is nested in another, has a ``forward`` that lives in ``torch.nn``, or
            parameters without a shape yet.
    """
    return report_on(model, resolve(model, regions, exclude), declared=declares(model, regions), inputs=inputs)


def declares(model: nn.Module, regions: Sequence[Region | type[nn.Module]] | None) -> bool:
    """Whether the regions are the model's own."""
    return regions is None and bool(declared_regions(model))


def declared_regions(model: nn.Module) -> Sequence[Region | type[nn.Module]]:
    """The ``regions`` of a model's class; none if it calls something else so."""
    regions = getattr(type(model), "regions", ())
    if not isinstance(regions, tuple | list):
        return ()
    is_region = all(
        isinstance(each, Region) or (isinstance(each, type) and issubclass(each, nn.Module)) for each in regions
    )
    return regions if is_region else ()


def report_on(
    model: nn.Module,
    chosen: Mapping[Region, Mapping[str, nn.Module]],
    *,
    declared: bool,
    inputs: Mapping[str, Any] | None = None,
) -> RegionReport:
    """The report of ``find_regions`` on regions that are resolved already."""
    observed: Mapping[str, Observed] = {}
    shares: dict[type[nn.Module], float] = {}
    if inputs is not None:
        observed = observe_call(model, chosen, inputs)
        shares = device_shares(model, chosen, inputs)
    found, obstacles = [], []
    for region, modules in chosen.items():
        groups: dict[Hashable, list[str]] = defaultdict(list)
        symbols = () if declared else lifted_in(modules.values()).names
        for name, module in modules.items():
            seen = observed.get(name)
            static = signature(module, reads=seen.reads if seen else None, without=symbols)
            for call in seen.inputs if seen else (None,):
                groups[static, call].append(name)
        obstacles += list(_obstacles(region, modules, observed, symbols))
        signatures = tuple(tuple(names) for names in groups.values())
        found.append(FoundRegion(region, signatures, tuple(_differences(modules, observed)), shares.get(region.cls)))
    return RegionReport(type(model).__name__, tuple(found), tuple(obstacles), declared)


def resolve(
    model: nn.Module,
    regions: Sequence[Region | type[nn.Module]] | None,
    exclude: Sequence[type[nn.Module] | str],
) -> dict[Region, dict[str, nn.Module]]:
    """Regions with their modules by name, checked: used by ``find_regions`` and ``compile_regions`` alike."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}, expected an nn.Module")
    if regions is None:
        given: Iterable[Region | type[nn.Module]] = declared_regions(model) or _discover(model)
    elif isinstance(regions, (str, type, Region)):
        raise TypeError(f"regions is {regions!r}, expected a list of module classes: regions=[...]")
    else:
        given = regions
    wanted = [item if isinstance(item, Region) else Region(item) for item in given]
    doubled = [cls.__name__ for cls, count in Counter(region.cls for region in wanted).items() if count > 1]
    if doubled:
        raise ValueError(f"region(s) {', '.join(doubled)} given more than once")
    if isinstance(exclude, (str, type)):
        raise TypeError(f"exclude is {exclude!r}, expected a list of classes and module names: exclude=[...]")
    names = dict(model.named_modules())
    for item in exclude:
        if isinstance(item, str) and item not in names:
            raise ValueError(f"exclude names {item!r}, but {type(model).__name__} has no such module")
    excluded = {id(part) for name, m in names.items() if name in exclude or type(m) in exclude for part in m.modules()}
    chosen: dict[Region, dict[str, nn.Module]] = {}
    for region in wanted:
        if region.cls in exclude:
            continue
        modules = {name: m for name, m in names.items() if type(m) is region.cls and id(m) not in excluded}
        if regions is None:
            modules.pop("", None)  # found for its parts
        if regions is None and not modules:
            # A configuration of a declared model need not have every kind of block.
            continue
        if not modules:
            relatives = sorted({type(m).__name__ for m in names.values() if isinstance(m, region.cls)})
            hint = f"; its subclasses {relatives} do not count, name them" if relatives else ""
            raise ValueError(f"region {region.cls.__name__} matches no module of {type(model).__name__}{hint}")
        chosen[region] = modules
    _refuse_nested(chosen)
    _refuse_lazy(chosen)
    return chosen


def _refuse_nested(chosen: Mapping[Region, Mapping[str, nn.Module]]) -> None:
    owner = {id(module): (name, region) for region, modules in chosen.items() for name, module in modules.items()}
    for region, modules in chosen.items():
        for name, module in modules.items():
            for inner_name, inner in module.named_modules():
                if inner is not module and id(inner) in owner:
                    inner_cls = owner[id(inner)][1].cls.__name__
                    raise ValueError(
                        f"region {inner_cls} ({name}.{inner_name}) is nested in region {region.cls.__name__} ({name}): "
                        "the outer one would compile it again; name one of the two"
                    )


def _refuse_lazy(chosen: Mapping[Region, Mapping[str, nn.Module]]) -> None:
    for region, modules in chosen.items():
        for name, module in modules.items():
            for tensor_name, tensor in (*module.named_parameters(), *module.named_buffers()):
                if is_lazy(tensor):
                    raise ValueError(
                        f"region {region.cls.__name__}: {name}.{tensor_name} has no shape before the first call; call "
                        "the model once on an example first"
                    )


def nothing_repeats(model: nn.Module) -> str:
    """Why no region is discovered in this model: for a message that goes on with what to do."""
    return "no module class occurs twice with weights of the same shapes, so there is no block to compile once"


def _discover(model: nn.Module) -> list[type[nn.Module]]:
    """The outermost repeated classes, at least two copies of which share a signature.

    Where no class repeats: those of torch.nn that do and are made of modules, such as ``nn.Sequential``. Else the
    classes that stand alone in a list, as of a block that the model calls again and again.
    """
    modules = dict(model.named_modules())
    signatures: dict[type[nn.Module], list[Hashable]] = defaultdict(list)
    for name, module in modules.items():
        if name and next(module.parameters(), None) is not None and not isinstance(module, _LISTS):
            signatures[type(module)].append(structure(module))
    repeated = {cls for cls, all_of_it in signatures.items() if len(set(all_of_it)) < len(all_of_it)}
    of_torch = {cls for cls in signatures if forward_in_torch_nn(cls)}
    made_of_modules = {type(module) for module in modules.values() if next(module.children(), None) is not None}
    alone = {type(module[0]) for module in modules.values() if isinstance(module, nn.ModuleList) and len(module) == 1}
    for candidates in (
        repeated - of_torch,
        repeated & of_torch & made_of_modules,
        (alone & set(signatures)) - of_torch,
    ):
        if candidates:
            return _outermost(model, candidates)
    return []


_LISTS = (nn.ModuleList, nn.ModuleDict)


def _outermost(model: nn.Module, candidates: set[type[nn.Module]]) -> list[type[nn.Module]]:
    found: list[type[nn.Module]] = []

    def walk(module: nn.Module) -> None:
        for child in module.children():
            if type(child) in candidates:
                if type(child) not in found:
                    found.append(type(child))
            else:
                walk(child)

    walk(model)
    # A class met on its own as well as inside another found class would be nested: the outer one wins.
    inside = {
        type(inner)
        for m in model.modules()
        if type(m) in found and m is not model
        for inner in m.modules()
        if inner is not m
    }
    return [cls for cls in found if cls not in inside]


def _obstacles(
    region: Region, modules: Mapping[str, nn.Module], observed: Mapping[str, Observed], symbols: Collection[str]
) -> Iterator[Obstacle]:
    cls = region.cls
    if "forward" not in vars(cls):
        owner = next(base for base in cls.__mro__ if "forward" in vars(base))
        yield Obstacle(
            cls.__name__,
            f"inherits forward from {owner.__name__}, and classes that share a forward share one recompile limit and "
            "one guard list; give it a forward of its own",
        )
    groups: dict[Hashable, dict[str, nn.Module]] = defaultdict(dict)
    for name, module in modules.items():
        groups[structure(module)][name] = module
    for group in groups.values():
        attributes = [_read(name, module, observed, configuration=False) for name, module in group.items()]
        for key in attributes[0]:
            if key in symbols:
                continue
            values = [attribute[key] for attribute in attributes if key in attribute and attribute[key].countable]
            if len(values) == len(group) > 1 and len(set(values)) == len(values):
                yield Obstacle(
                    cls.__name__,
                    f"forward reads {key}{'' if observed else ' (in some branch)'}, which differs in every layer "
                    f"({_abbreviate([str(v) for v in values])}): a graph a layer, {len(values)} in all; pass what it "
                    "selects as a tensor or hold it as a buffer",
                )
    for name in modules:
        if observed and not observed[name].inputs:
            yield Obstacle(cls.__name__, f"{name} was not called as a module: its forward is bypassed or not reached")


def _differences(modules: Mapping[str, nn.Module], observed: Mapping[str, Observed]) -> Iterator[str]:
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
    # Where tensors differ, so does the configuration of torch's own modules; it would only repeat them.
    attributes = [_read(name, module, observed, configuration=not different) for name, module in modules.items()]
    for key in dict.fromkeys(key for attribute in attributes for key in attribute):
        values = dict.fromkeys(str(attribute[key]) for attribute in attributes if key in attribute)
        if len(values) > 1:
            yield f"{key}: {_abbreviate(list(values))}"


def _read(
    name: str, module: nn.Module, observed: Mapping[str, Observed], *, configuration: bool
) -> dict[str, Attribute]:
    reads = observed[name].reads if name in observed else None
    return read_attributes(module, configuration=configuration, reads=reads)


def _abbreviate(items: Sequence[str], most: int = 4) -> str:
    return ", ".join(items[:most]) + (f", ... ({len(items)})" if len(items) > most else "")
