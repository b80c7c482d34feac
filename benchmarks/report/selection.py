"""Which races are shown, in which order, and where they ran."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.record import Result, device_name
from benchmarks.report.model import MeasuredRace

SELECTING = ("family", "model", "input", "workload", "dtype", "device", "gpu", "torch")
# The model families in the order of their pages, each with the library that it is held against.
UPSTREAM = {
    "gnn": "torch-geometric",
    "llm": "transformers",
    "bert": "transformers",
    "resnet": "torchvision",
    "unet": "diffusers",
}
LAST = ("attention", "patterns", "claims")  # they explain the families, and stand below all that can be used


def select(wanted: Mapping[str, str], shown: Iterable[MeasuredRace]) -> list[MeasuredRace]:
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


def newest(shown: Iterable[MeasuredRace]) -> list[MeasuredRace]:
    """Of races that differ in nothing but torch the one of the newest."""
    found: dict[tuple[str, ...], MeasuredRace] = {}
    for race in shown:
        key = (option(race, "gpu"), race.extra, *race.case.race)
        known = found.get(key)
        if known is None or torch_version(race) >= torch_version(known):
            found[key] = race
    return list(found.values())


def option(race: MeasuredRace, key: str) -> str:
    """What ``key=`` of a marker would have to say to name this race."""
    if key == "gpu":
        return device_name(race.environment, race.case.device)
    if key == "torch":
        return str(race.environment.get("torch"))
    return str(getattr(race.case, key))


def torch_version(race: MeasuredRace) -> tuple[int, ...]:
    """What it ran on, so that newer is greater."""
    return tuple(map(int, re.findall(r"\d+", option(race, "torch").partition("+")[0])))


def machines(shown: Iterable[MeasuredRace]) -> str:
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


def by_family(shown: Iterable[MeasuredRace]) -> dict[str, list[MeasuredRace]]:
    """Races by family: those with an upstream library as the documentation orders them, others, explanations last."""
    families: dict[str, list[MeasuredRace]] = {}
    for race in shown:
        families.setdefault(race.case.family, []).append(race)
    return {name: families[name] for name in sorted(families, key=_rank)}  # a stable sort


def ordered(shown: Iterable[MeasuredRace]) -> list[MeasuredRace]:
    """The same races in one list."""
    return [race for races in by_family(shown).values() for race in races]


def titles(shown: Sequence[MeasuredRace]) -> dict[MeasuredRace, str]:
    """The races' titles without what all of them share; the machine stands in them where there are several."""
    parts = [(*race.case.race[1:], race.machine) for race in shown]
    differ = [index for index, values in enumerate(zip(*parts, strict=True)) if index < 2 or len(set(values)) > 1]
    return {race: " · ".join(of_one[index] for index in differ) for race, of_one in zip(shown, parts, strict=True)}


def _rank(name: str) -> int:
    if name in UPSTREAM:
        return list(UPSTREAM).index(name)
    return len(UPSTREAM) + (1 + LAST.index(name) if name in LAST else 0)


def used_by(
    results: Iterable[Result], environments: Mapping[str, Mapping[str, Any]]
) -> dict[str, list[tuple[str, str]]]:
    """The environments that these rows name, by id, each as names and values."""
    used = dict.fromkeys(result.environment or "" for result in results)
    return {name: _flat(environments[name]) for name in used if name in environments}


def _flat(environment: Mapping[str, Any], before: str = "") -> list[tuple[str, str]]:
    """An environment's facts, those within others named ``peaks: copy_bandwidth``."""
    facts: list[tuple[str, str]] = []
    for key, value in environment.items():
        if isinstance(value, Mapping):
            facts += _flat(value, f"{before}{key}: ")
        elif (before or key not in ("kind", "id")) and value is not None:
            facts.append((f"{before}{key}", f"{value:,.6g}" if isinstance(value, float) else str(value)))
    return facts
