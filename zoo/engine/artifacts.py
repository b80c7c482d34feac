"""Compiled regions in a folder: a new process loads them, and neither traces nor compiles."""

from __future__ import annotations

import dataclasses
import dis
import functools
import hashlib
import hmac
import importlib.metadata
import json
import math
import os
import pickle
import platform
import sys
import tempfile
import types
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from zoo.engine.call import RegionCall, RegionWarning, region_call
from zoo.engine.compile import Choices, Plan, compiled_plan, place_calls, plan_of
from zoo.engine.direct import DirectOrInductor
from zoo.engine.graph_log import GRAPH_LOG
from zoo.engine.region import Region
from zoo.engine.saved_graph import LoadedCheck, SavedGraph, UnsavableError, write_graph
from zoo.engine.signature import own_class
from zoo.engine.traced import torch_state

_INDEX, _KERNELS, _CACHES = "index.json", "kernels.bin", "caches.bin"
# Torch's name of a flag in its state -> the flag's public name. A graph compiled with another value would never run.
_MATMUL = "torch.backends.cuda.matmul.allow"
_FLAGS = {
    "allow_tf32": f"{_MATMUL}_tf32",
    "allow_fp16_reduce": f"{_MATMUL}_fp16_reduced_precision_reduction",
    "allow_bf16_reduce": f"{_MATMUL}_bf16_reduced_precision_reduction",
    "deterministic_algorithms": "torch.use_deterministic_algorithms",
}
_PARTS = {"fingerprint": dict, "sources": dict, "choices": dict | None, "entries": list, "files": dict, "skipped": dict}
_OF_FILE = {"bytes", "sha256"}


class ArtifactError(RuntimeError):
    """A folder of compiled regions does not fit the model or the machine, or cannot be trusted."""


@dataclass
class SavedRegions:
    """The graphs that ``save_compiled`` wrote; ``skipped`` has the reason for each graph that could not be saved."""

    path: Path
    entries: list[dict[str, Any]] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        total = sum(path.stat().st_size for path in self.path.iterdir())
        lines = [f"{len(self.entries)} graph(s), {total / 2**20:.2f} MiB in {self.path}"]
        lines += [f"  {each['region']} ({each['mode']}): {each['kind']}, {each['file']}" for each in self.entries]
        return "\n".join(lines + [f"  not saved, {name}: {reason}" for name, reason in self.skipped.items()])


def save_compiled(model: nn.Module, path: str | Path, *, key: bytes | str | None = None) -> SavedRegions:
    """Write the graphs that a model's regions have compiled to a folder, for ``load_compiled`` in a new process.

    Call it after ``warm_up`` in each mode and with each shape that will be used. An older folder at ``path`` is
    replaced as a whole: if the disk is full, or another process writes too, one complete folder is left.

    Args:
        model: A model that ``compile_regions`` was called on.
        path: The folder to write.
        key: Signs the index by HMAC-SHA256; ``load_compiled`` with a key refuses any other folder.

    Returns:
        The saved graphs, and the reason for each graph that could not be saved; printable.

    Raises:
        ValueError: If the model has no compiled regions, none of them has run or can be saved, ``path`` holds other
            files, or the key is empty.
        OSError: If the folder cannot be written.
    """
    plan = compiled_plan(model)
    path = Path(path)
    if path.is_symlink():
        path = path.resolve()  # the link stays, and what it leads to is replaced
    check_target(path)
    _check_key(key)
    path.parent.mkdir(parents=True, exist_ok=True)
    saved = SavedRegions(path)
    with tempfile.TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent, ignore_cleanup_errors=True) as made:
        partial = Path(made, "new")  # a temporary folder is private; this one has the usual permissions
        partial.mkdir()
        sources: set[str] = set()
        for graph in _graphs(model, plan):
            try:
                file = graph.write()
            except UnsavableError as reason:
                saved.skipped[f"{graph.name}, {graph.shapes[0]}"] = str(reason)
                continue
            sources |= file.modules
            name = f"{len(saved.entries):03}-{own_class(graph.call.module).__name__}.bin"
            (partial / name).write_bytes(file.data)
            saved.entries.append({**file.entry, "file": name, **_size_and_hash(file.data)})
        if not saved.entries and not saved.skipped:
            if any(entry.graphs for entry in GRAPH_LOG.of(plan.log_id)):
                raise ValueError(
                    f"no graph of {type(model).__name__} can be saved: its regions ran, but kept no graph. Either they "
                    "allow graph breaks (fullgraph=False), global module hooks are set, every call changes values that "
                    "the guards read (a cache's Python attributes), or torch.compiler.reset() was called"
                )
            raise ValueError(f"no region of {type(model).__name__} has run compiled: call zoo.warm_up(model, ...)")
        caches = {}
        kernels = sys.modules.get("zoo.engine.kernel")
        if kernels is not None and (found := kernels.cached_kernels()).files:
            caches[_KERNELS] = pickle.dumps(found)
        # The new process traces skipped graphs again; with the compiler's caches that takes less time.
        if saved.skipped and (of_compiler := torch.compiler.save_cache_artifacts()):
            caches[_CACHES] = of_compiler[0]
        for name, data in caches.items():
            (partial / name).write_bytes(data)
        index: dict[str, Any] = {
            "fingerprint": _fingerprint(model),
            "sources": {each: _hash_of_module(each) for each in sorted(sources)},
            "choices": _choices_as_json(plan),
            "entries": saved.entries,
            "files": {name: _size_and_hash(data) for name, data in caches.items()},
            "skipped": saved.skipped,
        }
        if key is not None:
            index["hmac"] = _sign(index, key)
        (partial / _INDEX).write_text(json.dumps(index, indent=1))
        _replace(partial, path)
    return saved


def check_target(path: Path) -> None:
    """Refuse a folder that holds something other than compiled regions, and one that cannot be written."""
    if path.exists() and (others := _other_files(path)):
        raise ValueError(
            f"{path} is not a folder of compiled regions: it holds {', '.join(others[:4])}; name a new or an empty one"
        )
    if path.is_mount():
        raise ValueError(f"{path} is a mount point, which cannot be replaced: name a folder inside it")
    parent = next(each for each in path.absolute().parents if each.exists())
    try:
        os.rmdir(tempfile.mkdtemp(dir=parent))
    except OSError as error:
        raise PermissionError(
            f"{path} cannot be written: {parent}: {error.strerror}; name a folder elsewhere"
        ) from None


def _other_files(path: Path) -> list[str]:
    """What a path holds that ``save_compiled`` did not write there."""
    if not path.is_dir():
        return ["a file"]
    try:
        index = json.loads((path / _INDEX).read_text())
        known = {_INDEX, *index["files"], *(entry["file"] for entry in index["entries"])}
    except (OSError, ValueError, LookupError, TypeError):
        known = set()
    return sorted(each.name for each in path.iterdir() if each.name not in known)


def _check_key(key: bytes | str | None) -> None:
    if not isinstance(key, bytes | str | None):
        raise TypeError(f"key is a {type(key).__name__}, expected bytes or a string")
    if key is not None and not key:
        raise ValueError("key is empty, as from an unset environment variable; anybody could sign with an empty key")


def load_compiled(
    model: nn.Module, path: str | Path, *, key: bytes | str | None = None, strict: bool = False
) -> nn.Module:
    """Attach the compiled graphs in a folder to a model, so that calls with saved shapes and modes compile nothing.

    An uncompiled model gets the same regions as the saved model. Other calls compile as usual; ``enforce_budget``
    reports them as violations. A folder that does not fit (another torch, GPU, zoo or config) and a damaged file are
    skipped. One ``RegionWarning`` names the difference, the regions compile as usual, and ``enforce_budget`` allows it.

    Loading executes code from the files. Load only folders from a source that you trust; with ``key`` all folders
    signed with another key are refused. Hashes are checked before a file is unpickled.

    Args:
        model: A model of the saved class and config; its weights may differ.
        path: A folder that ``save_compiled`` wrote.
        key: The key that the folder was signed with.
        strict: Raise an ArtifactError instead of warning.

    Returns:
        The same model.

    Raises:
        ArtifactError: If a key is given and the folder was not signed with it; if the model is not compiled and the
            folder does not say how its regions were chosen; with ``strict``, if anything misfits.
        ValueError: If the key is empty.
    """
    _check_key(key)
    plan, path = plan_of(model), Path(path)
    index: dict[str, Any] = {}
    problems: list[str] = []
    try:
        index = read_index(path)
    except ArtifactError as error:
        if key is not None:
            raise
        problems.append(str(error).removeprefix(f"{path}: "))
    if key is not None and not hmac.compare_digest(str(index.get("hmac")), _sign(index, key)):
        raise ArtifactError(f"{path} was {'signed with another key' if 'hmac' in index else 'not signed'}")
    if index:
        problems += _differences(index, model)
    if plan is None and not (strict and problems):
        try:
            choices = _choices(index["choices"], model) if index else Choices()
        except (KeyError, TypeError) as error:  # objects that JSON cannot hold, another model's regions
            if index["choices"] is None or index["fingerprint"].get("zoo's sources") == _hash_of_zoo():
                name = type(model).__name__
                raise ArtifactError(
                    f"{path} does not say how regions of a {name} are chosen; "
                    "call zoo.compile_regions(model, ...) first"
                ) from error
            choices = Choices()  # another release of the zoo may have other arguments
        place_calls(model, choices, lazily=True)
    if not problems:
        problems += _attach(model, path, index)
        if not index["entries"]:
            problems.append(f"it holds no graph ({next(iter(index['skipped'].values()), 'nor a reason')})")
    if problems:
        message = f"{path}: {'; '.join(dict.fromkeys(problems))}"
        if strict:
            raise ArtifactError(message)
        usual = "What was not loaded is compiled as usual, in zoo.enforce_budget too"
        warnings.warn(f"{message}. {usual}", RegionWarning, stacklevel=2)
    else:
        compiled_plan(model).loaded.add(str(path))
    return model


def read_index(path: str | Path) -> dict[str, Any]:
    """The index of a folder: fingerprint, entries and files; ArtifactError if there is none that can be read."""
    try:
        index = json.loads((Path(path) / _INDEX).read_text())
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ArtifactError(f"{path}: no folder that zoo.save_compiled wrote, with an {_INDEX} in it") from error
    except (OSError, ValueError) as error:
        raise ArtifactError(f"{path}: no index that can be read: {error}") from error
    known = isinstance(index, dict) and all(isinstance(index.get(name), kind) for name, kind in _PARTS.items())
    if not known or not (
        all(isinstance(each, dict) and each.keys() >= {"file", "region", *_OF_FILE} for each in index["entries"])
        and all(isinstance(each, dict) and each.keys() >= _OF_FILE for each in index["files"].values())
    ):
        raise ArtifactError(f"{path}: an index of another release of the zoo")
    return index  # type: ignore[no-any-return]


class _File(NamedTuple):
    """A graph's entry in the index, the content of its file, and the modules whose code was traced."""

    entry: dict[str, Any]
    data: bytes
    modules: set[str]


@dataclass
class _Graph:
    """A graph of modules of one class: the first module's name and call, Dynamo's guards, the trace, input shapes."""

    name: str
    call: RegionCall
    guards: Any
    origin: Any
    shapes: list[Any] = field(default_factory=list)

    def write(self) -> _File:
        if isinstance(self.origin, _File):
            return self.origin
        if self.origin is None:
            ours = isinstance(getattr(self.guards.cache_entry.backend, "compiler_fn", None), DirectOrInductor)
            gone = "it was compiled for a model that is gone; call torch.compiler.reset() and run this one again"
            raise UnsavableError(gone if ours else "it was compiled by another backend than Inductor")
        state = self.origin.state
        mode = "inference_mode" if state["inference_mode"] else "grad" if state["grad_mode"] else "no_grad"
        entry = {
            "region": _as_json(own_class(self.call.module)),
            "first_module": self.name,
            "mode": mode + (", autocast" if any(state["autocast_state"]["enabled"]) else ""),
            "shapes": [[None if each is None else list(each) for each in of_call] for of_call in self.shapes],
            "kind": "inductor" if self.origin.product is None else "direct",
        }
        data = write_graph(self.origin, self.shapes, self.call.forward.__globals__)
        return _File(entry, data, _modules_of(self.origin.files))


def _graphs(model: nn.Module, plan: Plan) -> Iterable[_Graph]:
    found: dict[tuple[type, int], _Graph] = {}
    for name, module in plan.modules_of(model).items():
        if (call := region_call(module)) is None:
            continue
        for shapes, entries in call.entries.items():
            for guards, run, origin in entries:
                if guards.cache_entry is not None:
                    graph = found.setdefault((type(module), id(run.__code__)), _Graph(name, call, guards, origin))
                    graph.shapes += [] if shapes in graph.shapes else [shapes]
    return found.values()


def _replace(partial: Path, path: Path) -> None:
    """Replace a folder by another; the old one stays in place until then."""
    for attempt in range(20):
        try:
            if path.exists():
                path.rename(partial.with_name(f"old-{attempt}"))
            partial.rename(path)
            return
        except OSError:  # another process has just put its own there
            if attempt == 19:
                raise


def _differences(index: Mapping[str, Any], model: nn.Module) -> list[str]:
    """Descriptions of what has changed since the folder was written."""
    # Through JSON, which turns tuples into lists.
    there, here = index["fingerprint"], json.loads(json.dumps(_fingerprint(model)))
    if (was := str(there.get("model"))) != here["model"]:
        same = was.rpartition(".")[2] == here["model"].rpartition(".")[2]
        remedy = ": let the program that saves import the class, too" if same and was.startswith("__main__.") else ""
        return [f"it is of a {was}, and this is a {here['model']}{remedy}"]
    found: list[str] = []
    for name, now in here.items():
        before = there.get(name)
        if isinstance(now, dict) and isinstance(before, dict):
            changed = [key for key in now | before if now.get(key) != before.get(key)]
            found += [f"{name}'s {key} was {before.get(key)}, is {now.get(key)}" for key in changed]
        elif before != now:
            found.append(f"{name} was {before}, is {now}")
    changed = [name for name, known in index["sources"].items() if _hash_of_module(name) != known]
    return found + [f"{name} has changed, or a function, class or constant in it differs" for name in changed]


# Fields of transformers' configs that no block reads.
_UNREAD = {"architectures", "dtype", "torch_dtype", "transformers_version", "bos_token_id", "eos_token_id"}


def _fingerprint(model: nn.Module) -> dict[str, Any]:
    """What compiled code depends on except its inputs: releases, machine, the zoo's sources, the model's config."""
    tensors = [*model.parameters(), *model.buffers()]
    gpus = sorted({each.device.index or 0 for each in tensors if each.is_cuda})
    config: Any = getattr(model, "config", None)
    config = config.to_dict() if hasattr(config, "to_dict") else config
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        config = vars(config)
    if isinstance(config, Mapping):
        # Fields with an underscore hold where a library found the config.
        read = {name for name in config if not name.startswith("_")} - _UNREAD
        config = {name: str(config[name]) for name in sorted(read)}
    try:
        triton = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        triton = None
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton,
        "cuda": torch.version.cuda,
        "device": [*map(torch.cuda.get_device_name, gpus)] or platform.machine(),
        "capability": [*map(torch.cuda.get_device_capability, gpus)] or torch.backends.cpu.get_cpu_capability(),
        "threads": None if gpus else torch.get_num_threads(),
        "zoo": sys.modules["zoo"].__version__,  # which imports this module
        "zoo's sources": _hash_of_zoo(),
        "model": _as_json(own_class(model)),
        "config": config if isinstance(config, dict | None) else str(config),
        "weights": _kinds_of_weights(model),
        "dtypes": sorted({str(each.dtype) for each in tensors}),
        "environment": {name: os.environ.get(name) for name in ("ZOO_OWN_KERNELS", "TRITON_INTERPRET")},
    }


def _kinds_of_weights(model: nn.Module) -> str:
    """How many weights there are, and a hash of their names and shapes."""
    shapes = {name: list(each.shape) for name, each in (*model.named_parameters(), *model.named_buffers())}
    digest = hashlib.sha256(json.dumps(shapes, sort_keys=True).encode()).hexdigest()
    return f"{sum(map(math.prod, shapes.values())):,} in {len(shapes)} tensors ({digest[:12]})"


@functools.cache
def _hash_of_zoo() -> str:
    root = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _hash_of_module(name: str) -> str | None:
    """Hash an imported module's source file and the values in it that a graph holds as constants.

    These are functions, classes, default arguments, and class attributes that are numbers or strings, unless a method
    assigns to them. None for a module that is not imported.
    """
    module = sys.modules.get(name)
    file = getattr(module, "__file__", None)
    if not file or not Path(file).exists():
        return None
    own = {key: each for key, each in vars(module).items() if not key.startswith("__")}  # without Dynamo's names
    classes = [each for each in own.values() if isinstance(each, type) and each.__module__ == name]
    spaces = [(name, own), *((each.__qualname__, dict(vars(each))) for each in classes)]
    functions = [each for _, names in spaces for each in names.values() if isinstance(each, types.FunctionType)]
    assigned = {step.argval for each in functions for step in dis.get_instructions(each) if step.opname == "STORE_ATTR"}
    held: list[tuple[str, ...]] = []
    for space, names in spaces:
        for key, each in names.items():
            if isinstance(each, types.FunctionType):
                defaults = repr([_constant(each.__defaults__), _constant(each.__kwdefaults__)])
                place = str(each.__code__.co_firstlineno)
                held.append((space, key, each.__module__, each.__qualname__, place, defaults))
            elif isinstance(each, type):
                held.append((space, key, each.__module__, each.__qualname__))
            elif names is not own and not key.startswith("__") and key not in assigned:
                held.append((space, key, repr(_constant(each))))
    return hashlib.sha256(Path(file).read_bytes() + repr(sorted(held)).encode()).hexdigest()


def _constant(value: Any) -> Any:
    """Numbers, strings, and tuples and dicts of these as they are; the class name of any other value."""
    if isinstance(value, tuple):
        return tuple(map(_constant, value))
    if isinstance(value, dict):
        return {key: _constant(each) for key, each in value.items()}
    return value if isinstance(value, bool | int | float | str | None) else type(value).__qualname__


def _modules_of(files: set[str]) -> set[str]:
    """Names of the modules that traced code comes from, except torch, triton and zoo: the fingerprint covers these."""
    return {
        name
        for name, module in list(sys.modules.items())
        if getattr(module, "__file__", None) in files and name.partition(".")[0] not in ("torch", "triton", "zoo")
    }


def _attach(model: nn.Module, path: Path, index: Mapping[str, Any]) -> list[str]:
    problems: list[str] = []
    calls: dict[str, list[RegionCall]] = {}
    for module in compiled_plan(model).modules_of(model).values():
        if (call := region_call(module)) is not None:
            calls.setdefault(_as_json(own_class(module)), []).append(call)
    for name, written in index["files"].items():
        data = _checked(path / Path(name).name, written, problems)
        if data is not None and name == _KERNELS:
            from zoo.engine.kernel import load_kernels

            load_kernels(pickle.loads(data))
        elif data is not None:
            torch.compiler.load_cache_artifacts(data)
    state = torch_state()
    for entry in index["entries"]:
        data = _checked(path / Path(entry["file"]).name, entry, problems)
        served = calls.get(entry["region"], [])
        if not served:
            problems.append(f"{entry['region']} is no compiled region of this model")
        if data is None or not served:
            continue
        try:
            saved: SavedGraph = pickle.loads(data)
            if differing := _differing_flags(saved.check.state, state):
                problems += differing
                continue
            code, space = saved.code, served[0].forward.__globals__
            noted = functools.partial(GRAPH_LOG.note_loaded, entry["file"])
            check = LoadedCheck(saved, space, noted)
            origin = _File(entry, data, set(index["sources"]))
            for call in served:
                for shapes in saved.shapes:
                    call.add_entry(shapes, check, code, check.globals, origin)
        except Exception as error:  # a changed module may raise anything
            problems.append(f"{entry['file']} cannot be loaded: {type(error).__name__}: {error}")
    return problems


def _differing_flags(saved: Mapping[str, Any], state: Mapping[str, Any]) -> list[str]:
    """A message for each of torch's global flags that had another value when a graph was compiled."""
    return [
        f"{flag} was {saved[name]}, is {state[name]}: set it as it was before zoo.load_compiled"
        for name, flag in _FLAGS.items()
        if saved[name] != state[name]
    ]


def _checked(path: Path, written: Mapping[str, Any], problems: list[str]) -> bytes | None:
    """The content of a file; None, with a message in ``problems``, if it cannot be read or its hash differs."""
    try:
        data = path.read_bytes()
    except OSError as error:
        problems.append(f"{path.name} cannot be read: {error.strerror}")
        return None
    if _size_and_hash(data)["sha256"] != written["sha256"]:
        problems.append(f"{path.name} is not what was written ({len(data)} bytes, were {written['bytes']})")
        return None
    return data


def _size_and_hash(data: bytes) -> dict[str, Any]:
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def _sign(index: Mapping[str, Any], key: bytes | str) -> str:
    signed = json.dumps({name: value for name, value in index.items() if name != "hmac"}, sort_keys=True)
    return hmac.new(key.encode() if isinstance(key, str) else key, signed.encode(), "sha256").hexdigest()


def _choices_as_json(plan: Plan) -> dict[str, Any] | None:
    """The arguments of ``compile_regions``; None if JSON cannot hold one."""
    words = {name: _as_json(value) for name, value in vars(plan.choices).items()}
    try:
        return words if json.loads(json.dumps(words)) == words else None
    except TypeError:
        return None


def _as_json(value: Any) -> Any:
    """A class as its name, a region as its fields, also in a sequence."""
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, Region):
        return {name: _as_json(each) for name, each in vars(value).items() if each is not None and name != "why"}
    return [_as_json(each) for each in value] if isinstance(value, list | tuple) else value


def _choices(words: Mapping[str, Any], model: nn.Module) -> Choices:
    classes = {_as_json(type(each)): type(each) for each in model.modules()}

    def region(word: Any) -> Any:
        return Region(**{**word, "cls": classes[word["cls"]]}) if isinstance(word, Mapping) else classes.get(word, word)

    chosen = {name: words[name] and [region(each) for each in words[name]] for name in ("regions", "exclude")}
    return Choices(**{**words, **chosen})
