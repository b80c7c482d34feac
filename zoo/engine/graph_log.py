"""Every graph that a region compiled in this process, noted as Dynamo compiles it.

Dynamo's compile callbacks say when a compilation starts and ends; the Python stack at that moment says which module
was being called, from which model and with what. So a region is compiled exactly as ``module.compile()`` would do it,
with no wrapper in the way at run time.
"""

from __future__ import annotations

import linecache
import re
import sys
import time
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from zoo.engine.call import region_call
from zoo.engine.lifted import module_calls
from zoo.engine.signature import Attribute, input_kinds, mode, own_class, signature, structure


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One compilation of one region.

    ``graphs`` is what reached the backend (0: nothing was captured). ``inputs`` and ``model_inputs`` are kinds of
    input, hashable, and ``model_sizes`` how many sizes the model says that its regions are given in the call;
    ``seconds`` is the forward's compile time, a backward compiled later is an entry of its own with ``backward=True``
    and no graph. ``varied`` names the sizes and numbers of inputs that turned symbolic by it.
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
        """The signature without the attributes, its second part."""
        return self.signature[0]


class GraphLog:
    """Entries of the process, in order. There is one, ``GRAPH_LOG``; it listens from the first compiled region on."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.listeners: list[Callable[[Entry], None]] = []
        # module -> (model, the module's name in it)
        self._watched: WeakKeyDictionary[nn.Module, tuple[int, str]] = WeakKeyDictionary()
        self._roots: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
        # Compilations under way: the entry as it was when they started, graphs and seconds being where these began.
        self._open: dict[str, Entry] = {}
        self._next = 0

    def listen(self) -> None:
        """Register with Dynamo, once. Again after ``torch.compiler.reset()``, which forgets who listens.

        Before Dynamo is imported there is nothing to hear; whoever imports it calls this.
        """
        if "torch._dynamo" not in sys.modules:
            return
        from torch._dynamo.callback import callback_handler
        from torch._dynamo.utils import set_compilation_metrics_limit

        if self._start not in callback_handler.start_callbacks:
            callback_handler.register_start_callback(self._start)
            # Dynamo remembers 64 compilations otherwise, and of older ones no reason and no place of a break.
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
        """Stop watching a model, some of whose modules may have been taken out by now."""
        number = self._roots.pop(model, None)
        for module, (watched_for, _) in list(self._watched.items()):
            if watched_for == number:
                del self._watched[module]

    def of(self, model: int) -> list[Entry]:
        """Entries of one model, by the number that ``watch`` gave it."""
        return [entry for entry in self.entries if entry.model == model]

    def compiled(self, module: nn.Module, in_mode: str) -> bool:
        """Whether code for a module of this class and structure was compiled in this mode, by any model.

        Attributes are left out: those that the taken branch does not read cost no graph of their own. So is whether it
        trains: code that does not ask is run in both. So are buffers, which the call may have put others in place of.
        """
        buffers = {name for name, _ in module.named_buffers()}

        def alike(built: Any) -> Hashable:
            parts, tensors = built
            return parts, tuple(each for each in tensors if each[0] not in buffers)

        built, grad = alike(structure(module)), in_mode.partition(", ")[2]
        return any(e.graphs and e.mode.partition(", ")[2] == grad and alike(e.structure) == built for e in self.entries)

    def _start(self, args: Any) -> None:
        number, now, opened = args.compile_id, time.perf_counter(), None
        if args.callback_trigger.name == "DYNAMO":
            opened = self._entry(number, graphs=_unique_graphs(), seconds=now)
        elif args.callback_trigger.name == "LAZY_BACKWARD":
            forward = next((each for each in reversed(self.entries) if each.compile_id == number), None)
            opened = forward and replace(forward, graphs=0, seconds=now, backward=True)
        if opened is not None:
            self._open[number] = opened

    def note_loaded(self, file: str) -> None:
        """Note a graph that was loaded from a file, in the first call that it serves."""
        entry = self._entry(file, graphs=1, seconds=0.0)
        if entry is not None:
            self._add(entry)

    def _entry(self, number: str, graphs: int, seconds: float) -> Entry | None:
        """An entry for the watched module whose call is being compiled; None if there is none."""
        module: nn.Module | None = None
        call: Hashable = None
        root_call: Hashable = None
        sizes: int | None = None
        inside: set[nn.Module] = set()
        for frame in module_calls():
            called, args, kwargs = (frame[name] for name in ("self", "args", "kwargs"))
            # Only the innermost call counts: a helper compiled inside a region is not the region.
            if module is None and called not in self._watched:
                return None
            if module is None:
                module, call = called, input_kinds(args, kwargs)
                watched = self._watched[module][0]
                inside = {m for root, n in self._roots.items() if n == watched for m in root.modules()}
            if called in inside:
                # The outermost wins: a method of the model other than forward may be the way in.
                root_call = type(called), input_kinds(args, kwargs)
            if sizes is None and hasattr(called, "region_sizes"):
                sizes = _sizes(called, args, kwargs)
            if called in self._roots:
                break
        if module is None:
            return None
        model, name = self._watched[module]
        return Entry(
            compile_id=number, region=own_class(module), name=name, model=model, signature=signature(module),
            mode=mode(module), inputs=call, model_inputs=root_call, model_sizes=sizes or 1, graphs=graphs,
            seconds=seconds,
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
    """What the model says of its call, which a subclass may have given other arguments."""
    try:
        return int(model.region_sizes(*args, **kwargs))  # type: ignore[operator]
    except Exception:  # the compilation that is watched must not end by it
        return 1


def _unique_graphs() -> int:
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def place_of_break(compile_id: str) -> str:
    """Where the code broke off whose rest this compilation is of: file, line and code; empty for a whole forward."""
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
    """What Dynamo still remembers of a compilation, newest first; nothing of a graph that was loaded without it."""
    if "torch._dynamo" in sys.modules:
        from torch._dynamo.utils import get_compilation_metrics

        yield from (each for each in reversed(get_compilation_metrics()) if str(each.compile_id) == compile_id)


GRAPH_LOG = GraphLog()
