"""Read a state dict from where users keep them: a file, a folder in the hub's format, or a hub id. Tensors only."""

from __future__ import annotations

import json
from pathlib import Path

import torch

_PICKLED = (".pt", ".pth", ".bin", ".ckpt")


def read_state_dict(source: str | Path) -> dict[str, torch.Tensor]:
    """All tensors of ``source`` on the CPU, by key.

    Args:
        source: A ``.safetensors`` file, a ``.pt``/``.pth``/``.bin`` file (read with ``weights_only=True``: a file that
            holds code is refused), a folder with ``model.safetensors`` or its sharded index, or a hub id
            ``"owner/name"``.

    Raises:
        FileNotFoundError: If a path does not exist or a folder holds no weights.
        ValueError: If the file is of an unknown kind or does not hold a flat dict of tensors.
    """
    path = Path(source)
    if not path.exists():
        path = _from_hub(str(source))
    if path.is_dir():
        return _read_folder(path)
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(path)
    if path.suffix in _PICKLED:
        state = torch.load(path, map_location="cpu", weights_only=True)
        if isinstance(state, dict) and isinstance(state.get("state_dict"), dict):
            state = state["state_dict"]
        if not isinstance(state, dict) or not all(isinstance(value, torch.Tensor) for value in state.values()):
            raise ValueError(f"{path} does not hold a dict of tensors; save model.state_dict() instead")
        return state
    raise ValueError(f"{path}: unknown kind of weights {path.suffix!r}; use .safetensors, {', '.join(_PICKLED)}")


def _read_folder(folder: Path) -> dict[str, torch.Tensor]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        shards = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        state: dict[str, torch.Tensor] = {}
        for shard in shards:
            if not (folder / shard).exists():
                raise FileNotFoundError(f"{index} names {shard}, which is not in {folder}")
            state.update(read_state_dict(folder / shard))
        return state
    for name in (
        "model.safetensors",
        "diffusion_pytorch_model.safetensors",
        "model.pt",
        "model.pth",
        "pytorch_model.bin",
    ):
        if (folder / name).exists():
            return read_state_dict(folder / name)
    raise FileNotFoundError(f"{folder} holds no model.safetensors (or its sharded index) and no pytorch_model.bin")


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

    return Path(snapshot_download(name, allow_patterns=["*.safetensors", "*.json"]))
