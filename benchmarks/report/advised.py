"""Advice in the terminal: the verdict, the numbers behind it, and what stands in the way of compiling by regions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

from benchmarks.record import Result
from benchmarks.report import cells, choice, costs, numbers
from benchmarks.report.choice import short_name
from benchmarks.report.race import EPSILON, Race
from benchmarks.report.terminal import arms_table

# The commonest recompile of a model that was not written for regions, and what the compiler says of it.
KIND_DIFFERS = "dispatch key set mismatch"
RAW_INPUT = (
    " (the first block gets a tensor made outside inference mode, the others get one made inside; x = x + 0 before the "
    "blocks avoids the second graph)"
)
# Outputs of equal weights differ by rounding; by this many times that, the weights were not equal.
OTHER_WEIGHTS = 1e4


@dataclass(frozen=True)
class Regions:
    """What the model offers to compile by regions, a line each, and why it offers none."""

    found: Sequence[str]
    declared: bool
    obstacles: Sequence[str]
    none: str | None


def render(race: Race, calls: int, regions: Regions, console: Console) -> None:
    """Print the advice on one race of a single implementation's arms."""

    def say(*lines: str, style: str = "") -> None:
        for line in lines:
            console.print(Text(line, style=style))

    say("")
    verdict, *more = choice.verdict(race, calls)
    say(verdict, style="bold")
    say(*more)
    if lines := how_to(race, calls):
        say("", "To run it this way:", *(f"  {line}" for line in lines))
    say("", cells.subject(race), style="dim")
    if race.arms:
        for table in (_times(race, calls), _costs(race)):
            console.print()
            console.print(table)
    if any(not result.case.control for result in race.failures):
        say("")
        say(*(_failure(result) for result in race.failures if not result.case.control), style="red")
    say("", *_in_the_way(race, regions), "")
    say(*_notes(race), style="dim")


def how_to(race: Race, calls: int) -> list[str]:
    """The lines of code that run the model the way that was chosen; none for eager."""
    chosen = choice.choose(race, calls, "cold")
    if chosen is None or costs.is_eager(chosen.arm):
        return []
    case = chosen.arm.result.case
    if case.strategy == "full":
        mode = "" if case.mode == "default" else f', mode="{case.mode}"'
        return [f"model = torch.compile(model, dynamic=False{mode})"]
    lines = ["zoo.compile_regions(model)"]
    return [*lines, "step = zoo.cuda_graph(model, kwargs=inputs)"] if case.cuda_graph else lines


def _times(race: Race, calls: int) -> object:
    shown = arms_table(
        f"Total seconds for {numbers.count(calls)} calls; break-even calls",
        "ms a call",
        "95 % interval",
        "cold s",
        "warm s",
        "break-even",
    )
    for arm in race.arms:
        interval = race.interval(arm) if arm.p50 is not None else None
        cold, warm = (costs.total(race, arm, calls, caches) for caches in ("cold", "warm"))
        back = [numbers.calls(costs.pays_back(race, arm, caches)) for caches in ("cold", "warm")]
        row = [
            short_name(arm) + (" !" if arm.wrong else ""),
            numbers.significant(arm.p50),
            numbers.NOTHING if interval is None else "..".join(map(numbers.significant, interval)),
            numbers.significant(cold),
            numbers.significant(warm),
            back[0] if back[0] == back[1] else "/".join(back),
        ]
        shown.add_row(*map(Text, row))
    return shown


def _costs(race: Race) -> object:
    shown = arms_table(
        "Seconds before the first call; memory; relative error",
        "start-up",
        "cold s",
        "warm s",
        "capture",
        "g/b/r",
        "MiB",
        "error",
    )
    for arm in race.arms:
        cold = arm.result.cold
        row = [
            short_name(arm),
            numbers.NOTHING if costs.is_eager(arm) else numbers.significant(costs.start_up(race)),
            cells.seconds(cold),
            cells.seconds(arm.warm),
            numbers.significant(cold.capture if cold else None),
            cells.compiler_counts(cold),
            cells.memory(arm),
            cells.error(arm),
        ]
        shown.add_row(*map(Text, row))
    return shown


def _in_the_way(race: Race, regions: Regions) -> list[str]:
    origin = "declared by the model" if regions.declared else "discovered"
    lines = [f"Regions, {origin}: {'; '.join(regions.found)}."] if regions.found else []
    if regions.none is not None:
        return [*lines, f"No regions: {regions.none}."]
    obstacles = list(regions.obstacles)
    for arm in race.arms:
        if arm.result.case.strategy == "regional" and not arm.result.case.cuda_graph and arm.result.cold is not None:
            lines_of = (line.removeprefix(f"{arm.name}: ") for line in cells.troubles(arm))
            obstacles += [line + (RAW_INPUT if KIND_DIFFERS in line else "") for line in lines_of]
    obstacles += [_failure(r) for r in race.failures if r.case.strategy == "regional" and not r.case.cuda_graph]
    if not obstacles:
        return [*lines, "No obstacle to regional compilation was found."]
    return [*lines, "Obstacles to regional compilation:", *(f"- {obstacle}" for obstacle in obstacles)]


def _failure(result: Result) -> str:
    return cells.failure(result).removeprefix(f"{result.case.impl} ")


def _notes(race: Race) -> list[str]:
    notes = list(race.notes)
    checks = [arm.result.check for arm in race.arms if arm.result.check is not None]
    apart = max((check.eager_error for check in checks if check.eager_error is not None), default=0.0)
    if apart > OTHER_WEIGHTS * EPSILON[race.case.dtype]:
        notes.insert(
            0,
            "Eager outputs of the model differ between processes, so the errors here mean nothing: load the weights "
            "and inputs in the function, or draw them with torch's generator, which is seeded before each call of it.",
        )
    if any(arm.result.memory is not None and arm.result.memory.allocated is None for arm in race.arms):
        notes.append("Memory is measured on a GPU only.")
    notes.append(
        "g/b/r: graphs, graph breaks, recompiles. Totals are for one new process: they include the compiler's start-up "
        "and exclude imports and model set-up. The tables of the report exclude the start-up too."
    )
    return notes
