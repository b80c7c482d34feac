"""The one run that measures a whole table again, put together from the commands that its rows hold."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence

from benchmarks.report.model import MeasuredRace

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
