"""Files of tensors: found at a path or on the hub, read without a copy in memory, replaced all at once.

What conversion needs of an upstream library is imported here, when it is first used.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import json
import os
import pickle
import re
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_PICKLED = (".pt", ".pth", ".bin", ".ckpt")
# The files of quantized weights.
QUANTIZED = "quantized"
_STEMS = ("model", "diffusion_pytorch_model", QUANTIZED)
_INDEXES = tuple(f"{stem}.safetensors.index.json" for stem in _STEMS)
_WHOLE = (*(f"{stem}.safetensors" for stem in _STEMS), "model.pt", "model.pth", "pytorch_model.bin")

# The extra of this package that installs a library, where their names differ.
_EXTRAS = {"huggingface_hub": "hf", "torch_geometric": "gnn", "torchvision": "vision", "transformers": "hf"}


def upstream(name: str) -> Any:
    """A module of an upstream library. ImportError with the extra to install if the library is not there."""
    package = name.partition(".")[0]
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        extra = _EXTRAS.get(package, package)
        raise ImportError(f'{package} is not installed: pip install "regional-zoo[{extra}]"') from error


def locate(source: str | Path, patterns: Sequence[str] = ("*.safetensors", "*.json", "*.txt", "*.model")) -> Path:
    """The file or folder; of a hub id ``"owner/name"`` the files that match the patterns are downloaded first.

    FileNotFoundError if a path does not exist, or the hub does not give the files.
    """
    if not isinstance(source, str | os.PathLike):
        what = f"weights are a {type(source).__name__}, expected a file, a folder or a hub id"
        raise TypeError(f"{what}: tensors go into a model by model.load_state_dict(...)")
    path, name = Path(source), str(source)
    if path.exists():
        return path
    parts = name.split("/")
    if len(parts) != 2 or not all(parts) or name.startswith((".", "~")) or path.suffix in (".safetensors", *_PICKLED):
        raise FileNotFoundError(f"weights {name!r}: no such file or folder, and not a hub id of the form owner/name")
    errors = upstream("huggingface_hub.errors")
    try:
        return Path(upstream("huggingface_hub").snapshot_download(name, allow_patterns=list(patterns)))
    except (errors.HfHubHTTPError, errors.LocalEntryNotFoundError) as error:
        missing = f"no such file or folder here, and the hub did not give it ({type(error).__name__})"
        raise FileNotFoundError(f"weights {name!r}: {missing}; check the name and the network") from error


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a file or folder, on the CPU and mapped from disk where the format allows.

    A file is ``.safetensors`` or ``.pt``/``.pth``/``.bin`` (read with ``weights_only=True``: nothing in it is run), a
    folder holds ``model.safetensors`` or its sharded index. FileNotFoundError if a folder has no weights or lacks a
    shard; ValueError if a file is of an unknown kind, is cut off, or holds no flat dict of tensors.
    """
    tensors: dict[str, Tensor] = {}
    for file in _files(path):
        with reading(file, "; fetch or save it again"):
            found = _read(file)
        if twice := tensors.keys() & found.keys():
            raise ValueError(f"{path}: two shards hold {min(twice)}")
        tensors |= found
    return tensors


@contextlib.contextmanager
def reading(file: Path, remedy: str) -> Iterator[None]:
    """Turn errors of a file that is cut off or damaged into a ValueError that names it and ends in ``remedy``."""
    from safetensors import SafetensorError

    try:
        yield
    except (EOFError, OSError, RuntimeError, SafetensorError) as error:
        if isinstance(error, RuntimeError) and "PytorchStreamReader" not in str(error):
            raise
        if isinstance(error, OSError) and error.errno != errno.EINVAL:  # torch seeks past the end of a truncated file
            raise
        said = (str(error) or type(error).__name__).partition(". ")[0]
        raise ValueError(f"{file} is cut off or damaged ({said}){remedy}") from error


@contextlib.contextmanager
def replacing(folder: Path, *patterns: str) -> Iterator[Path]:
    """A temporary folder, whose files replace those of ``folder`` when all are written; an error changes nothing.

    Older files that match ``patterns``, such as an index and shards that would be read in place of the new ones, are
    deleted. ``folder`` is made if it is not there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".saving-", dir=folder) as made:
        yield Path(made)
        written = sorted(Path(made).iterdir())
        before = {old for pattern in patterns for old in folder.glob(pattern)}
        # The index goes first and comes last: if the process dies, shards of two saves do not pass for one model.
        for index in before:
            if index.name.endswith(".index.json"):
                index.unlink()
        for file in written:
            file.replace(folder / file.name)
        for old in before - {folder / file.name for file in written}:
            old.unlink(missing_ok=True)


def write_tensors(folder: Path, stem: str, tensors: Mapping[str, Tensor], *, max_shard_size: int | str = "5GB") -> None:
    """Write ``<stem>.safetensors`` into a folder, or shards and their index, as the hub's libraries do.

    Views of larger tensors are copied, one shard at a time. The size is bytes, or a number with KB, MB, GB or TB
    (ValueError for another text); a larger tensor gets a file of its own.
    """
    import safetensors.torch

    # On meta, where views do not count as one tensor.
    shapes = {key: torch.empty_like(tensor, device="meta") for key, tensor in tensors.items()}
    split = upstream("huggingface_hub").split_torch_state_dict_into_shards(
        shapes, filename_pattern=f"{stem}{{suffix}}.safetensors", max_shard_size=max_shard_size
    )
    for name, keys in split.filename_to_tensors.items():
        shard = {key: tensors[key].detach().cpu().clone(memory_format=torch.contiguous_format) for key in keys}
        safetensors.torch.save_file(shard, folder / name, metadata={"format": "pt"})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    if (index := next((path / name for name in _INDEXES if (path / name).exists()), None)) is not None:
        shards = [path / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
        for shard in shards:
            if not shard.exists():
                raise FileNotFoundError(f"{index} names {shard.name}, which is not in {path}")
        return shards
    for name in _WHOLE:
        if (path / name).exists():
            return [path / name]
    raise FileNotFoundError(f"{path} holds no model.safetensors (or its sharded index) and no pytorch_model.bin")


def _read(file: Path) -> dict[str, Tensor]:
    if file.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(file)
    if file.suffix not in _PICKLED:
        raise ValueError(f"{file}: unknown kind of weights {file.suffix!r}; use .safetensors, {', '.join(_PICKLED)}")
    try:
        # Files in the format from before torch 1.6, which are no zip files, cannot be mapped.
        state = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except (pickle.UnpicklingError, LookupError) as error:
        named = re.search(r"GLOBAL (\S+)", str(error))
        raise ValueError(
            f"{file} {f'refers to {named[1]}' if named else 'cannot be unpickled'}; nothing in it was run: only "
            "tensors are read from pickled files. If you trust it, open it by torch.load(..., weights_only=False) and "
            "save its state dict as .safetensors"
        ) from error
    if isinstance(state, dict) and isinstance(state.get("state_dict"), dict):
        state = state["state_dict"]
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise ValueError(f"{file} does not hold a dict of tensors; save model.state_dict() instead")
    return state
