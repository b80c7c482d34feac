"""Compares two runs arm by arm, as a gate for a CI.

python -m benchmarks.compare OLD NEW                       files of rows, or folders of such files
python -m benchmarks.compare OLD NEW --max-regression 3%

Exits 1 where an arm is slower by more than the bound, by its whole interval, or fails and did not before; 2 on wrong
usage; 4 where nothing of this is seen, but the noise of a race is too large to see it; else 0.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from benchmarks import stats
from benchmarks.cli import UsageError, run_command
from benchmarks.record import Compile, Result, Rows, device_name, load_run
from benchmarks.report import cells
from benchmarks.report.model import races
from benchmarks.report.show import print_table
from benchmarks.stats import Ratio, Verdict
from zoo.advise import unusable

HEAD = ("arm", "old ms", "new ms", "speed-up", "verdict")
NOISY = 4
COUNTS = "Exit 1 as well where graphs, breaks or recompiles grew."
MEMORY_CHANGE = 0.01  # an allocator's rounding moves a peak by less


@dataclass(frozen=True)
class Change:
    old: Result | None  # None for an arm that is new
    new: Result | None  # None for an arm that is gone
    ratio: Ratio | None = None  # old time over new time, above 1 if the arm got faster
    noise: float | None = None  # the wider A/A noise floor of the two runs; None if neither ran a control
    verdict: Verdict | None = None
    notes: tuple[str, ...] = ()  # what else changed: status, graphs, breaks, recompiles, kernels, memory, error
    grew: bool = False  # more graphs, breaks or recompiles than before

    @property
    def row(self) -> Result:
        row = self.new or self.old
        assert row is not None
        return row

    @property
    def newly_failing(self) -> bool:
        return bool(self.old and self.new and self.old.status == "ok" and self.new.status != "ok")

    def regressed(self, bound: float) -> bool:
        """Whether the arm is slower by more than ``bound`` (a fraction of the old time) in its whole interval."""
        return self.ratio is not None and self.verdict == "slower" and self.ratio.inverse.low > 1 + bound


def compare(old: Rows, new: Rows) -> list[Change]:
    """Every arm of either run, in the order of the old one; UsageError where they are of different devices."""
    before, after = _by_key(old), _by_key(new)
    common = before.keys() & after.keys()
    if not common:
        raise UsageError("no arm is in both runs; measure the same model, input, dtype and device")
    for key in before:
        if key in common and (was := _device(old, before[key])) != (now := _device(new, after[key])):
            raise UsageError(
                f"the old run is from {was}, the new one from {now}: times of different devices say nothing about the "
                "code; measure again on one of them"
            )
    noises = [
        {arm.result.case.key: race.noise(arm) for race in races(rows.results, rows.environments) for arm in race.arms}
        for rows in (old, new)
    ]
    changes = []
    for key in dict.fromkeys((*before, *after)):
        was_row, now_row = before.get(key), after.get(key)
        if was_row is None or now_row is None:
            changes.append(Change(was_row, now_row))
            continue
        floors = [floor for noise in noises if (floor := noise.get(key)) is not None]
        changes.append(_change(was_row, now_row, max(floors, default=None)))
    return changes


def _by_key(rows: Rows) -> dict[str, Result]:
    found: dict[str, Result] = {}
    for result in rows.results:
        if result.case.control:  # controls only give the noise floor
            continue
        key = result.case.key
        if key in found and _device(rows, found[key]) != _device(rows, result):
            raise UsageError(
                f"{key} was measured on {_device(rows, found[key])} and on {_device(rows, result)} in the same run; "
                "give the folder or file of one device"
            )
        found[key] = result
    return found


def _device(rows: Rows, result: Result) -> str:
    return device_name(rows.environment(result), result.case.device)


def _change(old: Result, new: Result, noise: float | None) -> Change:
    ratio = verdict = None
    if old.steady and new.steady:
        by_device = bool(old.steady.device_ms and new.steady.device_ms)
        first, second = (row.device_ms if by_device else row.wall_ms for row in (old.steady, new.steady))
        if first and second:
            ratio = stats.unpaired_ratio(first, second)
            verdict = stats.verdict(ratio, noise)
    grew, notes = _counts(old.counted or Compile(), new.counted or Compile())
    if old.status != new.status:
        notes.insert(0, f"{old.status} → {new.status}" + (f": {cells.shortened(new.reason)}" if new.reason else ""))
    return Change(old, new, ratio, noise, verdict, (*notes, *_sizes(old, new)), grew)


def _counts(old: Compile, new: Compile) -> tuple[bool, list[str]]:
    if old.graphs is None or new.graphs is None:
        return False, []
    pairs = (
        ("graphs", old.graphs, new.graphs),
        ("breaks", len(old.breaks), len(new.breaks)),
        ("recompiles", len(old.recompiles), len(new.recompiles)),
    )
    return any(now > was for _, was, now in pairs), [f"{what} {was} → {now}" for what, was, now in pairs if was != now]


def _sizes(old: Result, new: Result) -> list[str]:
    def both(section: str, name: str) -> tuple[Any, Any] | None:
        was, now = (getattr(getattr(row, section), name, None) for row in (old, new))
        return None if was is None or now is None else (was, now)

    notes = []
    if (kernels := both("work", "kernels")) and kernels[0] != kernels[1]:
        notes.append(f"kernels {' → '.join(map(cells.count, kernels))}")
    if (peaks := both("memory", "allocated")) and abs(peaks[1] - peaks[0]) > MEMORY_CHANGE * peaks[0]:
        notes.append(f"memory {' → '.join(map(cells.mebibytes, peaks))} MiB")
    if (errors := both("check", "error")) and max(errors) > 10 * max(min(errors), 1e-8):
        notes.append(f"error {' → '.join(map(cells.exponent, errors))}")
    return notes


# Printing ----------------------------------------------------------------------------------------------------------


def render(changes: Sequence[Change], console: Console) -> None:
    """A table of the arms in both runs, race by race, then other changes; then the arms in only one run."""
    groups: dict[tuple[str, ...], list[Change]] = {}
    for change in changes:
        if change.old and change.new:
            groups.setdefault(change.row.case.race, []).append(change)
    for race, group in groups.items():
        console.print(Text("\n" + " · ".join(race[1:]), style="bold"))
        lines = [
            [
                change.row.case.arm,
                *(cells.significant(_p50(row)) for row in (change.old, change.new)),
                cells.interval(change.ratio),
                "fails" if change.newly_failing else change.verdict or cells.NOTHING,
            ]
            for change in group
        ]
        print_table(console, "", (list(HEAD), lines))
        for change in group:
            if change.notes:
                console.print(Text(f"{change.row.case.arm}: {', '.join(change.notes)}"))
        noise = max((each.noise for each in group if each.noise is not None), default=None)
        known = f"A/A noise {cells.percent(noise)}" if noise is not None else "No A/A control ran, the noise is unknown"
        if cells.is_unusable(noise):
            console.print(Text(unusable(noise), style="red"))
        console.print(Text(f"{known}; a speed-up above 1× is faster than before.", style="dim"))
    for title, rows in (
        ("Only in the old run", [change.old for change in changes if change.new is None]),
        ("Only in the new run", [change.new for change in changes if change.old is None]),
    ):
        if rows:
            console.print(Text(f"\n{title}:", style="bold"))
            console.print(*(Text(f"  {row.case.key} ({row.status})") for row in rows if row), sep="\n")


def _p50(result: Result | None) -> float | None:
    samples = result.steady.samples if result and result.steady else []
    return stats.median(samples) if samples else None


def fraction(text: str) -> float:
    """``5%`` as 0.05; UsageError on anything else."""
    number = re.fullmatch(r"(\d+(?:\.\d+)?)%", text)
    if number is None:
        raise UsageError(f"--max-regression takes a percentage of at least 0, got {text!r}; write 5%")
    return float(number[1]) / 100


def command(
    old: Annotated[Path, typer.Argument(help="Rows before: a .jsonl file, or a folder of them.")],
    new: Annotated[Path, typer.Argument(help="Rows now.")],
    max_regression: Annotated[str, typer.Option(help="How much slower an arm may get before exit code 1.")] = "5%",
    fail_on_counts: Annotated[bool, typer.Option("--fail-on-counts", help=COUNTS)] = False,
) -> int:
    """Say of each arm whether it got faster or slower, and what else changed.

    Exits 1 past the given regression, 4 if the noise is too large to see one.
    """
    bound = fraction(max_regression)
    before, after = load_run(old), load_run(new)
    try:
        changes = compare(before, after)
    except ValueError as error:  # a sample is not a valid time
        raise UsageError(str(error)) from error
    console = Console()
    torches = [{str(rows.environment(r).get("torch")) for r in rows.results} for rows in (before, after)]
    if torches[0] != torches[1]:
        said = " → ".join(", ".join(sorted(each)) for each in torches)
        console.print(Text(f"torch {said}.", style="yellow"))
    render(changes, console)
    bad: list[str] = []
    for change in changes:
        if change.regressed(bound):
            bad.append(f"{change.row.case.key}: slower by more than {cells.percent(bound)}")
        if change.newly_failing and change.new:
            bad.append(f"{change.row.case.key}: newly {change.new.status}")
        if fail_on_counts and change.grew:
            bad.append(f"{change.row.case.key}: more graphs, breaks or recompiles")
    both = [change for change in changes if change.old and change.new]
    tally = {word: sum(change.verdict == word for change in both) for word in ("faster", "slower", "undetermined")}
    console.print(Text("\n" + ", ".join(f"{count} {word}" for word, count in tally.items()) + "."))
    for line in bad:
        console.print(Text(f"Regression: {line}", style="red"))
    if bad:
        return 1
    return NOISY if any(cells.is_unusable(change.noise) for change in both) else 0


if __name__ == "__main__":
    sys.exit(run_command(command, "python -m benchmarks.compare"))
