"""Weights from where users keep them (a file, a folder in the hub's format, a hub id): tensors only, one at a time."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pickle
import re
import tempfile
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

_PICKLED = (".pt", ".pth", ".bin", ".ckpt")
_INDEXES = ("model.safetensors.index.json", "diffusion_pytorch_model.safetensors.index.json")
_WHOLE = (
    "model.safetensors",
    "diffusion_pytorch_model.safetensors",
    "model.pt",
    "model.pth",
    "pytorch_model.bin",
)
# No output depends on it, and the zoo's own files did not always have it: zero where it is missing.
_UNUSED = "unused_bias"


class WeightsWarning(UserWarning):
    """Weights were loaded that are probably not what was meant: NaN or infinite, or random for lack of stored ones."""


@dataclass(frozen=True)
class Placement:
    """Where a tensor of a checkpoint goes: the whole of one of our tensors, or some of its rows.

    Args:
        name: Our key.
        start: The first row.
        rows: How many; None for all.
        repeated: The checkpoint may hold this second copy of tied weights, which must then be equal to the first.
    """

    name: str
    start: int = 0
    rows: int | None = None
    repeated: bool = False


class Tensors(Mapping[str, Tensor]):
    """Tensors of open files by key, each read when it is asked for and not kept."""

    def __init__(self, readers: Mapping[str, Callable[[], Tensor]]) -> None:
        self._readers = readers

    def __getitem__(self, key: str) -> Tensor:
        return self._readers[key]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._readers)

    def __len__(self) -> int:
        return len(self._readers)


def refuse_other_config(folder: Path, stored: Any, config: Any, free: Collection[str], family: str) -> None:
    """Refuse a folder whose ``config.json`` describes another architecture.

    Args:
        folder: Where it is.
        stored: What it says, as a config.
        config: The preset's, of the same class.
        free: Fields that may differ.
        family: Whose ``load`` reads the folder as it is.

    Raises:
        ValueError: If another field differs; the message names it.
    """
    for field in dataclasses.fields(config):
        theirs, ours = getattr(stored, field.name), getattr(config, field.name)
        if theirs != ours and field.name not in free:
            raise ValueError(
                f"{folder}: config.json has {field.name}={theirs!r}, the preset {ours!r}; take the fitting preset, "
                f"override {field.name}, or let zoo.{family}.load(folder) read the config"
            )


def check_finite(model: nn.Module, source: str, *, strict: bool) -> None:
    """Warn the caller of the public function that calls this if a weight is NaN or infinite; ValueError if strict."""
    broken = [name for name, tensor in model.state_dict().items() if tensor.is_floating_point() and not _finite(tensor)]
    message = f"{source}: {len(broken)} tensor(s) with NaN or infinite values: {', '.join(broken[:8])}"
    if broken and strict:
        raise ValueError(f"{message}; load other weights, or leave out strict=True to be warned only")
    if broken:
        warnings.warn(f"{message}; strict=True makes this an error", WeightsWarning, stacklevel=3)


def _finite(tensor: Tensor) -> bool:
    """Whether all values are finite. Both extremes are, and finding them takes no memory, as torch.isfinite would."""
    if tensor.is_meta or tensor.numel() == 0:
        return True
    if tensor.element_size() == 1:
        tensor = tensor.bfloat16()  # aminmax takes no float8, and bfloat16 holds all of it
    return all(extreme.isfinite() for extreme in tensor.detach().aminmax())


def locate(source: str | Path) -> Path:
    """The file or folder; a hub id ``"owner/name"`` is downloaded first.

    Raises:
        FileNotFoundError: If a path does not exist.
    """
    path = Path(source)
    return path if path.exists() else _from_hub(str(source))


@contextlib.contextmanager
def open_tensors(path: Path) -> Iterator[Tensors]:
    """Open all tensors of a file or folder; they are on the CPU and mapped from disk where the format allows.

    Args:
        path: A ``.safetensors`` file, a ``.pt``/``.pth``/``.bin`` file (read with ``weights_only=True``: nothing in it
            is run), or a folder with ``model.safetensors`` or its sharded index.

    Raises:
        FileNotFoundError: If a folder holds no weights, or lacks a shard.
        ValueError: If a file is of an unknown kind, is cut off, or does not hold a flat dict of tensors and no code.
    """
    with contextlib.ExitStack() as stack:
        readers: dict[str, Callable[[], Tensor]] = {}
        for file in _files(path):
            with reading(file, "; fetch or save it again"):
                found = _readers(file, stack)
            for key, reader in found.items():
                if key in readers:
                    raise ValueError(f"{path}: two shards hold {key}")
                readers[key] = reader
        yield Tensors(readers)


def check_dtype(dtype: Any) -> None:
    """ValueError unless parameters can be of this dtype; None leaves theirs as it is."""
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(f"dtype is {dtype!r}, but parameters need a floating-point torch.dtype")


@contextlib.contextmanager
def replacing(folder: Path, *patterns: str) -> Iterator[Path]:
    """A folder to write a checkpoint into; its files take the place of an earlier one's when all of them are written.

    Args:
        folder: Where the checkpoint belongs. Made if it is not there; left as it was if writing ends in an error.
        patterns: Of files that an earlier checkpoint may have left, and that would be read in place of the new ones:
            its index and shards. What matches and is not written anew is deleted.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".saving-", dir=folder) as made:
        yield Path(made)
        written = sorted(Path(made).iterdir())
        for file in written:
            file.replace(folder / file.name)
        for old in {old for pattern in patterns for old in folder.glob(pattern)} - {folder / f.name for f in written}:
            old.unlink()


@contextlib.contextmanager
def reading(file: Path, remedy: str) -> Iterator[None]:
    """ValueError that names the file, and ends in ``remedy``, if it turns out not to be all there."""
    from safetensors import SafetensorError

    try:
        yield
    except (EOFError, RuntimeError, SafetensorError) as error:
        if isinstance(error, RuntimeError) and "PytorchStreamReader" not in str(error):
            raise
        said = (str(error) or type(error).__name__).partition(". ")[0]
        raise ValueError(f"{file} is cut off or damaged ({said}){remedy}") from error


def fill(
    model: nn.Module,
    tensors: Mapping[str, Tensor],
    placements: Mapping[str, Placement | None],
    *,
    device: torch.device | str,
    dtype: torch.dtype | None,
    source: str,
) -> None:
    """Give a model that was built on the meta device its weights, tensor by tensor.

    Only the tensor being copied is in memory twice. Buffers that no checkpoint holds are computed by the modules'
    ``reset_buffers(device)``.

    Args:
        model: On the meta device.
        tensors: By the checkpoint's keys.
        placements: Where each key goes; None for one that is known and not needed.
        device: For the weights.
        dtype: Of floating-point weights; None keeps them as they are stored.
        source: For messages.

    Raises:
        ValueError: If a tensor is missing, left over, of another shape or of whole numbers; the message names it.
    """
    wanted = {key for key, place in placements.items() if place is not None and not place.repeated}
    absent = wanted - set(tensors)
    missing = sorted(key for key in absent if not key.endswith(_UNUSED))
    extra = sorted(set(tensors) - set(placements))
    if missing or extra:
        raise ValueError(f"{source}: missing tensors {missing[:8]}, unexpected tensors {extra[:8]}")
    expected = model.state_dict()
    made: dict[str, Tensor] = {}
    with torch.inference_mode(False), torch.no_grad():
        for key in [*(key for key in tensors if key in wanted), *(key for key in tensors if key not in wanted)]:
            place = placements[key]
            if place is None:
                continue
            tensor = tensors[key]
            if expected[place.name].is_floating_point() and not tensor.is_floating_point():
                raise ValueError(f"{source}: {key} is {tensor.dtype}, expected floating-point numbers")
            if place.name not in made:
                kept = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
                made[place.name] = torch.empty(expected[place.name].shape, dtype=kept, device=device)
            whole = made[place.name]
            part = whole if place.rows is None else whole[place.start : place.start + place.rows]
            if tensor.shape != part.shape:
                raise ValueError(f"{source}: {key} has shape {tuple(tensor.shape)}, expected {tuple(part.shape)}")
            if dtype is None and tensor.dtype != part.dtype:
                raise ValueError(f"{source}: {key} is {tensor.dtype}, but {part.dtype} is beside it in {place.name}")
            if not place.repeated:
                part.copy_(tensor)
                continue
            second = tensor.to(part)
            if not (torch.equal(part, second) or torch.allclose(part, second, rtol=0, atol=0, equal_nan=True)):
                raise ValueError(f"{source}: {key} differs from {place.name}, but the model has one tensor for both")
        made |= {key: torch.zeros_like(expected[key], dtype=dtype, device=device) for key in absent}
    model.load_state_dict(made, strict=True, assign=True)
    for module in model.modules():
        reset: Callable[[torch.device], None] | None = getattr(module, "reset_buffers", None)
        if reset is not None:
            reset(torch.device(device))
    left = [name for name, tensor in [*model.named_parameters(), *model.named_buffers()] if tensor.is_meta]
    if left:
        raise ValueError(f"{source}: nothing was loaded into {left[:8]}")


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    for index in (path / name for name in _INDEXES):
        if not index.exists():
            continue
        shards = [path / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
        for shard in shards:
            if not shard.exists():
                raise FileNotFoundError(f"{index} names {shard.name}, which is not in {path}")
        return shards
    for name in _WHOLE:
        if (path / name).exists():
            return [path / name]
    raise FileNotFoundError(f"{path} holds no model.safetensors (or its sharded index) and no pytorch_model.bin")


def _readers(file: Path, stack: contextlib.ExitStack) -> dict[str, Callable[[], Tensor]]:
    if file.suffix == ".safetensors":
        from safetensors import safe_open

        handle: Any = stack.enter_context(safe_open(file, framework="pt", device="cpu"))
        return {key: lambda key=key: handle.get_tensor(key) for key in handle.keys()}  # type: ignore[misc]  # noqa: SIM118
    if file.suffix in _PICKLED:
        state = _unpickled(file)
        if isinstance(state, dict) and isinstance(state.get("state_dict"), dict):
            state = state["state_dict"]
        if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
            raise ValueError(f"{file} does not hold a dict of tensors; save model.state_dict() instead")
        return {key: lambda key=key: state[key] for key in state}  # type: ignore[misc]
    raise ValueError(f"{file}: unknown kind of weights {file.suffix!r}; use .safetensors, {', '.join(_PICKLED)}")


def _unpickled(file: Path) -> Any:
    """What a pickled file holds; ValueError if it is more than tensors in plain containers."""
    try:
        try:
            return torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError as error:
            # Files in the format from before torch 1.6 cannot be mapped.
            if "mmap" not in str(error):
                raise
            return torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        named = re.search(r"GLOBAL (\S+)", str(error))
        raise ValueError(
            f"{file} {f'refers to {named[1]}' if named else 'cannot be unpickled'}; nothing in it was run: only "
            "tensors are read from pickled files. If you trust it, open it by torch.load(..., weights_only=False) and "
            "save its state dict as .safetensors"
        ) from error


def _from_hub(name: str) -> Path:
    parts = name.split("/")
    if (
        len(parts) != 2
        or not all(parts)
        or name.startswith((".", "~"))
        or Path(name).suffix in (".safetensors", *_PICKLED)
    ):
        raise FileNotFoundError(f"weights {name!r}: no such file or folder, and not a hub id of the form owner/name")
    from huggingface_hub import snapshot_download

    # Weights, configurations, and what tokenizers are kept in.
    return Path(snapshot_download(name, allow_patterns=["*.safetensors", "*.json", "*.txt", "*.model"]))
