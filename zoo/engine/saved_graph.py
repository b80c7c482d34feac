"""One compiled graph as the content of a file.

A graph that runs directly is saved as its Python source and the constants of its launches, a graph that Inductor
compiled in torch's serialised form. The file also holds the code that Dynamo made to call the graph, and the graph's
guards as Python source.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import dis
import functools
import hashlib
import importlib
import io
import marshal
import math
import pickle
import re
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zoo.engine.call import in_library, is_fixed
from zoo.engine.signature import as_written, own_class
from zoo.engine.traced import MODES, TensorKind, Traced, torch_state

# Kinds of guards. The comparison of ``torch_state`` covers these; and inside a transform of torch.func regions run
# eagerly.
_OF_STATE = {
    *("GRAD_MODE", "DETERMINISTIC_ALGORITHMS", "GLOBAL_STATE", "TORCH_FUNCTION_STATE", "DEFAULT_DEVICE"),
    *("AUTOGRAD_SAVED_TENSORS_HOOKS", "FUNCTORCH_STACK_MATCH"),
}
_IDENTITY = {
    *("ID_MATCH", "BUILTIN_MATCH", "CLOSURE_MATCH", "FUNCTION_MATCH", "MODULE_MATCH", "CLASS_MATCH", "NAME_MATCH"),
}
_CONSTANT = {"CONSTANT_MATCH", "EQUALS_MATCH", "BOOL_MATCH", "NONE_MATCH", "BOOL_FALSE", "BOOL_TRUE"}
# Guards whose code is complete, except for checks of types, which it names by their addresses.
_BY_CODE = {
    *("SEQUENCE_LENGTH", "DICT_KEYS_MATCH", "MAPPING_KEYS_CHECK", "EMPTY_NN_MODULE_HOOKS_DICT", "OBJECT_ALIASING"),
}
# The same, but their code may be empty: Dynamo omits what an earlier guard has checked.
_BY_CODE_ONCE = {"HASATTR", "DUPLICATE_INPUT", "DICT_CONTAINS", "DICT_NOT_CONTAINS", "SET_CONTAINS", "SET_NOT_CONTAINS"}
_FUNCTIONS = {"object.__getattribute__", "type", "len", "list", "dict", "dict.keys", "tuple", "set", "hasattr"} | {
    *("dict.__getitem__", "list.__getitem__"),  # of a subclass, such as ACT2FN of transformers
}
_FOR_NUMBERS = {"torch": torch, "math": math, "___as_tensor": torch._as_tensor_fullprec}
# In names of guards on parts of functions, whose source files are compared instead.
_CODE = ("__defaults__", "__kwdefaults__", "__code__", ".__dict__)")
# In guards on torch itself and on its tables of containers, in which torch.vmap looks up its arguments' types. The
# fingerprint of a folder covers torch's version.
_READ_BY_VMAP = re.compile(r"__import__\('torch'\)$|utils(\.|_dot_)_pytree").search
# Pickle looks for these types in builtins, as their __module__ says, and finds few there.
_TYPES = {cls: name for name, cls in vars(types).items() if isinstance(cls, type)}


class UnsavableError(ValueError):
    """A part of a compiled region cannot be written to a file; the message names it."""


@dataclass
class SavedGraph:
    """The content of a file. ``product`` is the value of the code's global ``compiled``, or a partial that loads it."""

    shapes: list[Any]
    check: SavedCheck
    code: types.CodeType
    modules: dict[str, str]  # name of a global of the code -> the module that it is
    names: list[str]  # other globals of the code, which the region's module defines
    compiled: str
    product: Any

    def globals_in(self, space: Mapping[str, Any]) -> dict[str, Any]:
        """The globals of the code, for a region whose forward has the globals ``space``."""
        own = {name: space[name] for name in self.names}
        modules = {name: importlib.import_module(each) for name, each in self.modules.items()}
        product = self.product() if isinstance(self.product, functools.partial) else self.product
        return {**own, **modules, "__builtins__": builtins, self.compiled: product}


def write_graph(traced: Traced, shapes: list[Any], space: Mapping[str, Any]) -> bytes:
    """A ``SavedGraph``, pickled; UnsavableError if something in it cannot be.

    ``shapes`` are those of its calls, ``space`` the globals of the forward that was compiled.
    """
    if traced.symbolic:
        raise UnsavableError(
            "its sizes are symbols, and a saved graph is looked up by its sizes: compile_regions(model, dynamic=False) "
            "keeps a graph for each shape; to generate, use a static cache"
        )
    assert traced.code is not None
    steps = list(dis.get_instructions(traced.code))
    if written := [each.argval for each in steps if each.opname == "STORE_GLOBAL"]:
        raise UnsavableError(f"it assigns to the global {written[0]}")
    loads = {each.argval for each in steps if each.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    compiled = [name for name in loads if name.startswith("__compiled_fn")]
    modules = {name: space[name].__name__ for name in loads if isinstance(space.get(name), types.ModuleType)}
    names = [name for name in loads if name not in modules and name not in compiled and not hasattr(builtins, name)]
    if len(compiled) != 1 or any(name.startswith("__") or name not in space for name in names):
        raise UnsavableError(f"the code that calls it reads {', '.join(names) or 'no graph'}")
    check = _write_check(traced, space)
    product = traced.product if traced.product is not None else _by_inductor(traced)
    buffer = io.BytesIO()
    try:
        saved = SavedGraph(shapes, check, traced.code, modules, names, compiled[0], product)
        _Pickler(buffer).dump(saved)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise UnsavableError(str(error)) from error
    return buffer.getvalue()


class _Pickler(pickle.Pickler):
    """Writes modules and kernels by name, and functions of a direct graph by their recipes."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, types.FunctionType) and hasattr(value, "recipe"):
            return value.recipe
        if isinstance(value, types.ModuleType):
            return importlib.import_module, (value.__name__,)
        if isinstance(value, type) and value in _TYPES:
            return getattr, (types, _TYPES[value])
        if isinstance(value, types.CodeType):
            # Dynamo puts constants into code that marshal does not know, such as dtypes and devices.
            return _code, (marshal.dumps(value.replace(co_consts=())), value.co_consts)
        if isinstance(value, Tensor):
            raise UnsavableError(f"its graph holds a constant tensor of shape {tuple(value.shape)}")
        if isinstance(getattr(value, "fn", None), types.FunctionType) and hasattr(value, "params"):  # a Triton kernel
            module, name = value.fn.__module__, value.fn.__qualname__
            if getattr(sys.modules[module], name, None) is not value:
                raise UnsavableError(f"kernel {name} is not a global of {module}")
            return getattr, (sys.modules[module], name)
        return NotImplemented


def _code(without_constants: bytes, constants: tuple[Any, ...]) -> types.CodeType:
    code: types.CodeType = marshal.loads(without_constants)
    return code.replace(co_consts=constants)


def _by_inductor(traced: Traced) -> functools.partial[Any]:
    """Loads Inductor's code for a graph, which is made again here: most of it comes from Inductor's caches."""
    from torch._dynamo.aot_compile_types import BundledAOTAutogradSerializableCallable as Serializable
    from torch._dynamo.exc import TensorifyScalarRestartAnalysis
    from torch._functorch import config
    from torch._guards import TracingContext, detect_fake_mode, tracing

    assert traced.graph is not None and traced.by_inductor is not None
    state = traced.state
    if any(state["autocast_state"]["enabled"]):
        raise UnsavableError("Inductor compiled it under autocast")
    inputs = [each.meta["example_value"] for each in traced.graph.graph.find_nodes(op="placeholder")]
    flags = ["strict_autograd_cache", "bypass_autograd_cache_key", "bundled_autograd_cache"]
    flags += ["force_non_lazy_backward_lowering", "force_autograd_cache"]
    ways = dict.fromkeys(flags, True)
    libraries: dict[str, bytes] = {}
    # Not before the statement: set_grad_enabled acts when it is made, and inference_mode restores what it found.
    with (
        torch.inference_mode(state["inference_mode"]), torch.set_grad_enabled(state["grad_mode"]),
        tracing(TracingContext(detect_fake_mode(inputs))), config.patch(ways), _libraries(libraries),
    ):  # fmt: skip
        try:
            try:
                compiled = traced.by_inductor(traced.graph, inputs)
            except TensorifyScalarRestartAnalysis:  # raised after it notes the floats that the graph does not need
                compiled = traced.by_inductor(traced.graph, inputs)
            compiled = Serializable(compiled)
            return functools.partial(_load_inductor, Serializable.serialize_compile_artifacts(compiled), libraries)
        except Exception as error:
            raise UnsavableError(f"torch cannot save it: {type(error).__name__}: {error}".partition("\n")[0]) from error


def _load_inductor(data: bytes, libraries: dict[str, bytes]) -> Any:
    """Inductor's code of what torch serialised of it, and of the libraries that it compiled for a CPU."""
    from torch._dynamo.aot_compile_types import BundledAOTAutogradSerializableCallable as Serializable
    from torch._inductor import config

    with config.patch(enable_autograd_for_aot=True), _libraries(libraries):
        return Serializable.deserialize_compile_artifacts(data)


@contextlib.contextmanager
def _libraries(known: dict[str, bytes]) -> Iterator[None]:
    """Inductor's C++ kernels come from ``known``, by a hash of their source, or are compiled and added to it."""
    from unittest import mock  # which imports asyncio

    from torch._inductor import config
    from torch._inductor.codecache import CppPythonBindingsCodeCache as Cache
    from torch._inductor.codecache import write_atomic
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    compile_one = Cache.load_pybinding

    def load(argtypes: Any, source: str, *args: Any, **options: Any) -> Any:
        name = hashlib.sha256(repr((argtypes, source)).encode()).hexdigest()
        if name not in known:
            kernel = compile_one(argtypes, source, *args, **options)
            known[name] = Path(kernel.__self__.__file__).read_bytes()
            return kernel
        path = Path(cache_dir(), f"{name}.so")
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(str(path), known[name])
        return getattr(Cache._load_library(str(path), name), Cache.entry_function)

    # In this process, and not in one of a pool.
    with config.patch(compile_threads=1), mock.patch.object(Cache, "load_pybinding", load):
        yield


@dataclass
class SavedCheck:
    """A function that looks at the arguments of a call, by name, as the guards of one graph do.

    ``source`` returns the tensors to compare with ``tensors``, or None. ``constants`` are what it compares with.
    """

    source: str
    constants: list[Any]
    tensors: list[TensorKind]
    state: dict[str, Any]


class LoadedCheck:
    """A loaded check, which replaces Dynamo's guards.

    ``space`` are the globals of the code that was compiled, ``globals`` those of the loaded one; ``noted`` is called
    once, when a call first passes.
    """

    cache_entry = True

    def __init__(self, graph: SavedGraph, space: Mapping[str, Any], noted: Callable[[], None]) -> None:
        saved, names = graph.check, dict[str, Any](_FOR_NUMBERS)
        exec(compile(saved.source, "<guards>", "exec"), names)
        self._saved, self._space, self._noted, self._look = saved, space, noted, names["check"]
        self.globals, self._read = graph.globals_in(space), graph.names
        self._modes = [(ask, saved.state[name]) for name, ask in MODES.items()]
        self._guards: tuple[Any, Any] | None = None

    def check(self, arguments: dict[str, Any]) -> bool:
        """Whether the graph may run on these arguments, by name."""
        for ask, wanted in self._modes:
            if ask() != wanted:
                return False
        try:
            tensors = self._look(arguments, self._space, self._saved.constants)
            for name in self._read:  # a tensor of the module, which may have been replaced
                self.globals[name] = self._space[name]
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
            return False  # ArithmeticError as in 1 / layer_idx of the first block
        # Two names of one tensor make another graph.
        if tensors is None or len(set(map(id, tensors))) != len(tensors):
            return False
        if self._guards is None:
            return self._begin(tensors)
        of_state, of_tensors = self._guards
        return bool(of_state.check() and (not tensors or of_tensors.check(*tensors)))

    def _begin(self, tensors: tuple[Any, ...]) -> bool:
        """The first check: compare torch's state and the tensors with the saved ones, and make C++ guards of them."""
        if torch_state() != self._saved.state or not all(isinstance(each, Tensor) for each in tensors):
            return False  # a bias may have become None
        if list(map(TensorKind.of, tensors)) != self._saved.tensors:
            return False
        guards = torch._C._dynamo.guards
        none = {"dynamic_dims_sizes": None, "dynamic_dims_strides": None}
        self._guards = guards.GlobalStateGuard(), guards.TensorGuards(*tensors, **none) if tensors else None
        self._noted()
        return True


def _write_check(traced: Traced, space: Mapping[str, Any]) -> SavedCheck:
    """The guards of code whose globals are ``space``; UnsavableError if another process cannot check one."""
    writer = _Writer(space)
    tensors: dict[str, TensorKind] = {}
    held, of_library = {guard.name: guard.value for guard in traced.guards}, in_library(space)
    for guard in traced.guards:
        kind, value = guard.kind, guard.value
        if kind in _OF_STATE or any(part in guard.name for part in _CODE):
            continue
        if any(map(_READ_BY_VMAP, (guard.name, *guard.code))):
            continue
        if guard.name.startswith("G[") and is_fixed(guard.name, kind, value, held, of_library):
            continue
        if kind == "SHAPE_ENV":  # conditions on symbols
            for code in guard.code:
                writer.ask_of_numbers(code)
        elif kind == "TENSOR_MATCH":
            if not isinstance(value, TensorKind) or value.cls not in (Tensor, torch.nn.Parameter, torch.nn.Buffer):
                raise UnsavableError(f"{guard.name} is a tensor of another class")
            tensors[writer.text(guard.name)] = value
        elif kind == "TYPE_MATCH":
            cls = value.cls if isinstance(value, TensorKind) else value if isinstance(value, type) else type(value)
            written = as_written(cls)
            ask = "type" if written is cls else writer.constant(own_class)  # no file can name what fully_shard made
            writer.ask(f"{ask}({writer.text(guard.name)}) is {writer.constant(written)}")
        elif kind == "CLOSURE_MATCH" and isinstance(value, types.FunctionType) and not _has_name(value):
            # Behind a decorator, say. Dynamo compares the code as well, and guards what it closes over on its own.
            writer.ask(f"{writer.constant(SameCode(value.__code__))}({writer.text(guard.name)})")
        elif kind in _IDENTITY or (kind in _CONSTANT and isinstance(value, bool | None)):
            writer.ask(f"{writer.text(guard.name)} is {writer.constant(value)}")
        elif kind in _CONSTANT:
            if isinstance(value, type):  # in place of a value that may hold tensors
                raise UnsavableError(f"{guard.name} is a {value.__name__} that the code reads")
            name = writer.text(guard.name)
            nan = isinstance(value, float) and math.isnan(value)  # Dynamo treats NaN as equal to itself
            same = f"!= {name}" if nan else f"== {writer.constant(value)}"
            writer.ask(f"type({name}) is {writer.constant(type(value))} and {name} {same}")
        elif kind == "NOT_PRESENT_IN_GENERIC_DICT":
            writer.ask(f"{guard.attribute!r} not in {writer.text(guard.name)}.__dict__")
        elif kind in _BY_CODE_ONCE or (kind in _BY_CODE and guard.code):
            for code in guard.code:
                if not code.startswith("___check_type_id"):
                    writer.ask(writer.text(code))
        else:
            raise UnsavableError(f"its guards look at {guard.name or 'the process'} ({kind})")
    body = "\n    ".join([*writer.lines, f"return ({''.join(f'{each}, ' for each in tensors)})"])
    return SavedCheck(f"def check(L, G, K):\n    {body}\n", writer.constants, list(tensors.values()), traced.state)


class SameCode:
    """Compares functions that no module holds by name, by their code, which may come from another process."""

    def __init__(self, code: types.CodeType) -> None:
        self._code = code

    def __call__(self, function: Any) -> bool:
        """Whether a function runs this code."""
        code = function.__code__
        if code is not self._code:
            if code != self._code:
                return False
            self._code = code  # so that the next comparison is by identity
        return True


def _has_name(function: types.FunctionType) -> bool:
    """Whether a function can be looked up by its name in its module."""
    found: Any = sys.modules.get(function.__module__)
    for part in function.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is function


class _Writer(ast.NodeTransformer):
    """Lines of a check, in which each expression is computed once."""

    def __init__(self, space: Mapping[str, Any]) -> None:
        self._space = space
        self._names: dict[str, str] = {}
        self.lines: dict[str, None] = {}  # in order, each once
        self.constants: list[Any] = []
        self._places: dict[int, int] = {}  # of constants, by identity

    def ask(self, condition: str) -> None:
        """Add a condition without which the check fails."""
        self.lines[f"if not ({condition}): return None"] = None

    def ask_of_numbers(self, condition: str) -> None:
        """Add a condition on numbers, as Dynamo writes it, without which the check fails."""
        names = {node.id for node in ast.walk(ast.parse(condition)) if isinstance(node, ast.Name)}
        if not names <= {"L", *_FOR_NUMBERS}:
            raise UnsavableError(f"its guards look at {condition}")
        self.ask(condition)

    def constant(self, value: Any) -> str:
        """An expression for a value: its literal, or an item of ``constants``."""
        plain = type(value) in (bool, int, str, type(None))  # an enum may be a string too
        if plain or (type(value) is float and abs(value) < 1e300):
            return repr(value)
        place = self._places.setdefault(id(value), len(self.constants))
        if place == len(self.constants):
            self.constants.append(value)
        return f"K[{place}]"

    def text(self, code: str) -> str:
        """The variable that holds the value of an expression; a comparison becomes one between such variables."""
        try:
            parsed = ast.parse(code, mode="eval")
        except SyntaxError as error:  # such as <class 'int'>
            raise UnsavableError(f"its guards look at {code}") from error
        return ast.unparse(self.visit(parsed.body))

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        if ast.unparse(node.value) == "G":
            return self._named(self._of_globals(ast.literal_eval(node.slice)))
        if ast.unparse(node.value) != "L":
            node.value = self.visit(node.value)
        node.slice = self.visit(node.slice)  # of a dict, it may be one of the keys of another
        return self._named(ast.unparse(node))

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        if ast.unparse(node).startswith("torch."):
            return node
        node.value = self.visit(node.value)
        return self._named(ast.unparse(node))

    def visit_Call(self, node: ast.Call) -> ast.expr:
        function, given = ast.unparse(node.func), [ast.unparse(self.visit(each)) for each in node.args]
        if function == "___dict_contains":
            return self._named(" in ".join(given))
        if function == "set.__contains__":
            return self._named(" in ".join(reversed(given)))
        if function not in _FUNCTIONS or node.keywords:
            raise UnsavableError(f"its guards look at {ast.unparse(node)}")
        return self._named(f"{function}({', '.join(given)})")

    def generic_visit(self, node: ast.AST) -> ast.AST:
        if isinstance(node, ast.Constant | ast.List | ast.Tuple):
            return node
        if isinstance(node, ast.Compare | ast.UnaryOp | ast.cmpop | ast.unaryop):
            return super().generic_visit(node)
        raise UnsavableError(f"its guards look at {ast.unparse(node)}")

    def _named(self, expression: str) -> ast.expr:
        if expression not in self._names:
            self._names[expression] = f"t{len(self._names)}"
            self.lines[f"{self._names[expression]} = {expression}"] = None
        return ast.Name(self._names[expression])

    def _of_globals(self, name: str) -> str:
        value = self._space.get(name)
        if name.startswith("__import_") and isinstance(value, types.ModuleType):
            return self.constant(value)  # imported when the file is loaded
        if name not in self._space or name.startswith("__"):
            raise UnsavableError(f"its guards look at {name}, which the compiler made")
        return f"G[{name!r}]"
