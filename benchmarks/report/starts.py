"""The table of starts: seconds of new processes to their first result, by phase."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from benchmarks.record import Rows, device_name
from benchmarks.report.cells import mebibytes, significant
from benchmarks.report.tables import markdown
from benchmarks.starts import ARTIFACTS, Process, Start

HEAD = ("process", "imports", "context", "model", "load", "first call", "capture", "total", "call", "host")
IMPORTS = ("python", "torch", "library")


def tables(wanted: Mapping[str, str], rows: Rows) -> str:
    """A table for each model and input that the options of a marker name; empty if there are no such rows."""
    found: dict[tuple[str, ...], list[Start]] = {}
    for start in rows.starts:
        environment = rows.environment(start)
        where = {"gpu": device_name(environment, start.case.device), "torch": str(environment.get("torch"))}
        said = {**start.case.to_json(), **where}
        if all(str(said[key]) in value.split(",") for key, value in wanted.items()):
            found.setdefault((*start.case.race, *where.values()), []).append(start)
    return "\n\n".join(_table(starts, rows) for starts in found.values())


def _table(starts: Sequence[Start], rows: Rows) -> str:
    """One model's: medians of the processes; below, what was loaded, compiled and equal, and the command."""
    case, environment = starts[0].case, rows.environment(starts[0])
    torch, commit = environment.get("torch"), str(environment.get("commit"))[:10]
    title = f"**{case.model}, {case.input}, {case.dtype}**"
    origin = f"{device_name(environment, case.device)}, torch {torch}, commit {commit}. Measure it again:"
    body = markdown(HEAD, [_row(start) for start in starts if start.processes])
    notes = f"Medians of {max(len(each.processes) for each in starts)} processes. {' '.join(_notes(starts))} {origin}"
    return "\n\n".join([title, body, notes, f"```sh\n{starts[0].command}\n```"])


def _row(start: Start) -> list[str]:
    def seconds(*phases: str) -> str:
        of_each = [sum(each.seconds.get(name, 0.0) for name in phases) for each in start.processes]
        known = any(name in start.processes[0].seconds for name in phases)
        return f"{statistics.median(of_each):.2f} s" if known else "–"

    totals = sorted(each.total for each in start.processes)
    spread = f" ({totals[0]:.2f} to {totals[-1]:.2f})" if len(totals) > 1 else ""
    host = [each.host_ms for each in start.processes if each.host_ms is not None]
    phases = [seconds(*IMPORTS), *map(seconds, ("context", "model", "load", "first call", "capture"))]
    call = significant(statistics.median(each.call_ms for each in start.processes))
    return [
        start.arm,
        *phases,
        f"{start.total:.2f} s{spread}",
        f"{call} ms",
        f"{significant(statistics.median(host))} ms" if host else "–",
    ]


def _notes(starts: Sequence[Start]) -> list[str]:
    notes = [f"{start.arm}: {start.reason}." for start in starts if start.reason]
    saver = next((start for start in starts if start.saved and start.processes), None)
    if saver is None or saver.saved is None:
        return notes
    kinds = [f"{saver.saved.kinds.count(kind)} {kind}" for kind in sorted(set(saver.saved.kinds))]
    notes.append(f"The folder of artifacts has {mebibytes(saver.saved.bytes)} MiB: {', '.join(kinds) or 'no graph'}.")
    if saver.saved.skipped:
        notes.append(f"Not saved: {'; '.join(saver.saved.skipped)}.")
    loaded = [each for start in starts if start.source == ARTIFACTS for each in start.processes]
    if loaded:
        compiled = _compiled(loaded)
        notes.append(
            f"Processes with artifacts {f'compiled: {compiled}' if compiled else 'traced and compiled nothing'}."
        )
        equal = {each.output for each in loaded} == {saver.processes[0].output}
        notes.append(f"Their outputs are {'' if equal else 'not '}bit-equal to those of the process that saved.")
    return notes


def _compiled(processes: Sequence[Process]) -> str:
    """What processes compiled although nothing had to be; empty if nothing."""
    most = {name: max(each.compiled[name] for each in processes) for name in processes[0].compiled}
    return ", ".join(f"{count} {name}" for name, count in most.items() if count)
