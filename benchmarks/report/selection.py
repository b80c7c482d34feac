"""Which races are shown, in which order, where they ran, and the commands that measure them again."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence

from benchmarks.record import device_name
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
    """Races by family: those with an upstream library as the documentation orders them, then others."""
    families: dict[str, list[MeasuredRace]] = {}
    for race in shown:
        families.setdefault(race.case.family, []).append(race)
    return {name: families[name] for name in sorted(families, key=_rank)}  # a stable sort


def titles(shown: Sequence[MeasuredRace]) -> dict[MeasuredRace, str]:
    """The races' titles without what all of them share; the machine stands in them where there are several."""
    parts = [(*race.case.race[1:], race.machine) for race in shown]
    differ = [index for index, values in enumerate(zip(*parts, strict=True)) if index < 2 or len(set(values)) > 1]
    return {race: " · ".join(of_one[index] for index in differ) for race, of_one in zip(shown, parts, strict=True)}


def _rank(name: str) -> int:
    return list(UPSTREAM).index(name) if name in UPSTREAM else len(UPSTREAM)


# Commands: the runs that measure a whole table again, put together from those that its rows hold ----------------------

PROGRAM = ("python", "-m", "benchmarks.run")
# benchmarks.run takes lists of these and runs each with each; commands that differ in anything else stay apart.
LISTS = ("--model", "--input", "--impl", "--strategy", "--mode", "--dtype")
# Dynamic arms come beside static ones, so one run measures both, as a race that is replaced as a whole needs it.
DYNAMIC, ARM = "--dynamic", "--arm"
# The names of a command's dynamic arms, none where it measures all; None where it measures static ones alone.
Arms = tuple[str, ...] | None


def commands_of(races: Iterable[MeasuredRace]) -> list[str]:
    """What measures all arms of these races again, A/A controls and failures included: one command where one can."""
    results = [result for race in races for result in (*(arm.result for arm in race.arms), *race.failures)]
    return merged(result.command for result in results if result.command)


def merged(commands: Iterable[str]) -> list[str]:
    """Commands that differ in lists alone made one; others, and what is no run of ours, as they are."""
    groups: dict[tuple[str, ...], tuple[dict[str, list[str]], list[Arms]]] = {}
    for command in commands:
        fixed, lists, dynamic = _parse(command)
        known, twins = groups.setdefault(fixed, ({}, []))
        for option, values in lists.items():
            known.setdefault(option, []).extend(value for value in values if value not in known.get(option, []))
        twins.append(dynamic)
    return [_written(fixed, lists, _together(twins)) for fixed, (lists, twins) in groups.items()]


def _parse(command: str) -> tuple[tuple[str, ...], dict[str, list[str]], Arms]:
    """The words that must agree, a mark where the first list stood; the values of the lists; the dynamic arms."""
    words = tuple(shlex.split(command))
    lists: dict[str, list[str]] = {}
    if words[:3] != PROGRAM:
        return words, lists, None
    dynamic = DYNAMIC in words
    fixed: list[str] = []
    arms: list[str] = []
    rest = iter(words)
    for word in rest:
        if word in LISTS:
            lists.setdefault(word, []).extend(next(rest, "").split(","))
        elif dynamic and word == ARM:
            arms.append(next(rest, ""))
        elif word != DYNAMIC:
            fixed.append(word)
    # One command that names a list and one that does not are two runs.
    return (*fixed, *sorted(lists)), lists, tuple(arms) if dynamic else None


def _together(twins: Sequence[Arms]) -> list[str]:
    """The options that measure the dynamic arms of these commands, and the static ones where one measures such."""
    asked = [arms for arms in twins if arms is not None]
    named = [] if None in twins or () in twins else dict.fromkeys(arm for arms in asked for arm in arms)
    return [DYNAMIC] * bool(asked) + [word for arm in named for word in (ARM, arm)]


def _written(fixed: tuple[str, ...], lists: dict[str, list[str]], dynamic: list[str]) -> str:
    if not lists:
        return shlex.join([*fixed, *dynamic])
    words = [*fixed[: -len(lists)], *dynamic]
    place = words.index("--family") + 2 if "--family" in words else len(PROGRAM)
    for option in LISTS:
        if option in lists:
            words[place:place] = [option, ",".join(lists[option])]
            place += 2
    return shlex.join(words)
