"""Time from a new process to its first result, with and without compiled regions in a folder.

    python -m benchmarks.deploy --family bert --model bert-base --input 32x128 --out runs/starts.jsonl

The first process compiles and saves. Then the arms start in turn, each time in a new process. ``torch's cache
artifacts`` come from ``torch.compiler.save_cache_artifacts`` with upstream's model compiled whole. The table is
``<!-- table: startup family=... -->`` of ``benchmarks.report``.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.cli import UsageError, pick, require_zoo, run_command
from benchmarks.machine import cache_environment, python_environment, row
from benchmarks.plan import WORKLOADS, Case, matching
from benchmarks.record import ARTIFACTS, CACHES, EMPTY, FILLED, Process, Rows, Saved, Start, Store, device_name
from benchmarks.report.cells import mebibytes, significant
from benchmarks.report.model import UPSTREAM
from benchmarks.report.tables import markdown

# (implementation, strategy, CUDA graph, source). The first arm saves.
ARMS = (
    ("zoo", "regional", False, EMPTY),
    ("zoo", "regional", False, ARTIFACTS),
    ("zoo", "regional", True, ARTIFACTS),
    ("zoo", "regional", False, FILLED),
    ("zoo", "eager", False, FILLED),
    ("upstream", "eager", False, EMPTY),
    ("upstream", "full", False, EMPTY),
    ("upstream", "full", False, CACHES),
    ("upstream", "full", False, FILLED),
)
HEAD = (
    *("process", "total s", "imports s", "context s", "model s", "load s", "first call s", "capture s"),
    *("call ms", "host ms"),
)
# Of each column of seconds, after the total.
PHASES = (
    ("python", "torch", "library"),
    ("context",),
    ("model", "optimizer"),
    ("load",),
    ("first call",),
    ("capture",),
)


def main(
    family: Annotated[str, typer.Option(help="Family of the model.")],
    model: Annotated[str, typer.Option(help="One model.")],
    input: Annotated[str, typer.Option(help="One input.")],
    out: Annotated[Path, typer.Option(help="File of rows, *.jsonl, to append to.")],
    workload: Annotated[str, typer.Option(help=f"{' or '.join(WORKLOADS)}.")] = WORKLOADS[0],
    dtype: Annotated[str | None, typer.Option(help="The family's default if omitted.")] = None,
    device: Annotated[str | None, typer.Option(help="cuda or cpu; cuda by default if there is a GPU.")] = None,
    arm: Annotated[list[str] | None, typer.Option(help="Arms that match a pattern; the first runs always.")] = None,
    processes: Annotated[int, typer.Option(help="Processes of each arm; the first arm has one.")] = 3,
    timeout: Annotated[float, typer.Option(help="Time limit in seconds for one process.")] = 300.0,
) -> int:
    """Measure how long new processes take to their first result; 1 if an arm failed."""
    require_zoo()
    from benchmarks.measure import scratch_folder
    from benchmarks.run import device_of, workload_of

    if processes < 1:
        raise UsageError(f"--processes is {processes}, expected at least 1")
    on, loaded = device_of(device), workload_of(family)
    pick("--model", [model], loaded.models)
    pick("--input", [input], loaded.inputs)
    pick("--workload", [workload], WORKLOADS)
    pick("--dtype", [dtype] if dtype else [], loaded.dtypes(on))
    dtype = dtype or loaded.dtypes(on)[0]
    base = Case(family=loaded.family, model=model, input=input, workload=workload, dtype=dtype, device=on)
    first, *others = (
        Start(case=replace(base, impl=impl, strategy=strategy, cuda_graph=cuda_graph), source=source)
        for impl, strategy, cuda_graph, source in ARMS
    )
    if why := loaded.refuses(first.case):
        raise UsageError(f"{first.arm}: {why}")
    wanted = matching([start.arm for start in (first, *others)], arm or [])
    starts = [first, *(each for each in others if each.arm in wanted and not loaded.refuses(each.case))]
    words = ["--family", family, "--model", model, "--input", input, "--workload", workload]
    words += ["--dtype", dtype, "--device", on]
    words += [word for each in arm or [] for word in ("--arm", each)] + ["--processes", str(processes)]
    command = shlex.join(["python", "-m", "benchmarks.deploy", *words, "--out", out.name])
    with scratch_folder("regional-zoo-starts-") as folder:
        runs = Processes(folder, family, timeout)
        facts = runs.prepare({start.case.impl: start.case for start in starts}.values())
        try:
            runs.start(starts[0])
            for start in starts[1:]:
                compiles = any(each.case == start.case and each.source == EMPTY for each in starts)
                if start.source in (FILLED, CACHES) and not compiles:
                    runs.start(replace(start, source=EMPTY, processes=[]))  # fills them
            for _ in range(processes):
                for start in starts[1:]:
                    runs.start(start)
        finally:  # keeps the measurements before Ctrl-C
            store, environment = Store(out), row(facts, {})
            store.append(environment)
            for start in starts:
                if start.processes or start.reason:
                    start.command, start.environment = command, environment["id"]
                    store.append(start.to_json())
    return 1 if any(start.reason for start in starts) else 0


@dataclass(frozen=True)
class Processes:
    """Starts processes in a folder and keeps their reports.

    A case's first process with empty caches fills those of its processes with filled ones.
    """

    folder: Path
    workload: str
    timeout: float

    def prepare(self, cases: Iterable[Case]) -> dict[str, Any]:
        """Build the models of all implementations concurrently; returns device facts. UsageError if one fails."""
        with ThreadPoolExecutor() as threads:
            told = list(threads.map(lambda case: self._run(case, self.folder / "preparing"), cases))
        for each in told:
            if isinstance(each, str):
                raise UsageError(f"the model cannot be built: {each}")
        return told[0]  # type: ignore[return-value]

    def start(self, start: Start) -> None:
        """Start one more process of an arm, and add its report, or its failure, to the arm."""
        if start.reason:
            return
        filled = self.folder / "-".join(start.case.arm.split())
        keep = start.source == FILLED or (start.source == EMPTY and not filled.exists())
        caches = filled if keep else self.folder / f"empty-{time.monotonic_ns()}"
        told = self._run(
            start.case,
            caches,
            library="zoo" if start.case.impl == "zoo" else UPSTREAM.get(start.case.family, "torch").replace("-", "_"),
            artifacts=str(self.folder / f"{start.case.impl}-artifacts"),
            load=start.source in (ARTIFACTS, CACHES),
            save=start.source == EMPTY and start.case.strategy != "eager",
            at=time.time(),
        )
        if not keep:
            shutil.rmtree(caches, ignore_errors=True)
        if isinstance(told, str):
            start.reason = told
        else:
            saved = told.pop("saved")
            start.saved = Saved(**saved) if saved else start.saved
            start.processes.append(Process(**told))
        print(f"{start.arm}: {start.reason or f'{start.processes[-1].total:.2f} s, {start.processes[-1]}'}", flush=True)

    def _run(self, case: Case, caches: Path, **asked: Any) -> dict[str, Any] | str:
        asked |= {
            "case": case.to_json(), "workload": self.workload,
            "model": str(self.folder / f"{case.impl}.pt"),
        }  # fmt: skip
        try:
            done = subprocess.run(
                [sys.executable, "-m", "benchmarks.fresh", json.dumps(asked)],
                env={**os.environ, **cache_environment(caches), **python_environment()},
                capture_output=True, text=True, timeout=self.timeout, stdin=subprocess.DEVNULL,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return f"a process took longer than {self.timeout:g} s"
        if done.returncode != 0:
            return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1][:600]
        told: dict[str, Any] = json.loads(done.stdout)
        return told


# The table ------------------------------------------------------------------------------------------------------------


def tables(wanted: Mapping[str, str], rows: Rows) -> str:
    """A table for each model and input that a marker's options select; empty without matching rows."""
    found: dict[tuple[str, ...], list[Start]] = {}
    for start in rows.starts:
        environment = rows.environment(start)
        where = {"gpu": device_name(environment, start.case.device), "torch": str(environment.get("torch"))}
        said = {**start.case.to_json(), **where}
        if all(str(said[key]) in value.split(",") for key, value in wanted.items()):
            found.setdefault((*start.case.race, *where.values()), []).append(start)
    return "\n\n".join(_table(starts, rows) for starts in found.values())


def _table(starts: Sequence[Start], rows: Rows) -> str:
    """One model's table: medians of the processes; below it loaded, compiled and equal results, and the command."""
    case, environment = starts[0].case, rows.environment(starts[0])
    torch, commit = environment.get("torch"), str(environment.get("commit"))[:10]
    title = f"**{case.model}, {case.input}, {'training, ' if case.workload == 'train' else ''}{case.dtype}**"
    origin = f"{device_name(environment, case.device)}, torch {torch}, commit {commit}. Measure it again:"
    body = markdown(HEAD, [_row(start) for start in starts if start.processes])
    most = max(len(each.processes) for each in starts)
    notes = f"Medians of up to {most} processes. {' '.join(_notes(starts))} {origin}"
    return "\n\n".join([title, body, notes, f"```sh\n{starts[0].command}\n```"])


def _row(start: Start) -> list[str]:
    def seconds(phases: Sequence[str]) -> str:
        of_each = [sum(each.seconds.get(name, 0.0) for name in phases) for each in start.processes]
        known = any(name in start.processes[0].seconds for name in phases)
        return f"{statistics.median(of_each):.2f}" if known else "–"

    totals = sorted(each.total for each in start.processes)
    spread = f" ({totals[0]:.2f} to {totals[-1]:.2f})" if len(totals) > 1 else ""
    host = [each.host_ms for each in start.processes if each.host_ms is not None]
    call = significant(statistics.median(each.call_ms for each in start.processes))
    shown = [start.arm, f"{start.total:.2f}{spread}", *map(seconds, PHASES), call]
    return [*shown, significant(statistics.median(host)) if host else "–"]


def _notes(starts: Sequence[Start]) -> list[str]:
    notes = [f"{start.arm}: {start.reason}." for start in starts if start.reason]
    for start in starts:
        if start.saved and start.case.impl == "upstream":
            notes.append(f"Torch's cache artifacts have {mebibytes(start.saved.bytes)} MiB.")
    saver = next((start for start in starts if start.saved and start.case.impl == "zoo"), None)
    if saver is None or saver.saved is None:
        return notes
    kinds = [f"{saver.saved.kinds.count(kind)} {kind}" for kind in sorted(set(saver.saved.kinds))]
    notes.append(f"The folder of artifacts has {mebibytes(saver.saved.bytes)} MiB: {', '.join(kinds) or 'no graph'}.")
    if saver.saved.skipped:
        notes.append(f"Not saved: {'; '.join(saver.saved.skipped)}.")
    loaded = [each for start in starts if start.source == ARTIFACTS for each in start.processes]
    if loaded:
        most = {name: max(each.compiled[name] for each in loaded) for name in loaded[0].compiled}
        compiled = ", ".join(f"{count} {name}" for name, count in most.items() if count)
        equal = {each.output for each in loaded} == {saver.processes[0].output}
        eager = [start for start in starts if start.case.impl == "zoo" and start.case.strategy == "eager"]
        notes += [
            f"Processes with artifacts {f'compiled: {compiled}' if compiled else 'traced and compiled nothing'}.",
            f"Their outputs are {'' if equal else 'not '}bit-equal to those of the process that saved.",
        ]
        if not equal and any(len({each.output for each in start.processes}) > 1 for start in eager):
            notes.append("Those of two uncompiled processes differ as well.")
    return notes


if __name__ == "__main__":
    sys.exit(run_command(main, "python -m benchmarks.deploy"))
