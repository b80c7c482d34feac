"""Every graph that a region compiled in this process, noted as Dynamo compiles it.

Dynamo's callbacks report when a compilation starts and ends; the Python stack at that moment shows which module is
called, by which model and with which arguments. A region compiles as by ``module.compile()``, without a wrapper.
"""

from __future__ import annotations

import linecache
import re
import sys
import time
import types
import warnings
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from zoo.engine.call import RegionCall, RegionWarning, region_call
from zoo.engine.lifted import module_calls
from zoo.engine.signature import Attribute, input_kinds, mode, own_class, signature, structure


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One compilation of one region.

    ``graphs`` counts graphs that reached the backend; 0 if Dynamo captured none. ``inputs`` and ``model_inputs`` are
    the hashable kinds of input of the region and of the model; ``model_sizes`` is the result of ``region_sizes`` of the
    model. ``seconds`` is the forward's compile time; a backward compiled later has its own entry, with
    ``backward=True`` and no graph. ``varied`` names the inputs' sizes and numbers that it made symbolic.
    """

    compile_id: str
    region: type[nn.Module]
    name: str
    model: int
    signature: tuple[Hashable, tuple[tuple[str, Attribute], ...]]
    mode: str
    inputs: Hashable
    model_inputs: Hashable
    model_sizes: int
    graphs: int
    seconds: float
    backward: bool = False
    varied: frozenset[str] = frozenset()

    @property
    def key(self) -> Hashable:
        """The same key compiled twice is a recompile."""
        return self.region, self.signature, self.mode, self.inputs

    @property
    def structure(self) -> Hashable:
        """The first part of the signature; the second is its attributes."""
        return self.signature[0]


class GraphLog:
    """Entries of the process, in order. There is one, ``GRAPH_LOG``; it listens from the first compiled region on."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.listeners: list[Callable[[Entry], None]] = []
        # module -> (model, the module's name in it)
        self._watched: WeakKeyDictionary[nn.Module, tuple[int, str]] = WeakKeyDictionary()
        self._roots: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
        # Compilations in progress; ``graphs`` and ``seconds`` hold the counter and the clock at the start.
        self._open: dict[str, Entry] = {}
        self._next = 0
        self._told: set[int] = set()  # numbers of models that torch.compile was seen to compile too

    def listen(self) -> None:
        """Register with Dynamo, once; and again after ``torch.compiler.reset()``, which drops all callbacks.

        Before Dynamo is imported this does nothing; code that imports Dynamo calls it.
        """
        if "torch._dynamo" not in sys.modules:
            return
        from torch._dynamo.callback import callback_handler
        from torch._dynamo.utils import set_compilation_metrics_limit

        if self._start not in callback_handler.start_callbacks:
            callback_handler.register_start_callback(self._start)
            # Dynamo's default is 64 compilations; the reasons and graph breaks of older ones would be lost.
            set_compilation_metrics_limit(4096)
        if self._end not in callback_handler.end_callbacks:
            callback_handler.register_end_callback(self._end)

    def watch(self, model: nn.Module, modules: dict[str, nn.Module]) -> int:
        """Note compilations of these modules from now on, under a number that stands for the model."""
        self._next += 1
        self._roots[model] = self._next
        for name, module in modules.items():
            self._watched[module] = (self._next, name)
        return self._next

    def forget(self, model: nn.Module) -> None:
        """Stop watching a model and its modules, also those that were removed from it since."""
        number = self._roots.pop(model, None)
        for module, (watched_for, _) in list(self._watched.items()):
            if watched_for == number:
                del self._watched[module]

    def of(self, model: int) -> list[Entry]:
        """Entries of one model, by the number that ``watch`` gave it."""
        return [entry for entry in self.entries if entry.model == model]

    def compiled(self, module: nn.Module, in_mode: str) -> bool:
        """Whether code for a module of this class and structure was compiled in this mode, by any model.

        The comparison ignores attributes (one that the code does not read costs no graph), training or eval mode (code
        that does not read it serves both) and buffers (the call may have replaced them).
        """
        buffers = {name for name, _ in module.named_buffers()}

        def alike(built: Any) -> Hashable:
            parts, tensors = built
            return parts, tuple(each for each in tensors if each[0] not in buffers)

        built, grad = alike(structure(module)), in_mode.partition(", ")[2]
        return any(e.graphs and e.mode.partition(", ")[2] == grad and alike(e.structure) == built for e in self.entries)

    def _start(self, args: Any) -> None:
        compile_id, now, opened = args.compile_id, time.perf_counter(), None
        if args.callback_trigger.name == "DYNAMO":
            opened = self._entry(compile_id, graphs=_unique_graphs(), seconds=now)
            self._warn_of_another_compiler()
        elif args.callback_trigger.name == "LAZY_BACKWARD":
            forward = next((each for each in reversed(self.entries) if each.compile_id == compile_id), None)
            opened = forward and replace(forward, graphs=0, seconds=now, backward=True)
        if opened is not None:
            self._open[compile_id] = opened

    def _warn_of_another_compiler(self) -> None:
        """Warn once for a model if torch.compile compiles it, or a region of it, in place of the regions' own call."""
        frame: types.FrameType | None = sys._getframe(1)
        running = set()
        while frame is not None and frame.f_code is not nn.Module._wrapped_call_impl.__code__:
            running.add(frame.f_code)
            frame = frame.f_back
        if frame is None or RegionCall._by_dynamo.__code__ in running:
            return
        module = frame.f_locals["self"]
        module = getattr(module, "_orig_mod", module)
        number, name = self._watched.get(module) or (self._roots.get(module), "the model")
        # Code that a running forward calls may be compiled by itself.
        if number is None or number in self._told or getattr(type(module).forward, "__code__", None) in running:
            return
        self._told.add(number)
        model = next(type(root).__name__ for root, known in self._roots.items() if known == number)
        message = (
            f"{model}: torch.compile, or a helper that calls it, compiles {name}, and the regions of "
            "zoo.compile_regions do not run there: use one of the two; zoo.uncompile(model) removes the regions"
        )
        warnings.warn(message, RegionWarning, stacklevel=2)

    def note_loaded(self, file: str) -> None:
        """Note a graph that was loaded from a file, in the first call that it serves."""
        entry = self._entry(file, graphs=1, seconds=0.0)
        if entry is not None:
            self._add(entry)

    def _entry(self, compile_id: str, graphs: int, seconds: float) -> Entry | None:
        """An entry for the watched module whose call is being compiled; None if there is none."""
        calls: list[tuple[nn.Module, Any, Any]] = []
        for frame in module_calls():
            calls.append((frame["self"], frame["args"], frame["kwargs"]))
            # Only the innermost call counts: a helper compiled inside a region is not the region.
            if calls[0][0] not in self._watched:
                return None
            if frame["self"] in self._roots:
                break
        if not calls:
            return None
        module, *inputs = calls[0]
        model, name = self._watched[module]
        if self._roots.get(calls[-1][0]) != model:
            # The call came through another method than forward: the outermost called module stands for the model.
            inside = {part for root, number in self._roots.items() if number == model for part in root.modules()}
            calls = [each for each in calls if each[0] in inside]
        root_call = (type(calls[-1][0]), input_kinds(*calls[-1][1:])) if calls else None
        sizes = next((_sizes(*each) for each in calls if hasattr(each[0], "region_sizes")), 1)
        return Entry(
            compile_id=compile_id, region=own_class(module), name=name, model=model, signature=signature(module),
            mode=mode(module), inputs=input_kinds(*inputs), model_inputs=root_call,
            model_sizes=sizes or 1, graphs=graphs, seconds=seconds,
        )  # fmt: skip

    def _end(self, args: Any) -> None:
        if (opened := self._open.pop(args.compile_id, None)) is None:
            return
        ended = replace(opened, seconds=time.perf_counter() - opened.seconds)
        if not opened.backward:
            module = next((each for each, known in self._watched.items() if known == (opened.model, opened.name)), None)
            call = None if module is None else region_call(module)
            varied = call.newly_varied() if call is not None else frozenset()
            ended = replace(ended, graphs=_unique_graphs() - opened.graphs, varied=varied)
        self._add(ended)

    def _add(self, entry: Entry) -> None:
        self.entries.append(entry)
        for listener in list(self.listeners):
            listener(entry)


def _sizes(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """The model's ``region_sizes`` for this call; 1 if it fails, as where a subclass takes other arguments."""
    try:
        return int(model.region_sizes(*args, **kwargs))  # type: ignore[operator]
    except Exception:  # an error here must not end the compilation
        return 1


def _unique_graphs() -> int:
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def place_of_break(compile_id: str) -> str:
    """The graph break after which this compilation resumes: file, line and code; empty for a whole forward."""
    metrics = next(_metrics(compile_id), None)
    rest, _, line = str(metrics and metrics.co_name).rpartition("_at_")
    if metrics is None or not rest.startswith("torch_dynamo_resume_in"):
        return ""
    number = int(line.partition("_")[0])
    return f"{metrics.co_filename}:{number} ({linecache.getline(str(metrics.co_filename), number).strip()})"


def recompile_reason(compile_id: str) -> str | None:
    """Dynamo's own words on why this compilation was needed, if it still remembers."""
    found = next((str(each.recompile_reason) for each in _metrics(compile_id) if each.recompile_reason), None)
    return found and re.sub(r" \(_dynamo/\S+ in \w+\)", "", found)  # the compiler's own line


def _metrics(compile_id: str) -> Iterator[Any]:
    """Dynamo's metrics of a compilation, newest first; none for a graph that was loaded without Dynamo."""
    if "torch._dynamo" in sys.modules:
        from torch._dynamo.utils import get_compilation_metrics

        yield from (each for each in reversed(get_compilation_metrics()) if str(each.compile_id) == compile_id)


GRAPH_LOG = GraphLog()
