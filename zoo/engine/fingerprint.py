"""What compiled code depends on beside its inputs, for a folder of it to be compared with a process."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn


def fingerprint(model: nn.Module) -> dict[str, Any]:
    """What compiled code depends on beside its inputs: releases, machine, the zoo's sources, the model's config."""
    from zoo import __version__

    tensors = [*model.parameters(), *model.buffers()]
    gpus = sorted({each.device.index or 0 for each in tensors if each.is_cuda})
    config: Any = getattr(model, "config", None)
    config = config.to_dict() if hasattr(config, "to_dict") else config
    if isinstance(config, Mapping):
        # Names with an underscore say where a library found the config.
        config = {name: value for name, value in sorted(config.items()) if not name.startswith("_")}
    try:
        triton = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        triton = None
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton,
        "cuda": torch.version.cuda,
        "device": [torch.cuda.get_device_name(each) for each in gpus] if gpus else platform.machine(),
        "capability": [list(torch.cuda.get_device_capability(each)) for each in gpus]
        if gpus
        else [torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()],
        "zoo": __version__,
        "zoo's sources": _hash_of_zoo(),
        "model": f"{type(model).__module__}.{type(model).__qualname__}",
        "config": None if config is None else str(config),
        "dtypes": sorted({str(each.dtype) for each in tensors}),
        "environment": {name: os.environ.get(name) for name in ("ZOO_OWN_KERNELS", "TRITON_INTERPRET")},
    }


@functools.cache
def _hash_of_zoo() -> str:
    root = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def hash_of_module(name: str) -> str | None:
    """Of a module's source file, as far as it is imported: what is not, no class of the model is of."""
    file = getattr(sys.modules.get(name), "__file__", None)
    return hashlib.sha256(Path(file).read_bytes()).hexdigest() if file and Path(file).exists() else None


def modules_of(files: frozenset[str]) -> set[str]:
    """Modules by the source files of the code that was traced, without those of a release that is compared by name."""
    known = ("torch", "triton", "zoo")
    return {
        name
        for name, module in list(sys.modules.items())
        if getattr(module, "__file__", None) in files and name.partition(".")[0] not in known
    }
