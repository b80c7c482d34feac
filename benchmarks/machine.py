"""The environment of a run: device, software, commit; and a GPU's clock, power and memory during the run."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib.metadata
import json
import os
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CACHE_VARIABLES = INDUCTOR_CACHE, TRITON_CACHE = "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"
LIBRARIES = ("torch-geometric", "torchvision", "transformers", "diffusers", "numpy", "triton")


def row(facts: dict[str, Any], peaks: dict[str, Any]) -> dict[str, Any]:
    """The environment row of a results file, from ``device_facts`` and ``timing.measure_peaks`` of a worker process."""
    content = {
        **facts,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": next(iter(_values("/proc/cpuinfo", "model name")), platform.processor() or platform.machine()),
        "cpu_count": cores(),
        "cpu_mhz": max(map(float, _values("/proc/cpuinfo", "cpu MHz")), default=None),
        "threads": os.environ.get("OMP_NUM_THREADS"),
        "libraries": _versions(),
        **_commit(),
        "peaks": peaks,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return {"kind": "environment", "id": digest[:12], **content}


def device_facts(device: str) -> dict[str, Any]:
    """Facts about the device and torch. Called in a worker, since it creates a CUDA context."""
    import torch

    facts: dict[str, Any] = {"device": device, "torch": torch.__version__, "cuda": torch.version.cuda}
    if device == "cpu":
        return {**facts, "gpu": None, "torch_threads": torch.get_num_threads()}
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    uuid = str(getattr(properties, "uuid", "")) or None
    monitor = Monitor(uuid)
    return {
        **facts,
        "gpu": properties.name,
        "gpu_uuid": uuid,
        "gpu_count": torch.cuda.device_count(),
        "gpu_memory": properties.total_memory,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "cudnn": torch.backends.cudnn.version(),
        "driver": monitor.driver(),
        "sm_clock_max_mhz": monitor.max_sm_clock(),
        "power_limit_w": monitor.power_limit(),
    }


def cache_contents() -> set[Path]:
    """The files in this process' cache folders, which Inductor and Triton write for each kernel and each graph."""
    folders = {os.environ[name] for name in CACHE_VARIABLES if name in os.environ}
    return {file for folder in folders for file in Path(folder).rglob("*") if file.is_file()}


def cache_environment(folder: Path) -> dict[str, str]:
    """The environment variables that put every on-disk cache of the compiler under ``folder``.

    Precompiled C++ headers are an exception: Inductor intentionally keeps one set per machine and toolchain.
    """
    return {INDUCTOR_CACHE: str(folder), TRITON_CACHE: str(folder / "triton")}


def python_environment() -> dict[str, str]:
    """Environment variables with which another process imports these files, and caches bytecode as Python does.

    Images often forbid the latter. Without bytecode each import of torch or transformers takes seconds more.
    """
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": ""}


def core_numbers() -> list[int]:
    """The cores that this process may run on; empty if the system has no CPU affinity."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def cores() -> int:
    return len(core_numbers()) or os.cpu_count() or 1


def stay_on(core: int) -> None:
    """Run all threads of this process on one core."""
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # a thread may have ended
            os.sched_setaffinity(int(thread), {core})


def _values(file: str, name: str) -> list[str]:
    """Values after this name in the lines of a /proc file; empty without the file."""
    path = Path(file)
    lines = path.read_text().splitlines() if path.exists() else []
    return [line.partition(":")[2].strip() for line in lines if line.startswith(name)]


def _versions() -> dict[str, str]:
    versions = {}
    for name in LIBRARIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def _commit() -> dict[str, Any]:
    """The clone's commit, and whether files that git tracks differ from it.

    In a copy without git history, BENCHMARKS_COMMIT names the commit, with the suffix ``-dirty`` if files differ from
    it. Without both sources the values are None.
    """

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=30)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    changes = git("status", "--porcelain", "--untracked-files=no")
    if told := os.environ.get("BENCHMARKS_COMMIT"):
        return {"commit": told.removesuffix("-dirty"), "dirty": told.endswith("-dirty")}
    commit = git("rev-parse", "HEAD")
    return {"commit": commit, "dirty": None if changes is None else bool(changes)}


class Monitor:
    """Clock, power and memory of one GPU by NVML, without a CUDA context. Without NVML every result is None.

    ``uuid`` is torch's UUID of the device. Without it, or if no device matches, the first device is monitored.
    """

    _SM_CLOCK = 1

    class _Memory(ctypes.Structure):
        _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))

    def __init__(self, uuid: str | None = None) -> None:
        self._nvml: Any = None
        self._device = ctypes.c_void_p()
        try:
            library = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError:
            return
        if library.nvmlInit_v2() != 0:
            return
        wanted, device = f"GPU-{(uuid or '').removeprefix('GPU-')}".encode(), ctypes.byref(self._device)
        found = library.nvmlDeviceGetHandleByUUID(wanted, device) == 0
        if found or library.nvmlDeviceGetHandleByIndex_v2(0, device) == 0:
            self._nvml = library

    def _number(self, function: str, *arguments: Any, unit: float = 1.0) -> float | None:
        value = ctypes.c_uint()
        if self._nvml is None or getattr(self._nvml, function)(self._device, *arguments, ctypes.byref(value)) != 0:
            return None
        return value.value * unit

    def sm_clock(self) -> float | None:
        """MHz, now."""
        return self._number("nvmlDeviceGetClockInfo", self._SM_CLOCK)

    def max_sm_clock(self) -> float | None:
        return self._number("nvmlDeviceGetMaxClockInfo", self._SM_CLOCK)

    def power(self) -> float | None:
        """Watts, now."""
        return self._number("nvmlDeviceGetPowerUsage", unit=1e-3)

    def power_limit(self) -> float | None:
        return self._number("nvmlDeviceGetEnforcedPowerLimit", unit=1e-3)

    def memory(self) -> tuple[int, int] | None:
        """Bytes used on the device by all processes, and free bytes."""
        memory = self._Memory()
        if self._nvml is None or self._nvml.nvmlDeviceGetMemoryInfo(self._device, ctypes.byref(memory)) != 0:
            return None
        return int(memory.used), int(memory.free)

    def driver(self) -> str | None:
        text = ctypes.create_string_buffer(96)
        if self._nvml is None or self._nvml.nvmlSystemGetDriverVersion(text, 96) != 0:
            return None
        return text.value.decode()


def free_memory(device: str, monitor: Monitor) -> int | None:
    """Bytes available to a new case, or None if unknown."""
    if device != "cpu":
        memory = monitor.memory()
        return None if memory is None else memory[1]
    found = _values("/proc/meminfo", "MemAvailable")
    return int(found[0].split()[0]) * 1024 if found else None


def cut(text: str, most: int) -> str:
    """The text, truncated to ``most`` letters."""
    return text if len(text) <= most else text[: most - 1] + "…"
