"""The one run that measures a whole table again, put together from the commands that its rows hold."""

from __future__ import annotations

import shlex
from collections.abc import Iterable

from benchmarks.rendering.race import Race

PROGRAM = ("python", "-m", "benchmarks.run")
# benchmarks.run takes lists of these and runs each with each; commands that differ in anything else stay apart.
LISTS = ("--model", "--input", "--impl", "--strategy", "--mode", "--dtype")


def commands_of(races: Iterable[Race]) -> list[str]:
    """What measures all arms of these races again, A/A controls and failures included: one command where one can."""
    results = [result for race in races for result in (*(arm.result for arm in race.arms), *race.failures)]
    return merged(result.command for result in results if result.command)


def merged(commands: Iterable[str]) -> list[str]:
    """Commands that differ in lists alone made one; others, and what is no run of ours, as they are."""
    groups: dict[tuple[str, ...], dict[str, list[str]]] = {}
    for command in commands:
        fixed, lists = _parse(command)
        known = groups.setdefault(fixed, {})
        for option, values in lists.items():
            known.setdefault(option, []).extend(value for value in values if value not in known.get(option, []))
    return [_written(fixed, lists) for fixed, lists in groups.items()]


def _parse(command: str) -> tuple[tuple[str, ...], dict[str, list[str]]]:
    """The words that must agree, a mark where the first list stood, and the values of the lists."""
    words = tuple(shlex.split(command))
    lists: dict[str, list[str]] = {}
    if words[:3] != PROGRAM:
        return words, lists
    fixed: list[str] = []
    rest = iter(words)
    for word in rest:
        if word in LISTS:
            lists.setdefault(word, []).extend(next(rest, "").split(","))
        else:
            fixed.append(word)
    return (*fixed, *sorted(lists)), lists  # one command that names a list and one that does not are two runs


def _written(fixed: tuple[str, ...], lists: dict[str, list[str]]) -> str:
    if not lists:
        return shlex.join(fixed)
    words = list(fixed[: -len(lists)])
    place = words.index("--family") + 2 if "--family" in words else len(PROGRAM)
    for option in LISTS:
        if option in lists:
            words[place:place] = [option, ",".join(lists[option])]
            place += 2
    return shlex.join(words)
