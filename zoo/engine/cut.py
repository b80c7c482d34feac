"""Choose the regions of a model that declares none."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass

from torch import nn
from torch.nn.modules.module import _forward_unimplemented
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList

from zoo.engine.signature import forward_in_torch_nn, own_class, own_structure

# Cost of a region's call, and of a layer that runs eagerly with the operations around it, in layers to compile.
_CALL = 1
_EAGER = 2
# A class is a region if it reduces the cost of its layers to at most this fraction of their eager cost.
_WORTHWHILE = 0.75
# And if it holds at least this fraction of the model's layers.
_SHARE = 0.01
# And, for a container class of torch, if its distinct blocks hold at most this fraction of its layers.
_DISTINCT = 0.82
# Attributes in which transformers and diffusers name their block classes.
_MARKS = ("_no_split_modules", "_repeated_blocks")


@dataclass
class _Part:
    """A module: its kind (equal for copies of one structure), layers in each call of it, and modules directly in it."""

    name: str
    module: nn.Module
    cls: type[nn.Module]
    kind: int
    own_layer: int
    calls: int
    layers: float
    children: list[_Part]


class Cut:
    """The classes of a model to compile as regions, chosen for the least cost of compiling and calling them.

    The cost is the number of layers in each distinct block, plus one for each call of a region, plus two for each layer
    outside of all regions. A layer is a module with a weight of two or more dimensions, except an embedding. A class is
    a candidate if two of its copies have the same structure, or if one is called twice; it is taken or left as a whole.
    If no candidate is taken, classes of ``torch.nn`` that contain modules, such as ``nn.Sequential``, are candidates
    unless their copies mostly differ. If nothing repeats, a class that is alone in an ``nn.ModuleList`` is taken, since
    the model may call that block several times.
    ``calls``: how often one call of the model calls each module; by default, as often as its list holds it.
    """

    def __init__(self, model: nn.Module, calls: Mapping[nn.Module, int] | None = None) -> None:
        self._calls = calls or {}
        self._kinds: dict[Hashable, int] = {}
        self._seen: set[int] = set()
        self._root = self._part("", model, 1)
        copies: dict[type[nn.Module], list[_Part]] = defaultdict(list)
        for part in _outermost(self._root):
            if part.layers and _is_called(part.cls):
                copies[part.cls].append(part)
        of_torch = {cls for cls in copies if forward_in_torch_nn(cls)}
        made_of_modules = {cls for cls, parts in copies.items() if any(part.children for part in parts)}
        # Class names that the model's library marks as its blocks: a module that holds several of one is no block.
        lists = (getattr(module, mark, None) for module in model.modules() for mark in _MARKS)
        marked = {name for marks in lists if isinstance(marks, list | tuple | set) for name in marks}
        self.repeated: list[type[nn.Module]] = []
        self.classes: list[type[nn.Module]] = []
        for considered in (copies.keys() - of_torch, of_torch & made_of_modules):
            candidates = [
                cls
                for cls, parts in copies.items()
                if cls in considered
                and len({part.kind for part in parts}) < sum(part.calls for part in parts)
                and (cls.__name__ in marked or not any(_repeated(part) & marked for part in parts))
            ]
            # A class that occurs only inside the library's own blocks is no candidate if these repeat.
            blocks = {cls for cls in candidates if cls.__name__ in marked and any(p.layers > 1 for p in copies[cls])}
            free = {part.cls for part in _outermost(self._root, blocks)}
            candidates = [cls for cls in candidates if cls in free]
            self.repeated += candidates
            # From the innermost outwards: a class is taken in place of what it holds.
            self._choose(sorted(candidates, key=lambda cls: max(part.layers for part in copies[cls])))
            if self.classes:
                return
        if not self.repeated:
            alone = {type(each[0]) for each in model.modules() if isinstance(each, nn.ModuleList) and len(each) == 1}
            self.classes = [cls for cls in copies if cls in alone - of_torch]

    def _choose(self, candidates: list[type[nn.Module]]) -> None:
        """Add classes as long as the cost falls, then drop those that no longer pay."""
        added = True
        while added:
            added = False
            for cls in candidates:
                if cls not in self.classes and self._cost([*self.classes, cls]) < self._cost(self.classes):
                    self.classes.append(cls)
                    added = True
        # A class may not pay any more once others contain most of its copies.
        for cls in reversed(self.classes):
            rest = [other for other in self.classes if other is not cls]
            if not self._worthwhile(cls) or self._cost(rest) <= self._cost(self.classes):
                self.classes = rest

    def regions(self) -> dict[type[nn.Module], dict[str, nn.Module]]:
        """The modules to compile, by class and name: those of the classes that are inside no other one."""
        found: dict[type[nn.Module], dict[str, nn.Module]] = {}
        for part in _outermost(self._root, self.classes):
            if part.cls in self.classes:
                found.setdefault(part.cls, {})[part.name] = part.module
        return found

    def _worthwhile(self, cls: type[nn.Module]) -> bool:
        parts = [part for part in _outermost(self._root, self.classes) if part.cls is cls]
        kinds = {part.kind: part.layers for part in parts}
        layers, calls = sum(part.layers * part.calls for part in parts), sum(part.calls for part in parts)
        compiled = sum(kinds.values())
        repeats = len(kinds) < calls and (compiled <= _DISTINCT * layers or not forward_in_torch_nn(cls))
        pays = compiled + _CALL * calls <= _WORTHWHILE * _EAGER * layers
        return repeats and pays and layers >= _SHARE * self._root.layers

    def _cost(self, classes: list[type[nn.Module]]) -> float:
        parts = [*_outermost(self._root, classes)]
        compiled = {part.kind: part.layers for part in parts if part.cls in classes}
        run = sum(part.calls * (_CALL if part.cls in classes else _EAGER * part.own_layer) for part in parts)
        return sum(compiled.values()) + run

    def _part(self, name: str, module: nn.Module, calls: int) -> _Part:
        self._seen.add(id(module))
        children = []
        times = Counter(map(id, module._modules.values()))
        for child_name, child in module.named_children():
            # Blocks may share a module without weights, such as an activation, and be copies all the same.
            shareable = next(child.parameters(), None) is None and next(child.children(), None) is None
            if shareable or id(child) not in self._seen:
                path = f"{name}.{child_name}" if name else child_name
                children.append(self._part(path, child, self._calls.get(child) or calls * times[id(child)]))
        built = own_structure(module), tuple((part.name[len(name) :], part.kind) for part in children)
        weights = module.parameters(recurse=False)
        matrix = any(is_lazy(weight) or sum(size > 1 for size in weight.shape) > 1 for weight in weights)
        own = int(matrix and not isinstance(module, nn.Embedding))
        kind = self._kinds.setdefault(built, len(self._kinds))
        layers = own + sum(part.layers * part.calls for part in children) / calls
        return _Part(name, module, own_class(module), kind, own, calls, layers, children)


def _is_called(cls: type[nn.Module]) -> bool:
    """Whether modules of a class run a ``forward`` that can be compiled: not containers, nor what is scripted."""
    return getattr(cls, "forward", None) not in (None, _forward_unimplemented) and cls is not ParametrizationList


def _outermost(part: _Part, classes: Collection[type[nn.Module]] = ()) -> Iterator[_Part]:
    """Modules inside a module, in order, down to those of the classes."""
    for child in part.children:
        yield child
        if child.cls not in classes:
            yield from _outermost(child, classes)


def _repeated(part: _Part) -> set[str]:
    """Names of the classes with several layers of which a module contains more than one."""
    counts = Counter(inner.cls.__name__ for inner in _outermost(part) if inner.layers > 1)
    return {name for name, count in counts.items() if count > 1}
