"""The workload behind ``advise``: a preset of the zoo by its name, or a user's own model by ``module:function``."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import inspect
import random
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.cli import did_you_mean
from benchmarks.families.base import Prepared, Workload, count_parameters, tensors
from benchmarks.plan import DTYPES, Case

EXAMPLE, GIVEN, CAST = "example", "given", "given, cast"  # names of the input in a row
BYTES_FORMULA = "weights, embedding tables apart, and inputs, each read once"
PLAIN = (bool, int, float, str, type(None))
# A GPU's peak of one eager call, and what compiled arms may need on top of it.
HEADROOM = 1.2


class Refused(ValueError):
    """The model cannot be measured; the message says why and what to do."""


@dataclass(kw_only=True)
class Loaded:
    """A model on its device with the inputs of one call; seconds of what was prepared once for it."""

    model: nn.Module
    inputs: dict[str, Any]
    static: tuple[str, ...] = ()
    preparation: dict[str, float] = field(default_factory=dict)

    @property
    def dtype(self) -> torch.dtype:
        """Of the first weight that has a fraction, else of the first such input, else torch's default."""
        found = (*self.model.parameters(), *tensors(self.inputs))
        return next((each.dtype for each in found if each.is_floating_point()), torch.get_default_dtype())


def is_own(name: str) -> bool:
    """Whether this names the user's function and not a preset: ``module:function``, ``folder/file.py:function``."""
    return ":" in name or "/" in name or name.endswith(".py")


def load(name: str, *, device: str, dtype: torch.dtype | None, seed: int, sizes: Mapping[str, int]) -> Loaded:
    """The model in eval mode and its inputs, on the device; ``sizes`` are those of ``zoo.example_inputs``.

    ``dtype`` None leaves a user's model and inputs as they are.

    Raises:
        Refused: If the function is not there, fails, or returns something else than a model and its inputs.
    """
    _seed(seed)
    if not is_own(name):
        return _preset(name, device, dtype, seed, sizes)
    function = _function(name)
    try:
        returned = function()
    except Exception as error:
        raise Refused(f"{name} failed: {_in_a_line(error)}") from error
    if not (isinstance(returned, tuple | list) and len(returned) == 2):
        raise Refused(f"{name} returned {_kind(returned)}, expected (model, inputs)")
    model, inputs = returned
    if not isinstance(model, nn.Module):
        raise Refused(f"{name} returned {_kind(model)} as the model, expected an nn.Module")
    named = _named(name, model, inputs)
    model = model.to(device) if dtype is None else model.to(device, dtype)
    return Loaded(model=model.eval(), inputs={key: _moved(value, device, dtype) for key, value in named.items()})


def _preset(name: str, device: str, dtype: torch.dtype | None, seed: int, sizes: Mapping[str, int]) -> Loaded:
    import zoo

    if name not in zoo.list_models():
        raise Refused(f"the zoo has no model {name!r}; {did_you_mean(name, zoo.list_models())}")
    model = zoo.create(name, device=device, dtype=dtype)
    try:
        inputs = zoo.example_inputs(model, seed=seed, **sizes)
    except (TypeError, ValueError) as error:
        raise Refused(f"{name} has no such inputs: {_in_a_line(error)}") from error
    loaded = Loaded(model=model.requires_grad_(False), inputs=inputs)
    prepare = getattr(model, "prepare", None)
    if "edge_index" in inputs and callable(prepare):
        # As its users would: sorted and normalised once, not in every call.
        began = time.perf_counter()
        inputs["edge_index"] = prepare(inputs["edge_index"], num_nodes=inputs["x"].size(0))
        loaded.static = ("edge_index",)
        loaded.preparation["CSRGraph"] = time.perf_counter() - began
    return loaded


def _function(name: str) -> Callable[[], Any]:
    """What ``module:function`` or ``file.py:function`` names."""
    where, _, function = name.rpartition(":")
    if not where or not function:
        raise Refused(f"{name!r} names no function; write module:function")
    try:
        module = _from_file(Path(where)) if where.endswith(".py") else importlib.import_module(where)
    except Exception as error:
        raise Refused(f"{where} cannot be imported: {_in_a_line(error)}") from error
    if not hasattr(module, function):
        own = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        raise Refused(f"{where} has no function {function!r}; {did_you_mean(function, own)}")
    found: Callable[[], Any] = getattr(module, function)
    if not callable(found):
        raise Refused(f"{name} is {_kind(found)}, expected a function that returns (model, inputs)")
    return found


def _from_file(path: Path) -> Any:
    """A module from its file, whose neighbours it can import as if it were run as a program."""
    spec = importlib.util.spec_from_file_location(f"advised_{path.stem}", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    sys.path.insert(0, str(path.parent))
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # the compiler looks classes up by their module's name
    spec.loader.exec_module(module)
    return module


def _named(name: str, model: nn.Module, inputs: Any) -> dict[str, Any]:
    """The inputs by the names of forward's parameters."""
    if isinstance(inputs, Tensor):
        inputs = (inputs,)
    if isinstance(inputs, Mapping):
        named = dict(inputs)
        if wrong := [key for key in named if not isinstance(key, str)]:
            raise Refused(f"{name} returned an input called {wrong[0]!r}, expected names of forward's parameters")
    elif isinstance(inputs, tuple | list):
        try:
            bound = inspect.signature(model.forward).bind(*inputs)
        except TypeError as error:
            raise Refused(f"{type(model).__name__}.forward does not take {len(inputs)} input(s): {error}") from error
        named = dict(bound.arguments)
        kinds = {key: parameter.kind for key, parameter in bound.signature.parameters.items()}
        if any(kinds[key] is not inspect.Parameter.POSITIONAL_OR_KEYWORD for key in named):
            raise Refused(f"{type(model).__name__}.forward takes *args; return the inputs by name, as a dict")
    else:
        raise Refused(f"{name} returned {_kind(inputs)} as inputs, expected a dict or a tuple of tensors")
    for key, value in named.items():
        if not isinstance(value, (Tensor, *PLAIN)):
            raise Refused(f"{name} returned {_kind(value)} as input {key!r}, expected a tensor")
    if not any(isinstance(value, Tensor) for value in named.values()):
        raise Refused(f"{name} returned inputs without a tensor")
    return named


def _moved(value: Any, device: str, dtype: torch.dtype | None) -> Any:
    if not isinstance(value, Tensor):
        return value
    value = value.detach().to(device)
    return value.to(dtype) if dtype is not None and value.is_floating_point() else value


def _seed(seed: int) -> None:
    import numpy as np

    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def _kind(value: Any) -> str:
    what = type(value).__name__
    return f"{'an' if what[0] in 'aeiouAEIOU' else 'a'} {what}" + (
        f" of {len(value)}" if isinstance(value, tuple | list) else ""
    )


def _in_a_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__


class AdvisedWorkload(Workload):
    """Any model by its name; ``sizes`` of a preset's inputs stand in the input's name (``example, batch=8``)."""

    family = "advise"
    models: tuple[str, ...] = ()
    inputs: tuple[str, ...] = (EXAMPLE, GIVEN, CAST)
    gpu_dtypes = cpu_dtypes = DTYPES

    def __init__(self) -> None:
        self.memory: int | None = None  # bytes of one eager call, once look has measured them

    def refuses(self, case: Case) -> str | None:
        return None

    def memory_bytes(self, case: Case) -> int:
        """What one eager call took, and some more."""
        return int(HEADROOM * (self.memory or 0))

    running_bytes = memory_bytes

    def look(
        self, *, model: str, device: str, dtype: str | None, seed: int, sizes: Mapping[str, int]
    ) -> dict[str, Any]:
        """Load the model in a worker process, call it once, and say what there is to compile.

        Returns ``refused``, why it cannot be measured; or ``dtype``, ``memory`` in bytes, and of the regions ``found``,
        ``declared``, ``obstacles`` and ``none``, why there are none.
        """
        try:
            loaded = load(model, device=device, dtype=_dtype(dtype), seed=seed, sizes=sizes)
            own = str(loaded.dtype).removeprefix("torch.")
            if own not in DTYPES:
                raise Refused(f"{model} computes in {own}; give --dtype, one of {', '.join(DTYPES)}")
            _call(model, loaded)
        except Refused as error:
            return {"refused": str(error)}
        return {"refused": None, "dtype": own, "memory": _memory(loaded, device), **_regions(loaded)}

    def prepare(self, case: Case, *, data_root: str | None, seed: int) -> Prepared:
        """Model and inputs on the device, the reference being the model's own eager call in more precision."""
        as_it_is = case.input == GIVEN
        dtype = None if as_it_is else _dtype(case.dtype)
        loaded = load(case.model, device=case.device, dtype=dtype, seed=seed, sizes=sizes_in(case.input))
        given = tensors(loaded.inputs)
        prepared = Prepared(
            model=loaded.model,
            inputs=loaded.inputs,
            static=loaded.static,
            reference=lambda: torch.empty(0),
            bytes=_weight_bytes(loaded.model) + sum(tensor.nbytes for tensor in given),
            bytes_formula=BYTES_FORMULA,
            data=GIVEN if is_own(case.model) else EXAMPLE,
            preparation_seconds=loaded.preparation,
            sizes={
                "parameters": count_parameters(loaded.model),
                "input values": sum(tensor.numel() for tensor in given),
            },
        )

        def reference() -> Any:
            # The precisest that this very model runs in: some hold to one dtype, some do not fit in float64.
            for dtype in (torch.float64, torch.float32):
                try:
                    output = _precise(loaded, dtype)
                except Exception:
                    if case.device != "cpu":
                        torch.cuda.empty_cache()
                    continue
                prepared.reference_dtype = str(dtype).removeprefix("torch.")
                return output
            prepared.reference_dtype = case.dtype
            return _precise(loaded, None)

        prepared.reference = reference
        return prepared


def sizes_in(input: str) -> dict[str, int]:
    """The sizes in an input's name: ``example, batch=8, tokens=32``."""
    pairs = [part.partition("=") for part in input.split(", ") if "=" in part]
    return {name: int(value) for name, _, value in pairs}


def _dtype(name: str | None) -> torch.dtype | None:
    return None if name is None else getattr(torch, name)


def _call(name: str, loaded: Loaded) -> None:
    """One eager call, whose output must hold a tensor."""
    try:
        with torch.inference_mode():
            output = loaded.model(**loaded.inputs)
    except Exception as error:
        raise Refused(f"{name}: the model does not run on its inputs: {_in_a_line(error)}") from error
    if not tensors(output):
        raise Refused(f"{name}: the model returns {_kind(output)} without a tensor in it")


def _precise(loaded: Loaded, dtype: torch.dtype | None) -> Any:
    """The output of an eager copy in this dtype; compiling in place does not outlive a copy."""
    model = copy.deepcopy(loaded.model)
    model = model if dtype is None else model.to(dtype)
    device = next((tensor.device.type for tensor in tensors(loaded.inputs)), "cpu")
    with torch.inference_mode():
        return model(**{key: _moved(value, device, dtype) for key, value in loaded.inputs.items()})


def _memory(loaded: Loaded, device: str) -> int:
    """Bytes that one call takes: the peak so far on a GPU; on a CPU the weights twice over, and there is swap."""
    if device != "cpu":
        torch.cuda.synchronize()
        return torch.cuda.max_memory_reserved()
    return 2 * sum(tensor.nbytes for tensor in (*loaded.model.parameters(), *loaded.model.buffers()))


def _weight_bytes(model: nn.Module) -> int:
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()) if id(tensor) not in tables)


def _regions(loaded: Loaded) -> dict[str, Any]:
    import zoo
    from zoo.engine.discover import nothing_repeats

    try:
        report = zoo.find_regions(loaded.model, inputs=loaded.inputs)
    except Exception as error:
        return {"found": [], "declared": False, "obstacles": [], "none": _in_a_line(error)}
    found = [f"{each.name}: {len(each.modules)} module(s), {each.graphs_needed} graph(s)" for each in report.regions]
    none = None
    if not found:
        # A declared model may have none of its regions in this configuration, or leave them eager on this device.
        none = "none that it declares is compiled here" if report.declared else nothing_repeats(loaded.model)
    obstacles = [str(obstacle) for obstacle in report.obstacles]
    return {"found": found, "declared": report.declared, "obstacles": obstacles, "none": none}


WORKLOAD = AdvisedWorkload()
