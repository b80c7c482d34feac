"""One compiled graph as the content of a file.

A graph with nothing to fuse is saved as the Python source it runs as, with the constants of its launches; what Inductor
compiled, as torch serialises it. Beside it are the code that Dynamo made to call it, and its guards as a check.
"""

from __future__ import annotations

import builtins
import contextlib
import dis
import hashlib
import importlib
import io
import marshal
import pickle
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zoo.engine.checks import Check, UnsavableError, write_check
from zoo.engine.traced import Traced


@dataclass
class SavedGraph:
    """What a file holds. ``product`` is what the global ``compiled`` of the code is."""

    shapes: list[Any]
    check: Check
    code: bytes
    modules: dict[str, str]  # of other globals of the code, those that are modules
    names: list[str]  # and those that are the region's own
    compiled: str
    product: Any

    def globals_in(self, space: dict[str, Any]) -> dict[str, Any]:
        """The globals of the code, for a region whose forward has the globals ``space``."""
        own = {name: space[name] for name in self.names}
        modules = {name: importlib.import_module(each) for name, each in self.modules.items()}
        return {**own, **modules, "__builtins__": builtins, self.compiled: self.product}


def write_graph(traced: Traced, shapes: list[Any], code: types.CodeType, space: dict[str, Any]) -> bytes:
    """A ``SavedGraph``, pickled. ``shapes`` of its calls, ``space`` the globals of the forward that was compiled.

    Raises:
        UnsavableError: If something in it cannot be written to a file.
    """
    if traced.symbolic:
        raise UnsavableError("its sizes or numbers are symbols, and their guards cannot be saved")
    loads = {each.argval for each in dis.get_instructions(code) if each.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    compiled = [name for name in loads if name.startswith("__compiled_fn")]
    modules = {name: space[name].__name__ for name in loads if isinstance(space.get(name), types.ModuleType)}
    names = [name for name in loads if name not in modules and name not in compiled and not hasattr(builtins, name)]
    if len(compiled) != 1 or any(name.startswith("__") or name not in space for name in names):
        raise UnsavableError(f"the code that calls it reads {', '.join(names) or 'no graph'}")
    check = write_check(traced.guards, space, traced.state)
    product = traced.product if traced.product is not None else _by_inductor(traced)
    buffer = io.BytesIO()
    try:
        saved = SavedGraph(shapes, check, marshal.dumps(code), modules, names, compiled[0], product)
        _Pickler(buffer).dump(saved)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise UnsavableError(str(error)) from error
    return buffer.getvalue()


class _Pickler(pickle.Pickler):
    """Writes modules and kernels by name, and functions of a direct graph by how they were made."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, types.FunctionType) and hasattr(value, "recipe"):
            return value.recipe
        if isinstance(value, types.ModuleType):
            return importlib.import_module, (value.__name__,)
        if isinstance(value, Tensor):
            raise UnsavableError(f"its graph holds a constant tensor of shape {tuple(value.shape)}")
        if isinstance(getattr(value, "fn", None), types.FunctionType) and hasattr(value, "params"):  # a Triton kernel
            module, name = value.fn.__module__, value.fn.__qualname__
            if getattr(sys.modules[module], name, None) is not value:
                raise UnsavableError(f"kernel {name} is not a global of {module}")
            return _kernel, (module, name)
        return NotImplemented


def _kernel(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


@dataclass
class _ByInductor:
    """What torch serialises of Inductor's code, and the libraries that it compiled for a CPU."""

    data: bytes
    libraries: dict[str, bytes]

    def __reduce__(self) -> Any:
        return _load_inductor, (self.data, self.libraries)


def _by_inductor(traced: Traced) -> _ByInductor:
    """Inductor's code for a graph, made again: most of it comes from Inductor's caches."""
    from torch._dynamo.aot_compile_types import BundledAOTAutogradSerializableCallable as Serializable
    from torch._functorch import config
    from torch._guards import TracingContext, detect_fake_mode, tracing

    assert traced.graph is not None
    state, nodes = traced.state, traced.graph.graph.find_nodes(op="placeholder")
    if any(state["autocast_state"]["enabled"]):
        raise UnsavableError("Inductor compiled it under autocast")
    inputs = [each.meta["example_value"] for each in nodes]
    ways = {
        **dict.fromkeys(("strict_autograd_cache", "bypass_autograd_cache_key", "bundled_autograd_cache"), True),
        **dict.fromkeys(("force_non_lazy_backward_lowering", "force_autograd_cache"), True),
    }
    libraries: dict[str, bytes] = {}
    # Not before the statement: set_grad_enabled acts when it is made, and inference_mode restores what it found.
    with (
        torch.inference_mode(state["inference_mode"]), torch.set_grad_enabled(state["grad_mode"]),
        tracing(TracingContext(detect_fake_mode(inputs))), config.patch(ways), _libraries(libraries),
    ):  # fmt: skip
        try:
            compiled = Serializable(traced.backend.by_inductor(traced.graph, inputs))
            return _ByInductor(Serializable.serialize_compile_artifacts(compiled), libraries)
        except Exception as error:
            raise UnsavableError(f"torch cannot save it: {type(error).__name__}: {error}".partition("\n")[0]) from error


def _load_inductor(data: bytes, libraries: dict[str, bytes]) -> Any:
    from torch._dynamo.aot_compile_types import BundledAOTAutogradSerializableCallable as Serializable
    from torch._inductor import config

    with config.patch(enable_autograd_for_aot=True), _libraries(libraries):
        return Serializable.deserialize_compile_artifacts(data)


@contextlib.contextmanager
def _libraries(known: dict[str, bytes]) -> Iterator[None]:
    """Inductor's C++ kernels come from ``known``, by a hash of their source, or are compiled and added to it."""
    from unittest import mock  # which imports asyncio

    from torch._inductor import config
    from torch._inductor.codecache import CppPythonBindingsCodeCache, write_atomic
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    compile_one = CppPythonBindingsCodeCache.load_pybinding

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
        cache = CppPythonBindingsCodeCache
        return getattr(cache._load_library(str(path), name), cache.entry_function)

    # In this process, and not in one of a pool.
    with config.patch(compile_threads=1), mock.patch.object(CppPythonBindingsCodeCache, "load_pybinding", load):
        yield
