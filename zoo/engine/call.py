"""The call of a compiled region.

Dynamo compiles a region, guards the code and shares it between copies of the class. At run time its lookup of that
code costs the host more than the guards do: it enters frame evaluation and tries every entry of the class in turn.
Here each module keeps the entries that served it. A later call checks all guards of such an entry and runs its code. A
call that passes no entry's guards goes to Dynamo, as without this module.
"""

from __future__ import annotations

import functools
import inspect
import os
import re
import sys
import threading
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch.fx._symbolic_trace import is_fx_symbolic_tracing
from torch.nn.modules import module as torch_module

from zoo.engine.autograd import transformed
from zoo.engine.compat import configured, full_guards, only_compiling
from zoo.engine.lifted import Lifted, as_given, carry_marks, carry_writes, own_items, without_base
from zoo.engine.signature import forward_in_torch_nn, input_kinds, own_class
from zoo.engine.traced import note_guards, traced_of, tracing

Call = TypeVar("Call")


class RegionWarning(UserWarning):
    """Something about a model, or the way it is called, will cost graphs or speed."""


# Warnings about a compilation, issued after it: a filter may turn them into errors, which must not end a compilation.
NOTICES: list[str] = []


class RegionError(RuntimeError):
    """A region cannot be compiled. The message names the module, the line of its code and the remedies."""


class _NoSymbol(Exception):
    """Dynamo cannot trace a region with its lifted numbers and sizes as symbols; the message is Dynamo's."""


# After this many calls that left no reusable entry, a module keeps no more entries: if every call changes an attribute
# that the guards read, no entry passes in the next call.
_MOST_MISSES = 8
# Shapes of its inputs whose entries a module keeps; the oldest is forgotten first, and found again by Dynamo.
_MOST_SHAPES = 256
# Dynamo's configuration is global to the process: a second thread would undo what the first one had set.
_patching = threading.RLock()
_TORCH = os.path.dirname(torch.__file__) + os.sep
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class RegionCall:
    """What ``module(...)`` runs once ``module``, called ``name`` in messages, is compiled as a region.

    ``fullgraph`` and ``dynamic`` are arguments of ``torch.compile``; ``options`` returns its other arguments at the
    first compilation. A region that may break runs in several frames, so Dynamo runs all its calls. ``lifted`` names
    the numbers that are symbols of the graph; it is None for a declared region. With ``lifted``, ``dynamic=None``
    learns which sizes vary from this module's own calls.
    """

    def __init__(
        self, module: nn.Module, *, name: str = "", fullgraph: bool, dynamic: bool | None = False,
        lifted: Lifted | None = None, options: Callable[[], dict[str, Any]],
    ) -> None:  # fmt: skip
        self.module = module
        self._name = name
        self._options = options
        self._lifted = lifted
        self._learns_sizes = dynamic is None
        self._sizes = lifted.new_sizes() if lifted else None
        self._own_index = lifted.own_index(module) if lifted else None
        self._varied: frozenset[str] = frozenset()
        if lifted and dynamic is False:
            dynamic = None  # False would make floats constants; sizes stay static, since each compilation forgets them
        self._class, self._class_forward = own_class(module), type(module).forward
        self.forward = self._class_forward
        self._fullgraph, self._dynamic = fullgraph, dynamic
        if forward_in_torch_nn(self._class):
            self.forward = _forward_of_ours(self._class)  # type: ignore[arg-type]
        # Shapes of positional tensors -> guards, function and origin (see ``add_entry``) of each entry, in all modes.
        self.entries: dict[Any, list[tuple[Any, Callable[..., Any], Any]]] = {}
        self.idle_watch: IdleWatch | None = None
        self._thread = threading.local()
        # How many threads run the hooks around this module's forward.
        self._in_hooks_now, self._counting = 0, threading.Lock()
        # Callbacks of enforce_budget, which get the module after each call.
        self.on_call: list[Callable[[nn.Module], None]] = []
        self._code: Any = getattr(self.forward, "__code__", None)
        self._misses = 0 if fullgraph and self._code is not None else _MOST_MISSES
        # Whether the last call that Dynamo ran compiled nothing.
        self._settled = False
        if self._code is not None:
            parameters = inspect.signature(self.forward, follow_wrapped=False).parameters.values()
            self._names = [each.name for each in parameters if each.kind <= each.POSITIONAL_OR_KEYWORD]
            self._known = {each.name for each in parameters}
            self._rest = {each.kind: each.name for each in parameters if each.kind in _VARIADIC}
            self._cells = list(zip(self._code.co_freevars, self.forward.__closure__ or (), strict=True))
            self._defaults = {each.name: each.default for each in parameters if each.default is not each.empty}
            self._default_values = self.forward.__defaults__

    @functools.cached_property
    def compiled(self) -> Any:
        """The result of ``torch.compile``, made when needed: it imports Dynamo, seconds that a loaded graph saves."""
        own = self.forward is not self._class_forward
        return self._compiled_forward if own else self._compile(self.module._call_impl)

    @functools.cached_property
    def _compiled_forward(self) -> Any:
        return self._compile(types.MethodType(self.forward, self.module))

    def _compile(self, run: Callable[..., Any]) -> Any:
        how = dict(self._options())
        of_library = in_library(self.forward.__globals__)
        filtering = _worth_guarding_in_library if of_library else _worth_guarding
        how["options"] = {"guard_filter_fn": filtering, **(how.get("options") or {})}
        return torch.compile(run, fullgraph=self._fullgraph, dynamic=self._dynamic, **how)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run compiled code on the arguments of ``module.forward``."""
        module = self.module
        if torch.compiler.is_dynamo_compiling():
            return module._call_impl(*args, **kwargs)  # part of a larger graph
        if torch._C._len_torch_dispatch_stack() or transformed():
            # Eager where a mode sees each operator (FLOP counters, fake tensors); and in torch.func and forward mode,
            # where Dynamo compiles nothing and its code has no tangents.
            return self._eagerly(args, kwargs)
        # FSDP2 replaces the class. Read here, since every call would pay for a function that reads it.
        hooks = module._forward_hooks or module._forward_pre_hooks or type(module) is not self._class
        if (hooks or module._backward_hooks or module._backward_pre_hooks) and self._has_hooks(module):
            return self._inside_hooks(module, args, kwargs)
        lifted = self._lifted
        try:
            if self._own_index is None or lifted is None:
                result = self._run(module, args, kwargs)
            else:
                positional = dict(enumerate(args))
                with own_items(self._own_index, lifted.items, positional, kwargs) as swapped:
                    result = as_given(self._run(module, tuple(positional.values()), kwargs), swapped)
        except _NoSymbol as reason:
            # Some operations take a number, but no symbol.
            before = self._lifted, self._sizes, self._own_index, self._learns_sizes, self._varied
            self._lifted, self._sizes, self._own_index, self._learns_sizes = Lifted(), None, None, False
            self._varied = frozenset()
            try:
                result = self._run(module, args, kwargs)
            except Exception:  # symbols were not the reason
                self._lifted, self._sizes, self._own_index, self._learns_sizes, self._varied = before
                raise
            self._warn_once(
                lifted,
                f"numbers that differ from block to block, or sizes that vary, cannot be symbols ({reason}): one graph "
                "for each of their values",
            )
        for note in self.on_call:
            note(module)
        return result

    @property
    def _in_hooks(self) -> bool:
        """Whether this thread is inside the hooks around the module's forward."""
        return getattr(self._thread, "in_hooks", False)

    def _has_hooks(self, module: nn.Module) -> bool:
        """Whether hooks, the user's or those of FSDP2, are still to run around the forward."""
        hooks = _hooks_of(module) or own_class(module) is not type(module)
        own = self.forward is self._class_forward and not _has_forward(module)
        return bool(hooks and not self._in_hooks and own)

    def _inside_hooks(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run hooks eagerly around the compiled forward: FSDP2's must gather weights before it and free them after."""
        with self._counting:
            self._in_hooks_now += 1
            module.__dict__["forward"] = self._forward_in_hooks
        try:
            return module._call_impl(*args, **kwargs)
        finally:
            with self._counting:
                self._in_hooks_now -= 1
                if not self._in_hooks_now:
                    module.__dict__.pop("forward", None)

    def _eagerly(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the module uncompiled; if its hooks already run, only its forward."""
        if self._in_hooks:
            return self._class_forward(self.module, *args, **kwargs)
        return self.module._call_impl(*args, **kwargs)

    def _forward_in_hooks(self, *args: Any, **kwargs: Any) -> Any:
        self._thread.in_hooks = True
        try:
            return self(*args, **kwargs)
        finally:
            self._thread.in_hooks = False

    def _run(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            entries = self.entries.get(_shapes(args)) if self.entries else None
        except RuntimeError as error:  # a nested tensor has no shape, and Dynamo's guards would end the process
            raise RegionError(self._cannot_compile(error)) from error
        if entries is not None and not self._needs_dynamo(module):
            arguments = self._bind(module, args, kwargs)
            for guards, run, _ in entries:
                # Dynamo clears ``cache_entry`` when it drops an entry: after a reset, or if a guarded object was freed.
                if guards.cache_entry is not None and guards.check(arguments):
                    result = run(module, *args, **kwargs)
                    if self.idle_watch is not None:
                        self.idle_watch.note()
                    return result
        return self._by_dynamo(module, args, kwargs)

    def _by_dynamo(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch._C._get_tracing_state() is not None or is_fx_symbolic_tracing():
            # Eager, as in ``__call__``. It is enough to ask here: in a trace no guard of a tensor passes.
            return self._eagerly(args, kwargs)
        from torch._dynamo import config

        # Guard the hooks inside a region, which Dynamo skips by default. Code that records its overhead looks for a
        # profiler five times in each call.
        how = configured(config, skip_nnmodule_hook_guards=False, record_runtime_overhead=False, **full_guards())
        with _patching, how, tracing(), only_compiling():
            keeps = self._misses < _MOST_MISSES and not self._needs_dynamo(module)
            # Before the call, which may change what guards read, such as a cache that it writes to.
            entry, known = self._entry(module, args, kwargs) if keeps else (None, [])
            result = self._compile_and_run(args, kwargs)
            if keeps:
                self._settled = False  # an entry serves the next call, or Dynamo compiles
                self._keep(module, args, kwargs, entry, known)
        while NOTICES:
            warnings.warn(NOTICES.pop(), RegionWarning, stacklevel=2)
        return result

    def _compile_and_run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        from torch._dynamo.exc import TorchDynamoException, TorchRuntimeError
        from torch.fx.experimental.symbolic_shapes import ConstraintViolationError

        try:
            return self._with_symbols(args, kwargs)
        except TorchRuntimeError:
            raise  # an error of the model's own, with its line
        except TorchDynamoException as error:
            if self._lifted is None or not (self._lifted.names or self._varied or self.newly_varied()):
                if str(error).startswith(("Observed exception", "Data-dependent assertion failed")):
                    self._eagerly(args, kwargs)  # raises the model's own error, with its message
                raise RegionError(self._cannot_compile(error)) from error
            raise _NoSymbol(_reason(error)) from error
        except ConstraintViolationError as error:
            static = "keep its sizes static, with no mark_dynamic and dynamic=False"
            raise RegionError(f"{self._cannot_compile(error)}, or {static}") from error

    def _with_symbols(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run with symbols for what varies, and warn when sizes turn symbolic."""
        from torch._dynamo.utils import counters

        lifted, compiled = self._lifted, self._compiled_forward if self._in_hooks else self.compiled
        if lifted is None:
            return compiled(*args, **kwargs)
        if self._sizes is None or (self._sizes and not self._learns_sizes):
            self._sizes = lifted.new_sizes()
        elif not self._sizes and self._learns_sizes and (self.module.training or not self._settled):
            self._sizes = lifted.sizes_for(self.module)
            self._varied |= self.newly_varied()
        static, views = False, (*args, *kwargs.values())
        if self._learns_sizes or self._dynamic:
            args = tuple(map(without_base, args))
            kwargs = {name: without_base(value) for name, value in kwargs.items()}
        if self._learns_sizes and not self._settled:
            static = carry_marks(self.module, args, kwargs)
            if self._code is not None:
                lifted.note_numbers(self.module, input_kinds((), self._bind(self.module, args, kwargs)))
        first, settled, frames = not self._sizes, self._settled, counters["frames"]["total"]
        with lifted.as_symbols(self._sizes):
            result = compiled(*args, **kwargs)
        owns = [*args, *kwargs.values()]
        carry_writes(views, owns)
        result = as_given(result, [pair for pair in zip(owns, views, strict=True) if pair[0] is not pair[1]])
        self._settled = counters["frames"]["total"] == frames
        if not (settled and self._settled) and (new := self.newly_varied()):
            self._varied |= new
            if not first and not static:  # a caller who marks sizes expects it
                self._warn_once(
                    lifted,
                    f"{', '.join(sorted(new)[:4])} differed between two calls and became symbolic, one graph for all "
                    "values; dynamic=False compiles one for each",
                )
        return result

    def _warn_once(self, lifted: Lifted | None, message: str) -> None:
        if lifted is not None and not lifted.told:
            lifted.told = True
            warnings.warn(f"{self._name} ({type(self.module).__name__}): {message}", RegionWarning, stacklevel=7)

    def newly_varied(self) -> frozenset[str]:
        """Sizes and numbers of inputs, in words, that turned symbolic since the last call that Dynamo ran."""
        if self._lifted is None or self._sizes is None:
            return frozenset()
        owner = self._code.co_varnames[0] if self._code is not None else "self"
        return self._lifted.varied(self._sizes, owner) - self._varied

    def _cannot_compile(self, error: Exception) -> str:
        """A message with the module, Dynamo's reason, the line of code and the remedies."""
        cls = own_class(self.module).__name__
        leave = "zoo.uncompile(model)"
        if self._name:
            leave = f"exclude=[{cls}], or {leave} if no other region is left"
        remedy = f"Leave it eager, {leave}, or let its graph break, regions=[zoo.Region({cls}, fullgraph=False), ...]"
        cause = getattr(error, "inner_exception", None)  # of the backend, perhaps by a fault of the machine
        if type(cause).__name__ == "InvalidCxxCompiler":
            remedy = "Install a C++ compiler such as g++, or name one in the environment's CXX"
        elif isinstance(cause, OSError) and not isinstance(cause, TimeoutError):
            remedy = "The compiler writes to TORCHINDUCTOR_CACHE_DIR and TRITON_CACHE_DIR: name writable folders"
        if "NestedTensor" in str(error):
            remedy = "nn.TransformerEncoder makes no nested tensors once its use_nested_tensor is False"
        frames = getattr(error, "real_stack", None) or []
        remedy += outside_of_hooks(self.module, self._name, "".join(f" in {frame.name}" for frame in frames))
        return f"{self._name or 'the model itself'} ({cls}) cannot be compiled as one graph: {_reason(error)}. {remedy}"

    def _entry(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, list[Any]]:
        """The first entry in Dynamo's cache whose guards pass, and the compile ids of all entries."""
        from torch._dynamo.eval_frame import _debug_get_cache_entry_list

        entries, arguments = _debug_get_cache_entry_list(self._code), self._bind(module, args, kwargs)
        passing = (e for e in entries if e.guard_manager.cache_entry is not None and e.guard_manager.check(arguments))
        return next(passing, None), [each.compile_id for each in entries]

    def _keep(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], entry: Any, known: Any) -> None:
        """Keep the entry that served a call: one whose guards passed before it, or the one compiled in it."""
        from torch._dynamo.eval_frame import _debug_get_cache_entry_list

        new = [each for each in _debug_get_cache_entry_list(self._code) if each.compile_id not in known]
        if entry is None or new:  # if Dynamo compiled, the entry that passed belongs to another backend and did not run
            entry = new[0] if len(new) == 1 else None
            guards = entry and entry.guard_manager
            if guards is None or guards.cache_entry is None or not guards.check(self._bind(module, args, kwargs)):
                self._misses += 1
        if entry is not None and entry.guard_manager.cache_entry is not None:
            self.add_entry(_shapes(args), entry.guard_manager, entry.code, self.forward.__globals__, traced_of(entry))

    def add_entry(self, shapes: Any, guards: Any, code: types.CodeType, space: dict[str, Any], origin: Any) -> None:
        """Run ``code`` in calls of these shapes whose guards pass; ``origin`` is its trace or saved file, or None."""
        f = self.forward
        run = types.FunctionType(code, space, f.__name__, f.__defaults__, f.__closure__)
        run.__kwdefaults__ = f.__kwdefaults__
        kept = self.entries.setdefault(shapes, [])
        if len(self.entries) > _MOST_SHAPES:
            del self.entries[next(iter(self.entries))]
        kept[:] = [each for each in kept if each[0].cache_entry is not None]
        kept.append((guards, run, origin))

    def _bind(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Arguments by name, as guards look them up. Arguments that misfit the signature raise later, in the call."""
        given = (module, *args)
        bound = {**self._defaults, **dict(zip(self._names, given, strict=False)), **kwargs}
        for name, cell in self._cells:
            bound[name] = cell.cell_contents
        for kind, name in self._rest.items():
            if kind is inspect.Parameter.VAR_POSITIONAL:
                bound[name] = given[len(self._names) :]
            else:
                bound[name] = {key: value for key, value in kwargs.items() if key not in self._known}
        return bound

    def _needs_dynamo(self, module: nn.Module) -> bool:
        """Whether something that guards do not see changes what a call runs: hooks, another forward, a stance."""
        return bool(
            (self.forward is not self._class_forward and _hooks_of(module))
            or torch_module._global_forward_hooks
            or torch_module._global_forward_pre_hooks
            or torch_module._global_backward_hooks
            or torch_module._global_backward_pre_hooks
            or ("forward" in module.__dict__ and _has_forward(module))
            or type(module).forward is not self._class_forward
            or self.forward.__defaults__ is not self._default_values
            or has_stance()
        )


def _has_forward(module: nn.Module) -> bool:
    """Whether a module has a ``forward`` of its own, other than the temporary one of ``_inside_hooks``."""
    forward = module.__dict__.get("forward")
    return forward is not None and getattr(forward, "__func__", None) is not RegionCall._forward_in_hooks


def _hooks_of(module: nn.Module) -> Any:
    forward = module._forward_hooks or module._forward_pre_hooks
    return forward or module._backward_hooks or module._backward_pre_hooks


def has_stance() -> bool:
    """Whether a stance of the compiler forces eager code or another backend. Other stances run compiled code."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    return dynamo is not None and (dynamo._stance.stance == "force_eager" or dynamo._stance.backend is not None)


def outside_of_hooks(module: nn.Module, name: str, said: str) -> str:
    """A sentence with a remedy if Dynamo's message ``said`` names a hook of a module inside this region; else empty."""
    for path, part in module.named_modules(prefix=name):
        hooks = (*part._forward_hooks.values(), *part._forward_pre_hooks.values())
        outside = part is not module and not forward_in_torch_nn(own_class(part))
        if outside and any(f" in {getattr(hook, '__name__', None)}" in said for hook in hooks):
            alike = re.sub(r"\b\d+\b", "*", path)
            return f". A hook runs outside of a graph if its own module is the region: regions=[{alike!r}, ...]"
    return ""


def _reason(error: Exception) -> str:
    """The first line of Dynamo's or a backend's message, and the line of user code that it is about."""
    cause = getattr(error, "inner_exception", None)
    said = str(error) if cause is None else f"{type(cause).__name__}: {cause}"
    reason = next((line.strip() for line in said.splitlines() if line.strip()), type(error).__name__)
    stack = getattr(error, "real_stack", None) or []
    # Not a line of torch's own code, which the user cannot rewrite.
    last = next((each for each in reversed(stack) if not each.filename.startswith(_TORCH)), None)
    return f"{reason}, at {last.filename}:{last.lineno} ({last.line})" if last else reason


@functools.cache
def _forward_of_ours(cls: Any) -> Callable[..., Any]:
    """A function to compile in place of a forward that torch.nn defines, since Dynamo skips frames of torch.nn."""
    code = _call.__code__.replace(co_name=cls.__name__)  # entries belong to a code object
    return types.FunctionType(code, _call.__globals__)


def _call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return self._call_impl(*args, **kwargs)


# Half of what Dynamo guards in a block are functions and classes of these packages, which nobody replaces.
_LIBRARIES = {"torch", "triton", "zoo", "builtins", "math", "_operator", "operator", "types", "typing"}
# A module that Dynamo imported.
_IS_IMPORTED = re.compile(rf"G\['__import_({'|'.join(_LIBRARIES)})(_dot_\w+)?'\]$").match


def _worth_guarding(guards: Sequence[Any], of_library: bool = False) -> list[bool]:
    """For each guard of a graph: whether calls check it. ``of_library``: the compiled forward is of ``_LIBRARIES``."""
    # If a guard asks an object for a missing attribute, torch leaves the object in this dict. An input would stay in
    # memory as long as the process, with its autograd history.
    values: dict[str, Any] = getattr(sys.modules["torch._dynamo.guards"], "_CLOSURE_VARS", None) or {}
    for name in [each for each in values if each.startswith("tmp")]:
        del values[name]
    note_guards(guards)
    hooked = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    held = {each.name: each.value for each in guards if each.has_value}
    kinds: dict[str, set[str]] = {}
    for each in guards:
        kinds.setdefault(each.name, set()).add(each.guard_type)
        # Torch rebuilds the guards and compares the guarded objects, but a NumPy array is a new tensor each time.
        each.orig_guard.obj_weakref = None
    return [
        not (each.is_global and each.has_value and is_fixed(each.name, each.guard_type, each.value, held, of_library))
        and not _is_implied(each, kinds)
        # This guard calls Python, and concerns only hooks that the compiler writes into a graph.
        and (hooked or each.guard_type != "AUTOGRAD_SAVED_TENSORS_HOOKS")
        for each in guards
    ]


# One object, since Dynamo compares it.
_worth_guarding_in_library = functools.partial(_worth_guarding, of_library=True)
_IS_DICT_OF_MODULE = re.compile(r"\._(modules|parameters|buffers)$").search
_IS_CONSTANT_OF_OURS = re.compile(r"G\['__import_zoo_\w+'\]\.\w+(\[\d+\])?$").match


def _is_implied(guard: Any, kinds: dict[str, set[str]]) -> bool:
    """Whether a guard is redundant: its value cannot change, or another guard checks it. ``kinds``: source -> types."""
    name, kind = guard.name, guard.guard_type
    if kind in ("TYPE_MATCH", "SEQUENCE_LENGTH") and not kinds[name].isdisjoint(("CONSTANT_MATCH", "EQUALS_MATCH")):
        return True  # equal values have one type
    if name.startswith("type("):
        return "TYPE_MATCH" in kinds.get(name[5:-1], ())
    if name.endswith(".__tensor_flatten__"):  # a method of subclasses
        return "TENSOR_MATCH" in kinds.get(name.rpartition(".")[0], ())
    if name.endswith("_hooks_with_kwargs"):
        return True  # how hooks are called, which are guarded themselves
    return bool((kind == "TYPE_MATCH" and _IS_DICT_OF_MODULE(name)) or _IS_CONSTANT_OF_OURS(name))


def is_fixed(name: str, kind: str, value: object, held: Mapping[str, Any], of_library: bool) -> bool:
    """Whether a global is library code that a library holds, which nobody replaces; ``held`` are values by source.

    In the user's module, in an object or in a dict, a name may be set to another function of torch.
    """
    if "." in name:
        holder = name.rpartition(".")[0]
        inside = _is_library_code(held.get(holder)) or _IS_IMPORTED(holder) or kind == "DUPLICATE_INPUT"
    else:
        inside = name.startswith("G['__") or of_library  # the former are Dynamo's
    return bool(inside) and _is_library_code(value)


def in_library(space: Mapping[str, Any]) -> bool:
    """Whether these are the globals of a module of Python, torch, Triton or the zoo."""
    return str(space.get("__name__")).partition(".")[0] in _LIBRARIES


def _is_library_code(value: object) -> bool:
    """Whether a value is a module, class or function of Python, torch, Triton or the zoo."""
    if isinstance(value, types.ModuleType):
        return value.__name__.partition(".")[0] in _LIBRARIES
    code = isinstance(value, type | types.FunctionType | types.BuiltinFunctionType)
    return code and str(value.__module__ or "builtins").partition(".")[0] in _LIBRARIES


def _shapes(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple([each.shape if isinstance(each, torch.Tensor) else None for each in args])


class IdleWatch:
    """Checks at some region calls whether the GPU is idle, and warns once if it mostly is."""

    SAMPLES = 64
    IDLE = 0.75

    def __init__(self, model: nn.Module, regions: Sequence[nn.Module]) -> None:
        self._name = type(model).__name__
        self._calls = [call for call in map(region_call, regions) if call is not None]
        self._seen = -2 * len(regions)  # two steps may still compile kernels
        self._idle = 0
        if len(regions) > 1:  # one alone has no call before it in the same step that could keep the GPU busy
            for call in self._calls:
                call.idle_watch = self

    def note(self) -> None:
        """Look at the stream, unless it is being captured, and warn after the last look."""
        if torch.cuda.is_current_stream_capturing():
            return
        self._seen += 1
        if self._seen <= 0:
            return
        self._idle += torch.cuda.current_stream().query()
        if self._seen < self.SAMPLES:
            return
        for call in self._calls:
            call.idle_watch = None
        if self._idle >= self.IDLE * self.SAMPLES:
            line = "zoo.training.TrainingStep(...)" if torch.is_grad_enabled() else "model = zoo.cuda_graph(model)"
            message = (
                f"{self._name}: the GPU was idle at {self._idle} of {self.SAMPLES} region calls, so the host sets the "
                f"pace; one CUDA graph around the step takes that away: {line}"
            )
            warnings.warn(message, RegionWarning, stacklevel=2)


def outermost_call(module: nn.Module) -> Any:
    """What ``module(...)`` runs in place of its eager call; None in an eager module."""
    return module._compiled_call_impl  # torch's slot, which this function and the next alone touch


def set_call(module: nn.Module, call: Callable[..., Any] | None) -> None:
    """Let ``module(...)`` run ``call``; None makes the module eager."""
    if call is None:
        module.__dict__.pop("_compiled_call_impl", None)  # torch.jit.script would compile what it finds there
    else:
        module._compiled_call_impl = call


def call_of(module: nn.Module, kind: type[Call]) -> Call | None:
    """The call of this kind that a module runs, also where another is around it; None if there is none."""
    call = outermost_call(module)
    while call is not None and not isinstance(call, kind):
        call = getattr(call, "__wrapped__", None)
    return call


def region_call(module: nn.Module) -> RegionCall | None:
    """The compiled call of a region; None for an eager module."""
    return call_of(module, RegionCall)
