"""Guards that can be saved: what Dynamo compares in a call, as Python source over the same expressions."""

from __future__ import annotations

import ast
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from zoo.engine.call import is_library_code
from zoo.engine.traced import MODES, Guard, TensorKind, torch_state

# Checked by the state of torch, or with no symbol in the graph by nothing.
_OF_STATE = {
    *("GRAD_MODE", "DETERMINISTIC_ALGORITHMS", "GLOBAL_STATE", "TORCH_FUNCTION_STATE", "DEFAULT_DEVICE"),
    *("AUTOGRAD_SAVED_TENSORS_HOOKS", "SHAPE_ENV"),
}
_IDENTITY = {
    "ID_MATCH",
    "BUILTIN_MATCH",
    "CLOSURE_MATCH",
    "FUNCTION_MATCH",
    "MODULE_MATCH",
    "CLASS_MATCH",
    "NAME_MATCH",
}
_CONSTANT = {"CONSTANT_MATCH", "EQUALS_MATCH", "BOOL_MATCH", "NONE_MATCH", "BOOL_FALSE", "BOOL_TRUE"}
# Their code says all of it, beside types by their address.
_IN_WORDS = {
    *("SEQUENCE_LENGTH", "DICT_KEYS_MATCH", "MAPPING_KEYS_CHECK", "EMPTY_NN_MODULE_HOOKS_DICT", "HASATTR"),
    *("DUPLICATE_INPUT", "OBJECT_ALIASING", "DICT_CONTAINS", "DICT_NOT_CONTAINS", "SET_CONTAINS", "SET_NOT_CONTAINS"),
}
_FUNCTIONS = {"type", "len", "list", "dict", "dict.keys", "tuple", "set", "hasattr"}
# Parts of code, whose source files are compared instead.
_CODE = ("__defaults__", "__kwdefaults__", "__code__", ".__dict__)")


class UnsavableError(ValueError):
    """Something of a compiled region cannot be written to a file; the message names it."""


@dataclass
class Check:
    """A function that looks at the arguments of a call, by name, as the guards of one graph do.

    ``source`` returns the tensors to compare with ``tensors``, or None. ``constants`` are what it compares with.
    """

    source: str
    constants: list[Any]
    tensors: list[TensorKind]
    state: dict[str, Any]


class _Writer:
    """Lines of a check, in which each expression is computed once."""

    def __init__(self, space: dict[str, Any]) -> None:
        self._space = space
        self._names: dict[str, str] = {}
        self._asked: set[str] = set()
        self.lines: list[str] = []
        self.constants: list[Any] = []

    def ask(self, condition: str) -> None:
        """A condition without which the check fails."""
        if condition not in self._asked:
            self._asked.add(condition)
            self.lines.append(f"if not ({condition}): return None")

    def constant(self, value: Any) -> str:
        """An expression of a value."""
        if isinstance(value, bool | int | str | None) or (isinstance(value, float) and abs(value) < 1e300):
            return repr(value)
        self.constants.append(value)
        return f"K[{len(self.constants) - 1}]"

    def text(self, code: str) -> str:
        """The name that an expression has been computed to; of a comparison, the comparison of such names."""
        return self._write(ast.parse(code, mode="eval").body)

    def _write(self, node: ast.AST) -> str:
        if isinstance(node, ast.Compare | ast.UnaryOp):
            for name, value in ast.iter_fields(node):
                if isinstance(value, ast.expr):
                    setattr(node, name, ast.Name(self._write(value)))
                elif name == "comparators":
                    setattr(node, name, [ast.Name(self._write(each)) for each in value])
            return ast.unparse(node)
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id == "G":
            assert isinstance(node.slice, ast.Constant)
            expression = self._of_globals(str(node.slice.value))
        elif isinstance(node, ast.Subscript):
            of = node.value.id if isinstance(node.value, ast.Name) else self._write(node.value)
            expression = f"{of}[{ast.unparse(node.slice)}]"
        elif isinstance(node, ast.Attribute):
            expression = f"{self._write(node.value)}.{node.attr}"
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "___dict_contains":
            key, container = map(self._write, node.args)
            expression = f"{key} in {container}"
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in _FUNCTIONS and not node.keywords:
            expression = f"{ast.unparse(node.func)}({', '.join(map(self._write, node.args))})"
        elif isinstance(node, ast.Constant | ast.List | ast.Tuple) or ast.unparse(node).startswith("torch."):
            return ast.unparse(node)
        else:
            raise UnsavableError(f"its guards look at {ast.unparse(node)}")
        if expression not in self._names:
            self._names[expression] = f"t{len(self._names)}"
            self.lines.append(f"{self._names[expression]} = {expression}")
        return self._names[expression]

    def _of_globals(self, name: str) -> str:
        value = self._space.get(name)
        if name.startswith("__import_") and isinstance(value, types.ModuleType):
            return f"M[{value.__name__!r}]"
        if name not in self._space or name.startswith("__"):
            raise UnsavableError(f"its guards look at {name}, which the compiler made")
        return f"G[{name!r}]"


def write_check(guards: Sequence[Guard], space: dict[str, Any], state: dict[str, Any]) -> Check:
    """A check of these guards, of code whose globals are ``space``, in calls in this state of torch.

    Raises:
        UnsavableError: If a guard looks at something that another process cannot.
    """
    writer = _Writer(space)
    tensors: dict[str, TensorKind] = {}
    for guard in guards:
        if guard.kind in _OF_STATE or any(part in guard.name for part in _CODE) or is_library(guard, space):
            continue
        value = guard.value
        if guard.kind == "TENSOR_MATCH":
            if not isinstance(value, TensorKind) or value.cls not in (
                torch.Tensor,
                torch.nn.Parameter,
                torch.nn.Buffer,
            ):
                raise UnsavableError(f"{guard.name} is a tensor of another class")
            tensors[writer.text(guard.name)] = value
        elif guard.kind == "TYPE_MATCH":
            writer.ask(f"type({writer.text(guard.name)}) is {writer.constant(_class(value))}")
        elif guard.kind in _IDENTITY:
            writer.ask(f"{writer.text(guard.name)} is {writer.constant(value)}")
        elif guard.kind in _CONSTANT:
            name = writer.text(guard.name)
            if isinstance(value, type):  # in place of a value that may hold tensors
                raise UnsavableError(f"{guard.name} is a {value.__name__} that the code reads")
            if isinstance(value, bool | None):
                writer.ask(f"{name} is {value}")
            else:
                writer.ask(f"type({name}) is {writer.constant(type(value))} and {name} == {writer.constant(value)}")
        elif guard.kind == "NOT_PRESENT_IN_GENERIC_DICT":
            writer.ask(f"{guard.attribute!r} not in {writer.text(guard.name)}.__dict__")
        elif guard.kind in _IN_WORDS and (guard.code or guard.kind == "HASATTR"):
            # Dynamo says but once which attributes there are.
            for code in guard.code:
                if not code.startswith("___check_type_id"):
                    writer.ask(writer.text(code))
        else:
            raise UnsavableError(f"its guards look at {guard.name or 'the process'} ({guard.kind})")
    # Two names of one tensor make another graph.
    writer.lines.append(f"return ({''.join(f'{each}, ' for each in tensors)})")
    body = "\n    ".join(writer.lines)
    return Check(f"def check(L, G, M, K):\n    {body}\n", writer.constants, list(tensors.values()), state)


def is_library(guard: Guard, space: dict[str, Any]) -> bool:
    """Whether a guard looks at code of torch, of Python or of the zoo: nobody replaces it, or its hash would differ."""
    if not guard.name.startswith("G["):
        return False
    root = space.get(guard.name.split("'")[1])
    return is_library_code(guard.value) or (guard.kind in _IDENTITY and (root is None or is_library_code(root)))


def _class(value: Any) -> type:
    if isinstance(value, TensorKind):
        return value.cls
    return value if isinstance(value, type) else type(value)


@dataclass
class LoadedCheck:
    """A check at work, in the place of Dynamo's guards.

    ``space`` are the globals of the code that was compiled, ``noted`` is called once when a call passes, and ``origin``
    is what the check was loaded from.
    """

    saved: Check
    space: dict[str, Any]
    noted: Callable[[], None]
    origin: Any = None
    cache_entry: bool = True
    _guards: tuple[Any, Any] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        names: dict[str, Any] = {"torch": torch}
        exec(compile(self.saved.source, "<guards>", "exec"), names)
        self._look = names["check"]
        self._modes = [(ask, self.saved.state[name]) for name, ask in MODES.items()]

    def check(self, arguments: dict[str, Any]) -> bool:
        """Whether the graph may run on these arguments, by name."""
        for ask, wanted in self._modes:
            if ask() != wanted:
                return False
        try:
            tensors = self._look(arguments, self.space, sys.modules, self.saved.constants)
        except (AttributeError, LookupError, TypeError):
            return False
        if tensors is None or len(set(map(id, tensors))) != len(tensors):
            return False
        if self._guards is None:
            return self._begin(tensors)
        of_state, of_tensors = self._guards
        return bool(of_state.check() and (not tensors or of_tensors.check(*tensors)))

    def _begin(self, tensors: tuple[Any, ...]) -> bool:
        """Compare with what was saved, and from then on with what was found: that is done in C++."""
        if torch_state() != self.saved.state or list(map(TensorKind.of, tensors)) != self.saved.tensors:
            return False
        guards = torch._C._dynamo.guards
        none = {"dynamic_dims_sizes": None, "dynamic_dims_strides": None}
        self._guards = guards.GlobalStateGuard(), guards.TensorGuards(*tensors, **none) if tensors else None
        self.noted()
        return True
