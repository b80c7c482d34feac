"""Which races a block of the documentation is made from, and the machines that they ran on."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from benchmarks.record import device_name
from benchmarks.report.race import Race

SELECTING = ("family", "model", "input", "workload", "dtype", "device", "gpu", "torch")
# The model families in the order of their pages, each with the library that it is held against.
UPSTREAM = {
    "gnn": "torch-geometric",
    "llm": "transformers",
    "bert": "transformers",
    "resnet": "torchvision",
    "unet": "diffusers",
}


def select(wanted: Mapping[str, str], shown: Iterable[Race]) -> list[Race]:
    """Races that the options name (commas separate alternatives), of the newest torch on the one device there is.

    Raises:
        ValueError: If rows of several devices match.
    """
    chosen = [race for race in shown if all(option(race, key) in value.split(",") for key, value in wanted.items())]
    devices = sorted({(option(race, "gpu"), race.case.device) for race in chosen})
    if len(devices) > 1:
        names = " and ".join(f"{gpu} ({device})" for gpu, device in devices)
        raise ValueError(f'there are rows of {names}; add gpu="..." or device=...')
    return newest(chosen)


def newest(shown: Iterable[Race]) -> list[Race]:
    """Of races that differ in nothing but torch the one of the newest."""
    found: dict[tuple[str, ...], Race] = {}
    for race in shown:
        key = (option(race, "gpu"), race.beside, *race.case.race)
        known = found.get(key)
        if known is None or torch_version(race) >= torch_version(known):
            found[key] = race
    return list(found.values())


def option(race: Race, key: str) -> str:
    """What ``key=`` of a marker would have to say to name this race."""
    if key == "gpu":
        return device_name(race.environment, race.case.device)
    if key == "torch":
        return str(race.environment.get("torch"))
    return str(getattr(race.case, key))


def torch_version(race: Race) -> tuple[int, ...]:
    """What it ran on, so that newer is greater."""
    return tuple(map(int, re.findall(r"\d+", option(race, "torch").partition("+")[0])))


def machines(shown: Iterable[Race]) -> str:
    """Device, torch, driver, the libraries that matter and commits, said once for all races of one machine.

    ``NVIDIA H200, torch 2.11.0+cu130, driver 580.65, triton 3.6.0, commits 0123456789, 123456789a``; empty of no races.
    """
    found: dict[str, tuple[dict[str, None], dict[str, None]]] = {}
    for race in shown:
        environment = race.environment
        driver = f", driver {environment['driver']}" if environment.get("driver") else ""
        libraries, commits = found.setdefault(race.machine + driver, ({}, {}))
        known = environment.get("libraries") or {}
        libraries |= {f"{n} {known[n]}": None for n in ("triton", UPSTREAM.get(race.case.family)) if n in known}
        if commit := environment.get("commit"):
            commits[str(commit)[:10] + (" with changes" if environment.get("dirty") else "")] = None
    lines = []
    for machine, (libraries, commits) in found.items():
        parts = [machine, *libraries]
        if commits:
            parts.append(f"commit{'s' * (len(commits) > 1)} {', '.join(commits)}")
        lines.append(", ".join(parts))
    return "; ".join(lines)
